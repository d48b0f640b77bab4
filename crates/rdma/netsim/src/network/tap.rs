//! Seeing packets at the hosts.

use sim::Time;

use crate::topology::HostId;

/// What was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TapDirection {
    /// A host begins to send a packet.
    Sent,
    /// A host has got one.
    Received,
}

/// Sees every packet that a host sends or gets.
pub trait PacketTap<Header> {
    /// A packet: from whom and to whom, its label, and whether it is marked by congestion.
    fn packet(
        &mut self,
        now: Time,
        what: TapDirection,
        between: (HostId, HostId),
        label_and_mark: (u32, bool),
        header: &Header,
    );
}
