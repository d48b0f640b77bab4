//! Calls that sleep, and closes by other threads meanwhile.
//!
//! The kernel keeps a socket open while a thread is in a call on it, although the number may refer to another file by
//! then. A call that sleeps here is no call in the kernel, so that a close by another thread *retains* the socket: a
//! descriptor that the program does not see takes the place of the closed one, until the last such call returns.
//! Without such calls, a close does nothing of this.

use super::lifetime::Lifetime;
use super::{Connection, Use};
use crate::kernel::Tcp;
use rustix::io::Errno;
use socket::descriptor::hidden::{self, HiddenFd};
use socket::process::clock::{TICKS_PER_MICROSECOND, ticks};
use socket::process::threads;
use std::cell::Cell;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// Microseconds that a close waits for a call of another thread to sleep, which polls for some tens of microseconds.
const CALL_SETTLE_US_MAX: u64 = 5_000;
const NOT_RETAINED: i32 = -1;
/// Milliseconds that the first sleep of a call takes at most where only TCP may end it; doubled each time. A close by
/// another thread at the very moment may have given the number to another file before the sleep begins.
const RECHECK_MS: i32 = 100;
/// How often it is doubled at most.
const RECHECKS_DOUBLED_MAX: u32 = 14;

/// The calls of a connection that have slept and not returned.
pub(super) struct Calls {
    lifetime: Lifetime,
    /// A call polls, and will sleep if it finds nothing. Calls of several threads may overwrite each other's mark: a
    /// close that does not see a call ends it.
    is_polled: AtomicBool,
    /// The slot of the hidden descriptor that takes the place of the program's; [`NOT_RETAINED`] before a close.
    retained_slot: AtomicI32,
}

impl Default for Calls {
    fn default() -> Self {
        Self {
            lifetime: Lifetime::default(),
            is_polled: AtomicBool::new(false),
            retained_slot: AtomicI32::new(NOT_RETAINED),
        }
    }
}

impl Calls {
    /// Returns the number that takes the place of the program's one.
    pub fn retained(&self) -> Option<RawFd> {
        let number = u16::try_from(self.retained_slot.load(Ordering::Acquire)).map_or(-1, hidden::number_at);
        (number >= 0).then_some(number)
    }

    fn take_retained(&self) -> Option<HiddenFd> {
        u16::try_from(self.retained_slot.swap(NOT_RETAINED, Ordering::AcqRel)).ok().map(HiddenFd::from_slot)
    }

    /// Forgets the calls in the child of a fork, which has none of those threads, and what they have retained.
    pub fn reset_after_fork(&self) {
        self.lifetime.reset();
        self.is_polled.store(false, Ordering::Relaxed);
        drop(self.take_retained());
        CURRENT.with(|current| current.0.set(None));
    }

    /// Forgets a call that a handler has left while it polled an earlier connection.
    pub fn begin_connection(&self) {
        self.is_polled.store(false, Ordering::Relaxed);
    }

    /// Returns whether a call of another thread has slept. Waits for one that polls, and is about to sleep.
    fn has_slept(&self, own_calls: u32) -> bool {
        let begun_ticks = ticks();
        let is_time_up = || ticks().wrapping_sub(begun_ticks) > CALL_SETTLE_US_MAX * TICKS_PER_MICROSECOND;
        while self.is_polled.load(Ordering::SeqCst) && self.lifetime.calls() <= own_calls && !is_time_up() {
            rustix::thread::sched_yield();
        }
        self.lifetime.calls() > own_calls
    }
}

thread_local! {
    /// The connection of the call in which this thread last slept, until that call returns. A handler that leaves a
    /// call by `siglongjmp` leaves the value here; the next call that sleeps, or a close by this thread, finds it. The
    /// destructor serves threads that are cancelled while they sleep.
    static CURRENT: Current = const { Current(Cell::new(None)) };
}

struct Current(Cell<Option<&'static Connection>>);

impl Drop for Current {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(Connection::end_call);
    }
}

fn is_current(connection: &Connection) -> bool {
    let is_it = |it: &'static Connection| std::ptr::eq(it, connection);
    CURRENT.try_with(|current| current.0.get().is_some_and(is_it)).unwrap_or(false)
}

/// A call that may sleep. Once it has slept, a close by another thread waits until it returns.
pub(super) struct BlockingCall {
    pub this: Use,
    has_slept: bool,
    rechecks: u32,
}

impl BlockingCall {
    pub fn begin(this: Use) -> Self {
        if !threads::is_single() {
            this.connection.calls.is_polled.store(true, Ordering::Relaxed);
        }
        Self { this, has_slept: false, rechecks: 0 }
    }

    /// Notes that the call is about to sleep.
    pub fn note_sleep(&mut self) {
        if self.has_slept || threads::is_single() {
            return;
        }
        let connection = self.this.connection;
        let before = CURRENT.with(|current| current.0.replace(Some(connection)));
        self.has_slept = true;
        if before.is_some_and(|it| std::ptr::eq(it, connection)) {
            return; // Already counted, by a call that a handler has interrupted or left.
        }
        connection.calls.lifetime.begin_call();
        before.into_iter().for_each(Connection::end_call);
    }

    /// Returns the milliseconds of the next sleep where only TCP may end it.
    pub fn recheck_ms(&mut self) -> i32 {
        let doubled = self.rechecks.min(RECHECKS_DOUBLED_MAX);
        self.rechecks += 1;
        RECHECK_MS << doubled
    }

    /// Returns whether a close by another thread waits for this call.
    pub fn has_slept(&self) -> bool {
        self.has_slept
    }
}

impl Drop for BlockingCall {
    fn drop(&mut self) {
        let connection = self.this.connection;
        if !threads::is_single() {
            connection.calls.is_polled.store(false, Ordering::Relaxed);
        }
        if self.has_slept && is_current(connection) {
            CURRENT.with(|current| current.0.set(None));
            connection.end_call();
        }
    }
}

impl Connection {
    /// Ends a call that has slept.
    fn end_call(&'static self) {
        if self.calls.lifetime.end_call() {
            self.end_retained();
        }
    }

    fn end_retained(&'static self) {
        let retained = self.calls.take_retained();
        if let Some(tcp) = retained.as_ref().map(HiddenFd::raw) {
            self.end(Tcp(tcp));
        }
    }

    /// Prepares for the close of the last descriptor `fd`, if calls of other threads have slept: they go on with a
    /// hidden descriptor. Returns whether there are such calls.
    pub(super) fn retain(&'static self, fd: RawFd) -> bool {
        let own_calls = u32::from(is_current(self));
        if threads::is_single() || crate::process::is_confined() || !self.calls.has_slept(own_calls) {
            return false;
        }
        let (Some(_sender), Some(_receiver)) = (self.sender.lock(), self.receiver.lock()) else { return false };
        let copy = rustix::io::fcntl_dupfd_cloexec(Tcp(fd).borrow(), 0);
        let Ok(copy) = copy.and_then(HiddenFd::hide) else { return false };
        self.calls.retained_slot.store(i32::from(copy.into_slot()), Ordering::Release);
        // No further call uses the connection.
        self.generation.fetch_add(1, Ordering::Release);
        true
    }

    /// Leaves the end of a connection that was [retained](Connection::retain) to the last call, or ends it.
    pub(super) fn close_retained(&'static self) {
        if is_current(self) {
            CURRENT.with(|current| current.0.set(None));
            self.calls.lifetime.forget_call();
        }
        if self.calls.lifetime.close() {
            self.end_retained();
        }
    }
}

impl Use {
    /// Returns the socket for a call: that of the program's number, or the one that a close has retained. For what the
    /// call does with it, the lock of a half must be held: a close takes both before it frees the number.
    ///
    /// # Errors
    /// `BADF` if the connection was closed since.
    #[inline(always)]
    pub(super) fn tcp(self) -> Result<Tcp, Errno> {
        let now = self.connection.generation.load(Ordering::Acquire);
        if now == self.generation { Ok(Tcp(self.fd)) } else { self.retained(now) }
    }

    #[cold]
    fn retained(self, now: u32) -> Result<Tcp, Errno> {
        let is_closing = now == self.generation.wrapping_add(1);
        self.connection.calls.retained().filter(|_| is_closing).map(Tcp).ok_or(Errno::BADF)
    }

    /// Returns whether the connection was closed since.
    pub fn is_closed(self) -> bool {
        self.connection.generation.load(Ordering::Acquire) != self.generation
    }
}
