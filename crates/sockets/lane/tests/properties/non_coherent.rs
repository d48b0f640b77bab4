//! Memory that is not coherent between two caches: the invalidations that an endpoint needs before it loads.
//!
//! Each fact is checked on a lane with all invalidations, where it must hold, and on a lane that omits one of them,
//! where it must not hold; otherwise the invalidation would be unnecessary, or the fact would show nothing.

use crate::windows::SECRET;
use fabric::test_support::counting::{CountingMemory, OperationCounts};
use fabric::test_support::non_coherent::{CacheBehavior, NonCoherentMemory, OmittedStep};
use fabric::{Coherence, Inbound, Memory, MemoryInbound, MemoryOutbound};
use lane::{Consumer, Layout, Producer, SLOT_BYTES};
use std::ptr::NonNull;
use volmem::sync::Ordering;
use volmem::{CACHE_LINE_BYTES, Region};

const RING: Layout = Layout::packed(8, 0);
const BOTH_RINGS: Layout = Layout::packed(8, 64);

/// Returns whether the invalidation of a span is omitted.
type IsOmitted = fn(usize, usize) -> bool;

fn omit_nothing(_offset: usize, _len_bytes: usize) -> bool {
    false
}

/// An endpoint's own window that omits some invalidations.
struct OmittingInbound {
    inner: MemoryInbound<NonCoherentMemory>,
    is_omitted: IsOmitted,
}

impl Inbound for OmittingInbound {
    fn len_bytes(&self) -> usize {
        self.inner.len_bytes()
    }

    fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
        self.inner.load_u64(offset, order)
    }

    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        self.inner.store_u64(offset, value, order);
    }

    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        // SAFETY: `destination` is writable for `len_bytes` and outside the window, by the contract of the trait's
        // method, which is the same.
        unsafe { self.inner.read_to(offset, destination, len_bytes) };
    }

    fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8> {
        self.inner.pointer(offset, len_bytes)
    }

    fn invalidate(&self, offset: usize, len_bytes: usize) {
        if !(self.is_omitted)(offset, len_bytes) {
            self.inner.invalidate(offset, len_bytes);
        }
    }
}

type Sender = Producer<MemoryOutbound<NonCoherentMemory>, OmittingInbound>;
type Receiver = Consumer<OmittingInbound, MemoryOutbound<NonCoherentMemory>>;

fn lane(layout: Layout, habits: CacheBehavior, is_omitted: IsOmitted) -> (Sender, Receiver) {
    let [(senders_own, receivers_peer), (receivers_own, senders_peer)] =
        NonCoherentMemory::windows(layout.window_bytes(), habits);
    let inbound = |memory| OmittingInbound { inner: MemoryInbound::new(memory), is_omitted };
    let producer = Producer::new(MemoryOutbound::new(receivers_peer), inbound(senders_own), layout, SECRET);
    let consumer = Consumer::new(inbound(receivers_own), MemoryOutbound::new(senders_peer), layout, SECRET);
    (producer, consumer)
}

/// Asserts that a fact holds on memory that is not coherent, and does not when these invalidations are omitted.
#[track_caller]
fn needs_invalidation(layout: Layout, is_omitted: IsOmitted, fact: fn(Sender, Receiver) -> bool) {
    let holds = |habits, is_omitted| {
        let (producer, consumer) = lane(layout, habits, is_omitted);
        fact(producer, consumer)
    };
    assert!(holds(CacheBehavior::explicit(), omit_nothing), "the fact does not hold");
    assert!(!holds(CacheBehavior::explicit(), is_omitted), "the fact holds without the invalidation");
}

/// Returns whether an offset lies in a part of the window.
fn is_in(offset: usize, part_offset: usize, part_bytes: usize) -> bool {
    (part_offset..part_offset + part_bytes).contains(&offset)
}

#[test]
fn a_record_is_seen_because_its_line_is_invalidated_before_each_poll() {
    let is_omitted: IsOmitted = |offset, len_bytes| is_in(offset, RING.small_offset, usize::MAX / 2) && len_bytes == 64;
    needs_invalidation(RING, is_omitted, |mut producer, mut consumer| {
        let mut bytes = [0; 5];
        assert_eq!(consumer.read(&mut bytes), Ok(0));
        assert_eq!(producer.write(b"bytes"), Ok(5));
        consumer.may_have_data() && consumer.read(&mut bytes) == Ok(5) && &bytes == b"bytes"
    });
}

#[test]
fn a_long_record_is_current_because_its_lines_are_invalidated_once_its_tag_is_seen() {
    // Records of three slots: the invalidation of the slots behind the first has two lines.
    needs_invalidation(
        RING,
        |_, len_bytes| len_bytes == 2 * SLOT_BYTES,
        |mut producer, mut consumer| {
            let mut is_new = true;
            for round in 1..20 {
                assert_eq!(producer.write(&[round; 120]), Ok(120));
                let mut bytes = [0; 120];
                assert_eq!(consumer.read(&mut bytes), Ok(120));
                is_new &= bytes == [round; 120];
            }
            is_new
        },
    );
}

#[test]
fn the_end_of_stream_is_seen_because_its_line_is_invalidated() {
    needs_invalidation(
        RING,
        |offset, _| offset == RING.forward_offset,
        |mut producer, mut consumer| {
            assert!(!consumer.is_finished());
            producer.finish();
            consumer.read(&mut [0]) == Ok(0) && consumer.is_finished()
        },
    );
}

#[test]
fn credit_is_seen_because_its_line_is_invalidated() {
    needs_invalidation(
        RING,
        |offset, _| offset == RING.back_offset,
        |mut producer, mut consumer| {
            while producer.write(&[1; 40]) == Ok(40) {}
            while consumer.read(&mut [0; 40]) == Ok(40) {}
            producer.write(&[1; 40]) == Ok(40)
        },
    );
}

#[test]
fn a_receiver_that_sleeps_is_seen_because_its_flag_is_invalidated() {
    let is_omitted: IsOmitted = |offset, _| offset == RING.back_offset + CACHE_LINE_BYTES;
    needs_invalidation(RING, is_omitted, |mut producer, mut consumer| {
        assert!(!producer.take_wake_request());
        consumer.announce_sleep();
        let is_seen = producer.take_wake_request() && !producer.take_wake_request();
        consumer.cancel_sleep();
        assert!(!producer.take_wake_request());
        consumer.announce_sleep();
        is_seen && producer.take_wake_request()
    });
}

#[test]
fn a_sender_that_sleeps_is_seen_because_its_flag_is_invalidated() {
    let is_omitted: IsOmitted = |offset, _| offset == RING.forward_offset + CACHE_LINE_BYTES;
    /// Lets the receiver cross a quarter of the ring, where it checks for sleepers.
    fn take(producer: &mut Sender, consumer: &mut Receiver) -> bool {
        for _ in 0..RING.small_slots / 4 {
            assert_eq!((producer.write(&[1]), consumer.read(&mut [0])), (Ok(1), Ok(1)));
        }
        consumer.take_wake_request()
    }
    needs_invalidation(RING, is_omitted, |mut producer, mut consumer| {
        assert!(!take(&mut producer, &mut consumer));
        producer.announce_sleep();
        take(&mut producer, &mut consumer) && !take(&mut producer, &mut consumer)
    });
}

#[test]
fn nothing_arrives_when_lines_are_not_written_back() {
    let (mut producer, mut consumer) =
        lane(RING, CacheBehavior::explicit().without(OmittedStep::WriteBack), omit_nothing);
    assert_eq!(producer.write(b"bytes"), Ok(5));
    assert_eq!(consumer.read(&mut [0; 5]), Ok(0));
}

#[test]
fn a_record_is_torn_without_the_barrier() {
    let torn = |habits: CacheBehavior| {
        // Records of two slots, so that none is split at the end of the ring.
        let (mut producer, mut consumer) = lane(RING, habits, omit_nothing);
        (1..20).any(|round| {
            assert_eq!(producer.write(&[round; 100]), Ok(100));
            let mut bytes = [0; 100];
            (0..1000).find(|_| consumer.read(&mut bytes) != Ok(0)).expect("a tag becomes visible in time");
            bytes != [round; 100]
        })
    };
    let count =
        |omitted| (0..20).filter(|&seed| torn(CacheBehavior { omitted, ..CacheBehavior::spontaneous(seed) })).count();
    assert!(count(Some(OmittedStep::Barrier)) > 5);
    assert_eq!(count(None), 0);
}

/// Neither endpoint stores in a line of the other: wake-up flags are numbered instead of cleared.
#[test]
fn nothing_is_written_in_place_and_short_messages_take_one_line() {
    let (mut producer, mut consumer) = lane(RING, CacheBehavior::explicit(), omit_nothing);
    assert!(producer.reserve(8).expect("an honest receiver").is_none());
    for len_bytes in 1..=48 {
        let bytes: Vec<u8> = (0..len_bytes).collect();
        assert_eq!(producer.write(&bytes), Ok(bytes.len()));
        assert_eq!(producer.position(), u64::from(len_bytes));
        let mut read = vec![0; bytes.len()];
        assert_eq!(consumer.read(&mut read), Ok(bytes.len()));
        assert_eq!(read, bytes);
    }
}

/// Stages records of these lengths, publishes and reads them; returns the counts of the sender's stores.
fn publish_together(
    windows: [(impl Memory, impl Memory); 2],
    coherence: Coherence,
    lens_bytes: &[usize],
) -> OperationCounts {
    let [(senders_own, receivers_peer), (receivers_own, senders_peer)] = windows;
    let memory = CountingMemory::with_coherence(receivers_peer, coherence);
    let (senders_own, back) = (MemoryInbound::new(senders_own), MemoryOutbound::new(senders_peer));
    let mut producer = Producer::new(MemoryOutbound::new(memory.clone()), senders_own, BOTH_RINGS, SECRET);
    let mut consumer = Consumer::new(MemoryInbound::new(receivers_own), back, BOTH_RINGS, SECRET);
    let bytes: Vec<u8> = (0..lens_bytes.iter().sum::<usize>()).map(|index| index as u8).collect();
    let (mut read, mut rest) = (vec![0; bytes.len()], &bytes[..]);
    for len_bytes in lens_bytes {
        let mut draft = producer.draft(*len_bytes).expect("an honest receiver").expect("room");
        draft.append(&rest[..*len_bytes]);
        draft.stage();
        rest = &rest[*len_bytes..];
        assert_eq!(consumer.read(&mut read), Ok(0), "the records are visible before they are published");
    }
    assert_eq!(memory.counts().barriers, 0, "staging needs no barrier");
    assert!(producer.publish_staged() && !producer.publish_staged());
    assert_eq!(consumer.read(&mut read), Ok(bytes.len()));
    assert_eq!(read, bytes);
    memory.counts()
}

fn stale_windows() -> [(NonCoherentMemory, NonCoherentMemory); 2] {
    NonCoherentMemory::windows(BOTH_RINGS.window_bytes(), CacheBehavior::explicit())
}

fn plain_windows() -> [(Region, Region); 2] {
    let [a, b] = [(); 2].map(|()| Region::heap(BOTH_RINGS.window_bytes()));
    [(a.clone(), b.clone()), (b, a)]
}

/// Short records, long records, and records that move to the big ring: first, in the middle, last.
const TOGETHER: [&[usize]; 5] =
    [&[8, 8, 8, 8], &[48, 49, 200, 1], &[1000, 8, 8], &[8, 8, 1000, 8], &[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8]];

#[test]
fn records_that_are_published_together_need_one_barrier() {
    for lens_bytes in TOGETHER {
        let stale = publish_together(stale_windows(), Coherence::NonCoherent, lens_bytes);
        let combined = publish_together(plain_windows(), Coherence::WriteCombined, lens_bytes);
        assert_eq!((stale.barriers, combined.barriers), (1, 1), "{lens_bytes:?}");
    }
}

#[test]
fn a_single_short_record_is_one_line_without_a_barrier() {
    let stale = publish_together(stale_windows(), Coherence::NonCoherent, &[48]);
    assert_eq!((stale.barriers, stale.write_backs), (0, 1));
    assert_eq!(publish_together(plain_windows(), Coherence::WriteCombined, &[48]).barriers, 1);
    assert_eq!(publish_together(stale_windows(), Coherence::NonCoherent, &[49]).barriers, 1, "two lines, in order");
}

#[test]
fn records_that_are_published_together_are_torn_without_the_barrier() {
    let torn = |habits: CacheBehavior| {
        let (mut producer, mut consumer) = lane(RING, habits, omit_nothing);
        (1..20_u8).any(|round| {
            for _ in 0..2 {
                let mut draft = producer.draft(100).expect("an honest receiver").expect("room");
                draft.append(&[round; 100]);
                draft.stage();
            }
            assert!(producer.publish_staged());
            let mut bytes = [0; 200];
            let read = (0..1000).map(|_| consumer.read(&mut bytes)).find(|read| *read != Ok(0));
            bytes != [round; 200] || read.expect("a tag becomes visible in time") != Ok(200)
        })
    };
    let count =
        |omitted| (0..20).filter(|&seed| torn(CacheBehavior { omitted, ..CacheBehavior::spontaneous(seed) })).count();
    assert!(count(Some(OmittedStep::Barrier)) > 5);
    assert_eq!(count(None), 0);
}
