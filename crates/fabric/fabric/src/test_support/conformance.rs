//! The tests that every backend must pass, over any [`Link`](crate::Link).
//!
//! A backend instantiates them with [`conformance_suite!`](crate::conformance_suite). The arguments are a module name,
//! which begins with `miri_` if the backend runs under Miri, and a function from the bytes of a window to both
//! endpoints of a new link that has not been trained.
//!
//! ```
//! fabric::conformance_suite!(miri_heap, fabric::heap::pair);
//! # fn main() {}
//! ```
//!
//! Where no process can hold both endpoints, as with a device that has one owner, two parties run the same tests. Each
//! makes a [`TwoParty`] that opens its own endpoint, and calls test after test
//! ([`for_each_conformance_test!`](crate::for_each_conformance_test) has their names).

mod cases;
mod common;
mod testbed;
mod two_party;

pub use cases::*;
pub use common::WINDOW_BYTES;
pub use testbed::{EndpointPair, SingleProcess, SingleProcessEndpoints, Testbed};
pub use two_party::{PartyBarrier, TwoParty, TwoPartyEndpoints};

/// Calls a macro with the names of all tests, after the given arguments in parentheses: the only list of them.
#[macro_export]
macro_rules! for_each_conformance_test {
    ($($then:ident)::+ ! ($($more:tt)*)) => {
        $($then)::+! { ($($more)*)
            bytes_written_outbound_appear_inbound
            a_window_holds_what_was_stored_last
            both_directions_are_independent
            publish_follows_payload
            words_are_never_torn
            spans_outside_a_window_are_refused
            slices_share_the_memory_and_keep_to_their_span
            a_ring_before_the_wait_is_not_lost
            a_ring_wakes_a_sleeper
            rings_both_ways_never_get_lost
            a_descriptor_is_readable_while_a_ring_waits
            scratchpad_words_cross_both_ways
            training_brings_both_endpoints_up_in_one_epoch
            the_epoch_grows_at_each_training
            a_link_taken_down_is_down_at_both_endpoints
            a_window_is_clean_after_training
            two_links_share_nothing
        }
    };
}

/// Instantiates the suite for a backend: `conformance_suite!(module_name, |window_bytes| (one_end, other_end))`.
#[macro_export]
macro_rules! conformance_suite {
    ($name:ident, $make:expr) => {
        $crate::for_each_conformance_test!(fabric::conformance_tests!($name, $make));
    };
}

/// Makes a test function for each test, see [`conformance_suite`].
#[doc(hidden)]
#[macro_export]
macro_rules! conformance_tests {
    (($name:ident, $make:expr) $($test:ident)*) => {
        mod $name {
            #[allow(unused_imports)] // The constructor may be a closure that uses no name of the enclosing module.
            use super::*;
            $(
                #[test]
                fn $test() {
                    let testbed = $crate::test_support::conformance::SingleProcess::new($make);
                    $crate::test_support::conformance::$test(&testbed);
                }
            )*
        }
    };
}
