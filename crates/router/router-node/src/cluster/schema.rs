//! Values of cluster files: their spellings and parsers.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use router::batch::FIXED_PACKETS_MAX;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize};

/// The transport of packets between nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InterconnectKind {
    /// Lanes in shared memory, for nodes of one machine.
    #[default]
    Lane,
    /// Lanes in memory windows behind a modelled link, for nodes of one machine.
    Window,
    /// The RDMA transport over lanes, for nodes of one machine.
    RnicLane,
    /// The RDMA transport over UDP.
    RnicUdp,
}

impl InterconnectKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Lane, Self::Window, Self::RnicLane, Self::RnicUdp];

    /// Returns the spelling in cluster files.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Lane => "lane",
            Self::Window => "window",
            Self::RnicLane => "rnic-lane",
            Self::RnicUdp => "rnic-udp",
        }
    }
}

/// How packets are routed to their egress node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Balance {
    /// Always over the direct link.
    #[default]
    Direct,
    /// Over a third node while the direct link is congested (Valiant load balancing).
    Valiant,
}

impl Balance {
    /// Returns the spelling in cluster files.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Valiant => "valiant",
        }
    }
}

/// What a node does if packet filters of its namespace would apply to packets that it forwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FilterMode {
    /// The kernel forwards, so that they apply.
    #[default]
    Honour,
    /// It does not start; if filters appear while it is up, it stops forwarding.
    Refuse,
    /// The router forwards: they do not apply.
    Ignore,
}

impl FilterMode {
    /// Returns the spelling in cluster files.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Honour => "honour",
            Self::Refuse => "refuse",
            Self::Ignore => "ignore",
        }
    }
}

/// How a port accesses its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortKind {
    /// A kernel interface by AF_XDP, or by AF_PACKET if AF_XDP is not available.
    #[default]
    Auto,
    /// A kernel interface by AF_XDP.
    AfXdp,
    /// A kernel interface by AF_PACKET.
    AfPacket,
    /// A TAP interface that the node creates for a program or a virtual machine.
    Tap,
    /// Two capture files.
    Pcap,
    /// A VLAN of another port, which carries its frames with a tag.
    Vlan,
}

impl PortKind {
    /// Returns the spelling in cluster files.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::AfXdp => "af-xdp",
            Self::AfPacket => "af-packet",
            Self::Tap => "tap",
            Self::Pcap => "pcap",
            Self::Vlan => "vlan",
        }
    }

    /// Returns whether the kernel has the interface's addresses and answers for them.
    pub fn has_kernel(self) -> bool {
        match self {
            Self::Auto | Self::AfXdp | Self::AfPacket => true,
            Self::Tap | Self::Pcap | Self::Vlan => false,
        }
    }
}

/// Packets per message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batch {
    /// As many as are queued, within a latency target.
    Adaptive,
    /// A fixed number, or fewer after a timeout.
    Fixed(u8),
}

const BATCH_MAX: u8 = FIXED_PACKETS_MAX as u8;

impl<'de> Deserialize<'de> for Batch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(BatchVisitor)
    }
}

impl fmt::Display for Batch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Adaptive => formatter.write_str("adaptive"),
            Self::Fixed(packets) => packets.fmt(formatter),
        }
    }
}

struct BatchVisitor;

impl BatchVisitor {
    fn refuse<E: de::Error>(value: impl fmt::Display) -> E {
        E::custom(format!(
            "{value} is not a batch size; write \"adaptive\", or packets a message from 1 to {BATCH_MAX}"
        ))
    }
}

impl Visitor<'_> for BatchVisitor {
    type Value = Batch;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "a batch size; write \"adaptive\", or packets a message from 1 to {BATCH_MAX}")
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Batch, E> {
        let packets = u8::try_from(value).ok().filter(|packets| (1..=BATCH_MAX).contains(packets));
        packets.map(Batch::Fixed).ok_or_else(|| Self::refuse(value))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Batch, E> {
        if value == "adaptive" { Ok(Batch::Adaptive) } else { Err(Self::refuse(format!("\"{value}\""))) }
    }
}

fn parsed_network<E: de::Error>(text: &str) -> Result<IpNet, E> {
    let what = "with a prefix length; write as in \"192.0.2.1/24\" or \"2001:db8::1/64\"";
    text.parse().map_err(|_| E::custom(format!("{text:?} is not an address {what}")))
}

fn parsed_address<E: de::Error>(text: &str) -> Result<IpAddr, E> {
    let example = "write as in \"192.0.2.1\" or \"2001:db8::1\"";
    text.parse().map_err(|_| E::custom(format!("{text:?} is not an IP address; {example}")))
}

/// Parses a prefix, for `deserialize_with`.
pub(super) fn network<'de, D: Deserializer<'de>>(deserializer: D) -> Result<IpNet, D::Error> {
    parsed_network(&String::deserialize(deserializer)?)
}

/// Parses a list of prefixes, for `deserialize_with`.
pub(super) fn networks<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<IpNet>, D::Error> {
    Vec::<String>::deserialize(deserializer)?.iter().map(|text| parsed_network(text)).collect()
}

/// Parses an optional address, for `deserialize_with`.
pub(super) fn address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<IpAddr>, D::Error> {
    parsed_address(&String::deserialize(deserializer)?).map(Some)
}

/// Parses a list of addresses, for `deserialize_with`.
pub(super) fn addresses<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<IpAddr>, D::Error> {
    Vec::<String>::deserialize(deserializer)?.iter().map(|text| parsed_address(text)).collect()
}

/// Parses an optional duration, for `deserialize_with`.
pub(super) fn optional_nanoseconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    config::nanoseconds(deserializer).map(Some)
}
