//! The registrations of a set. Everything here runs under the set's lock.
//!
//! *Hot* connections are polled by every wait, and their number is bounded; the others are *parked*: their peers ring,
//! and the inner epoll reports it. So a wait costs the same however many are registered. See `scan` for how waits poll,
//! and in which order they report.

mod kernel_events;
mod scan;

use super::kernel;
use super::ready_time::ReadyTime;
use super::registration::{LifelineState, Registration, Target, Watch};
use crate::descriptor::hidden::{HiddenFd, SpareFd};
use crate::process::limit;
use libc::EPOLL_CTL_ADD;
use rustix::io::Errno;
use std::collections::{BTreeSet, VecDeque};
use std::os::fd::RawFd;

const INPUT: u32 = libc::EPOLLIN as u32;

/// For the first set that gets a lane when the program has used up its descriptors.
static SPARE_INNER: SpareFd = SpareFd::new();

/// Prepares for [`ReadyList::ensure_inner`] while there are descriptors.
pub fn keep_spare_inner() {
    SPARE_INNER.keep(kernel::create_hidden);
}

/// The bound of the number of hot connections when nothing is known. Idle ones never raise it.
pub(super) const HOT_BEGIN: usize = 64;

/// Something that is ready.
struct ReadyEntry {
    since: ReadyTime,
    index: u32,
    ready: i16,
}

/// What becomes of what a sender holds back when its connection is parked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeldRecords {
    /// It is shown once it is due: the thread sleeps no longer than that.
    Kept,
    /// It is shown at once: nobody is known to be awake when it is due.
    Published,
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
    /// How many more connections than [`HOT_BEGIN`] may be hot.
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
}
