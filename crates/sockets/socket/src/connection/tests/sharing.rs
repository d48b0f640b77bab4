//! Locks between processes that hold the same endpoint.

use super::*;
use crate::connection::sharing::LOCK_WAITS_MAX;
use rustix::process::{Pid, Signal, kill_process};
use std::process::{Child, Stdio};

/// A child that is killed at the end of a test.
struct KilledChild(Child);

impl KilledChild {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for KilledChild {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}

/// Returns an endpoint whose send lock names a child, and the other endpoint. The child holds the endpoint if `holds`.
fn locked_by_child(holds: bool) -> (OpenEndpoint, OpenEndpoint, KilledChild) {
    let (one, two) = pair(true);
    let lifeline = rustix::io::fcntl_dupfd_cloexec(one.0.borrow_lifeline(), 0).unwrap();
    let child = KilledChild(test_support::spawn::sleeper(if holds { lifeline.into() } else { Stdio::null() }));
    one.0.is_transferred.store(true, Ordering::Relaxed);
    let segment = &one.0.lanes().unwrap().segment;
    segment.add(OwnState::Holders, 1);
    segment.store(OwnState::SendLock, u64::from(child.0.id()));
    (one, two, child)
}

/// Returns the result of as many sends as it takes until a lock's holder is checked.
fn send_until_checked(endpoint: &OpenEndpoint) -> Result<usize, Errno> {
    (0..=LOCK_WAITS_MAX).map(|_| send(endpoint.0, b"x")).find(|sent| *sent != Err(Errno::AGAIN)).unwrap_or(Ok(0))
}

#[test]
fn a_stopped_process_that_holds_the_endpoint_keeps_its_lock_until_it_is_killed() {
    let (one, _two, child) = locked_by_child(true);
    child.signal(Signal::STOP);
    assert_eq!(send_until_checked(&one), Ok(0), "the lock was taken from a process that may go on");
    child.signal(Signal::KILL);
    assert_eq!(send_until_checked(&one), Ok(1), "its parent has not waited for it yet");
}

#[test]
fn a_blocking_send_waits_for_a_stopped_process_until_its_timeout() {
    let (one, _two, child) = locked_by_child(true);
    child.signal(Signal::STOP);
    one.0.is_nonblocking.store(false, Ordering::Relaxed);
    one.0.send_timeout_ns.store(300_000_000, Ordering::Relaxed);
    assert_eq!(send(one.0, b"x"), Err(Errno::AGAIN));
    std::thread::scope(|scope| {
        one.0.send_timeout_ns.store(0, Ordering::Relaxed);
        let sender = scope.spawn(|| send(one.0, b"x"));
        one.0.lanes().unwrap().segment.store(OwnState::SendLock, 0);
        assert_eq!(sender.join().unwrap(), Ok(1), "the process has gone on");
    });
}

#[test]
fn a_lock_that_no_process_can_have_taken_resets_the_connection() {
    // A process that does not hold the endpoint, whether it is stopped or not, and one that holds it and sleeps.
    for (holds, stops) in [(false, true), (false, false), (true, false)] {
        let (one, _two, child) = locked_by_child(holds);
        if stops {
            child.signal(Signal::STOP);
        }
        assert_eq!(send_until_checked(&one), Err(Errno::CONNRESET), "holds {holds}, stops {stops}");
        child.signal(Signal::KILL);
    }
}

#[test]
fn a_lock_of_the_process_itself_resets_the_connection() {
    let (one, _two, _child) = locked_by_child(true);
    one.0.lanes().unwrap().segment.store(OwnState::SendLock, u64::from(std::process::id()));
    assert_eq!(send_until_checked(&one), Err(Errno::CONNRESET));
}
