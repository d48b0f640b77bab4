//! Tests of connections that begin on the lifeline, with both endpoints in one process.

use super::super::tests::{OpenEndpoint, lifeline_pair, origin};
use super::super::{Connection, ConnectionParams, InitialPath, MessageFlags};
use super::message::{FOLLOW, OFFER, SWITCH, send_message};
use super::receive::LifelineRead;
use crate::options::CORKED;
use libc::iovec;
use proptest::prelude::*;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use segment::{Segment, Side};
use std::collections::VecDeque;
use std::os::fd::{AsFd, IntoRawFd, OwnedFd};
use std::sync::atomic::Ordering;

mod holders;

fn lifeline() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
}

fn open(fd: OwnedFd, side: Side) -> OpenEndpoint {
    OpenEndpoint(Connection::open(origin(fd.into_raw_fd(), true), InitialPath::Lifeline(side)))
}

/// Returns an endpoint, and the bare other end of its lifeline.
fn with_bare_peer(side: Side) -> (OpenEndpoint, OwnedFd) {
    let (own, others) = lifeline();
    (open(own, side), others)
}

fn send(endpoint: &OpenEndpoint, bytes: &[u8]) -> Result<usize, Errno> {
    let spans = [iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
    // SAFETY: the span is the slice.
    unsafe { endpoint.0.send(&spans, MessageFlags::default()) }
}

fn receive(endpoint: &OpenEndpoint, len: usize) -> Result<Vec<u8>, Errno> {
    let mut bytes = vec![0; len];
    let spans = [iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: len }];
    // SAFETY: the span is the vector.
    let received = unsafe { endpoint.0.receive(&spans, MessageFlags::default()) }?;
    bytes.truncate(received);
    Ok(bytes)
}

fn receive_all(endpoint: &OpenEndpoint) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        match receive(endpoint, 10_000) {
            Ok(bytes) if bytes.is_empty() => return all,
            Ok(bytes) => all.extend(bytes),
            Err(error) => {
                assert_eq!(error, Errno::AGAIN);
                return all;
            }
        }
    }
}

fn uses_lanes_both_ways(endpoint: &OpenEndpoint) -> bool {
    endpoint.0.sends_by_lane() && endpoint.0.receives_by_lane()
}

#[test]
fn an_unread_message_does_not_count_as_unread_bytes_of_the_program() {
    let [one, two] = lifeline_pair();
    assert!(two.0.switch_to_lanes());
    assert_eq!(send(&two, b"answer"), Ok(6));
    assert_eq!(receive(&one, 10).as_deref(), Ok(&b"answer"[..]));
    assert!(two.0.has_bytes_in_lifeline(), "the peer has sent a FOLLOW");
    assert!(!two.0.has_program_bytes_in_lifeline());
    assert_eq!(send(&one, b"unread"), Ok(6));
    assert!(two.0.has_program_bytes_in_lifeline());
}

#[test]
fn a_cork_brings_lanes_except_for_the_response_to_the_only_request() {
    let [one, two] = lifeline_pair();
    for (requests, holds) in [(1, false), (2, true)] {
        assert_eq!(send(&one, b"question"), Ok(8));
        assert_eq!(receive(&two, 10).as_deref(), Ok(&b"question"[..]));
        two.0.set_shared_options(CORKED, CORKED);
        assert_eq!(send(&two, b"answer"), Ok(6));
        assert_eq!(two.0.sends_by_lane(), holds, "after {requests} requests");
        two.0.set_shared_options(CORKED, 0);
        assert_eq!(receive(&one, 10).as_deref(), Ok(&b"answer"[..]));
    }
    let [one, two] = lifeline_pair();
    one.0.set_shared_options(CORKED, CORKED);
    assert_eq!(send(&one, b"question"), Ok(8));
    assert!(one.0.sends_by_lane());
    assert_eq!((one.0.held_bytes(), two.0.unread_bytes()), (8, 0));
    one.0.push();
    assert_eq!(receive(&two, 10).as_deref(), Ok(&b"question"[..]));
}

#[test]
fn a_message_after_bytes_that_were_peeked_at_is_found() {
    let [one, two] = lifeline_pair();
    assert_eq!(send(&one, &[1; 100]), Ok(100));
    assert_eq!(receive(&two, 10).as_deref(), Ok(&[1; 10][..]));
    assert_eq!((two.0.lifeline_path.peeked_bytes.load(Ordering::Relaxed), two.0.unread_bytes()), (90, 90));
    assert!(one.0.switch_to_lanes());
    assert_eq!(send(&one, &[2; 50]), Ok(50));
    assert_eq!(two.0.unread_bytes(), 140);
    assert_eq!(receive(&two, 90).as_deref(), Ok(&[1; 90][..]));
    assert_eq!(receive(&two, 100).as_deref(), Ok(&[2; 50][..]));
    assert!(two.0.receives_by_lane());
}

#[test]
fn a_connection_for_one_request_gets_no_lanes() {
    let _no_child = test_support::spawn::forbid();
    let [client, server] = lifeline_pair();
    assert_eq!(receive(&server, 10), Err(Errno::AGAIN));
    assert_eq!(send(&client, b"question"), Ok(8));
    for part in [b"ques", b"tion"] {
        assert_eq!(receive(&server, 4).unwrap(), part);
    }
    for part in [b"ans", b"wer"] {
        assert_eq!(send(&server, part), Ok(3));
    }
    assert_eq!(receive_all(&client), b"answer");
    assert!(!server.0.lifeline_path.has_offered.load(Ordering::Relaxed));
    assert!(client.0.lanes().is_none() && server.0.lanes().is_none());
    drop(client);
    assert_eq!(receive(&server, 10).unwrap(), b"");
}

#[test]
fn a_busy_connection_gets_lanes() {
    let _no_child = test_support::spawn::forbid();
    let [client, server] = lifeline_pair();
    for round in 0..6_u8 {
        assert_eq!(send(&client, &[round; 10]), Ok(10));
        assert_eq!(receive_all(&server), [round; 10]);
        assert_eq!(send(&server, &[round; 20]), Ok(20));
        assert_eq!(receive_all(&client), [round; 20]);
    }
    assert!(uses_lanes_both_ways(&client) && uses_lanes_both_ways(&server));
}

#[test]
fn a_stream_in_one_direction_gets_a_lane_though_its_peer_reads_all_of_it() {
    let _no_child = test_support::spawn::forbid();
    for is_to_server in [true, false] {
        let [client, server] = lifeline_pair();
        let (from, to) = if is_to_server { (&client, &server) } else { (&server, &client) };
        for round in 0..40_u8 {
            assert_eq!(from.0.sends_by_lane(), round > 32);
            assert_eq!(send(from, &[round; 10]), Ok(10));
            assert_eq!(receive_all(to), [round; 10]);
        }
        assert_eq!(send(to, b"at last"), Ok(7));
        assert_eq!(receive_all(from), b"at last");
        assert!(uses_lanes_both_ways(&client) && uses_lanes_both_ways(&server));
    }
}

#[test]
fn a_process_with_lanes_to_an_address_begins_with_lanes_there() {
    let _no_child = test_support::spawn::forbid();
    let [client, server] = lifeline_pair();
    assert!(client.0.switch_to_lanes());
    let (connector, acceptor) = lifeline();
    let params = ConnectionParams { tuple: client.0.tuple().unwrap(), ..origin(connector.into_raw_fd(), true) };
    let other_client = OpenEndpoint(Connection::open(params, InitialPath::Lifeline(Side::Connector)));
    let other_server = open(acceptor, Side::Acceptor);
    assert_eq!((send(&other_client, b"one"), send(&client, b"two")), (Ok(3), Ok(3)));
    assert!(other_client.0.sends_by_lane());
    for (endpoint, bytes) in [(&server, b"two"), (&other_server, b"one")] {
        assert!(endpoint.0.readiness(libc::POLLIN) & libc::POLLIN != 0);
        assert_eq!(receive(endpoint, 10).unwrap(), bytes);
    }
    let elsewhere = lifeline_pair();
    assert_eq!(send(&elsewhere[0], b"three"), Ok(5));
    assert!(!elsewhere[0].0.sends_by_lane());
}

#[test]
fn an_endpoint_whose_peer_does_not_read_has_the_capacity_of_lanes() {
    let _no_child = test_support::spawn::forbid();
    let [client, server] = lifeline_pair();
    let sent: Vec<u8> = (0..3 << 20).map(|index| (index / 7) as u8).collect();
    for endpoints in [[&client, &server], [&server, &client]] {
        let accepted = send(endpoints[0], &sent).unwrap();
        assert!(accepted > 1 << 20, "{accepted}");
        assert_eq!(endpoints[1].0.unread_bytes(), accepted);
        assert!(receive_all(endpoints[1]) == sent[..accepted]);
    }
    receive_all(&client);
    assert!(uses_lanes_both_ways(&client) && uses_lanes_both_ways(&server));
}

#[test]
fn bytes_after_a_message_are_not_received_before_it_is_handled() {
    let _no_child = test_support::spawn::forbid();
    let [client, server] = lifeline_pair();
    assert!(client.0.switch_to_lanes());
    client.0.ring_locked();
    assert_eq!(send(&client, b"by the lane"), Ok(11));
    let (mut bytes, len) = ([0_u8; 20], 20);
    let spans = [iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: len }];
    {
        // As when a thread that polls for messages is interrupted before it handles one.
        let _guard = server.0.lock_direction(&server.0.receive_lock);
        assert!(matches!(server.0.receive_message(), Ok(LifelineRead::Message)));
        // SAFETY: the span is the array.
        let taken = unsafe { server.0.read_lifeline(&spans, 0, MessageFlags::default()) };
        assert!(matches!(taken, Ok(LifelineRead::Message)));
    }
    assert_eq!(receive(&server, len).unwrap(), b"by the lane");
}

#[test]
fn an_endpoint_that_switches_follows_a_message_behind_unread_bytes() {
    let _no_child = test_support::spawn::forbid();
    let [client, server] = lifeline_pair();
    assert_eq!((send(&client, b"c1"), send(&server, b"s1")), (Ok(2), Ok(2)));
    assert!(client.0.switch_to_lanes());
    assert!(server.0.switch_to_lanes());
    let inode = |endpoint: &OpenEndpoint| endpoint.0.lifeline_path.inode.load(Ordering::Relaxed);
    assert_eq!(inode(&client), inode(&server), "both use the same memory");
    assert_eq!((send(&client, b"c2"), send(&server, b"s2")), (Ok(2), Ok(2)));
    assert_eq!((receive_all(&client), receive_all(&server)), (b"s1s2".to_vec(), b"c1c2".to_vec()));
    assert!(uses_lanes_both_ways(&client) && uses_lanes_both_ways(&server));
    drop(client);
    assert_eq!(receive(&server, 1).unwrap(), b"");
}

#[test]
fn the_offer_of_the_connecting_endpoint_wins() {
    let _no_child = test_support::spawn::forbid();
    let [client, server] = lifeline_pair();
    for endpoint in [&client, &server] {
        endpoint.0.offer_for_capacity(4096);
    }
    for _ in 0..3 {
        for [one, other] in [[&client, &server], [&server, &client]] {
            assert_eq!(send(one, b"bytes"), Ok(5));
            assert_eq!(receive_all(other), b"bytes");
        }
    }
    assert!(uses_lanes_both_ways(&client) && uses_lanes_both_ways(&server));
}

#[test]
fn unread_bytes_reset_the_peer_and_messages_do_not() {
    let _no_child = test_support::spawn::forbid();
    for (unread, expected) in [(&b""[..], Ok(Vec::new())), (b"unread", Err(Errno::CONNRESET))] {
        let [client, server] = lifeline_pair();
        assert!(server.0.switch_to_lanes());
        send(&server, unread).unwrap();
        drop(client);
        assert_eq!(receive(&server, 10), expected, "{unread:?}");
        let [client, server] = lifeline_pair();
        send(&server, unread).unwrap();
        assert!(server.0.switch_to_lanes());
        drop(client);
        assert_eq!(receive(&server, 10), expected, "{unread:?} before the lane");
    }
}

#[test]
fn a_peer_that_breaks_the_protocol_resets_its_own_connection() {
    let _no_child = test_support::spawn::forbid();
    let (rubbish, _) = lifeline();
    let (segment, memory) = Segment::create(Side::Connector).unwrap();
    let descriptors = [rubbish.as_fd(), memory.as_fd()];
    for (kind, descriptor) in
        [0, 1, OFFER, SWITCH, FOLLOW, 5, 255].into_iter().flat_map(|kind| descriptors.map(|fd| (kind, fd)))
    {
        let (endpoint, peer) = with_bare_peer(Side::Acceptor);
        send_message(peer.as_fd(), kind, descriptor).unwrap();
        // Memory that was not set up is refused.
        let expected = if kind == OFFER { Errno::AGAIN } else { Errno::CONNRESET };
        assert_eq!(receive(&endpoint, 10), Err(expected), "message {kind}");
        let _ = (send(&endpoint, b"x"), endpoint.0.readiness(libc::POLLIN | libc::POLLOUT), endpoint.0.take_error());
    }
    segment.set_up();
    let (endpoint, peer) = with_bare_peer(Side::Acceptor);
    for _ in 0..10 {
        send_message(peer.as_fd(), OFFER, memory.as_fd()).unwrap();
    }
    assert_eq!(receive(&endpoint, 10), Err(Errno::CONNRESET), "more messages than an endpoint sends");
}

#[test]
fn a_peek_ends_before_a_message_wherever_the_buffer_ends() {
    let _no_child = test_support::spawn::forbid();
    for len in 1..14 {
        let (endpoint, peer) = with_bare_peer(Side::Acceptor);
        let (segment, memory) = Segment::create(Side::Connector).unwrap();
        segment.set_up();
        rustix::io::write(&peer, b"ten bytes.").unwrap();
        send_message(peer.as_fd(), OFFER, memory.as_fd()).unwrap();
        rustix::io::write(&peer, b"more").unwrap();
        assert_eq!(endpoint.0.unread_bytes(), 14);
        let mut received = Vec::new();
        while received.len() < 14 {
            received.extend(receive(&endpoint, len).unwrap());
        }
        assert_eq!(received, b"ten bytes.more", "by {len}");
    }
}

/// An action at one of the endpoints.
#[derive(Debug, Clone, Copy)]
enum Action {
    Send(usize),
    Receive(usize),
    Switch,
    Offer,
    Poll,
}

fn actions() -> impl Strategy<Value = Vec<(usize, Action)>> {
    let action = prop_oneof![
        4 => (1..3000_usize).prop_map(Action::Send),
        1 => (100_000..400_000_usize).prop_map(Action::Send),
        4 => (1..5000_usize).prop_map(Action::Receive),
        1 => (100_000..400_000_usize).prop_map(Action::Receive),
        1 => Just(Action::Switch),
        1 => Just(Action::Offer),
        2 => Just(Action::Poll),
    ];
    prop::collection::vec((0..2_usize, action), 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_arrives_once_and_in_order_whenever_endpoints_switch(actions in actions()) {
        let _no_child = test_support::spawn::forbid();
        let endpoints = lifeline_pair();
        let mut in_flight: [VecDeque<u8>; 2] = Default::default();
        let mut sent = [0_usize; 2];
        let mut has_offered = [false; 2];
        for (side, action) in actions {
            let (endpoint, other) = (&endpoints[side], 1 - side);
            match action {
                Action::Send(len) => {
                    let bytes: Vec<u8> = (sent[side]..sent[side] + len).map(|index| (index * 7 / 3) as u8).collect();
                    match send(endpoint, &bytes) {
                        Ok(accepted) => {
                            in_flight[other].extend(&bytes[..accepted]);
                            sent[side] += accepted;
                        }
                        Err(error) => prop_assert_eq!(error, Errno::AGAIN),
                    }
                }
                Action::Receive(len) => match receive(endpoint, len) {
                    Ok(bytes) => {
                        prop_assert!(!bytes.is_empty() && bytes.len() <= in_flight[side].len());
                        prop_assert!(in_flight[side].drain(..bytes.len()).eq(bytes));
                        // The accepting endpoint will offer with a response.
                        has_offered[side] |= side == 1;
                    }
                    Err(error) => {
                        prop_assert_eq!(error, Errno::AGAIN);
                        prop_assert!(in_flight[side].is_empty());
                    }
                },
                Action::Switch => prop_assert!(endpoint.0.switch_to_lanes()),
                Action::Offer => {
                    has_offered[side] = true;
                    endpoint.0.offer_for_capacity(4096);
                }
                Action::Poll => {
                    let is_readable = endpoint.0.readiness(libc::POLLIN) & libc::POLLIN != 0;
                    prop_assert_eq!(is_readable, !in_flight[side].is_empty());
                    let unread_bytes = endpoint.0.unread_bytes();
                    prop_assert_eq!(unread_bytes > 0, is_readable);
                    prop_assert!(has_offered[other] || unread_bytes == in_flight[side].len());
                }
            }
        }
        for side in 0..2 {
            prop_assert!(receive_all(&endpoints[side]).into_iter().eq(in_flight[side].drain(..)));
        }
    }
}
