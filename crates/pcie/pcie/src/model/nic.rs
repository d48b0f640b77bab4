//! Models of NICs as data: the PCIe traffic of a packet in addition to the packet itself.
//!
//! A NIC is a list of steps per direction: doorbells, descriptors, interrupts, pointers, and the packet. Each step says
//! which side transfers how many bytes, and for how many packets. All NICs are evaluated by the same code; the
//! published ones are the files in `nics/`.

use std::ops::Add;
use std::path::Path;

use config::ConfigError;
use serde::{Deserialize, Deserializer, Serialize};

use super::split::Span;
use super::{Access, Mode, Model, ModelError, Traffic};

/// Size of the frame check sequence, which the NIC adds and verifies, so that it does not cross PCIe.
pub const FCS_BYTES: u64 = 4;
/// Bytes on an Ethernet link before and after every frame: preamble and start delimiter 8, inter-frame gap 12.
pub const LINE_BYTES: u64 = 20;
/// Smallest Ethernet frame, including the frame check sequence.
pub const FRAME_BYTES_MIN: u64 = 64;
/// Largest frame considered, including the frame check sequence: a jumbo frame.
pub const FRAME_BYTES_MAX: u64 = 9018;

/// Largest number of bytes that a key of a step may give.
const STEP_BYTES_MAX: u64 = 4096;

const BUILT_IN: [(&str, &str); 6] = [
    ("simple", include_str!("../../nics/simple.toml")),
    ("kernel", include_str!("../../nics/kernel.toml")),
    ("dpdk", include_str!("../../nics/dpdk.toml")),
    ("mlx5-kernel", include_str!("../../nics/mlx5-kernel.toml")),
    ("mlx5-dpdk", include_str!("../../nics/mlx5-dpdk.toml")),
    ("mlx5-mprq", include_str!("../../nics/mlx5-mprq.toml")),
];

/// A model of a NIC and its driver.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NicModel {
    /// The NIC's name.
    pub name: String,
    /// A description in one line.
    pub description: String,
    /// The source of the numbers.
    pub source: String,
    /// Steps of transmitting a packet.
    pub transmit: Vec<Step>,
    /// Steps of receiving a packet.
    pub receive: Vec<Step>,
}

/// An access that packets require.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// The purpose, which determines the requester and the kind of access.
    pub step: StepKind,
    /// Size of an item.
    pub bytes: StepBytes,
    /// Items per access, such as descriptors of a batch.
    #[serde(default)]
    pub items: Count,
    /// Packets per access; by default the number of items.
    pub packets: Option<Count>,
    /// Bytes at the start of an access, before its items.
    #[serde(default)]
    pub prefix_bytes: u64,
    /// Bytes before each item.
    #[serde(default)]
    pub header_bytes: u64,
    /// Each item, with its header, is padded to a multiple of this.
    #[serde(default = "no_alignment")]
    pub align_bytes: u64,
    /// Largest access: it has fewer items if they do not fit.
    pub access_bytes_max: Option<u64>,
    /// Smallest packet that needs the step.
    #[serde(default)]
    pub packet_bytes_min: u64,
    /// Largest packet that needs the step.
    pub packet_bytes_max: Option<u64>,
}

/// The purpose of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StepKind {
    /// The driver writes a register of the NIC.
    Doorbell,
    /// The driver reads a register of the NIC.
    PointerRead,
    /// The NIC reads descriptors from memory.
    DescriptorFetch,
    /// The NIC writes completed descriptors to memory.
    DescriptorWriteBack,
    /// The NIC writes its progress to memory, where the driver reads it without crossing PCIe.
    PointerWriteBack,
    /// The NIC reads a packet to transmit, or writes a received packet.
    Packet,
    /// The NIC writes a message-signalled interrupt.
    Interrupt,
}

/// The size of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepBytes {
    /// The size of the packet.
    Frame,
    /// A fixed number of bytes.
    Fixed(u64),
}

/// A number from 1 to 65536.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u64")]
pub struct Count(u32);

/// The direction of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the host to the network.
    Transmit,
    /// From the network to the host.
    Receive,
}

/// Average PCIe traffic of a packet, as seen from the NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PacketTraffic {
    /// Bytes to the host.
    pub sent_bytes: f64,
    /// Bytes from the host.
    pub received_bytes: f64,
}

/// The packet bandwidth of a NIC for packets of one size, in 10^9 bits per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct NicBandwidth {
    /// Bandwidth in each direction when both are used at once.
    pub bidirectional_gbps: f64,
    /// Bandwidth of transmitting alone.
    pub tx_gbps: f64,
    /// Bandwidth of receiving alone.
    pub rx_gbps: f64,
}

impl NicModel {
    /// Returns the names of the built-in NICs.
    pub fn built_in_names() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }

    /// Returns a built-in NIC.
    pub fn built_in(name: &str) -> Option<Self> {
        let (_, text) = BUILT_IN.iter().find(|(known, _)| *known == name)?;
        Some(Self::parse(&format!("nics/{name}.toml"), text).expect("the built-in NICs are tested"))
    }

    /// Reads a NIC from a file.
    ///
    /// # Errors
    /// When it cannot be read or is invalid.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let nic: Self = config::read(path)?;
        nic.checked(&path.display().to_string())
    }

    /// Parses a NIC from the text of a file.
    ///
    /// # Errors
    /// When it is invalid.
    pub fn parse(file: &str, text: &str) -> Result<Self, ConfigError> {
        config::parse::<Self>(file, text)?.checked(file)
    }

    /// Checks the steps. A NIC that transfers no packets is refused, because it would have no bandwidth.
    fn checked(self, file: &str) -> Result<Self, ConfigError> {
        let invalid =
            |place: String, what: String| ConfigError::Invalid { file: file.to_owned(), location: place, what };
        for (key, steps) in [("transmit", &self.transmit), ("receive", &self.receive)] {
            for (index, step) in steps.iter().enumerate() {
                step.check().map_err(|(field, what)| invalid(format!("{key}[{index}].{field}"), what))?;
            }
            if let Some(packet_bytes) = untransferred(steps) {
                let what = format!(
                    "no step transfers the packet if it has {packet_bytes} bytes; write one with bytes = \"frame\""
                );
                return Err(invalid(key.to_owned(), what));
            }
        }
        Ok(self)
    }

    /// Returns the steps of a direction.
    pub fn steps(&self, direction: Direction) -> &[Step] {
        match direction {
            Direction::Transmit => &self.transmit,
            Direction::Receive => &self.receive,
        }
    }

    /// Returns the bandwidth over the link of `model` for packets of `packet_bytes` (a frame without its check
    /// sequence) that start `offset_bytes` into a page.
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

    /// Returns the PCIe traffic of a packet.
    pub fn traffic(&self, model: &Model, direction: Direction, packet: Span) -> PacketTraffic {
        let steps = self.steps(direction).iter();
        steps.map(|step| step.traffic(model, direction, packet)).fold(PacketTraffic::default(), Add::add)
    }

    /// Returns the smallest frame size from which on, up to `frame_bytes_max`, PCIe sustains an Ethernet link of
    /// `line_gbps` in both directions; both sizes include the check sequence. `None` if even the largest frames are too
    /// fast.
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

/// Returns the packet bandwidth of a fully used Ethernet link, without check sequences, in 10^9 bits per second.
///
/// A frame takes [`LINE_BYTES`] more than its size. The published program ignores that the packet is [`FCS_BYTES`]
/// shorter than its frame.
pub fn line_packet_gbps(mode: Mode, line_gbps: f64, packet_bytes: u64) -> f64 {
    let frame_bytes = match mode {
        Mode::Published => packet_bytes,
        Mode::Corrected => packet_bytes + FCS_BYTES,
    };
    line_gbps * packet_bytes as f64 / (frame_bytes.max(FRAME_BYTES_MIN) + LINE_BYTES) as f64
}

/// Returns the smallest packet that no step transfers.
fn untransferred(steps: &[Step]) -> Option<u64> {
    let is_transferred =
        |bytes: &u64| steps.iter().any(|step| step.bytes == StepBytes::Frame && step.is_needed_for(*bytes));
    let ends = steps.iter().filter_map(|step| step.packet_bytes_max).map(|last| last + 1);
    std::iter::once(1).chain(ends).filter(|bytes| !is_transferred(bytes)).min()
}

/// The default of [`Step::align_bytes`].
fn no_alignment() -> u64 {
    1
}

impl Step {
    /// Returns the number of packets per access, if all items fit.
    pub fn packets(&self) -> u32 {
        self.packets.unwrap_or(self.items).0
    }

    /// Returns whether packets of this size need the step.
    pub fn is_needed_for(&self, packet_bytes: u64) -> bool {
        (self.packet_bytes_min..=self.packet_bytes_max.unwrap_or(u64::MAX)).contains(&packet_bytes)
    }

    /// Fails with the name of an invalid key and the reason.
    fn check(&self) -> Result<(), (&'static str, String)> {
        let range = |key, bytes: u64, min: u64| match bytes {
            _ if (min..=STEP_BYTES_MAX).contains(&bytes) => Ok(()),
            _ => Err((key, format!("'{bytes}' is out of range; choose {min} to {STEP_BYTES_MAX}"))),
        };
        match self.bytes {
            StepBytes::Frame if self.items.0 > 1 && self.step != StepKind::DescriptorFetch => {
                return Err(("items", format!("'{}' packets cannot be one access; leave it out", self.items.0)));
            }
            StepBytes::Frame if self.items.0 > 1 && self.access_bytes_max.is_none() => {
                let what = format!("'{}' packets of any size are no access; add access_bytes_max", self.items.0);
                return Err(("items", what));
            }
            StepBytes::Frame => {}
            StepBytes::Fixed(bytes) => range("bytes", bytes, 1)?,
        }
        range("prefix_bytes", self.prefix_bytes, 0)?;
        range("header_bytes", self.header_bytes, 0)?;
        range("align_bytes", self.align_bytes, 1)?;
        let min = self.packet_bytes_min.max(1);
        if let Some(last) = self.packet_bytes_max.filter(|last| *last < min) {
            return Err((
                "packet_bytes_max",
                format!("'{last}' is less than the smallest packet; choose {min} or more"),
            ));
        }
        self.access_bytes_max.map_or(Ok(()), |most| self.check_access(most))
    }

    /// Fails if an item may be larger than the largest access, or if the number of packets would not follow that of the
    /// items.
    fn check_access(&self, most: u64) -> Result<(), (&'static str, String)> {
        if most > STEP_BYTES_MAX {
            return Err(("access_bytes_max", format!("'{most}' is out of range; choose at most {STEP_BYTES_MAX}")));
        }
        if self.packets.is_some() {
            return Err(("packets", "is not possible with access_bytes_max; leave one out".to_owned()));
        }
        let largest_bytes = match (self.bytes, self.packet_bytes_max) {
            (StepBytes::Fixed(bytes), _) | (StepBytes::Frame, Some(bytes)) => {
                self.prefix_bytes + self.item_bytes(bytes)
            }
            (StepBytes::Frame, None) => {
                return Err((
                    "access_bytes_max",
                    "needs packet_bytes_max, as packets have any size; add it".to_owned(),
                ));
            }
        };
        if largest_bytes > most {
            let what = format!("'{most}' is less than one item needs; choose {largest_bytes} or more");
            return Err(("access_bytes_max", what));
        }
        Ok(())
    }

    /// Returns the size of an item of `bytes` with its header and padding.
    fn item_bytes(&self, bytes: u64) -> u64 {
        (self.header_bytes + bytes).next_multiple_of(self.align_bytes)
    }

    /// Returns the bytes of an access, and how many packets it serves.
    fn access(&self, packet: Span) -> (Span, u32) {
        // A packet within a descriptor is not where the packet is in memory.
        let (bytes, address) = match self.bytes {
            StepBytes::Frame if self.step == StepKind::DescriptorFetch => (packet.bytes, 0),
            StepBytes::Frame => (packet.bytes, packet.address),
            StepBytes::Fixed(bytes) => (bytes, 0),
        };
        let item_bytes = self.item_bytes(bytes);
        let fitting = self.access_bytes_max.map(|most| most.saturating_sub(self.prefix_bytes) / item_bytes);
        let items = fitting.unwrap_or(u64::MAX).clamp(1, self.items.0.into());
        let packets = self.packets.map_or(items as u32, |packets| packets.0);
        (Span { address, bytes: self.prefix_bytes + items * item_bytes }, packets)
    }

    /// Returns the PCIe traffic of the step per packet.
    pub fn traffic(&self, model: &Model, direction: Direction, packet: Span) -> PacketTraffic {
        if !self.is_needed_for(packet.bytes) {
            return PacketTraffic::default();
        }
        let (span, packets) = self.access(packet);
        let (is_host, access) = self.step.access(direction);
        let traffic = model.traffic(access, span);
        let mut seen = if is_host { traffic.reversed() } else { traffic };
        // The published program overwrites these bytes with those of the packet: an assignment instead of a sum.
        if model.mode() == Mode::Published && direction == Direction::Receive && self.step == StepKind::DescriptorFetch
        {
            seen.sent_bytes = 0;
        }
        PacketTraffic::of(seen, packets)
    }
}

impl StepKind {
    /// Returns whether the host is the requester, and the kind of access.
    pub fn access(self, direction: Direction) -> (bool, Access) {
        match (self, direction) {
            (Self::Doorbell, _) => (true, Access::Write),
            (Self::PointerRead, _) => (true, Access::Read),
            (Self::DescriptorFetch, _) | (Self::Packet, Direction::Transmit) => (false, Access::Read),
            (Self::DescriptorWriteBack | Self::PointerWriteBack | Self::Interrupt, _) => (false, Access::Write),
            (Self::Packet, Direction::Receive) => (false, Access::Write),
        }
    }

    /// Returns the name in files.
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
