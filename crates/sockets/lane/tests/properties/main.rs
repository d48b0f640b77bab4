//! Properties that hold for every interleaving of calls and for every peer.
//!
//! A failure prints the minimal failing input and the seed (`cc ...`) that reproduces it. `PROPTEST_CASES` sets the
//! number of cases.

#![cfg(not(loom))]
#![allow(unsafe_code)] // Access in place uses raw pointers.

mod hostile;
mod moves;
mod non_coherent;
mod oracle;
mod threads;
mod timed;
mod windows;

use fabric::Coherence;
use fabric::test_support::non_coherent::CacheBehavior;
use hostile::Act;
use moves::Step;
use oracle::{Op, Shape};
use proptest::prelude::*;
use windows::ForgedLoad;

fn shape() -> impl Strategy<Value = Shape> {
    (0..4_u8, 0..8_u8).prop_map(|(small_doublings, big_doublings)| Shape { small_doublings, big_doublings })
}

/// Generates sizes near the limits of records and rings, and small sizes more often.
fn size() -> impl Strategy<Value = u16> {
    prop_oneof![
        4 => 0..64_u16,
        2 => 0..1_200_u16,
        1 => 0..40_000_u16,
        1 => prop::sample::select(vec![0, 1, 47, 48, 49, 111, 112, 113, 16_367, 16_368, 16_369, u16::MAX]),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        120 => size().prop_map(Op::Write),
        120 => size().prop_map(Op::WriteShort),
        60 => (size(), size())
            .prop_map(|(reserve_bytes, commit_bytes)| Op::InPlaceWrite { reserve_bytes, commit_bytes }),
        120 => size().prop_map(Op::Stage),
        80 => Just(Op::PublishStaged),
        120 => size().prop_map(Op::Read),
        120 => size().prop_map(Op::ReadShort),
        40 => (size(), size()).prop_map(|(skip_bytes, len_bytes)| Op::PeekTo { skip_bytes, len_bytes }),
        60 => size().prop_map(Op::InPlaceRead),
        40 => Just(Op::ProducerSleeps),
        40 => Just(Op::ConsumerSleeps),
        1 => Just(Op::Finish),
        20 => any::<u16>().prop_map(Op::SetCapacity),
        20 => any::<bool>().prop_map(Op::Patience),
        20 => Just(Op::GiveBack),
        80 => any::<u8>().prop_map(Op::Drain),
    ]
}

fn forged_load() -> impl Strategy<Value = ForgedLoad> {
    prop_oneof![
        12 => Just(ForgedLoad::Stored),
        2 => prop::sample::select(vec![0, 1, 2, 7, 8, 255, 256, 16_368, 1 << 32, u64::MAX, u64::MAX - 1, 1 << 63])
            .prop_map(ForgedLoad::Value),
        1 => any::<u64>().prop_map(ForgedLoad::Value),
        3 => any::<i8>().prop_map(ForgedLoad::Near),
        4 => (0..20_u8).prop_map(ForgedLoad::Tag),
        3 => size().prop_map(ForgedLoad::Data),
        2 => (0..12_u8).prop_map(ForgedLoad::Switch),
        2 => size().prop_map(ForgedLoad::Open),
        1 => any::<u16>().prop_map(ForgedLoad::CopyOf),
    ]
}

/// Generates words of the window; those at its start (flags and cursors) and in the rings' first slots more often.
fn word() -> impl Strategy<Value = u16> {
    prop_oneof![4 => 0..56_u16, 2 => (0..40_u16).prop_map(|slot| 64 + slot * 8), 2 => 64..400_u16, 1 => any::<u16>()]
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        8 => (word(), forged_load()).prop_map(|(word, forged_load)| Act::Poke { word, forged_load }),
        1 => (word(), word(), any::<u8>()).prop_map(|(from, to, words)| Act::Replay { from, to, words }),
        4 => prop_oneof![4 => size().prop_map(ForgedLoad::Data), 1 => forged_load()].prop_map(Act::Publish),
        4 => prop::collection::vec(forged_load(), 0..60).prop_map(Act::Script),
        4 => size().prop_map(Act::Read),
        4 => size().prop_map(Act::ReadShort),
        2 => (size(), size()).prop_map(|(skip_bytes, len_bytes)| Act::PeekTo { skip_bytes, len_bytes }),
        2 => Just(Act::Peek),
        2 => size().prop_map(Act::Consume),
        3 => Just(Act::Ask),
        4 => size().prop_map(Act::Write),
        4 => size().prop_map(Act::WriteShort),
        2 => size().prop_map(Act::Reserve),
        2 => size().prop_map(Act::Commit),
        3 => size().prop_map(Act::Stage),
        2 => Just(Act::PublishStaged),
        1 => Just(Act::Finish),
        1 => Just(Act::Sleep),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => size().prop_map(Step::Write),
        12 => size().prop_map(Step::WriteShort),
        12 => size().prop_map(Step::Read),
        12 => size().prop_map(Step::ReadShort),
        2 => any::<bool>().prop_map(Step::Patience),
        2 => any::<u16>().prop_map(Step::SetCapacity),
        2 => Just(Step::Release),
        3 => size().prop_map(|early_bytes| Step::Move { early_bytes }),
        3 => Just(Step::Freeze),
        2 => (any::<i8>(), 0..4_u64, size())
            .prop_map(|(slots, ring, bytes)| Step::ForgedFreeze { slots, place: ring | u64::from(bytes) << 8 }),
    ]
}

proptest! {
    #[test]
    fn a_stream_that_moves_and_freezes_at_any_time_keeps_its_bytes(steps in prop::collection::vec(step(), 0..200)) {
        moves::check(&steps);
    }

    #[test]
    fn every_interleaving_gives_the_bytes_of_the_oracle(shape in shape(), ops in prop::collection::vec(op(), 0..200)) {
        oracle::check_coherent(shape, &ops);
    }

    #[test]
    fn write_combined_stores_in_any_order_between_fences_give_the_same_bytes(
        shape in shape(),
        ops in prop::collection::vec(op(), 0..200),
        seed in any::<u64>(),
    ) {
        oracle::check_write_combined(shape, &ops, seed);
    }

    #[test]
    fn caches_that_hold_stale_lines_give_the_bytes_of_the_oracle(
        shape in shape(),
        ops in prop::collection::vec(op(), 0..200),
    ) {
        oracle::check_non_coherent(shape, &ops, CacheBehavior::explicit());
    }

    #[test]
    fn caches_that_fetch_and_evict_lines_at_any_time_give_the_same_bytes(
        shape in shape(),
        ops in prop::collection::vec(op(), 0..200),
        seed in any::<u64>(),
    ) {
        oracle::check_non_coherent(shape, &ops, CacheBehavior::spontaneous(seed));
    }

    #[test]
    fn calls_against_a_hostile_peer_return_bytes_or_corrupt(
        shape in shape(),
        acts in prop::collection::vec(act(), 0..120),
        coherence in prop::sample::select(vec![Coherence::Coherent, Coherence::WriteCombined, Coherence::NonCoherent]),
    ) {
        hostile::check(shape, coherence, &acts);
    }
}
