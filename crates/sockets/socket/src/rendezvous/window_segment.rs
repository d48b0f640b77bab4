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
use super::local_page::{self, LocalPage, MemoryFds};
use super::span_lease;
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

/// Adopts the endpoint of a connection in windows that another process has set up, by its [lease](span_lease).
///
/// # Errors
/// `INVAL` for a descriptor that is not a lease or a model that no link can have, and `NOTCONN` if no process has set
/// up the endpoint.
#[inline(never)] // Its variables are not to add to the caller's on a small stack.
pub(crate) fn adopt(lease: BorrowedFd<'_>) -> Result<Segment, Errno> {
    let spans = span_lease::spans_of(lease).ok_or(Errno::INVAL)?;
    let [inbound, outbound] = map_spans(lease, spans)?;
    let segment = Segment::adopt_in_windows(&inbound, &outbound, None)?;
    if !span_lease::is_modelled(lease) {
        return Ok(segment);
    }
    let model = segment.model().ok_or(Errno::INVAL)?;
    let [inbound, outbound] = map_spans(lease, WindowSpans { model: Some(model), ..spans })?;
    Segment::adopt_in_windows(&inbound, &outbound, Some(ModelledLink::map(lease, model)?))
}

/// Adopts an endpoint whose connection lies in the memory of a device, by its local page and a descriptor of that
/// memory.
///
/// # Errors
/// `INVAL` for a descriptor that is not a local page, or for memory of another device, and `NOTCONN` if no process has
/// set up the endpoint.
#[inline(never)] // Its variables are not to add to the caller's on a small stack.
pub(crate) fn adopt_on_device(memfd: &OwnedFd, memory: BorrowedFd<'_>) -> Result<Segment, Errno> {
    let LocalPage { spans, .. } =
        LocalPage::read(memfd.as_fd()).filter(|page| page.describes(memory)).ok_or(Errno::INVAL)?;
    let regions = map_spans(memory, spans)?;
    if spans.has_local_state() {
        let (inbound, outbound) = device_memory(regions, spans)?;
        return Segment::adopt_with_local_page(inbound, outbound, &local_page::map(memfd)?);
    }
    let [inbound, outbound] = regions;
    Segment::adopt_in_windows(&inbound, &outbound, None)
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
    use fabric::device::Caching;
    use fabric::timed::LinkTiming;
    use segment::model::LinkModel;

    pub(in super::super) fn segment_in(
        memory: BorrowedFd<'_>,
        spans: WindowSpans,
        side: Side,
        secrets: Secrets,
    ) -> Result<Segment, Errno> {
        open_spans(memory, spans, side, secrets).map(|(segment, _page)| segment)
    }

    /// The memory has two pages for pacing, and two spans.
    #[test]
    fn a_process_that_adopts_an_endpoint_of_a_modelled_link_finds_the_model_in_its_span() {
        const SPAN_BYTES: u64 = Segment::TIMED_WINDOW_BYTES as u64;
        const FIRST: u64 = 2 * 4096;
        let (memory, _mapping) = shm::create((FIRST + 2 * SPAN_BYTES) as usize).unwrap();
        let timing = LinkTiming { one_way_ns: 100, bytes_per_us: 10_000, header_bytes: 24, payload_bytes_max: 256 };
        let secrets = Secrets { to_acceptor: 7, to_connector: 8 };
        let spans = |own: u64| WindowSpans {
            model: Some(LinkModel { timing, inbound_pace_offset: own * 4096, outbound_pace_offset: (1 - own) * 4096 }),
            ..WindowSpans::new(FIRST + own * SPAN_BYTES, FIRST + (1 - own) * SPAN_BYTES)
        };
        let open = |spans, side| segment_in(memory.as_fd(), spans, side, secrets);
        let one = open(spans(0), Side::Connector).unwrap();
        open(spans(1), Side::Acceptor).unwrap();
        let successor = adopt(span_lease::lease(memory.as_fd(), spans(1)).unwrap().as_fd()).unwrap();
        assert_eq!(
            (successor.model(), successor.side(), successor.secrets()),
            (spans(1).model, Side::Acceptor, secrets)
        );
        assert_eq!(one.timed_sender().unwrap().write(b"to the successor"), Ok(16));
        successor.wait_for_arrivals();
        let mut bytes = [0; 16];
        assert_eq!(successor.timed_receiver().unwrap().read(&mut bytes), Ok(16));
        assert_eq!(&bytes, b"to the successor");
        // A link without a model has none, whatever a peer writes.
        let plain = WindowSpans { model: None, ..spans(1) };
        assert!(adopt(span_lease::lease(memory.as_fd(), plain).unwrap().as_fd()).unwrap().timed_sender().is_none());
        let beyond = |offset| {
            let model = spans(0).model.map(|model| LinkModel { inbound_pace_offset: offset, ..model });
            open(WindowSpans { model, ..spans(0) }, Side::Connector).map(|_| ()).unwrap_err()
        };
        assert_eq!([FIRST + 2 * SPAN_BYTES, 1, u64::MAX].map(beyond), [Errno::INVAL; 3]);
    }

    #[test]
    fn a_process_that_adopts_an_endpoint_with_a_local_page_continues_where_it_was() {
        let _no_child = test_support::spawn::forbid();
        let (memory, _mapping) = shm::create(3 * Segment::WINDOW_BYTES).unwrap();
        let span_bytes = Segment::WINDOW_BYTES as u64;
        let secrets = Secrets { to_acceptor: 9, to_connector: 10 };
        for caching in [Caching::Uncached, Caching::WriteCombined, Caching::NonCoherent] {
            let spans = WindowSpans { caching, ..WindowSpans::new(0, span_bytes) };
            let back = WindowSpans { caching, ..WindowSpans::new(span_bytes, 0) };
            let lease = span_lease::lease(memory.as_fd(), spans).unwrap();
            let (one, fds) = open_in_windows(lease, spans, Side::Connector, secrets).unwrap();
            let device = fds.device.as_ref().unwrap().try_clone().unwrap();
            let other = segment_in(memory.as_fd(), back, Side::Acceptor, secrets).unwrap();
            assert_eq!(one.local_page_sender().unwrap().write(b"first "), Ok(6));
            let successor = adopt_on_device(&fds.memfd, device.as_fd()).unwrap();
            assert_eq!(
                (successor.side(), successor.secrets(), successor.is_adopted()),
                (Side::Connector, secrets, true)
            );
            assert_eq!(successor.local_page_sender().unwrap().write(b"second"), Ok(6));
            let mut bytes = [0; 12];
            assert_eq!(other.local_page_receiver().unwrap().read(&mut bytes), Ok(12));
            assert_eq!(&bytes, b"first second");
            // Memory of another device, and a local page that no process has set up.
            let (other_device, _mapping) = shm::create(3 * Segment::WINDOW_BYTES).unwrap();
            assert_eq!(adopt_on_device(&fds.memfd, other_device.as_fd()).unwrap_err(), Errno::INVAL);
            let (empty, _region) = local_page::create(spans, memory.as_fd()).unwrap();
            assert_eq!(adopt_on_device(&empty, memory.as_fd()).unwrap_err(), Errno::NOTCONN);
            drop((one, other, successor, fds, device));
            assert!(!span_lease::is_leased(memory.as_fd(), spans).unwrap());
        }
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
