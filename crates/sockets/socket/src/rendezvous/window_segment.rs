//! Segments whose rings are spans of windows: mapping, opening and adopting them.

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
use crate::descriptor::hidden::close;

/// File system of the files that are the BARs of PCI devices.
const SYSFS_MAGIC: u64 = 0x6265_6572;

/// The end of a connection whose spans lie in `memory`, and what it is handed on by.
///
/// # Errors
/// `PERM` for memory that somebody could cut off under a mapping, `INVAL` for a spans that is not in it, and what mmap
/// answers. The descriptor is closed then.
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
            close(memory);
            Err(errno)
        }
    }
}

/// The end, set up, and its local page if it has one: where its state is, or where the memory cannot say itself what
/// lies where.
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

/// The end of a connection in windows that another process set up, by its [lease].
///
/// # Errors
/// `INVAL` for a descriptor that is no lease, or a model that no link can have, and `NOTCONN` where nobody has set the
/// end up.
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
/// `INVAL` for a descriptor that is not a local page or memory of another device, and `NOTCONN` where nobody has set up
/// the endpoint.
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
            // More than the span: who trusts programs with windows trusts them with all of the memory.
            Some(alignment) => Mapping::around(memory, offset, span_bytes, alignment)?,
        };
        Ok(Region::of_mapping(Arc::new(mapping)).sub(begin, span_bytes))
    };
    let errno = |error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL);
    Ok([span(spans.inbound_offset).map_err(errno)?, span(spans.outbound_offset).map_err(errno)?])
}

/// Whether a program could have a spans in the memory: maps it, and lets go of it untouched.
///
/// # Errors
/// As a program would find: `PERM` where it [must not be leased](may_lease), `INVAL` for a spans that is not in it, and
/// what mmap answers.
pub fn try_map_spans(memory: BorrowedFd<'_>, spans: WindowSpans) -> Result<(), Errno> {
    map_spans(memory, spans).map(drop)
}

/// A spans in memory that [may be leased](may_lease), before its end.
fn check_spans(memory: BorrowedFd<'_>, spans: WindowSpans) -> Result<(), Errno> {
    if !may_lease(memory)? {
        return Err(Errno::PERM);
    }
    let stat = rustix::fs::fstat(memory)?;
    let end_bytes = match FileType::from_raw_mode(stat.st_mode) {
        // Where a device ends, neither its node nor mmap says: only the proxy knows, which has mapped all of it.
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

/// Whether programs can have parts of the memory: one whose end nobody can move, which is a sealed memfd, the BAR of a
/// device, or a device.
///
/// # Errors
/// What fstat and fstatfs answer.
pub fn may_lease(memory: BorrowedFd<'_>) -> Result<bool, Errno> {
    let is_device = FileType::from_raw_mode(rustix::fs::fstat(memory)?.st_mode) == FileType::CharacterDevice;
    if is_device {
        return Ok(true);
    }
    match rustix::fs::fstatfs(memory)?.f_type as u64 {
        // Not a sealed file of huge pages: those may run out at the first touch, which kills.
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

    /// Two pages for paces, and two spans.
    #[test]
    fn who_comes_to_hold_an_end_over_a_modelled_link_finds_the_model_in_its_span() {
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
        let heir = adopt(span_lease::lease(memory.as_fd(), spans(1)).unwrap().as_fd()).unwrap();
        assert_eq!((heir.model(), heir.side(), heir.secrets()), (spans(1).model, Side::Acceptor, secrets));
        assert_eq!(one.timed_sender().unwrap().write(b"to the heir"), Ok(11));
        heir.wait_for_arrivals();
        let mut bytes = [0; 11];
        assert_eq!(heir.timed_receiver().unwrap().read(&mut bytes), Ok(11));
        assert_eq!(&bytes, b"to the heir");
        // One that is as fast as its memory is that, whatever a peer writes.
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
            let heir = adopt_on_device(&fds.memfd, device.as_fd()).unwrap();
            assert_eq!((heir.side(), heir.secrets(), heir.is_adopted()), (Side::Connector, secrets, true));
            assert_eq!(heir.local_page_sender().unwrap().write(b"second"), Ok(6));
            let mut bytes = [0; 12];
            assert_eq!(other.local_page_receiver().unwrap().read(&mut bytes), Ok(12));
            assert_eq!(&bytes, b"first second");
            // Memory that it is not about, and a local page that nobody has set up.
            let (stranger, _mapping) = shm::create(3 * Segment::WINDOW_BYTES).unwrap();
            assert_eq!(adopt_on_device(&fds.memfd, stranger.as_fd()).unwrap_err(), Errno::INVAL);
            let (empty, _region) = local_page::create(spans, memory.as_fd()).unwrap();
            assert_eq!(adopt_on_device(&empty, memory.as_fd()).unwrap_err(), Errno::NOTCONN);
            drop((one, other, heir, fds, device));
            assert!(!span_lease::is_leased(memory.as_fd(), spans).unwrap());
        }
    }

    #[test]
    fn memory_that_could_be_cut_off_and_places_outside_it_are_refused() {
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

    /// As of a DAX device, which maps nothing less: spans at any page, one of them across a multiple.
    #[test]
    fn spans_of_memory_that_is_mapped_by_larger_pieces_are_the_same_memory() {
        const PIECE_BYTES: u64 = 1 << 20;
        let span_bytes = Segment::WINDOW_BYTES as u64;
        let secrets = Secrets { to_acceptor: 1, to_connector: 2 };
        let (memory, _mapping) = shm::create(3 * PIECE_BYTES as usize).unwrap();
        let spans = WindowSpans::new(4096, 2 * PIECE_BYTES - span_bytes / 2 / 4096 * 4096);
        let back = WindowSpans::new(spans.outbound_offset, spans.inbound_offset);
        let by_pieces = WindowSpans { alignment: Alignment::new(PIECE_BYTES), ..spans };
        let connector = segment_in(memory.as_fd(), by_pieces, Side::Connector, secrets).unwrap();
        let acceptor = segment_in(memory.as_fd(), back, Side::Acceptor, secrets).unwrap();
        for (from, to) in [(&connector, &acceptor), (&acceptor, &connector)] {
            assert_eq!(from.sender().write(b"in its spans"), Ok(12));
            let mut bytes = [0; 12];
            assert_eq!((to.receiver().read(&mut bytes), &bytes), (Ok(12), b"in its spans"));
        }
        let between_pages = WindowSpans { inbound_offset: 8, ..by_pieces };
        assert_eq!(try_map_spans(memory.as_fd(), between_pages), Err(Errno::INVAL));
        assert_eq!(try_map_spans(memory.as_fd(), by_pieces), Ok(()));
    }
}
