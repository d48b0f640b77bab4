//! Memory that only its creator can write: the peer gets a descriptor that it can neither write nor map writable.
//!
//! The descriptor is opened a second time, for reading only, and the mode of the file keeps other users from opening it
//! for writing. A process of the same user could change the mode, as it could attach with ptrace(2). Where there is no
//! `/proc`, the seal `F_SEAL_FUTURE_WRITE` (Linux 5.1) protects the memory from every process instead, but then the
//! creator cannot return parts of it to the system either: the kernel refuses `MADV_REMOVE`.

use super::{SEALS_REQUIRED, ShmError, check_file_system, check_length, map, new_file};
use rustix::fs::{Mode, OFlags, SealFlags};
use rustix::fs::{fchmod, fcntl_add_seals, fcntl_get_seals, fstat, open};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use volmem::Mapping;

/// Memory that this process writes.
#[derive(Debug)]
pub struct OwnMemory {
    /// The memory, readable and writable.
    pub mapping: Mapping,
    /// The descriptor for the peer. It cannot be used to write.
    pub descriptor: OwnedFd,
    /// Whether parts of the memory can be returned to the system.
    pub is_releasable: bool,
}

/// How the peer is kept from writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protection {
    /// By a descriptor for reading only.
    Descriptor,
    /// By the seal against future writable mappings and writes.
    Seal,
}

/// Makes zeroed memory of `len_bytes` that can neither shrink nor grow, and that only this process and its children
/// write: the peer's descriptor permits no writing, and the mode of the file no other user. (A process of the same user
/// could change the mode through its descriptor and open the file again, as it could attach with ptrace(2).)
///
/// # Errors
/// [`ShmError::Length`], or [`ShmError::System`] with the kernel's error.
pub fn create_own(len_bytes: usize) -> Result<OwnMemory, ShmError> {
    create_protected(len_bytes, Protection::Descriptor).or_else(|_| create_protected(len_bytes, Protection::Seal))
}

pub(super) fn create_protected(len_bytes: usize, protection: Protection) -> Result<OwnMemory, ShmError> {
    let failed = |call| move |errno: Errno| ShmError::System { call, len_bytes, error: errno.into() };
    let memfd = new_file(len_bytes)?;
    let mapping = map(memfd.as_fd(), len_bytes)?;
    let is_releasable = protection == Protection::Descriptor;
    let seals = if is_releasable { SEALS_REQUIRED } else { SEALS_REQUIRED | SealFlags::FUTURE_WRITE };
    fcntl_add_seals(&memfd, seals).map_err(failed("fcntl F_ADD_SEALS"))?;
    let descriptor = match protection {
        Protection::Descriptor => reopen_for_reading(memfd.as_fd()).map_err(failed("open"))?,
        Protection::Seal => memfd,
    };
    Ok(OwnMemory { mapping, descriptor, is_releasable })
}

fn reopen_for_reading(memfd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    fchmod(memfd, Mode::RUSR)?;
    // The thread's own table of descriptors, in case it does not share the process's.
    let path = format!("/proc/thread-self/fd/{}", memfd.as_raw_fd());
    open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

/// Maps memory that a peer has made with [`create_own`], for reading only. `is_size` says which sizes are accepted. No
/// call on the descriptor can block, whatever the peer has sent.
///
/// # Errors
/// The descriptor is not acceptable. The error has the values found.
pub fn open_readable(memfd: impl AsFd, is_size: impl Fn(usize) -> bool) -> Result<Mapping, ShmError> {
    let memfd = memfd.as_fd();
    // First, because it asks no file system: only memory files have seals.
    let found = fcntl_get_seals(memfd)
        .map_err(|errno| ShmError::NotMemfd { descriptor: memfd.as_raw_fd(), error: errno.into() })?;
    if !found.contains(SEALS_REQUIRED) {
        return Err(ShmError::Seals { found: found.bits(), required: SEALS_REQUIRED.bits(), refused: 0 });
    }
    let stat = fstat(memfd).map_err(|errno| ShmError::System { call: "fstat", len_bytes: 0, error: errno.into() })?;
    let found_bytes = stat.st_size as u64;
    let len_bytes = usize::try_from(found_bytes).ok().filter(|len_bytes| is_size(*len_bytes));
    let len_bytes = len_bytes.ok_or(ShmError::UnknownSize { found_bytes })?;
    check_length(len_bytes)?;
    check_file_system(memfd, stat.st_blksize as u64, len_bytes)?;
    Mapping::sparse_read_only(memfd, len_bytes).map_err(|error| ShmError::System { call: "mmap", len_bytes, error })
}

#[cfg(test)]
mod tests;
