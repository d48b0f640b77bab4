//! Facts about a connection, its two ends in one process.

use super::*;
use crate::process::lock::Lock;
use crate::rendezvous;
use crate::rendezvous::address::Tuple;
use ::wait::Spin;
use fabric::device::{Caching, DeviceMemory};
use fabric::timed::{LinkTiming, Pacer};
use fabric::{MemoryInbound, MemoryOutbound, shm};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use segment::model::{LinkModel, ModelledLink};
use segment::{Endpoint, OwnState, PeerStatus, Secrets, Segment, Side};
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use volmem::Region;

/// A descriptor that is closed as a program would: first here, then in the kernel.
pub(crate) struct OpenEndpoint(pub &'static Connection);

impl Drop for OpenEndpoint {
    fn drop(&mut self) {
        close(self.0);
    }
}

fn close(connection: &'static Connection) {
    let fd = connection.lifeline();
    connection.remove_descriptor(fd);
    // SAFETY: made by `pair`, closed once.
    unsafe { rustix::io::close(fd) };
}

pub(in crate::connection) fn origin(fd: RawFd, nonblocking: bool) -> ConnectionParams {
    // Each leads elsewhere: what this process has of one address decides how others there begin.
    static SERVER: AtomicU32 = AtomicU32::new(Ipv4Addr::new(127, 1, 0, 0).to_bits());
    let server = Ipv4Addr::from_bits(SERVER.fetch_add(1, Ordering::Relaxed));
    let tuple = Tuple { local: "127.0.0.1:40000".parse().unwrap(), peer: (server, 80).into() };
    ConnectionParams { fd, tuple, options: OptionRecord::default(), nonblocking, slot: None }
}

/// Both ends of a connection over a socket pair.
pub(crate) fn pair(nonblocking: bool) -> (OpenEndpoint, OpenEndpoint) {
    let (segment, memfd) = Segment::create(Side::Connector).unwrap();
    segment.set_up();
    let others = Segment::open(&memfd, segment.secrets()).unwrap();
    open_both(segment, others, nonblocking)
}

/// The connecting and the accepting end of a connection on its lifeline.
pub(crate) fn lifeline_pair() -> [OpenEndpoint; 2] {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (connector, acceptor) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    [(connector, Side::Connector), (acceptor, Side::Acceptor)]
        .map(|(fd, side)| OpenEndpoint(Connection::open(origin(fd.into_raw_fd(), true), InitialPath::Lifeline(side))))
}

/// As [`pair`], in windows of two nodes.
fn pair_in_windows(nonblocking: bool) -> (OpenEndpoint, OpenEndpoint) {
    let ([connector, acceptor], _) = segments_in_windows();
    open_both(connector, acceptor, nonblocking)
}

/// Both ends of a connection in windows, and what a proxy has of the first.
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

/// Memory that is no ordinary memory.
const DEVICE_CACHING: [Caching; 3] = [Caching::Uncached, Caching::WriteCombined, Caching::NonCoherent];

/// Both ends of a connection in windows of such memory, and what a proxy has of the first. The nodes have cleaned what
/// they write.
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

/// As [`pair`], in windows of such memory.
fn pair_in_device_memory(caching: Caching, nonblocking: bool) -> (OpenEndpoint, OpenEndpoint) {
    let ([connector, acceptor], _) = segments_in_device_memory(caching);
    open_both(connector, acceptor, nonblocking)
}

/// Both ends of a connection over a link of this delay and gen3x16's rate, not set up; and what a proxy has of the
/// first.
fn segments_over_a_model(one_way_ns: u64) -> ([Segment; 2], Endpoint<MemoryInbound>) {
    let timing = LinkTiming { one_way_ns, bytes_per_us: 15_754, header_bytes: 24, payload_bytes_max: 256 };
    let model = LinkModel { timing, inbound_pace_offset: 0, outbound_pace_offset: 0 };
    let spans = [(); 2].map(|()| Region::heap(Segment::TIMED_WINDOW_BYTES));
    let paces = [Pacer::new(), Pacer::new()];
    for span in &spans {
        // Times in rings are old ones, whatever was there before.
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

/// As [`pair`], over a modelled link.
fn pair_over_a_model(one_way_ns: u64, nonblocking: bool) -> (OpenEndpoint, OpenEndpoint) {
    let ([connector, acceptor], _) = segments_over_a_model(one_way_ns);
    open_both(connector, acceptor, nonblocking)
}

fn open_both(segment: Segment, others: Segment, nonblocking: bool) -> (OpenEndpoint, OpenEndpoint) {
    let (one, two) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    let one = Connection::open(origin(one.into_raw_fd(), nonblocking), InitialPath::Lanes(segment, None));
    let two = Connection::open(origin(two.into_raw_fd(), nonblocking), InitialPath::Lanes(others, None));
    (OpenEndpoint(one), OpenEndpoint(two))
}

/// As [`pair`]; the first end can be handed on.
pub(crate) fn pair_with_memfd() -> (OpenEndpoint, OpenEndpoint) {
    let (one, two) = pair(true);
    let memfd = shm::create(4096).unwrap().0;
    one.0.with_details(|details| details.memory = MemoryFds::of_memfd(memfd).hide().ok());
    (one, two)
}

pub(crate) fn send(connection: &'static Connection, bytes: &[u8]) -> Result<usize, Errno> {
    let span = [libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
    // SAFETY: a slice is readable.
    unsafe { connection.send(&span, Flags::default()) }
}

pub(crate) fn receive_with(connection: &'static Connection, bytes: &mut [u8], flags: Flags) -> Result<usize, Errno> {
    let span = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }];
    // SAFETY: a slice is writable.
    unsafe { connection.receive(&span, flags) }
}

pub(crate) fn receive(connection: &'static Connection, bytes: &mut [u8]) -> Result<usize, Errno> {
    receive_with(connection, bytes, Flags::default())
}

#[test]
fn what_is_sent_is_received() {
    let (one, two) = pair(true);
    assert_eq!(send(one.0, b"hello"), Ok(5));
    let mut bytes = [0; 16];
    let peek = Flags { peek: true, ..Flags::default() };
    assert_eq!(receive_with(two.0, &mut bytes, peek), Ok(5));
    assert_eq!(receive(two.0, &mut bytes), Ok(5));
    assert_eq!(&bytes[..5], b"hello");
    assert_eq!(receive(two.0, &mut bytes), Err(Errno::AGAIN));
}

#[test]
fn windows_carry_both_directions_through_small_and_big_rings_to_their_ends() {
    carry_both_directions(pair_in_windows(true));
}

#[test]
fn windows_that_are_no_ordinary_memory_carry_both_directions_to_their_ends() {
    for caching in DEVICE_CACHING {
        carry_both_directions(pair_in_device_memory(caching, true));
    }
}

#[test]
fn sleepers_in_windows_that_are_no_ordinary_memory_are_woken() {
    for caching in DEVICE_CACHING {
        let (one, two) = pair_in_device_memory(caching, false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 0..20_u8 {
                    std::thread::sleep(std::time::Duration::from_millis(2));
                    send(one.0, &[round]).unwrap();
                }
            });
            for round in 0..20_u8 {
                let mut byte = [0xff];
                assert_eq!((receive(two.0, &mut byte), byte), (Ok(1), [round]));
            }
        });
    }
}

#[test]
fn whoever_is_told_to_give_way_carries_the_same_bytes_in_pieces() {
    let (one, two) = pair_in_windows(true);
    for end in [&one, &two] {
        assert!(!end.0.lanes().expect("attached").yields_in_copies(usize::MAX));
    }
    for end in [&one, &two] {
        end.0.lanes().expect("attached").segment.publish(PeerStatus::GiveWay, 1);
    }
    for end in [&one, &two] {
        let lanes = end.0.lanes().expect("attached");
        assert!(
            lanes.yields_in_copies(lane::INLINE_BYTES + 1) && !lanes.yields_in_copies(lane::INLINE_BYTES),
            "long copies alone"
        );
    }
    carry_both_directions((one, two));
}

#[test]
fn a_modelled_link_carries_both_directions_through_small_and_big_rings_to_their_ends() {
    carry_both_directions(pair_over_a_model(500, true));
}

/// What arrives later finds a receiver that does not wait, or does.
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

/// One-sided: nothing here depends on how fast the machine is.
#[test]
fn over_a_modelled_link_nothing_comes_before_its_time() {
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

/// Rings have another way here, and are there at once.
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
            // The other end sleeps for room by now.
            std::thread::sleep(std::time::Duration::from_millis(20));
            let mut rest = 1 << 20;
            while rest > 0 {
                rest -= receive(server, &mut vec![0; 70_000]).unwrap();
            }
        });
        for turn in 0..50 {
            // Most likely the other end sleeps by now, and this one will.
            std::thread::sleep(std::time::Duration::from_micros(turn * 10));
            assert_eq!(send(client, &[turn as u8]), Ok(1));
            let mut byte = [0];
            assert_eq!((receive(client, &mut byte), byte[0]), (Ok(1), turn as u8));
        }
        assert_eq!(send(client, &vec![1; 1 << 20]), Ok(1 << 20));
    });
}

#[test]
fn over_a_modelled_link_the_end_comes_behind_what_was_sent() {
    const ONE_WAY_NS: u64 = 2_000_000;
    let ([segment, others], _) = segments_over_a_model(ONE_WAY_NS);
    let (one, _lifeline) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    let one = OpenEndpoint(Connection::open(origin(one.into_raw_fd(), true), InitialPath::Lanes(segment, None)));
    let begun_ns = crate::process::clock::now_ns();
    let mut sender = others.timed_sender().unwrap();
    sender.write(b"last words").unwrap();
    sender.finish();
    others.publish(PeerStatus::Closed, 1);
    // It is gone before anything has arrived.
    assert_eq!(receive_retrying(one.0, &mut [0; 20]), Ok(10));
    assert_eq!(receive_retrying(one.0, &mut [0; 20]), Ok(0));
    assert!(crate::process::clock::now_ns() - begun_ns >= ONE_WAY_NS);
    assert_eq!(send(one.0, b"x"), Ok(1));
    one.0.lanes().unwrap().segment.wait_for_arrivals();
    assert_eq!(send(one.0, b"x"), Err(Errno::PIPE));
}

#[test]
fn what_the_proxy_says_over_a_modelled_link_holds_at_once() {
    let ([segment, others], endpoint) = segments_over_a_model(1_000_000_000);
    assert_eq!(segment.status(PeerStatus::Closed), 0);
    others.publish(PeerStatus::Closed, 1);
    assert_eq!(segment.status(PeerStatus::Closed), 0, "under way");
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

/// One end of a connection in windows, whose lifeline ends at a proxy: what that does with its end of it.
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

fn segment_of(end: &OpenEndpoint) -> &Segment {
    &end.0.lanes().expect("attached").segment
}

#[test]
fn what_the_proxy_says_of_a_peer_in_windows_ends_the_stream_or_resets_it_as_the_kernel_would() {
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
        assert_eq!(segment_of(&others).status(PeerStatus::Reset), 1, "who was reset does not leave in good order");
        // What the peer has said itself stands.
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

#[test]
fn the_end_comes_after_the_data_and_the_first_send_after_it_succeeds() {
    let (one, two) = pair(true);
    send(one.0, b"bye").unwrap();
    drop(one);
    let mut bytes = [0; 16];
    assert_eq!(receive(two.0, &mut bytes), Ok(3));
    assert_eq!(receive(two.0, &mut bytes), Ok(0));
    assert_eq!(receive(two.0, &mut bytes), Ok(0));
    assert_eq!(send(two.0, b"x"), Ok(1));
    assert_eq!(send(two.0, b"x"), Err(Errno::PIPE));
    assert_eq!(receive(two.0, &mut bytes), Ok(0));
}

#[test]
fn closing_with_unread_data_resets() {
    let (one, two) = pair(true);
    send(two.0, b"never read").unwrap();
    drop(one);
    let mut bytes = [0; 16];
    assert_eq!(receive(two.0, &mut bytes), Err(Errno::CONNRESET));
    assert_eq!(receive(two.0, &mut bytes), Ok(0));
    assert_eq!(send(two.0, b"x"), Err(Errno::PIPE));
}

#[test]
fn half_a_connection_goes_on() {
    let (one, two) = pair(true);
    one.0.shutdown(SHUTDOWN_WRITE).unwrap();
    let mut bytes = [0; 16];
    assert_eq!(receive(two.0, &mut bytes), Ok(0));
    assert_eq!(send(two.0, b"still"), Ok(5));
    assert_eq!(receive(one.0, &mut bytes), Ok(5));
    assert_eq!(send(one.0, b"x"), Err(Errno::PIPE));
}

#[test]
fn a_peer_that_vanishes_without_a_word_is_noticed() {
    let (one, two) = pair(false);
    // Only the kernel's part of a close, as after `kill -9`.
    // SAFETY: made by `pair`; the connection object stays open and is never used again.
    unsafe { rustix::io::close(one.0.lifeline()) };
    let mut bytes = [0; 16];
    assert_eq!(receive(two.0, &mut bytes), Ok(0));
    std::mem::forget(one);
}

#[test]
fn a_sleeping_receiver_is_woken() {
    let (one, two) = pair(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..20_u8 {
                std::thread::sleep(std::time::Duration::from_millis(2));
                send(one.0, &[round]).unwrap();
            }
        });
        for round in 0..20_u8 {
            let mut byte = [0xff];
            assert_eq!(receive(two.0, &mut byte), Ok(1));
            assert_eq!(byte, [round]);
        }
    });
}

#[test]
fn more_than_fits_goes_through_in_order() {
    const BYTES: usize = 24 << 20;
    let (one, two) = pair(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let sent: Vec<u8> = (0..BYTES).map(|index| ((index * 31) >> 3) as u8).collect();
            assert_eq!(send(one.0, &sent), Ok(BYTES));
            one.0.shutdown(SHUTDOWN_WRITE).unwrap();
        });
        let mut received = 0;
        let mut bytes = vec![0; 100_003];
        loop {
            let got = receive(two.0, &mut bytes).unwrap();
            if got == 0 {
                break;
            }
            for (index, byte) in bytes[..got].iter().enumerate() {
                assert_eq!(*byte, (((received + index) * 31) >> 3) as u8, "at {}", received + index);
            }
            received += got;
        }
        assert_eq!(received, BYTES);
    });
}

#[test]
fn readiness_follows_what_happens() {
    let (one, two) = pair(true);
    const ALL: i16 = libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP;
    assert_eq!(two.0.readiness(ALL), libc::POLLOUT);
    send(one.0, b"x").unwrap();
    assert_eq!(two.0.readiness(ALL), libc::POLLIN | libc::POLLOUT);
    drop(one);
    assert_eq!(two.0.readiness(ALL), ALL);
    let mut byte = [0];
    receive(two.0, &mut byte).unwrap();
    assert_eq!(two.0.readiness(ALL), ALL);
}

#[test]
fn a_full_lane_is_not_writable_until_it_is_read() {
    let (one, two) = pair(true);
    let bytes = vec![7; 1 << 16];
    let mut sent = 0;
    while let Ok(count) = send(one.0, &bytes) {
        sent += count;
    }
    assert_eq!(one.0.readiness(libc::POLLOUT), 0);
    let edges = one.0.edges(Edges::default());
    let mut received = 0;
    let mut buffer = vec![0; 1 << 16];
    while let Ok(count) = receive(two.0, &mut buffer) {
        received += count;
    }
    assert_eq!(sent, received);
    assert_eq!(one.0.readiness(libc::POLLOUT), libc::POLLOUT);
    assert_ne!(one.0.edges(edges), edges);
}

#[test]
fn a_reset_is_asked_for_by_linger() {
    let (one, two) = pair(true);
    one.0.with_details(|details| details.resets_on_close = true);
    drop(one);
    assert_eq!(two.0.readiness(libc::POLLIN) & libc::POLLERR, libc::POLLERR);
    assert_eq!(two.0.take_error(), libc::ECONNRESET);
    assert_eq!(two.0.take_error(), 0);
}

#[test]
fn a_receive_times_out() {
    let (_one, two) = pair(false);
    two.0.set_receive_timeout_ns(5_000_000);
    assert_eq!(receive(two.0, &mut [0]), Err(Errno::AGAIN));
}

#[test]
fn no_word_in_the_place_of_an_error_number_is_more_than_a_reset() {
    for word in [1, 4095, 1 << 12, 1 << 16, 1 << 31, 1 << 40, u64::MAX] {
        let (one, two) = pair(true);
        let own = |word| one.0.lanes().unwrap().segment.store(OwnState::PendingError, word);
        own(word);
        assert_eq!(receive(one.0, &mut [0; 8]), Err(Errno::CONNRESET));
        own(word);
        assert_eq!(one.0.take_error(), Errno::CONNRESET.raw_os_error());
        assert_eq!(one.0.take_error(), 0);
        own(word);
        one.0.lanes().unwrap().segment.store(OwnState::Peer, PeerState::Reset as u64);
        assert_eq!(send(one.0, b"x"), Err(Errno::CONNRESET));
        drop(two);
    }
}

#[test]
fn words_that_a_peer_forged_hold_nobody_up() {
    let (one, two) = pair(true);
    let segment = &one.0.lanes().unwrap().segment;
    let forge = |holders: u64, holder: u64| {
        segment.store(OwnState::Holders, holders);
        [OwnState::SendLock, OwnState::ReceiveLock].into_iter().for_each(|lock| segment.store(lock, holder));
    };
    let someone = std::os::unix::process::parent_id().into();
    // Nobody can hold this end but this process: the words are not even looked at.
    forge(2, someone);
    assert_eq!(send(one.0, b"x"), Ok(1));
    assert_eq!(receive(two.0, &mut [0; 8]), Ok(1));
    // Somebody could: each call waits for a moment, and after some hundred it is the peer's own connection that ends.
    one.0.note_shared();
    let mut calls = 0;
    while send(one.0, b"x") == Err(Errno::AGAIN) {
        calls += 1;
    }
    assert!((100..1000).contains(&calls), "{calls} calls");
    assert_eq!(send(one.0, b"x"), Err(Errno::CONNRESET));
    forge(1, 0);
}

#[test]
fn holders_that_are_gone_are_struck_out() {
    let (one, _two) = pair(true);
    one.0.note_shared();
    let lanes = one.0.lanes().unwrap();
    let ended = {
        let _child = test_support::spawn::lock();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        child.id()
    };
    let namespace = std::fs::metadata("/proc/self/ns/pid").map(|found| std::os::unix::fs::MetadataExt::ino(&found));
    let name = |process: u32| namespace.as_ref().unwrap() << 32 | u64::from(process);
    lanes.segment.store(OwnState::Holders, 3);
    lanes.segment.store(OwnState::Users, 3);
    assert!(lanes.segment.replace_holder(1, 0, name(ended) | 1 << 31));
    assert!(lanes.segment.replace_holder(2, 0, u64::from(ended)));
    assert!(!one.0.is_sole_user(lanes));
    assert_eq!(lanes.segment.load(OwnState::Holders), 2, "a number of another namespace says nothing here");
    assert_eq!(lanes.segment.load(OwnState::Users), 2);
    assert_eq!(lanes.segment.holder(1), 0);
    lanes.segment.store(OwnState::Holders, 1);
}

#[test]
fn a_holder_that_never_uses_the_end_disturbs_nobody() {
    let (one, _two) = pair(true);
    one.0.note_shared();
    let lanes = one.0.lanes().unwrap();
    lanes.segment.store(OwnState::Holders, 2);
    assert!(one.0.is_sole_user(lanes));
    assert_eq!(send(one.0, b"x"), Ok(1));
    assert!(one.0.is_sole_user(lanes), "counted twice");
    lanes.segment.add(OwnState::Users, 1);
    assert!(!one.0.is_sole_user(lanes));
    lanes.segment.store(OwnState::Holders, 1);
}

/// The connecting end of a connection whose other end has the lifeline and nothing else.
fn unanswered(nonblocking: bool, lifeline: OwnedFd) -> OpenEndpoint {
    let (segment, memfd) = Segment::create(Side::Connector).unwrap();
    rendezvous::send_handshake(lifeline.as_fd(), &segment, memfd.as_fd()).unwrap();
    segment.set_up();
    OpenEndpoint(Connection::open(origin(lifeline.into_raw_fd(), nonblocking), InitialPath::Lanes(segment, None)))
}

#[test]
fn a_peer_that_closed_before_the_handshake_came_is_the_end() {
    let _no_child = test_support::spawn::forbid();
    for nonblocking in [false, true] {
        let (own, peers) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        drop(peers);
        let one = unanswered(nonblocking, own);
        one.0.poll_lifeline(one.0.lanes().unwrap());
        assert_eq!(receive(one.0, &mut [0]), Ok(0));
        assert_eq!(send(one.0, b"x"), Ok(1));
        assert_eq!(send(one.0, b"x"), Err(Errno::PIPE));
        assert_eq!(receive(one.0, &mut [0]), Ok(0));
    }
}

#[test]
fn a_peer_that_closes_without_having_looked_for_the_handshake_is_the_end() {
    let (own, peers) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    let two = OpenEndpoint(Connection::open(origin(peers.into_raw_fd(), false), InitialPath::Handshake));
    let one = unanswered(false, own);
    drop(two);
    assert_eq!(receive(one.0, &mut [0]), Ok(0));
    assert_eq!(send(one.0, b"x"), Ok(1));
    assert_eq!(send(one.0, b"x"), Err(Errno::PIPE));
}

#[test]
fn a_listener_that_closes_without_accepting_resets() {
    let _no_child = test_support::spawn::forbid();
    for (nonblocking, sends_handshake) in [(false, false), (false, true), (true, true)] {
        let own_port = crate::rendezvous::tests::own_port();
        let name = format!("crosslane test {own_port} {nonblocking} {sends_handshake}");
        let address = rustix::net::SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let make = || rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        let (listener, own) = (make(), make());
        rustix::net::bind(&listener, &address).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        rustix::net::connect(&own, &address).unwrap();
        let mut listener = Some(listener);
        if !sends_handshake {
            listener = None; // Before the handshake: that finds the connection broken.
        }
        let one = unanswered(nonblocking, own);
        drop(listener);
        if nonblocking {
            one.0.poll_lifeline(one.0.lanes().unwrap());
        }
        assert_eq!(receive(one.0, &mut [0]), Err(Errno::CONNRESET));
        assert_eq!(send(one.0, b"x"), Err(Errno::PIPE));
    }
}

/// What a signal handler finds that has interrupted `holder` in the middle of its work.
fn as_in_a_handler<R>(connection: &'static Connection, holder: &'static Lock, handler: impl FnOnce() -> R) -> R {
    let interrupted = connection.lock_direction(holder).unwrap();
    let result = handler();
    drop(interrupted);
    result
}

#[test]
fn a_handler_looks_without_waiting_for_the_holder_that_it_interrupted() {
    let (one, two) = pair(true);
    send(two.0, b"there").unwrap();
    for lock in [&one.0.send_lock, &one.0.receive_lock] {
        as_in_a_handler(one.0, lock, || {
            assert_eq!(one.0.readiness(libc::POLLIN | libc::POLLOUT), libc::POLLIN | libc::POLLOUT);
            assert!(one.0.may_be_ready(libc::POLLIN));
            assert_eq!(one.0.unread_bytes(), 5);
            assert_eq!(one.0.take_error(), 0);
            assert!(!one.0.is_closed());
            one.0.park(libc::POLLIN | libc::POLLOUT);
            assert!(!one.0.handle_ring(), "who takes a ring needs both locks");
            one.0.unpark();
            one.0.edges(Edges::default());
            one.0.apply_recorded_options();
        });
    }
    as_in_a_handler(one.0, &one.0.receive_lock, || assert_eq!(receive(one.0, &mut [0]), Err(Errno::AGAIN)));
    assert_eq!(receive(one.0, &mut [0; 8]), Ok(5));
}

#[test]
fn a_shutdown_in_a_handler_comes_when_the_interrupted_holder_lets_go() {
    let (one, two) = pair(true);
    as_in_a_handler(one.0, &one.0.send_lock, || one.0.shutdown(SHUTDOWN_WRITE)).unwrap();
    assert_eq!(receive(two.0, &mut [0]), Ok(0));
    assert_eq!(send(one.0, b"x"), Err(Errno::PIPE));
    assert_eq!(send(two.0, b"y"), Ok(1));
}

#[test]
fn a_close_in_a_handler_comes_when_the_interrupted_holder_lets_go() {
    let locks: [fn(&Connection) -> &Lock; 2] =
        [|connection| &connection.send_lock, |connection| &connection.receive_lock];
    for lock_of in locks {
        let (one, two) = pair(true);
        let connection = one.0;
        send(connection, b"last").unwrap();
        as_in_a_handler(connection, lock_of(connection), || drop(one));
        assert!(!connection.lifetime.try_reclaim(), "given back");
        let mut bytes = [0; 8];
        assert_eq!(receive(two.0, &mut bytes), Ok(4));
        assert_eq!(receive(two.0, &mut bytes), Ok(0));
    }
}

#[test]
fn a_thread_that_works_for_an_earlier_connection_of_the_object_finds_out() {
    let (one, two) = pair(false);
    let earlier = one.0.generation().wrapping_sub(1);
    send(two.0, b"not for it").unwrap();
    assert_eq!(
        one.0.wait_to_receive(earlier, &mut wait::BlockingCall::new(one.0), wait::Deadline::after(0), Spin::new()),
        Err(Errno::BADF)
    );
    let taken = one.0.consume_with(earlier, Flags::default(), false, |_| panic!("looked at another's stream"));
    assert!(matches!(taken, Err(Errno::BADF)));
}

#[test]
fn a_wait_for_room_naps_once_a_shutdown_of_reading_has_woken_a_reader() {
    const WAIT_MS: usize = 50;
    let (one, _two) = pair(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| receive(one.0, &mut [0]));
        while !one.0.sleepers.is_any() {
            std::thread::yield_now();
        }
        one.0.shutdown(SHUTDOWN_READ).unwrap();
        assert_eq!(reader.join().unwrap(), Ok(0));
    });
    one.0.set_nonblocking(true);
    while send(one.0, &[0; 4096]).is_ok() {}
    one.0.set_nonblocking(false);
    let deadline = wait::Deadline::after(WAIT_MS as u64 * 1_000_000);
    let looks = std::iter::from_fn(|| {
        one.0.wait_to_send(one.0.generation(), &mut wait::BlockingCall::new(one.0), deadline).ok()
    })
    .count();
    assert!(looks <= WAIT_MS, "{looks} looks in {WAIT_MS} ms");
}

#[test]
fn what_a_program_writes_past_the_library_resets_the_connection() {
    let (one, two) = pair(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| receive(two.0, &mut [0]));
        while !two.0.sleepers.is_any() {
            std::thread::yield_now();
        }
        // SAFETY: open while its end is.
        let lifeline = unsafe { BorrowedFd::borrow_raw(one.0.lifeline()) };
        rustix::net::send(lifeline, b"GET / HTTP/1.1", rustix::net::SendFlags::empty()).unwrap();
        assert_eq!(reader.join().unwrap(), Err(Errno::CONNRESET));
    });
    assert_eq!(receive(one.0, &mut [0]), Err(Errno::CONNRESET));
    assert_eq!(send(one.0, b"x"), Err(Errno::PIPE));
}
