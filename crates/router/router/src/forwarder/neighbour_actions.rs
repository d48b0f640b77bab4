//! Executes the actions of the neighbour table: solicitations, packets whose neighbour was resolved, events.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use packet::ethernet::{EtherType, MacAddress};
use packet::{Protocol, arp, ipv6, ndisc};

use super::icmp_error::IcmpError;
use super::{Context, Forwarder, Origin};
use crate::counters::DropReason;
use crate::local_addresses::is_link_local_v6;
use crate::neighbour::Action;
use crate::output::Event;
use crate::{Packet, PortId};

impl Forwarder {
    /// Executes all pending actions. The loop terminates: an undeliverable packet causes at most one ICMP error, which
    /// causes none.
    pub(super) fn run_neighbour_actions(&mut self, ctx: &mut Context<'_>) {
        while let Some(action) = self.neighbours.next_action() {
            match action {
                Action::Solicit { port, address, to } => self.solicit(ctx, port, address, to),
                Action::Send { adjacency, port, packet } => self.send_to(ctx, packet, port, adjacency),
                Action::Undeliverable { port, packet } => {
                    self.send_icmp_error(ctx, &packet, Origin::Node, IcmpError::HostUnreachable);
                    self.discard(ctx, packet, Origin::Port(port), DropReason::NeighbourFailed);
                }
                Action::Dropped { port, packet, reason } => self.discard(ctx, packet, Origin::Port(port), reason),
                Action::Up { port, address, adjacency } if self.is_on_network(port, address) => {
                    ctx.output.push_event(Event::NeighbourUp { port, address, adjacency });
                }
                Action::Down { port, address, adjacency } if self.is_on_network(port, address) => {
                    ctx.output.push_event(Event::NeighbourDown { port, address, adjacency });
                }
                Action::Up { .. } | Action::Down { .. } => {}
                Action::Refused => self.counters.neighbours_refused += 1,
            }
        }
    }

    /// Returns whether the cluster should have a route to a neighbour: not to link-local addresses.
    pub(super) fn is_on_network(&self, port: PortId, address: IpAddr) -> bool {
        !is_link_local_v6(address) && self.addresses(port).iter().any(|network| network.contains(&address))
    }

    fn solicit(&mut self, ctx: &mut Context<'_>, port: PortId, address: IpAddr, to: Option<MacAddress>) {
        let Some(state) = self.ports.get_mut(usize::from(port.0)) else { return };
        if !state.solicitations.take(ctx.now) {
            self.counters.solicitations_suppressed += 1;
            return;
        }
        self.counters.solicitations_sent += 1;
        match address {
            IpAddr::V4(address) => self.solicit_v4(ctx, port, address, to),
            IpAddr::V6(address) => self.solicit_v6(ctx, port, address, to),
        }
    }

    fn solicit_v4(&mut self, ctx: &mut Context<'_>, port: PortId, target: Ipv4Addr, to: Option<MacAddress>) {
        let Some(l2) = self.l2(port) else { return };
        let request = arp::Repr {
            operation: arp::Operation::Request,
            sender_mac: l2.mac,
            sender: self.source_towards_v4(port, target),
            target_mac: to.unwrap_or_default(),
            target,
        };
        self.send_arp(ctx, port, &request, to.unwrap_or(MacAddress::BROADCAST));
    }

    pub(super) fn send_arp(&mut self, ctx: &mut Context<'_>, port: PortId, message: &arp::Repr, to: MacAddress) {
        let (Some(l2), Some(mut packet)) = (self.l2(port), ctx.pool.alloc()) else { return };
        ctx.pool.resize(&mut packet, arp::PACKET_BYTES);
        message.emit(ctx.pool.bytes_mut(&packet));
        self.transmit_as(ctx, packet, &l2.adjacency(port, to), EtherType::ARP);
    }

    fn solicit_v6(&mut self, ctx: &mut Context<'_>, port: PortId, target: Ipv6Addr, to: Option<MacAddress>) {
        let Some(l2) = self.l2(port) else { return };
        let Some(source) = self.source_towards_v6(port, target) else { return };
        let destination = if to.is_some() { target } else { ndisc::solicited_node(target) };
        let message = ndisc::Message::NeighbourSolicitation { target, source_mac: Some(l2.mac) };
        self.send_discovery(ctx, port, &message, (source, destination), to);
    }

    /// Sends a message to a neighbour, or to the group `destination`.
    pub(super) fn send_discovery(
        &mut self,
        ctx: &mut Context<'_>,
        port: PortId,
        message: &ndisc::Message,
        (source, destination): (Ipv6Addr, Ipv6Addr),
        to: Option<MacAddress>,
    ) {
        let Some(packet) = build_discovery(ctx, message, source, destination) else { return };
        let Some(l2) = self.l2(port) else { return ctx.pool.free(packet) };
        let to = to.unwrap_or_else(|| MacAddress::from_multicast_v6(destination));
        self.transmit_as(ctx, packet, &l2.adjacency(port, to), EtherType::IPV6);
    }

    /// Returns the port's address on the network of `target`, else any of the port, else the unspecified address.
    fn source_towards_v4(&self, port: PortId, target: Ipv4Addr) -> Ipv4Addr {
        let of = |network: &IpNet| match network {
            IpNet::V4(network) => Some(*network),
            IpNet::V6(_) => None,
        };
        let mut networks = self.addresses(port).iter().filter_map(of);
        let on_link = networks.clone().find(|network| network.contains(&target));
        on_link.or_else(|| networks.next()).map_or(Ipv4Addr::UNSPECIFIED, |network| network.addr())
    }

    fn source_towards_v6(&self, port: PortId, target: Ipv6Addr) -> Option<Ipv6Addr> {
        let of = |network: &IpNet| match network {
            IpNet::V6(network) => Some(*network),
            IpNet::V4(_) => None,
        };
        let mut networks = self.addresses(port).iter().filter_map(of);
        let on_link = networks.clone().find(|network| network.contains(&target));
        on_link.or_else(|| networks.next()).map(|network| network.addr())
    }
}

/// Builds an IP packet with the message; returns `None` without a free buffer.
fn build_discovery(
    ctx: &mut Context<'_>,
    message: &ndisc::Message,
    source: Ipv6Addr,
    destination: Ipv6Addr,
) -> Option<Packet> {
    const BYTES_MAX: usize = ipv6::HEADER_BYTES + ndisc::MESSAGE_BYTES_MAX;
    let mut packet = ctx.pool.alloc()?;
    ctx.pool.resize(&mut packet, BYTES_MAX);
    let (header, payload) = ctx.pool.bytes_mut(&packet).split_at_mut(ipv6::HEADER_BYTES);
    let payload_bytes = message.emit(payload, source, destination);
    let repr = ipv6::Repr {
        hop_limit: ndisc::HOP_LIMIT,
        ..super::icmp_error::header_v6(source, destination, Protocol::ICMPV6, payload_bytes)
    };
    repr.emit(header);
    ctx.pool.resize(&mut packet, ipv6::HEADER_BYTES + payload_bytes);
    Some(packet)
}
