//! A carrier between two nodes in virtual time: what a policy does to latency where nothing else disturbs it.
//!
//! Each node has a clock of its own, which goes on by what its work costs ([`Costs`]) and by nothing else. Whoever
//! drives the two gives a turn to the one whose clock is behind.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use router::NodeId;
use router::batch::FIXED_PACKETS_MAX;
use router::batch::message::{self, Header, Message};
use sim::{Span, Time};

use super::carrier::{Carrier, Fault, Intake, Limits, Packets, Told};
use super::interface::{Interconnect, InterconnectError, Offer, Settings, Terms};
use super::mesh::Mesh;
use super::{memory, rnic};

/// What a node spends on messages, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// On each, without its packets.
    pub message_ns: f64,
    /// On each of its packets.
    pub packet_ns: f64,
    /// On each of their bytes.
    pub byte_ns: f64,
    /// On each of those beyond what fits the first cache twice ([`NEAR_BYTES`]), besides.
    pub far_byte_ns: f64,
}

/// A message of so many bytes and its copy fit a first cache of 32 KiB.
const NEAR_BYTES: usize = 12_500;

impl Work {
    /// On a message of so many packets, with so many bytes all together.
    pub fn ns(&self, packets: usize, bytes: usize) -> f64 {
        let far_bytes = bytes.saturating_sub(NEAR_BYTES);
        let bytes_ns = self.byte_ns * bytes as f64 + self.far_byte_ns * far_bytes as f64;
        self.message_ns + self.packet_ns * packets as f64 + bytes_ns
    }
}

/// What work costs a node, in nanoseconds. *Assumed*, or fitted to what was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// A turn, whatever happens in it.
    pub turn_ns: f64,
    /// To send messages.
    pub sends: Work,
    /// To take them in.
    pub takes: Work,
    /// A look at what the peer says in a line that two cores pass to and fro.
    pub look_ns: f64,
    /// From the end of sending to when the peer can see it.
    pub one_way_ns: f64,
}

/// As which interconnect it works: how much may be under way, and how that is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// [`super::Kind::Lanes`].
    Lanes,
    /// [`super::Kind::RnicLanes`].
    RnicLanes,
    /// [`super::Kind::RnicUdp`].
    RnicUdp,
}

impl Manner {
    fn limits(self) -> Limits {
        match self {
            Manner::Lanes => memory::limits(&memory::Direct),
            Manner::RnicLanes => rnic::limits::<rnic_live::LaneIo>(),
            Manner::RnicUdp => rnic::limits::<rnic_live::UdpIo>(),
        }
    }
}

/// How many packets of so many bytes a message of the longest fixed batch has.
pub fn fixed_packets_max(manner: Manner, packet_bytes: usize) -> usize {
    let packets = std::iter::repeat_n(packet_bytes, FIXED_PACKETS_MAX);
    message::fit(manner.limits().message_bytes_max, packets).0
}

/// What both nodes share.
struct Shared {
    /// Of nodes 0 and 1.
    clocks_ns: [f64; 2],
    /// To nodes 0 and 1: from when on they are seen, and their bytes.
    messages: [VecDeque<(f64, Vec<u8>)>; 2],
    /// Bytes of those.
    waiting_bytes: [usize; 2],
    /// To nodes 0 and 1: from when on it is seen what their peer says of what it takes in, and what.
    told: [VecDeque<(f64, Told)>; 2],
    /// Messages that were taken in, to be filled anew.
    spare: Vec<Vec<u8>>,
}

/// The clocks of two nodes.
#[derive(Clone)]
pub struct Clocks(Arc<Mutex<Shared>>);

impl Clocks {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the clock of node 0 or 1 shows.
    ///
    /// # Panics
    /// For another node.
    pub fn now(&self, node: usize) -> Time {
        Time::ZERO + Span::from_ns(self.lock().clocks_ns[node])
    }

    /// Something else keeps node 0 or 1 busy for so long.
    ///
    /// # Panics
    /// For another node.
    pub fn spend(&self, node: usize, span: Span) {
        self.lock().clocks_ns[node] += span.ns();
    }
}

/// Nodes 0 and 1, joined, and their clocks.
///
/// # Errors
/// On a policy that cannot be.
///
/// # Panics
/// When a turn costs nothing: then time would stand still where there is nothing to do.
pub fn pair(
    manner: Manner,
    costs: Costs,
    settings: &Settings,
) -> Result<([Box<dyn Interconnect>; 2], Clocks), InterconnectError> {
    settings.policy.check()?;
    assert!(costs.turn_ns > 0.0, "{costs:?}");
    let shared = Shared {
        clocks_ns: [0.0; 2],
        messages: Default::default(),
        waiting_bytes: [0; 2],
        told: Default::default(),
        spare: Vec::new(),
    };
    let clocks = Clocks(Arc::new(Mutex::new(shared)));
    let node = |own: u8| -> Result<Box<dyn Interconnect>, InterconnectError> {
        let carrier = VirtualCarrier { own: own.into(), manner, costs, clocks: clocks.clone() };
        Ok(Box::new(Mesh::new(NodeId(own), *settings, carrier)?))
    };
    let [mut first, mut second] = [node(0)?, node(1)?];
    let offer = first.offer(NodeId(1))?;
    let terms = second.accept(NodeId(0), offer)?;
    first.finish(NodeId(1), &terms)?;
    Ok(([first, second], clocks))
}

struct VirtualCarrier {
    own: usize,
    manner: Manner,
    costs: Costs,
    clocks: Clocks,
}

impl VirtualCarrier {
    /// Sends a message that was put together, once that has cost what it costs.
    fn put(&self, cost_ns: f64, put: impl FnOnce(&mut Vec<u8>)) {
        let mut shared = self.clocks.lock();
        let mut message = shared.spare.pop().unwrap_or_default();
        put(&mut message);
        shared.clocks_ns[self.own] += cost_ns;
        let seen_ns = shared.clocks_ns[self.own] + self.costs.one_way_ns;
        shared.waiting_bytes[1 - self.own] += message.len();
        shared.messages[1 - self.own].push_back((seen_ns, message));
    }

    /// Whether the ring in memory, if that is what carries messages, has room for one more.
    fn has_room(&self, bytes: usize) -> bool {
        let waiting_bytes = self.clocks.lock().waiting_bytes[1 - self.own];
        self.manner != Manner::Lanes || waiting_bytes + bytes <= memory::RING_BYTES
    }
}

const TERMS: Terms = Terms { secret: 1, queue_pair: 0, packet_sequence: 0, address: None };

impl Carrier for VirtualCarrier {
    fn limits(&self) -> Limits {
        self.manner.limits()
    }

    fn offer(&mut self, _: NodeId) -> Result<Offer, InterconnectError> {
        Ok(Offer { terms: TERMS, descriptors: Vec::new() })
    }

    fn accept(&mut self, _: NodeId, _: Offer) -> Result<Terms, InterconnectError> {
        Ok(TERMS)
    }

    fn finish(&mut self, _: NodeId, _: &Terms) -> Result<(), InterconnectError> {
        Ok(())
    }

    fn leave(&mut self, _: NodeId) {}

    fn renew(&mut self) -> Result<(), InterconnectError> {
        Ok(())
    }

    fn turn(&mut self) -> bool {
        self.clocks.lock().clocks_ns[self.own] += self.costs.turn_ns;
        false
    }

    fn send<'a>(&mut self, _: NodeId, header: &Header, packets: impl Packets<'a>) -> Result<usize, Fault> {
        let lengths = packets.clone().map(|(_, bytes)| bytes.len());
        let (count, message_bytes) = message::fit(self.limits().message_bytes_max, lengths);
        if !self.has_room(message_bytes) {
            return Ok(0);
        }
        let packets = packets.take(count);
        let bytes = packets.clone().map(|(_, bytes)| bytes.len()).sum();
        self.put(self.costs.sends.ns(count, bytes), |message| {
            message.resize(message_bytes, 0);
            message::put(message, header, packets);
        });
        Ok(count)
    }

    fn tell(&mut self, _: NodeId, header: &Header) -> Result<bool, Fault> {
        if !self.has_room(message::HEADER_BYTES) {
            return Ok(false);
        }
        self.put(self.costs.sends.ns(0, 0), |message| {
            message.resize(message::HEADER_BYTES, 0);
            message::put(message, header, [].into_iter());
        });
        Ok(true)
    }

    fn flush(&mut self, _: NodeId) {}

    fn receive(&mut self, intake: &mut impl Intake) -> Result<bool, (NodeId, Fault)> {
        let from = NodeId(1 - self.own as u8);
        let mut shared = self.clocks.lock();
        let now_ns = shared.clocks_ns[self.own];
        let messages = &mut shared.messages[self.own];
        let is_seen = messages.front().is_some_and(|(seen_ns, _)| *seen_ns <= now_ns);
        let Some((_, bytes)) = is_seen.then(|| messages.pop_front()).flatten() else { return Ok(false) };
        shared.waiting_bytes[self.own] -= bytes.len();
        let taken = Message::check(&bytes[..]).and_then(|message| {
            let packet_bytes = message.entries().map(|place| place.bytes).sum();
            shared.clocks_ns[self.own] += self.costs.takes.ns(message.packets(), packet_bytes);
            intake.take(from, &message, &bytes[..])
        });
        shared.spare.push(bytes);
        taken.map_err(|error| (from, error.into()))?;
        Ok(true)
    }

    fn told(&mut self, _: NodeId) -> Option<Told> {
        if self.manner != Manner::Lanes {
            return None;
        }
        let mut shared = self.clocks.lock();
        shared.clocks_ns[self.own] += self.costs.look_ns;
        let now_ns = shared.clocks_ns[self.own];
        let said = &mut shared.told[self.own];
        while said.get(1).is_some_and(|(seen_ns, _)| *seen_ns <= now_ns) {
            said.pop_front();
        }
        said.front().filter(|(seen_ns, _)| *seen_ns <= now_ns).map(|(_, told)| *told)
    }

    fn tell_in_place(&mut self, _: NodeId, told: Told) {
        let mut shared = self.clocks.lock();
        let seen_ns = shared.clocks_ns[self.own] + self.costs.one_way_ns;
        shared.told[1 - self.own].push_back((seen_ns, told));
    }

    fn wakes(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn may_sleep(&mut self) -> bool {
        false
    }

    fn woke(&mut self) {}
}

#[cfg(test)]
mod tests {
    use router::batch::Parcel;
    use router::{AdjacencyId, Hop, Pool, PortId};

    use super::*;

    const WORK: Work = Work { message_ns: 200.0, packet_ns: 20.0, byte_ns: 0.1, far_byte_ns: 0.0 };
    const COSTS: Costs = Costs { turn_ns: 30.0, sends: WORK, takes: WORK, look_ns: 80.0, one_way_ns: 100.0 };
    const ROUND: Span = Span::from_ps(10_000_000);

    struct Nodes {
        nodes: [Box<dyn Interconnect>; 2],
        pools: [Pool; 2],
        clocks: Clocks,
    }

    impl Nodes {
        fn new(manner: Manner) -> Nodes {
            let (nodes, clocks) = pair(manner, COSTS, &Settings::default()).unwrap();
            Nodes { nodes, pools: std::array::from_fn(|_| Pool::new(64, 2048, 64)), clocks }
        }

        /// Both take turns for so long.
        fn pass(&mut self, us: f64) {
            let until = self.clocks.now(0).max(self.clocks.now(1)) + Span::from_ns(1000.0 * us);
            loop {
                let behind = [0, 1].into_iter().min_by_key(|node| self.clocks.now(*node));
                let Some(node) = behind.filter(|node| self.clocks.now(*node) < until) else { return };
                self.turn(node);
            }
        }

        fn turn(&mut self, node: usize) {
            let mut arrived = Vec::new();
            self.nodes[node].turn(self.clocks.now(node), &mut self.pools[node], &mut arrived, 32);
            arrived.into_iter().for_each(|(_, packet): Parcel| self.pools[node].free(packet));
        }

        /// The receiver is busy with full messages, or with nothing, for so many rounds.
        fn occupy(&mut self, rounds: usize, is_busy: bool) {
            for _ in 0..rounds {
                if is_busy {
                    self.send(32);
                }
                (0..2).for_each(|node| self.clocks.spend(node, ROUND));
                (0..2).for_each(|node| self.turn(node));
                self.nodes[1].begin_round(self.clocks.now(1), is_busy);
            }
        }

        fn send(&mut self, packets: usize) {
            let hop = Hop { node: NodeId(1), port: PortId(0), adjacency: AdjacencyId(1) };
            let mut parcels: Vec<Parcel> = (0..packets).map(|_| (hop, self.pools[0].alloc().unwrap())).collect();
            parcels.iter_mut().for_each(|(_, packet)| self.pools[0].resize(packet, 46));
            self.nodes[0].send(self.clocks.now(0), &mut self.pools[0], NodeId(1), &mut parcels);
        }

        fn sent(&self) -> (u64, u64) {
            let counters = self.nodes[0].counters(NodeId(1));
            (counters.sent_messages, counters.sent_packets)
        }
    }

    #[test]
    fn who_says_that_it_is_busy_gets_what_comes_in_half_the_target_together_while_that_is_news() {
        for manner in [Manner::Lanes, Manner::RnicLanes, Manner::RnicUdp] {
            let mut nodes = Nodes::new(manner);
            nodes.send(1);
            assert_eq!(nodes.sent(), (1, 1), "{manner:?}: nothing is known yet");
            nodes.occupy(2000, true);
            nodes.pass(100.0);
            let before = nodes.sent();
            let sent_since = |nodes: &Nodes| (nodes.sent().0 - before.0, nodes.sent().1 - before.1);
            let now = nodes.clocks.now(0);
            nodes.send(3);
            assert!(nodes.nodes[0].deadline().is_some_and(|at| at <= now + Span::from_ns(5000.0)), "{manner:?}");
            nodes.pass(4.0);
            nodes.send(2);
            assert_eq!(sent_since(&nodes), (0, 0), "{manner:?}: they wait for each other");
            nodes.pass(100.0);
            assert_eq!(sent_since(&nodes), (1, 5), "{manner:?}");
            nodes.pass(2000.0);
            nodes.send(3);
            assert_eq!(sent_since(&nodes), (2, 8), "{manner:?}: that is no news any more");
            nodes.pass(100.0);
            nodes.send(3);
            assert_eq!(sent_since(&nodes), (2, 8), "{manner:?}: it still is busy");
            nodes.occupy(2000, false);
            nodes.pass(100.0);
            nodes.send(3);
            assert_eq!(sent_since(&nodes), (4, 14), "{manner:?}: no more");
        }
    }
}
