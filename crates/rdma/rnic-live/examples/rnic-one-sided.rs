//! WRITE, WRITE with immediate, READ, compare-and-swap and fetch-and-add with a verbs device, both ways: the other end
//! of `tests/rxe/peer.c`, which runs on a NIC or on Linux' `rdma_rxe`.
//!
//! `cargo run --release -p rnic-live --example rnic-one-sided -- OWN_IP PEER_IP [ROUNDS [PERCENT_LOST [SEED]]]`
//!
//! Each round is all of it, both ways, as often as `peer.c` was told; packets are lost on purpose both ways.

#[path = "../tests/pair/mod.rs"]
#[allow(dead_code)] // The tests use the rest.
mod pair;

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::Duration;

use pair::Side;
use rnic::nic::{Policy, Profile};
use rnic::verbs::{CompletionKind, CompletionStatus, Mtu, Remote, SendKind};
use rnic::wire::{Immediate, QpNumber, RKey};
use rnic_live::{FaultRates, FaultyIo, UdpIo};

const USAGE: &str = "give an address of this machine, the peer's, rounds, \
    how many percent of the packets are to be lost each way, and a seed";
const ROCE_PORT: u16 = 4791;
/// Where `peer.c` waits.
const MEETING_PORT: u16 = 18_516;
const OWN_PSN: u32 = 0x00ff_fffd;
const ACK_TIMER_CODE: u8 = 14;
/// What lies where in the memory of both ends: as `peer.c` has it.
const PATTERN_BYTES: usize = 8000;
const IMMEDIATE_AT: usize = 8192;
const IMMEDIATE_BYTES: usize = 100;
const IMMEDIATE: u32 = 0xabcd_1234;
const COPY_AT: usize = 16_384;
const WORD_AT: usize = 32_768;
const WORD_BEFORE_AT: usize = 40_000;

fn pattern() -> Vec<u8> {
    (0..PATTERN_BYTES).map(|at| (at * 7 + 1) as u8).collect()
}

fn word(side: &mut Side<FaultyIo<UdpIo>>, at: usize) -> u64 {
    u64::from_ne_bytes(side.memory()[at..at + 8].try_into().expect("eight bytes"))
}

/// What the peer may reach of this end, and this end of it.
struct Peer {
    qp: u32,
    psn: u32,
    address: IpAddr,
    key: u32,
    memory: u64,
}

impl Peer {
    fn parse(line: &str) -> Option<Peer> {
        let mut fields = line.split_whitespace();
        let number = |text: Option<&str>| u64::from_str_radix(text?, 16).ok();
        let (qp, psn) = (number(fields.next())? as u32, number(fields.next())? as u32);
        let gid: Ipv6Addr = fields.next()?.parse().ok()?;
        let (key, memory) = (number(fields.next())? as u32, number(fields.next())?);
        let address = gid.to_ipv4_mapped().map_or(IpAddr::V6(gid), IpAddr::V4);
        Some(Peer { qp, psn, address, key, memory })
    }

    fn remote(&self, at: usize) -> Remote {
        Remote { address: self.memory + at as u64, key: RKey(self.key) }
    }
}

fn request(side: &mut Side<FaultyIo<UdpIo>>, kind: SendKind, at: usize, bytes: usize) {
    side.send(1, kind, at as u64, bytes as u32);
    let done = side.completions(1)[0];
    assert_eq!(done.status, CompletionStatus::Success, "{kind:?}");
}

fn atomic(side: &mut Side<FaultyIo<UdpIo>>, kind: SendKind) -> u64 {
    request(side, kind, WORD_BEFORE_AT, 8);
    word(side, WORD_BEFORE_AT)
}

/// What `ask` does in `peer.c`, the other way.
fn ask(side: &mut Side<FaultyIo<UdpIo>>, peer: &Peer) {
    let pattern = pattern();
    side.memory()[COPY_AT..][..PATTERN_BYTES].copy_from_slice(&pattern);
    request(side, SendKind::Write(peer.remote(0), None), COPY_AT, PATTERN_BYTES);
    request(side, SendKind::Write(peer.remote(IMMEDIATE_AT), Some(IMMEDIATE)), COPY_AT, IMMEDIATE_BYTES);
    side.memory()[COPY_AT..][..PATTERN_BYTES].fill(0);
    request(side, SendKind::Read(peer.remote(0)), COPY_AT, PATTERN_BYTES);
    assert_eq!(side.memory()[COPY_AT..][..PATTERN_BYTES], pattern, "READ");
    let remote = peer.remote(WORD_AT);
    assert_eq!(atomic(side, SendKind::CompareSwap { remote, compare: 5, swap: 9 }), 5);
    assert_eq!(atomic(side, SendKind::CompareSwap { remote, compare: 5, swap: 1 }), 9);
    assert_eq!(atomic(side, SendKind::FetchAdd { remote, add: 3 }), 9);
}

/// The peer's WRITE with immediate has come.
fn answer(side: &mut Side<FaultyIo<UdpIo>>) {
    let done = side.completions(1)[0];
    assert_eq!(
        (done.status, done.kind),
        (CompletionStatus::Success, CompletionKind::ReceiveWriteImmediate),
        "{done:?}"
    );
    assert_eq!(done.immediate, Some(Immediate::Data(IMMEDIATE)));
}

/// Looks at what the peer did.
fn look(side: &mut Side<FaultyIo<UdpIo>>) {
    let pattern = pattern();
    assert_eq!(side.memory()[..PATTERN_BYTES], pattern, "WRITE");
    assert_eq!(side.memory()[IMMEDIATE_AT..][..IMMEDIATE_BYTES], pattern[..IMMEDIATE_BYTES], "WRITE with immediate");
    assert_eq!(word(side, WORD_AT), 12, "atomics");
}

/// Everything as it is before a round, but for the receive request.
fn prepare(side: &mut Side<FaultyIo<UdpIo>>) {
    side.memory().fill(0);
    side.memory()[WORD_AT..][..8].copy_from_slice(&5_u64.to_ne_bytes());
}

/// The next line of the peer, which needs turns until it has written it.
fn line(side: &mut Side<FaultyIo<UdpIo>>, stream: &mut BufReader<TcpStream>) -> String {
    let (mut text, mut said) = (String::new(), [0; 1]);
    stream.get_ref().set_nonblocking(true).expect("a socket");
    while stream.buffer().is_empty() && stream.get_ref().peek(&mut said).is_err() {
        side.linger(Duration::from_millis(20));
    }
    stream.get_ref().set_nonblocking(false).expect("a socket");
    stream.read_line(&mut text).expect("a socket");
    text.trim_end().to_owned()
}

struct Plan {
    own: IpAddr,
    peer: IpAddr,
    rounds: u64,
    faults: FaultRates,
    seed: u64,
}

fn plan() -> Option<Plan> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [own, peer, rest @ ..] = &words[..] else { return None };
    let number = |at: usize| rest.get(at).map_or(Some(1), |word| word.parse().ok());
    let loss = rest.get(1).map_or(Some(0.0), |word| word.parse::<f64>().ok())? / 100.0;
    let faults = FaultRates { loss, loss_sent: loss, ..FaultRates::default() };
    let plan = Plan { own: own.parse().ok()?, peer: peer.parse().ok()?, rounds: number(0)?, faults, seed: number(2)? };
    (rest.len() <= 3).then_some(plan)
}

fn main() {
    let Some(plan) = plan() else {
        eprintln!("{USAGE}");
        std::process::exit(2);
    };
    let mut wire = UdpIo::bind(SocketAddr::new(plan.own, ROCE_PORT)).expect("an address of this machine");
    wire.expect_nics();
    let wire = FaultyIo::new(wire, plan.faults, plan.seed).unwrap_or_else(|error| {
        eprintln!("{error}");
        std::process::exit(2);
    });
    let mut side = Side::new(Profile::new(Policy::GoBackN), wire, 1);
    prepare(&mut side);
    let mut stream = TcpStream::connect((plan.peer, MEETING_PORT)).expect("the peer waits at its port");
    let gid = match plan.own {
        IpAddr::V4(own) => own.to_ipv6_mapped(),
        IpAddr::V6(own) => own,
    };
    writeln!(stream, "{:x} {OWN_PSN:x} {gid} {:x} 0", side.qp.0, side.keys.remote.0).expect("the peer listens");
    let mut lines = BufReader::new(stream.try_clone().expect("a descriptor"));
    let peer = Peer::parse(&line(&mut side, &mut lines)).expect("the words of peer.c");
    let address = SocketAddr::new(peer.address, ROCE_PORT);
    side.live.io_mut().inner_mut().add_peer(address).expect("a peer of this family");
    side.connect(QpNumber(peer.qp), (OWN_PSN, peer.psn), Mtu::B1024, ACK_TIMER_CODE);
    for _ in 0..plan.rounds {
        side.receive(1, 0, 0);
        // The peer asks once it knows that there is a receive request.
        writeln!(stream, "0").expect("the peer listens");
        answer(&mut side);
        assert_eq!(line(&mut side, &mut lines), "1");
        look(&mut side);
        prepare(&mut side);
        ask(&mut side, &peer);
        writeln!(stream, "1").expect("the peer listens");
    }
    println!("from the device: WRITE, WRITE with immediate, READ, compare-and-swap, fetch-and-add");
    println!("to the device: the same; {} rounds, {:?}", plan.rounds, side.live.io().fault_counters());
    assert_eq!(line(&mut side, &mut lines), "2", "the peer was not refused");
    println!("a key that never was: refused");
}
