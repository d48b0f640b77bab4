//! Transit packets that the router does not forward itself: the kernel does, or nobody.

use packet::{ipv4, ipv6};

use super::slow::Header;
use super::{Context, Forwarder, Origin};
use crate::counters::DropReason;
use crate::{AdjacencyId, Hop, Packet, PortId, TransitPath};

impl Forwarder {
    /// Returns whether a packet from a port is left to the transit path. `local` is the hop to this node itself, if
    /// the packet is for it.
    pub(super) fn is_diverted(&self, port: PortId, local: Option<Hop>) -> bool {
        match (self.transit, local) {
            (TransitPath::Router, _) => false,
            (_, None) => true,
            // The kernel has no addresses of TAPs and VLANs: it sends packets to them through the router.
            (TransitPath::Kernel, Some(hop)) => hop.adjacency == AdjacencyId::ROUTER && self.has_kernel(port),
            (TransitPath::Closed, Some(_)) => false,
        }
    }

    /// Leaves a packet from a port to the transit path. The kernel decrements its TTL.
    pub(super) fn divert(&mut self, ctx: &mut Context<'_>, packet: Packet, port: PortId) {
        let origin = Origin::Port(port);
        match self.transit {
            TransitPath::Kernel if self.has_kernel(port) => {
                self.discard(ctx, packet, origin, DropReason::KernelForwards);
            }
            TransitPath::Kernel => self.queue_for_kernel(ctx, packet, origin),
            TransitPath::Router | TransitPath::Closed => self.discard(ctx, packet, origin, DropReason::Filters),
        }
    }

    /// Leaves a packet from another node, for a port of this one, to the transit path. The ingress node has
    /// decremented its TTL, and the kernel decrements it again, so it is incremented here: the cluster is one hop.
    pub(super) fn divert_from_node(&mut self, ctx: &mut Context<'_>, packet: Packet, hop: Hop) {
        if self.transit != TransitPath::Kernel {
            return self.discard(ctx, packet, Origin::Node, DropReason::Filters);
        }
        let Some(header) = Header::of(ctx.pool.bytes(&packet)) else {
            return self.discard(ctx, packet, Origin::Node, DropReason::Hop);
        };
        // If the kernel sent it back, it must leave by a port: between two nodes it could circle for ever.
        let found = self.lookup_hop(ctx, &packet, &header, None);
        if found.is_none_or(|(found, _)| found.node != hop.node || found.port == PortId::NOWHERE) {
            return self.discard(ctx, packet, Origin::Node, DropReason::Hop);
        }
        increment_ttl(ctx.pool.bytes_mut(&packet));
        self.queue_for_kernel(ctx, packet, Origin::Node);
    }
}

/// Increments the TTL or hop limit of a validated packet, unless it is 255: programs of other nodes may send that.
fn increment_ttl(bytes: &mut [u8]) {
    if bytes[0] >> 4 == 4 {
        if let Ok(mut packet) = ipv4::Packet::new_checked(bytes) {
            packet.increment_ttl();
        }
    } else if let Ok(mut packet) = ipv6::Packet::new_checked(bytes) {
        packet.increment_hop_limit();
    }
}
