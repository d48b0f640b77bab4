//! Parts of windows that programs have, and how anybody on the machine learns that they still do.
//!
//! A program of a connection that lies in windows stores into the other node's window until it has unmapped it: a
//! part that it may still reach must not become another connection's. Only the kernel knows when that is, whatever dies
//! in which order. So the program gets an open file description of its own, on which the bytes of both spans are
//! locked: the lock goes with the description, and that goes with the last descriptor *and the last mapping* that was
//! made by it, in whichever process. It excludes nobody; it is there to be found.
//!
//! The description's position says which spans they are, for a program that gets the descriptor from another: by `exec`
//! or `SCM_RIGHTS`. Nobody reads or writes by it otherwise.

use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use fabric::shm;
use rustix::fs::{Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use crate::process::system::{self, call};
use crate::rendezvous::handshake::WindowSpans;
use segment::Segment;

const PAGE_BYTES: u64 = 4096;
/// Two numbers of pages and a bit make a position, which is less than 2^63.
const PAGE_NUMBER_BITS: u32 = 31;
/// Several times what the kernel says of a descriptor with two locks.
const INFO_BYTES_MAX: usize = 2048;
/// In a position: the link is a modelled one.
const MODELLED: u64 = 1 << (2 * PAGE_NUMBER_BITS);

/// A descriptor of the memory for one program, of an open file description of its own.
///
/// # Errors
/// What open answers.
pub fn reopen(memory: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    // A duplicate would share the locks of all others.
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

/// Notes on a [`reopen`] that both spans are leased to whoever has it.
///
/// # Errors
/// What fcntl answers.
pub fn mark_leased(descriptor: BorrowedFd<'_>, spans: WindowSpans) -> Result<(), Errno> {
    for offset in [spans.inbound_offset, spans.outbound_offset] {
        lock(&descriptor, libc::F_OFD_SETLK, &mut span_lock(libc::F_RDLCK, offset)?)?;
    }
    // Where there is a local page, it says so; and a device has no position.
    if !spans.has_local_state() {
        let _ = rustix::fs::seek(descriptor, SeekFrom::Start(position_of(spans)?));
    }
    Ok(())
}

/// Whether both spans were noted on this very open file description, whatever others there are of the same memory.
pub fn is_marked_on(descriptor: BorrowedFd<'_>, spans: WindowSpans) -> bool {
    // `F_OFD_GETLK` tells only of the locks of others.
    let mut bytes = [0; INFO_BYTES_MAX];
    let path = format!("/proc/self/fdinfo/{}", descriptor.as_raw_fd());
    let Some(info) = system::read_text(path.as_str(), &mut bytes) else { return false };
    [spans.inbound_offset, spans.outbound_offset].into_iter().all(|first| {
        let last = first.saturating_add(Segment::WINDOW_BYTES as u64 - 1);
        info.lines().filter_map(locked_range).any(|range| range.contains(&first) && range.contains(&last))
    })
}

/// The bytes that are locked by a line such as `lock: 1: OFDLCK ADVISORY READ -1 00:06:411 4096 278527`. Two spans side
/// by side are one lock.
fn locked_range(line: &str) -> Option<RangeInclusive<u64>> {
    let mut words = line.strip_prefix("lock:")?.split_ascii_whitespace();
    let (_number, kind) = (words.next()?, words.next()?);
    let (last, first) = (words.next_back()?.parse().ok()?, words.next_back()?.parse().ok()?);
    (kind == "OFDLCK").then_some(first..=last)
}

/// Whether the spans that were noted on a descriptor are those of a modelled link, whose model lies in them.
pub fn is_modelled(descriptor: BorrowedFd<'_>) -> bool {
    rustix::fs::seek(descriptor, SeekFrom::Current(0)).is_ok_and(|position| position & MODELLED != 0)
}

/// The spans that were noted on a descriptor, whoever made it.
/// `None` for a device, beside whose descriptor a [`local_page`](crate::rendezvous::local_page) goes.
pub fn spans_of(descriptor: BorrowedFd<'_>) -> Option<WindowSpans> {
    let position = rustix::fs::seek(descriptor, SeekFrom::Current(0)).ok()?;
    let offset = |number: u64| (number & ((1 << PAGE_NUMBER_BITS) - 1)) * PAGE_BYTES;
    let spans = WindowSpans::new(offset(position >> PAGE_NUMBER_BITS), offset(position));
    (position != 0 && shm::is_sealed(descriptor)).then_some(spans)
}

/// The numbers of both spans' first pages, in one, and whether the link is a modelled one.
fn position_of(spans: WindowSpans) -> Result<u64, Errno> {
    let page = |offset: u64| {
        let number = offset / PAGE_BYTES;
        if number >> PAGE_NUMBER_BITS == 0 { Ok(number) } else { Err(Errno::OVERFLOW) }
    };
    let modelled = if spans.model.is_some() { MODELLED } else { 0 };
    Ok(modelled | page(spans.inbound_offset)? << PAGE_NUMBER_BITS | page(spans.outbound_offset)?)
}

/// A [`reopen`] with a [`mark_leased`].
///
/// # Errors
/// Those of both.
pub fn lease(memory: BorrowedFd<'_>, spans: WindowSpans) -> Result<OwnedFd, Errno> {
    let descriptor = reopen(memory)?;
    mark_leased(descriptor.as_fd(), spans).map(|()| descriptor)
}

/// Whether a program of this machine may still reach one of the spans.
///
/// # Errors
/// What fcntl answers.
pub fn is_leased(memory: BorrowedFd<'_>, spans: WindowSpans) -> Result<bool, Errno> {
    for offset in [spans.inbound_offset, spans.outbound_offset] {
        // Would somebody stand against a lock for writing?
        let mut asked = span_lock(libc::F_WRLCK, offset)?;
        lock(&memory, libc::F_OFD_GETLK, &mut asked)?;
        if i32::from(asked.l_type) != libc::F_UNLCK {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A span that has something behind it for a modelled link is known by its beginning.
fn span_lock(kind: i32, offset: u64) -> Result<libc::flock, Errno> {
    Ok(libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: i64::try_from(offset).map_err(|_| Errno::INVAL)?,
        l_len: Segment::WINDOW_BYTES as i64,
        l_pid: 0,
    })
}

fn lock(file: &impl AsRawFd, command: i32, span: &mut libc::flock) -> Result<(), Errno> {
    // SAFETY: the structure is readable and writable, and has the kernel's layout on machines of 64 bits.
    let done = unsafe { call!(libc::SYS_fcntl, file.as_raw_fd(), command, std::ptr::from_mut(span)) };
    if done < 0 { Err(system::error_of(done)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use volmem::Mapping;

    const SPAN_BYTES: u64 = Segment::WINDOW_BYTES as u64;
    const FIRST: WindowSpans = WindowSpans::new(0, 2 * SPAN_BYTES);
    const SECOND: WindowSpans = WindowSpans::new(SPAN_BYTES, 3 * SPAN_BYTES);

    #[test]
    fn a_span_is_lent_until_the_last_descriptor_and_the_last_mapping_are_gone() {
        let _no_child = test_support::spawn::forbid();
        let (memory, _mapping) = shm::create(4 * Segment::WINDOW_BYTES).unwrap();
        let is_leased = |spans| is_leased(memory.as_fd(), spans).unwrap();
        assert_eq!((is_leased(FIRST), is_leased(SECOND)), (false, false), "the owner's own mapping does not count");
        let own = lease(memory.as_fd(), FIRST).unwrap();
        assert_eq!((spans_of(own.as_fd()), spans_of(memory.as_fd())), (Some(FIRST), None));
        assert_eq!((is_leased(FIRST), is_leased(SECOND)), (true, false));
        let back = WindowSpans::new(FIRST.outbound_offset, FIRST.inbound_offset);
        assert!(is_leased(back), "either span says so");
        let copy = rustix::io::dup(&own).unwrap();
        drop(own);
        assert!(is_leased(FIRST));
        let mapping = Mapping::at(copy.as_fd(), FIRST.outbound_offset, Segment::WINDOW_BYTES).unwrap();
        drop(copy);
        assert!(is_leased(FIRST), "mapped");
        drop(mapping);
        assert!(!is_leased(FIRST));
    }

    #[test]
    fn a_lease_is_told_from_other_descriptors_of_the_same_memory() {
        let (memory, _mapping) = shm::create(4 * Segment::WINDOW_BYTES).unwrap();
        let own = reopen(memory.as_fd()).unwrap();
        for spans in [FIRST, SECOND, WindowSpans::new(SPAN_BYTES, 0)] {
            let lease = lease(memory.as_fd(), spans).unwrap();
            let copy = rustix::io::dup(&lease).unwrap();
            let is_marked_on = |descriptor: &OwnedFd, spans| is_marked_on(descriptor.as_fd(), spans);
            assert_eq!([&lease, &copy, &own].map(|it| is_marked_on(it, spans)), [true, true, false]);
            let partly = WindowSpans::new(spans.inbound_offset, 3 * SPAN_BYTES + 4096);
            assert!(!is_marked_on(&lease, partly), "of one span, not of the other");
        }
        assert!(!is_marked_on(own.as_fd(), FIRST));
    }

    #[test]
    fn several_programs_have_their_spans_apart_from_each_other() {
        let _no_child = test_support::spawn::forbid();
        let (memory, _mapping) = shm::create(4 * Segment::WINDOW_BYTES).unwrap();
        let is_leased = |spans| is_leased(memory.as_fd(), spans).unwrap();
        let leases = [FIRST, FIRST, SECOND].map(|spans| lease(memory.as_fd(), spans).unwrap());
        assert!(is_leased(FIRST) && is_leased(SECOND));
        let [first, second, third] = leases;
        drop((first, third));
        assert_eq!((is_leased(FIRST), is_leased(SECOND)), (true, false), "one of two that have it is left");
        drop(second);
        assert!(!is_leased(FIRST));
    }
}
