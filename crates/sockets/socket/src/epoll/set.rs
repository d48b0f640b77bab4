//! The connections, listeners and nested sets that an epoll instance of the program holds.

use super::deferred_closes::{Close, DeferredCloses};
use super::ready_list::{HeldRecords, ReadyList};
use super::registration::{Registration, Target};
use super::wakeup;
use crate::descriptor::table::{Kind, Tracked};
use crate::process::lock::Lock;
use crate::process::pool::Pool;
use crate::process::{blocking, signals, threads};
use ::wait::AdaptiveSpin;
use libc::epoll_event;
use rustix::io::Errno;
use std::cell::{Cell, UnsafeCell};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// The state that the library keeps for an epoll instance of the program.
#[derive(Default)]
pub struct EpollSet {
    pub(super) lock: Lock,
    /// Accessed under `lock`.
    pub(super) ready_list: UnsafeCell<ReadyList>,
    /// Whether the set holds, or has held, a registration of the library's.
    pub(super) has_inner: AtomicBool,
    /// Number of threads that sleep in the kernel until the set is ready.
    pub(super) sleepers: AtomicU32,
    /// What recent waits have learned about how soon an event follows.
    pub(super) spin_history: AdaptiveSpin,
    /// Whether the set holds, or has held, another set, which is polled under this set's lock.
    pub(super) nests: AtomicBool,
    /// Grows when the last descriptor is closed, because the object is then reused.
    pub(super) generation: AtomicU32,
    /// Descriptors that signal handlers closed while their thread was inside the set.
    pub(super) deferred_closes: DeferredCloses,
}

// SAFETY: no other type has this kind, and the alignment of the struct is at least 8, that of its atomic fields.
unsafe impl Tracked for EpollSet {
    const KINDS: &'static [Kind] = &[Kind::EpollSet];
}

// SAFETY: the only field that is not `Sync` is the cell, and it is accessed only under `lock`.
unsafe impl Sync for EpollSet {}

pub(super) static POOL: Pool<EpollSet> = Pool::new();
/// Locked before the lock of a set that holds other sets. A fork locks all sets in any order; holding this lock, it
/// meets no thread that holds one set's lock and waits for another's.
pub(super) static NESTING: Lock = Lock::new();
/// Number of registrations in all sets; while it is 0, closing a descriptor has no extra cost.
pub(super) static REGISTERED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The sets that this thread sleeps on.
    static SLEEPING_ON: SleepingOn = const { SleepingOn(Cell::new(Vec::new())) };
}

struct SleepingOn(Cell<Vec<&'static EpollSet>>);

impl Drop for SleepingOn {
    /// Runs when the thread is cancelled while it sleeps.
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(EpollSet::remove_sleeper);
    }
}

/// Registers the thread as a sleeper of some sets; until it is dropped, changes of these sets wake the thread.
pub(crate) struct SleepGuard {
    before: usize,
}

impl SleepGuard {
    /// Runs `prepare` with the list to which sets add themselves by [`EpollSet::add_sleeper`].
    pub(crate) fn begin<R>(prepare: impl FnOnce(&mut Vec<&'static EpollSet>) -> R) -> (Self, R) {
        let mut asleep = SLEEPING_ON.with(|asleep| asleep.0.take());
        let before = asleep.len();
        let result = prepare(&mut asleep);
        SLEEPING_ON.with(|own| own.0.set(asleep));
        (Self { before }, result)
    }
}

impl Drop for SleepGuard {
    fn drop(&mut self) {
        SLEEPING_ON.with(|own| {
            let mut asleep = own.0.take();
            asleep.drain(self.before..).for_each(EpollSet::remove_sleeper);
            own.0.set(asleep);
        });
    }
}

impl EpollSet {
    /// Notes that the program duplicated a descriptor of the set.
    pub fn add_descriptor(&self, fd: RawFd) {
        self.with(|ready_list| ready_list.descriptors.push(fd));
    }

    /// Removes a descriptor. Returns whether it was the last one: the set is then empty and can be released.
    pub(super) fn drop_descriptor(&self, ready_list: &mut ReadyList, fd: RawFd) -> bool {
        ready_list.descriptors.retain(|&known| known != fd);
        if !ready_list.descriptors.is_empty() {
            return false;
        }
        REGISTERED.fetch_sub(ready_list.count(), Ordering::Relaxed);
        ready_list.clear();
        self.has_inner.store(false, Ordering::SeqCst);
        self.nests.store(false, Ordering::Relaxed);
        self.generation.fetch_add(1, Ordering::SeqCst);
        true
    }

    /// Returns whether the set has something to report. Makes no system call unless `thorough`.
    pub(crate) fn peek(&'static self, thorough: bool) -> bool {
        self.with(|ready_list| {
            if ready_list.peek(thorough) {
                return true;
            }
            let Some(epfd) = ready_list.epfd().filter(|_| thorough) else { return false };
            if !is_readable(epfd) || !ready_list.has_inner() {
                return is_readable(epfd);
            }
            ready_list.collect_events();
            ready_list.peek(true) || (!is_readable(ready_list.inner_fd()) && is_readable(epfd))
        })
    }

    /// Returns whether the set holds anything that the kernel does not know.
    pub(crate) fn has_lanes(&self) -> bool {
        self.has_inner.load(Ordering::Acquire)
    }

    /// Requests wakeups from the peers of all connections, and adds the set to those that a thread sleeps on. Returns
    /// whether nothing wakes the thread for one of them.
    pub(crate) fn add_sleeper(&'static self, asleep: &mut Vec<&'static EpollSet>) -> bool {
        self.with(|ready_list| {
            threads::add(&self.sleepers, 1);
            asleep.push(self);
            ready_list.park_all(asleep, HeldRecords::Published);
            ready_list.has_unwakeable
        })
    }

    pub(super) fn remove_sleeper(&'static self) {
        threads::add(&self.sleepers, u32::MAX);
    }

    #[inline]
    pub(super) fn with<R>(&self, access: impl FnOnce(&mut ReadyList) -> R) -> R {
        let result = self.enter(access);
        // A signal handler may have run while the lock was held.
        if self.deferred_closes.is_any() {
            self.apply_deferred();
        }
        if wakeup::has_noted_switches() {
            wakeup::pass_on_switches();
        }
        result
    }

    /// As [`EpollSet::with`], but returns `false` instead of waiting where another thread holds a lock.
    pub(super) fn with_if_free(&self, access: impl FnOnce(&mut ReadyList)) -> bool {
        let nesting = if self.nests.load(Ordering::Relaxed) { NESTING.try_lock().map(Some) } else { Some(None) };
        let is_free = nesting.is_some_and(|_nesting| {
            self.lock.try_lock().is_some_and(|_guard| {
                // SAFETY: `_guard` holds the lock of the set, so that no other reference to the list exists.
                self.access_locked(unsafe { &mut *self.ready_list.get() }, access);
                true
            })
        });
        if is_free && self.deferred_closes.is_any() {
            self.apply_deferred();
        }
        is_free
    }

    #[cold]
    fn apply_deferred(&self) {
        self.enter(|_| ());
        if self.deferred_closes.take_deferred_handlers() {
            signals::deliver_deferred_signals();
        }
    }

    fn access_locked<R>(&self, ready_list: &mut ReadyList, access: impl FnOnce(&mut ReadyList) -> R) -> R {
        if self.deferred_closes.is_any() {
            self.apply_deferred_closes(ready_list);
        }
        access(ready_list)
    }

    #[inline]
    fn enter<R>(&self, access: impl FnOnce(&mut ReadyList) -> R) -> R {
        // A thread that is inside an outer set holds this lock already.
        let _nesting = if self.nests.load(Ordering::Relaxed) { NESTING.lock_unless_held() } else { None };
        let _guard = self.lock.lock();
        // SAFETY: `_guard` holds the lock of the set, so that no other reference to the list exists.
        self.access_locked(unsafe { &mut *self.ready_list.get() }, access)
    }

    /// Applies the closes that signal handlers have deferred.
    #[cold]
    fn apply_deferred_closes(&self, ready_list: &mut ReadyList) {
        let has_overflowed = self.deferred_closes.take(|close| match close {
            Close { fd, is_of_set: true, .. } => self.apply_close_of_set(ready_list, fd),
            Close { fd, is_last, .. } => self.apply_close(ready_list, fd, is_last),
        });
        if has_overflowed {
            ready_list.stale_descriptors().into_iter().for_each(|fd| self.apply_close(ready_list, fd, false));
        }
    }

    /// Removes a descriptor of the set. Does not release the set to the pool, because this thread is inside it.
    fn apply_close_of_set(&self, ready_list: &mut ReadyList, fd: RawFd) {
        self.drop_descriptor(ready_list, fd);
    }

    fn apply_close(&self, ready_list: &mut ReadyList, fd: RawFd, is_last: bool) {
        for index in ready_list.find(fd).into_iter().chain(ready_list.orphan_known_by(fd)) {
            let survivors = if is_last { Vec::new() } else { others(&ready_list.at(index).target.descriptors(), fd) };
            self.forget(ready_list, index, &survivors);
        }
        while let Some(index) = ready_list.orphan_without_descriptors() {
            self.forget(ready_list, index, &[]);
        }
    }

    /// Makes the next wait poll those of `registered` that are parked.
    pub(super) fn unpark_for_poll_all(&self, ready_list: &mut ReadyList, registered: impl IntoIterator<Item = u32>) {
        let mut is_any = false;
        for index in registered {
            is_any |= ready_list.unpark_for_poll(index);
        }
        if is_any && self.sleepers.load(Ordering::SeqCst) > 0 {
            ready_list.wake_sleepers();
        }
    }

    /// Creates the inner epoll instance before something of the library's is registered.
    pub(super) fn prepare_for_lanes(&self, ready_list: &mut ReadyList) -> Result<(), Errno> {
        ready_list.ensure_inner(ready_list.epfd().ok_or(Errno::BADF)?)?;
        self.has_inner.store(true, Ordering::SeqCst);
        Ok(())
    }

    pub(super) fn add(&self, ready_list: &mut ReadyList, registration: Registration) -> Result<(), Errno> {
        self.prepare_for_lanes(ready_list)?;
        ready_list.has_foreign |= matches!(registration.target, Target::Nested(_));
        let index = ready_list.insert(registration);
        if let Err(error) = ready_list.register_in_kernel(index) {
            ready_list.remove(index);
            return Err(error);
        }
        REGISTERED.fetch_add(1, Ordering::Relaxed);
        self.start_watching(ready_list, index);
        Ok(())
    }

    pub(super) fn change(&self, ready_list: &mut ReadyList, index: u32, event: epoll_event) -> Result<(), Errno> {
        let is_connection = matches!(ready_list.at(index).target, Target::Connection(_));
        if !is_connection {
            // The flags decide in which epoll instance a listener is registered.
            ready_list.unregister_in_kernel(index);
        }
        ready_list.at_mut(index).modify(event.events, event.u64);
        if !is_connection {
            ready_list.register_in_kernel(index)?;
        }
        self.start_watching(ready_list, index);
        Ok(())
    }

    /// Makes waits poll a registration, and wakes threads that sleep on the set if it is ready.
    pub(super) fn start_watching(&self, ready_list: &mut ReadyList, index: u32) {
        if !ready_list.at(index).can_be_left_to_kernel_at_once() || !ready_list.leave_to_kernel(index, true) {
            ready_list.make_hot(index);
        }
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            ready_list.announce(index);
        }
    }

    pub(super) fn drop_registration(&self, ready_list: &mut ReadyList, index: u32) {
        ready_list.remove(index);
        REGISTERED.fetch_sub(1, Ordering::Relaxed);
    }

    /// Handles the close of a registration's descriptor, or of the one by which the kernel knows it.
    pub(super) fn forget(&self, ready_list: &mut ReadyList, index: u32, survivors: &[RawFd]) {
        if !survivors.is_empty() && ready_list.orphan(index, survivors) {
            return self.start_watching(ready_list, index);
        }
        // A registration that another process shares stays in the kernel: Linux keeps it while any process has the file
        // open.
        let registration = ready_list.at(index);
        let is_others_too = registration.is_inherited || (registration.may_be_in_child && registration.is_connection());
        if !is_others_too {
            ready_list.unregister_in_kernel(index);
        }
        self.drop_registration(ready_list, index);
    }
}

pub(super) fn is_readable(fd: RawFd) -> bool {
    blocking::poll_now(fd, libc::POLLIN) & libc::POLLIN != 0
}

pub(super) fn others(descriptors: &[RawFd], fd: RawFd) -> Vec<RawFd> {
    descriptors.iter().copied().filter(|&other| other != fd).collect()
}
