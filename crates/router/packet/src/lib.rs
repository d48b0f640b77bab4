//! Views and builders of the protocols that a router handles on Ethernet, one file per protocol.
//!
//! A view (`ethernet::Frame`, `ipv4::Packet` and so on) borrows or owns the bytes of a packet. `new_checked` validates
//! all length fields once; after that no accessor panics, whatever the bytes contain. A view does not verify checksums
//! by itself: call `verify_checksum`.
//!
//! A builder is a plain struct, `Repr`, with `parse` and `emit`; the slow path uses it. The fast path modifies packets
//! in place through the setters of the views, none of which can invalidate a checked view.
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

/// The protocol number of an IP payload (IANA registry "Assigned Internet Protocol Numbers").
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
    /// No next header (IPv6, RFC 8200, section 4.7).
    pub const NONE: Protocol = Protocol(59);

    /// Returns whether the payload begins with a source port and a destination port.
    #[inline]
    pub fn has_ports(self) -> bool {
        // TCP, UDP, DCCP, SCTP, UDP-Lite.
        matches!(self.0, 6 | 17 | 33 | 132 | 136)
    }
}
