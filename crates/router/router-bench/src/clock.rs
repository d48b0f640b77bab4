//! The clock of a trial, on a machine that at times takes the processor away.
//!
//! A loop that processes packets reads the clock in every iteration, so it notices when it could not run: an interrupt,
//! another process, or a hypervisor that gave the processor to another guest. An iteration counts as a *stall* only if
//! it took several times what its packets take, so that a slow program cannot pass for a disturbed machine.

use std::time::{Duration, Instant};

/// The longest time that an iteration may take before it counts as a stall: several times the expected time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Allowance {
    /// The part that does not depend on packets, in ns.
    pub iteration_ns: u64,
    /// The additional time for each packet, in ns.
    pub packet_ns: u64,
}

impl Allowance {
    /// Returns the part of an iteration that was a stall, in ns.
    pub fn stall_ns(self, iteration_ns: u64, packets: u64) -> u64 {
        iteration_ns.saturating_sub(self.iteration_ns + packets * self.packet_ns)
    }
}

/// A trial whose wall-clock time exceeds its length by this factor, plus `WALL_NS_MORE`, is abandoned.
const WALL_TIMES_MAX: u64 = 8;
const WALL_NS_MORE: u64 = 2_000_000_000;

/// The progress of a trial.
pub struct TrialClock {
    begin: Instant,
    trial_ns: u64,
    allowance: Allowance,
    /// Whether stalls count as time of the trial.
    counts_stalls: bool,
    polled_ns: u64,
    stalled_ns: u64,
    stall_ns_max: u64,
}

impl TrialClock {
    /// Begins a trial of this length.
    pub fn new(trial: Duration, allowance: Allowance, counts_stalls: bool) -> TrialClock {
        let trial_ns = trial.as_nanos() as u64;
        let begin = Instant::now();
        TrialClock { begin, trial_ns, allowance, counts_stalls, polled_ns: 0, stalled_ns: 0, stall_ns_max: 0 }
    }

    /// Records an iteration that ends now and processed `packets` packets, and returns how much of the trial has
    /// passed, in ns. Returns `None` if the machine has stretched the trial so much that it is abandoned.
    pub fn advance(&mut self, packets: u64) -> Option<u64> {
        self.advance_to(self.begin.elapsed().as_nanos() as u64, packets)
    }

    fn advance_to(&mut self, now_ns: u64, packets: u64) -> Option<u64> {
        let stall_ns = self.allowance.stall_ns(now_ns - self.polled_ns, packets);
        self.polled_ns = now_ns;
        self.stalled_ns += stall_ns;
        self.stall_ns_max = self.stall_ns_max.max(stall_ns);
        let passed_ns = if self.counts_stalls { now_ns } else { now_ns - self.stalled_ns };
        (now_ns <= WALL_TIMES_MAX * self.trial_ns + WALL_NS_MORE).then_some(passed_ns.min(self.trial_ns))
    }

    /// Returns whether the trial is over at a time that [`TrialClock::advance`] returned.
    pub fn is_over(&self, passed_ns: u64) -> bool {
        passed_ns == self.trial_ns
    }

    /// Returns the sum of all stalls and the longest stall, in ns.
    pub fn stalled_ns(&self) -> (u64, u64) {
        (self.stalled_ns, self.stall_ns_max)
    }

    /// Returns the wall-clock time from the beginning to the last [`TrialClock::advance`], in ns.
    pub fn wall_ns(&self) -> u64 {
        self.polled_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_of_a_trial_stops_while_the_machine_runs_something_else() {
        let (trial, allowance) = (Duration::from_millis(1), Allowance { iteration_ns: 2_000, packet_ns: 250 });
        let [mut quiet, mut raw] = [false, true].map(|counts| TrialClock::new(trial, allowance, counts));
        let mut both = |now_ns, packets| [quiet.advance_to(now_ns, packets), raw.advance_to(now_ns, packets)];
        assert_eq!(both(1_500, 0), [Some(1_500), Some(1_500)]);
        assert_eq!(both(60_000, 256), [Some(60_000), Some(60_000)], "256 packets may take this long");
        // 102 us without a packet: all but the 2 us that an iteration may take are a stall.
        assert_eq!(both(162_000, 0), [Some(62_000), Some(162_000)]);
        assert_eq!(both(1_200_000, 0), [Some(64_000), Some(1_000_000)], "a trial has an end");
        assert_eq!(both(2_008_000_001, 0), [None; 2], "however much the machine takes");
        assert_eq!(raw.wall_ns(), 2_008_000_001);
        let (stalled_ns, stall_ns_max) = quiet.stalled_ns();
        assert_eq!((stalled_ns, stall_ns_max), (100_000 + 1_036_000 + 2_006_798_001, 2_006_798_001));
        assert!(raw.is_over(1_000_000) && !raw.is_over(999_999));
    }
}
