//! Local delivery: to the node's kernel, or to the router itself on ports without a kernel.

use std::net::IpAddr;

use packet::{Protocol, icmpv4, icmpv6, ipv4, ipv6};

use super::icmp_error::{IcmpError, header_v6, scope_of};
use super::receive::is_discovery;
use super::send::destination_of;
use super::{Context, Forwarder, Origin};
use crate::counters::DropReason;
use crate::trace::Step;
use crate::{AdjacencyId, Packet, PortId};

/// Offset of the next header field in an IPv6 header.
const NEXT_HEADER_AT: u8 = 6;

impl Forwarder {
    /// Delivers a packet to an address of this node.
    pub(super) fn deliver(&mut self, ctx: &mut Context<'_>, packet: Packet, origin: Origin, adjacency: AdjacencyId) {
        let is_for_discovery = ipv6::Packet::new_checked(ctx.pool.bytes(&packet)).is_ok_and(|view| is_discovery(&view));
        match origin {
            Origin::Port(port) if is_for_discovery => self.receive_discovery(ctx, packet, port),
            _ if self.is_for_unassigned(ctx.pool.bytes(&packet)) => {
                self.discard(ctx, packet, origin, DropReason::AddressNotInUse)
            }
            _ if adjacency == AdjacencyId::ROUTER => self.serve(ctx, packet, origin, None),
            Origin::Port(port) if self.has_kernel(port) => self.discard(ctx, packet, origin, DropReason::KernelHasIt),
            Origin::Kernel => self.discard(ctx, packet, origin, DropReason::KernelLoop),
            Origin::Port(_) | Origin::Node | Origin::Router => self.queue_for_kernel(ctx, packet, origin),
        }
    }

    /// Delivers a packet to a link-local address of the port.
    pub(super) fn deliver_link_local(&mut self, ctx: &mut Context<'_>, packet: Packet, port: PortId) {
        if self.has_kernel(port) {
            self.discard(ctx, packet, Origin::Port(port), DropReason::KernelHasIt);
        } else {
            self.serve(ctx, packet, Origin::Port(port), Some(port));
        }
    }

    fn is_for_unassigned(&self, bytes: &[u8]) -> bool {
        destination_of(bytes).is_some_and(|destination| self.is_unassigned(destination))
    }

    pub(super) fn has_kernel(&self, port: PortId) -> bool {
        self.port_config(port).is_some_and(|config| config.has_kernel)
    }

    pub(super) fn queue_for_kernel(&mut self, ctx: &mut Context<'_>, packet: Packet, origin: Origin) {
        if ctx.output.to_kernel.len() >= ctx.output.queue_packets_max {
            return self.discard(ctx, packet, origin, DropReason::KernelQueue);
        }
        self.trace_step(ctx, &packet, Step::ToKernel);
        self.counters.to_kernel.add(packet.on_wire(0));
        ctx.output.to_kernel.push_back(packet);
    }

    /// Serves a packet to the router itself: answers echo requests, and rejects everything else by ICMP errors.
    fn serve(&mut self, ctx: &mut Context<'_>, packet: Packet, origin: Origin, scope: Option<PortId>) {
        let bytes = ctx.pool.bytes(&packet);
        let request = match bytes.first().map(|first| first >> 4) {
            Some(4) => local_request_v4(bytes),
            _ => local_request_v6(bytes),
        };
        match request {
            LocalRequest::Echo if self.replies.take(ctx.now) => self.echo(ctx, &packet, scope),
            LocalRequest::Echo | LocalRequest::Ignore => {}
            LocalRequest::Reject(error) => self.send_icmp_error(ctx, &packet, origin, error),
        }
        self.discard(ctx, packet, origin, DropReason::NoService);
    }

    /// Answers a valid echo request.
    fn echo(&mut self, ctx: &mut Context<'_>, request: &Packet, scope: Option<PortId>) {
        let Some(mut reply) = ctx.pool.alloc() else { return };
        let bytes = ctx.pool.bytes(request);
        let destination = match bytes.first().map(|first| first >> 4) {
            Some(4) => {
                let header_bytes = ipv4::Packet::new_checked(bytes).map_or(0, |view| view.header_bytes());
                let (reply_bytes, identification) =
                    (request.len() - header_bytes + ipv4::HEADER_BYTES, self.identification.wrapping_add(1));
                self.identification = identification;
                ctx.pool.resize(&mut reply, reply_bytes);
                let (request, bytes) = ctx.pool.bytes_pair(request, &reply);
                echo_v4(request, bytes, identification)
            }
            _ => {
                ctx.pool.resize(&mut reply, request.len());
                let (request, bytes) = ctx.pool.bytes_pair(request, &reply);
                echo_v6(request, bytes)
            }
        };
        let Some(destination) = destination else { return ctx.pool.free(reply) };
        let scope = match destination {
            IpAddr::V6(destination) => scope.and_then(|port| scope_of(destination, port)),
            IpAddr::V4(_) => None,
        };
        self.trace_step(ctx, &reply, Step::Generated);
        self.forward(ctx, reply, Origin::Router, scope);
    }
}

/// How the router itself responds to a packet.
enum LocalRequest {
    Echo,
    Reject(IcmpError),
    Ignore,
}

fn local_request_v4(bytes: &[u8]) -> LocalRequest {
    let Ok(packet) = ipv4::Packet::new_checked(bytes) else { return LocalRequest::Ignore };
    if packet.is_fragment() {
        return LocalRequest::Ignore;
    }
    match packet.protocol() {
        Protocol::ICMP => match icmpv4::Message::parse(packet.payload()) {
            Ok(icmpv4::Message::EchoRequest { .. }) => LocalRequest::Echo,
            _ => LocalRequest::Ignore,
        },
        Protocol::UDP => LocalRequest::Reject(IcmpError::PortUnreachable),
        _ => LocalRequest::Reject(IcmpError::Protocol { pointer: 9 }),
    }
}

fn local_request_v6(bytes: &[u8]) -> LocalRequest {
    let Ok(packet) = ipv6::Packet::new_checked(bytes) else { return LocalRequest::Ignore };
    let Ok(upper) = packet.upper_layer() else { return LocalRequest::Ignore };
    if upper.fragment.is_some() {
        return LocalRequest::Ignore;
    }
    match upper.protocol {
        Protocol::ICMPV6 if upper.offset == 0 => {
            match icmpv6::Message::parse(packet.payload(), packet.source(), packet.destination()) {
                Ok(icmpv6::Message::EchoRequest { .. }) => LocalRequest::Echo,
                _ => LocalRequest::Ignore,
            }
        }
        Protocol::UDP => LocalRequest::Reject(IcmpError::PortUnreachable),
        Protocol::ICMPV6 | Protocol::NONE => LocalRequest::Ignore,
        _ if upper.offset == 0 => LocalRequest::Reject(IcmpError::Protocol { pointer: NEXT_HEADER_AT }),
        _ => LocalRequest::Ignore,
    }
}

/// Writes the reply to an echo request, and returns its destination.
fn echo_v4(request: &[u8], reply: &mut [u8], identification: u16) -> Option<IpAddr> {
    let packet = ipv4::Packet::new_checked(request).ok()?;
    let (source, destination) = (packet.destination(), packet.source());
    let Ok(icmpv4::Message::EchoRequest { identifier, sequence, data }) = icmpv4::Message::parse(packet.payload())
    else {
        return None;
    };
    let message = icmpv4::Message::EchoReply { identifier, sequence, data };
    let header = ipv4::Repr {
        source,
        destination,
        protocol: Protocol::ICMP,
        ttl: super::icmp_error::DEFAULT_TTL,
        traffic_class: packet.traffic_class(),
        identification,
        do_not_fragment: false,
        payload_bytes: message.total_bytes(),
    };
    header.emit(reply);
    message.emit(&mut reply[ipv4::HEADER_BYTES..]);
    Some(destination.into())
}

/// Writes the reply to an echo request, and returns its destination.
fn echo_v6(request: &[u8], reply: &mut [u8]) -> Option<IpAddr> {
    let packet = ipv6::Packet::new_checked(request).ok()?;
    let (source, destination) = (packet.destination(), packet.source());
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
