//! Calls that create processes or run programs.

use crate::connection::{self, Connection};
use crate::epoll;
use crate::table::{self, Entry};
use crate::{lifecycle, statistics};
use socket::descriptor::hidden::{self, HiddenFd, Need};
use socket::process::settings::settings;
use socket::process::{identity, sandbox, signals};
use std::cell::Cell;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    /// This thread has called `vfork`, and its child may still run in its memory.
    static HAS_CHILD_IN_MEMORY: Cell<bool> = const { Cell::new(false) };
}

/// Prepares this process when the library is loaded: the program does not see descriptors of the library.
pub fn note_load() {
    hidden::hide_above_limit();
    meeting::hide_descriptors(meeting::HiddenNumbers {
        hide: |fd| HiddenFd::hide(fd, Need::Required).map(HiddenFd::into_slot),
        number: hidden::number_at,
        release: |slot| HiddenFd::from_slot(slot).unhide(),
    });
}

/// Prepares for a `vfork`: the child runs in the memory of this process, with this thread's variables.
pub fn before_vfork() {
    before_exec();
    HAS_CHILD_IN_MEMORY.set(true);
}

/// Returns whether the caller is a child of `vfork`: what it does to descriptors does not concern this process's table.
#[inline]
pub fn is_child_in_memory() -> bool {
    HAS_CHILD_IN_MEMORY.get() && find_out_whether_child()
}

#[cold]
fn find_out_whether_child() -> bool {
    let is_child = identity::is_borrowed_memory();
    HAS_CHILD_IN_MEMORY.set(is_child);
    is_child
}

/// The program has put this process under a system call filter (seccomp).
static IS_CONFINED: AtomicBool = AtomicBool::new(false);

/// Returns whether the program has put this process under a system call filter. The filter was designed for a program
/// without this library and may end a process that makes another call, so that the library makes none from then on.
#[inline]
pub fn is_confined() -> bool {
    IS_CONFINED.load(Ordering::Relaxed)
}

/// Prepares for a system call filter, which the program is about to install: all connections go back to TCP for good,
/// and the library forgets them. The filter may apply to one thread only; the whole process counts as filtered, because
/// its threads share connections.
pub fn confine() {
    if settings().off || is_confined() {
        return;
    }
    IS_CONFINED.store(true, Ordering::SeqCst);
    leave_to_kernel(|_| {});
    sandbox::set_confined(true);
}

/// Leaves all connections and sets to the kernel alone. Calls `visit` with each connection that was left.
fn leave_to_kernel(visit: impl Fn(&'static Connection)) {
    // All peers are asked first, so that the waits for them overlap.
    table::for_each(0..=RawFd::MAX, |fd, entry| match entry {
        Entry::None | Entry::Set(_) => {}
        Entry::Young(_) => {
            table::set(fd, Entry::None);
        }
        Entry::Connection(_) => lifecycle::stay_on_tcp(fd),
    });
    table::for_each(0..=RawFd::MAX, |fd, entry| {
        if let Entry::Connection(connection) = entry
            && connection.settle(fd)
        {
            table::replace(fd, entry, Entry::None);
            visit(connection);
        }
    });
    epoll::dissolve_sets();
}

/// Makes room for a descriptor of the program, which has none left, if this library holds numbers that the program
/// could have: all connections go back to TCP for good. Returns whether there is room.
pub fn make_room() -> bool {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    let last = u32::try_from(limit.saturating_sub(1)).unwrap_or(u32::MAX);
    let holds_numbers = || hidden::visible_ranges(0, last).next() != Some((0, last));
    if settings().off || is_confined() || is_child_in_memory() || !holds_numbers() {
        return false;
    }
    leave_to_kernel(Connection::hang_up);
    true
}

/// Returns whether this thread holds a lock of a connection or a set; if so, signal handlers are deferred until it
/// releases that.
pub fn defers_handlers() -> bool {
    connection::defers_handlers() || epoll::defers_handlers()
}

/// Prepares for the end of the process by `exit`.
pub fn before_exit() {
    connection::before_exit();
}

/// Prepares for a fork. Connections stay on TCP from now on, also those that have not proved busy: both processes would
/// move them.
pub fn before_fork() {
    table::for_each(0..=RawFd::MAX, |fd, entry| {
        if let Entry::Young(_) = entry {
            lifecycle::stay_on_tcp(fd);
        }
    });
    epoll::before_fork();
    connection::before_fork();
}

/// Continues after a fork, in the parent.
pub fn after_fork_in_parent() {
    epoll::after_fork_in_parent();
    connection::after_fork_in_parent();
}

/// Continues after a fork, in the child.
pub fn after_fork_in_child() {
    identity::note_process();
    signals::after_fork_in_child();
    epoll::after_fork_in_child();
    connection::after_fork_in_child();
    statistics::after_fork_in_child();
}

/// Sends connections back to TCP that the program which is about to run in this process, or in a child, will hold.
pub fn before_exec() {
    table::for_each(0..=RawFd::MAX, |fd, _| {
        // SAFETY: the number is not negative; a call on a closed one fails.
        let flags = rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(fd) });
        if flags.is_ok_and(|flags| !flags.contains(rustix::io::FdFlags::CLOEXEC)) {
            lifecycle::stay_on_tcp(fd);
        }
    });
}
