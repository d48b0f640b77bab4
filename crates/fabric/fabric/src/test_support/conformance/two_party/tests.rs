//! Two parties as two threads, so that one of them can fail or be missing.

use super::*;
use crate::heap::{self, HeapLink};
use crate::test_support::conformance::cases::{check, up};
use proptest::prelude::any;
use std::sync::mpsc::channel;

/// Runs a test as both parties. Returns the result at each endpoint, a panic as its text.
fn run<T: Send>(test: impl Fn(&dyn Fn() -> HeapLink, Endpoint, HeapLink) -> T + Sync) -> [Result<T, String>; 2] {
    let (barrier_a, barrier_b) = heap::pair(WINDOW_BYTES);
    let (to_b, from_a) = channel();
    let open_a = move || {
        let (a, b) = heap::pair(WINDOW_BYTES);
        to_b.send(b).expect("the other party");
        a
    };
    let open_b = move || from_a.recv().expect("the other party");
    thread::scope(|scope| {
        let test = &test;
        let a = scope.spawn(move || test(&open_a, Endpoint::A, barrier_a));
        let b = scope.spawn(move || test(&open_b, Endpoint::B, barrier_b));
        [a.join().map_err(text), b.join().map_err(text)]
    })
}

fn text(failure: Box<dyn std::any::Any + Send>) -> String {
    let text = failure.downcast_ref::<String>().cloned();
    text.or_else(|| failure.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

#[test]
fn a_failure_at_one_endpoint_is_a_failure_for_both_parties() {
    let outcomes = run(|open, own, barrier_link| {
        let testbed = TwoParty::new(own, Rc::new(PartyBarrier::new(&barrier_link)), |_| open());
        let mut endpoints = up(&testbed);
        endpoints.at(Endpoint::A, |_| ());
        endpoints.at(Endpoint::B, |_| panic!("broken"));
    });
    assert!(outcomes[0].as_ref().is_err_and(|text| text.contains("the other party has failed")), "{outcomes:?}");
    assert_eq!(outcomes[1], Err("broken".to_owned()));
}

#[test]
fn a_property_that_fails_at_one_endpoint_shrinks_to_the_same_case_at_both() {
    let outcomes = run(|open, own, barrier_link| {
        let testbed = TwoParty::new(own, Rc::new(PartyBarrier::new(&barrier_link)), |_| open());
        check(&testbed, any::<u32>(), |value| {
            let mut endpoints = testbed.link();
            endpoints.at(Endpoint::A, |_| assert!(value < 1_000, "too large"));
        });
    });
    for outcome in outcomes {
        assert!(outcome.as_ref().is_err_and(|text| text.contains(", 1000: ")), "{outcome:?}");
    }
}

#[test]
fn all_parties_get_each_result_and_the_same_random_number() {
    let outcomes = run(|open, own, barrier_link| {
        let testbed = TwoParty::new(own, Rc::new(PartyBarrier::new(&barrier_link)), |_| open());
        let mut endpoints = testbed.link();
        (
            Endpoint::ALL.map(|endpoint| endpoints.query(endpoint, |_| own as u64 + 7)),
            testbed.random_seed(),
            testbed.random_seed(),
        )
    });
    assert_eq!(outcomes[0], outcomes[1]);
    assert!(outcomes[0].as_ref().is_ok_and(|(answers, first, second)| *answers == [7, 8] && first != second));
}

#[test]
fn a_party_whose_peer_does_not_arrive_reports_it_and_waits_once() {
    const HOUR: Duration = Duration::from_secs(3600);
    let (barrier_link, _other) = heap::pair(WINDOW_BYTES);
    let barrier = PartyBarrier::new(&barrier_link).with_timeout(Duration::from_millis(50));
    let missed = |barrier: &PartyBarrier<HeapLink>| {
        let failure = catch_unwind(AssertUnwindSafe(|| barrier.wait())).expect_err("the other party is missing");
        assert!(text(failure).contains("the other party has not arrived for"));
    };
    missed(&barrier);
    missed(&barrier.with_timeout(HOUR));
}
