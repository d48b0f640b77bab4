//! Memory that a peer has passed.

use std::os::fd::BorrowedFd;

use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};

use crate::reason::Reason;

/// The type of a memfd's file system without huge pages (`linux/magic.h`).
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Checks whether a descriptor is a memfd that cannot shrink and has at least as many bytes as the peer states.
///
/// The seals come first: the kernel answers `F_GET_SEALS` without asking a file system (`memfd_fcntl`), and with an
/// error for everything that is neither shared memory nor of hugetlbfs. Of these two, a mapping of hugetlbfs is
/// refused: a read of it may find no page, and raise `SIGBUS`.
///
/// # Errors
/// [`Reason::Memory`].
pub fn check(descriptor: BorrowedFd<'_>, stated_bytes: u64) -> Result<(), Reason> {
    let seals = fcntl_get_seals(descriptor).map_err(|_| Reason::Memory)?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(Reason::Memory);
    }
    let file_system = fstatfs(descriptor).map_err(|_| Reason::Memory)?.f_type;
    let size_bytes = fstat(descriptor).map_err(|_| Reason::Memory)?.st_size;
    let is_large_enough = u64::try_from(size_bytes).is_ok_and(|size_bytes| size_bytes >= stated_bytes);
    if file_system as u64 == TMPFS_MAGIC && is_large_enough { Ok(()) } else { Err(Reason::Memory) }
}
