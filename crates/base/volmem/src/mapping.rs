//! Shared file mappings.

use std::io;
#[cfg(not(loom))]
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// A shared, readable and writable mapping of a file, unmapped when dropped.
///
/// The file must not shrink while it is mapped: seal a memfd with `F_SEAL_SHRINK` before mapping it, and check the
/// seals of a memfd that another process made. Otherwise a peer could truncate it, and every access would raise SIGBUS.
///
/// A core dump leaves it out (`MADV_DONTDUMP`), also that of a child: the kernel would read every page of the file, and
/// so allocate memory for those that nobody has written.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: a mapping is an address range. Its memory is accessed only through `Region`, whose accesses are atomic or
// opaque copies.
unsafe impl Send for Mapping {}
// SAFETY: `Mapping` has no interior state, and its memory is accessed only through `Region`, whose accesses are atomic
// or opaque copies.
unsafe impl Sync for Mapping {}

/// Makes libc calls without changing `errno`, which inside a preloaded library belongs to the program, whose call may
/// succeed without the mapping.
fn keeping_errno<R>(calls: impl FnOnce() -> R) -> R {
    // SAFETY: the function has no preconditions and returns the address of this thread's variable.
    let location = unsafe { libc::__errno_location() };
    // SAFETY: the variable lives as long as this thread, and nothing else accesses it meanwhile.
    let before = unsafe { *location };
    let result = calls();
    // SAFETY: the variable lives as long as this thread, and nothing else accesses it meanwhile.
    unsafe { *location = before };
    result
}

impl Mapping {
    /// Maps the first `len_bytes` of `file`.
    ///
    /// # Errors
    /// The error of `mmap(2)`; `InvalidInput` for a length of zero.
    pub fn new(file: BorrowedFd<'_>, len_bytes: usize) -> io::Result<Self> {
        Self::at(file, 0, len_bytes)
    }

    /// Maps `len_bytes` of `file` from `offset_bytes` on: for example one region of a device whose file is a sequence
    /// of regions.
    ///
    /// # Errors
    /// The error of `mmap(2)`; `InvalidInput` for a length of zero, and for an offset that is not page-aligned or
    /// exceeds `off_t`.
    pub fn at(file: BorrowedFd<'_>, offset_bytes: u64, len_bytes: usize) -> io::Result<Self> {
        Self::protected(file, offset_bytes, len_bytes, READ_WRITE)
    }

    /// Maps like [`Mapping::at`] memory that another party writes, for reading only.
    ///
    /// # Errors
    /// As [`Mapping::at`].
    pub fn read_only_at(file: BorrowedFd<'_>, offset_bytes: u64, len_bytes: usize) -> io::Result<Self> {
        Self::protected(file, offset_bytes, len_bytes, libc::PROT_READ)
    }

    /// Maps zeroed memory of no file, which children of a fork share. It is allocated as it is used.
    ///
    /// # Errors
    /// The error of `mmap(2)`; `InvalidInput` for a length of zero.
    pub fn anonymous(len_bytes: usize) -> io::Result<Self> {
        Self::of_flags(libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1, 0, len_bytes, READ_WRITE)
    }

    /// Maps like [`Mapping::new`] a file of which most is never accessed: none of its memory is locked or allocated in
    /// advance, even in a process that has called `mlockall(MCL_FUTURE)`.
    ///
    /// # Errors
    /// The errors of [`Mapping::new`], and that of `mprotect(2)`.
    pub fn sparse(file: BorrowedFd<'_>, len_bytes: usize) -> io::Result<Self> {
        Self::sparse_protected(file, len_bytes, READ_WRITE)
    }

    /// Maps like [`Mapping::sparse`] a file that another party writes, for reading only: a store to a region of the
    /// mapping raises SIGSEGV.
    ///
    /// # Errors
    /// As [`Mapping::sparse`].
    pub fn sparse_read_only(file: BorrowedFd<'_>, len_bytes: usize) -> io::Result<Self> {
        Self::sparse_protected(file, len_bytes, libc::PROT_READ)
    }

    fn sparse_protected(file: BorrowedFd<'_>, len_bytes: usize, protection: i32) -> io::Result<Self> {
        // `mmap` allocates all memory of a locked mapping that is readable or writable, so this mapping is neither
        // until it is unlocked.
        let mapping = Self::protected(file, 0, len_bytes, libc::PROT_NONE)?;
        let address = mapping.base.as_ptr().cast();
        // SAFETY: the range is the new mapping, which nothing else uses yet. A failed `munlock` only means that its
        // memory is allocated in advance.
        let make_accessible = || unsafe {
            libc::munlock(address, len_bytes);
            let is_accessible = libc::mprotect(address, len_bytes, protection) == 0;
            if is_accessible { Ok(()) } else { Err(io::Error::last_os_error()) }
        };
        keeping_errno(make_accessible).map(|()| mapping)
    }

    fn protected(file: BorrowedFd<'_>, offset_bytes: u64, len_bytes: usize, protection: i32) -> io::Result<Self> {
        let offset = libc::off_t::try_from(offset_bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        Self::of_flags(libc::MAP_SHARED, file.as_raw_fd(), offset, len_bytes, protection)
    }

    fn of_flags(flags: i32, file: i32, offset: libc::off_t, len_bytes: usize, protection: i32) -> io::Result<Self> {
        let anywhere = std::ptr::null_mut();
        let address = keeping_errno(|| {
            // SAFETY: the kernel chooses the address, so the new mapping replaces no existing memory.
            match unsafe { libc::mmap(anywhere, len_bytes, protection, flags, file, offset) } {
                libc::MAP_FAILED => Err(io::Error::last_os_error()),
                address => {
                    // SAFETY: the range is the new mapping; the advice changes only what a core dump has.
                    unsafe { libc::madvise(address, len_bytes, libc::MADV_DONTDUMP) };
                    Ok(address)
                }
            }
        })?;
        let base = NonNull::new(address.cast()).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { base, len_bytes })
    }

    /// Maps the smallest range of multiples of `alignment` that contains `len_bytes` of `file` from `offset_bytes` on,
    /// for a device with a coarser alignment than the page. Returns the mapping and the offset in it of the part.
    ///
    /// # Errors
    /// The errors of [`Mapping::at`]; `InvalidInput` for a range that exceeds `u64`.
    pub fn around(
        file: BorrowedFd<'_>,
        offset_bytes: u64,
        len_bytes: usize,
        alignment: Alignment,
    ) -> io::Result<(Self, usize)> {
        let around = alignment.around(offset_bytes, len_bytes).ok_or(io::ErrorKind::InvalidInput)?;
        Self::at(file, around.offset_bytes, around.len_bytes).map(|mapping| (mapping, around.part_offset))
    }

    /// Returns the memory of the whole pages among `len_bytes` from `begin` on to the operating system. The range must
    /// be inside the mapping.
    #[cfg(not(loom))] // Modelled memory is not a mapping.
    pub(crate) fn discard(&self, begin: NonNull<u8>, len_bytes: usize) {
        let whole = whole_pages(begin.addr().get(), len_bytes, page_bytes());
        if !whole.is_empty() {
            let pages = begin.as_ptr().with_addr(whole.start);
            // SAFETY: the pages are inside the range, which `Region::discard` has checked to be inside the mapping.
            // Only their contents change, which other parties may write at any time.
            keeping_errno(|| unsafe { libc::madvise(pages.cast(), whole.len(), libc::MADV_REMOVE) });
        }
    }

    /// Returns the first byte of the mapping.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

/// Returns the size of this kernel's pages, which on AArch64 is 4, 16 or 64 KiB. The kernel rounds the end of a range
/// up to it, so a multiple of a smaller size could include memory behind the range.
#[cfg(not(loom))]
fn page_bytes() -> usize {
    // SAFETY: the call only reads the auxiliary vector, which never changes.
    (unsafe { libc::getauxval(libc::AT_PAGESZ) } as usize).max(Alignment::MIN_BYTES as usize)
}

/// Returns the addresses of the whole pages among `len_bytes` from `begin` on.
#[cfg(not(loom))]
fn whole_pages(begin: usize, len_bytes: usize, page_bytes: usize) -> Range<usize> {
    begin.next_multiple_of(page_bytes)..(begin + len_bytes) / page_bytes * page_bytes
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `protected` mapped the range, and every `Region` of it holds an `Arc` of this mapping, so none is
        // left.
        keeping_errno(|| unsafe { libc::munmap(self.base.as_ptr().cast(), self.len_bytes) });
    }
}

/// Alignment of the mappings of a device: a power of two, at least [`Alignment::MIN_BYTES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alignment {
    log2: u8,
}

/// The multiples of an [`Alignment`] that contain a part of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Around {
    offset_bytes: u64,
    len_bytes: usize,
    /// Offset of the part in the range.
    part_offset: usize,
}

impl Alignment {
    /// Size of the smallest page of any machine, the smallest unit that the kernel maps.
    pub const MIN_BYTES: u64 = 4096;

    /// Returns an alignment; `None` if `bytes` is not a power of two or is less than a page.
    pub fn new(bytes: u64) -> Option<Self> {
        let is_valid = bytes.is_power_of_two() && bytes >= Self::MIN_BYTES;
        is_valid.then_some(Self { log2: bytes.trailing_zeros() as u8 })
    }

    /// Returns an alignment of 2 to the power of `log2` bytes, with the conditions of [`Alignment::new`].
    pub fn from_log2(log2: u8) -> Option<Self> {
        1_u64.checked_shl(log2.into()).and_then(Self::new)
    }

    /// Returns the exponent of the power of two.
    pub fn log2(self) -> u8 {
        self.log2
    }

    /// Returns the alignment in bytes.
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
    fn a_mapping_begins_at_its_offset_and_an_unaligned_one_is_refused() {
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

    /// Returns the kernel's flags of the mapping that begins at an address (proc(5), `VmFlags`).
    fn flags_of(mapping: &Mapping) -> String {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let begin = format!("{:08x}-", mapping.base().addr());
        let lines = smaps.lines().skip_while(|line| !line.starts_with(&begin));
        lines.skip(1).find_map(|line| line.strip_prefix("VmFlags:")).unwrap().to_owned()
    }

    #[test]
    fn a_core_dump_leaves_every_mapping_out() {
        let (file, len_bytes) = (file(), PAGE_BYTES as usize);
        let excluded = |mapping: io::Result<Mapping>| {
            // Dropped on return: the kernel would join it with the next one.
            flags_of(&mapping.unwrap()).split_whitespace().any(|flag| flag == "dd")
        };
        assert!(excluded(Mapping::new(file.as_fd(), len_bytes)));
        assert!(excluded(Mapping::at(file.as_fd(), PAGE_BYTES, len_bytes)));
        assert!(excluded(Mapping::sparse(file.as_fd(), len_bytes)));
        assert!(excluded(Mapping::sparse_read_only(file.as_fd(), len_bytes)));
        let alignment = Alignment::new(PAGE_BYTES).unwrap();
        assert!(excluded(Mapping::around(file.as_fd(), 8, 8, alignment).map(|(mapping, _)| mapping)));
    }

    #[test]
    fn miri_the_range_around_a_part_is_the_smallest_that_contains_it() {
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
        assert_eq!(around(last_within, PART_BYTES), Some((0, 1, last_within as usize)), "ends at a multiple");
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
    fn a_part_is_found_at_its_offset_in_the_range_around_it() {
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

    /// Returns a region of a sealed memfd with `pages` pages, all of them written, and its file.
    fn written(pages: usize) -> (Region, File) {
        // SAFETY: the name is a C string.
        let descriptor = unsafe { libc::memfd_create(c"volmem-test".as_ptr(), libc::MFD_ALLOW_SEALING) };
        assert!(descriptor >= 0, "{}", io::Error::last_os_error());
        // SAFETY: the descriptor is new and has no other owner.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.set_len((pages * PAGE_BYTES as usize) as u64).unwrap();
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: the system call takes no pointers.
        assert_eq!(unsafe { libc::fcntl(descriptor, libc::F_ADD_SEALS, seals) }, 0);
        let mapping = Mapping::new(file.as_fd(), pages * PAGE_BYTES as usize).unwrap();
        let region = Region::of_mapping(Arc::new(mapping));
        region.write(0, &vec![0xA5; region.len_bytes()]);
        assert_eq!(allocated_bytes(&file), region.len_bytes());
        (region, file)
    }

    /// Returns the bytes of memory that are allocated to a file.
    fn allocated_bytes(file: &File) -> usize {
        file.metadata().unwrap().blocks() as usize * 512
    }

    /// Returns the offset of the first zero byte, and the offset after the last one.
    fn zeros(region: &Region) -> Option<(usize, usize)> {
        let mut bytes = vec![0; region.len_bytes()];
        region.read(0, &mut bytes);
        let first = bytes.iter().position(|byte| *byte == 0)?;
        let last = bytes.iter().rposition(|byte| *byte == 0)?;
        assert!(bytes[first..=last].iter().all(|byte| *byte == 0), "zeros in several ranges");
        Some((first, last + 1))
    }

    #[test]
    fn miri_pages_are_whole_whatever_their_size() {
        const KIB: usize = 1 << 10;
        assert_eq!(whole_pages(64 * KIB, 4 * KIB, 4 * KIB), 64 * KIB..68 * KIB);
        assert!(whole_pages(64 * KIB, 60 * KIB, 64 * KIB).is_empty(), "the kernel would return 64 KiB");
        assert_eq!(whole_pages(60 * KIB, 80 * KIB, 64 * KIB), 64 * KIB..128 * KIB);
        assert!(whole_pages(65 * KIB, 120 * KIB, 64 * KIB).is_empty());
    }

    #[test]
    fn only_the_memory_of_whole_pages_is_returned() {
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
            assert_eq!(allocated_bytes(&file), 8 * PAGE - discarded_bytes, "{offset}+{len_bytes}");
            assert_eq!(zeros(&region), discarded, "{offset}+{len_bytes}");
            region.write(offset, &vec![1; len_bytes]);
        }
    }

    #[test]
    fn pages_that_a_part_of_a_region_discards_are_zero_in_every_mapping() {
        const PAGE: usize = PAGE_BYTES as usize;
        let (region, file) = written(4);
        let others = Region::of_mapping(Arc::new(Mapping::new(file.as_fd(), 4 * PAGE).unwrap()));
        region.sub(PAGE, 3 * PAGE).discard(PAGE, PAGE);
        assert_eq!(zeros(&others), Some((2 * PAGE, 3 * PAGE)));
    }

    #[test]
    fn heap_memory_is_not_discarded() {
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
        assert_eq!((allocated_bytes(&file), zeros(&whole)), (4 * PAGE, None));
    }
}
