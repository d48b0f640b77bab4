//! Settings of the endpoints: loss recovery, packet size and congestion control.

use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};

/// A kind of NIC: how it recovers losses, and where it keeps its contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NicKind {
    /// SRNIC: selective repeat with bitmaps in host memory.
    #[default]
    Srnic,
    /// SRNIC with contexts in host memory and a pool of them on chip.
    SrnicPaged,
    /// IRN: selective repeat with bitmaps on chip.
    Irn,
    /// Standard RoCEv2: go-back-N.
    GoBackN,
    /// Standard RoCEv2 by a NIC that caches few contexts on chip.
    ConnectionCache,
}

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
    /// The kind of NIC.
    pub policy: NicKind,
    /// Message bytes in a full packet.
    #[serde(deserialize_with = "mtu")]
    pub mtu_bytes: u32,
    /// Congestion control.
    pub congestion: CongestionAlgorithm,
}

impl Default for TransportConfig {
    /// Returns the settings of SRNIC's published simulations: packets of 1000 bytes, DCTCP.
    fn default() -> Self {
        Self { policy: NicKind::Srnic, mtu_bytes: 1000, congestion: CongestionAlgorithm::Dctcp }
    }
}

fn mtu<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match u32::deserialize(deserializer)? {
        bytes @ 256..=4096 => Ok(bytes),
        bytes => Err(D::Error::custom(format!("'{bytes}' is not an MTU; write bytes from 256 to 4096"))),
    }
}
