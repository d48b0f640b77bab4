//! Buffers that are too large for a stack. Threads may have as little as 16 KiB of it (`PTHREAD_STACK_MIN`), so that no
//! array there has more than 1 KiB.

#![allow(unsafe_code)] // The mapping of a buffer.

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::ffi::c_void;
use std::ptr::NonNull;

/// Returns a zeroed buffer on the heap.
///
/// # Errors
/// `NOMEM`.
pub(crate) fn on_heap(len_bytes: usize) -> Result<Vec<u8>, Errno> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len_bytes).map_err(|_| Errno::NOMEM)?;
    bytes.resize(len_bytes, 0);
    Ok(bytes)
}

/// A zeroed buffer in a mapping of its own, for calls that must not use the heap, as signal handlers and children of
/// `vfork` make them.
pub(crate) struct MappedBuffer {
    base: NonNull<u8>,
    len_bytes: usize,
}

impl MappedBuffer {
    /// Maps a buffer.
    ///
    /// # Errors
    /// Those of mmap.
    pub(crate) fn new(len_bytes: usize) -> Result<Self, Errno> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses affects no existing memory.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len_bytes, protection, MapFlags::PRIVATE)? };
        Ok(Self { base: NonNull::new(base.cast()).ok_or(Errno::NOMEM)?, len_bytes })
    }

    /// Returns the bytes.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping has `len_bytes`, lives as long as `self`, and is accessed through `self` only.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len_bytes) }
    }
}

impl Drop for MappedBuffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is that of `new`, and no reference to it outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast::<c_void>(), self.len_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zeroed_and_can_be_written() {
        let (mut on_heap, mut mapped) = (on_heap(5000).unwrap(), MappedBuffer::new(5000).unwrap());
        for bytes in [&mut on_heap[..], mapped.bytes()] {
            assert_eq!(bytes, [0; 5000]);
            bytes.fill(7);
            assert_eq!(bytes, [7; 5000]);
        }
        assert_eq!(MappedBuffer::new(0).err(), Some(Errno::INVAL));
    }
}
