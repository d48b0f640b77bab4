//! The life of a descriptor: `socket`, `bind`, `listen`, `connect`, `accept`, `dup`, `close`.
//!
//! A TCP socket starts as a [`Stream`], which the kernel alone serves. `listen` makes it a [`Listener`]: the same
//! kernel socket with a hidden lane listener beside it. `connect` and `accept` make [`Connection`]s where both sides
//! have Crosslane; everything else stays with the kernel, and the ledger says why.

mod accept;
mod confine;
mod connect;
mod deferral;
pub(crate) mod descriptor;
mod handoff;
pub(crate) mod inspect;
mod listen;
mod pending;
mod ports;
mod returned;
mod sockopt;

pub use accept::accept;
pub use confine::confine;
pub use connect::{Outcome, connect, note_kernel_failure};
pub use descriptor::{
    close, close_range, duplicate, duplicate_onto, forget_spawn_actions, keep_options_through_exec,
    note_spawn_duplicate, set_cloexec, while_executing, while_spawning,
};
pub use handoff::{adopt_inherited, is_lifeline, receive_rights, send_rights};
pub use listen::{listen, shutdown_listener};
pub use pending::{
    abandon as abandon_connect, advance as advance_connects, hold_off as hold_off_connects, is_any_pending,
    is_looked_at, is_pending,
};
pub use ports::{may_bind, note_bound, note_told};
pub use sockopt::{ask_as_tcp, get_option, note_option, refusal, set_option};

use crate::address::Family;
use crate::connection::Connection;
use crate::lock::Lock;
use crate::name_key::NameKey;
use crate::options::OptionRecord;
use crate::pool::Pool;
use crate::process;
use crate::process_stats;
use crate::rack;
use crate::rendezvous::LaneListener;
use crate::sandbox;
use crate::settings::{self, settings};
use crate::signals;
use crate::system;
use crate::table::{self, Entry};
use deferral::Deferral;
use ledger::ConnectionSlot;
use rustix::io::Errno;
use std::cell::UnsafeCell;
use std::hash::{Hash, Hasher};
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering, compiler_fence};

/// How a program ends whose environment is not understood.
const EXIT_WRONG_USE: i32 = 2;

/// What a TCP socket is before it is anything more, or when it stays with the kernel.
#[derive(Default)]
pub struct Stream {
    shared: Shared<StreamInner>,
}

#[derive(Default)]
struct StreamInner {
    is_v6: bool,
    descriptors: Vec<RawFd>,
    options: OptionRecord,
    slot: Option<ConnectionSlot>,
    port_choice: PortChoice,
    /// A connect that waits in the background.
    pending: Option<pending::Pending>,
}

/// Who has chosen the port that a socket is bound to. The kernel does not know the ports of connections with lanes, and
/// chooses what one of them has.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum PortChoice {
    #[default]
    Program,
    Kernel,
    /// The kernel, and the program has asked which it is.
    KnownKernel,
}

/// A TCP listener with a lane listener beside it. The kernel socket is in non-blocking mode always, so that waiting for
/// either does not get stuck in one; the program's own idea of the mode is kept here.
#[derive(Default)]
pub struct Listener {
    shared: Shared<ListenerInner>,
    is_nonblocking: AtomicBool,
}

#[derive(Default)]
struct ListenerInner {
    is_v6: bool,
    descriptors: Vec<RawFd>,
    options: OptionRecord,
    lane: Option<LaneListener>,
    /// Connections that it keeps back until they have bytes.
    deferral: Option<Deferral>,
    /// Where the parent of this process leaves some, while this process has not used the listener: for a program that
    /// follows by `exec`.
    of_parent: Option<returned::Returned>,
    /// Its line for `crosslane stat`, which goes with it.
    _slot: Option<ConnectionSlot>,
}

impl ListenerInner {
    /// Leaves the connections that it keeps back to other processes.
    fn leave_to_others(&mut self) {
        if let Some(deferral) = &mut self.deferral {
            deferral.give_back(usize::MAX);
        }
    }
}

static STREAMS: Pool<Stream> = Pool::new();
static LISTENERS: Pool<Listener> = Pool::new();

/// What the threads of the program share of a socket.
#[derive(Default)]
struct Shared<T> {
    lock: Lock,
    /// Under `lock`.
    inner: UnsafeCell<T>,
    /// Closed in signal handlers that have interrupted the holder of `lock`.
    left: LeftToHolder,
}

// SAFETY: the cell is accessed under the lock.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Has handlers put off if this thread holds the lock.
    fn puts_handlers_off(&self) -> bool {
        let is_held = self.lock.is_held_by_this_thread();
        if is_held {
            self.left.has_put_off.store(true, Ordering::SeqCst);
            self.left.is_any.store(true, Ordering::SeqCst);
        }
        is_held
    }

    /// `forget`: what a close does.
    fn with<R>(&self, access: impl FnOnce(&mut T) -> R, forget: impl FnMut(RawFd)) -> R {
        let guard = self.lock.lock();
        // SAFETY: under the lock.
        let answer = access(unsafe { &mut *self.inner.get() });
        drop(guard);
        // A handler that comes before this line leaves its work here, one that comes after it finds the lock free.
        compiler_fence(Ordering::SeqCst);
        if !self.left.is_empty() {
            self.left.take().for_each(forget);
            self.left.let_handlers_in();
        }
        answer
    }

    /// Runs `access` unless somebody holds the lock: where there is no time to wait.
    fn with_if_free(&self, access: impl FnOnce(&mut T)) {
        if let Some(_guard) = self.lock.enter_if_free() {
            // SAFETY: under the lock.
            access(unsafe { &mut *self.inner.get() });
        }
    }

    /// Whether a close is left to the holder of the lock, which this is a signal handler above.
    fn leaves_to_holder(&self, fd: RawFd) -> bool {
        let is_held = self.lock.is_held_by_this_thread();
        if is_held {
            self.left.add(fd);
        }
        is_held
    }
}

/// Descriptors of a socket that were closed in signal handlers which had interrupted the holder of its lock: waiting
/// there would have no end. Each is one more than the number, and zero is none.
#[derive(Default)]
struct LeftToHolder {
    is_any: AtomicBool,
    /// Handlers have been put off until the lock is free.
    has_put_off: AtomicBool,
    places: [AtomicI32; 8],
}

impl LeftToHolder {
    /// One for which there is no room stays known, as if it were not closed: more were closed within a few instructions
    /// than a socket has, but for contrived ones.
    fn add(&self, fd: RawFd) {
        let is_free =
            |place: &&AtomicI32| place.compare_exchange(0, fd + 1, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        self.places.iter().find(is_free);
        self.is_any.store(true, Ordering::SeqCst);
    }

    /// Lets in what was put off in this thread; what was in another one stays for that.
    fn let_handlers_in(&self) {
        if !self.has_put_off.load(Ordering::SeqCst) {
            return;
        }
        if signals::are_put_off() {
            self.has_put_off.store(false, Ordering::SeqCst);
            signals::let_handlers_in();
        } else {
            self.is_any.store(true, Ordering::SeqCst);
        }
    }

    #[inline]
    fn is_empty(&self) -> bool {
        !self.is_any.load(Ordering::Relaxed)
    }

    /// What comes meanwhile is taken now or says so anew.
    fn take(&self) -> impl Iterator<Item = RawFd> {
        self.is_any.store(false, Ordering::SeqCst);
        self.places.iter().map(|place| place.swap(0, Ordering::SeqCst) - 1).filter(|fd| *fd >= 0)
    }
}

fn is_last_struck_out(descriptors: &mut Vec<RawFd>, fd: RawFd) -> bool {
    let before = descriptors.len();
    descriptors.retain(|&known| known != fd);
    descriptors.is_empty() && before > 0
}

impl Stream {
    fn with<R>(&'static self, access: impl FnOnce(&mut StreamInner) -> R) -> R {
        self.shared.with(access, |fd| self.forget(fd))
    }

    /// The program has closed one of its descriptors of the socket.
    fn forget(&'static self, fd: RawFd) {
        if self.shared.leaves_to_holder(fd) {
            return;
        }
        let last = self
            .with(|inner| is_last_struck_out(&mut inner.descriptors, fd).then(|| std::mem::take::<StreamInner>(inner)));
        if last.is_some() {
            drop(last);
            STREAMS.give_back(self);
        }
    }

    /// Runs `access` on the record of the socket's options.
    pub fn with_options<R>(&'static self, access: impl FnOnce(&mut OptionRecord) -> R) -> R {
        self.with(|inner| access(&mut inner.options))
    }

    /// Counts bytes that the kernel carried.
    pub fn count_sent(&'static self, bytes: usize) {
        self.with(|inner| inner.slot.as_ref().inspect(|slot| slot.add_sent(bytes as u64)).is_some());
    }

    /// Counts bytes that the kernel carried.
    pub fn count_received(&'static self, bytes: usize) {
        self.with(|inner| inner.slot.as_ref().inspect(|slot| slot.add_received(bytes as u64)).is_some());
    }
}

impl Listener {
    fn with<R>(&'static self, access: impl FnOnce(&mut ListenerInner) -> R) -> R {
        self.shared.with(access, |fd| self.forget(fd))
    }

    /// The program has closed one of its descriptors of the listener.
    fn forget(&'static self, fd: RawFd) {
        if self.shared.leaves_to_holder(fd) {
            return;
        }
        crate::interest::forget_listener(fd, self);
        let last = self.with(|inner| {
            is_last_struck_out(&mut inner.descriptors, fd).then(|| {
                inner.leave_to_others();
                std::mem::take::<ListenerInner>(inner)
            })
        });
        if last.is_some() {
            drop(last);
            LISTENERS.give_back(self);
        }
    }

    /// The hidden descriptor on which lane connections arrive.
    pub fn lane_fd(&'static self) -> RawFd {
        self.with(|inner| inner.lane.as_ref().map_or(-1, LaneListener::fd))
    }

    /// The descriptor that is readable when a lane connection may have come: then ask [`Listener::has_lane_client`].
    pub fn watched_fd(&'static self) -> RawFd {
        self.with(|inner| match (&inner.deferral, &inner.lane) {
            (Some(deferral), _) => deferral.gate(),
            (None, lane) => lane.as_ref().map_or(-1, LaneListener::fd),
        })
    }

    /// Whether `accept` would find a connection that came by a lane, once the watched descriptor has become readable.
    pub fn has_lane_client(&'static self) -> bool {
        deferral::has_client(self)
    }

    /// The hidden descriptor, and the key of the names that connecting ends have.
    fn lane(&'static self) -> Option<(RawFd, NameKey)> {
        self.with(|inner| inner.lane.as_ref().map(|lane| (lane.fd(), lane.key())))
    }

    /// Runs `access` on the program's descriptors of this listener.
    pub fn with_descriptors<R>(&'static self, access: impl FnOnce(&[RawFd]) -> R) -> R {
        self.with(|inner| access(&inner.descriptors))
    }

    /// The listener that `descriptors` of the program are, with `lane` beside it.
    fn open(inner: ListenerInner, is_nonblocking: bool) -> &'static Self {
        let listener = LISTENERS.take();
        let slot = inner.lane.as_ref().map(|lane| {
            process_stats::page().open_connection(&ledger::Connection {
                path: ledger::Path::Lane,
                role: ledger::Role::Listen,
                fd: inner.descriptors.first().copied().unwrap_or(-1),
                local: Some(lane.name().address),
                peer: None,
            })
        });
        listener.with(|own| *own = ListenerInner { _slot: slot, ..inner });
        listener.set_nonblocking(is_nonblocking);
        listener
    }

    /// Whether clients can come by lanes. Not in a signal handler that has interrupted the holder of its lock.
    fn is_listening(&'static self) -> bool {
        !self.shared.lock.is_held_by_this_thread() && self.with(|inner| inner.lane.is_some())
    }

    /// Says whether the lane listener, and the queue of what is kept back, outlive `exec`.
    fn set_inheritable(&'static self, inheritable: bool) {
        if inheritable {
            deferral::note_shared();
        }
        self.with(|inner| {
            let returned = inner.deferral.as_ref().map(Deferral::returned).or(inner.of_parent.as_ref());
            returned.inspect(|returned| returned.set_inheritable(inheritable));
            inner.lane.as_ref().inspect(|lane| lane.set_inheritable(inheritable)).is_some()
        });
    }

    /// Whether the program put the descriptor in non-blocking mode.
    pub fn is_nonblocking(&self) -> bool {
        self.is_nonblocking.load(Ordering::Relaxed)
    }

    /// Notes the program's choice of mode; the kernel socket stays non-blocking.
    pub fn set_nonblocking(&'static self, nonblocking: bool) {
        self.is_nonblocking.store(nonblocking, Ordering::Relaxed);
        inspect::remember_mode(self.lane_fd(), nonblocking);
        if let Some(fd) = self.with(|inner| inner.descriptors.first().copied()) {
            inspect::mark_mode(fd, !nonblocking);
        }
    }

    /// Runs `access` on the record of the socket's options.
    pub fn with_options<R>(&'static self, access: impl FnOnce(&mut OptionRecord) -> R) -> R {
        self.with(|inner| access(&mut inner.options))
    }
}

/// The family of a program's socket.
fn family(is_v6: bool) -> Family {
    if is_v6 { Family::V6 } else { Family::V4 }
}

/// Says what of the environment is not understood. A value that is not ends the process, for a program is not to run
/// without what the value was to guarantee. To be called once, before the program runs.
pub fn check_environment() {
    if settings().off {
        return;
    }
    settings().mistakes.iter().for_each(|mistake| complain(&format_args!("{mistake}")));
    if !settings().mistakes.is_empty() {
        // SAFETY: ends the process; the program has not begun.
        unsafe { libc::_exit(EXIT_WRONG_USE) };
    }
    if let Some(line) = settings::unknown_variables(std::env::vars_os().map(|(name, _)| name)) {
        complain(&format_args!("{line}"));
    }
    if let Some(line) = rack::missing_named_directory() {
        complain(&format_args!("{line}; there are no lanes without it"));
    }
}

/// Notes a socket that the program has just made: `domain`, `kind` and `protocol` as in `socket(2)`.
pub fn note_socket(fd: RawFd, domain: i32, kind: i32, protocol: i32) {
    if sandbox::is_confined() {
        return;
    }
    let is_tcp = matches!(domain, libc::AF_INET | libc::AF_INET6)
        && kind & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) == libc::SOCK_STREAM
        && matches!(protocol, 0 | libc::IPPROTO_TCP);
    if is_tcp && !settings().off && table::can_hold(fd) {
        note_stream(fd, domain == libc::AF_INET6, OptionRecord::default(), None);
    }
}

fn note_stream(fd: RawFd, is_v6: bool, options: OptionRecord, slot: Option<ConnectionSlot>) {
    let stream = STREAMS.take();
    stream.with(|inner| *inner = StreamInner { is_v6, descriptors: vec![fd], options, slot, ..StreamInner::default() });
    table::set(fd, Entry::Stream(stream));
}

/// Lines that one process says to its user.
const COMPLAINTS_MAX: usize = 20;

/// One line to the user, once: a program that is refused tries again.
fn complain(message: &std::fmt::Arguments<'_>) {
    static SAID: [AtomicU64; COMPLAINTS_MAX] = [const { AtomicU64::new(0) }; COMPLAINTS_MAX];
    let line = format!("crosslane: {message}\n");
    let mut hasher = std::hash::DefaultHasher::new();
    line.hash(&mut hasher);
    let hash = hasher.finish().max(1);
    // A place that has it, or that nobody has taken yet.
    let place =
        SAID.iter().find_map(|said| match said.compare_exchange(0, hash, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Some(true),
            Err(other) => (other == hash).then_some(false),
        });
    if place == Some(true) {
        // SAFETY: standard error is the process's; the call fails harmlessly if it is closed.
        let _ = rustix::io::write(unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) }, line.as_bytes());
    }
}

/// The signals that the forking thread had blocked, while it holds all locks.
static MASK_AROUND_FORK: AtomicU64 = AtomicU64::new(0);

/// Has handlers put off until this thread lets go of the sockets that it holds; `false`: there are none.
pub(crate) fn put_handlers_off() -> bool {
    STREAMS.any(|stream| stream.shared.puts_handlers_off()) || LISTENERS.any(|it| it.shared.puts_handlers_off())
}

/// Whether this is a signal handler that has interrupted a thread which holds a listener.
pub(crate) fn is_inside_a_listener() -> bool {
    LISTENERS.any(|listener| listener.shared.lock.is_held_by_this_thread())
}

/// Runs `work` as a signal handler runs that has interrupted a thread which holds a listener.
#[cfg(test)]
pub(crate) fn inside_a_listener(work: impl FnOnce()) {
    LISTENERS.take().with(|_| work());
}

/// Handlers around `fork`; see `connection::before_fork`. Sets come first, because they ask listeners and connections
/// under their lock, and nobody asks the other way round.
pub fn before_fork() {
    // A handler between this and the end of the fork would wait for a lock that its own thread holds.
    let mask = system::set_signal_mask(u64::MAX);
    descriptor::before_fork();
    deferral::note_shared();
    crate::interest::before_fork();
    STREAMS.lock_around_fork().iter().for_each(|stream| stream.shared.lock.lock_until_unlocked());
    LISTENERS.lock_around_fork().iter().for_each(|listener| listener.shared.lock.lock_until_unlocked());
    crate::connection::before_fork();
    MASK_AROUND_FORK.store(mask, Ordering::Relaxed);
}

/// Notes that a child is about to be made, by `vfork` or `posix_spawn`.
pub extern "C" fn note_spawn() {
    system::note_spawn();
    leave_to_child();
}

/// Leaves connections that are kept back to a child, which may serve while this process does something else.
fn leave_to_child() {
    for_each_deferral(Deferral::leave_to_child);
}

/// Before the process ends by `exit`, perhaps in a signal handler.
pub fn before_exit() {
    for_each_deferral(|deferral| deferral.give_back(usize::MAX));
}

fn for_each_deferral(work: impl Fn(&mut Deferral)) {
    if !process::is_borrowed_memory() {
        LISTENERS.for_each(|listener| {
            listener.shared.with_if_free(|inner| inner.deferral.as_mut().into_iter().for_each(&work))
        });
    }
}

/// After a fork, in the parent.
pub fn after_fork_in_parent() {
    let mask = MASK_AROUND_FORK.load(Ordering::Relaxed);
    crate::connection::after_fork_in_parent();
    unlock_after_fork();
    crate::interest::after_fork_in_parent();
    descriptor::after_fork_in_parent();
    leave_to_child();
    system::set_signal_mask(mask);
}

/// After a fork, in the child.
pub fn after_fork_in_child() {
    let mask = MASK_AROUND_FORK.load(Ordering::Relaxed);
    crate::signals::after_fork_in_child();
    crate::connection::after_fork_in_child();
    unlock_after_fork();
    pending::after_fork_in_child();
    crate::interest::after_fork_in_child();
    descriptor::after_fork_in_child();
    LISTENERS.for_each(deferral::after_fork_in_child);
    process_stats::after_fork_in_child();
    system::set_signal_mask(mask);
}

fn unlock_after_fork() {
    LISTENERS.all_during_fork().iter().for_each(|listener| listener.shared.lock.unlock());
    LISTENERS.unlock_after_fork();
    STREAMS.all_during_fork().iter().for_each(|stream| stream.shared.lock.unlock());
    STREAMS.unlock_after_fork();
}

/// Whether a program that calls `connect` again on a connection should be told that it is there.
fn already_connected(connection: &Connection) -> Result<(), Errno> {
    if connection.take_connect_report() { Ok(()) } else { Err(Errno::ISCONN) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_handler_closes_that_has_interrupted_the_holder_is_forgotten_when_that_lets_go() {
        // Numbers that no table has: nothing but the record is touched.
        let stream = STREAMS.take();
        stream.with(|inner| inner.descriptors = vec![901, 902, 903]);
        stream.with(|_| [902, 901].map(|fd| stream.forget(fd)));
        stream.with(|inner| assert_eq!(inner.descriptors, [903]));
        stream.with(|inner| {
            stream.forget(903);
            assert_eq!(inner.descriptors, [903], "left to the holder");
        });
        stream.with(|inner| assert_eq!(inner.descriptors, []));
        assert!(stream.shared.left.is_empty());
    }

    #[test]
    fn the_same_of_a_listener() {
        let listener = LISTENERS.take();
        listener.with(|inner| inner.descriptors = vec![904, 905]);
        listener.with(|inner| {
            listener.forget(904);
            assert_eq!(inner.descriptors, [904, 905], "left to the holder");
        });
        listener.with(|inner| assert_eq!(inner.descriptors, [905]));
        listener.with_descriptors(|_| listener.forget(905));
        listener.with(|inner| assert_eq!(inner.descriptors, []));
        assert!(listener.shared.left.is_empty());
    }
}
