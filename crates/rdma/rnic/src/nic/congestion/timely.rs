//! TIMELY (SIGCOMM 2015): a rate that follows the gradient of the round-trip time, updated by each measured round trip.
//!
//! Below `rtt_low` the rate grows; above `rtt_high` it shrinks by `beta` times the excess; between them it grows if the
//! smoothed gradient is not positive, else it shrinks by `beta` times the gradient. After five increases in a row the
//! larger step applies.

use sim::Span;

use super::{AckSample, time_at};

/// Number of increases in a row before the larger step applies.
const INCREASES_BEFORE_HYPER: u8 = 5;

/// Constants of TIMELY.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timely {
    /// The rate of the port in bits per second, which is the initial and the maximum rate.
    pub line_bps: u64,
    /// The minimum rate in bits per second.
    pub least_bps: u64,
    /// The weight of the newest difference of round-trip times (the paper's alpha).
    pub gain: f32,
    /// The factor of decreases (beta).
    pub beta: f32,
    /// Below this round-trip time the rate grows.
    pub rtt_low: Span,
    /// Above this round-trip time the rate shrinks.
    pub rtt_high: Span,
    /// The round-trip time that differences are divided by.
    pub rtt_min: Span,
    /// The step of an increase in bits per second.
    pub step_bps: u64,
    /// The step after five increases in a row.
    pub hyper_step_bps: u64,
}

impl Timely {
    /// *Published*: the constants of HPCC's simulator (9f4be2a, run.py and rdma-hw.cc), which scale the steps with the
    /// rate. At 10 Gb/s, the rate of the paper, the steps are 10 and 50 Mb/s.
    pub fn scaled(line_bps: u64, rate_bps: u64) -> Self {
        Self {
            line_bps,
            least_bps: 100_000_000,
            gain: 0.875,
            beta: 0.8,
            rtt_low: Span::from_ns(50_000.0),
            rtt_high: Span::from_ns(500_000.0),
            rtt_min: Span::from_ns(20_000.0),
            step_bps: rate_bps / 1000,
            hyper_step_bps: rate_bps / 200,
        }
    }
}

/// The state of TIMELY.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) struct TimelyRate {
    bps: f32,
    /// The smoothed difference of consecutive round-trip times in nanoseconds.
    difference_ns: f32,
    /// The last round-trip time, or 0 before the first.
    rtt_ns: f32,
    increases: u8,
}

impl TimelyRate {
    pub fn new(constants: &Timely) -> Self {
        Self { bps: constants.line_bps as f32, difference_ns: 0.0, rtt_ns: 0.0, increases: 0 }
    }

    /// Returns the rate in bits per second.
    pub fn bps(&self) -> f64 {
        self.bps.into()
    }

    pub fn pause(&self, bytes: u32) -> Span {
        time_at(bytes, self.bps)
    }

    pub fn on_ack(&mut self, ack: &AckSample, constants: &Timely) {
        let Some(rtt) = ack.rtt else { return };
        let ns = rtt.ns() as f32;
        let is_first = self.rtt_ns == 0.0;
        let difference_ns = ns - self.rtt_ns;
        self.rtt_ns = ns;
        if is_first {
            return;
        }
        self.difference_ns += constants.gain * (difference_ns - self.difference_ns);
        let gradient = self.difference_ns / constants.rtt_min.ns() as f32;
        if rtt < constants.rtt_low || rtt <= constants.rtt_high && gradient <= 0.0 {
            let is_hyper = self.increases >= INCREASES_BEFORE_HYPER;
            let step_bps = if is_hyper { constants.hyper_step_bps } else { constants.step_bps };
            self.bps = (self.bps + step_bps as f32).min(constants.line_bps as f32);
            self.increases = self.increases.saturating_add(1);
            return;
        }
        let excess = if rtt > constants.rtt_high { 1.0 - constants.rtt_high.ns() as f32 / ns } else { gradient };
        let part = (1.0 - constants.beta * excess).max(0.0);
        self.bps = (self.bps * part).max(constants.least_bps as f32);
        self.increases = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::super::ack;
    use super::*;

    const LINE_BPS: u64 = 100_000_000_000;

    fn gbps_after(rtts_us: &[f64]) -> f64 {
        let constants = Timely::scaled(LINE_BPS, LINE_BPS);
        let mut rate = TimelyRate::new(&constants);
        for (to, us) in (1..).zip(rtts_us) {
            rate.on_ack(&ack(to, 1, 0, Some(Span::from_ns(us * 1e3))), &constants);
        }
        f64::from(rate.bps) / 1e9
    }

    /// A model that shares no code: the paper's algorithm 1 in plain numbers.
    fn model(rtts_us: &[f64]) -> f64 {
        let (mut gbps, mut smoothed, mut increases) = (100.0_f64, 0.0, 0);
        for pair in rtts_us.windows(2) {
            smoothed = 0.125 * smoothed + 0.875 * (pair[1] - pair[0]);
            let gradient = smoothed / 20.0;
            let grows = pair[1] < 50.0 || pair[1] <= 500.0 && gradient <= 0.0;
            gbps = if grows {
                increases += 1;
                gbps + if increases > 5 { 0.5 } else { 0.1 }
            } else {
                increases = 0;
                let excess = if pair[1] > 500.0 { 1.0 - 500.0 / pair[1] } else { gradient };
                gbps * f64::max(1.0 - 0.8 * excess, 0.0)
            };
            gbps = gbps.clamp(0.1, 100.0);
        }
        gbps
    }

    #[test]
    fn the_first_round_trip_changes_nothing_and_a_rising_one_cuts_by_beta_times_the_gradient() {
        assert!((gbps_after(&[60.0]) - 100.0).abs() < 1e-4);
        // (80 - 60) us x 0.875 / 20 us = 0.875.
        assert!((gbps_after(&[60.0, 80.0]) - 100.0 * (1.0 - 0.8 * 0.875)).abs() < 1e-4);
        // Above the high threshold the gradient does not matter.
        assert!((gbps_after(&[2000.0, 1000.0]) - 100.0 * (1.0 - 0.8 * 0.5)).abs() < 1e-4);
    }

    #[test]
    fn five_small_steps_then_large_ones() {
        let mut rtts = vec![60.0, 80.0];
        rtts.extend([40.0; 8]);
        // 30 Gb/s, then 5 x 100 Mb/s, then 3 x 500 Mb/s.
        assert!((gbps_after(&rtts) - (30.0 + 0.5 + 1.5)).abs() < 1e-3, "{}", gbps_after(&rtts));
    }

    #[test]
    fn random_round_trips_give_the_rates_of_a_separate_model() {
        let mut random = sim::Random::new(1, "timely");
        for _ in 0..200 {
            let rtts: Vec<f64> = (0..40).map(|_| 10.0 + random.unit() * random.unit() * 900.0).collect();
            let (found, expected) = (gbps_after(&rtts), model(&rtts));
            assert!((found - expected).abs() < 1e-3 * expected.max(0.1), "{found} {expected} {rtts:?}");
        }
    }
}
