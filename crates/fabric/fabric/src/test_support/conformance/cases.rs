//! The tests of the suite.

use super::common::{CASES, ROUNDS, STUCK_AFTER, WINDOW_BYTES, WORD_BYTES, load_fresh};
use super::testbed::{EndpointPair, Testbed};
use crate::Endpoint::{self, A, B};
use crate::{Doorbell, Epoch, Inbound, Link, LinkState, Outbound, Scratchpad, Slice, WaitOutcome};
use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestError, TestRunner};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};
use volmem::CACHE_LINE_BYTES;
use volmem::sync::Ordering;

/// Returns a trained link.
pub(super) fn up<P: Testbed>(testbed: &P) -> P::EndpointPair {
    let mut endpoints = testbed.link();
    assert!(endpoints.bring_up(), "a new link trains");
    endpoints
}

/// Checks a property with the same cases for all parties, also while a failing case shrinks.
pub(super) fn check<S: Strategy>(testbed: &impl Testbed, strategy: S, property: impl Fn(S::Value)) {
    let seed = testbed.random_seed();
    let rng_seed = RngSeed::Fixed(seed);
    let config = ProptestConfig { cases: CASES, failure_persistence: None, rng_seed, ..ProptestConfig::default() };
    let answer = TestRunner::new(config).run(&strategy, |value| {
        property(value);
        Ok(())
    });
    match answer {
        Ok(()) => {}
        Err(TestError::Fail(why, smallest)) => panic!("seed {seed:#x}, {smallest:?}: {why}"),
        Err(TestError::Abort(why)) => panic!("seed {seed:#x}: {why}"),
    }
}

fn contents(inbound: &impl Inbound) -> Vec<u8> {
    let mut bytes = vec![0; inbound.len_bytes()];
    inbound.invalidate(0, bytes.len());
    inbound.read(0, &mut bytes);
    bytes
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < STUCK_AFTER, "stuck: {what}");
        thread::yield_now();
    }
}

/// Blocks until the peer rings. A ring that is found only after the timeout did not wake the waiter.
fn sleep_until_rung(bell: &impl Doorbell, what: &str) {
    let begun = Instant::now();
    assert_eq!(bell.wait(Some(STUCK_AFTER)), WaitOutcome::Rung, "stuck: {what}");
    assert!(begun.elapsed() < STUCK_AFTER, "stuck: {what}, a ring that did not wake its waiter");
}

fn refused<T>(what: &str, access: impl FnOnce() -> T) {
    let answer = catch_unwind(AssertUnwindSafe(access));
    assert!(answer.is_err(), "{what} was not refused");
}

/// Writes bytes, and waits until the peer can see them.
fn send(link: &impl Link, offset: usize, bytes: &[u8]) {
    let outbound = link.outbound();
    outbound.write(offset, bytes);
    outbound.flush();
}

fn assert_states(endpoints: &mut impl EndpointPair, states: [LinkState; 2]) {
    for (endpoint, state) in Endpoint::ALL.into_iter().zip(states) {
        endpoints.at(endpoint, |link| assert_eq!(link.state(), state, "endpoint {endpoint:?}"));
    }
}

/// The epoch, which must be the same at both endpoints.
fn epoch_of(endpoints: &mut impl EndpointPair) -> u64 {
    let [a, b] = Endpoint::ALL.map(|endpoint| endpoints.query(endpoint, |link| u64::from(link.epoch().0)));
    assert_eq!(a, b, "the epochs differ");
    a
}

fn span_in_window() -> impl Strategy<Value = (usize, Vec<u8>)> {
    (0..WINDOW_BYTES).prop_flat_map(|offset| {
        let len_bytes_max = (WINDOW_BYTES - offset).min(200);
        (Just(offset), prop::collection::vec(any::<u8>(), 0..=len_bytes_max))
    })
}

/// Bytes of any length, at any alignment, arrive where they were written, and no others change.
pub fn bytes_written_outbound_appear_inbound(testbed: &impl Testbed) {
    check(testbed, span_in_window(), |(offset, bytes)| {
        let mut endpoints = up(testbed);
        endpoints.at(A, |a| send(a, offset, &bytes));
        let mut expected = vec![0; WINDOW_BYTES];
        expected[offset..offset + bytes.len()].copy_from_slice(&bytes);
        endpoints.at(B, |b| assert_eq!(contents(&b.inbound()), expected));
        let sent_into_bytes = endpoints.query(A, |a| a.outbound().len_bytes() as u64);
        assert_eq!(endpoints.query(B, |b| b.inbound().len_bytes() as u64), sent_into_bytes);
    });
}

/// Words and bytes, with and without fences: the window has the contents of a plain array.
pub fn a_window_holds_what_was_stored_last(testbed: &impl Testbed) {
    let word = (0..WINDOW_BYTES / WORD_BYTES, any::<u64>())
        .prop_map(|(index, value)| (index * WORD_BYTES, value.to_ne_bytes().to_vec(), true));
    let bytes = span_in_window().prop_map(|(offset, bytes)| (offset, bytes, false));
    let store = (prop_oneof![word, bytes], any::<bool>());
    check(testbed, prop::collection::vec(store, 0..30), |stores| {
        let mut endpoints = up(testbed);
        endpoints.at(A, |a| {
            let outbound = a.outbound();
            for ((offset, bytes, is_word), is_fenced) in &stores {
                match <[u8; WORD_BYTES]>::try_from(bytes.as_slice()) {
                    Ok(word) if *is_word => outbound.store_u64(*offset, u64::from_ne_bytes(word), Ordering::Relaxed),
                    _ => outbound.write(*offset, bytes),
                }
                if *is_fenced {
                    outbound.fence();
                }
            }
            outbound.flush();
        });
        let mut expected = vec![0; WINDOW_BYTES];
        for ((offset, bytes, _), _) in &stores {
            expected[*offset..offset + bytes.len()].copy_from_slice(bytes);
        }
        endpoints.at(B, |b| assert_eq!(contents(&b.inbound()), expected));
    });
}

/// A store of one endpoint changes neither its own window nor what the other endpoint stores.
pub fn both_directions_are_independent(testbed: &impl Testbed) {
    let mut endpoints = up(testbed);
    endpoints.at(A, |a| {
        send(a, 0, &[0xaa; WINDOW_BYTES]);
        assert_eq!(contents(&a.inbound()), [0; WINDOW_BYTES]);
    });
    endpoints.at(B, |b| send(b, 0, &[0xbb; WINDOW_BYTES]));
    endpoints.at(A, |a| assert_eq!(contents(&a.inbound()), [0xbb; WINDOW_BYTES]));
    endpoints.at(B, |b| {
        assert_eq!(contents(&b.inbound()), [0xaa; WINDOW_BYTES]);
        b.inbound().store_u64(8, 7, Ordering::Release);
        assert_eq!(load_fresh(&b.inbound(), 8), 7);
    });
    endpoints.at(A, |a| assert_eq!(contents(&a.inbound()), [0xbb; WINDOW_BYTES]));
}

/// Payload, fence, tag: a reader that sees the tag sees the payload, in each round of an exchange between two endpoints
/// that poll.
pub fn publish_follows_payload(testbed: &impl Testbed) {
    const TAG: usize = 0;
    const PAYLOAD: usize = CACHE_LINE_BYTES;
    const PAYLOAD_BYTES: usize = 200;
    up(testbed).both(
        |a| {
            let (outbound, inbound) = (a.outbound(), a.inbound());
            for round in 1..=ROUNDS {
                outbound.write(PAYLOAD, &[round as u8; PAYLOAD_BYTES]);
                outbound.fence();
                outbound.store_u64(TAG, round, Ordering::Release);
                outbound.flush();
                wait_until("the answer", || load_fresh(&inbound, TAG) == round);
            }
        },
        |b| {
            let (outbound, inbound) = (b.outbound(), b.inbound());
            for round in 1..=ROUNDS {
                wait_until("the tag", || load_fresh(&inbound, TAG) == round);
                let mut payload = [0; PAYLOAD_BYTES];
                inbound.invalidate(PAYLOAD, PAYLOAD_BYTES);
                inbound.read(PAYLOAD, &mut payload);
                assert_eq!(payload, [round as u8; PAYLOAD_BYTES], "round {round}");
                outbound.store_u64(TAG, round, Ordering::Release);
                outbound.flush();
            }
        },
    );
}

/// A word that is stored as a word is never seen torn. The endpoint stores until the other has seen the word change
/// several times, so that both access it at the same time.
pub fn words_are_never_torn(testbed: &impl Testbed) {
    const WORD: usize = 8;
    const LAST: u64 = u64::MAX;
    const FLUSHED_EVERY: u64 = 8;
    const SEEN_MIN: u64 = if cfg!(miri) { 2 } else { 20 };
    let word_of = |round: u64| u64::from_ne_bytes([(round % 255) as u8; WORD_BYTES]);
    up(testbed).both(
        |a| {
            let (outbound, inbound) = (a.outbound(), a.inbound());
            let mut round = 0;
            wait_until("changes seen", || {
                for _ in 0..FLUSHED_EVERY {
                    outbound.store_u64(WORD, word_of(round), Ordering::Relaxed);
                    round += 1;
                }
                outbound.flush();
                round >= ROUNDS && load_fresh(&inbound, WORD) >= SEEN_MIN
            });
            outbound.store_u64(WORD, LAST, Ordering::Relaxed);
            outbound.flush();
        },
        |b| {
            let (outbound, inbound) = (b.outbound(), b.inbound());
            let (mut last, mut seen) = (0, 0);
            wait_until("the last word", || {
                let word = load_fresh(&inbound, WORD);
                let bytes = word.to_ne_bytes();
                assert!(bytes.iter().all(|byte| *byte == bytes[0]), "torn word {bytes:x?}");
                if word != last {
                    (last, seen) = (word, seen + 1);
                    outbound.store_u64(WORD, seen, Ordering::Release);
                    outbound.flush();
                }
                word == LAST
            });
        },
    );
}

/// No access reaches past the end of a window, or overflows, or is misaligned for words.
pub fn spans_outside_a_window_are_refused(testbed: &impl Testbed) {
    const OUTSIDE: [usize; 4] = [WINDOW_BYTES, WINDOW_BYTES - WORD_BYTES + 1, usize::MAX, usize::MAX - WORD_BYTES + 1];
    let mut endpoints = up(testbed);
    endpoints.at(A, |a| {
        let outbound = a.outbound();
        for offset in OUTSIDE {
            refused("a store", || outbound.store_u64(offset, 1, Ordering::Relaxed));
            refused("a write", || outbound.write(offset, &[1; WORD_BYTES]));
            refused("an outbound address", || outbound.pointer(offset, WORD_BYTES));
        }
        refused("an unaligned store", || outbound.store_u64(4, 1, Ordering::Relaxed));
        outbound.flush();
    });
    endpoints.at(B, |b| {
        let inbound = b.inbound();
        for offset in OUTSIDE {
            refused("a load", || inbound.load_u64(offset, Ordering::Relaxed));
            refused("an own store", || inbound.store_u64(offset, 1, Ordering::Relaxed));
            refused("a read", || inbound.read(offset, &mut [0; WORD_BYTES]));
            refused("an inbound address", || inbound.pointer(offset, WORD_BYTES));
        }
        refused("an unaligned load", || inbound.load_u64(4, Ordering::Relaxed));
        assert_eq!(contents(&inbound), [0; WINDOW_BYTES]);
    });
    endpoints.at(A, |a| {
        a.outbound().write(WINDOW_BYTES - 1, &[1]);
        a.outbound().write(WINDOW_BYTES, &[]);
    });
}

/// A slice is the same memory at an offset. It has the given length and begins on a cache line.
pub fn slices_share_the_memory_and_keep_to_their_span(testbed: &impl Testbed) {
    const LINE: usize = CACHE_LINE_BYTES;
    let mut endpoints = up(testbed);
    endpoints.at(A, |a| {
        let outbound = a.outbound().slice(LINE, 4 * LINE);
        outbound.slice(LINE, LINE).write(3, b"here");
        outbound.flush();
        assert_eq!(outbound.len_bytes(), 4 * LINE);
        refused("a write behind a slice", || outbound.write(4 * LINE, &[1]));
        refused("a slice behind a slice", || outbound.slice(4 * LINE, LINE));
        refused("a slice off the lines", || outbound.slice(8, LINE));
    });
    endpoints.at(B, |b| {
        let inbound = b.inbound().slice(2 * LINE, LINE);
        let mut bytes = [0; 4];
        inbound.invalidate(0, LINE);
        inbound.read(3, &mut bytes);
        assert_eq!(&bytes, b"here");
        assert_eq!(inbound.len_bytes(), LINE);
        refused("a read behind a slice", || inbound.read(LINE, &mut [0]));
        refused("a slice of half a line", || inbound.slice(0, LINE - 8));
    });
}

/// Several rings before a wait end that one wait. The next wait times out.
pub fn a_ring_before_the_wait_is_not_lost(testbed: &impl Testbed) {
    let mut endpoints = up(testbed);
    endpoints.at(B, |b| assert_eq!(b.doorbell().wait(Some(Duration::ZERO)), WaitOutcome::TimedOut));
    endpoints.at(A, |a| (0..3).for_each(|_| a.doorbell().ring()));
    endpoints.at(B, |b| {
        sleep_until_rung(&b.doorbell(), "rings before a wait");
        assert_eq!(b.doorbell().wait(Some(Duration::from_millis(1))), WaitOutcome::TimedOut);
    });
    endpoints.at(A, |a| a.doorbell().ring());
    endpoints.at(B, |b| assert_eq!(b.doorbell().wait(Some(Duration::ZERO)), WaitOutcome::Rung));
    endpoints.at(A, |a| {
        assert_eq!(
            a.doorbell().wait(Some(Duration::ZERO)),
            WaitOutcome::TimedOut,
            "a ring came back to the endpoint that rang"
        );
    });
}

/// A blocked waiter wakes, and sees what was stored before the ring.
pub fn a_ring_wakes_a_sleeper(testbed: &impl Testbed) {
    up(testbed).both(
        |a| {
            // The other probably blocks after this; the result does not depend on it.
            thread::sleep(Duration::from_millis(20));
            a.outbound().store_u64(0, 42, Ordering::Release);
            a.outbound().flush();
            a.doorbell().ring();
        },
        |b| {
            sleep_until_rung(&b.doorbell(), "a sleeper");
            assert_eq!(load_fresh(&b.inbound(), 0), 42);
        },
    );
}

/// Two endpoints alternately ring and wait. If one ring is lost, both are stuck.
pub fn rings_both_ways_never_get_lost(testbed: &impl Testbed) {
    up(testbed).both(
        |a| {
            let bell = a.doorbell();
            for round in 0..ROUNDS {
                bell.ring();
                sleep_until_rung(&bell, &format!("the answer of round {round}"));
            }
        },
        |b| {
            let bell = b.doorbell();
            for round in 0..ROUNDS {
                sleep_until_rung(&bell, &format!("round {round}"));
                bell.ring();
            }
        },
    );
}

/// Where there is a descriptor, poll(2) agrees with [`Doorbell::wait`]. An interrupt may take some time, so the test
/// waits for it.
pub fn a_descriptor_is_readable_while_a_ring_waits(testbed: &impl Testbed) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    fn is_readable(bell: &impl Doorbell, timeout: Duration) -> bool {
        let timeout = Timespec::try_from(timeout).expect("a minute");
        let Some(descriptor) = bell.descriptor() else { return false };
        poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&timeout)).expect("poll") == 1
    }
    let mut endpoints = up(testbed);
    if endpoints.query(B, |b| u64::from(b.doorbell().descriptor().is_some())) == 0 {
        return;
    }
    endpoints.at(B, |b| assert!(!is_readable(&b.doorbell(), Duration::ZERO)));
    endpoints.at(A, |a| a.doorbell().ring());
    endpoints.at(B, |b| {
        let bell = b.doorbell();
        assert!(is_readable(&bell, STUCK_AFTER));
        assert_eq!(bell.wait(None), WaitOutcome::Rung);
        assert!(!is_readable(&bell, Duration::ZERO));
    });
}

/// Each endpoint reads the word that the other wrote last. Words are independent. Words and handles survive training.
pub fn scratchpad_words_cross_both_ways(testbed: &impl Testbed) {
    let mut endpoints = testbed.link();
    let [words, peer_words] =
        Endpoint::ALL.map(|endpoint| endpoints.query(endpoint, |link| link.scratchpad().words() as u64) as usize);
    assert_eq!(words, peer_words);
    assert!(words >= 4, "{words} words");
    let value_of = |endpoint, index: usize| if endpoint == A { u32::MAX - index as u32 } else { index as u32 + 1 };
    let mut pads = Vec::new();
    for endpoint in Endpoint::ALL {
        endpoints.at(endpoint, |link| pads.push((endpoint, link.scratchpad())));
    }
    for index in 0..words {
        for endpoint in Endpoint::ALL {
            endpoints.at(endpoint, |link| assert_eq!(link.scratchpad().read(index), 0));
        }
        for endpoint in Endpoint::ALL {
            endpoints.at(endpoint, |link| link.scratchpad().write(index, value_of(endpoint, index)));
        }
    }
    assert!(endpoints.train_in_turn(A));
    for endpoint in Endpoint::ALL {
        endpoints.at(endpoint, |_| {
            let (_, pad) = pads.iter().find(|(of, _)| *of == endpoint).expect("a handle of the endpoint");
            for index in 0..words {
                assert_eq!(pad.read(index), value_of(endpoint.other(), index), "word {index}");
            }
            refused("a write behind the words", || pad.write(words, 1));
            refused("a read behind the words", || pad.read(words));
        });
    }
    endpoints.at(A, |a| assert_eq!(contents(&a.inbound()), [0; WINDOW_BYTES], "scratchpads are no part of the window"));
}

/// The link is down, then training while one endpoint trains, then up at both endpoints in the same epoch.
pub fn training_brings_both_endpoints_up_in_one_epoch(testbed: &impl Testbed) {
    let mut endpoints = testbed.link();
    assert_states(&mut endpoints, [LinkState::Down; 2]);
    assert_eq!(epoch_of(&mut endpoints), u64::from(Epoch::NONE.0));
    endpoints.at(A, |a| (0..5).for_each(|_| assert_eq!(a.train(), LinkState::Training)));
    assert_states(&mut endpoints, [LinkState::Training, LinkState::Down]);
    assert!(endpoints.train_in_turn(A));
    assert_states(&mut endpoints, [LinkState::Up; 2]);
    let epoch = epoch_of(&mut endpoints);
    for endpoint in Endpoint::ALL {
        endpoints
            .at(endpoint, |link| assert_eq!(link.train(), LinkState::Up, "training a link that is up changes nothing"));
    }
    assert_eq!(epoch_of(&mut endpoints), epoch);
}

/// Whichever endpoint takes the link down, and whichever trains first.
pub fn the_epoch_grows_at_each_training(testbed: &impl Testbed) {
    let mut endpoints = up(testbed);
    for round in 0..8_u32 {
        let epoch = epoch_of(&mut endpoints);
        endpoints.at(if round & 1 == 0 { A } else { B }, Link::take_down);
        let is_up = endpoints.train_in_turn(if round & 2 == 0 { A } else { B });
        assert!(is_up, "round {round}");
        let epoch_next = epoch_of(&mut endpoints);
        assert!(epoch_next > epoch, "round {round}: epoch {epoch_next} after {epoch}");
    }
}

/// The other endpoint sees that the link is down, also while the first endpoint trains alone.
pub fn a_link_taken_down_is_down_at_both_endpoints(testbed: &impl Testbed) {
    let mut endpoints = up(testbed);
    endpoints.at(A, Link::take_down);
    assert_states(&mut endpoints, [LinkState::Down; 2]);
    endpoints.at(A, |a| (0..3).for_each(|_| assert_eq!(a.train(), LinkState::Training)));
    endpoints.at(B, |b| assert_eq!(b.state(), LinkState::Down));
    assert!(endpoints.train_in_turn(B));
    endpoints.at(B, Link::take_down);
    assert_states(&mut endpoints, [LinkState::Down; 2]);
}

/// No store of an older epoch is left in a window.
pub fn a_window_is_clean_after_training(testbed: &impl Testbed) {
    let mut endpoints = up(testbed);
    endpoints.at(A, |a| send(a, 0, &[1; WINDOW_BYTES]));
    endpoints.at(B, |b| {
        b.inbound().store_u64(0, 2, Ordering::Relaxed);
        send(b, WINDOW_BYTES - 1, &[3]);
        b.take_down();
    });
    assert!(endpoints.train_in_turn(A));
    for endpoint in Endpoint::ALL {
        endpoints.at(endpoint, |link| assert_eq!(contents(&link.inbound()), [0; WINDOW_BYTES]));
    }
}

/// Two links share neither windows nor rings nor scratchpads nor states.
pub fn two_links_share_nothing(testbed: &impl Testbed) {
    let (mut endpoints, mut others) = (up(testbed), up(testbed));
    endpoints.at(A, |a| {
        send(a, 0, &[1; WINDOW_BYTES]);
        a.doorbell().ring();
        a.scratchpad().write(0, 9);
        a.take_down();
    });
    endpoints.at(B, |b| assert_eq!(b.state(), LinkState::Down));
    for endpoint in Endpoint::ALL {
        others.at(endpoint, |other| {
            assert_eq!(other.state(), LinkState::Up);
            assert_eq!(contents(&other.inbound()), [0; WINDOW_BYTES]);
            assert_eq!(other.doorbell().wait(Some(Duration::ZERO)), WaitOutcome::TimedOut);
            assert_eq!(other.scratchpad().read(0), 0);
        });
    }
}
