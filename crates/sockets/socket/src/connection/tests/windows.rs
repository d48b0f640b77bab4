//! Tests of connections in windows: of ordinary memory, of other memory, and over modelled links.

use super::super::*;
use super::*;
use fabric::device::{Caching, DeviceMemory};
use fabric::timed::{LinkTiming, Pacer};
use fabric::{MemoryInbound, MemoryOutbound};
use segment::model::{LinkModel, ModelledLink};
use segment::{Endpoint, Secrets};
use volmem::Region;

/// The kinds of memory that are not ordinary memory.
const DEVICE_CACHING: [Caching; 3] = [Caching::Uncached, Caching::WriteCombined, Caching::NonCoherent];

/// Returns what [`pair`] does, in windows of two nodes.
fn pair_in_windows(nonblocking: bool) -> (OpenEndpoint, OpenEndpoint) {
    let ([connector, acceptor], _) = segments_in_windows();
    open_both(connector, acceptor, nonblocking)
}

/// Returns both endpoints' segments in windows, and the proxy's view of the first.
fn segments_in_windows() -> ([Segment; 2], Endpoint<MemoryInbound>) {
    let spans = [(); 2].map(|()| Region::heap(Segment::WINDOW_BYTES));
    let secrets = Secrets { to_acceptor: 0x0123_4567_89ab_cdef, to_connector: 0xfedc_ba98_7654_3210 };
    for span in &spans {
        (0..Segment::WINDOW_BYTES).step_by(8).for_each(|offset| span.store_u64(offset, !0, Ordering::Relaxed));
        Segment::clean_span(&MemoryInbound::new(span.clone()));
    }
    let connector = Segment::in_windows(&spans[0], &spans[1], Side::Connector, secrets);
    let acceptor = Segment::in_windows(&spans[1], &spans[0], Side::Acceptor, secrets);
    connector.set_up();
    acceptor.set_up();
    ([connector, acceptor], Endpoint::new(MemoryInbound::new(spans[0].clone())))
}

/// Returns both endpoints' segments in windows of memory that is not ordinary, and the proxy's view of the first. The
/// nodes have cleaned what they write.
fn segments_in_device_memory(caching: Caching) -> ([Segment; 2], Endpoint<MemoryInbound>) {
    let spans = [(); 2].map(|()| Region::heap(Segment::WINDOW_BYTES));
    for span in &spans {
        (0..Segment::WINDOW_BYTES).step_by(8).for_each(|offset| span.store_u64(offset, !0, Ordering::Relaxed));
    }
    for [own, other] in [[0, 1], [1, 0]] {
        let (inbound, outbound) = (spans[own].clone(), spans[other].clone());
        Segment::clean_with_local_page(&MemoryInbound::new(inbound), &MemoryOutbound::new(outbound));
    }
    let segment = |own: usize, side| {
        let memory = |span: usize| DeviceMemory::new(spans[span].clone(), caching).unwrap();
        let secrets = Secrets { to_acceptor: 5, to_connector: 6 };
        Segment::with_local_page(memory(own), memory(1 - own), &Region::heap(Segment::LOCAL_PAGE_BYTES), side, secrets)
    };
    let segments = [segment(0, Side::Connector), segment(1, Side::Acceptor)];
    segments.iter().for_each(Segment::set_up);
    (segments, Endpoint::with_local_page(MemoryInbound::new(spans[0].clone())))
}

/// Returns what [`pair`] does, in windows of memory that is not ordinary.
fn pair_in_device_memory(caching: Caching, nonblocking: bool) -> (OpenEndpoint, OpenEndpoint) {
    let ([connector, acceptor], _) = segments_in_device_memory(caching);
    open_both(connector, acceptor, nonblocking)
}

/// Returns both endpoints' segments over a link with this delay and the rate of gen3x16, and the proxy's view of the
/// first.
fn segments_over_a_model(one_way_ns: u64) -> ([Segment; 2], Endpoint<MemoryInbound>) {
    let timing = LinkTiming { one_way_ns, bytes_per_us: 15_754, header_bytes: 24, payload_bytes_max: 256 };
    let model = LinkModel { timing, inbound_pace_offset: 0, outbound_pace_offset: 0 };
    let spans = [(); 2].map(|()| Region::heap(Segment::TIMED_WINDOW_BYTES));
    let paces = [Pacer::new(), Pacer::new()];
    for span in &spans {
        // Timestamps in rings are in the past, whatever was there before.
        let size = Segment::WINDOW_BYTES + (Segment::TIMED_WINDOW_BYTES - Segment::WINDOW_BYTES) / 4;
        (0..size).step_by(8).for_each(|offset| span.store_u64(offset, !0, Ordering::Relaxed));
        Segment::clean_span(&MemoryInbound::new(span.clone()));
    }
    let segment = |own: usize, side| {
        let link = ModelledLink { model, pace: paces[own].clone(), peers_pace: paces[1 - own].clone() };
        let secrets = Secrets { to_acceptor: 3, to_connector: 4 };
        Segment::in_modelled_windows(&spans[own], &spans[1 - own], link, side, secrets).unwrap()
    };
    let segments = [segment(0, Side::Connector), segment(1, Side::Acceptor)];
    segments.iter().for_each(Segment::set_up);
    (segments, Endpoint::new(MemoryInbound::new(spans[0].clone())))
}

/// Returns what [`pair`] does, over a modelled link.
fn pair_over_a_model(one_way_ns: u64, nonblocking: bool) -> (OpenEndpoint, OpenEndpoint) {
    let ([connector, acceptor], _) = segments_over_a_model(one_way_ns);
    open_both(connector, acceptor, nonblocking)
}

#[test]
fn windows_carry_both_directions_through_small_and_larger_rings_to_the_end() {
    carry_both_directions(pair_in_windows(true));
}

#[test]
fn windows_that_are_not_ordinary_memory_carry_both_directions_to_the_end() {
    for caching in DEVICE_CACHING {
        carry_both_directions(pair_in_device_memory(caching, true));
    }
}

#[test]
fn sleepers_in_windows_that_are_not_ordinary_memory_are_woken() {
    for caching in DEVICE_CACHING {
        receive_asleep(pair_in_device_memory(caching, false));
    }
}

#[test]
fn an_endpoint_that_yields_in_copies_carries_the_same_bytes() {
    let (one, two) = pair_in_windows(true);
    for side in [&one, &two] {
        assert!(!side.0.lanes().expect("attached").yields_in_copies(usize::MAX));
    }
    for side in [&one, &two] {
        side.0.lanes().expect("attached").segment.publish(PeerStatus::GiveWay, 1);
    }
    for side in [&one, &two] {
        let lanes = side.0.lanes().expect("attached");
        assert!(
            lanes.yields_in_copies(lane::INLINE_BYTES + 1) && !lanes.yields_in_copies(lane::INLINE_BYTES),
            "only long copies"
        );
    }
    carry_both_directions((one, two));
}

#[test]
fn a_modelled_link_carries_both_directions_through_small_and_larger_rings_to_the_end() {
    carry_both_directions(pair_over_a_model(500, true));
}

/// Receives, and spins while nothing has arrived.
fn receive_retrying(connection: &'static Connection, bytes: &mut [u8]) -> Result<usize, Errno> {
    loop {
        match receive(connection, bytes) {
            Err(Errno::AGAIN) => std::hint::spin_loop(),
            received => return received,
        }
    }
}

fn carry_both_directions((one, two): (OpenEndpoint, OpenEndpoint)) {
    let data: Vec<u8> = (0..3 * (256 << 10)).map(|index| (index % 251) as u8).collect();
    for (from, to) in [(&one, &two), (&two, &one)] {
        let mut received = Vec::new();
        let mut buffer = vec![0; 70_000];
        let mut sent = 0;
        while received.len() < data.len() {
            sent += send(from.0, &data[sent..]).unwrap_or(0);
            let bytes = receive_retrying(to.0, &mut buffer).unwrap();
            received.extend_from_slice(&buffer[..bytes]);
        }
        assert!(received == data);
    }
    one.0.shutdown(SHUTDOWN_WRITE).unwrap();
    assert_eq!(receive_retrying(two.0, &mut [0; 8]), Ok(0));
    assert_eq!(send(two.0, b"unread"), Ok(6));
    while one.0.unread_bytes() == 0 {}
    drop(one);
    two.0.lanes().unwrap().segment.wait_for_arrivals();
    assert_eq!(send(two.0, b"into nothing"), Err(Errno::CONNRESET));
}

/// One-sided: the result does not depend on the speed of the machine.
#[test]
fn over_a_modelled_link_nothing_arrives_early() {
    const ONE_WAY_NS: u64 = 2_000_000;
    let (one, two) = pair_over_a_model(ONE_WAY_NS, true);
    for size in [1, 8, 49, 5_000, 100_000] {
        let begun_ns = crate::process::clock::now_ns();
        assert_eq!(send(one.0, &vec![7; size]), Ok(size));
        let mut bytes = vec![0; size];
        let first = receive_retrying(two.0, &mut bytes).unwrap();
        assert!(crate::process::clock::now_ns() - begun_ns >= ONE_WAY_NS, "{size} bytes");
        let mut rest = first;
        while rest < size {
            rest += receive_retrying(two.0, &mut bytes[rest..]).unwrap();
        }
        assert_eq!(bytes, vec![7; size]);
    }
}

/// Rings take another path here, and arrive at once.
#[test]
fn sleepers_over_a_modelled_link_are_woken_for_what_arrives_after_the_ring() {
    let (one, two) = pair_over_a_model(300_000, false);
    std::thread::scope(|scope| {
        let (client, server) = (one.0, two.0);
        scope.spawn(move || {
            let mut byte = [0];
            for _ in 0..50 {
                assert_eq!(receive(server, &mut byte), Ok(1));
                assert_eq!(send(server, &byte), Ok(1));
            }
            // By now the other endpoint sleeps until there is room.
            std::thread::sleep(std::time::Duration::from_millis(20));
            let mut rest = 1 << 20;
            while rest > 0 {
                rest -= receive(server, &mut vec![0; 70_000]).unwrap();
            }
        });
        for turn in 0..50 {
            // Most likely the other endpoint sleeps by now, and this one will.
            std::thread::sleep(std::time::Duration::from_micros(turn * 10));
            assert_eq!(send(client, &[turn as u8]), Ok(1));
            let mut byte = [0];
            assert_eq!((receive(client, &mut byte), byte[0]), (Ok(1), turn as u8));
        }
        assert_eq!(send(client, &vec![1; 1 << 20]), Ok(1 << 20));
    });
}

#[test]
fn over_a_modelled_link_the_end_arrives_after_what_was_sent() {
    const ONE_WAY_NS: u64 = 2_000_000;
    let ([segment, others], _) = segments_over_a_model(ONE_WAY_NS);
    let (one, _lifeline) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    let one = OpenEndpoint(Connection::open(origin(one.into_raw_fd(), true), InitialPath::Lanes(segment, None)));
    let begun_ns = crate::process::clock::now_ns();
    let mut sender = others.timed_sender().unwrap();
    sender.write(b"last words").unwrap();
    sender.finish();
    others.publish(PeerStatus::Closed, 1);
    // The peer has closed before anything has arrived.
    assert_eq!(receive_retrying(one.0, &mut [0; 20]), Ok(10));
    assert_eq!(receive_retrying(one.0, &mut [0; 20]), Ok(0));
    assert!(crate::process::clock::now_ns() - begun_ns >= ONE_WAY_NS);
    assert_eq!(send(one.0, b"x"), Ok(1));
    one.0.lanes().unwrap().segment.wait_for_arrivals();
    assert_eq!(send(one.0, b"x"), Err(Errno::PIPE));
}

#[test]
fn the_status_from_the_proxy_takes_effect_at_once_over_a_modelled_link() {
    let ([segment, others], endpoint) = segments_over_a_model(1_000_000_000);
    assert_eq!(segment.status(PeerStatus::Closed), 0);
    others.publish(PeerStatus::Closed, 1);
    assert_eq!(segment.status(PeerStatus::Closed), 0, "in flight");
    endpoint.note_reset();
    assert_ne!((segment.status(PeerStatus::Closed), segment.status(PeerStatus::Reset)), (0, 0));
    let ([segment, others], endpoint) = segments_over_a_model(1_000_000_000);
    endpoint.note_left();
    assert_eq!((segment.status(PeerStatus::Closed), others.status(PeerStatus::Closed)), (segment::LEFT_SILENTLY, 0));
    assert_eq!(segment.model().unwrap().timing.one_way_ns, 1_000_000_000);
}

#[test]
fn a_pipe_fills_a_lane_over_a_modelled_link() {
    let (one, two) = pair_over_a_model(500, true);
    let (reading, writing) = rustix::pipe::pipe().unwrap();
    assert_eq!(rustix::io::write(&writing, &[5; 40_000]), Ok(40_000));
    drop(writing);
    let pipe = Pipe::of(reading.as_fd(), false, true).unwrap();
    let mut received = 0;
    let mut is_sent = false;
    while received < 40_000 {
        is_sent |= matches!(one.0.splice_from(pipe, 1 << 20), Ok(0));
        received += receive(two.0, &mut vec![0; 70_000]).unwrap_or(0);
    }
    assert!(received == 40_000 && (is_sent || one.0.splice_from(pipe, 1 << 20) == Ok(0)));
}

/// Returns an endpoint in windows whose lifeline ends at a proxy, its peer, the proxy's view of it, and the proxy's end
/// of the lifeline.
fn endpoint_at_proxy(
    caching: Caching,
    blocked: bool,
) -> (OpenEndpoint, OpenEndpoint, Endpoint<MemoryInbound>, OwnedFd) {
    let ([segment, others], endpoint) = match caching {
        Caching::Cached => segments_in_windows(),
        caching => segments_in_device_memory(caching),
    };
    let [(one, two), (three, _)] =
        [(); 2].map(|()| socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap());
    let one = Connection::open(origin(one.into_raw_fd(), !blocked), InitialPath::Lanes(segment, None));
    let others = Connection::open(origin(three.into_raw_fd(), true), InitialPath::Lanes(others, None));
    (OpenEndpoint(one), OpenEndpoint(others), endpoint, two)
}

fn segment_of(side: &OpenEndpoint) -> &Segment {
    &side.0.lanes().expect("attached").segment
}

#[test]
fn the_status_from_the_proxy_ends_or_resets_the_stream_as_the_kernel_would() {
    for caching in [Caching::Cached].into_iter().chain(DEVICE_CACHING) {
        for (is_read, expected) in [(true, Ok(0)), (false, Err(Errno::CONNRESET))] {
            let (one, others, endpoint, _lifeline) = endpoint_at_proxy(caching, false);
            send(others.0, b"last words").unwrap();
            send(one.0, b"to be read").unwrap();
            if is_read {
                assert_eq!(receive(others.0, &mut [0; 20]), Ok(10));
            }
            endpoint.note_left();
            assert_eq!(receive(one.0, &mut [0; 20]), Ok(10), "what came before the end");
            assert_eq!(receive(one.0, &mut [0; 20]), expected, "{caching}");
        }
        let (one, others, endpoint, _lifeline) = endpoint_at_proxy(caching, false);
        endpoint.note_reset();
        assert_eq!(receive(one.0, &mut [0; 8]), Err(Errno::CONNRESET));
        drop(one);
        assert_eq!(
            segment_of(&others).status(PeerStatus::Reset),
            1,
            "an endpoint that was reset does not close in order"
        );
        // What the peer itself has published takes precedence.
        let (one, others, endpoint, _lifeline) = endpoint_at_proxy(caching, false);
        send(one.0, b"unread").unwrap();
        segment_of(&others).publish(PeerStatus::Closed, 1);
        endpoint.note_left();
        assert_eq!(receive(one.0, &mut [0; 8]), Ok(0), "{caching}");
    }
}

#[test]
fn a_proxy_that_dies_resets_its_connections_in_windows() {
    for caching in [Caching::Cached].into_iter().chain(DEVICE_CACHING) {
        let (one, others, _endpoint, lifeline) = endpoint_at_proxy(caching, true);
        send(others.0, b"last words").unwrap();
        drop(lifeline);
        assert_eq!(receive(one.0, &mut [0; 20]), Ok(10));
        assert_eq!(receive(one.0, &mut [0; 20]), Err(Errno::CONNRESET));
    }
}
