//! Descriptors of our own, kept out of the program's way.
//!
//! The kernel gives a program the lowest free number, and programs count on it. Ours therefore live at high numbers,
//! below the soft limit, are closed at `exec`, and stand in a table that the interposed `close`, `dup2`, `close_range`
//! and `closefrom` ask. The table is plain atomics: it can be read in a signal handler and in the child of a fork.
//!
//! Some must outlive `exec`, because the connections do that they belong to. The new program finds them by a marker: an
//! empty memfd at a number that follows from the limit alone. Looking for a marker that is not there costs one `fcntl`.

#![allow(unsafe_code)] // Numbers of descriptors are turned back into descriptors.

#[cfg(test)]
mod tests;

use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU16, AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, Mode, OFlags, RawDir};
use rustix::io::{Errno, FdFlags};
use rustix::process::Resource;

/// Hidden descriptors begin here where the soft limit is high enough.
const FIRST_NUMBER_MAX: u64 = 8192;
/// No hidden descriptor has this number or a higher one.
const NUMBERS: usize = 1 << 16;
/// Hidden descriptors a process can have.
const SLOTS: usize = 1 << 15;
/// The marker's number where the soft limit allows it: a constant, so that a program may raise its limit before it
/// calls `exec`.
const MARKER_NUMBER_MAX: u64 = 739;
/// Numbers looked at for a marker, when the program has taken those before.
const MARKER_TRIES: i32 = 16;
/// The marker's name; memfds of ours begin with `crosslane`.
const MARKER_NAME: &std::ffi::CStr = c"crosslane-marker";
const MARKER_LINK: &[u8] = b"/memfd:crosslane-marker (deleted)";

/// By slot: 0 when free, else a descriptor's number plus one, with [`OPTIONAL`], or [`CLAIMED`] or [`RELEASED`].
static DESCRIPTORS: [AtomicI32; SLOTS] = [const { AtomicI32::new(FREE) }; SLOTS];
/// By number: 0 when not hidden, else its slot plus one.
static SLOT_OF: [AtomicU16; NUMBERS] = [const { AtomicU16::new(0) }; NUMBERS];
/// One more than the highest slot ever used.
static SLOTS_USED: AtomicU32 = AtomicU32::new(0);
/// The free slots below [`SLOTS_USED`], as a stack: the topmost plus one, under a tag that changes with each change.
static FREE_TOP: AtomicU64 = AtomicU64::new(0);
/// By free slot: the one below it plus one.
static FREE_BELOW: [AtomicU16; SLOTS] = [const { AtomicU16::new(0) }; SLOTS];
/// What [`first_number`] answered last; 0 when it is to be asked again.
static FIRST_NUMBER: AtomicU32 = AtomicU32::new(0);
/// The lowest and one more than the highest number ever hidden.
static LOWEST: AtomicU32 = AtomicU32::new(u32::MAX);
static HIGHEST: AtomicU32 = AtomicU32::new(0);
/// The marker's slot plus one, once there is a marker.
static MARKER_SLOT: AtomicU32 = AtomicU32::new(0);

const FREE: i32 = 0;
/// A slot between being taken and having a descriptor.
const CLAIMED: i32 = -1;
/// A slot whose optional descriptor has been closed under its owner.
const RELEASED: i32 = -2;
const OPTIONAL: i32 = 1 << 30;

/// What to do with a hidden descriptor when the program needs numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Keep it.
    Required,
    /// Close it: its owner manages without.
    Optional,
}

/// A hidden descriptor. Its number can change while it lives, so it is asked for each time.
#[derive(Debug)]
pub struct HiddenFd {
    slot: u16,
}

impl HiddenFd {
    /// Moves a descriptor to a high number, closed at `exec`.
    ///
    /// # Errors
    /// `MFILE` when there is no number for it; the descriptor is closed then.
    pub fn hide(fd: OwnedFd, need: Need) -> Result<Self, Errno> {
        let moved = move_up(&fd);
        close(fd);
        Self::register(moved?, need)
    }

    /// Hides a descriptor at the number it has, when that is high enough; else as [`HiddenFd::hide`]. For descriptors
    /// that were inherited; whether it is closed at `exec` stays as it is in the first case.
    ///
    /// # Errors
    /// `MFILE` when there is no number for it; the descriptor is closed then.
    pub fn adopt(fd: OwnedFd, need: Need) -> Result<Self, Errno> {
        let number = fd.as_raw_fd() as u64;
        if number < first_number() || number >= NUMBERS as u64 {
            return Self::hide(fd, need);
        }
        Self::register(fd, need)
    }

    fn register(fd: OwnedFd, need: Need) -> Result<Self, Errno> {
        let number = fd.as_raw_fd();
        let slot = (number as usize) < NUMBERS;
        let Some(slot) = slot.then(take_slot).flatten() else {
            close(fd);
            return Err(Errno::MFILE);
        };
        let number = fd.into_raw_fd();
        publish(slot, number, need);
        Ok(Self { slot })
    }

    /// The number, or -1 when an optional descriptor has been released.
    pub fn raw(&self) -> RawFd {
        number_in(DESCRIPTORS[usize::from(self.slot)].load(Ordering::Acquire)).unwrap_or(-1)
    }

    /// Where [`number_at`] finds the number.
    pub fn slot(&self) -> u16 {
        self.slot
    }

    /// The descriptor, unless it was optional and has been released.
    pub fn get(&self) -> Option<BorrowedFd<'_>> {
        let number = self.raw();
        // SAFETY: the number is not -1, and is open for as long as `self` owns the slot, but for what the module's
        // callers do in `relocate` and `release_all_optional`: then a system call on it fails, and no memory is touched
        // by it.
        (number >= 0).then(|| unsafe { BorrowedFd::borrow_raw(number) })
    }

    /// As [`HiddenFd::get`], with the error a system call would give.
    ///
    /// # Errors
    /// `BADF` when an optional descriptor has been released.
    pub fn fd(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.get().ok_or(Errno::BADF)
    }

    /// Says whether the descriptor outlives `exec`. The first that does brings a marker with it; see [`inherited`].
    ///
    /// # Errors
    /// `BADF` when it has been released, `MFILE` when there is no number for the marker.
    pub fn set_inheritable(&self, inheritable: bool) -> Result<(), Errno> {
        if inheritable {
            ensure_marker()?;
        }
        let flags = if inheritable { FdFlags::empty() } else { FdFlags::CLOEXEC };
        rustix::io::fcntl_setfd(self.fd()?, flags)
    }

    /// The descriptor itself, at the number it has and hidden no more; `None` when an optional one has been released.
    pub fn unhide(self) -> Option<OwnedFd> {
        let number = ManuallyDrop::new(self).release_slot()?;
        // SAFETY: open, and nobody's since the slot gave it up.
        Some(unsafe { OwnedFd::from_raw_fd(number) })
    }

    /// Takes the number out of the table, before it is closed or somebody else's, and frees the slot.
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
            // SAFETY: the slot that owned it has just given it up, so that nobody else closes it.
            unsafe { rustix::io::close(number) };
        }
    }
}

/// The number of the hidden descriptor at a place, or -1.
pub fn number_at(slot: u16) -> RawFd {
    number_in(DESCRIPTORS[usize::from(slot)].load(Ordering::Acquire)).unwrap_or(-1)
}

fn number_in(entry: i32) -> Option<RawFd> {
    (entry > FREE).then_some((entry & !OPTIONAL) - 1)
}

/// Takes a number out of the table before it is closed: afterwards it may be somebody else's.
fn forget_and_close(number: RawFd) {
    SLOT_OF[number as usize].store(0, Ordering::Release);
    // SAFETY: the caller has just taken this number out of the slot that owned it, so that nobody else closes it.
    unsafe { rustix::io::close(number) };
}

/// Closes by a raw system call: `close` of libc may be our own.
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

/// A new top of the free list: it differs from every earlier one, also when the same slot is on top again.
fn tagged(old: u64, slot_plus_one: u16) -> u64 {
    (old >> 16).wrapping_add(1) << 16 | u64::from(slot_plus_one)
}

fn take_unused() -> Option<u16> {
    let one_more = |used: u32| (used < SLOTS as u32).then_some(used + 1);
    let slot = SLOTS_USED.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).ok()?;
    // More are hidden than ever before: a good time to see whether the program has changed its limit.
    FIRST_NUMBER.store(0, Ordering::Relaxed);
    Some(slot as u16)
}

fn publish(slot: u16, number: RawFd, need: Need) {
    let optional = if need == Need::Optional { OPTIONAL } else { 0 };
    DESCRIPTORS[usize::from(slot)].store((number + 1) | optional, Ordering::Release);
    SLOT_OF[number as usize].store(slot + 1, Ordering::Release);
    LOWEST.fetch_min(number as u32, Ordering::AcqRel);
    HIGHEST.fetch_max(number as u32 + 1, Ordering::AcqRel);
}

fn soft_limit() -> u64 {
    rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// The lowest number a hidden descriptor should have under the present limit.
fn first_number() -> u64 {
    (soft_limit() / 4 * 3).clamp(4, FIRST_NUMBER_MAX)
}

fn marker_number() -> i32 {
    (first_number() - 1).min(MARKER_NUMBER_MAX) as i32
}

/// A copy at a high number, or at a lower one when there is none.
fn move_up(fd: &OwnedFd) -> Result<OwnedFd, Errno> {
    let from = match FIRST_NUMBER.load(Ordering::Relaxed) {
        0 => first_number(),
        known => u64::from(known),
    };
    let moved = move_from(fd, from)?;
    // Without room above, the limit has been lowered since.
    let has_room = moved.as_raw_fd() as u64 >= from;
    FIRST_NUMBER.store(if has_room { from as u32 } else { 0 }, Ordering::Relaxed);
    Ok(moved)
}

fn move_from(fd: &OwnedFd, mut from: u64) -> Result<OwnedFd, Errno> {
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

/// Whether the number is one of ours, which the program must not see, close or replace.
#[inline]
pub fn is_hidden(fd: RawFd) -> bool {
    usize::try_from(fd)
        .ok()
        .and_then(|number| SLOT_OF.get(number))
        .is_some_and(|slot| slot.load(Ordering::Acquire) != 0)
}

/// Moves a hidden descriptor away from a number that the program is about to put something else on by `dup2`, `dup3` or
/// `F_DUPFD`. The number stays open, so that nothing else gets it before the program. A number that is not hidden is
/// left alone.
///
/// # Errors
/// `MFILE` when there is no other number; the hidden descriptor stays where it is.
pub fn relocate(fd: RawFd) -> Result<(), Errno> {
    let Some(slot) = usize::try_from(fd).ok().and_then(|number| SLOT_OF.get(number)) else { return Ok(()) };
    let Some(slot) = slot.load(Ordering::Acquire).checked_sub(1) else { return Ok(()) };
    let entry = DESCRIPTORS[usize::from(slot)].load(Ordering::Acquire);
    if number_in(entry) != Some(fd) {
        return Ok(()); // Closed or moved by another thread since.
    }
    // A marker stays near its number, or the program after `exec` would not find it.
    let is_marker = MARKER_SLOT.load(Ordering::Acquire) == u32::from(slot) + 1;
    let from = if is_marker { marker_number() as u64 } else { first_number() };
    let moved = copy_elsewhere(fd, from).and_then(|copy| {
        if (copy.as_raw_fd() as usize) < NUMBERS {
            return Ok(copy);
        }
        close(copy);
        Err(Errno::MFILE)
    });
    let optional = entry & OPTIONAL != 0;
    let (replacement, result) = match &moved {
        Ok(copy) => ((copy.as_raw_fd() + 1) | (entry & OPTIONAL), Ok(())),
        Err(_) if optional => (RELEASED, Ok(())),
        Err(error) => return Err(*error),
    };
    let here = &DESCRIPTORS[usize::from(slot)];
    if here.compare_exchange(entry, replacement, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        moved.map(close).ok();
        return Ok(());
    }
    if let Ok(copy) = moved {
        let number = copy.into_raw_fd();
        publish(slot, number, if optional { Need::Optional } else { Need::Required });
    }
    SLOT_OF[fd as usize].store(0, Ordering::Release);
    result
}

/// A copy at another high number that is closed at `exec` if `fd` is.
fn copy_elsewhere(fd: RawFd, from: u64) -> Result<OwnedFd, Errno> {
    // SAFETY: the table says the number is an open descriptor of ours; if another thread closes it now, the calls below
    // fail.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::io::fcntl_getfd(borrowed)?;
    // `move_from` takes an owned descriptor; this one is leased to it and not closed.
    // SAFETY: wrapped so that it is never dropped.
    let leased = std::mem::ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(fd) });
    let copy = move_from(&leased, from)?;
    rustix::io::fcntl_setfd(&copy, flags)?;
    Ok(copy)
}

/// Closes all optional hidden descriptors, because the program has run out of numbers. Returns how many.
pub fn release_all_optional() -> usize {
    let used = SLOTS_USED.load(Ordering::Acquire) as usize;
    DESCRIPTORS[..used].iter().filter(|entry| release_if_optional(entry)).count()
}

fn release_if_optional(entry: &AtomicI32) -> bool {
    let seen = entry.load(Ordering::Acquire);
    let Some(number) = number_in(seen).filter(|_| seen & OPTIONAL != 0) else { return false };
    let released = entry.compare_exchange(seen, RELEASED, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    if released {
        forget_and_close(number);
    }
    released
}

/// The parts of `first..=last` without hidden numbers: what the program's `close_range` and `closefrom` may close.
pub fn visible_ranges(first: u32, last: u32) -> impl Iterator<Item = (u32, u32)> {
    let lowest = LOWEST.load(Ordering::Acquire);
    let highest = HIGHEST.load(Ordering::Acquire).min(NUMBERS as u32);
    // One more than any number, so that the end of the range is an edge like a hidden number.
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

/// The process has had a connection: its lifeline alone may be left to a child.
static HAS_LIFELINES: AtomicBool = AtomicBool::new(false);

/// Notes that a child may inherit a lifeline, without any hidden descriptor.
#[inline]
pub fn note_lifeline() {
    if !HAS_LIFELINES.load(Ordering::Relaxed) {
        HAS_LIFELINES.store(true, Ordering::Relaxed);
    }
}

/// Makes the marker if there is anything that a child could inherit.
pub fn prepare_inheritance() {
    if SLOTS_USED.load(Ordering::Acquire) > 0 || HAS_LIFELINES.load(Ordering::Relaxed) {
        let _ = ensure_marker();
    }
}

/// Makes the marker by which a program after `exec` knows that something was left for it; see [`inherited`].
///
/// # Errors
/// `MFILE` when there is no number for it; what memfd_create answers.
pub fn ensure_marker() -> Result<(), Errno> {
    if MARKER_SLOT.load(Ordering::Acquire) != 0 {
        return Ok(());
    }
    let memfd = rustix::fs::memfd_create(MARKER_NAME, MemfdFlags::CLOEXEC)?;
    let copy = rustix::io::fcntl_dupfd_cloexec(&memfd, marker_number());
    close(memfd);
    let marker = HiddenFd::register(copy?, Need::Required)?;
    rustix::io::fcntl_setfd(marker.fd()?, FdFlags::empty())?;
    own_marker(marker);
    Ok(())
}

/// A marker stays for the life of the process; a second one made at the same time goes.
fn own_marker(marker: HiddenFd) {
    let slot = u32::from(marker.slot) + 1;
    if MARKER_SLOT.compare_exchange(0, slot, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
        std::mem::forget(marker);
    }
}

/// A place for one hidden descriptor that is made before it is needed, when there may be no number left.
#[derive(Debug, Default)]
pub struct SpareFd {
    /// The descriptor's slot plus one, and above it the process that made it; 0: there is none.
    word: AtomicU64,
}

impl SpareFd {
    /// An empty place.
    pub const fn new() -> Self {
        Self { word: AtomicU64::new(0) }
    }

    /// Makes the descriptor, if there is none of this process's.
    pub fn keep(&self, make: impl FnOnce() -> Result<HiddenFd, Errno>) {
        let (known, process) = (self.word.load(Ordering::Acquire), own_process());
        if known >> 32 == process {
            return;
        }
        let Ok(spare) = make() else { return };
        let word = (process << 32) | (u64::from(spare.slot) + 1);
        if self.word.compare_exchange(known, word, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            std::mem::forget(spare);
            drop(Self::from_word(known));
        }
    }

    /// Takes the descriptor out. One that was made before a fork is the parent's too, and only closed here.
    pub fn take(&self) -> Option<HiddenFd> {
        let word = self.word.swap(0, Ordering::AcqRel);
        Self::from_word(word).filter(|_| word >> 32 == own_process())
    }

    fn from_word(word: u64) -> Option<HiddenFd> {
        (word as u32).checked_sub(1).map(|slot| HiddenFd { slot: slot as u16 })
    }
}

fn own_process() -> u64 {
    rustix::process::getpid().as_raw_nonzero().get() as u64
}

/// What the numbers of open descriptors lead to, as far as it matters to who inherits them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InheritedKind {
    /// A memfd whose name begins with `crosslane`.
    Memfd,
    /// A socket of any kind.
    Socket,
    /// Something else: the memory of a device may be it.
    Other,
}

/// Descriptors that the program before `exec` may have left for us, by number; empty when it left no marker.
/// The caller looks at each before it believes in it. To be called once, while the library is loaded.
pub fn inherited() -> Vec<(RawFd, InheritedKind)> {
    let Some(marker) = find_marker() else { return Vec::new() };
    // SAFETY: the number is open, is a marker that only this module makes, and nothing in this program owns it yet.
    let marker = unsafe { OwnedFd::from_raw_fd(marker) };
    let number = marker.as_raw_fd();
    match HiddenFd::register(marker, Need::Required) {
        Ok(hidden) => own_marker(hidden),
        Err(_) => return Vec::new(),
    }
    let mut found = list_open().unwrap_or_default();
    found.retain(|(fd, _)| *fd != number);
    found
}

fn find_marker() -> Option<RawFd> {
    let first = marker_number();
    for number in first..first + MARKER_TRIES {
        // SAFETY: only asked for its flags; a closed number is an error of that call.
        rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(number) }).ok()?;
        let mut buffer = [0_u8; 64];
        if read_link(number, &mut buffer) == Some(MARKER_LINK) {
            return Some(number);
        }
    }
    None
}

/// What /proc says the number leads to, cut to the buffer.
fn read_link(number: RawFd, buffer: &mut [u8; 64]) -> Option<&[u8]> {
    let path = format!("/proc/self/fd/{number}");
    let mut room = [MaybeUninit::<u8>::uninit(); 64];
    let (link, _) = rustix::fs::readlinkat_raw(rustix::fs::CWD, path.as_str(), &mut room).ok()?;
    let length = link.len();
    buffer[..length].copy_from_slice(link);
    Some(&buffer[..length])
}

fn list_open() -> Result<Vec<(RawFd, InheritedKind)>, Errno> {
    let mut found = Vec::new();
    for_each_open(|number| {
        let mut link = [0_u8; 64];
        let link = read_link(number, &mut link).unwrap_or_default();
        if link.starts_with(b"/memfd:crosslane") {
            found.push((number, InheritedKind::Memfd));
        } else if link.starts_with(b"socket:") {
            found.push((number, InheritedKind::Socket));
        } else {
            found.push((number, InheritedKind::Other));
        }
    })?;
    found.sort_unstable_by_key(|(number, _)| *number);
    Ok(found)
}

/// One more than the highest number below `end` that the program has open.
///
/// # Errors
/// What opening and reading `/proc/self/fd` answers.
pub fn visible_end(end: RawFd) -> Result<RawFd, Errno> {
    let mut highest = -1;
    for_each_open(|number| {
        if number < end && !is_hidden(number) {
            highest = highest.max(number);
        }
    })?;
    Ok(highest + 1)
}

/// Runs `visit` on every open number, in no order; that of the listing itself is among them.
fn for_each_open(mut visit: impl FnMut(RawFd)) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(c"/proc/self/fd", flags, Mode::empty())?;
    let mut buffer = [MaybeUninit::<u8>::uninit(); 4096];
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
