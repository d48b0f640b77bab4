//! Which polls ask the driver to yield. Time is passed in.

use crate::program::ProgramStub;
use crate::world::{Shape, World, heap_world};
use fabric::heap::HeapLink;

const SHORT: usize = 0;
const STREAM: usize = 1;
/// How long a short message makes streams yield.
const LATENCY_TRAFFIC_NS: u64 = 10_000_000;
/// Polls that forward a message of a stream from one program to the other.
const POLLS: usize = 40;
/// Less than a program's buffer, and enough to move a connection to the bulk class.
const PIECE_BYTES: usize = 16_000;
/// The duration of a poll.
const POLL_NS: u64 = 1_000;

/// Two programs with a connection for short messages and one for a stream, both opened by node 0.
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
        (0..8).for_each(|count| world.poll(count % 2));
        let mut pair = Self { world };
        pair.forward(STREAM, PIECE_BYTES);
        pair.forward(STREAM, PIECE_BYTES);
        pair.world.now_ns += 2 * LATENCY_TRAFFIC_NS;
        pair
    }

    fn end(&self, conversation: usize, node: usize) -> ProgramStub {
        self.world.conversations[conversation].endpoints[node].clone().expect("connected")
    }

    /// Sends bytes, has them read at the other node, and returns how often each proxy yielded.
    fn forward(&mut self, conversation: usize, bytes: usize) -> [u32; 2] {
        self.end(conversation, 0).send(std::iter::repeat_n(7, bytes));
        self.world.deliver_ring(conversation, 0);
        let mut yields = [0; 2];
        let mut read = 0;
        for _ in 0..POLLS {
            for (node, count) in yields.iter_mut().enumerate() {
                let outcome = self.world.nodes[node].engine.poll(self.world.now_ns).expect("the peer is honest");
                *count += u32::from(outcome.should_yield);
            }
            read += self.end(conversation, 1).read(usize::MAX).len();
            self.world.deliver_ring(conversation, 1);
            self.world.now_ns += POLL_NS;
        }
        assert_eq!(read, bytes);
        yields
    }

    /// Forwards a stream in each of these polls, and returns how often each proxy yielded.
    fn stream(&mut self, polls: usize) -> [u32; 2] {
        let mut yields = [0; 2];
        for _ in 0..polls {
            self.end(STREAM, 0).send(std::iter::repeat_n(7, 2000));
            self.world.deliver_ring(STREAM, 0);
            for (node, count) in yields.iter_mut().enumerate() {
                let outcome = self.world.nodes[node].engine.poll(self.world.now_ns).expect("the peer is honest");
                *count += u32::from(outcome.should_yield);
            }
            self.end(STREAM, 1).read(usize::MAX);
            self.world.deliver_ring(STREAM, 1);
            self.world.now_ns += POLL_NS;
        }
        yields
    }
}

#[test]
fn a_proxy_that_forwards_a_short_message_yields() {
    assert_eq!(Pair::new(true).forward(SHORT, 8), [1, 1]);
}

#[test]
fn an_engine_without_classes_does_not_yield_for_short_messages() {
    let mut pair = Pair::new(false);
    assert_eq!(pair.forward(SHORT, 8), [0, 0]);
    assert_eq!(pair.forward(STREAM, PIECE_BYTES), [0, 0]);
}

#[test]
fn streams_without_short_messages_do_not_yield() {
    let mut pair = Pair::new(true);
    assert_eq!(pair.forward(STREAM, PIECE_BYTES), [0, 0]);
}

#[test]
fn streams_yield_regularly_for_some_time_after_a_short_message() {
    let mut pair = Pair::new(true);
    pair.forward(SHORT, 8);
    assert_eq!(pair.stream(30), [5, 5], "30 us, with a yield every 5 us");
    pair.world.now_ns += LATENCY_TRAFFIC_NS;
    assert_eq!(pair.forward(STREAM, PIECE_BYTES), [0, 0]);
}
