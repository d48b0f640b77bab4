//! Every interleaving of threads at one connection, by the loom model checker, of the code in `waiters` itself. Each
//! fact stands beside what breaks it: there the checker must fail, or it would show nothing.
//!
//! loom knows no single order of all sequentially consistent accesses. A read-modify-write reads the latest value, so
//! here every load of a `Word` is one.

#![allow(unsafe_code)] // The checker's cells, which find whoever looks at memory while another writes.

#[path = "../src/connection/waiters.rs"]
mod waiters;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use std::process::Command;
use waiters::{BlockedCalls, Lifetime, Sleepers, Word};

/// How often the checker takes the processor from a thread that could go on, in one interleaving.
const PREEMPTIONS_MAX: usize = 3;

/// Naps in a row that come back at once.
const NAPS_MAX: u32 = 1;

#[derive(Default)]
struct Watched(AtomicU32);

impl Word for Watched {
    fn load(&self) -> u32 {
        self.0.fetch_add(0, Ordering::AcqRel)
    }

    fn store(&self, value: u32) {
        self.0.store(value, Ordering::Release);
    }

    fn add(&self, value: u32) -> u32 {
        self.0.fetch_add(value, Ordering::AcqRel)
    }

    fn swap(&self, value: u32) -> u32 {
        self.0.swap(value, Ordering::AcqRel)
    }
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS_MAX);
    builder.max_branches = 10_000;
    builder.check(model);
}

/// The model must come to `end`, which ends its process: loom cannot unwind from a deadlock.
#[track_caller]
fn must_fail(model: &str, flaw: Flaw, end: &str) {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "child_of_other_tests", "--nocapture"]);
    let output = child.env("CROSSLANE_TEST_MODEL", model).env("CROSSLANE_TEST_FLAW", format!("{flaw:?}")).output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains(end), "{model}, {flaw:?}: {said}");
}

type Model = fn(Flaw);

/// Run by the tests below in a process of its own, with a model and a flaw.
#[test]
fn child_of_other_tests() {
    let Ok(wanted) = std::env::var("CROSSLANE_TEST_MODEL") else { return };
    let flaw = std::env::var("CROSSLANE_TEST_FLAW").unwrap();
    let flaw = Flaw::ALL.into_iter().find(|known| format!("{known:?}") == flaw).unwrap();
    let models: [(&str, Model); 5] = [
        ("waiters_and_a_close", waiters_and_a_close),
        ("a_waiter_and_the_next_connection", a_waiter_and_the_next_connection),
        ("calls_and_a_close", calls_and_a_close),
        ("two_receivers", two_receivers),
        ("a_receiver_and_a_poller", a_receiver_and_a_poller),
    ];
    let model = models.into_iter().find(|(name, _)| *name == wanted).unwrap().1;
    check(move || model(flaw));
}

/// How threads at a connection differ from what they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// A waiter is counted after it was told that it may look.
    ArrivesLate,
    /// The last waiter of a closed connection does not care.
    LeavesQuietly,
    /// Whoever closes takes the memory away without asking.
    TakesUnasked,
    /// A close is left to calls that were there before it said so.
    TrustsEarlierCount,
    /// The peer is asked to ring for one who does not count as a sleeper yet.
    AsksUncounted,
    /// Whether there are others is asked before the lock is taken under which the ring is.
    LocksLate,
    /// A ring is taken though others sleep.
    TakesRingOfOthers,
}

impl Flaw {
    const ALL: [Self; 8] = [
        Self::None,
        Self::ArrivesLate,
        Self::LeavesQuietly,
        Self::TakesUnasked,
        Self::TrustsEarlierCount,
        Self::AsksUncounted,
        Self::LocksLate,
        Self::TakesRingOfOthers,
    ];
}

/// The memory of a connection: which one, or none. loom finds whoever looks while another writes.
struct MemorySource(UnsafeCell<Option<u32>>);

// SAFETY: loom checks the accesses.
unsafe impl Sync for MemorySource {}
// SAFETY: as above.
unsafe impl Send for MemorySource {}

struct Object {
    lifetime: Lifetime<Watched>,
    send_lock: Mutex<()>,
    receive_lock: Mutex<()>,
    memory: MemorySource,
    times_taken_back: AtomicU32,
}

impl Object {
    /// A connection of the first generation.
    fn new() -> Arc<Self> {
        let object = Self {
            lifetime: Lifetime::default(),
            send_lock: Mutex::new(()),
            receive_lock: Mutex::new(()),
            memory: MemorySource(UnsafeCell::new(None)),
            times_taken_back: AtomicU32::new(0),
        };
        object.open();
        Arc::new(object)
    }

    fn open(&self) {
        let _both = (self.send_lock.lock().unwrap(), self.receive_lock.lock().unwrap());
        self.lifetime.begin_generation();
        let generation = self.lifetime.generation();
        // SAFETY: loom checks it.
        self.memory.0.with_mut(|memory| unsafe { *memory = Some(generation) });
        self.lifetime.open();
    }

    /// As `Connection::wait_to_receive`, for one that works for the first generation.
    fn wait(&self, flaw: Flaw) {
        if flaw != Flaw::ArrivesLate {
            self.lifetime.add_waiter();
        }
        let may_access = {
            let _receive = self.receive_lock.lock().unwrap();
            self.lifetime.may_access(1)
        };
        if flaw == Flaw::ArrivesLate {
            self.lifetime.add_waiter();
        }
        if may_access {
            assert!(self.lifetime.has_waiters());
            // SAFETY: loom checks it.
            self.memory.0.with(|memory| assert_eq!(unsafe { *memory }, Some(1)));
        }
        if self.lifetime.remove_waiter() && flaw != Flaw::LeavesQuietly {
            self.recycle(flaw);
        }
    }

    /// As `Connection::finish_close`.
    fn close(&self, flaw: Flaw) {
        {
            let _both = (self.send_lock.lock().unwrap(), self.receive_lock.lock().unwrap());
            if !self.lifetime.close() {
                return;
            }
        }
        self.recycle(flaw);
    }

    /// As `Connection::recycle_if_unused`.
    fn recycle(&self, flaw: Flaw) -> bool {
        let _both = (self.send_lock.lock().unwrap(), self.receive_lock.lock().unwrap());
        if flaw != Flaw::TakesUnasked && !self.lifetime.try_reclaim() {
            return false;
        }
        // SAFETY: loom checks it.
        self.memory.0.with_mut(|memory| unsafe { *memory = None });
        self.times_taken_back.fetch_add(1, Ordering::Relaxed);
        true
    }
}

/// Two waiters, and a close meanwhile; afterwards the memory was taken away once.
fn waiters_and_a_close(flaw: Flaw) {
    let object = Object::new();
    let waiters = [(); 2].map(|()| {
        let object = Arc::clone(&object);
        thread::spawn(move || object.wait(flaw))
    });
    object.close(flaw);
    waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
    assert_eq!(object.times_taken_back.load(Ordering::Relaxed), 1);
}

#[test]
fn memory_stays_while_a_waiter_looks_and_goes_once() {
    check(|| waiters_and_a_close(Flaw::None));
    must_fail("waiters_and_a_close", Flaw::ArrivesLate, "panicked");
    must_fail("waiters_and_a_close", Flaw::LeavesQuietly, "panicked");
    must_fail("waiters_and_a_close", Flaw::TakesUnasked, "panicked");
}

/// The object is another connection when a waiter of the first comes late.
fn a_waiter_and_the_next_connection(flaw: Flaw) {
    let object = Object::new();
    let waiter = {
        let object = Arc::clone(&object);
        thread::spawn(move || object.wait(flaw))
    };
    object.close(flaw);
    if object.times_taken_back.load(Ordering::Relaxed) == 1 {
        object.open();
        object.close(flaw);
    }
    waiter.join().unwrap();
    assert!((1..=2).contains(&object.times_taken_back.load(Ordering::Relaxed)));
    assert!(!object.recycle(flaw), "once for each close");
}

#[test]
fn a_late_waiter_does_not_look_at_the_next_connection() {
    check(|| a_waiter_and_the_next_connection(Flaw::None));
    must_fail("a_waiter_and_the_next_connection", Flaw::ArrivesLate, "panicked");
}

#[test]
fn the_child_of_a_fork_waits_for_none_of_its_parents_threads() {
    check(|| {
        let (lifetime, sleepers) = (Lifetime::<Watched>::default(), Sleepers::<Watched>::default());
        lifetime.open();
        lifetime.add_waiter();
        sleepers.enter();
        assert!(sleepers.is_any());
        lifetime.forget_waiters();
        sleepers.forget();
        assert!(!sleepers.is_any());
        assert!(lifetime.close() && lifetime.try_reclaim());
    });
}

/// Two closes at once, as by two threads or a signal handler's leftover.
#[test]
fn a_connection_is_closed_once() {
    check(|| {
        let object = Object::new();
        let other = {
            let object = Arc::clone(&object);
            thread::spawn(move || object.close(Flaw::None))
        };
        object.close(Flaw::None);
        other.join().unwrap();
        assert_eq!(object.times_taken_back.load(Ordering::Relaxed), 1);
    });
}

/// Two calls that sleep, and a close meanwhile, which one of the three does.
fn calls_and_a_close(flaw: Flaw) {
    let calls = Arc::new(BlockedCalls::<Watched>::default());
    let times_closed = Arc::new(AtomicU32::new(0));
    let callers = [(); 2].map(|()| {
        let (calls, times_closed) = (Arc::clone(&calls), Arc::clone(&times_closed));
        thread::spawn(move || {
            calls.enter();
            if calls.leave() {
                times_closed.fetch_add(1, Ordering::Relaxed);
            }
        })
    });
    let is_left = if flaw == Flaw::TrustsEarlierCount {
        let is_left = calls.count() > 0;
        let _ = calls.defer_close();
        is_left
    } else {
        calls.count() > 0 && calls.defer_close()
    };
    if !is_left {
        times_closed.fetch_add(1, Ordering::Relaxed);
    }
    callers.into_iter().for_each(|caller| caller.join().unwrap());
    assert_eq!(times_closed.load(Ordering::Relaxed), 1);
    assert!(!calls.forget(), "nothing is left to do");
}

#[test]
fn a_close_is_done_once_by_who_ends_last() {
    check(|| calls_and_a_close(Flaw::None));
    must_fail("calls_and_a_close", Flaw::TrustsEarlierCount, "panicked");
}

/// A lifeline, and what comes by the lane beside it.
struct Line {
    sleepers: Sleepers<Watched>,
    /// Words that wait in the lane. Under the receive lock, as everything of the lane.
    lane: Mutex<Lane>,
    has_words: Condvar,
    rings: Mutex<u32>,
    ringing: Condvar,
}

#[derive(Default)]
struct Lane {
    words: u32,
    /// A sleeper has asked to be rung.
    is_asked: bool,
}

impl Line {
    fn new() -> Arc<Self> {
        let sleepers = Sleepers::default();
        let (lane, has_words) = (Mutex::new(Lane::default()), Condvar::new());
        Arc::new(Self { sleepers, lane, has_words, rings: Mutex::new(0), ringing: Condvar::new() })
    }

    /// The peer's send. Publishing and asking are the lane's own protocol, which has its own model.
    fn send(&self) {
        let rings = {
            let mut lane = self.lane.lock().unwrap();
            lane.words += 1;
            self.has_words.notify_all();
            std::mem::take(&mut lane.is_asked)
        };
        if rings {
            *self.rings.lock().unwrap() += 1;
            self.ringing.notify_all();
        }
    }

    /// A look; one that finds nothing asks to be rung, as announcing and looking once more does.
    fn take_or_ask(&self) -> bool {
        let mut lane = self.lane.lock().unwrap();
        let is_there = lane.words > 0;
        lane.words -= u32::from(is_there);
        lane.is_asked |= !is_there;
        is_there
    }

    /// In the kernel: until there is a ring, which stays.
    fn sleep_until_rung(&self) {
        let mut rings = self.rings.lock().unwrap();
        while *rings == 0 {
            rings = self.ringing.wait(rings).unwrap();
        }
    }

    /// A moment, after which the same thread looks again; where that has changed nothing, it is as well until there is
    /// something to find.
    fn nap(&self, naps: &mut u32) {
        *naps += 1;
        let mut lane = self.lane.lock().unwrap();
        while *naps > NAPS_MAX && lane.words == 0 {
            lane = self.has_words.wait(lane).unwrap();
        }
    }

    /// As `Connection::consume_ring_if`.
    fn consume_ring_if(&self, flaw: Flaw, is_alone: &dyn Fn() -> bool) {
        let was_alone = flaw == Flaw::LocksLate && is_alone();
        let _lock = self.lane.lock().unwrap();
        if flaw == Flaw::TakesRingOfOthers || was_alone || (flaw != Flaw::LocksLate && is_alone()) {
            *self.rings.lock().unwrap() = 0;
        }
    }

    /// As `Connection::receive` by a thread that waits.
    fn receive(&self, flaw: Flaw) {
        let mut naps = 0;
        loop {
            if flaw == Flaw::AsksUncounted && self.take_or_ask() {
                return;
            }
            self.sleepers.enter();
            if flaw != Flaw::AsksUncounted && self.take_or_ask() {
                return self.sleepers.leave();
            }
            let sleep = |is_alone| if is_alone { self.sleep_until_rung() } else { self.nap(&mut naps) };
            self.sleepers.sleep(|| true, sleep, |(), is_alone| self.consume_ring_if(flaw, is_alone));
            self.sleepers.leave();
        }
    }

    /// As `poll`, which relies on a ring always, leaves before it answers that, and enters again to take it.
    fn receive_by_poll(&self, flaw: Flaw) {
        let mut naps = 0;
        loop {
            self.sleepers.enter();
            if self.take_or_ask() {
                return self.sleepers.leave();
            }
            self.sleep_until_rung();
            self.sleepers.leave();
            self.sleepers.enter();
            self.consume_ring_if(flaw, &|| self.sleepers.is_one());
            self.sleepers.leave();
            // A ring that stays is left out of the next sleep for a moment.
            self.nap(&mut naps);
        }
    }
}

/// A thread that receives a word by `receive` and one that receives two by `other`; a ring that is lost leaves one
/// asleep, which loom calls a deadlock.
fn receiver_and(flaw: Flaw, other: fn(&Line, Flaw)) {
    let line = Line::new();
    let other = {
        let line = Arc::clone(&line);
        thread::spawn(move || (0..2).for_each(|_| other(&line, flaw)))
    };
    let peer = {
        let line = Arc::clone(&line);
        thread::spawn(move || (0..3).for_each(|_| line.send()))
    };
    line.receive(flaw);
    other.join().unwrap();
    peer.join().unwrap();
}

fn two_receivers(flaw: Flaw) {
    receiver_and(flaw, Line::receive);
}

fn a_receiver_and_a_poller(flaw: Flaw) {
    receiver_and(flaw, Line::receive_by_poll);
}

#[test]
fn no_receiver_takes_a_ring_that_another_relies_on() {
    check(|| two_receivers(Flaw::None));
    must_fail("two_receivers", Flaw::AsksUncounted, "deadlock");
    must_fail("two_receivers", Flaw::LocksLate, "deadlock");
    must_fail("two_receivers", Flaw::TakesRingOfOthers, "deadlock");
}

#[test]
fn no_receiver_and_no_poller_takes_a_ring_that_the_other_relies_on() {
    check(|| a_receiver_and_a_poller(Flaw::None));
    must_fail("a_receiver_and_a_poller", Flaw::LocksLate, "deadlock");
    must_fail("a_receiver_and_a_poller", Flaw::TakesRingOfOthers, "deadlock");
}
