//! What the NICs are compared with: bare UDP sockets, a cache line and a copy; and the thread beside which they run.

use std::hint::black_box;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use stats::Latencies;

use super::ends::MEMORY_BYTES;
use super::verbs::{STREAM_MTU, WARM_UP};

/// Time without a datagram after which the stream has ended.
const SILENCE: Duration = Duration::from_millis(50);
/// Checks of a word between two yields: on one core, the other thread needs the processor.
const CHECKS_PER_YIELD: u32 = 1000;

/// A thread that computes until it is dropped.
pub struct BusyThread {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl BusyThread {
    /// Starts it.
    pub fn start() -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&is_over);
        let thread = std::thread::spawn(move || while !seen.load(Ordering::Relaxed) {});
        Self { is_over, thread: Some(thread) }
    }
}

impl Drop for BusyThread {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn sockets() -> Result<[UdpSocket; 2]> {
    let bind = || UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).context("no UDP socket on the loopback device");
    let (one, other) = (bind()?, bind()?);
    one.connect(other.local_addr()?)?;
    other.connect(one.local_addr()?)?;
    Ok([one, other])
}

/// Spins until a datagram arrives.
fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> Result<()> {
    loop {
        match socket.recv(buffer) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("receiving by bare UDP"),
        }
    }
}

/// Returns the time of each round trip of a datagram between two threads that spin.
pub fn round_trips(bytes: u32, trips: u32) -> Result<Latencies> {
    let [ping, pong] = sockets()?;
    ping.set_nonblocking(true)?;
    pong.set_nonblocking(true)?;
    let trips = trips + WARM_UP;
    std::thread::scope(|scope| {
        let answering = scope.spawn(move || -> Result<()> {
            let mut buffer = vec![0; bytes as usize];
            for _ in 0..trips {
                receive(&pong, &mut buffer)?;
                pong.send(&buffer).context("sending by bare UDP")?;
            }
            Ok(())
        });
        let (message, mut buffer) = (vec![1; bytes as usize], vec![0; bytes as usize]);
        let mut latencies = Latencies::new();
        for trip in 0..trips {
            let started = Instant::now();
            ping.send(&message).context("sending by bare UDP")?;
            receive(&ping, &mut buffer)?;
            if trip >= WARM_UP {
                latencies.add(started.elapsed().as_nanos() as f64, 1);
            }
        }
        answering.join().map_err(|_| anyhow!("the end that answers has panicked"))??;
        Ok(latencies)
    })
}

/// Returns the rate of datagrams with the payload of the NIC's packets, in bytes per second; none is acknowledged, and
/// lost ones do not count.
pub fn stream(stream_bytes: u64) -> Result<f64> {
    let [from, to] = sockets()?;
    to.set_read_timeout(Some(SILENCE))?;
    let payload = vec![1; STREAM_MTU.bytes() as usize];
    let is_sent = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let receiving = scope.spawn(|| {
            let mut buffer = vec![0; payload.len()];
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
        let sent = (0..stream_bytes.div_ceil(payload.len() as u64)).try_for_each(|_| from.send(&payload).map(drop));
        is_sent.store(true, Ordering::Relaxed);
        let (received, last) = receiving.join().map_err(|_| anyhow!("the receiving end has panicked"))?;
        sent.context("sending by bare UDP")?;
        Ok(received as f64 / last.duration_since(started).as_secs_f64())
    })
}

/// Returns the rate of a copy within this thread, from cache to cache, in bytes per second.
pub fn copy(stream_bytes: u64) -> f64 {
    let (source, mut target) = (vec![1_u8; MEMORY_BYTES], vec![0_u8; MEMORY_BYTES]);
    let copies = stream_bytes.div_ceil(MEMORY_BYTES as u64);
    let started = Instant::now();
    for _ in 0..copies {
        black_box(&mut target).copy_from_slice(black_box(&source));
    }
    (copies * MEMORY_BYTES as u64) as f64 / started.elapsed().as_secs_f64()
}

/// Returns the time of each round trip of a cache line between two threads.
pub fn line_bounces(bounces: u32) -> Latencies {
    let line = AtomicU32::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for bounce in 0..bounces {
                wait_for(&line, 2 * bounce + 1);
                line.store(2 * bounce + 2, Ordering::Release);
            }
        });
        let mut latencies = Latencies::new();
        for bounce in 0..bounces {
            let started = Instant::now();
            line.store(2 * bounce + 1, Ordering::Release);
            wait_for(&line, 2 * bounce + 2);
            latencies.add(started.elapsed().as_nanos() as f64, 1);
        }
        latencies
    })
}

fn wait_for(line: &AtomicU32, value: u32) {
    let mut checks = 0_u32;
    while line.load(Ordering::Acquire) != value {
        checks = checks.wrapping_add(1);
        if checks.is_multiple_of(CHECKS_PER_YIELD) {
            std::thread::yield_now();
        }
        std::hint::spin_loop();
    }
}
