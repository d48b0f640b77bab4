//! What the kernel is asked to report, and what it reports.

use super::{INPUT, ReadyList};
use crate::descriptor::hidden::HiddenFd;
use crate::epoll::kernel;
use crate::epoll::ready_time::ReadyTime;
use crate::epoll::registration::{EDGE, EXCLUSIVE, LifelineState, ONESHOT, Target, Watch};
use crate::listener::Listener;
use crate::process::clock::{TICKS_PER_MICROSECOND, ticks};
use crate::process::limit;
use crate::process::system;
use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, epoll_event};
use rustix::io::Errno;

/// The token of the bell.
const WAKE_TOKEN: u64 = u64::MAX;
const OUTPUT: u32 = libc::EPOLLOUT as u32;
const HANG_UP: u32 = libc::EPOLLHUP as u32;
const INPUT_SHUT: u32 = libc::EPOLLRDHUP as u32;
/// Tokens taken from the inner epoll at once.
const TOKENS: usize = 64;
/// Waits that end without asking the kernel, before the clock is read to see whether it is time to ask.
const CALLS_PER_CLOCK_READ: u32 = 8;
/// Foreign descriptors and parked connections wait this long, at most, while hot ones keep the program busy.
const UNASKED_MICROSECONDS: u64 = 20;

/// What the kernel is asked of a lane listener, or of the gate before it: an epoll instance, which takes no
/// `EPOLLEXCLUSIVE`.
fn lane_events(listener: &'static Listener, events: u32) -> u32 {
    let kept = if listener.watched_fd() == listener.lane_fd() { EDGE | EXCLUSIVE } else { EDGE };
    INPUT | events & kept
}

impl ReadyList {
    /// Makes the kernel report it: nested sets to us, a listener to both. A connection comes into the inner epoll when
    /// it is parked first: programs that add and remove busy ones all the time cost no system call.
    pub fn register_in_kernel(&mut self, index: u32) -> Result<(), Errno> {
        let token = self.token(index);
        let inner = self.inner_fd();
        let registration = self.at(index);
        match registration.target {
            Target::Connection(_) | Target::Stream => Ok(()),
            // Beside the inner epoll, not in it: the kernel allows only so many levels.
            Target::Nested(_) => {
                let (events, data) =
                    ((registration.events & EDGE) | INPUT, kernel::data_of(kernel::InternalFd::Nested(index)));
                kernel::control(self.epfd().ok_or(Errno::BADF)?, EPOLL_CTL_ADD, registration.kernel_fd, events, data)
            }
            Target::Listener(listener) => {
                let (fd, events, data) = (registration.kernel_fd, registration.events, registration.data);
                let epfd = self.epfd().ok_or(Errno::BADF)?;
                if events & ONESHOT == 0 {
                    kernel::control(epfd, EPOLL_CTL_ADD, fd, events, data)?;
                } else {
                    kernel::control(inner, EPOLL_CTL_ADD, fd, events & !(ONESHOT | EDGE), token)?;
                }
                match kernel::control(inner, EPOLL_CTL_ADD, listener.watched_fd(), lane_events(listener, events), token)
                {
                    // Another descriptor of the same listener is in the set and reports it.
                    Ok(()) | Err(Errno::EXIST) => Ok(()),
                    Err(error) => {
                        let _ = kernel::control(epfd, EPOLL_CTL_DEL, fd, 0, 0);
                        let _ = kernel::control(inner, EPOLL_CTL_DEL, fd, 0, 0);
                        Err(error)
                    }
                }
            }
        }
    }

    /// Asks the peer of a connection to ring, and the kernel to report it. `false`: looking is all that can be done.
    pub(super) fn park(&mut self, index: u32) -> bool {
        let (token, inner) = (self.token(index), self.inner_fd());
        let registration = self.at_mut(index);
        if !registration.is_connection() || registration.lacks_wakeup() {
            return false;
        }
        if registration.lifeline == LifelineState::Unregistered {
            let added = kernel::control(inner, EPOLL_CTL_ADD, registration.kernel_fd, INPUT | INPUT_SHUT, token);
            registration.lifeline = if added.is_ok() { LifelineState::Wakes } else { LifelineState::Unwakeable };
        }
        if registration.lifeline == LifelineState::CarriesData && !registration.is_on_lifeline() {
            // What the kernel has said while the connection was on its lifeline it does not say again. Whatever rang is
            // in memory, but for the end of a peer that has left no word there.
            registration.lifeline = LifelineState::Shared;
            registration.poll_for_hang_up();
        }
        registration.park()
    }

    /// Has the kernel report a connection that is on its lifeline: at once if something is there and it
    /// `reports_present`, else when something comes. `false`: it cannot.
    pub fn leave_to_kernel(&mut self, index: u32, reports_present: bool) -> bool {
        let (token, inner) = (self.token(index), self.inner_fd());
        let registration = self.at_mut(index);
        let operation = match registration.lifeline {
            LifelineState::Unregistered => Some(EPOLL_CTL_ADD),
            LifelineState::Wakes | LifelineState::Shared => Some(EPOLL_CTL_MOD),
            LifelineState::CarriesData => reports_present.then_some(EPOLL_CTL_MOD),
            LifelineState::Ended | LifelineState::Unwakeable => return false,
        };
        if let Some(operation) = operation {
            let events = INPUT | INPUT_SHUT | EDGE | registration.events & OUTPUT;
            if kernel::control(inner, operation, registration.kernel_fd, events, token).is_err() {
                return false;
            }
            registration.lifeline = LifelineState::CarriesData;
        }
        registration.park();
        self.set_watch(index, Watch::Parked);
        true
    }

    /// Undoes [`ReadyList::register_in_kernel`]. What is not there any more need not be taken out.
    pub fn unregister_in_kernel(&mut self, index: u32) {
        let inner = self.inner_fd();
        let registration = self.at(index);
        match registration.target {
            Target::Connection(_) if !registration.can_wake() => {}
            Target::Connection(_) => {
                let _ = kernel::control(inner, EPOLL_CTL_DEL, registration.kernel_fd, 0, 0);
            }
            Target::Nested(_) => {
                let _ = kernel::control(self.epfd().unwrap_or(-1), EPOLL_CTL_DEL, registration.kernel_fd, 0, 0);
            }
            Target::Listener(listener) => {
                let _ = match self.another_of(index) {
                    Some((heir, events)) => {
                        let (fd, token) = (listener.watched_fd(), self.token(heir));
                        kernel::control(inner, EPOLL_CTL_MOD, fd, lane_events(listener, events), token)
                    }
                    None => kernel::control(inner, EPOLL_CTL_DEL, listener.watched_fd(), 0, 0),
                };
                let at = if registration.events & ONESHOT == 0 { self.epfd().unwrap_or(-1) } else { inner };
                let _ = kernel::control(at, EPOLL_CTL_DEL, registration.kernel_fd, 0, 0);
            }
            Target::Stream => {}
        }
    }

    /// Another registration of the same listener, and what it asks for.
    fn another_of(&self, index: u32) -> Option<(u32, u32)> {
        let target = self.at(index).target;
        let registered = target.descriptors().into_iter().filter_map(|fd| self.find(fd));
        let mut others = registered.chain(self.orphans.iter().copied());
        let is_another = |&other: &u32| other != index && self.at(other).target.is(target);
        others.find(is_another).map(|other| (other, self.at(other).events))
    }

    pub fn token(&self, index: u32) -> u64 {
        (u64::from(index) << 32) | u64::from(self.slots[index as usize].generation)
    }

    fn of_token(&self, token: u64) -> Option<u32> {
        let index = (token >> 32) as u32;
        let slot = self.slots.get(index as usize)?;
        (slot.generation == token as u32 && slot.registration.is_some()).then_some(index)
    }

    /// Whether foreign descriptors and parked connections have waited long enough.
    #[inline]
    pub fn kernel_is_due(&mut self) -> bool {
        self.calls_since_clock += 1;
        if self.calls_since_clock < CALLS_PER_CLOCK_READ {
            return false;
        }
        self.calls_since_clock = 0;
        ticks().wrapping_sub(self.asked_ticks) > UNASKED_MICROSECONDS * TICKS_PER_MICROSECOND
    }

    pub fn note_kernel_asked(&mut self) {
        self.asked_ticks = ticks();
        self.asleep_since = None;
    }

    /// Wakes the threads that sleep on the set.
    pub fn wake_sleepers(&mut self) {
        if self.wake_event.is_none() {
            let created = limit::with_raised_limit(kernel::create_wake_event, |error| *error == Errno::MFILE);
            let Ok(wake_event) = created else { return };
            let _ = kernel::control(self.inner_fd(), EPOLL_CTL_ADD, wake_event.raw(), INPUT, WAKE_TOKEN);
            self.wake_event = Some(wake_event);
        }
        if let Some(wake_event) = self.wake_event.as_ref().and_then(HiddenFd::get) {
            let _ = rustix::io::write(wake_event, &1_u64.to_ne_bytes());
        }
    }

    /// Takes what the inner epoll reports: those registrations become hot, as many as they are; a scan follows.
    ///
    /// It reports them in the order in which they became ready. After a sleep that is all there is to know of those
    /// without a stamp: each is behind those that were reported before it, whenever a thread has heard of it.
    pub fn collect_events(&mut self) {
        let inner = self.inner_fd();
        let mut behind = self.asleep_since.take();
        for _ in 0..=self.count() / TOKENS {
            let mut events = [epoll_event { events: 0, u64: 0 }; TOKENS];
            // SAFETY: the array is writable.
            let Ok(count) = (unsafe { kernel::wait_now(inner, events.as_mut_ptr(), TOKENS) }) else { return };
            for event in &events[..count] {
                let (token, events) = (event.u64, event.events);
                let reported_at = behind.unwrap_or_else(ReadyTime::now);
                self.note_event(token, events, reported_at);
                if behind.is_some() && count > 1 {
                    let stamped = self.of_token(token).and_then(|index| self.at(index).arrived_or_arrives());
                    behind = Some(stamped.map_or(reported_at, |arrived| arrived.max(reported_at)).behind(1));
                }
            }
            if count < TOKENS {
                return;
            }
        }
    }

    /// The program's epoll instance has reported something of ours.
    pub fn note_internal_event(&mut self, internal: kernel::InternalFd) {
        match internal {
            kernel::InternalFd::Inner => self.collect_events(),
            kernel::InternalFd::Nested(index) => {
                let slot = self.slots.get_mut(index as usize);
                let Some(registration) = slot.and_then(|slot| slot.registration.as_mut()) else { return };
                registration.is_pending = true;
                if !registration.is_enabled {
                    self.unregister_in_kernel(index);
                }
            }
        }
    }

    fn note_event(&mut self, token: u64, events: u32, at: ReadyTime) {
        if token == WAKE_TOKEN {
            if let Some(wake_event) = self.wake_event.as_ref().and_then(HiddenFd::get) {
                let _ = rustix::io::read(wake_event, &mut [0_u8; 8]);
            }
            return;
        }
        let Some(index) = self.of_token(token) else {
            // Another process that has the set added it: not ours to report, but the kernel will say it again at once.
            self.must_back_off = true;
            return;
        };
        let registration = self.at_mut(index);
        match registration.target {
            Target::Connection(_) => self.note_connection_event(index, events, at),
            Target::Listener(listener) => {
                registration.is_pending = true;
                if events & HANG_UP != 0 {
                    let _ = kernel::control(self.inner_fd(), EPOLL_CTL_DEL, listener.watched_fd(), 0, 0);
                }
            }
            Target::Nested(_) | Target::Stream => {}
        }
        let registration = self.at(index);
        if !registration.is_enabled && matches!(registration.target, Target::Listener(_)) {
            // A one-shot report was made: it says nothing until it is changed.
            self.unregister_in_kernel(index);
        }
        self.make_hot_untrimmed(index);
    }

    fn note_connection_event(&mut self, index: u32, events: u32, at: ReadyTime) {
        let inner = self.inner_fd();
        let registration = self.at_mut(index);
        let Target::Connection(connection) = registration.target else { return };
        registration.unpark();
        let before = registration.lifeline;
        if connection.is_on_lifeline() {
            // By edges: what the kernel has said it does not say again.
            registration.note_kernel_report(at);
            if before == LifelineState::CarriesData {
                return;
            }
        }
        let is_taken = connection.consume_ring();
        registration.lifeline = match () {
            () if connection.has_ended() => LifelineState::Ended,
            // Before there are lanes the peer may say so, and only one that is gone says nothing more.
            () if connection.is_on_lifeline() => LifelineState::CarriesData,
            () if events & INPUT_SHUT != 0 && events & HANG_UP == 0 => LifelineState::Unwakeable,
            () if is_taken => LifelineState::Wakes,
            () => LifelineState::Shared,
        };
        let (fd, after) = (registration.kernel_fd, registration.lifeline);
        if after == LifelineState::Shared && !connection.is_on_lifeline() {
            system::drain_surplus_rings(connection.lifeline());
        }
        if after == before {
            return;
        }
        let token = self.token(index);
        let _ = match after {
            LifelineState::Wakes => kernel::control(inner, EPOLL_CTL_MOD, fd, INPUT | INPUT_SHUT, token),
            LifelineState::CarriesData | LifelineState::Shared => {
                kernel::control(inner, EPOLL_CTL_MOD, fd, INPUT | INPUT_SHUT | EDGE, token)
            }
            LifelineState::Ended | LifelineState::Unwakeable => kernel::control(inner, EPOLL_CTL_DEL, fd, 0, 0),
            LifelineState::Unregistered => Ok(()),
        };
    }
}
