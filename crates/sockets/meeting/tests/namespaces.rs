//! Endpoints in different network namespaces, and peers that pretend to be one.
//!
//! Each namespace belongs to a thread of the test, which takes root.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};

use common::{memory, offer};
use meeting::message::{Kind, Memory, Message};
use meeting::place::{Directories, UserDirectory};
use meeting::proof::{Progress, Stream};
use meeting::{
    Accepting, Answer, Endpoint, Evidence, Met, PeerUser, Policy, Proposal, Reason, Rendezvous, Role, Step, counts,
};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

/// Enters a new network namespace with addresses on its loopback interface. `false` without the right to do so.
fn enter_namespace(addresses: &[&str]) -> bool {
    // SAFETY: the thread shares no namespace-bound state with others that would rely on it.
    #[allow(unsafe_code)]
    let entered = unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) };
    if entered.is_err() {
        return false;
    }
    let ip = |words: &str| Command::new("ip").args(words.split(' ')).status().is_ok_and(|status| status.success());
    ip("link set lo up") && addresses.iter().all(|address| ip(&format!("address add {address}/32 dev lo")))
}

fn policy() -> Policy {
    Policy { admits: |uid, _| Ok(PeerUser::Known(uid)), evidence: Evidence::Proof, keys: None }
}

fn place(directory: &Path) -> Rendezvous {
    Rendezvous::Directories(Directories {
        base: None,
        of_users: vec![UserDirectory { user: 1, path: directory.to_owned() }],
    })
}

const SERVER: &str = "10.128.9.1";
const CLIENT: &str = "10.128.9.2";

/// Makes a connection from a port of the client to the server, both of this thread's namespace.
fn connect(listener: &TcpListener, client_port: u16) -> (TcpStream, TcpStream) {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap();
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true).unwrap();
    let local: SocketAddr = format!("{CLIENT}:{client_port}").parse().unwrap();
    rustix::net::bind(&socket, &local).unwrap();
    rustix::net::connect(&socket, &listener.local_addr().unwrap()).unwrap();
    (TcpStream::from(socket), listener.accept().unwrap().0)
}

/// Passes bytes in both directions.
fn exchange(client: &mut TcpStream, server: &mut TcpStream, bytes: &[u8]) {
    let mut got = vec![0; bytes.len()];
    client.write_all(bytes).unwrap();
    server.read_exact(&mut got).unwrap();
    server.write_all(bytes).unwrap();
    client.read_exact(&mut got).unwrap();
}

/// The true connection of the victim: both its ends are in the namespace of the calling thread.
struct Victim {
    client: TcpStream,
    server: TcpStream,
    port: u16,
}

impl Victim {
    fn new() -> Self {
        let listener = TcpListener::bind((SERVER, 0)).unwrap();
        let (mut client, mut server) = connect(&listener, 0);
        exchange(&mut client, &mut server, b"AUTH secret");
        let port = client.local_addr().unwrap().port();
        Self { client, server, port }
    }

    /// Connects to whoever has announced the connection, and sends a proposal.
    fn propose(&self, directory: &Path) -> Result<Proposal, Reason> {
        let endpoint = Endpoint::of(self.client.as_fd(), Role::Connected)?;
        let mut proposal = Proposal::connect(&place(directory), &endpoint, &policy())?;
        proposal.send(self.client.as_fd(), &offer(&memory(), 7))?;
        Ok(proposal)
    }

    fn must_work(&mut self) {
        exchange(&mut self.client, &mut self.server, b"still here");
    }
}

/// Changes an answer to a proposal.
type Change = fn(&mut Message, &Message);

/// What an impostor does with the proposal of the victim.
struct Lie {
    /// Changes the answer.
    answer: Change,
    /// Passes another descriptor than its own for look-ups.
    passes: fn() -> OwnedFd,
}

fn netlink() -> OwnedFd {
    let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
    let protocol = Some(rustix::net::netlink::SOCK_DIAG);
    rustix::net::socket_with(rustix::net::AddressFamily::NETLINK, rustix::net::SocketType::DGRAM, flags, protocol)
        .unwrap()
}

const HONEST: Lie = Lie { answer: |_, _| {}, passes: netlink };

/// Runs `victim` in one namespace while an impostor in another one, which has a connection of the same addresses and
/// as many bytes, answers its proposal. Returns what the victim makes of it.
fn impersonate(lie: Lie, then: impl FnOnce(&mut Victim, Answer, Sender<()>) + Send) {
    let scratch = tempfile::tempdir().unwrap();
    let directory = scratch.path().to_owned();
    let (to_impostor, of_victim) = channel::<(SocketAddr, u16)>();
    let (to_victim, of_impostor): (Sender<PathBuf>, Receiver<PathBuf>) = channel();
    let (over, is_over) = channel::<()>();
    std::thread::scope(|scope| {
        let place_of_victim = directory.clone();
        scope.spawn(move || {
            if !enter_namespace(&[SERVER, CLIENT]) {
                return;
            }
            let mut victim = Victim::new();
            to_impostor.send((victim.server.local_addr().unwrap(), victim.port)).unwrap();
            let Ok(_file) = of_impostor.recv() else { return };
            let mut proposal = victim.propose(&place_of_victim).unwrap();
            let answer = loop {
                match proposal.advance(victim.client.as_fd()) {
                    Answer::Waiting => std::thread::yield_now(),
                    answer => break answer,
                }
            };
            then(&mut victim, answer, over);
            victim.must_work();
        });
        scope.spawn(move || {
            if !enter_namespace(&[SERVER, CLIENT]) {
                return;
            }
            let Ok((server, port)) = of_victim.recv() else { return };
            let listener = TcpListener::bind(server).unwrap();
            let (mut client, mut accepted) = connect(&listener, port);
            // It knows how many bytes have passed, and not which.
            exchange(&mut client, &mut accepted, b"????_??????");
            let endpoint = Endpoint::of(accepted.as_fd(), Role::Accepted).unwrap();
            // The announcement of an endpoint makes the file; this thread answers in its place.
            let file = announcement_of(&directory, &accepted, &endpoint);
            let listener = UnixListener::bind(&file).unwrap();
            to_victim.send(file).unwrap();
            let (caller, _) = listener.accept().unwrap();
            let mut bytes = [0; 128];
            (&caller).read_exact(&mut bytes).unwrap();
            let proposal = Message::parse(&bytes).unwrap();
            let own = counts::read(accepted.as_fd(), Role::Accepted).unwrap();
            let mut yes = Message::new(Kind::Yes, &endpoint, own, Memory::own(common::MEMORY_BYTES, 9));
            yes.wants_proof = true;
            (lie.answer)(&mut yes, &proposal);
            send(&caller, &yes, &[memory(), (lie.passes)()]);
            let _ = is_over.recv();
            drop(client);
        });
    });
}

/// Returns the name of the socket at which an endpoint is announced.
fn announcement_of(directory: &Path, socket: &TcpStream, endpoint: &Endpoint) -> PathBuf {
    let _announced = Accepting::announce(&place(directory), socket.as_fd(), endpoint, &policy()).unwrap();
    std::fs::read_dir(directory).unwrap().next().unwrap().unwrap().path()
}

fn send(socket: impl AsFd, message: &Message, descriptors: &[OwnedFd]) {
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
    let bytes = message.encode();
    rustix::net::sendmsg(socket, &[std::io::IoSlice::new(&bytes)], &mut control, SendFlags::empty()).unwrap();
}

fn refused(answer: &Answer) -> Option<Reason> {
    if let Answer::Refused(reason) = answer { Some(*reason) } else { None }
}

#[test]
fn a_connection_of_the_same_addresses_and_counts_in_another_namespace_is_no_proof() {
    impersonate(HONEST, |victim, answer, _over| {
        let Answer::Met(mut met) = answer else { panic!("{answer:?}") };
        let mut prover = met.proof.take().expect("it is to be proven by the bytes");
        // A request of the victim, of which the impostor does not know the bytes.
        exchange(&mut victim.client, &mut victim.server, b"GET secrets");
        for stream in [Stream::Sent, Stream::Received] {
            prover.note(stream, 11, &mut |at, to| to.copy_from_slice(&b"GET secrets"[at..at + to.len()]));
        }
        let own = || counts::read(victim.client.as_fd(), Role::Connected).ok();
        assert_eq!(prover.advance(met.bell.as_fd(), own), Progress::Waiting, "the claim");
        for _ in 0..300 {
            prover.note(Stream::Sent, 0, &mut |_, _| {});
        }
        assert_eq!(prover.advance(met.bell.as_fd(), own), Progress::Refused(Reason::NoProof), "it says nothing");
    });
}

#[test]
fn an_impostor_that_needs_no_proof_is_refused() {
    impersonate(Lie { answer: |yes, _| yes.wants_proof = false, ..HONEST }, |_, answer, _over| {
        assert_eq!(refused(&answer), Some(Reason::NoProof));
    });
}

#[test]
fn what_an_impostor_says_of_its_socket_must_be_what_the_kernel_says() {
    let lies: [(Change, Reason); 4] = [
        // It claims to be in the victim's namespace, and the victim's own socket.
        (|yes, proposal| yes.netns_cookie = proposal.netns_cookie, Reason::Cookie),
        (|yes, _| yes.cookie += 1, Reason::Cookie),
        (|yes, _| yes.netns_cookie += 1000, Reason::NoLookUp),
        (|yes, _| yes.counts.received += 1, Reason::Counts),
    ];
    for (answer, expected) in lies {
        impersonate(Lie { answer, ..HONEST }, move |_, answer, _over| {
            assert_eq!(refused(&answer), Some(expected));
        });
    }
}

#[test]
fn only_a_socket_for_look_ups_is_used_for_them() {
    let others: [fn() -> OwnedFd; 3] = [
        || TcpListener::bind("127.0.0.1:0").unwrap().into(),
        || {
            let protocol = Some(rustix::net::netlink::KOBJECT_UEVENT);
            rustix::net::socket(rustix::net::AddressFamily::NETLINK, rustix::net::SocketType::DGRAM, protocol).unwrap()
        },
        memory,
    ];
    for passes in others {
        impersonate(Lie { passes, ..HONEST }, |_, answer, _over| {
            assert_eq!(refused(&answer), Some(Reason::NoLookUp));
        });
    }
}

/// Notes what passes between two endpoints, and lets both provers proceed until they have a result.
fn prove(victim: &mut Victim, bells: [&Met; 2], provers: &mut [Box<meeting::Prover>; 2]) -> [Progress; 2] {
    let mut progress = [Progress::Waiting; 2];
    for round in 0..6_u8 {
        let bytes = [round; 20];
        exchange(&mut victim.client, &mut victim.server, &bytes);
        for (end, prover) in provers.iter_mut().enumerate() {
            let streams = if end == 0 { [Stream::Sent, Stream::Received] } else { [Stream::Received, Stream::Sent] };
            if progress[end] == Progress::Waiting {
                for stream in streams {
                    prover.note(stream, 20, &mut |_, to| to.fill(round));
                }
                let (socket, role) = match end {
                    0 => (victim.client.as_fd(), Role::Connected),
                    _ => (victim.server.as_fd(), Role::Accepted),
                };
                progress[end] = prover.advance(bells[end].bell.as_fd(), || counts::read(socket, role).ok());
            }
        }
    }
    progress
}

#[test]
fn the_two_ends_of_a_connection_prove_it_to_each_other() {
    let scratch = tempfile::tempdir().unwrap();
    let directory = scratch.path();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if !enter_namespace(&[SERVER, CLIENT]) {
                return;
            }
            let mut victim = Victim::new();
            let endpoint = Endpoint::of(victim.server.as_fd(), Role::Accepted).unwrap();
            let mut accepting =
                Accepting::announce(&place(directory), victim.server.as_fd(), &endpoint, &policy()).unwrap();
            // A look-up says that the peer's socket is of another user: it has changed its user since.
            let caller = Endpoint::of(victim.client.as_fd(), Role::Connected).unwrap();
            let mut proposal = Proposal::connect(&place(directory), &caller, &policy()).unwrap();
            assert!(!proposal.wants_proof(), "both are of one user, in one namespace");
            proposal.send(victim.client.as_fd(), &offer(&memory(), 7)).unwrap();
            assert_eq!(accepting.advance(victim.server.as_fd()), Step::Proposed);
            let accepted = accepting.accept(&offer(&memory(), 9)).unwrap();
            let Answer::Met(connected) = proposal.advance(victim.client.as_fd()) else { panic!("no answer") };
            assert!(connected.proof.is_none() && accepted.proof.is_none());
            let counts = [&connected.own_counts, &accepted.own_counts];
            let mut provers = [(Role::Connected, counts[0]), (Role::Accepted, counts[1])]
                .map(|(role, counts)| Box::new(meeting::Prover::new(role, [7, 9], counts)));
            assert_eq!(prove(&mut victim, [&connected, &accepted], &mut provers), [Progress::Proven; 2]);
            drop(accepting);
            assert!(directory.read_dir().unwrap().next().is_none(), "the announcement is over");
        });
    });
}
