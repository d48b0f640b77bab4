//! `epoll_wait(2)`: polls lanes in memory and, from time to time, the kernel; spins for a while; then requests wakeups
//! from the peers and sleeps in the kernel.

use super::control::set_of;
use super::event_buffer::EventBuffer;
use super::kernel;
use super::ready_list::{HeldRecords, ReadyList};
use super::ready_time::ReadyTime;
use super::set::{EpollSet, SleepGuard};
use crate::process::clock::now_ns;
use crate::process::signals::{self, HandlersRun, SignalCheckpoint};
use crate::process::{background_connects, blocking};
use libc::{epoll_event, sigset_t};
use rustix::io::Errno;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use wait::{Action, Spin};

/// The cost of polling one connection, in polls of a bare lane.
pub(crate) const LANE_POLLS_PER_POLL: u32 = 24;
/// How often the kernel is polled in a row while its events fill the array and are all internal: those of the inner
/// epoll instance and of nested sets come before the program's own.
const KERNEL_POLLS_MAX: usize = 8;
/// How long a thread sleeps at most when nothing wakes it for one of the awaited events.
pub(crate) const UNWAKEABLE_POLL_NS: u64 = 1_000_000;
const MILLISECOND_NS: u64 = 1_000_000;

/// The arguments of the program's call.
pub(super) struct Call {
    pub epfd: RawFd,
    pub events: *mut epoll_event,
    pub max: i32,
    pub timeout_ns: Option<u64>,
    pub mask: *const sigset_t,
}

impl Call {
    /// Returns the same call with `waited_ns` less time.
    pub(super) fn after(&self, waited_ns: u64) -> Self {
        let left_ns = |timeout_ns: u64| {
            let left_ns = timeout_ns.saturating_sub(waited_ns);
            if timeout_ns.is_multiple_of(MILLISECOND_NS) { left_ns.next_multiple_of(MILLISECOND_NS) } else { left_ns }
        };
        Self { timeout_ns: self.timeout_ns.map(left_ns), ..*self }
    }
}

/// The end of the wait. The clock is read when it is first needed.
struct Deadline {
    timeout_ns: Option<u64>,
    at_ns: Option<u64>,
    began: SignalCheckpoint,
}

impl Deadline {
    fn new(timeout_ns: Option<u64>) -> Self {
        Self { timeout_ns, at_ns: None, began: SignalCheckpoint::now() }
    }

    /// Returns `INTR` if a signal handler has run: the kernel reports that only to threads that sleep in a system call.
    fn check_signals(&self) -> Result<(), Errno> {
        if self.began.since() == HandlersRun::None { Ok(()) } else { Err(Errno::INTR) }
    }

    /// Returns the time left; `None` waits without limit. Rounded up to whole milliseconds if the program's time-out is
    /// in whole milliseconds, because the kernel then accepts it in the call at which a thread can be cancelled.
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

/// `epoll_wait(2)`, `epoll_pwait(2)` and `epoll_pwait2(2)`; without a time-out, waits without limit.
///
/// # Errors
/// As the system call.
///
/// # Safety
/// `events` is writable for `max` events; `mask` is null or points to a signal set.
pub unsafe fn wait(
    epfd: RawFd,
    events: *mut epoll_event,
    max: i32,
    timeout_ns: Option<u64>,
    mask: *const libc::sigset_t,
) -> Result<usize, Errno> {
    match set_of(epfd) {
        Some(set) => set.wait(&Call { epfd, events, max, timeout_ns, mask }),
        // SAFETY: `events` and `mask` are valid by the contract of this function.
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
            // These sockets may become connections with lanes during this wait.
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
            let is_due = ready_list.is_kernel_poll_due();
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

    /// Waits in the kernel while the set holds no registration of the library's. Returns `None` if it does now.
    #[cold]
    fn wait_in_kernel(&'static self, call: &Call) -> Option<Result<usize, Errno>> {
        let (sleep, ()) = SleepGuard::begin(|asleep| {
            crate::process::threads::add(&self.sleepers, 1);
            asleep.push(self);
        });
        if self.has_inner.load(Ordering::SeqCst) {
            return None;
        }
        // SAFETY: `wait` built `call` from its arguments: `events` is writable for `max` events, `mask` null or a
        // signal set.
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

    /// Runs `access`, or fails with `BADF` if the set has been closed since `generation`.
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

    /// Before a wait returns, makes sure that threads which stay asleep are woken for later events.
    #[inline]
    fn finish_wait(&'static self, buffer: &EventBuffer) -> usize {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.with(ReadyList::hand_over_to_sleepers);
        }
        buffer.len
    }

    /// Polls lanes, other descriptors and parked connections. When one of lanes and kernel has filled the array, the
    /// other is polled first in the next wait.
    fn poll_everything(&'static self, call: &Call, buffer: &mut EventBuffer, generation: u32) -> Result<(), Errno> {
        if call.timeout_ns != Some(0) {
            // SAFETY: `wait` built `call` from its arguments: `mask` is null or points to a signal set.
            unsafe { blocking::deliver_signals(call.mask) }?;
        }
        let lanes_first = self.with_generation(generation, |ready_list| {
            let lanes_first = std::mem::take(&mut ready_list.lanes_first);
            if lanes_first {
                ready_list.scan(buffer, true);
            }
            ready_list.note_kernel_poll();
            lanes_first
        })?;
        if buffer.is_full() {
            return Ok(());
        }
        for _ in 0..KERNEL_POLLS_MAX {
            let room = buffer.room();
            // SAFETY: the array has room for `room` more events behind the first `len`.
            let count = unsafe { kernel::wait_now(call.epfd, buffer.events.add(buffer.len), room) }?;
            self.process_kernel_events(buffer, count, generation, !lanes_first)?;
            if buffer.len > 0 || count < room {
                break;
            }
        }
        Ok(())
    }

    /// Accepts `count` events that the kernel has put into the array; internal ones are replaced by events of lanes.
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
        // SAFETY: `wait` built `call` from its arguments: `mask` is null or points to a signal set.
        unsafe { blocking::deliver_signals(call.mask) }?;
        // SAFETY: `wait` built `call` from its arguments: `mask` is null or points to a signal set.
        let _masked = unsafe { signals::mask_while_polling(call.mask, &mut deadline.began) };
        loop {
            match self.wait_once(call, buffer, generation, &mut deadline) {
                Ok(SleepOutcome::Ready | SleepOutcome::TimedOut) => return Ok(()),
                Ok(SleepOutcome::Retry) => {}
                // Whatever else a signal handler has done, the call was interrupted.
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

    /// Polls hot connections for a while. Returns `true` if something is ready or the time is up.
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
            // SAFETY: the slice is empty; `mask` is null or points to a signal set, as `wait` received it.
            unsafe {
                blocking::ppoll(&mut [], Some(UNWAKEABLE_POLL_NS.min(left_ns.unwrap_or(UNWAKEABLE_POLL_NS))), call.mask)
            }?;
        }
        deadline.check_signals()?;
        has_unwakeable |= background_connects::is_any_pending();
        let longest_ns = if has_unwakeable { Some(UNWAKEABLE_POLL_NS) } else { held_ns };
        let left_ns = longest_ns.map_or(left_ns, |ns| Some(left_ns.map_or(ns, |left_ns| left_ns.min(ns))));
        // SAFETY: `wait` built `call` from its arguments: `events` is writable for `max` events, `mask` null or a
        // signal set.
        let count = unsafe { blocking::epoll_wait(call.epfd, call.events, call.max, left_ns, call.mask) }?;
        #[cfg(test)]
        super::tests::note_sleep();
        drop(sleep);
        if held_ns.is_some() {
            self.with_generation(generation, ReadyList::poll_held)?;
        }
        self.process_kernel_events(buffer, count, generation, true)?;
        self.with_generation(generation, ReadyList::note_kernel_poll)?;
        Ok(match () {
            () if buffer.len > 0 => SleepOutcome::Ready,
            () if count == 0 && deadline.is_over() => SleepOutcome::TimedOut,
            () if count == 0 && longest_ns.is_none() => SleepOutcome::TimedOut,
            () => SleepOutcome::Retry,
        })
    }
}
