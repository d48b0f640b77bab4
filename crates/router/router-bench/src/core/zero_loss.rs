//! The highest rate at which no packet is lost (RFC 2544, section 26.1).
//!
//! Packets come evenly, by the clock; those that find the card's ring full are lost. So a pause of the machine's own
//! longer than the ring lasts ends a trial, as it would at a wire: that is the raw rate. For the undisturbed one, the
//! clock stands still while the machine has taken the core away ([`crate::clock`]): no packet comes then, and the core
//! has nothing to make up for.

use std::time::{Duration, Instant};

use ::router::Port as _;
use ::router::VECTOR_PACKETS_MAX;
use ::router::port::memory::Destinations;
use serde::Serialize;

use super::{Error, Router, WIRE_BYTES, name_of, version_of};
use crate::clock::{Allowance, TrialClock};
use crate::search::{Found, Length, Rules, Verdict, highest};

/// Frames that a network card keeps for a core, at most.
const RING_FRAMES: u64 = 4096;

/// The search ends when it knows the rate to this part.
const PRECISION: f64 = 0.01;

/// What a turn takes at most: several times what it takes.
const ALLOWANCE: Allowance = Allowance { turn_ns: 2_000, packet_ns: 250 };

/// Rates at which nothing was lost. *Measured.*
#[derive(Clone, Debug, Serialize)]
pub struct ZeroLoss {
    /// 4 or 6.
    pub version: u8,
    /// Bytes of a frame, or `IMIX`.
    pub size: String,
    /// Millions of packets a second, raw: whatever the machine did meanwhile counts.
    pub mpps: f64,
    /// Of an Ethernet wire at that rate, with preambles and gaps.
    pub wire_gbit_per_s: f64,
    /// Millions of packets a second, without the time in which the machine had taken the core away.
    pub mpps_undisturbed: f64,
    /// The share of the trials that was such time.
    pub stalled_share: f64,
    /// The longest such time in one piece, in us.
    pub stall_us_max: f64,
    /// How long the trial was that held what shorter ones had found, in ms.
    pub trial_ms: u64,
}

/// How long trials are, in ms.
#[derive(Clone, Copy, Debug)]
pub struct Trials {
    /// Those that search.
    pub short_ms: u64,
    /// Those that hold what was found.
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

/// Where a search begins without a search before it, as a share of what a core forwards when there is always a packet.
pub(super) const FIRST_SHARE: f64 = 0.85;

/// Searches, first at this share of what the core forwards when there is always a packet: the share that another search
/// found, if there was one. Says the share that it found too.
///
/// # Errors
/// A packet was taken in and not forwarded.
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
    let mut search = |rules: Rules, first: f64, ceiling: f64, counts_stalls: bool| -> Result<Found, Error> {
        highest(rules, first, ceiling, |packets_per_s, length| {
            let trial = trials.duration(length);
            let mut clock = TrialClock::new(trial, ALLOWANCE, counts_stalls);
            let verdict = try_rate(router, sizes, destinations, packets_per_s, &mut clock)?;
            stalls.add(&clock);
            Ok(verdict)
        })
    };
    let undisturbed = search(Rules::undisturbed(PRECISION), saturated * first_share, ceiling, false)?;
    // Where the machine is quiet, that is the raw rate too, and two trials say so.
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

/// Packets a second when there is always one.
fn saturated(router: &mut Router, sizes: &[usize], destinations: &Destinations, trial: Duration) -> Result<f64, Error> {
    const PACKETS: usize = 1 << 13;
    let mut traffic = router.traffic(sizes, destinations.clone());
    // The best of some pieces: one that the machine disturbed would be no ceiling.
    let (begin, mut ns_min) = (Instant::now(), u128::MAX);
    while begin.elapsed() < trial || ns_min == u128::MAX {
        let piece = Instant::now();
        traffic.forward(PACKETS, &mut ())?;
        ns_min = ns_min.min(piece.elapsed().as_nanos().max(1));
    }
    Ok(PACKETS as f64 * 1e9 / ns_min as f64)
}

/// What the machine took of trials.
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

/// Offers packets at this rate until the trial is over or one is lost.
fn try_rate(
    router: &mut Router,
    sizes: &[usize],
    destinations: &Destinations,
    packets_per_s: f64,
    clock: &mut TrialClock,
) -> Result<Verdict, Error> {
    let mut traffic = router.traffic(sizes, destinations.clone()).with_ring(RING_FRAMES);
    let (mut offered, mut taken, mut count) = (0, 0, 0);
    let is_lost = loop {
        let Some(passed_ns) = clock.look(count) else { return Ok(Verdict::Disturbed) };
        let due = (passed_ns as f64 * 1e-9 * packets_per_s) as u64;
        traffic.generator.offer(due - offered);
        offered = due;
        count = traffic.turn(VECTOR_PACKETS_MAX, &mut ()) as u64;
        taken += count;
        let is_lost = traffic.generator.losses().receive_overflows > 0;
        if is_lost || clock.is_over(passed_ns) && count == 0 {
            break is_lost;
        }
    };
    let (packets_in, packets_out) = (taken, traffic.generator.transmitted().packets);
    if packets_in != packets_out {
        return Err(Error::Lost { packets_in, packets_out, drops: "at a rate".to_owned() });
    }
    Ok(if is_lost { Verdict::Lost } else { Verdict::Carried })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_search_ends_and_what_overflows_the_ring_is_lost() {
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
