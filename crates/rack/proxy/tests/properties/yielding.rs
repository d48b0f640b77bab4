//! Who asks to let others run, and when. Time is handed in.

use crate::program::ProgramStub;
use crate::world::{Shape, World, heap_world};
use fabric::heap::HeapLink;

const SHORT: usize = 0;
const STREAM: usize = 1;
/// As long as a short message is company.
const COMPANY_NS: u64 = 10_000_000;
/// Turns that carry a message of a stream from end to end.
const TURNS: usize = 40;
/// Less than a program holds, and enough to make a connection one of bulk.
const PIECE_BYTES: usize = 16_000;
/// What a turn takes.
const TURN_NS: u64 = 1_000;

/// Two programs with a connection for short messages and one for a stream, both from node 0.
struct Pair {
    world: World<HeapLink>,
}

impl Pair {
    fn new(has_classes: bool) -> Self {
        let shape = Shape {
            has_classes,
            ring_shift: 7,
            slice_bytes: 2048,
            connections_max: 8,
            is_failover: false,
            is_oversubscribed: false,
        };
        let (mut world, _) = heap_world(shape);
        for _ in [SHORT, STREAM] {
            world.open(0, 40_000, false, true);
        }
        (0..8).for_each(|turn| world.poll(turn % 2));
        let mut pair = Self { world };
        pair.carry(STREAM, PIECE_BYTES);
        pair.carry(STREAM, PIECE_BYTES);
        pair.world.now_ns += 2 * COMPANY_NS;
        pair
    }

    fn end(&self, talk: usize, node: usize) -> ProgramStub {
        self.world.talks[talk].ends[node].clone().expect("connected")
    }

    /// Sends so many bytes, has them read at the other node, and answers how often each proxy gave way.
    fn carry(&mut self, talk: usize, bytes: usize) -> [u32; 2] {
        self.end(talk, 0).send(std::iter::repeat_n(7, bytes));
        self.world.hear(talk, 0);
        let mut gave_way = [0; 2];
        let mut read = 0;
        for _ in 0..TURNS {
            for (node, count) in gave_way.iter_mut().enumerate() {
                let outcome = self.world.nodes[node].engine.poll(self.world.now_ns).expect("an honest peer");
                *count += u32::from(outcome.should_yield);
            }
            read += self.end(talk, 1).read(usize::MAX).len();
            self.world.hear(talk, 1);
            self.world.now_ns += TURN_NS;
        }
        assert_eq!(read, bytes);
        gave_way
    }

    /// A stream of so many turns in each of which it brings something, and how often each proxy gave way.
    fn stream(&mut self, turns: usize) -> [u32; 2] {
        let mut gave_way = [0; 2];
        for _ in 0..turns {
            self.end(STREAM, 0).send(std::iter::repeat_n(7, 2000));
            self.world.hear(STREAM, 0);
            for (node, count) in gave_way.iter_mut().enumerate() {
                let outcome = self.world.nodes[node].engine.poll(self.world.now_ns).expect("an honest peer");
                *count += u32::from(outcome.should_yield);
            }
            self.end(STREAM, 1).read(usize::MAX);
            self.world.hear(STREAM, 1);
            self.world.now_ns += TURN_NS;
        }
        gave_way
    }

    /// Whether the programs of the stream have been told to give way.
    fn told(&self) -> [bool; 2] {
        [0, 1].map(|node| self.end(STREAM, node).lock().is_yielding)
    }
}

#[test]
fn whoever_hands_a_short_message_on_asks_to_let_others_run() {
    assert_eq!(Pair::new(true).carry(SHORT, 8), [1, 1]);
}

#[test]
fn a_partition_without_classes_does_not_know_who_is_short() {
    let mut pair = Pair::new(false);
    assert_eq!(pair.carry(SHORT, 8), [0, 0]);
    assert_eq!(pair.carry(STREAM, PIECE_BYTES), [0, 0]);
}

#[test]
fn streams_without_company_give_way_to_nobody() {
    let mut pair = Pair::new(true);
    assert_eq!(pair.carry(STREAM, PIECE_BYTES), [0, 0]);
    assert_eq!(pair.told(), [false, false]);
}

#[test]
fn streams_in_company_give_way_now_and_then_until_it_has_gone() {
    let mut pair = Pair::new(true);
    pair.carry(SHORT, 8);
    assert_eq!(pair.stream(30), [5, 5], "30 us, of which each sixth turn ends 5 us");
    assert_eq!(pair.told(), [true, true], "both programs copy");
    assert!(!pair.end(SHORT, 0).lock().is_yielding && !pair.end(SHORT, 1).lock().is_yielding);
    pair.world.now_ns += COMPANY_NS;
    assert_eq!(pair.carry(STREAM, PIECE_BYTES), [0, 0]);
    assert_eq!(pair.told(), [false, false]);
}
