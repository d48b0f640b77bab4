//! `dup`, `close` and similar calls: the library's records follow what the kernel does.

use crate::connection::{self, Connection};
use crate::descriptor::hidden;
use crate::entry::{self, Entry};
use crate::epoll;
use crate::listener;
use crate::listener::{LISTENERS, Listener};
use crate::process::lock::Lock;
use crate::process::locked::Locked;
use crate::process::system::is_inheritable;
use crate::process::{background_connects, identity};
use rustix::io::Errno;
use std::os::fd::{BorrowedFd, RawFd};

/// Held while the inheritance of descriptors changes, and by a thread that starts a program until it runs: what the
/// program inherits depends on whether it loads this library.
static SPAWN_LOCK: Lock = Lock::new();
/// The descriptors of connections that file actions of `posix_spawn` duplicate: the address of the actions, and the
/// number.
static DUPLICATED: Locked<Vec<(usize, RawFd)>> = Locked::new(Vec::new());

/// Records that the program closes `fd`, which the caller then closes in the kernel.
///
/// # Errors
/// `BADF` for a descriptor that the program does not have.
pub fn close(fd: RawFd) -> Result<(), Errno> {
    if hidden::is_hidden(fd) {
        return Err(Errno::BADF);
    }
    if !matches!(entry::get(fd), Entry::None) && !identity::is_borrowed_memory() {
        forget(fd);
    }
    Ok(())
}

fn forget(fd: RawFd) {
    let _guard = background_connects::hold_off();
    match entry::set(fd, Entry::None) {
        Entry::None => {}
        Entry::Connection(connection) => {
            epoll::forget(fd, connection);
            connection.remove_descriptor(fd);
        }
        Entry::Confined(connection) => connection.close_confined(fd),
        Entry::Listener(listener) => listener.remove_descriptor(fd),
        Entry::Stream(stream) => {
            epoll::forget_stream(fd);
            stream.remove_descriptor(fd);
        }
        Entry::EpollSet(set) => set.remove_descriptor(fd),
    }
}

/// Records that `new` is another descriptor of the file of `old`.
pub fn duplicate(old: RawFd, new: RawFd) {
    if identity::is_borrowed_memory() {
        inherit_into_borrower(old);
        return;
    }
    let entry = entry::get(old);
    if matches!(entry, Entry::None) || !entry::can_hold(new) {
        return;
    }
    match entry {
        Entry::None => return,
        Entry::Connection(connection) => connection.add_descriptor(new),
        Entry::Confined(connection) => {
            connection.add_descriptor(new);
            entry::set(new, entry);
            return;
        }
        Entry::Listener(listener) => listener.with(|inner| inner.descriptors.push(new)),
        Entry::Stream(stream) => stream.with(|inner| inner.descriptors.push(new)),
        Entry::EpollSet(set) => set.add_descriptor(new),
    }
    entry::set(new, entry);
    set_cloexec(new);
}

/// Makes the memory of a connection inheritable for a child of `vfork` that has duplicated its descriptor for `exec`.
/// Changes only the child's descriptors.
fn inherit_into_borrower(fd: RawFd) {
    match entry::get(fd) {
        Entry::Connection(connection) => connection.set_inheritable(true),
        Entry::Listener(listener) => listener.set_inheritable(true),
        _ => {}
    }
}

/// Records that file actions duplicate `fd` for the program that they start.
pub fn note_spawn_duplicate(actions: usize, fd: RawFd) {
    if matches!(entry::get(fd), Entry::Connection(_) | Entry::Listener(_)) && !identity::is_borrowed_memory() {
        DUPLICATED.with_unless_held(|entries| entries.push((actions, fd)));
    }
}

/// Records that file actions are created or destroyed.
pub fn forget_spawn_actions(actions: usize) {
    DUPLICATED.with_unless_held(|entries| entries.retain(|(at, _)| *at != actions));
}

/// Runs `spawn`, which starts a program with the descriptors that its file actions produce. If the program loads this
/// library, it also inherits the hidden descriptors that belong to them.
pub fn while_spawning<R>(actions: usize, loads_library: impl FnOnce() -> Option<bool>, spawn: impl FnOnce() -> R) -> R {
    if identity::is_borrowed_memory() {
        return spawn();
    }
    let duplicated = DUPLICATED.with_unless_held(|entries| {
        entries.iter().filter(|(at, _)| *at == actions).map(|(_, fd)| entry::get(*fd)).collect::<Vec<_>>()
    });
    let duplicated = duplicated.unwrap_or_default();
    let has_listeners = LISTENERS.any(Listener::is_listening);
    if duplicated.is_empty() && !has_listeners {
        return spawn();
    }
    let loads_library = loads_library() == Some(true);
    let _guard = SPAWN_LOCK.lock_unless_held();
    let set_all = |inheritable| {
        for entry in &duplicated {
            match *entry {
                Entry::Connection(connection) if inheritable => {
                    connection.keep_options_through_exec(|_| true);
                    connection.set_inheritable(true);
                }
                Entry::Connection(connection) => follow_cloexec(connection),
                Entry::Listener(listener) => listener.set_inheritable(inheritable),
                _ => {}
            }
        }
    };
    if loads_library {
        set_all(true);
        set_listeners_inheritable(true);
    }
    let result = spawn();
    if loads_library {
        set_all(false);
        set_listeners_inheritable(false);
    }
    result
}

/// Before `exec` and similar calls, stores the options of connections where the program that follows finds them.
pub fn keep_options_through_exec() {
    if !identity::is_borrowed_memory() {
        connection::for_each_open(|connection| connection.keep_options_through_exec(is_inheritable));
    }
}

/// Runs `exec`, which returns only if it fails. A program that loads this library inherits the hidden descriptors of
/// the listeners together with the program's own; no other program could accept the clients that connect there.
/// Connections that this process holds are released to the processes that share the listener.
pub fn while_executing<R>(loads_library: impl FnOnce() -> Option<bool>, exec: impl FnOnce() -> R) -> R {
    keep_options_through_exec();
    let loads_library = if LISTENERS.any(Listener::is_listening) { loads_library() } else { None };
    let Some(loads_library) = loads_library else { return exec() };
    set_listeners_inheritable(loads_library);
    if identity::is_borrowed_memory() {
        // A child of `vfork`, which has descriptors of its own, keeps what it has duplicated for the next attempt.
        return exec();
    }
    for_each_listening(listener::share_before_exec);
    let result = exec();
    for_each_listening(listener::resume_after_exec);
    set_listeners_inheritable(false);
    result
}

fn for_each_listening(work: impl Fn(&'static Listener)) {
    LISTENERS.for_each(|listener| {
        if listener.is_listening() {
            work(listener);
        }
    });
}

/// Makes the listeners with a descriptor that stays open through `exec` inheritable, or none.
fn set_listeners_inheritable(inheritable: bool) {
    for_each_listening(|listener| {
        if !inheritable {
            listener.set_inheritable(false);
        } else if listener.with_descriptors(|own| own.iter().any(|&fd| is_inheritable(fd))) {
            listener.set_inheritable(true);
        }
    });
}

/// Before a fork, acquires the locks, so that no thread is changing what is inherited.
pub(super) fn before_fork() {
    SPAWN_LOCK.lock_without_guard();
    DUPLICATED.lock().lock_without_guard();
}

/// After a fork, in the parent.
pub(super) fn after_fork_in_parent() {
    DUPLICATED.lock().unlock();
    SPAWN_LOCK.unlock();
}

/// After a fork, in the child.
pub(super) fn after_fork_in_child() {
    DUPLICATED.lock().reset();
    SPAWN_LOCK.reset();
    identity::note_process();
}

/// Before `dup2(old, new)`, records that `new` is closed.
///
/// # Errors
/// Those of moving a hidden descriptor away from `new`.
pub fn duplicate_onto(old: RawFd, new: RawFd) -> Result<(), Errno> {
    if identity::is_borrowed_memory() || old == new {
        return Ok(());
    }
    if hidden::is_hidden(new) {
        hidden::relocate(new)?;
    } else if !matches!(entry::get(new), Entry::None) && is_open(old) {
        forget(new);
    }
    Ok(())
}

fn is_open(fd: RawFd) -> bool {
    // SAFETY: the descriptor is only queried; the kernel answers a closed number with an error.
    fd >= 0 && rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(fd) }).is_ok()
}

/// `close_range(2)`: closes the program's descriptors in the range, or sets their close-on-exec flag, and leaves those
/// of the library.
///
/// # Errors
/// Those of `close_range(2)`.
pub fn close_range(first: u32, last: u32, flags: u32) -> Result<(), Errno> {
    if first > last || flags & !(libc::CLOSE_RANGE_CLOEXEC | libc::CLOSE_RANGE_UNSHARE) != 0 {
        return Err(Errno::INVAL);
    }
    let last_fd = RawFd::try_from(last).unwrap_or(RawFd::MAX);
    let Ok(first_fd) = RawFd::try_from(first) else { return Ok(()) };
    let closes = flags & libc::CLOSE_RANGE_CLOEXEC == 0;
    if closes && !identity::is_borrowed_memory() {
        entry::for_each(first_fd..=last_fd, |fd, _| forget(fd));
    }
    for (first, last) in hidden::visible_ranges(first, last) {
        // SAFETY: the program has asked to close these descriptors, and none of them is hidden.
        let closed = unsafe { crate::process::system::call!(libc::SYS_close_range, first, last, flags) };
        crate::process::system::unit_or_error(closed)?;
    }
    if !closes {
        entry::for_each(first_fd..=last_fd, |fd, _| set_cloexec(fd));
    }
    Ok(())
}

/// Updates the inheritance of the memory of `fd`, whose close-on-exec flag may have changed.
pub fn set_cloexec(fd: RawFd) {
    if let Entry::Connection(connection) = entry::get(fd) {
        let _guard = SPAWN_LOCK.lock_unless_held();
        follow_cloexec(connection);
    }
}

/// Makes the memory of a connection inheritable exactly if one of its descriptors stays open through `exec`.
pub(super) fn follow_cloexec(connection: &'static Connection) {
    connection.set_inheritable(connection.has_descriptor(is_inheritable));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::tests::pair_with_memfd;

    #[test]
    fn file_actions_pass_the_memory_of_duplicated_connections_to_a_program_that_loads_the_library() {
        /// Clears the entry: the table must not describe a later descriptor of this number.
        struct Entered(RawFd);

        impl Drop for Entered {
            fn drop(&mut self) {
                entry::set(self.0, Entry::None);
            }
        }

        let _no_child = test_support::spawn::forbid();
        identity::note_process();
        let ((one, _two), (other, _)) = (pair_with_memfd(), pair_with_memfd());
        let are_inheritable = || [&one, &other].map(|end| is_inheritable(end.0.memory()[0]));
        let [actions, others] = [1000, 2000];
        let fd = one.0.with_descriptors(|own| own[0]);
        entry::set(fd, Entry::Connection(one.0));
        let _entered = Entered(fd);
        note_spawn_duplicate(actions, fd);
        let spawn = |actions, loads| while_spawning(actions, || loads, are_inheritable);
        assert_eq!(spawn(actions, Some(true)), [true, false]);
        assert_eq!(are_inheritable(), [false, false]);
        assert_eq!(
            spawn(actions, Some(false)),
            [false, false],
            "without the library, the program could not use the memory"
        );
        assert_eq!(spawn(others, Some(true)), [false, false]);
        forget_spawn_actions(actions);
        assert_eq!(spawn(actions, Some(true)), [false, false]);
    }
}
