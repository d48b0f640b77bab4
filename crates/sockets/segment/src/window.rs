//! Spans of windows: what a program is told of them, and how it maps them.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use fabric::shm;
use rustix::fs::FileType;
use rustix::io::Errno;
use volmem::{Alignment, Mapping, Region};

use crate::SPAN_BYTES;

/// The type of sysfs, whose resource files are the BARs of PCI devices.
const SYSFS_MAGIC: u64 = 0x6265_6572;
/// The kind of spans: this bit, and in the second byte the binary logarithm of the unit of mapping, 0 for pages.
const KIND: u32 = 1;
const ALIGNMENT_SHIFT: u32 = 8;

/// The spans of a connection between two nodes, as the end that gets this sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSpans {
    /// Offset in the memory of the span that this end reads, in its own node's window.
    pub inbound_offset: u64,
    /// Offset in the memory of the span that this end writes, in the other node's window.
    pub outbound_offset: u64,
    /// The unit in which the memory must be mapped, if larger than a page. It is sent, because programs may not be able
    /// to read where the kernel describes devices.
    pub alignment: Option<Alignment>,
}

impl WindowSpans {
    /// Returns spans in memory that is mapped by pages.
    pub const fn new(inbound_offset: u64, outbound_offset: u64) -> Self {
        Self { inbound_offset, outbound_offset, alignment: None }
    }

    /// Encodes everything but the offsets, for [`WindowSpans::of_kind`].
    pub fn kind(self) -> u32 {
        KIND | self.alignment.map_or(0, |alignment| u32::from(alignment.log2()) << ALIGNMENT_SHIFT)
    }

    /// Returns spans in memory of a [kind](WindowSpans::kind); `None` for a number that no such kind has.
    pub fn of_kind(kind: u32, inbound_offset: u64, outbound_offset: u64) -> Option<Self> {
        let [_, log2, ..] = kind.to_le_bytes();
        let spans = Self { alignment: Alignment::from_log2(log2), ..Self::new(inbound_offset, outbound_offset) };
        (spans.kind() == kind).then_some(spans)
    }

    /// Returns both offsets.
    pub fn offsets(self) -> [u64; 2] {
        [self.inbound_offset, self.outbound_offset]
    }
}

/// Maps spans: the inbound one for reading only, unless both may be in one unit of mapping.
///
/// # Errors
/// `PERM` if the memory [must not be leased](may_lease), `INVAL` for spans that are not in it, and those of mmap.
pub fn map(memory: BorrowedFd<'_>, spans: WindowSpans) -> Result<[Region; 2], Errno> {
    check(memory, spans)?;
    let errno = |error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL);
    let [inbound, outbound] = spans.offsets();
    if let Some(alignment) = spans.alignment {
        let span = |offset| {
            // This maps more than the span: an operator who trusts programs with windows trusts them with all of the
            // memory.
            let (mapping, begin) = Mapping::around(memory, offset, SPAN_BYTES, alignment)?;
            Ok(Region::of_mapping(Arc::new(mapping)).sub(begin, SPAN_BYTES))
        };
        return Ok([span(inbound).map_err(errno)?, span(outbound).map_err(errno)?]);
    }
    let inbound = Mapping::read_only_at(memory, inbound, SPAN_BYTES).map_err(errno)?;
    let outbound = Mapping::at(memory, outbound, SPAN_BYTES).map_err(errno)?;
    Ok([inbound, outbound].map(|mapping| Region::of_mapping(Arc::new(mapping))))
}

/// Checks that the memory [may be leased](may_lease) and that the spans are within it, aligned and disjoint.
fn check(memory: BorrowedFd<'_>, spans: WindowSpans) -> Result<(), Errno> {
    if !may_lease(memory)? {
        return Err(Errno::PERM);
    }
    let stat = rustix::fs::fstat(memory)?;
    let end_bytes = match FileType::from_raw_mode(stat.st_mode) {
        // Neither the device node nor mmap tells the size of a device: only the proxy knows it, which has mapped all of
        // it.
        FileType::CharacterDevice => i64::MAX as u64,
        _ => stat.st_size as u64,
    };
    let is_fit = |offset: u64| {
        let ends_within = offset.checked_add(SPAN_BYTES as u64).is_some_and(|end| end <= end_bytes);
        ends_within && offset.is_multiple_of(Alignment::MIN_BYTES)
    };
    let are_apart = spans.inbound_offset.abs_diff(spans.outbound_offset) >= SPAN_BYTES as u64;
    if spans.offsets().into_iter().all(is_fit) && are_apart { Ok(()) } else { Err(Errno::INVAL) }
}

/// Returns whether programs can use parts of the memory. It must have a fixed size: a sealed memfd, the BAR of a
/// device, or a device.
///
/// # Errors
/// The errors of fstat and fstatfs.
pub fn may_lease(memory: BorrowedFd<'_>) -> Result<bool, Errno> {
    let is_device = FileType::from_raw_mode(rustix::fs::fstat(memory)?.st_mode) == FileType::CharacterDevice;
    if is_device {
        return Ok(true);
    }
    match rustix::fs::fstatfs(memory)?.f_type as u64 {
        // A sealed file of huge pages is refused: they may be exhausted at the first access, which kills the process.
        shm::TMPFS_MAGIC => Ok(shm::is_sealed(memory)),
        file_system => Ok(file_system == SYSFS_MAGIC),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use volmem::sync::Ordering;

    #[test]
    fn a_kind_is_decoded_as_encoded_and_other_numbers_are_refused() {
        for alignment in [None, Alignment::new(1 << 21)] {
            let spans = WindowSpans { alignment, ..WindowSpans::new(1 << 20, 0) };
            assert_eq!(WindowSpans::of_kind(spans.kind(), 1 << 20, 0), Some(spans));
        }
        for kind in [0, 2, 3, 5, 1 << 16 | 1, 200 << 8 | 1] {
            assert_eq!(WindowSpans::of_kind(kind, 1 << 20, 0), None, "{kind:#x}");
        }
    }

    #[test]
    fn memory_that_could_be_truncated_and_spans_outside_it_are_refused() {
        let span_bytes = SPAN_BYTES as u64;
        let (memory, _mapping) = shm::create(2 * SPAN_BYTES).unwrap();
        let open =
            |memory: BorrowedFd<'_>, inbound, outbound| map(memory, WindowSpans::new(inbound, outbound)).map(|_| ());
        assert_eq!(open(memory.as_fd(), 0, span_bytes), Ok(()));
        for (inbound, outbound) in
            [(0, 0), (0, span_bytes + 4096), (1, span_bytes), (0, 4096), (u64::MAX - 4095, 0), (1 << 63, 0)]
        {
            assert_eq!(open(memory.as_fd(), inbound, outbound), Err(Errno::INVAL), "{inbound:#x} {outbound:#x}");
        }
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * span_bytes).unwrap();
        assert_eq!(open(file.as_fd(), 0, span_bytes), Err(Errno::PERM));
    }

    /// As with a DAX device, which cannot map less: spans at any page, one of them across a multiple of the unit.
    #[test]
    fn spans_that_are_mapped_in_larger_units_are_the_same_memory() {
        const UNIT_BYTES: u64 = 1 << 20;
        let span_bytes = SPAN_BYTES as u64;
        let (memory, _mapping) = shm::create(3 * UNIT_BYTES as usize).unwrap();
        let spans = WindowSpans::new(4096, 2 * UNIT_BYTES - span_bytes / 2 / 4096 * 4096);
        let back = WindowSpans::new(spans.outbound_offset, spans.inbound_offset);
        let in_units = WindowSpans { alignment: Alignment::new(UNIT_BYTES), ..spans };
        let [inbound, outbound] = map(memory.as_fd(), in_units).unwrap();
        let [other_inbound, other_outbound] = map(memory.as_fd(), back).unwrap();
        for (from, to, at) in [(&outbound, &other_inbound, 0), (&other_outbound, &inbound, SPAN_BYTES - 8)] {
            from.store_u64(at, 77, Ordering::Relaxed);
            assert_eq!(to.load_u64(at, Ordering::Relaxed), 77);
        }
        let between_pages = WindowSpans { inbound_offset: 8, ..in_units };
        assert_eq!(map(memory.as_fd(), between_pages).map(drop), Err(Errno::INVAL));
    }
}
