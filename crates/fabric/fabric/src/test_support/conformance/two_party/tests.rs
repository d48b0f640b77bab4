//! Two testbed as two threads, so that one of them can fail, or be missing.

use super::*;
use crate::heap::{self, HeapLink};
use crate::test_support::conformance::cases::{check, up};
use proptest::prelude::any;
use std::sync::mpsc::channel;

/// Runs a fact as both testbed; what came of it at each end, a panic as its text.
fn run<T: Send>(fact: impl Fn(&dyn Fn() -> HeapLink, Endpoint, HeapLink) -> T + Sync) -> [Result<T, String>; 2] {
    let (place_a, place_b) = heap::pair(WINDOW_BYTES);
    let (to_b, from_a) = channel();
    let open_a = move || {
        let (a, b) = heap::pair(WINDOW_BYTES);
        to_b.send(b).expect("the other party");
        a
    };
    let open_b = move || from_a.recv().expect("the other party");
    thread::scope(|scope| {
        let fact = &fact;
        let a = scope.spawn(move || fact(&open_a, Endpoint::A, place_a));
        let b = scope.spawn(move || fact(&open_b, Endpoint::B, place_b));
        [a.join().map_err(text), b.join().map_err(text)]
    })
}

fn text(failure: Box<dyn std::any::Any + Send>) -> String {
    let text = failure.downcast_ref::<String>().cloned();
    text.or_else(|| failure.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

#[test]
fn what_fails_at_one_end_fails_for_both_parties() {
    let outcomes = run(|open, own, place| {
        let testbed = TwoParty::new(own, Rc::new(PartyBarrier::new(&place)), |_| open());
        let mut ends = up(&testbed);
        ends.at(Endpoint::A, |_| ());
        ends.at(Endpoint::B, |_| panic!("broken"));
    });
    assert!(outcomes[0].as_ref().is_err_and(|text| text.contains("the other party has failed")), "{outcomes:?}");
    assert_eq!(outcomes[1], Err("broken".to_owned()));
}

#[test]
fn a_property_that_fails_at_one_end_ends_with_the_same_smallest_case_at_both() {
    let outcomes = run(|open, own, place| {
        let testbed = TwoParty::new(own, Rc::new(PartyBarrier::new(&place)), |_| open());
        check(&testbed, any::<u32>(), |value| {
            let mut ends = testbed.link();
            ends.at(Endpoint::A, |_| assert!(value < 1_000, "too large"));
        });
    });
    for outcome in outcomes {
        assert!(outcome.as_ref().is_err_and(|text| text.contains(", 1000: ")), "{outcome:?}");
    }
}

#[test]
fn all_parties_get_an_answer_and_one_number_by_chance() {
    let outcomes = run(|open, own, place| {
        let testbed = TwoParty::new(own, Rc::new(PartyBarrier::new(&place)), |_| open());
        let mut ends = testbed.link();
        (Endpoint::ALL.map(|end| ends.query(end, |_| own as u64 + 7)), testbed.random_seed(), testbed.random_seed())
    });
    assert_eq!(outcomes[0], outcomes[1]);
    assert!(outcomes[0].as_ref().is_ok_and(|(answers, first, second)| *answers == [7, 8] && first != second));
}

#[test]
fn a_party_whose_other_does_not_come_says_so_and_waits_once() {
    const HOUR: Duration = Duration::from_secs(3600);
    let (place, _other) = heap::pair(WINDOW_BYTES);
    let meeting = PartyBarrier::new(&place).with_timeout(Duration::from_millis(50));
    let missed = |meeting: &PartyBarrier<HeapLink>| {
        let failure = catch_unwind(AssertUnwindSafe(|| meeting.wait())).expect_err("nobody came");
        assert!(text(failure).contains("the other party has not come for"));
    };
    missed(&meeting);
    missed(&meeting.with_timeout(HOUR));
}
