//! WRITE, WRITE with immediate, READ, compare-and-swap and fetch-and-add with a verbs device, in both directions. The
//! peer is `tests/rxe/peer.c`, which runs on a NIC or on Linux' `rdma_rxe`.
//!
//! `cargo run --release -p rnic-live --example rnic-one-sided -- OWN_IP PEER_IP [ROUNDS [PERCENT_LOST [SEED]]]`
//!
//! Each round performs all operations in both directions. ROUNDS is the same as for `peer.c`. Packets are dropped on
//! purpose in both directions.

#[path = "../tests/pair/mod.rs"]
#[allow(dead_code)] // The tests use the rest.
mod pair;

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::Duration;

use pair::TestHost;
use rnic::nic::{NicProfile, TransportPolicy};
use rnic::verbs::{CompletionKind, CompletionStatus, Mtu, RemoteBuffer, SendKind};
use rnic::wire::{Immediate, QpNumber, RKey};
use rnic_live::{FaultRates, FaultyIo, UdpIo};

const USAGE: &str = "give an address of this machine, the peer's, rounds, \
    how many percent of the packets are to be lost each way, and a seed";
const ROCE_PORT: u16 = 4791;
/// The TCP port of `peer.c`, for exchanging connection parameters.
const RENDEZVOUS_PORT: u16 = 18_516;
const OWN_PSN: u32 = 0x00ff_fffd;
const ACK_TIMER_CODE: u8 = 14;
// The memory layout of both ends, as in `peer.c`.
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

fn word(host: &mut TestHost<FaultyIo<UdpIo>>, at: usize) -> u64 {
    u64::from_ne_bytes(host.memory()[at..at + 8].try_into().expect("eight bytes"))
}

/// The peer's connection parameters.
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

    fn remote(&self, at: usize) -> RemoteBuffer {
        RemoteBuffer { address: self.memory + at as u64, key: RKey(self.key) }
    }
}

fn request(host: &mut TestHost<FaultyIo<UdpIo>>, kind: SendKind, at: usize, bytes: usize) {
    host.post_send(1, kind, at as u64, bytes as u32);
    let done = host.wait_completions(1)[0];
    assert_eq!(done.status, CompletionStatus::Success, "{kind:?}");
}

fn atomic(host: &mut TestHost<FaultyIo<UdpIo>>, kind: SendKind) -> u64 {
    request(host, kind, WORD_BEFORE_AT, 8);
    word(host, WORD_BEFORE_AT)
}

/// Performs all operations on the peer's memory, like `initiate` in `peer.c`.
fn initiate(host: &mut TestHost<FaultyIo<UdpIo>>, peer: &Peer) {
    let pattern = pattern();
    host.memory()[COPY_AT..][..PATTERN_BYTES].copy_from_slice(&pattern);
    request(host, SendKind::Write(peer.remote(0), None), COPY_AT, PATTERN_BYTES);
    request(host, SendKind::Write(peer.remote(IMMEDIATE_AT), Some(IMMEDIATE)), COPY_AT, IMMEDIATE_BYTES);
    host.memory()[COPY_AT..][..PATTERN_BYTES].fill(0);
    request(host, SendKind::Read(peer.remote(0)), COPY_AT, PATTERN_BYTES);
    assert_eq!(host.memory()[COPY_AT..][..PATTERN_BYTES], pattern, "READ");
    let remote = peer.remote(WORD_AT);
    assert_eq!(atomic(host, SendKind::CompareSwap { remote, compare: 5, swap: 9 }), 5);
    assert_eq!(atomic(host, SendKind::CompareSwap { remote, compare: 5, swap: 1 }), 9);
    assert_eq!(atomic(host, SendKind::FetchAdd { remote, add: 3 }), 9);
}

/// Waits for the peer's WRITE with immediate.
fn receive_immediate(host: &mut TestHost<FaultyIo<UdpIo>>) {
    let done = host.wait_completions(1)[0];
    assert_eq!(
        (done.status, done.kind),
        (CompletionStatus::Success, CompletionKind::ReceiveWriteImmediate),
        "{done:?}"
    );
    assert_eq!(done.immediate, Some(Immediate::Data(IMMEDIATE)));
}

/// Checks the results of the peer's operations in this end's memory.
fn check_memory(host: &mut TestHost<FaultyIo<UdpIo>>) {
    let pattern = pattern();
    assert_eq!(host.memory()[..PATTERN_BYTES], pattern, "WRITE");
    assert_eq!(host.memory()[IMMEDIATE_AT..][..IMMEDIATE_BYTES], pattern[..IMMEDIATE_BYTES], "WRITE with immediate");
    assert_eq!(word(host, WORD_AT), 12, "atomics");
}

/// Resets the memory for the next round.
fn reset_memory(host: &mut TestHost<FaultyIo<UdpIo>>) {
    host.memory().fill(0);
    host.memory()[WORD_AT..][..8].copy_from_slice(&5_u64.to_ne_bytes());
}

/// Returns the next line from the peer, and serves the peer's requests until it has arrived.
fn next_line(host: &mut TestHost<FaultyIo<UdpIo>>, stream: &mut BufReader<TcpStream>) -> String {
    let (mut text, mut byte) = (String::new(), [0; 1]);
    stream.get_ref().set_nonblocking(true).expect("a socket");
    while stream.buffer().is_empty() && stream.get_ref().peek(&mut byte).is_err() {
        host.serve_for(Duration::from_millis(20));
    }
    stream.get_ref().set_nonblocking(false).expect("a socket");
    stream.read_line(&mut text).expect("a socket");
    text.trim_end().to_owned()
}

struct Options {
    own: IpAddr,
    peer: IpAddr,
    rounds: u64,
    faults: FaultRates,
    seed: u64,
}

fn options() -> Option<Options> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [own, peer, rest @ ..] = &arguments[..] else { return None };
    let number = |at: usize| rest.get(at).map_or(Some(1), |argument| argument.parse().ok());
    let loss = rest.get(1).map_or(Some(0.0), |argument| argument.parse::<f64>().ok())? / 100.0;
    let faults = FaultRates { loss, loss_sent: loss, ..FaultRates::default() };
    let options =
        Options { own: own.parse().ok()?, peer: peer.parse().ok()?, rounds: number(0)?, faults, seed: number(2)? };
    (rest.len() <= 3).then_some(options)
}

fn main() {
    let Some(options) = options() else {
        eprintln!("{USAGE}");
        std::process::exit(2);
    };
    let mut io = UdpIo::bind(SocketAddr::new(options.own, ROCE_PORT)).expect("an address of this machine");
    io.expect_nics();
    let io = FaultyIo::new(io, options.faults, options.seed).unwrap_or_else(|error| {
        eprintln!("{error}");
        std::process::exit(2);
    });
    let mut host = TestHost::new(NicProfile::new(TransportPolicy::GoBackN), io, 1);
    reset_memory(&mut host);
    let mut stream = TcpStream::connect((options.peer, RENDEZVOUS_PORT)).expect("the peer accepts connections");
    let gid = match options.own {
        IpAddr::V4(own) => own.to_ipv6_mapped(),
        IpAddr::V6(own) => own,
    };
    writeln!(stream, "{:x} {OWN_PSN:x} {gid} {:x} 0", host.qp.0, host.keys.remote.0).expect("the connection is open");
    let mut lines = BufReader::new(stream.try_clone().expect("a descriptor"));
    let peer = Peer::parse(&next_line(&mut host, &mut lines)).expect("connection parameters of peer.c");
    let address = SocketAddr::new(peer.address, ROCE_PORT);
    host.live.io_mut().inner_mut().add_peer(address).expect("a peer of the same address family");
    host.connect(QpNumber(peer.qp), (OWN_PSN, peer.psn), Mtu::B1024, ACK_TIMER_CODE);
    for _ in 0..options.rounds {
        host.post_receive(1, 0, 0);
        // Tells the peer that the receive request is posted.
        writeln!(stream, "0").expect("the connection is open");
        receive_immediate(&mut host);
        assert_eq!(next_line(&mut host, &mut lines), "1");
        check_memory(&mut host);
        reset_memory(&mut host);
        initiate(&mut host, &peer);
        writeln!(stream, "1").expect("the connection is open");
    }
    println!("from the device: WRITE, WRITE with immediate, READ, compare-and-swap, fetch-and-add");
    println!("to the device: the same; {} rounds, {:?}", options.rounds, host.live.io().fault_counters());
    assert_eq!(next_line(&mut host, &mut lines), "2", "the peer's invalid key was not refused");
    println!("an invalid key: refused");
}
