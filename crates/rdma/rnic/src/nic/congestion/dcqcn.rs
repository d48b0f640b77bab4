//! DCQCN ("Congestion Control for Large-Scale RDMA Deployments", SIGCOMM 2015): a rate that follows congestion
//! notification packets (CNPs) of the receiver.
//!
//! Two machines share these constants. With `decrease_ns`, timers run as in ConnectX NICs and in HPCC's simulator: they
//! start at the first CNP; each `alpha_ns` updates alpha by whether a CNP arrived in it; each `decrease_ns` in which
//! one arrived cuts the rate. Without, as in the paper, each CNP cuts the rate and updates alpha at once, and alpha
//! decays in each `alpha_ns` without a CNP. In both, each `increase_ns` without a cut, and each `byte_counter` bytes
//! sent, raise the rate: halfway to the target for the first `recoveries` times, then with the target raised by
//! `step_bps`, then by `hyper_step_bps`.

use sim::{Span, Time};

use super::time_at;

/// Number of picoseconds in a nanosecond.
const PS_PER_NS: u64 = 1000;
/// Maximum number of increases that are applied at once after a time without packets; enough to reach any rate.
const CATCH_UP_MAX: u64 = 1000;

/// Constants of DCQCN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dcqcn {
    /// The rate of the port in bits per second, which is the initial rate of every queue pair.
    pub line_bps: u64,
    /// The minimum rate in bits per second.
    pub least_bps: u64,
    /// The step of an additive increase in bits per second.
    pub step_bps: u64,
    /// The step of a hyper increase in bits per second.
    pub hyper_step_bps: u64,
    /// The weight of a CNP in alpha (g).
    pub gain: f32,
    /// The period of alpha's timer in nanoseconds.
    pub alpha_ns: u32,
    /// The period in which the rate is cut at most once, in nanoseconds; 0 cuts it at each CNP.
    pub decrease_ns: u32,
    /// The period of the increase timer in nanoseconds.
    pub increase_ns: u32,
    /// Bytes between two increases of the byte counter; 0 for no byte counter.
    pub byte_counter: u32,
    /// Number of increases to the target before the target itself is raised (F).
    pub recoveries: u8,
    /// Whether each cut sets the target to the rate before it. Otherwise only the first cut after an increase does.
    pub clamps_target: bool,
    /// Minimum time between two CNPs that a receiver sends for a queue pair.
    pub cnp_period: Span,
}

impl Dcqcn {
    /// *Published*: the constants of the paper, for ports of 40 Gb/s. The paper gives no hyper step; 200 Mb/s are those
    /// of its authors' simulator (ns3-rdma e8a27d0).
    pub fn published(line_bps: u64) -> Self {
        Self {
            line_bps,
            least_bps: 100_000_000,
            step_bps: 40_000_000,
            hyper_step_bps: 200_000_000,
            gain: 1.0 / 256.0,
            alpha_ns: 55_000,
            decrease_ns: 0,
            increase_ns: 55_000,
            byte_counter: 10_000_000,
            recoveries: 5,
            clamps_target: true,
            cnp_period: Span::from_ns(50_000.0),
        }
    }

    /// *Published*: the constants of HPCC's simulator (9f4be2a, run.py), which are those of ConnectX NICs, with steps
    /// of 5 and 50 Mb/s for each 25 Gb/s of `rate_bps`. There each marked packet's acknowledgement carries the
    /// notification, so `cnp_period` is 0.
    pub fn scaled(line_bps: u64, rate_bps: u64) -> Self {
        Self {
            line_bps,
            least_bps: 100_000_000,
            step_bps: rate_bps / 5000,
            hyper_step_bps: rate_bps / 500,
            gain: 1.0 / 256.0,
            alpha_ns: 1000,
            decrease_ns: 4000,
            increase_ns: 300_000,
            byte_counter: 0,
            recoveries: 1,
            clamps_target: false,
            cnp_period: Span::ZERO,
        }
    }
}

/// The CNPs that a timer has not processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PendingCnp {
    /// No CNP ever arrived, and no timer runs.
    BeforeFirst,
    None,
    ForAlpha,
    ForDecrease,
    ForBoth,
}

impl PendingCnp {
    fn is_for_alpha(self) -> bool {
        matches!(self, Self::ForAlpha | Self::ForBoth)
    }

    fn is_for_decrease(self) -> bool {
        matches!(self, Self::ForDecrease | Self::ForBoth)
    }

    fn without_alpha(self) -> Self {
        if self.is_for_decrease() { Self::ForDecrease } else { Self::None }
    }

    fn without_decrease(self) -> Self {
        if self.is_for_alpha() { Self::ForAlpha } else { Self::None }
    }
}

/// The state of DCQCN's reaction point. Its size is that of the context's other variable parts, so timers are kept as
/// the nanoseconds that are left from `since` on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) struct DcqcnRate {
    since: Time,
    bps: f32,
    target_bps: f32,
    alpha: f32,
    alpha_in_ns: u32,
    decrease_in_ns: u32,
    increase_in_ns: u32,
    bytes: u32,
    timer_stage: u8,
    byte_stage: u8,
    pending: PendingCnp,
}

/// Runs a periodic timer for `ns`: returns how many times it expired, and when it expires next.
fn expirations(left_ns: u32, ns: u64, period_ns: u32) -> (u64, u32) {
    let Some(after_first) = ns.checked_sub(u64::from(left_ns)) else {
        return (0, left_ns - ns as u32);
    };
    let period_ns = u64::from(period_ns.max(1));
    (1 + after_first / period_ns, (period_ns - after_first % period_ns) as u32)
}

impl DcqcnRate {
    pub fn new(constants: &Dcqcn) -> Self {
        Self {
            since: Time::ZERO,
            bps: constants.line_bps as f32,
            target_bps: constants.line_bps as f32,
            alpha: 1.0,
            alpha_in_ns: 0,
            decrease_in_ns: 0,
            increase_in_ns: 0,
            bytes: 0,
            timer_stage: 0,
            byte_stage: 0,
            pending: PendingCnp::BeforeFirst,
        }
    }

    pub fn pause(&self, bytes: u32) -> Span {
        time_at(bytes, self.bps)
    }

    /// Returns the rate in bits per second.
    pub fn bps_at(&mut self, now: Time, constants: &Dcqcn) -> f64 {
        self.advance(now, constants);
        self.bps.into()
    }

    pub fn on_cnp(&mut self, now: Time, constants: &Dcqcn) {
        self.advance(now, constants);
        if self.pending == PendingCnp::BeforeFirst {
            (self.since, self.pending) = (now, PendingCnp::None);
            (self.alpha_in_ns, self.decrease_in_ns) = (constants.alpha_ns, constants.decrease_ns);
            self.increase_in_ns = constants.decrease_ns.saturating_add(constants.increase_ns);
            self.pending = PendingCnp::ForDecrease;
        } else {
            self.pending = PendingCnp::ForBoth;
        }
        if constants.decrease_ns == 0 {
            self.decrease(constants);
            self.alpha += constants.gain * (1.0 - self.alpha);
            (self.alpha_in_ns, self.pending) = (constants.alpha_ns, PendingCnp::None);
        }
    }

    pub fn on_sent(&mut self, now: Time, bytes: u32, constants: &Dcqcn) {
        self.advance(now, constants);
        if constants.byte_counter == 0 || self.pending == PendingCnp::BeforeFirst {
            return;
        }
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes >= constants.byte_counter {
            self.bytes = 0;
            self.increase(constants);
            self.byte_stage = self.byte_stage.saturating_add(1);
        }
    }

    /// Applies the expirations of timers up to `now`.
    fn advance(&mut self, now: Time, constants: &Dcqcn) {
        if self.pending == PendingCnp::BeforeFirst {
            return;
        }
        let mut ns = now.since(self.since).ps() / PS_PER_NS;
        let decrease_in_ns = u64::from(self.decrease_in_ns);
        if self.pending.is_for_decrease() && decrease_in_ns <= ns {
            self.run_timers(decrease_in_ns, constants);
            self.decrease(constants);
            ns -= decrease_in_ns;
        }
        self.run_timers(ns, constants);
    }

    /// Runs the timers for `ns`, in which no decrease is due.
    fn run_timers(&mut self, ns: u64, constants: &Dcqcn) {
        self.since += Span::from_ps(ns * PS_PER_NS);
        let (mut updates, alpha_in_ns) = expirations(self.alpha_in_ns, ns, constants.alpha_ns);
        self.alpha_in_ns = alpha_in_ns;
        if updates > 0 && self.pending.is_for_alpha() {
            self.alpha += constants.gain * (1.0 - self.alpha);
            self.pending = self.pending.without_alpha();
            updates -= 1;
        }
        if updates > 0 {
            self.alpha *= (1.0 - constants.gain).powi(i32::try_from(updates).unwrap_or(i32::MAX));
        }
        if constants.decrease_ns > 0 {
            (_, self.decrease_in_ns) = expirations(self.decrease_in_ns, ns, constants.decrease_ns);
        }
        let (increases, increase_in_ns) = expirations(self.increase_in_ns, ns, constants.increase_ns);
        self.increase_in_ns = increase_in_ns;
        for _ in 0..increases.min(CATCH_UP_MAX) {
            self.increase(constants);
            self.timer_stage = self.timer_stage.saturating_add(1);
        }
    }

    fn decrease(&mut self, constants: &Dcqcn) {
        if constants.clamps_target || self.timer_stage > 0 || self.byte_stage > 0 {
            self.target_bps = self.bps;
        }
        self.bps = (self.bps * (1.0 - self.alpha / 2.0)).max(constants.least_bps as f32);
        (self.timer_stage, self.byte_stage, self.bytes) = (0, 0, 0);
        self.increase_in_ns = constants.increase_ns;
        self.pending = self.pending.without_decrease();
    }

    fn increase(&mut self, constants: &Dcqcn) {
        // Without a byte counter, the timer decides alone.
        let byte_stage = if constants.byte_counter == 0 { self.timer_stage } else { self.byte_stage };
        let (least, most) = (self.timer_stage.min(byte_stage), self.timer_stage.max(byte_stage));
        if least > constants.recoveries {
            self.target_bps += constants.hyper_step_bps as f32;
        } else if most >= constants.recoveries {
            self.target_bps += constants.step_bps as f32;
        }
        self.target_bps = self.target_bps.min(constants.line_bps as f32);
        self.bps = f32::midpoint(self.bps, self.target_bps);
    }
}

#[cfg(test)]
mod tests;
