//! Explores every interleaving of the two ends of a direction, step by step, and checks that the receiving program gets
//! every byte once and in order.
//!
//! A step is one access to what both ends share: a word, the lane, or the kernel. Stores wait in a buffer as long as
//! the processor may delay them. Ends crash between any two steps. A receiver that has left the lane may be replaced by
//! somebody who only knows the kernel's calls.

#[path = "search/model.rs"]
mod model;

use model::{Budget, Rules, World, explore};

/// What the ends may do in the search; each number adds a factor to its length.
const BUDGET: Budget = Budget { bytes: 4, asks: 2, returns: 1, freezes: 1, meetings: 0, early_consents: 0 };

#[test]
fn every_byte_arrives_once_and_in_order_in_every_interleaving() {
    let explored = explore(BUDGET, Rules::default()).unwrap_or_else(|fault| panic!("{fault}"));
    // The search must not become empty by a mistake in the model.
    assert!(explored.states > 100_000, "only {} states", explored.states);
    let wanted = [
        explored.moves_begun,
        explored.moves_ended,
        explored.resends,
        explored.settled,
        explored.replaced,
        explored.dropped,
        explored.abandoned,
    ];
    assert!(wanted.iter().all(|count| *count > 0), "never happened: {explored:?}");
}

#[test]
fn both_ends_may_freeze_and_go_back_repeatedly() {
    let budget = Budget { bytes: 2, asks: 2, returns: 2, freezes: 2, meetings: 0, early_consents: 0 };
    explore(budget, Rules::default()).unwrap_or_else(|fault| panic!("{fault}"));
}

/// What the ends may do where another process takes the place of one of them.
const BUDGET_ANEW: Budget = Budget { bytes: 3, asks: 2, returns: 1, freezes: 1, meetings: 1, early_consents: 0 };

#[test]
fn ends_that_have_left_their_lanes_may_meet_anew() {
    let explored = explore(BUDGET_ANEW, Rules::default()).unwrap_or_else(|fault| panic!("{fault}"));
    assert!(explored.meetings > 100, "{explored:?}");
}

#[test]
fn a_receiver_may_consent_before_the_sender_asks() {
    let budget = Budget { bytes: 3, asks: 1, returns: 1, freezes: 1, meetings: 0, early_consents: 1 };
    let explored = explore(budget, Rules::default()).unwrap_or_else(|fault| panic!("{fault}"));
    assert!(explored.early_consents > 0 && explored.moves_begun > 0, "{explored:?}");
}

#[test]
fn a_meeting_during_a_move_is_found() {
    explore(BUDGET_ANEW, Rules { leaves_lanes: false, ..Rules::default() }).expect_err("a broken rule is found");
}

#[test]
fn a_receiver_that_forgets_a_frozen_lane_is_found() {
    let fault = found(Rules { reads_abandoned: false, ..Rules::default() });
    assert!(fault.contains("bytes arrive"), "{fault}");
}

/// Returns the fault that the search finds with `rules`.
fn found(rules: Rules) -> String {
    explore(BUDGET, rules).expect_err("a broken rule is found")
}

#[test]
fn a_receiver_without_consent_is_found() {
    let fault = found(Rules { is_careful: false, ..Rules::default() });
    assert!(fault.contains("received byte") || fault.contains("the beginning of a lane"), "{fault}");
}

#[test]
fn a_missing_fence_is_found() {
    found(Rules { has_fences: false, ..Rules::default() });
}

#[test]
fn a_sender_that_overlooks_a_frozen_lane_is_found() {
    found(Rules { sees_frozen: false, ..Rules::default() });
}

#[test]
fn a_receiver_that_does_not_wait_for_the_end_is_found() {
    found(Rules { waits_for_end: false, ..Rules::default() });
}

#[test]
fn a_lane_that_is_entered_early_is_found() {
    found(Rules { counts_written: false, ..Rules::default() });
}

#[test]
fn a_sender_that_leaves_bytes_in_the_lane_is_found() {
    found(Rules { repeats: false, ..Rules::default() });
}

#[test]
fn a_receiver_that_drops_nothing_is_found() {
    let fault = found(Rules { drops: false, ..Rules::default() });
    assert!(fault.contains("received byte"), "{fault}");
}

#[test]
fn a_connection_that_never_asks_stays_on_tcp() {
    let explored = explore(Budget { asks: 0, ..BUDGET }, Rules::default()).unwrap_or_else(|fault| panic!("{fault}"));
    assert_eq!((explored.moves_begun, explored.resends), (0, 0));
    assert!(World::new(BUDGET).is_on_tcp());
}
