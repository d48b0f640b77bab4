//! Memory mappings that are shared with the kernel.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// A readable and writable mapping, which is unmapped when it is dropped.
pub(crate) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping is valid in every thread of the process and belongs to this value alone; access to its memory
// through [`Mapping::at`] is unsafe code with its own argument.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps memory that a socket shares with the kernel.
    pub fn of_socket(socket: impl AsFd, offset: u64, bytes: usize) -> io::Result<Mapping> {
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: the mapping is new, at an address that the kernel chooses, so it replaces no other memory.
        let start =
            unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags, socket, offset) }?;
        Ok(Mapping { start: NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?, bytes })
    }

    /// Maps private memory of this process, filled with zeroes.
    pub fn anonymous(bytes: usize) -> io::Result<Mapping> {
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: the mapping is new, at an address that the kernel chooses, so it replaces no other memory.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
        Ok(Mapping { start: NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?, bytes })
    }

    /// Returns the length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns a pointer to the byte at `offset`. Panics unless `bytes` bytes from there lie within the mapping: a
    /// wrong offset is a bug or an invalid value of the kernel.
    pub fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes), "{bytes} B at {offset} of a mapping of {} B", self.bytes);
        // SAFETY: the assertion above has checked that `offset` lies within the mapping.
        unsafe { self.start.as_ptr().add(offset) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping of `self.bytes` bytes at `self.start`, and its users, which hold the
        // pointers into it, own this value.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
