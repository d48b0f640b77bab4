//! Shared file mappings with an owner.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

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

/// Makes calls of libc's on our own account: `errno` is the program's, for whose call we may do without a mapping.
fn keeping_errno<R>(calls: impl FnOnce() -> R) -> R {
    // SAFETY: libc's own variable of this thread.
    let location = unsafe { libc::__errno_location() };
    // SAFETY: the same variable, which nothing else of this thread uses meanwhile.
    let before = unsafe { *location };
    let result = calls();
    // SAFETY: the same variable of this thread, which is there for as long as the thread runs.
    unsafe { *location = before };
    result
}

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
        Self::protected(file, offset_bytes, len_bytes, READ_WRITE)
    }

    /// As [`Mapping::new`], of a file that is mostly never touched: none of its memory is locked or taken beforehand,
    /// even in a process that has called `mlockall(MCL_FUTURE)`.
    ///
    /// # Errors
    /// As [`Mapping::new`], and what `mprotect(2)` answers.
    pub fn sparse(file: BorrowedFd<'_>, len_bytes: usize) -> io::Result<Self> {
        // `mmap` takes all memory of a locked mapping that can be read or written, so this one can be neither until it
        // is unlocked.
        let mapping = Self::protected(file, 0, len_bytes, libc::PROT_NONE)?;
        let address = mapping.base.as_ptr().cast();
        // SAFETY: the range is the new mapping, which nobody has seen. Whether it stays locked decides only when its
        // memory is taken.
        let make_accessible = || unsafe {
            libc::munlock(address, len_bytes);
            let is_accessible = libc::mprotect(address, len_bytes, READ_WRITE) == 0;
            if is_accessible { Ok(()) } else { Err(io::Error::last_os_error()) }
        };
        keeping_errno(make_accessible).map(|()| mapping)
    }

    fn protected(file: BorrowedFd<'_>, offset_bytes: u64, len_bytes: usize, protection: i32) -> io::Result<Self> {
        let offset = libc::off_t::try_from(offset_bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        let (anywhere, file) = (std::ptr::null_mut(), file.as_raw_fd());
        let address = keeping_errno(|| {
            // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
            match unsafe { libc::mmap(anywhere, len_bytes, protection, libc::MAP_SHARED, file, offset) } {
                libc::MAP_FAILED => Err(io::Error::last_os_error()),
                address => Ok(address),
            }
        })?;
        let base = NonNull::new(address.cast()).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { base, len_bytes })
    }

    /// Maps the whole multiples of `alignment` around `len_bytes` of `file` from `offset_bytes` on: a part of a device
    /// that maps nothing less. Says where in the mapping that part begins.
    ///
    /// # Errors
    /// As [`Mapping::at`], and `InvalidInput` for what lies beyond files.
    pub fn around(
        file: BorrowedFd<'_>,
        offset_bytes: u64,
        len_bytes: usize,
        alignment: Alignment,
    ) -> io::Result<(Self, usize)> {
        let around = alignment.around(offset_bytes, len_bytes).ok_or(io::ErrorKind::InvalidInput)?;
        Self::at(file, around.offset_bytes, around.len_bytes).map(|mapping| (mapping, around.part_offset))
    }

    /// Gives the memory of the whole pages among `len_bytes` from `begin` on, which lie in the mapping, back to the
    /// system.
    #[cfg(not(loom))] // Modelled memory is no mapping.
    pub(crate) fn discard(&self, begin: NonNull<u8>, len_bytes: usize) {
        const PAGE_BYTES: usize = Alignment::MIN_BYTES as usize;
        let first = begin.addr().get().next_multiple_of(PAGE_BYTES);
        let end = (begin.addr().get() + len_bytes) / PAGE_BYTES * PAGE_BYTES;
        if first < end {
            let pages = begin.as_ptr().with_addr(first);
            // SAFETY: inside the mapping, as the caller says. What changes is the contents, which others may write at
            // any time too.
            keeping_errno(|| unsafe { libc::madvise(pages.cast(), end - first, libc::MADV_REMOVE) });
        }
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
        keeping_errno(|| unsafe { libc::munmap(self.base.as_ptr().cast(), self.len_bytes) });
    }
}

/// What mappings of a device begin and end at whole multiples of: a power of two, at least [`Alignment::MIN_BYTES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alignment {
    log2: u8,
}

/// Whole multiples of an [`Alignment`] around a part of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Around {
    offset_bytes: u64,
    len_bytes: usize,
    /// Where in them the part begins.
    part_offset: usize,
}

impl Alignment {
    /// The smallest page of any machine: the kernel maps nothing less.
    pub const MIN_BYTES: u64 = 4096;

    /// `None`: no power of two, or less than a page.
    pub fn new(bytes: u64) -> Option<Self> {
        let is_valid = bytes.is_power_of_two() && bytes >= Self::MIN_BYTES;
        is_valid.then_some(Self { log2: bytes.trailing_zeros() as u8 })
    }

    /// As [`Alignment::new`], of 2 to the power of `log2` bytes.
    pub fn from_log2(log2: u8) -> Option<Self> {
        1_u64.checked_shl(log2.into()).and_then(Self::new)
    }

    /// Which power of two.
    pub fn log2(self) -> u8 {
        self.log2
    }

    /// In bytes.
    pub fn bytes(self) -> u64 {
        1 << self.log2
    }

    fn around(self, offset_bytes: u64, len_bytes: usize) -> Option<Around> {
        let begin = offset_bytes & !(self.bytes() - 1);
        let end = offset_bytes.checked_add(len_bytes as u64)?.checked_next_multiple_of(self.bytes())?;
        Some(Around {
            offset_bytes: begin,
            len_bytes: usize::try_from(end - begin).ok()?,
            part_offset: (offset_bytes - begin) as usize,
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{Region, sync::Arc};
    use std::fs::File;
    use std::os::fd::{AsFd, FromRawFd};
    use std::os::unix::fs::{FileExt, MetadataExt};

    const PAGE_BYTES: u64 = 4096;

    fn file() -> File {
        let thread = std::thread::current().id();
        let path = std::env::temp_dir().join(format!("volmem-mapping-{}-{thread:?}", std::process::id()));
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

    #[test]
    fn miri_whole_multiples_around_a_part_are_the_fewest_that_hold_it() {
        const UNIT_BYTES: u64 = 2 << 20;
        let alignment = Alignment::new(UNIT_BYTES).unwrap();
        let around = |offset_bytes, len_bytes| {
            let found = alignment.around(offset_bytes, len_bytes)?;
            Some((found.offset_bytes / UNIT_BYTES, found.len_bytes as u64 / UNIT_BYTES, found.part_offset))
        };
        const PART_BYTES: usize = 268 << 10;
        assert_eq!(around(0, PART_BYTES), Some((0, 1, 0)));
        assert_eq!(around(4096, PART_BYTES), Some((0, 1, 4096)));
        let last_within = UNIT_BYTES - PART_BYTES as u64;
        assert_eq!(around(last_within, PART_BYTES), Some((0, 1, last_within as usize)), "ends where a multiple does");
        assert_eq!(around(last_within + 4096, PART_BYTES), Some((0, 2, last_within as usize + 4096)));
        assert_eq!(around(7 * UNIT_BYTES, UNIT_BYTES as usize), Some((7, 1, 0)));
        for offset_bytes in [u64::MAX, u64::MAX - UNIT_BYTES / 2 - PART_BYTES as u64] {
            assert_eq!(around(offset_bytes, PART_BYTES), None, "{offset_bytes:#x}");
        }
    }

    #[test]
    fn miri_an_alignment_is_a_power_of_two_of_at_least_a_page() {
        for bytes in [4096, 2 << 20, 1 << 30, 1 << 63] {
            let alignment = Alignment::new(bytes).unwrap();
            assert_eq!((alignment.bytes(), Alignment::from_log2(alignment.log2())), (bytes, Some(alignment)));
        }
        assert_eq!([0, 1, 2048, 4097, 3 << 20].map(Alignment::new), [None; 5]);
        assert_eq!([0, 11, 64, 255].map(Alignment::from_log2), [None; 4]);
    }

    #[test]
    fn a_part_is_found_in_the_multiples_that_are_mapped_around_it() {
        let file = file();
        let alignment = Alignment::new(2 * PAGE_BYTES).unwrap();
        let (mapping, part) = Mapping::around(file.as_fd(), PAGE_BYTES + 8, 8, alignment).unwrap();
        assert_eq!((mapping.len_bytes() as u64, part as u64), (2 * PAGE_BYTES, PAGE_BYTES + 8));
        Region::of_mapping(Arc::new(mapping)).sub(part, 8).write(0, b"in there");
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, PAGE_BYTES + 8).unwrap();
        assert_eq!(&bytes, b"in there");
        let beyond = Mapping::around(file.as_fd(), u64::MAX, 8, alignment).unwrap_err();
        assert_eq!(beyond.kind(), io::ErrorKind::InvalidInput);
    }

    /// A region of a sealed memfd of so many pages, all of them written, and its file.
    fn written(pages: usize) -> (Region, File) {
        // SAFETY: the name ends in a zero byte.
        let descriptor = unsafe { libc::memfd_create(c"volmem-test".as_ptr(), libc::MFD_ALLOW_SEALING) };
        assert!(descriptor >= 0, "{}", io::Error::last_os_error());
        // SAFETY: new, and nobody else's.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.set_len((pages * PAGE_BYTES as usize) as u64).unwrap();
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: a system call without pointers.
        assert_eq!(unsafe { libc::fcntl(descriptor, libc::F_ADD_SEALS, seals) }, 0);
        let mapping = Mapping::new(file.as_fd(), pages * PAGE_BYTES as usize).unwrap();
        let region = Region::of_mapping(Arc::new(mapping));
        region.write(0, &vec![0xA5; region.len_bytes()]);
        assert_eq!(taken_bytes(&file), region.len_bytes());
        (region, file)
    }

    /// Bytes of memory that a file has.
    fn taken_bytes(file: &File) -> usize {
        file.metadata().unwrap().blocks() as usize * 512
    }

    /// Offsets of the first and behind the last byte that is zero.
    fn zeros(region: &Region) -> Option<(usize, usize)> {
        let mut bytes = vec![0; region.len_bytes()];
        region.read(0, &mut bytes);
        let first = bytes.iter().position(|byte| *byte == 0)?;
        let last = bytes.iter().rposition(|byte| *byte == 0)?;
        assert!(bytes[first..=last].iter().all(|byte| *byte == 0), "zeros in several places");
        Some((first, last + 1))
    }

    #[test]
    fn the_memory_of_whole_pages_goes_back_to_the_system_and_no_other() {
        const PAGE: usize = PAGE_BYTES as usize;
        for (offset, len_bytes, discarded) in [
            (0, 8 * PAGE, Some((0, 8 * PAGE))),
            (2 * PAGE, 3 * PAGE, Some((2 * PAGE, 5 * PAGE))),
            (PAGE - 1, 2 * PAGE + 2, Some((PAGE, 3 * PAGE))),
            (PAGE + 1, 2 * PAGE - 1, Some((2 * PAGE, 3 * PAGE))),
            (PAGE + 1, 2 * PAGE - 2, None),
            (PAGE, PAGE - 1, None),
            (PAGE + 64, 128, None),
            (5 * PAGE, 0, None),
            (8 * PAGE, 0, None),
        ] {
            let (region, file) = written(8);
            region.discard(offset, len_bytes);
            let discarded_bytes = discarded.map_or(0, |(begin, end)| end - begin);
            assert_eq!(taken_bytes(&file), 8 * PAGE - discarded_bytes, "{offset}+{len_bytes}");
            assert_eq!(zeros(&region), discarded, "{offset}+{len_bytes}");
            region.write(offset, &vec![1; len_bytes]);
        }
    }

    #[test]
    fn what_a_part_of_a_region_discards_is_gone_from_every_mapping() {
        const PAGE: usize = PAGE_BYTES as usize;
        let (region, file) = written(4);
        let others = Region::of_mapping(Arc::new(Mapping::new(file.as_fd(), 4 * PAGE).unwrap()));
        region.sub(PAGE, 3 * PAGE).discard(PAGE, PAGE);
        assert_eq!(zeros(&others), Some((2 * PAGE, 3 * PAGE)));
    }

    #[test]
    fn memory_of_the_heap_is_left_alone() {
        let region = Region::heap(64 << 10);
        region.write(0, &vec![0xA5; region.len_bytes()]);
        region.discard(0, region.len_bytes());
        assert_eq!(zeros(&region), None);
    }

    #[test]
    fn a_span_outside_of_a_region_is_not_discarded() {
        const PAGE: usize = PAGE_BYTES as usize;
        let (whole, file) = written(4);
        let region = whole.sub(PAGE, 2 * PAGE);
        let spans = [(0, 2 * PAGE + 1), (2 * PAGE + 1, 0), (PAGE, 2 * PAGE), (usize::MAX, 2), (1, usize::MAX)];
        for (offset, len_bytes) in spans {
            let discard = std::panic::AssertUnwindSafe(|| region.discard(offset, len_bytes));
            assert!(std::panic::catch_unwind(discard).is_err(), "{offset}+{len_bytes}");
        }
        assert_eq!((taken_bytes(&file), zeros(&whole)), (4 * PAGE, None));
    }
}
