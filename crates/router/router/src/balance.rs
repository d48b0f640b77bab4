//! Load balancing between nodes: packets take the direct link, or a detour through an intermediate node.
//!
//! In a full mesh the direct link is the shortest and cheapest path. Only when it is overloaded and packets queue up
//! for it, flows are spread over intermediate nodes (Valiant load balancing), which relay them without a lookup.
//!
//! **Order.** Flows are hashed into buckets. A bucket changes its path only when none of its packets is in flight: from
//! the direct link once the peer has received all packets submitted for it, and from a detour once the bucket has been
//! idle for longer than any packet stays in flight (a flowlet gap). Therefore packets of a flow are never reordered.
//! The one exception is the failure of an intermediate node, whose flows change their path at once.

use sim::{Random, Span, Time};

use crate::{NODES_MAX, NodeId};

/// Number of flow buckets per destination.
pub const BUCKETS: usize = 256;

const NODES: usize = NODES_MAX as usize;

/// The state of the link to a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkLoad {
    /// Whether the link is up.
    pub is_up: bool,
    /// Number of packets queued for the link.
    pub queued: usize,
    /// Number of packets submitted to the link so far.
    pub submitted: u64,
    /// Number of these, in order, that are known to have left it: received, dropped or lost.
    pub completed: u64,
}

/// When flows take detours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// Queue length at which a link becomes hot; at a quarter of it the link stops being hot.
    pub hot_packets: usize,
    /// Upper bound of the time that a packet takes on a detour.
    pub flowlet_gap: Span,
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// Intermediate node, if the bucket takes a detour.
    detour: Option<NodeId>,
    /// Time of its last packet on a detour.
    last: Time,
    /// Number of its last packet on the direct link, in the count of [`LinkLoad::submitted`].
    sequence: u64,
}

const DIRECT: Bucket = Bucket { detour: None, last: Time::ZERO, sequence: 0 };

/// The flows to a node.
#[derive(Clone, Debug)]
struct Destination {
    is_hot: bool,
    /// Number of packets submitted to the direct link when it became hot; any bucket may own the last of them.
    sequence_when_hot: u64,
    /// Number of buckets on detours.
    detours: usize,
    /// Time of the last packet on a detour.
    detour_last: Time,
    buckets: Vec<Bucket>,
}

/// Selects the paths of packets.
#[derive(Debug)]
pub struct Balancer {
    own: NodeId,
    thresholds: Thresholds,
    destinations: Vec<Destination>,
    random: Random,
}

impl Balancer {
    /// Creates the balancer of node `own`; `seed` determines the random choices of intermediate nodes.
    pub fn new(own: NodeId, thresholds: Thresholds, seed: u64) -> Balancer {
        let destination = Destination {
            is_hot: false,
            sequence_when_hot: 0,
            detours: 0,
            detour_last: Time::ZERO,
            buckets: vec![DIRECT; BUCKETS],
        };
        Balancer { own, thresholds, destinations: vec![destination; NODES], random: Random::new(seed, "balance") }
    }

    /// Returns whether all packets to a node take the direct link now, in which case the caller need not distinguish
    /// flows. Must be called for packets to the node before [`Balancer::next_node`].
    pub fn is_direct(&mut self, now: Time, to: NodeId, links: &[LinkLoad; NODES]) -> bool {
        let Thresholds { hot_packets, flowlet_gap } = self.thresholds;
        let (destination, link) = (&mut self.destinations[usize::from(to.0)], links[usize::from(to.0)]);
        if !destination.is_hot && link.queued >= hot_packets {
            destination.is_hot = true;
            destination.sequence_when_hot = link.submitted;
        } else if destination.is_hot && link.queued <= hot_packets / 4 {
            destination.is_hot = false;
        }
        if destination.is_hot {
            return false;
        }
        if destination.detours > 0 && now.since(destination.detour_last) >= flowlet_gap {
            destination.buckets.fill(DIRECT);
            destination.detours = 0;
        }
        destination.detours == 0
    }

    /// Returns the next node of a packet to `to`, by its flow hash: `to` itself, or an intermediate node. Counts the
    /// packet as submitted to that link.
    pub fn next_node(&mut self, now: Time, to: NodeId, flow_hash: u32, links: &[LinkLoad; NODES]) -> NodeId {
        let at = flow_hash as usize % BUCKETS;
        let direct = links[usize::from(to.0)];
        let destination = &self.destinations[usize::from(to.0)];
        let bucket = destination.buckets[at];
        let is_free = match bucket.detour {
            None => bucket.sequence.max(destination.sequence_when_hot) <= direct.completed,
            Some(intermediate) => {
                !links[usize::from(intermediate.0)].is_up || now.since(bucket.last) >= self.thresholds.flowlet_gap
            }
        };
        let detour = if is_free { self.choose(to, links) } else { bucket.detour };
        let destination = &mut self.destinations[usize::from(to.0)];
        destination.detours += usize::from(detour.is_some());
        destination.detours -= usize::from(bucket.detour.is_some());
        let bucket = &mut destination.buckets[at];
        bucket.detour = detour;
        if let Some(intermediate) = detour {
            (bucket.last, destination.detour_last) = (now, now);
            return intermediate;
        }
        bucket.sequence = direct.submitted + 1;
        to
    }

    /// Selects the less loaded of two random intermediate nodes, if the direct link is hot and the load there is below
    /// half.
    fn choose(&mut self, to: NodeId, links: &[LinkLoad; NODES]) -> Option<NodeId> {
        let direct = links[usize::from(to.0)];
        if !self.destinations[usize::from(to.0)].is_hot {
            return None;
        }
        let mut intermediates = [NodeId(0); NODES];
        let mut count = 0;
        for node in (0..NODES_MAX).map(NodeId).filter(|node| *node != to && *node != self.own) {
            if links[usize::from(node.0)].is_up {
                intermediates[count] = node;
                count += 1;
            }
        }
        let drawn = |random: &mut Random| intermediates[random.below(count as u64) as usize];
        if count == 0 {
            return None;
        }
        let (one, other) = (drawn(&mut self.random), drawn(&mut self.random));
        let intermediate =
            if links[usize::from(one.0)].queued <= links[usize::from(other.0)].queued { one } else { other };
        (links[usize::from(intermediate.0)].queued < direct.queued / 2).then_some(intermediate)
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

    /// Returns the link states of a mesh of four nodes, as seen from node 0.
    fn links(queued: [usize; 4]) -> [LinkLoad; NODES] {
        let mut links = [LinkLoad::default(); NODES];
        for node in 1..4 {
            links[node] = up(queued[node]);
        }
        links
    }

    const TO: NodeId = NodeId(1);

    #[test]
    fn all_packets_take_the_direct_link_while_it_is_not_hot() {
        let mut balancer = Balancer::new(NodeId(0), thresholds(), 1);
        assert!(balancer.is_direct(at(0), TO, &links([0, HOT_PACKETS - 1, 0, 0])));
        assert!(!balancer.is_direct(at(0), TO, &links([0, HOT_PACKETS, 0, 0])));
        assert!(!balancer.is_direct(at(0), TO, &links([0, HOT_PACKETS / 4 + 1, 0, 0])), "still hot");
        assert!(balancer.is_direct(at(0), TO, &links([0, HOT_PACKETS / 4, 0, 0])));
    }

    #[test]
    fn flows_of_a_hot_link_take_detours_once_none_of_their_packets_is_in_flight() {
        let mut balancer = Balancer::new(NodeId(0), thresholds(), 1);
        let mut loads = links([0, 100, 0, 0]);
        (loads[1].submitted, loads[1].completed) = (500, 400);
        assert!(!balancer.is_direct(at(0), TO, &loads));
        assert_eq!(balancer.next_node(at(0), TO, 7, &loads), TO, "100 packets, perhaps of this flow, are in flight");
        (loads[1].submitted, loads[1].completed) = (501, 500);
        assert_eq!(balancer.next_node(at(1), TO, 7, &loads), TO, "its last packet is in flight");
        (loads[1].submitted, loads[1].completed) = (502, 502);
        let intermediate = balancer.next_node(at(2), TO, 7, &loads);
        assert!(intermediate == NodeId(2) || intermediate == NodeId(3));
        assert_ne!(balancer.next_node(at(3), TO, 8, &loads), TO);
        // The flow stays on the detour while its packets follow closely, even if the link is not hot any more.
        loads[1].queued = 0;
        assert!(!balancer.is_direct(at(900), TO, &loads));
        assert_eq!(balancer.next_node(at(900), TO, 7, &loads), intermediate);
        assert!(!balancer.is_direct(at(1899), TO, &loads));
        assert!(balancer.is_direct(at(1900), TO, &loads), "all packets on detours have arrived");
    }

    #[test]
    fn flows_spread_over_intermediate_nodes_except_loaded_or_failed_ones() {
        let mut balancer = Balancer::new(NodeId(0), thresholds(), 3);
        let spread = |balancer: &mut Balancer, loads: &[LinkLoad; NODES], first: u32| {
            let mut counts = [0; NODES];
            assert!(!balancer.is_direct(at(0), TO, loads));
            (first..first + 60).for_each(|hash| counts[usize::from(balancer.next_node(at(0), TO, hash, loads).0)] += 1);
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
        assert_eq!(spread(&mut balancer, &loads, 180)[1], 60, "no intermediate node is up");
        assert_eq!(spread(&mut balancer, &loads, 0)[1], 60, "flows of failed nodes change their path at once");
    }

    /// A packet in flight.
    struct InFlight {
        flow: u32,
        number: u64,
        arrives: u64,
    }

    /// A mesh whose direct link serves its queue at a rate, and whose detours take any time below the gap, in order.
    struct Mesh {
        balancer: Balancer,
        direct: VecDeque<InFlight>,
        direct_free: u64,
        detours_in_flight: Vec<InFlight>,
        /// Arrival of the last packet through each intermediate node: packets on a path stay in order.
        detour_last_arrival: [u64; NODES],
        submitted: u64,
        completed: u64,
        sent: Vec<u64>,
        arrived: Vec<u64>,
        detoured: u64,
    }

    impl Mesh {
        fn new(seed: u64, flows: usize) -> Mesh {
            Mesh {
                balancer: Balancer::new(NodeId(0), thresholds(), seed),
                direct: VecDeque::new(),
                direct_free: 0,
                detours_in_flight: Vec::new(),
                detour_last_arrival: [0; NODES],
                submitted: 0,
                completed: 0,
                sent: vec![0; flows],
                arrived: vec![0; flows],
                detoured: 0,
            }
        }

        fn send(&mut self, now: u64, flow: u32, service: u64, detour: u64) {
            let mut loads = links([0, self.direct.len(), 0, 0]);
            (loads[1].submitted, loads[1].completed) = (self.submitted, self.completed);
            let is_direct = self.balancer.is_direct(at(now), TO, &loads);
            let next_node = if is_direct { TO } else { self.balancer.next_node(at(now), TO, flow, &loads) };
            let number = self.sent[flow as usize];
            self.sent[flow as usize] += 1;
            if next_node == TO {
                self.submitted += 1;
                self.direct_free = self.direct_free.max(now) + service;
                self.direct.push_back(InFlight { flow, number, arrives: self.direct_free });
            } else {
                self.detoured += 1;
                let last = &mut self.detour_last_arrival[usize::from(next_node.0)];
                *last = (now + detour).max(*last);
                self.detours_in_flight.push(InFlight { flow, number, arrives: *last });
            }
        }

        /// Processes all arrivals until `now`, and returns whether each flow is in order.
        fn arrive(&mut self, now: u64) -> bool {
            let mut due: Vec<InFlight> = Vec::new();
            while let Some(packet) = self.direct.pop_front_if(|packet| packet.arrives <= now) {
                self.completed += 1;
                due.push(packet);
            }
            due.extend(self.detours_in_flight.extract_if(.., |packet| packet.arrives <= now));
            due.sort_by_key(|packet| packet.arrives);
            let mut is_in_order = true;
            for packet in due {
                let next = &mut self.arrived[packet.flow as usize];
                is_in_order &= *next == packet.number;
                *next = packet.number + 1;
            }
            is_in_order
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn flows_stay_in_order_on_all_paths(
            seed in any::<u64>(),
            steps in proptest::collection::vec((0_u32..12, 0_u64..120, 1_u64..120, 0_u64..GAP_NS), 50..400),
        ) {
            let mut mesh = Mesh::new(seed, 12);
            let mut now = 0;
            for (flow, pause, service, detour) in steps {
                now += pause;
                prop_assert!(mesh.arrive(now), "out of order at {now} ns");
                // Bursts, so that the link becomes hot, and occasional pauses, so that it stops being hot.
                if pause == 7 {
                    now += 3 * GAP_NS;
                    prop_assert!(mesh.arrive(now), "out of order at {now} ns");
                }
                for packet in 0..pause % 4 {
                    mesh.send(now, (flow + packet as u32 % 2) % 12, service, detour);
                }
            }
            prop_assert!(mesh.arrive(u64::MAX));
            prop_assert_eq!(&mesh.sent, &mesh.arrived);
        }
    }

    #[test]
    fn the_test_of_the_order_covers_detours() {
        let mut random = Random::new(5, "steps");
        let mut mesh = Mesh::new(1, 12);
        let mut now = 0;
        for _ in 0..5000 {
            now += random.below(60);
            assert!(mesh.arrive(now));
            mesh.send(now, random.below(12) as u32, 45, random.below(GAP_NS));
        }
        assert!(mesh.detoured > 200 && mesh.submitted > 200, "{} detoured, {} direct", mesh.detoured, mesh.submitted);
    }
}
