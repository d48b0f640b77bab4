//! The library's own descriptors, which the program must not see.
//!
//! The kernel gives a program the lowest free number, and programs rely on it. Hidden descriptors therefore have high
//! numbers, below the soft limit, are closed at `exec`, and are recorded in a table that the interposed `close`,
//! `dup2`, `close_range` and `closefrom` consult. The first ones of a process with several threads have lower numbers
//! (see `table`). The table consists of atomics, so that it can be read in a signal
//! handler and in the child of a fork.

#![allow(unsafe_code)] // Numbers of descriptors are converted to descriptors.

mod table;
#[cfg(test)]
mod tests;

use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU16, AtomicU32, AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags, RawDir};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};

/// The first number of hidden descriptors, where the soft limit is high enough.
const FIRST_NUMBER_MAX: u64 = 8192;
/// The first number of those with which the kernel's table of descriptors has at most 8 KiB.
const SMALL_TABLE_NUMBER: u64 = 960;
/// The common soft limit, up to which the table is small anyway.
const SMALL_LIMIT: u64 = 1024;
/// No hidden descriptor has this number or a higher one.
const NUMBERS: usize = 1 << 16;
/// Largest number of hidden descriptors in a process.
const SLOTS: usize = 1 << 15;
/// Bytes of directory entries that are read at once, on the stack.
const LISTING_BYTES: usize = 512;

/// By slot: 0 if free; else the descriptor's number plus one, or [`CLAIMED`].
static DESCRIPTORS: [AtomicI32; SLOTS] = [const { AtomicI32::new(FREE) }; SLOTS];
/// By number: 0 if not hidden, else its slot plus one.
static SLOT_OF: [AtomicU16; NUMBERS] = [const { AtomicU16::new(0) }; NUMBERS];
/// One more than the highest slot ever used.
static SLOTS_USED: AtomicU32 = AtomicU32::new(0);
/// The stack of free slots below [`SLOTS_USED`]: the topmost slot plus one, and a tag that grows with each change,
/// against ABA.
static FREE_TOP: AtomicU64 = AtomicU64::new(0);
/// By free slot: the next free slot plus one.
static FREE_BELOW: [AtomicU16; SLOTS] = [const { AtomicU16::new(0) }; SLOTS];
/// The last result of [`first_number`]; 0 if it must be computed again.
static FIRST_NUMBER: AtomicU32 = AtomicU32::new(0);
/// The lowest number ever hidden, and one more than the highest.
static LOWEST: AtomicU32 = AtomicU32::new(u32::MAX);
static HIGHEST: AtomicU32 = AtomicU32::new(0);

const FREE: i32 = 0;
/// A slot that is in use but has no descriptor yet.
const CLAIMED: i32 = -1;
/// A hidden descriptor. Its number may change, so that it must be read for each use.
#[derive(Debug)]
pub struct HiddenFd {
    slot: u16,
}

impl HiddenFd {
    /// Moves a descriptor to a high number and sets its close-on-exec flag.
    ///
    /// # Errors
    /// `MFILE` if no number is free; the descriptor is then closed.
    pub fn hide(fd: OwnedFd) -> Result<Self, Errno> {
        let moved = move_up(&fd);
        close(fd);
        Self::register(moved?)
    }

    /// As [`HiddenFd::hide`], but in a process with several threads, at a number for which the kernel's table of
    /// descriptors need not grow, while some of those are free: to enlarge it takes milliseconds there.
    ///
    /// # Errors
    /// As [`HiddenFd::hide`].
    pub fn hide_within_table(fd: OwnedFd) -> Result<Self, Errno> {
        let Some(moved) = table::move_within(fd.as_fd()) else { return Self::hide(fd) };
        close(fd);
        Self::register(moved)
    }

    /// As [`HiddenFd::hide`], but where the limit is high, at a number so low that the kernel's table of descriptors
    /// stays small: a fork copies it. For a descriptor that a process has once.
    ///
    /// # Errors
    /// As [`HiddenFd::hide`].
    pub fn hide_in_small_table(fd: OwnedFd) -> Result<Self, Errno> {
        if soft_limit() <= SMALL_LIMIT {
            return Self::hide(fd);
        }
        let moved = match table::move_within(fd.as_fd()) {
            Some(moved) => Ok(moved),
            None => move_from(fd.as_fd(), SMALL_TABLE_NUMBER),
        };
        close(fd);
        Self::register(moved?)
    }

    fn register(fd: OwnedFd) -> Result<Self, Errno> {
        let number = fd.as_raw_fd();
        let slot = (number as usize) < NUMBERS;
        let Some(slot) = slot.then(take_slot).flatten() else {
            close(fd);
            return Err(Errno::MFILE);
        };
        let number = fd.into_raw_fd();
        publish(slot, number);
        Ok(Self { slot })
    }

    /// Returns the number.
    pub fn raw(&self) -> RawFd {
        number_in(DESCRIPTORS[usize::from(self.slot)].load(Ordering::Acquire)).unwrap_or(-1)
    }

    /// Returns the slot by which [`number_at`] finds the number.
    pub fn slot(&self) -> u16 {
        self.slot
    }

    /// Returns the slot in place of the object; [`HiddenFd::from_slot`] reverts this.
    pub fn into_slot(self) -> u16 {
        ManuallyDrop::new(self).slot
    }

    /// Returns the object of a slot that [`HiddenFd::into_slot`] has returned, once.
    pub fn from_slot(slot: u16) -> Self {
        Self { slot }
    }

    /// Returns the descriptor.
    ///
    /// # Errors
    /// `BADF` if another thread has just given the slot up.
    pub fn fd(&self) -> Result<BorrowedFd<'_>, Errno> {
        let number = self.raw();
        // SAFETY: the number is not -1, and is open while `self` owns the slot. `relocate` may close it concurrently; a
        // system call on it then fails, without touching memory.
        if number >= 0 { Ok(unsafe { BorrowedFd::borrow_raw(number) }) } else { Err(Errno::BADF) }
    }

    /// Returns the descriptor, at its number but no longer hidden.
    pub fn unhide(self) -> Option<OwnedFd> {
        let number = ManuallyDrop::new(self).release_slot()?;
        // SAFETY: the number is open, and the slot that owned it has just released it.
        Some(unsafe { OwnedFd::from_raw_fd(number) })
    }

    /// Removes the number from the table, before it is closed or gets another owner, and frees the slot.
    fn release_slot(&self) -> Option<RawFd> {
        let slot = usize::from(self.slot);
        let number = number_in(DESCRIPTORS[slot].swap(CLAIMED, Ordering::AcqRel));
        if let Some(number) = number {
            SLOT_OF[number as usize].store(0, Ordering::Release);
        }
        DESCRIPTORS[slot].store(FREE, Ordering::Release);
        push_free(self.slot);
        number
    }
}

impl Drop for HiddenFd {
    fn drop(&mut self) {
        if let Some(number) = self.release_slot() {
            // SAFETY: the slot that owned the number has just released it, so that no one else closes it.
            unsafe { rustix::io::close(number) };
        }
    }
}

/// Returns the number of the hidden descriptor in a slot, or -1.
pub fn number_at(slot: u16) -> RawFd {
    number_in(DESCRIPTORS[usize::from(slot)].load(Ordering::Acquire)).unwrap_or(-1)
}

fn number_in(entry: i32) -> Option<RawFd> {
    (entry > FREE).then_some(entry - 1)
}

/// Closes a descriptor by a raw system call, because libc's `close` may be interposed by this library.
pub fn close(fd: OwnedFd) {
    // SAFETY: the descriptor is given up here, and nothing else owns it.
    unsafe { rustix::io::close(fd.into_raw_fd()) };
}

fn take_slot() -> Option<u16> {
    let slot = pop_free().or_else(take_unused)?;
    DESCRIPTORS[usize::from(slot)].store(CLAIMED, Ordering::Release);
    Some(slot)
}

fn pop_free() -> Option<u16> {
    let mut top = FREE_TOP.load(Ordering::Acquire);
    loop {
        let slot = (top as u16).checked_sub(1)?;
        let next = tagged(top, FREE_BELOW[usize::from(slot)].load(Ordering::Relaxed));
        match FREE_TOP.compare_exchange_weak(top, next, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return Some(slot),
            Err(now) => top = now,
        }
    }
}

fn push_free(slot: u16) {
    let mut top = FREE_TOP.load(Ordering::Relaxed);
    loop {
        FREE_BELOW[usize::from(slot)].store(top as u16, Ordering::Relaxed);
        match FREE_TOP.compare_exchange_weak(top, tagged(top, slot + 1), Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => return,
            Err(now) => top = now,
        }
    }
}

/// Returns the new top of the free stack, with a tag that no earlier top had.
fn tagged(old: u64, slot_plus_one: u16) -> u64 {
    (old >> 16).wrapping_add(1) << 16 | u64::from(slot_plus_one)
}

fn take_unused() -> Option<u16> {
    let one_more = |used: u32| (used < SLOTS as u32).then_some(used + 1);
    let slot = SLOTS_USED.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).ok()?;
    // A new maximum of hidden descriptors is an occasion to notice a changed limit.
    FIRST_NUMBER.store(0, Ordering::Relaxed);
    Some(slot as u16)
}

fn publish(slot: u16, number: RawFd) {
    DESCRIPTORS[usize::from(slot)].store(number + 1, Ordering::Release);
    SLOT_OF[number as usize].store(slot + 1, Ordering::Release);
    LOWEST.fetch_min(number as u32, Ordering::AcqRel);
    HIGHEST.fetch_max(number as u32 + 1, Ordering::AcqRel);
}

fn soft_limit() -> u64 {
    rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Returns the lowest number for hidden descriptors under the current limit.
fn first_number() -> u64 {
    first_number_under(soft_limit())
}

/// Returns the lowest number for hidden descriptors in a process whose soft limit is `limit` (`RLIMIT_NOFILE`). At the
/// limit they may have lower ones.
pub fn first_number_under(limit: u64) -> u64 {
    (limit / 4 * 3).clamp(4, FIRST_NUMBER_MAX)
}

/// Whether hidden descriptors get numbers above the soft limit where the hard limit permits it.
static ABOVE_LIMIT: AtomicBool = AtomicBool::new(false);

/// Gives hidden descriptors numbers above the soft limit from now on, where the hard limit permits it: the program then
/// runs out of numbers exactly when it would without them.
pub fn hide_above_limit() {
    ABOVE_LIMIT.store(true, Ordering::Relaxed);
}

/// Returns a copy at a number that the program cannot get, for which the soft limit is raised for a moment. `None` if
/// the limits do not permit it, or such numbers are too high for the table.
fn move_above_limit(fd: &OwnedFd) -> Option<OwnedFd> {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let soft = limit.current.filter(|soft| *soft < NUMBERS as u64)?;
    let raised = limit.maximum.unwrap_or(u64::MAX).min(NUMBERS as u64);
    let from = soft.max(first_number_under(soft));
    if from >= raised {
        return None;
    }
    let set = |current| rustix::process::setrlimit(Resource::Nofile, Rlimit { current: Some(current), ..limit });
    set(raised).ok()?;
    let moved = rustix::io::fcntl_dupfd_cloexec(fd, from as i32);
    let _ = set(soft);
    moved.ok()
}

/// Returns a copy at a high number, or at a lower one if no high number is free.
fn move_up(fd: &OwnedFd) -> Result<OwnedFd, Errno> {
    if ABOVE_LIMIT.load(Ordering::Relaxed)
        && let Some(moved) = move_above_limit(fd)
    {
        return Ok(moved);
    }
    let from = match FIRST_NUMBER.load(Ordering::Relaxed) {
        0 => first_number(),
        known => u64::from(known),
    };
    let moved = move_from(fd.as_fd(), from)?;
    // If no number was free from there on, the limit has been lowered since.
    let has_room = moved.as_raw_fd() as u64 >= from;
    FIRST_NUMBER.store(if has_room { from as u32 } else { 0 }, Ordering::Relaxed);
    Ok(moved)
}

fn move_from(fd: BorrowedFd<'_>, mut from: u64) -> Result<OwnedFd, Errno> {
    loop {
        match rustix::io::fcntl_dupfd_cloexec(fd, from as i32) {
            Ok(moved) => return Ok(moved),
            // INVAL: another thread has lowered the limit meanwhile.
            Err(Errno::MFILE | Errno::INVAL) if from > 8 => from /= 2,
            Err(Errno::INVAL) => return Err(Errno::MFILE),
            Err(error) => return Err(error),
        }
    }
}

/// Returns whether the number is a hidden descriptor, which the program must not see, close or replace.
#[inline]
pub fn is_hidden(fd: RawFd) -> bool {
    usize::try_from(fd)
        .ok()
        .and_then(|number| SLOT_OF.get(number))
        .is_some_and(|slot| slot.load(Ordering::Acquire) != 0)
}

/// Moves a hidden descriptor away from a number that the program is about to use for `dup2`, `dup3` or `F_DUPFD`. The
/// number stays open, so that only the program can reuse it. Does nothing for a number that is not hidden.
///
/// # Errors
/// `MFILE` if no other number is free; the hidden descriptor then stays where it is.
pub fn relocate(fd: RawFd) -> Result<(), Errno> {
    let Some(slot) = usize::try_from(fd).ok().and_then(|number| SLOT_OF.get(number)) else { return Ok(()) };
    let Some(slot) = slot.load(Ordering::Acquire).checked_sub(1) else { return Ok(()) };
    let entry = DESCRIPTORS[usize::from(slot)].load(Ordering::Acquire);
    if number_in(entry) != Some(fd) {
        return Ok(()); // Closed or moved by another thread since.
    }
    let copy = copy_elsewhere(fd, first_number())?;
    if copy.as_raw_fd() as usize >= NUMBERS {
        close(copy);
        return Err(Errno::MFILE);
    }
    let here = &DESCRIPTORS[usize::from(slot)];
    if here.compare_exchange(entry, copy.as_raw_fd() + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        close(copy);
        return Ok(());
    }
    publish(slot, copy.into_raw_fd());
    SLOT_OF[fd as usize].store(0, Ordering::Release);
    Ok(())
}

/// Returns a copy at another high number, with the same close-on-exec flag.
fn copy_elsewhere(fd: RawFd, from: u64) -> Result<OwnedFd, Errno> {
    // SAFETY: by the table, the number is an open hidden descriptor; if another thread closes it now, the calls below
    // fail.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::io::fcntl_getfd(borrowed)?;
    let copy = move_from(borrowed, from)?;
    rustix::io::fcntl_setfd(&copy, flags)?;
    Ok(copy)
}

/// Returns the parts of `first..=last` without hidden numbers, which `close_range` and `closefrom` may close.
pub fn visible_ranges(first: u32, last: u32) -> impl Iterator<Item = (u32, u32)> {
    let lowest = LOWEST.load(Ordering::Acquire);
    let highest = HIGHEST.load(Ordering::Acquire).min(NUMBERS as u32);
    // The end of the range is treated like a hidden number.
    let end = u64::from(last) + 1;
    let mut next = u64::from(first);
    std::iter::from_fn(move || {
        while next < end {
            let scan_from = next.max(u64::from(lowest)).min(u64::from(highest));
            let hidden = (scan_from..u64::from(highest)).find(|number| *number >= next && is_hidden(*number as i32));
            let stop = hidden.unwrap_or(end).min(end);
            let range = (next, stop);
            next = stop + 1;
            if range.0 < range.1 {
                return Some((range.0 as u32, (range.1 - 1) as u32));
            }
        }
        None
    })
}

/// Returns one more than the highest number below `end` that the program has open.
///
/// # Errors
/// The error of opening or reading `/proc/self/fd`.
pub fn visible_end(end: RawFd) -> Result<RawFd, Errno> {
    let mut highest = -1;
    for_each_open(|number| {
        if number < end && !is_hidden(number) {
            highest = highest.max(number);
        }
    })?;
    Ok(highest + 1)
}

/// Runs `visit` on every open number, in no particular order, including the one of the listing itself.
fn for_each_open(mut visit: impl FnMut(RawFd)) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(c"/proc/self/fd", flags, Mode::empty())?;
    let mut buffer = [MaybeUninit::<u8>::uninit(); LISTING_BYTES];
    let mut entries = RawDir::new(&folder, &mut buffer);
    let mut result = Ok(());
    while let Some(entry) = entries.next() {
        match entry {
            Ok(entry) => {
                entry.file_name().to_str().ok().and_then(|name| name.parse().ok()).into_iter().for_each(&mut visit)
            }
            Err(error) => {
                result = Err(error);
                break;
            }
        }
    }
    close(folder);
    result
}
