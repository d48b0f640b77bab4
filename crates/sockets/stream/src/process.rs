//! Calls that create processes or run programs.

use crate::connection::{self, Connection};
use crate::epoll;
use crate::holders;
use crate::table::{self, Entry};
use crate::{lifecycle, sharing, statistics};
use socket::descriptor::hidden::{self, HiddenFd};
use socket::process::settings::settings;
use socket::process::{identity, sandbox, signals, system};
use socket::rack::location;
use std::cell::Cell;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    /// This thread has called `vfork`, and its child may still run in its memory.
    static HAS_CHILD_IN_MEMORY: Cell<bool> = const { Cell::new(false) };
    /// The signals that were blocked before this thread's fork, which is in progress.
    static BLOCKED_BEFORE_FORK: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Prepares this process when the library is loaded: the program does not see descriptors of the library.
pub fn note_load() {
    hidden::hide_above_limit();
    meeting::hide_descriptors(meeting::HiddenNumbers {
        hide: |fd| HiddenFd::hide_within_table(fd).map(HiddenFd::into_slot),
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
    statistics::note_confined();
    leave_to_kernel(|_| {});
    sandbox::set_confined(true);
}

/// Prepares for a child with memory of its own and the descriptors of this process: what one of them closes or makes,
/// the other does not learn. Both processes use TCP from then on.
pub fn before_sharing_descriptors() {
    confine();
}

/// Leaves all connections and sets to the kernel alone. Calls `visit` with each connection that was left.
fn leave_to_kernel(visit: impl Fn(&'static Connection)) {
    // All peers are asked first, so that the waits for them overlap.
    table::for_each(0..=RawFd::MAX, |fd, entry| match entry {
        Entry::None | Entry::Set(_) => {}
        Entry::Young(_) => {
            if let Entry::Young(young) = table::set(fd, Entry::None) {
                sharing::leave_counted(young);
            }
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
    meeting::diag::close_kept();
    holders::close_descriptor();
    true
}

/// Returns whether this thread holds a lock of a connection or a set; if so, signal handlers are deferred until it
/// releases that.
pub fn defers_handlers() -> bool {
    connection::defers_handlers() || epoll::defers_handlers()
}

/// Prepares for a change of the root directory, behind which a shared rack must still be reached. Returns whether that
/// has to be undone if the call fails.
pub fn before_change_of_root() -> bool {
    if settings().off || is_confined() || identity::is_borrowed_memory() {
        return false;
    }
    match location::shared() {
        // Without it, connections that come later stay on TCP.
        Ok(Some(rack)) if rack.base().is_none() => rack.keep_for_change_of_root().is_ok(),
        _ => false,
    }
}

/// Undoes what [`before_change_of_root`] has done.
pub fn after_failed_change_of_root() {
    if let Ok(Some(rack)) = location::shared() {
        rack.forget_kept();
    }
}

/// Prepares for the end of the process, other than by a signal: peers get what they have left in lanes, and those with
/// whom this process shares connections may use lanes afterwards. A child of `vfork` has no connections itself.
pub fn before_exit() {
    if settings().off || is_confined() || identity::is_borrowed_memory() {
        return;
    }
    connection::before_exit();
    if may_release_holds() {
        sharing::release_all();
    }
}

/// Returns whether this process shares connections and may release them now.
pub fn may_release_holds() -> bool {
    // Other threads go on for a moment after a release.
    holders::is_any() && !is_confined() && !identity::is_borrowed_memory() && sharing::is_only_thread()
}

/// Prepares for a fork. Connections that both processes will hold stay on TCP until one of them is left, also those
/// that have not proved busy.
pub fn before_fork() {
    // A handler would wait for the locks that this thread holds until the fork is over.
    if !is_confined() {
        BLOCKED_BEFORE_FORK.set(Some(system::set_signal_mask(u64::MAX)));
    }
    sharing::before_fork();
    epoll::before_fork();
    connection::before_fork();
}

/// Continues after a fork, in the parent.
pub fn after_fork_in_parent() {
    epoll::after_fork_in_parent();
    connection::after_fork_in_parent();
    sharing::after_fork_in_parent();
    unblock_signals();
}

fn unblock_signals() {
    if let Some(mask) = BLOCKED_BEFORE_FORK.take() {
        system::set_signal_mask(mask);
    }
}

/// Continues after a fork of this thread that has failed, once [`after_fork_in_parent`] was called.
pub fn after_failed_fork() {
    if holders::is_any() {
        sharing::after_failed_fork();
    }
}

/// Continues after a fork, in the child.
pub fn after_fork_in_child() {
    identity::note_process();
    signals::after_fork_in_child();
    epoll::after_fork_in_child();
    connection::after_fork_in_child();
    sharing::after_fork_in_child();
    crate::identity::after_fork_in_child();
    meeting::diag::close_kept();
    crate::remote::after_fork_in_child();
    statistics::after_fork_in_child();
    unblock_signals();
}

/// Prepares for another program in this process: what it closes, nobody holds here any more.
pub fn before_program() {
    before_exec();
    if may_release_holds() {
        sharing::release_all();
    }
}

/// Continues after a program could not be run in this process.
pub fn after_failed_program() {
    if holders::is_any() && !identity::is_borrowed_memory() {
        sharing::hold_all_again();
    }
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
