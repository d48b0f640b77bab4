//! `epoll_wait`: polls the lanes of members in memory and, from time to time, the kernel; spins for a while; then asks
//! the peers to ring and sleeps in the kernel.

use super::buffer::Buffer;
use super::registry;
use super::set::{EpollSet, Source, known_number, with_members};
use crate::lifecycle;
use libc::{epoll_event, sigset_t};
use rustix::io::Errno;
use socket::process::blocking;
use socket::process::clock::{TICKS_PER_MICROSECOND, now_ns, ticks};
use socket::process::signals::{self, HandlersRun, SignalCheckpoint};
use socket::process::threads;
use std::os::fd::RawFd;
use wait::{Action, Spin};

/// A wait that finds ready lanes may omit other ready descriptors for at most this time.
const KERNEL_EVERY_US: u64 = 20;
/// How often the kernel is asked in a row while its events fill the array and none of them is the program's.
const KERNEL_POLLS_MAX: usize = 8;
/// The cost of polling one member, in polls of a bare lane.
const POLLS_PER_MEMBER: u32 = 12;
const OUTPUT: u32 = (libc::EPOLLOUT | libc::EPOLLWRNORM) as u32;
const MILLISECOND_NS: u64 = 1_000_000;

/// The arguments of a wait.
struct Call {
    epfd: RawFd,
    timeout_ns: Option<u64>,
    mask: *const sigset_t,
    deadline_ns: Option<u64>,
    began: SignalCheckpoint,
}

impl Call {
    /// Returns the time left; `None` waits without limit. In whole milliseconds if the program's time-out is, because
    /// the kernel then accepts it in the call at which a thread can be cancelled.
    fn left_ns(&self) -> Option<u64> {
        let left_ns = self.deadline_ns?.saturating_sub(now_ns());
        let is_whole = self.timeout_ns.is_some_and(|timeout_ns| timeout_ns.is_multiple_of(MILLISECOND_NS));
        Some(if is_whole { left_ns.next_multiple_of(MILLISECOND_NS) } else { left_ns })
    }
}

/// Waits for events of a set, as `epoll_pwait2(2)`; without a timeout it waits without limit.
///
/// # Errors
/// Those of the system call.
///
/// # Safety
/// `events` is writable for `max` events, which is positive; `mask` is null or points to a signal set.
pub unsafe fn wait(
    epfd: RawFd,
    events: *mut epoll_event,
    max: usize,
    timeout_ns: Option<u64>,
    mask: *const sigset_t,
) -> Result<usize, Errno> {
    let Some(set) = with_members(epfd) else {
        // SAFETY: the array and the mask are valid by this function's contract.
        return unsafe { wait_for_first_member(epfd, events, max, timeout_ns, mask) };
    };
    // SAFETY: the array is valid by the contract of `wait`.
    let mut buffer = unsafe { Buffer::new(events, max) };
    let deadline_ns = timeout_ns.map(|timeout_ns| now_ns().saturating_add(timeout_ns));
    let mut call = Call { epfd, timeout_ns, mask, deadline_ns, began: SignalCheckpoint::now() };
    set.wait(&mut call, &mut buffer)?;
    Ok(buffer.len())
}

/// Waits in the kernel on a set that has no member. It may get one meanwhile; then the wait goes on with it.
///
/// # Safety
/// As [`wait`].
unsafe fn wait_for_first_member(
    epfd: RawFd,
    events: *mut epoll_event,
    max: usize,
    timeout_ns: Option<u64>,
    mask: *const sigset_t,
) -> Result<usize, Errno> {
    // Only another thread can add a member meanwhile, and only then is the time left needed.
    let timeout_of_many = timeout_ns.filter(|timeout_ns| *timeout_ns > 0 && !threads::is_single());
    let deadline_ns = timeout_of_many.map(|timeout_ns| now_ns().saturating_add(timeout_ns));
    let may_get_member = !threads::is_single() && timeout_ns != Some(0);
    let known = known_number(epfd);
    if may_get_member {
        registry::add_waiter(known);
        if with_members(epfd).is_some() {
            registry::remove_waiter(known);
            // SAFETY: the array and the mask are valid by the contract of `wait`.
            return unsafe { wait(epfd, events, max, timeout_ns, mask) };
        }
    }
    // SAFETY: the array and the mask are valid by the contract of `wait`.
    let waited = unsafe { blocking::epoll_wait(epfd, events, max as i32, timeout_ns, mask) };
    if may_get_member {
        registry::remove_waiter(known);
    }
    let count = waited?;
    let Some(set) = with_members(epfd) else { return Ok(count) };
    // SAFETY: the array is valid by the contract of `wait`.
    let mut buffer = unsafe { Buffer::new(events, max) };
    set.accept(&mut buffer, count);
    if buffer.len() > 0 || count == 0 {
        return Ok(buffer.len());
    }
    let left_ns = deadline_ns.map(|deadline_ns| deadline_ns.saturating_sub(now_ns())).or(timeout_ns);
    // SAFETY: the array and the mask are valid by the contract of `wait`.
    unsafe { wait(epfd, events, max, left_ns, mask) }
}

impl EpollSet {
    fn wait(&'static self, call: &mut Call, buffer: &mut Buffer) -> Result<(), Errno> {
        if self.lock().is_some_and(|mut state| std::mem::take(&mut state.kernel_first)) {
            self.ask_kernel(call, buffer)?;
        }
        self.poll_lanes(buffer);
        if self.is_kernel_due(buffer) || (buffer.len() == 0 && call.timeout_ns == Some(0)) {
            self.ask_kernel(call, buffer)?;
        }
        if buffer.len() == 0 && call.timeout_ns != Some(0) {
            self.wait_blocking(call, buffer)?;
            if buffer.asks_kernel && !buffer.has_kernel_events {
                self.ask_kernel(call, buffer)?;
            }
        }
        if self.is_awaited()
            && let Some(mut state) = self.lock()
        {
            self.hand_over(&mut state);
        }
        Ok(())
    }

    /// Reports the lanes that have events.
    #[inline]
    fn poll_lanes(&'static self, buffer: &mut Buffer) {
        let Some(mut state) = self.lock() else { return };
        for index in state.members.poll(buffer) {
            self.end_one_shot(&mut state, index);
        }
    }

    /// Returns whether it is time to ask the kernel, or it may have other events of members that were reported, or
    /// events from before those. What it has reported in this wait it would report again.
    fn is_kernel_due(&self, buffer: &Buffer) -> bool {
        let asked_ticks = self.lock().map_or(0, |state| state.kernel_asked_ticks);
        let is_time = ticks().wrapping_sub(asked_ticks) > KERNEL_EVERY_US * TICKS_PER_MICROSECOND;
        !buffer.has_kernel_events && (is_time || buffer.asks_kernel)
    }

    /// Ends a registration with `EPOLLONESHOT` of which lane events were reported, in the kernel too.
    fn end_one_shot(&self, state: &mut super::set::State, index: u32) {
        let Some(member) = state.members.get(index) else { return };
        if member.is_one_shot() && !member.is_off() {
            let fd = member.fd;
            member.in_kernel = libc::EPOLLONESHOT as u32;
            super::set::disarm(self.epfd(), fd, index);
            state.members.switch_off(index);
        }
    }

    /// Asks the kernel without waiting, and accepts what it reports. That comes first: a busy client waits for its
    /// answers, so that what uses TCP, as the first requests of a client do, has arrived earlier as a rule.
    fn ask_kernel(&'static self, call: &Call, buffer: &mut Buffer) -> Result<(), Errno> {
        lifecycle::follow_switch();
        if let Some(mut state) = self.lock() {
            state.kernel_asked_ticks = ticks();
            state.kernel_first = buffer.is_full();
        }
        if buffer.is_full() {
            return Ok(());
        }
        let of_lanes = buffer.len();
        for _ in 0..KERNEL_POLLS_MAX {
            let (begin, room) = buffer.rest();
            // SAFETY: the array has room for this number of events behind the filled ones, by the contract of `wait`.
            let count = unsafe { blocking::epoll_wait(call.epfd, begin, room, Some(0), std::ptr::null()) }?;
            self.accept(buffer, count);
            if buffer.len() > 0 || count < room as usize {
                break;
            }
        }
        buffer.bring_forward(of_lanes);
        Ok(())
    }

    /// Accepts `count` events that the kernel has stored behind the filled ones: keeps the program's, translates the
    /// members', and polls the members that were rung for.
    fn accept(&'static self, buffer: &mut Buffer, count: usize) {
        let Some(mut state) = self.lock() else { return };
        let begin = buffer.len();
        let mut has_rings = false;
        for offset in 0..count {
            let event = buffer.of_kernel(begin, offset);
            match Self::source(event.u64) {
                Source::Program => {
                    buffer.push(event.events, event.u64);
                }
                Source::Inner => has_rings = true,
                Source::Member(index) => {
                    if state.members.get(index).is_some_and(|member| member.is_removed()) {
                        self.finish_removal(&mut state, index);
                        continue;
                    }
                    let Some(member) = state.members.get(index).filter(|member| !member.is_off()) else { continue };
                    let data = member.data;
                    let of_kernel = if event.events & !OUTPUT == 0 {
                        member.filter(event.events)
                    } else {
                        let (connection, fd, wanted) = (member.connection, member.fd, member.events as i16);
                        let confirmed = connection.confirm_events(fd, event.events as i16, wanted);
                        member.filter(confirmed as u16 as u32)
                    };
                    let (is_one_shot, is_filtered) = (member.is_one_shot(), of_kernel != event.events);
                    let ready = of_kernel | state.members.events_with(index, of_kernel);
                    if is_filtered {
                        state.update_kernel(self.epfd(), index);
                    }
                    if ready != 0
                        && let Some(member) = state.members.get(index)
                    {
                        buffer.push_at(&mut member.place, ready, data);
                    }
                    match (is_one_shot, ready) {
                        (true, 0) => state.rearm(self.epfd(), index),
                        (true, _) => state.members.switch_off(index),
                        (false, _) => {}
                    }
                }
            }
        }
        buffer.has_kernel_events |= buffer.len() > begin;
        if has_rings {
            let rung = state.take_rings(self.epfd());
            drop(state);
            self.pass_on(rung);
            self.poll_lanes(buffer);
        }
    }

    fn wait_blocking(&'static self, call: &mut Call, buffer: &mut Buffer) -> Result<(), Errno> {
        // SAFETY: the mask is valid by the contract of `wait`.
        unsafe { blocking::deliver_signals(call.mask) }?;
        // SAFETY: the mask is valid by the contract of `wait`.
        let _masked = unsafe { signals::mask_while_polling(call.mask, &mut call.began) };
        loop {
            if self.spin(call, buffer)? || self.sleep(call, buffer)? {
                return Ok(());
            }
        }
    }

    /// Polls hot members for a while. Returns `true` if there are events or the time is up.
    fn spin(&'static self, call: &Call, buffer: &mut Buffer) -> Result<bool, Errno> {
        let polled = || self.lock().map_or(0, |state| state.members.polled_count() as u32);
        let mut count = polled();
        let mut spin = Spin::with(&self.spin_history);
        while count > 0 {
            match spin.iterate_by(POLLS_PER_MEMBER.saturating_mul(count)) {
                Action::Poll => self.poll_lanes(buffer),
                Action::PollKernel => {
                    self.ask_kernel(call, buffer)?;
                    if buffer.len() == 0 {
                        if call.began.since() != HandlersRun::None {
                            return Err(Errno::INTR);
                        }
                        if call.left_ns() == Some(0) {
                            return Ok(true);
                        }
                    }
                    count = polled();
                }
                Action::Block => break,
            }
            if buffer.len() > 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Parks all members and sleeps in the kernel. Returns `true` if there are events or the time is up.
    fn sleep(&'static self, call: &Call, buffer: &mut Buffer) -> Result<bool, Errno> {
        threads::add(&self.sleepers, 1);
        let is_ready = self.lock().is_some_and(|mut state| state.members.park_all());
        let woken = if is_ready {
            Ok(0)
        } else if call.began.since() != HandlersRun::None {
            Err(Errno::INTR)
        } else {
            let (begin, room) = buffer.rest();
            // SAFETY: the array and the mask are valid by the contract of `wait`.
            unsafe { blocking::epoll_wait(call.epfd, begin, room, call.left_ns(), call.mask) }
        };
        threads::add(&self.sleepers, u32::MAX);
        let count = woken?;
        if is_ready {
            self.poll_lanes(buffer);
        } else {
            self.accept(buffer, count);
        }
        Ok(buffer.len() > 0 || (!is_ready && count == 0 && call.left_ns() == Some(0)))
    }
}
