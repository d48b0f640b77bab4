//! The kernel's counts of real TCP sockets.

#![allow(unsafe_code)] // Socket options that only the tests set.

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use common::Connection;
use meeting::counts::read;
use meeting::{Counts, Endpoint, Reason, Role};

fn connected(connection: &Connection) -> Result<Counts, Reason> {
    read(connection.connected.as_fd(), Role::Connected)
}

fn accepted(connection: &Connection) -> Result<Counts, Reason> {
    read(connection.accepted.as_fd(), Role::Accepted)
}

/// Waits until `probe` returns `expected`.
fn eventually<T: PartialEq + std::fmt::Debug>(expected: &T, mut probe: impl FnMut() -> T) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while Instant::now() < deadline && probe() != *expected {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(probe(), *expected);
}

fn all(written: u64, received: u64, consumed: u64) -> Result<Counts, Reason> {
    Ok(Counts { written, acked: written, received, consumed })
}

#[test]
fn counts_begin_at_0_and_follow_both_streams() {
    for (listening, destination) in [("127.0.0.1:0", "127.0.0.1:0"), ("[::1]:0", "[::1]:0"), ("[::]:0", "127.0.0.1:0")]
    {
        let mut connection = Connection::new(listening, destination);
        assert_eq!((connected(&connection), accepted(&connection)), (all(0, 0, 0), all(0, 0, 0)));
        connection.connected.write_all(&[0; 1000]).unwrap();
        connection.accepted.write_all(&[0; 50]).unwrap();
        connection.accepted.read_exact(&mut [0; 300]).unwrap();
        connection.connected.read_exact(&mut [0; 50]).unwrap();
        eventually(&all(1000, 50, 50), || connected(&connection));
        eventually(&all(50, 1000, 300), || accepted(&connection));
        connection.accepted.peek(&mut [0; 100]).unwrap();
        assert_eq!(accepted(&connection), all(50, 1000, 300), "a peek consumes nothing");
    }
}

#[test]
fn bytes_that_a_full_peer_does_not_take_are_written_and_not_acknowledged() {
    let mut connection = Connection::v4();
    connection.connected.set_nonblocking(true).unwrap();
    let mut written = 0;
    while let Ok(count) = connection.connected.write(&[0; 65_536]) {
        written += count as u64;
    }
    let counts = connected(&connection).unwrap();
    assert!(counts.written == written && counts.acked < written, "{written} {counts:?}");
}

#[test]
fn a_fin_is_no_byte_on_either_side_before_and_after_it_is_consumed() {
    let mut connection = Connection::v4();
    connection.connected.write_all(&[0; 10]).unwrap();
    connection.accepted.write_all(&[0; 4]).unwrap();
    connection.connected.shutdown(Shutdown::Write).unwrap();
    eventually(&all(4, 10, 0), || accepted(&connection)); // CLOSE_WAIT
    eventually(&all(10, 4, 0), || connected(&connection)); // FIN_WAIT2
    connection.accepted.read_exact(&mut [0; 10]).unwrap();
    assert_eq!(accepted(&connection), all(4, 10, 10));
    assert_eq!(connection.accepted.read(&mut [0; 10]).unwrap(), 0);
    assert_eq!(accepted(&connection), all(4, 10, 10), "after the end was received");
    connection.accepted.write_all(&[0; 3]).unwrap();
    eventually(&all(7, 10, 10), || accepted(&connection));
    connection.connected.read_exact(&mut [0; 7]).unwrap();
    assert_eq!(connected(&connection), all(10, 7, 7));
}

#[test]
fn a_fin_behind_bytes_that_the_peer_does_not_take_is_no_byte() {
    let mut connection = Connection::v4();
    connection.connected.set_nonblocking(true).unwrap();
    let mut written = 0;
    while let Ok(count) = connection.connected.write(&[0; 65_536]) {
        written += count as u64;
    }
    connection.connected.shutdown(Shutdown::Write).unwrap(); // FIN_WAIT1: the FIN waits behind the bytes.
    let counts = connected(&connection).unwrap();
    assert!(counts.written == written && counts.acked < written, "{written} {counts:?}");
    let total = connection.accepted.read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(total as u64, written);
    eventually(&all(written, 0, 0), || connected(&connection));
    assert_eq!(accepted(&connection), all(0, written, written));
}

#[test]
fn both_ends_of_the_stream_and_a_reset_are_beyond_the_counts() {
    let connection = Connection::v4();
    connection.connected.shutdown(Shutdown::Write).unwrap();
    eventually(&all(0, 0, 0), || accepted(&connection));
    connection.accepted.shutdown(Shutdown::Write).unwrap();
    eventually(&Err(Reason::State), || accepted(&connection));
    eventually(&Err(Reason::State), || connected(&connection));

    let mut connection = Connection::v4();
    connection.connected.write_all(b"unread").unwrap();
    eventually(&all(0, 6, 0), || accepted(&connection));
    drop(connection.accepted); // A reset, because bytes are unread.
    eventually(&Err(Reason::State), || read(connection.connected.as_fd(), Role::Connected));
}

#[test]
fn a_pending_urgent_byte_is_refused_until_the_stream_is_read_past_it() {
    let mut connection = Connection::v4();
    connection.connected.write_all(&[0; 5]).unwrap();
    rustix::net::send(&connection.connected, b"!", rustix::net::SendFlags::OOB).unwrap();
    eventually(&Err(Reason::Urgent), || accepted(&connection));
    connection.connected.write_all(&[0; 5]).unwrap();
    eventually(&11, || connected(&connection).unwrap().acked);
    connection.accepted.read_exact(&mut [0; 5]).unwrap();
    assert_eq!(accepted(&connection), Err(Reason::Urgent), "at the mark");
    let mut byte = [0_u8];
    assert_eq!(rustix::net::recv(&connection.accepted, &mut byte, rustix::net::RecvFlags::OOB).unwrap().0, 1);
    assert_eq!(accepted(&connection), Err(Reason::Urgent), "received, and still at the mark");
    connection.accepted.read_exact(&mut [0; 5]).unwrap();
    assert_eq!(accepted(&connection), all(0, 11, 11));
}

#[test]
fn unread_bytes_before_an_urgent_byte_that_was_received_are_counted_by_a_look_up_only() {
    let mut connection = Connection::v4();
    connection.connected.write_all(&[0; 5]).unwrap();
    rustix::net::send(&connection.connected, b"!", rustix::net::SendFlags::OOB).unwrap();
    connection.connected.write_all(&[0; 5]).unwrap();
    eventually(&11, || connected(&connection).unwrap().acked);
    rustix::net::recv(&connection.accepted, &mut [0_u8], rustix::net::RecvFlags::OOB).unwrap();
    assert_eq!(accepted(&connection), all(0, 11, 6), "0 bytes are consumed: 6 are hidden behind the mark");
    if let Some(entry) = meeting::diag::look_up(connection.endpoints().1.tuple) {
        assert_eq!(entry.unread_bytes, 11);
    }
}

#[test]
fn counts_stay_exact_while_both_sides_send_and_acknowledge() {
    let connection = Connection::v4();
    let (mut reader, mut writer) = (&connection.accepted, &connection.connected);
    reader.set_read_timeout(Some(Duration::from_secs(30))).unwrap(); // Ends the reader if this thread fails.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = [0; 3000];
            while matches!(reader.read(&mut bytes), Ok(1..)) {}
        });
        // This thread is the only one to write, so what it has written is known at each read of the counts.
        let (mut written, mut last, mut busy) = (0, Counts::default(), 0);
        for round in 0..20_000_u64 {
            writer.write_all(&vec![0; (round % 97) as usize + 1]).unwrap();
            written += round % 97 + 1;
            match connected(&connection) {
                Ok(counts) => {
                    assert_eq!(counts.written, written);
                    assert!(last.acked <= counts.acked && counts.acked <= written);
                    last = counts;
                }
                Err(reason) => busy += u64::from(reason == Reason::Busy),
            }
        }
        assert!(busy < 2000, "{busy} of 20000 reads found the counts changing each time");
        connection.connected.shutdown(Shutdown::Write).unwrap();
    });
}

#[test]
fn sockets_that_are_no_plain_established_tcp_are_refused() {
    let of = |socket: std::os::fd::BorrowedFd<'_>| Endpoint::of(socket, Role::Connected).unwrap_err();
    let (unix, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
    assert_eq!(of(unix.as_fd()), Reason::NotTcp);
    assert_eq!(of(std::fs::File::open("/dev/null").unwrap().as_fd()), Reason::NotTcp);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    assert_eq!(of(listener.as_fd()), Reason::State);
    assert_eq!(read(listener.as_fd(), Role::Accepted), Err(Reason::State));

    // A socket that connects to its own address is connected to itself (simultaneous open).
    let (ours, flags) = (listener.local_addr().unwrap(), rustix::net::SocketFlags::CLOEXEC);
    drop(listener);
    let family = rustix::net::AddressFamily::INET;
    let socket = rustix::net::socket_with(family, rustix::net::SocketType::STREAM, flags, None).unwrap();
    rustix::net::bind(&socket, &ours).unwrap();
    rustix::net::connect(&socket, &ours).unwrap();
    assert_eq!(of(socket.as_fd()), Reason::SelfConnected);
}

#[test]
fn a_socket_with_kernel_tls_is_refused() {
    let connection = Connection::v4();
    if set_option(&connection.connected, libc::TCP_ULP, b"tls").is_err() {
        return; // A kernel without it.
    }
    assert_eq!(Endpoint::of(connection.connected.as_fd(), Role::Connected).unwrap_err(), Reason::Ulp);
}

#[test]
fn a_socket_under_repair_is_refused() {
    let connection = Connection::v4();
    if set_option(&connection.connected, libc::TCP_REPAIR, &1_i32.to_ne_bytes()).is_err() {
        return; // Not privileged.
    }
    assert_eq!(Endpoint::of(connection.connected.as_fd(), Role::Connected).unwrap_err(), Reason::Repair);
}

fn set_option(socket: &TcpStream, name: i32, value: &[u8]) -> Result<(), i32> {
    let (fd, length) = (socket.as_raw_fd(), value.len() as libc::socklen_t);
    // SAFETY: `value` is readable for its length.
    match unsafe { libc::setsockopt(fd, libc::IPPROTO_TCP, name, value.as_ptr().cast(), length) } {
        0 => Ok(()),
        result => Err(result),
    }
}
