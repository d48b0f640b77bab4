//! Arbitrary interleavings of calls at both endpoints of a lane: the received bytes must equal the oracle's.
#![no_main]

use fabric::test_support::non_coherent::CacheBehavior;
use libfuzzer_sys::fuzz_target;

#[path = "../../crates/sockets/lane/tests/properties/oracle.rs"]
mod oracle;
#[path = "../../crates/sockets/lane/tests/properties/windows.rs"]
#[allow(dead_code)] // The other target uses the rest.
mod windows;

#[derive(Debug, arbitrary::Arbitrary)]
struct Input {
    shape: oracle::Shape,
    /// Stores are write-combined and arrive in an order determined by this seed.
    gather_seed: Option<u64>,
    /// Otherwise, caches hold stale lines and move them at times determined by this seed.
    stale_seed: Option<u64>,
    ops: Vec<oracle::Op>,
}

fuzz_target!(|input: Input| {
    match (input.gather_seed, input.stale_seed) {
        (Some(seed), _) => oracle::check_write_combined(input.shape, &input.ops, seed),
        (None, Some(seed)) => oracle::check_non_coherent(input.shape, &input.ops, CacheBehavior::spontaneous(seed)),
        (None, None) => oracle::check_coherent(input.shape, &input.ops),
    }
});
