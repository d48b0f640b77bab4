//! A lane over windows with a modelled latency and rate.

use crate::windows::SECRET;
use fabric::heap::{self, HeapLink};
use fabric::timed::{
    Clock, LinkTiming, Pacer, SharedConfig, SharedInbound, SharedLayout, SharedOutbound, SharedWindows, TimedConfig,
    TimedLink, memory_bytes,
};
use fabric::{Inbound, Link, Outbound, train_both};
use lane::{Consumer, Layout, Producer};
use std::sync::Arc;
use std::sync::Mutex;
use volmem::Region;

const LAYOUT: Layout = Layout::packed(64, 1024);

/// One byte per nanosecond, and a one-way latency of half a microsecond.
const TIMING: LinkTiming = LinkTiming { one_way_ns: 500, bytes_per_us: 1000, header_bytes: 24, payload_bytes_max: 256 };

/// A clock that the test advances.
#[derive(Debug, Clone, Default)]
struct ManualClock(Arc<Mutex<u64>>);

impl Clock for ManualClock {
    fn now_ns(&self) -> u64 {
        *self.0.lock().expect("no test panics with it")
    }

    fn wait_until(&self, time_ns: u64) {
        let mut now_ns = self.0.lock().expect("no test panics with it");
        *now_ns = time_ns.max(*now_ns);
    }
}

fn lane(
    clock: &ManualClock,
) -> (Producer<impl Outbound + use<>, impl Inbound + use<>>, Consumer<impl Inbound + use<>, impl Outbound + use<>>) {
    let setup = || TimedConfig { window_bytes: LAYOUT.window_bytes(), timing: TIMING, pacer: Pacer::new() };
    let (a, b) = heap::pair(memory_bytes(LAYOUT.window_bytes(), TIMING).expect("a timing"));
    let timed = |link: HeapLink| TimedLink::with_clock(link, setup(), clock.clone()).expect("a timed link");
    let (mut a, mut b) = (timed(a), timed(b));
    assert!(train_both(&mut a, &mut b));
    let producer = Producer::new(a.outbound(), a.inbound(), LAYOUT, SECRET);
    (producer, Consumer::new(b.inbound(), b.outbound(), LAYOUT, SECRET))
}

/// A lane that two programs share, and the memory that its receiver polls.
type SharedLane = (
    Producer<SharedOutbound<ManualClock>, SharedInbound<ManualClock>>,
    Consumer<SharedInbound<ManualClock>, SharedOutbound<ManualClock>>,
);

fn shared_lane(clock: &ManualClock) -> SharedLane {
    let shape = SharedLayout { window_bytes: LAYOUT.window_bytes(), words_bytes: 512 };
    let memory = [(); 2].map(|()| Region::heap(shape.memory_bytes()));
    let pacers = [Pacer::new(), Pacer::new()];
    let end = |own: usize| {
        let (pacer, peer_pacer) = (pacers[own].clone(), pacers[1 - own].clone());
        let setup = SharedConfig { layout: shape, timing: TIMING, pacer, peer_pacer };
        SharedWindows::with_clock(&memory[own], &memory[1 - own], setup, clock.clone()).expect("windows")
    };
    let (a, b) = (end(0), end(1));
    let producer = Producer::new(a.outbound(), a.inbound(), LAYOUT, SECRET);
    (producer, Consumer::new(b.inbound(), b.outbound(), LAYOUT, SECRET))
}

#[test]
fn a_short_message_between_programs_is_one_packet_and_arrives_after_one_way() {
    let clock = ManualClock::default();
    let (mut producer, mut consumer) = shared_lane(&clock);
    let mut bytes = [0; 8];
    // The first write loads the credit.
    assert_eq!(producer.write(b"the room"), Ok(8));
    clock.wait_until(10_000);
    assert_eq!(consumer.read(&mut bytes), Ok(8));
    // SAFETY: the literal has eight readable bytes, outside the windows.
    assert!(unsafe { producer.write_short_from(b"8 bytes.".as_ptr(), 8, true) });
    // Tag, header and two words of payload: 32 bytes, and 24 bytes of packet overhead.
    clock.wait_until(10_000 + 32 + 24 + 500 - 1);
    assert_eq!(consumer.read(&mut bytes), Ok(0));
    clock.wait_until(10_000 + 32 + 24 + 500);
    assert_eq!(consumer.read(&mut bytes), Ok(8));
    assert_eq!(&bytes, b"8 bytes.");
}

#[test]
fn a_stream_between_programs_arrives_whole_and_at_the_rate_of_the_link() {
    let clock = ManualClock::default();
    stream(&clock, shared_lane(&clock));
}

#[test]
fn a_short_message_is_one_packet_and_arrives_after_one_way() {
    let clock = ManualClock::default();
    let (mut producer, mut consumer) = lane(&clock);
    assert_eq!(producer.write(b"8 bytes."), Ok(8));
    let mut bytes = [0; 8];
    // Tag, header and payload: 24 bytes, and 24 bytes of packet overhead.
    clock.wait_until(24 + 24 + 500 - 1);
    assert_eq!(consumer.read(&mut bytes), Ok(0));
    clock.wait_until(24 + 24 + 500);
    assert_eq!(consumer.read(&mut bytes), Ok(8));
    assert_eq!(&bytes, b"8 bytes.");
}

#[test]
fn messages_that_are_published_together_are_a_packet_each_and_arrive_with_the_last() {
    let clock = ManualClock::default();
    let (mut producer, mut consumer) = lane(&clock);
    for message in [b"first 8.", b"second 8", b"third 8."] {
        let mut draft = producer.draft(8).expect("an honest receiver").expect("room");
        draft.append(message);
        draft.stage();
    }
    clock.wait_until(10_000);
    let mut bytes = [0; 32];
    assert_eq!(consumer.read(&mut bytes), Ok(0));
    assert!(producer.publish_staged());
    // Only the line that is stored last has not arrived long before.
    clock.wait_until(10_000 + 24 + 24 + 500 - 1);
    assert_eq!(consumer.read(&mut bytes), Ok(0));
    clock.wait_until(10_000 + 24 + 24 + 500);
    assert_eq!(consumer.read(&mut bytes), Ok(24));
    assert_eq!(&bytes[..24], b"first 8.second 8third 8.");
}

#[test]
fn a_stream_arrives_whole_and_at_the_rate_of_the_link() {
    let clock = ManualClock::default();
    stream(&clock, lane(&clock));
}

fn stream(
    clock: &ManualClock,
    (mut producer, mut consumer): (Producer<impl Outbound, impl Inbound>, Consumer<impl Inbound, impl Outbound>),
) {
    const STREAM_BYTES: usize = 200_000;
    let (mut sent_bytes, mut received_bytes) = (0, 0);
    while received_bytes < STREAM_BYTES {
        let bytes: Vec<u8> = (sent_bytes..STREAM_BYTES).take(3_000).map(|index| (index % 251) as u8).collect();
        sent_bytes += producer.write(&bytes).expect("an honest receiver");
        clock.wait_until(clock.now_ns() + 1_000);
        let mut bytes = [0; 4_000];
        let read_bytes = consumer.read(&mut bytes).expect("an honest sender");
        for byte in &bytes[..read_bytes] {
            assert_eq!(*byte, (received_bytes % 251) as u8, "byte {received_bytes}");
            received_bytes += 1;
        }
    }
    assert!(clock.now_ns() > STREAM_BYTES as u64, "faster than a byte a nanosecond");
}
