//! `poll` with connections that have met their other end.
//!
//! The kernel's own readiness of each socket is the truth for what goes by TCP; a lane adds what it carries. A wait
//! polls the lanes in memory for a while, then asks the peers to ring and sleeps in the kernel on the sockets and the
//! bells together.

use crate::connection::{Connection, Parked};
use crate::table::{self, Entry};
use libc::{pollfd, sigset_t};
use rustix::io::Errno;
use socket::process::blocking;
use socket::process::clock::now_ns;
use socket::process::signals::{self, HandlersRun, SignalCheckpoint};
use std::os::fd::RawFd;
use wait::{Action, Spin};

const OUTPUT: i16 = libc::POLLOUT | libc::POLLWRNORM;
/// Polls of the lanes that take as long as one system call.
const POLLS_PER_CALL: u32 = 100;

/// Returns whether an entry is a connection that has met its other end.
pub fn concerns(entries: &[pollfd]) -> bool {
    entries.iter().any(|entry| matches!(table::get(entry.fd), Entry::Connection(_)))
}

/// One of the program's entries that is a connection.
struct Watched {
    /// Its index among the program's entries.
    index: usize,
    connection: &'static Connection,
    fd: RawFd,
    wanted: i16,
}

impl Watched {
    /// Returns the wanted events that the lanes have.
    fn lane_events(&self) -> i16 {
        self.connection.lane_events(self.fd, self.wanted)
    }
}

/// A call of `poll`, and the entries that the kernel is asked for in its place.
struct Call<'a> {
    entries: &'a mut [pollfd],
    watched: Vec<Watched>,
    /// The program's entries, then the bell of each watched connection.
    in_kernel: Vec<pollfd>,
}

impl<'a> Call<'a> {
    fn new(entries: &'a mut [pollfd]) -> Self {
        let watch = |(index, entry): (usize, &pollfd)| match table::get(entry.fd) {
            Entry::Connection(connection) => Some(Watched { index, connection, fd: entry.fd, wanted: entry.events }),
            _ => None,
        };
        let watched: Vec<Watched> = entries.iter().enumerate().filter_map(watch).collect();
        let in_kernel = Vec::with_capacity(entries.len() + watched.len());
        Self { entries, watched, in_kernel }
    }

    fn any_lane_is_ready(&self) -> bool {
        self.watched.iter().any(|watched| watched.lane_events() != 0)
    }

    /// Asks the kernel, and stores what it and the lanes report. Returns the number of entries with events.
    ///
    /// # Safety
    /// `mask` is null or points to a signal set.
    unsafe fn ask(&mut self, timeout_ns: Option<u64>, mask: *const sigset_t) -> Result<usize, Errno> {
        self.in_kernel.clear();
        self.in_kernel.extend(self.entries.iter().map(|entry| pollfd { revents: 0, ..*entry }));
        for watched in &self.watched {
            if watched.connection.sends_by_lane() {
                self.in_kernel[watched.index].events &= !OUTPUT;
            }
            let fd = if timeout_ns == Some(0) { -1 } else { watched.connection.bell() };
            self.in_kernel.push(pollfd { fd, events: libc::POLLIN, revents: 0 });
        }
        // SAFETY: the caller guarantees that `mask` is null or points to a signal set.
        unsafe { blocking::ppoll(&mut self.in_kernel, timeout_ns, mask) }?;
        let (of_program, of_bells) = self.in_kernel.split_at(self.entries.len());
        for (entry, found) in self.entries.iter_mut().zip(of_program) {
            entry.revents = found.revents;
        }
        for (watched, bell) in self.watched.iter().zip(of_bells) {
            if bell.revents != 0 {
                watched.connection.answer_bell(watched.fd);
            }
            let entry = &mut self.entries[watched.index];
            if entry.revents & !OUTPUT != 0 {
                watched.connection.note_kernel_event();
            }
            entry.revents |= watched.lane_events();
        }
        Ok(self.entries.iter().filter(|entry| entry.revents != 0).count())
    }
}

/// Waits until one of the entries has an event, as `ppoll(2)`; without a timeout it waits without limit. Returns the
/// number of entries with events.
///
/// # Errors
/// Those of `ppoll(2)`.
///
/// # Safety
/// `mask` is null or points to a signal set.
pub unsafe fn poll(entries: &mut [pollfd], timeout_ns: Option<u64>, mask: *const sigset_t) -> Result<usize, Errno> {
    let mut began = SignalCheckpoint::now();
    let deadline_ns = timeout_ns.map(|timeout_ns| now_ns().saturating_add(timeout_ns));
    let mut call = Call::new(entries);
    // SAFETY: the caller guarantees that `mask` is null or points to a signal set.
    let ready = unsafe { call.ask(Some(0), std::ptr::null()) }?;
    if ready > 0 || timeout_ns == Some(0) {
        // SAFETY: the caller guarantees that `mask` is null or points to a signal set.
        return unsafe { blocking::deliver_signals(mask) }.map(|()| ready).or(if ready > 0 {
            Ok(ready)
        } else {
            Err(Errno::INTR)
        });
    }
    // SAFETY: the caller guarantees that `mask` is null or points to a signal set.
    let _masked = unsafe { signals::mask_while_polling(mask, &mut began) };
    match spin(&mut call, began, deadline_ns)? {
        Some(ready) => Ok(ready),
        // SAFETY: the caller guarantees that `mask` is null or points to a signal set.
        None => unsafe { sleep(&mut call, began, deadline_ns, mask) },
    }
}

/// Polls the lanes, and the kernel from time to time. Returns `None` when it is time to sleep.
fn spin(call: &mut Call, began: SignalCheckpoint, deadline_ns: Option<u64>) -> Result<Option<usize>, Errno> {
    let mut spin = Spin::new();
    loop {
        if call.any_lane_is_ready() {
            // SAFETY: the mask is null.
            let ready = unsafe { call.ask(Some(0), std::ptr::null()) }?;
            if ready > 0 {
                return Ok(Some(ready));
            }
        }
        match spin.iterate_by(1 + call.watched.len() as u32) {
            Action::Poll => {}
            Action::PollKernel => {
                if began.since() != HandlersRun::None {
                    return Err(Errno::INTR);
                }
                // SAFETY: the mask is null.
                let ready = unsafe { call.ask(Some(0), std::ptr::null()) }?;
                if ready > 0 || deadline_ns.is_some_and(|deadline_ns| now_ns() >= deadline_ns) {
                    return Ok(Some(ready));
                }
                let _ = spin.iterate_by(POLLS_PER_CALL);
            }
            Action::Block => return Ok(None),
        }
    }
}

/// Asks the peers to ring, polls once more, and sleeps in the kernel.
///
/// # Safety
/// `mask` is null or points to a signal set.
unsafe fn sleep(
    call: &mut Call,
    began: SignalCheckpoint,
    deadline_ns: Option<u64>,
    mask: *const sigset_t,
) -> Result<usize, Errno> {
    loop {
        let parked: Vec<Parked> = call.watched.iter().map(|watched| watched.connection.park(watched.wanted)).collect();
        let is_ready = call.any_lane_is_ready();
        if began.since() != HandlersRun::None {
            return Err(Errno::INTR);
        }
        let left_ns = deadline_ns.map(|deadline_ns| deadline_ns.saturating_sub(now_ns()));
        // SAFETY: the caller guarantees that `mask` is null or points to a signal set.
        let ready = unsafe { call.ask(if is_ready { Some(0) } else { left_ns }, mask) };
        drop(parked);
        match ready? {
            0 if left_ns != Some(0) => {}
            ready => return Ok(ready),
        }
    }
}
