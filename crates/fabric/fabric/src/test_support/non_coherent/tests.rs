//! The simulated caches behave as specified, and omitted operations are noticed.

use super::*;
use crate::test_support::conformance::{self, SingleProcess};
use crate::{Inbound, MemoryInbound, MemoryOutbound, Outbound};
use std::panic::{AssertUnwindSafe, catch_unwind};

const LINE: usize = CACHE_LINE_BYTES;

fn nodes(habits: CacheBehavior) -> (NonCoherentMemory, NonCoherentMemory) {
    NonCoherentMemory::pair(16 * LINE, habits)
}

fn load(memory: &NonCoherentMemory, offset: usize) -> u64 {
    memory.load_u64(offset, Ordering::Acquire)
}

#[test]
fn miri_a_store_stays_in_the_cache_until_its_line_is_written_back() {
    let (a, b) = nodes(CacheBehavior::explicit());
    a.store_u64(8, 7, Ordering::Release);
    assert_eq!((load(&a, 8), load(&b, 8)), (7, 0));
    a.write_back(0, LINE);
    b.invalidate_lines(0, LINE);
    assert_eq!(load(&b, 8), 7);
}

#[test]
fn miri_a_load_hits_the_cache_until_its_line_is_invalidated() {
    let (a, b) = nodes(CacheBehavior::explicit());
    assert_eq!(load(&b, 0), 0);
    a.store_u64(0, 7, Ordering::Release);
    a.write_back(0, 8);
    assert_eq!(load(&b, 0), 0, "the cache did not hold the stale line");
    b.invalidate_lines(63, 1);
    assert_eq!(load(&b, 0), 7);
}

#[test]
fn miri_a_write_back_stores_the_whole_line_over_the_peers_words() {
    let (a, b) = nodes(CacheBehavior::explicit());
    a.store_u64(0, 1, Ordering::Relaxed);
    b.store_u64(8, 2, Ordering::Relaxed);
    a.write_back(0, 8);
    b.invalidate_lines(8, 8);
    assert_eq!((load(&b, 0), load(&b, 8)), (0, 2), "two writers of a line did not conflict");
}

#[test]
fn a_spontaneous_cache_writes_back_late_and_in_any_order_up_to_a_barrier() {
    let order = |seed, with_barrier: bool| {
        let (a, b) = nodes(CacheBehavior::spontaneous(seed));
        a.store_u64(0, 1, Ordering::Relaxed);
        a.write_back(0, 8);
        if with_barrier {
            a.barrier();
        }
        a.store_u64(5 * LINE, 1, Ordering::Relaxed);
        a.write_back(5 * LINE, 8);
        let fresh = |offset| {
            b.invalidate_lines(offset, 8);
            load(&b, offset)
        };
        (0..200).find(|_| fresh(5 * LINE) == 1).expect("a write-back ends eventually");
        fresh(0)
    };
    let overtaken = (0..50).filter(|&seed| order(seed, false) == 0).count();
    assert!(overtaken > 5, "{overtaken} of 50");
    assert!((0..50).all(|seed| order(seed, true) == 1));
}

#[test]
fn a_spontaneous_cache_does_not_affect_code_that_writes_back_and_invalidates() {
    for seed in 0..50 {
        let (a, b) = nodes(CacheBehavior::spontaneous(seed));
        let (outbound, inbound) = (MemoryOutbound::new(a), MemoryInbound::new(b));
        for round in 1..100 {
            outbound.write(LINE + 3, &[round; 200]);
            outbound.fence();
            outbound.store_line(0, &[round.into(), !u64::from(round)]);
            while {
                inbound.invalidate(0, LINE);
                inbound.load_u64(0, Ordering::Acquire)
            } != u64::from(round)
            {}
            assert_eq!(inbound.load_u64(8, Ordering::Relaxed), !u64::from(round), "seed {seed}");
            let mut bytes = [0; 200];
            inbound.invalidate(LINE + 3, 200);
            inbound.read(LINE + 3, &mut bytes);
            assert_eq!(bytes, [round; 200], "seed {seed}");
        }
    }
}

#[test]
fn a_window_without_write_backs_or_invalidations_fails_the_suite() {
    let fails = |omission| {
        let parties =
            SingleProcess::new(move |window_bytes| pair(window_bytes, CacheBehavior::explicit().without(omission)));
        let answer = catch_unwind(AssertUnwindSafe(|| conformance::bytes_written_outbound_appear_inbound(&parties)));
        answer.is_err()
    };
    assert!(fails(OmittedStep::WriteBack));
    assert!(fails(OmittedStep::Invalidate));
}

/// Whether a tag was seen without its payload.
fn tag_overtakes(habits: CacheBehavior) -> bool {
    let (a, b) = nodes(habits);
    let (outbound, inbound) = (MemoryOutbound::new(a), MemoryInbound::new(b));
    outbound.write(LINE, &[1; LINE]);
    outbound.fence();
    outbound.store_u64(0, 1, Ordering::Release);
    let fresh = |offset| {
        inbound.invalidate(offset, 8);
        inbound.load_u64(offset, Ordering::Acquire)
    };
    (0..200).find(|_| fresh(0) == 1).expect("a tag arrives eventually");
    fresh(LINE) == 0
}

#[test]
fn a_fence_that_does_not_wait_lets_a_tag_overtake_its_payload() {
    let overtaken = |omitted| {
        (0..50).filter(|&seed| tag_overtakes(CacheBehavior { omitted, ..CacheBehavior::spontaneous(seed) })).count()
    };
    assert!(overtaken(Some(OmittedStep::Barrier)) > 5);
    assert_eq!(overtaken(None), 0);
}

#[test]
fn an_outbound_window_has_no_address_where_stores_would_stay_in_the_cache() {
    assert!(MemoryOutbound::new(nodes(CacheBehavior::explicit()).0).pointer(0, LINE).is_none());
}
