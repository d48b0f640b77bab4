//! Any interleaving of calls at both ends of a lane gives the bytes of the oracle.
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
    /// Stores gather, and arrive as this seed decides.
    gather_seed: Option<u64>,
    /// Else, caches hold stale lines, and move them as this seed decides.
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
