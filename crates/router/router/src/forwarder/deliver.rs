//! Packets for the node itself: for its kernel, or for the router where no kernel is.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use packet::{Protocol, icmpv4, icmpv6, ipv4, ipv6};

use super::receive::is_discovery;
use super::report::{Problem, header_v6, scope_of};
use super::send::destination_of;
use super::{Forwarder, Io, Origin};
use crate::counters::DropReason;
use crate::trace::Step;
use crate::{AdjacencyId, Packet, PortId};

/// Where the next header is named in an IPv6 header.
const NEXT_HEADER_AT: u8 = 6;

impl Forwarder {
    /// For an address of the node's.
    pub(super) fn deliver(&mut self, io: &mut Io<'_>, packet: Packet, origin: Origin, adjacency: AdjacencyId) {
        let is_told = ipv6::Packet::new_checked(io.pool.bytes(&packet)).is_ok_and(|view| is_discovery(&view));
        match origin {
            Origin::Port(port) if is_told => self.receive_discovery(io, packet, port),
            _ if self.is_for_unused(io.pool.bytes(&packet)) => self.discard(io, packet, origin, DropReason::Unused),
            _ if adjacency == AdjacencyId::ROUTER => self.serve(io, packet, origin, None),
            Origin::Port(port) if self.has_kernel(port) => self.discard(io, packet, origin, DropReason::KernelHasIt),
            Origin::Kernel => self.discard(io, packet, origin, DropReason::KernelLoop),
            Origin::Port(_) | Origin::Node | Origin::Router => self.queue_for_kernel(io, packet, origin),
        }
    }

    /// For a link-local address of the port's own.
    pub(super) fn deliver_link_local(&mut self, io: &mut Io<'_>, packet: Packet, port: PortId) {
        if self.has_kernel(port) {
            self.discard(io, packet, Origin::Port(port), DropReason::KernelHasIt);
        } else {
            self.serve(io, packet, Origin::Port(port), Some(port));
        }
    }

    fn is_for_unused(&self, bytes: &[u8]) -> bool {
        destination_of(bytes).is_some_and(|destination| self.is_unused(destination))
    }

    fn has_kernel(&self, port: PortId) -> bool {
        self.port_config(port).is_some_and(|config| config.has_kernel)
    }

    fn queue_for_kernel(&mut self, io: &mut Io<'_>, packet: Packet, origin: Origin) {
        if io.output.to_kernel.len() >= io.output.queue_packets_max {
            return self.discard(io, packet, origin, DropReason::KernelQueue);
        }
        self.note(io, &packet, Step::ToKernel);
        self.counters.to_kernel.add(packet.len());
        io.output.to_kernel.push_back(packet);
    }

    /// What a router without a kernel does for others: it answers echo requests, and says that it does nothing else.
    fn serve(&mut self, io: &mut Io<'_>, packet: Packet, origin: Origin, scope: Option<PortId>) {
        let bytes = io.pool.bytes(&packet);
        let asked = match bytes.first().map(|first| first >> 4) {
            Some(4) => asked_v4(bytes),
            _ => asked_v6(bytes),
        };
        match asked {
            Asked::Echo if self.answers.take(io.now) => self.echo(io, &packet, scope),
            Asked::Echo | Asked::Nothing => {}
            Asked::Other(problem) => self.report(io, &packet, origin, problem),
        }
        self.discard(io, packet, origin, DropReason::NoService);
    }

    /// Answers an intact echo request.
    fn echo(&mut self, io: &mut Io<'_>, request: &Packet, scope: Option<PortId>) {
        let Some(mut reply) = io.pool.take() else { return };
        let bytes = io.pool.bytes(request);
        let made = match bytes.first().map(|first| first >> 4) {
            Some(4) => {
                let header_bytes = ipv4::Packet::new_checked(bytes).map_or(0, |view| view.header_bytes());
                let (reply_bytes, identification) =
                    (request.len() - header_bytes + ipv4::HEADER_BYTES, self.identification.wrapping_add(1));
                self.identification = identification;
                io.pool.resize(&mut reply, reply_bytes);
                let (request, bytes) = io.pool.pair(request, &reply);
                echo_v4(request, bytes, identification)
            }
            _ => {
                io.pool.resize(&mut reply, request.len());
                let (request, bytes) = io.pool.pair(request, &reply);
                echo_v6(request, bytes)
            }
        };
        let Some(to) = made else { return io.pool.free(reply) };
        let scope = match to {
            IpAddr::V6(to) => scope.and_then(|port| scope_of(to, port)),
            IpAddr::V4(_) => None,
        };
        self.note(io, &reply, Step::Made);
        self.forward(io, reply, Origin::Router, scope);
    }
}

/// What a packet wants of the router.
enum Asked {
    Echo,
    Other(Problem),
    Nothing,
}

fn asked_v4(bytes: &[u8]) -> Asked {
    let Ok(packet) = ipv4::Packet::new_checked(bytes) else { return Asked::Nothing };
    if packet.is_fragment() {
        return Asked::Nothing;
    }
    match packet.protocol() {
        Protocol::ICMP => match icmpv4::Message::parse(packet.payload()) {
            Ok(icmpv4::Message::EchoRequest { .. }) => Asked::Echo,
            _ => Asked::Nothing,
        },
        Protocol::UDP => Asked::Other(Problem::PortUnreachable),
        _ => Asked::Other(Problem::Protocol { pointer: 9 }),
    }
}

fn asked_v6(bytes: &[u8]) -> Asked {
    let Ok(packet) = ipv6::Packet::new_checked(bytes) else { return Asked::Nothing };
    let Ok(upper) = packet.upper_layer() else { return Asked::Nothing };
    if upper.fragment.is_some() {
        return Asked::Nothing;
    }
    match upper.protocol {
        Protocol::ICMPV6 if upper.offset == 0 => {
            match icmpv6::Message::parse(packet.payload(), packet.source(), packet.destination()) {
                Ok(icmpv6::Message::EchoRequest { .. }) => Asked::Echo,
                _ => Asked::Nothing,
            }
        }
        Protocol::UDP => Asked::Other(Problem::PortUnreachable),
        Protocol::ICMPV6 | Protocol::NONE => Asked::Nothing,
        _ if upper.offset == 0 => Asked::Other(Problem::Protocol { pointer: NEXT_HEADER_AT }),
        _ => Asked::Nothing,
    }
}

/// Writes the answer to an echo request; says to whom.
fn echo_v4(request: &[u8], reply: &mut [u8], identification: u16) -> Option<IpAddr> {
    let packet = ipv4::Packet::new_checked(request).ok()?;
    let (source, destination): (Ipv4Addr, Ipv4Addr) = (packet.destination(), packet.source());
    let Ok(icmpv4::Message::EchoRequest { identifier: of, sequence, data }) = icmpv4::Message::parse(packet.payload())
    else {
        return None;
    };
    let message = icmpv4::Message::EchoReply { identifier: of, sequence, data };
    let header = ipv4::Repr {
        source,
        destination,
        protocol: Protocol::ICMP,
        ttl: super::report::HOPS,
        traffic_class: packet.traffic_class(),
        identification,
        do_not_fragment: false,
        payload_bytes: message.total_bytes(),
    };
    header.emit(reply);
    message.emit(&mut reply[ipv4::HEADER_BYTES..]);
    Some(destination.into())
}

fn echo_v6(request: &[u8], reply: &mut [u8]) -> Option<IpAddr> {
    let packet = ipv6::Packet::new_checked(request).ok()?;
    let (source, destination): (Ipv6Addr, Ipv6Addr) = (packet.destination(), packet.source());
    let Ok(icmpv6::Message::EchoRequest { identifier, sequence, data }) =
        icmpv6::Message::parse(packet.payload(), destination, source)
    else {
        return None;
    };
    let message = icmpv6::Message::EchoReply { identifier, sequence, data };
    header_v6(source, destination, Protocol::ICMPV6, message.total_bytes()).emit(reply);
    message.emit(&mut reply[ipv6::HEADER_BYTES..], source, destination);
    Some(destination.into())
}
