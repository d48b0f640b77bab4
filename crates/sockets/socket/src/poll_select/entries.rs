//! The entries of a call: the object behind each one, and the kernel's results for it.

use crate::connection::Connection;
use crate::entry::{self, Entry};
use crate::epoll::{EpollSet, SleepGuard};
use crate::lifecycle;
use crate::listener::Listener;
use crate::process::blocking;
use libc::{POLLERR, POLLHUP, POLLIN, POLLRDNORM, pollfd};
use std::os::fd::RawFd;

/// Calls with at most this many entries allocate nothing, so that signal handlers may make them.
const STACK_ENTRIES: usize = 32;

pub(super) const FOR_INPUT: i16 = POLLIN | POLLRDNORM;

pub(super) const NOTHING: pollfd = pollfd { fd: -1, events: 0, revents: 0 };

pub(super) fn is_ours(fd: RawFd) -> bool {
    match entry::get(fd) {
        Entry::Connection(_) | Entry::Listener(_) => true,
        Entry::EpollSet(set) => set.has_lanes(),
        Entry::Stream(_) => is_connect_pending(fd),
        Entry::Confined(_) | Entry::None => false,
    }
}

pub(super) fn is_connect_pending(fd: RawFd) -> bool {
    matches!(entry::get(fd), Entry::Stream(stream) if lifecycle::is_pending(stream))
}

/// The object behind an entry, which decides where its result comes from.
#[derive(Clone, Copy)]
pub(super) enum Target {
    Foreign,
    Connection(&'static Connection),
    Listener(&'static Listener),
    EpollSet(&'static EpollSet),
}

impl Target {
    pub(super) fn of(fd: RawFd) -> Self {
        match entry::get(fd) {
            Entry::Connection(connection) => Self::Connection(connection),
            Entry::Listener(listener) => Self::Listener(listener),
            Entry::EpollSet(set) if set.has_lanes() => Self::EpollSet(set),
            _ => Self::Foreign,
        }
    }
}

/// A list that is on the stack while it is short.
pub(super) struct StackList<T> {
    short: [T; STACK_ENTRIES],
    len: usize,
    long: Vec<T>,
}

impl<T: Copy> StackList<T> {
    pub(super) fn new(filler: T) -> Self {
        Self { short: [filler; STACK_ENTRIES], len: 0, long: Vec::new() }
    }

    pub(super) fn push(&mut self, entry: T) {
        if self.len < STACK_ENTRIES {
            self.short[self.len] = entry;
        } else {
            if self.len == STACK_ENTRIES {
                self.long.extend_from_slice(&self.short);
            }
            self.long.push(entry);
        }
        self.len += 1;
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [T] {
        if self.len > STACK_ENTRIES { &mut self.long } else { &mut self.short[..self.len] }
    }
}

pub(super) type Entries = StackList<pollfd>;

/// Returns the entries of the kernel's call: one for every entry of the program, and behind them one for every lane
/// listener. It adds no others, because the kernel bounds their number by the descriptor limit.
pub(super) fn kernel_entries(fds: &[pollfd], sleeps: bool) -> Entries {
    let on = |fd, events| pollfd { fd, events, revents: 0 };
    let mut entries = Entries::new(NOTHING);
    for entry in fds {
        entries.push(match Target::of(entry.fd) {
            Target::Foreign | Target::Listener(_) => on(entry.fd, entry.events),
            Target::Connection(_) | Target::EpollSet(_) if sleeps => on(entry.fd, POLLIN),
            Target::Connection(_) | Target::EpollSet(_) => NOTHING,
        });
    }
    for entry in fds {
        if let Target::Listener(listener) = Target::of(entry.fd) {
            let lane_fd = listener.watched_fd();
            if !entries.as_mut_slice()[fds.len()..].iter().any(|lane| lane.fd == lane_fd) {
                entries.push(on(lane_fd, POLLIN));
            }
        }
    }
    entries
}

/// Returns whether the kernel's result must not be shown to the program, because a connect is pending and another
/// thread may be replacing the socket. Only a failure of TCP counts, and not while a kernel TCP connect is being
/// started.
pub(super) fn is_still_connecting(result: &pollfd) -> bool {
    let Entry::Stream(stream) = entry::get(result.fd) else { return false };
    lifecycle::is_pending(stream) && (result.revents & POLLERR == 0 || lifecycle::is_advancing(stream))
}

/// Returns the kernel's result for a descriptor that the library does not serve. Polls again if the result may belong
/// to a socket that was falling back to kernel TCP.
pub(super) fn settled_result(result: &pollfd) -> i16 {
    let may_be_past = result.revents & (POLLERR | POLLHUP) != 0 && matches!(entry::get(result.fd), Entry::Stream(_));
    if may_be_past { blocking::poll_now(result.fd, result.events) } else { result.revents }
}

/// Stores the kernel's results for listeners and for descriptors that the library does not serve.
pub(super) fn store_kernel_results(fds: &mut [pollfd], entries: &[pollfd]) {
    let (results, lanes) = entries.split_at(fds.len());
    for (entry, result) in fds.iter_mut().zip(results) {
        match Target::of(entry.fd) {
            Target::Foreign if is_still_connecting(result) => entry.revents = 0,
            Target::Foreign => entry.revents = settled_result(result),
            Target::Listener(listener) => {
                let lane_fd = listener.watched_fd();
                let has_lane = lanes.iter().any(|lane| lane.fd == lane_fd && lane.revents & POLLIN != 0)
                    && listener.has_lane_client();
                entry.revents = result.revents | if has_lane { entry.events & FOR_INPUT } else { 0 };
            }
            Target::Connection(_) | Target::EpollSet(_) => {}
        }
    }
}

/// Consumes wakeups. Returns `false` if the kernel would report the same events again at once: because a lifeline stays
/// readable, as other processes must find the wakeup or the peer has hung up, or because a descriptor has events that
/// the call does not request.
pub(super) fn take_wakeups(fds: &[pollfd], entries: &[pollfd]) -> bool {
    let mut can_sleep_again = true;
    for (entry, result) in fds.iter().zip(entries) {
        can_sleep_again &= entry.revents == 0;
        if let Target::Connection(connection) = Target::of(entry.fd)
            && result.revents != 0
        {
            let is_taken = connection.consume_ring();
            let stays_readable =
                connection.has_ended() || blocking::poll_now(entry.fd, libc::POLLRDHUP) & libc::POLLRDHUP != 0;
            can_sleep_again &= is_taken && !stays_readable;
        }
    }
    can_sleep_again
}

/// The connections and sets of a call while a thread sleeps on them.
pub(super) struct Parked {
    connections: StackList<Option<&'static Connection>>,
    /// Nothing wakes the thread for a connection in one of the sets.
    pub(super) has_unwakeable: bool,
    _sleep: SleepGuard,
}

impl Parked {
    pub(super) fn park(fds: &[pollfd]) -> Self {
        let mut connections = StackList::new(None);
        let mut has_unwakeable = false;
        let (sleep, ()) = SleepGuard::begin(|asleep| {
            for entry in fds {
                match Target::of(entry.fd) {
                    Target::Connection(connection) => {
                        connection.park(entry.events);
                        connections.push(Some(connection));
                    }
                    Target::EpollSet(set) => has_unwakeable |= set.add_sleeper(asleep),
                    Target::Foreign | Target::Listener(_) => {}
                }
            }
        });
        Self { connections, has_unwakeable, _sleep: sleep }
    }
}

impl Drop for Parked {
    fn drop(&mut self) {
        self.connections.as_mut_slice().iter().flatten().for_each(|connection| connection.unpark());
    }
}
