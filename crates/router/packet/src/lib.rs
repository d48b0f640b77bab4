//! Views and builders of what a router meets on Ethernet.
//!
//! One file a protocol. A view (`ethernet::Frame`, `ipv4::Packet` and so on) is made by `new_checked`, which reads the
//! lengths once and refuses what does not hold together; after that no accessor panics, whatever the bytes say. A
//! view never checks a checksum by itself: `verify_checksum` does.
//!
//! Builders are plain structs, `Repr`, with `parse` and `emit`: what the slow path needs. The fast path changes
//! packets in place by the views' setters, none of which can make a checked view wrong.
#![forbid(unsafe_code)]

pub mod arp;
pub mod checksum;
mod error;
pub mod ethernet;
pub mod flow;
pub mod icmpv4;
pub mod icmpv6;
pub mod ipv4;
pub mod ipv6;
pub mod mld;
pub mod ndisc;
mod octets;
pub mod tcp;
pub mod udp;
pub mod vlan;

pub use error::Error;

/// The protocol of an IP packet's payload, by its assigned number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Protocol(pub u8);

impl Protocol {
    /// ICMP for IPv4.
    pub const ICMP: Protocol = Protocol(1);
    /// TCP.
    pub const TCP: Protocol = Protocol(6);
    /// UDP.
    pub const UDP: Protocol = Protocol(17);
    /// ICMP for IPv6.
    pub const ICMPV6: Protocol = Protocol(58);
    /// IPv6: nothing follows.
    pub const NONE: Protocol = Protocol(59);

    /// Whether the payload begins with a source and a destination port.
    #[inline]
    pub fn has_ports(self) -> bool {
        // TCP, UDP, DCCP, SCTP, UDP-Lite.
        matches!(self.0, 6 | 17 | 33 | 132 | 136)
    }
}
