//! A wait: look at lanes in memory, now and then ask the kernel, spin for a while, have the peers ring, sleep in the
//! kernel.

use super::control::set_of;
use super::event_buffer::EventBuffer;
use super::kernel;
use super::ready_list::{HeldRecords, ReadyList};
use super::ready_time::ReadyTime;
use super::set::{EpollSet, SleepGuard};
use crate::process::background_connects;
use crate::process::blocking;
use crate::process::clock::now_ns;
use crate::process::signals::{self, HandlersRun, SignalCheckpoint};
use libc::{epoll_event, sigset_t};
use rustix::io::Errno;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use wait::{Action, Spin};

/// A glance at a connection costs as much as this many looks at a bare lane.
pub(crate) const LANE_POLLS_PER_POLL: u32 = 24;
/// How often the kernel is asked in one look while what it says fills the array and is all ours: the inner epoll and
/// nested sets, before what is the program's.
const KERNEL_POLLS_MAX: usize = 8;
/// How long a thread sleeps when it cannot be woken for everything.
pub(crate) const UNWAKEABLE_POLL_NS: u64 = 1_000_000;
const MILLISECOND_NS: u64 = 1_000_000;

/// What the program asked for.
pub(super) struct Call {
    pub epfd: RawFd,
    pub events: *mut epoll_event,
    pub max: i32,
    pub timeout_ns: Option<u64>,
    pub mask: *const sigset_t,
}

impl Call {
    /// The same call when so much of its time is over.
    pub(super) fn after(&self, waited_ns: u64) -> Self {
        let left_ns = |timeout_ns: u64| {
            let left_ns = timeout_ns.saturating_sub(waited_ns);
            if timeout_ns.is_multiple_of(MILLISECOND_NS) { left_ns.next_multiple_of(MILLISECOND_NS) } else { left_ns }
        };
        Self { timeout_ns: self.timeout_ns.map(left_ns), ..*self }
    }
}

/// When the wait is over. The clock is read when this is first needed.
struct Deadline {
    timeout_ns: Option<u64>,
    at_ns: Option<u64>,
    began: SignalCheckpoint,
}

impl Deadline {
    fn new(timeout_ns: Option<u64>) -> Self {
        Self { timeout_ns, at_ns: None, began: SignalCheckpoint::now() }
    }

    /// `INTR` once a signal handler has run: the kernel says so only to those who sleep in it.
    fn check_signals(&self) -> Result<(), Errno> {
        if self.began.since() == HandlersRun::None { Ok(()) } else { Err(Errno::INTR) }
    }

    /// Time left; none waits for ever. In whole milliseconds, rounded up, if the program's time-out is: the kernel then
    /// takes it by the call that a thread can be cancelled in.
    fn left_ns(&mut self) -> Option<u64> {
        let timeout_ns = self.timeout_ns?;
        let now = now_ns();
        let at_ns = *self.at_ns.get_or_insert_with(|| now.saturating_add(timeout_ns));
        let left_ns = at_ns.saturating_sub(now);
        Some(if timeout_ns % MILLISECOND_NS == 0 { left_ns.next_multiple_of(MILLISECOND_NS) } else { left_ns })
    }

    fn is_over(&mut self) -> bool {
        self.left_ns() == Some(0)
    }
}

enum SleepOutcome {
    Ready,
    TimedOut,
    Retry,
}

/// `epoll_wait(2)` and its kin; no time-out waits for ever.
///
/// # Errors
/// As the system call.
///
/// # Safety
/// `events` is writable for `max` events; `mask` is null or a signal set.
pub unsafe fn wait(
    epfd: RawFd,
    events: *mut epoll_event,
    max: i32,
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
) -> Result<usize, Errno> {
    match set_of(epfd) {
        Some(set) => set.wait(&Call { epfd, events, max, timeout_ns, mask }),
        // SAFETY: the caller vouches for `events` and `mask`.
        None => unsafe { blocking::epoll_wait(epfd, events, max, timeout_ns, mask) },
    }
}

impl EpollSet {
    #[inline]
    pub(super) fn wait(&'static self, call: &Call) -> Result<usize, Errno> {
        background_connects::advance();
        if self.has_inner.load(Ordering::Acquire) {
            return self.wait_for_lanes(call);
        }
        if background_connects::is_any_pending() {
            // They become lanes under the eyes of this wait.
            self.with(|ready_list| self.prepare_for_lanes(ready_list))?;
            return self.wait_for_lanes(call);
        }
        let started_ns = now_ns();
        match self.wait_in_kernel(call) {
            Some(result) => result,
            None => self.wait_for_lanes(&call.after(now_ns() - started_ns)),
        }
    }

    #[inline]
    fn wait_for_lanes(&'static self, call: &Call) -> Result<usize, Errno> {
        let generation = self.generation.load(Ordering::Acquire);
        let mut buffer = EventBuffer::new(call.events, call.max)?;
        let dont_wait = call.timeout_ns == Some(0);
        let is_due = self.with_generation(generation, |ready_list| {
            let is_due = ready_list.kernel_is_due();
            if !is_due {
                ready_list.scan(&mut buffer, false);
            }
            is_due || (dont_wait && buffer.len == 0 && ready_list.needs_kernel())
        })?;
        if is_due {
            self.poll_everything(call, &mut buffer, generation)?;
        }
        if buffer.len == 0 && !dont_wait {
            self.wait_blocking(call, &mut buffer, generation)?;
        }
        Ok(self.finish_wait(&buffer))
    }

    /// As long as the set holds nothing of ours. `None`: it does now.
    #[cold]
    fn wait_in_kernel(&'static self, call: &Call) -> Option<Result<usize, Errno>> {
        let (sleep, ()) = SleepGuard::begin(|asleep| {
            crate::process::threads::add(&self.sleepers, 1);
            asleep.push(self);
        });
        if self.has_inner.load(Ordering::SeqCst) {
            return None;
        }
        // SAFETY: the caller's array and mask.
        let result = unsafe { blocking::epoll_wait(call.epfd, call.events, call.max, call.timeout_ns, call.mask) };
        drop(sleep);
        let Ok(count) = result else { return Some(result) };
        if count == 0 || !self.has_inner.load(Ordering::SeqCst) {
            return Some(result);
        }
        let Ok(mut buffer) = EventBuffer::new(call.events, call.max) else { return Some(result) };
        buffer.append(count, |_| {});
        (buffer.len > 0).then_some(Ok(buffer.len))
    }

    /// Runs `access`, unless the set has been closed since.
    #[inline]
    fn with_generation<R>(&self, generation: u32, access: impl FnOnce(&mut ReadyList) -> R) -> Result<R, Errno> {
        self.with(|ready_list| {
            if self.generation.load(Ordering::Relaxed) == generation {
                Ok(access(ready_list))
            } else {
                Err(Errno::BADF)
            }
        })
    }

    /// Before the wait returns: threads that stay asleep must be woken for what comes next.
    #[inline]
    fn finish_wait(&'static self, buffer: &EventBuffer) -> usize {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.with(ReadyList::hand_over_to_sleepers);
        }
        buffer.len
    }

    /// Lanes, foreign descriptors and parked connections. When one side has filled the array, the other comes first
    /// next time.
    fn poll_everything(&'static self, call: &Call, buffer: &mut EventBuffer, generation: u32) -> Result<(), Errno> {
        if call.timeout_ns != Some(0) {
            // SAFETY: the caller's mask.
            unsafe { blocking::deliver_signals(call.mask) }?;
        }
        let lanes_first = self.with_generation(generation, |ready_list| {
            let lanes_first = std::mem::take(&mut ready_list.lanes_first);
            if lanes_first {
                ready_list.scan(buffer, true);
            }
            ready_list.note_kernel_asked();
            lanes_first
        })?;
        if buffer.is_full() {
            return Ok(());
        }
        for _ in 0..KERNEL_POLLS_MAX {
            let room = buffer.room();
            // SAFETY: the rest of the caller's array.
            let count = unsafe { kernel::wait_now(call.epfd, buffer.events.add(buffer.len), room) }?;
            self.process_kernel_events(buffer, count, generation, !lanes_first)?;
            if buffer.len > 0 || count < room {
                break;
            }
        }
        Ok(())
    }

    /// The kernel has put `count` events into the array: what it says of lanes becomes what they say.
    fn process_kernel_events(
        &'static self,
        buffer: &mut EventBuffer,
        count: usize,
        generation: u32,
        scans: bool,
    ) -> Result<(), Errno> {
        self.with_generation(generation, |ready_list| {
            buffer.append(count, |internal| ready_list.note_internal_event(internal));
            if scans || buffer.len == 0 {
                ready_list.lanes_first = buffer.is_full();
                if !buffer.is_full() {
                    ready_list.scan(buffer, true);
                }
            }
        })
    }

    fn wait_blocking(&'static self, call: &Call, buffer: &mut EventBuffer, generation: u32) -> Result<(), Errno> {
        let mut deadline = Deadline::new(call.timeout_ns);
        // SAFETY: the caller's mask.
        unsafe { blocking::deliver_signals(call.mask) }?;
        // SAFETY: as above.
        let _masked = unsafe { signals::mask_while_polling(call.mask, &mut deadline.began) };
        loop {
            match self.wait_once(call, buffer, generation, &mut deadline) {
                Ok(SleepOutcome::Ready | SleepOutcome::TimedOut) => return Ok(()),
                Ok(SleepOutcome::Retry) => {}
                // Whatever else the handler did: the call was interrupted.
                Err(error) => return deadline.check_signals().and(Err(error)),
            }
        }
    }

    fn wait_once(
        &'static self,
        call: &Call,
        buffer: &mut EventBuffer,
        generation: u32,
        deadline: &mut Deadline,
    ) -> Result<SleepOutcome, Errno> {
        background_connects::advance();
        if self.spin(call, buffer, generation, deadline)? {
            return Ok(SleepOutcome::Ready);
        }
        self.sleep(call, buffer, generation, deadline)
    }

    /// Looks at hot connections for a while. `true`: something was found, or the time is up.
    fn spin(
        &'static self,
        call: &Call,
        buffer: &mut EventBuffer,
        generation: u32,
        deadline: &mut Deadline,
    ) -> Result<bool, Errno> {
        let mut hot_count = self.with_generation(generation, |ready_list| ready_list.hot_count())?;
        let mut spin = Spin::with(&self.spin_history);
        while hot_count > 0 {
            match spin.iterate_by(LANE_POLLS_PER_POLL.saturating_mul(hot_count as u32)) {
                Action::Poll => self.with_generation(generation, |ready_list| ready_list.scan(buffer, false))?,
                Action::PollKernel => {
                    self.poll_everything(call, buffer, generation)?;
                    if buffer.len == 0 {
                        deadline.check_signals()?;
                        if deadline.is_over() {
                            return Ok(true);
                        }
                    }
                    hot_count = self.with_generation(generation, |ready_list| ready_list.hot_count())?;
                }
                Action::Block => break,
            }
            if buffer.len > 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn sleep(
        &'static self,
        call: &Call,
        buffer: &mut EventBuffer,
        generation: u32,
        deadline: &mut Deadline,
    ) -> Result<SleepOutcome, Errno> {
        let mut backs_off = false;
        let mut has_unwakeable = false;
        let mut held_ns = None;
        let (sleep, is_quiet) = SleepGuard::begin(|asleep| {
            self.with_generation(generation, |ready_list| {
                crate::process::threads::add(&self.sleepers, 1);
                asleep.push(self);
                backs_off = std::mem::take(&mut ready_list.must_back_off);
                ready_list.asleep_since = Some(ReadyTime::now());
                let is_quiet = ready_list.park_all(asleep, HeldRecords::Kept);
                has_unwakeable = ready_list.has_unwakeable;
                held_ns = ready_list.held_left_ns();
                is_quiet
            })
        });
        if !is_quiet? {
            drop(sleep);
            self.with_generation(generation, |ready_list| ready_list.scan(buffer, true))?;
            return Ok(if buffer.len > 0 { SleepOutcome::Ready } else { SleepOutcome::Retry });
        }
        let left_ns = deadline.left_ns();
        if backs_off && left_ns != Some(0) {
            // SAFETY: no entries; the caller's mask.
            unsafe {
                blocking::ppoll(&mut [], Some(UNWAKEABLE_POLL_NS.min(left_ns.unwrap_or(UNWAKEABLE_POLL_NS))), call.mask)
            }?;
        }
        deadline.check_signals()?;
        has_unwakeable |= background_connects::is_any_pending();
        let longest_ns = if has_unwakeable { Some(UNWAKEABLE_POLL_NS) } else { held_ns };
        let left_ns = longest_ns.map_or(left_ns, |ns| Some(left_ns.map_or(ns, |left_ns| left_ns.min(ns))));
        // SAFETY: the caller's array and mask.
        let count = unsafe { blocking::epoll_wait(call.epfd, call.events, call.max, left_ns, call.mask) }?;
        #[cfg(test)]
        super::tests::note_sleep();
        self.spin_history.note_wakeup();
        drop(sleep);
        if held_ns.is_some() {
            self.with_generation(generation, ReadyList::poll_held)?;
        }
        self.process_kernel_events(buffer, count, generation, true)?;
        self.with_generation(generation, ReadyList::note_kernel_asked)?;
        Ok(match () {
            () if buffer.len > 0 => SleepOutcome::Ready,
            () if count == 0 && deadline.is_over() => SleepOutcome::TimedOut,
            () if count == 0 && longest_ns.is_none() => SleepOutcome::TimedOut,
            () => SleepOutcome::Retry,
        })
    }
}
