//! The registrations of a set. All of this code runs under the set's lock.
//!
//! Every wait polls the *hot* connections, whose number is bounded. The others are *parked*: their peers send wakeups,
//! which the inner epoll instance reports. The cost of a wait therefore does not depend on the number of registrations.
//! `scan` describes how waits poll and in which order they report.

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

/// For the first set that gets a lane after the program has used up its descriptors.
static SPARE_INNER: SpareFd = SpareFd::new();

/// Prepares for [`ReadyList::ensure_inner`] while descriptors are available.
pub fn keep_spare_inner() {
    SPARE_INNER.keep(kernel::create_hidden);
}

/// The initial bound on the number of hot connections. Idle connections never raise it.
pub(super) const HOT_BEGIN: usize = 64;

/// A registration that a scan has found ready.
struct ReadyEntry {
    since: ReadyTime,
    index: u32,
    ready: i16,
}

/// What happens to records that a sender holds back when its connection is parked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeldRecords {
    /// They become readable once they are due; the thread sleeps no longer than that.
    Kept,
    /// They become readable at once, because no thread may be awake when they are due.
    Published,
}

#[derive(Default)]
pub(super) struct ReadyList {
    /// The program's descriptors of the set.
    pub descriptors: Vec<RawFd>,
    /// Whether the kernel reports an event that no one here may consume, so that it must not be asked again at once.
    pub must_back_off: bool,
    /// Whether nothing wakes a sleeper for one of the hot connections.
    pub has_unwakeable: bool,
    /// Parked connections with held records, since the last sleep.
    held: Vec<u32>,
    /// Time until the first of these records is due.
    held_left_ns: Option<u64>,
    /// Whether the last wait only had room for the kernel's events.
    pub lanes_first: bool,
    /// Whether descriptors that the library does not serve, or sets that may hold some, have been added.
    pub has_foreign: bool,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// By descriptor: the index of the slot plus one, or 0.
    by_fd: Vec<u32>,
    /// Registrations whose descriptor the program has closed while the object has another one.
    orphans: Vec<u32>,
    /// Connections that every wait polls; the one that has been idle for longest comes first.
    hot: Vec<u32>,
    /// Nested sets, and listeners that the kernel has reported; every wait polls them too.
    hot_others: Vec<u32>,
    /// Ready connections that had to leave the hot ones, by the time at which they became ready.
    queue: BTreeSet<(ReadyTime, u32)>,
    /// Connections that cannot be woken for and that no longer fit among the hot ones.
    unparkable: VecDeque<u32>,
    /// By how much the bound on hot connections exceeds [`HOT_BEGIN`].
    hot_extra: usize,
    /// Number of scans that have reported something.
    reports: u32,
    /// Number of connections that are parked and not hot.
    parked_count: usize,
    /// What the current scan has found; empty between scans.
    found: Vec<ReadyEntry>,
    /// Whether the current scan has polled a connection whose data travels over its lifeline.
    has_polled_lifeline: bool,
    /// When a wait fell asleep; at that time all connections were parked and none was ready.
    pub asleep_since: Option<ReadyTime>,
    inner: Option<HiddenFd>,
    wake_event: Option<HiddenFd>,
    kernel_polled_ticks: u64,
    /// Added to the generations in a process that has inherited the set, so that its tokens differ from those that
    /// other processes register in the same kernel objects.
    generations_skipped: u32,
}

#[derive(Default)]
struct Slot {
    generation: u32,
    registration: Option<Registration>,
}

impl ReadyList {
    /// Returns how many connections are worth spinning for. Those that cannot be woken for stop being hot at the first
    /// sleep.
    pub fn hot_count(&self) -> usize {
        self.hot.len()
    }

    /// Returns whether only the kernel knows all ready registrations. It is not needed if all registrations are hot or
    /// queued connections.
    pub fn needs_kernel(&self) -> bool {
        self.has_foreign || self.count() > self.hot.len() + self.queue.len()
    }

    /// Returns the inner epoll instance, or -1.
    pub fn inner_fd(&self) -> RawFd {
        self.inner.as_ref().map_or(-1, HiddenFd::raw)
    }

    pub fn epfd(&self) -> Option<RawFd> {
        self.descriptors.first().copied()
    }

    pub fn has_inner(&self) -> bool {
        self.inner.is_some()
    }

    /// Creates the inner epoll instance and registers it in the program's.
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

    /// Adds a registration; [`ReadyList::register_in_kernel`] does the kernel's part.
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
            // An epoll instance holds a descriptor only once; a registration under its own number takes precedence.
            self.move_to(orphan, -1);
        }
        self.by_fd[fd] = index + 1;
        self.slots[index as usize].registration = Some(registration);
        index
    }

    /// Handles the close of a registration's descriptor; `survivors` are other descriptors of the object. As in Linux,
    /// the registration stays, and the kernel knows it by one of the survivors. Returns `false` if none of them is
    /// free.
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

    /// Returns an orphan of `target` that is affected by the close of `fd`: because the kernel knows it by `fd`, or
    /// because `fd` is the last descriptor.
    pub fn orphan_of(&self, target: Target, fd: RawFd, is_last: bool) -> Option<u32> {
        self.orphans.iter().copied().find(|&index| {
            let orphan = self.at(index);
            orphan.target.is(target) && (is_last || orphan.kernel_fd == fd)
        })
    }

    /// Returns the registrations of `target`, which has these descriptors.
    pub fn registrations_of(&self, target: Target, descriptors: &[RawFd]) -> Vec<u32> {
        let numbered = descriptors.iter().filter_map(|&fd| self.find(fd));
        let orphans = self.orphans.iter().copied();
        numbered.chain(orphans).filter(|&index| self.at(index).target.is(target)).collect()
    }

    pub fn orphan_known_by(&self, fd: RawFd) -> Option<u32> {
        self.orphans.iter().copied().find(|&index| self.at(index).kernel_fd == fd)
    }

    /// Returns an orphan whose object has no descriptor left.
    pub fn orphan_without_descriptors(&self) -> Option<u32> {
        self.orphans.iter().copied().find(|&index| self.at(index).target.descriptors().is_empty())
    }

    /// Returns registered descriptors that are known to refer to another object now.
    pub fn stale_descriptors(&self) -> Vec<RawFd> {
        let registrations = self.slots.iter().filter_map(|slot| slot.registration.as_ref());
        let numbered = registrations.filter(|registration| self.find(registration.fd).is_some());
        numbered
            .map(|registration| (registration.fd, registration.target))
            .filter(Target::has_gone)
            .map(|of| of.0)
            .collect()
    }

    /// Returns the orphan whose number refers to the same object again.
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

    /// Registers another descriptor of the same object in the kernel's part, or none. Without one, a connection is
    /// polled every millisecond, and nothing else can be reported.
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

    /// Removes a registration; [`ReadyList::unregister_in_kernel`] does the kernel's part.
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

    /// Removes all registrations, because the last descriptor of the set was closed.
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

    /// Updates the list in the child of a fork: another process made all registrations, and no thread sleeps here.
    pub fn after_fork_in_child(&mut self) {
        // A process id has at most 22 bits, which leaves 1024 generations to each process.
        self.generations_skipped = (rustix::process::getpid().as_raw_nonzero().get() as u32) << 10;
        for &free in &self.free {
            let slot = &mut self.slots[free as usize];
            slot.generation = slot.generation.wrapping_add(self.generations_skipped);
        }
        for index in 0..self.slots.len() as u32 {
            if let Some(registration) = self.slots[index as usize].registration.as_mut() {
                registration.is_inherited = true;
                // The connections have already reset their sleepers.
                registration.is_parked = false;
                self.make_hot_untrimmed(index);
            }
        }
    }

    /// Updates the list in the parent of a fork: the child may continue to use what this process closes.
    pub fn after_fork_in_parent(&mut self) {
        self.slots.iter_mut().filter_map(|slot| slot.registration.as_mut()).for_each(|it| it.may_be_in_child = true);
    }

    /// Returns connections that were left to the kernel and use lanes now.
    pub fn switched(&self) -> Vec<u32> {
        let has_switched = |slot: &Slot| {
            let registration = slot.registration.as_ref();
            registration.is_some_and(|it| it.lifeline == LifelineState::CarriesData && !it.is_on_lifeline())
        };
        (0_u32..).zip(&self.slots).filter(|(_, slot)| has_switched(slot)).map(|(index, _)| index).collect()
    }

    /// Makes the next wait poll a parked registration. Returns `false` if it is not parked.
    pub fn unpark_for_poll(&mut self, index: u32) -> bool {
        let is_parked = self.at(index).watch == Watch::Parked;
        if is_parked {
            self.at_mut(index).unpark();
            self.make_hot(index);
        }
        is_parked
    }

    /// After a sleep, makes the next scan poll the connections with held records.
    pub fn poll_held(&mut self) {
        self.held_left_ns = None;
        for index in std::mem::take(&mut self.held) {
            if self.slots[index as usize].registration.is_some() {
                self.unpark_for_poll(index);
            }
        }
    }

    /// Returns the time until a held record is due, as the last [`ReadyList::park_all`] found it.
    pub fn held_left_ns(&self) -> Option<u64> {
        self.held_left_ns
    }
}
