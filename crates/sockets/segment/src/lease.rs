//! Span leases: how every proxy of the machine learns that a program can still access spans of windows.
//!
//! A program whose connection is in windows stores into the other node's window until it has unmapped it. Until then,
//! the span must not be assigned to another connection. Only the kernel knows when that is, regardless of which process
//! dies first. So the program gets an open file description of its own, on which the bytes of both spans are locked:
//! the lock is released with the description, and that with the last descriptor *and the last mapping* that was made by
//! it, in any process. The lock excludes no access; it is only queried.

use crate::SPAN_BYTES;
use crate::window::WindowSpans;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

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
    for offset in spans.offsets() {
        lock(descriptor, libc::F_OFD_SETLK, &mut span_lock(libc::F_RDLCK, offset)?)?;
    }
    Ok(())
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
    for offset in spans.offsets() {
        // Queries whether a write lock would conflict with a lease.
        let mut asked = span_lock(libc::F_WRLCK, offset)?;
        lock(memory, libc::F_OFD_GETLK, &mut asked)?;
        if i32::from(asked.l_type) != libc::F_UNLCK {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the lock of a span.
fn span_lock(kind: i32, offset: u64) -> Result<libc::flock, Errno> {
    Ok(libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: i64::try_from(offset).map_err(|_| Errno::INVAL)?,
        l_len: SPAN_BYTES as i64,
        l_pid: 0,
    })
}

fn lock(file: BorrowedFd<'_>, command: i32, span: &mut libc::flock) -> Result<(), Errno> {
    // SAFETY: `span` is an exclusive reference, and `libc::flock` has the kernel's layout on 64-bit machines.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), command, std::ptr::from_mut(span)) };
    if done == -1 {
        Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fabric::shm;
    use volmem::Mapping;

    const BYTES: u64 = SPAN_BYTES as u64;
    const FIRST: WindowSpans = WindowSpans::new(0, 2 * BYTES);
    const SECOND: WindowSpans = WindowSpans::new(BYTES, 3 * BYTES);

    #[test]
    fn a_span_is_leased_until_the_last_descriptor_and_the_last_mapping_are_gone() {
        let _no_child = test_support::spawn::forbid();
        let (memory, _mapping) = shm::create(4 * SPAN_BYTES).unwrap();
        let is_leased = |spans| is_leased(memory.as_fd(), spans).unwrap();
        assert_eq!((is_leased(FIRST), is_leased(SECOND)), (false, false), "the owner's own mapping does not count");
        let own = lease(memory.as_fd(), FIRST).unwrap();
        assert_eq!((is_leased(FIRST), is_leased(SECOND)), (true, false));
        let back = WindowSpans::new(FIRST.outbound_offset, FIRST.inbound_offset);
        assert!(is_leased(back), "either span shows the lease");
        let copy = rustix::io::dup(&own).unwrap();
        drop(own);
        assert!(is_leased(FIRST));
        let mapping = Mapping::at(copy.as_fd(), FIRST.outbound_offset, SPAN_BYTES).unwrap();
        drop(copy);
        assert!(is_leased(FIRST), "mapped");
        drop(mapping);
        assert!(!is_leased(FIRST));
    }

    #[test]
    fn programs_lease_their_spans_independently() {
        let _no_child = test_support::spawn::forbid();
        let (memory, _mapping) = shm::create(4 * SPAN_BYTES).unwrap();
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
