//! Observes packets at the hosts.

use sim::Time;

use crate::topology::HostId;

/// What a host did with an observed packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TapDirection {
    /// The host began to send it.
    Sent,
    /// The host received it.
    Received,
}

/// A packet observed at a host.
#[derive(Clone, Copy, Debug)]
pub struct TappedPacket<'a, Header> {
    /// Time of the observation.
    pub at: Time,
    /// Whether a host sent or received it.
    pub direction: TapDirection,
    /// The sending host.
    pub from: HostId,
    /// The receiving host.
    pub to: HostId,
    /// The label that ECMP hashes.
    pub label: u32,
    /// Whether it carries an ECN congestion mark.
    pub is_marked: bool,
    /// Its transport header.
    pub header: &'a Header,
}

/// Observes every packet that a host sends or receives.
pub trait PacketTap<Header> {
    /// Called once for each packet.
    fn observe(&mut self, packet: &TappedPacket<'_, Header>);
}
