//! The engine of `proxy` in virtual time: the same code as live, over links of `fabric::timed` with a virtual clock.
//!
//! A core is a thread of a proxy that owns one engine for each peer. A poll takes the time that [`Costs`] give for the
//! frames and bytes that the engine has counted. Stores are in flight for the time of the link's model, and all cores
//! of a node share the rate of the node's link. Programs answer after a fixed time. No real clock is read, and the same
//! seed gives the same figures.

mod engine_work;
mod experiments;
mod program;

pub use engine_work::work;
pub use experiments::{Isolation, Scaling, isolation, scaling};

use fabric::heap::{self, HeapLink};
use fabric::timed::{self, Clock, LinkTiming, Pacer, TimedInbound, TimedLink, TimedOutbound};
use fabric::{Link, Slice, train_both};
use lane::{Consumer, Layout, Producer};
use program::{Program, ProgramEnd};
use proxy::frame::LinkSide;
use proxy::{Class, ConnectionKey, Engine, EngineCounters, EngineEvent, EngineSettings, OpenPayload, PartitionLanes};
use serde::Serialize;
use sim::{EventQueue, Span, Time};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The time that an engine's work takes on a core.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Costs {
    /// A poll without work, for each engine.
    pub turn_ns: f64,
    /// A frame sent, without its payload.
    pub send_ns: f64,
    /// A frame received, without its payload.
    pub receive_ns: f64,
    /// A byte copied.
    pub byte_ns: f64,
    /// The part of a round trip of a short message that each node adds besides the link: from the proxy to the program
    /// and back, with the work on both frames.
    pub program_ns: f64,
}

impl Default for Costs {
    /// Assumptions, on the safe side of measurements: 57 ns for a frame (`crosslane bench windows --sim --measure`), 32
    /// to 36 ns for a poll-loop iteration, and half of 0.77 us for an endpoint; a copy runs at 10 GB/s.
    fn default() -> Self {
        Self { turn_ns: 40.0, send_ns: 120.0, receive_ns: 120.0, byte_ns: 0.1, program_ns: 400.0 }
    }
}

/// The model of the link: a non-transparent bridge of PCIe 3.0 with 16 lanes.
pub const LINK: LinkTiming =
    LinkTiming { one_way_ns: 500, bytes_per_us: 15_754, header_bytes: 24, payload_bytes_max: 256 };

/// The time of the core that is polled.
#[derive(Debug, Clone, Default)]
struct VirtualClock(Arc<AtomicU64>);

impl VirtualClock {
    fn set(&self, time: Time) {
        self.0.store(time.ps() / 1000, Ordering::Relaxed);
    }
}

impl Clock for VirtualClock {
    fn now_ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// A core that stalls is late, which is counted at the end of its poll.
    fn wait_until(&self, time_ns: u64) {
        self.0.fetch_max(time_ns, Ordering::Relaxed);
    }
}

type SimLink = TimedLink<HeapLink, VirtualClock>;
type SimEngine = Engine<TimedInbound<HeapLink, VirtualClock>, TimedOutbound<HeapLink, VirtualClock>, ProgramEnd>;

/// One engine of a core, and its link, which must stay alive.
struct Seat {
    engine: SimEngine,
    _link: SimLink,
}

/// A core of a node.
struct Core {
    seats: Vec<Seat>,
    /// The programs that answer the connections of each peer, in the order of opening.
    served: Vec<Vec<Program>>,
}

/// All cores of all nodes.
struct World {
    clock: VirtualClock,
    costs: Costs,
    cores: Vec<Core>,
    queue: EventQueue<usize>,
}

/// How the partitions of a world are set up.
#[derive(Debug, Clone, Copy)]
struct Plan {
    slots: u64,
    has_classes: bool,
    slice_bytes: usize,
    backlog_bytes: usize,
}

impl Plan {
    fn layout(&self) -> Layout {
        Layout::packed(self.slots, 0)
    }

    fn partitions(&self) -> usize {
        if self.has_classes { Class::ALL.len() } else { 1 }
    }

    fn settings(&self, side: LinkSide) -> EngineSettings {
        EngineSettings {
            slice_bytes: self.slice_bytes,
            backlog_bytes: self.backlog_bytes,
            secret: 1,
            ..EngineSettings::new(side)
        }
    }

    fn partition_lanes(
        &self,
        link: &SimLink,
    ) -> Vec<PartitionLanes<TimedInbound<HeapLink, VirtualClock>, TimedOutbound<HeapLink, VirtualClock>>> {
        let bytes = self.layout().window_bytes();
        (0..self.partitions())
            .map(|index| {
                let inbound = link.inbound().slice(index * bytes, bytes);
                let outbound = link.outbound().slice(index * bytes, bytes);
                let to = Producer::new(outbound.clone(), inbound.clone(), self.layout(), SECRET);
                PartitionLanes::new(to, Consumer::new(inbound, outbound, self.layout(), SECRET))
            })
            .collect()
    }
}

const SECRET: u64 = 0x51;
/// A short message is several stores into one line, and the model's journal holds each of them.
const STORES_PER_LINE: usize = 8;

impl World {
    /// Creates nodes with this number of cores each. Every core is linked with the core of the same rank of every other
    /// node. The cores of a node are consecutive.
    fn new(nodes: usize, cores: usize, plan: Plan, costs: Costs) -> Self {
        let clock = VirtualClock::default();
        let paces: Vec<Pacer> = (0..nodes).map(|_| Pacer::new()).collect();
        let mut world = Self {
            clock,
            costs,
            cores: (0..nodes * cores).map(|_| Core { seats: Vec::new(), served: Vec::new() }).collect(),
            queue: EventQueue::new(),
        };
        for low in 0..nodes {
            for high in low + 1..nodes {
                for rank in 0..cores {
                    world.join([low * cores + rank, high * cores + rank], [&paces[low], &paces[high]], plan);
                }
            }
        }
        (0..world.cores.len()).for_each(|core| world.queue.schedule(Time::ZERO, core));
        world
    }

    fn join(&mut self, ends: [usize; 2], paces: [&Pacer; 2], plan: Plan) {
        let window_bytes = plan.partitions() * plan.layout().window_bytes();
        let memory_bytes = timed::memory_bytes(STORES_PER_LINE * window_bytes, LINK).expect("a link's timing");
        let (low, high) = heap::pair(memory_bytes.next_multiple_of(64));
        let timed = |link, pace: &Pacer| {
            let setup = timed::TimedConfig { window_bytes, timing: LINK, pacer: pace.clone() };
            TimedLink::with_clock(link, setup, self.clock.clone()).expect("a link's timing")
        };
        let mut links = [timed(low, paces[0]), timed(high, paces[1])];
        let [first, second] = &mut links;
        assert!(train_both(first, second), "two ends in one process come up");
        for ((core, link), side) in ends.into_iter().zip(links).zip([LinkSide::Lower, LinkSide::Higher]) {
            let engine = Engine::new(plan.settings(side), plan.partition_lanes(&link));
            self.cores[core].seats.push(Seat { engine, _link: link });
            self.cores[core].served.push(Vec::new());
        }
    }

    /// Opens a connection from `seat` of `core`, whose remote program is `server`.
    fn open(&mut self, core: usize, seat: usize, client: Program, remote: (usize, usize), server: Program) {
        let served = &mut self.cores[remote.0].served[remote.1];
        let open_payload = OpenPayload::new(&(served.len() as u32).to_le_bytes()).expect("four bytes");
        served.push(server);
        let end = client.end(&self.clock.0);
        self.cores[core].seats[seat].engine.open(open_payload, |_: ConnectionKey| end).expect("room for a connection");
    }

    /// Runs until `end`.
    fn run(&mut self, end: Time) {
        while let Some((now, core)) = self.queue.next_event() {
            if now >= end {
                self.queue.schedule(now, core);
                return;
            }
            let cost = self.poll(now, core);
            self.queue.schedule(now + cost, core);
        }
    }

    /// Polls all engines of a core; returns the time that it takes.
    fn poll(&mut self, now: Time, core: usize) -> Span {
        self.clock.set(now);
        let clock = self.clock.clone();
        let costs = self.costs;
        let Core { seats, served } = &mut self.cores[core];
        let mut cost = Span::ZERO;
        for (seat, served) in seats.iter_mut().zip(served) {
            let begun = now + cost;
            clock.set(begun);
            let before = *seat.engine.counters();
            let fault = seat.engine.poll(begun.ps() / 1000).err();
            assert!(fault.is_none(), "an honest peer: {fault:?}");
            while let Some(event) = seat.engine.next_event() {
                let EngineEvent::Open { key, open_payload } = event else { panic!("the peer is honest") };
                let index = u32::from_le_bytes(open_payload.bytes().try_into().expect("four bytes"));
                let end = served[index as usize].end(&clock.0);
                seat.engine.answer(key, Ok(end));
            }
            cost += costs.of(&before, seat.engine.counters());
        }
        cost
    }

    fn counters(&self, cores: std::ops::Range<usize>) -> EngineCounters {
        let mut sum = EngineCounters::default();
        self.cores[cores].iter().flat_map(|core| &core.seats).for_each(|seat| sum += *seat.engine.counters());
        sum
    }
}

impl Costs {
    fn of(&self, before: &EngineCounters, after: &EngineCounters) -> Span {
        let sent = (after.frames_sent - before.frames_sent) as f64;
        let received = (after.frames_received - before.frames_received) as f64;
        let bytes = (after.bytes_sent - before.bytes_sent) + (after.bytes_received - before.bytes_received);
        Span::from_ns(self.turn_ns + sent * self.send_ns + received * self.receive_ns + bytes as f64 * self.byte_ns)
    }
}
