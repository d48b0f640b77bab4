//! Two nodes in virtual time, which shows the effect of a batching policy on latency without other disturbances.
//!
//! Each node has a clock that advances only by the cost of its work ([`NodeCosts`]). The caller polls the node whose
//! clock is behind.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use router::NodeId;
use router::batch::FIXED_PACKETS_MAX;
use router::batch::message::{self, Header, Message};
use sim::{Span, Time};

use super::carrier::{Ack, Carrier, CarrierError, FlowLimits, MessageSink, Packets};
use super::interface::{ConnectionParams, Interconnect, InterconnectError, InterconnectSettings, Offer};
use super::mesh::Mesh;
use super::{medium, memory, rnic};

/// The cost of messages in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MessageCost {
    /// Per message, without its packets.
    pub message_ns: f64,
    /// Per packet.
    pub packet_ns: f64,
    /// Per byte.
    pub byte_ns: f64,
    /// Additional cost per byte beyond [`L1_BYTES`].
    pub uncached_byte_ns: f64,
}

/// A message of this length and its copy fit a first-level cache of 32 KiB.
const L1_BYTES: usize = 12_500;

impl MessageCost {
    /// Returns the cost of a message with this many packets and bytes.
    pub fn ns(&self, packets: usize, bytes: usize) -> f64 {
        let uncached_bytes = bytes.saturating_sub(L1_BYTES);
        let bytes_ns = self.byte_ns * bytes as f64 + self.uncached_byte_ns * uncached_bytes as f64;
        self.message_ns + self.packet_ns * packets as f64 + bytes_ns
    }
}

/// The costs of a node in nanoseconds: *assumed*, or fitted to measurements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeCosts {
    /// Per poll, whatever happens in it.
    pub poll_ns: f64,
    /// Sending messages.
    pub send: MessageCost,
    /// Receiving messages.
    pub receive: MessageCost,
    /// Reading the acknowledgement word, whose cache line two cores share.
    pub ack_poll_ns: f64,
    /// From the end of sending until the peer can see the message.
    pub one_way_ns: f64,
}

/// The interconnect that is modelled: its flow control limits and its kind of acknowledgements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelledTransport {
    /// [`super::TransportKind::Lanes`].
    Lanes,
    /// [`super::TransportKind::RnicLanes`].
    RnicLanes,
    /// [`super::TransportKind::RnicUdp`].
    RnicUdp,
}

impl ModelledTransport {
    fn limits(self) -> FlowLimits {
        match self {
            ModelledTransport::Lanes => memory::limits(&medium::Direct),
            ModelledTransport::RnicLanes => rnic::limits::<rnic_live::LaneIo>(),
            ModelledTransport::RnicUdp => rnic::limits::<rnic_live::UdpIo>(),
        }
    }
}

/// Returns the number of packets of this length in a message of the longest fixed batch.
pub fn fixed_packets_max(transport: ModelledTransport, packet_bytes: usize) -> usize {
    let packets = std::iter::repeat_n(packet_bytes, FIXED_PACKETS_MAX);
    message::fit(transport.limits().message_bytes_max, packets).0
}

/// The state that both nodes share.
struct Shared {
    /// The clocks of nodes 0 and 1.
    clocks_ns: [f64; 2],
    /// Messages to nodes 0 and 1, each with the time from which it is visible.
    messages: [VecDeque<(f64, Vec<u8>)>; 2],
    /// The bytes of these messages.
    queued_bytes: [usize; 2],
    /// Acknowledgements for nodes 0 and 1, each with the time from which it is visible.
    acks: [VecDeque<(f64, Ack)>; 2],
    /// Buffers of received messages, for reuse.
    spare: Vec<Vec<u8>>,
}

/// The clocks of the two nodes.
#[derive(Clone)]
pub struct VirtualClocks(Arc<Mutex<Shared>>);

impl VirtualClocks {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the time of node 0 or 1.
    ///
    /// # Panics
    /// Panics for another node.
    pub fn now(&self, node: usize) -> Time {
        Time::ZERO + Span::from_ns(self.lock().clocks_ns[node])
    }

    /// Advances the clock of node 0 or 1 by other work.
    ///
    /// # Panics
    /// Panics for another node.
    pub fn spend(&self, node: usize, span: Span) {
        self.lock().clocks_ns[node] += span.ns();
    }
}

/// Returns nodes 0 and 1, connected, and their clocks.
///
/// # Errors
/// Returns an error when the policy is invalid.
///
/// # Panics
/// Panics when a poll costs nothing: time would not advance without work.
pub fn pair(
    transport: ModelledTransport,
    costs: NodeCosts,
    settings: &InterconnectSettings,
) -> Result<([Box<dyn Interconnect>; 2], VirtualClocks), InterconnectError> {
    settings.policy.check()?;
    assert!(costs.poll_ns > 0.0, "{costs:?}");
    let shared = Shared {
        clocks_ns: [0.0; 2],
        messages: Default::default(),
        queued_bytes: [0; 2],
        acks: Default::default(),
        spare: Vec::new(),
    };
    let clocks = VirtualClocks(Arc::new(Mutex::new(shared)));
    let node = |own: u8| -> Result<Box<dyn Interconnect>, InterconnectError> {
        let carrier = VirtualCarrier { own: own.into(), transport, costs, clocks: clocks.clone() };
        Ok(Box::new(Mesh::new(NodeId(own), *settings, carrier)?))
    };
    let [mut first, mut second] = [node(0)?, node(1)?];
    let offer = first.offer(NodeId(1))?;
    let params = second.accept(NodeId(0), offer)?;
    first.finish(NodeId(1), &params)?;
    Ok(([first, second], clocks))
}

struct VirtualCarrier {
    own: usize,
    transport: ModelledTransport,
    costs: NodeCosts,
    clocks: VirtualClocks,
}

impl VirtualCarrier {
    /// Sends a message after advancing the clock by its cost.
    fn put(&self, cost_ns: f64, put: impl FnOnce(&mut Vec<u8>)) {
        let mut shared = self.clocks.lock();
        let mut message = shared.spare.pop().unwrap_or_default();
        put(&mut message);
        shared.clocks_ns[self.own] += cost_ns;
        let seen_ns = shared.clocks_ns[self.own] + self.costs.one_way_ns;
        shared.queued_bytes[1 - self.own] += message.len();
        shared.messages[1 - self.own].push_back((seen_ns, message));
    }

    /// Returns whether the modelled ring, if there is one, has room for another message.
    fn has_room(&self, bytes: usize) -> bool {
        let queued_bytes = self.clocks.lock().queued_bytes[1 - self.own];
        self.transport != ModelledTransport::Lanes || queued_bytes + bytes <= memory::RING_BYTES
    }
}

const PARAMS: ConnectionParams = ConnectionParams { secret: 1, queue_pair: 0, packet_sequence: 0, address: None };

impl Carrier for VirtualCarrier {
    fn limits(&self) -> FlowLimits {
        self.transport.limits()
    }

    fn offer(&mut self, _: NodeId) -> Result<Offer, InterconnectError> {
        Ok(Offer { params: PARAMS, descriptors: Vec::new() })
    }

    fn accept(&mut self, _: NodeId, _: Offer) -> Result<ConnectionParams, InterconnectError> {
        Ok(PARAMS)
    }

    fn finish(&mut self, _: NodeId, _: &ConnectionParams) -> Result<(), InterconnectError> {
        Ok(())
    }

    fn remove_peer(&mut self, _: NodeId) {}

    fn restart(&mut self) -> Result<(), InterconnectError> {
        Ok(())
    }

    fn poll(&mut self) -> bool {
        self.clocks.lock().clocks_ns[self.own] += self.costs.poll_ns;
        false
    }

    fn send<'a>(&mut self, _: NodeId, header: &Header, packets: impl Packets<'a>) -> Result<usize, CarrierError> {
        let lengths = packets.clone().map(|packet| packet.bytes.len());
        let (count, message_bytes) = message::fit(self.limits().message_bytes_max, lengths);
        if !self.has_room(message_bytes) {
            return Ok(0);
        }
        let packets = packets.take(count);
        let bytes = packets.clone().map(|packet| packet.bytes.len()).sum();
        self.put(self.costs.send.ns(count, bytes), |message| {
            message.resize(message_bytes, 0);
            message::put(message, header, packets);
        });
        Ok(count)
    }

    fn send_ack(&mut self, _: NodeId, header: &Header) -> Result<bool, CarrierError> {
        if !self.has_room(message::HEADER_BYTES) {
            return Ok(false);
        }
        self.put(self.costs.send.ns(0, 0), |message| {
            message.resize(message::HEADER_BYTES, 0);
            message::put(message, header, [].into_iter());
        });
        Ok(true)
    }

    fn flush(&mut self, _: NodeId) {}

    fn receive(&mut self, sink: &mut impl MessageSink) -> Result<bool, (NodeId, CarrierError)> {
        let from = NodeId(1 - self.own as u8);
        let mut shared = self.clocks.lock();
        let now_ns = shared.clocks_ns[self.own];
        let messages = &mut shared.messages[self.own];
        let is_seen = messages.front().is_some_and(|(seen_ns, _)| *seen_ns <= now_ns);
        let Some((_, bytes)) = is_seen.then(|| messages.pop_front()).flatten() else { return Ok(false) };
        shared.queued_bytes[self.own] -= bytes.len();
        let processed = Message::check(&bytes[..]).and_then(|message| {
            let packet_bytes = message.entries().map(|entry| entry.bytes).sum();
            shared.clocks_ns[self.own] += self.costs.receive.ns(message.packets(), packet_bytes);
            sink.receive(from, &message, &bytes[..])
        });
        shared.spare.push(bytes);
        processed.map_err(|error| (from, error.into()))?;
        Ok(true)
    }

    fn poll_ack(&mut self, _: NodeId) -> Option<Ack> {
        if self.transport != ModelledTransport::Lanes {
            return None;
        }
        let mut shared = self.clocks.lock();
        shared.clocks_ns[self.own] += self.costs.ack_poll_ns;
        let now_ns = shared.clocks_ns[self.own];
        let acks = &mut shared.acks[self.own];
        while acks.get(1).is_some_and(|(seen_ns, _)| *seen_ns <= now_ns) {
            acks.pop_front();
        }
        acks.front().filter(|(seen_ns, _)| *seen_ns <= now_ns).map(|(_, ack)| *ack)
    }

    fn write_ack(&mut self, _: NodeId, ack: Ack) {
        let mut shared = self.clocks.lock();
        let seen_ns = shared.clocks_ns[self.own] + self.costs.one_way_ns;
        shared.acks[1 - self.own].push_back((seen_ns, ack));
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn prepare_wait(&mut self) -> bool {
        false
    }

    fn finish_wait(&mut self) {}
}

#[cfg(test)]
mod tests {
    use router::batch::Parcel;
    use router::{AdjacencyId, Hop, Pool, PortId};

    use super::*;

    const MESSAGE: MessageCost =
        MessageCost { message_ns: 200.0, packet_ns: 20.0, byte_ns: 0.1, uncached_byte_ns: 0.0 };
    const COSTS: NodeCosts =
        NodeCosts { poll_ns: 30.0, send: MESSAGE, receive: MESSAGE, ack_poll_ns: 80.0, one_way_ns: 100.0 };
    const ITERATION: Span = Span::from_ps(10_000_000);

    struct Nodes {
        nodes: [Box<dyn Interconnect>; 2],
        pools: [Pool; 2],
        clocks: VirtualClocks,
    }

    impl Nodes {
        fn new(transport: ModelledTransport) -> Nodes {
            let (nodes, clocks) = pair(transport, COSTS, &InterconnectSettings::default()).unwrap();
            Nodes { nodes, pools: std::array::from_fn(|_| Pool::new(64, 2048, 64)), clocks }
        }

        /// Polls both nodes for this time.
        fn pass(&mut self, us: f64) {
            let until = self.clocks.now(0).max(self.clocks.now(1)) + Span::from_ns(1000.0 * us);
            loop {
                let behind = [0, 1].into_iter().min_by_key(|node| self.clocks.now(*node));
                let Some(node) = behind.filter(|node| self.clocks.now(*node) < until) else { return };
                self.poll(node);
            }
        }

        fn poll(&mut self, node: usize) {
            let mut arrived = Vec::new();
            self.nodes[node].poll(self.clocks.now(node), &mut self.pools[node], &mut arrived, 32);
            arrived.into_iter().for_each(|(_, packet): Parcel| self.pools[node].free(packet));
        }

        /// Keeps the receiver busy with full messages, or idle, for a number of iterations.
        fn occupy(&mut self, iterations: usize, is_busy: bool) {
            for _ in 0..iterations {
                if is_busy {
                    self.send(32);
                }
                (0..2).for_each(|node| self.clocks.spend(node, ITERATION));
                (0..2).for_each(|node| self.poll(node));
                self.nodes[1].begin_iteration(self.clocks.now(1), is_busy);
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
    fn a_busy_peer_gets_batches_of_half_the_target_while_its_report_is_recent() {
        for transport in [ModelledTransport::Lanes, ModelledTransport::RnicLanes, ModelledTransport::RnicUdp] {
            let mut nodes = Nodes::new(transport);
            nodes.send(1);
            assert_eq!(nodes.sent(), (1, 1), "{transport:?}: occupancy is not known yet");
            nodes.occupy(2000, true);
            nodes.pass(100.0);
            let before = nodes.sent();
            let sent_since = |nodes: &Nodes| (nodes.sent().0 - before.0, nodes.sent().1 - before.1);
            let now = nodes.clocks.now(0);
            nodes.send(3);
            assert!(nodes.nodes[0].deadline().is_some_and(|at| at <= now + Span::from_ns(5000.0)), "{transport:?}");
            nodes.pass(4.0);
            nodes.send(2);
            assert_eq!(sent_since(&nodes), (0, 0), "{transport:?}: packets wait to be batched");
            nodes.pass(100.0);
            assert_eq!(sent_since(&nodes), (1, 5), "{transport:?}");
            nodes.pass(2000.0);
            nodes.send(3);
            assert_eq!(sent_since(&nodes), (2, 8), "{transport:?}: the reported occupancy has expired");
            nodes.pass(100.0);
            nodes.send(3);
            assert_eq!(sent_since(&nodes), (2, 8), "{transport:?}: the peer is still busy");
            nodes.occupy(2000, false);
            nodes.pass(100.0);
            nodes.send(3);
            assert_eq!(sent_since(&nodes), (4, 14), "{transport:?}: the peer is idle again");
        }
    }
}
