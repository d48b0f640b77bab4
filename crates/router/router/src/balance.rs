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

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    const GAP_NS: u64 = 1000;
    const HOT_PACKETS: usize = 16;

    fn at(ns: u64) -> Time {
        Time::from_ps(ns * 1000)
    }

    fn thresholds() -> Thresholds {
        Thresholds { hot_packets: HOT_PACKETS, flowlet_gap: Span::from_ps(GAP_NS * 1000) }
    }

    fn up(queued: usize) -> LinkLoad {
        LinkLoad { is_up: true, queued, ..LinkLoad::default() }
    }

    /// A mesh of four, seen from node 0.
    fn links(queued: [usize; 4]) -> [LinkLoad; NODES] {
        let mut links = [LinkLoad::default(); NODES];
        for node in 1..4 {
            links[node] = up(queued[node]);
        }
        links
    }

    const TO: NodeId = NodeId(1);

    #[test]
    fn all_go_straight_while_the_link_is_not_hot() {
        let mut balancer = Balancer::new(NodeId(0), thresholds(), 1);
        assert!(balancer.is_straight(at(0), TO, &links([0, HOT_PACKETS - 1, 0, 0])));
        assert!(!balancer.is_straight(at(0), TO, &links([0, HOT_PACKETS, 0, 0])));
        assert!(!balancer.is_straight(at(0), TO, &links([0, HOT_PACKETS / 4 + 1, 0, 0])), "still hot");
        assert!(balancer.is_straight(at(0), TO, &links([0, HOT_PACKETS / 4, 0, 0])));
    }

    #[test]
    fn flows_of_a_hot_link_go_round_once_nothing_of_them_is_under_way() {
        let mut balancer = Balancer::new(NodeId(0), thresholds(), 1);
        let mut loads = links([0, 100, 0, 0]);
        (loads[1].handed, loads[1].settled) = (500, 400);
        assert!(!balancer.is_straight(at(0), TO, &loads));
        assert_eq!(balancer.way(at(0), TO, 7, &loads), TO, "100 packets, perhaps its own, are under way");
        (loads[1].handed, loads[1].settled) = (501, 500);
        assert_eq!(balancer.way(at(1), TO, 7, &loads), TO, "its last one is");
        (loads[1].handed, loads[1].settled) = (502, 502);
        let third = balancer.way(at(2), TO, 7, &loads);
        assert!(third == NodeId(2) || third == NodeId(3));
        assert_ne!(balancer.way(at(3), TO, 8, &loads), TO);
        // It stays there while packets follow one another, also when the link is hot no more.
        loads[1].queued = 0;
        assert!(!balancer.is_straight(at(900), TO, &loads));
        assert_eq!(balancer.way(at(900), TO, 7, &loads), third);
        assert!(!balancer.is_straight(at(1899), TO, &loads));
        assert!(balancer.is_straight(at(1900), TO, &loads), "everything that went round is there");
    }

    #[test]
    fn flows_spread_over_third_nodes_and_not_over_busy_or_dead_ones() {
        let mut balancer = Balancer::new(NodeId(0), thresholds(), 3);
        let spread = |balancer: &mut Balancer, loads: &[LinkLoad; NODES], first: u32| {
            let mut counts = [0; NODES];
            assert!(!balancer.is_straight(at(0), TO, loads));
            (first..first + 60).for_each(|hash| counts[usize::from(balancer.way(at(0), TO, hash, loads).0)] += 1);
            counts
        };
        let even = spread(&mut balancer, &links([0, 100, 10, 10]), 0);
        assert!(even[2] >= 15 && even[3] >= 15 && even[2] + even[3] == 60, "{even:?}");
        let busy = spread(&mut balancer, &links([0, 100, 60, 10]), 60);
        assert!(busy[3] >= 30 && busy[2] == 0, "{busy:?}");
        let mut loads = links([0, 100, 0, 0]);
        loads[2].is_up = false;
        assert_eq!(spread(&mut balancer, &loads, 120)[3], 60);
        loads[3].is_up = false;
        assert_eq!(spread(&mut balancer, &loads, 180)[1], 60, "nobody is there to go round by");
        assert_eq!(spread(&mut balancer, &loads, 0)[1], 60, "flows of dead nodes go on at once");
    }

    /// A packet under way: of which flow, its number in it, when it arrives.
    struct Flying {
        flow: u32,
        number: u64,
        arrives: u64,
    }

    /// A mesh in which the straight link serves its queue at a rate, and detours take any time below the gap, in order.
    struct World {
        balancer: Balancer,
        straight: VecDeque<Flying>,
        straight_free: u64,
        round: Vec<Flying>,
        /// When the last packet arrives that goes round by each node: they keep their order on a way.
        round_last: [u64; NODES],
        handed: u64,
        settled: u64,
        sent: Vec<u64>,
        arrived: Vec<u64>,
        detoured: u64,
    }

    impl World {
        fn new(seed: u64, flows: usize) -> World {
            World {
                balancer: Balancer::new(NodeId(0), thresholds(), seed),
                straight: VecDeque::new(),
                straight_free: 0,
                round: Vec::new(),
                round_last: [0; NODES],
                handed: 0,
                settled: 0,
                sent: vec![0; flows],
                arrived: vec![0; flows],
                detoured: 0,
            }
        }

        fn send(&mut self, now: u64, flow: u32, service: u64, detour: u64) {
            let mut loads = links([0, self.straight.len(), 0, 0]);
            (loads[1].handed, loads[1].settled) = (self.handed, self.settled);
            let is_straight = self.balancer.is_straight(at(now), TO, &loads);
            let way = if is_straight { TO } else { self.balancer.way(at(now), TO, flow, &loads) };
            let number = self.sent[flow as usize];
            self.sent[flow as usize] += 1;
            if way == TO {
                self.handed += 1;
                self.straight_free = self.straight_free.max(now) + service;
                self.straight.push_back(Flying { flow, number, arrives: self.straight_free });
            } else {
                self.detoured += 1;
                let last = &mut self.round_last[usize::from(way.0)];
                *last = (now + detour).max(*last);
                self.round.push(Flying { flow, number, arrives: *last });
            }
        }

        /// Everything that arrives until then, each flow in order or not.
        fn arrive(&mut self, now: u64) -> bool {
            let mut due: Vec<Flying> = Vec::new();
            while let Some(flying) = self.straight.pop_front_if(|flying| flying.arrives <= now) {
                self.settled += 1;
                due.push(flying);
            }
            due.extend(self.round.extract_if(.., |flying| flying.arrives <= now));
            due.sort_by_key(|flying| flying.arrives);
            let mut is_in_order = true;
            for flying in due {
                let next = &mut self.arrived[flying.flow as usize];
                is_in_order &= *next == flying.number;
                *next = flying.number + 1;
            }
            is_in_order
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn flows_stay_in_order_whatever_way_they_take(
            seed in any::<u64>(),
            steps in proptest::collection::vec((0_u32..12, 0_u64..120, 1_u64..120, 0_u64..GAP_NS), 50..400),
        ) {
            let mut world = World::new(seed, 12);
            let mut now = 0;
            for (flow, pause, service, detour) in steps {
                now += pause;
                prop_assert!(world.arrive(now), "out of order at {now} ns");
                // Bursts, so that the link becomes hot, and silence now and then, so that it cools down.
                if pause == 7 {
                    now += 3 * GAP_NS;
                    prop_assert!(world.arrive(now), "out of order at {now} ns");
                }
                for packet in 0..pause % 4 {
                    world.send(now, (flow + packet as u32 % 2) % 12, service, detour);
                }
            }
            prop_assert!(world.arrive(u64::MAX));
            prop_assert_eq!(&world.sent, &world.arrived);
        }
    }

    #[test]
    fn the_property_is_tried_on_detours_too() {
        let mut random = Random::new(5, "steps");
        let mut world = World::new(1, 12);
        let mut now = 0;
        for _ in 0..5000 {
            now += random.below(60);
            assert!(world.arrive(now));
            world.send(now, random.below(12) as u32, 45, random.below(GAP_NS));
        }
        assert!(world.detoured > 200 && world.handed > 200, "{} round, {} straight", world.detoured, world.handed);
    }
}
