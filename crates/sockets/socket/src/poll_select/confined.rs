//! `poll(2)` in a process that has installed a system call filter.

use crate::connection::Connection;
use crate::entry::{self, Entry};
use crate::process::clock::now_ns;
use crate::process::system;
use libc::pollfd;
use rustix::io::Errno;
use std::os::fd::RawFd;

/// Number of connections on lanes that one call polls; for further ones it reports what the kernel reports.
const POLLED_MAX: usize = 32;

/// Time between two polls for room to send, which no wakeup may announce.
const ROOM_POLL_MS: i32 = 2;

/// A connection of a call, and the events requested of it.
#[derive(Clone, Copy)]
struct Polled {
    index: u32,
    events: i16,
    connection: &'static Connection,
}

/// The connections of a call of which at least one direction uses a lane.
struct PolledSet {
    entries: [Option<Polled>; POLLED_MAX],
}

impl PolledSet {
    fn of(fds: &[pollfd]) -> Self {
        let mut entries = [None; POLLED_MAX];
        let by_lane = fds.iter().enumerate().filter_map(|(index, entry)| match entry::get(entry.fd) {
            Entry::Confined(connection) if connection.is_polled_by_lane() => {
                Some(Polled { index: index as u32, events: entry.events, connection })
            }
            _ => None,
        });
        entries.iter_mut().zip(by_lane).for_each(|(place, polled)| *place = Some(polled));
        Self { entries }
    }

    fn iter(&self) -> impl Iterator<Item = &Polled> {
        self.entries.iter().flatten()
    }

    fn is_any_ready(&self) -> bool {
        self.iter().any(|polled| polled.connection.confined_readiness(polled.events) != 0)
    }

    /// Requests wakeups from the peers, and reduces the events requested of the kernel to wakeups where a lane has the
    /// bytes.
    fn announce(&self, fds: &mut [pollfd]) {
        for &Polled { index, events, connection } in self.iter() {
            fds[index as usize].events = connection.prepare_confined_poll(events);
        }
    }

    fn waits_for_room(&self) -> bool {
        self.iter().any(|polled| polled.connection.waits_for_lane_room(polled.events))
    }

    /// Restores the program's requested events, and stores the results.
    fn store_results(&self, fds: &mut [pollfd], read_wakeups: impl Fn(RawFd, *mut u8, usize) -> isize) {
        for &Polled { index, events, connection } in self.iter() {
            let entry = &mut fds[index as usize];
            let fd = entry.fd;
            entry.events = events;
            entry.revents =
                connection.confined_revents(entry.revents, events, |bytes, len| read_wakeups(fd, bytes, len));
        }
    }
}

/// `poll(2)` of a process under a filter: `call` makes the program's system call with the given time-out in
/// nanoseconds. Wakeups are consumed with `read`: a process that waits for bytes but may not read has no use for them.
///
/// # Errors
/// As the system call.
#[inline(never)] // Its variables are not to add to the caller's on a small stack.
pub fn poll_entries_confined(
    fds: &mut [pollfd],
    timeout_ns: Option<u64>,
    call: impl Fn(&mut [pollfd], Option<u64>) -> Result<usize, Errno>,
) -> Result<usize, Errno> {
    // SAFETY: `bytes` points to `len` writable bytes of a buffer of `Connection::confined_revents`.
    let read_wakeups = |fd: RawFd, bytes: *mut u8, len: usize| unsafe {
        system::call_kernel(libc::SYS_read, [fd as usize, bytes as usize, len])
    };
    let set = PolledSet::of(fds);
    let deadline_ns = timeout_ns.map(|timeout_ns| now_ns().saturating_add(timeout_ns));
    loop {
        let mut left_ns = deadline_ns.map(|deadline_ns| deadline_ns.saturating_sub(now_ns()));
        let is_last = left_ns == Some(0);
        if set.iter().next().is_none() {
            let polled = call(fds, timeout_ns)?;
            fds.iter_mut().for_each(translate_to_tcp);
            return Ok(polled);
        }
        if !is_last && !set.is_any_ready() {
            set.announce(fds);
        }
        if set.is_any_ready() {
            left_ns = Some(0);
        } else if set.waits_for_room() {
            const ROOM_POLL_NS: u64 = ROOM_POLL_MS as u64 * 1_000_000;
            left_ns = Some(left_ns.map_or(ROOM_POLL_NS, |left_ns| left_ns.min(ROOM_POLL_NS)));
        }
        let polled = call(fds, left_ns);
        set.store_results(fds, read_wakeups);
        polled?;
        fds.iter_mut().for_each(translate_to_tcp);
        let ready = fds.iter().filter(|entry| entry.fd >= 0 && entry.revents != 0).count();
        if ready > 0 || is_last {
            return Ok(ready);
        }
    }
}

fn translate_to_tcp(entry: &mut pollfd) {
    if let Entry::Confined(connection) = entry::get(entry.fd) {
        entry.revents = connection.to_tcp_events(entry.revents, entry.events);
    }
}
