//! `select` with connections that have met their other end.

use crate::poll::{Entries, NO_ENTRY, concerns, poll_until};
use libc::{POLLERR, POLLHUP, POLLIN, POLLOUT, POLLPRI, POLLRDBAND, POLLRDNORM, POLLWRBAND, POLLWRNORM};
use libc::{c_ulong, fd_set, pollfd, sigset_t};
use rustix::io::Errno;
use socket::descriptor::hidden;
use std::os::fd::RawFd;

const WORD_BITS: usize = c_ulong::BITS as usize;
/// Events that each set asks for, and those that make a descriptor ready there, as in the kernel (`fs/select.c`): a
/// hang-up makes a descriptor readable, but not writable.
const ASKED: [i16; 3] = [POLLIN | POLLRDNORM | POLLRDBAND, POLLOUT | POLLWRNORM | POLLWRBAND, POLLPRI];
const READY: [i16; 3] = [ASKED[0] | POLLHUP | POLLERR, ASKED[1] | POLLERR, POLLPRI];

/// The sets of a `select` for reading, for writing and for exceptions, each null or with a bit for every number below
/// the count.
pub struct Sets {
    sets: [*mut fd_set; 3],
    count: usize,
}

/// Returns the number of words that a set for descriptors below `count` has.
pub fn words(count: i32) -> usize {
    usize::try_from(count).unwrap_or(0).div_ceil(WORD_BITS)
}

/// Returns the count of a `select` without the numbers above the program's highest open descriptor. The kernel reads no
/// more of the sets than its descriptor table has room for, and programs may pass their descriptor limit with sets that
/// are only as large as that; hidden descriptors enlarge the table.
pub fn clamped_count(count: i32) -> i32 {
    let has_hidden = || hidden::visible_ranges(0, u32::MAX).nth(1).is_some();
    if count <= libc::FD_SETSIZE as i32 || crate::process::is_confined() || !has_hidden() {
        return count;
    }
    hidden::visible_end(count).unwrap_or(count)
}

impl Sets {
    /// Returns the sets of a call.
    ///
    /// # Safety
    /// As long as the result is used, each set is null or writable for `count` bits, and nothing else refers to it.
    pub unsafe fn new(sets: [*mut fd_set; 3], count: i32) -> Self {
        Self { sets, count: usize::try_from(count).unwrap_or(0) }
    }

    /// Returns a word of a set, which is not null.
    fn word(&self, set: *mut fd_set, index: usize) -> *mut c_ulong {
        debug_assert!(index * WORD_BITS < self.count);
        set.cast::<c_ulong>().wrapping_add(index)
    }

    /// Returns the events that the sets ask for a descriptor below the count.
    fn events(&self, fd: usize) -> i16 {
        self.sets.into_iter().zip(ASKED).filter(|(set, _)| !set.is_null()).fold(0, |events, (set, asked)| {
            // SAFETY: the set is not null, so that it has a bit for every number below the count.
            let word = unsafe { self.word(set, fd / WORD_BITS).read() };
            if word >> (fd % WORD_BITS) & 1 != 0 { events | asked } else { events }
        })
    }

    /// Calls `visit` with each descriptor in a set and the events that are asked for.
    fn for_each(&self, mut visit: impl FnMut(usize, i16)) {
        for index in 0..self.count.div_ceil(WORD_BITS) {
            let any = self.sets.into_iter().filter(|set| !set.is_null()).fold(0, |any, set| {
                // SAFETY: the set is not null, so that it has a bit for every number below the count.
                any | unsafe { self.word(set, index).read() }
            });
            let begin = index * WORD_BITS;
            let bits = (0..WORD_BITS.min(self.count - begin)).filter(|bit| any >> bit & 1 != 0);
            bits.for_each(|bit| visit(begin + bit, self.events(begin + bit)));
        }
    }

    /// Returns whether a set names a connection that has met its other end.
    pub fn concern_lanes(&self) -> bool {
        let mut is_any = false;
        self.for_each(|fd, _| is_any |= concerns(fd as RawFd));
        is_any
    }

    /// Keeps the bits of ready descriptors and clears all others; returns how many it keeps.
    fn report(&self, entries: &[pollfd]) -> usize {
        let mut kept = 0;
        for (set, (asked, ready)) in self.sets.into_iter().zip(ASKED.into_iter().zip(READY)) {
            if set.is_null() {
                continue;
            }
            for entry in entries.iter().filter(|entry| entry.events & asked == asked) {
                let fd = entry.fd as usize;
                if entry.revents & ready != 0 {
                    kept += 1;
                } else {
                    let word = self.word(set, fd / WORD_BITS);
                    // SAFETY: the set is not null, so that it has a bit for every number below the count.
                    unsafe { word.write(word.read() & !(1 << (fd % WORD_BITS))) };
                }
            }
        }
        kept
    }
}

/// Returns whether an entry is ready for a set that asks for it, or is no open descriptor.
fn is_selected(entry: &pollfd) -> bool {
    let wanted = ASKED.into_iter().zip(READY).filter(|(asked, _)| entry.events & asked == *asked);
    entry.revents & wanted.fold(libc::POLLNVAL, |wanted, (_, ready)| wanted | ready) != 0
}

/// Waits as `pselect(2)`; without a timeout, without limit. Returns the number of bits in the sets. An error leaves the
/// sets unchanged.
///
/// # Errors
/// Those of `pselect(2)`.
///
/// # Safety
/// `mask` is null or points to a signal set.
pub unsafe fn select(sets: &Sets, timeout_ns: Option<u64>, mask: *const sigset_t) -> Result<usize, Errno> {
    let mut entries = Entries::new(NO_ENTRY);
    sets.for_each(|fd, events| entries.push(pollfd { fd: fd as RawFd, events, revents: 0 }));
    let entries = entries.as_mut_slice();
    // SAFETY: the caller guarantees that `mask` is null or points to a signal set.
    unsafe { poll_until(entries, is_selected, timeout_ns, mask) }?;
    if entries.iter().any(|entry| entry.revents & libc::POLLNVAL != 0) {
        return Err(Errno::BADF);
    }
    Ok(sets.report(entries))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_become_entries_and_ready_entries_bits() {
        let (mut read, mut write) = ([0_u64; 2], [0_u64; 2]);
        read[0] = 1 << 3 | 1 << 63;
        read[1] = 1 << 2;
        write[1] = 1 << 2 | 1 << 40;
        let pointers = [read.as_mut_ptr().cast(), write.as_mut_ptr().cast(), std::ptr::null_mut()];
        // SAFETY: both sets have 128 bits.
        let sets = unsafe { Sets::new(pointers, 67) };
        let mut found = Vec::new();
        sets.for_each(|fd, events| found.push((fd, events)));
        assert_eq!(found, [(3, ASKED[0]), (63, ASKED[0]), (66, ASKED[0] | ASKED[1])], "70 and more are not below 67");
        let entry = |(fd, events), revents| pollfd { fd: fd as RawFd, events, revents };
        let entries = [entry(found[0], 0), entry(found[1], POLLHUP), entry(found[2], POLLHUP)];
        assert_eq!(sets.report(&entries), 2);
        assert_eq!((read, write), ([1 << 63, 1 << 2], [0, 1 << 40]), "a hang-up is readable and not writable");
    }

    #[test]
    fn only_what_a_set_asks_for_selects_an_entry() {
        let selects = |asked: &[usize], revents| {
            let events = asked.iter().fold(0, |events, set| events | ASKED[*set]);
            is_selected(&pollfd { fd: 0, events, revents })
        };
        assert!(selects(&[0], POLLHUP) && selects(&[0], POLLERR) && selects(&[1], POLLERR));
        assert!(!selects(&[1], POLLHUP) && !selects(&[2], POLLHUP | POLLERR) && !selects(&[0], POLLOUT));
        assert!(selects(&[2], libc::POLLNVAL) && selects(&[0, 1], POLLOUT));
    }

    #[test]
    fn a_hang_up_that_no_set_asks_for_ends_no_wait() {
        let (reading, writing) = rustix::pipe::pipe().unwrap();
        drop(writing);
        let fd = std::os::fd::AsRawFd::as_raw_fd(&reading);
        let mut entries = [pollfd { fd, events: ASKED[1], revents: 0 }];
        // SAFETY: there is no mask.
        let ready = unsafe { poll_until(&mut entries, is_selected, Some(3_000_000), std::ptr::null()) };
        assert_eq!(ready, Ok(0));
    }
}
