//! The slow path: validated packets are looked up one at a time, then forwarded, fragmented, delivered or answered.

use std::net::IpAddr;

use packet::{ipv4, ipv6};

use super::icmp_error::IcmpError;
use super::stages::{flow_hash_v4, flow_hash_v6};
use super::{Context, Forwarder, Origin};
use crate::counters::DropReason;
use crate::trace::Step;
use crate::{Hop, NODES_MAX, Packet, PortId};

/// The header fields that the slow path needs.
#[derive(Clone, Copy)]
pub(super) struct Header {
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    /// Time to live, or hop limit.
    pub(super) ttl: u8,
    pub(super) do_not_fragment: bool,
}

impl Header {
    /// Parses the header of a validated IP packet; returns `None` for anything else.
    pub(super) fn of(bytes: &[u8]) -> Option<Header> {
        match bytes.first()? >> 4 {
            4 => {
                let packet = ipv4::Packet::new_checked(bytes).ok()?;
                Some(Header {
                    source: packet.source().into(),
                    destination: packet.destination().into(),
                    ttl: packet.ttl(),
                    do_not_fragment: packet.do_not_fragment(),
                })
            }
            6 => {
                let packet = ipv6::Packet::new_checked(bytes).ok()?;
                Some(Header {
                    source: packet.source().into(),
                    destination: packet.destination().into(),
                    ttl: packet.hop_limit(),
                    do_not_fragment: true,
                })
            }
            _ => None,
        }
    }

    /// Returns whether source or destination is an IPv4 link-local address. Routers neither forward such packets nor
    /// send ICMP errors about them (RFC 3927, section 7).
    fn is_link_local_v4(&self) -> bool {
        let is_link_local = |address| matches!(address, IpAddr::V4(address) if address.is_link_local());
        is_link_local(self.source) || is_link_local(self.destination)
    }
}

impl Forwarder {
    /// Forwards a validated packet. A packet generated here for a link-local destination leaves through port `scope`.
    pub(super) fn forward(&mut self, ctx: &mut Context<'_>, packet: Packet, origin: Origin, scope: Option<PortId>) {
        let Some(header) = Header::of(ctx.pool.bytes(&packet)) else {
            return self.discard(ctx, packet, origin, DropReason::Version);
        };
        let found = self.lookup_hop(ctx, &packet, &header, scope);
        let is_local = found.is_some_and(|(hop, _)| (hop.node, hop.port) == (self.config.node, PortId::KERNEL));
        if matches!(origin, Origin::Port(_)) && !is_local && header.is_link_local_v4() {
            return self.discard(ctx, packet, origin, DropReason::LinkLocal);
        }
        if let Origin::Port(port) = origin
            && self.is_diverted(port, found.map(|(hop, _)| hop).filter(|_| is_local))
        {
            return self.divert(ctx, packet, port);
        }
        let Some((hop, flow)) = found else {
            self.send_icmp_error(ctx, &packet, origin, IcmpError::NoRoute);
            return self.discard(ctx, packet, origin, DropReason::NoRoute);
        };
        match hop.port {
            PortId::NOWHERE => self.drop_by_route(ctx, packet, origin, hop),
            PortId::KERNEL if hop.node == self.config.node => self.deliver(ctx, packet, origin, hop.adjacency),
            PortId::KERNEL => self.dispatch(ctx, packet, hop, flow),
            _ => self.forward_out(ctx, packet, origin, (hop, flow), &header),
        }
    }

    /// Looks a packet up, and returns the hop and the flow hash.
    pub(super) fn lookup_hop(
        &mut self,
        ctx: &mut Context<'_>,
        packet: &Packet,
        header: &Header,
        scope: Option<PortId>,
    ) -> Option<(Hop, u32)> {
        let bytes = ctx.pool.bytes(packet);
        let flow = if header.destination.is_ipv4() { flow_hash_v4(bytes) } else { flow_hash_v6(bytes) };
        if let (IpAddr::V6(destination), Some(port)) = (header.destination, scope)
            && destination.is_unicast_link_local()
        {
            return Some((Hop::on_link(self.config.node, port), flow));
        }
        let is_traced = self.trace.is_some();
        let (hop, hops) = self.tables.read(|tables| {
            let group = match header.destination {
                IpAddr::V4(address) => tables.v4.lookup(address),
                IpAddr::V6(address) => tables.v6.lookup(address),
            }?;
            let hops = if is_traced { tables.groups.hops(group).len() } else { 0 };
            Some((tables.groups.select(group, flow)?, hops as u16))
        })?;
        self.trace_step(ctx, packet, Step::LookedUp { hop, hops });
        Some((hop, flow))
    }

    /// Drops a packet whose route has no next hop: blackhole, prohibited, unreachable or no route.
    fn drop_by_route(&mut self, ctx: &mut Context<'_>, packet: Packet, origin: Origin, hop: Hop) {
        let reason = match hop {
            Hop::BLACKHOLE => DropReason::Blackhole,
            Hop::PROHIBITED => {
                self.send_icmp_error(ctx, &packet, origin, IcmpError::Prohibited);
                DropReason::Prohibited
            }
            Hop::NO_ROUTE => {
                self.send_icmp_error(ctx, &packet, origin, IcmpError::NoRoute);
                DropReason::NoRoute
            }
            _ => {
                self.send_icmp_error(ctx, &packet, origin, IcmpError::HostUnreachable);
                DropReason::Unreachable
            }
        };
        self.discard(ctx, packet, origin, reason);
    }

    /// Forwards a packet to a port of this node or another one.
    fn forward_out(
        &mut self,
        ctx: &mut Context<'_>,
        packet: Packet,
        origin: Origin,
        (hop, flow): (Hop, u32),
        header: &Header,
    ) {
        let is_from_outside = matches!(origin, Origin::Port(_));
        if let IpAddr::V6(source) = header.source
            && source.is_unicast_link_local()
            && origin != Origin::Router
        {
            self.send_icmp_error(ctx, &packet, origin, IcmpError::BeyondScope);
            return self.discard(ctx, packet, origin, DropReason::LinkLocal);
        }
        if is_from_outside && header.ttl <= 1 || header.ttl == 0 {
            self.send_icmp_error(ctx, &packet, origin, IcmpError::TimeExceeded);
            return self.discard(ctx, packet, origin, DropReason::TimeExceeded);
        }
        let mtu_bytes = usize::from(self.mtus[usize::from(hop.node.0 % NODES_MAX)][usize::from(hop.port.0)]);
        if mtu_bytes == 0 {
            let is_node_up = self.nodes_up[usize::from(hop.node.0 % NODES_MAX)];
            self.send_icmp_error(ctx, &packet, origin, IcmpError::HostUnreachable);
            let reason = if is_node_up { DropReason::EgressDown } else { DropReason::NodeDown };
            return self.discard(ctx, packet, origin, reason);
        }
        if packet.ip_bytes_max() > mtu_bytes && header.do_not_fragment {
            self.send_icmp_error(ctx, &packet, origin, IcmpError::TooBig { mtu_bytes: mtu_bytes as u16 });
            return self.discard(ctx, packet, origin, DropReason::TooBig);
        }
        if is_from_outside {
            decrement_ttl(ctx.pool.bytes_mut(&packet));
            if hop.node == self.config.node && origin == Origin::Port(hop.port) {
                self.redirect(ctx, &packet, hop.port, hop);
            }
        }
        if packet.ip_bytes_max() > mtu_bytes {
            self.fragment(ctx, packet, origin, (hop, flow), mtu_bytes);
        } else {
            self.dispatch(ctx, packet, hop, flow);
        }
    }
}

/// Decrements the TTL or hop limit of a validated packet, which must exceed 1.
fn decrement_ttl(bytes: &mut [u8]) {
    if bytes[0] >> 4 == 4 {
        if let Ok(mut packet) = ipv4::Packet::new_checked(bytes) {
            packet.decrement_ttl();
        }
    } else if let Ok(mut packet) = ipv6::Packet::new_checked(bytes) {
        packet.decrement_hop_limit();
    }
}
