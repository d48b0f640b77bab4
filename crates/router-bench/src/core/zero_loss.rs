//! The highest rate at which no packet is lost (RFC 2544, section 26.1), by halving.
//!
//! Packets come evenly, by the clock; those that find the card's ring full are lost. So a pause of the machine's own
//! longer than the ring lasts ends a trial, as it would at a wire.

use std::time::{Duration, Instant};

use ::router::Port as _;
use ::router::VECTOR_PACKETS_MAX;
use ::router::port::memory::Destinations;
use serde::Serialize;

use super::{Error, Router, WIRE_BYTES, name_of};

/// Frames that a network card keeps for a core, at most.
const RING_FRAMES: u64 = 4096;

/// The search ends when it knows the rate to this part.
const PRECISION: f64 = 0.01;

/// A trial that lost something is tried again before it counts: a machine that others use pauses now and then.
const TRIES: usize = 3;

/// A rate at which nothing was lost.
#[derive(Clone, Debug, Serialize)]
pub struct ZeroLoss {
    /// Bytes of a frame, or `IMIX`.
    pub size: String,
    /// Millions of packets a second; the next higher rate that was tried, 1% above at most, lost some.
    pub mpps: f64,
    /// Of an Ethernet wire, with preambles and gaps.
    pub wire_gbit_per_s: f64,
    /// How long each trial was, in ms.
    pub trial_ms: u64,
}

/// Searches.
///
/// # Errors
/// A packet was taken in and not forwarded.
pub fn zero_loss(
    router: &mut Router,
    sizes: &[usize],
    destinations: &Destinations,
    trial_ms: u64,
) -> Result<ZeroLoss, Error> {
    let trial = Duration::from_millis(trial_ms);
    let highest = saturated(router, sizes, destinations, trial)?;
    let (mut good, mut bad) = (0.0, highest * 1.1);
    while bad - good > PRECISION * bad {
        let rate = (good + bad) / 2.0;
        let mut is_lossless = false;
        for _ in 0..TRIES {
            is_lossless |= is_lossless || lost(router, sizes, destinations, rate, trial)? == 0;
        }
        if is_lossless {
            good = rate;
        } else {
            bad = rate;
        }
    }
    let mean_bytes = sizes.iter().sum::<usize>() as f64 / sizes.len() as f64;
    let wire_gbit_per_s = good * (mean_bytes + WIRE_BYTES as f64) * 8.0 / 1e9;
    Ok(ZeroLoss { size: name_of(sizes), mpps: good / 1e6, wire_gbit_per_s, trial_ms })
}

/// Packets a second when there is always one.
fn saturated(router: &mut Router, sizes: &[usize], destinations: &Destinations, trial: Duration) -> Result<f64, Error> {
    const PACKETS: usize = 1 << 13;
    let mut traffic = router.traffic(sizes, destinations.clone());
    let begin = Instant::now();
    let mut packets = 0;
    while begin.elapsed() < trial {
        traffic.forward(PACKETS, &mut ())?;
        packets += PACKETS;
    }
    Ok(packets as f64 / begin.elapsed().as_secs_f64())
}

/// Packets that are lost at this rate.
fn lost(
    router: &mut Router,
    sizes: &[usize],
    destinations: &Destinations,
    packets_per_s: f64,
    trial: Duration,
) -> Result<u64, Error> {
    let mut traffic = router.traffic(sizes, destinations.clone()).with_ring(RING_FRAMES);
    let begin = Instant::now();
    let (mut offered, mut taken) = (0, 0);
    loop {
        let elapsed = begin.elapsed().min(trial);
        let due = (elapsed.as_secs_f64() * packets_per_s) as u64;
        traffic.generator.offer(due - offered);
        offered = due;
        let count = traffic.turn(VECTOR_PACKETS_MAX, &mut ()) as u64;
        taken += count;
        if elapsed == trial && count == 0 {
            break;
        }
    }
    let (packets_in, packets_out) = (taken, traffic.generator.swallowed().packets);
    if packets_in != packets_out {
        return Err(Error::Lost { packets_in, packets_out, drops: "at a rate".to_owned() });
    }
    Ok(traffic.generator.losses().receive_overflows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_search_ends_and_what_overflows_the_ring_is_lost() {
        let mut router = Router::new(3, 2_000, 10).expect("tables");
        let destinations = router.destinations_v4(1, 100);
        let found = zero_loss(&mut router, &[64], &destinations, 1).expect("all are forwarded");
        assert!(found.mpps > 0.0, "{found:?}");
        let trial = Duration::from_millis(2);
        let lost = lost(&mut router, &[64], &destinations, 1e12, trial).expect("all are forwarded");
        assert!(lost > 0, "a million packets a microsecond are more than a core takes");
    }
}
