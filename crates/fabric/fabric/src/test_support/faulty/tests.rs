//! Each fault happens, only if the plan has it, and again with the same seed.

use super::*;
use crate::heap::{self, HeapLink};
use crate::{Inbound, train_both};
use proptest::prelude::*;

const WINDOW_BYTES: usize = 1024;
const SEED_VARIABLE: &str = "FABRIC_TEST_PANICS_WITH_A_FAULTY_LINK";

/// A trained link whose endpoint `a` has faults.
fn link(plan: FaultPlan) -> (FaultyLink<HeapLink>, HeapLink) {
    let (a, mut b) = heap::pair(WINDOW_BYTES);
    let mut a = FaultyLink::new(a, plan);
    assert!(train_both(&mut a, &mut b));
    (a, b)
}

fn contents(link: &impl Link) -> Vec<u8> {
    let mut bytes = vec![0; WINDOW_BYTES];
    link.inbound().read(0, &mut bytes);
    bytes
}

fn few_cases() -> ProptestConfig {
    let cases = if cfg!(miri) { 2 } else { 200 };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

#[test]
fn miri_a_store_is_invisible_until_it_is_due() {
    let (a, b) = link(FaultPlan { delay_ns: 100..=100, ..FaultPlan::none(1) });
    a.outbound().store_u64(0, 7, Ordering::Release);
    a.tick(99);
    assert_eq!((b.inbound().load_u64(0, Ordering::Acquire), a.stores_in_flight()), (0, 1));
    a.tick(100);
    assert_eq!((b.inbound().load_u64(0, Ordering::Acquire), a.stores_in_flight()), (7, 0));
}

#[test]
fn miri_time_does_not_go_back() {
    let (a, b) = link(FaultPlan { delay_ns: 10..=10, ..FaultPlan::none(1) });
    a.tick(100);
    a.tick(5);
    a.outbound().store_u64(0, 7, Ordering::Release);
    a.tick(109);
    assert_eq!(b.inbound().load_u64(0, Ordering::Acquire), 0);
    a.tick(110);
    assert_eq!(b.inbound().load_u64(0, Ordering::Acquire), 7);
}

#[test]
fn miri_a_flush_waits_in_virtual_time_for_all_stores() {
    let (a, b) = link(FaultPlan { delay_ns: 50..=5_000, is_write_combined: true, ..FaultPlan::none(1) });
    a.outbound().write(3, &[9; 300]);
    a.outbound().flush();
    assert_eq!(contents(&b)[3..303], [9; 300]);
    assert_eq!(a.stores_in_flight(), 0);
}

#[test]
fn miri_a_ring_arrives_after_the_stores_before_it() {
    let (a, b) = link(FaultPlan { delay_ns: 100..=100, ..FaultPlan::none(1) });
    a.outbound().store_u64(0, 7, Ordering::Release);
    a.doorbell().ring();
    assert_eq!(b.doorbell().wait(Some(Duration::ZERO)), WaitOutcome::TimedOut);
    a.tick(100);
    assert_eq!(b.doorbell().wait(Some(Duration::ZERO)), WaitOutcome::Rung);
    assert_eq!(b.inbound().load_u64(0, Ordering::Acquire), 7);
}

#[test]
fn miri_a_lost_link_is_down_at_both_endpoints_and_drops_stores_under_way_and_later_ones() {
    let (mut a, mut b) = link(FaultPlan { delay_ns: 100..=100, ..FaultPlan::none(1) });
    let epoch = a.epoch();
    a.outbound().write(0, &[1; 16]);
    a.lose();
    assert_eq!((a.state(), b.state()), (LinkState::Down, LinkState::Down));
    a.outbound().write(16, &[2; 16]);
    a.doorbell().ring();
    a.tick(1_000);
    assert_eq!(contents(&b), [0; WINDOW_BYTES]);
    assert_eq!(b.doorbell().wait(Some(Duration::ZERO)), WaitOutcome::TimedOut);
    assert_eq!(a.counts(), FaultCounts { words_stored: 4, words_dropped: 4, words_corrupted: 0, losses: 1 });
    assert!(train_both(&mut a, &mut b));
    assert!(a.epoch() > epoch && a.epoch() == b.epoch());
    a.tick(2_000);
    assert_eq!(contents(&b), [0; WINDOW_BYTES], "a store of the old epoch arrived in the new one");
    a.outbound().write(0, &[3; 16]);
    a.outbound().flush();
    assert_eq!(contents(&b)[..16], [3; 16]);
}

#[test]
fn miri_a_loss_at_the_other_endpoint_drops_stores_under_way() {
    let (mut a, mut b) = link(FaultPlan { delay_ns: 100..=100, ..FaultPlan::none(1) });
    a.outbound().write(0, &[1; 16]);
    b.take_down();
    assert_eq!(a.state(), LinkState::Down);
    assert!(train_both(&mut a, &mut b));
    a.tick(1_000);
    assert_eq!(contents(&b), [0; WINDOW_BYTES]);
    assert_eq!(a.counts().words_dropped, 2);
}

#[test]
fn miri_an_outage_refuses_training_and_scratchpads_until_it_ends() {
    let (mut a, mut b) = link(FaultPlan { outage_ns: 500..=500, ..FaultPlan::none(1) });
    a.lose();
    a.scratchpad().write(0, 1);
    a.tick(499);
    assert!(!train_both(&mut a, &mut b));
    assert_eq!((a.train(), b.scratchpad().read(0)), (LinkState::Down, 0));
    a.tick(500);
    a.scratchpad().write(0, 2);
    assert!(train_both(&mut a, &mut b));
    assert_eq!(b.scratchpad().read(0), 2);
}

#[test]
fn links_are_lost_in_the_middle_of_a_write_if_the_plan_has_losses() {
    let mut torn_writes = 0;
    for seed in 0..200 {
        let (a, b) = link(FaultPlan { losses_per_million_words: 50_000, ..FaultPlan::none(seed) });
        a.outbound().write(0, &[1; 256]);
        let arrived = contents(&b).iter().filter(|byte| **byte == 1).count();
        assert_eq!(a.counts().losses, u64::from(arrived < 256), "seed {seed}");
        assert_eq!((a.state() == LinkState::Up, arrived % 8), (arrived == 256, 0), "seed {seed}");
        torn_writes += u32::from(arrived != 0 && arrived != 256);
    }
    assert!(torn_writes > 50, "{torn_writes} of 200");
}

#[test]
fn a_corrupted_word_has_one_bit_flipped_in_the_bytes_that_were_stored() {
    let plan = |seed| FaultPlan { corruptions_per_million_words: 1_000_000, ..FaultPlan::none(seed) };
    for seed in 0..100 {
        let (a, b) = link(plan(seed));
        a.outbound().store_u64(8, 0, Ordering::Release);
        a.outbound().write(17, &[0; 3]);
        let flipped: Vec<usize> = (0..WINDOW_BYTES).filter(|&offset| contents(&b)[offset] != 0).collect();
        assert!(matches!(flipped[..], [8..=15, 17..=19]), "seed {seed}: {flipped:?}");
        assert!(flipped.iter().all(|&offset| contents(&b)[offset].count_ones() == 1), "seed {seed}");
        assert_eq!(a.counts().words_corrupted, 2, "seed {seed}");
    }
}

/// Writes a payload and a tag, with or without a fence between them. Returns whether the tag was ever seen without all
/// of the payload.
fn tag_overtakes(seed: u64, is_fenced: bool, delay_ns_max: u64) -> bool {
    let delay_ns = 0..=delay_ns_max;
    let (a, b) = link(FaultPlan { delay_ns, ..FaultPlan::write_combined(seed) });
    let outbound = a.outbound();
    outbound.write(64, &[1; 100]);
    if is_fenced {
        outbound.fence();
    }
    outbound.store_u64(0, 1, Ordering::Release);
    (0..200).any(|now_ns| {
        a.tick(now_ns);
        let mut payload = [0; 100];
        let is_published = b.inbound().load_u64(0, Ordering::Acquire) == 1;
        is_published && {
            b.inbound().read(64, &mut payload);
            payload != [1; 100]
        }
    })
}

#[test]
fn a_missing_fence_is_detected() {
    let caught = (0..20).filter(|&seed| tag_overtakes(seed, false, 0)).count();
    assert!(caught > 15, "{caught} of 20 seeds");
}

#[test]
fn a_write_combined_window_reports_it_and_has_no_address() {
    let coherence = |plan| link(plan).0.outbound().coherence();
    assert_eq!(coherence(FaultPlan::write_combined(1)), Coherence::WriteCombined);
    assert_eq!(coherence(FaultPlan::none(1)), Coherence::Coherent);
    assert!(link(FaultPlan::none(1)).0.outbound().pointer(0, 8).is_none());
}

/// What an observer sees of a run: the window after each step, and the counts.
fn history(plan: &FaultPlan, stores: &[(usize, u8)]) -> (Vec<Vec<u8>>, FaultCounts) {
    let (a, b) = link(plan.clone());
    let step = |(index, (offset, value)): (usize, &(usize, u8))| {
        a.outbound().write(*offset, &[*value; 20]);
        a.tick(index as u64 * 10);
        contents(&b)
    };
    (stores.iter().enumerate().map(step).collect(), a.counts())
}

fn any_plan() -> impl Strategy<Value = FaultPlan> {
    let rates = (0..200_000_u32, 0..20_000_u32);
    (any::<u64>(), any::<bool>(), 0..100_u64, 0..100_u64, rates).prop_map(
        |(seed, is_write_combined, delay_ns_min, delay_ns_span, (corruptions, losses))| FaultPlan {
            seed,
            is_write_combined,
            delay_ns: delay_ns_min..=delay_ns_min + delay_ns_span,
            corruptions_per_million_words: corruptions,
            losses_per_million_words: losses,
            outage_ns: 0..=delay_ns_span,
        },
    )
}

proptest! {
    #![proptest_config(few_cases())]

    #[test]
    fn miri_a_fenced_payload_is_never_overtaken(seed in any::<u64>(), delay_ns_max in 0..100_u64) {
        prop_assert!(!tag_overtakes(seed, true, delay_ns_max));
    }

    #[test]
    fn miri_the_same_seed_gives_the_same_faults(
        plan in any_plan(),
        stores in prop::collection::vec((0..WINDOW_BYTES - 20, any::<u8>()), 1..20)
    ) {
        prop_assert_eq!(history(&plan, &stores), history(&plan, &stores));
    }

    #[test]
    fn miri_every_word_stored_arrives_or_is_counted(
        plan in any_plan(),
        stores in prop::collection::vec((0..WINDOW_BYTES / 8, 1..u64::MAX), 1..40)
    ) {
        let lossless = FaultPlan { losses_per_million_words: 0, corruptions_per_million_words: 0, ..plan.clone() };
        let (a, b) = link(lossless);
        let mut expected = vec![0; WINDOW_BYTES / 8];
        for &(index, value) in &stores {
            a.outbound().store_u64(index * 8, value, Ordering::Relaxed);
            expected[index] = value;
        }
        a.outbound().flush();
        let found: Vec<u64> =
            (0..WINDOW_BYTES / 8).map(|index| b.inbound().load_u64(index * 8, Ordering::Relaxed)).collect();
        prop_assert_eq!(found, expected);
        let (a, b) = link(plan);
        let outbound = a.outbound();
        (0..WINDOW_BYTES / 8).for_each(|index| outbound.store_u64(index * 8, u64::MAX, Ordering::Relaxed));
        outbound.flush();
        let arrived = contents(&b).chunks(8).filter(|word| word.iter().any(|byte| *byte != 0)).count() as u64;
        prop_assert_eq!(arrived + a.counts().words_dropped, a.counts().words_stored);
    }
}

/// Panics on purpose when [`a_failure_prints_its_seed`] runs it in a process of its own.
#[test]
fn a_failure_with_a_faulty_link() {
    if std::env::var_os(SEED_VARIABLE).is_some() {
        let (a, _b) = link(FaultPlan::none(0x5eed));
        assert_eq!(a.seed(), 0, "on purpose");
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri starts no processes")]
fn a_failure_prints_its_seed() {
    let test = std::env::current_exe().expect("this test");
    let output = std::process::Command::new(test)
        .args(["--exact", "test_support::faulty::tests::a_failure_with_a_faulty_link", "--nocapture"])
        .env(SEED_VARIABLE, "1")
        .output()
        .expect("it runs again");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(errors.contains("fabric::test_support::faulty: seed 0x5eed"), "{errors}");
}
