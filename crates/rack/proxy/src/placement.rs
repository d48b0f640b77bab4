//! Classifies connections as latency or bulk by their traffic.

/// The classes of partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Short messages, which must not be delayed by others.
    Latency = 0,
    /// Streams.
    Bulk = 1,
}

impl Class {
    /// Both classes, in the order of their partitions.
    pub const ALL: [Self; 2] = [Self::Latency, Self::Bulk];

    /// Converts a number that a peer wrote.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(number as usize).copied()
    }
}

/// The thresholds of the bulk class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Bytes sent without running out of input.
    pub burst_bytes: u64,
    /// Bytes sent in an interval.
    pub interval_bytes: u64,
    /// Minimum length of an interval.
    pub interval_ns: u64,
    /// Consecutive intervals with less than a quarter of both thresholds, after which a connection is latency again.
    pub calm_intervals: u32,
}

impl Default for Placement {
    /// 128 KiB at once, or 256 MB/s; a stream that has been quiet for eight milliseconds is latency again.
    fn default() -> Self {
        Self { burst_bytes: 128 << 10, interval_bytes: 256 << 10, interval_ns: 1_000_000, calm_intervals: 8 }
    }
}

/// What a connection has recently sent in one direction.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TrafficHistory {
    interval_ns_start: u64,
    interval_bytes: u64,
    burst_bytes: u64,
    burst_bytes_max: u64,
    calm_intervals: u32,
}

impl TrafficHistory {
    pub(crate) fn new(now_ns: u64) -> Self {
        Self { interval_ns_start: now_ns, ..Self::default() }
    }

    /// Records that the connection ran out of input: the next bytes are another burst.
    pub(crate) fn note_dry(&mut self) {
        self.burst_bytes = 0;
    }

    /// Records bytes sent; returns the class that the connection should be in, once that is clear.
    pub(crate) fn note(&mut self, now_ns: u64, bytes: u64, rule: &Placement) -> Option<Class> {
        let elapsed_ns = now_ns.saturating_sub(self.interval_ns_start);
        let verdict = if elapsed_ns >= rule.interval_ns { self.judge(now_ns, elapsed_ns, rule) } else { None };
        self.interval_bytes += bytes;
        self.burst_bytes += bytes;
        self.burst_bytes_max = self.burst_bytes_max.max(self.burst_bytes);
        if self.burst_bytes >= rule.burst_bytes {
            self.calm_intervals = 0;
            return Some(Class::Bulk);
        }
        verdict
    }

    fn judge(&mut self, now_ns: u64, elapsed_ns: u64, rule: &Placement) -> Option<Class> {
        let scaled = u128::from(self.interval_bytes) * u128::from(rule.interval_ns) / u128::from(elapsed_ns);
        let interval_bytes = u64::try_from(scaled).unwrap_or(u64::MAX);
        let burst_bytes = self.burst_bytes_max;
        let calm_intervals = self.calm_intervals;
        *self = Self { burst_bytes: self.burst_bytes, burst_bytes_max: self.burst_bytes, ..Self::new(now_ns) };
        if interval_bytes >= rule.interval_bytes {
            return Some(Class::Bulk);
        }
        if interval_bytes < rule.interval_bytes / 4 && burst_bytes < rule.burst_bytes / 4 {
            self.calm_intervals = calm_intervals.saturating_add(1);
        }
        (self.calm_intervals >= rule.calm_intervals).then_some(Class::Latency)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULE: Placement = Placement { burst_bytes: 1000, interval_bytes: 4000, interval_ns: 100, calm_intervals: 3 };

    #[test]
    fn one_long_burst_is_bulk() {
        let mut seen = TrafficHistory::new(0);
        assert_eq!(seen.note(1, 999, &RULE), None);
        assert_eq!(seen.note(1, 1, &RULE), Some(Class::Bulk));
    }

    #[test]
    fn bytes_with_pauses_between_them_are_not_a_burst() {
        let mut seen = TrafficHistory::new(0);
        for _ in 0..3 {
            assert_eq!(seen.note(1, 900, &RULE), None);
            seen.note_dry();
        }
    }

    #[test]
    fn short_messages_at_a_high_rate_are_bulk() {
        let mut seen = TrafficHistory::new(0);
        let mut verdicts = Vec::new();
        for now_ns in 0..150 {
            verdicts.push(seen.note(now_ns, 41, &RULE));
            seen.note_dry();
        }
        assert_eq!(verdicts.iter().flatten().collect::<Vec<_>>(), [&Class::Bulk]);
    }

    #[test]
    fn a_stream_that_has_been_calm_for_long_enough_is_latency_again() {
        let mut seen = TrafficHistory::new(0);
        assert_eq!(seen.note(0, 5000, &RULE), Some(Class::Bulk));
        seen.note_dry();
        let verdicts: Vec<_> = (1..6)
            .map(|interval| {
                let verdict = seen.note(interval * 100, 10, &RULE);
                seen.note_dry();
                verdict
            })
            .collect();
        assert_eq!(verdicts, [Some(Class::Bulk), None, None, Some(Class::Latency), Some(Class::Latency)]);
    }

    #[test]
    fn a_long_pause_counts_as_one_calm_interval() {
        let mut seen = TrafficHistory::new(0);
        assert_eq!(seen.note(0, 5000, &RULE), Some(Class::Bulk));
        seen.note_dry();
        assert_eq!(seen.note(1_000_000, 10, &RULE), None);
    }
}
