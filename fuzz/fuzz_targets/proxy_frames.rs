//! Whatever a peer says in the partitions of a link, the proxy at the other end lives, and connections that it does not
//! name see nothing of it.
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
