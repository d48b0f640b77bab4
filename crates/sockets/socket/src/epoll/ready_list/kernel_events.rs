//! Registrations in the kernel's epoll instances, and the events that they report.

use super::{INPUT, ReadyList};
use crate::descriptor::hidden::HiddenFd;
use crate::epoll::kernel;
use crate::epoll::ready_time::ReadyTime;
use crate::epoll::registration::{EDGE, EXCLUSIVE, LifelineState, ONESHOT, Target, Watch};
use crate::listener::Listener;
use crate::process::clock::{TICKS_PER_MICROSECOND, ticks};
use crate::process::{limit, system};
use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, epoll_event};
use rustix::io::Errno;

/// The token of the eventfd that wakes sleeping threads.
const WAKE_TOKEN: u64 = u64::MAX;
const OUTPUT: u32 = libc::EPOLLOUT as u32;
const HANG_UP: u32 = libc::EPOLLHUP as u32;
const INPUT_SHUT: u32 = libc::EPOLLRDHUP as u32;
/// Events read from the inner epoll instance at once.
const TOKENS: usize = 64;
/// For how long a busy program's other descriptors and parked connections may go unpolled.
const KERNEL_POLL_INTERVAL_US: u64 = 20;

/// Returns the events to register for a lane listener, or for its gate, an epoll instance, for which the kernel rejects
/// `EPOLLEXCLUSIVE`.
fn lane_events(listener: &'static Listener, events: u32) -> u32 {
    let kept = if listener.watched_fd() == listener.lane_fd() { EDGE | EXCLUSIVE } else { EDGE };
    INPUT | events & kept
}

impl ReadyList {
    /// Registers a nested set or a listener in the kernel's instances. A connection is registered in the inner one only
    /// when it is first parked, so that adding and removing busy connections costs no system call.
    pub fn register_in_kernel(&mut self, index: u32) -> Result<(), Errno> {
        let token = self.token(index);
        let inner = self.inner_fd();
        let registration = self.at(index);
        match registration.target {
            Target::Connection(_) | Target::Stream => Ok(()),
            // In the program's instance, not in the inner one, because the kernel bounds the depth of nesting.
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

    /// Asks the peer of a connection for a wakeup, and the kernel to report it. Returns `false` if the connection can
    /// only be polled.
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
            // The kernel does not repeat what it reported while data travelled over the lifeline. Wakeups since then
            // have left their cause in memory, except for the hang-up of a peer that was killed.
            registration.lifeline = LifelineState::Shared;
            registration.poll_for_hang_up();
        }
        registration.park()
    }

    /// Makes the kernel report a connection whose data travels over its lifeline: when something new arrives, and with
    /// `reports_present` also if something is there already. Returns `false` if that is impossible.
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
        if !registration.can_be_left_to_kernel() {
            // Another thread has switched to lanes meanwhile. It notifies only sets in which the connection is parked.
            registration.unpark();
            return false;
        }
        self.set_watch(index, Watch::Parked);
        true
    }

    /// Undoes [`ReadyList::register_in_kernel`]. Ignores registrations that no longer exist.
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
                    Some((other, events)) => {
                        let (fd, token) = (listener.watched_fd(), self.token(other));
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

    /// Returns another registration of the same listener, and its requested events.
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

    /// Returns whether the kernel has not been polled for [`KERNEL_POLL_INTERVAL_US`].
    #[inline]
    pub fn is_kernel_poll_due(&self) -> bool {
        ticks().wrapping_sub(self.kernel_polled_ticks) > KERNEL_POLL_INTERVAL_US * TICKS_PER_MICROSECOND
    }

    pub fn note_kernel_poll(&mut self) {
        self.kernel_polled_ticks = ticks();
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

    /// Reads all events of the inner epoll instance and makes their registrations hot; a scan follows.
    ///
    /// The kernel reports in the order in which registrations became ready. After a sleep that order is all that is
    /// known of registrations without a timestamp; each is placed behind those reported before it.
    pub fn collect_events(&mut self) {
        let inner = self.inner_fd();
        let mut behind = self.asleep_since.take();
        for _ in 0..=self.count() / TOKENS {
            let mut events = [epoll_event { events: 0, u64: 0 }; TOKENS];
            // SAFETY: `events` is a local array of `TOKENS` events.
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

    /// Handles an event of an internal descriptor in the program's epoll instance.
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
            // Another process that shares the set registered it. It is not reported here, but the kernel would repeat
            // it at once.
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
            // After a one-shot report the registration reports nothing until it is modified.
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
            // Edge-triggered: the kernel does not repeat it.
            registration.note_kernel_report(at);
            if before == LifelineState::CarriesData {
                return;
            }
        }
        let is_taken = connection.consume_ring();
        registration.lifeline = match () {
            () if connection.has_ended() => LifelineState::Ended,
            // Before there are lanes, a peer may announce them here; only a peer that is gone sends nothing more.
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
