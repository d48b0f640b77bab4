//! Adjacencies: the Ethernet headers of frames to neighbours.

use packet::ethernet::{EtherType, HEADER_BYTES, MacAddress};
use packet::vlan;

use crate::PortId;

/// What the fast path needs of a neighbour: the Ethernet header of frames to it. Half a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
pub(crate) struct Adjacency {
    /// The header, except for the EtherType of the payload.
    pub(super) header: [u8; HEADER_BYTES + vlan::HEADER_BYTES],
    /// Length of the header in bytes, including the EtherType.
    pub(crate) header_bytes: u8,
    /// Port of the neighbour.
    pub(crate) port: PortId,
    /// Port with the transmit queue: the same, or the parent of a VLAN.
    pub(crate) queue: PortId,
    /// The MAC address is known, and no state depends on the next use of the neighbour.
    pub(super) is_ready: bool,
}

const _: () = assert!(size_of::<Adjacency>() == 32, "two to a cache line");

impl Adjacency {
    pub(super) const INVALID: Adjacency = Adjacency {
        header: [0; HEADER_BYTES + vlan::HEADER_BYTES],
        header_bytes: HEADER_BYTES as u8,
        port: PortId::NOWHERE,
        queue: PortId::NOWHERE,
        is_ready: false,
    };

    /// Returns the header of an untagged frame with this EtherType, if the adjacency is ready and `port` is untagged.
    #[inline]
    pub(crate) fn untagged(&self, port: PortId, ethertype: EtherType) -> Option<[u8; HEADER_BYTES]> {
        let is_it = self.is_ready && self.port == port && usize::from(self.header_bytes) == HEADER_BYTES;
        let mut header = *self.header.first_chunk::<HEADER_BYTES>()?;
        header[HEADER_BYTES - 2..].copy_from_slice(&ethertype.0.to_be_bytes());
        is_it.then_some(header)
    }

    /// Writes the header to the front of `frame`. Panics if `frame` is shorter.
    pub(crate) fn write(&self, ethertype: EtherType, frame: &mut [u8]) {
        let type_at = usize::from(self.header_bytes) - 2;
        frame[..type_at].copy_from_slice(&self.header[..type_at]);
        frame[type_at..type_at + 2].copy_from_slice(&ethertype.0.to_be_bytes());
    }
}

/// The layer-2 attributes of a port.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortL2 {
    pub(crate) mac: MacAddress,
    pub(crate) queue: PortId,
    pub(crate) vlan: Option<u16>,
}

impl PortL2 {
    /// Returns the adjacency for frames to `to`.
    pub(crate) fn adjacency(&self, port: PortId, to: MacAddress) -> Adjacency {
        let mut header = [0; HEADER_BYTES + vlan::HEADER_BYTES];
        header[..6].copy_from_slice(&to.0);
        header[6..12].copy_from_slice(&self.mac.0);
        let mut header_bytes = HEADER_BYTES;
        if let Some(id) = self.vlan {
            header[12..14].copy_from_slice(&EtherType::VLAN.0.to_be_bytes());
            let tag = vlan::Tag { priority: 0, drop_eligible: false, id };
            header[14..16].copy_from_slice(&tag.bits().to_be_bytes());
            header_bytes += vlan::HEADER_BYTES;
        }
        Adjacency { header, header_bytes: header_bytes as u8, port, queue: self.queue, is_ready: true }
    }
}
