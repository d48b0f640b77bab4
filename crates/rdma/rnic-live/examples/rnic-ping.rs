//! Round trips of SENDs through the RNIC's engine, beside a bare UDP ping-pong and the floor of this machine:
//! `cargo run --release -p rnic-live --example rnic-ping -- [BYTES [ROUND_TRIPS [ROUNDS]]]`
//!
//! Both ends are threads of this process that look on rather than sleep. All numbers are measured, side by side in
//! alternating rounds; ratios are to bare UDP.

#[path = "../tests/pair/mod.rs"]
#[allow(dead_code)] // The tests use the rest.
mod pair;
mod shared;

use std::net::UdpSocket;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pair::{Pair, Side, lanes, udp};
use rnic::nic::{Policy, Profile};
use rnic::verbs::{CompletionKind, CompletionStatus, Mtu, SendKind};
use rnic_live::{ACK_TIMER_CODE, PacketIo};
use shared::{Entry, alternate, numbers, quantile};

const USAGE: &str = "give bytes (up to 65536), round trips and rounds, such as 64 5000 7";
/// Round trips before the first that counts.
const WARM_UP: usize = 200;
/// Longer than any pause of a thread that is still to count as looking on.
const SPIN: Duration = Duration::from_secs(1);
/// Times that the floor moves a line there and back, for one sample.
const BOUNCES: u64 = 20_000;
/// Where a message is put.
const INBOX: u64 = 65_536;

/// Waits for one message; what is completed of this side's own sends is taken along.
fn received<W: PacketIo>(side: &mut Side<W>) {
    loop {
        let done = side.completions(1);
        assert!(done.iter().all(|completion| completion.status == CompletionStatus::Success), "{done:?}");
        if done.iter().any(|completion| completion.kind == CompletionKind::Receive) {
            return;
        }
    }
}

/// Microseconds of each round trip.
fn rnic<W: PacketIo + Send>(policy: Policy, wires: [W; 2], bytes: usize, trips: usize) -> Vec<f64> {
    let Pair { a: mut ping, b: mut pong } = Pair::connected(Profile::new(policy), wires, Mtu::B1024, ACK_TIMER_CODE);
    for side in [&mut ping, &mut pong] {
        side.live.set_spin(SPIN);
        side.receive(0, INBOX, bytes as u32);
    }
    let trips = trips + WARM_UP;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for id in 1..=trips as u64 {
                received(&mut pong);
                pong.receive(id, INBOX, bytes as u32);
                pong.send(id, SendKind::Send(None), INBOX, bytes as u32);
            }
            pong.linger(Duration::from_millis(100));
        });
        let mut samples = Vec::with_capacity(trips);
        for id in 1..=trips as u64 {
            let began = Instant::now();
            ping.send(id, SendKind::Send(None), 0, bytes as u32);
            received(&mut ping);
            samples.push(began.elapsed().as_nanos() as f64 / 1000.0);
            ping.receive(id, INBOX, bytes as u32);
        }
        samples.split_off(WARM_UP)
    })
}

/// The same with nothing but two sockets, which look on as well.
fn bare(bytes: usize, trips: usize) -> Vec<f64> {
    let [ping, pong] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").expect("a socket on this machine"));
    for (end, other) in [(&ping, &pong), (&pong, &ping)] {
        end.connect(other.local_addr().expect("a bound socket")).expect("a route on this machine");
        end.set_nonblocking(true).expect("a socket");
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
            let began = Instant::now();
            ping.send(&message).expect("room for one datagram");
            receive(&ping, &mut buffer);
            samples.push(began.elapsed().as_nanos() as f64 / 1000.0);
        }
        samples.split_off(WARM_UP)
    })
}

/// A cache line there and back between two threads, in nanoseconds.
fn line_bounce_ns() -> f64 {
    let line = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for bounce in 0..BOUNCES {
                wait_for(&line, 2 * bounce + 1);
                line.store(2 * bounce + 2, Ordering::Release);
            }
        });
        let began = Instant::now();
        for bounce in 0..BOUNCES {
            line.store(2 * bounce + 1, Ordering::Release);
            wait_for(&line, 2 * bounce + 2);
        }
        began.elapsed().as_nanos() as f64 / BOUNCES as f64
    })
}

fn wait_for(line: &AtomicU64, value: u64) {
    let mut looks = 0_u32;
    while line.load(Ordering::Acquire) != value {
        looks += 1;
        // On one processor the other thread needs it.
        if looks.is_multiple_of(1000) {
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
    let mut entries = [
        Entry::new("bare UDP", move || bare(bytes.min(65_000), trips)),
        Entry::new("go-back-n, UDP (RoCEv2)", move || rnic(Policy::GoBackN, udp(), bytes, trips)),
        Entry::new("srnic, UDP", move || rnic(Policy::Srnic, udp(), bytes, trips)),
        Entry::new("srnic, lanes", move || rnic(Policy::Srnic, lanes(), bytes, trips)),
        Entry::new("cache line (floor)", || vec![line_bounce_ns() / 1000.0]),
    ];
    let samples = alternate(&mut entries, rounds);
    println!("Round trips of {bytes} bytes in us, measured; {rounds} alternating rounds of {trips}.\n");
    println!("{:<26}{:>11}{:>11}{:>11}{:>11}{:>12}", "", "p50", "p99", "p99.9", "max", "to bare UDP");
    let reference = quantile(&samples[0], 0.5);
    for (entry, samples) in entries.iter().zip(&samples) {
        let [p50, p99, p999, max] = [0.5, 0.99, 0.999, 1.0].map(|point| quantile(samples, point));
        println!("{:<26}{p50:>11.3}{p99:>11.3}{p999:>11.3}{max:>11.3}{:>11.2}x", entry.name, p50 / reference);
    }
}
