//! Round-trip times of SENDs through the RDMA engine, compared with a bare UDP ping-pong and the floor of this machine:
//! `cargo run --release -p rnic-live --example rnic-ping -- [BYTES [ROUND_TRIPS [ROUNDS]]]`
//!
//! Both ends are threads of this process that spin. All numbers are measured side by side in alternating rounds; ratios
//! are to bare UDP.

#[path = "../tests/pair/mod.rs"]
#[allow(dead_code)] // The tests use the rest.
mod pair;
mod shared;

use std::net::UdpSocket;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pair::{Pair, TestHost, lanes, udp};
use rnic::nic::{NicProfile, TransportPolicy};
use rnic::verbs::{CompletionKind, CompletionStatus, Mtu, SendKind};
use rnic_live::{ACK_TIMER_CODE, PacketIo};
use shared::{Measurement, numbers, quantile, run_alternating};

const USAGE: &str = "give bytes (up to 65536), round trips and rounds, such as 64 5000 7";
/// Round trips before the first that is counted.
const WARM_UP: usize = 200;
/// Spin time longer than any pause of the other thread, so that no end blocks.
const SPIN: Duration = Duration::from_secs(1);
/// Round trips of the cache line for one sample of the floor.
const BOUNCES: u64 = 20_000;
/// Address of received messages.
const INBOX: u64 = 65_536;

/// Waits for one message, and takes completions of own sends on the way.
fn wait_for_message<W: PacketIo>(side: &mut TestHost<W>) {
    loop {
        let done = side.wait_completions(1);
        assert!(done.iter().all(|completion| completion.status == CompletionStatus::Success), "{done:?}");
        if done.iter().any(|completion| completion.kind == CompletionKind::Receive) {
            return;
        }
    }
}

/// Returns the time of each round trip in microseconds.
fn rnic<W: PacketIo + Send>(
    policy: TransportPolicy,
    ios: [W; 2],
    bytes: usize,
    trips: usize,
    delays_acks: bool,
) -> Vec<f64> {
    let Pair { a: mut ping, b: mut pong } = Pair::connected(NicProfile::new(policy), ios, Mtu::B1024, ACK_TIMER_CODE);
    for side in [&mut ping, &mut pong] {
        side.live.set_spin(SPIN);
        side.live.set_delayed_acks(delays_acks);
        side.post_receive(0, INBOX, bytes as u32);
    }
    let trips = trips + WARM_UP;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for id in 1..=trips as u64 {
                wait_for_message(&mut pong);
                pong.post_receive(id, INBOX, bytes as u32);
                pong.post_send(id, SendKind::Send(None), INBOX, bytes as u32);
            }
            pong.serve_for(Duration::from_millis(100));
        });
        let mut samples = Vec::with_capacity(trips);
        for id in 1..=trips as u64 {
            let started = Instant::now();
            ping.post_send(id, SendKind::Send(None), 0, bytes as u32);
            wait_for_message(&mut ping);
            samples.push(started.elapsed().as_nanos() as f64 / 1000.0);
            ping.post_receive(id, INBOX, bytes as u32);
        }
        samples.split_off(WARM_UP)
    })
}

/// Returns the same for two bare UDP sockets, which spin too.
fn bare(bytes: usize, trips: usize) -> Vec<f64> {
    let [ping, pong] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").expect("a socket on this machine"));
    for (socket, peer) in [(&ping, &pong), (&pong, &ping)] {
        socket.connect(peer.local_addr().expect("a bound socket")).expect("a route on this machine");
        socket.set_nonblocking(true).expect("a socket");
    }
    let trips = trips + WARM_UP;
    let receive = |socket: &UdpSocket, buffer: &mut [u8]| while socket.recv(buffer).is_err() {};
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut buffer = vec![0; bytes];
            for _ in 0..trips {
                receive(&pong, &mut buffer);
                pong.send(&buffer).expect("room for one datagram");
            }
        });
        let (message, mut buffer) = (vec![1; bytes], vec![0; bytes]);
        let mut samples = Vec::with_capacity(trips);
        for _ in 0..trips {
            let started = Instant::now();
            ping.send(&message).expect("room for one datagram");
            receive(&ping, &mut buffer);
            samples.push(started.elapsed().as_nanos() as f64 / 1000.0);
        }
        samples.split_off(WARM_UP)
    })
}

/// Returns the round-trip time of a cache line between two threads, in nanoseconds.
fn line_bounce_ns() -> f64 {
    let line = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for bounce in 0..BOUNCES {
                wait_for(&line, 2 * bounce + 1);
                line.store(2 * bounce + 2, Ordering::Release);
            }
        });
        let started = Instant::now();
        for bounce in 0..BOUNCES {
            line.store(2 * bounce + 1, Ordering::Release);
            wait_for(&line, 2 * bounce + 2);
        }
        started.elapsed().as_nanos() as f64 / BOUNCES as f64
    })
}

fn wait_for(line: &AtomicU64, value: u64) {
    let mut spins = 0_u32;
    while line.load(Ordering::Acquire) != value {
        spins += 1;
        // With one processor, the other thread needs it.
        if spins.is_multiple_of(1000) {
            std::thread::yield_now();
        }
        std::hint::spin_loop();
    }
}

fn main() {
    let [bytes, trips, rounds] = numbers(USAGE, [64, 5000, 7]);
    if bytes as u64 > INBOX {
        eprintln!("{bytes} bytes are too many; {USAGE}");
        std::process::exit(2);
    }
    let mut measurements = [
        Measurement::new("bare UDP", move || bare(bytes.min(65_000), trips)),
        Measurement::new("go-back-n, UDP (RoCEv2)", move || rnic(TransportPolicy::GoBackN, udp(), bytes, trips, false)),
        Measurement::new("the same, delayed acks", move || rnic(TransportPolicy::GoBackN, udp(), bytes, trips, true)),
        Measurement::new("srnic, UDP", move || rnic(TransportPolicy::Srnic, udp(), bytes, trips, false)),
        Measurement::new("the same, delayed acks", move || rnic(TransportPolicy::Srnic, udp(), bytes, trips, true)),
        Measurement::new("srnic, lanes", move || rnic(TransportPolicy::Srnic, lanes(), bytes, trips, false)),
        Measurement::new("cache line (floor)", || vec![line_bounce_ns() / 1000.0]),
    ];
    let samples = run_alternating(&mut measurements, rounds);
    println!("Round trips of {bytes} bytes in us, measured; {rounds} alternating rounds of {trips}.\n");
    println!("{:<26}{:>11}{:>11}{:>11}{:>11}{:>12}", "", "p50", "p99", "p99.9", "max", "to bare UDP");
    let reference = quantile(&samples[0], 0.5);
    for (measurement, samples) in measurements.iter().zip(&samples) {
        let [p50, p99, p999, max] = [0.5, 0.99, 0.999, 1.0].map(|point| quantile(samples, point));
        println!("{:<26}{p50:>11.3}{p99:>11.3}{p999:>11.3}{max:>11.3}{:>11.2}x", measurement.name, p50 / reference);
    }
}
