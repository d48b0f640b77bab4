//! `dup`, `close` and their kin, kept in step with what the kernel does.

use super::{LISTENERS, Listener, ListenerInner, STREAMS, Stream, StreamInner};
use crate::connection::Connection;
use crate::descriptors;
use crate::interest;
use crate::table::{self, Entry};
use rustix::io::{Errno, FdFlags};
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

static PROCESS: AtomicI32 = AtomicI32::new(0);

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
    match table::set(fd, Entry::None) {
        Entry::None => {}
        Entry::Connection(connection) => {
            interest::forget(fd, connection);
            connection.remove_descriptor(fd);
        }
        Entry::Listener(listener) => forget_listener(fd, listener),
        Entry::Stream(stream) => {
            interest::forget_stream(fd);
            forget_stream(fd, stream);
        }
        Entry::Interest(set) => set.remove_descriptor(fd),
    }
}

fn forget_listener(fd: RawFd, listener: &'static Listener) {
    interest::forget_listener(fd, listener);
    let last = listener.with(|inner| {
        inner.descriptors.retain(|&known| known != fd);
        inner.descriptors.is_empty().then(|| std::mem::take::<ListenerInner>(inner))
    });
    if last.is_some() {
        drop(last);
        LISTENERS.give_back(listener);
    }
}

fn forget_stream(fd: RawFd, stream: &'static Stream) {
    let last = stream.with(|inner| {
        inner.descriptors.retain(|&known| known != fd);
        inner.descriptors.is_empty().then(|| std::mem::take::<StreamInner>(inner))
    });
    if last.is_some() {
        drop(last);
        STREAMS.give_back(stream);
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
    crate::connection::for_each_open(|connection| connection.set_inheritable(true));
    LISTENERS.for_each(|listener| listener.set_inheritable(true));
    let result = spawn();
    LISTENERS.for_each(follow_listener);
    crate::connection::for_each_open(follow_cloexec);
    result
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
    match table::get(fd) {
        Entry::Connection(connection) => follow_cloexec(connection),
        Entry::Listener(listener) => follow_listener(listener),
        _ => {}
    }
}

/// Whether a descriptor stays open through `exec`.
pub(crate) fn is_inheritable(fd: RawFd) -> bool {
    // SAFETY: the program's descriptor, in a call about it.
    let flags = rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(fd) });
    flags.is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC))
}

/// A connection lives through `exec` if one of its descriptors does.
pub(super) fn follow_cloexec(connection: &Connection) {
    connection.set_inheritable(connection.has_descriptor(is_inheritable));
}

fn follow_listener(listener: &Listener) {
    let inheritable = listener.with(|inner| inner.descriptors.iter().any(|&fd| is_inheritable(fd)));
    listener.set_inheritable(inheritable);
}
