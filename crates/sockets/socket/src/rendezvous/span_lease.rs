//! Span leases: how every process of the machine learns that a program can still access spans of windows.
//!
//! A program whose connection is in windows stores into the other node's window until it has unmapped it. Until then,
//! the span must not be assigned to another connection. Only the kernel knows when that is, regardless of which process
//! dies first. So the program gets an open file description of its own, on which the bytes of both spans are locked:
//! the lock is released with the description, and that with the last descriptor *and the last mapping* that was made by
//! it, in any process. The lock excludes no access; it is only queried.
//!
//! The position of the description encodes the spans, for a program that gets the descriptor from another by `exec` or
//! `SCM_RIGHTS`. It is not used otherwise.

use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use fabric::shm;
use rustix::fs::{Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use crate::process::buffer;
use crate::process::system::{self, call};
use crate::rendezvous::handshake::WindowSpans;
use segment::Segment;

const PAGE_BYTES: u64 = 4096;
/// Width of a page number: two of them and one bit make a position, which is less than 2^63.
const PAGE_NUMBER_BITS: u32 = 31;
/// Several times what the kernel writes about a descriptor with two locks.
const INFO_BYTES_MAX: usize = 2048;
/// The bit of a position for a modelled link.
const MODELLED: u64 = 1 << (2 * PAGE_NUMBER_BITS);

/// Opens the memory again, as an open file description for one program.
///
/// # Errors
/// Those of open.
pub fn reopen(memory: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    // A duplicate would share the locks with all others.
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

/// Marks both spans as leased to the holder of a descriptor from [`reopen`].
///
/// # Errors
/// Those of fcntl.
pub fn mark_leased(descriptor: BorrowedFd<'_>, spans: WindowSpans) -> Result<(), Errno> {
    for offset in [spans.inbound_offset, spans.outbound_offset] {
        lock(&descriptor, libc::F_OFD_SETLK, &mut span_lock(libc::F_RDLCK, offset)?)?;
    }
    // A local page records the spans itself; and a device has no position.
    if !spans.has_local_state() {
        let _ = rustix::fs::seek(descriptor, SeekFrom::Start(position_of(spans)?));
    }
    Ok(())
}

/// Returns whether both spans were marked on this open file description, and not on another one of the same memory.
pub fn is_marked_on(descriptor: BorrowedFd<'_>, spans: WindowSpans) -> bool {
    // `F_OFD_GETLK` reports only the locks of other descriptions.
    let Ok(mut bytes) = buffer::on_heap(INFO_BYTES_MAX) else { return false };
    let path = format!("/proc/self/fdinfo/{}", descriptor.as_raw_fd());
    let Some(info) = system::read_text(path.as_str(), &mut bytes) else { return false };
    [spans.inbound_offset, spans.outbound_offset].into_iter().all(|first| {
        let last = first.saturating_add(Segment::WINDOW_BYTES as u64 - 1);
        info.lines().filter_map(locked_range).any(|range| range.contains(&first) && range.contains(&last))
    })
}

/// Parses the range of bytes in a line such as `lock: 1: OFDLCK ADVISORY READ -1 00:06:411 4096 278527`. Two adjacent
/// spans have one lock.
fn locked_range(line: &str) -> Option<RangeInclusive<u64>> {
    let mut words = line.strip_prefix("lock:")?.split_ascii_whitespace();
    let (_number, kind) = (words.next()?, words.next()?);
    let (last, first) = (words.next_back()?.parse().ok()?, words.next_back()?.parse().ok()?);
    (kind == "OFDLCK").then_some(first..=last)
}

/// Returns whether the spans that were marked on a descriptor are those of a modelled link, whose model is in them.
pub fn is_modelled(descriptor: BorrowedFd<'_>) -> bool {
    rustix::fs::seek(descriptor, SeekFrom::Current(0)).is_ok_and(|position| position & MODELLED != 0)
}

/// Returns the spans that were marked on a descriptor. `None` for a device, whose descriptor is accompanied by a
/// [`local_page`](crate::rendezvous::local_page).
pub fn spans_of(descriptor: BorrowedFd<'_>) -> Option<WindowSpans> {
    let position = rustix::fs::seek(descriptor, SeekFrom::Current(0)).ok()?;
    let offset = |number: u64| (number & ((1 << PAGE_NUMBER_BITS) - 1)) * PAGE_BYTES;
    let spans = WindowSpans::new(offset(position >> PAGE_NUMBER_BITS), offset(position));
    (position != 0 && shm::is_sealed(descriptor)).then_some(spans)
}

/// Encodes the numbers of both spans' first pages, and whether the link is a modelled one, as a position.
fn position_of(spans: WindowSpans) -> Result<u64, Errno> {
    let page = |offset: u64| {
        let number = offset / PAGE_BYTES;
        if number >> PAGE_NUMBER_BITS == 0 { Ok(number) } else { Err(Errno::OVERFLOW) }
    };
    let modelled = if spans.model.is_some() { MODELLED } else { 0 };
    Ok(modelled | page(spans.inbound_offset)? << PAGE_NUMBER_BITS | page(spans.outbound_offset)?)
}

/// Opens the memory again and marks both spans as leased: [`reopen`] and [`mark_leased`].
///
/// # Errors
/// Those of both functions.
pub fn lease(memory: BorrowedFd<'_>, spans: WindowSpans) -> Result<OwnedFd, Errno> {
    let descriptor = reopen(memory)?;
    mark_leased(descriptor.as_fd(), spans).map(|()| descriptor)
}

/// Returns whether a program of this machine can still access one of the spans.
///
/// # Errors
/// Those of fcntl.
pub fn is_leased(memory: BorrowedFd<'_>, spans: WindowSpans) -> Result<bool, Errno> {
    for offset in [spans.inbound_offset, spans.outbound_offset] {
        // Queries whether a write lock would conflict with a lease.
        let mut asked = span_lock(libc::F_WRLCK, offset)?;
        lock(&memory, libc::F_OFD_GETLK, &mut asked)?;
        if i32::from(asked.l_type) != libc::F_UNLCK {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the lock of a span. A span with the additional bytes of a modelled link is locked as far as one without.
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
    // SAFETY: `span` is an exclusive reference, and `libc::flock` has the kernel's layout on 64-bit machines.
    let done = unsafe { call!(libc::SYS_fcntl, file.as_raw_fd(), command, std::ptr::from_mut(span)) };
    system::unit_or_error(done)
}

#[cfg(test)]
mod tests {
    use super::*;
    use volmem::Mapping;

    const SPAN_BYTES: u64 = Segment::WINDOW_BYTES as u64;
    const FIRST: WindowSpans = WindowSpans::new(0, 2 * SPAN_BYTES);
    const SECOND: WindowSpans = WindowSpans::new(SPAN_BYTES, 3 * SPAN_BYTES);

    #[test]
    fn a_span_is_leased_until_the_last_descriptor_and_the_last_mapping_are_gone() {
        let _no_child = test_support::spawn::forbid();
        let (memory, _mapping) = shm::create(4 * Segment::WINDOW_BYTES).unwrap();
        let is_leased = |spans| is_leased(memory.as_fd(), spans).unwrap();
        assert_eq!((is_leased(FIRST), is_leased(SECOND)), (false, false), "the owner's own mapping does not count");
        let own = lease(memory.as_fd(), FIRST).unwrap();
        assert_eq!((spans_of(own.as_fd()), spans_of(memory.as_fd())), (Some(FIRST), None));
        assert_eq!((is_leased(FIRST), is_leased(SECOND)), (true, false));
        let back = WindowSpans::new(FIRST.outbound_offset, FIRST.inbound_offset);
        assert!(is_leased(back), "either span shows the lease");
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
    fn a_lease_is_distinguished_from_other_descriptors_of_the_same_memory() {
        let (memory, _mapping) = shm::create(4 * Segment::WINDOW_BYTES).unwrap();
        let own = reopen(memory.as_fd()).unwrap();
        for spans in [FIRST, SECOND, WindowSpans::new(SPAN_BYTES, 0)] {
            let lease = lease(memory.as_fd(), spans).unwrap();
            let copy = rustix::io::dup(&lease).unwrap();
            let is_marked_on = |descriptor: &OwnedFd, spans| is_marked_on(descriptor.as_fd(), spans);
            assert_eq!([&lease, &copy, &own].map(|it| is_marked_on(it, spans)), [true, true, false]);
            let partly = WindowSpans::new(spans.inbound_offset, 3 * SPAN_BYTES + 4096);
            assert!(!is_marked_on(&lease, partly), "one span is leased, the other is not");
        }
        assert!(!is_marked_on(own.as_fd(), FIRST));
    }

    #[test]
    fn programs_lease_their_spans_independently() {
        let _no_child = test_support::spawn::forbid();
        let (memory, _mapping) = shm::create(4 * Segment::WINDOW_BYTES).unwrap();
        let is_leased = |spans| is_leased(memory.as_fd(), spans).unwrap();
        let leases = [FIRST, FIRST, SECOND].map(|spans| lease(memory.as_fd(), spans).unwrap());
        assert!(is_leased(FIRST) && is_leased(SECOND));
        let [first, second, third] = leases;
        drop((first, third));
        assert_eq!((is_leased(FIRST), is_leased(SECOND)), (true, false), "one of two leases is left");
        drop(second);
        assert!(!is_leased(FIRST));
    }
}
