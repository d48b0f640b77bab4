//! What the fast path knows about a neighbour: the header of frames to it.

use packet::ethernet::{EtherType, HEADER_BYTES, MacAddress};
use packet::vlan;

use crate::PortId;

/// What the fast path sees of an adjacency: how to begin a frame. Half a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
pub(crate) struct Adjacency {
    /// The frame's first bytes, up to the type of what it carries.
    pub(super) header: [u8; HEADER_BYTES + vlan::HEADER_BYTES],
    /// How many they are, with the type.
    pub(crate) header_bytes: u8,
    /// The port whose neighbour it is.
    pub(crate) port: PortId,
    /// The port whose queue frames go to: the same, or a VLAN's parent.
    pub(crate) queue: PortId,
    /// The neighbour's hardware address is known, and nobody wants to know when it is used.
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

    /// The header of an untagged frame with this type, when `port` sends such and nothing else is to be done.
    #[inline]
    pub(crate) fn untagged(&self, port: PortId, ethertype: EtherType) -> Option<[u8; HEADER_BYTES]> {
        let is_it = self.is_ready && self.port == port && usize::from(self.header_bytes) == HEADER_BYTES;
        let mut header = *self.header.first_chunk::<HEADER_BYTES>()?;
        header[HEADER_BYTES - 2..].copy_from_slice(&ethertype.0.to_be_bytes());
        is_it.then_some(header)
    }

    /// Writes the header to the front of `frame`, which is as long at least.
    pub(crate) fn write(&self, ethertype: EtherType, frame: &mut [u8]) {
        let type_at = usize::from(self.header_bytes) - 2;
        frame[..type_at].copy_from_slice(&self.header[..type_at]);
        frame[type_at..type_at + 2].copy_from_slice(&ethertype.0.to_be_bytes());
    }
}

/// How a port's frames begin.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortL2 {
    pub(crate) mac: MacAddress,
    pub(crate) queue: PortId,
    pub(crate) vlan: Option<u16>,
}

impl PortL2 {
    /// A frame's header to `to`.
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
