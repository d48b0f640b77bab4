//! The protocol numbers of IP.

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
