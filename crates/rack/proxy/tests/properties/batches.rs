//! The cost of publishing frames where barriers are expensive: on write-combined memory, and on memory whose caches are
//! not coherent. No test depends on time: engines are polled explicitly.

use crate::program::ProgramStub;
use crate::world::SECRET;
use fabric::test_support::counting::CountingMemory;
use fabric::test_support::non_coherent::{CacheBehavior, NonCoherentMemory};
use fabric::{Coherence, Memory, MemoryInbound, MemoryOutbound, Outbound, Slice};
use lane::{Consumer, Layout, Producer};
use proxy::frame::LinkSide;
use proxy::{
    Class, ConnectionKey, Engine, EngineCounters, EngineEvent, EngineSettings, OpenPayload, PartitionLanes, Placement,
};
use std::sync::{Arc, Mutex};
use volmem::Region;

const LAYOUT: Layout = Layout::packed(512, 0);
const PARTITION_BYTES: usize = LAYOUT.window_bytes().next_multiple_of(64);
/// More than any message here: the unread bytes that a program holds.
const INPUT_BYTES_MAX: usize = 64 << 10;

type Proxy<M> = Engine<MemoryInbound<M>, MemoryOutbound<CountingMemory<M>>, ProgramStub>;

/// Two engines with a partition of each class, connections between them, and a count of the first engine's stores.
struct Pair<M> {
    from: Proxy<M>,
    to: Proxy<M>,
    memory: CountingMemory<M>,
    senders: Vec<ProgramStub>,
    receivers: Vec<ProgramStub>,
}

/// What an operation has cost.
#[derive(Debug, PartialEq, Eq)]
struct Cost {
    frames: u64,
    publishes: u64,
    barriers: u64,
}

impl<M: Memory + 'static> Pair<M> {
    fn new([(own_a, peer_a), (own_b, peer_b)]: [(M, M); 2], coherence: Coherence, settings: EngineSettings) -> Self {
        let (memory, back) =
            (CountingMemory::with_coherence(peer_a, coherence), CountingMemory::with_coherence(peer_b, coherence));
        let engine = |side, own: &M, peer: &CountingMemory<M>| {
            let port = |index: usize| {
                let inbound = MemoryInbound::new(own.part(index * PARTITION_BYTES, PARTITION_BYTES));
                let outbound = MemoryOutbound::new(peer.part(index * PARTITION_BYTES, PARTITION_BYTES));
                let to = Producer::new(outbound.clone(), inbound.clone(), LAYOUT, SECRET);
                PartitionLanes::new(to, Consumer::new(inbound, outbound, LAYOUT, SECRET))
            };
            Engine::new(EngineSettings { side, ..settings }, (0..Class::ALL.len()).map(port).collect())
        };
        let (from, to) = (engine(LinkSide::Lower, &own_a, &memory), engine(LinkSide::Higher, &own_b, &back));
        Self { from, to, memory, senders: Vec::new(), receivers: Vec::new() }
    }

    /// Opens connections, and polls until nothing is left to do.
    fn connect(&mut self, connections: usize) {
        for index in 0..connections {
            let end = ProgramStub::new(INPUT_BYTES_MAX);
            self.senders.push(end.clone());
            let open_payload = OpenPayload::new(&[index as u8]).expect("a byte");
            self.from.open(open_payload, |_: ConnectionKey| end).expect("room for a connection");
        }
        (0..8).for_each(|_| self.poll_both());
        assert_eq!(self.receivers.len(), connections);
    }

    fn poll_both(&mut self) {
        self.from.poll(0).expect("the peer is honest");
        self.to.poll(0).expect("the peer is honest");
        while let Some(event) = self.to.next_event() {
            let EngineEvent::Open { key, .. } = event else { panic!("the peer is honest: {event:?}") };
            let end = ProgramStub::new(INPUT_BYTES_MAX);
            self.receivers.push(end.clone());
            self.to.answer(key, Ok(end));
        }
    }

    /// Polls the first engine once, and returns the cost.
    fn poll(&mut self) -> Cost {
        let (before, barriers) = (*self.from.counters(), self.memory.counts().barriers);
        self.from.poll(0).expect("the peer is honest");
        let EngineCounters { frames_sent, publishes, .. } = *self.from.counters();
        let barriers = self.memory.counts().barriers - barriers;
        Cost { frames: frames_sent - before.frames_sent, publishes: publishes - before.publishes, barriers }
    }

    /// Returns the bytes that each receiver has got since the last call.
    fn received(&mut self) -> Vec<Vec<u8>> {
        self.to.poll(0).expect("the peer is honest");
        self.receivers.iter().map(|end| end.read(INPUT_BYTES_MAX)).collect()
    }
}

/// All connections stay in the latency class.
fn settings() -> EngineSettings {
    EngineSettings { secret: 7, placement: None, ..EngineSettings::new(LinkSide::Lower) }
}

fn non_coherent(behavior: CacheBehavior) -> Pair<NonCoherentMemory> {
    let windows = NonCoherentMemory::windows(Class::ALL.len() * PARTITION_BYTES, behavior);
    Pair::new(windows, Coherence::NonCoherent, settings())
}

fn write_combined() -> Pair<Region> {
    let [a, b] = [(); 2].map(|()| Region::heap(Class::ALL.len() * PARTITION_BYTES));
    Pair::new([(a.clone(), b.clone()), (b, a)], Coherence::WriteCombined, settings())
}

/// Returns one message for each connection, all of which are ready when the poll begins.
fn messages(connections: usize, len_bytes: usize) -> Vec<Vec<u8>> {
    (0..connections).map(|index| vec![index as u8 + 1; len_bytes]).collect()
}

fn ready_together<M: Memory + 'static>(mut pair: Pair<M>, connections: usize, len_bytes: usize) -> Cost {
    pair.connect(connections);
    let messages = messages(connections, len_bytes);
    pair.senders.iter().zip(&messages).for_each(|(end, bytes)| end.send(bytes.iter().copied()));
    let cost = pair.poll();
    assert_eq!(pair.received(), messages);
    cost
}

#[test]
fn frames_that_are_ready_together_are_published_by_one_store_and_one_barrier() {
    for (connections, len_bytes) in [(2, 8), (16, 8), (16, 32), (9, 100), (3, 900)] {
        let one = Cost { frames: connections as u64, publishes: 1, barriers: 1 };
        assert_eq!(
            ready_together(non_coherent(CacheBehavior::explicit()), connections, len_bytes),
            one,
            "non-coherent, {len_bytes} bytes"
        );
        assert_eq!(ready_together(write_combined(), connections, len_bytes), one, "combined, {len_bytes} bytes");
    }
}

/// The frame is published by the poll in which it is ready, alone, though no other one follows: on memory that is
/// written back by the line, without any barrier.
#[test]
fn a_single_frame_is_published_without_waiting_for_another() {
    for len_bytes in [1, 8, 32] {
        let one = |barriers| Cost { frames: 1, publishes: 1, barriers };
        assert_eq!(ready_together(non_coherent(CacheBehavior::explicit()), 1, len_bytes), one(0));
        assert_eq!(ready_together(write_combined(), 1, len_bytes), one(1));
    }
}

/// The program sends again during the poll, which does not wait for it.
#[test]
fn the_first_frame_of_a_sole_connection_is_published_before_more_input_is_polled() {
    let mut pair = write_combined();
    pair.connect(2);
    let send_two = |index: u8| {
        move |end: &ProgramStub| {
            end.send([index; 8].into_iter());
            end.lock().next_output = vec![index; 8];
        }
    };
    send_two(1)(&pair.senders[0]);
    assert_eq!(pair.poll(), Cost { frames: 2, publishes: 2, barriers: 2 });
    send_two(2)(&pair.senders[0]);
    send_two(3)(&pair.senders[1]);
    let Cost { frames, publishes, .. } = pair.poll();
    assert_eq!((frames, publishes), (4, 2), "the first frame is published with those behind it");
    assert_eq!(pair.received(), [[vec![1; 16], vec![2; 16]].concat(), vec![3; 16]]);
}

#[test]
fn a_poll_without_frames_stores_nothing() {
    let mut pair = write_combined();
    pair.connect(3);
    assert_eq!(pair.poll(), Cost { frames: 0, publishes: 0, barriers: 0 });
}

/// The copy of a long frame takes longer than a fence: frames that are ready before it are published first.
#[test]
fn short_frames_are_published_before_a_long_one_is_copied() {
    let mut pair = write_combined();
    pair.connect(3);
    pair.senders[0].send([1; 8].into_iter());
    pair.senders[1].send([2; 8].into_iter());
    pair.senders[2].send([3; 1500].into_iter());
    assert_eq!(pair.poll(), Cost { frames: 3, publishes: 2, barriers: 2 });
    assert_eq!(pair.received(), [vec![1; 8], vec![2; 8], vec![3; 1500]]);
}

/// A connection without credit delays no frame of another one, and no poll waits for its credit.
#[test]
fn a_frame_is_published_alongside_a_connection_without_credit() {
    let mut pair = write_combined();
    pair.connect(2);
    pair.senders[0].send((0..400 << 10).map(|at| at as u8));
    (0..400).for_each(|_| pair.poll_both());
    assert!(pair.from.counters().stalls > 0, "{:?}", pair.from.counters());
    pair.senders[1].send([9; 8].into_iter());
    assert_eq!(pair.poll(), Cost { frames: 1, publishes: 1, barriers: 1 });
    assert_eq!(pair.received()[1], [9; 8]);
}

/// Frames without room do not delay those that had room.
#[test]
fn frames_that_found_room_in_a_full_partition_are_published() {
    let mut pair = write_combined();
    pair.connect(1);
    pair.senders[0].send((0..200 << 10).map(|at| at as u8));
    // The other engine is not polled.
    let costs: Vec<Cost> = (0..100).map(|_| pair.poll()).collect();
    assert!(pair.from.counters().partitions_full > 0, "{:?}", pair.from.counters());
    let published: u64 = costs.iter().map(|cost| cost.frames).sum();
    (0..20).for_each(|_| _ = pair.to.poll(0).expect("the peer is honest"));
    assert_eq!(pair.to.counters().frames_received - pair.receivers.len() as u64, published);
}

/// Cache lines are written back and loaded spontaneously: frames that were published together all arrive, in order, or
/// none does.
#[test]
fn bytes_arrive_in_order_however_cache_lines_are_evicted() {
    for seed in 0..20 {
        let mut pair = non_coherent(CacheBehavior::spontaneous(seed));
        pair.connect(12);
        let mut sent = vec![Vec::new(); 12];
        let mut read = vec![Vec::new(); 12];
        for round in 0..30_usize {
            for (index, end) in pair.senders.iter().enumerate().filter(|(index, _)| (index + round) % 3 != 0) {
                let bytes: Vec<u8> =
                    (0..1 + (index * 37 + round * 11) % 400).map(|at| (at * 7 + round) as u8).collect();
                end.send(bytes.iter().copied());
                sent[index].extend(bytes);
            }
            pair.poll_both();
            for (index, end) in pair.receivers.iter().enumerate() {
                read[index].extend(end.read(INPUT_BYTES_MAX));
            }
        }
        for _ in 0..200 {
            pair.poll_both();
            for (index, end) in pair.receivers.iter().enumerate() {
                read[index].extend(end.read(INPUT_BYTES_MAX));
            }
        }
        assert_eq!(read, sent, "seed {seed}");
        let counters = pair.from.counters();
        assert!(counters.frames_sent > counters.publishes * 3 / 2, "{counters:?}");
    }
}

/// Small rings and frequent moves: a partition is often full just when a connection leaves it.
const TIGHT: Layout = Layout::packed(16, 0);

fn tight(side: LinkSide) -> EngineSettings {
    let placement = Placement { burst_bytes: 3000, interval_bytes: 4000, interval_ns: 500, calm_intervals: 2 };
    // No connection is parked, because nothing rings.
    let poll_ns = 1 << 40;
    EngineSettings { side, slice_bytes: 400, backlog_bytes: 2048, placement: Some(placement), poll_ns, ..settings() }
}

/// Returns two partitions: `own` receives, and `to` sends.
fn tight_ports<O: Outbound>(own: &Region, to: impl Fn(usize, usize) -> O) -> Vec<PartitionLanes<MemoryInbound, O>> {
    let bytes = TIGHT.window_bytes().next_multiple_of(64);
    let port = |index: usize| {
        let inbound = || MemoryInbound::new(own.sub(index * bytes, bytes));
        let producer = Producer::new(to(index * bytes, bytes), inbound(), TIGHT, SECRET);
        PartitionLanes::new(producer, Consumer::new(inbound(), to(index * bytes, bytes), TIGHT, SECRET))
    };
    (0..Class::ALL.len()).map(port).collect()
}

/// A peer that polls between two stores of a poll finds no frame before one that it depends on: bytes follow the `Open`
/// of their connection, and the `Move` that brought it to their partition.
#[test]
fn a_peer_that_polls_after_every_store_finds_frames_in_the_order_of_their_connections() {
    for seed in 1..20_u64 {
        let [own_a, own_b] = [(); 2].map(|()| Region::heap(2 * TIGHT.window_bytes().next_multiple_of(64)));
        let back = |offset, bytes| MemoryOutbound::new(own_a.sub(offset, bytes));
        let mut to = Engine::new(tight(LinkSide::Higher), tight_ports(&own_b, back));
        let received = Arc::new(Mutex::new((Vec::<ProgramStub>::new(), true, 0_u64)));
        let seen = received.clone();
        let poll = Box::new(move || {
            let (receivers, polls, now_ns) = &mut *seen.lock().expect("no test panics while it holds the lock");
            if !*polls {
                return;
            }
            to.poll(*now_ns).expect("the peer is honest");
            while let Some(event) = to.next_event() {
                let EngineEvent::Open { key, .. } = event else { panic!("the peer is honest: {event:?}") };
                receivers.push(ProgramStub::new(INPUT_BYTES_MAX));
                to.answer(key, Ok(receivers[receivers.len() - 1].clone()));
            }
        });
        let memory = CountingMemory::with_coherence(own_b.clone(), Coherence::WriteCombined).with_store_hook(poll);
        let window = MemoryOutbound::new(memory.clone());
        let mut from = Engine::new(tight(LinkSide::Lower), tight_ports(&own_a, |at, bytes| window.slice(at, bytes)));
        let mut random = seed;
        let mut below = |limit: u64| {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            (random >> 33) % limit
        };
        let (mut senders, mut sent) = (Vec::new(), vec![Vec::new(); 4]);
        for round in 0..4000_u64 {
            if senders.len() < sent.len() && below(50) == 0 {
                let end = ProgramStub::new(INPUT_BYTES_MAX);
                senders.push(end.clone());
                from.open(OpenPayload::new(&[1]).expect("a byte"), |_: ConnectionKey| end)
                    .expect("room for a connection");
            }
            if !senders.is_empty() {
                let index = below(senders.len() as u64);
                // In turn, so that the stream of one connection fills the partition that another one leaves.
                let has_bursts = (round / 200 + index) % 2 == 0;
                let bytes = vec![round as u8; below(if has_bursts { 1500 } else { 20 }) as usize + 1];
                senders[index as usize].send(bytes.iter().copied());
                sent[index as usize].extend(bytes);
            }
            let now_ns = {
                let (_, polls, now_ns) = &mut *received.lock().expect("no poll panics");
                *polls = below(3) > 0;
                *now_ns += below(200);
                *now_ns
            };
            from.poll(now_ns).expect("the peer is honest");
            memory.run_hook();
        }
        received.lock().expect("no poll panics").1 = true;
        let mut read = vec![Vec::new(); sent.len()];
        for _ in 0..3000 {
            memory.run_hook();
            from.poll(1 << 30).expect("the peer is honest");
            for (index, end) in received.lock().expect("no poll panics").0.iter().enumerate() {
                read[index].extend(end.read(INPUT_BYTES_MAX));
            }
        }
        assert_eq!(read, sent, "seed {seed}");
        assert!(from.counters().moves > 10, "{:?}", from.counters());
    }
}
