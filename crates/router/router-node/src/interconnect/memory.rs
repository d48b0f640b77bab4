//! Messages in rings that both nodes map: lanes, with plain memory or the timing of a modelled link.
//!
//! A message is one record of a lane. The sender assembles it, and the receiver copies it out packet by packet. A
//! record does not wrap: the rest of the ring is filled. A word in each direction holds the acknowledgement: the number
//! of packets received, and the occupancy of the receiver.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use fabric::shm::{EventfdDoorbell, create_memory, open_memory};
use fabric::{Doorbell, Inbound, Outbound, WaitOutcome};
use lane::{Consumer, Draft, Producer, RECORD_BYTES_MAX, SLOT_BYTES, Span};
use router::batch::MessageTransfer;
use router::batch::message::{self, Header, Message, Source};
use router::{NODES_MAX, NodeId};
use volmem::sync::Ordering;
use volmem::{CACHE_LINE_BYTES, Mapping, Region};

use super::carrier::{Ack, Carrier, CarrierError, FlowLimits, MessageSink, Packets};
use super::interface::{ConnectionParams, InterconnectError, Offer, random_u64, shared_memory};
use super::medium::{ACK_OFFSET, LAYOUT, Medium, SLOTS, Windows};

/// Maximum number of bytes in flight.
pub(super) const RING_BYTES: usize = SLOTS as usize * SLOT_BYTES;
/// A message whose packets are all at most this long is assembled first and copied at once.
const GATHERED_BYTES_MAX: usize = 256;
/// A part of a large packet that would be shorter is not sent: the rest of the ring before its end is filled.
const PART_BYTES_MIN: usize = 2048;
/// Latency model of messages between two cores of a server: *measured*, approximately.
const LATENCY_NS: [f64; 3] = [300.0, 20.0, 0.15];
/// Bytes of a record in front of its message.
const RECORD_HEADER_BYTES: usize = 16;

/// A peer, and the lane to and from it.
struct Peer<W: Windows> {
    to: Producer<W::Outbound, W::Inbound>,
    from: Consumer<W::Inbound, W::Outbound>,
    windows: W,
    inbound: W::Inbound,
    outbound: W::Outbound,
    bell: EventfdDoorbell,
    /// Whether the last message found no room.
    is_blocked: bool,
    /// Whether this node offered the memory and waits for the acceptance.
    is_offered: bool,
}

/// The bytes of a message in a lane.
struct Record<'a, I>(Span<'a, I>);

impl<I: Inbound> Source for Record<'_, I> {
    fn bytes(&self) -> usize {
        self.0.len_bytes()
    }

    #[inline]
    fn read(&self, at: usize, into: &mut [u8]) {
        self.0.part(at, into.len()).read(into);
    }
}

impl<W: Windows> Peer<W> {
    fn new(windows: W, bell: EventfdDoorbell, secret: u64, is_offered: bool) -> Self {
        let (inbound, outbound) = (windows.inbound(), windows.outbound());
        Self {
            to: Producer::new(outbound.clone(), inbound.clone(), LAYOUT, secret),
            from: Consumer::new(inbound.clone(), outbound.clone(), LAYOUT, secret),
            windows,
            inbound,
            outbound,
            bell,
            is_blocked: false,
            is_offered,
        }
    }

    /// Returns the length of the longest message that fits before the end of the ring.
    fn bytes_to_end(&self) -> usize {
        let slots = SLOTS - self.to.position() % SLOTS;
        (slots as usize * SLOT_BYTES - RECORD_HEADER_BYTES).min(RECORD_BYTES_MAX)
    }

    /// Sends the message in `buffer`. Returns whether there was room.
    fn publish(&mut self, buffer: &[u8]) -> Result<bool, CarrierError> {
        self.publish_with(buffer.len(), |draft| draft.append(buffer))
    }

    /// Sends a message of `bytes` bytes, which `append` writes. Returns whether there was room.
    fn publish_with(
        &mut self,
        bytes: usize,
        append: impl FnOnce(&mut Draft<'_, W::Outbound, W::Inbound>),
    ) -> Result<bool, CarrierError> {
        let draft = self.to.draft(bytes)?;
        self.is_blocked = true;
        let Some(mut draft) = draft.filter(|draft| draft.room_bytes() >= bytes) else { return Ok(false) };
        draft.prefetch();
        append(&mut draft);
        draft.publish();
        self.is_blocked = false;
        Ok(true)
    }

    /// Fills the ring up to its end.
    fn fill(&mut self, buffer: &mut [u8]) -> Result<bool, CarrierError> {
        let filler = &mut buffer[..self.bytes_to_end()];
        message::put_filler(filler);
        self.publish(filler)
    }

    fn receive(&mut self, node: NodeId, sink: &mut impl MessageSink) -> Result<bool, CarrierError> {
        let Some(chunk) = self.from.peek()? else { return Ok(false) };
        let record = Record(self.from.span(chunk));
        let message = Message::check(&record)?;
        sink.receive(node, &message, &record)?;
        self.from.consume(chunk.len_bytes)?;
        if self.from.take_wake_request() {
            self.bell.ring();
        }
        Ok(true)
    }

    /// Asks the peer for a wake-up. Returns false when there is work already.
    fn prepare_wait(&mut self) -> bool {
        self.from.announce_sleep();
        if self.is_blocked {
            self.to.announce_sleep();
        }
        let has_room = self.is_blocked && self.to.is_writable().unwrap_or(true);
        !self.from.may_have_data() && !has_room
    }

    fn finish_wait(&mut self) {
        self.from.cancel_sleep();
        if self.is_blocked {
            self.to.cancel_sleep();
        }
        if self.bell.wait(Some(Duration::ZERO)) == WaitOutcome::Rung {
            self.windows.settle();
        }
    }
}

/// Lanes to all peers.
pub(super) struct MemoryCarrier<M: Medium> {
    medium: M,
    peers: [Option<Peer<M::Windows>>; NODES_MAX as usize],
    /// The peer that is polled next.
    next_peer: usize,
    buffer: Box<[u8]>,
}

impl<M: Medium> MemoryCarrier<M> {
    pub(super) fn new(medium: M) -> Self {
        let peers = std::array::from_fn(|_| None);
        Self { medium, peers, next_peer: 0, buffer: vec![0; RECORD_BYTES_MAX].into_boxed_slice() }
    }

    /// Maps the memory of a peer. `order` is 0 if this node's half comes first.
    fn join(
        &self,
        mapping: Mapping,
        bell: EventfdDoorbell,
        secret: u64,
        order: usize,
    ) -> Result<Peer<M::Windows>, InterconnectError> {
        let (memory, side_bytes) = (Region::of_mapping(Arc::new(mapping)), self.medium.side_bytes());
        let halves = [memory.sub(0, side_bytes), memory.sub(side_bytes, side_bytes)];
        let windows = self.medium.windows(&halves[order], &halves[1 - order])?;
        Ok(Peer::new(windows, bell, secret, order == 0))
    }

    fn connected(&mut self) -> impl Iterator<Item = &mut Peer<M::Windows>> {
        self.peers.iter_mut().flatten().filter(|peer| !peer.is_offered)
    }

    fn peer(&mut self, node: NodeId) -> Option<&mut Peer<M::Windows>> {
        connected(&mut self.peers, node)
    }
}

/// Returns a connected peer.
fn connected<W: Windows>(peers: &mut [Option<Peer<W>>], node: NodeId) -> Option<&mut Peer<W>> {
    peers[usize::from(node.0)].as_mut().filter(|peer| !peer.is_offered)
}

/// Returns the flow control limits of lanes.
pub(super) fn limits(medium: &impl Medium) -> FlowLimits {
    FlowLimits {
        message_bytes_max: RECORD_BYTES_MAX,
        ahead_packets: medium.ahead_packets(),
        // The ring itself limits what is in flight.
        messages_max: SLOTS as usize,
        transfer: MessageTransfer::Copy,
        latency_ns: [LATENCY_NS[0] + 2.0 * medium.one_way_ns(), LATENCY_NS[1], LATENCY_NS[2]],
        bytes_max: u64::MAX,
        acks_in_messages: false,
    }
}

impl<M: Medium> Carrier for MemoryCarrier<M> {
    fn limits(&self) -> FlowLimits {
        limits(&self.medium)
    }

    fn offer(&mut self, node: NodeId) -> Result<Offer, InterconnectError> {
        let (mapping, bell, parts) = create_memory(2 * self.medium.side_bytes())?;
        let secret = random_u64()?;
        self.peers[usize::from(node.0)] = Some(self.join(mapping, bell, secret, 0)?);
        let params = ConnectionParams { secret, queue_pair: 0, packet_sequence: 0, address: None };
        Ok(Offer { params, descriptors: vec![parts.memfd, parts.doorbell_creator, parts.doorbell_peer] })
    }

    fn accept(&mut self, node: NodeId, offer: Offer) -> Result<ConnectionParams, InterconnectError> {
        let params = offer.params;
        let (mapping, bell) = open_memory(shared_memory(node, offer)?, 2 * self.medium.side_bytes())?;
        self.peers[usize::from(node.0)] = Some(self.join(mapping, bell, params.secret, 1)?);
        Ok(ConnectionParams { secret: 0, ..params })
    }

    fn finish(&mut self, node: NodeId, _: &ConnectionParams) -> Result<(), InterconnectError> {
        if let Some(peer) = &mut self.peers[usize::from(node.0)] {
            peer.is_offered = false;
        }
        Ok(())
    }

    fn remove_peer(&mut self, node: NodeId) {
        self.peers[usize::from(node.0)] = None;
    }

    fn restart(&mut self) -> Result<(), InterconnectError> {
        self.peers.fill_with(|| None);
        Ok(())
    }

    fn poll(&mut self) -> bool {
        false
    }

    fn part_bytes_max(&self, to: NodeId) -> usize {
        let peer = self.peers[usize::from(to.0)].as_ref();
        let bytes = peer.map_or(RECORD_BYTES_MAX, Peer::bytes_to_end);
        if bytes < PART_BYTES_MIN { RECORD_BYTES_MAX } else { bytes }
    }

    fn send<'a>(&mut self, to: NodeId, header: &Header, packets: impl Packets<'a>) -> Result<usize, CarrierError> {
        let Some(peer) = connected(&mut self.peers, to) else { return Ok(0) };
        send(peer, &mut self.buffer, header, packets)
    }

    fn send_ack(&mut self, to: NodeId, header: &Header) -> Result<bool, CarrierError> {
        let Some(peer) = connected(&mut self.peers, to) else { return Ok(false) };
        let bytes = message::put(&mut self.buffer, header, [].into_iter());
        peer.publish(&self.buffer[..bytes])
    }

    fn flush(&mut self, to: NodeId) {
        if let Some(peer) = self.peer(to)
            && peer.to.take_wake_request()
        {
            peer.bell.ring();
        }
    }

    fn receive(&mut self, sink: &mut impl MessageSink) -> Result<bool, (NodeId, CarrierError)> {
        for _ in 0..NODES_MAX {
            let node = NodeId((self.next_peer % usize::from(NODES_MAX)) as u8);
            if let Some(peer) = self.peer(node)
                && peer.receive(node, sink).map_err(|fault| (node, fault))?
            {
                return Ok(true);
            }
            self.next_peer += 1;
        }
        Ok(false)
    }

    fn poll_ack(&mut self, node: NodeId) -> Option<Ack> {
        let peer = self.peer(node)?;
        peer.inbound.invalidate(ACK_OFFSET, CACHE_LINE_BYTES);
        Some(Ack::from_word(peer.inbound.load_u64(ACK_OFFSET, Ordering::Acquire)))
    }

    fn write_ack(&mut self, node: NodeId, ack: Ack) {
        if let Some(peer) = self.peer(node) {
            peer.outbound.store_u64(ACK_OFFSET, ack.to_word(), Ordering::Release);
        }
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        let connected = self.peers.iter().flatten().filter(|peer| !peer.is_offered);
        connected.filter_map(|peer| peer.bell.descriptor()).collect()
    }

    fn prepare_wait(&mut self) -> bool {
        let mut is_idle = true;
        // Every peer has to be asked, whatever the others return.
        self.connected().for_each(|peer| is_idle &= peer.prepare_wait());
        is_idle
    }

    fn finish_wait(&mut self) {
        self.connected().for_each(Peer::finish_wait);
    }
}

fn send<'a, W: Windows>(
    peer: &mut Peer<W>,
    buffer: &mut [u8],
    header: &Header,
    packets: impl Packets<'a>,
) -> Result<usize, CarrierError> {
    let lengths = || packets.clone().map(|packet| packet.bytes.len());
    let (mut count, mut bytes) = message::fit(peer.bytes_to_end(), lengths());
    if count == 0 {
        if !peer.fill(buffer)? {
            return Ok(0);
        }
        (count, bytes) = message::fit(peer.bytes_to_end(), lengths());
    }
    let is_gathered = lengths().take(count).all(|bytes| bytes <= GATHERED_BYTES_MAX);
    let packets = packets.take(count);
    let is_sent = peer.publish_with(bytes, |draft| {
        if is_gathered {
            message::put(buffer, header, packets);
            return draft.append(&buffer[..bytes]);
        }
        let front_bytes = message::put_front(buffer, header, packets.clone());
        draft.append(&buffer[..front_bytes]);
        packets.for_each(|packet| draft.append(packet.bytes));
    })?;
    Ok(if is_sent { count } else { 0 })
}

#[cfg(test)]
mod tests {
    use fabric::test_support::counting::CountingMemory;
    use fabric::{MemoryInbound, MemoryOutbound};
    use router::batch::Parcel;
    use router::batch::message::MessageError;
    use router::{Hop, Pool};
    use sim::Time;

    use super::super::interface::{Interconnect, InterconnectSettings, PeerCounters, PeerState};
    use super::super::medium::{Direct, DirectWindows, WORDS_BYTES};
    use super::super::mesh::Mesh;
    use super::*;
    use router::batch::message::Item;

    /// The peer's endpoint of an offer, controlled by an attacker.
    struct Hostile {
        peer: Peer<DirectWindows>,
    }

    impl Hostile {
        fn of(offer: Offer) -> Hostile {
            let secret = offer.params.secret;
            let parts = shared_memory(NodeId(0), offer).unwrap();
            let (mapping, bell) = open_memory(parts, 2 * Direct.side_bytes()).unwrap();
            Hostile { peer: MemoryCarrier::new(Direct).join(mapping, bell, secret, 1).unwrap() }
        }
    }

    /// Counts the stores of the sender.
    struct CountedWindows(CountingMemory<Region>);

    impl Windows for CountedWindows {
        type Inbound = MemoryInbound<CountingMemory<Region>>;
        type Outbound = MemoryOutbound<CountingMemory<Region>>;

        fn inbound(&self) -> Self::Inbound {
            MemoryInbound::new(CountingMemory::new(Region::heap(LAYOUT.window_bytes())))
        }

        fn outbound(&self) -> Self::Outbound {
            MemoryOutbound::new(self.0.clone())
        }

        fn settle(&self) {}
    }

    #[test]
    fn the_lines_of_a_message_are_prefetched_for_writing_whether_gathered_or_not() {
        let (_, bell, _) = create_memory(4096).unwrap();
        let memory = CountingMemory::new(Region::heap(LAYOUT.window_bytes()));
        let mut peer = Peer::new(CountedWindows(memory.clone()), bell, 7, false);
        let hop = Hop { node: NodeId(0), port: router::PortId(1), adjacency: router::AdjacencyId(2) };
        let mut buffer = vec![0; RECORD_BYTES_MAX];
        for packet in [&[7; 46][..], &[7; 1486]] {
            let before = memory.counts().prefetched_bytes;
            let packets = std::iter::repeat_n(Item::new(hop, packet), 4);
            assert_eq!(send(&mut peer, &mut buffer, &Header::default(), packets).unwrap(), 4);
            let fetched = memory.counts().prefetched_bytes - before;
            assert_eq!(fetched as usize, message::length(4, 4 * packet.len()) - (SLOT_BYTES - RECORD_HEADER_BYTES));
        }
    }

    struct Victim {
        mesh: Mesh<MemoryCarrier<Direct>>,
        pool: Pool,
    }

    impl Victim {
        fn new() -> Victim {
            let mesh = Mesh::new(NodeId(0), InterconnectSettings::default(), MemoryCarrier::new(Direct)).unwrap();
            Victim { mesh, pool: Pool::new(256, 2048, 64) }
        }

        fn join(&mut self, node: u8) -> Hostile {
            let offer = self.mesh.offer(NodeId(node)).unwrap();
            let params = offer.params;
            self.mesh.finish(NodeId(node), &params).unwrap();
            Hostile::of(offer)
        }

        fn poll(&mut self) -> usize {
            let mut arrived: Vec<Parcel> = Vec::new();
            self.mesh.poll(Time::ZERO, &mut self.pool, &mut arrived, 64);
            let count = arrived.len();
            arrived.into_iter().for_each(|(_, packet)| self.pool.free(packet));
            count
        }

        fn states(&self) -> [PeerState; 2] {
            [1, 2].map(|node| self.mesh.state(NodeId(node)))
        }
    }

    fn message(sequence: u32) -> Vec<u8> {
        let hop = Hop { node: NodeId(0), port: router::PortId(1), adjacency: router::AdjacencyId(2) };
        let mut bytes = vec![0; 200];
        let header = Header { sequence, ..Header::default() };
        let length = message::put(&mut bytes, &header, [Item::new(hop, &[7; 60])].into_iter());
        bytes.truncate(length);
        bytes
    }

    #[test]
    fn a_peer_that_sends_invalid_messages_is_ignored_and_others_are_not() {
        let corrupt = |at: usize, value: u8| {
            let mut bytes = message(1);
            bytes[at] = value;
            bytes
        };
        for invalid in [vec![1], vec![0; 4000], corrupt(2, 9), corrupt(12, 1), corrupt(18, 8), message(0)] {
            let mut victim = Victim::new();
            let (mut hostile, mut honest) = (victim.join(1), victim.join(2));
            for bytes in [&message(0), &invalid] {
                assert!(hostile.peer.publish(bytes).unwrap());
            }
            assert!(honest.peer.publish(&message(0)).unwrap());
            assert_eq!(victim.poll(), 2, "the message before the invalid one was accepted");
            assert_eq!(victim.states(), [PeerState::Broken, PeerState::Up]);
            assert!(honest.peer.publish(&message(1)).unwrap());
            assert_eq!(victim.poll(), 1);
            assert_eq!(victim.pool.available(), 256);
        }
    }

    #[test]
    fn a_peer_that_acknowledges_unsent_packets_is_ignored() {
        for number in [1, u32::MAX] {
            let mut victim = Victim::new();
            let (hostile, _honest) = (victim.join(1), victim.join(2));
            hostile.peer.outbound.store_u64(ACK_OFFSET, u64::from(number), Ordering::Release);
            let packets = |victim: &mut Victim| {
                let mut packet = victim.pool.alloc().unwrap();
                victim.pool.resize(&mut packet, 60);
                let hop = Hop { node: NodeId(1), port: router::PortId(0), adjacency: router::AdjacencyId(0) };
                let mut parcels = vec![(hop, packet)];
                victim.mesh.send(Time::ZERO, &mut victim.pool, NodeId(1), &mut parcels);
            };
            // The acknowledgement is read while messages are in flight and the latency is measured.
            (0..20).for_each(|_| packets(&mut victim));
            let is_possible = number <= 8;
            let state = if is_possible { PeerState::Up } else { PeerState::Broken };
            assert_eq!(victim.states(), [state, PeerState::Up], "acknowledgement {number}");
        }
    }

    #[test]
    fn every_poll_terminates_whatever_a_peer_writes_to_its_lane() {
        let mut random = sim::Random::new(6, "words of a lane");
        for _ in 0..300 {
            let mut victim = Victim::new();
            let (mut hostile, mut honest) = (victim.join(1), victim.join(2));
            hostile.peer.publish(&message(0)).unwrap();
            for _ in 0..8 {
                let at = (random.below(WORDS_BYTES as u64 / 8 + 64) * 8) as usize;
                let value = if random.chance(0.5) { random.bits() } else { random.below(5000) };
                hostile.peer.outbound.store_u64(at, value, Ordering::Release);
                hostile.peer.inbound.store_u64(at, value, Ordering::Release);
                victim.poll();
            }
            assert!(honest.peer.publish(&message(0)).unwrap());
            assert_eq!(victim.poll(), 1);
            let PeerCounters { received_packets, .. } = victim.mesh.counters(NodeId(2));
            assert_eq!((received_packets, victim.states()[1]), (1, PeerState::Up));
        }
    }

    #[test]
    fn an_error_names_the_value() {
        let error = CarrierError::from(MessageError { what: "a version", value: 9 });
        let text = "a message with a version of 9; all nodes of a cluster must run the same version, \
                    and messages of this one are ignored from now on";
        assert_eq!(error.to_string(), text);
    }
}
