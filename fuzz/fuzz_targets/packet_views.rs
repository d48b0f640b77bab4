//! Parses arbitrary bytes as packets: views must not panic, and an accepted packet can be emitted and parsed again to
//! the same values.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/router/packet/tests/exercise/mod.rs"]
mod exercise;

fuzz_target!(|bytes: &[u8]| exercise::exercise(bytes));
