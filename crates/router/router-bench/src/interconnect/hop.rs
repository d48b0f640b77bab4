//! The latency of one hop, defined as in the published measurement: a batch travels to the other node and back, and the
//! time that the other node takes is subtracted. One hop is ((T4 - T1) - (T3 - T2)) / 2.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use router_node::interconnect::TransportKind;
use serde::Serialize;

use super::nodes::{Cores, Node, packet_bytes, pair, pin};
use super::{Batching, BenchError, Effort, name};
use crate::statistics::Quantiles;

const BUFFERS: u32 = 256;
/// Round trips before the measured ones.
const WARM_UP: usize = 50;
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(10);

/// The latency of a hop. *Measured.*
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Hop {
    /// The name of the interconnect.
    pub interconnect: &'static str,
    /// The frame size in bytes.
    pub frame_bytes: usize,
    /// The number of packets in a message.
    pub batch: u8,
    /// The time from sending the first packet to the arrival of the last one.
    pub latency: Quantiles,
}

/// Measures hops with each of these sizes and batches; `step` is called for each batch.
///
/// # Errors
/// Fails if the nodes could not be created or packets do not arrive.
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

fn hop(
    kind: TransportKind,
    frame_bytes: usize,
    batch: u8,
    round_trips: usize,
    cores: Cores,
) -> Result<Hop, BenchError> {
    let [mut local, mut remote] = pair(kind, Batching::Fixed(batch), BUFFERS)?;
    let rounds = WARM_UP + round_trips;
    let (began, has_failed) = (Instant::now(), AtomicBool::new(false));
    let clock = Clock { began, has_failed: &has_failed, kind };
    let (bytes, batch_packets) = (packet_bytes(frame_bytes), usize::from(batch));
    let (local_times, remote_times) = std::thread::scope(|scope| {
        let responder = scope.spawn(|| {
            pin(cores.receiver)?;
            (0..rounds).map(|_| clock.respond(&mut remote, bytes, batch_packets)).collect::<Result<Vec<_>, _>>()
        });
        let requester = scope.spawn(|| {
            pin(cores.sender)?;
            (0..rounds).map(|_| clock.request(&mut local, bytes, batch_packets)).collect::<Result<Vec<_>, _>>()
        });
        (requester.join().expect("the requesting node"), responder.join().expect("the responding node"))
    });
    let hop_ns = |((t1, t4), (t2, t3)): ((u64, u64), (u64, u64))| (t4 - t1).saturating_sub(t3 - t2) / 2;
    let mut hops_ns: Vec<u64> = local_times?.into_iter().zip(remote_times?).skip(WARM_UP).map(hop_ns).collect();
    Ok(Hop { interconnect: name(kind), frame_bytes, batch, latency: Quantiles::of(&mut hops_ns) })
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
            assert!(node.make_packet(bytes, now_ns), "all buffers of a round trip were returned");
        }
        // The time when the first packet is sent: preparing the packets is not part of the hop.
        let sent_ns = self.now_ns();
        node.send(sent_ns);
        sent_ns
    }

    /// Waits for all packets, and returns the time when they have arrived.
    fn wait(&self, node: &mut Node, packets: usize) -> Result<u64, BenchError> {
        let (mut found, until) = (0, Instant::now() + ARRIVAL_TIMEOUT);
        loop {
            node.poll(self.now_ns());
            if !node.arrived.is_empty() {
                node.take_arrived(|_| found += 1);
                if found >= packets {
                    return Ok(self.now_ns());
                }
            }
            let is_late = self.has_failed.load(Ordering::Relaxed) || Instant::now() > until;
            if is_late {
                self.has_failed.store(true, Ordering::Relaxed);
                let limit_s = ARRIVAL_TIMEOUT.as_secs();
                return Err(BenchError::Silent { kind: name(self.kind), found, wanted: packets, limit_s });
            }
        }
    }

    /// Sends a batch, waits for the reply, and returns T1 and T4.
    fn request(&self, node: &mut Node, bytes: usize, packets: usize) -> Result<(u64, u64), BenchError> {
        let sent_ns = self.send(node, bytes, packets);
        Ok((sent_ns, self.wait(node, packets)?))
    }

    /// Waits for a batch, replies, and returns T2 and T3.
    fn respond(&self, node: &mut Node, bytes: usize, packets: usize) -> Result<(u64, u64), BenchError> {
        let arrival_ns = self.wait(node, packets)?;
        Ok((arrival_ns, self.send(node, bytes, packets)))
    }
}
