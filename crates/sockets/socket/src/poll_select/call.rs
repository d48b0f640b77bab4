//! One `poll` or `select` over lanes: it polls, spins, then sleeps.

use super::entries::{FOR_INPUT, Parked, Target, kernel_entries, store_kernel_results, take_wakeups};
use crate::connection::Connection;
use crate::epoll::{LANE_POLLS_PER_POLL, UNWAKEABLE_POLL_NS};
use crate::process::clock::now_ns;
use crate::process::signals::{self, HandlersRun, SignalCheckpoint};
use crate::process::{background_connects, blocking, threads};
use libc::{pollfd, sigset_t};
use rustix::io::Errno;
use wait::{Action, Spin};

/// Longest sleep in a process with several threads while a connection's data travels over its lifeline.
const LIFELINE_POLL_NS: u64 = 100_000_000;

/// The end of the wait. The clock is read when it is first needed.
pub(super) struct Deadline {
    timeout_ns: Option<u64>,
    at_ns: Option<u64>,
}

impl Deadline {
    pub(super) fn new(timeout_ns: Option<u64>) -> Self {
        Self { timeout_ns, at_ns: None }
    }

    pub(super) fn start(&mut self) {
        self.left_ns();
    }

    pub(super) fn left_ns(&mut self) -> Option<u64> {
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

pub(super) fn has_result(entry: &pollfd) -> bool {
    entry.revents != 0
}

/// One call: its entries, the results that end it, and its deadline.
struct Call<'a> {
    fds: &'a mut [pollfd],
    /// Returns whether an entry's result ends the call.
    accepts: fn(&pollfd) -> bool,
    needs_kernel: bool,
    deadline: &'a mut Deadline,
    mask: *const sigset_t,
    began: SignalCheckpoint,
}

/// `poll(2)` or `select(2)` of entries of which at least one is served by the library. `accepts` decides which results
/// end the call.
///
/// # Errors
/// As the system call.
///
/// # Safety
/// `mask` is null or points to a signal set.
pub(super) unsafe fn poll_lanes(
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
                // SAFETY: `poll_lanes` was called with a mask that is null or points to a signal set.
                return unsafe { blocking::deliver_signals(self.mask) }.map(|()| 0);
            }
            if masked.is_none() && !self.mask.is_null() {
                // SAFETY: `poll_lanes` was called with a mask that is null or points to a signal set.
                unsafe { blocking::deliver_signals(self.mask) }?;
                // As in the kernel, a signal that arrives from here on is handled at once or blocked until the call is
                // over.
                // SAFETY: `poll_lanes` was called with a mask that is null or points to a signal set.
                masked = unsafe { signals::mask_while_polling(self.mask, &mut self.began) };
            }
            if let Some(ready) = self.spin()? {
                return Ok(ready);
            }
            let woken = self.sleep()?;
            match woken {
                SleepOutcome::Ready(ready) => return Ok(ready),
                SleepOutcome::TimedOut => return Ok(0),
                SleepOutcome::Retry | SleepOutcome::RetryLater => {}
            }
        }
    }

    /// Fills in the results of all entries; returns how many end the call.
    fn poll_once(&mut self, polls_kernel: bool) -> Result<usize, Errno> {
        if polls_kernel {
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

    /// Polls listeners and descriptors that the library does not serve.
    fn poll_kernel(&mut self) -> Result<(), Errno> {
        let mut entries = kernel_entries(self.fds, false);
        let entries = entries.as_mut_slice();
        // SAFETY: a null mask is allowed.
        unsafe { blocking::ppoll(entries, Some(0), std::ptr::null()) }?;
        store_kernel_results(self.fds, entries);
        Ok(())
    }

    fn connections(&self) -> impl Iterator<Item = &'static Connection> {
        self.fds.iter().filter_map(|entry| match Target::of(entry.fd) {
            Target::Connection(connection) => Some(connection),
            _ => None,
        })
    }

    /// Polls the connections for a while. Returns the result of the call if it is over.
    fn spin(&mut self) -> Result<Option<usize>, Errno> {
        let Some(first) = self.connections().next() else { return Ok(None) };
        let connections = self.connections().count();
        let mut spin = Spin::with(first.spin_history());
        loop {
            match spin.iterate_by(LANE_POLLS_PER_POLL.saturating_mul(connections as u32)) {
                Action::Poll if !self.may_be_ready() => continue,
                Action::Poll => {}
                Action::PollKernel => {
                    // SAFETY: `poll_lanes` was called with a mask that is null or points to a signal set.
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

    /// Returns `INTR` if a signal handler has run: the kernel reports that only to threads that sleep in a system call.
    fn check_signals(&self) -> Result<(), Errno> {
        if self.began.since() == HandlersRun::None { Ok(()) } else { Err(Errno::INTR) }
    }

    /// Returns whether no wakeup announces an awaited event.
    fn lacks_wakeup(&self) -> bool {
        self.fds.iter().any(|entry| match Target::of(entry.fd) {
            Target::Connection(connection) => connection.must_poll_for_room(entry.events),
            _ => false,
        })
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
        let must_poll = background_connects::is_any_pending() || self.lacks_wakeup();
        // Another thread may read the message from the lifeline which says that the rest comes by a lane.
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
        // Entries that the kernel would report again at once are left out for a moment.
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

    /// Requests wakeups from the peers, polls once more, then sleeps.
    fn block(&mut self, entries: &mut [pollfd], timeout_ns: Option<u64>) -> Result<SleepOutcome, Errno> {
        let parked = Parked::park(self.fds);
        // The system call below polls the other descriptors itself.
        if self.poll_once(false)? > 0 {
            drop(parked);
            return self.poll_once(self.needs_kernel).map(SleepOutcome::Ready);
        }
        self.check_signals()?;
        // A held record becomes readable without a wakeup, and so does room of which the peer does not notify.
        let room_ns = (parked.has_unwakeable || self.lacks_wakeup()).then_some(UNWAKEABLE_POLL_NS);
        let unannounced_ns = self.connections().filter_map(Connection::held_left_ns).chain(room_ns).min();
        let unannounced_ns = unannounced_ns.filter(|ns| timeout_ns.is_none_or(|timeout_ns| *ns < timeout_ns));
        let timeout_ns = unannounced_ns.or(timeout_ns);
        let count = match timeout_ns {
            None if self.mask.is_null() => blocking::poll(entries, -1),
            // SAFETY: `poll_lanes` was called with a mask that is null or points to a signal set.
            _ => unsafe { blocking::ppoll(entries, timeout_ns, self.mask) },
        }?;
        // A wakeup is only consumed by a thread that is no longer registered as a sleeper.
        drop(parked);
        store_kernel_results(self.fds, entries);
        let can_sleep_again = count == 0 || take_wakeups(self.fds, entries);
        let ready = self.poll_once(false)?;
        Ok(match () {
            () if ready > 0 => SleepOutcome::Ready(ready),
            () if count == 0 && unannounced_ns.is_none() => SleepOutcome::TimedOut,
            () if can_sleep_again => SleepOutcome::Retry,
            () => SleepOutcome::RetryLater,
        })
    }
}

enum SleepOutcome {
    Ready(usize),
    TimedOut,
    Retry,
    /// As `Retry`, but the kernel would report the same events again at once.
    RetryLater,
}
