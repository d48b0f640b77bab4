//! The clock of a trial, on a machine that takes the processor away now and then.
//!
//! Who works off packets looks at the clock in every turn, and so sees when it could not: an interrupt, another
//! process, a hypervisor that gave the processor to somebody else. What counts as such a *stall* is a turn that took
//! several times what its packets take, so that nobody can pass off its own slowness as the machine's.

use std::time::{Duration, Instant};

/// What a turn takes at most without packets, and for each: several times what it takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Allowance {
    /// Without packets, in ns.
    pub turn_ns: u64,
    /// More for each packet, in ns.
    pub packet_ns: u64,
}

impl Allowance {
    /// What of a turn was a stall, in ns.
    pub fn stall_ns(self, turn_ns: u64, packets: u64) -> u64 {
        turn_ns.saturating_sub(self.turn_ns + packets * self.packet_ns)
    }
}

/// A trial that the machine has stretched to so many times its length, and this much more, is given up.
const WALL_TIMES_MAX: u64 = 8;
const WALL_NS_MORE: u64 = 2_000_000_000;

/// How far a trial is.
pub struct TrialClock {
    begin: Instant,
    trial_ns: u64,
    allowance: Allowance,
    /// Whether time that the machine took is time all the same.
    counts_stalls: bool,
    looked_ns: u64,
    stalled_ns: u64,
    stall_ns_max: u64,
}

impl TrialClock {
    /// A trial begins that is as long.
    pub fn new(trial: Duration, allowance: Allowance, counts_stalls: bool) -> TrialClock {
        let trial_ns = trial.as_nanos() as u64;
        let begin = Instant::now();
        TrialClock { begin, trial_ns, allowance, counts_stalls, looked_ns: 0, stalled_ns: 0, stall_ns_max: 0 }
    }

    /// What of the trial has passed, in ns, when the turn that ends now had so many packets; `None` if it never ends.
    pub fn look(&mut self, packets: u64) -> Option<u64> {
        self.look_at(self.begin.elapsed().as_nanos() as u64, packets)
    }

    fn look_at(&mut self, now_ns: u64, packets: u64) -> Option<u64> {
        let stall_ns = self.allowance.stall_ns(now_ns - self.looked_ns, packets);
        self.looked_ns = now_ns;
        self.stalled_ns += stall_ns;
        self.stall_ns_max = self.stall_ns_max.max(stall_ns);
        let passed_ns = if self.counts_stalls { now_ns } else { now_ns - self.stalled_ns };
        (now_ns <= WALL_TIMES_MAX * self.trial_ns + WALL_NS_MORE).then_some(passed_ns.min(self.trial_ns))
    }

    /// Whether all of the trial has passed, at a time that [`TrialClock::look`] said.
    pub fn is_over(&self, passed_ns: u64) -> bool {
        passed_ns == self.trial_ns
    }

    /// All stalls together, and the longest, in ns.
    pub fn stalled_ns(&self) -> (u64, u64) {
        (self.stalled_ns, self.stall_ns_max)
    }

    /// The time from the beginning to the last look, in ns.
    pub fn wall_ns(&self) -> u64 {
        self.looked_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_of_a_trial_stands_still_while_the_machine_does_something_else() {
        let (trial, allowance) = (Duration::from_millis(1), Allowance { turn_ns: 2_000, packet_ns: 250 });
        let [mut quiet, mut raw] = [false, true].map(|counts| TrialClock::new(trial, allowance, counts));
        let mut both = |now_ns, packets| [quiet.look_at(now_ns, packets), raw.look_at(now_ns, packets)];
        assert_eq!(both(1_500, 0), [Some(1_500), Some(1_500)]);
        assert_eq!(both(60_000, 256), [Some(60_000), Some(60_000)], "256 packets may take this long");
        // 102 us without a packet: all but the 2 that a turn may take.
        assert_eq!(both(162_000, 0), [Some(62_000), Some(162_000)]);
        assert_eq!(both(1_200_000, 0), [Some(64_000), Some(1_000_000)], "a trial has an end");
        assert_eq!(both(2_008_000_001, 0), [None; 2], "however much the machine takes");
        assert_eq!(raw.wall_ns(), 2_008_000_001);
        let (stalled_ns, stall_ns_max) = quiet.stalled_ns();
        assert_eq!((stalled_ns, stall_ns_max), (100_000 + 1_036_000 + 2_006_798_001, 2_006_798_001));
        assert!(raw.is_over(1_000_000) && !raw.is_over(999_999));
    }
}
