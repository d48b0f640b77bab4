//! A pair that everything but its bytes proves to be one connection: addresses, states, and the cookies of both sides
//! by look-ups of the kernel. `TCP_REPAIR` (`tcp(7)`) makes one, where the test may use it: it removes the connecting
//! endpoint silently, like a reset that is lost, and creates another one with its addresses and sequence numbers.

#![allow(unsafe_code)] // Socket options that only the test sets.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use common::{Connection, memory, offer, place, policy};
use meeting::diag::{LookUp, look_up_peer};
use meeting::{Accepting, Answer, Endpoint, Evidence, Policy, Proposal, Reason, Role, Step, counts};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

const QUEUES: [i32; 2] = [1, 2]; // TCP_RECV_QUEUE, TCP_SEND_QUEUE

fn set(socket: &impl AsRawFd, name: i32, value: i32) -> bool {
    let pointer = (&raw const value).cast();
    // SAFETY: the pointer is to a local number, whose length is passed along.
    unsafe { libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, name, pointer, 4) == 0 }
}

fn get(socket: &impl AsRawFd, name: i32) -> i32 {
    let (mut value, mut length) = (0_i32, 4);
    // SAFETY: the pointers are to a local number and its length.
    let result = unsafe {
        let pointer = (&raw mut value).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, name, pointer, &raw mut length)
    };
    assert_eq!(result, 0);
    value
}

/// Replaces the connecting endpoint by another socket. `None` without the privilege.
fn replace(connected: TcpStream) -> Option<TcpStream> {
    let (local, peer) = (connected.local_addr().unwrap(), connected.peer_addr().unwrap());
    if !set(&connected, libc::TCP_REPAIR, 1) {
        return None;
    }
    let sequences = QUEUES.map(|queue| {
        assert!(set(&connected, libc::TCP_REPAIR_QUEUE, queue));
        get(&connected, libc::TCP_QUEUE_SEQ)
    });
    drop(connected); // Sends nothing.
    let socket: OwnedFd =
        rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    sockopt::set_socket_reuseaddr(&socket, true).unwrap();
    assert!(set(&socket, libc::TCP_REPAIR, 1));
    rustix::net::bind(&socket, &local).unwrap();
    for (queue, sequence) in QUEUES.into_iter().zip(sequences) {
        assert!(set(&socket, libc::TCP_REPAIR_QUEUE, queue) && set(&socket, libc::TCP_QUEUE_SEQ, sequence));
    }
    rustix::net::connect(&socket, &peer).unwrap();
    // Ends the repair with a window probe, whose answer lets the socket send.
    assert!(set(&socket, libc::TCP_REPAIR, 0));
    Some(TcpStream::from(socket))
}

#[test]
fn a_stale_pair_whose_cookies_agree_is_unmasked_by_its_bytes() {
    let Connection { mut connected, mut accepted } = Connection::v4();
    connected.write_all(&[1; 300]).unwrap();
    accepted.read_exact(&mut [0; 300]).unwrap();
    let Some(mut connected) = replace(connected) else { return };
    connected.write_all(&[1; 100]).unwrap();
    accepted.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    accepted.read_exact(&mut [0; 100]).unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    while counts::read(connected.as_fd(), Role::Connected).is_err() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1)); // Until the bytes are acknowledged.
    }

    let theirs = Endpoint::of(connected.as_fd(), Role::Connected).unwrap();
    let ours = Endpoint::of(accepted.as_fd(), Role::Accepted).unwrap();
    assert_eq!(ours.tuple, theirs.tuple.reversed());
    for (endpoint, other) in [(&ours, &theirs), (&theirs, &ours)] {
        match look_up_peer(endpoint) {
            LookUp::Found(entry) => assert!(entry.cookie == other.cookie && entry.is_connected()),
            other => assert_eq!(other, LookUp::Unavailable),
        }
    }
    for evidence in [Evidence::LookUp, Evidence::Counts] {
        let policy = Policy { evidence, ..policy() };
        let mut accepting = Accepting::announce(&place(), accepted.as_fd(), &ours, &policy).unwrap();
        let mut proposal = Proposal::connect(&place(), &theirs, &policy).unwrap();
        proposal.send(connected.as_fd(), &offer(&memory(), 1)).unwrap();
        assert_eq!(accepting.advance(accepted.as_fd()), Step::Refused(Reason::Counts));
        assert!(matches!(proposal.advance(connected.as_fd()), Answer::Declined(Reason::Counts)));
    }
}
