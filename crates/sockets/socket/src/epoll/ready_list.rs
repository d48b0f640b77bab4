//! The registrations of a set. Everything here runs under the set's lock.
//!
//! *Hot* connections are polled by every wait, and their number is bounded; the others are *parked*: their peers ring,
//! and the inner epoll reports it. So a wait costs the same however many are registered. See `scan` for how waits poll,
//! and in which order they report.

mod scan;

use super::kernel;
use super::ready_time::ReadyTime;
use super::registration::{EDGE, EXCLUSIVE, LifelineState, ONESHOT, Registration, Target, Watch};
use crate::descriptor::hidden::{HiddenFd, SpareFd};
use crate::listener::Listener;
use crate::process::clock::{TICKS_PER_MICROSECOND, ticks};
use crate::process::limit;
use crate::process::system;
use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, epoll_event};
use rustix::io::Errno;
#[cfg(test)]
pub(super) use scan::HOT_BEGIN;
pub(super) use scan::HeldRecords;
use scan::ReadyEntry;
use std::collections::{BTreeSet, VecDeque};
use std::os::fd::RawFd;

/// The token of the bell.
const WAKE_TOKEN: u64 = u64::MAX;
const INPUT: u32 = libc::EPOLLIN as u32;
const OUTPUT: u32 = libc::EPOLLOUT as u32;
const HANG_UP: u32 = libc::EPOLLHUP as u32;
const INPUT_SHUT: u32 = libc::EPOLLRDHUP as u32;

/// Tokens taken from the inner epoll at once.
const TOKENS: usize = 64;
/// Waits that end without asking the kernel, before the clock is read to see whether it is time to ask.
const CALLS_PER_CLOCK_READ: u32 = 8;
/// Foreign descriptors and parked connections wait this long, at most, while hot ones keep the program busy.
const UNASKED_MICROSECONDS: u64 = 20;

/// For the first set that gets a lane when the program has used up its descriptors.
static SPARE_INNER: SpareFd = SpareFd::new();

/// Prepares for [`ReadyList::ensure_inner`] while there are descriptors.
pub fn keep_spare_inner() {
    SPARE_INNER.keep(kernel::create_hidden);
}

/// What the kernel is asked of a lane listener, or of the gate before it: an epoll instance, which takes no
/// `EPOLLEXCLUSIVE`.
fn lane_events(listener: &'static Listener, events: u32) -> u32 {
    let kept = if listener.watched_fd() == listener.lane_fd() { EDGE | EXCLUSIVE } else { EDGE };
    INPUT | events & kept
}

#[derive(Default)]
pub(super) struct ReadyList {
    /// The program's descriptors of the set.
    pub descriptors: Vec<RawFd>,
    /// The kernel reports what nobody here may take: ask it again only in a while.
    pub must_back_off: bool,
    /// A hot connection cannot be woken for.
    pub has_unwakeable: bool,
    /// Parked connections whose senders hold something back, since the last sleep.
    held: Vec<u32>,
    /// How long the first of them may.
    held_left_ns: Option<u64>,
    /// The last wait had room for the kernel's events only.
    pub lanes_first: bool,
    /// Foreign descriptors have been added, or sets that may hold some.
    pub has_foreign: bool,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// By descriptor: index of the slot plus one, or zero.
    by_fd: Vec<u32>,
    /// Those whose descriptor the program has closed while another one names the same object.
    orphans: Vec<u32>,
    /// Connections that every wait polls: the one that has been idle for longest comes first.
    hot: Vec<u32>,
    /// Nested sets, and listeners that the kernel has reported: every wait polls them too.
    hot_others: Vec<u32>,
    /// Connections that were found ready and had to make room among the hot ones, by when they became ready.
    queue: BTreeSet<(ReadyTime, u32)>,
    /// Connections that can neither be woken for nor be polled by every wait.
    unparkable: VecDeque<u32>,
    /// How many more connections than [`scan::HOT_BEGIN`] may be hot.
    hot_extra: usize,
    /// Scans that have reported something.
    reports: u32,
    /// How many connections are parked and not hot.
    parked_count: usize,
    /// What the scan that is going on has found; empty between scans.
    found: Vec<ReadyEntry>,
    /// The scan that is going on has polled a connection that is on its lifeline.
    has_polled_lifeline: bool,
    /// Since when a wait sleeps: all was parked and quiet then.
    pub asleep_since: Option<ReadyTime>,
    inner: Option<HiddenFd>,
    wake_event: Option<HiddenFd>,
    calls_since_clock: u32,
    asked_ticks: u64,
    /// Added to the generations in a process that has inherited the set: what it registers has other tokens than what
    /// other processes register in the same kernel objects.
    generations_skipped: u32,
}

#[derive(Default)]
struct Slot {
    generation: u32,
    registration: Option<Registration>,
}

impl ReadyList {
    /// Connections that are worth spinning for: those that cannot ring leave the hot ones at the first sleep.
    pub fn hot_count(&self) -> usize {
        self.hot.len()
    }

    /// Whether only the kernel knows the rest of the answer. Without foreign descriptors, listeners and parked
    /// connections a set whose connections are all hot knows everything itself.
    pub fn needs_kernel(&self) -> bool {
        self.has_foreign || self.count() > self.hot.len() + self.queue.len()
    }

    /// The epoll instance that the program does not see, or -1.
    pub fn inner_fd(&self) -> RawFd {
        self.inner.as_ref().map_or(-1, HiddenFd::raw)
    }

    pub fn epfd(&self) -> Option<RawFd> {
        self.descriptors.first().copied()
    }

    pub fn has_inner(&self) -> bool {
        self.inner.is_some()
    }

    /// Puts the inner epoll into the program's.
    pub fn ensure_inner(&mut self, epfd: RawFd) -> Result<(), Errno> {
        if self.inner.is_some() {
            return Ok(());
        }
        let created = limit::with_raised_limit(kernel::create_hidden, |error| *error == Errno::MFILE);
        let inner = created.ok().or_else(|| SPARE_INNER.take()).ok_or(Errno::NOMEM)?;
        kernel::control(epfd, EPOLL_CTL_ADD, inner.raw(), INPUT, kernel::data_of(kernel::InternalFd::Inner))?;
        self.inner = Some(inner);
        Ok(())
    }

    pub fn find(&self, fd: RawFd) -> Option<u32> {
        let place = self.by_fd.get(usize::try_from(fd).ok()?)?;
        place.checked_sub(1)
    }

    pub fn at(&self, index: u32) -> &Registration {
        self.slots[index as usize].registration.as_ref().expect("an index in use")
    }

    pub fn at_mut(&mut self, index: u32) -> &mut Registration {
        self.slots[index as usize].registration.as_mut().expect("an index in use")
    }

    /// Enters a registration; the kernel's part is [`ReadyList::register_in_kernel`].
    pub fn insert(&mut self, registration: Registration) -> u32 {
        let fd = registration.fd as usize;
        if self.by_fd.len() <= fd {
            self.by_fd.resize(fd + 1, 0);
        }
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: self.generations_skipped, registration: None });
            (self.slots.len() - 1) as u32
        });
        if let Some(orphan) = self.orphan_known_by(registration.fd) {
            // One descriptor is in an epoll instance once: who has a number of its own goes first.
            self.move_to(orphan, -1);
        }
        self.by_fd[fd] = index + 1;
        self.slots[index as usize].registration = Some(registration);
        index
    }

    /// The program closes the descriptor of a registration; `survivors` are others of the same object. It stays, as
    /// Linux keeps it, and is known to the kernel by one of them. `false`: that cannot be, for want of a free one.
    pub fn orphan(&mut self, index: u32, survivors: &[RawFd]) -> bool {
        let is_free = |fd: &&RawFd| self.find(**fd).is_none() && self.orphan_known_by(**fd).is_none();
        let kernel_fd = survivors.iter().find(is_free).copied().filter(|_| !self.at(index).is_inherited);
        if !self.move_to(index, kernel_fd.unwrap_or(-1)) {
            return false;
        }
        let fd = self.at(index).fd;
        if !self.orphans.contains(&index) {
            self.orphans.push(index);
            self.by_fd[fd as usize] = 0;
        }
        true
    }

    /// An orphan of `target` that has to do with the closing of `fd`: because the kernel knows it by that, or because
    /// it `is_last`.
    pub fn orphan_of(&self, target: Target, fd: RawFd, is_last: bool) -> Option<u32> {
        self.orphans.iter().copied().find(|&index| {
            let orphan = self.at(index);
            orphan.target.is(target) && (is_last || orphan.kernel_fd == fd)
        })
    }

    pub fn orphan_known_by(&self, fd: RawFd) -> Option<u32> {
        self.orphans.iter().copied().find(|&index| self.at(index).kernel_fd == fd)
    }

    /// An orphan whose object has no descriptor left.
    pub fn orphan_without_descriptors(&self) -> Option<u32> {
        self.orphans.iter().copied().find(|&index| self.at(index).target.descriptors().is_empty())
    }

    /// Registered descriptors that are something else by now, as far as can be told.
    pub fn stale_descriptors(&self) -> Vec<RawFd> {
        let registrations = self.slots.iter().filter_map(|slot| slot.registration.as_ref());
        let numbered = registrations.filter(|registration| self.find(registration.fd).is_some());
        numbered
            .map(|registration| (registration.fd, registration.target))
            .filter(Target::has_gone)
            .map(|of| of.0)
            .collect()
    }

    /// The orphan whose number names the same object again.
    pub fn find_returned(&mut self, fd: RawFd, target: Target) -> Option<u32> {
        let is_returned = |&index: &u32| self.at(index).fd == fd && self.at(index).target.is(target);
        let place = self.orphans.iter().position(is_returned)?;
        let index = self.orphans[place];
        if !self.move_to(index, fd) {
            return None;
        }
        self.orphans.swap_remove(place);
        self.by_fd[fd as usize] = index + 1;
        Some(index)
    }

    /// Has the kernel know a registration by another descriptor of the same object, or by none: then a connection is
    /// looked at every millisecond, and nothing else can be.
    fn move_to(&mut self, index: u32, kernel_fd: RawFd) -> bool {
        if self.at(index).is_inherited {
            self.at_mut(index).kernel_fd = kernel_fd;
            return true;
        }
        self.unregister_in_kernel(index);
        let registration = self.at_mut(index);
        registration.kernel_fd = kernel_fd;
        registration.unpark();
        if registration.can_wake() {
            registration.lifeline = LifelineState::Unregistered;
        }
        self.make_hot(index);
        self.register_in_kernel(index).is_ok()
    }

    /// Takes a registration out; the kernel's part is [`ReadyList::unregister_in_kernel`].
    pub fn remove(&mut self, index: u32) {
        self.at_mut(index).unpark();
        self.set_watch(index, Watch::Off);
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1).wrapping_add(self.generations_skipped);
        if let Some(registration) = slot.registration.take()
            && self.find(registration.fd) == Some(index)
        {
            self.by_fd[registration.fd as usize] = 0;
        } else {
            self.orphans.retain(|&orphan| orphan != index);
        }
        self.free.push(index);
    }

    /// Takes everything out: the last descriptor of the set is gone.
    pub fn clear(&mut self) {
        for index in 0..self.slots.len() as u32 {
            if self.slots[index as usize].registration.is_some() {
                self.remove(index);
            }
        }
        *self =
            Self { slots: std::mem::take(&mut self.slots), free: std::mem::take(&mut self.free), ..Self::default() };
    }

    pub fn count(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// In the child of a fork: everything was made by another process, and nothing is asleep here.
    pub fn after_fork_in_child(&mut self) {
        // The number of a process has 22 bits: this leaves a thousand generations to each.
        self.generations_skipped = (rustix::process::getpid().as_raw_nonzero().get() as u32) << 10;
        for &free in &self.free {
            let slot = &mut self.slots[free as usize];
            slot.generation = slot.generation.wrapping_add(self.generations_skipped);
        }
        for index in 0..self.slots.len() as u32 {
            if let Some(registration) = self.slots[index as usize].registration.as_mut() {
                registration.is_inherited = true;
                // The connections have forgotten their sleepers already.
                registration.is_parked = false;
                self.make_hot_untrimmed(index);
            }
        }
    }

    /// In the parent of a fork: the child may go on with what this process closes.
    pub fn after_fork_in_parent(&mut self) {
        self.slots.iter_mut().filter_map(|slot| slot.registration.as_mut()).for_each(|it| it.may_be_in_child = true);
    }

    /// Those that were left to the kernel, and go by lanes now.
    pub fn switched(&self) -> Vec<u32> {
        let has_switched = |slot: &Slot| {
            let registration = slot.registration.as_ref();
            registration.is_some_and(|it| it.lifeline == LifelineState::CarriesData && !it.is_on_lifeline())
        };
        (0_u32..).zip(&self.slots).filter(|(_, slot)| has_switched(slot)).map(|(index, _)| index).collect()
    }

    /// Has the next wait poll one that is parked. `false`: it is not.
    pub fn unpark_for_poll(&mut self, index: u32) -> bool {
        let is_parked = self.at(index).watch == Watch::Parked;
        if is_parked {
            self.at_mut(index).unpark();
            self.make_hot(index);
        }
        is_parked
    }

    /// After a sleep that was to end when something is due that a sender holds back: the scan finds out.
    pub fn poll_held(&mut self) {
        self.held_left_ns = None;
        for index in std::mem::take(&mut self.held) {
            if self.slots[index as usize].registration.is_some() {
                self.unpark_for_poll(index);
            }
        }
    }

    /// How long a sleep may be, as the last [`ReadyList::park_all`] has found.
    pub fn held_left_ns(&self) -> Option<u64> {
        self.held_left_ns
    }

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
    fn park(&mut self, index: u32) -> bool {
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
