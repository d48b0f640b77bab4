//! epoll over lanes.
//!
//! The program's epoll descriptor stays a kernel epoll instance, in which the program's foreign descriptors are
//! registered as ever. With the first connection of ours it gets an *inner* epoll that the program does not see, with
//! the lifelines of its connections, under data that no program uses. What is ready on lanes is found in memory first;
//! see `ready_list` for how that stays cheap, and `wait` for how a wait goes.
//!
//! What is ready on lanes is reported in the order in which it became ready, and what was reported and stays ready goes
//! to the tail, as in the kernel's ready list; see `ready_time`.
//!
//! Where this differs from the kernel:
//! * A registration whose descriptor was closed while another one of the same connection lives stays, as in the kernel;
//!   but where the set holds all those others too, it is looked at in steps of a millisecond.
//! * A wait that finds lanes ready may leave out foreign descriptors that are ready too, for 20 microseconds at most.
//! * Only what arrives has a time of its own. The end of a stream, an error or room to write counts as of the wait that
//!   finds it, and of several records that an edge-triggered watcher has not read, the first one counts.
//! * Sets nest four deep: the kernel allows five instances on a path, and the last has an inner one.

mod deferred_closes;
mod kernel;
mod ready_list;
mod ready_time;
mod registration;
#[cfg(test)]
mod tests;
mod wait;

use crate::connection::{self, Connection};
use crate::descriptor::table::{self, Kind, Object, Tracked};
use crate::listener;
use crate::listener::Listener;
use crate::process::background_connects;
use crate::process::blocking;
use crate::process::lock::Lock;
use crate::process::pool::Pool;
use crate::process::settings::settings;
use crate::process::signals;
use crate::process::threads;
use ::wait::AdaptiveSpin;
use deferred_closes::{Close, DeferredCloses};
use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, epoll_event};
use ready_list::{HeldRecords, ReadyList};
use registration::{EDGE, EXCLUSIVE, ONESHOT, Registration, Target};
use rustix::io::Errno;
use std::cell::{Cell, UnsafeCell};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use wait::Call;

/// What may stand beside `EPOLLEXCLUSIVE`.
const EXCLUSIVE_ALLOWED: u32 =
    (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLERR | libc::EPOLLHUP | libc::EPOLLWAKEUP) as u32 | EDGE | EXCLUSIVE;

/// What an epoll instance of the program holds of ours.
#[derive(Default)]
pub struct EpollSet {
    lock: Lock,
    /// Under `lock`.
    ready_list: UnsafeCell<ReadyList>,
    /// It holds, or has held, something of ours.
    has_inner: AtomicBool,
    /// Threads that sleep in the kernel until the set has something.
    sleepers: AtomicU32,
    /// What waits have learned of how soon something comes.
    spin_history: AdaptiveSpin,
    /// It holds, or has held, another set, which is looked at under this one's lock.
    nests: AtomicBool,
    /// Grows when the last descriptor is closed: objects are used again.
    generation: AtomicU32,
    /// Descriptors that signal handlers have closed, inside the set.
    deferred_closes: DeferredCloses,
}

// SAFETY: no other type names these kinds, and the fields of the struct have an alignment of 8.
unsafe impl Tracked for EpollSet {
    const KINDS: &'static [Kind] = &[Kind::EpollSet];
}

// SAFETY: the cell is accessed under the lock.
unsafe impl Sync for EpollSet {}

static POOL: Pool<EpollSet> = Pool::new();
/// Taken before the lock of a set that holds others: a fork, which takes the locks of all sets in any order, then finds
/// nobody between two of them.
static NESTING: Lock = Lock::new();
/// Registrations in all sets: closing a descriptor costs nothing while there is none.
static REGISTERED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The sets this thread sleeps on.
    static SLEEPING_ON: SleepingOn = const { SleepingOn(Cell::new(Vec::new())) };
}

struct SleepingOn(Cell<Vec<&'static EpollSet>>);

impl Drop for SleepingOn {
    /// The thread was cancelled in its sleep.
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(EpollSet::remove_sleeper);
    }
}

/// The sets that this thread is about to sleep on; until this is dropped, whoever changes them wakes it.
pub(crate) struct SleepGuard {
    before: usize,
}

impl SleepGuard {
    /// Runs `prepare` with the list in which sets enter themselves by [`EpollSet::add_sleeper`].
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
    /// Notes that the program made another descriptor of the set.
    pub fn add_descriptor(&self, fd: RawFd) {
        self.with(|ready_list| ready_list.descriptors.push(fd));
    }

    /// Notes that the program closes a descriptor of the set. With the last one, this process is done with it.
    pub fn remove_descriptor(&'static self, fd: RawFd) {
        if is_inside_a_set() {
            defer_in_all_sets(Close { fd, is_last: false, is_of_set: false });
            return self.deferred_closes.push(Close { fd, is_last: false, is_of_set: true });
        }
        forget_descriptor(fd, Target::Nested(self), || self.with(|ready_list| others(&ready_list.descriptors, fd)));
        if self.with(|ready_list| self.drop_descriptor(ready_list, fd)) {
            POOL.release(self);
        }
    }

    /// Answers whether it was the last: then the set is empty, and to be given back.
    fn drop_descriptor(&self, ready_list: &mut ReadyList, fd: RawFd) -> bool {
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

    /// Whether the set has something to report. A look that is not `fully` done makes no system call.
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

    /// Whether the set holds anything that the kernel alone does not know.
    pub(crate) fn has_lanes(&self) -> bool {
        self.has_inner.load(Ordering::Acquire)
    }

    /// Asks the peers of all connections to ring, and enters the set among those that a thread sleeps on.
    pub(crate) fn add_sleeper(&'static self, asleep: &mut Vec<&'static EpollSet>) {
        self.with(|ready_list| {
            threads::add(&self.sleepers, 1);
            asleep.push(self);
            ready_list.park_all(asleep, HeldRecords::Published);
        });
    }

    fn remove_sleeper(&'static self) {
        threads::add(&self.sleepers, u32::MAX);
    }

    #[inline]
    fn with<R>(&self, access: impl FnOnce(&mut ReadyList) -> R) -> R {
        let result = self.enter(access);
        // A handler may have struck inside.
        if self.deferred_closes.is_any() {
            self.apply_deferred();
        }
        result
    }

    /// As [`EpollSet::with`] if nobody is inside, and nobody would be waited for.
    fn with_if_free(&self, access: impl FnOnce(&mut ReadyList)) -> bool {
        let nesting = if self.nests.load(Ordering::Relaxed) { NESTING.try_lock().map(Some) } else { Some(None) };
        let is_free = nesting.is_some_and(|_nesting| {
            self.lock.try_lock().is_some_and(|_guard| {
                // SAFETY: under the lock.
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
        // Nobody waits for it twice: this thread may be inside an outer set already.
        let _nesting = if self.nests.load(Ordering::Relaxed) { NESTING.lock_unless_held() } else { None };
        let _guard = self.lock.lock();
        // SAFETY: under the lock.
        self.access_locked(unsafe { &mut *self.ready_list.get() }, access)
    }

    /// Does what signal handlers have left to do.
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

    /// A set whose last descriptor is closed here stays out of the pool: somebody is inside.
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

    /// Has the next wait poll those of `registered` that are parked.
    fn unpark_for_poll_all(&self, ready_list: &mut ReadyList, registered: impl IntoIterator<Item = u32>) {
        let mut is_any = false;
        for index in registered {
            is_any |= ready_list.unpark_for_poll(index);
        }
        if is_any && self.sleepers.load(Ordering::SeqCst) > 0 {
            ready_list.wake_sleepers();
        }
    }

    /// Something of ours is in the set, or about to be.
    fn prepare_for_lanes(&self, ready_list: &mut ReadyList) -> Result<(), Errno> {
        ready_list.ensure_inner(ready_list.epfd().ok_or(Errno::BADF)?)?;
        self.has_inner.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn add(&self, ready_list: &mut ReadyList, registration: Registration) -> Result<(), Errno> {
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

    fn change(&self, ready_list: &mut ReadyList, index: u32, event: epoll_event) -> Result<(), Errno> {
        let is_connection = matches!(ready_list.at(index).target, Target::Connection(_));
        if !is_connection {
            // Flags decide where the kernel's part is.
            ready_list.unregister_in_kernel(index);
        }
        ready_list.at_mut(index).modify(event.events, event.u64);
        if !is_connection {
            ready_list.register_in_kernel(index)?;
        }
        self.start_watching(ready_list, index);
        Ok(())
    }

    /// Waits look at it from now on; threads that sleep on the set are woken if it is ready.
    fn start_watching(&self, ready_list: &mut ReadyList, index: u32) {
        if !ready_list.at(index).can_be_left_to_kernel_at_once() || !ready_list.leave_to_kernel(index, true) {
            ready_list.make_hot(index);
        }
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            ready_list.announce(index);
        }
    }

    fn drop_registration(&self, ready_list: &mut ReadyList, index: u32) {
        ready_list.remove(index);
        REGISTERED.fetch_sub(1, Ordering::Relaxed);
    }

    /// The program closes the descriptor of a registration, or the one by which the kernel knows it.
    fn forget(&self, ready_list: &mut ReadyList, index: u32, survivors: &[RawFd]) {
        if !survivors.is_empty() && ready_list.orphan(index, survivors) {
            return self.start_watching(ready_list, index);
        }
        // What was made before a fork stays in the kernel for the other process, as Linux keeps it while somebody has
        // the file open.
        let registration = ready_list.at(index);
        let is_others_too = registration.is_inherited || (registration.may_be_in_child && registration.is_connection());
        if !is_others_too {
            ready_list.unregister_in_kernel(index);
        }
        self.drop_registration(ready_list, index);
    }

    /// Takes what was registered as a plain TCP socket from the kernel's part, or gives it back.
    fn control_stream_again(&self, operation: i32, fd: RawFd) {
        self.with(|ready_list| {
            let registration = ready_list.find(fd).map(|index| ready_list.at(index));
            if let (Some(Registration { target: Target::Stream, events, data, .. }), Some(epfd)) =
                (registration, ready_list.epfd())
            {
                let _ = kernel::control(epfd, operation, fd, *events, *data);
            }
        });
    }

    /// Makes what was registered as a plain TCP socket what it has become.
    fn convert(&self, fd: RawFd, target: Target) {
        self.with(|ready_list| {
            let Some(index) = ready_list.find(fd) else { return };
            let old = ready_list.at(index);
            if !matches!(old.target, Target::Stream) {
                return;
            }
            let (events, data, epfd) = (old.events, old.data, ready_list.epfd().unwrap_or(-1));
            self.drop_registration(ready_list, index);
            if let Target::Listener(_) = target {
                // It is the same kernel socket still; the registration comes again, with the lane's.
                let _ = kernel::control(epfd, EPOLL_CTL_DEL, fd, 0, 0);
            }
            // Without descriptors for it the kernel's part stays away, and with it this registration.
            let _ = self.add(ready_list, Registration::new(fd, target, events, data));
        });
    }
}

impl EpollSet {
    /// Makes what was registered as a listener with a lane listener a plain TCP socket.
    fn revert(&self, fd: RawFd) {
        self.with(|ready_list| {
            let Some(index) = ready_list.find(fd) else { return };
            let Registration { target: Target::Listener(_), events, data, .. } = *ready_list.at(index) else { return };
            self.forget(ready_list, index, &[]);
            // It is in the kernel's set still where that is another process's too.
            let _ = kernel::control(ready_list.epfd().unwrap_or(-1), EPOLL_CTL_ADD, fd, events, data);
            ready_list.has_foreign = true;
            ready_list.insert(Registration::new(fd, Target::Stream, events, data));
            REGISTERED.fetch_add(1, Ordering::Relaxed);
        });
    }
}

fn is_readable(fd: RawFd) -> bool {
    blocking::poll_now(fd, libc::POLLIN) & libc::POLLIN != 0
}

/// `epoll_create1(2)`.
///
/// # Errors
/// As the system call.
pub fn create(flags: i32) -> Result<RawFd, Errno> {
    let fd = kernel::create(flags)?;
    if table::can_hold(fd) && !settings().off {
        ready_list::keep_spare_inner();
        enter(fd);
    }
    Ok(fd)
}

/// Returns the set that an epoll descriptor stands for, if there is one.
#[inline]
fn set_of(epfd: RawFd) -> Option<&'static EpollSet> {
    table::load(epfd).get()
}

/// Makes a set for an epoll descriptor of the program.
fn enter(epfd: RawFd) -> &'static EpollSet {
    connection::observe_changes(poll_again);
    listener::observe_closing(forget_listener);
    let set = POOL.take();
    set.spin_history.reset();
    set.with(|ready_list| ready_list.descriptors.push(epfd));
    table::swap(epfd, Object::new(Kind::EpollSet, set));
    set
}

/// `epoll_ctl(2)`.
///
/// # Errors
/// As the system call; `NOMEM` when there is no descriptor left for what the library needs.
///
/// # Safety
/// `event` is null or points to an event.
pub unsafe fn control(epfd: RawFd, operation: i32, fd: RawFd, event: *mut epoll_event) -> Result<(), Errno> {
    let target = match Target::of_descriptor(fd) {
        Some(target) if epfd != fd || !matches!(target, Target::Nested(_)) => target,
        // SAFETY: the caller vouches for `event`.
        _ => return unsafe { control_foreign(epfd, operation, fd, event) },
    };
    let event = if operation == EPOLL_CTL_DEL {
        epoll_event { events: 0, u64: 0 }
    } else if event.is_null() {
        return Err(Errno::FAULT);
    } else {
        // SAFETY: the caller's; on some machines it is packed.
        unsafe { event.read_unaligned() }
    };
    let Some(set) = set_of(epfd) else { return control_unknown(epfd, operation, fd, target, event) };
    control_in(set, epfd, operation, fd, target, event)
}

fn control_in(
    set: &'static EpollSet,
    epfd: RawFd,
    operation: i32,
    fd: RawFd,
    target: Target,
    event: epoll_event,
) -> Result<(), Errno> {
    match target {
        Target::Stream => return control_stream(set, epfd, operation, fd, event),
        Target::Nested(_) => set.nests.store(true, Ordering::Relaxed),
        Target::Connection(_) | Target::Listener(_) => {}
    }
    set.with(|ready_list| control_own(set, ready_list, operation, fd, target, event))
}

unsafe fn control_foreign(epfd: RawFd, operation: i32, fd: RawFd, event: *mut epoll_event) -> Result<(), Errno> {
    // SAFETY: the caller's.
    unsafe { kernel::control_with(epfd, operation, fd, event) }?;
    if operation == EPOLL_CTL_ADD
        && let Some(set) = set_of(epfd)
    {
        set.with(|ready_list| ready_list.has_foreign = true);
    }
    Ok(())
}

/// An epoll instance that was made before this library came, or was received: it becomes a set with its first object of
/// ours.
fn control_unknown(epfd: RawFd, operation: i32, fd: RawFd, target: Target, event: epoll_event) -> Result<(), Errno> {
    let is_new = operation == EPOLL_CTL_ADD && table::can_hold(epfd) && table::load(epfd) == Object::NONE;
    if !is_new {
        return kernel::control(epfd, operation, fd, event.events, event.u64);
    }
    let set = enter(epfd);
    set.with(|ready_list| ready_list.has_foreign = true);
    let result = control_in(set, epfd, operation, fd, target, event);
    if result.is_err() {
        table::swap(epfd, Object::NONE);
        set.remove_descriptor(epfd);
    }
    result
}

fn control_stream(
    set: &'static EpollSet,
    epfd: RawFd,
    operation: i32,
    fd: RawFd,
    event: epoll_event,
) -> Result<(), Errno> {
    let _guard = background_connects::hold_off();
    kernel::control(epfd, operation, fd, event.events, event.u64)?;
    set.with(|ready_list| {
        ready_list.has_foreign = true;
        if let Some(index) = ready_list.find(fd) {
            set.drop_registration(ready_list, index);
        }
        if operation != EPOLL_CTL_DEL {
            ready_list.insert(Registration::new(fd, Target::Stream, event.events, event.u64));
            REGISTERED.fetch_add(1, Ordering::Relaxed);
        }
    });
    if background_connects::is_any_pending() {
        wake_sleepers();
    }
    Ok(())
}

fn control_own(
    set: &'static EpollSet,
    ready_list: &mut ReadyList,
    operation: i32,
    fd: RawFd,
    target: Target,
    event: epoll_event,
) -> Result<(), Errno> {
    let found = ready_list.find(fd).or_else(|| ready_list.find_returned(fd, target));
    let events = event.events;
    match (operation, found) {
        (EPOLL_CTL_ADD, _) if events & EXCLUSIVE != 0 && !allows_exclusive(target, events) => Err(Errno::INVAL),
        (EPOLL_CTL_ADD, Some(index)) if is_registered(ready_list, index, fd) => Err(Errno::EXIST),
        (EPOLL_CTL_ADD, found) => {
            match found {
                // A TCP socket that had this number before.
                Some(index) if matches!(ready_list.at(index).target, Target::Stream) => {
                    set.drop_registration(ready_list, index)
                }
                // A handler has closed it, and somebody is about to say so here.
                Some(index) => set.forget(ready_list, index, &[]),
                None => {}
            }
            set.add(ready_list, Registration::new(fd, target, events, event.u64))
        }
        (EPOLL_CTL_MOD | EPOLL_CTL_DEL, None) => Err(Errno::NOENT),
        (EPOLL_CTL_MOD, Some(index)) if (events | ready_list.at(index).events) & EXCLUSIVE != 0 => Err(Errno::INVAL),
        (EPOLL_CTL_MOD, Some(index)) => set.change(ready_list, index, event),
        (EPOLL_CTL_DEL, Some(index)) => {
            ready_list.unregister_in_kernel(index);
            set.drop_registration(ready_list, index);
            Ok(())
        }
        _ => Err(Errno::INVAL),
    }
}

/// Whether the number still is what was registered under it, or that lives on under another.
fn is_registered(ready_list: &ReadyList, index: u32, fd: RawFd) -> bool {
    let target = ready_list.at(index).target;
    !matches!(target, Target::Stream) && (!Target::has_gone(&(fd, target)) || !target.descriptors().is_empty())
}

fn allows_exclusive(target: Target, events: u32) -> bool {
    events & !EXCLUSIVE_ALLOWED == 0 && events & ONESHOT == 0 && !matches!(target, Target::Nested(_))
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

/// After `connect` put a lifeline in the place of the TCP socket `fd`: sets that held the socket hold the connection.
pub fn adopt(fd: RawFd, connection: &'static Connection) {
    convert_everywhere(fd, Target::Connection(connection));
}

/// After `listen` added a lane listener to the TCP socket `fd`: sets that held the socket hold both.
pub fn adopt_listener(fd: RawFd, listener: &'static Listener) {
    convert_everywhere(fd, Target::Listener(listener));
}

/// Has the kernel report another descriptor of a listener: `switch` changes which one stands for its lanes.
pub fn rewatch_listener(listener: &'static Listener, switch: impl FnOnce()) {
    let for_each_registration = |work: &dyn Fn(&EpollSet, &mut ReadyList, u32)| {
        let descriptors = Target::Listener(listener).descriptors();
        POOL.for_each(|set| {
            set.with(|ready_list| {
                let is_of_listener = |index: &u32| ready_list.at(*index).target.is(Target::Listener(listener));
                let found: Vec<u32> =
                    descriptors.iter().filter_map(|&fd| ready_list.find(fd)).filter(is_of_listener).collect();
                found.into_iter().for_each(|index| work(set, ready_list, index));
            });
        });
    };
    if REGISTERED.load(Ordering::Relaxed) == 0 {
        return switch();
    }
    for_each_registration(&|_, ready_list, index| ready_list.unregister_in_kernel(index));
    switch();
    for_each_registration(&|set, ready_list, index| {
        let Registration { events, data, .. } = *ready_list.at(index);
        // Without a descriptor for it the listener reports what comes by TCP alone, as when it is registered.
        let _ = set.change(ready_list, index, epoll_event { events, u64: data });
    });
}

/// Whether an epoll instance of the program may hold a listener.
pub fn holds_listener(listener: &'static Listener) -> bool {
    let descriptors = Target::Listener(listener).descriptors();
    REGISTERED.load(Ordering::Relaxed) > 0
        && POOL.any(|set| set.with(|ready_list| descriptors.iter().any(|&fd| ready_list.find(fd).is_some())))
}

/// After the lane listener beside the TCP socket `fd` is gone: sets that held both hold the socket.
pub fn adopt_stream(fd: RawFd) {
    if REGISTERED.load(Ordering::Relaxed) > 0 {
        POOL.for_each(|set| set.revert(fd));
    }
}

/// Wakes all threads that sleep on sets: how long they may sleep has changed.
pub fn wake_sleepers() {
    POOL.for_each(|set| {
        if set.sleepers.load(Ordering::SeqCst) > 0 {
            set.with(|ready_list| {
                if set.prepare_for_lanes(ready_list).is_ok() {
                    ready_list.wake_sleepers();
                }
            });
        }
    });
}

/// Whether a set holds this connection.
pub(crate) fn is_in_a_set(connection: &'static Connection) -> bool {
    REGISTERED.load(Ordering::Relaxed) > 0
        && connection.with_descriptors(<[RawFd]>::to_vec).iter().any(|&fd| {
            let mut is_found = false;
            POOL.for_each(|set| set.with(|ready_list| is_found |= ready_list.find(fd).is_some()));
            is_found
        })
}

/// The sets that hold a connection look at it in their next wait, and whoever sleeps on them wakes up.
pub fn poll_again(connection: &'static Connection) {
    if REGISTERED.load(Ordering::Relaxed) == 0 {
        return;
    }
    let descriptors = Target::Connection(connection).descriptors();
    POOL.for_each(|set| {
        // A handler that has interrupted who is inside a set: that one's wait looks.
        if !set.lock.is_held_by_this_thread() {
            set.with(|ready_list| {
                let registered: Vec<u32> = descriptors.iter().filter_map(|&fd| ready_list.find(fd)).collect();
                set.unpark_for_poll_all(ready_list, registered);
            });
        }
    });
}

/// Does something with a TCP socket of the program while the kernel reports nothing of it: on its way it is what the
/// program is not to see. Whoever changes a registration meanwhile must be kept off.
pub fn while_unregistered(descriptors: &[RawFd], work: impl FnOnce()) {
    if REGISTERED.load(Ordering::Relaxed) == 0 {
        return work();
    }
    let control_all = |operation| {
        POOL.for_each(|set| descriptors.iter().for_each(|&fd| set.control_stream_again(operation, fd)));
    };
    control_all(EPOLL_CTL_DEL);
    work();
    control_all(EPOLL_CTL_ADD);
}

/// Runs `replace`, which puts a TCP socket in the place of a connection under `descriptors`: sets that held the
/// connection hold the socket afterwards.
///
/// # Errors
/// As `replace`.
pub fn while_replaced(
    descriptors: &[RawFd],
    connection: &'static Connection,
    replace: impl FnOnce() -> Result<(), Errno>,
) -> Result<(), Errno> {
    if REGISTERED.load(Ordering::Relaxed) == 0 {
        return replace();
    }
    let mut held = Vec::new();
    POOL.for_each(|set| {
        set.with(|ready_list| {
            for &fd in descriptors {
                let found =
                    ready_list.find(fd).filter(|index| ready_list.at(*index).target.is(Target::Connection(connection)));
                if let (Some(index), Some(epfd)) = (found, ready_list.epfd()) {
                    let registration = ready_list.at(index);
                    held.push((set, epfd, fd, epoll_event { events: registration.events, u64: registration.data }));
                    set.forget(ready_list, index, &[]);
                }
            }
        });
    });
    let replaced = replace();
    for (set, epfd, fd, event) in held {
        let _ = if replaced.is_ok() {
            control_stream(set, epfd, EPOLL_CTL_ADD, fd, event)
        } else {
            control_in(set, epfd, EPOLL_CTL_ADD, fd, Target::Connection(connection), event)
        };
    }
    replaced
}

fn convert_everywhere(fd: RawFd, target: Target) {
    if REGISTERED.load(Ordering::Relaxed) > 0 {
        POOL.for_each(|set| set.convert(fd, target));
    }
}

/// Before the program closes a descriptor of a connection: with the last one, the connection leaves all sets.
pub fn forget(fd: RawFd, connection: &'static Connection) {
    forget_descriptor(fd, Target::Connection(connection), || connection.with_descriptors(|own| others(own, fd)));
}

/// Before the program closes a descriptor of a listener: with the last one, the listener leaves all sets.
pub fn forget_listener(fd: RawFd, listener: &'static Listener) {
    forget_descriptor(fd, Target::Listener(listener), || listener.with_descriptors(|own| others(own, fd)));
}

/// Before the program closes a descriptor of a TCP socket that the kernel serves: the kernel knows whether it stays.
pub fn forget_stream(fd: RawFd) {
    forget_descriptor(fd, Target::Stream, Vec::new);
}

fn others(descriptors: &[RawFd], fd: RawFd) -> Vec<RawFd> {
    descriptors.iter().copied().filter(|&other| other != fd).collect()
}

fn defer_in_all_sets(close: Close) {
    POOL.any(|set| {
        set.deferred_closes.push(close);
        false
    });
}

/// Has handlers put off until this thread leaves the sets that it is inside; `false`: there are none.
pub(crate) fn defer_handlers() -> bool {
    POOL.any(|set| {
        let is_inside = set.lock.is_held_by_this_thread();
        if is_inside {
            set.deferred_closes.defer_handlers();
        }
        is_inside
    })
}

/// Whether this is a signal handler that has interrupted a thread inside a set.
fn is_inside_a_set() -> bool {
    POOL.any(|set| set.lock.is_held_by_this_thread())
}

fn forget_descriptor(fd: RawFd, target: Target, survivors: impl FnOnce() -> Vec<RawFd>) {
    if REGISTERED.load(Ordering::Relaxed) == 0 {
        return;
    }
    let survivors = survivors();
    let close = Close { fd, is_last: survivors.is_empty(), is_of_set: false };
    if is_inside_a_set() {
        // This may be the thread that every one of them waits for.
        return defer_in_all_sets(close);
    }
    POOL.for_each(|set| {
        let forget = |ready_list: &mut ReadyList| {
            // The number may be another object's by now, which is registered under it.
            let is_stale = |index: &u32| {
                let registered = ready_list.at(*index).target;
                registered.is(target) || Target::has_gone(&(fd, registered))
            };
            if let Some(index) = ready_list.find(fd).filter(is_stale) {
                set.forget(ready_list, index, &survivors);
            }
            while let Some(index) = ready_list.orphan_of(target, fd, survivors.is_empty()) {
                set.forget(ready_list, index, &survivors);
            }
        };
        if set.with_if_free(forget) {
            return;
        }
        if is_inside_a_socket() {
            // Whoever is inside the set may wait for what this thread holds below this handler.
            set.deferred_closes.push(close);
            set.with_if_free(|_| ());
        } else {
            set.with(forget);
        }
    });
}

/// Whether this is a signal handler that has interrupted a thread which holds something that sets look at.
fn is_inside_a_socket() -> bool {
    listener::is_inside_a_listener() || crate::connection::is_inside_a_connection()
}

/// Before a fork: no thread is inside a set while the process is copied.
pub fn before_fork() {
    while !lock_all_around_fork() {
        rustix::thread::sched_yield();
    }
}

/// `false`, and nothing is locked: somebody stays inside, perhaps a signal handler that waits for the list of all sets.
fn lock_all_around_fork() -> bool {
    let sets = POOL.lock_around_fork();
    let locks = || std::iter::once(&NESTING).chain(sets.iter().map(|set| &set.lock));
    let Some(held) = locks().position(|lock| !lock.try_lock_without_guard()) else { return true };
    locks().take(held).for_each(Lock::unlock);
    POOL.unlock_after_fork();
    false
}

/// After a fork, in the parent. Connections have got lanes before it, under the eyes of nobody.
pub fn after_fork_in_parent() {
    for set in POOL.all_during_fork() {
        // SAFETY: under the lock, which this thread has held since before the fork.
        let ready_list = unsafe { &mut *set.ready_list.get() };
        let switched = ready_list.switched();
        set.unpark_for_poll_all(ready_list, switched);
        ready_list.after_fork_in_parent();
        set.lock.unlock();
    }
    NESTING.unlock();
    POOL.unlock_after_fork();
}

/// After a fork, in the child, which has one thread. The kernel's part of the sets is the parent's too.
pub fn after_fork_in_child() {
    for set in POOL.all_during_fork() {
        set.lock.reset();
        set.sleepers.store(0, Ordering::Relaxed);
        set.with(ReadyList::after_fork_in_child);
    }
    NESTING.unlock();
    POOL.unlock_after_fork();
}
