//! Throughput of WRITEs through the RDMA engine, compared with bare UDP datagrams and a memory copy on this machine:
//! `cargo run --release -p rnic-live --example rnic-stream -- [BYTES [MEGABYTES [ROUNDS]]]`
//!
//! One thread writes messages of this size, 16 outstanding, into the memory of another thread. Bare UDP sends datagrams
//! with the same payload as the engine's packets, one by one, and counts those that arrive. All numbers are measured
//! side by side in alternating rounds; ratios are to bare UDP.

#[path = "../tests/pair/mod.rs"]
#[allow(dead_code)] // The tests use the rest.
mod pair;
mod shared;

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pair::{MEMORY_BYTES, Pair, lanes, udp};
use rnic::nic::{NicProfile, TransportPolicy};
use rnic::verbs::{CompletionStatus, Mtu, RemoteBuffer, SendKind};
use rnic_live::{ACK_TIMER_CODE, PacketIo};
use shared::{Measurement, numbers, quantile, run_alternating};

const USAGE: &str = "give bytes of a message (up to 262144), megabytes in all and rounds, such as 65536 64 7";
/// Outstanding messages.
const DEPTH: usize = 16;
/// Path MTU; the loopback device and lanes do not fragment packets of this size.
const MTU: Mtu = Mtu::B4096;
/// Outstanding packets: as many as the default socket buffer holds.
const WINDOW_PACKETS: u32 = 32;
const SPIN: Duration = Duration::from_millis(1);
/// How long the target serves requests before it checks whether the run has ended.
const SERVE: Duration = Duration::from_millis(2);

/// Returns the throughput in MB/s.
fn rnic<W: PacketIo + Send>(policy: TransportPolicy, ios: [W; 2], bytes: usize, total_bytes: usize) -> Vec<f64> {
    let profile = NicProfile { mtu_bytes: MTU.bytes(), window_packets: WINDOW_PACKETS, ..NicProfile::new(policy) };
    let Pair { a: mut writer, b: mut target } = Pair::connected(profile, ios, MTU, ACK_TIMER_CODE);
    let remote = RemoteBuffer { address: 0, key: target.keys.remote };
    writer.live.set_spin(SPIN);
    target.live.set_spin(SPIN);
    let is_done = AtomicBool::new(false);
    let messages = total_bytes.div_ceil(bytes);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                target.serve_for(SERVE);
            }
        });
        let started = Instant::now();
        let (mut posted, mut done) = (0, 0);
        while done < messages {
            while posted < messages && posted < done + DEPTH {
                writer.post_send(posted as u64, SendKind::Write(remote, None), 0, bytes as u32);
                posted += 1;
            }
            let completions = writer.wait_completions(1);
            assert!(completions.iter().all(|completion| completion.status == CompletionStatus::Success));
            done += completions.len();
        }
        let seconds = started.elapsed().as_secs_f64();
        is_done.store(true, Ordering::Relaxed);
        vec![(messages * bytes) as f64 / seconds / 1e6]
    })
}

/// Returns the throughput of bare datagrams in MB/s, without acknowledgements; lost datagrams do not count.
fn bare(total_bytes: usize) -> Vec<f64> {
    let [from, to] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").expect("a socket on this machine"));
    from.connect(to.local_addr().expect("a bound socket")).expect("a route on this machine");
    to.set_read_timeout(Some(Duration::from_millis(50))).expect("a socket");
    let payload = vec![1; MTU.bytes() as usize];
    let is_sent = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Receives until the sender is done and no datagram is left.
        let receiver = scope.spawn(|| {
            let mut buffer = vec![0; MTU.bytes() as usize];
            let (mut received, mut last) = (0, Instant::now());
            loop {
                match to.recv(&mut buffer) {
                    Ok(bytes) => (received, last) = (received + bytes, Instant::now()),
                    Err(_) if is_sent.load(Ordering::Relaxed) => return (received, last),
                    Err(_) => {}
                }
            }
        });
        let started = Instant::now();
        for _ in 0..total_bytes.div_ceil(payload.len()) {
            from.send(&payload).expect("room for one datagram");
        }
        is_sent.store(true, Ordering::Relaxed);
        let (received, last) = receiver.join().expect("the receiver does not panic");
        vec![received as f64 / last.duration_since(started).as_secs_f64() / 1e6]
    })
}

/// Returns the throughput of a copy within this thread, from cache to cache, in MB/s.
fn copy(total_bytes: usize) -> Vec<f64> {
    let (source, mut target) = (vec![1_u8; MEMORY_BYTES], vec![0_u8; MEMORY_BYTES]);
    let started = Instant::now();
    for _ in 0..total_bytes.div_ceil(MEMORY_BYTES) {
        std::hint::black_box(&mut target).copy_from_slice(std::hint::black_box(&source));
    }
    vec![total_bytes as f64 / started.elapsed().as_secs_f64() / 1e6]
}

fn main() {
    let [bytes, megabytes, rounds] = numbers(USAGE, [65_536, 64, 7]);
    if bytes > MEMORY_BYTES {
        eprintln!("{bytes} bytes are too many; {USAGE}");
        std::process::exit(2);
    }
    let total = megabytes * 1_000_000;
    let mut measurements = [
        Measurement::new("bare UDP", move || bare(total)),
        Measurement::new("go-back-n, UDP (RoCEv2)", move || rnic(TransportPolicy::GoBackN, udp(), bytes, total)),
        Measurement::new("srnic, UDP", move || rnic(TransportPolicy::Srnic, udp(), bytes, total)),
        Measurement::new("srnic, lanes", move || rnic(TransportPolicy::Srnic, lanes(), bytes, total)),
        Measurement::new("one copy (floor)", move || copy(total)),
    ];
    let samples = run_alternating(&mut measurements, rounds);
    println!("WRITEs of {bytes} bytes in MB/s, measured; {rounds} alternating rounds of {megabytes} MB.\n");
    println!("{:<26}{:>10}{:>10}{:>10}{:>13}", "", "median", "least", "most", "to bare UDP");
    let reference = quantile(&samples[0], 0.5);
    for (measurement, samples) in measurements.iter().zip(&samples) {
        let [median, least, most] = [0.5, 0.0, 1.0].map(|point| quantile(samples, point));
        println!("{:<26}{median:>10.0}{least:>10.0}{most:>10.0}{:>12.2}x", measurement.name, median / reference);
    }
}
