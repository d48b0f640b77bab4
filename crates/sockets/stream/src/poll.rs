//! `poll` with connections that have met their other end.
//!
//! The kernel's own readiness of each socket is the truth for what TCP carries; a lane adds what it carries. A wait
//! polls the lanes in memory for a while, then asks the peers to ring and sleeps in the kernel on the sockets and the
//! bells together.

mod young;

use crate::connection::{LaneReport, Parked, Use};
use crate::epoll;
use crate::lifecycle;
use crate::short_list::ShortList;
use crate::table::{self, Entry};
use libc::{pollfd, sigset_t};
use rustix::io::Errno;
use socket::process::blocking;
use socket::process::clock::{TICKS_PER_MICROSECOND, now_ns, ticks};
use socket::process::signals::{self, HandlersRun, SignalCheckpoint};
use socket::process::threads;
use std::cell::Cell;
use std::os::fd::RawFd;
use wait::{Action, Spin};
use young::HeldYoung;

const INPUT: i16 = libc::POLLIN | libc::POLLRDNORM;
const OUTPUT: i16 = libc::POLLOUT | libc::POLLWRNORM;
/// Polls of the lanes that take as long as one system call.
const POLLS_PER_CALL: u32 = 100;
/// A call that finds ready lanes may omit other ready descriptors for at most this time.
const KERNEL_EVERY_TICKS: u64 = 20 * TICKS_PER_MICROSECOND;

thread_local! {
    /// The entries of which this thread has last asked the kernel, as a hash, and when, by the processor's clock.
    static KERNEL_ASKED: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

/// Returns whether a descriptor is a connection that has met its other end. What the lanes of a set of such connections
/// have becomes visible in the kernel first.
#[inline]
pub fn concerns(fd: RawFd) -> bool {
    match table::get(fd) {
        Entry::None => false,
        // Another thread may let it meet its other end meanwhile.
        Entry::Young(_) => !threads::is_single(),
        Entry::Connection(connection) => connection.has_met() || !threads::is_single(),
        Entry::Set(_) => {
            epoll::show_to_kernel(fd);
            false
        }
    }
}

/// Entries that any descriptor limit allows.
const ENTRIES_UNCHECKED: u64 = 64;

/// Returns whether a call may have this number of entries: at most the descriptor limit, as in the kernel.
pub fn allows(entries: u64) -> bool {
    let limit = || rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    entries <= ENTRIES_UNCHECKED || limit().is_none_or(|limit| entries <= limit)
}

/// Returns whether an entry has an event that `poll` reports.
fn has_event(entry: &pollfd) -> bool {
    entry.revents != 0
}

/// Entries of a call that are kept on the stack, and connections among them. Threads may have 16 KiB of it, so that the
/// parts of a call are functions of their own, too.
const SHORT_ENTRIES: usize = 32;
const SHORT_WATCHED: usize = 16;

/// The entry that the kernel ignores.
pub(crate) const NO_ENTRY: pollfd = pollfd { fd: -1, events: 0, revents: 0 };

pub(crate) type Entries = ShortList<pollfd, SHORT_ENTRIES>;

/// One of the program's entries that is a connection.
#[derive(Clone, Copy)]
struct Watched {
    /// Its index among the program's entries.
    index: u32,
    /// The connection in its present use: another thread may close it meanwhile.
    now: Use,
    wanted: i16,
    /// It is the first entry of its connection among the first ones, and so has the bell: with many entries of few
    /// connections, a call stays within the descriptor limit.
    has_bell: bool,
}

impl Watched {
    /// Returns the wanted events that the lanes have.
    fn lane_events(&self) -> i16 {
        self.lane_report().ready
    }

    fn lane_report(&self) -> LaneReport {
        let report = || self.now.connection().lane_report(self.now.fd(), self.wanted);
        if self.now.is_closed() { LaneReport::default() } else { report() }
    }

    fn uses_lane(&self) -> bool {
        let connection = self.now.connection();
        let receives = || self.wanted & INPUT != 0 && connection.receives_by_lane();
        receives() || (self.wanted & OUTPUT != 0 && connection.sends_by_lane())
    }

    fn park(&self) -> Parked {
        self.now.connection().park(self.wanted)
    }
}

/// A call of `poll`, and the entries that the kernel is asked for in its place.
struct Call<'a> {
    entries: &'a mut [pollfd],
    /// A hash of the entries.
    hash: u64,
    watched: ShortList<Option<Watched>, SHORT_WATCHED>,
    /// The program's entries, then the bells of the watched connections.
    in_kernel: Entries,
    /// Returns whether an entry's events end the wait.
    ends_wait: fn(&pollfd) -> bool,
    /// Indices of entries whose only events do not end the wait. The kernel reports those without end, so that it is
    /// not asked any more.
    muted: ShortList<usize, SHORT_WATCHED>,
}

impl<'a> Call<'a> {
    #[inline(never)]
    fn new(entries: &'a mut [pollfd], hash: u64, ends_wait: fn(&pollfd) -> bool) -> Self {
        let (in_kernel, muted) = (Entries::new(NO_ENTRY), ShortList::new(0));
        let mut call = Self { entries, hash, watched: ShortList::new(None), in_kernel, ends_wait, muted };
        for (index, entry) in call.entries.iter().enumerate() {
            if let Entry::Connection(connection) = table::get(entry.fd) {
                let known: &[Option<Watched>] = call.watched.as_slice();
                let is_its = |it: &Watched| std::ptr::eq(it.now.connection(), connection);
                let has_bell = !known.iter().take(SHORT_WATCHED).flatten().any(is_its);
                let (now, wanted) = (connection.current_use(entry.fd), entry.events);
                call.watched.push(Some(Watched { index: index as u32, now, wanted, has_bell }));
            }
        }
        call
    }

    /// Stores what the lanes report. Returns whether they report anything, and whether the kernel may have more.
    #[inline]
    fn poll_lanes(&mut self) -> (bool, bool) {
        let (mut is_any, mut asks_kernel) = (false, false);
        for watched in self.watched.as_slice().iter().flatten() {
            let report = watched.lane_report();
            self.entries[watched.index as usize].revents = report.ready;
            is_any |= report.ready != 0;
            asks_kernel |= report.asks_kernel;
        }
        (is_any, asks_kernel)
    }

    /// Returns the number of entries with events.
    fn count(&self) -> usize {
        self.entries.iter().filter(|entry| (self.ends_wait)(entry)).count()
    }

    fn watched(&self) -> impl Iterator<Item = &Watched> {
        self.watched.as_slice().iter().flatten()
    }

    /// Returns whether a wanted direction uses a lane. Otherwise the kernel reports what comes next, or a ring.
    fn has_lanes(&self) -> bool {
        self.watched().any(Watched::uses_lane)
    }

    fn any_lane_is_ready(&self) -> bool {
        self.watched().any(|watched| watched.lane_events() != 0)
    }

    /// Asks the kernel, and stores what it and the lanes report. Returns the number of entries with events.
    ///
    /// # Safety
    /// `mask` is null or points to a signal set.
    #[inline(never)]
    unsafe fn ask(&mut self, timeout_ns: Option<u64>, mask: *const sigset_t) -> Result<usize, Errno> {
        lifecycle::follow_switch();
        self.in_kernel.clear();
        self.entries.iter().for_each(|entry| self.in_kernel.push(pollfd { revents: 0, ..*entry }));
        for watched in self.watched.as_slice().iter().flatten() {
            if watched.now.connection().sends_by_lane() {
                self.in_kernel.as_mut_slice()[watched.index as usize].events &= !OUTPUT;
            }
            if watched.has_bell && timeout_ns != Some(0) {
                self.in_kernel.push(pollfd { fd: watched.now.connection().bell(), events: libc::POLLIN, revents: 0 });
            }
        }
        let in_kernel = self.in_kernel.as_mut_slice();
        self.muted.as_slice().iter().for_each(|index| in_kernel[*index].fd = -1);
        // SAFETY: `mask` is null or a signal set, by this function's contract.
        unsafe { blocking::ppoll_slice(in_kernel, timeout_ns, mask) }?;
        KERNEL_ASKED.set((self.hash, ticks()));
        let (of_program, of_bells) = in_kernel.split_at(self.entries.len());
        for (entry, found) in self.entries.iter_mut().zip(of_program) {
            entry.revents = found.revents;
        }
        let with_bells = self.watched.as_slice().iter().flatten().filter(|watched| watched.has_bell);
        for (watched, bell) in with_bells.zip(of_bells) {
            if bell.revents != 0 && !watched.now.is_closed() {
                watched.now.connection().answer_bell(watched.now.fd());
            }
        }
        for watched in self.watched.as_slice().iter().flatten() {
            let entry = &mut self.entries[watched.index as usize];
            if entry.revents & !OUTPUT != 0 && !watched.now.is_closed() {
                let connection = watched.now.connection();
                let wanted = if connection.sends_by_lane() { entry.events & !OUTPUT } else { entry.events };
                entry.revents = connection.confirm_events(entry.fd, entry.revents, wanted);
            }
            entry.revents |= watched.lane_events();
        }
        self.mute();
        Ok(self.count())
    }

    /// Mutes the entries that have only events which do not end the wait.
    fn mute(&mut self) {
        for (index, entry) in self.entries.iter().enumerate() {
            if entry.revents != 0 && !(self.ends_wait)(entry) {
                self.muted.push(index);
            }
        }
    }

    /// Asks the peers to ring.
    fn park(&self) -> Parking {
        let mut parking = Parking { short: [const { None }; SHORT_WATCHED], long: Vec::new() };
        let mut watched = self.watched();
        parking.short.iter_mut().zip(&mut watched).for_each(|(place, it)| *place = Some(it.park()));
        if self.watched.as_slice().len() > SHORT_WATCHED {
            signals::without_handlers(|| parking.long.extend(watched.map(Watched::park)));
        }
        parking
    }
}

/// Stores what the lanes report as the events of all entries. Returns a hash of the entries, and whether the kernel may
/// have other events of these connections.
fn take_lane_events(entries: &mut [pollfd]) -> (u64, bool) {
    let (mut hash, mut asks_kernel) = (0, false);
    for entry in entries {
        let report = match table::get(entry.fd) {
            Entry::Connection(connection) => connection.lane_report(entry.fd, entry.events),
            Entry::None | Entry::Young(_) | Entry::Set(_) => LaneReport::default(),
        };
        entry.revents = report.ready;
        asks_kernel |= report.asks_kernel;
        // The mixing of FNV (Fowler, Noll and Vo).
        hash = (hash ^ (entry.fd as u64) << 16 ^ entry.events as u64).wrapping_mul(0x0100_0000_01b3);
    }
    (hash, asks_kernel)
}

/// Returns whether it is time that this thread asks the kernel for the entries with this hash.
fn is_kernel_due(hash: u64) -> bool {
    let (asked, asked_ticks) = KERNEL_ASKED.get();
    hash != asked || ticks().wrapping_sub(asked_ticks) > KERNEL_EVERY_TICKS
}

/// The connections that a wait relies on to be rung for.
struct Parking {
    short: [Option<Parked>; SHORT_WATCHED],
    long: Vec<Parked>,
}

impl Drop for Parking {
    fn drop(&mut self) {
        if self.long.capacity() > 0 {
            signals::without_handlers(|| drop(std::mem::take(&mut self.long)));
        }
    }
}

/// Waits until one of the entries has an event, as `ppoll(2)`; without a timeout it waits without limit. Returns the
/// number of entries with events.
///
/// # Errors
/// Those of `ppoll(2)`.
///
/// # Safety
/// `mask` is null or points to a signal set.
pub unsafe fn poll(entries: &mut [pollfd], timeout_ns: Option<u64>, mask: *const sigset_t) -> Result<usize, Errno> {
    // SAFETY: `mask` is null or a signal set, by this function's contract.
    unsafe { poll_until(entries, has_event, timeout_ns, mask) }
}

/// As [`poll`], for entries that end the wait, and are counted, if `ends_wait` says so.
///
/// # Safety
/// As [`poll`].
pub(crate) unsafe fn poll_until(
    entries: &mut [pollfd],
    ends_wait: fn(&pollfd) -> bool,
    timeout_ns: Option<u64>,
    mask: *const sigset_t,
) -> Result<usize, Errno> {
    let mut began = SignalCheckpoint::now();
    let deadline_ns = timeout_ns.map(|timeout_ns| now_ns().saturating_add(timeout_ns));
    let _held = HeldYoung::hold(entries);
    let (hash, asks_kernel) = take_lane_events(entries);
    let is_kernel_due = asks_kernel || is_kernel_due(hash);
    let of_lanes = if is_kernel_due { 0 } else { entries.iter().filter(|entry| ends_wait(entry)).count() };
    if of_lanes > 0 && mask.is_null() {
        return Ok(of_lanes);
    }
    let mut call = Call::new(entries, hash, ends_wait);
    if !call.has_lanes() {
        // The kernel applies the mask: a handler that runs before that has run before the call.
        let began = mask.is_null().then_some(began);
        // SAFETY: `mask` is null or a signal set, by this function's contract.
        return unsafe { sleep(&mut call, began, deadline_ns, mask) };
    }
    let ready = loop {
        if of_lanes > 0 || (timeout_ns != Some(0) && !is_kernel_due) {
            break of_lanes;
        }
        // SAFETY: the mask is null.
        match unsafe { call.ask(Some(0), std::ptr::null()) } {
            // The handler ran before the call had its mask, which might keep the signal out.
            Err(Errno::INTR) if !mask.is_null() => began = SignalCheckpoint::now(),
            asked => break asked?,
        }
    };
    if ready > 0 || timeout_ns == Some(0) {
        // SAFETY: `mask` is null or a signal set, by this function's contract.
        return unsafe { blocking::deliver_signals(mask) }.map(|()| ready).or(if ready > 0 {
            Ok(ready)
        } else {
            Err(Errno::INTR)
        });
    }
    // SAFETY: `mask` is null or a signal set, by this function's contract.
    let _masked = unsafe { signals::mask_while_polling(mask, &mut began) };
    match spin(&mut call, began, deadline_ns)? {
        Some(ready) => Ok(ready),
        // SAFETY: `mask` is null or a signal set, by this function's contract.
        None => unsafe { sleep(&mut call, Some(began), deadline_ns, mask) },
    }
}

/// Polls the lanes, and the kernel from time to time. Returns `None` when it is time to sleep.
#[inline(never)]
fn spin(call: &mut Call, began: SignalCheckpoint, deadline_ns: Option<u64>) -> Result<Option<usize>, Errno> {
    let mut spin = Spin::new();
    loop {
        if let (true, asks_kernel) = call.poll_lanes() {
            let ready = if asks_kernel || is_kernel_due(call.hash) {
                // SAFETY: the mask is null.
                unsafe { call.ask(Some(0), std::ptr::null()) }?
            } else {
                call.count()
            };
            if ready > 0 {
                return Ok(Some(ready));
            }
        }
        match spin.iterate_by(1 + call.watched.as_slice().len() as u32) {
            Action::Poll => {}
            Action::PollKernel => {
                if began.since() != HandlersRun::None {
                    return Err(Errno::INTR);
                }
                // SAFETY: the mask is null.
                let ready = unsafe { call.ask(Some(0), std::ptr::null()) }?;
                if ready > 0 || deadline_ns.is_some_and(|deadline_ns| now_ns() >= deadline_ns) {
                    return Ok(Some(ready));
                }
                let _ = spin.iterate_by(POLLS_PER_CALL);
            }
            Action::Block => return Ok(None),
        }
    }
}

/// Asks the peers to ring, polls once more, and sleeps in the kernel. A handler that has run since `began` ends the
/// call.
///
/// # Safety
/// `mask` is null or points to a signal set.
#[inline(never)]
unsafe fn sleep(
    call: &mut Call,
    mut began: Option<SignalCheckpoint>,
    deadline_ns: Option<u64>,
    mask: *const sigset_t,
) -> Result<usize, Errno> {
    loop {
        let parked = call.park();
        let is_ready = call.any_lane_is_ready();
        if began.is_some_and(|began| began.since() != HandlersRun::None) {
            return Err(Errno::INTR);
        }
        let left_ns = deadline_ns.map(|deadline_ns| deadline_ns.saturating_sub(now_ns()));
        // SAFETY: `mask` is null or a signal set, by this function's contract.
        let ready = unsafe { call.ask(if is_ready { Some(0) } else { left_ns }, mask) };
        drop(parked);
        match ready? {
            0 if deadline_ns.is_none_or(|deadline_ns| now_ns() < deadline_ns) => {}
            ready => return Ok(ready),
        }
        if !mask.is_null() {
            // The handlers that ran since were kept out until the kernel's wait was over.
            began = began.map(|_| SignalCheckpoint::now());
        }
    }
}
