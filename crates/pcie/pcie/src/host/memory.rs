//! Main memory: latency, rate, and the refresh that blocks it every few microseconds. Refresh causes the tail of reads
//! that miss the cache: on both systems the published tails end at one refresh above the median.

use sim::{Random, Span, Time};

use super::parameters::MemoryParameters;

/// The memory of one socket.
#[derive(Clone, Debug)]
pub struct Memory {
    latency: Span,
    line: Span,
    refresh_interval_ps: u64,
    refresh_ps: u64,
    phase_ps: u64,
    free_at: Time,
}

impl Memory {
    /// Returns idle memory whose refresh has a random phase.
    pub fn new(parameters: &MemoryParameters, hop_ns: f64, mut random: Random) -> Self {
        let refresh_interval_ps = Span::from_ns(parameters.refresh_interval_ns).ps().max(1);
        Self {
            latency: Span::from_ns(parameters.latency_ns + hop_ns),
            line: Span::from_ns(parameters.line_ns),
            refresh_interval_ps,
            refresh_ps: Span::from_ns(parameters.refresh_ns).ps(),
            phase_ps: random.below(refresh_interval_ps),
            free_at: Time::ZERO,
        }
    }

    /// Returns how long an access that begins at `at` waits for a refresh to end.
    pub fn refresh_wait(&self, at: Time) -> Span {
        let since_begin_ps = (at.ps() + self.phase_ps) % self.refresh_interval_ps;
        Span::from_ps(self.refresh_ps.saturating_sub(since_begin_ps))
    }

    /// Returns the time from `at` until the first of `lines` is available; the others follow at the rate of memory.
    pub fn access(&mut self, at: Time, lines: u32) -> Span {
        let begun = at.max(self.free_at);
        self.free_at = begun + self.line * u64::from(lines);
        begun.since(at) + self.refresh_wait(begun) + self.latency
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(line_ns: f64) -> Memory {
        let parameters = MemoryParameters { latency_ns: 80.0, line_ns, refresh_interval_ns: 7800.0, refresh_ns: 260.0 };
        Memory::new(&parameters, 0.0, Random::new(1, "memory"))
    }

    #[test]
    fn one_access_in_thirty_waits_for_refresh() {
        let memory = memory(0.0);
        let waits: Vec<f64> = (0..7800).map(|ns| memory.refresh_wait(Time::from_ps(ns * 1000)).ns()).collect();
        assert_eq!(waits.iter().filter(|wait| **wait > 0.0).count(), 260);
        assert!((waits.iter().sum::<f64>() / 7800.0 - 260.0 * 260.0 / 2.0 / 7800.0).abs() < 0.1);
    }

    #[test]
    fn lines_follow_at_the_rate_of_memory() {
        let mut memory = memory(10.0);
        let quiet = Time::from_ps(memory.refresh_interval_ps + 300_000 - memory.phase_ps);
        assert!((memory.access(quiet, 2).ns() - 80.0).abs() < 1e-9);
        assert!((memory.access(quiet, 1).ns() - 100.0).abs() < 1e-9, "after two lines of 10 ns");
    }
}
