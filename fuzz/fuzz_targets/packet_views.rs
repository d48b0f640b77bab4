//! Any bytes are survived by every view of a packet, and what is understood can be said again and is understood the
//! same.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/router/packet/tests/exercise/mod.rs"]
mod exercise;

fuzz_target!(|bytes: &[u8]| exercise::exercise(bytes));
