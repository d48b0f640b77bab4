//! Tests of `poll` and `select`. Both endpoints of every connection are in this process.

use super::select::WORD_BITS;
use super::{poll, select};
use crate::connection::tests::{OpenEndpoint, pair, receive, send};
use crate::entry::{self, Entry};
use crate::process::clock::now_ns;
use libc::{POLLIN, POLLOUT, fd_set, pollfd};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, RawFd};

const HANG_NS: u64 = 20_000_000_000;

/// A connection of whose first endpoint the program has a descriptor.
struct Pair {
    own: OpenEndpoint,
    peer: Option<OpenEndpoint>,
}

impl Pair {
    fn new() -> Self {
        let (own, peer) = pair(true);
        entry::set(own.0.lifeline(), Entry::Connection(own.0));
        Self { own, peer: Some(peer) }
    }

    fn fd(&self) -> RawFd {
        self.own.0.lifeline()
    }

    fn send_to_own(&self) {
        send(self.peer.as_ref().unwrap().0, b"x").unwrap();
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        entry::set(self.fd(), Entry::None);
    }
}

fn entry(fd: RawFd, events: i16) -> pollfd {
    pollfd { fd, events, revents: -1 }
}

fn poll_all(entries: &mut [pollfd], timeout_ns: Option<u64>) -> (Result<usize, Errno>, Vec<i16>) {
    // SAFETY: a null mask is allowed.
    let result = unsafe { poll(entries, timeout_ns, std::ptr::null()) };
    (result, entries.iter().map(|entry| entry.revents).collect())
}

#[test]
fn connections_and_foreign_descriptors_are_answered_together() {
    let pair = Pair::new();
    let counter = eventfd(1, EventfdFlags::NONBLOCK).unwrap();
    let mut entries = [
        entry(pair.fd(), POLLIN | POLLOUT),
        entry(-1, POLLIN),
        entry(counter.as_raw_fd(), POLLIN),
        entry(pair.fd(), POLLIN),
    ];
    assert_eq!(poll_all(&mut entries, Some(0)), (Ok(2), vec![POLLOUT, 0, POLLIN, 0]));
    pair.send_to_own();
    assert_eq!(poll_all(&mut entries, None), (Ok(3), vec![POLLIN | POLLOUT, 0, POLLIN, POLLIN]));
}

#[test]
fn a_closed_descriptor_is_invalid_beside_a_connection() {
    let pair = Pair::new();
    let mut entries = [entry(pair.fd(), POLLIN), entry(999_999, POLLIN)];
    assert_eq!(poll_all(&mut entries, None), (Ok(1), vec![0, libc::POLLNVAL]));
}

#[test]
fn a_sleeper_is_woken_by_data_and_by_the_end() {
    let mut pair = Pair::new();
    let fd = pair.fd();
    let sleep = || poll_all(&mut [entry(fd, POLLIN), entry(fd, POLLIN | libc::POLLRDHUP)], Some(HANG_NS));
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(sleep);
        std::thread::sleep(std::time::Duration::from_millis(10));
        pair.send_to_own();
        assert_eq!(sleeper.join().unwrap(), (Ok(2), vec![POLLIN, POLLIN]));
    });
    let mut bytes = [0; 8];
    assert_eq!(receive(pair.own.0, &mut bytes), Ok(1));
    let peer = pair.peer.take();
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(sleep);
        std::thread::sleep(std::time::Duration::from_millis(10));
        drop(peer);
        let (result, revents) = sleeper.join().unwrap();
        assert_eq!((result, revents), (Ok(2), vec![POLLIN, POLLIN | libc::POLLRDHUP]));
    });
}

#[test]
fn an_idle_call_returns_when_its_time_is_up() {
    let pair = Pair::new();
    let mut entries = [entry(pair.fd(), POLLIN)];
    let before = now_ns();
    assert_eq!(poll_all(&mut entries, Some(3_000_000)), (Ok(0), vec![0]));
    assert!(now_ns() - before >= 3_000_000);
}

#[test]
fn more_descriptors_than_fit_the_stack_are_polled() {
    let pairs: Vec<_> = (0..150).map(|_| Pair::new()).collect();
    let mut entries: Vec<_> = pairs.iter().map(|pair| entry(pair.fd(), POLLIN)).collect();
    assert_eq!(poll_all(&mut entries, Some(2_000_000)).0, Ok(0));
    pairs[149].send_to_own();
    pairs[3].send_to_own();
    let (result, revents) = poll_all(&mut entries, Some(HANG_NS));
    assert_eq!(result, Ok(2));
    assert_eq!((revents[3], revents[149]), (POLLIN, POLLIN));
}

/// Bits for descriptors up to 4096, more than libc's own sets have.
type Set = [libc::c_ulong; 64];

fn bit(set: &mut Set, fd: RawFd) {
    set[fd as usize / WORD_BITS] |= 1 << (fd as usize % WORD_BITS);
}

fn select_all(count: i32, sets: [&mut Set; 3], timeout_ns: Option<u64>) -> (Result<usize, Errno>, Option<u64>) {
    let [read, write, except] = sets.map(|set| set.as_mut_ptr().cast::<fd_set>());
    // SAFETY: each set has 4096 bits, more than the numbers used by the tests, and the mask is null.
    unsafe { select(count, read, write, except, timeout_ns, std::ptr::null()) }
}

#[test]
fn select_answers_for_connections_and_others() {
    let pair = Pair::new();
    let counter = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let fds = [pair.fd(), counter.as_raw_fd()];
    let count = fds.iter().max().unwrap() + 1;
    let (mut read, mut write, mut except) = ([0; 64], [0; 64], [0; 64]);
    for fd in fds {
        bit(&mut read, fd);
        bit(&mut except, fd);
    }
    bit(&mut write, fds[0]);
    let (result, left_ns) = select_all(count, [&mut read, &mut write, &mut except], Some(HANG_NS));
    assert_eq!(result, Ok(1));
    assert!(left_ns.is_some_and(|left_ns| left_ns > 0 && left_ns <= HANG_NS));
    let mut expected = [0; 64];
    bit(&mut expected, fds[0]);
    assert_eq!((read, write, except), ([0; 64], expected, [0; 64]));

    pair.send_to_own();
    let mut read = expected;
    assert_eq!(select_all(count, [&mut read, &mut [0; 64], &mut [0; 64]], None), (Ok(1), None));
    assert_eq!(read, expected);
}

#[test]
fn select_refuses_closed_descriptors_and_negative_counts() {
    let pair = Pair::new();
    // The highest number of a kernel set, which tests that run at the same time are the least likely to open.
    let closed = 1023;
    let mut read = [0; 64];
    bit(&mut read, pair.fd());
    bit(&mut read, closed);
    let (result, _) = select_all(closed + 1, [&mut read, &mut [0; 64], &mut [0; 64]], Some(HANG_NS));
    assert_eq!(result, Err(Errno::BADF));
    assert_eq!(select_all(-1, [&mut read, &mut [0; 64], &mut [0; 64]], Some(0)).0, Err(Errno::INVAL));
}

#[test]
fn select_times_out_with_empty_sets() {
    let pair = Pair::new();
    let mut read = [0; 64];
    bit(&mut read, pair.fd());
    let sets = [&mut read, &mut [0; 64], &mut [0; 64]];
    assert_eq!(select_all(pair.fd() + 1, sets, Some(2_000_000)), (Ok(0), Some(0)));
    assert_eq!(read, [0; 64]);
}
