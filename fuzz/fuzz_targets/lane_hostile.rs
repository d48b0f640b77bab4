//! A peer stores arbitrary words in both windows at arbitrary times: the victim must receive bytes or `Corrupt`, and
//! must access only its own parts of the windows.
#![no_main]

use fabric::Coherence;
use libfuzzer_sys::fuzz_target;

#[path = "../../crates/sockets/lane/tests/properties/hostile.rs"]
mod hostile;
#[path = "../../crates/sockets/lane/tests/properties/oracle.rs"]
#[allow(dead_code)] // The other target uses the rest.
mod oracle;
#[path = "../../crates/sockets/lane/tests/properties/windows.rs"]
#[allow(dead_code)]
mod windows;

#[derive(Debug, arbitrary::Arbitrary)]
struct Input {
    shape: oracle::Shape,
    is_coherent: bool,
    acts: Vec<hostile::Act>,
}

fuzz_target!(|input: Input| {
    let coherence = if input.is_coherent { Coherence::Coherent } else { Coherence::WriteCombined };
    hostile::check(input.shape, coherence, &input.acts);
});
