//! Transmission: a packet with a known hop gets an Ethernet header and is placed in a queue, or waits for address
//! resolution.

use std::net::IpAddr;

use ipnet::IpNet;
use packet::ethernet::EtherType;
use packet::{ipv4, ipv6};

use super::{Context, Forwarder, Origin};
use crate::counters::DropReason;
use crate::neighbour::Adjacency;
use crate::output::RoutedPacket;
use crate::trace::Step;
use crate::{AdjacencyId, Hop, NODES_MAX, PORTS_MAX, Packet, PortId, TransitPath};

/// Returns the EtherType of an IP packet. Other packets, which are dropped earlier, would count as IPv4.
#[inline]
fn ethertype_of(bytes: &[u8]) -> EtherType {
    if bytes.first().is_some_and(|first| first >> 4 == 6) { EtherType::IPV6 } else { EtherType::IPV4 }
}

impl Forwarder {
    /// Sends a packet out of a local port, or to its egress node.
    #[inline]
    pub(super) fn dispatch(&mut self, ctx: &mut Context<'_>, packet: Packet, hop: Hop, flow: u32) {
        if hop.node == self.config.node {
            self.send(ctx, packet, hop);
        } else {
            self.send_to_node(ctx, RoutedPacket { hop, flow, packet });
        }
    }

    #[inline]
    fn send_to_node(&mut self, ctx: &mut Context<'_>, routed: RoutedPacket) {
        let node = usize::from(routed.hop.node.0 % NODES_MAX);
        self.trace_step(ctx, &routed.packet, Step::ToNode(routed.hop.node));
        if ctx.output.to_nodes[node].len() >= ctx.output.queue_packets_max {
            self.discard(ctx, routed.packet, Origin::Router, DropReason::NodeQueue);
            return;
        }
        self.counters.to_nodes[node].add(routed.packet.on_wire(0));
        ctx.output.to_nodes[node].push_back(routed);
    }

    /// Transmits a packet from another node. Its hop is validated against the ports and adjacencies of this node.
    pub(super) fn egress_one(&mut self, ctx: &mut Context<'_>, routed: RoutedPacket) {
        let RoutedPacket { hop, packet, .. } = routed;
        self.trace_step(ctx, &packet, Step::FromNode);
        let version = ctx.pool.bytes(&packet).first().map(|first| first >> 4);
        if hop.node != self.config.node || !matches!(version, Some(4 | 6)) {
            self.discard(ctx, packet, Origin::Node, DropReason::Hop);
        } else if hop.port == PortId::KERNEL {
            self.deliver(ctx, packet, Origin::Node, hop.adjacency);
        } else if self.transit != TransitPath::Router {
            self.divert_from_node(ctx, packet, hop);
        } else {
            // The ingress node has checked the MTU, but may have used an outdated value.
            match usize::from(self.mtus[usize::from(hop.node.0 % NODES_MAX)][usize::from(hop.port.0)]) {
                0 => self.discard(ctx, packet, Origin::Node, DropReason::EgressDown),
                mtu_bytes if packet.ip_bytes_max() > mtu_bytes => {
                    self.discard(ctx, packet, Origin::Node, DropReason::TooBig)
                }
                _ => self.send(ctx, packet, hop),
            }
        }
    }

    /// Sends a packet out of a port of this node.
    #[inline]
    pub(super) fn send(&mut self, ctx: &mut Context<'_>, packet: Packet, hop: Hop) {
        match self.neighbours.ready(hop.adjacency) {
            Some(ready) if ready.port == hop.port => {
                let ready = *ready;
                self.transmit(ctx, packet, &ready);
            }
            _ => self.send_unready(ctx, packet, hop),
        }
    }

    /// Queues an IP packet for transmission to this adjacency.
    #[inline]
    fn transmit(&mut self, ctx: &mut Context<'_>, packet: Packet, header: &Adjacency) {
        self.trace_step(ctx, &packet, Step::Sent(header.port));
        let ethertype = ethertype_of(ctx.pool.bytes(&packet));
        self.transmit_as(ctx, packet, header, ethertype);
    }

    /// Queues a packet for transmission to this adjacency, with this EtherType.
    #[inline]
    pub(super) fn transmit_as(
        &mut self,
        ctx: &mut Context<'_>,
        mut packet: Packet,
        header: &Adjacency,
        ethertype: EtherType,
    ) {
        if packet.is_large() && !self.takes_large(header.queue) {
            let origin = Origin::Port(header.port);
            return self.segment(ctx, packet, origin, |this, ctx, segment| {
                this.transmit_as(ctx, segment, header, ethertype);
            });
        }
        let queue = &mut ctx.output.to_ports[usize::from(header.queue.0 % PORTS_MAX)];
        if ctx.pool.headroom(&packet) < usize::from(header.header_bytes) {
            self.discard(ctx, packet, Origin::Port(header.port), DropReason::NoBuffer);
            return;
        }
        if queue.len() >= ctx.output.queue_packets_max {
            self.discard(ctx, packet, Origin::Port(header.port), DropReason::PortQueue);
            return;
        }
        ctx.pool.grow_front(&mut packet, u16::from(header.header_bytes));
        header.write(ethertype, ctx.pool.bytes_mut(&packet));
        let sent = packet.on_wire(usize::from(header.header_bytes));
        self.counters.ports[usize::from(header.port.0 % PORTS_MAX)].sent.add(sent);
        if header.queue != header.port {
            self.counters.ports[usize::from(header.queue.0 % PORTS_MAX)].sent.add(sent);
        }
        queue.push_back(packet);
    }

    /// Sends a packet whose adjacency is not ready: the neighbour is unresolved, its use must be recorded, or it must
    /// be found by the destination address.
    fn send_unready(&mut self, ctx: &mut Context<'_>, packet: Packet, hop: Hop) {
        let port = hop.port;
        if self.l2(port).is_none() || !self.is_port_up(port) {
            self.discard(ctx, packet, Origin::Router, DropReason::EgressDown);
        } else if hop.adjacency == AdjacencyId::ON_LINK {
            self.glean(ctx, packet, port);
        } else if self.neighbours.port_of(hop.adjacency) == Some(port) {
            self.send_to(ctx, packet, port, hop.adjacency);
        } else {
            self.discard(ctx, packet, Origin::Port(port), DropReason::Hop);
        }
    }

    /// Sends a packet to the neighbour that has its destination address: the glean adjacency.
    fn glean(&mut self, ctx: &mut Context<'_>, packet: Packet, port: PortId) {
        let destination = match destination_of(ctx.pool.bytes(&packet)) {
            Some(destination) if !self.local.has(destination) => destination,
            _ => return self.discard(ctx, packet, Origin::Port(port), DropReason::Hop),
        };
        if self.addresses(port).iter().any(|network| is_broadcast(network, destination)) {
            self.discard(ctx, packet, Origin::Port(port), DropReason::Broadcast);
        } else if let Some(adjacency) = self.neighbours.find(port, destination) {
            self.send_to(ctx, packet, port, adjacency);
        } else {
            self.trace_step(ctx, &packet, Step::AwaitsNeighbour(port, AdjacencyId::ON_LINK));
            self.neighbours.resolve(ctx.now, port, destination, packet);
        }
    }

    /// Sends a packet to a neighbour in the table, or queues it until the neighbour is resolved.
    pub(super) fn send_to(&mut self, ctx: &mut Context<'_>, packet: Packet, port: PortId, adjacency: AdjacencyId) {
        if self.neighbours.resolved(adjacency).is_none() {
            self.trace_step(ctx, &packet, Step::AwaitsNeighbour(port, adjacency));
        }
        let Some(packet) = self.neighbours.send_or_queue(ctx.now, adjacency, packet) else { return };
        match self.neighbours.resolved(adjacency).copied() {
            Some(header) => self.transmit(ctx, packet, &header),
            None => self.discard(ctx, packet, Origin::Port(port), DropReason::NeighbourFailed),
        }
    }
}

/// Returns the destination address of an IP packet.
pub(super) fn destination_of(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.first()? >> 4 {
        4 => Some(ipv4::Packet::new_checked(bytes).ok()?.destination().into()),
        _ => Some(ipv6::Packet::new_checked(bytes).ok()?.destination().into()),
    }
}

/// Returns whether the address is the broadcast address of an IPv4 network, or its all-zeros form (RFC 1812, sections
/// 4.2.2.11 and 5.3.5). A /31 network has neither (RFC 3021).
pub(super) fn is_broadcast(network: &IpNet, address: IpAddr) -> bool {
    match (network, address) {
        (IpNet::V4(network), IpAddr::V4(address)) if network.prefix_len() < 31 => {
            address == network.broadcast() || address == network.network()
        }
        _ => false,
    }
}
