//! Buffers at addresses where no program has memory: the page at null, and addresses beyond user space.
//!
//! For those the kernel returns `EFAULT`, and so does this module, at the cost of one comparison. Only the kernel knows
//! whether any other address is mapped: copying from or to an unmapped one faults.

use super::{Connection, MessageFlags, total_bytes};
use libc::iovec;
use rustix::io::Errno;

/// The size of the page at null, which Linux does not map by default (`vm.mmap_min_addr`).
const ADDRESS_MIN: usize = 4096;
/// The end of user space where page tables have five levels.
const ADDRESS_END: usize = 1 << 56;

/// Returns whether a buffer is at an address where no program has memory.
#[inline(always)] // Called by every send and receive.
pub(super) fn has_bad_address(spans: &[iovec]) -> bool {
    spans.iter().any(|span| span.iov_base.addr().wrapping_sub(ADDRESS_MIN) >= ADDRESS_END - ADDRESS_MIN)
}

/// Returns whether a buffer is beyond user space. The kernel refuses such a buffer before it checks the connection,
/// even if it is empty.
fn is_beyond_user_space(span: &iovec) -> bool {
    span.iov_base.addr() >= ADDRESS_END
}

/// Returns the buffers before the first non-empty one at null, if there is one.
fn spans_before_null(spans: &[iovec]) -> Option<&[iovec]> {
    let first = spans.iter().position(|span| span.iov_base.addr() < ADDRESS_MIN && span.iov_len > 0)?;
    Some(&spans[..first])
}

impl Connection {
    /// Receives as [`Connection::receive`] does, with a buffer at a bad address. Bytes that do not fit in the buffers
    /// before that one stay unread.
    ///
    /// # Safety
    /// Every span that is not at a bad address is writable for its length.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn receive_with_bad_address(
        &'static self,
        spans: &[iovec],
        flags: MessageFlags,
    ) -> Result<usize, Errno> {
        if spans.iter().any(is_beyond_user_space) {
            return Err(Errno::FAULT);
        }
        let before = match spans_before_null(spans) {
            Some(before) if !flags.discard => before,
            // SAFETY: the spans at bad addresses are empty, or nothing is copied because the bytes are discarded.
            _ => return unsafe { self.receive_checked(spans, flags) },
        };
        let count_only = MessageFlags { peek: true, discard: true, wait_all: false, ..flags };
        // SAFETY: nothing is copied, because the bytes are only counted.
        match unsafe { self.receive_checked(spans, count_only) }? {
            0 => Ok(0),
            // SAFETY: the spans before the first bad one are writable, by this function's contract.
            bytes if bytes <= total_bytes(before) => unsafe { self.receive_checked(before, flags) },
            _ => Err(Errno::FAULT),
        }
    }

    /// Sends as [`Connection::send`] does, with a buffer at a bad address.
    ///
    /// # Safety
    /// Every span that is not at a bad address is readable for its length.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn send_with_bad_address(
        &'static self,
        spans: &[iovec],
        flags: MessageFlags,
    ) -> Result<usize, Errno> {
        if spans.iter().any(is_beyond_user_space) {
            return Err(Errno::FAULT);
        }
        if spans_before_null(spans).is_none() {
            // SAFETY: the spans at bad addresses are empty, and the others are readable by this function's contract.
            return unsafe { self.send_checked(spans, flags) };
        }
        // Errors of the connection take precedence.
        // SAFETY: there are no spans.
        unsafe { self.send_checked(&[], flags) }?;
        Err(Errno::FAULT)
    }
}
