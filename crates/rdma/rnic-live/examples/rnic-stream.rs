//! Bytes a second of WRITEs through the RNIC's engine, beside datagrams of bare UDP and a copy on this machine:
//! `cargo run --release -p rnic-live --example rnic-stream -- [BYTES [MEGABYTES [ROUNDS]]]`
//!
//! One thread writes messages of so many bytes, 16 at a time, another is written to. Bare UDP sends datagrams of the
//! same payload as packets have, one by one, and counts what arrives. All numbers are measured, side by side in
//! alternating rounds; ratios are to bare UDP.

#[path = "../tests/pair/mod.rs"]
#[allow(dead_code)] // The tests use the rest.
mod pair;
mod shared;

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pair::{Pair, SIDE_BYTES, lanes, udp};
use rnic::nic::{Policy, Profile};
use rnic::verbs::{CompletionStatus, Mtu, Remote, SendKind};
use rnic_live::{ACK_TIMER_CODE, PacketIo};
use shared::{Entry, alternate, numbers, quantile};

const USAGE: &str = "give bytes of a message (up to 262144), megabytes in all and rounds, such as 65536 64 7";
/// Messages on their way at a time.
const DEPTH: usize = 16;
/// Of each packet; the loopback device and lanes take that whole.
const MTU: Mtu = Mtu::B4096;
/// Packets on their way at a time: what the kernel holds for a socket by default.
const WINDOW_PACKETS: u32 = 32;
const SPIN: Duration = Duration::from_millis(1);
/// How long the end that is written to looks for more before it looks whether that was all.
const LOOK: Duration = Duration::from_millis(2);

/// Megabytes a second.
fn rnic<W: PacketIo + Send>(policy: Policy, wires: [W; 2], bytes: usize, total_bytes: usize) -> Vec<f64> {
    let profile = Profile { mtu_bytes: MTU.bytes(), window_packets: WINDOW_PACKETS, ..Profile::new(policy) };
    let Pair { a: mut writer, b: mut target } = Pair::connected(profile, wires, MTU, ACK_TIMER_CODE);
    let remote = Remote { address: 0, key: target.keys.remote };
    writer.live.set_spin(SPIN);
    target.live.set_spin(SPIN);
    let is_done = AtomicBool::new(false);
    let messages = total_bytes.div_ceil(bytes);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                target.linger(LOOK);
            }
        });
        let began = Instant::now();
        let (mut posted, mut done) = (0, 0);
        while done < messages {
            while posted < messages && posted < done + DEPTH {
                writer.send(posted as u64, SendKind::Write(remote, None), 0, bytes as u32);
                posted += 1;
            }
            let completions = writer.completions(1);
            assert!(completions.iter().all(|completion| completion.status == CompletionStatus::Success));
            done += completions.len();
        }
        let seconds = began.elapsed().as_secs_f64();
        is_done.store(true, Ordering::Relaxed);
        vec![(messages * bytes) as f64 / seconds / 1e6]
    })
}

/// The same bytes as datagrams, without acknowledgement; what is lost does not count.
fn bare(total_bytes: usize) -> Vec<f64> {
    let [from, to] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").expect("a socket on this machine"));
    from.connect(to.local_addr().expect("a bound socket")).expect("a route on this machine");
    to.set_read_timeout(Some(Duration::from_millis(50))).expect("a socket");
    let payload = vec![1; MTU.bytes() as usize];
    let is_sent = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // As long as the sender sends, and until nothing is under way any more.
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
        let began = Instant::now();
        for _ in 0..total_bytes.div_ceil(payload.len()) {
            from.send(&payload).expect("room for one datagram");
        }
        is_sent.store(true, Ordering::Relaxed);
        let (received, last) = receiver.join().expect("the receiver has no reason to panic");
        vec![received as f64 / last.duration_since(began).as_secs_f64() / 1e6]
    })
}

/// A copy of as many bytes within this thread, from cache to cache.
fn copy(total_bytes: usize) -> Vec<f64> {
    let (source, mut target) = (vec![1_u8; SIDE_BYTES], vec![0_u8; SIDE_BYTES]);
    let began = Instant::now();
    for _ in 0..total_bytes.div_ceil(SIDE_BYTES) {
        std::hint::black_box(&mut target).copy_from_slice(std::hint::black_box(&source));
    }
    vec![total_bytes as f64 / began.elapsed().as_secs_f64() / 1e6]
}

fn main() {
    let [bytes, megabytes, rounds] = numbers(USAGE, [65_536, 64, 7]);
    if bytes > SIDE_BYTES {
        eprintln!("{bytes} bytes are too many; {USAGE}");
        std::process::exit(2);
    }
    let total = megabytes * 1_000_000;
    let mut entries = [
        Entry::new("bare UDP", move || bare(total)),
        Entry::new("go-back-n, UDP (RoCEv2)", move || rnic(Policy::GoBackN, udp(), bytes, total)),
        Entry::new("srnic, UDP", move || rnic(Policy::Srnic, udp(), bytes, total)),
        Entry::new("srnic, lanes", move || rnic(Policy::Srnic, lanes(), bytes, total)),
        Entry::new("one copy (floor)", move || copy(total)),
    ];
    let samples = alternate(&mut entries, rounds);
    println!("WRITEs of {bytes} bytes in MB/s, measured; {rounds} alternating rounds of {megabytes} MB.\n");
    println!("{:<26}{:>10}{:>10}{:>10}{:>13}", "", "median", "least", "most", "to bare UDP");
    let reference = quantile(&samples[0], 0.5);
    for (entry, samples) in entries.iter().zip(&samples) {
        let [median, least, most] = [0.5, 0.0, 1.0].map(|point| quantile(samples, point));
        println!("{:<26}{median:>10.0}{least:>10.0}{most:>10.0}{:>12.2}x", entry.name, median / reference);
    }
}
