//! Minimum latency of a transfer, hop by hop: on an idle path of links, switches, root complex and memory, where
//! packets wait only for packets of the same transfer.
//!
//! A packet is forwarded when it has arrived completely, or after its header by a cut-through switch. In flit mode
//! nothing of a flit can be used before its checksum has arrived, so a packet arrives with the end of its last flit.

use std::path::Path;

use config::ConfigError;
use serde::{Deserialize, Serialize};

use super::split::Span;
use super::{Model, ModelError};
use crate::NS_MAX;
use crate::link::{FLIT_BYTES, FLIT_TLP_BYTES, Generation, Lanes, Link};

const DIRECT: &str = include_str!("../../paths/direct.toml");
/// Longest valid link in meters; PCIe over optical cables reaches some hundred.
const LENGTH_M_MAX: f64 = 1000.0;
/// Longest valid propagation delay in nanoseconds a meter, thirty times that of light.
const NS_PER_M_MAX: f64 = 100.0;

/// A path from a device to memory.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PciePath {
    /// The path's name.
    pub name: String,
    /// The source of the numbers.
    pub source: String,
    /// Latency of the device, from the start of the access to the first symbol of the first packet.
    #[serde(deserialize_with = "config::nanoseconds")]
    pub device_ns: f64,
    /// The links from the device to the root complex, with switches between them.
    pub links: Vec<LinkHop>,
    /// Latency of the root complex for a request to memory, including its completion.
    #[serde(deserialize_with = "config::nanoseconds")]
    pub root_complex_ns: f64,
    /// Latency of memory or a cache for a read.
    #[serde(deserialize_with = "config::nanoseconds")]
    pub memory_read_ns: f64,
    /// Latency of memory or a cache until a write can be read.
    #[serde(deserialize_with = "config::nanoseconds")]
    pub memory_write_ns: f64,
}

/// A link with the switch at its end, if any.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkHop {
    /// Length of traces and cables.
    #[serde(deserialize_with = "config::meters")]
    pub length_m: f64,
    /// Propagation delay per meter: 7 ns in a board (relative permittivity 4.4), 5 ns in a cable.
    #[serde(default = "board_ns_per_m", deserialize_with = "config::nanoseconds")]
    pub ns_per_m: f64,
    /// Generation, if it differs from the model's.
    pub generation: Option<Generation>,
    /// Lanes, if they differ from the model's.
    pub lanes: Option<Lanes>,
    /// The switch at its end towards the root complex; the last link has none.
    pub switch: Option<PcieSwitch>,
}

/// A PCI Express switch.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PcieSwitch {
    /// Forwarding latency: from the packet's last symbol in, or the header's last symbol for cut-through, to the first
    /// symbol out.
    #[serde(deserialize_with = "config::nanoseconds")]
    pub forward_ns: f64,
    /// Whether packets are forwarded before they have arrived completely (cut-through).
    #[serde(default)]
    pub cut_through: bool,
}

/// The minimum latency of a transfer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LatencyBreakdown {
    /// The total latency.
    pub latency_ns: f64,
    /// Its parts in temporal order, as experienced by the last packet; they add up to the total.
    pub parts: Vec<LatencyPart>,
}

/// A part of a latency.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LatencyPart {
    /// The location: `device`, `link 1`, `switch 1`, `root complex`, `memory`.
    pub hop: String,
    /// What takes the time.
    pub what: &'static str,
    /// Duration.
    pub ns: f64,
}

impl PcieSwitch {
    /// Broadcom PEX88000, generation 4: 105 ns between ports of 16 lanes, cut-through (vendor's figure, Linley
    /// Newsletter, 24 September 2019).
    pub const PEX88000: Self = Self { forward_ns: 105.0, cut_through: true };
}

impl PciePath {
    /// Returns the path of a device in a slot of the root complex, with DDR4 memory.
    pub fn direct() -> Self {
        Self::parse("paths/direct.toml", DIRECT).expect("the built-in path is tested")
    }

    /// Reads a path from a file.
    ///
    /// # Errors
    /// When it cannot be read or is invalid.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let file: Self = config::read(path)?;
        file.checked(&path.display().to_string())
    }

    /// Parses a path from the text of a file.
    ///
    /// # Errors
    /// When it is invalid.
    pub fn parse(file: &str, text: &str) -> Result<Self, ConfigError> {
        config::parse::<Self>(file, text)?.checked(file)
    }

    /// Returns the path with `count` more links like the last one, with `switch` before each.
    pub fn with_switches(mut self, count: usize, switch: &PcieSwitch) -> Self {
        let last = self.links.pop().expect("a path has links");
        let switched = LinkHop { switch: Some(switch.clone()), ..last.clone() };
        self.links.extend(std::iter::repeat_n(switched, count));
        self.links.push(last);
        self
    }

    /// Checks the ranges of all numbers, and that there are switches between links and nowhere else.
    fn checked(self, file: &str) -> Result<Self, ConfigError> {
        let invalid = |place: String, what: &str| {
            Err(ConfigError::Invalid { file: file.to_owned(), location: place, what: what.to_owned() })
        };
        for (place, value, max) in self.numbers() {
            if value > max {
                return invalid(place, &format!("{value} is out of range; choose 0 to {max}"));
            }
        }
        let Some((last, others)) = self.links.split_last() else {
            return invalid("links".to_owned(), "there is none; write at least one");
        };
        if let Some(index) = others.iter().position(|link| link.switch.is_none()) {
            return invalid(format!("links[{index}]"), "no switch before the next link; write [links.switch]");
        }
        if last.switch.is_some() {
            let place = format!("links[{}].switch", others.len());
            return invalid(place, "the last link ends at the root complex; leave it out");
        }
        Ok(self)
    }

    /// Returns every number with its key and the largest valid value.
    fn numbers(&self) -> Vec<(String, f64, f64)> {
        let mut numbers = vec![
            ("device_ns".to_owned(), self.device_ns, NS_MAX),
            ("root_complex_ns".to_owned(), self.root_complex_ns, NS_MAX),
            ("memory_read_ns".to_owned(), self.memory_read_ns, NS_MAX),
            ("memory_write_ns".to_owned(), self.memory_write_ns, NS_MAX),
        ];
        for (index, link) in self.links.iter().enumerate() {
            numbers.push((format!("links[{index}].length_m"), link.length_m, LENGTH_M_MAX));
            numbers.push((format!("links[{index}].ns_per_m"), link.ns_per_m, NS_PER_M_MAX));
            if let Some(switch) = &link.switch {
                numbers.push((format!("links[{index}].switch.forward_ns"), switch.forward_ns, NS_MAX));
            }
        }
        numbers
    }

    /// Returns the minimum latency of a read, until its last byte has arrived at the device.
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

    /// Returns the minimum latency of a write, until its last byte can be read from memory.
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

    /// Returns the minimum latency of a write followed by a read of the same address, which returns the written data.
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
    /// Returns the size on the wire, and how much of it is not data.
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

/// One direction of a link. Packets that are ready follow each other without a gap, as a burst.
struct LinkDirection {
    model: Model,
    burst_start_ns: f64,
    burst_bytes: u64,
}

/// Bound for rounding differences between sums of the same times in another order. Without it, a packet that is ready
/// exactly when the one before has left could start a new burst, which in flit mode costs a flit.
const ROUNDING_NS: f64 = 1e-6;

impl LinkDirection {
    fn new(model: Model) -> Self {
        Self { model, burst_start_ns: 0.0, burst_bytes: 0 }
    }

    /// Sends a packet that is ready at `ready_ns`. Returns when its header and when all of it has been transmitted.
    fn send(&mut self, ready_ns: f64, bytes: u64, header_bytes: u64) -> (f64, f64) {
        let free_ns = self.burst_start_ns + self.ns(self.burst_bytes);
        if ready_ns > free_ns + ROUNDING_NS {
            (self.burst_start_ns, self.burst_bytes) = (ready_ns, 0);
        }
        let header_ns = self.burst_start_ns + self.ns(self.burst_bytes + header_bytes);
        self.burst_bytes += bytes;
        (header_ns, self.burst_start_ns + self.ns(self.burst_bytes))
    }

    /// Returns the transmission time of bytes of packets; in flit mode, until the end of their last flit.
    fn ns(&self, bytes: u64) -> f64 {
        let wire_bytes = match self.model.is_flit_mode() {
            true => bytes.div_ceil(u64::from(FLIT_TLP_BYTES)) * u64::from(FLIT_BYTES),
            false => bytes,
        };
        wire_bytes as f64 * 8.0 / self.model.raw_gbps()
    }
}

/// A transfer over a path, with the state of all links.
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
        let mut last = LatencyBreakdown::default();
        for piece in span.split(self.model.link.mps_bytes.bytes()) {
            last = self.send_upstream(Packet::Write(piece));
        }
        last.add("root complex", "processing", self.path.root_complex_ns);
        last.add("memory", "write", self.path.memory_write_ns);
        last
    }

    /// Simulates a read. Memory answers no request before `written_ns`.
    fn read(&mut self, span: Span, written_ns: f64) -> LatencyBreakdown {
        let mut last = LatencyBreakdown::default();
        for request in span.split(self.model.link.mrrs_bytes.bytes()) {
            let mut at_memory = self.send_upstream(Packet::Request(request));
            at_memory.add("root complex", "processing", self.path.root_complex_ns);
            let wait_ns = (written_ns - at_memory.latency_ns).max(0.0);
            if wait_ns > 0.0 {
                at_memory.add("memory", "the write ahead", wait_ns);
            }
            at_memory.add("memory", "read", self.path.memory_read_ns);
            let limit_bytes = self.model.completion_limit_bytes();
            for piece in request.completions(self.model.link.rcb_bytes.bytes(), limit_bytes) {
                last = self.send_downstream(&at_memory, Packet::Completion(piece));
            }
        }
        last
    }

    /// Sends a packet from the device to the root complex.
    fn send_upstream(&mut self, packet: Packet) -> LatencyBreakdown {
        let mut latency = LatencyBreakdown::default();
        latency.add("device", "processing", self.path.device_ns);
        let mut header_ns = latency.latency_ns;
        for (index, hop) in self.path.links.iter().enumerate() {
            header_ns = cross(&mut self.upstream[index], hop, index, packet, header_ns, &mut latency);
            if let Some(switch) = &hop.switch {
                header_ns = forward(switch, index, header_ns, &mut latency);
            }
        }
        latency
    }

    /// Sends a packet from the root complex to the device, after the parts of `at_memory`.
    fn send_downstream(&mut self, at_memory: &LatencyBreakdown, packet: Packet) -> LatencyBreakdown {
        let mut latency = at_memory.clone();
        let mut header_ns = latency.latency_ns;
        for (index, hop) in self.path.links.iter().enumerate().rev() {
            if let Some(switch) = &hop.switch {
                header_ns = forward(switch, index, header_ns, &mut latency);
            }
            header_ns = cross(&mut self.downstream[index], hop, index, packet, header_ns, &mut latency);
        }
        latency
    }
}

/// Sends a packet, whose header is ready at `ready_ns`, over a link. Returns when its header is at the other end.
fn cross(
    direction: &mut LinkDirection,
    hop: &LinkHop,
    index: usize,
    packet: Packet,
    ready_ns: f64,
    latency: &mut LatencyBreakdown,
) -> f64 {
    let (bytes, header_bytes) = packet.bytes(&direction.model);
    let (header_arrives_ns, packet_arrives_ns) = direction.send(ready_ns, bytes, header_bytes);
    // With cut-through a packet may leave before all of it has arrived, but its end cannot leave before it has arrived.
    let crossing_ns = (packet_arrives_ns - latency.latency_ns).max(0.0);
    let own_header_ns = direction.ns(header_bytes).min(crossing_ns);
    let (name, propagation_ns) = (format!("link {}", index + 1), hop.length_m * hop.ns_per_m);
    latency.add(&name, packet.header(), own_header_ns);
    if crossing_ns > own_header_ns {
        latency.add(&name, packet.rest(), crossing_ns - own_header_ns);
    }
    latency.add(&name, "propagation", propagation_ns);
    header_arrives_ns + propagation_ns
}

/// Forwards a packet through a switch. Returns when its header leaves.
fn forward(switch: &PcieSwitch, index: usize, header_ns: f64, latency: &mut LatencyBreakdown) -> f64 {
    let packet_ns = latency.latency_ns;
    latency.add(&format!("switch {}", index + 1), "forwarding", switch.forward_ns);
    switch.forward_ns + if switch.cut_through { header_ns } else { packet_ns }
}

impl LatencyBreakdown {
    fn add(&mut self, hop: &str, what: &'static str, ns: f64) {
        self.latency_ns += ns;
        self.parts.push(LatencyPart { hop: hop.to_owned(), what, ns });
    }
}

#[cfg(test)]
mod tests;
