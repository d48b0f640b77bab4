//! Which way packets take to another node: straight there, or by way of a third one.
//!
//! On a mesh the straight link is the shortest and the cheapest. Only where more is to go than it carries, and packets
//! queue up for it, flows are spread over third nodes (Valiant load balancing), which pass them on without looking at
//! them.
//!
//! **Order.** Flows are told apart by buckets of their hash. A bucket changes its way only when nothing of it is under
//! way: from the straight link once the other end has taken in all that was handed over for it, from a detour once the
//! bucket has been silent for longer than anything stays on the way. So no packet overtakes another one of its flow.
//! The one exception is the death of a third node, whose flows go on at once.

use sim::{Random, Span, Time};

use crate::{NODES_MAX, NodeId};

/// Flows that are told apart for each destination.
pub const BUCKETS: usize = 256;

const NODES: usize = NODES_MAX as usize;

/// What is known of the link to one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkLoad {
    /// Whether it carries anything.
    pub is_up: bool,
    /// Packets that wait for it.
    pub queued: usize,
    /// Packets that were handed over to it so far.
    pub handed: u64,
    /// Of those, how many are known to be past it: the first so many are taken in, dropped or lost.
    pub settled: u64,
}

/// When to go round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// A link for which so many packets wait is hot; with a quarter of that it is not any more.
    pub hot_packets: usize,
    /// Longer than any packet is on a detour.
    pub flowlet_gap: Span,
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// The third node, if it goes round.
    detour: Option<NodeId>,
    /// Its last packet, on a detour.
    last: Time,
    /// Its last packet on the straight link, counted as [`LinkLoad::handed`].
    ordinal: u64,
}

const STRAIGHT: Bucket = Bucket { detour: None, last: Time::ZERO, ordinal: 0 };

/// The flows to one node.
#[derive(Clone, Debug)]
struct Destination {
    is_hot: bool,
    /// What had been handed over to the straight link when it became hot: of each bucket, perhaps.
    ordinal_when_hot: u64,
    /// Buckets that go round.
    detours: usize,
    /// When the last packet went round.
    detour_last: Time,
    buckets: Vec<Bucket>,
}

/// Chooses ways.
#[derive(Debug)]
pub struct Balancer {
    own: NodeId,
    thresholds: Thresholds,
    destinations: Vec<Destination>,
    random: Random,
}

impl Balancer {
    /// For packets that come in at `own`. `seed`: of what it draws.
    pub fn new(own: NodeId, thresholds: Thresholds, seed: u64) -> Balancer {
        let destination = Destination {
            is_hot: false,
            ordinal_when_hot: 0,
            detours: 0,
            detour_last: Time::ZERO,
            buckets: vec![STRAIGHT; BUCKETS],
        };
        Balancer { own, thresholds, destinations: vec![destination; NODES], random: Random::new(seed, "balance") }
    }

    /// Whether all packets for a node go straight now, so that nobody needs to tell flows apart. To be asked when
    /// packets for it come, before [`Balancer::way`].
    pub fn is_straight(&mut self, now: Time, to: NodeId, links: &[LinkLoad; NODES]) -> bool {
        let Thresholds { hot_packets, flowlet_gap } = self.thresholds;
        let (destination, link) = (&mut self.destinations[usize::from(to.0)], links[usize::from(to.0)]);
        if !destination.is_hot && link.queued >= hot_packets {
            destination.is_hot = true;
            destination.ordinal_when_hot = link.handed;
        } else if destination.is_hot && link.queued <= hot_packets / 4 {
            destination.is_hot = false;
        }
        if destination.is_hot {
            return false;
        }
        if destination.detours > 0 && now.since(destination.detour_last) >= flowlet_gap {
            destination.buckets.fill(STRAIGHT);
            destination.detours = 0;
        }
        destination.detours == 0
    }

    /// To which node a packet for `to` goes next, by its flow's hash: `to` itself, or a third one. It counts as handed
    /// over there.
    pub fn way(&mut self, now: Time, to: NodeId, flow_hash: u32, links: &[LinkLoad; NODES]) -> NodeId {
        let at = flow_hash as usize % BUCKETS;
        let straight = links[usize::from(to.0)];
        let destination = &self.destinations[usize::from(to.0)];
        let bucket = destination.buckets[at];
        let is_free = match bucket.detour {
            None => bucket.ordinal.max(destination.ordinal_when_hot) <= straight.settled,
            Some(third) => !links[usize::from(third.0)].is_up || now.since(bucket.last) >= self.thresholds.flowlet_gap,
        };
        let detour = if is_free { self.choose(to, links) } else { bucket.detour };
        let destination = &mut self.destinations[usize::from(to.0)];
        destination.detours += usize::from(detour.is_some());
        destination.detours -= usize::from(bucket.detour.is_some());
        let bucket = &mut destination.buckets[at];
        bucket.detour = detour;
        if let Some(third) = detour {
            (bucket.last, destination.detour_last) = (now, now);
            return third;
        }
        bucket.ordinal = straight.handed + 1;
        to
    }

    /// The less busy one of two third nodes, where the straight link is hot and that is much less busy.
    fn choose(&mut self, to: NodeId, links: &[LinkLoad; NODES]) -> Option<NodeId> {
        let straight = links[usize::from(to.0)];
        if !self.destinations[usize::from(to.0)].is_hot {
            return None;
        }
        let mut thirds = [NodeId(0); NODES];
        let mut count = 0;
        for node in (0..NODES_MAX).map(NodeId).filter(|node| *node != to && *node != self.own) {
            if links[usize::from(node.0)].is_up {
                thirds[count] = node;
                count += 1;
            }
        }
        let drawn = |random: &mut Random| thirds[random.below(count as u64) as usize];
        if count == 0 {
            return None;
        }
        let (one, other) = (drawn(&mut self.random), drawn(&mut self.random));
        let third = if links[usize::from(one.0)].queued <= links[usize::from(other.0)].queued { one } else { other };
        (links[usize::from(third.0)].queued < straight.queued / 2).then_some(third)
    }
}
