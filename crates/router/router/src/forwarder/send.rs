//! The last steps: a packet whose hop is known gets its frame's header and goes to a queue, or waits for a neighbour.

use std::net::IpAddr;

use ipnet::IpNet;
use packet::ethernet::EtherType;
use packet::{ipv4, ipv6};

use super::{Forwarder, Io, Origin};
use crate::counters::DropReason;
use crate::neighbour::Readiness;
use crate::output::Parcel;
use crate::trace::Step;
use crate::{AdjacencyId, Hop, NODES_MAX, PORTS_MAX, Packet, PortId};

/// What a packet is, by its first four bits; what is neither counts as IPv4, and never comes so far.
#[inline]
fn ethertype_of(bytes: &[u8]) -> EtherType {
    if bytes.first().is_some_and(|first| first >> 4 == 6) { EtherType::IPV6 } else { EtherType::IPV4 }
}

impl Forwarder {
    /// A packet that is ready to leave, for its egress node.
    #[inline]
    pub(super) fn leave(&mut self, io: &mut Io<'_>, packet: Packet, hop: Hop, flow: u32) {
        if hop.node == self.config.node {
            self.send(io, packet, hop);
        } else {
            self.queue_for_node(io, Parcel { hop, flow, packet });
        }
    }

    #[inline]
    fn queue_for_node(&mut self, io: &mut Io<'_>, parcel: Parcel) {
        let node = usize::from(parcel.hop.node.0 % NODES_MAX);
        self.note(io, &parcel.packet, Step::ToNode(parcel.hop.node));
        if io.output.to_nodes[node].len() >= io.output.queue_packets_max {
            self.discard(io, parcel.packet, Origin::Router, DropReason::NodeQueue);
            return;
        }
        self.counters.to_nodes[node].add(parcel.packet.len());
        io.output.to_nodes[node].push_back(parcel);
    }

    /// From another node. Its hop is believed as far as it names what this node has.
    pub(super) fn egress_one(&mut self, io: &mut Io<'_>, parcel: Parcel) {
        let Parcel { hop, packet, .. } = parcel;
        self.note(io, &packet, Step::FromNode);
        let version = io.pool.bytes(&packet).first().map(|first| first >> 4);
        if hop.node != self.config.node || !matches!(version, Some(4 | 6)) {
            self.discard(io, packet, Origin::Node, DropReason::Hop);
        } else if hop.port == PortId::KERNEL {
            self.deliver(io, packet, Origin::Node, hop.adjacency);
        } else {
            // The ingress node saw to it, by what it knew of the port; it may not know the latest.
            match usize::from(self.mtus[usize::from(hop.node.0 % NODES_MAX)][usize::from(hop.port.0)]) {
                0 => self.discard(io, packet, Origin::Node, DropReason::EgressDown),
                mtu_bytes if packet.len() > mtu_bytes => self.discard(io, packet, Origin::Node, DropReason::TooBig),
                _ => self.send(io, packet, hop),
            }
        }
    }

    /// Out by a port of this node's.
    #[inline]
    pub(super) fn send(&mut self, io: &mut Io<'_>, packet: Packet, hop: Hop) {
        match self.neighbours.ready(hop.adjacency) {
            Some(ready) if ready.port == hop.port => {
                let ready = *ready;
                self.emit(io, packet, &ready);
            }
            _ => self.send_slow(io, packet, hop),
        }
    }

    /// An IP packet into the port's queue, with this header.
    #[inline]
    fn emit(&mut self, io: &mut Io<'_>, packet: Packet, header: &Readiness) {
        self.note(io, &packet, Step::Sent(header.port));
        let ethertype = ethertype_of(io.pool.bytes(&packet));
        self.emit_as(io, packet, header, ethertype);
    }

    /// Into the port's queue, with this header and type.
    #[inline]
    pub(super) fn emit_as(&mut self, io: &mut Io<'_>, mut packet: Packet, header: &Readiness, ethertype: EtherType) {
        let queue = &mut io.output.to_ports[usize::from(header.queue.0 % PORTS_MAX)];
        if io.pool.headroom(&packet) < usize::from(header.header_bytes) {
            self.discard(io, packet, Origin::Port(header.port), DropReason::NoBuffer);
            return;
        }
        if queue.len() >= io.output.queue_packets_max {
            self.discard(io, packet, Origin::Port(header.port), DropReason::PortQueue);
            return;
        }
        io.pool.grow_front(&mut packet, u16::from(header.header_bytes));
        header.write(ethertype, io.pool.bytes_mut(&packet));
        self.counters.ports[usize::from(header.port.0 % PORTS_MAX)].sent.add(packet.len());
        if header.queue != header.port {
            self.counters.ports[usize::from(header.queue.0 % PORTS_MAX)].sent.add(packet.len());
        }
        queue.push_back(packet);
    }

    /// Where the neighbour is not known, or should be noted as used, or is yet to be found by the packet's destination.
    fn send_slow(&mut self, io: &mut Io<'_>, packet: Packet, hop: Hop) {
        let port = hop.port;
        if self.link(port).is_none() || self.mtus[usize::from(self.config.node.0)][usize::from(port.0)] == 0 {
            self.discard(io, packet, Origin::Router, DropReason::EgressDown);
        } else if hop.adjacency == AdjacencyId::ON_LINK {
            self.glean(io, packet, port);
        } else if self.neighbours.port_of(hop.adjacency) == Some(port) {
            self.send_to(io, packet, port, hop.adjacency);
        } else {
            self.discard(io, packet, Origin::Port(port), DropReason::Hop);
        }
    }

    /// To the neighbour that has the packet's destination address.
    fn glean(&mut self, io: &mut Io<'_>, packet: Packet, port: PortId) {
        let destination = match destination_of(io.pool.bytes(&packet)) {
            Some(destination) if !self.own.has(destination) => destination,
            _ => return self.discard(io, packet, Origin::Port(port), DropReason::Hop),
        };
        if self.addresses(port).iter().any(|network| is_broadcast(network, destination)) {
            self.discard(io, packet, Origin::Port(port), DropReason::Broadcast);
        } else if let Some(adjacency) = self.neighbours.find(port, destination) {
            self.send_to(io, packet, port, adjacency);
        } else {
            self.note(io, &packet, Step::Waits(port, AdjacencyId::ON_LINK));
            self.neighbours.unknown(io.now, port, destination, packet);
        }
    }

    /// To a neighbour of the table's, or into what waits for it.
    pub(super) fn send_to(&mut self, io: &mut Io<'_>, packet: Packet, port: PortId, adjacency: AdjacencyId) {
        if self.neighbours.known(adjacency).is_none() {
            self.note(io, &packet, Step::Waits(port, adjacency));
        }
        let Some(packet) = self.neighbours.used(io.now, adjacency, packet) else { return };
        match self.neighbours.known(adjacency).copied() {
            Some(header) => self.emit(io, packet, &header),
            None => self.discard(io, packet, Origin::Port(port), DropReason::NeighbourFailed),
        }
    }
}

pub(super) fn destination_of(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.first()? >> 4 {
        4 => Some(ipv4::Packet::new_checked(bytes).ok()?.destination().into()),
        _ => Some(ipv6::Packet::new_checked(bytes).ok()?.destination().into()),
    }
}

/// Whether the address is that of all on an IPv4 network, or of none (RFC 1812, sections 4.2.2.11 and 5.3.5). A network
/// of two addresses has neither (RFC 3021).
pub(super) fn is_broadcast(network: &IpNet, address: IpAddr) -> bool {
    match (network, address) {
        (IpNet::V4(network), IpAddr::V4(address)) if network.prefix_len() < 31 => {
            address == network.broadcast() || address == network.network()
        }
        _ => false,
    }
}
