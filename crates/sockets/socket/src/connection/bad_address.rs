//! Buffers where no program has memory: at null and just behind it, and beyond the addresses of programs. To them the
//! kernel answers `EFAULT`, and so does this, for one comparison. Whether there is memory at any other address only the
//! kernel knows: who copies from or to one without finds out by a fault.

use super::{Connection, Flags, total_bytes};
use libc::iovec;
use rustix::io::Errno;

/// The page at null, which Linux gives to nobody by default (`vm.mmap_min_addr`).
const ADDRESS_MIN: usize = 4096;
/// The end of the addresses of programs where pages have five levels.
const ADDRESS_END: usize = 1 << 56;

/// Whether a buffer is where nobody has memory.
#[inline(always)] // Asked by every call.
pub(super) fn has_bad_address(spans: &[iovec]) -> bool {
    spans.iter().any(|span| span.iov_base.addr().wrapping_sub(ADDRESS_MIN) >= ADDRESS_END - ADDRESS_MIN)
}

/// The kernel refuses it before it looks at the connection, even if it is empty.
fn is_beyond_user_space(span: &iovec) -> bool {
    span.iov_base.addr() >= ADDRESS_END
}

/// Those in front of the first that is at null and not empty, if there is one.
fn spans_before_null(spans: &[iovec]) -> Option<&[iovec]> {
    let first = spans.iter().position(|span| span.iov_base.addr() < ADDRESS_MIN && span.iov_len > 0)?;
    Some(&spans[..first])
}

impl Connection {
    /// As [`Connection::receive`], where a buffer is nowhere. What does not fit in front of that stays unread.
    ///
    /// # Safety
    /// Every other span is writable for its length.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn receive_with_bad_address(
        &'static self,
        spans: &[iovec],
        flags: Flags,
    ) -> Result<usize, Errno> {
        if spans.iter().any(is_beyond_user_space) {
            return Err(Errno::FAULT);
        }
        let before = match spans_before_null(spans) {
            Some(before) if !flags.discard => before,
            // SAFETY: those that are nowhere are empty, or nothing is copied.
            _ => return unsafe { self.receive_checked(spans, flags) },
        };
        let look = Flags { peek: true, discard: true, wait_all: false, ..flags };
        // SAFETY: nothing is copied.
        match unsafe { self.receive_checked(spans, look) }? {
            0 => Ok(0),
            // SAFETY: our caller says that what is not nowhere is writable.
            bytes if bytes <= total_bytes(before) => unsafe { self.receive_checked(before, flags) },
            _ => Err(Errno::FAULT),
        }
    }

    /// As [`Connection::send`], where a buffer is nowhere.
    ///
    /// # Safety
    /// Every other span is readable for its length.
    #[cold]
    #[inline(never)]
    pub(super) unsafe fn send_with_bad_address(&'static self, spans: &[iovec], flags: Flags) -> Result<usize, Errno> {
        if spans.iter().any(is_beyond_user_space) {
            return Err(Errno::FAULT);
        }
        if spans_before_null(spans).is_none() {
            // SAFETY: those that are nowhere are empty.
            return unsafe { self.send_checked(spans, flags) };
        }
        // What there is to say of the connection comes first.
        // SAFETY: no spans.
        unsafe { self.send_checked(&[], flags) }?;
        Err(Errno::FAULT)
    }
}
