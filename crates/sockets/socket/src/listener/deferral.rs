//! `TCP_DEFER_ACCEPT`: a connection is neither reported nor accepted before its first bytes have come, or the program's
//! time is over.
//!
//! Only whoever takes a connection out of the lane listener's backlog can see whether it has bytes. One without any is
//! kept here, hidden, and a *gate* stands for the lane listener wherever somebody waits for it: an epoll instance with
//! the lane listener, all that are kept, and a timer. Others that share the listener find what is still in its backlog:
//! nothing is taken out while one that is kept here can be accepted. What is kept goes back to all of them when one is
//! accepted, for that may keep this process busy, and when this process closes the listener or ends.

use super::Listener;
use super::returned::Returned;
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
const TAKEN_AT_ONCE_MAX: usize = 1 << 16;
/// Connections that one `accept` gives back.
const GIVEN_AT_ONCE_MAX: usize = 64;
/// What the gate says is ready is asked for in so many parts.
const EVENTS_AT_ONCE: usize = 8;
const OF_LANE: u64 = 0;
const OF_TIMER: u64 = 1;
const OF_RETURNED: u64 = 2;
const FIRST_NUMBER: u64 = 3;

/// Whether others may share the listeners of this process: it has forked, has left them to a program, or has them from
/// another process or program.
static ARE_SHARED: AtomicBool = AtomicBool::new(false);

/// The connections that a listener keeps back.
pub(crate) struct Deferral {
    gate: HiddenFd,
    timer: HiddenFd,
    pub(crate) returned: Returned,
    /// How long a connection waits for its bytes; 0: the program has turned it off.
    pub(crate) wait_ns: u64,
    next_number: u64,
    /// The first that came first.
    kept: VecDeque<Kept>,
    /// Nothing is kept here: a thread calls `exec`, and what came in meanwhile would go with this process's memory.
    is_leaving: bool,
}

/// A connection without bytes, when it was last asked.
struct Kept {
    /// What the gate calls it.
    number: u64,
    lifeline: HiddenFd,
    tuple: Tuple,
    opener: Opener,
    due_ns: u64,
}

enum Seen {
    /// The connection of this number can be accepted.
    Ready(u64),
    /// There is one in the backlog.
    Arrival,
    /// There is one that another process, or this one, has given back.
    Returned,
    Nothing,
}

impl Deferral {
    /// What `fd`, a TCP listener, asks of its lane listener; `None`: not to wait.
    ///
    /// # Errors
    /// `MFILE` and its kin, where there is no descriptor left.
    pub fn asked_by(fd: RawFd, lane_fd: RawFd) -> Result<Option<Self>, Errno> {
        match wait_ns_of(fd) {
            0 => Ok(None),
            wait_ns => Self::new(lane_fd, wait_ns, Returned::new(lane_fd)?).map(Some),
        }
    }

    /// As [`Deferral::asked_by`], with what the program before `exec`, and others that share the listener, have left
    /// among `sockets`.
    ///
    /// # Errors
    /// As [`Deferral::asked_by`].
    pub fn inherited(fd: RawFd, lane_fd: RawFd, sockets: &[RawFd]) -> Result<Option<Self>, Errno> {
        match Returned::inherited(lane_fd, sockets) {
            Some(returned) => {
                note_shared();
                Self::new(lane_fd, wait_ns_of(fd), returned).map(Some)
            }
            None => Self::asked_by(fd, lane_fd),
        }
    }

    pub(crate) fn new(lane_fd: RawFd, wait_ns: u64, returned: Returned) -> Result<Self, Errno> {
        let gate = HiddenFd::hide(epoll::create(epoll::CreateFlags::CLOEXEC)?, Need::Required)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = HiddenFd::hide(rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?, Need::Required)?;
        // SAFETY: the number of a listener that the caller keeps open. Were it closed, the call would fail.
        let lane = unsafe { BorrowedFd::borrow_raw(lane_fd) };
        epoll::add(gate.fd()?, lane, EventData::new_u64(OF_LANE), EventFlags::IN)?;
        epoll::add(gate.fd()?, timer.fd()?, EventData::new_u64(OF_TIMER), EventFlags::IN)?;
        epoll::add(gate.fd()?, returned.exit()?, EventData::new_u64(OF_RETURNED), EventFlags::IN)?;
        Ok(Self { gate, timer, returned, wait_ns, next_number: FIRST_NUMBER, kept: VecDeque::new(), is_leaving: false })
    }

    /// Stands for the lane listener wherever somebody waits for it.
    pub fn gate(&self) -> RawFd {
        self.gate.raw()
    }

    /// Where it leaves connections to others.
    pub fn returned(&self) -> &Returned {
        &self.returned
    }

    pub(crate) fn set_wait_ns(&mut self, wait_ns: u64) {
        self.wait_ns = wait_ns;
        if wait_ns == 0 {
            self.kept.iter_mut().for_each(|kept| kept.due_ns = 0);
            self.set_timer();
        }
    }

    /// Has the timer wake those who wait when the first connection is due. It stays readable until that is accepted.
    fn set_timer(&self) {
        let first_ns = self.kept.iter().map(|kept| kept.due_ns).min();
        // No time at all would stop it.
        let left_ns = first_ns.map_or(0, |due_ns| due_ns.saturating_sub(now_ns()).max(1));
        let it_value = Timespec { tv_sec: (left_ns / 1_000_000_000) as _, tv_nsec: (left_ns % 1_000_000_000) as _ };
        let once = Itimerspec { it_interval: Timespec::default(), it_value };
        let _ =
            self.timer.fd().and_then(|timer| rustix::time::timerfd_settime(timer, TimerfdTimerFlags::empty(), &once));
    }

    fn look(&self) -> Result<Seen, Errno> {
        if self.is_leaving {
            return Ok(Seen::Nothing);
        }
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; EVENTS_AT_ONCE];
        let count = epoll::wait(self.gate.fd()?, &mut events, Some(&Timespec::default()))?;
        let ready = events[..count].iter().map(|event| event.data.u64());
        let now_ns = now_ns();
        let is_due = |kept: &&Kept| kept.due_ns <= now_ns;
        let due = self.kept.iter().find(is_due).map(|kept| kept.number);
        if let Some(number) = ready.clone().filter(|number| *number >= FIRST_NUMBER).chain(due).min() {
            return Ok(Seen::Ready(number));
        }
        if ready.clone().any(|number| number == OF_TIMER) {
            self.set_timer();
        }
        let is_there = |place| ready.clone().any(|number| number == place);
        Ok(match (is_there(OF_RETURNED), is_there(OF_LANE)) {
            (true, _) => Seen::Returned,
            (false, true) => Seen::Arrival,
            (false, false) => Seen::Nothing,
        })
    }

    /// `due_ns`: when one that was kept before may be accepted without bytes.
    fn keep(&mut self, accepted: Accepted, due_ns: Option<u64>) -> Result<(), Errno> {
        let Accepted { lifeline, tuple, opener } = accepted;
        let lifeline = HiddenFd::hide(lifeline, Need::Required)?;
        let due_ns = now_ns().saturating_add(self.wait_ns).min(due_ns.unwrap_or(u64::MAX));
        let kept = Kept { number: self.next_number, lifeline, tuple, opener, due_ns };
        self.next_number += 1;
        self.take_back(kept)
    }

    fn take_back(&mut self, kept: Kept) -> Result<(), Errno> {
        epoll::add(self.gate.fd()?, kept.lifeline.fd()?, EventData::new_u64(kept.number), EventFlags::IN)?;
        let place = self.kept.partition_point(|earlier| earlier.number < kept.number);
        self.kept.insert(place, kept);
        self.set_timer();
        if self.is_leaving {
            self.give_back(usize::MAX);
        }
        Ok(())
    }

    /// Leaves the first connections to all processes that share the listener. What finds no room stays.
    pub fn give_back(&mut self, count_max: usize) {
        self.give_back_if(count_max, |_| true);
    }

    /// Leaves to a child what it would keep back as well.
    pub fn leave_to_child(&mut self) {
        self.give_back_if(usize::MAX, |lifeline| !begins_with_message(lifeline));
    }

    fn give_back_if(&mut self, count_max: usize, is_wanted: impl Fn(BorrowedFd<'_>) -> bool) {
        let Self { gate, returned, kept, .. } = self;
        let mut left = count_max;
        kept.retain(|one| {
            let Ok(lifeline) = one.lifeline.fd() else { return true };
            if left == 0 || !is_wanted(lifeline) || returned.give(lifeline, one.due_ns).is_err() {
                return true;
            }
            left -= 1;
            // Before it is closed, as in `release`.
            let _ = gate.fd().map(|gate| epoll::delete(gate, lifeline));
            false
        });
        self.set_timer();
    }

    fn release(&mut self, number: u64) -> Option<Kept> {
        let place = self.kept.iter().position(|kept| kept.number == number)?;
        let kept = self.kept.remove(place)?;
        // Before it is closed: a duplicate would stay in the gate.
        let _ = epoll::delete(self.gate.fd().ok()?, kept.lifeline.fd().ok()?);
        self.set_timer();
        Some(kept)
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
    !keeps_back(listener) || !matches!(find(listener), Ok(None))
}

/// Whether this process, which is about to use the listener, keeps connections back. One that does not takes none that
/// its parent leaves either, and must not hold them: their clients would wait in vain when the parent has gone.
fn keeps_back(listener: &'static Listener) -> bool {
    listener.with(|inner| {
        inner.of_parent = None;
        inner.deferral.is_some()
    })
}

/// The number of a connection that can be accepted.
fn find(listener: &'static Listener) -> Result<Option<u64>, Errno> {
    for _ in 0..TAKEN_AT_ONCE_MAX {
        let seen = listener.with(|inner| inner.deferral.as_ref().map_or(Ok(Seen::Nothing), Deferral::look));
        match seen? {
            Seen::Ready(number) => return Ok(Some(number)),
            Seen::Nothing => return Ok(None),
            Seen::Arrival => take_in(listener)?,
            Seen::Returned => take_returned(listener)?,
        }
    }
    Ok(None)
}

/// Under the lock, so that no thread that calls `exec` comes between.
fn take_in(listener: &'static Listener) -> Result<(), Errno> {
    let (lane_fd, key) = listener.lane().ok_or(Errno::BADF)?;
    listener.with(|inner| {
        let Some(deferral) = inner.deferral.as_mut().filter(|deferral| !deferral.is_leaving) else { return Ok(()) };
        match rendezvous::accept(lane_fd, &key, libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) {
            // Another process was faster.
            Err(Errno::AGAIN) => Ok(()),
            Err(error) => Err(error),
            Ok(accepted) => deferral.keep(accepted, None),
        }
    })
}

fn take_returned(listener: &'static Listener) -> Result<(), Errno> {
    let (_, key) = listener.lane().ok_or(Errno::BADF)?;
    listener.with(|inner| {
        let Some(deferral) = inner.deferral.as_mut().filter(|deferral| !deferral.is_leaving) else { return Ok(()) };
        let returned = deferral.returned.take(&key)?;
        returned.map_or(Ok(()), |(accepted, due_ns)| deferral.keep(accepted, Some(due_ns)))
    })
}

/// As [`rendezvous::accept`], of a listener that keeps connections back; `None`: it does not.
pub(crate) fn accept(listener: &'static Listener, flags: i32) -> Option<Result<Accepted, Errno>> {
    keeps_back(listener).then(|| accept_kept(listener, flags))
}

fn accept_kept(listener: &'static Listener, flags: i32) -> Result<Accepted, Errno> {
    let number = find(listener)?.ok_or(Errno::AGAIN)?;
    let release = |inner: &mut super::ListenerInner| inner.deferral.as_mut()?.release(number);
    // Another thread may be faster.
    let kept = listener.with(release).ok_or(Errno::AGAIN)?;
    let to_lowest = || rustix::io::fcntl_dupfd_cloexec(kept.lifeline.fd()?, 0);
    match limit::retry_with_room(to_lowest, |error| *error == Errno::MFILE) {
        Ok(lifeline) => {
            let (is_cloexec, is_nonblocking) = (flags & libc::SOCK_CLOEXEC != 0, flags & libc::SOCK_NONBLOCK != 0);
            rendezvous::set_modes(lifeline.as_fd(), is_cloexec, is_nonblocking)?;
            if ARE_SHARED.load(Ordering::Relaxed) {
                give_back(listener, GIVEN_AT_ONCE_MAX);
            }
            Ok(Accepted { lifeline, tuple: kept.tuple, opener: kept.opener })
        }
        Err(error) => {
            listener.with(|inner| inner.deferral.as_mut().map_or(Ok(()), |deferral| deferral.take_back(kept)))?;
            Err(error)
        }
    }
}

fn give_back(listener: &'static Listener, count_max: usize) {
    listener.with(|inner| inner.deferral.as_mut().map(|deferral| deferral.give_back(count_max)));
}

/// Others may share the listeners of this process from now on.
pub(crate) fn note_shared() {
    ARE_SHARED.store(true, Ordering::Relaxed);
}

/// Before `exec`: what is kept goes to all that share the listener. The program that follows is one of them.
pub(crate) fn leave(listener: &'static Listener) {
    listener.with(|inner| {
        if let Some(deferral) = &mut inner.deferral {
            deferral.is_leaving = true;
            deferral.give_back(usize::MAX);
        }
    });
}

/// After an `exec` that has failed.
pub(crate) fn stay(listener: &'static Listener) {
    let was_leaving = listener.with(|inner| {
        inner.deferral.as_mut().is_some_and(|deferral| std::mem::replace(&mut deferral.is_leaving, false))
    });
    if was_leaving {
        // Threads that wait for events were told meanwhile, and found nothing. What is taken out here is news to them.
        let _ = find(listener);
    }
}
