//! Shared file mappings with an owner.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// A shared, readable and writable mapping of a file, unmapped when dropped.
///
/// The file must not shrink while it is mapped: seal a memfd with `F_SEAL_SHRINK` before mapping it, and check the
/// seals of one that somebody else made. Otherwise a peer could truncate it and turn every access into SIGBUS.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: a mapping is an address range; the memory in it is reached only through `Region`, which is made of atomic
// accesses.
unsafe impl Send for Mapping {}
// SAFETY: as above; `Mapping` itself has no interior state.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len_bytes` of `file`.
    ///
    /// # Errors
    /// What `mmap(2)` answers; `InvalidInput` for a length of zero.
    pub fn new(file: BorrowedFd<'_>, len_bytes: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(address.cast()).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { base, len_bytes })
    }

    /// First byte of the mapping.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new` and every `Region` of it holds an `Arc` of this mapping, so none is
        // left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len_bytes) };
    }
}
