//! Network cards as data: what a packet costs on PCIe besides itself.
//!
//! A card is a list of steps each way: doorbells, descriptors, interrupts, pointers, and the packet. Each step says
//! who moves how many bytes, and how many packets that serves. One evaluator takes them all; the published cards are
//! the files in `nics/`.

use std::ops::Add;
use std::path::Path;

use serde::{Deserialize, Deserializer, Serialize};

use super::split::Span;
use super::{Access, Mode, Model, ModelError, Traffic};
use config::ConfigError;

/// Bytes of a frame's checksum, which the card makes and checks: it does not cross PCIe.
pub const FCS_BYTES: u64 = 4;
/// Bytes on an Ethernet line before and after every frame: preamble and start 8, gap 12.
pub const LINE_BYTES: u64 = 20;
/// The smallest Ethernet frame, checksum included.
pub const FRAME_BYTES_MIN: u64 = 64;
/// The largest frame that is searched, checksum included: a jumbo frame.
pub const FRAME_BYTES_MAX: u64 = 9018;

/// The largest item that a step moves besides packets.
const STEP_BYTES_MAX: u64 = 4096;

const BUILT_IN: [(&str, &str); 3] = [
    ("simple", include_str!("../../nics/simple.toml")),
    ("kernel", include_str!("../../nics/kernel.toml")),
    ("dpdk", include_str!("../../nics/dpdk.toml")),
];

/// A card and its driver.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NicModel {
    /// What it is called.
    pub name: String,
    /// What it does, in a line.
    pub description: String,
    /// Where the numbers come from.
    pub source: String,
    /// Steps of a packet from the host to the line.
    pub transmit: Vec<Step>,
    /// Steps of a packet from the line to the host.
    pub receive: Vec<Step>,
}

/// One access that packets need.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// What for, and so who asks whom.
    pub step: StepKind,
    /// Of one item.
    pub bytes: StepBytes,
    /// Items that one access moves together: descriptors of a batch.
    #[serde(default)]
    pub items: Count,
    /// Packets that one access serves; as many as items unless it says otherwise.
    pub packets: Option<Count>,
}

/// What a step is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StepKind {
    /// The driver writes a register of the card.
    Doorbell,
    /// The driver reads a register of the card.
    PointerRead,
    /// The card reads descriptors from memory.
    DescriptorFetch,
    /// The card writes finished descriptors to memory.
    DescriptorWriteBack,
    /// The card writes its progress to memory, where the driver reads it without crossing PCIe.
    PointerWriteBack,
    /// The card reads a packet to transmit, or writes one it received.
    Packet,
    /// The card writes a message-signalled interrupt.
    Interrupt,
}

/// Bytes of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepBytes {
    /// As many as the packet has.
    Frame,
    /// This many.
    Fixed(u64),
}

/// A number from 1 to 65536.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u64")]
pub struct Count(u32);

/// Which way packets go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the host to the line.
    Transmit,
    /// From the line to the host.
    Receive,
}

/// Bytes on PCIe for one packet, on average, seen from the card.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PacketTraffic {
    /// To the host.
    pub sent_bytes: f64,
    /// From the host.
    pub received_bytes: f64,
}

/// What a card moves over a link for packets of one size, in 10^9 bits of packets a second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct NicBandwidth {
    /// Both ways at once: of each.
    pub bidirectional_gbps: f64,
    /// To the line alone.
    pub tx_gbps: f64,
    /// From the line alone.
    pub rx_gbps: f64,
}

impl NicModel {
    /// Names of the cards that need no file.
    pub fn built_in_names() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }

    /// A card that needs no file.
    pub fn built_in(name: &str) -> Option<Self> {
        let (_, text) = BUILT_IN.iter().find(|(known, _)| *known == name)?;
        Some(Self::parse(&format!("nics/{name}.toml"), text).expect("the built-in cards are tested"))
    }

    /// The card that a file describes.
    ///
    /// # Errors
    /// When it cannot be read or makes no sense.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let nic: Self = config::read(path)?;
        nic.checked(&path.display().to_string())
    }

    /// The card that the text of a file describes.
    ///
    /// # Errors
    /// When it makes no sense.
    pub fn parse(file: &str, text: &str) -> Result<Self, ConfigError> {
        config::parse::<Self>(file, text)?.checked(file)
    }

    /// A card that moves no packets has a bandwidth of nothing.
    fn checked(self, file: &str) -> Result<Self, ConfigError> {
        let senseless =
            |place: String, what: String| ConfigError::Invalid { file: file.to_owned(), location: place, what };
        for (key, steps) in [("transmit", &self.transmit), ("receive", &self.receive)] {
            if !steps.iter().any(|step| step.bytes == StepBytes::Frame) {
                let what = "no step moves the packet; write one with bytes = \"frame\"";
                return Err(senseless(key.to_owned(), what.to_owned()));
            }
            for (index, step) in steps.iter().enumerate() {
                step.check().map_err(|(field, what)| senseless(format!("{key}[{index}].{field}"), what))?;
            }
        }
        Ok(self)
    }

    /// The steps of one way.
    pub fn steps(&self, direction: Direction) -> &[Step] {
        match direction {
            Direction::Transmit => &self.transmit,
            Direction::Receive => &self.receive,
        }
    }

    /// What the card moves over the link of `model` when packets have `packet_bytes` (a frame without its checksum)
    /// and begin `offset_bytes` into a page.
    ///
    /// # Errors
    /// For sizes and offsets that cannot be modelled.
    pub fn bandwidth(&self, model: &Model, packet_bytes: u64, offset_bytes: u64) -> Result<NicBandwidth, ModelError> {
        let packet = model.span(packet_bytes, offset_bytes)?;
        let tx = self.traffic(model, Direction::Transmit, packet);
        let rx = self.traffic(model, Direction::Receive, packet);
        let gbps = |traffic: PacketTraffic| {
            packet_bytes as f64 * model.tlp_gbps() / traffic.sent_bytes.max(traffic.received_bytes)
        };
        Ok(NicBandwidth { bidirectional_gbps: gbps(tx + rx), tx_gbps: gbps(tx), rx_gbps: gbps(rx) })
    }

    /// What one packet costs.
    pub fn traffic(&self, model: &Model, direction: Direction, packet: Span) -> PacketTraffic {
        let steps = self.steps(direction).iter();
        steps.map(|step| step.traffic(model, direction, packet)).fold(PacketTraffic::default(), Add::add)
    }

    /// The smallest frame from which on, up to `frame_bytes_max`, all frames cross PCIe both ways as fast as an
    /// Ethernet line of `line_gbps` brings them; checksum included in both. `None` when even the largest do not.
    ///
    /// # Errors
    /// Never for frames up to [`FRAME_BYTES_MAX`].
    pub fn smallest_frame(
        &self,
        model: &Model,
        line_gbps: f64,
        frame_bytes_max: u64,
    ) -> Result<Option<u64>, ModelError> {
        let mut smallest = None;
        for frame_bytes in (FRAME_BYTES_MIN..=frame_bytes_max).rev() {
            let packet_bytes = frame_bytes - FCS_BYTES;
            let needed_gbps = line_packet_gbps(model.mode(), line_gbps, packet_bytes);
            if self.bandwidth(model, packet_bytes, 0)?.bidirectional_gbps < needed_gbps {
                break;
            }
            smallest = Some(frame_bytes);
        }
        Ok(smallest)
    }
}

/// What an Ethernet line brings when it is full of frames: packet bytes without checksum, in 10^9 bits a second.
///
/// A frame takes [`LINE_BYTES`] more than itself. The published program forgets that the packet is [`FCS_BYTES`]
/// shorter than its frame.
pub fn line_packet_gbps(mode: Mode, line_gbps: f64, packet_bytes: u64) -> f64 {
    let frame_bytes = match mode {
        Mode::Published => packet_bytes,
        Mode::Corrected => packet_bytes + FCS_BYTES,
    };
    line_gbps * packet_bytes as f64 / (frame_bytes.max(FRAME_BYTES_MIN) + LINE_BYTES) as f64
}

impl Step {
    /// Packets that one access serves.
    pub fn packets(&self) -> u32 {
        self.packets.unwrap_or(self.items).0
    }

    /// The key that makes no sense, and why.
    fn check(&self) -> Result<(), (&'static str, String)> {
        match self.bytes {
            StepBytes::Frame if self.items.0 > 1 => {
                Err(("items", format!("'{}' packets are not moved together; leave it out", self.items.0)))
            }
            StepBytes::Fixed(bytes) if !(1..=STEP_BYTES_MAX).contains(&bytes) => {
                Err(("bytes", format!("'{bytes}' is out of range; choose 1 to {STEP_BYTES_MAX}")))
            }
            _ => Ok(()),
        }
    }

    /// What the step costs one packet.
    pub fn traffic(&self, model: &Model, direction: Direction, packet: Span) -> PacketTraffic {
        let span = match self.bytes {
            StepBytes::Frame => packet,
            StepBytes::Fixed(bytes) => Span { address: 0, bytes: bytes * u64::from(self.items.0) },
        };
        let (is_host, access) = self.step.access(direction);
        let traffic = model.traffic(access, span);
        let mut seen = if is_host { traffic.reversed() } else { traffic };
        // The published program overwrites these bytes with the packet's: an assignment where a sum was meant.
        if model.mode() == Mode::Published && direction == Direction::Receive && self.step == StepKind::DescriptorFetch
        {
            seen.sent_bytes = 0;
        }
        PacketTraffic::of(seen, self.packets())
    }
}

impl StepKind {
    /// Whether the host asks, and for what.
    pub fn access(self, direction: Direction) -> (bool, Access) {
        match (self, direction) {
            (Self::Doorbell, _) => (true, Access::Write),
            (Self::PointerRead, _) => (true, Access::Read),
            (Self::DescriptorFetch, _) | (Self::Packet, Direction::Transmit) => (false, Access::Read),
            (Self::DescriptorWriteBack | Self::PointerWriteBack | Self::Interrupt, _) => (false, Access::Write),
            (Self::Packet, Direction::Receive) => (false, Access::Write),
        }
    }

    /// As in a file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Doorbell => "doorbell",
            Self::PointerRead => "pointer-read",
            Self::DescriptorFetch => "descriptor-fetch",
            Self::DescriptorWriteBack => "descriptor-write-back",
            Self::PointerWriteBack => "pointer-write-back",
            Self::Packet => "packet",
            Self::Interrupt => "interrupt",
        }
    }
}

impl PacketTraffic {
    fn of(traffic: Traffic, packets: u32) -> Self {
        let share = |bytes: u64| bytes as f64 / f64::from(packets);
        Self { sent_bytes: share(traffic.sent_bytes), received_bytes: share(traffic.received_bytes) }
    }
}

impl Add for PacketTraffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            sent_bytes: self.sent_bytes + other.sent_bytes,
            received_bytes: self.received_bytes + other.received_bytes,
        }
    }
}

impl Default for Count {
    fn default() -> Self {
        Self(1)
    }
}

impl TryFrom<u64> for Count {
    type Error = String;

    fn try_from(count: u64) -> Result<Self, String> {
        let possible = u32::try_from(count).ok().filter(|count| (1..=1 << 16).contains(count));
        possible.map(Self).ok_or_else(|| format!("'{count}' is out of range; choose 1 to 65536"))
    }
}

impl<'de> Deserialize<'de> for StepBytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = config::bytes_or_word(deserializer, "frame")?;
        Ok(bytes.map_or(Self::Frame, Self::Fixed))
    }
}

#[cfg(test)]
mod tests;
