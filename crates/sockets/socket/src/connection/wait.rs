//! Waiting: spin, then sleep on the lifeline.
//!
//! A sleeper publishes in the peer's memory that it sleeps, polls once more, and then sleeps in the kernel until the
//! peer rings or closes.

use super::lanes::Lanes;
use super::waiters::Word;
use super::{Connection, SHUTDOWN_READ, SHUTDOWN_WRITE};
use crate::process::clock::now_ns;
use crate::process::lock::Lock;
use crate::process::signals::{HandlersRun, SignalCheckpoint};
use crate::process::{blocking, threads};
use rustix::io::Errno;
use segment::OwnState;
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};
use wait::{Action, Spin};

/// Milliseconds that a thread sleeps if it is not alone on its lifeline, where another thread may consume the byte that
/// was meant for it.
const NAP_MS: i32 = 1;
/// Milliseconds that a thread sleeps at most while it waits for room, if the process has other threads: one of them may
/// shut the connection down, and only the end of the lifeline would wake a sleeper at once, but it would end reading
/// too.
const ROOM_POLL_MS: i32 = 100;
/// Milliseconds that a thread sleeps at most before there are lanes, if the process has other threads.
const LIFELINE_POLL_MS: i32 = 20;
/// Polls of memory that take as long as one system call.
const POLLS_PER_CALL: u32 = 250;
/// Milliseconds that a thread sleeps while it waits for a handshake.
const HANDSHAKE_NAP_MS: i32 = 10;

/// Number of consecutive waits of a call that may find memory ready although the call then moves nothing. Other threads
/// may be faster, but a peer that forges its words can also make memory look ready forever: the call naps from then on,
/// until its deadline or a signal ends it.
const READY_IN_VAIN_MAX: u32 = 100;

/// Where a send that has waited may find room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    /// The receiver has consumed records of the ring.
    InRing,
    /// The lane may grow beyond its ring.
    InLargerRing,
}

/// When a wait ends without success.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline {
    at_ns: Option<u64>,
    began: SignalCheckpoint,
}

impl Deadline {
    /// Returns the deadline in `timeout_ns`; 0 is never.
    pub(super) fn after(timeout_ns: u64) -> Self {
        let began = SignalCheckpoint::now();
        Self { at_ns: (timeout_ns != 0).then(|| now_ns().saturating_add(timeout_ns)), began }
    }

    /// Returns `INTR` once a signal handler has run that ends the wait: one without `SA_RESTART`, or any if the wait
    /// has a timeout. The kernel reports this only to threads that sleep in it.
    fn check_signals(self) -> Result<(), Errno> {
        match self.began.since() {
            HandlersRun::None => Ok(()),
            HandlersRun::Restarting if self.at_ns.is_none() => Ok(()),
            _ => Err(Errno::INTR),
        }
    }

    /// Returns whether a wait that the kernel has interrupted continues.
    fn continues_after_signal(self) -> bool {
        self.at_ns.is_none() && self.began.restarts()
    }

    /// Returns the milliseconds left, rounded up; -1 for never.
    fn left_ms(self) -> Result<i32, Errno> {
        let Some(at_ns) = self.at_ns else { return Ok(-1) };
        let left_ns = at_ns.saturating_sub(now_ns());
        if left_ns == 0 {
            Err(Errno::AGAIN)
        } else {
            Ok(i32::try_from(left_ns.div_ceil(1_000_000)).unwrap_or(i32::MAX))
        }
    }
}

impl Word for AtomicU32 {
    #[inline]
    fn load(&self) -> u32 {
        self.load(Ordering::SeqCst)
    }

    #[inline]
    fn store(&self, value: u32) {
        self.store(value, Ordering::Release);
    }

    #[inline]
    fn add(&self, value: u32) -> u32 {
        threads::add(self, value)
    }

    #[inline]
    fn swap(&self, value: u32) -> u32 {
        self.swap(value, Ordering::SeqCst)
    }
}

/// A thread that polls the lanes without a lock.
struct Waiter(&'static Connection);

impl Waiter {
    fn new(connection: &'static Connection) -> Self {
        connection.lifetime.add_waiter();
        Self(connection)
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let connection = self.0;
        if connection.lifetime.remove_waiter() {
            connection.recycle_if_unused();
        }
    }
}

thread_local! {
    /// The connection of the call in which this thread last slept, until that call returns. A handler that leaves a
    /// call by `siglongjmp` leaves the value here; the next call that sleeps, or a close by this thread, finds it.
    static CURRENT_CALL: Cell<Option<&'static Connection>> = const { Cell::new(None) };
}

/// A call that may sleep. Once it has slept, a close by another thread waits until it returns.
pub(super) struct BlockingCall {
    connection: &'static Connection,
    has_slept: bool,
    /// Waits since the call has last moved bytes or slept.
    waits_in_vain: u32,
}

impl BlockingCall {
    pub(super) fn new(connection: &'static Connection) -> Self {
        Self { connection, has_slept: false, waits_in_vain: 0 }
    }

    /// Notes that the call has moved bytes.
    pub(super) fn note_progress(&mut self) {
        self.waits_in_vain = 0;
    }

    /// Counts a wait that begins. Returns whether it is to be a nap.
    fn begin_wait(&mut self) -> bool {
        self.waits_in_vain += 1;
        self.waits_in_vain > READY_IN_VAIN_MAX
    }

    /// Notes that the call is about to sleep.
    fn note_sleep(&mut self) {
        if self.has_slept || threads::is_single() {
            return;
        }
        self.has_slept = true;
        let before = CURRENT_CALL.replace(Some(self.connection));
        if before.is_some_and(|it| std::ptr::eq(it, self.connection)) {
            return; // Already counted, by a call that a handler has interrupted or left.
        }
        self.connection.calls.enter();
        before.into_iter().for_each(Connection::end_call);
    }

    /// Returns whether this thread is in a call on `connection`, which a handler has interrupted or left.
    pub(super) fn is_of_this_thread(connection: &Connection) -> bool {
        CURRENT_CALL.get().is_some_and(|it| std::ptr::eq(it, connection))
    }
}

impl Drop for BlockingCall {
    fn drop(&mut self) {
        if self.has_slept && Self::is_of_this_thread(self.connection) {
            CURRENT_CALL.set(None);
            self.connection.end_call();
        }
    }
}

thread_local! {
    /// The connection that this thread sleeps on. The destructor serves threads that are cancelled while they sleep.
    static ASLEEP: Sleep = const { Sleep(Cell::new(None)) };
}

struct Sleep(Cell<Option<&'static Connection>>);

impl Sleep {
    /// Begins a sleep. Returns the value for [`Sleep::end`]: in a signal handler, the sleep that it has interrupted.
    fn begin(&self, connection: &'static Connection) -> Option<&'static Connection> {
        connection.sleepers.enter();
        self.0.replace(Some(connection))
    }

    fn end(&self, interrupted: Option<&'static Connection>) -> Option<&'static Connection> {
        let connection = self.0.replace(interrupted)?;
        connection.sleepers.leave();
        Some(connection)
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(connection) = self.end(None) {
            drop(Waiter(connection));
        }
        CURRENT_CALL.take().into_iter().for_each(Connection::end_call);
    }
}

impl Connection {
    /// Waits until a receive may find something. `spin` may have begun before.
    pub(super) fn wait_to_receive(
        &'static self,
        generation: u32,
        call: &mut BlockingCall,
        deadline: Deadline,
        spin: Spin,
    ) -> Result<(), Errno> {
        if call.begin_wait() {
            call.note_sleep();
            return self.nap(deadline);
        }
        let (_waiter, lanes) = self.become_waiter(generation, &self.receive_lock)?;
        let Some(lanes) = lanes.filter(|_| self.receives_by_lane()) else {
            return self.wait_on_lifeline(call, deadline, spin, libc::POLLIN);
        };
        let is_ready =
            || lanes.observer().may_have_data() || self.has_ended_in(lanes, lanes.segment.snapshot(), SHUTDOWN_READ);
        if self.spin(lanes, deadline, spin, is_ready)? {
            return Ok(());
        }
        self.sleep_unless(
            call,
            is_ready,
            || self.announce_receive_sleep(lanes),
            || self.sleep(lanes, deadline, self.held_left_ms_in(lanes).map(|left_ms| left_ms as i32)),
        )
    }

    /// Waits until a send may find room: for the receiver to make some and, if that takes long, for as much as the lane
    /// may hold.
    pub(super) fn wait_to_send(
        &'static self,
        generation: u32,
        call: &mut BlockingCall,
        deadline: Deadline,
    ) -> Result<Room, Errno> {
        if call.begin_wait() {
            call.note_sleep();
            return self.nap(deadline).map(|()| Room::InLargerRing);
        }
        let (_waiter, lanes) = self.become_waiter(generation, &self.send_lock)?;
        let Some(lanes) = lanes.filter(|_| self.sends_by_lane()) else {
            return self.wait_on_lifeline(call, deadline, Spin::new(), libc::POLLOUT).map(|()| Room::InRing);
        };
        let has_ended = || self.has_ended_in(lanes, lanes.segment.snapshot(), SHUTDOWN_WRITE);
        if self.spin(lanes, deadline, Spin::new(), || self.has_ring_room(lanes) || has_ended())? {
            return Ok(Room::InRing);
        }
        let is_ready = || self.has_room(lanes) || has_ended();
        if is_ready() {
            return Ok(Room::InLargerRing);
        }
        if !self.receives_by_lane() {
            self.process_messages_for_all();
        }
        if !self.receives_by_lane() || lanes.segment.peer_is_confined() {
            // The peer does not ring yet, or does not ring any more.
            call.note_sleep();
            call.waits_in_vain = 0;
            return self.nap(deadline).map(|()| Room::InLargerRing);
        }
        let longest_ms = (!threads::is_single()).then_some(ROOM_POLL_MS);
        let sleep = || self.sleep(lanes, deadline, longest_ms);
        self.sleep_unless(call, is_ready, || self.announce_send_sleep(lanes), sleep)?;
        Ok(Room::InLargerRing)
    }

    /// Asks the peer to ring by `announce`, polls once more, and sleeps. The thread is counted as a sleeper before the
    /// peer is asked, so that no other thread consumes the ring.
    #[cold]
    #[inline(never)] // Inlined, it would make each wait find its thread-local variables, by a call, before it polls.
    fn sleep_unless(
        &'static self,
        call: &mut BlockingCall,
        is_ready: impl Fn() -> bool,
        announce: impl FnOnce(),
        sleep: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        call.note_sleep();
        // The caller drops its waiter; if this thread is cancelled, the destructor of `ASLEEP` does.
        let interrupted = ASLEEP.with(|asleep| asleep.begin(self));
        announce();
        let outcome = if is_ready() {
            Ok(())
        } else {
            call.waits_in_vain = 0;
            sleep()
        };
        ASLEEP.with(|asleep| asleep.end(interrupted));
        outcome
    }

    /// Makes this thread a waiter and returns the lanes, which stay while there is a waiter. `lock` is that of either
    /// direction: a thread that removes or attaches lanes holds both, so it sees the waiter or has finished before.
    fn become_waiter(
        &'static self,
        generation: u32,
        lock: &'static Lock,
    ) -> Result<(Waiter, Option<&'static Lanes>), Errno> {
        let waiter = Waiter::new(self);
        let _guard = self.lock_direction(lock);
        if self.lifetime.may_access(generation) { Ok((waiter, self.lanes())) } else { Err(Errno::BADF) }
    }

    /// Returns whether a send would find room. Errors count as room, so that the send reports them.
    pub(super) fn has_room(&'static self, lanes: &Lanes) -> bool {
        let _guard = self.lock_direction(&self.send_lock);
        // SAFETY: the send lock is held, which protects the sender.
        unsafe { (*lanes.sender.get()).is_writable() }.unwrap_or(true)
    }

    /// Returns whether a send would find room in the present ring of the lane.
    fn has_ring_room(&'static self, lanes: &Lanes) -> bool {
        let _guard = self.lock_direction(&self.send_lock);
        // SAFETY: the send lock is held, which protects the sender.
        unsafe { (*lanes.sender.get()).is_ring_writable() }.unwrap_or(true)
    }

    /// Asks the peer to ring when it has sent something.
    pub(super) fn announce_receive_sleep(&'static self, lanes: &Lanes) {
        let _guard = self.lock_direction(&self.receive_lock);
        // SAFETY: the receive lock is held, which protects the receiver.
        unsafe { (*lanes.receiver.get()).announce_sleep() };
    }

    /// Asks the peer to ring when it has made room.
    pub(super) fn announce_send_sleep(&'static self, lanes: &Lanes) {
        let _guard = self.lock_direction(&self.send_lock);
        // SAFETY: the send lock is held, which protects the sender.
        unsafe { (*lanes.sender.get()).announce_sleep() };
    }

    /// Spins. Returns `false` when it is time to sleep.
    fn spin(
        &self,
        lanes: &Lanes,
        deadline: Deadline,
        mut spin: Spin,
        is_ready: impl Fn() -> bool,
    ) -> Result<bool, Errno> {
        loop {
            if is_ready() {
                return Ok(true);
            }
            match spin.iterate() {
                Action::Poll => {}
                Action::PollKernel => {
                    self.poll_lifeline(lanes);
                    deadline.check_signals()?;
                }
                Action::Block => return Ok(false),
            }
        }
    }

    /// Sleeps on the lifeline of a connection with lanes, and consumes the ring.
    fn sleep(&'static self, lanes: &Lanes, deadline: Deadline, longest_ms: Option<i32>) -> Result<(), Errno> {
        if let Some(slot) = self.slot() {
            slot.count_sleep();
        }
        let sleep = |is_alone| self.sleep_in_kernel(lanes, deadline, longest_ms, is_alone);
        let end = |outcome, is_alone: &dyn Fn() -> bool| {
            let has_ended = match outcome {
                Ok(true) => !self.consume_ring_if(lanes, is_alone),
                Ok(false) => true,
                Err(_) => false,
            };
            (outcome, has_ended)
        };
        let (outcome, has_ended) = self.sleepers.sleep(|| self.is_sole_user(lanes), sleep, end);
        if has_ended {
            self.poll_lifeline(lanes);
        }
        outcome.map(|_| ())
    }

    /// Consumes the ring in the lifeline, unless it may be meant for another sleeper. Returns `false` if the lifeline
    /// has ended.
    ///
    /// It does so under the locks under which peers are asked to ring: a thread that has asked before is counted as a
    /// sleeper by then, and one that asks later is rung for later.
    fn consume_ring_if(&'static self, lanes: &Lanes, is_alone: &dyn Fn() -> bool) -> bool {
        let both = self.lock_both();
        // After a close the number may belong to another file.
        let is_mine = self.is_open() && self.receives_by_lane();
        both.is_none() || !is_mine || !is_alone() || self.drain_lifeline(lanes)
    }

    /// Returns whether the calling sleeper is the only one, in this process and in those that hold the same endpoint.
    /// Only then may it consume a ring of the lifeline, and rely on one.
    pub(super) fn is_sole_sleeper(&self, lanes: &Lanes) -> bool {
        self.sleepers.is_one() && self.is_sole_user(lanes)
    }

    /// Sleeps in the kernel. Returns `Ok(false)` if the lifeline has ended.
    fn sleep_in_kernel(
        &self,
        lanes: &Lanes,
        deadline: Deadline,
        longest_ms: Option<i32>,
        is_alone: bool,
    ) -> Result<bool, Errno> {
        let fd = self.lifeline();
        let left_ms = deadline.left_ms()?;
        if !self.is_open() {
            return Err(Errno::BADF);
        }
        // As late as possible: a handler that runs from now on interrupts the system call.
        deadline.check_signals()?;
        let waits_for_ring = is_alone && left_ms < 0 && longest_ms.is_none();
        if waits_for_ring && !self.is_nonblocking.load(Ordering::Relaxed) && !self.is_lifeline_shut(lanes) {
            return match blocking::wait_to_receive(fd) {
                Err(Errno::CONNRESET) => {
                    self.note_hang_up(lanes, true);
                    Ok(false)
                }
                // The program has closed that descriptor, and this call continues with another one.
                Err(Errno::BADF) if self.lifeline() != fd => Ok(true),
                woken => woken,
            };
        }
        let mut entry = [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }];
        if self.is_lifeline_shut(lanes) {
            // It stays readable and brings no rings: only its end is of interest.
            entry[0].events = 0;
            return nap_on(&mut entry, left_ms, deadline);
        }
        if is_alone && longest_ms.is_none() {
            // This may return before the timeout; the caller checks.
            blocking::poll_slice(&mut entry, left_ms)?;
            return Ok(entry[0].revents & libc::POLLHUP == 0);
        }
        if !is_alone && blocking::poll_now(fd, libc::POLLIN) & libc::POLLIN != 0 {
            // A byte in the lifeline is for another sleeper, which must find it; this thread must not spin on it.
            entry[0].fd = -1;
        }
        let longest_ms = longest_ms.filter(|_| is_alone).unwrap_or(NAP_MS);
        poll_again_after_signals(&mut entry, if left_ms < 0 { longest_ms } else { left_ms.min(longest_ms) }, deadline)?;
        Ok(entry[0].revents & libc::POLLHUP == 0)
    }

    /// Returns whether a shutdown of the receive direction ended the lifeline, to wake its sleepers.
    pub(super) fn is_lifeline_shut(&self, lanes: &Lanes) -> bool {
        lanes.segment.load(OwnState::Shutdown) & SHUTDOWN_READ != 0
            && blocking::poll_now(self.lifeline(), libc::POLLRDHUP) & libc::POLLRDHUP != 0
    }

    /// Sleeps [`NAP_MS`], for a wait that no ring ends.
    pub(super) fn nap(&self, deadline: Deadline) -> Result<(), Errno> {
        deadline.left_ms()?;
        poll_again_after_signals(&mut [], NAP_MS, deadline)?;
        deadline.check_signals()
    }

    /// Waits until the kernel reports `POLLIN` or `POLLOUT` of the lifeline. The caller is a waiter.
    fn wait_on_lifeline(
        &'static self,
        call: &mut BlockingCall,
        deadline: Deadline,
        mut spin: Spin,
        events: i16,
    ) -> Result<(), Errno> {
        if self.awaits_handshake.load(Ordering::Relaxed) {
            return self.wait_for_handshake(deadline);
        }
        let is_over = || self.is_lifeline_wait_over(events);
        loop {
            if is_over() || blocking::poll_now(self.lifeline(), events) != 0 {
                return Ok(());
            }
            match spin.iterate_by(POLLS_PER_CALL) {
                Action::Poll => {}
                Action::PollKernel => deadline.check_signals()?,
                Action::Block => break,
            }
        }
        self.sleep_unless(call, is_over, || {}, || self.sleep_on_lifeline(deadline, events))
    }

    /// Sleeps until the lifeline has `events`.
    fn sleep_on_lifeline(&'static self, deadline: Deadline, events: i16) -> Result<(), Errno> {
        if let Some(slot) = self.slot() {
            slot.count_sleep();
        }
        let fd = self.lifeline();
        let left_ms = deadline.left_ms()?;
        if !self.is_open() {
            return Err(Errno::BADF);
        }
        deadline.check_signals()?;
        let is_alone = threads::is_single() && !self.may_have_other_holders();
        if is_alone && events == libc::POLLIN && left_ms < 0 && !self.is_nonblocking.load(Ordering::Relaxed) {
            return match blocking::wait_to_receive(fd) {
                Err(Errno::CONNRESET) => {
                    self.note_kernel_reset();
                    Ok(())
                }
                Err(Errno::BADF) if self.lifeline() != fd => Ok(()),
                woken => woken.map(|_| ()),
            };
        }
        // Another thread or process may shut the connection down, or consume the message by which the input continues
        // in a lane.
        let longest_ms = if is_alone { left_ms } else { LIFELINE_POLL_MS };
        let mut entry = [libc::pollfd { fd, events, revents: 0 }];
        poll_again_after_signals(&mut entry, if left_ms < 0 { longest_ms } else { left_ms.min(longest_ms) }, deadline)
    }

    /// Sleeps until a handshake may have arrived.
    fn wait_for_handshake(&self, deadline: Deadline) -> Result<(), Errno> {
        let mut entry = [libc::pollfd { fd: self.lifeline(), events: libc::POLLIN, revents: 0 }];
        let left_ms = deadline.left_ms()?;
        // Another thread may receive the handshake, and nothing would wake this one.
        let look_again_ms = if left_ms < 0 { HANDSHAKE_NAP_MS } else { left_ms.min(HANDSHAKE_NAP_MS) };
        deadline.check_signals()?;
        poll_again_after_signals(&mut entry, look_again_ms, deadline)
    }
}

/// Sleeps at most [`NAP_MS`]. Returns `Ok(false)` if the lifeline has ended.
fn nap_on(entry: &mut [libc::pollfd; 1], left_ms: i32, deadline: Deadline) -> Result<bool, Errno> {
    poll_again_after_signals(entry, if left_ms < 0 { NAP_MS } else { left_ms.min(NAP_MS) }, deadline)?;
    Ok(entry[0].revents & libc::POLLHUP == 0)
}

/// Polls, and returns early without an error after a signal that would have restarted the call it stands for.
fn poll_again_after_signals(entry: &mut [libc::pollfd], timeout_ms: i32, deadline: Deadline) -> Result<(), Errno> {
    match blocking::poll(entry, timeout_ms) {
        Err(Errno::INTR) if deadline.continues_after_signal() => Ok(()),
        polled => polled.map(|_| ()),
    }
}
