//! The EtherTypes of frames and VLAN tags.

/// The EtherType: the protocol of a frame's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EtherType(pub u16);

impl EtherType {
    /// IPv4.
    pub const IPV4: EtherType = EtherType(0x0800);
    /// ARP.
    pub const ARP: EtherType = EtherType(0x0806);
    /// A VLAN tag (IEEE 802.1Q).
    pub const VLAN: EtherType = EtherType(0x8100);
    /// A service provider's VLAN tag (IEEE 802.1ad).
    pub const SERVICE_VLAN: EtherType = EtherType(0x88a8);
    /// IPv6.
    pub const IPV6: EtherType = EtherType(0x86dd);
}
