//! No bytes make a view of a packet panic; what a view accepts can be emitted, and parses to the same values again.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/router/packet/tests/exercise/mod.rs"]
mod exercise;

fuzz_target!(|bytes: &[u8]| exercise::exercise(bytes));
