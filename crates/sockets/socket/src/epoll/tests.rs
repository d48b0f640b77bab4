//! Facts about sets. Both ends of every connection are in this process; time-outs only keep a failure from hanging.

use super::ready_time::ReadyTime;
use super::*;
use crate::connection::tests::{OpenEndpoint, lifeline_pair, pair, receive, send};
use crate::entry::{self, Entry};
use crate::poll_select;
use ready_list::{HOT_BEGIN, HeldRecords};
use rustix::event::{EventfdFlags, eventfd};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

/// What a test does in the middle of a scan.
type Work = Box<dyn FnOnce()>;

thread_local! {
    static POLLS: Cell<u64> = const { Cell::new(0) };
    static HAS_SLEPT: Cell<bool> = const { Cell::new(false) };
    static STAMPS: RefCell<BTreeMap<RawFd, u64>> = const { RefCell::new(BTreeMap::new()) };
    static WHILE_PARKING: Cell<Option<Work>> = const { Cell::new(None) };
    static BEFORE_POLL: Cell<Option<(u64, Work)>> = const { Cell::new(None) };
}

/// A registration is about to be polled by this thread.
pub(super) fn note_poll() {
    POLLS.set(POLLS.get() + 1);
    match BEFORE_POLL.take() {
        Some((0, work)) => work(),
        Some((count, work)) => BEFORE_POLL.set(Some((count - 1, work))),
        None => {}
    }
}

/// This thread has slept on a set.
pub(super) fn note_sleep() {
    HAS_SLEPT.set(true);
}

/// What a test says the stamp of the first unread record is.
pub(super) fn made_up_stamp(fd: RawFd) -> Option<u64> {
    STAMPS.with_borrow(|stamps| stamps.get(&fd).copied())
}

/// A connection is about to be parked to make room for another.
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

/// One end that a program has a descriptor of.
struct ProgramEndpoint(OpenEndpoint);

impl ProgramEndpoint {
    fn fd(&self) -> RawFd {
        self.0.0.lifeline()
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

/// As [`own_and_peer`], on their lifeline.
fn young_own_and_peer() -> (ProgramEndpoint, OpenEndpoint) {
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
        // SAFETY: a readable event.
        unsafe { control(self.0, operation, fd, &raw mut event) }
    }

    fn add(&self, fd: RawFd, events: u32, data: u64) {
        self.control(EPOLL_CTL_ADD, fd, events, data).unwrap();
    }

    /// Events and data, sorted by data.
    fn wait_max(&self, max: usize, timeout_ns: Option<u64>) -> Result<Vec<(u32, u64)>, Errno> {
        let mut found = self.wait_in_order(max, timeout_ns)?;
        found.sort_by_key(|&(_, data)| data);
        Ok(found)
    }

    /// Events and data.
    fn wait_in_order(&self, max: usize, timeout_ns: Option<u64>) -> Result<Vec<(u32, u64)>, Errno> {
        let mut events = vec![epoll_event { events: 0, u64: 0 }; max];
        // SAFETY: the array is writable.
        let count = unsafe { wait(self.0, events.as_mut_ptr(), max as i32, timeout_ns, std::ptr::null()) }?;
        Ok(events[..count].iter().map(|event| (event.events, event.u64)).collect())
    }

    /// The data of what is ready now, `max` at most, in the order of the reports.
    fn order(&self, max: usize) -> Vec<u64> {
        self.wait_in_order(max, Some(0)).unwrap().iter().map(|&(_, data)| data).collect()
    }

    /// Registers one connection after the other, under its place as data.
    fn add_all(&self, pairs: &[(ProgramEndpoint, OpenEndpoint)], events: u32) {
        pairs.iter().enumerate().for_each(|(index, (own, _))| self.add(own.fd(), events, index as u64));
    }

    /// What is ready now.
    fn now(&self) -> Vec<(u32, u64)> {
        self.wait_max(16, Some(0)).unwrap()
    }

    /// What comes.
    fn wait(&self) -> Vec<(u32, u64)> {
        self.wait_max(16, Some(HANG_NS)).unwrap()
    }

    /// Lets waits time out until one has slept, so that every connection is parked. On a busy machine the time may be
    /// up before.
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
        // SAFETY: made by `create`, closed once.
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

/// How many polls of this thread `work` makes.
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

/// Sends a byte that arrives so much after `base`, by its stamp.
fn send_at((own, peer): &(ProgramEndpoint, OpenEndpoint), base: u64, units: u64) {
    set_stamp(own.fd(), base + units);
    send(peer.0, b"x").unwrap();
}

fn set_stamp(fd: RawFd, stamp: u64) {
    STAMPS.with_borrow_mut(|stamps| stamps.insert(fd, stamp));
}

/// The clock of stamps: later than what has been registered so far.
fn stamps_now() -> u64 {
    ReadyTime::now().units() + 1
}

/// Sends until there is no room.
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
fn a_sleeper_is_rung_for_data() {
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
fn a_peer_that_goes_is_reported_to_a_sleeper() {
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
fn foreign_descriptors_keep_their_data_and_wake_beside_lanes() {
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
fn with_room_for_one_event_everybody_gets_a_turn() {
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
fn idle_connections_are_not_looked_at() {
    let epoll = Epoll::new();
    let pairs: Vec<_> = (0..300).map(|_| own_and_peer()).collect();
    for (index, (own, _)) in pairs.iter().enumerate() {
        epoll.add(own.fd(), IN, index as u64);
    }
    epoll.let_all_sleep();
    assert_eq!(epoll.set().with(|ready_list| ready_list.hot_count()), 0);
    send(pairs[123].1.0, b"x").unwrap();
    assert_eq!(epoll.wait(), [(IN, 123)]);
    assert_eq!(epoll.set().with(|ready_list| ready_list.hot_count()), 1);
    for index in [7, 8, 299] {
        send(pairs[index].1.0, b"x").unwrap();
    }
    read_all(pairs[123].0.0.0);
    assert_eq!(epoll.now(), [(IN, 7), (IN, 8), (IN, 299)]);
}

#[test]
fn a_busy_connection_has_many_idle_ones_parked() {
    let epoll = Epoll::new();
    let pairs: Vec<_> = (0..100).map(|_| own_and_peer()).collect();
    for (index, (own, _)) in pairs.iter().enumerate() {
        epoll.add(own.fd(), IN, index as u64);
    }
    send(pairs[0].1.0, b"x").unwrap();
    for _ in 0..5000 {
        assert_eq!(epoll.wait(), [(IN, 0)]);
    }
    assert!(epoll.set().with(|ready_list| ready_list.hot_count()) < 80);
    send(pairs[1].1.0, b"x").unwrap();
    send(pairs[99].1.0, b"x").unwrap();
    read_all(pairs[0].0.0.0);
    let mut seen = std::collections::BTreeSet::new();
    while seen.len() < 2 {
        seen.extend(epoll.wait().into_iter().map(|(_, data)| data));
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [1, 99]);
}

#[test]
fn a_wait_polls_the_same_number_however_many_idle_connections_are_fresh() {
    let epoll = Epoll::new();
    let pairs = pairs_of(4 * HOT_BEGIN);
    let hot = || epoll.set().with(|ready_list| ready_list.hot_count());
    for (index, (own, _)) in pairs.iter().enumerate() {
        let polls = polls_of(|| epoll.add(own.fd(), IN, index as u64));
        assert!(polls <= 2, "{polls} polls to add number {index}");
        assert_eq!(hot(), HOT_BEGIN.min(index + 1));
    }
    let last = pairs.len() - 1;
    let (busy, peer) = &pairs[last];
    for round in 0..600 {
        send(peer.0, b"x").unwrap();
        let polls = polls_of(|| assert_eq!(epoll.wait(), [(IN, last as u64)]));
        assert!(polls <= 2 * HOT_BEGIN as u64, "{polls}");
        assert_eq!(read_all(busy.0.0), 1);
        assert!(round > 0 || hot() == HOT_BEGIN, "no wait slept");
    }
    assert!(hot() < 10, "idle for long");
}

#[test]
fn connections_that_are_busy_at_once_are_all_polled() {
    let epoll = Epoll::new();
    let pairs = pairs_of(2 * HOT_BEGIN);
    epoll.add_all(&pairs, IN);
    for _ in 0..6 {
        pairs.iter().for_each(|(_, peer)| send_one(peer.0));
        let mut left = pairs.len();
        while left > 0 {
            for (_, index) in epoll.wait_max(512, Some(HANG_NS)).unwrap() {
                left -= read_all(pairs[index as usize].0.0.0);
            }
        }
        assert_eq!(epoll.now(), []);
    }
    assert_eq!(epoll.set().with(|ready_list| ready_list.hot_count()), pairs.len());
}

#[test]
fn what_arrives_while_its_connection_makes_room_is_not_lost() {
    let epoll = Epoll::new();
    let pairs = pairs_of(HOT_BEGIN + 1);
    let peer = pairs[0].1.0;
    WHILE_PARKING.set(Some(Box::new(move || send_one(peer))));
    epoll.add_all(&pairs, IN);
    assert!(WHILE_PARKING.take().is_none(), "one was parked");
    for _ in 0..2 {
        assert_eq!(epoll.wait(), [(IN, 0)]);
    }
    read_all(pairs[0].0.0.0);
    epoll.let_all_sleep();
    send(peer, b"x").unwrap();
    assert_eq!(epoll.wait(), [(IN, 0)]);
}

#[test]
fn what_arrived_first_is_reported_first() {
    let epoll = Epoll::new();
    let pairs = pairs_of(3);
    epoll.add_all(&pairs, IN);
    let base = stamps_now();
    for (pair, units) in pairs.iter().zip([30, 10, 20]) {
        send_at(pair, base, units);
    }
    assert_eq!(epoll.order(16), [1, 2, 0]);
}

#[test]
fn senders_stamp_what_they_send() {
    let epoll = Epoll::new();
    let pairs = pairs_of(5);
    epoll.add_all(&pairs, IN);
    for order in [[2, 0, 1, 4, 3], [4, 3, 2, 1, 0]] {
        order.iter().for_each(|&index| send_one(pairs[index as usize].1.0));
        assert_eq!(epoll.order(16), order);
        pairs.iter().for_each(|(own, _)| assert_eq!(read_all(own.0.0), 1));
    }
}

#[test]
fn what_was_reported_goes_behind_what_became_ready_meanwhile() {
    let epoll = Epoll::new();
    let pairs = pairs_of(4);
    epoll.add_all(&pairs, IN);
    let base = stamps_now();
    for (pair, units) in pairs.iter().zip([30, 10, 20]) {
        send_at(pair, base, units);
    }
    let take = |count: usize| (0..count).flat_map(|_| epoll.order(1)).collect::<Vec<_>>();
    assert_eq!(take(7), [1, 2, 0, 1, 2, 0, 1]);
    send_at(&pairs[3], stamps_now(), 0);
    assert_eq!(take(7), [2, 0, 1, 3, 2, 0, 1]);
    // What was read and is ready anew keeps its place in the list, if it is there.
    assert_eq!(read_all(pairs[3].0.0.0), 1);
    send_at(&pairs[3], stamps_now(), 0);
    assert_eq!(take(5), [3, 2, 0, 1, 3]);
    assert_eq!(read_all(pairs[3].0.0.0), 1);
    assert_eq!(take(1), [2]);
    send_at(&pairs[3], stamps_now(), 0);
    assert_eq!(take(4), [0, 1, 2, 3], "else it joins anew");
}

#[test]
fn what_was_stored_before_a_find_is_found_too() {
    let epoll = Epoll::new();
    let pairs = pairs_of(2);
    epoll.add_all(&pairs, IN);
    let base = stamps_now();
    let (before, after) = ((pairs[1].0.fd(), pairs[1].1.0), (pairs[0].0.fd(), pairs[0].1.0));
    // Between the poll of the one that was added last, and that of the other.
    BEFORE_POLL.set(Some((
        1,
        Box::new(move || {
            for ((fd, peer), units) in [(before, 10), (after, 20)] {
                set_stamp(fd, base + units);
                send(peer, b"x").unwrap();
            }
        }),
    )));
    assert_eq!(epoll.order(16), [1, 0]);
}

#[test]
fn what_arrives_during_a_scan_keeps_its_order() {
    let epoll = Epoll::new();
    let pairs = pairs_of(4);
    epoll.add_all(&pairs, IN);
    send_one(pairs[3].1.0);
    let peers = [1, 2, 0].map(|index: usize| pairs[index].1.0);
    // After the poll of the one that was added last, which is ready.
    BEFORE_POLL.set(Some((1, Box::new(move || peers.into_iter().for_each(send_one)))));
    assert_eq!(epoll.order(16), [3, 1, 2, 0]);
}

#[test]
fn what_is_in_the_list_keeps_its_place_when_more_arrives() {
    let epoll = Epoll::new();
    let pairs = pairs_of(3);
    epoll.add_all(&pairs, IN);
    let base = stamps_now();
    pairs.iter().zip([10, 20, 30]).for_each(|(pair, units)| send_at(pair, base, units));
    assert_eq!(epoll.order(1), [0]);
    // As if another thread had read it.
    assert_eq!(read_all(pairs[1].0.0.0), 1);
    send_at(&pairs[1], base, 40);
    assert_eq!(epoll.order(2), [1, 2]);
}

#[test]
fn what_is_newer_than_all_finds_is_left_to_the_next_wait() {
    let epoll = Epoll::new();
    let pairs = pairs_of(2);
    epoll.add_all(&pairs, IN);
    let base = stamps_now();
    send_at(&pairs[0], base, 10);
    let (fd, peer) = (pairs[1].0.fd(), pairs[1].1.0);
    BEFORE_POLL.set(Some((
        1,
        Box::new(move || {
            set_stamp(fd, base + 20);
            send(peer, b"x").unwrap();
        }),
    )));
    assert_eq!(epoll.order(16), [0], "something else may have come before the newer one");
    assert_eq!(read_all(pairs[0].0.0.0), 1);
    assert_eq!(epoll.order(16), [1]);
}

#[test]
fn a_parked_connection_that_rang_is_reported_before_what_came_after() {
    let epoll = Epoll::new();
    let pairs = pairs_of(2);
    epoll.add_all(&pairs, IN);
    for _ in 0..50 {
        epoll.let_all_sleep();
        send_at(&pairs[0], stamps_now(), 0);
        assert_eq!(epoll.wait(), [(IN, 0)]);
        assert_eq!(read_all(pairs[0].0.0.0), 1);
        // One is hot, the other is not.
        let base = stamps_now();
        send_at(&pairs[1], base, 1);
        send_at(&pairs[0], base, 2);
        assert_eq!(epoll.order(16), [1, 0]);
        pairs.iter().for_each(|(own, _)| assert_eq!(read_all(own.0.0), 1));
    }
}

#[test]
fn more_ready_connections_than_may_be_hot_are_reported_in_order_and_in_turn() {
    let epoll = Epoll::new();
    let pairs = pairs_of(3 * HOT_BEGIN);
    epoll.add_all(&pairs, IN);
    let base = stamps_now();
    let count = pairs.len() as u64;
    // The last comes first.
    pairs.iter().enumerate().for_each(|(index, pair)| send_at(pair, base, count - index as u64));
    let all: Vec<u64> = (0..count).rev().collect();
    for round in 0..3 {
        let mut reported = Vec::new();
        while reported.len() < pairs.len() {
            let polls = polls_of(|| reported.extend(epoll.order(8)));
            // At first, what rang is collected.
            assert!(round == 0 || polls <= 3 * HOT_BEGIN as u64, "{polls}");
        }
        assert_eq!(reported, all, "round {round}");
    }
}

#[test]
fn what_the_kernel_reports_after_a_sleep_keeps_its_place_among_lanes() {
    let epoll = Epoll::new();
    let lanes = pairs_of(2);
    epoll.add_all(&lanes, IN);
    let young = [(); 2].map(|()| young_own_and_peer());
    (2..).zip(&young).for_each(|(data, (own, _))| epoll.add(own.fd(), IN, data));
    epoll.let_all_sleep();
    for order in [[0, 2, 1, 3], [2, 0, 3, 1], [3, 2, 1, 0]] {
        epoll.set().with(|ready_list| {
            ready_list.asleep_since = Some(ReadyTime::now());
            assert!(ready_list.park_all(&mut Vec::new(), HeldRecords::Kept));
        });
        for data in order {
            match lanes.get(data as usize) {
                Some((_, peer)) => send_one(peer.0),
                None => send_one(young[data as usize - 2].1.0),
            }
        }
        // The sleeper is late.
        std::thread::sleep(Duration::from_millis(1));
        epoll.set().with(ReadyList::collect_events);
        assert_eq!(epoll.order(16), order);
        lanes.iter().chain(&young).for_each(|(own, _)| assert_eq!(read_all(own.0.0), 1));
        epoll.let_all_sleep();
    }
}

#[test]
fn a_call_that_takes_the_switch_to_lanes_out_does_not_hide_what_came_behind_it() {
    let _no_child = test_support::spawn::forbid();
    let calls: [fn(&'static Connection); 4] = [
        |connection| assert_ne!(connection.readiness_for_all(libc::POLLIN), 0),
        |connection| assert_eq!(connection.take_error(), 0),
        |connection| assert_eq!(connection.tcp_state(), crate::options::TcpState::Established),
        |connection| assert_eq!(receive(connection, &mut [0; 10]), Ok(10)),
    ];
    for call in calls {
        let epoll = Epoll::new();
        let (own, peer) = young_own_and_peer();
        epoll.add(own.fd(), IN, 1);
        epoll.let_all_sleep();
        peer.0.prepare_to_be_sent();
        assert_eq!(send(peer.0, &[7; 100]), Ok(100));
        call(own.0.0);
        assert_eq!(epoll.wait(), [(IN, 1)]);
        assert!(read_all(own.0.0) >= 90);
        epoll.let_all_sleep();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| epoll.wait());
            epoll.until_asleep();
            send_one(peer.0);
            assert_eq!(waiter.join().unwrap(), [(IN, 1)]);
        });
    }
}

#[test]
fn an_edge_is_not_mistaken_for_the_message_before_it() {
    let _no_child = test_support::spawn::forbid();
    let edges: [fn(&OpenEndpoint); 2] =
        [|peer| peer.0.shutdown(crate::connection::SHUTDOWN_WRITE).unwrap(), |peer| send_one(peer.0)];
    for edge in edges {
        let epoll = Epoll::new();
        let (own, peer) = young_own_and_peer();
        epoll.add(own.fd(), IN | EDGE, 1);
        epoll.let_all_sleep();
        send_one(peer.0);
        peer.0.prepare_to_be_sent();
        assert_eq!(epoll.wait(), [(IN, 1)]);
        assert_eq!(read_all(own.0.0), 1);
        edge(&peer);
        assert_eq!(epoll.wait().len(), 1);
    }
}

#[test]
fn what_waits_for_its_turn_can_be_changed_read_and_taken_out() {
    let epoll = Epoll::new();
    let pairs = pairs_of(3 * HOT_BEGIN);
    epoll.add_all(&pairs, IN);
    let base = stamps_now();
    pairs.iter().enumerate().for_each(|(index, pair)| send_at(pair, base, index as u64));
    assert_eq!(epoll.order(2), [0, 1]);
    epoll.control(EPOLL_CTL_DEL, pairs[2].0.fd(), 0, 0).unwrap();
    epoll.control(EPOLL_CTL_MOD, pairs[3].0.fd(), IN | ONESHOT, 1003).unwrap();
    read_all(pairs[4].0.0.0);
    epoll.control(EPOLL_CTL_MOD, pairs[5].0.fd(), IN | EDGE, 1005).unwrap();
    assert_eq!(epoll.order(3), [1003, 1005, 6]);
    let count = pairs.len() as u64;
    for _ in 0..2 {
        assert_eq!(epoll.order(512), (7..count).chain([0, 1, 6]).collect::<Vec<_>>());
    }
    for (own, _) in &pairs {
        read_all(own.0.0);
    }
    epoll.let_all_sleep();
    send(pairs[5].1.0, b"x").unwrap();
    assert_eq!(epoll.order(512), [1005]);
}

#[test]
fn connections_whose_peers_are_gone_are_polled_a_few_at_a_time() {
    let _no_child = test_support::spawn::forbid();
    let epoll = Epoll::new();
    let (owns, peers): (Vec<_>, Vec<_>) = pairs_of(100).into_iter().unzip();
    owns.iter().enumerate().for_each(|(index, own)| epoll.add(own.fd(), IN | EDGE, index as u64));
    drop(peers);
    let mut seen = std::collections::BTreeSet::new();
    while seen.len() < owns.len() {
        seen.extend(epoll.wait().into_iter().map(|(_, data)| data));
    }
    epoll.let_all_sleep();
    let polls = polls_of(|| assert_eq!(epoll.now(), []));
    assert!(polls < 20, "{polls}");
    owns[77].0.0.shutdown(crate::connection::SHUTDOWN_WRITE).unwrap();
    let found = (0..owns.len()).find_map(|_| epoll.now().first().copied());
    assert_eq!(found, Some((IN | HUP, 77)));
}

#[test]
fn what_is_added_while_a_thread_sleeps_wakes_it() {
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
        // One of the two threads gets this; the other stays asleep, or is woken for the next.
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
        // SAFETY: no mask.
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
    // SAFETY: no event is read for a call that fails before.
    assert_eq!(unsafe { control(epoll.0, EPOLL_CTL_MOD, fd, std::ptr::null_mut()) }, Err(Errno::FAULT));
    epoll.control(EPOLL_CTL_DEL, fd, 0, 0).unwrap();
    assert_eq!(epoll.control(EPOLL_CTL_ADD, fd, IN | ONESHOT | EXCLUSIVE, 1), Err(Errno::INVAL));
    epoll.add(fd, IN | EXCLUSIVE, 1);
}

#[test]
fn a_closed_descriptor_leaves_the_set() {
    let epoll = Epoll::new();
    let (own, peer) = own_and_peer();
    epoll.add(own.fd(), IN, 1);
    send(peer.0, b"x").unwrap();
    drop(own);
    assert_eq!(epoll.now(), []);
    assert_eq!(epoll.set().with(|ready_list| ready_list.count()), 0);
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

#[test]
fn a_plain_socket_that_becomes_a_connection_stays_in_the_set() {
    let epoll = Epoll::new();
    let (own, peer) = own_and_peer();
    // As if `connect` had put the lifeline in the place of a socket that is in the set.
    epoll.set().with(|ready_list| ready_list.insert(Registration::new(own.fd(), Target::Stream, IN | OUT, 5)));
    REGISTERED.fetch_add(1, Ordering::Relaxed);
    adopt(own.fd(), own.0.0);
    assert_eq!(epoll.now(), [(OUT, 5)]);
    send(peer.0, b"x").unwrap();
    assert_eq!(epoll.now(), [(IN | OUT, 5)]);
}

#[test]
fn closing_the_set_lets_go_of_its_connections() {
    let (own, peer) = own_and_peer();
    for _ in 0..3 {
        let epoll = Epoll::new();
        epoll.add(own.fd(), IN, 1);
        epoll.let_all_sleep();
        let second = rustix::io::dup(unsafe_borrow(epoll.0)).unwrap();
        epoll.set().add_descriptor(second.as_raw_fd());
        entry::set(second.as_raw_fd(), Entry::EpollSet(epoll.set()));
        send(peer.0, b"x").unwrap();
        let same = std::mem::ManuallyDrop::new(Epoll(second.as_raw_fd()));
        assert_eq!(same.now(), [(IN, 1)]);
        assert_eq!(read_all(own.0.0), 1);
        epoll.let_all_sleep();
        epoll.set().remove_descriptor(second.as_raw_fd());
        entry::set(second.as_raw_fd(), Entry::None);
    }
    assert!(own.0.0.consume_ring());
}

fn unsafe_borrow(fd: RawFd) -> std::os::fd::BorrowedFd<'static> {
    // SAFETY: the test keeps the descriptor open.
    unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) }
}

/// A second descriptor of a connection.
fn duplicate_of(own: &ProgramEndpoint) -> RawFd {
    // SAFETY: an open descriptor.
    let copy = rustix::io::dup(unsafe { std::os::fd::BorrowedFd::borrow_raw(own.fd()) }).unwrap();
    let copy = std::os::fd::IntoRawFd::into_raw_fd(copy);
    own.0.0.add_descriptor(copy);
    entry::set(copy, Entry::Connection(own.0.0));
    copy
}

/// As the program's `close` does.
fn close_one(fd: RawFd, connection: &'static Connection) {
    entry::set(fd, Entry::None);
    forget(fd, connection);
    connection.remove_descriptor(fd);
    // SAFETY: the test's descriptor.
    unsafe { rustix::io::close(fd) };
}

#[test]
fn a_registration_outlives_its_descriptor_while_another_names_the_connection() {
    let epoll = Epoll::new();
    let (own, peer) = own_and_peer();
    let copy = duplicate_of(&own);
    epoll.add(copy, IN, 1);
    epoll.let_all_sleep();
    close_one(copy, own.0.0);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| epoll.wait());
        epoll.until_asleep();
        assert!(!epoll.set().with(|ready_list| ready_list.has_unwakeable));
        send(peer.0, b"x").unwrap();
        assert_eq!(waiter.join().unwrap(), [(IN, 1)]);
    });
    // What is left takes a number of its own in the set: the orphan cannot be rung for, and is found all the same.
    epoll.add(own.fd(), IN, 2);
    assert_eq!(epoll.now(), [(IN, 1), (IN, 2)]);
    assert_eq!(read_all(own.0.0), 1);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| epoll.wait());
        epoll.until_asleep();
        send(peer.0, b"y").unwrap();
        assert!(!waiter.join().unwrap().is_empty());
    });
    // The end of a nap may have found the orphan before the ring for the other came: as long as there is something to
    // report, the kernel is asked for rings now and then only.
    let began = std::time::Instant::now();
    while epoll.now() != [(IN, 1), (IN, 2)] {
        assert!(began.elapsed().as_nanos() < u128::from(HANG_NS), "{:?}", epoll.now());
    }
    let set = epoll.set();
    drop(own);
    assert_eq!(set.with(|ready_list| ready_list.count()), 0);
}

#[test]
fn a_number_that_returns_to_its_connection_finds_its_registration() {
    let epoll = Epoll::new();
    let (own, peer) = own_and_peer();
    let copy = duplicate_of(&own);
    epoll.add(copy, IN, 1);
    close_one(copy, own.0.0);
    assert_eq!(epoll.control(EPOLL_CTL_MOD, own.fd(), IN, 2), Err(Errno::NOENT));
    // Another thread may take the number in between.
    let again = duplicate_of(&own);
    if again == copy {
        assert_eq!(epoll.control(EPOLL_CTL_ADD, again, IN, 2), Err(Errno::EXIST));
        epoll.control(EPOLL_CTL_MOD, again, IN, 3).unwrap();
        send(peer.0, b"x").unwrap();
        assert_eq!(epoll.wait(), [(IN, 3)]);
        epoll.control(EPOLL_CTL_DEL, again, 0, 0).unwrap();
    }
    close_one(again, own.0.0);
}

#[test]
fn a_wait_that_lanes_came_into_has_the_time_that_was_left() {
    let call = |timeout_ns| Call { epfd: -1, events: std::ptr::null_mut(), max: 1, timeout_ns, mask: std::ptr::null() };
    assert_eq!(call(Some(5_000_000)).after(1_900_000).timeout_ns, Some(4_000_000), "in whole milliseconds, as asked");
    assert_eq!(call(Some(5_000_001)).after(1_900_000).timeout_ns, Some(3_100_001));
    assert_eq!(call(Some(5_000_000)).after(9_000_000).timeout_ns, Some(0));
    assert_eq!(call(None).after(9_000_000).timeout_ns, None);
}

#[test]
fn a_process_that_inherits_a_set_registers_under_other_tokens() {
    let epoll = Epoll::new();
    let (kept, _peer) = own_and_peer();
    epoll.add(kept.fd(), IN, 1);
    let (first, _first_peer) = own_and_peer();
    let (second, _second_peer) = own_and_peer();
    let tokens = || {
        [&first, &second].map(|own| {
            epoll.add(own.fd(), IN, 2);
            epoll.set().with(|ready_list| ready_list.token(ready_list.find(own.fd()).unwrap()))
        })
    };
    let leave = || [&first, &second].map(|own| epoll.control(EPOLL_CTL_DEL, own.fd(), 0, 0).unwrap());
    epoll.add(first.fd(), IN, 2);
    epoll.control(EPOLL_CTL_DEL, first.fd(), 0, 0).unwrap();
    let before = tokens();
    leave();
    epoll.set().with(ReadyList::after_fork_in_child);
    let after = tokens();
    assert!(before.iter().all(|token| !after.contains(token)), "{before:x?} {after:x?}");
    leave();
}

/// Whoever is inside may wait for what the handler's thread holds.
#[test]
fn what_a_handler_closes_whose_thread_holds_a_socket_is_left_to_who_is_inside_the_set() {
    let (own, _peer) = own_and_peer();
    let epoll = Epoll::new();
    epoll.add(own.fd(), IN, 1);
    let Entry::EpollSet(set) = entry::get(epoll.0) else { panic!("no set") };
    let ((inside, is_inside), (go_on, goes_on)) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
    let waiting = std::thread::spawn(move || {
        set.with(|_| {
            inside.send(()).unwrap();
            goes_on.recv_timeout(Duration::from_nanos(HANG_NS)).unwrap();
        });
    });
    is_inside.recv().unwrap();
    let registered = entry::get(own.fd());
    listener::inside_a_listener(|| {
        entry::set(own.fd(), Entry::None);
        forget(own.fd(), own.0.0);
    });
    go_on.send(()).unwrap();
    waiting.join().unwrap();
    entry::set(own.fd(), registered);
    assert_eq!(epoll.control(EPOLL_CTL_MOD, own.fd(), IN, 1), Err(Errno::NOENT));
}
