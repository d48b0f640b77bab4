//! Both endpoints of real TCP connections meet, or stay on TCP for a reason.

mod common;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;

use common::{Connection, MEMORY_BYTES, alone, descriptors, key, memory, offer, place, policy};
use meeting::bell::{Drained, drain, hang_up, ring};
use meeting::{Accepting, Announcement, Answer, Endpoint, Evidence, Memory, Policy, Proposal, Reason, Role, Step};

const V6: &str = "[::1]:0";

#[test]
fn both_endpoints_have_the_others_memory_cookie_and_a_bell() {
    let _alone = alone();
    for (listening, destination) in
        [("127.0.0.1:0", "127.0.0.1:0"), (V6, V6), ("[::]:0", "127.0.0.1:0"), ("[::]:0", "[::ffff:127.0.0.1]:0")]
    {
        let connection = Connection::new(listening, destination);
        let before = descriptors();
        let (connected, accepted) = connection.meet();
        let (a, b) = connection.endpoints();
        assert_eq!((connected.peer_cookie, accepted.peer_cookie), (b.cookie, a.cookie), "{listening} {destination}");
        let memories = [11, 22].map(|secret| Memory::own(MEMORY_BYTES, secret));
        assert_eq!([connected.outgoing, connected.incoming], memories);
        assert_eq!([accepted.incoming, accepted.outgoing], memories);
        assert_eq!(connected.peer_pid, std::process::id() as i32);
        assert_eq!(rustix::fs::fstat(&connected.peer_memory).unwrap().st_size, MEMORY_BYTES as i64);
        assert_eq!(rustix::io::write(&accepted.peer_memory, b"x"), Err(rustix::io::Errno::BADF), "read-only");

        ring(connected.bell.as_fd()).unwrap();
        assert_eq!(drain(accepted.bell.as_fd()), Drained::Empty);
        hang_up(connected.bell);
        assert_eq!(drain(accepted.bell.as_fd()), Drained::HungUp);
        hang_up(accepted.bell);
        drop((connected.peer_memory, accepted.peer_memory));
        assert_eq!(descriptors(), before);
    }
}

#[test]
fn endpoints_meet_whatever_has_passed_before_and_is_under_way() {
    let _alone = alone();
    let mut connection = Connection::v4();
    connection.connected.write_all(&[1; 100_000]).unwrap();
    connection.accepted.read_exact(&mut [0; 30_000]).unwrap();
    connection.accepted.set_nonblocking(true).unwrap();
    while connection.accepted.write(&[2; 50_000]).is_ok() {}
    let (connected, accepted) = connection.meet();
    assert_eq!(accepted.own_counts.consumed, 30_000);
    assert_eq!(connected.peer_counts, accepted.own_counts);
    assert_eq!((accepted.peer_counts.written, accepted.peer_counts.consumed), (100_000, 0));
}

#[test]
fn bytes_that_pass_during_the_meeting_do_not_disturb_it() {
    let _alone = alone();
    let mut connection = Connection::v4();
    let memories = [memory(), memory()];
    let mut accepting = connection.announce();
    connection.accepted.write_all(&[1; 10]).unwrap();
    connection.connected.write_all(&[1; 20]).unwrap();
    let mut proposal = connection.connect().unwrap();
    connection.connected.read_exact(&mut [0; 5]).unwrap();
    connection.accepted.write_all(&[1; 10]).unwrap();
    proposal.send(connection.connected.as_fd(), &offer(&memories[0], 1)).unwrap();
    connection.connected.write_all(&[1; 20]).unwrap();
    connection.accepted.read_exact(&mut [0; 25]).unwrap();
    assert_eq!(accepting.advance(connection.accepted.as_fd()), Step::Proposed);
    connection.accepted.write_all(&[1; 10]).unwrap();
    connection.connected.read_exact(&mut [0; 20]).unwrap();
    accepting.accept(&offer(&memories[1], 2)).unwrap();
    connection.connected.write_all(&[1; 20]).unwrap();
    assert!(matches!(proposal.advance(connection.connected.as_fd()), Answer::Met(_)));
}

#[test]
fn nobody_answers_before_the_announcement_and_after_it() {
    let _alone = alone();
    let connection = Connection::v4();
    let before = descriptors();
    assert_eq!(connection.connect().unwrap_err(), Reason::Nobody);
    let accepting = connection.announce();
    let taken = Announcement::bind(&place(), &connection.endpoints().1);
    assert_eq!(taken.unwrap_err(), Reason::NameTaken);
    let waiting: Vec<Proposal> = (0..5).map(|_| connection.connect().unwrap()).collect();
    assert_eq!(connection.connect().unwrap_err(), Reason::Full);
    drop(accepting);
    assert_eq!(connection.connect().unwrap_err(), Reason::Nobody);
    drop(waiting);
    assert_eq!(descriptors(), before);
}

#[test]
fn another_key_is_another_name() {
    let _alone = alone();
    let connection = Connection::v4();
    let _accepting = connection.announce();
    let other = meeting::Rendezvous::from(meeting::Key::from([1; 16]));
    assert_eq!(Proposal::connect(&other, &connection.endpoints().0, &policy()).unwrap_err(), Reason::Nobody);
}

#[test]
fn a_refusal_carries_its_reason_and_leaves_the_announcement() {
    let _alone = alone();
    let connection = Connection::v4();
    let memories = [memory(), memory()];
    let before = descriptors();
    let mut accepting = connection.announce();
    let mut proposal = connection.connect().unwrap();
    proposal.send(connection.connected.as_fd(), &offer(&memories[0], 1)).unwrap();
    assert_eq!(proposal.send(connection.connected.as_fd(), &offer(&memories[0], 1)), Err(Reason::Gone));
    assert_eq!(accepting.advance(connection.accepted.as_fd()), Step::Proposed);
    accepting.refuse(Reason::Off);
    assert!(matches!(proposal.advance(connection.connected.as_fd()), Answer::Declined(Reason::Off)));

    let mut again = connection.connect().unwrap();
    again.send(connection.connected.as_fd(), &offer(&memories[0], 1)).unwrap();
    assert_eq!(accepting.advance(connection.accepted.as_fd()), Step::Proposed);
    accepting.accept(&offer(&memories[1], 1)).unwrap();
    assert!(matches!(again.advance(connection.connected.as_fd()), Answer::Met(_)));
    drop((proposal, again, accepting));
    assert_eq!(descriptors(), before);
}

#[test]
fn an_accepting_endpoint_that_goes_before_it_answers_hangs_up() {
    let _alone = alone();
    let connection = Connection::v4();
    let memory = memory();
    for advances in 0..2 {
        let mut accepting = connection.announce();
        let mut proposal = connection.connect().unwrap();
        proposal.send(connection.connected.as_fd(), &offer(&memory, 1)).unwrap();
        for _ in 0..advances {
            assert_eq!(accepting.advance(connection.accepted.as_fd()), Step::Proposed);
        }
        drop(accepting);
        assert!(matches!(proposal.advance(connection.connected.as_fd()), Answer::Refused(Reason::Gone)));
    }
}

#[test]
fn a_silent_caller_does_not_keep_the_other_endpoint_out() {
    let _alone = alone();
    let connection = Connection::v4();
    let memory = memory();
    let mut accepting = connection.announce();
    let silent = connection.connect().unwrap();
    assert_eq!(accepting.advance(connection.accepted.as_fd()), Step::Waiting);
    assert!(accepting.descriptors().1.is_some());
    let mut proposal = connection.connect().unwrap();
    proposal.send(connection.connected.as_fd(), &offer(&memory, 1)).unwrap();
    assert_eq!(accepting.advance(connection.accepted.as_fd()), Step::Proposed);
    assert_eq!(drain(silent.descriptor().unwrap()), Drained::HungUp);
}

#[test]
fn an_endpoint_of_another_user_is_neither_accepted_nor_sent_anything() {
    let _alone = alone();
    let connection = Connection::v4();
    let other = Policy { admits: |_, _| Err(Reason::User), ..policy() };
    let (connected, accepted) = connection.endpoints();
    let mut accepting = Accepting::announce(&place(), connection.accepted.as_fd(), &accepted, &other).unwrap();
    assert_eq!(Proposal::connect(&place(), &connected, &other).unwrap_err(), Reason::User);
    let mut proposal = connection.connect().unwrap();
    let _ = proposal.send(connection.connected.as_fd(), &offer(&memory(), 1));
    assert_eq!(accepting.advance(connection.accepted.as_fd()), Step::Refused(Reason::User), "the first caller");
    assert_eq!(accepting.advance(connection.accepted.as_fd()), Step::Refused(Reason::User), "the second");
    assert!(matches!(proposal.advance(connection.connected.as_fd()), Answer::Refused(Reason::Gone)));
}

#[test]
fn roles_decide_who_announces_and_who_proposes() {
    let _alone = alone();
    let connection = Connection::v4();
    let (connected, accepted) = connection.endpoints();
    let announced = Accepting::announce(&place(), connection.connected.as_fd(), &connected, &policy());
    assert_eq!(announced.unwrap_err(), Reason::Role);
    assert_eq!(Proposal::connect(&place(), &accepted, &policy()).unwrap_err(), Reason::Role);
}

#[test]
fn a_stale_pair_is_refused_on_both_sides() {
    let _alone = alone();
    // Two connections whose endpoints take each other for one: the tuple of both is that of the first, as after a reset
    // that was lost and a port that was used again. The histories differ by one byte, in one direction.
    for (is_looked_up, reason) in [(false, Reason::Counts), (true, Reason::Counts)] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut pairs = [Connection::to(&listener, address), Connection::to(&listener, address)];
        for (pair, bytes) in pairs.iter_mut().zip([300, 301]) {
            pair.connected.write_all(&vec![1; bytes]).unwrap();
            pair.accepted.read_exact(&mut vec![0; bytes]).unwrap();
            pair.accepted.write_all(&[1; 500]).unwrap();
            pair.connected.read_exact(&mut [0; 500]).unwrap();
        }
        let policy = Policy { evidence: if is_looked_up { Evidence::LookUp } else { Evidence::Counts }, ..policy() };
        let (stale, later) = (&pairs[0], &pairs[1]);
        let accepted = stale.endpoints().1;
        let connected = Endpoint { tuple: accepted.tuple.reversed(), ..later.endpoints().0 };
        let (stale, later) = (stale.accepted.as_fd(), later.connected.as_fd());
        let memories = [memory(), memory()];
        let mut accepting = Accepting::announce(&place(), stale, &accepted, &policy).unwrap();
        let mut proposal = Proposal::connect(&place(), &connected, &policy).unwrap();
        proposal.send(later, &offer(&memories[0], 1)).unwrap();
        assert_eq!(accepting.advance(stale), Step::Refused(reason));
        assert!(matches!(proposal.advance(later), Answer::Declined(answer) if answer == reason));
    }
}

#[test]
fn a_stale_accepting_endpoint_that_agrees_is_refused_by_the_connecting_one() {
    let _alone = alone();
    // The accepting endpoint's `before` is old, so it cannot tell that it has received more than the other has written
    // since. The window of the connecting one is tight.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (mut stale, later) = (Connection::to(&listener, address), Connection::to(&listener, address));
    let policy = Policy { evidence: Evidence::Counts, ..policy() };
    let accepted = stale.endpoints().1;
    let connected = Endpoint { tuple: accepted.tuple.reversed(), ..later.endpoints().0 };
    let memories = [memory(), memory()];
    let mut accepting = Accepting::announce(&place(), stale.accepted.as_fd(), &accepted, &policy).unwrap();
    stale.connected.write_all(&[1; 7]).unwrap();
    stale.accepted.read_exact(&mut [0; 7]).unwrap();
    let mut proposal = Proposal::connect(&place(), &connected, &policy).unwrap();
    proposal.send(later.connected.as_fd(), &offer(&memories[0], 1)).unwrap();
    assert_eq!(accepting.advance(stale.accepted.as_fd()), Step::Proposed);
    let met = accepting.accept(&offer(&memories[1], 1)).unwrap();
    assert!(matches!(proposal.advance(later.connected.as_fd()), Answer::Refused(Reason::Counts)));
    assert_eq!(drain(met.bell.as_fd()), Drained::Refused(Reason::Counts));
    assert_eq!(drain(met.bell.as_fd()), Drained::HungUp);
}

#[test]
fn a_caller_that_hangs_up_before_the_answer_leaves_the_announcement() {
    let _alone = alone();
    let connection = Connection::v4();
    let mut accepting = connection.announce();
    let propose = || {
        let mut proposal = connection.connect().unwrap();
        proposal.send(connection.connected.as_fd(), &offer(&memory(), 1)).unwrap();
        proposal
    };
    let gone = propose();
    let mut waiting = propose();
    assert_eq!(accepting.advance(connection.accepted.as_fd()), Step::Proposed);
    drop(gone);
    assert!(matches!(accepting.accept(&offer(&memory(), 2)), Err(Reason::Gone)));
    assert_eq!(accepting.advance(connection.accepted.as_fd()), Step::Proposed);
    accepting.accept(&offer(&memory(), 2)).unwrap();
    assert!(matches!(waiting.advance(connection.connected.as_fd()), Answer::Met(_)));
}

#[test]
fn a_caller_that_cannot_propose_says_why_and_leaves_the_announcement() {
    let _alone = alone();
    let connection = Connection::v4();
    let mut accepting = connection.announce();
    connection.connect().unwrap().refuse(Reason::NoMemory);
    assert_eq!(accepting.advance(connection.accepted.as_fd()), Step::Declined(Reason::NoMemory));
    assert_eq!(accepting.advance(connection.accepted.as_fd()), Step::Waiting);
    let mut proposal = connection.connect().unwrap();
    proposal.send(connection.connected.as_fd(), &offer(&memory(), 1)).unwrap();
    assert_eq!(accepting.advance(connection.accepted.as_fd()), Step::Proposed);
}

#[test]
fn an_endpoint_of_another_connection_with_the_same_counts_is_refused_by_the_look_up() {
    let _alone = alone();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (ours, other) = (Connection::to(&listener, address), Connection::to(&listener, address));
    let accepted = ours.endpoints().1;
    let connected = Endpoint { tuple: accepted.tuple.reversed(), ..other.endpoints().0 };
    let mut accepting = Accepting::announce(&place(), ours.accepted.as_fd(), &accepted, &policy()).unwrap();
    let mut proposal = Proposal::connect(&place(), &connected, &policy()).unwrap();
    proposal.send(other.connected.as_fd(), &offer(&memory(), 1)).unwrap();
    assert_eq!(accepting.advance(ours.accepted.as_fd()), Step::Refused(Reason::Cookie));
    assert!(matches!(proposal.advance(other.connected.as_fd()), Answer::Declined(Reason::Cookie)));
}

#[test]
fn nobody_meets_at_the_listener_of_another_program() {
    let _alone = alone();
    use std::os::linux::net::SocketAddrExt;
    let connection = Connection::v4();
    let name = meeting::name(&key(), connection.endpoints().1.tuple);
    let address = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
    let foreign = UnixListener::bind_addr(&address).unwrap();
    let mut proposal = connection.connect().unwrap();
    proposal.send(connection.connected.as_fd(), &offer(&memory(), 1)).unwrap();
    let (mut caller, _) = foreign.accept().unwrap();
    caller.write_all(b"220 mail.example ESMTP\r\n").unwrap();
    assert!(matches!(proposal.advance(connection.connected.as_fd()), Answer::Refused(Reason::Malformed)));
}

#[test]
fn a_child_that_closes_what_it_shares_leaves_the_meeting_to_its_parent() {
    let _alone = alone();
    let connection = Connection::v4();
    let before = descriptors();
    let mut accepting = connection.announce();
    let mut proposal = connection.connect().unwrap();
    proposal.send(connection.connected.as_fd(), &offer(&memory(), 1)).unwrap();
    assert_eq!(accepting.advance(connection.accepted.as_fd()), Step::Proposed);
    let waiting = connection.connect().unwrap();
    // The parent's descriptors, and the peer's bell: nothing hangs up.
    let listener = accepting.descriptors().0.try_clone_to_owned().unwrap();
    let bell = proposal.descriptor().unwrap().try_clone_to_owned().unwrap();
    proposal.close_shared();
    assert_eq!(rustix::net::send(&bell, b"x", rustix::net::SendFlags::NOSIGNAL), Ok(1));
    accepting.close_shared();
    drop((connection.connect().unwrap(), waiting));
    drop((listener, bell));
    assert_eq!(connection.connect().unwrap_err(), Reason::Nobody);
    assert_eq!(descriptors(), before);
}

#[test]
fn role_of_a_socket_is_not_guessed() {
    let _alone = alone();
    // Whoever states the wrong role gets counts that are off by the SYN, and no meeting.
    let connection = Connection::v4();
    let wrong = meeting::counts::read(connection.accepted.as_fd(), Role::Connected);
    assert_eq!(wrong, Err(Reason::State));
}
