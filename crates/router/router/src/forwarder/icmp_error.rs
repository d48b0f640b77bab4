//! ICMP errors to the senders of dropped packets (RFC 1812, section 4.3; RFC 4443, section 2.4).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use packet::{Protocol, icmpv4, icmpv6, ipv4, ipv6};

use super::{Context, Forwarder, Origin};
use crate::local_addresses::{is_martian_source_v4, is_martian_v6};
use crate::trace::Step;
use crate::{Packet, PortId};

/// An error to report, independent of the IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IcmpError {
    NoRoute,
    HostUnreachable,
    Prohibited,
    TimeExceeded,
    TooBig {
        mtu_bytes: u16,
    },
    SourceRouteFailed,
    Parameter {
        pointer: u8,
    },
    BeyondScope,
    PortUnreachable,
    /// Unknown protocol; `pointer` is the offset of the field that names it.
    Protocol {
        pointer: u8,
    },
}

/// Source of errors from a router without an IPv4 address (RFC 7600, section 4.8).
const DUMMY_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 8);

/// Source of errors to the node's own kernel, which rejects messages from its own addresses.
const DUMMY_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// Maximum length of an IPv4 error in bytes: what every host can reassemble (RFC 1812, section 4.3.2.3).
pub(super) const ERROR_BYTES_MAX_V4: usize = 576;

/// TTL of packets generated here.
pub(super) const DEFAULT_TTL: u8 = 64;

/// Precedence *internetwork control*, used for errors (RFC 1812, section 4.3.2.5).
const TRAFFIC_CLASS_CONTROL: u8 = 0xc0;

impl IcmpError {
    fn message_v4(self, original: &[u8]) -> Option<icmpv4::Message<'_>> {
        let unreachable =
            |code: icmpv4::Unreachable, mtu| Some(icmpv4::Message::Unreachable { code: code as u8, mtu, original });
        match self {
            IcmpError::NoRoute => unreachable(icmpv4::Unreachable::Network, 0),
            IcmpError::HostUnreachable => unreachable(icmpv4::Unreachable::Host, 0),
            IcmpError::Prohibited => unreachable(icmpv4::Unreachable::Prohibited, 0),
            IcmpError::TooBig { mtu_bytes } => unreachable(icmpv4::Unreachable::FragmentationNeeded, mtu_bytes),
            IcmpError::SourceRouteFailed => unreachable(icmpv4::Unreachable::SourceRouteFailed, 0),
            IcmpError::PortUnreachable => unreachable(icmpv4::Unreachable::Port, 0),
            IcmpError::Protocol { .. } => unreachable(icmpv4::Unreachable::Protocol, 0),
            IcmpError::TimeExceeded => Some(icmpv4::Message::TimeExceeded { code: 0, original }),
            IcmpError::Parameter { pointer } => Some(icmpv4::Message::ParameterProblem { pointer, original }),
            IcmpError::BeyondScope => None,
        }
    }

    fn message_v6(self, original: &[u8]) -> Option<icmpv6::Message<'_>> {
        let unreachable = |code: icmpv6::Unreachable| Some(icmpv6::Message::Unreachable { code: code as u8, original });
        match self {
            IcmpError::NoRoute => unreachable(icmpv6::Unreachable::NoRoute),
            IcmpError::HostUnreachable => unreachable(icmpv6::Unreachable::Address),
            IcmpError::Prohibited => unreachable(icmpv6::Unreachable::Prohibited),
            IcmpError::BeyondScope => unreachable(icmpv6::Unreachable::BeyondScope),
            IcmpError::PortUnreachable => unreachable(icmpv6::Unreachable::Port),
            IcmpError::TooBig { mtu_bytes } => {
                Some(icmpv6::Message::PacketTooBig { mtu: u32::from(mtu_bytes), original })
            }
            IcmpError::TimeExceeded => Some(icmpv6::Message::TimeExceeded { code: 0, original }),
            IcmpError::Parameter { pointer } => {
                Some(icmpv6::Message::ParameterProblem { code: 0, pointer: u32::from(pointer), original })
            }
            IcmpError::Protocol { pointer } => {
                Some(icmpv6::Message::ParameterProblem { code: 1, pointer: u32::from(pointer), original })
            }
            IcmpError::SourceRouteFailed => None,
        }
    }
}

impl Forwarder {
    /// Sends an ICMP error about a packet to its sender, if errors may be sent about it and the rate limit allows. The
    /// caller keeps the packet.
    pub(super) fn send_icmp_error(&mut self, ctx: &mut Context<'_>, packet: &Packet, origin: Origin, error: IcmpError) {
        let bytes = ctx.pool.bytes(packet);
        let sender = match bytes.first().map(|first| first >> 4) {
            Some(4) => icmp_error_destination_v4(bytes),
            Some(6) => icmp_error_destination_v6(bytes),
            _ => None,
        };
        let may_report = |sender: &IpAddr| match origin {
            Origin::Kernel => true,
            Origin::Router => false,
            Origin::Port(_) | Origin::Node => !self.local.has(*sender),
        };
        let Some(sender) = sender.filter(may_report) else { return };
        let scope = match origin {
            Origin::Port(port) => Some(port),
            _ => None,
        };
        if !self.icmp_errors.take(ctx.now) {
            self.counters.icmp_errors_suppressed += 1;
            return;
        }
        let Some(mut message) = ctx.pool.alloc() else { return };
        let kind_and_code = match sender {
            IpAddr::V4(sender) => self.build_v4(ctx, packet, &mut message, (sender, origin), error),
            IpAddr::V6(sender) => self.build_v6(ctx, packet, &mut message, (sender, origin), error),
        };
        let Some((kind, code)) = kind_and_code else { return ctx.pool.free(message) };
        self.trace_step(ctx, packet, Step::IcmpErrorSent(kind, code));
        self.counters.icmp_errors_sent += 1;
        self.trace_step(ctx, &message, Step::Generated);
        self.forward(ctx, message, Origin::Router, scope);
    }

    /// Builds the error packet, and returns its ICMP type and code.
    fn build_v4(
        &mut self,
        ctx: &mut Context<'_>,
        packet: &Packet,
        error_packet: &mut Packet,
        (sender, origin): (Ipv4Addr, Origin),
        error: IcmpError,
    ) -> Option<(u8, u8)> {
        const ROOM: usize = ERROR_BYTES_MAX_V4 - ipv4::HEADER_BYTES - icmpv4::HEADER_BYTES;
        let original_bytes = packet.len().min(ROOM);
        let payload_bytes = icmpv4::HEADER_BYTES + original_bytes;
        ctx.pool.resize(error_packet, (ipv4::HEADER_BYTES + payload_bytes).min(ctx.pool.bytes_max()));
        self.identification = self.identification.wrapping_add(1);
        let header = self.header_v4(self.source_v4(origin), sender, payload_bytes, TRAFFIC_CLASS_CONTROL);
        let (original, bytes) = ctx.pool.bytes_pair(packet, error_packet);
        let message = error.message_v4(&original[..original_bytes])?;
        header.emit(bytes);
        let (_, payload) = bytes.split_at_mut(ipv4::HEADER_BYTES);
        message.emit(payload);
        Some((payload[0], payload[1]))
    }

    fn build_v6(
        &mut self,
        ctx: &mut Context<'_>,
        packet: &Packet,
        error_packet: &mut Packet,
        (sender, origin): (Ipv6Addr, Origin),
        error: IcmpError,
    ) -> Option<(u8, u8)> {
        const ROOM: usize = ipv6::MTU_MIN - ipv6::HEADER_BYTES - icmpv6::HEADER_BYTES;
        let source = self.source_v6(origin, sender)?;
        let original_bytes = packet.len().min(ROOM);
        let payload_bytes = icmpv6::HEADER_BYTES + original_bytes;
        ctx.pool.resize(error_packet, (ipv6::HEADER_BYTES + payload_bytes).min(ctx.pool.bytes_max()));
        let (original, bytes) = ctx.pool.bytes_pair(packet, error_packet);
        let message = error.message_v6(&original[..original_bytes])?;
        header_v6(source, sender, Protocol::ICMPV6, payload_bytes).emit(bytes);
        let (_, payload) = bytes.split_at_mut(ipv6::HEADER_BYTES);
        message.emit(payload, source, sender);
        Some((payload[0], payload[1]))
    }

    pub(super) fn header_v4(
        &self,
        source: Ipv4Addr,
        destination: Ipv4Addr,
        payload_bytes: usize,
        traffic_class: u8,
    ) -> ipv4::Repr {
        ipv4::Repr {
            source,
            destination,
            protocol: Protocol::ICMP,
            ttl: DEFAULT_TTL,
            traffic_class,
            identification: self.identification,
            do_not_fragment: false,
            payload_bytes,
        }
    }

    /// Returns the source address of an error: one of the ingress port, else of any port.
    pub(super) fn source_v4(&self, origin: Origin) -> Ipv4Addr {
        let of = |network: &IpNet| match network.addr() {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        };
        let port = match origin {
            Origin::Port(port) => self.addresses(port).iter().find_map(of),
            Origin::Kernel => return DUMMY_V4,
            Origin::Node | Origin::Router => None,
        };
        port.or_else(|| self.all_addresses().find_map(of)).unwrap_or(DUMMY_V4)
    }

    /// Returns the source address of an error to `to`, or `None` if no address has the required scope.
    fn source_v6(&self, origin: Origin, to: Ipv6Addr) -> Option<Ipv6Addr> {
        let is_link_local = to.is_unicast_link_local();
        let of = |network: &IpNet| match network.addr() {
            IpAddr::V6(address) if address.is_unicast_link_local() == is_link_local => Some(address),
            _ => None,
        };
        let port = match origin {
            Origin::Port(port) => self.addresses(port).iter().find_map(of),
            Origin::Kernel => return Some(DUMMY_V6),
            Origin::Node | Origin::Router => None,
        };
        port.or_else(|| self.all_addresses().filter(|_| !is_link_local).find_map(of))
    }

    fn all_addresses(&self) -> impl Iterator<Item = &IpNet> {
        self.ports.iter().flat_map(|port| &port.addresses)
    }
}

/// Returns the header of a packet generated here.
pub(super) fn header_v6(
    source: Ipv6Addr,
    destination: Ipv6Addr,
    next_header: Protocol,
    payload_bytes: usize,
) -> ipv6::Repr {
    ipv6::Repr {
        source,
        destination,
        next_header,
        hop_limit: DEFAULT_TTL,
        traffic_class: 0,
        flow_label: 0,
        payload_bytes,
    }
}

/// Returns the destination of an ICMP error about an IPv4 packet. Returns `None` for ICMP errors, multicast and
/// broadcast packets, martian sources, and fragments other than the first (RFC 1812, section 4.3.2.7).
pub(super) fn icmp_error_destination_v4(bytes: &[u8]) -> Option<IpAddr> {
    let packet = ipv4::Packet::new_checked(bytes).ok()?;
    let (source, destination) = (packet.source(), packet.destination());
    let is_error = packet.protocol() == Protocol::ICMP
        && icmpv4::Packet::new_checked(packet.payload()).map_or(true, |message| message.is_error());
    let may_send = !is_error
        && packet.fragment_offset_bytes() == 0
        && !destination.is_multicast()
        && !destination.is_broadcast()
        && !is_martian_source_v4(source);
    may_send.then_some(source.into())
}

/// Returns the destination of an ICMP error about an IPv6 packet, or `None` if no error may be sent (RFC 4443, section
/// 2.4 e).
pub(super) fn icmp_error_destination_v6(bytes: &[u8]) -> Option<IpAddr> {
    let packet = ipv6::Packet::new_checked(bytes).ok()?;
    let upper = packet.upper_layer().ok()?;
    let (source, destination) = (packet.source(), packet.destination());
    let is_later = upper.fragment.is_some_and(|fragment| fragment.offset_bytes > 0);
    let is_error = upper.protocol == Protocol::ICMPV6
        && icmpv6::Packet::new_checked(&packet.payload()[upper.offset..]).map_or(true, |message| message.is_error());
    let may_send =
        !is_later && !is_error && !destination.is_multicast() && !source.is_multicast() && !is_martian_v6(source);
    may_send.then_some(source.into())
}

/// Returns the egress port of a packet to a link-local address, which the address alone does not determine.
pub(super) fn scope_of(address: Ipv6Addr, port: PortId) -> Option<PortId> {
    address.is_unicast_link_local().then_some(port)
}
