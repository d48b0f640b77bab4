//! Two threads of the operating system that block on doorbells.

use crate::windows::{Random, SECRET};
use fabric::test_support::non_coherent::{CacheBehavior, NonCoherentMemory};
use fabric::{Inbound, Memory, MemoryInbound, MemoryOutbound, Outbound};
use lane::{Consumer, Layout, Producer};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use volmem::Region;

/// A doorbell that remembers a ring before the wait.
#[derive(Default)]
struct Doorbell {
    is_rung: Mutex<bool>,
    changed: Condvar,
}

impl Doorbell {
    fn ring(&self) {
        *self.is_rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut is_rung = self.is_rung.lock().unwrap_or_else(PoisonError::into_inner);
        while !*is_rung {
            is_rung = self.changed.wait(is_rung).unwrap_or_else(PoisonError::into_inner);
        }
        *is_rung = false;
    }
}

#[derive(Default)]
struct Doorbells {
    producer: Doorbell,
    consumer: Doorbell,
}

fn stream_byte(index: u64) -> u8 {
    (index.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

fn send(
    mut producer: Producer<impl Outbound, impl Inbound>,
    bells: &Doorbells,
    stream_bytes: u64,
    write_bytes_max: usize,
    mut random: Random,
) {
    let mut sent_bytes = 0;
    while sent_bytes < stream_bytes {
        let len_bytes = (1 + random.below(write_bytes_max) as u64).min(stream_bytes - sent_bytes);
        let bytes: Vec<u8> = (sent_bytes..sent_bytes + len_bytes).map(stream_byte).collect();
        let written_bytes = producer.write(&bytes).expect("an honest receiver");
        sent_bytes += written_bytes as u64;
        if producer.take_wake_request() {
            bells.consumer.ring();
        }
        if written_bytes == 0 {
            producer.announce_sleep();
            if producer.is_writable().expect("an honest receiver") {
                producer.cancel_sleep();
            } else {
                bells.producer.wait();
            }
        }
    }
    producer.finish();
    if producer.take_wake_request() {
        bells.consumer.ring();
    }
}

fn receive(
    mut consumer: Consumer<impl Inbound, impl Outbound>,
    bells: &Doorbells,
    read_bytes_max: usize,
    mut random: Random,
) -> u64 {
    let mut received_bytes = 0;
    let mut buffer = vec![0; read_bytes_max];
    loop {
        let len_bytes = 1 + random.below(read_bytes_max);
        let read_bytes = consumer.read(&mut buffer[..len_bytes]).expect("an honest sender");
        for byte in &buffer[..read_bytes] {
            assert_eq!(*byte, stream_byte(received_bytes), "byte {received_bytes}");
            received_bytes += 1;
        }
        if consumer.take_wake_request() {
            bells.producer.ring();
        }
        if consumer.is_finished() {
            return received_bytes;
        }
        if read_bytes == 0 {
            consumer.announce_sleep();
            if consumer.may_have_data() {
                consumer.cancel_sleep();
            } else {
                bells.consumer.wait();
            }
        }
    }
}

/// Sends a stream with reads and writes of random sizes. The seed determines the sizes, the machine the interleaving.
fn stream(layout: Layout, stream_bytes: u64, write_bytes_max: usize, read_bytes_max: usize, seed: u64) {
    let (senders, receivers) = (Region::heap(layout.window_bytes()), Region::heap(layout.window_bytes()));
    let windows = [(senders.clone(), receivers.clone()), (receivers, senders)];
    stream_in(windows, layout, stream_bytes, write_bytes_max, read_bytes_max, seed);
}

/// Does the same in given windows, as the sender and as the receiver map them, each with its own window first.
type Windows<M> = [(M, M); 2];

fn stream_in<M: Memory + 'static>(
    windows: Windows<M>,
    layout: Layout,
    stream_bytes: u64,
    write_bytes_max: usize,
    read_bytes_max: usize,
    seed: u64,
) {
    println!("seed {seed:#x}");
    let [(senders_own, receivers_peer), (receivers_own, senders_peer)] = windows;
    let producer = Producer::new(MemoryOutbound::new(receivers_peer), MemoryInbound::new(senders_own), layout, SECRET);
    let consumer = Consumer::new(MemoryInbound::new(receivers_own), MemoryOutbound::new(senders_peer), layout, SECRET);
    let bells = Arc::new(Doorbells::default());
    let senders_bells = bells.clone();
    let sender = std::thread::spawn(move || {
        send(producer, &senders_bells, stream_bytes, write_bytes_max, Random(seed));
    });
    let received_bytes = receive(consumer, &bells, read_bytes_max, Random(!seed));
    sender.join().expect("the sender's own checks");
    assert_eq!(received_bytes, stream_bytes);
}

/// Returns a new seed for each run; `LANE_SEED` repeats one.
fn seed() -> u64 {
    let given = std::env::var("LANE_SEED").ok();
    let given = given.map(|text| u64::from_str_radix(text.trim_start_matches("0x"), 16).expect("LANE_SEED in hex"));
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().expect("a clock after 1970");
    given.unwrap_or(now.as_nanos() as u64)
}

#[test]
fn a_stream_of_small_messages_through_a_tiny_ring_arrives_whole() {
    stream(Layout::packed(8, 0), 2 << 20, 100, 100, seed());
}

#[test]
fn a_stream_through_both_rings_arrives_whole() {
    stream(Layout::packed(16, 256), 16 << 20, 40_000, 20_000, seed());
}

#[test]
fn a_fast_writer_and_a_slow_reader_arrive_at_the_same_stream() {
    stream(Layout::packed(64, 0), 2 << 20, 20_000, 50, seed());
}

#[test]
fn a_slow_writer_and_a_fast_reader_arrive_at_the_same_stream() {
    stream(Layout::packed(8, 1024), 2 << 20, 50, 60_000, seed());
}

#[test]
fn a_stream_through_caches_that_hold_stale_lines_arrives_whole() {
    let (layout, seed) = (Layout::packed(8, 64), seed());
    for habits in [CacheBehavior::explicit(), CacheBehavior::spontaneous(seed)] {
        stream_in(NonCoherentMemory::windows(layout.window_bytes(), habits), layout, 256 << 10, 5_000, 5_000, seed);
    }
}
