//! A peer writes arbitrary records to the partitions of a link: the proxy of the other node must not panic, and
//! connections that the records do not name must not be affected.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/rack/proxy/tests/properties/hostile.rs"]
mod hostile;
#[path = "../../crates/rack/proxy/tests/properties/program.rs"]
#[allow(dead_code)] // The property tests use the rest.
mod program;
#[path = "../../crates/rack/proxy/tests/properties/world.rs"]
#[allow(dead_code)]
mod world;

#[derive(Debug, arbitrary::Arbitrary)]
struct Input {
    shape: world::Shape,
    attacks: Vec<hostile::Attack>,
}

fuzz_target!(|input: Input| hostile::check(input.shape, &input.attacks));
