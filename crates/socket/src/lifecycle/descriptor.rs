//! `dup`, `close` and their kin, kept in step with what the kernel does.

use super::{LISTENERS, Listener};
use crate::connection::Connection;
use crate::descriptors;
use crate::interest;
use crate::lock::Lock;
use crate::table::{self, Entry};
use rustix::io::{Errno, FdFlags};
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

static PROCESS: AtomicI32 = AtomicI32::new(0);

/// Threads that spawn just now: everything stays inheritable until the last is done.
static SPAWNERS: AtomicU32 = AtomicU32::new(0);
/// Held while `SPAWNERS` and what is inheritable change together.
static SPAWNERS_LOCK: Lock = Lock::new();

/// Remembers which process this memory belongs to.
pub fn note_process() {
    PROCESS.store(rustix::process::getpid().as_raw_nonzero().get(), Ordering::Relaxed);
}

/// A child of `vfork` runs in its parent's memory: what it does to descriptors must not touch the parent's table.
pub fn is_borrowed_memory() -> bool {
    PROCESS.load(Ordering::Relaxed) != rustix::process::getpid().as_raw_nonzero().get()
}

/// Notes that the program closes `fd`. `Ok(true)`: the caller closes it in the kernel now.
///
/// # Errors
/// `BADF` for a descriptor that the program does not have.
pub fn close(fd: RawFd) -> Result<(), Errno> {
    if descriptors::is_hidden(fd) {
        return Err(Errno::BADF);
    }
    if !matches!(table::get(fd), Entry::None) && !is_borrowed_memory() {
        forget(fd);
    }
    Ok(())
}

fn forget(fd: RawFd) {
    let _guard = super::pending::hold_off();
    match table::set(fd, Entry::None) {
        Entry::None => {}
        Entry::Connection(connection) => {
            interest::forget(fd, connection);
            connection.remove_descriptor(fd);
        }
        Entry::Listener(listener) => listener.forget(fd),
        Entry::Stream(stream) => {
            interest::forget_stream(fd);
            stream.forget(fd);
        }
        Entry::Interest(set) => set.remove_descriptor(fd),
    }
}

/// Notes that `new` is another descriptor of what `old` is.
pub fn duplicate(old: RawFd, new: RawFd) {
    if is_borrowed_memory() {
        inherit_into_borrower(old);
        return;
    }
    let entry = table::get(old);
    if matches!(entry, Entry::None) || !table::can_hold(new) {
        return;
    }
    match entry {
        Entry::None => return,
        Entry::Connection(connection) => connection.add_descriptor(new),
        Entry::Listener(listener) => listener.with(|inner| inner.descriptors.push(new)),
        Entry::Stream(stream) => stream.with(|inner| inner.descriptors.push(new)),
        Entry::Interest(set) => set.add_descriptor(new),
    }
    table::set(new, entry);
    set_cloexec(new);
}

/// The child of a `vfork` has made itself a descriptor to take through `exec`: what the connection needs goes with it.
/// Touches the child's own descriptors only.
fn inherit_into_borrower(fd: RawFd) {
    match table::get(fd) {
        Entry::Connection(connection) => connection.set_inheritable(true),
        Entry::Listener(listener) => listener.set_inheritable(true),
        _ => {}
    }
}

/// Runs `spawn`, which makes a child with whatever descriptors its caller arranged, while all connections can be
/// inherited.
pub fn while_inheritable<R>(spawn: impl FnOnce() -> R) -> R {
    {
        let _guard = SPAWNERS_LOCK.enter();
        SPAWNERS.fetch_add(1, Ordering::Relaxed);
        crate::connection::for_each_open(|connection| connection.set_inheritable(true));
        LISTENERS.for_each(|listener| listener.set_inheritable(true));
    }
    let result = spawn();
    let _guard = SPAWNERS_LOCK.enter();
    if SPAWNERS.fetch_sub(1, Ordering::Relaxed) == 1 {
        LISTENERS.for_each(follow_listener);
        crate::connection::for_each_open(follow_cloexec);
    }
    result
}

/// Before a fork: nobody is about to change what is inherited.
pub(super) fn before_fork() {
    SPAWNERS_LOCK.lock_until_unlocked();
}

/// After a fork, in the parent.
pub(super) fn after_fork_in_parent() {
    SPAWNERS_LOCK.unlock();
}

/// After a fork, in the child, where nobody spawns.
pub(super) fn after_fork_in_child() {
    SPAWNERS_LOCK.reset();
    SPAWNERS.store(0, Ordering::Relaxed);
    note_process();
}

/// Before `dup2(old, new)`: what `new` was is closed. Answers whether the kernel may go ahead.
///
/// # Errors
/// What moving a hidden descriptor out of the way answers.
pub fn duplicate_onto(old: RawFd, new: RawFd) -> Result<(), Errno> {
    if is_borrowed_memory() || old == new {
        return Ok(());
    }
    if descriptors::is_hidden(new) {
        descriptors::relocate(new)?;
    } else if !matches!(table::get(new), Entry::None) && is_open(old) {
        forget(new);
    }
    Ok(())
}

fn is_open(fd: RawFd) -> bool {
    // SAFETY: only asks; a closed number is answered with an error.
    fd >= 0 && rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(fd) }).is_ok()
}

/// `close_range`: closes the program's descriptors in the range, or has them closed at `exec`, and leaves ours.
///
/// # Errors
/// As `close_range(2)`.
pub fn close_range(first: u32, last: u32, flags: u32) -> Result<(), Errno> {
    if first > last || flags & !(libc::CLOSE_RANGE_CLOEXEC | libc::CLOSE_RANGE_UNSHARE) != 0 {
        return Err(Errno::INVAL);
    }
    let last_fd = RawFd::try_from(last).unwrap_or(RawFd::MAX);
    let Ok(first_fd) = RawFd::try_from(first) else { return Ok(()) };
    let closes = flags & libc::CLOSE_RANGE_CLOEXEC == 0;
    if closes && !is_borrowed_memory() {
        table::for_each(first_fd..=last_fd, |fd, _| forget(fd));
    }
    for (first, last) in descriptors::visible_ranges(first, last) {
        // SAFETY: the program asked for this to be done with these descriptors.
        if unsafe { crate::system::call!(libc::SYS_close_range, first, last, flags) } < 0 {
            return Err(crate::system::errno());
        }
    }
    if !closes {
        table::for_each(first_fd..=last_fd, |fd, _| set_cloexec(fd));
    }
    Ok(())
}

/// The close-on-exec flag of `fd` may have changed: what it needs after `exec` follows.
pub fn set_cloexec(fd: RawFd) {
    let follow = |follow: &dyn Fn()| {
        let _guard = SPAWNERS_LOCK.enter();
        follow();
    };
    match table::get(fd) {
        Entry::Connection(connection) => follow(&|| follow_cloexec(connection)),
        Entry::Listener(listener) => follow(&|| follow_listener(listener)),
        _ => {}
    }
}

fn is_anybody_spawning() -> bool {
    SPAWNERS.load(Ordering::Relaxed) > 0
}

/// Whether a descriptor stays open through `exec`.
pub(crate) fn is_inheritable(fd: RawFd) -> bool {
    // SAFETY: the program's descriptor, in a call about it.
    let flags = rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(fd) });
    flags.is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC))
}

/// A connection lives through `exec` if one of its descriptors does.
pub(super) fn follow_cloexec(connection: &'static Connection) {
    connection.set_inheritable(is_anybody_spawning() || connection.has_descriptor(is_inheritable));
}

fn follow_listener(listener: &'static Listener) {
    let inheritable = listener.with(|inner| inner.descriptors.iter().any(|&fd| is_inheritable(fd)));
    listener.set_inheritable(is_anybody_spawning() || inheritable);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::tests::pair_with_memfd;

    #[test]
    fn what_one_thread_spawns_with_is_inheritable_until_all_have_spawned() {
        let (one, _two) = pair_with_memfd();
        let is_inheritable = || is_inheritable(one.0.memory()[0]);
        assert!(!is_inheritable());
        while_inheritable(|| {
            assert!(is_inheritable());
            while_inheritable(|| assert!(is_inheritable()));
            assert!(is_inheritable(), "another thread is not done");
            follow_cloexec(one.0);
            assert!(is_inheritable(), "another thread is not done");
        });
        assert!(!is_inheritable());
    }
}
