//! `TCP_DEFER_ACCEPT`: a connection is neither reported nor accepted before its first bytes have arrived or the time
//! that the program has set is over.
//!
//! Only a process that accepts a connection from the lane listener's backlog can see whether it has bytes. A connection
//! without bytes is held here, hidden from the program, and a *gate* replaces the lane listener in all waits: an epoll
//! instance with the lane listener, all held connections, and a timer. Other processes that share the listener find
//! what is still in its backlog: nothing is removed from it while a held connection can be accepted. The held
//! connections are released to all of these processes when one is accepted, because this process may then be busy, and
//! when this process closes the listener or ends.

use super::Listener;
use super::shared_queue::SharedQueue;
use crate::descriptor::hidden::{HiddenFd, Need};
use crate::process::clock::now_ns;
use crate::process::limit;
use crate::process::socket_option::{SocketOption, get_raw};
use crate::rendezvous::address::{Opener, Tuple};
use crate::rendezvous::{self, Accepted};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, ReturnFlags};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) const DEFER_ACCEPT: SocketOption = SocketOption { level: libc::IPPROTO_TCP, name: libc::TCP_DEFER_ACCEPT };
/// Maximum number of connections that one poll removes: more than the backlog and the queue hold, because an
/// edge-triggered set is not notified of those that stay.
const ACCEPTS_PER_POLL_MAX: usize = 1 << 16;
/// Maximum number of held connections that one `accept` releases.
const SHARED_PER_ACCEPT_MAX: usize = 64;
/// Number of events that are read from the gate at once.
const EVENTS_PER_WAIT: usize = 8;
const LANE_NUMBER: u64 = 0;
const TIMER_NUMBER: u64 = 1;
const QUEUE_NUMBER: u64 = 2;
const FIRST_NUMBER: u64 = 3;

/// Whether other processes may share the listeners of this one: it has forked, has passed them to a program, or has
/// received them from another process or program.
static ARE_SHARED: AtomicBool = AtomicBool::new(false);

/// The held connections of a listener.
pub(crate) struct DeferredAccept {
    gate: HiddenFd,
    timer: HiddenFd,
    pub(crate) queue: SharedQueue,
    /// Time that a connection waits for its bytes; 0 if the program has turned the option off.
    pub(crate) wait_ns: u64,
    next_number: u64,
    /// In order of arrival.
    held: VecDeque<HeldConnection>,
    /// A thread calls `exec`, so no connection is held here: it would be lost with the memory of this process.
    is_executing: bool,
}

/// A connection that had no bytes at the last poll.
struct HeldConnection {
    /// Its number in the gate.
    number: u64,
    lifeline: HiddenFd,
    tuple: Tuple,
    opener: Opener,
    due_ns: u64,
}

enum GateEvent {
    /// The connection with this number can be accepted.
    Ready(u64),
    /// A connection is in the backlog.
    Arrival,
    /// A connection is in the queue, to which this or another process has released it.
    Shared,
    Nothing,
}

impl DeferredAccept {
    /// Creates what the option of `fd`, a TCP listener, requires of its lane listener; `None` if the option is not set.
    ///
    /// # Errors
    /// `MFILE` and similar errors, when no descriptor is free.
    pub fn for_listener(fd: RawFd, lane_fd: RawFd) -> Result<Option<Self>, Errno> {
        match wait_ns_of(fd) {
            0 => Ok(None),
            wait_ns => Self::new(lane_fd, wait_ns, SharedQueue::new(lane_fd)?).map(Some),
        }
    }

    /// Creates the same as [`DeferredAccept::for_listener`], with the queue of the listener if it is among `sockets`:
    /// the program before `exec`, or other processes that share the listener, have left it.
    ///
    /// # Errors
    /// Those of [`DeferredAccept::for_listener`].
    pub fn inherited(fd: RawFd, lane_fd: RawFd, sockets: &[RawFd]) -> Result<Option<Self>, Errno> {
        match SharedQueue::inherited(lane_fd, sockets) {
            Some(queue) => {
                mark_listeners_shared();
                Self::new(lane_fd, wait_ns_of(fd), queue).map(Some)
            }
            None => Self::for_listener(fd, lane_fd),
        }
    }

    pub(crate) fn new(lane_fd: RawFd, wait_ns: u64, queue: SharedQueue) -> Result<Self, Errno> {
        let gate = HiddenFd::hide(epoll::create(epoll::CreateFlags::CLOEXEC)?, Need::Required)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = HiddenFd::hide(rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?, Need::Required)?;
        // SAFETY: the number is that of a listener which the caller keeps open. Were it closed, the call would fail.
        let lane = unsafe { BorrowedFd::borrow_raw(lane_fd) };
        epoll::add(gate.fd()?, lane, EventData::new_u64(LANE_NUMBER), EventFlags::IN)?;
        epoll::add(gate.fd()?, timer.fd()?, EventData::new_u64(TIMER_NUMBER), EventFlags::IN)?;
        epoll::add(gate.fd()?, queue.receiver()?, EventData::new_u64(QUEUE_NUMBER), EventFlags::IN)?;
        Ok(Self { gate, timer, queue, wait_ns, next_number: FIRST_NUMBER, held: VecDeque::new(), is_executing: false })
    }

    /// Returns the descriptor of the gate, which replaces the lane listener in all waits.
    pub fn gate(&self) -> RawFd {
        self.gate.raw()
    }

    /// Returns the queue by which connections are released to other processes.
    pub fn queue(&self) -> &SharedQueue {
        &self.queue
    }

    pub(crate) fn set_wait_ns(&mut self, wait_ns: u64) {
        self.wait_ns = wait_ns;
        if wait_ns == 0 {
            self.held.iter_mut().for_each(|held| held.due_ns = 0);
            self.set_timer();
        }
    }

    /// Sets the timer to the time when the first connection is due. It stays readable until that connection is
    /// accepted.
    fn set_timer(&self) {
        let first_ns = self.held.iter().map(|held| held.due_ns).min();
        // A time of zero would stop the timer.
        let left_ns = first_ns.map_or(0, |due_ns| due_ns.saturating_sub(now_ns()).max(1));
        let it_value = Timespec { tv_sec: (left_ns / 1_000_000_000) as _, tv_nsec: (left_ns % 1_000_000_000) as _ };
        let once = Itimerspec { it_interval: Timespec::default(), it_value };
        let _ =
            self.timer.fd().and_then(|timer| rustix::time::timerfd_settime(timer, TimerfdTimerFlags::empty(), &once));
    }

    fn poll(&self) -> Result<GateEvent, Errno> {
        if self.is_executing {
            return Ok(GateEvent::Nothing);
        }
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; EVENTS_PER_WAIT];
        let count = epoll::wait(self.gate.fd()?, &mut events, Some(&Timespec::default()))?;
        let ready = events[..count].iter().map(|event| event.data.u64());
        let now_ns = now_ns();
        let is_due = |held: &&HeldConnection| held.due_ns <= now_ns;
        let due = self.held.iter().find(is_due).map(|held| held.number);
        if let Some(number) = ready.clone().filter(|number| *number >= FIRST_NUMBER).chain(due).min() {
            return Ok(GateEvent::Ready(number));
        }
        if ready.clone().any(|number| number == TIMER_NUMBER) {
            self.set_timer();
        }
        let is_ready = |number| ready.clone().any(|other| other == number);
        Ok(match (is_ready(QUEUE_NUMBER), is_ready(LANE_NUMBER)) {
            (true, _) => GateEvent::Shared,
            (false, true) => GateEvent::Arrival,
            (false, false) => GateEvent::Nothing,
        })
    }

    /// Holds a connection. `due_ns` is the time at which it may be accepted without bytes, if it was held before.
    fn hold(&mut self, accepted: Accepted, due_ns: Option<u64>) -> Result<(), Errno> {
        let Accepted { lifeline, tuple, opener } = accepted;
        let lifeline = HiddenFd::hide(lifeline, Need::Required)?;
        let due_ns = now_ns().saturating_add(self.wait_ns).min(due_ns.unwrap_or(u64::MAX));
        let held = HeldConnection { number: self.next_number, lifeline, tuple, opener, due_ns };
        self.next_number += 1;
        self.insert(held)
    }

    fn insert(&mut self, held: HeldConnection) -> Result<(), Errno> {
        epoll::add(self.gate.fd()?, held.lifeline.fd()?, EventData::new_u64(held.number), EventFlags::IN)?;
        let index = self.held.partition_point(|earlier| earlier.number < held.number);
        self.held.insert(index, held);
        self.set_timer();
        if self.is_executing {
            self.share(usize::MAX);
        }
        Ok(())
    }

    /// Releases the first `count_max` connections to all processes that share the listener. Those for which the queue
    /// has no room stay.
    pub fn share(&mut self, count_max: usize) {
        self.share_if(count_max, |_| true);
    }

    /// Releases to a child the connections that the child can hold as well.
    pub fn share_with_child(&mut self) {
        self.share_if(usize::MAX, |lifeline| !begins_with_message(lifeline));
    }

    fn share_if(&mut self, count_max: usize, is_wanted: impl Fn(BorrowedFd<'_>) -> bool) {
        let Self { gate, queue, held, .. } = self;
        let mut left = count_max;
        held.retain(|one| {
            let Ok(lifeline) = one.lifeline.fd() else { return true };
            if left == 0 || !is_wanted(lifeline) || queue.push(lifeline, one.due_ns).is_err() {
                return true;
            }
            left -= 1;
            // The lifeline is removed from the gate before it is closed: the duplicate in the queue would stay
            // registered.
            let _ = gate.fd().map(|gate| epoll::delete(gate, lifeline));
            false
        });
        self.set_timer();
    }

    fn remove(&mut self, number: u64) -> Option<HeldConnection> {
        let index = self.held.iter().position(|held| held.number == number)?;
        let held = self.held.remove(index)?;
        // The lifeline is removed before it is closed: a duplicate would stay registered in the gate.
        let _ = epoll::delete(self.gate.fd().ok()?, held.lifeline.fd().ok()?);
        self.set_timer();
        Some(held)
    }
}

/// Returns whether the first byte is not the client's, but belongs to a message between the endpoints: the client has
/// forked before it has sent anything. To the process that accepts the connection it looks as if there were bytes.
fn begins_with_message(lifeline: BorrowedFd<'_>) -> bool {
    // A descriptor ends a receive, but it is reported as well if it follows bytes that fill the buffer.
    let mut bytes = [0_u8; 2];
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let (spans, mut no_room) = (&mut [IoSliceMut::new(&mut bytes)], RecvAncillaryBuffer::default());
    rustix::net::recvmsg(lifeline, spans, &mut no_room, flags)
        .is_ok_and(|seen| seen.bytes == 1 && seen.flags.contains(ReturnFlags::CTRUNC))
}

/// Returns the value of `TCP_DEFER_ACCEPT` of a TCP listener, as the kernel has rounded it.
pub(crate) fn wait_ns_of(fd: RawFd) -> u64 {
    let mut seconds = [0_u8; 4];
    // SAFETY: the descriptor is only queried, during a call of the program that names it.
    let listener = unsafe { BorrowedFd::borrow_raw(fd) };
    get_raw(listener, DEFER_ACCEPT, &mut seconds).map_or(0, |_| u64::from(u32::from_ne_bytes(seconds)) * 1_000_000_000)
}

/// Returns whether `accept` would find a lane connection on a listener whose watched descriptor is readable.
pub(crate) fn has_client(listener: &'static Listener) -> bool {
    // If no descriptor is free to accept one, `accept` reports it.
    !defers(listener) || !matches!(find(listener), Ok(None))
}

/// Returns whether this process, which is about to use the listener, holds connections. A process that does not hold
/// any does not accept those that its parent releases either, and must not keep the queue open: their clients would
/// wait forever when the parent has gone.
fn defers(listener: &'static Listener) -> bool {
    listener.with(|inner| {
        inner.parent_queue = None;
        inner.deferral.is_some()
    })
}

/// Returns the number of a connection that can be accepted.
fn find(listener: &'static Listener) -> Result<Option<u64>, Errno> {
    for _ in 0..ACCEPTS_PER_POLL_MAX {
        let seen = listener.with(|inner| inner.deferral.as_ref().map_or(Ok(GateEvent::Nothing), DeferredAccept::poll));
        match seen? {
            GateEvent::Ready(number) => return Ok(Some(number)),
            GateEvent::Nothing => return Ok(None),
            GateEvent::Arrival => accept_from_backlog(listener)?,
            GateEvent::Shared => accept_from_queue(listener)?,
        }
    }
    Ok(None)
}

/// Accepts a connection from the backlog and holds it, under the lock, so that no thread calls `exec` in between.
fn accept_from_backlog(listener: &'static Listener) -> Result<(), Errno> {
    let (lane_fd, key) = listener.lane().ok_or(Errno::BADF)?;
    listener.with(|inner| {
        let Some(deferral) = inner.deferral.as_mut().filter(|deferral| !deferral.is_executing) else { return Ok(()) };
        match rendezvous::accept(lane_fd, &key, libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) {
            // Another process has accepted it.
            Err(Errno::AGAIN) => Ok(()),
            Err(error) => Err(error),
            Ok(accepted) => deferral.hold(accepted, None),
        }
    })
}

fn accept_from_queue(listener: &'static Listener) -> Result<(), Errno> {
    let (_, key) = listener.lane().ok_or(Errno::BADF)?;
    listener.with(|inner| {
        let Some(deferral) = inner.deferral.as_mut().filter(|deferral| !deferral.is_executing) else { return Ok(()) };
        let shared = deferral.queue.pop(&key)?;
        shared.map_or(Ok(()), |(accepted, due_ns)| deferral.hold(accepted, Some(due_ns)))
    })
}

/// Accepts a connection, as [`rendezvous::accept`] does, on a listener that holds connections; `None` if it does not.
pub(crate) fn accept(listener: &'static Listener, flags: i32) -> Option<Result<Accepted, Errno>> {
    defers(listener).then(|| accept_held(listener, flags))
}

#[inline(never)] // Its variables are not to add to the caller's on a small stack.
fn accept_held(listener: &'static Listener, flags: i32) -> Result<Accepted, Errno> {
    let number = find(listener)?.ok_or(Errno::AGAIN)?;
    let remove = |inner: &mut super::ListenerInner| inner.deferral.as_mut()?.remove(number);
    // Another thread may have accepted it.
    let held = listener.with(remove).ok_or(Errno::AGAIN)?;
    let to_lowest = || rustix::io::fcntl_dupfd_cloexec(held.lifeline.fd()?, 0);
    match limit::retry_with_room(to_lowest, |error| *error == Errno::MFILE) {
        Ok(lifeline) => {
            let (is_cloexec, is_nonblocking) = (flags & libc::SOCK_CLOEXEC != 0, flags & libc::SOCK_NONBLOCK != 0);
            rendezvous::set_modes(lifeline.as_fd(), is_cloexec, is_nonblocking)?;
            if ARE_SHARED.load(Ordering::Relaxed) {
                share(listener, SHARED_PER_ACCEPT_MAX);
            }
            Ok(Accepted { lifeline, tuple: held.tuple, opener: held.opener })
        }
        Err(error) => {
            listener.with(|inner| inner.deferral.as_mut().map_or(Ok(()), |deferral| deferral.insert(held)))?;
            Err(error)
        }
    }
}

fn share(listener: &'static Listener, count_max: usize) {
    listener.with(|inner| inner.deferral.as_mut().map(|deferral| deferral.share(count_max)));
}

/// Records that other processes may share the listeners of this one from now on.
pub(crate) fn mark_listeners_shared() {
    ARE_SHARED.store(true, Ordering::Relaxed);
}

/// Before `exec`, releases all held connections to the processes that share the listener. The program that follows is
/// one of them.
pub(crate) fn share_before_exec(listener: &'static Listener) {
    listener.with(|inner| {
        if let Some(deferral) = &mut inner.deferral {
            deferral.is_executing = true;
            deferral.share(usize::MAX);
        }
    });
}

/// Holds connections again after an `exec` that has failed.
pub(crate) fn resume_after_exec(listener: &'static Listener) {
    let was_executing = listener.with(|inner| {
        inner.deferral.as_mut().is_some_and(|deferral| std::mem::replace(&mut deferral.is_executing, false))
    });
    if was_executing {
        // Threads that wait for events were notified meanwhile and found nothing. A connection that is held now is
        // reported to them.
        let _ = find(listener);
    }
}
