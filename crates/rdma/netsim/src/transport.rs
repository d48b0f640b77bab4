//! Settings of the endpoints: loss recovery, packet size and congestion control.

use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};

/// How endpoints find what is lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TransportPolicy {
    /// Selective repeat whose bitmaps lie in the host's memory.
    #[default]
    Srnic,
    /// The same, with contexts in the host's memory and a pool of them on chip.
    SrnicPaged,
    /// Selective repeat with bitmaps on chip.
    Irn,
    /// Standard RoCEv2.
    GoBackN,
    /// Standard RoCEv2 by a NIC that keeps few contexts on chip.
    ConnectionCache,
}

/// How senders slow down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CongestionAlgorithm {
    /// Not at all.
    None,
    /// A window of bandwidth times delay.
    BdpWindow,
    /// By the share of marked packets.
    #[default]
    Dctcp,
    /// By notifications, with a rate.
    Dcqcn,
    /// By the round trip.
    Swift,
}

/// What endpoints do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TransportConfig {
    /// How they find what is lost.
    pub policy: TransportPolicy,
    /// Bytes of message in a packet.
    #[serde(deserialize_with = "mtu")]
    pub mtu_bytes: u32,
    /// How senders slow down.
    pub congestion: CongestionAlgorithm,
}

impl Default for TransportConfig {
    /// As in the published simulations: packets of 1000 bytes, DCTCP.
    fn default() -> Self {
        Self { policy: TransportPolicy::Srnic, mtu_bytes: 1000, congestion: CongestionAlgorithm::Dctcp }
    }
}

fn mtu<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match u32::deserialize(deserializer)? {
        bytes @ 256..=4096 => Ok(bytes),
        bytes => Err(D::Error::custom(format!("'{bytes}' is no MTU; write bytes from 256 to 4096"))),
    }
}
