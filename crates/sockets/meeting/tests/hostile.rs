//! Peers that send anything: each ends as a refusal, nothing is leaked, and nothing blocks.

mod common;

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

use common::{Connection, MEMORY_BYTES, alone, descriptors, key, memory, offer, sealed};
use meeting::bell::{Drained, drain, hang_up};
use meeting::message::{Kind, MESSAGE_BYTES, Message, VERSION};
use meeting::{Answer, Counts, Endpoint, Memory, Reason, Role, Step};
use proptest::prelude::*;
use rustix::fs::SealFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sockopt};

const RIGHTS_MAX: usize = 253;

/// Sends bytes with descriptors, as one piece.
fn send(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize, rustix::io::Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(RIGHTS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
}

/// A peer of either side of a meeting, over a connection of its own.
struct Attack {
    connection: Connection,
    endpoints: (Endpoint, Endpoint),
}

impl Attack {
    fn new() -> Self {
        let connection = Connection::v4();
        let endpoints = connection.endpoints();
        Self { connection, endpoints }
    }

    /// Returns the message that the other endpoint would have sent to the side with `role`.
    fn valid(&self, role: Role) -> Message {
        let (kind, endpoint) = match role {
            Role::Accepted => (Kind::Proposal, &self.endpoints.0),
            Role::Connected => (Kind::Yes, &self.endpoints.1),
        };
        Message::new(kind, endpoint, Counts::default(), Memory::own(MEMORY_BYTES, 1))
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::from_abstract_name(meeting::name(&key(), self.endpoints.1.tuple)).unwrap()
    }

    /// Runs `attack` with a socket that is connected to the side with `role`. Returns how that side ends, or `None` if
    /// it still waits.
    fn run(&self, role: Role, attack: impl FnOnce(&UnixStream)) -> Option<Result<(), Reason>> {
        let begin = Instant::now();
        let result = match role {
            Role::Accepted => {
                let mut accepting = self.connection.announce();
                let socket = UnixStream::connect_addr(&self.address()).unwrap();
                attack(&socket);
                match accepting.advance(self.connection.accepted.as_fd()) {
                    Step::Waiting => None,
                    Step::Proposed => Some(Ok(())),
                    Step::Refused(reason) | Step::Declined(reason) => Some(Err(reason)),
                }
            }
            Role::Connected => {
                let listener = UnixListener::bind_addr(&self.address()).unwrap();
                let mut proposal = self.connection.connect().unwrap();
                proposal.send(self.connection.connected.as_fd(), &offer(&memory(), 1)).unwrap();
                let (socket, _) = listener.accept().unwrap();
                attack(&socket);
                match proposal.advance(self.connection.connected.as_fd()) {
                    Answer::Waiting => None,
                    Answer::Met(met) => {
                        hang_up(met.bell);
                        Some(Ok(()))
                    }
                    Answer::Refused(reason) | Answer::Declined(reason) => Some(Err(reason)),
                }
            }
        };
        assert!(begin.elapsed() < Duration::from_secs(30), "a close has waited");
        result
    }
}

/// Sends one piece to both sides, and returns how they end.
fn send_to_both(bytes: impl Fn(&Message) -> Vec<u8>, fds: &[BorrowedFd<'_>]) -> [Option<Result<(), Reason>>; 2] {
    [Role::Accepted, Role::Connected].map(|role| {
        let attack = Attack::new();
        let before = descriptors();
        let message = bytes(&attack.valid(role));
        let result = attack.run(role, |socket| {
            send(socket, &message, fds).unwrap();
        });
        assert_eq!(descriptors(), before, "{result:?}");
        result
    })
}

fn encoded(message: &Message) -> Vec<u8> {
    message.encode().to_vec()
}

fn both(reason: Reason) -> [Option<Result<(), Reason>>; 2] {
    [Some(Err(reason)); 2]
}

/// Returns a TCP socket whose last close waits for a minute, and its peer, which does not read.
fn lingering() -> (std::net::TcpStream, std::net::TcpStream) {
    let Connection { mut connected, accepted } = Connection::v4();
    connected.set_nonblocking(true).unwrap();
    while connected.write(&[0; 65_536]).is_ok() {}
    connected.set_nonblocking(false).unwrap();
    sockopt::set_socket_linger(&connected, Some(Duration::from_secs(60))).unwrap();
    (connected, accepted)
}

#[test]
fn a_valid_message_is_accepted_by_both_sides() {
    let _alone = alone();
    assert_eq!(send_to_both(encoded, &[memory().as_fd()]), [Some(Ok(())); 2]);
}

#[test]
fn a_part_of_a_message_and_more_than_one_are_malformed() {
    let _alone = alone();
    let memory = memory();
    for length in [1, 8, 9, MESSAGE_BYTES / 2, MESSAGE_BYTES - 1] {
        let part = send_to_both(|message| message.encode()[..length].to_vec(), &[memory.as_fd()]);
        assert_eq!(part, both(Reason::Malformed), "{length}");
    }
    let longer = send_to_both(|message| [encoded(message), vec![0]].concat(), &[memory.as_fd()]);
    assert_eq!(longer, both(Reason::Malformed));
    let twice = send_to_both(|message| encoded(message).repeat(2), &[memory.as_fd()]);
    assert_eq!(twice, both(Reason::Malformed));
    // In two pieces: the accepting side expects nothing after a proposal; the rest of an answer are rings.
    let attack = Attack::new();
    let message = attack.valid(Role::Accepted).encode();
    let pieces = attack.run(Role::Accepted, |socket| {
        send(socket, &message, &[memory.as_fd()]).unwrap();
        send(socket, &message, &[memory.as_fd()]).unwrap();
    });
    assert_eq!(pieces, Some(Err(Reason::Malformed)));
}

#[test]
fn a_silent_peer_is_waited_for_and_one_that_hangs_up_is_gone() {
    let _alone = alone();
    let attack = Attack::new();
    assert_eq!(attack.run(Role::Accepted, |_| {}), None);
    assert_eq!(attack.run(Role::Connected, |_| {}), None);
    let end = |socket: &UnixStream| socket.shutdown(std::net::Shutdown::Both).unwrap();
    assert_eq!(attack.run(Role::Accepted, end), None, "another caller may come");
    assert_eq!(attack.run(Role::Connected, end), Some(Err(Reason::Gone)));
}

#[test]
fn another_release_gets_a_reason_for_its_messages_of_any_length() {
    let _alone = alone();
    for length in [10, MESSAGE_BYTES, 200] {
        let attack = Attack::new();
        let mut bytes = attack.valid(Role::Accepted).encode().to_vec();
        bytes[8..10].copy_from_slice(&(VERSION + 1).to_ne_bytes());
        bytes.resize(length, 7);
        let mut accepting = attack.connection.announce();
        let mut socket = UnixStream::connect_addr(&attack.address()).unwrap();
        send(&socket, &bytes, &[memory().as_fd()]).unwrap();
        assert_eq!(accepting.advance(attack.connection.accepted.as_fd()), Step::Refused(Reason::Version));
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer).unwrap();
        assert_eq!(Message::parse(&answer).unwrap().kind, Kind::No(Reason::Version));
    }
}

#[test]
fn kinds_of_the_wrong_side_are_refused_and_reasons_are_those_of_the_peer() {
    let _alone = alone();
    let no = |number: u16| {
        move |message: &Message| {
            let kind = Kind::No(Reason::from_number(number));
            encoded(&Message { kind, memory: Memory::default(), ..*message })
        }
    };
    assert_eq!(send_to_both(no(999), &[]), both(Reason::Other(999)));
    let swapped = send_to_both(
        |message| {
            let kind = if message.kind == Kind::Yes { Kind::Proposal } else { Kind::Yes };
            encoded(&Message { kind, ..*message })
        },
        &[memory().as_fd()],
    );
    assert_eq!(swapped, both(Reason::Malformed));
    assert_eq!(send_to_both(no(64), &[memory().as_fd()]), both(Reason::Descriptors));
}

#[test]
fn exactly_one_descriptor_comes_with_a_proposal_or_a_yes() {
    let _alone = alone();
    let memory = memory();
    for count in [0, 2, RIGHTS_MAX] {
        let result = send_to_both(encoded, &vec![memory.as_fd(); count]);
        assert_eq!(result, both(Reason::Descriptors), "{count}");
    }
}

#[test]
fn only_sealed_memory_of_the_stated_size_is_kept() {
    let _alone = alone();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let path = rustix::fs::open("/dev/shm", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
    let rejected: [(&str, OwnedFd); 8] = [
        ("pipe", reader),
        ("pipe", writer),
        ("file", file.into()),
        ("path", path),
        ("listener", std::net::TcpListener::bind("127.0.0.1:0").unwrap().into()),
        ("can shrink", sealed(MEMORY_BYTES, SealFlags::GROW)),
        ("too small", sealed(MEMORY_BYTES - 1, SealFlags::SHRINK)),
        ("empty", sealed(0, SealFlags::SHRINK)),
    ];
    for (what, descriptor) in &rejected {
        assert_eq!(send_to_both(encoded, &[descriptor.as_fd()]), both(Reason::Memory), "{what}");
    }
    assert_eq!(send_to_both(encoded, &[sealed(MEMORY_BYTES + 1, SealFlags::SHRINK).as_fd()]), [Some(Ok(())); 2]);
}

#[test]
fn memory_in_huge_pages_is_refused() {
    let _alone = alone();
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING | rustix::fs::MemfdFlags::HUGETLB;
    let Ok(huge) = rustix::fs::memfd_create("huge", flags) else { return };
    if rustix::fs::ftruncate(&huge, 1 << 30).is_err() {
        return;
    }
    rustix::fs::fcntl_add_seals(&huge, SealFlags::SHRINK).unwrap();
    assert_eq!(send_to_both(encoded, &[huge.as_fd()]), both(Reason::Memory));
}

#[test]
fn a_socket_that_lingers_does_not_make_anything_wait() {
    let _alone = alone();
    for role in [Role::Accepted, Role::Connected] {
        // As the only descriptor, after the one that is awaited, with the wrong bytes, and in the queue of a socket.
        for case in 0..5 {
            let attack = Attack::new();
            let before = descriptors();
            let (socket, peer) = lingering();
            let message = if case == 2 { vec![1; 5] } else { encoded(&attack.valid(role)) };
            let fds: Vec<OwnedFd> = match case {
                0 | 2 => vec![socket.into()],
                1 => vec![memory(), socket.into()],
                _ => {
                    let (inner, inner_peer) = UnixStream::pair().unwrap();
                    send(&inner_peer, b"x", &[socket.as_fd()]).unwrap();
                    drop(socket);
                    let memory = (case == 4).then(memory);
                    memory.into_iter().chain([inner.into()]).collect()
                }
            };
            let result = attack.run(role, move |caller| {
                let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
                send(caller, &message, &borrowed).unwrap();
            });
            let reason = match case {
                1 | 4 => Reason::Descriptors,
                2 => Reason::Malformed,
                _ => Reason::Memory,
            };
            assert_eq!(result, Some(Err(reason)), "{role:?} {case}");
            drop(peer);
            assert_eq!(descriptors(), before, "{role:?} {case}");
        }
    }
}

#[test]
fn lingering_sockets_in_what_is_never_read_do_not_make_a_close_wait() {
    let _alone = alone();
    let attack = Attack::new();
    let begin = Instant::now();
    let accepting = attack.connection.announce();
    let mut peers = Vec::new();
    for _ in 0..3 {
        let (socket, peer) = lingering();
        let caller = UnixStream::connect_addr(&attack.address()).unwrap();
        send(&caller, b"x", &[socket.as_fd()]).unwrap();
        send(&caller, b"x", &[socket.as_fd()]).unwrap();
        peers.push((peer, caller));
    }
    drop(accepting); // The listener with its queue, none of it accepted.
    let listener = UnixListener::bind_addr(&attack.address()).unwrap();
    let proposal = attack.connection.connect().unwrap();
    let (caller, _) = listener.accept().unwrap();
    let (socket, _peer) = lingering();
    send(&caller, b"x", &[socket.as_fd()]).unwrap();
    drop(socket);
    drop(proposal);
    assert!(begin.elapsed() < Duration::from_secs(30), "a close has waited");
}

#[test]
fn a_bell_refuses_descriptors_or_closes_them() {
    let _alone = alone();
    let connection = Connection::v4();
    let (connected, accepted) = connection.meet();
    let memory = memory();
    let sender = UnixStream::from(connected.bell.into_fd());
    let before = descriptors();
    match send(&sender, b"x", &[memory.as_fd(), sender.as_fd()]) {
        Ok(_) => {} // Before Linux 6.16.
        Err(errno) => assert_eq!(errno, rustix::io::Errno::PERM),
    }
    assert!(matches!(drain(accepted.bell.as_fd()), Drained::Empty | Drained::HungUp));
    assert_eq!(descriptors(), before);
}

#[test]
fn descriptors_among_rings_are_closed_and_end_the_bell() {
    let _alone = alone();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (socket, peer) = lingering();
    let begin = Instant::now();
    send(&theirs, b"x", &[socket.as_fd()]).unwrap();
    send(&theirs, b"x", &[theirs.as_fd(), ours.as_fd()]).unwrap();
    drop(socket);
    let before = descriptors();
    while rustix::io::ioctl_fionread(&ours).unwrap() > 0 {
        assert_eq!(drain(ours.as_fd()), Drained::HungUp);
    }
    assert_eq!(descriptors(), before);
    assert!(begin.elapsed() < Duration::from_secs(30), "a close has waited");
    drop(peer);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_pieces_with_any_descriptors_end_as_a_refusal(
        pieces in prop::collection::vec(
            (prop::collection::vec((0..MESSAGE_BYTES, any::<u8>()), 0..4), 1..200_usize, 0..6_usize, any::<bool>()),
            1..4,
        ),
        is_accepted in any::<bool>(),
    ) {
        let _alone = alone();
        let role = if is_accepted { Role::Accepted } else { Role::Connected };
        let attack = Attack::new();
        let before = descriptors();
        let (unix, _peer) = UnixStream::pair().unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let memory = memory();
        let result = attack.run(role, |socket| {
            for (changes, length, count, is_valid) in &pieces {
                let mut bytes = encoded(&attack.valid(role));
                if !is_valid {
                    changes.iter().for_each(|(at, byte)| bytes[*at] = *byte);
                    bytes.resize(*length, 0);
                }
                let fds = [memory.as_fd(), unix.as_fd(), reader.as_fd(), writer.as_fd(), memory.as_fd()];
                // Fails if the side has hung up.
                let _ = send(socket, &bytes, &fds[..(*count).min(5)]);
            }
        });
        drop((unix, _peer, reader, writer, memory));
        prop_assert_eq!(descriptors(), before);
        let (changes, length, count, is_valid) = &pieces[0];
        let is_message = *is_valid || (changes.is_empty() && *length == MESSAGE_BYTES);
        if is_message && *count == 1 && (pieces.len() == 1 || role == Role::Connected) {
            prop_assert_eq!(result, Some(Ok(())));
        } else {
            prop_assert!(result.is_some());
        }
    }
}
