//! The other end of rdma-core's `ibv_rc_pingpong`, `ibv_uc_pingpong` and `ibv_ud_pingpong`: against a NIC, or against
//! Linux' `rdma_rxe`.
//!
//! `cargo run --release -p rnic-live --example rnic-pingpong -- \
//!     rc|uc|ud OWN_IP PEER_IP|- [BYTES [ROUND_TRIPS [PERCENT_LOST [SEED]]]]`
//!
//! With a peer it goes there as the client of `ibv_rc_pingpong -g INDEX -s BYTES -n ROUND_TRIPS`, and compares what
//! comes back with what it sent; with `-` it waits for such a client. Packets are lost on purpose both ways.

#[path = "../tests/pair/mod.rs"]
#[allow(dead_code)] // The tests use the rest.
mod pair;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use pair::Side;
use rnic::nic::{Policy, Profile};
use rnic::verbs::{Address, CompletionKind, CompletionStatus, Datagram, Mtu, SendKind};
use rnic::wire::{QpNumber, Service};
use rnic_live::{FaultRates, FaultyIo, UdpIo};

const USAGE: &str = "give rc, uc or ud, an address of this machine, the peer's or -, bytes (up to 65536), round trips, \
    how many percent of the packets are to be lost each way, and a seed";
/// Where RoCEv2's packets go: IBA annex 17.
const ROCE_PORT: u16 = 4791;
/// Where rdma-core's examples meet.
const MEETING_PORT: u16 = 18_515;
/// "LID:QPN:PSN:GID" and a zero: what they tell each other there.
const WORDS_BYTES: usize = 4 + 1 + 6 + 1 + 6 + 1 + 32 + 1;
const DONE: &[u8] = b"done\0";
const INBOX: u64 = 65_536;
const BYTES_MAX: u64 = INBOX;
const OWN_PSN: u32 = 0x00ff_ffc0;
/// 4.096 us x 2^14: theirs.
const ACK_TIMER_CODE: u8 = 14;
/// Theirs.
const QUEUE_KEY: u32 = 0x1111_1111;
/// For a peer that did not hear of its last message's arrival: some of its time-outs, where packets are lost.
const LINGERS: Duration = Duration::from_millis(200);
const LINGERS_LOSSY: Duration = Duration::from_secs(2);
/// What verbs leave before a datagram, for a global routing header.
const ROUTING_HEADER_BYTES: u32 = 40;

/// What one end says of itself.
struct Words {
    qp: u32,
    psn: u32,
    gid: u128,
}

impl Words {
    fn say(&self) -> Vec<u8> {
        let mut text = format!("{:04x}:{:06x}:{:06x}:{:032x}", 0, self.qp, self.psn, self.gid).into_bytes();
        text.push(0);
        text
    }

    fn parse(text: &[u8]) -> Option<Words> {
        let text = std::str::from_utf8(text).ok()?.trim_end_matches('\0');
        let mut fields = text.split(':');
        let _lid = fields.next()?;
        let mut number =
            |bits: u32| u128::from_str_radix(fields.next()?, 16).ok().filter(|value| value >> bits == 0_u128);
        let (qp, psn) = (number(24)? as u32, number(24)? as u32);
        let gid = u128::from_str_radix(fields.next()?, 16).ok()?;
        Some(Words { qp, psn, gid })
    }

    fn address(&self) -> IpAddr {
        let gid = Ipv6Addr::from_bits(self.gid);
        gid.to_ipv4_mapped().map_or(IpAddr::V6(gid), IpAddr::V4)
    }
}

#[derive(Clone, Copy)]
struct Plan {
    service: Service,
    own: IpAddr,
    peer: Option<IpAddr>,
    bytes: u32,
    trips: u64,
    faults: FaultRates,
    seed: u64,
}

fn plan() -> Option<Plan> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [service, own, peer, rest @ ..] = &words[..] else { return None };
    let service = match service.as_str() {
        "rc" => Service::Rc,
        "uc" => Service::Uc,
        "ud" => Service::Ud,
        _ => return None,
    };
    let peer = if peer == "-" { None } else { Some(peer.parse().ok()?) };
    let number = |at: usize, default: u64| rest.get(at).map_or(Some(default), |word| word.parse().ok());
    let bytes = number(0, 4096)?;
    let loss = rest.get(2).map_or(Some(0.0), |word| word.parse::<f64>().ok())? / 100.0;
    let is_fine = (1..=BYTES_MAX).contains(&bytes) && rest.len() <= 4;
    is_fine.then_some(Plan {
        service,
        own: own.parse().ok()?,
        peer,
        bytes: bytes as u32,
        trips: number(1, 1000)?,
        faults: FaultRates { loss, loss_sent: loss, ..FaultRates::default() },
        seed: number(3, 1)?,
    })
}

fn meet(plan: &Plan, own: &Words) -> std::io::Result<Words> {
    let wrong = || std::io::Error::other("these are not the words of ibv_rc_pingpong");
    let mut theirs = [0; WORDS_BYTES];
    let Some(peer) = plan.peer else {
        let (mut stream, _) = TcpListener::bind((plan.own, MEETING_PORT))?.accept()?;
        stream.read_exact(&mut theirs)?;
        stream.write_all(&own.say())?;
        stream.read_exact(&mut [0; DONE.len()])?;
        return Words::parse(&theirs).ok_or_else(wrong);
    };
    let mut stream = TcpStream::connect((peer, MEETING_PORT))?;
    stream.write_all(&own.say())?;
    stream.read_exact(&mut theirs)?;
    stream.write_all(DONE)?;
    Words::parse(&theirs).ok_or_else(wrong)
}

/// What is sent in this round trip: different bytes in each.
fn fill(outbox: &mut [u8], trip: u64) {
    outbox.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at as u64 * 7 + trip * 13) as u8);
}

/// Waits for the message of this trip and for the end of the own send.
fn next(side: &mut Side<FaultyIo<UdpIo>>, mut wanted: usize) {
    while wanted > 0 {
        for done in side.completions(1) {
            assert_eq!(done.status, CompletionStatus::Success, "{done:?}");
            wanted -= 1;
        }
    }
}

impl Plan {
    fn header_bytes(&self) -> u32 {
        if self.service == Service::Ud { ROUTING_HEADER_BYTES } else { 0 }
    }

    /// Where a message stands once it is received.
    fn message_at(&self) -> u64 {
        INBOX + u64::from(self.header_bytes())
    }

    fn receive(&self, side: &mut Side<FaultyIo<UdpIo>>, id: u64) {
        side.receive(id, INBOX, self.bytes + self.header_bytes());
    }
}

fn client(side: &mut Side<FaultyIo<UdpIo>>, plan: &Plan, to: Option<Datagram>) -> u64 {
    let mut different = 0;
    for trip in 0..plan.trips {
        fill(&mut side.memory()[..plan.bytes as usize], trip);
        side.send_to(to, trip, SendKind::Send(None), 0, plan.bytes);
        next(side, 2);
        let memory = side.memory();
        let back = &memory[plan.message_at() as usize..][..plan.bytes as usize];
        different += u64::from(memory[..plan.bytes as usize] != *back);
        plan.receive(side, trip);
    }
    different
}

fn server(side: &mut Side<FaultyIo<UdpIo>>, plan: &Plan, to: Option<Datagram>) {
    let mut received = 0;
    let mut sent = 0;
    while received < plan.trips || sent < plan.trips {
        for done in side.completions(1) {
            assert_eq!(done.status, CompletionStatus::Success, "{done:?}");
            if done.kind == CompletionKind::Receive {
                received += 1;
                plan.receive(side, received);
                side.send_to(to, received, SendKind::Send(None), plan.message_at(), plan.bytes);
            } else {
                sent += 1;
            }
        }
    }
}

fn main() {
    let Some(plan) = plan() else {
        eprintln!("{USAGE}");
        std::process::exit(2);
    };
    let mut wire = UdpIo::bind(SocketAddr::new(plan.own, ROCE_PORT)).unwrap_or_else(|error| {
        eprintln!("{error}");
        std::process::exit(1);
    });
    wire.expect_nics();
    let wire = FaultyIo::new(wire, plan.faults, plan.seed).unwrap_or_else(|error| {
        eprintln!("{error}");
        std::process::exit(2);
    });
    let mut side = Side::new(Profile::new(Policy::GoBackN), wire, 1);
    match plan.service {
        Service::Rc => {}
        Service::Uc => side.unreliable(),
        Service::Ud => side.datagrams(QUEUE_KEY, OWN_PSN),
    }
    let gid = match plan.own {
        IpAddr::V4(own) => own.to_ipv6_mapped(),
        IpAddr::V6(own) => own,
    };
    let theirs = meet(&plan, &Words { qp: side.qp.0, psn: OWN_PSN, gid: gid.to_bits() }).unwrap_or_else(|error| {
        eprintln!("meeting at port {MEETING_PORT}: {error}");
        std::process::exit(1);
    });
    let different = play(&mut side, &plan, &theirs);
    println!("{:?}", side.live.receive_drops());
    println!("{:?}", side.live.io().fault_counters());
    std::process::exit(i32::from(different > 0));
}

/// How many messages came back as something else.
fn play(side: &mut Side<FaultyIo<UdpIo>>, plan: &Plan, theirs: &Words) -> u64 {
    let (peer, qp) = (SocketAddr::new(theirs.address(), ROCE_PORT), QpNumber(theirs.qp));
    side.live.io_mut().inner_mut().add_peer(peer).expect("a peer of this family");
    match plan.service {
        Service::Rc => side.connect(qp, (OWN_PSN, theirs.psn), Mtu::B1024, ACK_TIMER_CODE),
        Service::Uc => side.connect_unreliable(qp, (OWN_PSN, theirs.psn), Mtu::B1024),
        Service::Ud => {}
    }
    let to = (plan.service == Service::Ud).then_some(Datagram { to: Address(0), qp, queue_key: QUEUE_KEY });
    (0..16).for_each(|id| plan.receive(side, id));
    let began = Instant::now();
    let different = if plan.peer.is_some() {
        client(side, plan, to)
    } else {
        server(side, plan, to);
        0
    };
    let each_us = began.elapsed().as_secs_f64() * 1e6 / plan.trips.max(1) as f64;
    side.linger(if plan.faults == FaultRates::default() { LINGERS } else { LINGERS_LOSSY });
    println!("{} round trips of {} bytes, {each_us:.1} us each, {different} of them changed", plan.trips, plan.bytes);
    different
}
