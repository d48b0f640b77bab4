//! Tests of endpoints that several processes hold, of which each is an object of this process.

use super::*;
use segment::OwnState;
use std::os::fd::BorrowedFd;

/// Returns what another process has after a fork: an object for the same endpoint.
fn another_holder(endpoint: &OpenEndpoint) -> OpenEndpoint {
    let memory = endpoint.0.memory();
    // SAFETY: the endpoint keeps the descriptor open.
    let memory = unsafe { BorrowedFd::borrow_raw(memory[0]) }.try_clone_to_owned().unwrap();
    let lanes = endpoint.0.lanes().unwrap();
    let segment = Segment::join(&memory, lanes.segment.side()).unwrap();
    assert!(segment.is_adopted());
    let lifeline = endpoint.0.borrow_lifeline().try_clone_to_owned().unwrap();
    let holder =
        OpenEndpoint(Connection::open(origin(lifeline.into_raw_fd(), true), InitialPath::Lanes(segment, None)));
    lanes.segment.store(OwnState::Holders, 2);
    [endpoint, &holder].into_iter().for_each(|one| one.0.note_shared());
    holder
}

/// Makes the peer, which has not found the other endpoint's message, switch to memory of its own.
fn switch_crossing(peer: OwnedFd) -> OpenEndpoint {
    let (segment, memory) = Segment::create(Side::Acceptor).unwrap();
    segment.set_up();
    send_message(peer.as_fd(), SWITCH, memory.as_fd()).unwrap();
    OpenEndpoint(Connection::open(origin(peer.into_raw_fd(), true), InitialPath::Lanes(segment, None)))
}

#[test]
fn a_message_with_unknown_memory_is_left_to_the_process_that_receives() {
    let _no_child = test_support::spawn::forbid();
    let (reader, peer) = with_bare_peer(Side::Connector);
    reader.0.settle_lifeline();
    assert!(reader.0.sends_by_lane());
    let writer = another_holder(&reader);
    let peer = switch_crossing(peer);
    assert_eq!(send(&peer, b"in the peer's memory"), Ok(20));
    writer.0.process_messages_for_all();
    assert_eq!(writer.0.readiness(libc::POLLOUT), libc::POLLOUT);
    assert!(!writer.0.receives_by_lane());
    assert_eq!(receive(&reader, 100).unwrap(), b"in the peer's memory");
    writer.0.process_messages_for_all();
    assert!(writer.0.receives_by_lane(), "the peer rings for room from now on");
    assert_eq!(receive(&reader, 100), Err(Errno::AGAIN));
    for holder in [reader, writer] {
        holder.0.lanes().unwrap().segment.store(OwnState::Holders, 1);
    }
}

#[test]
fn a_process_that_cannot_attach_the_memory_of_its_input_resets_the_connection() {
    let _no_child = test_support::spawn::forbid();
    for polls in [false, true] {
        let (reader, peer) = with_bare_peer(Side::Connector);
        reader.0.settle_lifeline();
        let late = another_holder(&reader);
        let peer = switch_crossing(peer);
        assert_eq!(send(&peer, b"one"), Ok(3));
        assert_eq!(receive(&reader, 3).unwrap(), b"one");
        assert_eq!(send(&peer, b"two"), Ok(3));
        if polls {
            late.0.process_messages_for_all();
            assert_eq!(late.0.readiness(libc::POLLIN), libc::POLLIN | libc::POLLERR | libc::POLLHUP);
        }
        assert_eq!(receive(&late, 3), Err(Errno::CONNRESET));
        late.0.lanes().unwrap().segment.store(OwnState::Holders, 1);
    }
}

#[test]
fn memory_that_comes_before_a_fork_is_attached_before_it() {
    let _no_child = test_support::spawn::forbid();
    let (own, peer) = with_bare_peer(Side::Connector);
    assert!(own.0.switch_to_lanes());
    rustix::io::write(&peer, b"by the lifeline, ").unwrap();
    let peer = switch_crossing(peer);
    assert_eq!(send(&peer, b"by the lane"), Ok(11));
    own.0.settle_lifeline();
    let has_inbound = || {
        let _both = own.0.lock_both();
        // SAFETY: both locks are held, under which the cell is written.
        unsafe { &*own.0.lanes().unwrap().inbound.get() }.is_some()
    };
    assert!(has_inbound() && !own.0.receives_by_lane());
    assert_eq!(receive_all(&own), b"by the lifeline, by the lane");
}

#[test]
fn a_shared_endpoint_without_lanes_goes_on_to_send_by_the_lifeline() {
    let _no_child = test_support::spawn::forbid();
    let (own, peer) = with_bare_peer(Side::Connector);
    own.0.lifeline_path.is_shared.store(true, Ordering::Relaxed);
    own.0.note_shared();
    let others = peer.try_clone().unwrap();
    let peer = switch_crossing(peer);
    assert_eq!(send(&peer, b"by the lane"), Ok(11));
    assert_eq!(receive_all(&own), b"by the lane");
    assert_eq!(send(&own, b"by the lifeline"), Ok(15));
    assert!(own.0.receives_by_lane() && !own.0.sends_by_lane());
    let mut bytes = [0; 20];
    assert_eq!(rustix::io::read(&others, &mut bytes), Ok(15));
}

#[test]
fn an_endpoint_that_attached_lanes_early_uses_them_from_a_fork_on() {
    let _no_child = test_support::spawn::forbid();
    let (own, peer) = with_bare_peer(Side::Connector);
    rustix::io::write(&peer, b"by the lifeline, ").unwrap();
    let peer = switch_crossing(peer);
    assert_eq!(send(&peer, b"by the lane"), Ok(11));
    own.0.readiness(libc::POLLPRI);
    assert!(own.0.lanes().is_some() && !own.0.sends_by_lane());
    own.0.settle_lifeline();
    assert!(own.0.sends_by_lane() && !own.0.receives_by_lane());
    assert_eq!(send(&own, b"by the lane"), Ok(11));
    assert_eq!(receive_all(&own), b"by the lifeline, by the lane");
    assert_eq!(receive_all(&peer), b"by the lane");
}
