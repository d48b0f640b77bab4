//! ICMP redirects: tell a host whose packet leaves through the network from which it came of the better first hop (RFC
//! 1812, section 5.2.7.2; RFC 4861, section 8.2). The packet itself is forwarded.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use packet::{Protocol, icmpv4, ipv4, ipv6, ndisc};

use super::icmp_error::{ERROR_BYTES_MAX_V4, header_v6, icmp_error_destination_v4, icmp_error_destination_v6};
use super::{Context, Forwarder, Origin};
use crate::trace::Step;
use crate::{AdjacencyId, Hop, Packet, PortId};

/// Code *redirect for the host* (RFC 1812, section 5.2.7.2, forbids redirects for networks).
const CODE_HOST: u8 = 1;

impl Forwarder {
    /// Sends a redirect about a packet that leaves through its ingress port, if the sender has a better first hop.
    #[cold]
    pub(super) fn redirect(&mut self, ctx: &mut Context<'_>, packet: &Packet, port: PortId, hop: Hop) {
        if !self.config.redirects {
            return;
        }
        let bytes = ctx.pool.bytes(packet);
        match bytes.first().map(|first| first >> 4) {
            Some(4) => self.redirect_v4(ctx, packet, port, hop),
            Some(6) => self.redirect_v6(ctx, packet, port, hop),
            _ => {}
        }
    }

    /// Returns the address of the next hop: the destination itself, or a router.
    fn next_hop_address(&self, hop: Hop, destination: IpAddr) -> Option<IpAddr> {
        match hop.adjacency {
            AdjacencyId::ON_LINK => Some(destination),
            adjacency => self.neighbours.address_of(adjacency),
        }
    }

    fn redirect_v4(&mut self, ctx: &mut Context<'_>, packet: &Packet, port: PortId, hop: Hop) {
        let bytes = ctx.pool.bytes(packet);
        let Ok(view) = ipv4::Packet::new_checked(bytes) else { return };
        let (source, destination) = (view.source(), view.destination());
        let Some(IpAddr::V4(next)) = self.next_hop_address(hop, destination.into()) else { return };
        let Some(own) = self.address_on_network_of(port, source.into(), next.into()) else { return };
        if icmp_error_destination_v4(bytes).is_none() || source == next || !self.redirects.take(ctx.now) {
            return;
        }
        let IpAddr::V4(own) = own else { return };
        let Some(mut message) = ctx.pool.alloc() else { return };
        self.build_redirect_v4(ctx, packet, &mut message, (own, source, next));
        self.counters.redirects_sent += 1;
        self.trace_step(ctx, &message, Step::Generated);
        self.forward(ctx, message, Origin::Router, None);
    }

    fn build_redirect_v4(
        &mut self,
        ctx: &mut Context<'_>,
        packet: &Packet,
        redirect_packet: &mut Packet,
        (own, source, next): (Ipv4Addr, Ipv4Addr, Ipv4Addr),
    ) {
        let room = ERROR_BYTES_MAX_V4 - ipv4::HEADER_BYTES - icmpv4::HEADER_BYTES;
        let original_bytes = packet.len().min(room);
        let payload_bytes = icmpv4::HEADER_BYTES + original_bytes;
        ctx.pool.resize(redirect_packet, ipv4::HEADER_BYTES + payload_bytes);
        self.identification = self.identification.wrapping_add(1);
        let header = self.header_v4(own, source, payload_bytes, 0);
        let (original, bytes) = ctx.pool.bytes_pair(packet, redirect_packet);
        header.emit(bytes);
        let original = &original[..original_bytes];
        let message = icmpv4::Message::Redirect { code: CODE_HOST, gateway: next.octets(), original };
        message.emit(&mut bytes[ipv4::HEADER_BYTES..]);
    }

    /// Sends an IPv6 redirect, whose target must be a link-local address or the destination (RFC 4861, section 8.2).
    fn redirect_v6(&mut self, ctx: &mut Context<'_>, packet: &Packet, port: PortId, hop: Hop) {
        let bytes = ctx.pool.bytes(packet);
        let Ok(view) = ipv6::Packet::new_checked(bytes) else { return };
        let (source, destination) = (view.source(), view.destination());
        let Some(IpAddr::V6(target)) = self.next_hop_address(hop, destination.into()) else { return };
        let is_valid_target = target == destination || target.is_unicast_link_local();
        let is_on_link = self.is_on_network(port, source.into());
        let (true, true, Some(own)) = (is_valid_target, is_on_link, self.link_local_address(port)) else { return };
        if icmp_error_destination_v6(bytes).is_none() || source == target || !self.redirects.take(ctx.now) {
            return;
        }
        let target_mac = self.neighbours.find(port, target.into()).and_then(|adjacency| self.neighbours.mac(adjacency));
        let Some(mut message) = ctx.pool.alloc() else { return };
        let redirect = ndisc::Redirect { target, destination, target_mac, original: &[] };
        build_redirect_v6(ctx, packet, &mut message, (own, source), redirect);
        self.counters.redirects_sent += 1;
        self.trace_step(ctx, &message, Step::Generated);
        self.forward(ctx, message, Origin::Router, None);
    }

    /// Returns the port's address on the network that contains both addresses, if there is one.
    fn address_on_network_of(&self, port: PortId, one: IpAddr, other: IpAddr) -> Option<IpAddr> {
        let common = self.addresses(port).iter().find(|network| network.contains(&one) && network.contains(&other));
        common.map(|network| network.addr())
    }
}

fn build_redirect_v6(
    ctx: &mut Context<'_>,
    packet: &Packet,
    redirect_packet: &mut Packet,
    (own, source): (Ipv6Addr, Ipv6Addr),
    redirect: ndisc::Redirect<'_>,
) {
    let room = ipv6::MTU_MIN - ipv6::HEADER_BYTES - ndisc::Redirect::OVERHEAD_BYTES;
    let original_bytes = packet.len().min(room);
    ctx.pool.resize(redirect_packet, ipv6::HEADER_BYTES + ndisc::Redirect::OVERHEAD_BYTES + original_bytes);
    let (original, bytes) = ctx.pool.bytes_pair(packet, redirect_packet);
    let (header, payload) = bytes.split_at_mut(ipv6::HEADER_BYTES);
    let redirect = ndisc::Redirect { original: &original[..original_bytes], ..redirect };
    let payload_bytes = redirect.emit(payload, own, source);
    let repr = ipv6::Repr { hop_limit: ndisc::HOP_LIMIT, ..header_v6(own, source, Protocol::ICMPV6, payload_bytes) };
    repr.emit(header);
    ctx.pool.resize(redirect_packet, ipv6::HEADER_BYTES + payload_bytes);
}
