//! What every backend must do, as tests over any [`Link`].
//!
//! A backend instantiates them with [`conformance_suite!`](crate::conformance_suite): a module name (begin it with
//! `miri_` if the backend runs under Miri) and a function from the bytes of a window to both ends of a new link, not
//! yet trained.
//!
//! ```
//! fabric::conformance_suite!(miri_heap, fabric::heap::pair);
//! # fn main() {}
//! ```

use crate::{Doorbell, Epoch, Inbound, Link, LinkState, Outbound, Scratchpad, Slice, Wake, train_both};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};
use volmem::CACHE_LINE_BYTES;
use volmem::sync::Ordering;

/// Calls a macro with the names of all facts, behind what it is given in parentheses: the one list of them.
#[macro_export]
macro_rules! conformance_facts {
    ($($then:ident)::+ ! ($($more:tt)*)) => {
        $($then)::+! { ($($more)*)
            bytes_written_outbound_appear_inbound
            a_window_holds_what_was_stored_last
            both_directions_are_independent
            publish_follows_payload
            words_are_never_torn
            spans_outside_a_window_are_refused
            slices_share_the_memory_and_keep_to_their_span
            a_ring_before_the_wait_is_not_lost
            a_ring_wakes_a_sleeper
            rings_both_ways_never_get_lost
            a_descriptor_is_readable_while_a_ring_waits
            scratchpad_words_cross_both_ways
            training_brings_both_ends_up_in_one_epoch
            the_epoch_grows_at_each_training
            a_link_taken_down_is_down_at_both_ends
            a_window_is_clean_after_training
            two_links_share_nothing
        }
    };
}

/// Instantiates the suite for a backend: `conformance_suite!(module_name, |window_bytes| (one_end, other_end))`.
#[macro_export]
macro_rules! conformance_suite {
    ($name:ident, $make:expr) => {
        $crate::conformance_facts!(fabric::conformance_tests!($name, $make));
    };
}

/// A test for each fact, see [`conformance_suite`].
#[doc(hidden)]
#[macro_export]
macro_rules! conformance_tests {
    (($name:ident, $make:expr) $($fact:ident)*) => {
        mod $name {
            #[allow(unused_imports)] // The constructor may be a closure that names nothing of its surroundings.
            use super::*;
            $(
                #[test]
                fn $fact() {
                    $crate::conformance::$fact($make);
                }
            )*
        }
    };
}

const WINDOW_BYTES: usize = if cfg!(miri) { 512 } else { 1024 };
const WORD_BYTES: usize = size_of::<u64>();

/// Cases of a property, rounds of an exchange: an interpreter gets fewer.
const CASES: u32 = if cfg!(miri) { 2 } else { 64 };
const ROUNDS: u64 = if cfg!(miri) { 12 } else { 2_000 };

/// How long a test waits before it calls a link stuck. No test passes or fails by how long something takes within it.
const STUCK_AFTER: Duration = Duration::from_secs(60);

/// A trained link.
fn up<L: Link>(make: impl Fn(usize) -> (L, L)) -> (L, L) {
    let (mut a, mut b) = make(WINDOW_BYTES);
    assert!(train_both(&mut a, &mut b), "a new link trains: {:?}, {:?}", a.state(), b.state());
    (a, b)
}

fn check<S: Strategy>(strategy: S, property: impl Fn(S::Value)) {
    let config = ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() };
    let answer = TestRunner::new(config).run(&strategy, |value| {
        property(value);
        Ok(())
    });
    if let Err(failure) = answer {
        panic!("{failure}");
    }
}

fn contents(inbound: &impl Inbound) -> Vec<u8> {
    let mut bytes = vec![0; inbound.len_bytes()];
    inbound.invalidate(0, bytes.len());
    inbound.read(0, &mut bytes);
    bytes
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < STUCK_AFTER, "stuck: {what}");
        thread::yield_now();
    }
}

fn loaded(inbound: &impl Inbound, offset: usize) -> u64 {
    inbound.invalidate(offset, WORD_BYTES);
    inbound.load_u64(offset, Ordering::Acquire)
}

fn span_in_window() -> impl Strategy<Value = (usize, Vec<u8>)> {
    (0..WINDOW_BYTES).prop_flat_map(|offset| {
        let len_bytes_max = (WINDOW_BYTES - offset).min(200);
        (Just(offset), prop::collection::vec(any::<u8>(), 0..=len_bytes_max))
    })
}

/// Bytes of any length, at any alignment, arrive where they were written, and nothing else changes.
pub fn bytes_written_outbound_appear_inbound<L: Link>(make: impl Fn(usize) -> (L, L)) {
    check(span_in_window(), |(offset, bytes)| {
        let (a, b) = up(&make);
        a.outbound().write(offset, &bytes);
        a.outbound().flush();
        let mut expected = vec![0; WINDOW_BYTES];
        expected[offset..offset + bytes.len()].copy_from_slice(&bytes);
        assert_eq!(contents(&b.inbound()), expected);
        assert_eq!(b.inbound().len_bytes(), a.outbound().len_bytes());
    });
}

/// Words and bytes, fenced or not, mixed: the window is what a plain array would be.
pub fn a_window_holds_what_was_stored_last<L: Link>(make: impl Fn(usize) -> (L, L)) {
    let word = (0..WINDOW_BYTES / WORD_BYTES, any::<u64>())
        .prop_map(|(index, value)| (index * WORD_BYTES, value.to_ne_bytes().to_vec(), true));
    let bytes = span_in_window().prop_map(|(offset, bytes)| (offset, bytes, false));
    let store = (prop_oneof![word, bytes], any::<bool>());
    check(prop::collection::vec(store, 0..30), |stores| {
        let (a, b) = up(&make);
        let outbound = a.outbound();
        let mut expected = vec![0; WINDOW_BYTES];
        for ((offset, bytes, is_word), is_fenced) in stores {
            expected[offset..offset + bytes.len()].copy_from_slice(&bytes);
            match <[u8; WORD_BYTES]>::try_from(bytes.as_slice()) {
                Ok(word) if is_word => outbound.store_u64(offset, u64::from_ne_bytes(word), Ordering::Relaxed),
                _ => outbound.write(offset, &bytes),
            }
            if is_fenced {
                outbound.fence();
            }
        }
        outbound.flush();
        assert_eq!(contents(&b.inbound()), expected);
    });
}

/// What one end stores does not show in its own window, nor in what the other stores.
pub fn both_directions_are_independent<L: Link>(make: impl Fn(usize) -> (L, L)) {
    let (a, b) = up(make);
    a.outbound().write(0, &[0xaa; WINDOW_BYTES]);
    a.outbound().flush();
    assert_eq!(contents(&a.inbound()), [0; WINDOW_BYTES]);
    b.outbound().write(0, &[0xbb; WINDOW_BYTES]);
    b.outbound().flush();
    assert_eq!(contents(&a.inbound()), [0xbb; WINDOW_BYTES]);
    assert_eq!(contents(&b.inbound()), [0xaa; WINDOW_BYTES]);
    b.inbound().store_u64(8, 7, Ordering::Release);
    assert_eq!(loaded(&b.inbound(), 8), 7);
    assert_eq!(contents(&a.inbound()), [0xbb; WINDOW_BYTES]);
}

/// Payload, fence, tag: who sees the tag sees the payload, round after round between two threads.
pub fn publish_follows_payload<L: Link>(make: impl Fn(usize) -> (L, L)) {
    const TAG: usize = 0;
    const PAYLOAD: usize = CACHE_LINE_BYTES;
    const PAYLOAD_BYTES: usize = 200;
    let (a, b) = up(make);
    let (to_b, from_b) = (a.outbound(), a.inbound());
    let (to_a, from_a) = (b.outbound(), b.inbound());
    thread::scope(|scope| {
        scope.spawn(move || {
            for round in 1..=ROUNDS {
                wait_until("the tag", || loaded(&from_a, TAG) == round);
                let mut payload = [0; PAYLOAD_BYTES];
                from_a.invalidate(PAYLOAD, PAYLOAD_BYTES);
                from_a.read(PAYLOAD, &mut payload);
                assert_eq!(payload, [round as u8; PAYLOAD_BYTES], "round {round}");
                to_a.store_u64(TAG, round, Ordering::Release);
                to_a.flush();
            }
        });
        for round in 1..=ROUNDS {
            to_b.write(PAYLOAD, &[round as u8; PAYLOAD_BYTES]);
            to_b.fence();
            to_b.store_u64(TAG, round, Ordering::Release);
            to_b.flush();
            wait_until("the answer", || loaded(&from_b, TAG) == round);
        }
    });
}

/// A word stored as a word is seen whole, whoever loads it when.
pub fn words_are_never_torn<L: Link>(make: impl Fn(usize) -> (L, L)) {
    const LAST: u64 = u64::MAX;
    let (a, b) = up(make);
    let (outbound, inbound) = (a.outbound(), b.inbound());
    thread::scope(|scope| {
        scope.spawn(move || {
            for round in 1..=ROUNDS {
                outbound.store_u64(8, u64::from_ne_bytes([round as u8; WORD_BYTES]), Ordering::Relaxed);
            }
            outbound.store_u64(8, LAST, Ordering::Relaxed);
            outbound.flush();
        });
        wait_until("the last word", || {
            let bytes = loaded(&inbound, 8).to_ne_bytes();
            assert!(bytes.iter().all(|byte| *byte == bytes[0]), "torn word {bytes:x?}");
            bytes == LAST.to_ne_bytes()
        });
    });
}

/// Nothing reaches past the end of a window, nor over it by overflow, nor off the grid of words.
pub fn spans_outside_a_window_are_refused<L: Link>(make: impl Fn(usize) -> (L, L)) {
    fn refused<T>(what: &str, access: impl FnOnce() -> T) {
        let answer = catch_unwind(AssertUnwindSafe(access));
        assert!(answer.is_err(), "{what} was not refused");
    }
    let (a, b) = up(make);
    let (outbound, inbound) = (a.outbound(), b.inbound());
    for offset in [WINDOW_BYTES, WINDOW_BYTES - WORD_BYTES + 1, usize::MAX, usize::MAX - WORD_BYTES + 1] {
        refused("a store", || outbound.store_u64(offset, 1, Ordering::Relaxed));
        refused("a write", || outbound.write(offset, &[1; WORD_BYTES]));
        refused("an outbound address", || outbound.pointer(offset, WORD_BYTES));
        refused("a load", || inbound.load_u64(offset, Ordering::Relaxed));
        refused("an own store", || inbound.store_u64(offset, 1, Ordering::Relaxed));
        refused("a read", || inbound.read(offset, &mut [0; WORD_BYTES]));
        refused("an inbound address", || inbound.pointer(offset, WORD_BYTES));
    }
    refused("an unaligned store", || outbound.store_u64(4, 1, Ordering::Relaxed));
    refused("an unaligned load", || inbound.load_u64(4, Ordering::Relaxed));
    outbound.flush();
    assert_eq!(contents(&inbound), [0; WINDOW_BYTES]);
    outbound.write(WINDOW_BYTES - 1, &[1]);
    outbound.write(WINDOW_BYTES, &[]);
}

/// A slice is the same memory at an offset; it ends where it says, and begins on a line.
pub fn slices_share_the_memory_and_keep_to_their_span<L: Link>(make: impl Fn(usize) -> (L, L)) {
    const LINE: usize = CACHE_LINE_BYTES;
    let (a, b) = up(make);
    let (outbound, inbound) = (a.outbound().slice(LINE, 4 * LINE), b.inbound().slice(2 * LINE, LINE));
    outbound.slice(LINE, LINE).write(3, b"here");
    outbound.flush();
    let mut bytes = [0; 4];
    inbound.invalidate(0, LINE);
    inbound.read(3, &mut bytes);
    assert_eq!(&bytes, b"here");
    assert_eq!((outbound.len_bytes(), inbound.len_bytes()), (4 * LINE, LINE));
    let refused = |access: &dyn Fn()| assert!(catch_unwind(AssertUnwindSafe(access)).is_err());
    refused(&|| outbound.write(4 * LINE, &[1]));
    refused(&|| inbound.read(LINE, &mut [0]));
    refused(&|| drop(outbound.slice(4 * LINE, LINE)));
    refused(&|| drop(outbound.slice(8, LINE)));
    refused(&|| drop(inbound.slice(0, LINE - 8)));
}

/// Rings from before a wait end that wait, all of them the one; then there is silence.
pub fn a_ring_before_the_wait_is_not_lost<L: Link>(make: impl Fn(usize) -> (L, L)) {
    let (a, b) = up(make);
    let bell = b.doorbell();
    assert_eq!(bell.wait(Some(Duration::ZERO)), Wake::TimedOut);
    (0..3).for_each(|_| a.doorbell().ring());
    assert_eq!(bell.wait(Some(STUCK_AFTER)), Wake::Rung);
    assert_eq!(bell.wait(Some(Duration::from_millis(1))), Wake::TimedOut);
    a.doorbell().ring();
    assert_eq!(bell.wait(Some(Duration::ZERO)), Wake::Rung);
    assert_eq!(a.doorbell().wait(Some(Duration::ZERO)), Wake::TimedOut, "a ring came back to who rang");
}

/// A sleeper wakes, and sees what was stored before the ring.
pub fn a_ring_wakes_a_sleeper<L: Link>(make: impl Fn(usize) -> (L, L)) {
    let (a, b) = up(make);
    let (bell, inbound) = (b.doorbell(), b.inbound());
    thread::scope(|scope| {
        let sleeper = scope.spawn(move || (bell.wait(Some(STUCK_AFTER)), loaded(&inbound, 0)));
        thread::sleep(Duration::from_millis(20)); // Most likely it sleeps by now; nothing depends on it.
        a.outbound().store_u64(0, 42, Ordering::Release);
        a.outbound().flush();
        a.doorbell().ring();
        assert_eq!(sleeper.join().expect("the sleeper"), (Wake::Rung, 42));
    });
}

/// Two threads that only ever ring and wait, many times: one lost ring and both are stuck.
pub fn rings_both_ways_never_get_lost<L: Link>(make: impl Fn(usize) -> (L, L)) {
    let (a, b) = up(make);
    let (bell_a, bell_b) = (a.doorbell(), b.doorbell());
    thread::scope(|scope| {
        scope.spawn(move || {
            for round in 0..ROUNDS {
                assert_eq!(bell_b.wait(Some(STUCK_AFTER)), Wake::Rung, "round {round}");
                bell_b.ring();
            }
        });
        for round in 0..ROUNDS {
            bell_a.ring();
            assert_eq!(bell_a.wait(Some(STUCK_AFTER)), Wake::Rung, "round {round}");
        }
    });
}

/// Where there is a descriptor, poll(2) agrees with [`Doorbell::wait`].
pub fn a_descriptor_is_readable_while_a_ring_waits<L: Link>(make: impl Fn(usize) -> (L, L)) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let (a, b) = up(make);
    let bell = b.doorbell();
    let Some(descriptor) = bell.descriptor() else { return };
    let is_readable = || {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&at_once)).expect("poll") == 1
    };
    assert!(!is_readable());
    a.doorbell().ring();
    assert!(is_readable());
    assert_eq!(bell.wait(None), Wake::Rung);
    assert!(!is_readable());
}

/// Each end reads what the other wrote last; words are apart, and survive training.
pub fn scratchpad_words_cross_both_ways<L: Link>(make: impl Fn(usize) -> (L, L)) {
    let (mut a, mut b) = make(WINDOW_BYTES);
    let (pad_a, pad_b) = (a.scratchpad(), b.scratchpad());
    assert_eq!(pad_a.words(), pad_b.words());
    assert!(pad_a.words() >= 4, "{} words", pad_a.words());
    for index in 0..pad_a.words() {
        assert_eq!((pad_a.read(index), pad_b.read(index)), (0, 0));
        pad_a.write(index, u32::MAX - index as u32);
        pad_b.write(index, index as u32 + 1);
    }
    assert!(train_both(&mut a, &mut b));
    for index in 0..pad_a.words() {
        assert_eq!((pad_a.read(index), pad_b.read(index)), (index as u32 + 1, u32::MAX - index as u32));
    }
    let refused = |access: &dyn Fn()| assert!(catch_unwind(AssertUnwindSafe(access)).is_err());
    refused(&|| pad_a.write(pad_a.words(), 1));
    refused(&|| _ = pad_a.read(pad_a.words()));
    assert_eq!(contents(&a.inbound()), [0; WINDOW_BYTES], "scratchpads are no part of the window");
}

/// Down, then training while only one end trains, then up at both, in the same epoch.
pub fn training_brings_both_ends_up_in_one_epoch<L: Link>(make: impl Fn(usize) -> (L, L)) {
    let (mut a, mut b) = make(WINDOW_BYTES);
    assert_eq!((a.state(), b.state()), (LinkState::Down, LinkState::Down));
    assert_eq!((a.epoch(), b.epoch()), (Epoch::NONE, Epoch::NONE));
    (0..5).for_each(|_| assert_eq!(a.train(), LinkState::Training));
    assert_eq!((a.state(), b.state()), (LinkState::Training, LinkState::Down));
    assert!(train_both(&mut a, &mut b));
    assert_eq!((a.state(), b.state()), (LinkState::Up, LinkState::Up));
    assert_eq!(a.epoch(), b.epoch());
    let epoch = a.epoch();
    assert_eq!((a.train(), b.train()), (LinkState::Up, LinkState::Up), "training a link that is up changes nothing");
    assert_eq!((a.epoch(), b.epoch()), (epoch, epoch));
}

/// Whichever end takes the link down, whichever trains first.
pub fn the_epoch_grows_at_each_training<L: Link>(make: impl Fn(usize) -> (L, L)) {
    let (mut a, mut b) = up(make);
    for round in 0..8_u32 {
        let epoch = a.epoch();
        if round & 1 == 0 {
            a.take_down()
        } else {
            b.take_down()
        }
        let is_up = if round & 2 == 0 { train_both(&mut a, &mut b) } else { train_both(&mut b, &mut a) };
        assert!(is_up, "round {round}");
        assert_eq!(a.epoch(), b.epoch());
        assert!(a.epoch() > epoch, "round {round}: epoch {} after {epoch}", a.epoch());
    }
}

/// The other end sees it, and goes on seeing it when the first trains alone.
pub fn a_link_taken_down_is_down_at_both_ends<L: Link>(make: impl Fn(usize) -> (L, L)) {
    let (mut a, mut b) = up(make);
    a.take_down();
    assert_eq!((a.state(), b.state()), (LinkState::Down, LinkState::Down));
    (0..3).for_each(|_| assert_eq!(a.train(), LinkState::Training));
    assert_eq!(b.state(), LinkState::Down);
    assert!(train_both(&mut b, &mut a));
    b.take_down();
    assert_eq!((a.state(), b.state()), (LinkState::Down, LinkState::Down));
}

/// Nothing of an older epoch is left in a window.
pub fn a_window_is_clean_after_training<L: Link>(make: impl Fn(usize) -> (L, L)) {
    let (mut a, mut b) = up(make);
    a.outbound().write(0, &[1; WINDOW_BYTES]);
    a.outbound().flush();
    b.inbound().store_u64(0, 2, Ordering::Relaxed);
    b.outbound().write(WINDOW_BYTES - 1, &[3]);
    b.outbound().flush();
    b.take_down();
    assert!(train_both(&mut a, &mut b));
    assert_eq!(contents(&a.inbound()), [0; WINDOW_BYTES]);
    assert_eq!(contents(&b.inbound()), [0; WINDOW_BYTES]);
}

/// Neither windows nor rings nor scratchpads nor states.
pub fn two_links_share_nothing<L: Link>(make: impl Fn(usize) -> (L, L)) {
    let (mut a, b) = up(&make);
    let (c, d) = up(&make);
    a.outbound().write(0, &[1; WINDOW_BYTES]);
    a.outbound().flush();
    a.doorbell().ring();
    a.scratchpad().write(0, 9);
    a.take_down();
    assert_eq!(b.state(), LinkState::Down);
    for other in [&c, &d] {
        assert_eq!(other.state(), LinkState::Up);
        assert_eq!(contents(&other.inbound()), [0; WINDOW_BYTES]);
        assert_eq!(other.doorbell().wait(Some(Duration::ZERO)), Wake::TimedOut);
        assert_eq!(other.scratchpad().read(0), 0);
    }
}
