//! Tests of epoll sets. Both endpoints of every connection are in this process; time-outs only bound a test that hangs.

mod descriptors;
mod scan;

use super::control::{control, create};
use super::kernel;
use super::ready_list::{self, ReadyList};
use super::ready_time::ReadyTime;
use super::registration::{EDGE, EXCLUSIVE, ONESHOT, Registration, Target};
use super::set::{EpollSet, REGISTERED, is_readable};
use super::wait::{Call, wait};
use super::{adopt, forget};
use crate::connection::Connection;
use crate::connection::tests::{OpenEndpoint, lifeline_pair, pair, receive, send};
use crate::entry::{self, Entry};
use crate::listener;
use crate::poll_select;
use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, epoll_event};
use ready_list::{HOT_BEGIN, HeldRecords};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// What a test does during a scan.
type Work = Box<dyn FnOnce()>;

thread_local! {
    static POLLS: Cell<u64> = const { Cell::new(0) };
    static HAS_SLEPT: Cell<bool> = const { Cell::new(false) };
    static STAMPS: RefCell<BTreeMap<RawFd, u64>> = const { RefCell::new(BTreeMap::new()) };
    static WHILE_PARKING: Cell<Option<Work>> = const { Cell::new(None) };
    static BEFORE_POLL: Cell<Option<(u64, Work)>> = const { Cell::new(None) };
}

/// Runs before this thread polls a registration.
pub(super) fn note_poll() {
    POLLS.set(POLLS.get() + 1);
    match BEFORE_POLL.take() {
        Some((0, work)) => work(),
        Some((count, work)) => BEFORE_POLL.set(Some((count - 1, work))),
        None => {}
    }
}

/// Runs after this thread has slept on a set.
pub(super) fn note_sleep() {
    HAS_SLEPT.set(true);
}

/// Returns the timestamp that a test has set for the first unread record of `fd`.
pub(super) fn test_stamp(fd: RawFd) -> Option<u64> {
    STAMPS.with_borrow(|stamps| stamps.get(&fd).copied())
}

/// Runs before a connection is parked to make room for another.
pub(super) fn while_parking() {
    if let Some(work) = WHILE_PARKING.take() {
        work();
    }
}

const HANG_NS: u64 = 20_000_000_000;
const IN: u32 = libc::EPOLLIN as u32;
const OUT: u32 = libc::EPOLLOUT as u32;
const HUP: u32 = libc::EPOLLHUP as u32;
const RDHUP: u32 = libc::EPOLLRDHUP as u32;

/// An endpoint that the program has a descriptor of.
struct ProgramEndpoint(OpenEndpoint);

impl ProgramEndpoint {
    fn fd(&self) -> RawFd {
        self.0.0.with_descriptors(|own| own[0])
    }
}

impl Drop for ProgramEndpoint {
    fn drop(&mut self) {
        entry::set(self.fd(), Entry::None);
        forget(self.fd(), self.0.0);
    }
}

fn own_and_peer() -> (ProgramEndpoint, OpenEndpoint) {
    let (own, peer) = pair(true);
    entry::set(own.0.lifeline(), Entry::Connection(own.0));
    (ProgramEndpoint(own), peer)
}

/// As [`own_and_peer`], with the data travelling over the lifeline.
fn own_and_peer_on_lifeline() -> (ProgramEndpoint, OpenEndpoint) {
    let [peer, own] = lifeline_pair();
    entry::set(own.0.lifeline(), Entry::Connection(own.0));
    (ProgramEndpoint(own), peer)
}

struct Epoll(RawFd);

impl Epoll {
    fn new() -> Self {
        Self(create(libc::EPOLL_CLOEXEC).unwrap())
    }

    fn control(&self, operation: i32, fd: RawFd, events: u32, data: u64) -> Result<(), Errno> {
        let mut event = epoll_event { events, u64: data };
        // SAFETY: `event` is a local variable that lives until the call returns.
        unsafe { control(self.0, operation, fd, &raw mut event) }
    }

    fn add(&self, fd: RawFd, events: u32, data: u64) {
        self.control(EPOLL_CTL_ADD, fd, events, data).unwrap();
    }

    /// Returns events and data, sorted by data.
    fn wait_max(&self, max: usize, timeout_ns: Option<u64>) -> Result<Vec<(u32, u64)>, Errno> {
        let mut found = self.wait_in_order(max, timeout_ns)?;
        found.sort_by_key(|&(_, data)| data);
        Ok(found)
    }

    /// Returns events and data, in the order of the reports.
    fn wait_in_order(&self, max: usize, timeout_ns: Option<u64>) -> Result<Vec<(u32, u64)>, Errno> {
        let mut events = vec![epoll_event { events: 0, u64: 0 }; max];
        // SAFETY: the array has `max` elements, and the mask is null.
        let count = unsafe { wait(self.0, events.as_mut_ptr(), max as i32, timeout_ns, std::ptr::null()) }?;
        Ok(events[..count].iter().map(|event| (event.events, event.u64)).collect())
    }

    /// Returns the data of up to `max` ready registrations, in the order of the reports.
    fn order(&self, max: usize) -> Vec<u64> {
        self.wait_in_order(max, Some(0)).unwrap().iter().map(|&(_, data)| data).collect()
    }

    /// Registers all connections, each under its index as data.
    fn add_all(&self, pairs: &[(ProgramEndpoint, OpenEndpoint)], events: u32) {
        pairs.iter().enumerate().for_each(|(index, (own, _))| self.add(own.fd(), events, index as u64));
    }

    /// Returns what is ready now.
    fn now(&self) -> Vec<(u32, u64)> {
        self.wait_max(16, Some(0)).unwrap()
    }

    /// Waits until something is ready, and returns it.
    fn wait(&self) -> Vec<(u32, u64)> {
        self.wait_max(16, Some(HANG_NS)).unwrap()
    }

    /// Lets waits time out until one has slept, so that every connection is parked. On a busy machine a wait may time
    /// out before it sleeps.
    fn let_all_sleep(&self) {
        HAS_SLEPT.set(false);
        while !HAS_SLEPT.get() {
            assert_eq!(self.wait_max(16, Some(2_000_000)).unwrap(), []);
        }
    }

    fn set(&self) -> &'static EpollSet {
        match entry::get(self.0) {
            Entry::EpollSet(set) => set,
            _ => panic!("not a set"),
        }
    }

    /// Waits until another thread sleeps on the set.
    fn until_asleep(&self) {
        while self.set().sleepers.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl Drop for Epoll {
    fn drop(&mut self) {
        let set = self.set();
        entry::set(self.0, Entry::None);
        set.remove_descriptor(self.0);
        // SAFETY: `create` returned the descriptor, and only this `drop` closes it.
        unsafe { rustix::io::close(self.0) };
    }
}

fn counter() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK).unwrap()
}

fn count_up(counter: &OwnedFd) {
    rustix::io::write(counter, &1_u64.to_ne_bytes()).unwrap();
}

fn read_all(connection: &'static Connection) -> usize {
    let mut bytes = [0; 4096];
    let mut total = 0;
    while let Ok(count @ 1..) = receive(connection, &mut bytes) {
        total += count;
    }
    total
}

/// Returns how often this thread polls a registration during `work`.
fn polls_of(work: impl FnOnce()) -> u64 {
    let before = POLLS.get();
    work();
    POLLS.get() - before
}

fn pairs_of(count: usize) -> Vec<(ProgramEndpoint, OpenEndpoint)> {
    (0..count).map(|_| own_and_peer()).collect()
}

fn send_one(connection: &'static Connection) {
    assert_eq!(send(connection, b"x"), Ok(1));
}

/// Sends a byte whose timestamp is `base + units`.
fn send_at((own, peer): &(ProgramEndpoint, OpenEndpoint), base: u64, units: u64) {
    set_stamp(own.fd(), base + units);
    send(peer.0, b"x").unwrap();
}

fn set_stamp(fd: RawFd, stamp: u64) {
    STAMPS.with_borrow_mut(|stamps| stamps.insert(fd, stamp));
}

/// Returns a timestamp later than all registrations made so far.
fn stamps_now() -> u64 {
    ReadyTime::now().units() + 1
}

/// Sends until there is no room left.
fn fill(connection: &'static Connection) {
    let bytes = vec![0; 65536];
    while send(connection, &bytes).is_ok() {}
}

#[test]
fn level_reports_as_long_as_there_is_something() {
    let epoll = Epoll::new();
    let (own, peer) = own_and_peer();
    epoll.add(own.fd(), IN, u64::MAX - 7);
    assert_eq!(epoll.now(), []);
    send(peer.0, b"x").unwrap();
    assert_eq!(epoll.now(), [(IN, u64::MAX - 7)]);
    assert_eq!(epoll.wait(), [(IN, u64::MAX - 7)]);
    assert_eq!(read_all(own.0.0), 1);
    assert_eq!(epoll.now(), []);
}

#[test]
fn a_sleeper_is_woken_by_data() {
    let epoll = Epoll::new();
    let (own, peer) = own_and_peer();
    epoll.add(own.fd(), IN, 1);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| epoll.wait());
        epoll.until_asleep();
        send(peer.0, b"x").unwrap();
        assert_eq!(waiter.join().unwrap(), [(IN, 1)]);
    });
}

#[test]
fn many_round_trips_lose_no_wake_up() {
    let epoll = Epoll::new();
    let (own, peer) = own_and_peer();
    epoll.add(own.fd(), IN, 1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let theirs = Epoll::new();
            entry::set(peer.0.lifeline(), Entry::Connection(peer.0));
            theirs.add(peer.0.lifeline(), IN, 2);
            for round in 0..3000_u32 {
                if round % 500 == 499 {
                    // Long enough for the other side to fall asleep.
                    std::thread::sleep(Duration::from_millis(2));
                }
                send(peer.0, &round.to_ne_bytes()).unwrap();
                assert_eq!(theirs.wait(), [(IN, 2)]);
                assert_eq!(read_all(peer.0), 4);
            }
            entry::set(peer.0.lifeline(), Entry::None);
            forget(peer.0.lifeline(), peer.0);
        });
        for _ in 0..3000 {
            assert_eq!(epoll.wait(), [(IN, 1)]);
            assert_eq!(read_all(own.0.0), 4);
            send(own.0.0, b"pong").unwrap();
        }
    });
}

#[test]
fn edge_reports_once_for_each_arrival() {
    let epoll = Epoll::new();
    let (own, peer) = own_and_peer();
    epoll.add(own.fd(), IN | OUT | EDGE, 1);
    assert_eq!(epoll.now(), [(OUT, 1)]);
    assert_eq!(epoll.now(), []);
    send(peer.0, b"x").unwrap();
    assert_eq!(epoll.wait(), [(IN | OUT, 1)]);
    assert_eq!(epoll.now(), []);
    send(peer.0, b"y").unwrap();
    assert_eq!(epoll.now(), [(IN | OUT, 1)]);
    epoll.let_all_sleep();
    send(peer.0, b"z").unwrap();
    assert_eq!(epoll.now(), [(IN | OUT, 1)]);
    assert_eq!(epoll.now(), []);
    epoll.control(EPOLL_CTL_MOD, own.fd(), IN | EDGE, 2).unwrap();
    assert_eq!(epoll.now(), [(IN, 2)]);
    assert_eq!(epoll.now(), []);
}

#[test]
fn edge_reports_room_that_came_back() {
    let epoll = Epoll::new();
    let (own, peer) = own_and_peer();
    epoll.add(own.fd(), OUT | EDGE, 1);
    assert_eq!(epoll.now(), [(OUT, 1)]);
    fill(own.0.0);
    assert_eq!(epoll.now(), []);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| epoll.wait());
        epoll.until_asleep();
        read_all(peer.0);
        assert_eq!(waiter.join().unwrap(), [(OUT, 1)]);
    });
    assert_eq!(epoll.now(), []);
}

#[test]
fn level_reports_room_to_a_sleeper() {
    let epoll = Epoll::new();
    let (own, peer) = own_and_peer();
    fill(own.0.0);
    epoll.add(own.fd(), OUT, 1);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| epoll.wait());
        epoll.until_asleep();
        read_all(peer.0);
        assert_eq!(waiter.join().unwrap(), [(OUT, 1)]);
    });
    epoll.control(EPOLL_CTL_MOD, own.fd(), 0, 1).unwrap();
    assert_eq!(epoll.now(), []);
}

#[test]
fn one_shot_reports_once_until_it_is_changed() {
    let epoll = Epoll::new();
    let (own, peer) = own_and_peer();
    epoll.add(own.fd(), IN | ONESHOT, 1);
    send(peer.0, b"x").unwrap();
    assert_eq!(epoll.now(), [(IN, 1)]);
    send(peer.0, b"y").unwrap();
    epoll.let_all_sleep();
    epoll.control(EPOLL_CTL_MOD, own.fd(), IN | ONESHOT, 2).unwrap();
    assert_eq!(epoll.now(), [(IN, 2)]);
    epoll.let_all_sleep();
}

#[test]
fn a_switch_to_lanes_that_one_set_receives_is_passed_on_to_others() {
    let (input, output) = (Epoll::new(), Epoll::new());
    let (own, peer) = own_and_peer_on_lifeline();
    input.add(own.fd(), IN, 1);
    input.let_all_sleep();
    // The peer switches, and sends before anyone here can ask to be rung.
    peer.0.prepare_to_be_sent();
    send(peer.0, b"x").unwrap();
    output.add(own.fd(), OUT, 2);
    assert_eq!(output.now(), [(OUT, 2)]);
    assert!(!own.0.0.is_on_lifeline(), "the other set has received the message");
    assert_eq!(input.now(), [(IN, 1)]);
}

#[test]
fn a_peer_that_closes_is_reported_to_a_sleeper() {
    let epoll = Epoll::new();
    let (own, peer) = own_and_peer();
    epoll.add(own.fd(), IN | RDHUP, 1);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| epoll.wait());
        epoll.until_asleep();
        drop(peer);
        assert_eq!(waiter.join().unwrap(), [(IN | RDHUP, 1)]);
    });
    own.0.0.shutdown(crate::connection::SHUTDOWN_WRITE).unwrap();
    assert_eq!(epoll.wait(), [(IN | RDHUP | HUP, 1)]);
}

#[test]
fn a_connection_that_has_ended_keeps_no_sleeper_awake() {
    let _no_child = test_support::spawn::forbid();
    let epoll = Epoll::new();
    let (own, peer) = own_and_peer();
    epoll.add(own.fd(), 0, 1);
    drop(peer);
    for _ in 0..3 {
        epoll.let_all_sleep();
    }
    assert!(!epoll.set().with(|ready_list| is_readable(ready_list.inner_fd())));
}

#[test]
fn other_descriptors_keep_their_data_and_wake_a_set_with_lanes() {
    let epoll = Epoll::new();
    let (own, peer) = own_and_peer();
    let foreign = counter();
    epoll.add(foreign.as_raw_fd(), IN, 0xdead_beef_0000_0001);
    epoll.add(own.fd(), IN, 7);
    assert_eq!(epoll.now(), []);
    count_up(&foreign);
    assert_eq!(epoll.now(), [(IN, 0xdead_beef_0000_0001)]);
    std::thread::scope(|scope| {
        rustix::io::read(&foreign, &mut [0_u8; 8]).unwrap();
        let waiter = scope.spawn(|| epoll.wait());
        epoll.until_asleep();
        count_up(&foreign);
        assert_eq!(waiter.join().unwrap(), [(IN, 0xdead_beef_0000_0001)]);
    });
    send(peer.0, b"x").unwrap();
    let mut seen = [false; 2];
    while seen != [true; 2] {
        epoll.wait().iter().for_each(|&(_, data)| seen[usize::from(data == 7)] = true);
    }
}

#[test]
fn with_room_for_one_event_every_descriptor_is_reported_in_turn() {
    let epoll = Epoll::new();
    let pairs: Vec<_> = (0..5).map(|_| own_and_peer()).collect();
    let foreign = counter();
    count_up(&foreign);
    epoll.add(foreign.as_raw_fd(), IN, 5);
    for (index, (own, peer)) in pairs.iter().enumerate() {
        epoll.add(own.fd(), IN, index as u64);
        send(peer.0, b"x").unwrap();
    }
    let mut turns = [0; 6];
    while turns.contains(&0) {
        let found = epoll.wait_max(1, Some(HANG_NS)).unwrap();
        assert_eq!(found.len(), 1);
        turns[found[0].1 as usize] += 1;
        assert!(turns.iter().sum::<u32>() < 1_000_000, "{turns:?}");
    }
}

#[test]
fn a_ready_connection_added_during_a_sleep_wakes_the_thread() {
    let epoll = Epoll::new();
    let (idle, _idle_peer) = own_and_peer();
    let (own, peer) = own_and_peer();
    send(peer.0, b"x").unwrap();
    for has_lanes_before in [false, true] {
        if has_lanes_before {
            epoll.add(idle.fd(), IN, 9);
        }
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| epoll.wait());
            epoll.until_asleep();
            epoll.add(own.fd(), IN, 1);
            assert_eq!(waiter.join().unwrap(), [(IN, 1)]);
        });
        epoll.control(EPOLL_CTL_DEL, own.fd(), 0, 0).unwrap();
        assert_eq!(epoll.now(), []);
    }
    std::thread::scope(|scope| {
        epoll.add(own.fd(), 0, 1);
        let waiter = scope.spawn(|| epoll.wait());
        epoll.until_asleep();
        epoll.control(EPOLL_CTL_MOD, own.fd(), IN, 2).unwrap();
        assert_eq!(waiter.join().unwrap(), [(IN, 2)]);
    });
}

#[test]
fn a_thread_that_stays_asleep_is_woken_after_another_was_busy() {
    let epoll = Epoll::new();
    let (first, first_peer) = own_and_peer();
    let (second, second_peer) = own_and_peer();
    epoll.add(first.fd(), IN | EDGE, 1);
    epoll.add(second.fd(), IN | EDGE, 2);
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| epoll.wait());
        epoll.until_asleep();
        // One of the two threads gets this event; the other stays asleep, or is woken for the next one.
        let busy = scope.spawn(|| epoll.wait());
        send(first_peer.0, b"x").unwrap();
        while !sleeper.is_finished() && !busy.is_finished() {
            std::thread::yield_now();
        }
        send(second_peer.0, b"x").unwrap();
        let mut found = [sleeper.join().unwrap(), busy.join().unwrap()].concat();
        found.sort_by_key(|&(_, data)| data);
        assert_eq!(found, [(IN, 1), (IN, 2)]);
    });
}

#[test]
fn a_set_in_a_set_is_ready_when_it_holds_something() {
    let (outer, inner) = (Epoll::new(), Epoll::new());
    let (own, peer) = own_and_peer();
    let foreign = counter();
    inner.add(own.fd(), IN, 1);
    inner.add(foreign.as_raw_fd(), IN, 2);
    outer.add(inner.0, IN, 3);
    assert_eq!(outer.now(), []);
    send(peer.0, b"x").unwrap();
    assert_eq!(outer.now(), [(IN, 3)]);
    assert_eq!(inner.now(), [(IN, 1)]);
    read_all(own.0.0);
    assert_eq!(outer.now(), []);
    count_up(&foreign);
    assert_eq!(outer.now(), [(IN, 3)]);
    rustix::io::read(&foreign, &mut [0_u8; 8]).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| outer.wait());
        outer.until_asleep();
        send(peer.0, b"x").unwrap();
        assert_eq!(waiter.join().unwrap(), [(IN, 3)]);
    });
    read_all(own.0.0);
    outer.let_all_sleep();
}

#[test]
fn sets_nest_three_deep_and_wake_the_outermost_sleeper() {
    let (outer, middle, inner) = (Epoll::new(), Epoll::new(), Epoll::new());
    let (own, peer) = own_and_peer();
    inner.add(own.fd(), IN, 1);
    middle.add(inner.0, IN, 2);
    outer.add(middle.0, IN | ONESHOT, 3);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| outer.wait());
        outer.until_asleep();
        send(peer.0, b"x").unwrap();
        assert_eq!(waiter.join().unwrap(), [(IN, 3)]);
    });
    outer.let_all_sleep();
    assert_eq!(middle.now(), [(IN, 2)]);
    outer.control(EPOLL_CTL_MOD, middle.0, IN, 4).unwrap();
    assert_eq!(outer.now(), [(IN, 4)]);
    read_all(own.0.0);
    outer.let_all_sleep();
    assert!(!outer.set().with(|ready_list| ready_list.has_unwakeable));
}

#[test]
fn a_set_can_be_polled() {
    let inner = Epoll::new();
    let (own, peer) = own_and_peer();
    inner.add(own.fd(), IN, 1);
    let poll = |timeout_ns| {
        let mut entries = [libc::pollfd { fd: inner.0, events: libc::POLLIN, revents: 0 }];
        // SAFETY: a null mask is allowed.
        unsafe { poll_select::poll(&mut entries, timeout_ns, std::ptr::null()) }.map(|_| entries[0].revents)
    };
    assert_eq!(poll(Some(0)), Ok(0));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| poll(Some(HANG_NS)));
        inner.until_asleep();
        send(peer.0, b"x").unwrap();
        assert_eq!(waiter.join().unwrap(), Ok(libc::POLLIN));
    });
    assert_eq!(inner.now(), [(IN, 1)]);
}

#[test]
fn errors_are_the_kernels() {
    let epoll = Epoll::new();
    let (own, _peer) = own_and_peer();
    let fd = own.fd();
    assert_eq!(epoll.control(EPOLL_CTL_MOD, fd, IN, 1), Err(Errno::NOENT));
    assert_eq!(epoll.control(EPOLL_CTL_DEL, fd, IN, 1), Err(Errno::NOENT));
    epoll.add(fd, IN, 1);
    assert_eq!(epoll.control(EPOLL_CTL_ADD, fd, IN, 1), Err(Errno::EXIST));
    assert_eq!(epoll.control(99, fd, IN, 1), Err(Errno::INVAL));
    assert_eq!(epoll.control(EPOLL_CTL_ADD, epoll.0, IN, 1), Err(Errno::INVAL));
    assert_eq!(epoll.control(EPOLL_CTL_ADD, -1, IN, 1), Err(Errno::BADF));
    assert_eq!(epoll.control(EPOLL_CTL_MOD, fd, IN | EXCLUSIVE, 1), Err(Errno::INVAL));
    assert_eq!(Epoll::control(&std::mem::ManuallyDrop::new(Epoll(fd)), EPOLL_CTL_ADD, fd, IN, 1), Err(Errno::INVAL));
    assert_eq!(epoll.wait_max(0, Some(0)), Err(Errno::INVAL));
    // SAFETY: `event` is null, which is refused before it is read.
    assert_eq!(unsafe { control(epoll.0, EPOLL_CTL_MOD, fd, std::ptr::null_mut()) }, Err(Errno::FAULT));
    epoll.control(EPOLL_CTL_DEL, fd, 0, 0).unwrap();
    assert_eq!(epoll.control(EPOLL_CTL_ADD, fd, IN | ONESHOT | EXCLUSIVE, 1), Err(Errno::INVAL));
    epoll.add(fd, IN | EXCLUSIVE, 1);
}

#[test]
fn an_instance_made_elsewhere_becomes_a_set() {
    let epfd = kernel::create(libc::EPOLL_CLOEXEC).unwrap();
    let epoll = Epoll(epfd);
    let (own, peer) = own_and_peer();
    epoll.add(own.fd(), IN, 1);
    send(peer.0, b"x").unwrap();
    assert_eq!(epoll.wait(), [(IN, 1)]);
}

#[test]
fn a_signal_ends_a_wait_and_a_mask_lets_it_through() {
    extern "C" fn nothing(_: i32) {}
    let epoll = Epoll::new();
    let (own, _peer) = own_and_peer();
    epoll.add(own.fd(), IN, 1);
    // SAFETY: the handler does nothing; the structures are zeroed and writable; only this thread's mask changes.
    let (blocked, open) = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
        let (mut blocked, mut open): (libc::sigset_t, libc::sigset_t) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigemptyset(&raw mut open);
        libc::sigaddset(&raw mut blocked, libc::SIGUSR1);
        assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, &raw const blocked, std::ptr::null_mut()), 0);
        libc::pthread_kill(libc::pthread_self(), libc::SIGUSR1);
        (blocked, open)
    };
    let wait_under = |mask: *const libc::sigset_t| {
        let mut event = epoll_event { events: 0, u64: 0 };
        // SAFETY: one event is writable.
        unsafe { wait(epoll.0, &raw mut event, 1, Some(2_000_000), mask) }
    };
    assert_eq!(wait_under(&raw const blocked), Ok(0));
    assert_eq!(wait_under(&raw const open), Err(Errno::INTR));
    assert_eq!(wait_under(&raw const open), Ok(0));
}

#[test]
fn two_sets_that_hold_one_connection_are_both_woken_each_time() {
    let sets = [Epoll::new(), Epoll::new()];
    let (own, peer) = own_and_peer();
    sets.iter().for_each(|set| set.add(own.fd(), IN | EDGE, 1));
    for _ in 0..50 {
        std::thread::scope(|scope| {
            let waiters = sets.each_ref().map(|set| scope.spawn(|| set.wait()));
            sets.iter().for_each(Epoll::until_asleep);
            send(peer.0, b"x").unwrap();
            for waiter in waiters {
                assert_eq!(waiter.join().unwrap(), [(IN, 1)]);
            }
        });
    }
    assert_eq!(read_all(own.0.0), 50);
    sets.iter().for_each(Epoll::let_all_sleep);
}

#[test]
fn a_connection_shut_down_for_reading_still_reports_room() {
    let epoll = Epoll::new();
    let (own, peer) = own_and_peer();
    fill(own.0.0);
    epoll.add(own.fd(), OUT, 1);
    epoll.let_all_sleep();
    own.0.0.shutdown(crate::connection::SHUTDOWN_READ).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| epoll.wait());
        epoll.until_asleep();
        read_all(peer.0);
        let found = waiter.join().unwrap();
        assert_eq!(found[0].0 & OUT, OUT, "{found:?}");
    });
}
