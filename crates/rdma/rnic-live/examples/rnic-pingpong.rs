//! A peer of rdma-core's `ibv_rc_pingpong`, `ibv_uc_pingpong` and `ibv_ud_pingpong`, on a NIC or on Linux' `rdma_rxe`.
//!
//! `cargo run --release -p rnic-live --example rnic-pingpong -- \
//!     rc|uc|ud OWN_IP PEER_IP|- [BYTES [ROUND_TRIPS [PERCENT_LOST [SEED]]]]`
//!
//! With PEER_IP it is the client of `ibv_rc_pingpong -g INDEX -s BYTES -n ROUND_TRIPS`, and compares what it receives
//! with what it sent; with `-` it waits for such a client. Packets are dropped on purpose in both directions.

#[path = "../tests/pair/mod.rs"]
#[allow(dead_code)] // The tests use the rest.
mod pair;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use pair::TestHost;
use rnic::nic::{NicProfile, TransportPolicy};
use rnic::verbs::{CompletionKind, CompletionStatus, DatagramDestination, Mtu, NicAddress, SendKind};
use rnic::wire::{QpNumber, Service};
use rnic_live::{FaultRates, FaultyIo, UdpIo};

const USAGE: &str = "give rc, uc or ud, an address of this machine, the peer's or -, bytes (up to 65536), round trips, \
    how many percent of the packets are to be lost each way, and a seed";
/// UDP port of RoCEv2 (InfiniBand Architecture, annex A17).
const ROCE_PORT: u16 = 4791;
/// The TCP port of rdma-core's examples, for exchanging connection parameters.
const RENDEZVOUS_PORT: u16 = 18_515;
/// Size of the connection parameters: "LID:QPN:PSN:GID" and a NUL.
const PARAMETERS_BYTES: usize = 4 + 1 + 6 + 1 + 6 + 1 + 32 + 1;
const DONE: &[u8] = b"done\0";
const INBOX: u64 = 65_536;
const BYTES_MAX: u64 = INBOX;
const OWN_PSN: u32 = 0x00ff_ffc0;
/// 4.096 us x 2^14, as in rdma-core's examples.
const ACK_TIMER_CODE: u8 = 14;
/// As in rdma-core's examples.
const QUEUE_KEY: u32 = 0x1111_1111;
/// Time for which the peer is served at the end, in case the last acknowledgement was lost.
const LINGER: Duration = Duration::from_millis(200);
/// The same where packets are dropped on purpose: several of the peer's time-outs.
const LINGER_LOSSY: Duration = Duration::from_secs(2);
/// Room that the verbs API leaves before a datagram for a global routing header.
const GRH_BYTES: u32 = 40;

/// The connection parameters of one end.
struct Parameters {
    qp: u32,
    psn: u32,
    gid: u128,
}

impl Parameters {
    fn encode(&self) -> Vec<u8> {
        let mut text = format!("{:04x}:{:06x}:{:06x}:{:032x}", 0, self.qp, self.psn, self.gid).into_bytes();
        text.push(0);
        text
    }

    fn parse(text: &[u8]) -> Option<Parameters> {
        let text = std::str::from_utf8(text).ok()?.trim_end_matches('\0');
        let mut fields = text.split(':');
        let _lid = fields.next()?;
        let mut number =
            |bits: u32| u128::from_str_radix(fields.next()?, 16).ok().filter(|value| value >> bits == 0_u128);
        let (qp, psn) = (number(24)? as u32, number(24)? as u32);
        let gid = u128::from_str_radix(fields.next()?, 16).ok()?;
        Some(Parameters { qp, psn, gid })
    }

    fn address(&self) -> IpAddr {
        let gid = Ipv6Addr::from_bits(self.gid);
        gid.to_ipv4_mapped().map_or(IpAddr::V6(gid), IpAddr::V4)
    }
}

#[derive(Clone, Copy)]
struct Options {
    service: Service,
    own: IpAddr,
    peer: Option<IpAddr>,
    bytes: u32,
    trips: u64,
    faults: FaultRates,
    seed: u64,
}

fn options() -> Option<Options> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [service, own, peer, rest @ ..] = &arguments[..] else { return None };
    let service = match service.as_str() {
        "rc" => Service::Rc,
        "uc" => Service::Uc,
        "ud" => Service::Ud,
        _ => return None,
    };
    let peer = if peer == "-" { None } else { Some(peer.parse().ok()?) };
    let number = |at: usize, default: u64| rest.get(at).map_or(Some(default), |argument| argument.parse().ok());
    let bytes = number(0, 4096)?;
    let loss = rest.get(2).map_or(Some(0.0), |argument| argument.parse::<f64>().ok())? / 100.0;
    let is_valid = (1..=BYTES_MAX).contains(&bytes) && rest.len() <= 4;
    is_valid.then_some(Options {
        service,
        own: own.parse().ok()?,
        peer,
        bytes: bytes as u32,
        trips: number(1, 1000)?,
        faults: FaultRates { loss, loss_sent: loss, ..FaultRates::default() },
        seed: number(3, 1)?,
    })
}

/// Exchanges connection parameters over TCP, as client or as server.
fn exchange(options: &Options, own: &Parameters) -> std::io::Result<Parameters> {
    let wrong = || std::io::Error::other("these are not connection parameters of ibv_rc_pingpong");
    let mut theirs = [0; PARAMETERS_BYTES];
    let Some(peer) = options.peer else {
        let (mut stream, _) = TcpListener::bind((options.own, RENDEZVOUS_PORT))?.accept()?;
        stream.read_exact(&mut theirs)?;
        stream.write_all(&own.encode())?;
        stream.read_exact(&mut [0; DONE.len()])?;
        return Parameters::parse(&theirs).ok_or_else(wrong);
    };
    let mut stream = TcpStream::connect((peer, RENDEZVOUS_PORT))?;
    stream.write_all(&own.encode())?;
    stream.read_exact(&mut theirs)?;
    stream.write_all(DONE)?;
    Parameters::parse(&theirs).ok_or_else(wrong)
}

/// Fills the message of a round trip, with different bytes in each.
fn fill(outbox: &mut [u8], trip: u64) {
    outbox.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at as u64 * 7 + trip * 13) as u8);
}

/// Waits for this many completions.
fn wait_for(host: &mut TestHost<FaultyIo<UdpIo>>, mut wanted: usize) {
    while wanted > 0 {
        for done in host.wait_completions(1) {
            assert_eq!(done.status, CompletionStatus::Success, "{done:?}");
            wanted -= 1;
        }
    }
}

impl Options {
    fn grh_bytes(&self) -> u32 {
        if self.service == Service::Ud { GRH_BYTES } else { 0 }
    }

    /// Returns the address of a received message.
    fn message_at(&self) -> u64 {
        INBOX + u64::from(self.grh_bytes())
    }

    fn receive(&self, host: &mut TestHost<FaultyIo<UdpIo>>, id: u64) {
        host.post_receive(id, INBOX, self.bytes + self.grh_bytes());
    }
}

fn client(host: &mut TestHost<FaultyIo<UdpIo>>, options: &Options, to: Option<DatagramDestination>) -> u64 {
    let mut different = 0;
    for trip in 0..options.trips {
        fill(&mut host.memory()[..options.bytes as usize], trip);
        host.post_send_to(to, trip, SendKind::Send(None), 0, options.bytes);
        wait_for(host, 2);
        let memory = host.memory();
        let back = &memory[options.message_at() as usize..][..options.bytes as usize];
        different += u64::from(memory[..options.bytes as usize] != *back);
        options.receive(host, trip);
    }
    different
}

fn server(host: &mut TestHost<FaultyIo<UdpIo>>, options: &Options, to: Option<DatagramDestination>) {
    let mut received = 0;
    let mut sent = 0;
    while received < options.trips || sent < options.trips {
        for done in host.wait_completions(1) {
            assert_eq!(done.status, CompletionStatus::Success, "{done:?}");
            if done.kind == CompletionKind::Receive {
                received += 1;
                options.receive(host, received);
                host.post_send_to(to, received, SendKind::Send(None), options.message_at(), options.bytes);
            } else {
                sent += 1;
            }
        }
    }
}

fn main() {
    let Some(options) = options() else {
        eprintln!("{USAGE}");
        std::process::exit(2);
    };
    let mut io = UdpIo::bind(SocketAddr::new(options.own, ROCE_PORT)).unwrap_or_else(|error| {
        eprintln!("{error}");
        std::process::exit(1);
    });
    io.expect_nics();
    let io = FaultyIo::new(io, options.faults, options.seed).unwrap_or_else(|error| {
        eprintln!("{error}");
        std::process::exit(2);
    });
    let mut host = TestHost::new(NicProfile::new(TransportPolicy::GoBackN), io, 1);
    match options.service {
        Service::Rc => {}
        Service::Uc => host.use_uc(),
        Service::Ud => host.use_ud(QUEUE_KEY, OWN_PSN),
    }
    let gid = match options.own {
        IpAddr::V4(own) => own.to_ipv6_mapped(),
        IpAddr::V6(own) => own,
    };
    let theirs =
        exchange(&options, &Parameters { qp: host.qp.0, psn: OWN_PSN, gid: gid.to_bits() }).unwrap_or_else(|error| {
            eprintln!("exchange of connection parameters at TCP port {RENDEZVOUS_PORT}: {error}");
            std::process::exit(1);
        });
    let different = run(&mut host, &options, &theirs);
    println!("{:?}", host.live.receive_drops());
    println!("{:?}", host.live.io().fault_counters());
    std::process::exit(i32::from(different > 0));
}

/// Connects, runs the round trips, and returns how many messages came back changed.
fn run(host: &mut TestHost<FaultyIo<UdpIo>>, options: &Options, theirs: &Parameters) -> u64 {
    let (peer, qp) = (SocketAddr::new(theirs.address(), ROCE_PORT), QpNumber(theirs.qp));
    host.live.io_mut().inner_mut().add_peer(peer).expect("a peer of the same address family");
    match options.service {
        Service::Rc => host.connect(qp, (OWN_PSN, theirs.psn), Mtu::B1024, ACK_TIMER_CODE),
        Service::Uc => host.connect_uc(qp, (OWN_PSN, theirs.psn), Mtu::B1024),
        Service::Ud => {}
    }
    let to =
        (options.service == Service::Ud).then_some(DatagramDestination { to: NicAddress(0), qp, queue_key: QUEUE_KEY });
    (0..16).for_each(|id| options.receive(host, id));
    let started = Instant::now();
    let different = if options.peer.is_some() {
        client(host, options, to)
    } else {
        server(host, options, to);
        0
    };
    let each_us = started.elapsed().as_secs_f64() * 1e6 / options.trips.max(1) as f64;
    host.serve_for(if options.faults == FaultRates::default() { LINGER } else { LINGER_LOSSY });
    println!(
        "{} round trips of {} bytes, {each_us:.1} us each, {different} of them changed",
        options.trips, options.bytes
    );
    different
}
