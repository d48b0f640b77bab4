//! Every interleaving of two threads on one lane, and every value that their loads may see, by the loom model checker:
//! `RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p lane --release --test loom`
//!
//! Each fact stands beside what breaks it: a window that forgets the order of a store, a receiver that returns credit
//! too early, ends without the fence between store and look. There the checker must fail, or it would show nothing.
//!
//! What it cannot show: loom runs loads in program order, so a load that a weakly ordered machine performs *late*
//! (payload loads after the credit's store) is kept in place by the release order of that store, by argument and not by
//! search.

#![cfg(loom)]
#![allow(unsafe_code)] // Raw spans of the window traits.

use fabric::{Coherence, MemoryInbound, MemoryOutbound, Outbound};
use lane::mutation::WithoutSleepFences;
use lane::{Consumer, Layout, MemoryRelease, Producer, SLOT_BYTES};
use loom::sync::{Condvar, Mutex};
use loom::thread;
use std::collections::BTreeSet;
use std::ptr::NonNull;
use volmem::Region;
use volmem::sync::{Arc, Ordering};

const SECRET: u64 = 0x5EC7;
const RING: Layout = Layout::packed(8, 0);
const BOTH_RINGS: Layout = Layout::packed(8, 16);
const MESSAGE_BYTES: usize = 8;

/// How an outbound window differs from what it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// Stores have no order.
    Unordered,
    /// The length of an open record has no order: it may show before what is appended.
    LengthUnordered,
    /// All credit is for so many slots at least.
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
        // SAFETY: the caller's.
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
    // No ring lies in the sender's memory: each word costs the checker time.
    let senders = Region::heap(layout.back_offset + Layout::BACK_BYTES);
    let receivers = Region::heap(layout.window_bytes());
    let forward = Window { memory: MemoryOutbound::new(receivers.clone()), flaw: forward };
    let back = Window { memory: MemoryOutbound::new(senders.clone()), flaw: back };
    let producer = Producer::new(forward, MemoryInbound::new(senders), layout, SECRET);
    (producer, Consumer::new(MemoryInbound::new(receivers), back, layout, SECRET))
}

/// A ring before the wait is not lost.
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

/// Explores `body`; `LOOM_MAX_PREEMPTIONS` goes deeper (6 takes a minute, 10 several).
fn explore(body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(4);
    builder.max_branches = 100_000;
    builder.check(body);
}

/// Reads until there are so many bytes, sleeping in between.
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

/// What is seen at all is seen whole: a record over two slots.
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

/// Two records that are shown together: seen both or not at all, and whole. A receiver that sleeps is rung once.
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
fn records_that_are_shown_together_are_seen_together() {
    publish_together(Flaw::None);
}

#[test]
#[should_panic(expected = "record header")]
fn records_that_are_shown_together_are_not_seen_so_when_stores_have_no_order() {
    publish_together(Flaw::Unordered);
}

/// A full ring, a receiver that reads two messages, a sender that writes on as soon as it may.
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

/// The sender sleeps for room in a full ring, of which the receiver reads just enough for one wake-up.
fn sender_sleeps() {
    explore(|| {
        let (mut producer, mut consumer) = lane(RING, Flaw::None, Flaw::None);
        for number in 0..8 {
            assert_eq!(producer.write(&message(number)), Ok(MESSAGE_BYTES));
        }
        let bell = Doorbell::new();
        let receivers_bell = bell.clone();
        // The sender is the first thread: a deadlock unwinds only from there.
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
fn the_end_comes_after_the_last_byte() {
    finish(Flaw::None);
}

#[test]
#[should_panic(expected = "end of stream")]
fn the_end_comes_before_the_last_byte_when_stores_have_no_order() {
    finish(Flaw::Unordered);
}

// --- elastic lanes ---------------------------------------------------------------------------------------------------

/// The small ring and two larger ones, which have few slots under the checker.
const ELASTIC: Layout = Layout::packed_elastic(8, 8);
/// Takes six slots, and no small ring.
const BULK_BYTES: usize = 5 * SLOT_BYTES;

/// Shows what is held back, and notes that it was the receiver who has.
fn shows(consumer: &mut Receiver, has_shown: &mut bool) -> bool {
    let shows = consumer.show_held();
    *has_shown |= shows;
    shows
}

/// Two messages are held back and a third one follows that shows them, to a receiver whose time to wait is up at any
/// moment: it shows what it finds held back, and sleeps where it finds nothing. Each message is read once, in order.
fn hold_back(forward: Flaw) {
    explore_outcomes(2, &[false, true], move || {
        let (mut producer, mut consumer) = lane(RING, forward, Flaw::None);
        let bell = Doorbell::new();
        let senders_bell = bell.clone();
        let sender = thread::spawn(move || {
            for (number, is_held) in [(1, true), (2, true), (3, false)] {
                if is_held {
                    producer.begin_hold(0);
                }
                assert_eq!(producer.write(&message(number)), Ok(MESSAGE_BYTES));
                producer.end_hold(is_held, 1000);
                if producer.take_wake_request() {
                    senders_bell.ring();
                }
            }
        });
        let mut bytes = Vec::new();
        let mut has_shown = false;
        let mut buffer = [0; 3 * MESSAGE_BYTES];
        while bytes.len() < buffer.len() {
            let read_bytes = consumer.read(&mut buffer).unwrap();
            bytes.extend_from_slice(&buffer[..read_bytes]);
            if read_bytes > 0 || shows(&mut consumer, &mut has_shown) {
                continue;
            }
            consumer.announce_sleep();
            if consumer.may_have_data() || consumer.held_since_ms().is_some() {
                consumer.cancel_sleep();
            } else {
                bell.wait();
            }
        }
        assert_eq!(bytes, [message(1), message(2), message(3)].concat(), "not what was written");
        sender.join().unwrap();
        has_shown
    });
}

#[test]
fn what_is_held_back_is_read_once_whoever_shows_it() {
    hold_back(Flaw::None);
}

#[test]
#[should_panic(expected = "record header")]
fn what_is_held_back_is_not_there_when_stores_have_no_order() {
    hold_back(Flaw::Unordered);
}

/// Explores `body`, whose threads store to more words that the other one loads, with so many preemptions, or
/// one more where `LOOM_MAX_PREEMPTIONS` is set. `body` says what came to pass, and all of `expected` must have.
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

/// Two messages come behind an open record that the receiver reads meanwhile: they are appended as long as it has not
/// caught up. The end closes the record.
fn append(forward: Flaw) {
    explore_outcomes(2, &[1, 2, 3], move || {
        let (mut producer, mut consumer) = lane(ELASTIC, forward, Flaw::None);
        let bell = Doorbell::new();
        let senders_bell = bell.clone();
        // The first is unread, so that the second opens a record.
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
fn what_is_appended_to_an_open_record_is_read_once_and_in_order() {
    append(Flaw::None);
}

#[test]
#[should_panic(expected = "not what was written")]
fn what_is_appended_is_not_read_when_the_length_has_no_order() {
    append(Flaw::LengthUnordered);
}

/// The sender moves to a larger ring, and back to the small one if everything is read by then.
/// Where it is not patient, that may be an open record, of which the receiver does not know that it is closed.
fn hand_over(back: Flaw, prefers_waiting: bool) {
    explore_outcomes(2, &[false, true], move || {
        let (mut producer, mut consumer) = lane(ELASTIC, Flaw::None, back);
        producer.set_prefers_waiting(prefers_waiting); // Such a one writes records of their own.
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
fn bytes_follow_the_move_from_an_open_record_whose_ring_was_given_back() {
    hand_over(Flaw::None, false);
}

#[test]
#[should_panic(expected = "not what was written")]
fn bytes_do_not_follow_when_memory_is_given_back_that_is_unread() {
    hand_over(Flaw::CreditAtLeast(1 + 6 + 1), true); // The record that leads to the larger ring, and both there.
}

/// The way out of a larger ring is unread when the sender moves to a larger one again: to another one, then.
#[test]
fn a_ring_that_was_left_is_not_written_before_the_way_out_of_it_is_read() {
    explore_outcomes(1, &[()], || {
        let (mut producer, mut consumer) = lane(ELASTIC, Flaw::None, Flaw::None);
        producer.set_prefers_waiting(true);
        let bell = Doorbell::new();
        let senders_bell = bell.clone();
        assert_eq!(producer.write(&[1; BULK_BYTES]), Ok(BULK_BYTES));
        assert_eq!(consumer.read(&mut [0; BULK_BYTES]), Ok(BULK_BYTES));
        assert_eq!(producer.release_memory(), MemoryRelease::Released);
        // So many that the next but one to go there would lie on the way out.
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

/// A sender sleeps for room, of which the receiver gives back just what it asks for.
fn sender_sleeps_for_enough() {
    explore(|| {
        let (mut producer, mut consumer) = lane(ELASTIC, Flaw::None, Flaw::None);
        producer.forbid_growth();
        producer.set_prefers_waiting(true);
        for number in 0..7 {
            assert_eq!(producer.write(&message(number)), Ok(MESSAGE_BYTES));
        }
        assert_eq!(producer.write(&message(7)), Ok(0), "the slot that is kept");
        // Four slots are asked for. The first two of them are not worth a wake-up, and the others may be.
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
fn a_sender_that_sleeps_is_woken_when_as_much_room_comes_back_as_it_asks_for() {
    sender_sleeps_for_enough();
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_sender_that_sleeps_is_not_woken_when_enough_room_comes_back_without_the_fences() {
    let _mutation = WithoutSleepFences::new();
    sender_sleeps_for_enough();
}
