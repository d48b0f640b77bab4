//! Compares the event queue with a binary heap on mixes of events that are typical of simulators: `cargo bench -p sim`.
//!
//! The number of events in the queue is constant: every step takes the earliest event and schedules another. The output
//! is the time of a step in nanoseconds, the best of three rounds.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

use sim::{EventQueue, Random, Time};

/// Has the size of an event of the network simulator.
type Event = (u32, u32);

const STEPS: usize = 2_000_000;
const ROUNDS: usize = 3;

trait Queue: Default {
    fn schedule(&mut self, at: u64, event: Event);
    fn next(&mut self) -> (u64, Event);
}

#[derive(Default)]
struct Heap {
    heap: BinaryHeap<Reverse<(u64, u64, Event)>>,
    scheduled: u64,
}

impl Queue for Heap {
    fn schedule(&mut self, at: u64, event: Event) {
        self.heap.push(Reverse((at, self.scheduled, event)));
        self.scheduled += 1;
    }

    fn next(&mut self) -> (u64, Event) {
        self.heap.pop().map_or((0, (0, 0)), |Reverse((at, _, event))| (at, event))
    }
}

#[derive(Default)]
struct Wheels(EventQueue<Event>);

impl Queue for Wheels {
    fn schedule(&mut self, at: u64, event: Event) {
        self.0.schedule(Time::from_ps(at), event);
    }

    fn next(&mut self) -> (u64, Event) {
        self.0.next_event().map_or((0, (0, 0)), |(at, event)| (at.ps(), event))
    }
}

/// Returns the picoseconds from an event to the one that it schedules.
type Delta = fn(&mut Random) -> u64;

const MIXES: [(&str, Delta); 4] = [
    ("evenly, 0 to 1 us", |random| random.below(1_000_000)),
    ("a network: packets sent, packets in flight, few timers", |random| match random.below(100) {
        0..48 => 83_840,
        48..96 => 1_000_000 + 20_960 * random.below(3),
        96..99 => 100_000_000 + random.below(1000) * 1000,
        _ => 1_000_000_000,
    }),
    ("in steps of 1 us", |_| 1_000_000),
    ("exponentially, 10 us", |random| random.exponential(1e7) as u64),
];

fn ns_per_step<Q: Queue>(held: usize, delta: Delta) -> (f64, u64) {
    let mut best = (f64::INFINITY, 0);
    for _ in 0..ROUNDS {
        let (mut queue, mut random) = (Q::default(), Random::new(1, "queue"));
        (0..held).for_each(|index| queue.schedule(delta(&mut random), (index as u32, 0)));
        let (begun, mut check) = (Instant::now(), 0_u64);
        for _ in 0..STEPS {
            let (at, event) = queue.next();
            check = check.wrapping_mul(31).wrapping_add(at ^ u64::from(event.0));
            queue.schedule(at + delta(&mut random), event);
        }
        best = (best.0.min(begun.elapsed().as_nanos() as f64 / STEPS as f64), check);
    }
    best
}

fn main() {
    for (name, delta) in MIXES {
        println!("{name}");
        for held in [1, 10, 30, 60, 100, 1_000, 10_000, 100_000, 1_000_000] {
            let (heap, heap_check) = ns_per_step::<Heap>(held, delta);
            let (wheels, wheels_check) = ns_per_step::<Wheels>(held, delta);
            assert_eq!(heap_check, wheels_check, "the queues disagree");
            println!("  {held:>9} events: heap {heap:6.1} ns, wheels {wheels:6.1} ns, {:.2} x", heap / wheels);
        }
    }
}
