//! What one hop takes, as it was published: a batch goes there and comes back, and what the other node takes is left
//! out. One hop is ((T4 - T1) - (T3 - T2)) / 2.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use router_node::interconnect::TransportKind;
use serde::Serialize;

use super::nodes::{Cores, Node, packet_bytes, pair, pin};
use super::{Batching, BenchError, Effort, name};
use crate::statistics::Quantiles;

const BUFFERS: u32 = 256;
/// Round trips before those that count.
const WARM_UP: usize = 50;
const PATIENCE: Duration = Duration::from_secs(10);

/// A hop. *Measured.*
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Hop {
    /// Over which interconnect.
    pub interconnect: &'static str,
    /// Bytes of a frame.
    pub frame_bytes: usize,
    /// Packets that go together.
    pub batch: u8,
    /// From the first packet's handing over to the last one's arrival.
    pub latency: Quantiles,
}

/// Hops with each of these sizes and batches; `step` hears of each batch.
///
/// # Errors
/// When the nodes could not be made, or nothing arrives.
pub fn hops(
    kind: TransportKind,
    frame_bytes: &[usize],
    batches: &[u8],
    effort: &Effort,
    cores: Cores,
    step: &mut dyn FnMut(&str),
) -> Result<Vec<Hop>, BenchError> {
    let mut found = Vec::with_capacity(batches.len() * frame_bytes.len());
    for batch in batches {
        step(&format!("one hop, {batch} a message"));
        for frame_bytes in frame_bytes {
            found.push(hop(kind, *frame_bytes, *batch, effort.round_trips, cores)?);
        }
    }
    Ok(found)
}

struct Times {
    there: Vec<u64>,
    back: Vec<u64>,
}

fn hop(
    kind: TransportKind,
    frame_bytes: usize,
    batch: u8,
    round_trips: usize,
    cores: Cores,
) -> Result<Hop, BenchError> {
    let [mut near, mut far] = pair(kind, Batching::Fixed(batch), BUFFERS)?;
    let rounds = WARM_UP + round_trips;
    let (began, has_failed) = (Instant::now(), AtomicBool::new(false));
    let clock = Clock { began, has_failed: &has_failed, kind };
    let (bytes, batch_packets) = (packet_bytes(frame_bytes), usize::from(batch));
    let (near_times, far_times) = std::thread::scope(|scope| {
        let answering = scope.spawn(|| {
            pin(cores.receiver)?;
            (0..rounds).map(|_| clock.answer(&mut far, bytes, batch_packets)).collect::<Result<Vec<_>, _>>()
        });
        let asking = scope.spawn(|| {
            pin(cores.sender)?;
            (0..rounds).map(|_| clock.ask(&mut near, bytes, batch_packets)).collect::<Result<Vec<_>, _>>()
        });
        (asking.join().expect("the asking node"), answering.join().expect("the answering node"))
    });
    let times = Times { there: spans(&near_times?), back: spans(&far_times?) };
    let hop_ns = |(all, other): (&u64, &u64)| all.saturating_sub(*other) / 2;
    let mut hops_ns: Vec<u64> = times.there.iter().zip(&times.back).skip(WARM_UP).map(hop_ns).collect();
    Ok(Hop { interconnect: name(kind), frame_bytes, batch, latency: Quantiles::of(&mut hops_ns) })
}

fn spans(times: &[(u64, u64)]) -> Vec<u64> {
    times.iter().map(|(from, to)| to - from).collect()
}

struct Clock<'a> {
    began: Instant,
    has_failed: &'a AtomicBool,
    kind: TransportKind,
}

impl Clock<'_> {
    fn now_ns(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    fn send(&self, node: &mut Node, bytes: usize, packets: usize) -> u64 {
        let now_ns = self.now_ns();
        for _ in 0..packets {
            assert!(node.make(bytes, now_ns), "all buffers of a round trip came back");
        }
        // The moment when the first is handed over: making them is no part of the hop.
        let sent_ns = self.now_ns();
        node.send(sent_ns);
        sent_ns
    }

    /// When all have come.
    fn wait(&self, node: &mut Node, packets: usize) -> Result<u64, BenchError> {
        let (mut found, until) = (0, Instant::now() + PATIENCE);
        loop {
            node.turn(self.now_ns());
            if !node.arrived.is_empty() {
                node.take(|_| found += 1);
                if found >= packets {
                    return Ok(self.now_ns());
                }
            }
            let is_late = self.has_failed.load(Ordering::Relaxed) || Instant::now() > until;
            if is_late {
                self.has_failed.store(true, Ordering::Relaxed);
                let limit_s = PATIENCE.as_secs();
                return Err(BenchError::Silent { kind: name(self.kind), found, wanted: packets, limit_s });
            }
        }
    }

    /// T1 and T4.
    fn ask(&self, node: &mut Node, bytes: usize, packets: usize) -> Result<(u64, u64), BenchError> {
        let sent_ns = self.send(node, bytes, packets);
        Ok((sent_ns, self.wait(node, packets)?))
    }

    /// T2 and T3.
    fn answer(&self, node: &mut Node, bytes: usize, packets: usize) -> Result<(u64, u64), BenchError> {
        let came_ns = self.wait(node, packets)?;
        Ok((came_ns, self.send(node, bytes, packets)))
    }
}
