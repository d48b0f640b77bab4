//! How long a transfer takes at least, hop by hop: what an idle path of these links, switches, root complex and memory
//! needs, were nothing ever to wait for anything but the packets ahead.
//!
//! A packet is passed on when it has arrived whole, or from its header on by a switch that cuts through. In flit mode
//! nothing of a flit is known before its checksum: a packet arrives with the end of its last flit.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::split::Span;
use super::{Model, ModelError};
use crate::link::{FLIT_BYTES, FLIT_TLP_BYTES};
use crate::link::{Generation, Lanes, Link};
use config::ConfigError;

const DIRECT: &str = include_str!("../../paths/direct.toml");

/// The way from a device to memory.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PciePath {
    /// What it is called.
    pub name: String,
    /// Where the numbers come from.
    pub source: String,
    /// From the wish to the first symbol of the first packet.
    #[serde(deserialize_with = "config::nanoseconds")]
    pub device_ns: f64,
    /// From the device to the root complex, with switches between them.
    pub links: Vec<LinkHop>,
    /// Of the root complex, for a request to memory; its completion included.
    #[serde(deserialize_with = "config::nanoseconds")]
    pub root_complex_ns: f64,
    /// Of memory or a cache, for a read.
    #[serde(deserialize_with = "config::nanoseconds")]
    pub memory_read_ns: f64,
    /// Of memory or a cache, until a write can be read.
    #[serde(deserialize_with = "config::nanoseconds")]
    pub memory_write_ns: f64,
}

/// A link, and the switch behind it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkHop {
    /// Length of traces and cables.
    #[serde(deserialize_with = "config::meters")]
    pub length_m: f64,
    /// Propagation: 7 ns in a board (relative permittivity 4.4), 5 ns in a cable.
    #[serde(default = "board_ns_per_m", deserialize_with = "config::nanoseconds")]
    pub ns_per_m: f64,
    /// Generation, where it is not the model's.
    pub generation: Option<Generation>,
    /// Lanes, where they are not the model's.
    pub lanes: Option<Lanes>,
    /// At its end towards the root complex; the last link has none.
    pub switch: Option<PcieSwitch>,
}

/// A switch.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PcieSwitch {
    /// From the last symbol in to the first out, or from the header's last when it cuts through.
    #[serde(deserialize_with = "config::nanoseconds")]
    pub forward_ns: f64,
    /// Whether packets leave before they have arrived whole.
    #[serde(default)]
    pub cut_through: bool,
}

/// The least time of a transfer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LatencyBreakdown {
    /// All of it.
    pub latency_ns: f64,
    /// Its parts in the order of time, as the last packet meets them; they add up.
    pub parts: Vec<LatencyPart>,
}

/// A part of a latency.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LatencyPart {
    /// Where: `device`, `link 1`, `switch 1`, `root complex`, `memory`.
    pub hop: String,
    /// What takes the time.
    pub what: &'static str,
    /// How long.
    pub ns: f64,
}

impl PcieSwitch {
    /// Broadcom PEX88000, generation 4: 105 ns between ports of 16 lanes, cut through (vendor's figure, in Linley
    /// Newsletter of 24 September 2019).
    pub const PEX88000: Self = Self { forward_ns: 105.0, cut_through: true };
}

impl PciePath {
    /// A device in a slot of the root complex, and DDR4.
    pub fn direct() -> Self {
        Self::parse("paths/direct.toml", DIRECT).expect("the built-in path is tested")
    }

    /// The path that a file describes.
    ///
    /// # Errors
    /// When it cannot be read or makes no sense.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let file: Self = config::read(path)?;
        file.checked(&path.display().to_string())
    }

    /// The path that the text of a file describes.
    ///
    /// # Errors
    /// When it makes no sense.
    pub fn parse(file: &str, text: &str) -> Result<Self, ConfigError> {
        config::parse::<Self>(file, text)?.checked(file)
    }

    /// The path lengthened by this many links like the last one, with `switch` before each.
    pub fn with_switches(mut self, count: usize, switch: &PcieSwitch) -> Self {
        let last = self.links.pop().expect("a path has links");
        let switched = LinkHop { switch: Some(switch.clone()), ..last.clone() };
        self.links.extend(std::iter::repeat_n(switched, count));
        self.links.push(last);
        self
    }

    /// Links have switches between them and nowhere else.
    fn checked(self, file: &str) -> Result<Self, ConfigError> {
        let senseless = |place: String, what: &str| {
            Err(ConfigError::Invalid { file: file.to_owned(), location: place, what: what.to_owned() })
        };
        let Some((last, others)) = self.links.split_last() else {
            return senseless("links".to_owned(), "there is none; write one at least");
        };
        if let Some(index) = others.iter().position(|link| link.switch.is_none()) {
            return senseless(format!("links[{index}]"), "no switch before the next link; write [links.switch]");
        }
        if last.switch.is_some() {
            let place = format!("links[{}].switch", others.len());
            return senseless(place, "the last link ends at the root complex; leave it out");
        }
        Ok(self)
    }

    /// The least time of a read: until its last byte has arrived at the device.
    ///
    /// # Errors
    /// For sizes and offsets that cannot be modelled.
    pub fn read_latency(
        &self,
        model: &Model,
        size_bytes: u64,
        offset_bytes: u64,
    ) -> Result<LatencyBreakdown, ModelError> {
        let span = model.span(size_bytes, offset_bytes)?;
        Ok(Transfer::new(self, model)?.read(span, 0.0))
    }

    /// The least time of a write: until its last byte can be read from memory.
    ///
    /// # Errors
    /// For sizes and offsets that cannot be modelled.
    pub fn write_latency(
        &self,
        model: &Model,
        size_bytes: u64,
        offset_bytes: u64,
    ) -> Result<LatencyBreakdown, ModelError> {
        let span = model.span(size_bytes, offset_bytes)?;
        Ok(Transfer::new(self, model)?.write(span))
    }

    /// The least time of a write and a read of the same place behind it, which finds what was written.
    ///
    /// # Errors
    /// For sizes and offsets that cannot be modelled.
    pub fn write_read_latency(
        &self,
        model: &Model,
        size_bytes: u64,
        offset_bytes: u64,
    ) -> Result<LatencyBreakdown, ModelError> {
        let span = model.span(size_bytes, offset_bytes)?;
        let mut transfer = Transfer::new(self, model)?;
        let written = transfer.write(span);
        Ok(transfer.read(span, written.latency_ns))
    }
}

fn board_ns_per_m() -> f64 {
    7.0
}

/// A packet of a transfer.
#[derive(Clone, Copy)]
enum Packet {
    Write(Span),
    Request(Span),
    Completion(Span),
}

impl Packet {
    /// Bytes on the wire, and those of them that are no data.
    fn bytes(self, model: &Model) -> (u64, u64) {
        match self {
            Self::Write(span) => (model.request_bytes(span) + span.dw_bytes(), model.request_bytes(span)),
            Self::Request(span) => (model.request_bytes(span), model.request_bytes(span)),
            Self::Completion(span) => {
                let bytes = model.completion_bytes(span);
                (bytes, bytes - span.dw_bytes())
            }
        }
    }

    fn header(self) -> &'static str {
        match self {
            Self::Write(_) => "header of the last write",
            Self::Request(_) => "header of the last request",
            Self::Completion(_) => "header of the last completion",
        }
    }

    fn rest(self) -> &'static str {
        match self {
            Self::Request(_) => "packets ahead",
            Self::Write(_) | Self::Completion(_) => "data, and packets ahead",
        }
    }
}

/// One direction of a link: packets follow each other without a gap as long as there are any.
struct LinkDirection {
    model: Model,
    burst_began_ns: f64,
    burst_bytes: u64,
}

/// Sums of the same times in another order differ by less. A packet that is ready when the one before has left begins
/// no burst of its own: in flit mode that would cost it a flit, by rounding alone.
const SAME_MOMENT_NS: f64 = 1e-6;

impl LinkDirection {
    fn new(model: Model) -> Self {
        Self { model, burst_began_ns: 0.0, burst_bytes: 0 }
    }

    /// When the header of a packet that is ready at `ready_ns` is there, and when all of it is.
    fn send(&mut self, ready_ns: f64, bytes: u64, header_bytes: u64) -> (f64, f64) {
        let free_ns = self.burst_began_ns + self.ns(self.burst_bytes);
        if ready_ns > free_ns + SAME_MOMENT_NS {
            (self.burst_began_ns, self.burst_bytes) = (ready_ns, 0);
        }
        let header_ns = self.burst_began_ns + self.ns(self.burst_bytes + header_bytes);
        self.burst_bytes += bytes;
        (header_ns, self.burst_began_ns + self.ns(self.burst_bytes))
    }

    /// How long bytes of packets take, to the end of their last flit where there are flits.
    fn ns(&self, bytes: u64) -> f64 {
        let line_bytes = match self.model.is_flit_mode() {
            true => bytes.div_ceil(u64::from(FLIT_TLP_BYTES)) * u64::from(FLIT_BYTES),
            false => bytes,
        };
        line_bytes as f64 * 8.0 / self.model.raw_gbps()
    }
}

/// A path in use.
struct Transfer<'a> {
    path: &'a PciePath,
    model: Model,
    upstream: Vec<LinkDirection>,
    downstream: Vec<LinkDirection>,
}

impl<'a> Transfer<'a> {
    fn new(path: &'a PciePath, model: &Model) -> Result<Self, ModelError> {
        let directions = || -> Result<Vec<LinkDirection>, ModelError> {
            let hops = path.links.iter().map(|hop| {
                let generation = hop.generation.unwrap_or(model.link.generation);
                let link = Link { generation, lanes: hop.lanes.unwrap_or(model.link.lanes), ..model.link };
                Model::new(model.mode, link, model.completions).map(LinkDirection::new)
            });
            hops.collect()
        };
        Ok(Self { path, model: *model, upstream: directions()?, downstream: directions()? })
    }

    fn write(&mut self, span: Span) -> LatencyBreakdown {
        let mut last = LatencyBreakdown { latency_ns: 0.0, parts: Vec::new() };
        for piece in span.cut(self.model.link.mps_bytes.bytes()) {
            last = self.ask(Packet::Write(piece));
        }
        last.add("root complex", "processing", self.path.root_complex_ns);
        last.add("memory", "write", self.path.memory_write_ns);
        last
    }

    /// Memory answers no request before `written_ns`.
    fn read(&mut self, span: Span, written_ns: f64) -> LatencyBreakdown {
        let mut last = LatencyBreakdown { latency_ns: 0.0, parts: Vec::new() };
        for request in span.cut(self.model.link.mrrs_bytes.bytes()) {
            let mut asked = self.ask(Packet::Request(request));
            asked.add("root complex", "processing", self.path.root_complex_ns);
            let wait_ns = (written_ns - asked.latency_ns).max(0.0);
            if wait_ns > 0.0 {
                asked.add("memory", "the write ahead", wait_ns);
            }
            asked.add("memory", "read", self.path.memory_read_ns);
            let limit_bytes = self.model.completion_limit_bytes();
            for piece in request.completions(self.model.link.rcb_bytes.bytes(), limit_bytes) {
                last = self.answer(&asked, Packet::Completion(piece));
            }
        }
        last
    }

    /// Carries a packet from the device to the root complex.
    fn ask(&mut self, packet: Packet) -> LatencyBreakdown {
        let mut carried = LatencyBreakdown { latency_ns: 0.0, parts: Vec::new() };
        carried.add("device", "processing", self.path.device_ns);
        let mut header_ns = carried.latency_ns;
        for (index, hop) in self.path.links.iter().enumerate() {
            header_ns = cross(&mut self.upstream[index], hop, index, packet, header_ns, &mut carried);
            if let Some(switch) = &hop.switch {
                header_ns = forward(switch, index, header_ns, &mut carried);
            }
        }
        carried
    }

    /// Carries a packet back.
    fn answer(&mut self, asked: &LatencyBreakdown, packet: Packet) -> LatencyBreakdown {
        let mut carried = asked.clone();
        let mut header_ns = carried.latency_ns;
        for (index, hop) in self.path.links.iter().enumerate().rev() {
            if let Some(switch) = &hop.switch {
                header_ns = forward(switch, index, header_ns, &mut carried);
            }
            header_ns = cross(&mut self.downstream[index], hop, index, packet, header_ns, &mut carried);
        }
        carried
    }
}

/// A packet crosses a link, from its header at `ready_ns` on; says when its header is at the other end.
fn cross(
    direction: &mut LinkDirection,
    hop: &LinkHop,
    index: usize,
    packet: Packet,
    ready_ns: f64,
    carried: &mut LatencyBreakdown,
) -> f64 {
    let (bytes, header_bytes) = packet.bytes(&direction.model);
    let (header_there_ns, whole_there_ns) = direction.send(ready_ns, bytes, header_bytes);
    // What cuts through can leave before it is there whole, but its end is never ahead of itself.
    let crossing_ns = (whole_there_ns - carried.latency_ns).max(0.0);
    let own_header_ns = direction.ns(header_bytes).min(crossing_ns);
    let (name, propagation_ns) = (format!("link {}", index + 1), hop.length_m * hop.ns_per_m);
    carried.add(&name, packet.header(), own_header_ns);
    if crossing_ns > own_header_ns {
        carried.add(&name, packet.rest(), crossing_ns - own_header_ns);
    }
    carried.add(&name, "propagation", propagation_ns);
    header_there_ns + propagation_ns
}

/// A packet passes a switch; says when its header leaves.
fn forward(switch: &PcieSwitch, index: usize, header_ns: f64, carried: &mut LatencyBreakdown) -> f64 {
    let whole_ns = carried.latency_ns;
    carried.add(&format!("switch {}", index + 1), "forwarding", switch.forward_ns);
    switch.forward_ns + if switch.cut_through { header_ns } else { whole_ns }
}

impl LatencyBreakdown {
    fn add(&mut self, hop: &str, what: &'static str, ns: f64) {
        self.latency_ns += ns;
        self.parts.push(LatencyPart { hop: hop.to_owned(), what, ns });
    }
}

#[cfg(test)]
mod tests;
