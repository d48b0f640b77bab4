//! The highest rate at which no packet is lost (RFC 2544, section 26.1).
//!
//! Packets arrive evenly by the clock; those that find the receive ring of the network card full are lost. A pause of
//! the machine that is longer than the ring covers therefore ends a trial, as it would on a wire: this gives the raw
//! rate. For the undisturbed rate, the clock stops while the machine stalls the core ([`crate::clock`]): no
//! packet arrives during that time, so the core has no backlog to process.

use std::time::{Duration, Instant};

use ::router::Port as _;
use ::router::VECTOR_PACKETS_MAX;
use ::router::port::memory::Destinations;
use serde::Serialize;

use super::{Error, Router, WIRE_BYTES, name_of, version_of};
use crate::clock::{Allowance, TrialClock};
use crate::search::{Length, Rules, SearchResult, Verdict, highest};

/// The largest number of frames that a network card queues for a core.
const RING_FRAMES: u64 = 4096;

/// The relative precision at which the search ends.
const PRECISION: f64 = 0.01;

/// The longest time of an iteration: several times the expected time.
const ALLOWANCE: Allowance = Allowance { iteration_ns: 2_000, packet_ns: 250 };

/// The highest rates without a loss. *Measured.*
#[derive(Clone, Debug, Serialize)]
pub struct ZeroLoss {
    /// 4 or 6.
    pub version: u8,
    /// The size of a frame in bytes, or `IMIX`.
    pub size: String,
    /// The raw rate in millions of packets a second: stalls of the machine count.
    pub mpps: f64,
    /// The raw rate on an Ethernet wire, with preambles and gaps.
    pub wire_gbit_per_s: f64,
    /// The undisturbed rate in millions of packets a second, without the time for which the machine
    /// stalled the core.
    pub mpps_undisturbed: f64,
    /// The share of stalls in the time of the trials.
    pub stalled_share: f64,
    /// The longest stall, in us.
    pub stall_us_max: f64,
    /// The length of the trial that confirmed the result of shorter ones, in ms.
    pub trial_ms: u64,
}

/// The lengths of trials, in ms.
#[derive(Clone, Copy, Debug)]
pub struct Trials {
    /// Of trials that search.
    pub short_ms: u64,
    /// Of the trial that confirms the result.
    pub long_ms: u64,
}

impl Trials {
    fn duration(self, length: Length) -> Duration {
        Duration::from_millis(match length {
            Length::Short => self.short_ms,
            Length::Long => self.long_ms,
        })
    }
}

/// The start of the first search, as a share of what a core forwards when a packet is always available.
pub(super) const FIRST_SHARE: f64 = 0.85;

/// Searches for the highest rates without a loss. The search starts at `first_share` of what the core forwards when a
/// packet is always available: [`FIRST_SHARE`], or the share that a previous search found. Returns the rates and the
/// share that this search found.
///
/// # Errors
/// Fails if a packet was received and not forwarded.
pub fn zero_loss(
    router: &mut Router,
    sizes: &[usize],
    destinations: &Destinations,
    trials: Trials,
    first_share: f64,
) -> Result<(ZeroLoss, f64), Error> {
    let saturated = saturated(router, sizes, destinations, trials.duration(Length::Short))?;
    let ceiling = saturated * 1.1;
    let mut stalls = Stalls::default();
    let mut search = |rules: Rules, first: f64, ceiling: f64, counts_stalls: bool| -> Result<SearchResult, Error> {
        highest(rules, first, ceiling, |packets_per_s, length| {
            let trial = trials.duration(length);
            let mut clock = TrialClock::new(trial, ALLOWANCE, counts_stalls);
            let verdict = try_rate(router, sizes, destinations, packets_per_s, &mut clock)?;
            stalls.add(&clock);
            Ok(verdict)
        })
    };
    let undisturbed = search(Rules::undisturbed(PRECISION), saturated * first_share, ceiling, false)?;
    // On an idle machine the raw rate is the same, and two trials confirm it.
    let first = if undisturbed.rate > 0.0 { undisturbed.rate } else { ceiling / 2.0 };
    let raw = search(Rules::raw(PRECISION), first, first * (1.0 + 2.0 * PRECISION), true)?;
    let mean_bytes = sizes.iter().sum::<usize>() as f64 / sizes.len() as f64;
    let share = undisturbed.rate / saturated;
    let found = ZeroLoss {
        version: version_of(destinations),
        size: name_of(sizes),
        mpps: raw.rate / 1e6,
        wire_gbit_per_s: raw.rate * (mean_bytes + WIRE_BYTES as f64) * 8.0 / 1e9,
        mpps_undisturbed: undisturbed.rate.max(raw.rate) / 1e6,
        stalled_share: stalls.share(),
        stall_us_max: stalls.ns_max as f64 / 1e3,
        trial_ms: trials.long_ms,
    };
    Ok((found, if share > 0.0 { share } else { first_share }))
}

/// Returns the rate, in packets a second, when a packet is always available.
fn saturated(router: &mut Router, sizes: &[usize], destinations: &Destinations, trial: Duration) -> Result<f64, Error> {
    const PACKETS: usize = 1 << 13;
    let mut traffic = router.traffic(sizes, destinations.clone());
    // The fastest of several runs is the upper bound; a disturbed run would be too low.
    let (begin, mut ns_min) = (Instant::now(), u128::MAX);
    while begin.elapsed() < trial || ns_min == u128::MAX {
        let piece = Instant::now();
        traffic.forward(PACKETS, &mut ())?;
        ns_min = ns_min.min(piece.elapsed().as_nanos().max(1));
    }
    Ok(PACKETS as f64 * 1e9 / ns_min as f64)
}

/// The stalls of all trials.
#[derive(Default)]
struct Stalls {
    wall_ns: u64,
    stalled_ns: u64,
    ns_max: u64,
}

impl Stalls {
    fn add(&mut self, clock: &TrialClock) {
        let (stalled_ns, ns_max) = clock.stalled_ns();
        self.wall_ns += clock.wall_ns();
        self.stalled_ns += stalled_ns;
        self.ns_max = self.ns_max.max(ns_max);
    }

    fn share(&self) -> f64 {
        self.stalled_ns as f64 / self.wall_ns.max(1) as f64
    }
}

/// Offers packets at this rate until the trial is over or a packet is lost.
fn try_rate(
    router: &mut Router,
    sizes: &[usize],
    destinations: &Destinations,
    packets_per_s: f64,
    clock: &mut TrialClock,
) -> Result<Verdict, Error> {
    let mut traffic = router.traffic(sizes, destinations.clone()).with_ring(RING_FRAMES);
    let (mut offered, mut received, mut count) = (0, 0, 0);
    let is_lost = loop {
        let Some(passed_ns) = clock.advance(count) else { return Ok(Verdict::Disturbed) };
        let due = (passed_ns as f64 * 1e-9 * packets_per_s) as u64;
        traffic.generator.offer(due - offered);
        offered = due;
        count = traffic.poll_once(VECTOR_PACKETS_MAX, &mut ()) as u64;
        received += count;
        let is_lost = traffic.generator.losses().receive_overflows > 0;
        if is_lost || clock.is_over(passed_ns) && count == 0 {
            break is_lost;
        }
    };
    let (packets_in, packets_out) = (received, traffic.generator.transmitted().packets);
    if packets_in != packets_out {
        return Err(Error::Lost { packets_in, packets_out, drops: "during a trial at a fixed rate".to_owned() });
    }
    Ok(if is_lost { Verdict::Lost } else { Verdict::Carried })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_search_ends_and_packets_that_overflow_the_ring_are_lost() {
        let mut router = Router::new(3, 2_000, 10).expect("tables");
        let destinations = router.destinations_v4(1, 100);
        let trials = Trials { short_ms: 1, long_ms: 2 };
        let found = zero_loss(&mut router, &[64], &destinations, trials, FIRST_SHARE).expect("all are forwarded");
        let (found, share) = found;
        assert!(share > 0.0 && share <= 1.1 && found.trial_ms == 2, "{found:?}, {share}");
        assert!(found.mpps_undisturbed > 0.0 && found.mpps_undisturbed >= found.mpps, "{found:?}");
        let mut clock = TrialClock::new(Duration::from_millis(2), ALLOWANCE, false);
        let verdict = try_rate(&mut router, &[64], &destinations, 1e12, &mut clock).expect("all are forwarded");
        assert_eq!(verdict, Verdict::Lost, "a million packets a microsecond are more than a core takes");
    }
}
