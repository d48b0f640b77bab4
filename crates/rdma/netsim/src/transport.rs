//! Settings of the endpoints: loss recovery, packet size and congestion control.

mod ack_timeout;

use rnic::nic::TransportPolicy;
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};

pub use ack_timeout::{AckTimeout, AckTimeoutError};

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
}

/// Settings of the endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
}

impl Default for TransportConfig {
    /// Returns the settings of SRNIC's published simulations: packets of 1000 bytes, DCTCP.
    fn default() -> Self {
        Self {
            policy: TransportPolicy::Srnic,
            mtu_bytes: 1000,
            congestion: CongestionAlgorithm::Dctcp,
            ack_timeout: AckTimeout::Auto,
        }
    }
}

fn mtu<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match u32::deserialize(deserializer)? {
        bytes @ 256..=4096 => Ok(bytes),
        bytes => Err(D::Error::custom(format!("'{bytes}' is not an MTU; write bytes from 256 to 4096"))),
    }
}
