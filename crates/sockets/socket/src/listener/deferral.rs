//! `TCP_DEFER_ACCEPT`: a connection is neither reported nor accepted before its first bytes have come, or the program's
//! time is over.
//!
//! Only whoever takes a connection out of the lane listener's backlog can see whether it has bytes. One without any is
//! kept here, hidden, and a *gate* stands for the lane listener wherever somebody waits for it: an epoll instance with
//! the lane listener, all that are kept, and a timer. Others that share the listener find what is still in its backlog:
//! nothing is taken out while one that is kept here can be accepted. What is kept goes back to all of them when one is
//! accepted, for that may keep this process busy, and when this process closes the listener or ends.

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
/// Connections that one look takes out: more than the backlog and the queue hold, because a set that reports edges is
/// not told of those that stay.
const ACCEPTS_PER_POLL_MAX: usize = 1 << 16;
/// Connections that one `accept` gives back.
const SHARED_PER_ACCEPT_MAX: usize = 64;
/// What the gate says is ready is asked for in so many parts.
const EVENTS_PER_WAIT: usize = 8;
const LANE_NUMBER: u64 = 0;
const TIMER_NUMBER: u64 = 1;
const QUEUE_NUMBER: u64 = 2;
const FIRST_NUMBER: u64 = 3;

/// Whether others may share the listeners of this process: it has forked, has left them to a program, or has them from
/// another process or program.
static ARE_SHARED: AtomicBool = AtomicBool::new(false);

/// The connections that a listener keeps back.
pub(crate) struct DeferredAccept {
    gate: HiddenFd,
    timer: HiddenFd,
    pub(crate) queue: SharedQueue,
    /// How long a connection waits for its bytes; 0: the program has turned it off.
    pub(crate) wait_ns: u64,
    next_number: u64,
    /// The first that came first.
    held: VecDeque<HeldConnection>,
    /// Nothing is kept here: a thread calls `exec`, and what came in meanwhile would go with this process's memory.
    is_executing: bool,
}

/// A connection without bytes, when it was last asked.
struct HeldConnection {
    /// What the gate calls it.
    number: u64,
    lifeline: HiddenFd,
    tuple: Tuple,
    opener: Opener,
    due_ns: u64,
}

enum GateEvent {
    /// The connection of this number can be accepted.
    Ready(u64),
    /// There is one in the backlog.
    Arrival,
    /// There is one that another process, or this one, has given back.
    Shared,
    Nothing,
}

impl DeferredAccept {
    /// What `fd`, a TCP listener, asks of its lane listener; `None`: not to wait.
    ///
    /// # Errors
    /// `MFILE` and its kin, where there is no descriptor left.
    pub fn for_listener(fd: RawFd, lane_fd: RawFd) -> Result<Option<Self>, Errno> {
        match wait_ns_of(fd) {
            0 => Ok(None),
            wait_ns => Self::new(lane_fd, wait_ns, SharedQueue::new(lane_fd)?).map(Some),
        }
    }

    /// As [`DeferredAccept::for_listener`], with the queue of the listener if it is among `sockets`: the program before
    /// `exec`, or others that share the listener, have left it.
    ///
    /// # Errors
    /// As [`DeferredAccept::for_listener`].
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
        // SAFETY: the number of a listener that the caller keeps open. Were it closed, the call would fail.
        let lane = unsafe { BorrowedFd::borrow_raw(lane_fd) };
        epoll::add(gate.fd()?, lane, EventData::new_u64(LANE_NUMBER), EventFlags::IN)?;
        epoll::add(gate.fd()?, timer.fd()?, EventData::new_u64(TIMER_NUMBER), EventFlags::IN)?;
        epoll::add(gate.fd()?, queue.receiver()?, EventData::new_u64(QUEUE_NUMBER), EventFlags::IN)?;
        Ok(Self { gate, timer, queue, wait_ns, next_number: FIRST_NUMBER, held: VecDeque::new(), is_executing: false })
    }

    /// Stands for the lane listener wherever somebody waits for it.
    pub fn gate(&self) -> RawFd {
        self.gate.raw()
    }

    /// Where it leaves connections to others.
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

    /// Has the timer wake those who wait when the first connection is due. It stays readable until that is accepted.
    fn set_timer(&self) {
        let first_ns = self.held.iter().map(|held| held.due_ns).min();
        // No time at all would stop it.
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
        let is_there = |place| ready.clone().any(|number| number == place);
        Ok(match (is_there(QUEUE_NUMBER), is_there(LANE_NUMBER)) {
            (true, _) => GateEvent::Shared,
            (false, true) => GateEvent::Arrival,
            (false, false) => GateEvent::Nothing,
        })
    }

    /// `due_ns`: when one that was kept before may be accepted without bytes.
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
        let place = self.held.partition_point(|earlier| earlier.number < held.number);
        self.held.insert(place, held);
        self.set_timer();
        if self.is_executing {
            self.share(usize::MAX);
        }
        Ok(())
    }

    /// Leaves the first connections to all processes that share the listener. What finds no room stays.
    pub fn share(&mut self, count_max: usize) {
        self.share_if(count_max, |_| true);
    }

    /// Leaves to a child what it would keep back as well.
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
            // Before it is closed, as in `release`.
            let _ = gate.fd().map(|gate| epoll::delete(gate, lifeline));
            false
        });
        self.set_timer();
    }

    fn remove(&mut self, number: u64) -> Option<HeldConnection> {
        let place = self.held.iter().position(|held| held.number == number)?;
        let held = self.held.remove(place)?;
        // Before it is closed: a duplicate would stay in the gate.
        let _ = epoll::delete(self.gate.fd().ok()?, held.lifeline.fd().ok()?);
        self.set_timer();
        Some(held)
    }
}

/// Whether the first that has come is no byte of the client's, but a message between the ends: the client has forked
/// before it said anything. To whoever takes the connection in it looks as if there were bytes.
fn begins_with_message(lifeline: BorrowedFd<'_>) -> bool {
    // A descriptor ends what is received, but is told of as well if it comes behind bytes that fill the room.
    let mut bytes = [0_u8; 2];
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let (spans, mut no_room) = (&mut [IoSliceMut::new(&mut bytes)], RecvAncillaryBuffer::default());
    rustix::net::recvmsg(lifeline, spans, &mut no_room, flags)
        .is_ok_and(|seen| seen.bytes == 1 && seen.flags.contains(ReturnFlags::CTRUNC))
}

/// `TCP_DEFER_ACCEPT` of a TCP listener, as the kernel has rounded it.
pub(crate) fn wait_ns_of(fd: RawFd) -> u64 {
    let mut seconds = [0_u8; 4];
    // SAFETY: the program's descriptor, in a call about it.
    let listener = unsafe { BorrowedFd::borrow_raw(fd) };
    get_raw(listener, DEFER_ACCEPT, &mut seconds).map_or(0, |_| u64::from(u32::from_ne_bytes(seconds)) * 1_000_000_000)
}

/// Whether `accept` would find a connection that came by a lane, of a listener whose watched descriptor is readable.
pub(crate) fn has_client(listener: &'static Listener) -> bool {
    // Where there is no descriptor to take one out, `accept` says so.
    !defers(listener) || !matches!(find(listener), Ok(None))
}

/// Whether this process, which is about to use the listener, keeps connections back. One that does not takes none that
/// its parent leaves either, and must not hold them: their clients would wait in vain when the parent has gone.
fn defers(listener: &'static Listener) -> bool {
    listener.with(|inner| {
        inner.parent_queue = None;
        inner.deferral.is_some()
    })
}

/// The number of a connection that can be accepted.
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

/// Under the lock, so that no thread that calls `exec` comes between.
fn accept_from_backlog(listener: &'static Listener) -> Result<(), Errno> {
    let (lane_fd, key) = listener.lane().ok_or(Errno::BADF)?;
    listener.with(|inner| {
        let Some(deferral) = inner.deferral.as_mut().filter(|deferral| !deferral.is_executing) else { return Ok(()) };
        match rendezvous::accept(lane_fd, &key, libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) {
            // Another process was faster.
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
        let queue = deferral.queue.pop(&key)?;
        queue.map_or(Ok(()), |(accepted, due_ns)| deferral.hold(accepted, Some(due_ns)))
    })
}

/// As [`rendezvous::accept`], of a listener that keeps connections back; `None`: it does not.
pub(crate) fn accept(listener: &'static Listener, flags: i32) -> Option<Result<Accepted, Errno>> {
    defers(listener).then(|| accept_held(listener, flags))
}

fn accept_held(listener: &'static Listener, flags: i32) -> Result<Accepted, Errno> {
    let number = find(listener)?.ok_or(Errno::AGAIN)?;
    let remove = |inner: &mut super::ListenerInner| inner.deferral.as_mut()?.remove(number);
    // Another thread may be faster.
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

/// Others may share the listeners of this process from now on.
pub(crate) fn mark_listeners_shared() {
    ARE_SHARED.store(true, Ordering::Relaxed);
}

/// Before `exec`: what is kept goes to all that share the listener. The program that follows is one of them.
pub(crate) fn share_before_exec(listener: &'static Listener) {
    listener.with(|inner| {
        if let Some(deferral) = &mut inner.deferral {
            deferral.is_executing = true;
            deferral.share(usize::MAX);
        }
    });
}

/// After an `exec` that has failed.
pub(crate) fn resume_after_exec(listener: &'static Listener) {
    let was_leaving = listener.with(|inner| {
        inner.deferral.as_mut().is_some_and(|deferral| std::mem::replace(&mut deferral.is_executing, false))
    });
    if was_leaving {
        // Threads that wait for events were told meanwhile, and found nothing. What is taken out here is news to them.
        let _ = find(listener);
    }
}
