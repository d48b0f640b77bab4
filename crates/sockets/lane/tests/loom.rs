//! Checks a lane between two threads with the loom model checker, which explores the interleavings and the values that
//! their loads may see:
//! `RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p lane --release --test loom`
//!
//! For each fact there is a mutation that breaks it: a window that ignores the order of a store, a receiver that
//! returns credit too early, endpoints without the fence between store and load, announcements without numbers. With
//! the mutation the checker must fail; otherwise the check would show nothing.
//!
//! A limit of the check: loom runs loads in program order. That a weakly ordered machine does not perform a payload
//! load *late*, after the store of the credit, follows from the release order of that store, and is not explored.

#![cfg(loom)]
#![allow(unsafe_code)] // The window traits take raw pointers.

use fabric::{Coherence, MemoryInbound, MemoryOutbound, Outbound};
use lane::mutation::{WithoutNumbers, WithoutSleepFences};
use lane::{Budget, Consumer, ELASTIC_RINGS, LargerRings, Layout, MemoryRelease, Producer, SLOT_BYTES};
use loom::sync::{Condvar, Mutex};
use loom::thread;
use std::collections::BTreeSet;
use std::ptr::NonNull;
use volmem::Region;
use volmem::sync::{Arc, AtomicU64, Ordering};

const SECRET: u64 = 0x5EC7;
const RING: Layout = Layout::packed(8, 0);
const BOTH_RINGS: Layout = Layout::packed(8, 16);
const MESSAGE_BYTES: usize = 8;

/// A deviation of an outbound window from its contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// All stores are relaxed.
    Unordered,
    /// The store of an open record's length is relaxed, so it may become visible before the appended bytes.
    LengthUnordered,
    /// Each credit is at least this number of slots.
    CreditAtLeast(u64),
}

struct Window {
    memory: MemoryOutbound,
    flaw: Flaw,
}

impl Outbound for Window {
    fn len_bytes(&self) -> usize {
        self.memory.len_bytes()
    }

    fn coherence(&self) -> Coherence {
        self.memory.coherence()
    }

    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        let is_credit = offset == RING.back_offset;
        let is_length = offset >= RING.small_offset && offset % SLOT_BYTES == size_of::<u64>();
        match self.flaw {
            Flaw::Unordered => self.memory.store_u64(offset, value, Ordering::Relaxed),
            Flaw::LengthUnordered if is_length => self.memory.store_u64(offset, value, Ordering::Relaxed),
            Flaw::CreditAtLeast(slots) if is_credit => self.memory.store_u64(offset, value.max(slots), order),
            Flaw::None | Flaw::LengthUnordered | Flaw::CreditAtLeast(_) => self.memory.store_u64(offset, value, order),
        }
    }

    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        // SAFETY: `source` is readable for `len_bytes` and outside the window, by the contract of the trait's method,
        // which is the same.
        unsafe { self.memory.write_from(offset, source, len_bytes) };
    }

    fn pointer(&self, offset: usize, len_bytes: usize) -> Option<NonNull<u8>> {
        self.memory.pointer(offset, len_bytes)
    }

    fn fence(&self) {
        self.memory.fence();
    }

    fn flush(&self) {
        self.memory.flush();
    }

    fn discard(&self, offset: usize, len_bytes: usize) {
        self.memory.discard(offset, len_bytes);
    }
}

type Sender = Producer<Window, MemoryInbound>;
type Receiver = Consumer<MemoryInbound, Window>;

fn lane(layout: Layout, forward: Flaw, back: Flaw) -> (Sender, Receiver) {
    // The sender's memory has no rings, because each word costs the checker time.
    let senders = Region::heap(layout.back_offset + Layout::BACK_BYTES);
    let receivers = Region::heap(layout.window_bytes());
    let forward = Window { memory: MemoryOutbound::new(receivers.clone()), flaw: forward };
    let back = Window { memory: MemoryOutbound::new(senders.clone()), flaw: back };
    let producer = Producer::new(forward, MemoryInbound::new(senders), layout, SECRET);
    (producer, Consumer::new(MemoryInbound::new(receivers), back, layout, SECRET))
}

/// A doorbell that remembers a ring before the wait.
struct Doorbell {
    is_rung: Mutex<bool>,
    changed: Condvar,
}

impl Doorbell {
    fn new() -> Arc<Self> {
        Arc::new(Self { is_rung: Mutex::new(false), changed: Condvar::new() })
    }

    fn ring(&self) {
        *self.is_rung.lock().unwrap() = true;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut is_rung = self.is_rung.lock().unwrap();
        while !*is_rung {
            is_rung = self.changed.wait(is_rung).unwrap();
        }
        *is_rung = false;
    }
}

/// Explores `body`. `LOOM_MAX_PREEMPTIONS` sets the depth (6 takes a minute, 10 several).
fn explore(body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(4);
    builder.max_branches = 100_000;
    builder.check(body);
}

/// Reads until the given number of bytes has arrived, and sleeps in between.
fn read_all(consumer: &mut Receiver, bell: &Doorbell, len_bytes: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut buffer = vec![0; len_bytes];
    while bytes.len() < len_bytes {
        let read_bytes = consumer.read(&mut buffer).unwrap();
        bytes.extend_from_slice(&buffer[..read_bytes]);
        if read_bytes == 0 {
            consumer.announce_sleep();
            if consumer.may_have_data() {
                consumer.cancel_sleep();
            } else {
                bell.wait();
            }
        }
    }
    bytes
}

fn write_and_ring(producer: &mut Sender, bell: &Doorbell, bytes: &[u8]) {
    assert_eq!(producer.write(bytes), Ok(bytes.len()));
    if producer.take_wake_request() {
        bell.ring();
    }
}

fn message(number: u8) -> [u8; MESSAGE_BYTES] {
    [number; MESSAGE_BYTES]
}

fn read_message(consumer: &mut Receiver, number: u8) {
    let mut bytes = message(0);
    let read_bytes = consumer.read(&mut bytes).unwrap();
    assert_eq!((read_bytes, bytes), (MESSAGE_BYTES, message(number)), "overwritten before it was read");
}

/// A record of two slots, which must be seen complete or not at all.
fn publish(forward: Flaw) {
    explore(move || {
        let (mut producer, mut consumer) = lane(RING, forward, Flaw::None);
        let sender = thread::spawn(move || producer.write(&[7; 56]).unwrap());
        let mut bytes = [0; 56];
        let read_bytes = consumer.read(&mut bytes).unwrap();
        assert!(read_bytes == 0 || bytes == [7; 56], "torn: {read_bytes} bytes {bytes:?}");
        assert_eq!(sender.join().unwrap(), 56);
    });
}

#[test]
fn payload_is_visible_when_its_tag_is() {
    publish(Flaw::None);
}

#[test]
#[should_panic(expected = "record header")]
fn payload_is_not_visible_with_its_tag_when_stores_have_no_order() {
    publish(Flaw::Unordered);
}

/// A batch of two records, which must both be seen complete or not at all. A receiver that sleeps is rung once.
fn publish_together(forward: Flaw) {
    explore(move || {
        let (mut producer, mut consumer) = lane(RING, forward, Flaw::None);
        let bell = Doorbell::new();
        let senders_bell = bell.clone();
        let sender = thread::spawn(move || {
            for number in 1..3 {
                let mut draft = producer.draft(MESSAGE_BYTES).unwrap().unwrap();
                draft.append(&message(number));
                draft.stage();
            }
            assert!(producer.publish_staged());
            if producer.take_wake_request() {
                senders_bell.ring();
            }
        });
        let mut bytes = [0; 2 * MESSAGE_BYTES];
        while consumer.read(&mut bytes).unwrap() != bytes.len() {
            assert_eq!(bytes, [0; 2 * MESSAGE_BYTES], "one without the other");
            consumer.announce_sleep();
            if consumer.may_have_data() {
                consumer.cancel_sleep();
            } else {
                bell.wait();
            }
        }
        assert_eq!(bytes, [message(1), message(2)].concat()[..], "torn");
        sender.join().unwrap();
    });
}

#[test]
fn records_that_are_published_together_are_seen_together() {
    publish_together(Flaw::None);
}

#[test]
#[should_panic(expected = "record header")]
fn records_that_are_published_together_are_not_seen_so_when_stores_have_no_order() {
    publish_together(Flaw::Unordered);
}

/// A full ring, a receiver that reads two messages, and a sender that writes again as soon as it has room.
fn credit(back: Flaw) {
    explore(move || {
        let (mut producer, mut consumer) = lane(RING, Flaw::None, back);
        for number in 0..8 {
            assert_eq!(producer.write(&message(number)), Ok(MESSAGE_BYTES));
        }
        assert_eq!(producer.write(&message(8)), Ok(0));
        let sender = thread::spawn(move || {
            let mut written = 8;
            for _ in 0..3 {
                written += u8::from(producer.write(&message(written)).unwrap() > 0);
            }
            written
        });
        for number in 0..2 {
            read_message(&mut consumer, number);
        }
        for number in 2..sender.join().unwrap() {
            read_message(&mut consumer, number);
        }
    });
}

#[test]
fn an_unread_slot_is_not_overwritten_when_the_ring_wraps() {
    credit(Flaw::None);
}

#[test]
#[should_panic(expected = "overwritten before it was read")]
fn an_unread_slot_is_overwritten_when_credit_comes_early() {
    credit(Flaw::CreditAtLeast(2));
}

/// The receiver sleeps for each of two messages.
fn receiver_sleeps() {
    explore(|| {
        let (mut producer, mut consumer) = lane(RING, Flaw::None, Flaw::None);
        let bell = Doorbell::new();
        let senders_bell = bell.clone();
        let sender = thread::spawn(move || {
            write_and_ring(&mut producer, &senders_bell, &message(1));
            write_and_ring(&mut producer, &senders_bell, &message(2));
        });
        let bytes = read_all(&mut consumer, &bell, 2 * MESSAGE_BYTES);
        assert_eq!(bytes, [message(1), message(2)].concat());
        sender.join().unwrap();
    });
}

#[test]
fn a_receiver_that_sleeps_is_woken_for_every_message() {
    receiver_sleeps();
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_receiver_that_sleeps_is_not_woken_without_the_fences() {
    let _mutation = WithoutSleepFences::new();
    receiver_sleeps();
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_receiver_that_sleeps_is_not_woken_twice_by_announcements_without_numbers() {
    let _mutation = WithoutNumbers::new();
    receiver_sleeps();
}

/// The sender sleeps for room in a full ring, of which the receiver reads just enough for one wake-up.
fn sender_sleeps() {
    explore(|| {
        let (mut producer, mut consumer) = lane(RING, Flaw::None, Flaw::None);
        for number in 0..8 {
            assert_eq!(producer.write(&message(number)), Ok(MESSAGE_BYTES));
        }
        let bell = Doorbell::new();
        let receivers_bell = bell.clone();
        // The sender is the first thread, because a deadlock unwinds only from there.
        let receiver = thread::spawn(move || {
            for number in 0..2 {
                read_message(&mut consumer, number);
                if consumer.take_wake_request() {
                    receivers_bell.ring();
                }
            }
        });
        while producer.write(&message(8)) == Ok(0) {
            producer.announce_sleep();
            if producer.is_writable().unwrap() {
                producer.cancel_sleep();
            } else {
                bell.wait();
            }
        }
        receiver.join().unwrap();
    });
}

#[test]
fn a_sender_that_sleeps_is_woken_when_room_comes_back() {
    sender_sleeps();
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_sender_that_sleeps_is_not_woken_without_the_fences() {
    let _mutation = WithoutSleepFences::new();
    sender_sleeps();
}

/// A short message, then one that makes the lane move to its big ring.
fn switch(forward: Flaw) {
    explore(move || {
        let (mut producer, mut consumer) = lane(BOTH_RINGS, forward, Flaw::None);
        let bell = Doorbell::new();
        let senders_bell = bell.clone();
        let sender = thread::spawn(move || {
            write_and_ring(&mut producer, &senders_bell, &message(1));
            write_and_ring(&mut producer, &senders_bell, &[2; 256]);
        });
        let bytes = read_all(&mut consumer, &bell, MESSAGE_BYTES + 256);
        assert_eq!(bytes[..MESSAGE_BYTES], message(1));
        assert_eq!(bytes[MESSAGE_BYTES..], [2; 256]);
        sender.join().unwrap();
    });
}

#[test]
fn bytes_follow_the_move_to_the_big_ring() {
    switch(Flaw::None);
}

#[test]
#[should_panic(expected = "record header")]
fn bytes_do_not_follow_the_move_when_stores_have_no_order() {
    switch(Flaw::Unordered);
}

/// One message and the end, for a receiver that sleeps in between.
fn finish(forward: Flaw) {
    explore(move || {
        let (mut producer, mut consumer) = lane(RING, forward, Flaw::None);
        let bell = Doorbell::new();
        let senders_bell = bell.clone();
        let sender = thread::spawn(move || {
            assert_eq!(producer.write(&message(1)), Ok(MESSAGE_BYTES));
            producer.finish();
            if producer.take_wake_request() {
                senders_bell.ring();
            }
        });
        let mut bytes = Vec::new();
        while !consumer.is_finished() {
            let mut buffer = message(0);
            let read_bytes = consumer.read(&mut buffer).unwrap();
            bytes.extend_from_slice(&buffer[..read_bytes]);
            consumer.announce_sleep();
            if consumer.may_have_data() {
                consumer.cancel_sleep();
            } else {
                bell.wait();
            }
        }
        assert_eq!(bytes, message(1));
        sender.join().unwrap();
    });
}

#[test]
fn the_end_of_stream_is_seen_after_the_last_byte() {
    finish(Flaw::None);
}

#[test]
#[should_panic(expected = "end of stream")]
fn the_end_of_stream_is_seen_before_the_last_byte_when_stores_have_no_order() {
    finish(Flaw::Unordered);
}

/// Waits until a word is not 0.
fn wait_for(word: &AtomicU64, bell: &Doorbell) -> u64 {
    loop {
        match word.load(Ordering::Acquire) {
            0 => bell.wait(),
            position => return position,
        }
    }
}

/// The receiver reads up to where the sender's part ends, and both restart the lane. The sender writes on at once.
fn moves(forward: Flaw) {
    explore_outcomes(2, &[()], move || {
        let (mut producer, mut consumer) = lane(ELASTIC, forward, Flaw::None);
        let (bell, senders_bell) = (Doorbell::new(), Doorbell::new());
        let words: [Arc<AtomicU64>; 3] = std::array::from_fn(|_| Arc::new(AtomicU64::new(0)));
        let (receivers_bell, own_bell) = (bell.clone(), senders_bell.clone());
        let [end, consent, start] = words.clone();
        let sender = thread::spawn(move || {
            assert_eq!(producer.write(&message(1)), Ok(MESSAGE_BYTES));
            end.store(producer.end_move(), Ordering::Release);
            receivers_bell.ring();
            wait_for(&consent, &own_bell);
            start.store(producer.restart(), Ordering::Release);
            assert_eq!(producer.write(&message(2)), Ok(MESSAGE_BYTES));
            receivers_bell.ring();
        });
        let [end, consent, start] = words;
        let end = wait_for(&end, &bell);
        while !consumer.has_reached(end).unwrap() {
            read_message(&mut consumer, 1);
        }
        consent.store(1, Ordering::Release);
        senders_bell.ring();
        consumer.restart(wait_for(&start, &bell)).unwrap();
        assert_eq!(read_all(&mut consumer, &bell, MESSAGE_BYTES), message(2));
        sender.join().unwrap();
    });
}

#[test]
fn a_part_of_a_stream_is_read_to_its_end_and_the_next_from_its_start() {
    moves(Flaw::None);
}

// --- elastic lanes ---------------------------------------------------------------------------------------------------

/// The small ring and two larger rings, which have few slots under loom.
const ELASTIC: Layout = {
    let packed = Layout::packed(8, 0);
    Layout { elastic: Some(LargerRings::in_a_row(packed.big_offset, ELASTIC_RINGS as u8)), ..packed }
};
/// Length of a message of six slots, which does not fit the small ring.
const BULK_BYTES: usize = 5 * SLOT_BYTES;

/// Explores `body`, whose threads share more words, with the given number of preemptions, or one more if
/// `LOOM_MAX_PREEMPTIONS` is set. `body` returns its outcome, and each of `expected` must have occurred.
fn explore_outcomes<T>(preemptions: usize, expected: &[T], body: impl Fn() -> T + Sync + Send + 'static)
where
    T: Ord + Copy + std::fmt::Debug + Send + 'static,
{
    let seen = std::sync::Arc::new(std::sync::Mutex::new(BTreeSet::new()));
    let outcomes = seen.clone();
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions + usize::from(builder.preemption_bound.is_some()));
    builder.max_branches = 100_000;
    builder.check(move || _ = outcomes.lock().unwrap().insert(body()));
    assert_eq!(*seen.lock().unwrap(), expected.iter().copied().collect(), "the outcomes that were explored");
}

fn close_and_ring(producer: &mut Sender, bell: &Doorbell) {
    producer.finish();
    if producer.take_wake_request() {
        bell.ring();
    }
}

/// Two messages follow an open record while the receiver reads it. They are appended as long as the receiver has not
/// caught up. The end of the stream closes the record.
fn append(forward: Flaw) {
    explore_outcomes(2, &[1, 2, 3], move || {
        let (mut producer, mut consumer) = lane(ELASTIC, forward, Flaw::None);
        let bell = Doorbell::new();
        let senders_bell = bell.clone();
        // The first message is unread, so that the second opens a record.
        assert_eq!(producer.write(&message(1)), Ok(MESSAGE_BYTES));
        assert_eq!(producer.write(&message(2)), Ok(MESSAGE_BYTES));
        let slots_before = producer.position();
        let sender = thread::spawn(move || {
            write_and_ring(&mut producer, &senders_bell, &message(3));
            write_and_ring(&mut producer, &senders_bell, &message(4));
            close_and_ring(&mut producer, &senders_bell);
            producer.position()
        });
        let bytes = read_all(&mut consumer, &bell, 4 * MESSAGE_BYTES);
        assert_eq!(bytes, [message(1), message(2), message(3), message(4)].concat(), "not what was written");
        let slots = sender.join().unwrap() - slots_before;
        assert_eq!(consumer.read(&mut message(0)), Ok(0));
        assert!(consumer.is_finished());
        slots
    });
}

#[test]
fn bytes_appended_to_an_open_record_are_read_once_and_in_order() {
    append(Flaw::None);
}

#[test]
#[should_panic(expected = "not what was written")]
fn appended_bytes_are_not_read_when_the_length_has_no_order() {
    append(Flaw::LengthUnordered);
}

/// The sender moves to a larger ring, and back to the small one if everything is read by then. A sender that does not
/// prefer waiting may have an open record that is read, and the receiver may not have seen that it is closed.
fn hand_over(back: Flaw, prefers_waiting: bool) {
    explore_outcomes(2, &[false, true], move || {
        let (mut producer, mut consumer) = lane(ELASTIC, Flaw::None, back);
        producer.set_prefers_waiting(prefers_waiting); // If set, each write is a separate record.
        let bell = Doorbell::new();
        let senders_bell = bell.clone();
        let sender = thread::spawn(move || {
            write_and_ring(&mut producer, &senders_bell, &[1; BULK_BYTES]);
            write_and_ring(&mut producer, &senders_bell, &message(2));
            let given = producer.release_memory();
            write_and_ring(&mut producer, &senders_bell, &message(3));
            given == MemoryRelease::Released
        });
        let bytes = read_all(&mut consumer, &bell, BULK_BYTES + 2 * MESSAGE_BYTES);
        let written = [&[1; BULK_BYTES][..], &message(2), &message(3)].concat();
        assert_eq!(bytes, written, "not what was written");
        sender.join().unwrap()
    });
}

#[test]
fn bytes_follow_the_moves_between_the_rings_of_an_elastic_lane() {
    hand_over(Flaw::None, true);
}

#[test]
fn bytes_follow_the_move_from_an_open_record_whose_ring_was_released() {
    hand_over(Flaw::None, false);
}

#[test]
#[should_panic(expected = "not what was written")]
fn bytes_do_not_follow_when_unread_memory_is_released() {
    hand_over(Flaw::CreditAtLeast(1 + 6 + 1), true); // The switch to the larger ring, and both records there.
}

/// The switch out of a larger ring is unread when the sender grows again, so it must move to another ring.
#[test]
fn a_ring_is_not_reused_before_the_switch_out_of_it_is_read() {
    explore_outcomes(1, &[()], || {
        let (mut producer, mut consumer) = lane(ELASTIC, Flaw::None, Flaw::None);
        producer.set_prefers_waiting(true);
        let bell = Doorbell::new();
        let senders_bell = bell.clone();
        assert_eq!(producer.write(&[1; BULK_BYTES]), Ok(BULK_BYTES));
        assert_eq!(consumer.read(&mut [0; BULK_BYTES]), Ok(BULK_BYTES));
        assert_eq!(producer.release_memory(), MemoryRelease::Released);
        // Sends so many messages that the next but one in that ring would overwrite the switch.
        for number in 2..9 {
            assert_eq!(producer.write(&message(number)), Ok(MESSAGE_BYTES));
        }
        let sender = thread::spawn(move || {
            for number in 9..11 {
                write_and_ring(&mut producer, &senders_bell, &[number; BULK_BYTES]);
            }
        });
        let bytes = read_all(&mut consumer, &bell, 7 * MESSAGE_BYTES + 2 * BULK_BYTES);
        let messages = (2..9).flat_map(message);
        let written: Vec<u8> = messages.chain([9; BULK_BYTES]).chain([10; BULK_BYTES]).collect();
        assert_eq!(bytes, written);
        sender.join().unwrap();
    });
}

/// A budget without memory for larger rings.
struct NoMemory;

impl Budget for NoMemory {
    fn charge(&self, _bytes: usize) -> bool {
        false
    }

    fn has_room(&self, _bytes: usize) -> bool {
        false
    }

    fn release(&self, _bytes: usize) {}
}

/// A sender sleeps for room, and the receiver returns just the credit that it announced.
fn sender_sleeps_for_enough() {
    explore(|| {
        let (mut producer, mut consumer) = lane(ELASTIC, Flaw::None, Flaw::None);
        producer.set_budget(&NoMemory);
        producer.set_prefers_waiting(true);
        for number in 0..7 {
            assert_eq!(producer.write(&message(number)), Ok(MESSAGE_BYTES));
        }
        assert_eq!(producer.write(&message(7)), Ok(0), "the slot that is kept");
        // Four slots are requested. The first two must not cause a wake-up; the others may.
        (0..2).for_each(|number| read_message(&mut consumer, number));
        let bell = Doorbell::new();
        let receivers_bell = bell.clone();
        let receiver = thread::spawn(move || {
            for number in 2..4 {
                read_message(&mut consumer, number);
                if consumer.take_wake_request() {
                    receivers_bell.ring();
                }
            }
        });
        loop {
            producer.announce_sleep();
            if producer.is_writable().unwrap() {
                producer.cancel_sleep();
                break;
            }
            bell.wait();
        }
        assert_eq!(producer.write(&message(7)), Ok(MESSAGE_BYTES));
        receiver.join().unwrap();
    });
}

#[test]
fn a_sender_that_sleeps_is_woken_when_the_room_it_announced_is_free() {
    sender_sleeps_for_enough();
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_sender_that_sleeps_is_not_woken_when_the_room_is_free_without_the_fences() {
    let _mutation = WithoutSleepFences::new();
    sender_sleeps_for_enough();
}
