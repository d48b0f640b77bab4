//! Two relays at the ends of one connection, driven as a proxy drives them: they meet, move both directions to lanes,
//! and end as TCP connections do.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use meeting::bell::{self, Drained};
use meeting::{
    Accepting, Answer, Endpoint, Evidence, Key, Memory, Met, Offer, PeerUser, Policy, Proposal, Rendezvous, Role, Step,
};
use segment::ends::{self, EndMemory, PeerMemory};
use stream::connection::{Broken, Relay, RelayInput, WindowOffer};
use volmem::sync::Ordering;

const LIMIT: Duration = Duration::from_secs(20);

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let connected = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
    let (accepted, _) = listener.accept().expect("a connection");
    for stream in [&connected, &accepted] {
        stream.set_nonblocking(true).expect("a socket");
    }
    (connected, accepted)
}

fn relay(stream: TcpStream, role: Role) -> Relay {
    Relay::new(OwnedFd::from(stream), role, Key::from([7; 16]))
}

fn relays() -> (Relay, Relay) {
    let (connected, accepted) = pair();
    let accepted = relay(accepted, Role::Accepted);
    (relay(connected, Role::Connected), accepted)
}

/// Takes what has arrived.
fn take(relay: &mut Relay, taken: &mut Vec<u8>) -> RelayInput {
    relay.note_events();
    let input = relay.input();
    if let RelayInput::Bytes(bytes) = input {
        let begin = taken.len();
        taken.resize(begin + bytes, 0);
        relay.read_input(0, &mut taken[begin..]);
        relay.consume(bytes).expect("a correct peer");
        relay.wake_peer();
    }
    input
}

/// Takes until a number of bytes has arrived.
fn take_all(relay: &mut Relay, bytes: usize) -> Vec<u8> {
    let (mut taken, began) = (Vec::new(), Instant::now());
    while taken.len() < bytes {
        assert!(began.elapsed() < LIMIT, "{} of {bytes}", taken.len());
        take(relay, &mut taken);
    }
    taken
}

/// Exchanges words until the ends have met and both directions have had the time to move.
fn converse(a: &mut Relay, b: &mut Relay) {
    for turn in 0..200_u32 {
        let word = turn.to_le_bytes();
        for _ in 0..2 {
            assert_eq!(a.write(&word), Ok(word.len()));
            a.wake_peer();
            assert_eq!(take_all(b, word.len()), word);
            std::mem::swap(a, b);
        }
    }
}

/// Bytes that differ at each place.
fn bytes_of(count: usize) -> Vec<u8> {
    (0..count as u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

#[test]
fn both_directions_carry_their_bytes_before_and_after_the_ends_have_met() {
    let (mut a, mut b) = relays();
    converse(&mut a, &mut b);
    assert!(a.has_met() && b.has_met());
    let sent = bytes_of(3 << 20);
    for _ in 0..4 {
        let (mut done, mut taken) = (0, Vec::new());
        let began = Instant::now();
        while taken.len() < sent.len() {
            assert!(began.elapsed() < LIMIT, "{done} sent, {} taken", taken.len());
            done += a.write(&sent[done..]).expect("a correct peer");
            a.wake_peer();
            take(&mut b, &mut taken);
        }
        assert!(taken == sent, "other bytes");
        assert!(Relay::is_any_grown(), "nothing was in the lane");
        // The next bytes use a lane whose memory was returned.
        (0..2).for_each(|_| a.reclaim());
        std::mem::swap(&mut a, &mut b);
    }
}

#[test]
fn a_peer_without_the_library_is_served_by_tcp() {
    let (connected, accepted) = pair();
    let mut relay = relay(connected, Role::Connected);
    let mut peer = accepted;
    peer.set_nonblocking(false).expect("a socket");
    for _ in 0..50 {
        assert_eq!(relay.write(b"hello"), Ok(5));
        let mut got = [0; 5];
        peer.read_exact(&mut got).expect("five bytes");
        peer.write_all(&got).expect("room");
        assert_eq!(take_all(&mut relay, 5), b"hello");
    }
    assert!(!relay.has_met());
    drop(peer);
    assert_eq!(end_of(&mut relay), RelayInput::End);
}

/// Returns how the peer's stream ends.
fn end_of(relay: &mut Relay) -> RelayInput {
    let (mut taken, began) = (Vec::new(), Instant::now());
    loop {
        assert!(began.elapsed() < LIMIT, "no end");
        let input = take(relay, &mut taken);
        if matches!(input, RelayInput::End | RelayInput::Broken) {
            return input;
        }
    }
}

#[test]
fn a_half_close_ends_one_direction_behind_all_bytes() {
    let (mut a, mut b) = relays();
    converse(&mut a, &mut b);
    let sent = bytes_of(40_000);
    assert_eq!(a.write(&sent), Ok(sent.len()));
    a.finish();
    let mut taken = Vec::new();
    let began = Instant::now();
    while take(&mut b, &mut taken) != RelayInput::End {
        assert!(began.elapsed() < LIMIT, "no end");
    }
    assert!(taken == sent, "{} of {}", taken.len(), sent.len());
    assert!(!b.is_over());
    assert_eq!(b.write(b"still"), Ok(5));
    b.wake_peer();
    assert_eq!(take_all(&mut a, 5), b"still");
    b.finish();
    assert_eq!(end_of(&mut a), RelayInput::End);
    assert!(a.is_over() && b.is_over());
}

#[test]
fn an_orderly_close_delivers_what_was_sent_and_a_drop_resets() {
    for closes in [true, false] {
        let (mut a, mut b) = relays();
        converse(&mut a, &mut b);
        assert_eq!(a.write(b"last"), Ok(4));
        if closes {
            a.close();
            assert_eq!(take_all(&mut b, 4), b"last");
            assert_eq!(end_of(&mut b), RelayInput::End);
        } else {
            drop(a);
            assert_eq!(end_of(&mut b), RelayInput::Broken);
            assert!(b.is_broken());
            assert!(matches!(b.write(b"x"), Ok(1) | Err(Broken)));
        }
    }
}

#[test]
fn a_peer_that_goes_with_bytes_of_its_lane_unread_resets() {
    let (mut a, mut b) = relays();
    converse(&mut a, &mut b);
    assert_eq!(b.write(b"unread"), Ok(6));
    // As the kernel does for a killed process: nothing of the library runs, and the socket has no linger.
    let socket = a.socket().try_clone_to_owned().expect("a descriptor");
    rustix::net::sockopt::set_socket_linger(&socket, None).expect("a socket");
    drop(socket);
    drop(a);
    assert_eq!(end_of(&mut b), RelayInput::Broken);
}

/// Returns a policy for peers of this user.
fn policy() -> Policy {
    Policy { admits: |uid, _| Ok(PeerUser::Known(uid)), evidence: Evidence::Counts, keys: None }
}

/// Returns a relay that has proposed windows to its peer, and the peer, which has agreed. The relay has not read the
/// answer.
fn proposing_windows() -> (Relay, Box<Met>, TcpStream) {
    let (connected, accepted) = pair();
    let endpoint = Endpoint::of(accepted.as_fd(), Role::Accepted).expect("a connection");
    let place = Rendezvous::Names(Key::from([7; 16]));
    let mut accepting = Accepting::announce(&place, accepted.as_fd(), &endpoint, &policy()).expect("a name");
    let mut relay = relay(connected, Role::Connected);
    let (end, descriptor) = EndMemory::create(3 << 20).expect("memory");
    let memory = Memory::own(end.region().len_bytes() as u64, 5);
    relay.offer_window(Some(WindowOffer { descriptor: descriptor.try_clone().expect("a descriptor"), memory }));
    let began = Instant::now();
    while !matches!(accepting.advance(accepted.as_fd()), Step::Proposed) {
        assert!(began.elapsed() < LIMIT, "no proposal");
    }
    let met = accepting.accept(&Offer { descriptor: descriptor.as_fd(), memory }).expect("a proposal");
    assert!(!relay.has_met());
    (relay, met, accepted)
}

#[test]
fn a_peer_that_is_to_be_woken_before_its_answer_was_read_is_woken_then() {
    let (mut relay, met, _peer) = proposing_windows();
    relay.wake();
    relay.note_events();
    assert!(relay.has_met());
    assert_eq!(bell::take_rings(met.bell.as_fd()), (Drained::Empty, true));
    // Once.
    relay.note_events();
    assert_eq!(bell::take_rings(met.bell.as_fd()), (Drained::Empty, false));
    relay.reset();
}

#[test]
fn a_peer_whose_answer_was_not_read_learns_that_the_other_program_has_left() {
    let (mut relay, met, _peer) = proposing_windows();
    relay.hang_up();
    relay.note_events();
    assert!(!relay.has_met());
    assert_eq!(bell::drain(met.bell.as_fd()), Drained::HungUp);
}

/// A peer that has met a relay, and then writes what no correct one does.
struct Hostile {
    _socket: TcpStream,
    mine: EndMemory,
    producer: segment::Sender,
}

impl Hostile {
    /// Meets a relay, and begins to send by a lane.
    fn beginning(relay: &mut Relay, socket: TcpStream) -> Self {
        let endpoint = Endpoint::of(socket.as_fd(), Role::Connected).expect("a connection");
        let mut proposal =
            Proposal::connect(&Key::from([7; 16]).into(), &endpoint, &policy()).expect("an announcement");
        let (mine, descriptor) = EndMemory::create(3 << 20).expect("memory");
        let memory = Memory::own(mine.region().len_bytes() as u64, 5);
        proposal.send(socket.as_fd(), &Offer { descriptor: descriptor.as_fd(), memory }).expect("a peer");
        relay.note_events();
        assert!(relay.has_met());
        let Answer::Met(met) = proposal.advance(socket.as_fd()) else { panic!("no answer") };
        let peers = PeerMemory::open(met.peer_memory.as_fd(), segment::CAPACITY_BYTES_MAX).expect("memory");
        let state = volmem::Region::heap(ends::OWN_STATE_BYTES);
        let mut producer = ends::sender(&mine, &peers, &state, memory.secret);
        mine.publish(ends::Word::Ask, 1);
        assert_eq!(relay.input(), RelayInput::Nothing);
        assert_eq!(peers.load(ends::Word::Ok), 1, "the relay consents");
        let start = producer.restart();
        mine.publish_start(0, start);
        mine.publish(ends::Word::Up, 1);
        std::mem::forget(met);
        Self { _socket: socket, mine, producer }
    }

    fn write_of_unknown_kind(&mut self) {
        let index = self.producer.position() % ends::SMALL_RING_SLOTS.next_power_of_two() as u64;
        let slot = ends::SMALL_RING_OFFSET + index as usize * lane::SLOT_BYTES;
        assert_eq!(self.producer.write(b"!"), Ok(1));
        self.mine.region().store_u64(slot + 8, 1 | 4 << 16, Ordering::Release);
    }
}

#[test]
fn a_peer_that_writes_what_no_correct_one_does_is_reset_at_once() {
    let forge: [fn(&mut Hostile); 3] = [
        |peer| peer.write_of_unknown_kind(),
        |peer| peer.mine.publish(ends::Word::Ended, path_end(2)),
        |peer| peer.mine.publish(ends::Word::Ended, path_end(1) | 1),
    ];
    for forge in forge {
        let (connected, accepted) = pair();
        let mut relay = relay(accepted, Role::Accepted);
        let mut peer = Hostile::beginning(&mut relay, connected);
        assert_eq!(peer.producer.write(b"hello"), Ok(5));
        assert_eq!(take_all(&mut relay, 5), b"hello");
        forge(&mut peer);
        assert!(relay.may_have_input());
        assert_eq!(relay.input(), RelayInput::Broken);
        assert!(relay.is_broken());
    }
}

/// The word that ends a move.
fn path_end(number: u64) -> u64 {
    path::EndWord { number: path::MoveNumber::from_word(number), is_resent: false }.to_word()
}
