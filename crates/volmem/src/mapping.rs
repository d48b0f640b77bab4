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
        Self::at(file, 0, len_bytes)
    }

    /// Maps `len_bytes` of `file` from `offset_bytes` on: a part of a device whose file is a row of its regions.
    ///
    /// # Errors
    /// What `mmap(2)` answers; `InvalidInput` for a length of zero, and an offset between pages or beyond files.
    pub fn at(file: BorrowedFd<'_>, offset_bytes: u64, len_bytes: usize) -> io::Result<Self> {
        let offset = libc::off_t::try_from(offset_bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                offset,
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{Region, sync::Arc};
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    const PAGE_BYTES: u64 = 4096;

    fn file() -> File {
        let path = std::env::temp_dir().join(format!("volmem-mapping-{}", std::process::id()));
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file.set_len(2 * PAGE_BYTES).unwrap();
        file
    }

    #[test]
    fn a_mapping_begins_at_its_offset_and_one_between_pages_is_refused() {
        let file = file();
        let mapping = Mapping::at(file.as_fd(), PAGE_BYTES, PAGE_BYTES as usize).unwrap();
        Region::of_mapping(Arc::new(mapping)).write(1, b"here");
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, PAGE_BYTES + 1).unwrap();
        assert_eq!(&bytes, b"here");
        for offset_bytes in [1, u64::MAX] {
            let error = Mapping::at(file.as_fd(), offset_bytes, PAGE_BYTES as usize).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        }
    }
}
