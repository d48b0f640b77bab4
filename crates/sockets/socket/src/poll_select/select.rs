//! `select(2)` over lanes.

use super::call::{Deadline, poll_lanes};
use super::confined::poll_entries_confined;
use super::entries::{Entries, NOTHING, is_ours};
use crate::descriptor::hidden;
use crate::entry::{self, Entry};
use crate::process::{blocking, memory, sandbox};
use libc::{POLLIN, POLLOUT, POLLPRI, POLLRDBAND, POLLRDNORM, POLLWRBAND, POLLWRNORM, fd_set, pollfd, sigset_t};
use rustix::io::Errno;
use std::os::fd::RawFd;

const FOR_READING: i16 = POLLIN | POLLRDNORM | POLLRDBAND;
const FOR_WRITING: i16 = POLLOUT | POLLWRNORM | POLLWRBAND;
/// Events that make a descriptor readable or writable for `select`, as in the kernel.
const READABLE: i16 = FOR_READING | libc::POLLHUP | libc::POLLERR;
const WRITABLE: i16 = FOR_WRITING | libc::POLLERR;

pub(super) const WORD_BITS: usize = libc::c_ulong::BITS as usize;

/// `pselect(2)`; without a time-out, waits without limit. Also returns how much of the time-out is left, if there is
/// one.
///
/// # Safety
/// Each set is null or has a bit for every number below `count`; `mask` is null or points to a signal set.
pub unsafe fn select(
    count: i32,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout_ns: Option<u64>,
    mask: *const sigset_t,
) -> (Result<usize, Errno>, Option<u64>) {
    let mut deadline = Deadline::new(timeout_ns);
    if timeout_ns.is_some() {
        deadline.start();
    }
    let sets = [read, write, except];
    let count = clamped_count(count);
    let numbers = usize::try_from(count).unwrap_or(0);
    let is_bad = |set: &*mut fd_set| {
        !set.is_null() && !memory::are_writable(set.cast::<libc::c_ulong>(), numbers.div_ceil(WORD_BITS))
    };
    if sets.iter().any(is_bad) {
        return (Err(Errno::FAULT), None);
    }
    // SAFETY: each set is null or has a bit for every number below `count`, which `clamped_count` only lowers.
    let names_ours = (0..numbers).any(|fd| {
        let is_ours = || is_ours(fd as RawFd) || matches!(entry::get(fd as RawFd), Entry::Confined(_));
        // SAFETY: `fd` is below `numbers`, and each set is null or has a bit for every number below that.
        unsafe { Bitmaps(sets).events(fd) != 0 && is_ours() }
    });
    let result = if names_ours {
        // SAFETY: each set is null or has a bit for every number below `numbers`; `mask` is null or points to a signal
        // set.
        unsafe { select_lanes(numbers, Bitmaps(sets), &mut deadline, mask) }
    } else {
        // SAFETY: sets and mask are valid by the contract of this function, and `count` was only lowered.
        unsafe { blocking::pselect(count, sets, timeout_ns, mask) }
    };
    (result, deadline.left_ns())
}

/// Returns the count of a `select` without the numbers above the program's highest open descriptor. Programs pass their
/// descriptor limit as the count together with sets that are only as large as their descriptors need, because the
/// kernel reads no more than its descriptor table has room for, and hidden descriptors enlarge that table.
fn clamped_count(count: i32) -> i32 {
    if count <= libc::FD_SETSIZE as i32 { count } else { hidden::visible_end(count).unwrap_or(count) }
}

unsafe fn select_lanes(
    numbers: usize,
    sets: Bitmaps,
    deadline: &mut Deadline,
    mask: *const sigset_t,
) -> Result<usize, Errno> {
    let mut entries = Entries::new(NOTHING);
    for fd in 0..numbers {
        // SAFETY: `fd` is below `numbers`, and `select` checked that each set is null or has a bit for it.
        let events = unsafe { sets.events(fd) };
        if events != 0 {
            entries.push(pollfd { fd: fd as RawFd, events, revents: 0 });
        }
    }
    let entries = entries.as_mut_slice();
    if sandbox::is_confined() && !entries.iter().any(|entry| is_ours(entry.fd)) {
        let left_ns = deadline.left_ns();
        // SAFETY: `mask` is null or points to a signal set, as `select` received it.
        poll_entries_confined(entries, left_ns, |entries, left_ns| unsafe { select_entries(entries, left_ns, mask) })?;
    } else {
        // SAFETY: `mask` is null or points to a signal set, as `select` received it.
        unsafe { poll_lanes(entries, is_selected, deadline, mask) }?;
    }
    if entries.iter().any(|entry| entry.revents & libc::POLLNVAL != 0) {
        return Err(Errno::BADF);
    }
    // SAFETY: the number of each entry is below `numbers`, so that each set is null or has a bit for it.
    Ok(entries.iter().map(|entry| unsafe { sets.report(entry) }).sum())
}

/// As `poll` of the entries, with the system call that `select` makes.
#[inline(never)] // Its variables are not to add to the caller's on a small stack.
unsafe fn select_entries(
    entries: &mut [pollfd],
    timeout_ns: Option<u64>,
    mask: *const sigset_t,
) -> Result<usize, Errno> {
    // SAFETY: an `fd_set` is an array of integers, for which zeros are valid: an empty set.
    let mut sets: [fd_set; 3] = unsafe { std::mem::zeroed() };
    let is_within = |fd: RawFd| (0..libc::FD_SETSIZE as RawFd).contains(&fd);
    for entry in entries.iter().filter(|entry| is_within(entry.fd)) {
        for (set, requested) in sets.iter_mut().zip(Bitmaps::REQUESTED) {
            if entry.events & requested != 0 {
                // SAFETY: the number is below `FD_SETSIZE`, the number of bits of the set.
                unsafe { libc::FD_SET(entry.fd, set) };
            }
        }
    }
    let count = entries.iter().map(|entry| entry.fd + 1).max().unwrap_or(0).min(libc::FD_SETSIZE as i32);
    // SAFETY: `count` is at most `FD_SETSIZE`, the number of bits of the sets; `mask` is null or points to a signal
    // set.
    let selected = unsafe { blocking::pselect(count, sets.each_mut().map(std::ptr::from_mut), timeout_ns, mask) }?;
    for entry in entries {
        let found = sets.iter().zip([libc::POLLIN, libc::POLLOUT, POLLPRI]);
        // SAFETY: the number is below `FD_SETSIZE`, the number of bits of the set.
        let is_set = |set| is_within(entry.fd) && unsafe { libc::FD_ISSET(entry.fd, set) };
        entry.revents = found.filter(|(set, _)| is_set(*set)).fold(0, |found, (_, event)| found | event);
    }
    Ok(selected)
}

/// The three sets of `select`, each null or with a bit for every descriptor of the call, however high its number.
#[derive(Clone, Copy)]
struct Bitmaps([*mut fd_set; 3]);

impl Bitmaps {
    const REQUESTED: [i16; 3] = [FOR_READING, FOR_WRITING, POLLPRI];
    const REPORTED: [i16; 3] = [READABLE, WRITABLE, POLLPRI];

    unsafe fn events(self, fd: usize) -> i16 {
        let Self(sets) = self;
        sets.into_iter().zip(Self::REQUESTED).fold(0, |events, (set, requested)| {
            // SAFETY: the set is not null, so that it has a bit for the number.
            let is_set = !set.is_null()
                && unsafe { set.cast::<libc::c_ulong>().add(fd / WORD_BITS).read() } >> (fd % WORD_BITS) & 1 != 0;
            if is_set { events | requested } else { events }
        })
    }

    /// Keeps the bits of ready descriptors and clears the others; returns how many it keeps.
    unsafe fn report(self, entry: &pollfd) -> usize {
        let Self(sets) = self;
        let fd = entry.fd as usize;
        let mut count = 0;
        for ((set, requested), reported) in sets.into_iter().zip(Self::REQUESTED).zip(Self::REPORTED) {
            if set.is_null() {
                continue;
            }
            // SAFETY: the set is not null, so that it has a bit for the number; this thread has the only reference to
            // it.
            let word = unsafe { &mut *set.cast::<libc::c_ulong>().add(fd / WORD_BITS) };
            let bit = 1 << (fd % WORD_BITS);
            if *word & bit != 0 && entry.events & requested != 0 && entry.revents & reported != 0 {
                count += 1;
            } else {
                *word &= !bit;
            }
        }
        count
    }
}

/// Returns whether an entry is ready by the rules of the kernel's `select`: a hang-up makes a descriptor readable, but
/// not writable.
fn is_selected(entry: &pollfd) -> bool {
    let accepted = Bitmaps::REQUESTED.into_iter().zip(Bitmaps::REPORTED).fold(
        libc::POLLNVAL,
        |accepted, (requested, reported)| {
            if entry.events & requested != 0 { accepted | reported } else { accepted }
        },
    );
    entry.revents & accepted != 0
}
