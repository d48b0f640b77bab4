//! Settings of the endpoints: loss recovery, packet size and congestion control.

mod ack_timeout;
mod congestion;
mod keys;

use rnic::nic::TransportPolicy;
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};

pub use ack_timeout::{AckTimeout, AckTimeoutError};
pub use congestion::{
    BdpWindowKeys, DcqcnKeys, DctcpKeys, DctcpPreset, LineRate, RatePreset, SwiftKeys, SwiftPreset, TimelyKeys,
};

/// How senders control congestion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CongestionAlgorithm {
    /// None.
    None,
    /// A fixed window of the bandwidth-delay product.
    BdpWindow,
    /// DCTCP: a window that follows the share of marked packets.
    #[default]
    Dctcp,
    /// DCQCN: a rate that follows congestion notification packets.
    Dcqcn,
    /// Swift: a window that follows the round-trip time.
    Swift,
    /// TIMELY: a rate that follows the gradient of the round-trip time.
    Timely,
}

impl CongestionAlgorithm {
    /// All congestion controls.
    pub const ALL: [Self; 6] = [Self::None, Self::BdpWindow, Self::Dctcp, Self::Dcqcn, Self::Swift, Self::Timely];

    /// Returns the name in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::BdpWindow => "bdp-window",
            Self::Dctcp => "dctcp",
            Self::Dcqcn => "dcqcn",
            Self::Swift => "swift",
            Self::Timely => "timely",
        }
    }
}

/// The table `transport.irn`: IRN's timeouts, unless `ack_timeout` replaces them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IrnKeys {
    /// The timeout while few packets are in flight, in nanoseconds.
    #[serde(deserialize_with = "keys::time", skip_serializing_if = "Option::is_none")]
    pub timeout_low: Option<f64>,
    /// The timeout otherwise, in nanoseconds.
    #[serde(deserialize_with = "keys::time", skip_serializing_if = "Option::is_none")]
    pub timeout_high: Option<f64>,
    /// The low timeout applies below this number of packets in flight.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub low_packets: Option<u32>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Settings of the endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TransportConfig {
    /// The transport policy of the NICs.
    pub policy: TransportPolicy,
    /// Message bytes in a full packet.
    #[serde(deserialize_with = "mtu")]
    pub mtu_bytes: u32,
    /// Congestion control.
    pub congestion: CongestionAlgorithm,
    /// When a sender retransmits what is not acknowledged.
    pub ack_timeout: AckTimeout,
    /// Maximum number of packets between two acknowledgements.
    #[serde(deserialize_with = "keys::ack_packets")]
    pub ack_packets: u32,
    /// Maximum number of packets in flight of a queue pair.
    pub window_packets: u32,
    /// Whether each flow begins on a new queue pair, without what congestion control learnt before.
    pub new_queue_pairs: bool,
    /// Whether NICs take time: doorbells, reads and writes of host memory, software. Without it they act at once, and
    /// send a packet of each queue pair in turn, as in most simulators.
    pub nic_latency: bool,
    /// The rate in Gb/s at which NICs read their host's memory; `None` for that of the policy's modelled NIC.
    #[serde(deserialize_with = "keys::pcie_gbps", skip_serializing_if = "Option::is_none")]
    pub pcie_gbps: Option<f64>,
    /// IRN's timeouts.
    #[serde(skip_serializing_if = "is_default")]
    pub irn: IrnKeys,
    /// The fixed window.
    #[serde(rename = "bdp-window", skip_serializing_if = "is_default")]
    pub bdp_window: BdpWindowKeys,
    /// Constants of DCTCP.
    #[serde(skip_serializing_if = "is_default")]
    pub dctcp: DctcpKeys,
    /// Constants of DCQCN.
    #[serde(skip_serializing_if = "is_default")]
    pub dcqcn: DcqcnKeys,
    /// Constants of Swift.
    #[serde(skip_serializing_if = "is_default")]
    pub swift: SwiftKeys,
    /// Constants of TIMELY.
    #[serde(skip_serializing_if = "is_default")]
    pub timely: TimelyKeys,
}

impl Default for TransportConfig {
    /// Returns the settings of SRNIC's published simulations: packets of 1000 bytes, DCTCP.
    fn default() -> Self {
        Self {
            policy: TransportPolicy::Srnic,
            mtu_bytes: 1000,
            congestion: CongestionAlgorithm::Dctcp,
            ack_timeout: AckTimeout::Auto,
            ack_packets: 16,
            window_packets: rnic::nic::WINDOW_PACKETS_MAX,
            new_queue_pairs: false,
            nic_latency: true,
            pcie_gbps: None,
            irn: IrnKeys::default(),
            bdp_window: BdpWindowKeys::default(),
            dctcp: DctcpKeys::default(),
            dcqcn: DcqcnKeys::default(),
            swift: SwiftKeys::default(),
            timely: TimelyKeys::default(),
        }
    }
}

fn mtu<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match u32::deserialize(deserializer)? {
        bytes @ 256..=4096 => Ok(bytes),
        bytes => Err(D::Error::custom(format!("'{bytes}' is not an MTU; write bytes from 256 to 4096"))),
    }
}
