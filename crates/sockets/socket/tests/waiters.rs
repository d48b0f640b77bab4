//! Model checks of `connection::waiters`: loom runs every interleaving of threads at one connection. Each property has
//! tests with flaws that break it: there the checker must fail, otherwise the property would not be checked.
//!
//! loom does not model a single order of all sequentially consistent accesses. A read-modify-write reads the latest
//! value, so every load of a `Word` is one here.

#![allow(unsafe_code)] // loom's cells, which detect accesses that race with a write.

#[path = "../src/connection/waiters.rs"]
mod waiters;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use std::process::Command;
use waiters::{BlockedCalls, Lifetime, Sleepers, Word};

/// How often loom preempts a thread that could continue, in one interleaving.
const PREEMPTIONS_MAX: usize = 3;

/// Consecutive naps that return at once.
const NAPS_MAX: u32 = 1;

#[derive(Default)]
struct ModelWord(AtomicU32);

impl Word for ModelWord {
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

/// Checks that the model fails with `failure` on standard error. It runs in a process of its own, because loom cannot
/// unwind from a deadlock.
#[track_caller]
fn assert_fails(model: &str, flaw: Flaw, failure: &str) {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "child_of_other_tests", "--nocapture"]);
    let output = child.env("CROSSLANE_TEST_MODEL", model).env("CROSSLANE_TEST_FLAW", format!("{flaw:?}")).output();
    let output = output.unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains(failure), "{model}, {flaw:?}: {stderr}");
}

type Model = fn(Flaw);

/// Runs a model with a flaw, in a process that the tests below start.
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

/// A deviation from the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// A waiter is counted only after it was allowed to poll.
    CountsWaiterLate,
    /// The last waiter of a closed connection does not reclaim the memory.
    SkipsReclaim,
    /// The closing thread reclaims the memory without a check for waiters.
    ReclaimsUnchecked,
    /// A close is deferred to calls that were blocked before it was announced.
    ChecksCountEarly,
    /// The peer is asked to ring before the sleeper is counted.
    AsksBeforeCounted,
    /// The check for other sleepers is made before the lock is taken that protects the ring.
    ChecksBeforeLock,
    /// A ring is consumed while other threads sleep.
    ConsumesOthersRing,
}

impl Flaw {
    const ALL: [Self; 8] = [
        Self::None,
        Self::CountsWaiterLate,
        Self::SkipsReclaim,
        Self::ReclaimsUnchecked,
        Self::ChecksCountEarly,
        Self::AsksBeforeCounted,
        Self::ChecksBeforeLock,
        Self::ConsumesOthersRing,
    ];
}

/// The memory of a connection: its generation, or none. loom detects accesses that race with a write.
struct GuardedMemory(UnsafeCell<Option<u32>>);

// SAFETY: loom checks that no access races with a write.
unsafe impl Sync for GuardedMemory {}
// SAFETY: loom checks that no access races with a write.
unsafe impl Send for GuardedMemory {}

struct Object {
    lifetime: Lifetime<ModelWord>,
    send_lock: Mutex<()>,
    receive_lock: Mutex<()>,
    memory: GuardedMemory,
    times_reclaimed: AtomicU32,
}

impl Object {
    /// Returns a connection of the first generation.
    fn new() -> Arc<Self> {
        let object = Self {
            lifetime: Lifetime::default(),
            send_lock: Mutex::new(()),
            receive_lock: Mutex::new(()),
            memory: GuardedMemory(UnsafeCell::new(None)),
            times_reclaimed: AtomicU32::new(0),
        };
        object.open();
        Arc::new(object)
    }

    fn open(&self) {
        let _both = (self.send_lock.lock().unwrap(), self.receive_lock.lock().unwrap());
        self.lifetime.begin_generation();
        let generation = self.lifetime.generation();
        // SAFETY: loom checks that no other access is concurrent.
        self.memory.0.with_mut(|memory| unsafe { *memory = Some(generation) });
        self.lifetime.open();
    }

    /// Waits as `Connection::wait_to_receive` does, for a call on the first generation.
    fn wait(&self, flaw: Flaw) {
        if flaw != Flaw::CountsWaiterLate {
            self.lifetime.add_waiter();
        }
        let may_access = {
            let _receive = self.receive_lock.lock().unwrap();
            self.lifetime.may_access(1)
        };
        if flaw == Flaw::CountsWaiterLate {
            self.lifetime.add_waiter();
        }
        if may_access {
            assert!(self.lifetime.has_waiters());
            // SAFETY: loom checks that no write is concurrent.
            self.memory.0.with(|memory| assert_eq!(unsafe { *memory }, Some(1)));
        }
        if self.lifetime.remove_waiter() && flaw != Flaw::SkipsReclaim {
            self.recycle(flaw);
        }
    }

    /// Closes as `Connection::finish_close` does.
    fn close(&self, flaw: Flaw) {
        {
            let _both = (self.send_lock.lock().unwrap(), self.receive_lock.lock().unwrap());
            if !self.lifetime.close() {
                return;
            }
        }
        self.recycle(flaw);
    }

    /// Reclaims the memory as `Connection::recycle_if_unused` does.
    fn recycle(&self, flaw: Flaw) -> bool {
        let _both = (self.send_lock.lock().unwrap(), self.receive_lock.lock().unwrap());
        if flaw != Flaw::ReclaimsUnchecked && !self.lifetime.try_reclaim() {
            return false;
        }
        // SAFETY: loom checks that no other access is concurrent.
        self.memory.0.with_mut(|memory| unsafe { *memory = None });
        self.times_reclaimed.fetch_add(1, Ordering::Relaxed);
        true
    }
}

/// Runs two waiters and a concurrent close. Afterwards the memory was reclaimed once.
fn waiters_and_a_close(flaw: Flaw) {
    let object = Object::new();
    let waiters = [(); 2].map(|()| {
        let object = Arc::clone(&object);
        thread::spawn(move || object.wait(flaw))
    });
    object.close(flaw);
    waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
    assert_eq!(object.times_reclaimed.load(Ordering::Relaxed), 1);
}

#[test]
fn memory_stays_while_a_waiter_polls_and_is_reclaimed_once() {
    check(|| waiters_and_a_close(Flaw::None));
    assert_fails("waiters_and_a_close", Flaw::CountsWaiterLate, "panicked");
    assert_fails("waiters_and_a_close", Flaw::SkipsReclaim, "panicked");
    assert_fails("waiters_and_a_close", Flaw::ReclaimsUnchecked, "panicked");
}

/// Runs a waiter of the first connection, while the object becomes another connection.
fn a_waiter_and_the_next_connection(flaw: Flaw) {
    let object = Object::new();
    let waiter = {
        let object = Arc::clone(&object);
        thread::spawn(move || object.wait(flaw))
    };
    object.close(flaw);
    if object.times_reclaimed.load(Ordering::Relaxed) == 1 {
        object.open();
        object.close(flaw);
    }
    waiter.join().unwrap();
    assert!((1..=2).contains(&object.times_reclaimed.load(Ordering::Relaxed)));
    assert!(!object.recycle(flaw), "once for each close");
}

#[test]
fn a_late_waiter_does_not_poll_the_next_connection() {
    check(|| a_waiter_and_the_next_connection(Flaw::None));
    assert_fails("a_waiter_and_the_next_connection", Flaw::CountsWaiterLate, "panicked");
}

#[test]
fn the_child_of_a_fork_does_not_wait_for_threads_of_its_parent() {
    check(|| {
        let (lifetime, sleepers) = (Lifetime::<ModelWord>::default(), Sleepers::<ModelWord>::default());
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

/// Two concurrent closes, as by two threads or by a deferred signal handler.
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
        assert_eq!(object.times_reclaimed.load(Ordering::Relaxed), 1);
    });
}

/// Runs two blocked calls and a concurrent close, which exactly one of the three performs.
fn calls_and_a_close(flaw: Flaw) {
    let calls = Arc::new(BlockedCalls::<ModelWord>::default());
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
    let is_deferred = if flaw == Flaw::ChecksCountEarly {
        let is_deferred = calls.count() > 0;
        let _ = calls.defer_close();
        is_deferred
    } else {
        calls.count() > 0 && calls.defer_close()
    };
    if !is_deferred {
        times_closed.fetch_add(1, Ordering::Relaxed);
    }
    callers.into_iter().for_each(|caller| caller.join().unwrap());
    assert_eq!(times_closed.load(Ordering::Relaxed), 1);
    assert!(!calls.forget(), "no close is left to perform");
}

#[test]
fn a_close_is_performed_once_by_the_last_call() {
    check(|| calls_and_a_close(Flaw::None));
    assert_fails("calls_and_a_close", Flaw::ChecksCountEarly, "panicked");
}

/// A lifeline, with a lane in one direction.
struct ModelLifeline {
    sleepers: Sleepers<ModelWord>,
    /// The lane and its words, protected by the receive lock.
    lane: Mutex<ModelLane>,
    has_words: Condvar,
    rings: Mutex<u32>,
    ringing: Condvar,
}

#[derive(Default)]
struct ModelLane {
    words: u32,
    /// A sleeper has asked the peer to ring.
    has_asked_for_ring: bool,
}

impl ModelLifeline {
    fn new() -> Arc<Self> {
        let sleepers = Sleepers::default();
        let (lane, has_words) = (Mutex::new(ModelLane::default()), Condvar::new());
        Arc::new(Self { sleepers, lane, has_words, rings: Mutex::new(0), ringing: Condvar::new() })
    }

    /// Sends a word, as the peer. Publishing and asking are the lane's own protocol, which has its own model.
    fn send(&self) {
        let rings = {
            let mut lane = self.lane.lock().unwrap();
            lane.words += 1;
            self.has_words.notify_all();
            std::mem::take(&mut lane.has_asked_for_ring)
        };
        if rings {
            *self.rings.lock().unwrap() += 1;
            self.ringing.notify_all();
        }
    }

    /// Receives a word, or asks the peer to ring, as announcing a sleep and polling once more does.
    fn receive_or_ask(&self) -> bool {
        let mut lane = self.lane.lock().unwrap();
        let is_there = lane.words > 0;
        lane.words -= u32::from(is_there);
        lane.has_asked_for_ring |= !is_there;
        is_there
    }

    /// Sleeps, as in the kernel, until there is a ring, which stays.
    fn sleep_until_rung(&self) {
        let mut rings = self.rings.lock().unwrap();
        while *rings == 0 {
            rings = self.ringing.wait(rings).unwrap();
        }
    }

    /// Naps, after which the same thread polls again. Where that would change nothing, it is equivalent to sleep until
    /// there is something to find.
    fn nap(&self, naps: &mut u32) {
        *naps += 1;
        let mut lane = self.lane.lock().unwrap();
        while *naps > NAPS_MAX && lane.words == 0 {
            lane = self.has_words.wait(lane).unwrap();
        }
    }

    /// Consumes a ring as `Connection::consume_ring_if` does.
    fn consume_ring_if(&self, flaw: Flaw, is_alone: &dyn Fn() -> bool) {
        let was_alone = flaw == Flaw::ChecksBeforeLock && is_alone();
        let _lock = self.lane.lock().unwrap();
        if flaw == Flaw::ConsumesOthersRing || was_alone || (flaw != Flaw::ChecksBeforeLock && is_alone()) {
            *self.rings.lock().unwrap() = 0;
        }
    }

    /// Receives as a blocking `Connection::receive` does.
    fn receive(&self, flaw: Flaw) {
        let mut naps = 0;
        loop {
            if flaw == Flaw::AsksBeforeCounted && self.receive_or_ask() {
                return;
            }
            self.sleepers.enter();
            if flaw != Flaw::AsksBeforeCounted && self.receive_or_ask() {
                return self.sleepers.leave();
            }
            let sleep = |is_alone| if is_alone { self.sleep_until_rung() } else { self.nap(&mut naps) };
            self.sleepers.sleep(|| true, sleep, |(), is_alone| self.consume_ring_if(flaw, is_alone));
            self.sleepers.leave();
        }
    }

    /// Receives as `poll` does, which always relies on a ring, leaves before it handles the ring, and enters again to
    /// consume it.
    fn receive_by_poll(&self, flaw: Flaw) {
        let mut naps = 0;
        loop {
            self.sleepers.enter();
            if self.receive_or_ask() {
                return self.sleepers.leave();
            }
            self.sleep_until_rung();
            self.sleepers.leave();
            self.sleepers.enter();
            self.consume_ring_if(flaw, &|| self.sleepers.is_one());
            self.sleepers.leave();
            // A ring that stays is excluded from the next sleep for a moment.
            self.nap(&mut naps);
        }
    }
}

/// Runs a thread that receives one word by `receive` and one that receives two by `other`. A ring that is lost leaves
/// one asleep, which loom reports as a deadlock.
fn receiver_and(flaw: Flaw, other: fn(&ModelLifeline, Flaw)) {
    let lifeline = ModelLifeline::new();
    let other = {
        let lifeline = Arc::clone(&lifeline);
        thread::spawn(move || (0..2).for_each(|_| other(&lifeline, flaw)))
    };
    let peer = {
        let lifeline = Arc::clone(&lifeline);
        thread::spawn(move || (0..3).for_each(|_| lifeline.send()))
    };
    lifeline.receive(flaw);
    other.join().unwrap();
    peer.join().unwrap();
}

fn two_receivers(flaw: Flaw) {
    receiver_and(flaw, ModelLifeline::receive);
}

fn a_receiver_and_a_poller(flaw: Flaw) {
    receiver_and(flaw, ModelLifeline::receive_by_poll);
}

#[test]
fn no_receiver_consumes_a_ring_that_another_relies_on() {
    check(|| two_receivers(Flaw::None));
    assert_fails("two_receivers", Flaw::AsksBeforeCounted, "deadlock");
    assert_fails("two_receivers", Flaw::ChecksBeforeLock, "deadlock");
    assert_fails("two_receivers", Flaw::ConsumesOthersRing, "deadlock");
}

#[test]
fn no_receiver_or_poller_consumes_a_ring_that_the_other_relies_on() {
    check(|| a_receiver_and_a_poller(Flaw::None));
    assert_fails("a_receiver_and_a_poller", Flaw::ChecksBeforeLock, "deadlock");
    assert_fails("a_receiver_and_a_poller", Flaw::ConsumesOthersRing, "deadlock");
}
