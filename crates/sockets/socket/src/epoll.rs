//! epoll over lanes.
//!
//! The program's epoll descriptor stays a kernel epoll instance, in which the program's foreign descriptors are
//! registered as ever. With the first connection of ours it gets an *inner* epoll that the program does not see, with
//! the lifelines of its connections, under data that no program uses. What is ready on lanes is found in memory first;
//! see `roster` for how that stays cheap, and `wait` for how a wait goes.
//!
//! What is ready on lanes is reported in the order in which it became ready, and what was reported and stays ready goes
//! to the tail, as in the kernel's ready list; see `order`.
//!
//! Where this differs from the kernel:
//! * A registration whose descriptor was closed while another one of the same connection lives stays, as in the kernel;
//!   but where the set holds all those others too, it is looked at in steps of a millisecond.
//! * A wait that finds lanes ready may leave out foreign descriptors that are ready too, for 20 microseconds at most.
//! * Only what arrives has a time of its own. The end of a stream, an error or room to write counts as of the wait that
//!   finds it, and of several records that an edge-triggered watcher has not read, the first one counts.
//! * Sets nest four deep: the kernel allows five instances on a path, and the last has an inner one.

mod kernel;
mod left;
mod order;
mod registration;
mod roster;
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
use left::{Close, Left};
use libc::{EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, epoll_event};
use registration::{EDGE, EXCLUSIVE, ONESHOT, Registration, Target};
use roster::{Held, Roster};
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
pub struct InterestSet {
    lock: Lock,
    /// Under `lock`.
    roster: UnsafeCell<Roster>,
    /// It holds, or has held, something of ours.
    has_inner: AtomicBool,
    /// Threads that sleep in the kernel until the set has something.
    sleepers: AtomicU32,
    /// What waits have learned of how soon something comes.
    spin_history: AdaptiveSpin,
    /// It holds, or has held, another set, which is looked at under this one's lock.
    nests: AtomicBool,
    /// Grows when the last descriptor is closed: objects are used again.
    life: AtomicU32,
    /// Descriptors that signal handlers have closed, inside the set.
    left: Left,
}

// SAFETY: no other type names these kinds, and the fields of the struct have an alignment of 8.
unsafe impl Tracked for InterestSet {
    const KINDS: &'static [Kind] = &[Kind::EpollSet];
}

// SAFETY: the cell is accessed under the lock.
unsafe impl Sync for InterestSet {}

static POOL: Pool<InterestSet> = Pool::new();
/// Taken before the lock of a set that holds others: a fork, which takes the locks of all sets in any order, then finds
/// nobody between two of them.
static NESTING: Lock = Lock::new();
/// Registrations in all sets: closing a descriptor costs nothing while there is none.
static REGISTERED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The sets this thread sleeps on.
    static ASLEEP: Asleep = const { Asleep(Cell::new(Vec::new())) };
}

struct Asleep(Cell<Vec<&'static InterestSet>>);

impl Drop for Asleep {
    /// The thread was cancelled in its sleep.
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(InterestSet::note_awake);
    }
}

/// The sets that this thread is about to sleep on; until this is dropped, whoever changes them wakes it.
pub(crate) struct Sleep {
    before: usize,
}

impl Sleep {
    /// Runs `prepare` with the list in which sets enter themselves by [`InterestSet::fall_asleep`].
    pub(crate) fn begin<R>(prepare: impl FnOnce(&mut Vec<&'static InterestSet>) -> R) -> (Self, R) {
        let mut asleep = ASLEEP.with(|asleep| asleep.0.take());
        let before = asleep.len();
        let result = prepare(&mut asleep);
        ASLEEP.with(|own| own.0.set(asleep));
        (Self { before }, result)
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        ASLEEP.with(|own| {
            let mut asleep = own.0.take();
            asleep.drain(self.before..).for_each(InterestSet::note_awake);
            own.0.set(asleep);
        });
    }
}

impl InterestSet {
    /// Notes that the program made another descriptor of the set.
    pub fn add_descriptor(&self, fd: RawFd) {
        self.with(|roster| roster.descriptors.push(fd));
    }

    /// Notes that the program closes a descriptor of the set. With the last one, this process is done with it.
    pub fn remove_descriptor(&'static self, fd: RawFd) {
        if is_inside_a_set() {
            leave_to_all(Close { fd, is_last: false, is_of_set: false });
            return self.left.leave(Close { fd, is_last: false, is_of_set: true });
        }
        forget_one_of(fd, Target::Nested(self), || self.with(|roster| others(&roster.descriptors, fd)));
        if self.with(|roster| self.drop_descriptor(roster, fd)) {
            POOL.give_back(self);
        }
    }

    /// Answers whether it was the last: then the set is empty, and to be given back.
    fn drop_descriptor(&self, roster: &mut Roster, fd: RawFd) -> bool {
        roster.descriptors.retain(|&known| known != fd);
        if !roster.descriptors.is_empty() {
            return false;
        }
        REGISTERED.fetch_sub(roster.count(), Ordering::Relaxed);
        roster.clear();
        self.has_inner.store(false, Ordering::SeqCst);
        self.nests.store(false, Ordering::Relaxed);
        self.life.fetch_add(1, Ordering::SeqCst);
        true
    }

    /// Whether the set has something to report. A look that is not `fully` done makes no system call.
    pub(crate) fn peek(&'static self, fully: bool) -> bool {
        self.with(|roster| {
            if roster.peek(fully) {
                return true;
            }
            let Some(epfd) = roster.epfd().filter(|_| fully) else { return false };
            if !is_readable(epfd) || !roster.has_inner() {
                return is_readable(epfd);
            }
            roster.collect();
            roster.peek(true) || (!is_readable(roster.inner_fd()) && is_readable(epfd))
        })
    }

    /// Whether the set holds anything that the kernel alone does not know.
    pub(crate) fn has_lanes(&self) -> bool {
        self.has_inner.load(Ordering::Acquire)
    }

    /// Asks the peers of all connections to ring, and enters the set among those that a thread sleeps on.
    pub(crate) fn fall_asleep(&'static self, asleep: &mut Vec<&'static InterestSet>) {
        self.with(|roster| {
            threads::add(&self.sleepers, 1);
            asleep.push(self);
            roster.park_all(asleep, Held::Shown);
        });
    }

    fn note_awake(&'static self) {
        threads::add(&self.sleepers, u32::MAX);
    }

    #[inline]
    fn with<R>(&self, access: impl FnOnce(&mut Roster) -> R) -> R {
        let result = self.enter(access);
        // A handler may have struck inside.
        if self.left.is_any() {
            self.do_what_is_left();
        }
        result
    }

    /// As [`InterestSet::with`] if nobody is inside, and nobody would be waited for.
    fn with_if_free(&self, access: impl FnOnce(&mut Roster)) -> bool {
        let nesting = if self.nests.load(Ordering::Relaxed) { NESTING.enter_if_free().map(Some) } else { Some(None) };
        let is_free = nesting.is_some_and(|_nesting| {
            self.lock.enter_if_free().is_some_and(|_guard| {
                // SAFETY: under the lock.
                self.access_locked(unsafe { &mut *self.roster.get() }, access);
                true
            })
        });
        if is_free && self.left.is_any() {
            self.do_what_is_left();
        }
        is_free
    }

    #[cold]
    fn do_what_is_left(&self) {
        self.enter(|_| ());
        if self.left.take_put_off() {
            signals::let_handlers_in();
        }
    }

    fn access_locked<R>(&self, roster: &mut Roster, access: impl FnOnce(&mut Roster) -> R) -> R {
        if self.left.is_any() {
            self.follow_closes(roster);
        }
        access(roster)
    }

    #[inline]
    fn enter<R>(&self, access: impl FnOnce(&mut Roster) -> R) -> R {
        // Nobody waits for it twice: this thread may be inside an outer set already.
        let _nesting = if self.nests.load(Ordering::Relaxed) { NESTING.enter() } else { None };
        let _guard = self.lock.lock();
        // SAFETY: under the lock.
        self.access_locked(unsafe { &mut *self.roster.get() }, access)
    }

    /// Does what signal handlers have left to do.
    #[cold]
    fn follow_closes(&self, roster: &mut Roster) {
        let is_too_much = self.left.take(|close| match close {
            Close { fd, is_of_set: true, .. } => self.follow_close_of_set(roster, fd),
            Close { fd, is_last, .. } => self.follow_close(roster, fd, is_last),
        });
        if is_too_much {
            roster.strays().into_iter().for_each(|fd| self.follow_close(roster, fd, false));
        }
    }

    /// A set whose last descriptor is closed here stays out of the pool: somebody is inside.
    fn follow_close_of_set(&self, roster: &mut Roster, fd: RawFd) {
        self.drop_descriptor(roster, fd);
    }

    fn follow_close(&self, roster: &mut Roster, fd: RawFd, is_last: bool) {
        for index in roster.find(fd).into_iter().chain(roster.orphan_known_by(fd)) {
            let survivors = if is_last { Vec::new() } else { others(&roster.at(index).target.descriptors(), fd) };
            self.forget(roster, index, &survivors);
        }
        while let Some(index) = roster.orphan_without_descriptors() {
            self.forget(roster, index, &[]);
        }
    }

    /// Has the next wait poll those of `registered` that are parked.
    fn look_at_parked(&self, roster: &mut Roster, registered: impl IntoIterator<Item = u32>) {
        let mut is_any = false;
        for index in registered {
            is_any |= roster.unpark_for_a_look(index);
        }
        if is_any && self.sleepers.load(Ordering::SeqCst) > 0 {
            roster.ring_bell();
        }
    }

    /// Something of ours is in the set, or about to be.
    fn prepare_for_lanes(&self, roster: &mut Roster) -> Result<(), Errno> {
        roster.ensure_inner(roster.epfd().ok_or(Errno::BADF)?)?;
        self.has_inner.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn add(&self, roster: &mut Roster, registration: Registration) -> Result<(), Errno> {
        self.prepare_for_lanes(roster)?;
        roster.has_foreign |= matches!(registration.target, Target::Nested(_));
        let index = roster.insert(registration);
        if let Err(error) = roster.enlist(index) {
            roster.remove(index);
            return Err(error);
        }
        REGISTERED.fetch_add(1, Ordering::Relaxed);
        self.start_watching(roster, index);
        Ok(())
    }

    fn change(&self, roster: &mut Roster, index: u32, event: epoll_event) -> Result<(), Errno> {
        let is_connection = matches!(roster.at(index).target, Target::Connection(_));
        if !is_connection {
            // Flags decide where the kernel's part is.
            roster.delist(index);
        }
        roster.at_mut(index).renew(event.events, event.u64);
        if !is_connection {
            roster.enlist(index)?;
        }
        self.start_watching(roster, index);
        Ok(())
    }

    /// Waits look at it from now on; threads that sleep on the set are woken if it is ready.
    fn start_watching(&self, roster: &mut Roster, index: u32) {
        if !roster.at(index).may_be_left_to_kernel_at_once() || !roster.leave_to_kernel(index, true) {
            roster.heat(index);
        }
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            roster.announce(index);
        }
    }

    fn drop_registration(&self, roster: &mut Roster, index: u32) {
        roster.remove(index);
        REGISTERED.fetch_sub(1, Ordering::Relaxed);
    }

    /// The program closes the descriptor of a registration, or the one by which the kernel knows it.
    fn forget(&self, roster: &mut Roster, index: u32, survivors: &[RawFd]) {
        if !survivors.is_empty() && roster.orphan(index, survivors) {
            return self.start_watching(roster, index);
        }
        // What was made before a fork stays in the kernel for the other process, as Linux keeps it while somebody has
        // the file open.
        let registration = roster.at(index);
        let is_others_too = registration.is_inherited || (registration.has_heir && registration.is_connection());
        if !is_others_too {
            roster.delist(index);
        }
        self.drop_registration(roster, index);
    }

    /// Takes what was registered as a plain TCP socket from the kernel's part, or gives it back.
    fn control_stream_again(&self, operation: i32, fd: RawFd) {
        self.with(|roster| {
            let registration = roster.find(fd).map(|index| roster.at(index));
            if let (Some(Registration { target: Target::Stream, events, data, .. }), Some(epfd)) =
                (registration, roster.epfd())
            {
                let _ = kernel::control(epfd, operation, fd, *events, *data);
            }
        });
    }

    /// Makes what was registered as a plain TCP socket what it has become.
    fn convert(&self, fd: RawFd, target: Target) {
        self.with(|roster| {
            let Some(index) = roster.find(fd) else { return };
            let old = roster.at(index);
            if !matches!(old.target, Target::Stream) {
                return;
            }
            let (events, data, epfd) = (old.events, old.data, roster.epfd().unwrap_or(-1));
            self.drop_registration(roster, index);
            if let Target::Listener(_) = target {
                // It is the same kernel socket still; the registration comes again, with the lane's.
                let _ = kernel::control(epfd, EPOLL_CTL_DEL, fd, 0, 0);
            }
            // Without descriptors for it the kernel's part stays away, and with it this registration.
            let _ = self.add(roster, Registration::new(fd, target, events, data));
        });
    }
}

impl InterestSet {
    /// Makes what was registered as a listener with a lane listener a plain TCP socket.
    fn revert(&self, fd: RawFd) {
        self.with(|roster| {
            let Some(index) = roster.find(fd) else { return };
            let Registration { target: Target::Listener(_), events, data, .. } = *roster.at(index) else { return };
            self.forget(roster, index, &[]);
            // It is in the kernel's set still where that is another process's too.
            let _ = kernel::control(roster.epfd().unwrap_or(-1), EPOLL_CTL_ADD, fd, events, data);
            roster.has_foreign = true;
            roster.insert(Registration::new(fd, Target::Stream, events, data));
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
        roster::keep_spare_inner();
        enter(fd);
    }
    Ok(fd)
}

/// Returns the set that an epoll descriptor stands for, if there is one.
#[inline]
fn set_of(epfd: RawFd) -> Option<&'static InterestSet> {
    table::load(epfd).get()
}

/// Makes a set for an epoll descriptor of the program.
fn enter(epfd: RawFd) -> &'static InterestSet {
    connection::observe_changes(look_again);
    listener::observe_closing(forget_listener);
    let set = POOL.take();
    set.spin_history.reset();
    set.with(|roster| roster.descriptors.push(epfd));
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
    set: &'static InterestSet,
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
    set.with(|roster| control_own(set, roster, operation, fd, target, event))
}

unsafe fn control_foreign(epfd: RawFd, operation: i32, fd: RawFd, event: *mut epoll_event) -> Result<(), Errno> {
    // SAFETY: the caller's.
    unsafe { kernel::control_with(epfd, operation, fd, event) }?;
    if operation == EPOLL_CTL_ADD
        && let Some(set) = set_of(epfd)
    {
        set.with(|roster| roster.has_foreign = true);
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
    set.with(|roster| roster.has_foreign = true);
    let result = control_in(set, epfd, operation, fd, target, event);
    if result.is_err() {
        table::swap(epfd, Object::NONE);
        set.remove_descriptor(epfd);
    }
    result
}

fn control_stream(
    set: &'static InterestSet,
    epfd: RawFd,
    operation: i32,
    fd: RawFd,
    event: epoll_event,
) -> Result<(), Errno> {
    let _guard = background_connects::hold_off();
    kernel::control(epfd, operation, fd, event.events, event.u64)?;
    set.with(|roster| {
        roster.has_foreign = true;
        if let Some(index) = roster.find(fd) {
            set.drop_registration(roster, index);
        }
        if operation != EPOLL_CTL_DEL {
            roster.insert(Registration::new(fd, Target::Stream, event.events, event.u64));
            REGISTERED.fetch_add(1, Ordering::Relaxed);
        }
    });
    if background_connects::is_any_pending() {
        wake_sleepers();
    }
    Ok(())
}

fn control_own(
    set: &'static InterestSet,
    roster: &mut Roster,
    operation: i32,
    fd: RawFd,
    target: Target,
    event: epoll_event,
) -> Result<(), Errno> {
    let found = roster.find(fd).or_else(|| roster.find_returned(fd, target));
    let events = event.events;
    match (operation, found) {
        (EPOLL_CTL_ADD, _) if events & EXCLUSIVE != 0 && !allows_exclusive(target, events) => Err(Errno::INVAL),
        (EPOLL_CTL_ADD, Some(index)) if is_registered(roster, index, fd) => Err(Errno::EXIST),
        (EPOLL_CTL_ADD, found) => {
            match found {
                // A TCP socket that had this number before.
                Some(index) if matches!(roster.at(index).target, Target::Stream) => {
                    set.drop_registration(roster, index)
                }
                // A handler has closed it, and somebody is about to say so here.
                Some(index) => set.forget(roster, index, &[]),
                None => {}
            }
            set.add(roster, Registration::new(fd, target, events, event.u64))
        }
        (EPOLL_CTL_MOD | EPOLL_CTL_DEL, None) => Err(Errno::NOENT),
        (EPOLL_CTL_MOD, Some(index)) if (events | roster.at(index).events) & EXCLUSIVE != 0 => Err(Errno::INVAL),
        (EPOLL_CTL_MOD, Some(index)) => set.change(roster, index, event),
        (EPOLL_CTL_DEL, Some(index)) => {
            roster.delist(index);
            set.drop_registration(roster, index);
            Ok(())
        }
        _ => Err(Errno::INVAL),
    }
}

/// Whether the number still is what was registered under it, or that lives on under another.
fn is_registered(roster: &Roster, index: u32, fd: RawFd) -> bool {
    let target = roster.at(index).target;
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
pub fn watch_anew(listener: &'static Listener, switch: impl FnOnce()) {
    let for_each_registration = |work: &dyn Fn(&InterestSet, &mut Roster, u32)| {
        let descriptors = Target::Listener(listener).descriptors();
        POOL.for_each(|set| {
            set.with(|roster| {
                let is_of_listener = |index: &u32| roster.at(*index).target.is(Target::Listener(listener));
                let found: Vec<u32> =
                    descriptors.iter().filter_map(|&fd| roster.find(fd)).filter(is_of_listener).collect();
                found.into_iter().for_each(|index| work(set, roster, index));
            });
        });
    };
    if REGISTERED.load(Ordering::Relaxed) == 0 {
        return switch();
    }
    for_each_registration(&|_, roster, index| roster.delist(index));
    switch();
    for_each_registration(&|set, roster, index| {
        let Registration { events, data, .. } = *roster.at(index);
        // Without a descriptor for it the listener reports what comes by TCP alone, as when it is registered.
        let _ = set.change(roster, index, epoll_event { events, u64: data });
    });
}

/// Whether an epoll instance of the program may hold a listener.
pub fn holds_listener(listener: &'static Listener) -> bool {
    let descriptors = Target::Listener(listener).descriptors();
    REGISTERED.load(Ordering::Relaxed) > 0
        && POOL.any(|set| set.with(|roster| descriptors.iter().any(|&fd| roster.find(fd).is_some())))
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
            set.with(|roster| {
                if set.prepare_for_lanes(roster).is_ok() {
                    roster.ring_bell();
                }
            });
        }
    });
}

/// Whether a set holds this connection.
pub(crate) fn is_held_by_a_set(connection: &'static Connection) -> bool {
    REGISTERED.load(Ordering::Relaxed) > 0
        && connection.with_descriptors(<[RawFd]>::to_vec).iter().any(|&fd| {
            let mut is_found = false;
            POOL.for_each(|set| set.with(|roster| is_found |= roster.find(fd).is_some()));
            is_found
        })
}

/// The sets that hold a connection look at it in their next wait, and whoever sleeps on them wakes up.
pub fn look_again(connection: &'static Connection) {
    if REGISTERED.load(Ordering::Relaxed) == 0 {
        return;
    }
    let descriptors = Target::Connection(connection).descriptors();
    POOL.for_each(|set| {
        // A handler that has interrupted who is inside a set: that one's wait looks.
        if !set.lock.is_held_by_this_thread() {
            set.with(|roster| {
                let registered: Vec<u32> = descriptors.iter().filter_map(|&fd| roster.find(fd)).collect();
                set.look_at_parked(roster, registered);
            });
        }
    });
}

/// Does something with a TCP socket of the program while the kernel reports nothing of it: on its way it is what the
/// program is not to see. Whoever changes a registration meanwhile must be kept off.
pub fn while_unheard(descriptors: &[RawFd], work: impl FnOnce()) {
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
        set.with(|roster| {
            for &fd in descriptors {
                let found = roster.find(fd).filter(|index| roster.at(*index).target.is(Target::Connection(connection)));
                if let (Some(index), Some(epfd)) = (found, roster.epfd()) {
                    let registration = roster.at(index);
                    held.push((set, epfd, fd, epoll_event { events: registration.events, u64: registration.data }));
                    set.forget(roster, index, &[]);
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
    forget_one_of(fd, Target::Connection(connection), || connection.with_descriptors(|own| others(own, fd)));
}

/// Before the program closes a descriptor of a listener: with the last one, the listener leaves all sets.
pub fn forget_listener(fd: RawFd, listener: &'static Listener) {
    forget_one_of(fd, Target::Listener(listener), || listener.with_descriptors(|own| others(own, fd)));
}

/// Before the program closes a descriptor of a TCP socket that the kernel serves: the kernel knows whether it stays.
pub fn forget_stream(fd: RawFd) {
    forget_one_of(fd, Target::Stream, Vec::new);
}

fn others(descriptors: &[RawFd], fd: RawFd) -> Vec<RawFd> {
    descriptors.iter().copied().filter(|&other| other != fd).collect()
}

fn leave_to_all(close: Close) {
    POOL.any(|set| {
        set.left.leave(close);
        false
    });
}

/// Has handlers put off until this thread leaves the sets that it is inside; `false`: there are none.
pub(crate) fn put_handlers_off() -> bool {
    POOL.any(|set| {
        let is_inside = set.lock.is_held_by_this_thread();
        if is_inside {
            set.left.put_handlers_off();
        }
        is_inside
    })
}

/// Whether this is a signal handler that has interrupted a thread inside a set.
fn is_inside_a_set() -> bool {
    POOL.any(|set| set.lock.is_held_by_this_thread())
}

fn forget_one_of(fd: RawFd, target: Target, survivors: impl FnOnce() -> Vec<RawFd>) {
    if REGISTERED.load(Ordering::Relaxed) == 0 {
        return;
    }
    let survivors = survivors();
    let close = Close { fd, is_last: survivors.is_empty(), is_of_set: false };
    if is_inside_a_set() {
        // This may be the thread that every one of them waits for.
        return leave_to_all(close);
    }
    POOL.for_each(|set| {
        let forget = |roster: &mut Roster| {
            // The number may be another object's by now, which is registered under it.
            let is_stale = |index: &u32| {
                let registered = roster.at(*index).target;
                registered.is(target) || Target::has_gone(&(fd, registered))
            };
            if let Some(index) = roster.find(fd).filter(is_stale) {
                set.forget(roster, index, &survivors);
            }
            while let Some(index) = roster.orphan_of(target, fd, survivors.is_empty()) {
                set.forget(roster, index, &survivors);
            }
        };
        if set.with_if_free(forget) {
            return;
        }
        if is_inside_a_socket() {
            // Whoever is inside the set may wait for what this thread holds below this handler.
            set.left.leave(close);
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
    let Some(held) = locks().position(|lock| !lock.lock_soon_until_unlocked()) else { return true };
    locks().take(held).for_each(Lock::unlock);
    POOL.unlock_after_fork();
    false
}

/// After a fork, in the parent. Connections have got lanes before it, under the eyes of nobody.
pub fn after_fork_in_parent() {
    for set in POOL.all_during_fork() {
        // SAFETY: under the lock, which this thread has held since before the fork.
        let roster = unsafe { &mut *set.roster.get() };
        let switched = roster.switched();
        set.look_at_parked(roster, switched);
        roster.bequeath();
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
        set.with(Roster::inherit);
    }
    NESTING.unlock();
    POOL.unlock_after_fork();
}
