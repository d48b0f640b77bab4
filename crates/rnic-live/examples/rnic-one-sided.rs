//! WRITE, WRITE with immediate, READ, compare-and-swap and fetch-and-add with a verbs device, both ways: the other end
//! of `tests/rxe/peer.c`, which runs on a NIC or on Linux' `rdma_rxe`.
//!
//! `cargo run --release -p rnic-live --example rnic-one-sided -- OWN_IP PEER_IP`

#[path = "../tests/pair/mod.rs"]
#[allow(dead_code)] // The tests use the rest.
mod pair;

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream};

use pair::Side;
use rnic::nic::{Policy, Profile};
use rnic::verbs::{CompletionKind, CompletionStatus, Mtu, Remote, SendKind};
use rnic::wire::{Immediate, QpNumber, RKey};
use rnic_live::Udp;

const USAGE: &str = "give an address of this machine and the peer's";
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

fn word(side: &mut Side<Udp>, at: usize) -> u64 {
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

fn request(side: &mut Side<Udp>, kind: SendKind, at: usize, bytes: usize) {
    side.send(1, kind, at as u64, bytes as u32);
    let done = side.completions(1)[0];
    assert_eq!(done.status, CompletionStatus::Success, "{kind:?}");
}

fn atomic(side: &mut Side<Udp>, kind: SendKind) -> u64 {
    request(side, kind, WORD_BEFORE_AT, 8);
    word(side, WORD_BEFORE_AT)
}

/// What `ask` does in `peer.c`, the other way.
fn ask(side: &mut Side<Udp>, peer: &Peer) {
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

/// Gives the peer what it needs until it has written so many lines, and looks at what it did.
fn answer(side: &mut Side<Udp>) {
    let done = side.completions(1)[0];
    assert_eq!(
        (done.status, done.kind),
        (CompletionStatus::Success, CompletionKind::ReceiveWriteImmediate),
        "{done:?}"
    );
    assert_eq!(done.immediate, Some(Immediate::Data(IMMEDIATE)));
}

fn look(side: &mut Side<Udp>) {
    let pattern = pattern();
    assert_eq!(side.memory()[..PATTERN_BYTES], pattern, "WRITE");
    assert_eq!(side.memory()[IMMEDIATE_AT..][..IMMEDIATE_BYTES], pattern[..IMMEDIATE_BYTES], "WRITE with immediate");
    assert_eq!(word(side, WORD_AT), 12, "atomics");
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let addresses: Vec<IpAddr> = words.iter().filter_map(|word| word.parse().ok()).collect();
    let [own, peers] = addresses[..] else {
        eprintln!("{USAGE}");
        std::process::exit(2);
    };
    let mut wire = Udp::bind(SocketAddr::new(own, ROCE_PORT)).expect("an address of this machine");
    wire.expect_nics();
    let mut side = Side::new(Profile::new(Policy::GoBackN), wire, 1);
    side.memory()[WORD_AT..][..8].copy_from_slice(&5_u64.to_ne_bytes());
    let mut stream = TcpStream::connect((peers, MEETING_PORT)).expect("the peer waits at its port");
    let gid = match own {
        IpAddr::V4(own) => own.to_ipv6_mapped(),
        IpAddr::V6(own) => own,
    };
    writeln!(stream, "{:x} {OWN_PSN:x} {gid} {:x} 0", side.qp.0, side.keys.remote.0).expect("the peer listens");
    let mut lines = BufReader::new(stream.try_clone().expect("a descriptor")).lines();
    let mut line = || lines.next().and_then(Result::ok).unwrap_or_default();
    let peer = Peer::parse(&line()).expect("the words of peer.c");
    side.live.wire_mut().add_peer(SocketAddr::new(peer.address, ROCE_PORT)).expect("a peer of this family");
    side.connect(QpNumber(peer.qp), (OWN_PSN, peer.psn), Mtu::B1024, ACK_TIMER_CODE);
    side.receive(1, 0, 0);
    answer(&mut side);
    stream.set_nonblocking(true).expect("a socket");
    let mut said = [0; 2];
    while stream.peek(&mut said).is_err() {
        side.linger(std::time::Duration::from_millis(20));
    }
    stream.set_nonblocking(false).expect("a socket");
    assert_eq!(line(), "1");
    look(&mut side);
    println!("from the device: WRITE, WRITE with immediate, READ, compare-and-swap, fetch-and-add");
    ask(&mut side, &peer);
    println!("to the device: the same");
    writeln!(stream, "1").expect("the peer listens");
    side.linger(std::time::Duration::from_secs(2));
    assert_eq!(line(), "2", "the peer was not refused");
    println!("a key that never was: refused");
}
