//! Measures the meetings of two endpoints in one process: time of each side, and of its parts. Memories are made
//! before.
//!
//! `cargo run --release -p meeting --example meeting_cost [ROUNDS]`

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use meeting::bell::hang_up;
use meeting::{
    Accepting, Answer, Endpoint, Evidence, Key, Memory, Met, Offer, PeerUser, Policy, Proposal, Rendezvous, Role, Step,
    counts, diag,
};
use rustix::fs::{MemfdFlags, SealFlags};

const MEMORY: Memory = Memory::own(65_536, 1);
const ROUNDS: usize = 2000;

fn memory() -> OwnedFd {
    let memory = rustix::fs::memfd_create("lane", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memfd");
    rustix::fs::ftruncate(&memory, MEMORY.bytes).expect("memory");
    rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW).expect("seals");
    memory
}

/// Nanoseconds of each part, by name.
#[derive(Default)]
struct Parts(Vec<(&'static str, Vec<u64>)>);

impl Parts {
    fn time<T>(&mut self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let result = work();
        let elapsed_ns = begin.elapsed().as_nanos() as u64;
        match self.0.iter_mut().find(|(known, _)| *known == name) {
            Some((_, times)) => times.push(elapsed_ns),
            None => self.0.push((name, vec![elapsed_ns])),
        }
        result
    }

    fn report(&mut self) {
        let mut total_us = 0.0;
        for (name, times) in &mut self.0 {
            times.sort_unstable();
            let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize] as f64 / 1000.0;
            println!("{name:<44} p50 {:7.2} us   p99 {:7.2} us", at(0.5), at(0.99));
            total_us += if name.starts_with(' ') { 0.0 } else { at(0.5) };
        }
        println!("{:<44}     {total_us:7.2} us\n", "sum of the medians of one meeting");
    }
}

fn meet(
    parts: &mut Parts,
    sockets: &(TcpStream, TcpStream),
    memories: &[OwnedFd; 2],
    policy: &Policy,
) -> (Box<Met>, Box<Met>) {
    let place = Rendezvous::from(Key::from([9; 16]));
    let (connected, accepted) = (sockets.0.as_fd(), sockets.1.as_fd());
    let offers = memories.each_ref().map(|memory| Offer { descriptor: memory.as_fd(), memory: MEMORY });
    let endpoint = parts.time("accepting: Endpoint::of", || Endpoint::of(accepted, Role::Accepted)).expect("TCP");
    let mut accepting =
        parts.time("accepting: announce", || Accepting::announce(&place, accepted, &endpoint, policy)).expect("a name");
    let endpoint = parts.time("connecting: Endpoint::of", || Endpoint::of(connected, Role::Connected)).expect("TCP");
    let mut proposal =
        parts.time("connecting: connect", || Proposal::connect(&place, &endpoint, policy)).expect("a peer");
    parts.time("connecting: send", || proposal.send(connected, &offers[0])).expect("a peer");
    let step = parts.time("accepting: advance", || accepting.advance(accepted));
    assert_eq!(step, Step::Proposed);
    let met = parts.time("accepting: accept", || accepting.accept(&offers[1])).expect("a peer");
    let Answer::Met(other) = parts.time("connecting: advance", || proposal.advance(connected)) else {
        panic!("refused");
    };
    drop(proposal);
    (met, other)
}

fn main() {
    let rounds = std::env::args().nth(1).map_or(ROUNDS, |text| text.parse().expect("a number of rounds"));
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    for evidence in [Evidence::LookUp, Evidence::Counts] {
        let policy = Policy { admits: |uid, _| Ok(PeerUser::Known(uid)), evidence, keys: None };
        let mut parts = Parts::default();
        for _ in 0..rounds {
            let mut sockets = parts.time(" a TCP connection, for comparison", || {
                let connected = TcpStream::connect(address).expect("a connection");
                (connected, listener.accept().expect("a connection").0)
            });
            let memories = parts.time(" both memories (not part of the meeting)", || [memory(), memory()]);
            sockets.0.write_all(&[1; 100]).expect("a peer");
            sockets.1.read_exact(&mut [0; 100]).expect("a peer");
            let (met, other) = meet(&mut parts, &sockets, &memories, &policy);
            let socket = sockets.0.as_fd();
            parts.time(" counts::read", || counts::read(socket, Role::Connected)).expect("counts");
            let endpoint = Endpoint::of(socket, Role::Connected).expect("TCP");
            parts.time(" diag::look_up_peer", || diag::look_up_peer(&endpoint));
            parts.time(" nobody: connect", || {
                Proposal::connect(&Key::from([8; 16]).into(), &endpoint, &policy).expect_err("nobody")
            });
            parts.time(" both hang up", || {
                hang_up(met.bell);
                hang_up(other.bell);
            });
        }
        println!("{} look-ups, {rounds} rounds:", if evidence == Evidence::LookUp { "with" } else { "without" });
        parts.report();
    }
}
