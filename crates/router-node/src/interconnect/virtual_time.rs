//! A carrier between two nodes in virtual time: what a policy does to latency where nothing else disturbs it.
//!
//! Each node has a clock of its own, which goes on by what its work costs ([`Costs`]) and by nothing else. Whoever
//! drives the two gives a turn to the one whose clock is behind.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use router::NodeId;
use router::batch::message::{self, Header, Message};
use sim::{Span, Time};

use super::carrier::{Carrier, Fault, Intake, Limits, Packets, Told};
use super::mesh::Mesh;
use super::{Interconnect, InterconnectError, Offer, Settings, Terms, memory, rnic};

/// What a node spends on messages, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// On each, without its packets.
    pub message_ns: f64,
    /// On each of its packets.
    pub packet_ns: f64,
    /// On each of their bytes.
    pub byte_ns: f64,
}

impl Work {
    /// On a message of so many packets, with so many bytes all together.
    pub fn ns(&self, packets: usize, bytes: usize) -> f64 {
        self.message_ns + self.packet_ns * packets as f64 + self.byte_ns * bytes as f64
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
    Rnic,
}

impl Manner {
    fn limits(self) -> Limits {
        match self {
            Manner::Lanes => memory::limits(&memory::Direct),
            Manner::Rnic => rnic::limits(0),
        }
    }
}

/// How many packets of so many bytes a full message has.
pub fn message_packets_max(manner: Manner, packet_bytes: usize) -> usize {
    message::fit(manner.limits().message_bytes_max, std::iter::repeat(packet_bytes)).0
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
pub fn pair(
    manner: Manner,
    costs: Costs,
    settings: &Settings,
) -> Result<([Box<dyn Interconnect>; 2], Clocks), InterconnectError> {
    settings.policy.check()?;
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
        self.manner == Manner::Rnic || waiting_bytes + bytes <= memory::RING_BYTES
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
            let packet_bytes = message.places().map(|place| place.bytes).sum();
            shared.clocks_ns[self.own] += self.costs.takes.ns(message.packets(), packet_bytes);
            intake.take(from, &message, &bytes[..])
        });
        shared.spare.push(bytes);
        taken.map_err(|error| (from, error.into()))?;
        Ok(true)
    }

    fn told(&mut self, _: NodeId) -> Option<Told> {
        if self.manner == Manner::Rnic {
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
