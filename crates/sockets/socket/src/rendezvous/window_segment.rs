//! Segments in the spans of windows: mapping, opening and adopting them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use fabric::device::DeviceMemory;
use fabric::shm;
use rustix::fs::FileType;
use rustix::io::Errno;
use segment::model::ModelledLink;
use segment::{Secrets, Segment, Side};
use volmem::{Alignment, Mapping, Region};

use super::handshake::WindowSpans;
use super::local_page::{self, MemoryFds};
use crate::descriptor::received::discard;

/// The type of sysfs, whose resource files are the BARs of PCI devices.
const SYSFS_MAGIC: u64 = 0x6265_6572;

/// Opens the endpoint of a connection whose spans are in `memory`. Returns it with the descriptors by which it is
/// transferred.
///
/// # Errors
/// `PERM` for memory that another process could truncate under a mapping, `INVAL` for spans that are not in it, and
/// those of mmap. The descriptor is closed then.
pub(super) fn open_in_windows(
    memory: OwnedFd,
    spans: WindowSpans,
    side: Side,
    secrets: Secrets,
) -> Result<(Segment, MemoryFds), Errno> {
    match open_spans(memory.as_fd(), spans, side, secrets) {
        Ok((segment, None)) => Ok((segment, MemoryFds::of_memfd(memory))),
        Ok((segment, Some(page))) => Ok((segment, MemoryFds { device: Some(memory), ..MemoryFds::of_memfd(page) })),
        Err(errno) => {
            discard(memory);
            Err(errno)
        }
    }
}

/// Opens and sets up the endpoint. Returns it with its local page, if it has one: for its state, or if the memory
/// itself cannot tell where the spans are.
#[inline(never)] // Its variables are not to add to the caller's on a small stack.
fn open_spans(
    memory: BorrowedFd<'_>,
    spans: WindowSpans,
    side: Side,
    secrets: Secrets,
) -> Result<(Segment, Option<OwnedFd>), Errno> {
    let [inbound, outbound] = map_spans(memory, spans)?;
    let has_local_page = spans.has_local_state() || !shm::is_sealed(memory);
    let page = has_local_page.then(|| local_page::create(spans, memory)).transpose()?;
    let segment = match (spans.model, &page) {
        (None, Some((_, page))) if spans.has_local_state() => {
            let (inbound, outbound) = device_memory([inbound, outbound], spans)?;
            Segment::with_local_page(inbound, outbound, page, side, secrets)
        }
        (None, _) => Segment::in_windows(&inbound, &outbound, side, secrets),
        (Some(model), _) => {
            let link = ModelledLink::map(memory, model)?;
            Segment::in_modelled_windows(&inbound, &outbound, link, side, secrets)?
        }
    };
    segment.set_up();
    Ok((segment, page.map(|(memfd, _)| memfd)))
}

fn device_memory(regions: [Region; 2], spans: WindowSpans) -> Result<(DeviceMemory, DeviceMemory), Errno> {
    let [inbound, outbound] = regions.map(|region| DeviceMemory::new(region, spans.caching));
    inbound.zip(outbound).ok_or(Errno::OPNOTSUPP)
}

fn map_spans(memory: BorrowedFd<'_>, spans: WindowSpans) -> Result<[Region; 2], Errno> {
    check_spans(memory, spans)?;
    let span = |offset| {
        let span_bytes = spans.span_bytes();
        let (mapping, begin) = match spans.alignment {
            None => (Mapping::at(memory, offset, span_bytes)?, 0),
            // This maps more than the span: an operator who trusts programs with windows trusts them with all of the
            // memory.
            Some(alignment) => Mapping::around(memory, offset, span_bytes, alignment)?,
        };
        Ok(Region::of_mapping(Arc::new(mapping)).sub(begin, span_bytes))
    };
    let errno = |error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL);
    Ok([span(spans.inbound_offset).map_err(errno)?, span(spans.outbound_offset).map_err(errno)?])
}

/// Maps spans of ordinary memory for an endpoint that only reads its inbound span: that one first.
///
/// # Errors
/// Those of [`try_map_spans`]; `OPNOTSUPP` for other memory.
pub fn map_for_reader(memory: BorrowedFd<'_>, spans: WindowSpans) -> Result<[Region; 2], Errno> {
    if spans.kind().is_none() {
        return Err(Errno::OPNOTSUPP);
    }
    if spans.alignment.is_some() {
        // One unit may contain both.
        return map_spans(memory, spans);
    }
    check_spans(memory, spans)?;
    let errno = |error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL);
    let span_bytes = spans.span_bytes();
    let inbound = Mapping::read_only_at(memory, spans.inbound_offset, span_bytes).map_err(errno)?;
    let outbound = Mapping::at(memory, spans.outbound_offset, span_bytes).map_err(errno)?;
    Ok([inbound, outbound].map(|mapping| Region::of_mapping(Arc::new(mapping))))
}

/// Checks whether a program could use spans of the memory, by mapping and unmapping them without access.
///
/// # Errors
/// Those that a program would get: `PERM` if the memory [must not be leased](may_lease), `INVAL` for spans that are not
/// in it, and those of mmap.
pub fn try_map_spans(memory: BorrowedFd<'_>, spans: WindowSpans) -> Result<(), Errno> {
    map_spans(memory, spans).map(drop)
}

/// Checks that the memory [may be leased](may_lease) and that the spans are within it, aligned and disjoint.
fn check_spans(memory: BorrowedFd<'_>, spans: WindowSpans) -> Result<(), Errno> {
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
    let span_bytes = spans.span_bytes() as u64;
    let is_fit = |offset: u64| {
        let ends_within = offset.checked_add(span_bytes).is_some_and(|end| end <= end_bytes);
        ends_within && offset.is_multiple_of(Alignment::MIN_BYTES)
    };
    let are_apart = spans.inbound_offset.abs_diff(spans.outbound_offset) >= span_bytes;
    let are_fit = [spans.inbound_offset, spans.outbound_offset].into_iter().all(is_fit);
    if are_fit && are_apart { Ok(()) } else { Err(Errno::INVAL) }
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
pub(super) mod tests {
    use super::*;
    use crate::rendezvous::directory::tests::Scratch;

    pub(in super::super) fn segment_in(
        memory: BorrowedFd<'_>,
        spans: WindowSpans,
        side: Side,
        secrets: Secrets,
    ) -> Result<Segment, Errno> {
        open_spans(memory, spans, side, secrets).map(|(segment, _page)| segment)
    }

    #[test]
    fn memory_that_could_be_truncated_and_spans_outside_it_are_refused() {
        let span_bytes = Segment::WINDOW_BYTES as u64;
        let secrets = Secrets { to_acceptor: 1, to_connector: 2 };
        let (memory, _mapping) = shm::create(2 * Segment::WINDOW_BYTES).unwrap();
        let open = |memory: BorrowedFd<'_>, inbound_offset, outbound_offset| {
            segment_in(memory, WindowSpans::new(inbound_offset, outbound_offset), Side::Acceptor, secrets).map(|_| ())
        };
        assert_eq!(open(memory.as_fd(), 0, span_bytes), Ok(()));
        for (inbound, outbound) in
            [(0, 0), (0, span_bytes + 4096), (1, span_bytes), (0, 4096), (u64::MAX - 4095, 0), (1 << 63, 0)]
        {
            assert_eq!(open(memory.as_fd(), inbound, outbound), Err(Errno::INVAL), "{inbound:#x} {outbound:#x}");
        }
        let scratch = Scratch::new();
        let file = std::fs::File::create_new(scratch.0.join("file")).unwrap();
        file.set_len(2 * span_bytes).unwrap();
        assert_eq!(open(file.as_fd(), 0, span_bytes), Err(Errno::PERM));
    }

    /// As with a DAX device, which cannot map less: spans at any page, one of them across a multiple of the unit.
    #[test]
    fn spans_that_are_mapped_in_larger_units_are_the_same_memory() {
        const UNIT_BYTES: u64 = 1 << 20;
        let span_bytes = Segment::WINDOW_BYTES as u64;
        let secrets = Secrets { to_acceptor: 1, to_connector: 2 };
        let (memory, _mapping) = shm::create(3 * UNIT_BYTES as usize).unwrap();
        let spans = WindowSpans::new(4096, 2 * UNIT_BYTES - span_bytes / 2 / 4096 * 4096);
        let back = WindowSpans::new(spans.outbound_offset, spans.inbound_offset);
        let in_units = WindowSpans { alignment: Alignment::new(UNIT_BYTES), ..spans };
        let connector = segment_in(memory.as_fd(), in_units, Side::Connector, secrets).unwrap();
        let acceptor = segment_in(memory.as_fd(), back, Side::Acceptor, secrets).unwrap();
        for (from, to) in [(&connector, &acceptor), (&acceptor, &connector)] {
            assert_eq!(from.sender().write(b"in its spans"), Ok(12));
            let mut bytes = [0; 12];
            assert_eq!((to.receiver().read(&mut bytes), &bytes), (Ok(12), b"in its spans"));
        }
        let between_pages = WindowSpans { inbound_offset: 8, ..in_units };
        assert_eq!(try_map_spans(memory.as_fd(), between_pages), Err(Errno::INVAL));
        assert_eq!(try_map_spans(memory.as_fd(), in_units), Ok(()));
    }
}
