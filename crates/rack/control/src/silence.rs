//! How long a peer has been silent, as far as this process can tell.

/// Checks within the limit. More would wake idle processes more often, fewer would make the count coarser.
const CHECKS: u64 = 4;

/// Measures the silence of a peer. It counts only time in which the process that judges ran: while its machine, its
/// container or the process itself is paused, a live peer cannot be heard, and often does not run either.
///
/// Times are in nanoseconds of a clock that may go on during a pause.
#[derive(Clone, Debug)]
pub struct SilenceTimer {
    limit_ns: u64,
    silent_ns: u64,
    checked_at_ns: u64,
}

impl SilenceTimer {
    /// Returns the timer of a peer that was heard at `now_ns` and may be silent for `limit_ns`.
    pub fn new(limit_ns: u64, now_ns: u64) -> Self {
        Self { limit_ns: limit_ns.max(1), silent_ns: 0, checked_at_ns: now_ns }
    }

    /// Notes that the peer was heard.
    pub fn heard(&mut self, now_ns: u64) {
        (self.silent_ns, self.checked_at_ns) = (0, self.checked_at_ns.max(now_ns));
    }

    /// Returns how long the peer has been silent, if that has reached the limit.
    ///
    /// The time since the last check counts at most as long as the wait for [`Self::due_ns`]: whatever is longer, this
    /// process did not run.
    pub fn expired(&mut self, now_ns: u64) -> Option<u64> {
        let since_ns = now_ns.saturating_sub(self.checked_at_ns);
        self.silent_ns += since_ns.min(self.step_ns());
        self.checked_at_ns = self.checked_at_ns.max(now_ns);
        (self.silent_ns >= self.limit_ns).then_some(self.silent_ns)
    }

    /// Returns when the peer has to be checked next.
    pub fn due_ns(&self) -> u64 {
        self.checked_at_ns.saturating_add(self.step_ns())
    }

    /// Returns the longest time until the next check.
    fn step_ns(&self) -> u64 {
        let step_ns = self.limit_ns.div_ceil(CHECKS);
        match self.limit_ns.saturating_sub(self.silent_ns) {
            0 => step_ns,
            left_ns => step_ns.min(left_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_expires_at_the_limit_if_the_judge_runs() {
        let mut timer = SilenceTimer::new(80, 1000);
        let mut checks = 0;
        while timer.expired(timer.due_ns()).is_none() {
            checks += 1;
            assert!(timer.due_ns() <= 1080);
        }
        assert_eq!((checks, timer.expired(1080)), (3, Some(80)));
        assert_eq!(timer.due_ns(), 1100, "whoever keeps the peer all the same is not woken continuously");
        timer.heard(1085);
        assert_eq!((timer.expired(1100), timer.due_ns()), (None, 1120));
    }

    #[test]
    fn frequent_checks_do_not_change_the_limit() {
        let mut timer = SilenceTimer::new(80, 0);
        assert!((0..80).all(|now_ns| timer.expired(now_ns).is_none()));
        assert_eq!(timer.expired(80), Some(80));
    }

    #[test]
    fn a_pause_of_the_judge_counts_as_one_step() {
        let mut timer = SilenceTimer::new(80, 0);
        assert_eq!(timer.expired(2_000_000), None);
        assert_eq!(timer.expired(4_000_000), None, "nor does a second one");
        assert_eq!((timer.expired(4_000_020), timer.expired(4_000_040)), (None, Some(80)));
    }

    #[test]
    fn a_clock_that_does_not_advance_expires_nothing() {
        let mut timer = SilenceTimer::new(80, 100);
        assert!((0..1000).all(|_| timer.expired(50).is_none()));
        assert_eq!(SilenceTimer::new(0, 0).expired(1), Some(1));
    }
}
