//! Waiting for what other processes do.

use std::fmt::Debug;
use std::thread;
use std::time::{Duration, Instant};

use crate::WAIT_MAX;

const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Observes until a condition holds, and returns that observation. Panics with the last observation after
/// [`WAIT_MAX`].
#[track_caller]
pub fn wait_for<T: Debug>(what: &str, mut observe: impl FnMut() -> T, holds: impl Fn(&T) -> bool) -> T {
    let deadline = Instant::now() + WAIT_MAX;
    loop {
        let observed = observe();
        if holds(&observed) {
            return observed;
        }
        assert!(Instant::now() < deadline, "no {what}: {observed:#?}");
        thread::sleep(POLL_INTERVAL);
    }
}

/// Waits until a condition holds; panics after [`WAIT_MAX`].
#[track_caller]
pub fn wait_until(what: &str, holds: impl FnMut() -> bool) {
    wait_for(what, holds, |holds| *holds);
}
