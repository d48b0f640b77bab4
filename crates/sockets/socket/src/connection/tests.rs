//! Tests of connections with both endpoints in one process.

mod sharing;
mod urgent;
mod windows;

use super::*;
use crate::process::lock::Lock;
use crate::rendezvous;
use crate::rendezvous::address::Tuple;
use ::wait::Spin;
use fabric::shm;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use segment::{OwnState, PeerStatus, Segment, Side};
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, IntoRawFd, OwnedFd};

/// An endpoint that is closed as a program does it: first in the library, then in the kernel.
pub(crate) struct OpenEndpoint(pub &'static Connection);

impl Drop for OpenEndpoint {
    fn drop(&mut self) {
        close(self.0);
    }
}

fn close(connection: &'static Connection) {
    let fd = connection.with_descriptors(|own| own[0]);
    connection.remove_descriptor(fd);
    // SAFETY: the descriptor was opened by `origin`'s caller and is closed once.
    unsafe { rustix::io::close(fd) };
}

pub(in crate::connection) fn origin(fd: RawFd, nonblocking: bool) -> ConnectionParams {
    // Each connection has another address: connections to the same address influence how later ones begin.
    static SERVER: AtomicU32 = AtomicU32::new(Ipv4Addr::new(127, 1, 0, 0).to_bits());
    let server = Ipv4Addr::from_bits(SERVER.fetch_add(1, Ordering::Relaxed));
    let tuple = Tuple { local: "127.0.0.1:40000".parse().unwrap(), peer: (server, 80).into() };
    ConnectionParams { fd, tuple, options: OptionRecord::default(), nonblocking, slot: None }
}

/// Returns both endpoints of a connection over a socket pair.
pub(crate) fn pair(nonblocking: bool) -> (OpenEndpoint, OpenEndpoint) {
    let (segment, memfd) = Segment::create(Side::Connector).unwrap();
    segment.set_up();
    let others = Segment::open(&memfd, segment.secrets()).unwrap();
    open_both(segment, others, nonblocking)
}

/// Returns the connecting and the accepting endpoint of a connection on its lifeline.
pub(crate) fn lifeline_pair() -> [OpenEndpoint; 2] {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (connector, acceptor) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    [(connector, Side::Connector), (acceptor, Side::Acceptor)]
        .map(|(fd, side)| OpenEndpoint(Connection::open(origin(fd.into_raw_fd(), true), InitialPath::Lifeline(side))))
}

fn open_both(segment: Segment, others: Segment, nonblocking: bool) -> (OpenEndpoint, OpenEndpoint) {
    let (one, two) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    let one = Connection::open(origin(one.into_raw_fd(), nonblocking), InitialPath::Lanes(segment, None));
    let two = Connection::open(origin(two.into_raw_fd(), nonblocking), InitialPath::Lanes(others, None));
    (OpenEndpoint(one), OpenEndpoint(two))
}

/// Returns what [`pair`] does; the first endpoint can be transferred.
pub(crate) fn pair_with_memfd() -> (OpenEndpoint, OpenEndpoint) {
    let (one, two) = pair(true);
    let memfd = shm::create(4096).unwrap().0;
    one.0.with_details(|details| details.memory = MemoryFds::of_memfd(memfd).hide().ok());
    (one, two)
}

pub(crate) fn send(connection: &'static Connection, bytes: &[u8]) -> Result<usize, Errno> {
    let span = [libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
    // SAFETY: a slice is readable for its length.
    unsafe { connection.send(&span, MessageFlags::default()) }
}

pub(crate) fn receive_with(
    connection: &'static Connection,
    bytes: &mut [u8],
    flags: MessageFlags,
) -> Result<usize, Errno> {
    let span = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }];
    // SAFETY: a mutable slice is writable for its length.
    unsafe { connection.receive(&span, flags) }
}

pub(crate) fn receive(connection: &'static Connection, bytes: &mut [u8]) -> Result<usize, Errno> {
    receive_with(connection, bytes, MessageFlags::default())
}

/// Sends bytes with pauses in which the receiver falls asleep.
fn receive_asleep((one, two): (OpenEndpoint, OpenEndpoint)) {
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
fn what_is_sent_is_received() {
    let (one, two) = pair(true);
    assert_eq!(send(one.0, b"hello"), Ok(5));
    let mut bytes = [0; 16];
    let peek = MessageFlags { peek: true, ..MessageFlags::default() };
    assert_eq!(receive_with(two.0, &mut bytes, peek), Ok(5));
    assert_eq!(receive(two.0, &mut bytes), Ok(5));
    assert_eq!(&bytes[..5], b"hello");
    assert_eq!(receive(two.0, &mut bytes), Err(Errno::AGAIN));
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
fn a_state_of_the_peer_that_does_not_exist_is_a_reset() {
    for state in [4, 77, u64::MAX] {
        let (one, two) = pair(true);
        two.0.lanes().unwrap().segment.store(OwnState::Peer, state);
        assert_eq!(receive(two.0, &mut [0; 16]), Ok(0));
        assert_eq!(send(two.0, b"x"), Err(Errno::PIPE));
        assert_ne!(two.0.readiness(libc::POLLIN) & libc::POLLHUP, 0);
        drop(one);
        assert!(two.0.has_ended());
    }
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
fn the_other_direction_continues_after_a_shutdown() {
    let (one, two) = pair(true);
    one.0.shutdown(SHUTDOWN_WRITE).unwrap();
    let mut bytes = [0; 16];
    assert_eq!(receive(two.0, &mut bytes), Ok(0));
    assert_eq!(send(two.0, b"still"), Ok(5));
    assert_eq!(receive(one.0, &mut bytes), Ok(5));
    assert_eq!(send(one.0, b"x"), Err(Errno::PIPE));
}

#[test]
fn a_peer_that_is_killed_is_detected() {
    let (one, two) = pair(false);
    // Only the kernel's part of a close, as after `kill -9`.
    // SAFETY: the descriptor was opened by `pair`; the connection object stays open and is never used again.
    unsafe { rustix::io::close(one.0.lifeline()) };
    let mut bytes = [0; 16];
    assert_eq!(receive(two.0, &mut bytes), Ok(0));
    std::mem::forget(one);
}

#[test]
fn a_sleeping_receiver_is_woken() {
    receive_asleep(pair(false));
}

#[test]
fn more_bytes_than_a_lane_holds_arrive_in_order() {
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
fn readiness_follows_sends_and_the_close() {
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
    let edges = one.0.edges(EdgeCounters::default());
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
fn a_close_with_linger_of_zero_resets() {
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
fn a_forged_error_number_is_reported_as_a_reset() {
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
fn forged_lock_words_block_no_call_for_long() {
    let (one, two) = pair(true);
    let segment = &one.0.lanes().unwrap().segment;
    let forge = |holders: u64, holder: u64| {
        segment.store(OwnState::Holders, holders);
        [OwnState::SendLock, OwnState::ReceiveLock].into_iter().for_each(|lock| segment.store(lock, holder));
    };
    let parent = std::os::unix::process::parent_id().into();
    // Only this process can hold this endpoint, so the words are not read.
    forge(2, parent);
    assert_eq!(send(one.0, b"x"), Ok(1));
    assert_eq!(receive(two.0, &mut [0; 8]), Ok(1));
    // Another process could: each call waits for a moment, and after some hundred calls the peer's connection ends.
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
fn dead_holders_are_removed_from_the_list() {
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
fn a_holder_that_is_not_a_user_does_not_share_rings() {
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

/// Returns the connecting endpoint of a connection whose peer has only the lifeline.
fn unanswered(nonblocking: bool, lifeline: OwnedFd) -> OpenEndpoint {
    let (segment, memfd) = Segment::create(Side::Connector).unwrap();
    rendezvous::send_handshake(lifeline.as_fd(), &segment, memfd.as_fd()).unwrap();
    segment.set_up();
    OpenEndpoint(Connection::open(origin(lifeline.into_raw_fd(), nonblocking), InitialPath::Lanes(segment, None)))
}

#[test]
fn a_peer_that_closed_before_the_handshake_is_the_end_of_the_stream() {
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
fn a_peer_that_closes_without_receiving_the_handshake_is_the_end_of_the_stream() {
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
            listener = None; // Before the handshake, which finds the connection broken.
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

/// Runs `handler` like a signal handler that has interrupted the holder of a lock.
fn as_in_a_handler<R>(connection: &'static Connection, holder: &'static Lock, handler: impl FnOnce() -> R) -> R {
    let interrupted = connection.lock_direction(holder).unwrap();
    let result = handler();
    drop(interrupted);
    result
}

#[test]
fn a_handler_polls_without_waiting_for_the_holder_that_it_interrupted() {
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
            assert!(!one.0.handle_ring(), "consuming a ring requires both locks");
            one.0.unpark();
            one.0.edges(EdgeCounters::default());
            one.0.apply_recorded_options();
        });
    }
    as_in_a_handler(one.0, &one.0.receive_lock, || assert_eq!(receive(one.0, &mut [0]), Err(Errno::AGAIN)));
    assert_eq!(receive(one.0, &mut [0; 8]), Ok(5));
}

#[test]
fn a_shutdown_in_a_handler_takes_effect_when_the_holder_unlocks() {
    let (one, two) = pair(true);
    as_in_a_handler(one.0, &one.0.send_lock, || one.0.shutdown(SHUTDOWN_WRITE)).unwrap();
    assert_eq!(receive(two.0, &mut [0]), Ok(0));
    assert_eq!(send(one.0, b"x"), Err(Errno::PIPE));
    assert_eq!(send(two.0, b"y"), Ok(1));
}

#[test]
fn a_close_in_a_handler_takes_effect_when_the_holder_unlocks() {
    let locks: [fn(&Connection) -> &Lock; 2] =
        [|connection| &connection.send_lock, |connection| &connection.receive_lock];
    for lock_of in locks {
        let (one, two) = pair(true);
        let connection = one.0;
        send(connection, b"last").unwrap();
        as_in_a_handler(connection, lock_of(connection), || drop(one));
        assert!(!connection.lifetime.try_reclaim(), "reclaimed too early");
        let mut bytes = [0; 8];
        assert_eq!(receive(two.0, &mut bytes), Ok(4));
        assert_eq!(receive(two.0, &mut bytes), Ok(0));
    }
}

#[test]
fn a_call_on_an_earlier_connection_of_the_object_fails() {
    let (one, two) = pair(false);
    let earlier = one.0.generation().wrapping_sub(1);
    send(two.0, b"not for it").unwrap();
    assert_eq!(
        one.0.wait_to_receive(earlier, &mut wait::BlockingCall::new(one.0), wait::Deadline::after(0), Spin::new()),
        Err(Errno::BADF)
    );
    let taken = one
        .0
        .consume_with(earlier, MessageFlags::default(), false, |_| panic!("read the stream of another connection"));
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
    let attempts = std::iter::from_fn(|| {
        one.0.wait_to_send(one.0.generation(), &mut wait::BlockingCall::new(one.0), deadline).ok()
    })
    .count();
    assert!(attempts <= WAIT_MS, "{attempts} attempts in {WAIT_MS} ms");
}

#[test]
fn bytes_that_bypass_the_library_reset_the_connection() {
    let (one, two) = pair(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| receive(two.0, &mut [0]));
        while !two.0.sleepers.is_any() {
            std::thread::yield_now();
        }
        let lifeline = one.0.borrow_lifeline();
        rustix::net::send(lifeline, b"GET / HTTP/1.1", rustix::net::SendFlags::empty()).unwrap();
        assert_eq!(reader.join().unwrap(), Err(Errno::CONNRESET));
    });
    assert_eq!(receive(one.0, &mut [0]), Err(Errno::CONNRESET));
    assert_eq!(send(one.0, b"x"), Err(Errno::PIPE));
}
