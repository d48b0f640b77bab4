//! Memory that a peer has passed.

use std::os::fd::BorrowedFd;

use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};

use crate::reason::Reason;

/// The type of a memfd's file system without huge pages (`linux/magic.h`).
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// Smaller than every huge page.
const PAGE_BYTES: u64 = 4096;

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
    let stat = fstat(descriptor).map_err(|_| Reason::Memory)?;
    let is_large_enough = u64::try_from(stat.st_size).is_ok_and(|size_bytes| size_bytes >= stated_bytes);
    if is_large_enough && has_small_pages(descriptor, stat.st_blksize as u64)? { Ok(()) } else { Err(Reason::Memory) }
}

/// Returns whether a memory file has ordinary pages. The block size of hugetlbfs is that of its pages; so may be that
/// of shared memory with transparent huge pages (`shmem_getattr`), which its file system tells apart.
fn has_small_pages(descriptor: BorrowedFd<'_>, block_bytes: u64) -> Result<bool, Reason> {
    Ok(block_bytes == PAGE_BYTES || fstatfs(descriptor).map_err(|_| Reason::Memory)?.f_type as u64 == TMPFS_MAGIC)
}
