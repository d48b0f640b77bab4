//! poll and select over lanes.
//!
//! A call that names no descriptor of ours is the kernel's at once. Otherwise connections are looked at in memory, the
//! others in the kernel; then the thread spins for a while, has the peers ring, and sleeps in the kernel's `ppoll` on
//! everything together.

mod confined;

pub use confined::poll_entries_confined;

use crate::connection::Connection;
use crate::descriptor::hidden;
use crate::entry::{self, Entry};
use crate::epoll::{EpollSet, SleepGuard};
use crate::lifecycle;
use crate::listener::Listener;
use crate::process::background_connects;
use crate::process::blocking;
use crate::process::clock::now_ns;
use crate::process::sandbox;
use crate::process::signals::{self, HandlersRun, SignalCheckpoint};
use crate::process::threads;
use libc::{
    POLLERR, POLLHUP, POLLIN, POLLOUT, POLLPRI, POLLRDBAND, POLLRDNORM, POLLWRBAND, POLLWRNORM, fd_set, pollfd,
    sigset_t,
};
use rustix::io::Errno;
use rustix::process::Resource;
use std::os::fd::RawFd;
use wait::{Action, Spin};

/// Calls with at most so many descriptors allocate nothing, so that a signal handler may make them.
const STACK_ENTRIES: usize = 64;
/// A glance at a connection costs as much as this many looks at a bare lane.
const LANE_POLLS_PER_POLL: u32 = 24;
/// How long a thread sleeps when it cannot be woken for everything.
const UNWAKEABLE_POLL_NS: u64 = 1_000_000;
/// Longest sleep beside other threads while some connection has no lanes.
const LIFELINE_POLL_NS: u64 = 100_000_000;
const MILLISECOND_NS: u64 = 1_000_000;

const FOR_READING: i16 = POLLIN | POLLRDNORM | POLLRDBAND;
const FOR_WRITING: i16 = POLLOUT | POLLWRNORM | POLLWRBAND;
const FOR_INPUT: i16 = POLLIN | POLLRDNORM;
/// What makes a descriptor readable or writable for `select`, as the kernel has it.
const READABLE: i16 = FOR_READING | libc::POLLHUP | libc::POLLERR;
const WRITABLE: i16 = FOR_WRITING | libc::POLLERR;

const NOTHING: pollfd = pollfd { fd: -1, events: 0, revents: 0 };
const WORD_BITS: usize = libc::c_ulong::BITS as usize;

/// Entries of a call in a process under a system call filter.
const CONFINED_ENTRIES_MAX: u64 = 1 << 20;

/// Whether a call may have so many entries: as many as the program may have descriptors. Who has more entries than the
/// least limit of a program that works pays for the question with them.
pub fn allows_entries(entries: u64) -> bool {
    // Under a filter the question may not be asked; the kernel's limit is no higher by default.
    let is_confined = crate::process::sandbox::is_confined();
    entries <= STACK_ENTRIES as u64
        || (is_confined && entries <= CONFINED_ENTRIES_MAX)
        || !is_confined && rustix::process::getrlimit(Resource::Nofile).current.is_none_or(|limit| entries <= limit)
}

/// `ppoll(2)`; no time-out waits for ever.
///
/// # Errors
/// As the system call.
///
/// # Safety
/// `mask` is null or a signal set.
pub unsafe fn poll(fds: &mut [pollfd], timeout_ns: Option<u64>, mask: *const sigset_t) -> Result<usize, Errno> {
    if fds.iter().any(|entry| is_ours(entry.fd)) {
        return poll_lanes(fds, has_answer, &mut Deadline::new(timeout_ns), mask);
    }
    match timeout_ns {
        _ if !mask.is_null() => {}
        None => return blocking::poll(fds, -1),
        Some(ns) if ns % MILLISECOND_NS == 0 && i32::try_from(ns / MILLISECOND_NS).is_ok() => {
            return blocking::poll(fds, (ns / MILLISECOND_NS) as i32);
        }
        Some(_) => {}
    }
    // SAFETY: the caller's mask.
    unsafe { blocking::ppoll(fds, timeout_ns, mask) }
}

/// As [`poll`], in a process under a system call filter: the kernel is asked by the call that the program made, `poll`
/// or `ppoll`.
///
/// # Errors
/// As the system call.
///
/// # Safety
/// As [`poll`].
pub unsafe fn poll_confined(
    fds: &mut [pollfd],
    timeout_ns: Option<u64>,
    mask: *const sigset_t,
    is_ppoll: bool,
) -> Result<usize, Errno> {
    if fds.iter().any(|entry| is_ours(entry.fd)) {
        return poll_lanes(fds, has_answer, &mut Deadline::new(timeout_ns), mask);
    }
    if is_ppoll {
        // SAFETY: the caller's mask.
        return unsafe { blocking::ppoll(fds, timeout_ns, mask) };
    }
    let timeout_ms = timeout_ns.map_or(-1, |ns| i32::try_from(ns.div_ceil(MILLISECOND_NS)).unwrap_or(i32::MAX));
    blocking::poll(fds, timeout_ms)
}

fn is_ours(fd: RawFd) -> bool {
    match entry::get(fd) {
        Entry::Connection(_) | Entry::Listener(_) => true,
        Entry::EpollSet(set) => set.has_lanes(),
        Entry::Stream(_) => is_connect_pending(fd),
        Entry::Confined(_) | Entry::None => false,
    }
}

/// `pselect(2)`; no time-out waits for ever. Also answers how much of the time-out is left, if there is one.
///
/// # Safety
/// Each set is null or has a bit for every number below `count`; `mask` is null or a signal set.
pub unsafe fn select(
    count: i32,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout_ns: Option<u64>,
    mask: *const sigset_t,
) -> (Result<usize, Errno>, Option<u64>) {
    let mut deadline = Deadline::new(timeout_ns);
    if timeout_ns.is_some() {
        deadline.start();
    }
    let sets = [read, write, except];
    let count = clamped_count(count);
    let numbers = usize::try_from(count).unwrap_or(0);
    // SAFETY: the caller's sets.
    let names_ours = (0..numbers).any(|fd| {
        let is_ours = || is_ours(fd as RawFd) || matches!(entry::get(fd as RawFd), Entry::Confined(_));
        // SAFETY: the caller's sets.
        unsafe { Bitmaps(sets).events(fd) != 0 && is_ours() }
    });
    let result = if names_ours {
        // SAFETY: the caller's sets.
        unsafe { select_lanes(numbers, Bitmaps(sets), &mut deadline, mask) }
    } else {
        // SAFETY: the caller's.
        unsafe { blocking::pselect(count, sets, timeout_ns, mask) }
    };
    (result, deadline.left_ns())
}

/// The count of a `select`, without numbers that the program has none behind. Programs pass their descriptor limit with
/// sets as large as their descriptors need, because the kernel looks at no more than its own table has room for; and
/// that grows with our hidden numbers.
fn clamped_count(count: i32) -> i32 {
    if count <= libc::FD_SETSIZE as i32 { count } else { hidden::visible_end(count).unwrap_or(count) }
}

unsafe fn select_lanes(
    numbers: usize,
    sets: Bitmaps,
    deadline: &mut Deadline,
    mask: *const sigset_t,
) -> Result<usize, Errno> {
    let mut entries = Entries::new(NOTHING);
    for fd in 0..numbers {
        // SAFETY: the caller's sets.
        let events = unsafe { sets.events(fd) };
        if events != 0 {
            entries.push(pollfd { fd: fd as RawFd, events, revents: 0 });
        }
    }
    let entries = entries.as_mut_slice();
    if sandbox::is_confined() && !entries.iter().any(|entry| is_ours(entry.fd)) {
        let left_ns = deadline.left_ns();
        // SAFETY: the caller's mask.
        poll_entries_confined(entries, left_ns, |entries, left_ns| unsafe { select_entries(entries, left_ns, mask) })?;
    } else {
        poll_lanes(entries, is_selected, deadline, mask)?;
    }
    if entries.iter().any(|entry| entry.revents & libc::POLLNVAL != 0) {
        return Err(Errno::BADF);
    }
    // SAFETY: the caller's sets.
    Ok(entries.iter().map(|entry| unsafe { sets.answer(entry) }).sum())
}

/// As `poll` of the entries, by the call that `select` makes.
unsafe fn select_entries(
    entries: &mut [pollfd],
    timeout_ns: Option<u64>,
    mask: *const sigset_t,
) -> Result<usize, Errno> {
    // SAFETY: all zeros are sets of nothing.
    let mut sets: [fd_set; 3] = unsafe { std::mem::zeroed() };
    let is_within = |fd: RawFd| (0..libc::FD_SETSIZE as RawFd).contains(&fd);
    for entry in entries.iter().filter(|entry| is_within(entry.fd)) {
        for (set, asked) in sets.iter_mut().zip(Bitmaps::ASKED) {
            if entry.events & asked != 0 {
                // SAFETY: the number is within the set.
                unsafe { libc::FD_SET(entry.fd, set) };
            }
        }
    }
    let count = entries.iter().map(|entry| entry.fd + 1).max().unwrap_or(0).min(libc::FD_SETSIZE as i32);
    // SAFETY: the sets have room for so many; the caller's mask.
    let selected = unsafe { blocking::pselect(count, sets.each_mut().map(std::ptr::from_mut), timeout_ns, mask) }?;
    for entry in entries {
        let found = sets.iter().zip([libc::POLLIN, libc::POLLOUT, POLLPRI]);
        // SAFETY: the number is within the set.
        let is_set = |set| is_within(entry.fd) && unsafe { libc::FD_ISSET(entry.fd, set) };
        entry.revents = found.filter(|(set, _)| is_set(*set)).fold(0, |found, (_, event)| found | event);
    }
    Ok(selected)
}

/// The three sets of `select`, each null or a bit for every descriptor asked about, of any number.
#[derive(Clone, Copy)]
struct Bitmaps([*mut fd_set; 3]);

impl Bitmaps {
    const ASKED: [i16; 3] = [FOR_READING, FOR_WRITING, POLLPRI];
    const ANSWERED: [i16; 3] = [READABLE, WRITABLE, POLLPRI];

    unsafe fn events(self, fd: usize) -> i16 {
        let Self(sets) = self;
        sets.into_iter().zip(Self::ASKED).fold(0, |events, (set, asked)| {
            // SAFETY: the caller's set has a bit for the number.
            let is_set = !set.is_null()
                && unsafe { set.cast::<libc::c_ulong>().add(fd / WORD_BITS).read() } >> (fd % WORD_BITS) & 1 != 0;
            if is_set { events | asked } else { events }
        })
    }

    /// Leaves the bits of what is ready; returns how many.
    unsafe fn answer(self, entry: &pollfd) -> usize {
        let Self(sets) = self;
        let fd = entry.fd as usize;
        let mut count = 0;
        for ((set, asked), answered) in sets.into_iter().zip(Self::ASKED).zip(Self::ANSWERED) {
            if set.is_null() {
                continue;
            }
            // SAFETY: the caller's set has a bit for the number.
            let word = unsafe { &mut *set.cast::<libc::c_ulong>().add(fd / WORD_BITS) };
            let bit = 1 << (fd % WORD_BITS);
            if *word & bit != 0 && entry.events & asked != 0 && entry.revents & answered != 0 {
                count += 1;
            } else {
                *word &= !bit;
            }
        }
        count
    }
}

/// When the wait is over. The clock is read when this is first needed.
struct Deadline {
    timeout_ns: Option<u64>,
    at_ns: Option<u64>,
}

impl Deadline {
    fn new(timeout_ns: Option<u64>) -> Self {
        Self { timeout_ns, at_ns: None }
    }

    fn start(&mut self) {
        self.left_ns();
    }

    fn left_ns(&mut self) -> Option<u64> {
        let timeout_ns = self.timeout_ns?;
        if timeout_ns == 0 {
            return Some(0);
        }
        let now = now_ns();
        let at_ns = *self.at_ns.get_or_insert_with(|| now.saturating_add(timeout_ns));
        Some(at_ns.saturating_sub(now))
    }

    fn is_over(&mut self) -> bool {
        self.left_ns() == Some(0)
    }
}

/// What an entry of the program is, and where the kernel's answer about it stands.
#[derive(Clone, Copy)]
enum Target {
    Foreign,
    Connection(&'static Connection),
    Listener(&'static Listener),
    EpollSet(&'static EpollSet),
}

impl Target {
    fn of(fd: RawFd) -> Self {
        match entry::get(fd) {
            Entry::Connection(connection) => Self::Connection(connection),
            Entry::Listener(listener) => Self::Listener(listener),
            Entry::EpollSet(set) if set.has_lanes() => Self::EpollSet(set),
            _ => Self::Foreign,
        }
    }
}

/// A list of which a short one is on the stack.
struct StackList<T> {
    short: [T; STACK_ENTRIES],
    len: usize,
    long: Vec<T>,
}

impl<T: Copy> StackList<T> {
    fn new(filler: T) -> Self {
        Self { short: [filler; STACK_ENTRIES], len: 0, long: Vec::new() }
    }

    fn push(&mut self, entry: T) {
        if self.len < STACK_ENTRIES {
            self.short[self.len] = entry;
        } else {
            if self.len == STACK_ENTRIES {
                self.long.extend_from_slice(&self.short);
            }
            self.long.push(entry);
        }
        self.len += 1;
    }

    fn as_mut_slice(&mut self) -> &mut [T] {
        if self.len > STACK_ENTRIES { &mut self.long } else { &mut self.short[..self.len] }
    }
}

type Entries = StackList<pollfd>;

/// One call: its entries, which of the answers end it, and until when it waits.
struct Call<'a> {
    fds: &'a mut [pollfd],
    /// By what an entry asks for: which answers end the call.
    accepts: fn(&pollfd) -> bool,
    needs_kernel: bool,
    deadline: &'a mut Deadline,
    mask: *const sigset_t,
    began: SignalCheckpoint,
}

fn has_answer(entry: &pollfd) -> bool {
    entry.revents != 0
}

/// As the kernel's `select`: a hang-up makes a descriptor readable, but not writable.
fn is_selected(entry: &pollfd) -> bool {
    let accepted =
        Bitmaps::ASKED.into_iter().zip(Bitmaps::ANSWERED).fold(libc::POLLNVAL, |accepted, (asked, answered)| {
            if entry.events & asked != 0 { accepted | answered } else { accepted }
        });
    entry.revents & accepted != 0
}

fn poll_lanes(
    fds: &mut [pollfd],
    accepts: fn(&pollfd) -> bool,
    deadline: &mut Deadline,
    mask: *const sigset_t,
) -> Result<usize, Errno> {
    let needs_kernel = fds.iter().any(|entry| entry.fd >= 0 && !matches!(Target::of(entry.fd), Target::Connection(_)));
    Call { fds, accepts, needs_kernel, deadline, mask, began: SignalCheckpoint::now() }.run()
}

impl Call<'_> {
    fn run(&mut self) -> Result<usize, Errno> {
        let mut masked = None;
        loop {
            background_connects::advance();
            let ready = self.poll_once(self.needs_kernel)?;
            if ready > 0 {
                return Ok(ready);
            }
            if self.deadline.timeout_ns == Some(0) {
                // SAFETY: the caller's mask.
                return unsafe { blocking::deliver_signals(self.mask) }.map(|()| 0);
            }
            if masked.is_none() && !self.mask.is_null() {
                // SAFETY: the caller's mask.
                unsafe { blocking::deliver_signals(self.mask) }?;
                // From here on, as in the kernel: what comes now runs, or waits until the call is over.
                // SAFETY: as above.
                masked = unsafe { signals::mask_while_polling(self.mask, &mut self.began) };
            }
            if let Some(ready) = self.spin()? {
                return Ok(ready);
            }
            let woken = self.sleep()?;
            if let Some(first) = self.connections().next() {
                first.spin_history().note_wakeup();
            }
            match woken {
                SleepOutcome::Ready(ready) => return Ok(ready),
                SleepOutcome::TimedOut => return Ok(0),
                SleepOutcome::Retry | SleepOutcome::RetryLater => {}
            }
        }
    }

    /// Answers every entry; returns how many have something.
    fn poll_once(&mut self, asks_kernel: bool) -> Result<usize, Errno> {
        if asks_kernel {
            self.poll_kernel()?;
        }
        for entry in self.fds.iter_mut() {
            match Target::of(entry.fd) {
                Target::Connection(connection) => entry.revents = connection.readiness_for_all(entry.events),
                Target::EpollSet(set) => entry.revents = if set.peek(true) { entry.events & FOR_INPUT } else { 0 },
                Target::Foreign if entry.fd < 0 => entry.revents = 0,
                Target::Foreign | Target::Listener(_) => {}
            }
        }
        Ok(self.fds.iter().filter(|entry| (self.accepts)(entry)).count())
    }

    /// Foreign descriptors and listeners.
    fn poll_kernel(&mut self) -> Result<(), Errno> {
        let mut entries = kernel_entries(self.fds, false);
        let entries = entries.as_mut_slice();
        // SAFETY: no mask; the call does not sleep.
        unsafe { blocking::ppoll(entries, Some(0), std::ptr::null()) }?;
        store_kernel_answers(self.fds, entries);
        Ok(())
    }

    fn connections(&self) -> impl Iterator<Item = &'static Connection> {
        self.fds.iter().filter_map(|entry| match Target::of(entry.fd) {
            Target::Connection(connection) => Some(connection),
            _ => None,
        })
    }

    /// Glances at the connections for a while. `Some`: the answer of the call.
    fn spin(&mut self) -> Result<Option<usize>, Errno> {
        let Some(first) = self.connections().next() else { return Ok(None) };
        let connections = self.connections().count();
        let mut spin = Spin::with(first.spin_history());
        loop {
            match spin.iterate_by(LANE_POLLS_PER_POLL.saturating_mul(connections as u32)) {
                Action::Poll if !self.may_be_ready() => continue,
                Action::Poll => {}
                Action::PollKernel => {
                    // SAFETY: the caller's mask.
                    unsafe { blocking::deliver_signals(self.mask) }?;
                    if self.deadline.is_over() {
                        return self.poll_once(self.needs_kernel).map(Some);
                    }
                }
                Action::Block => return Ok(None),
            }
            let ready = self.poll_once(self.needs_kernel)?;
            if ready > 0 {
                return Ok(Some(ready));
            }
            self.check_signals()?;
        }
    }

    /// The kernel says that a handler has run only to those who sleep in it.
    fn check_signals(&self) -> Result<(), Errno> {
        if self.began.since() == HandlersRun::None { Ok(()) } else { Err(Errno::INTR) }
    }

    fn may_be_ready(&self) -> bool {
        self.fds.iter().any(|entry| match Target::of(entry.fd) {
            Target::Connection(connection) => connection.may_be_ready(entry.events),
            _ => false,
        })
    }

    fn sleep(&mut self) -> Result<SleepOutcome, Errno> {
        let mut entries = kernel_entries(self.fds, true);
        let entries = entries.as_mut_slice();
        let left_ns = self.deadline.left_ns();
        let lacks_wakeup = |entry: &pollfd| match Target::of(entry.fd) {
            Target::Connection(connection) => connection.must_poll_for_room(entry.events),
            _ => false,
        };
        let must_poll = background_connects::is_any_pending() || self.fds.iter().any(lacks_wakeup);
        // Another thread may take what says that the rest comes by a lane.
        let may_miss_lanes = !threads::is_single() && self.connections().any(Connection::is_on_lifeline);
        let longest_ns = match () {
            () if must_poll => Some(UNWAKEABLE_POLL_NS),
            () if may_miss_lanes => Some(LIFELINE_POLL_NS),
            () => None,
        };
        let first_ns = longest_ns.map(|longest_ns| left_ns.map_or(longest_ns, |left_ns| left_ns.min(longest_ns)));
        match self.block(entries, first_ns.or(left_ns))? {
            SleepOutcome::TimedOut if longest_ns.is_some() && !self.deadline.is_over() => {
                return Ok(SleepOutcome::Retry);
            }
            SleepOutcome::RetryLater => {}
            woken => return Ok(woken),
        }
        // What the kernel would report again at once is left out for a moment.
        entries.iter_mut().filter(|entry| entry.revents != 0).for_each(|entry| entry.fd = -1);
        let left_ns = self.deadline.left_ns();
        match self
            .block(entries, Some(left_ns.map_or(UNWAKEABLE_POLL_NS, |left_ns| left_ns.min(UNWAKEABLE_POLL_NS))))?
        {
            SleepOutcome::TimedOut if self.deadline.is_over() => Ok(SleepOutcome::TimedOut),
            SleepOutcome::Ready(ready) => Ok(SleepOutcome::Ready(ready)),
            _ => Ok(SleepOutcome::Retry),
        }
    }

    /// Has the peers ring, looks once more, sleeps.
    fn block(&mut self, entries: &mut [pollfd], timeout_ns: Option<u64>) -> Result<SleepOutcome, Errno> {
        let parked = Parked::park(self.fds);
        // The kernel itself tells at once what foreign descriptors have.
        if self.poll_once(false)? > 0 {
            drop(parked);
            return self.poll_once(self.needs_kernel).map(SleepOutcome::Ready);
        }
        self.check_signals()?;
        // What a sender holds back becomes ready without a ring.
        let held_ns = self.connections().filter_map(Connection::held_left_ns).min();
        let held_ns = held_ns.filter(|held_ns| timeout_ns.is_none_or(|timeout_ns| *held_ns < timeout_ns));
        let timeout_ns = held_ns.or(timeout_ns);
        let count = match timeout_ns {
            None if self.mask.is_null() => blocking::poll(entries, -1),
            // SAFETY: the caller's mask.
            _ => unsafe { blocking::ppoll(entries, timeout_ns, self.mask) },
        }?;
        // A ring is taken by a watcher that is not parked any more.
        drop(parked);
        store_kernel_answers(self.fds, entries);
        let can_sleep_again = count == 0 || take_wakeups(self.fds, entries);
        let ready = self.poll_once(false)?;
        Ok(match () {
            () if ready > 0 => SleepOutcome::Ready(ready),
            () if count == 0 && held_ns.is_none() => SleepOutcome::TimedOut,
            () if can_sleep_again => SleepOutcome::Retry,
            () => SleepOutcome::RetryLater,
        })
    }
}

enum SleepOutcome {
    Ready(usize),
    TimedOut,
    Retry,
    /// As `Nothing`, and the kernel would report the same again at once.
    RetryLater,
}

/// What the kernel is asked: a place for every entry of the program, and behind them one for every lane listener. No
/// more than that, because the kernel takes as many as the program may have descriptors.
fn kernel_entries(fds: &[pollfd], sleeps: bool) -> Entries {
    let on = |fd, events| pollfd { fd, events, revents: 0 };
    let mut entries = Entries::new(NOTHING);
    for entry in fds {
        entries.push(match Target::of(entry.fd) {
            Target::Foreign | Target::Listener(_) => on(entry.fd, entry.events),
            Target::Connection(_) | Target::EpollSet(_) if sleeps => on(entry.fd, POLLIN),
            Target::Connection(_) | Target::EpollSet(_) => NOTHING,
        });
    }
    for entry in fds {
        if let Target::Listener(listener) = Target::of(entry.fd) {
            let lane_fd = listener.watched_fd();
            if !entries.as_mut_slice()[fds.len()..].iter().any(|lane| lane.fd == lane_fd) {
                entries.push(on(lane_fd, POLLIN));
            }
        }
    }
    entries
}

fn is_connect_pending(fd: RawFd) -> bool {
    matches!(entry::get(fd), Entry::Stream(stream) if lifecycle::is_pending(stream))
}

/// Whether the kernel's answer is not the program's yet: another thread may just be putting something else in the place
/// of a socket whose connect waits. Only that TCP has given up counts, and not while kernel TCP is begun with.
fn is_still_connecting(answer: &pollfd) -> bool {
    let Entry::Stream(stream) = entry::get(answer.fd) else { return false };
    lifecycle::is_pending(stream) && (answer.revents & POLLERR == 0 || lifecycle::is_advancing(stream))
}

/// What the kernel says of a foreign descriptor, asked again where it may have spoken of a socket on its way to kernel
/// TCP.
fn settled_answer(answer: &pollfd) -> i16 {
    let may_be_past = answer.revents & (POLLERR | POLLHUP) != 0 && matches!(entry::get(answer.fd), Entry::Stream(_));
    if may_be_past { blocking::poll_now(answer.fd, answer.events) } else { answer.revents }
}

/// Of foreign descriptors and listeners; the others are looked at.
fn store_kernel_answers(fds: &mut [pollfd], entries: &[pollfd]) {
    let (answers, lanes) = entries.split_at(fds.len());
    for (entry, answer) in fds.iter_mut().zip(answers) {
        match Target::of(entry.fd) {
            Target::Foreign if is_still_connecting(answer) => entry.revents = 0,
            Target::Foreign => entry.revents = settled_answer(answer),
            Target::Listener(listener) => {
                let lane_fd = listener.watched_fd();
                let has_lane = lanes.iter().any(|lane| lane.fd == lane_fd && lane.revents & POLLIN != 0)
                    && listener.has_lane_client();
                entry.revents = answer.revents | if has_lane { entry.events & FOR_INPUT } else { 0 };
            }
            Target::Connection(_) | Target::EpollSet(_) => {}
        }
    }
}

/// `false`: the kernel would report the same again at once. A lifeline stays readable because others must find the
/// ring, or because it says for ever that nothing comes any more; or a foreign descriptor has what the call does not
/// ask for.
fn take_wakeups(fds: &[pollfd], entries: &[pollfd]) -> bool {
    let mut can_sleep_again = true;
    for (entry, answer) in fds.iter().zip(entries) {
        can_sleep_again &= entry.revents == 0;
        if let Target::Connection(connection) = Target::of(entry.fd)
            && answer.revents != 0
        {
            let is_taken = connection.consume_ring();
            let stays_readable =
                connection.has_ended() || blocking::poll_now(entry.fd, libc::POLLRDHUP) & libc::POLLRDHUP != 0;
            can_sleep_again &= is_taken && !stays_readable;
        }
    }
    can_sleep_again
}

/// The connections and sets of a call, while a thread sleeps on them.
struct Parked {
    connections: StackList<Option<&'static Connection>>,
    _sleep: SleepGuard,
}

impl Parked {
    fn park(fds: &[pollfd]) -> Self {
        let mut connections = StackList::new(None);
        let (sleep, ()) = SleepGuard::begin(|asleep| {
            for entry in fds {
                match Target::of(entry.fd) {
                    Target::Connection(connection) => {
                        connection.park(entry.events);
                        connections.push(Some(connection));
                    }
                    Target::EpollSet(set) => set.add_sleeper(asleep),
                    Target::Foreign | Target::Listener(_) => {}
                }
            }
        });
        Self { connections, _sleep: sleep }
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        self.connections.as_mut_slice().iter().flatten().for_each(|connection| connection.unpark());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::tests::{OpenEndpoint, pair, receive, send};
    use rustix::event::{EventfdFlags, eventfd};
    use std::os::fd::AsRawFd;

    const HANG_NS: u64 = 20_000_000_000;

    /// A connection whose first end a program has a descriptor of.
    struct Pair {
        own: OpenEndpoint,
        peer: Option<OpenEndpoint>,
    }

    impl Pair {
        fn new() -> Self {
            let (own, peer) = pair(true);
            entry::set(own.0.lifeline(), Entry::Connection(own.0));
            Self { own, peer: Some(peer) }
        }

        fn fd(&self) -> RawFd {
            self.own.0.lifeline()
        }

        fn send_to_own(&self) {
            send(self.peer.as_ref().unwrap().0, b"x").unwrap();
        }
    }

    impl Drop for Pair {
        fn drop(&mut self) {
            entry::set(self.fd(), Entry::None);
        }
    }

    fn entry(fd: RawFd, events: i16) -> pollfd {
        pollfd { fd, events, revents: -1 }
    }

    fn poll_all(entries: &mut [pollfd], timeout_ns: Option<u64>) -> (Result<usize, Errno>, Vec<i16>) {
        // SAFETY: no mask.
        let result = unsafe { poll(entries, timeout_ns, std::ptr::null()) };
        (result, entries.iter().map(|entry| entry.revents).collect())
    }

    #[test]
    fn connections_and_foreign_descriptors_are_answered_together() {
        let pair = Pair::new();
        let counter = eventfd(1, EventfdFlags::NONBLOCK).unwrap();
        let mut entries = [
            entry(pair.fd(), POLLIN | POLLOUT),
            entry(-1, POLLIN),
            entry(counter.as_raw_fd(), POLLIN),
            entry(pair.fd(), POLLIN),
        ];
        assert_eq!(poll_all(&mut entries, Some(0)), (Ok(2), vec![POLLOUT, 0, POLLIN, 0]));
        pair.send_to_own();
        assert_eq!(poll_all(&mut entries, None), (Ok(3), vec![POLLIN | POLLOUT, 0, POLLIN, POLLIN]));
    }

    #[test]
    fn a_closed_descriptor_is_invalid_beside_a_connection() {
        let pair = Pair::new();
        let mut entries = [entry(pair.fd(), POLLIN), entry(999_999, POLLIN)];
        assert_eq!(poll_all(&mut entries, None), (Ok(1), vec![0, libc::POLLNVAL]));
    }

    #[test]
    fn a_sleeper_is_rung_for_data_and_for_the_end() {
        let mut pair = Pair::new();
        let fd = pair.fd();
        let sleep = || poll_all(&mut [entry(fd, POLLIN), entry(fd, POLLIN | libc::POLLRDHUP)], Some(HANG_NS));
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(sleep);
            std::thread::sleep(std::time::Duration::from_millis(10));
            pair.send_to_own();
            assert_eq!(sleeper.join().unwrap(), (Ok(2), vec![POLLIN, POLLIN]));
        });
        let mut bytes = [0; 8];
        assert_eq!(receive(pair.own.0, &mut bytes), Ok(1));
        let peer = pair.peer.take();
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(sleep);
            std::thread::sleep(std::time::Duration::from_millis(10));
            drop(peer);
            let (result, revents) = sleeper.join().unwrap();
            assert_eq!((result, revents), (Ok(2), vec![POLLIN, POLLIN | libc::POLLRDHUP]));
        });
    }

    #[test]
    fn nothing_comes_before_the_time_is_up() {
        let pair = Pair::new();
        let mut entries = [entry(pair.fd(), POLLIN)];
        let before = now_ns();
        assert_eq!(poll_all(&mut entries, Some(3_000_000)), (Ok(0), vec![0]));
        assert!(now_ns() - before >= 3_000_000);
    }

    #[test]
    fn more_descriptors_than_fit_the_stack_are_polled() {
        let pairs: Vec<_> = (0..150).map(|_| Pair::new()).collect();
        let mut entries: Vec<_> = pairs.iter().map(|pair| entry(pair.fd(), POLLIN)).collect();
        assert_eq!(poll_all(&mut entries, Some(2_000_000)).0, Ok(0));
        pairs[149].send_to_own();
        pairs[3].send_to_own();
        let (result, revents) = poll_all(&mut entries, Some(HANG_NS));
        assert_eq!(result, Ok(2));
        assert_eq!((revents[3], revents[149]), (POLLIN, POLLIN));
    }

    /// Bits for descriptors up to 4096: more than libc's own sets have.
    type Set = [libc::c_ulong; 64];

    fn bit(set: &mut Set, fd: RawFd) {
        set[fd as usize / WORD_BITS] |= 1 << (fd as usize % WORD_BITS);
    }

    fn select_all(count: i32, sets: [&mut Set; 3], timeout_ns: Option<u64>) -> (Result<usize, Errno>, Option<u64>) {
        let [read, write, except] = sets.map(|set| set.as_mut_ptr().cast::<fd_set>());
        // SAFETY: the sets have a bit for every number that the tests ask about.
        unsafe { select(count, read, write, except, timeout_ns, std::ptr::null()) }
    }

    #[test]
    fn select_answers_for_connections_and_others() {
        let pair = Pair::new();
        let counter = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let fds = [pair.fd(), counter.as_raw_fd()];
        let count = fds.iter().max().unwrap() + 1;
        let (mut read, mut write, mut except) = ([0; 64], [0; 64], [0; 64]);
        for fd in fds {
            bit(&mut read, fd);
            bit(&mut except, fd);
        }
        bit(&mut write, fds[0]);
        let (result, left_ns) = select_all(count, [&mut read, &mut write, &mut except], Some(HANG_NS));
        assert_eq!(result, Ok(1));
        assert!(left_ns.is_some_and(|left_ns| left_ns > 0 && left_ns <= HANG_NS));
        let mut expected = [0; 64];
        bit(&mut expected, fds[0]);
        assert_eq!((read, write, except), ([0; 64], expected, [0; 64]));

        pair.send_to_own();
        let mut read = expected;
        assert_eq!(select_all(count, [&mut read, &mut [0; 64], &mut [0; 64]], None), (Ok(1), None));
        assert_eq!(read, expected);
    }

    #[test]
    fn select_refuses_closed_descriptors_and_negative_counts() {
        let pair = Pair::new();
        // Of the numbers that a set of the kernel has, the last one that tests beside this one come to open.
        let closed = 1023;
        let mut read = [0; 64];
        bit(&mut read, pair.fd());
        bit(&mut read, closed);
        let (result, _) = select_all(closed + 1, [&mut read, &mut [0; 64], &mut [0; 64]], Some(HANG_NS));
        assert_eq!(result, Err(Errno::BADF));
        assert_eq!(select_all(-1, [&mut read, &mut [0; 64], &mut [0; 64]], Some(0)).0, Err(Errno::INVAL));
    }

    #[test]
    fn select_times_out_with_empty_sets() {
        let pair = Pair::new();
        let mut read = [0; 64];
        bit(&mut read, pair.fd());
        let sets = [&mut read, &mut [0; 64], &mut [0; 64]];
        assert_eq!(select_all(pair.fd() + 1, sets, Some(2_000_000)), (Ok(0), Some(0)));
        assert_eq!(read, [0; 64]);
    }
}
