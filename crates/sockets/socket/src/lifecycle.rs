//! The life of a descriptor: `socket`, `bind`, `listen`, `connect`, `accept`, `dup`, `close`.
//!
//! A TCP socket starts as a [`Stream`](crate::stream::Stream), which the kernel alone serves. `listen` makes it a
//! [`Listener`](crate::listener::Listener): the same kernel socket with a hidden lane listener. `connect` and `accept`
//! make [`Connection`]s if both sides have Crosslane; all others stay with the kernel, and the stats page counts the
//! reasons.

mod accept;
mod attempt;
mod confine;
mod connect;
mod deferral;
pub(crate) mod descriptor;
mod handoff;
mod listen;
mod pending;
mod ports;
mod sockopt;

pub use accept::accept;
pub use attempt::Outcome;
pub use confine::confine;
pub use connect::{connect, note_kernel_failure};
pub use descriptor::{
    close, close_range, duplicate, duplicate_onto, forget_spawn_actions, keep_options_through_exec,
    note_spawn_duplicate, set_cloexec, while_executing, while_spawning,
};
pub use handoff::{adopt_inherited, is_lifeline, receive_rights, send_rights};
pub use listen::{listen, shutdown_listener};
pub use pending::{abandon as abandon_connect, is_advancing, is_pending};
pub use ports::{may_bind, note_address_read, note_bound};
pub use sockopt::{get_option, ioctl_as_tcp, note_option, refusal, set_option};

use crate::accounting::process_stats;
use crate::connection::{self, Connection};
use crate::entry::{self, Entry};
use crate::epoll;
use crate::listener::{self, DeferredAccept, LISTENERS};
use crate::options::OptionRecord;
use crate::process::settings::settings;
use crate::process::{identity, sandbox, signals, system};
use crate::rendezvous::address::Family;
use crate::rendezvous::directory;
use crate::stream::{STREAMS, StreamInner};
use rustix::io::Errno;
use stats_page::ConnectionSlot;
use std::hash::{Hash, Hasher};
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// The exit status of a program whose environment is not valid.
const EXIT_WRONG_USE: i32 = 2;

/// Returns the address family of a program's socket.
fn family(is_v6: bool) -> Family {
    if is_v6 { Family::V6 } else { Family::V4 }
}

/// Reports errors in the environment. An invalid value ends the process, because a program must not run without what
/// the value was to guarantee. Called once, before the program runs.
pub fn check_environment() {
    if settings().off {
        return;
    }
    settings().mistakes.iter().for_each(|mistake| warn_user(&format_args!("{mistake}")));
    if !settings().mistakes.is_empty() {
        // SAFETY: `_exit` ends the process without running any other code, and the program has not started yet.
        unsafe { libc::_exit(EXIT_WRONG_USE) };
    }
    if let Some(line) = directory::missing_configured_directory() {
        warn_user(&format_args!("{line}; there are no lanes without it"));
    }
}

/// Records a socket that the program has just created: `domain`, `kind` and `protocol` as in `socket(2)`.
pub fn note_socket(fd: RawFd, domain: i32, kind: i32, protocol: i32) {
    let is_tcp = matches!(domain, libc::AF_INET | libc::AF_INET6)
        && kind & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) == libc::SOCK_STREAM
        && matches!(protocol, 0 | libc::IPPROTO_TCP);
    if is_tcp && sandbox::is_confined() {
        process_stats::count_under_filter();
    } else if is_tcp && !settings().off && entry::can_hold(fd) {
        note_stream(fd, domain == libc::AF_INET6, OptionRecord::default(), None);
    }
}

fn note_stream(fd: RawFd, is_v6: bool, options: OptionRecord, slot: Option<ConnectionSlot>) {
    let stream = STREAMS.take();
    stream.with(|inner| *inner = StreamInner { is_v6, descriptors: vec![fd], options, slot, ..StreamInner::default() });
    entry::set(fd, Entry::Stream(stream));
}

/// Maximum number of lines that one process prints.
const WARNINGS_MAX: usize = 20;

/// Prints a line to standard error, once: a program that is refused tries again.
fn warn_user(message: &std::fmt::Arguments<'_>) {
    static PRINTED: [AtomicU64; WARNINGS_MAX] = [const { AtomicU64::new(0) }; WARNINGS_MAX];
    let line = format!("crosslane: {message}\n");
    let mut hasher = std::hash::DefaultHasher::new();
    line.hash(&mut hasher);
    let hash = hasher.finish().max(1);
    // Finds the entry with this line, or the first free one.
    let is_new = PRINTED.iter().find_map(|printed| {
        match printed.compare_exchange(0, hash, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Some(true),
            Err(other) => (other == hash).then_some(false),
        }
    });
    if is_new == Some(true) {
        // SAFETY: the descriptor is borrowed for one call, which fails harmlessly if standard error is closed.
        let _ = rustix::io::write(unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) }, line.as_bytes());
    }
}

/// The signals that the forking thread had blocked, stored while it holds all locks.
static MASK_AROUND_FORK: AtomicU64 = AtomicU64::new(0);

/// Returns whether this thread holds a lock of a connection, set or socket, and if so has it deliver deferred signals
/// when it releases the lock.
pub fn defer_handlers() -> bool {
    connection::defer_handlers()
        || epoll::defer_handlers()
        || STREAMS.any(|stream| stream.shared.defers_handlers())
        || LISTENERS.any(|it| it.shared.defers_handlers())
}

/// Before a fork, acquires all locks; see `connection::before_fork`. Epoll sets come first, because they query
/// listeners and connections under their lock, and never the other way round.
pub fn before_fork() {
    // A signal handler that ran before the end of the fork would wait for a lock that its own thread holds.
    let mask = system::set_signal_mask(u64::MAX);
    descriptor::before_fork();
    listener::mark_listeners_shared();
    epoll::before_fork();
    STREAMS.lock_around_fork().iter().for_each(|stream| stream.shared.lock.lock_without_guard());
    LISTENERS.lock_around_fork().iter().for_each(|listener| listener.shared.lock.lock_without_guard());
    connection::before_fork();
    MASK_AROUND_FORK.store(mask, Ordering::Relaxed);
}

/// Records that a child is about to be created, by `vfork` or `posix_spawn`.
pub extern "C" fn note_spawn() {
    system::note_spawn();
    share_with_child();
}

/// Releases held connections to a child, which may serve them while this process does something else.
fn share_with_child() {
    for_each_deferral(DeferredAccept::share_with_child);
}

/// Before the process ends by `exit`, perhaps in a signal handler, releases held connections to others.
pub fn before_exit() {
    for_each_deferral(|deferral| deferral.share(usize::MAX));
}

fn for_each_deferral(work: impl Fn(&mut DeferredAccept)) {
    if !identity::is_borrowed_memory() {
        LISTENERS.for_each(|listener| {
            listener.shared.with_if_free(|inner| inner.deferral.as_mut().into_iter().for_each(&work))
        });
    }
}

/// After a fork, in the parent: releases all locks.
pub fn after_fork_in_parent() {
    let mask = MASK_AROUND_FORK.load(Ordering::Relaxed);
    connection::after_fork_in_parent();
    unlock_after_fork();
    epoll::after_fork_in_parent();
    descriptor::after_fork_in_parent();
    share_with_child();
    system::set_signal_mask(mask);
}

/// After a fork, in the child: releases all locks and drops what belongs to the parent.
pub fn after_fork_in_child() {
    let mask = MASK_AROUND_FORK.load(Ordering::Relaxed);
    signals::after_fork_in_child();
    connection::after_fork_in_child();
    unlock_after_fork();
    pending::after_fork_in_child();
    epoll::after_fork_in_child();
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

/// Returns the result for a program that calls `connect` again on a connection: success the first time, and `ISCONN`
/// from then on.
fn already_connected(connection: &Connection) -> Result<(), Errno> {
    if connection.take_connect_report() { Ok(()) } else { Err(Errno::ISCONN) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closes_in_a_handler_that_has_interrupted_the_holder_take_effect_at_unlock() {
        // No table has these numbers, so only the record is changed.
        let stream = STREAMS.take();
        stream.with(|inner| inner.descriptors = vec![901, 902, 903]);
        stream.with(|_| [902, 901].map(|fd| stream.remove_descriptor(fd)));
        stream.with(|inner| assert_eq!(inner.descriptors, [903]));
        stream.with(|inner| {
            stream.remove_descriptor(903);
            assert_eq!(inner.descriptors, [903], "the close is left to the holder");
        });
        stream.with(|inner| assert_eq!(inner.descriptors, []));
        assert!(stream.shared.deferred_closes.is_empty());
    }
}
