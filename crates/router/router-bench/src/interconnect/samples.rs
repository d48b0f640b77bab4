//! Latencies of a sample of packets, in memory that was written before the trial.
//!
//! A trial at a high rate has millions of packets. Recording each would need memory that the kernel allocates during
//! the trial, and a vector that grows is copied: the receiver then stalled for long enough to lose packets, although
//! the interconnect had lost none.

/// Twice the expected number of samples, which leaves more than a thousand above the 99th percentile.
const SAMPLES_MAX: usize = 1 << 18;

/// The sample of one packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sample {
    /// The arrival time at the sender.
    pub arrival_ns: u64,
    /// The time from then until the other node received it.
    pub latency_ns: u32,
}

/// A systematic sample: one in `stride` of the packets that the receiver counts.
#[derive(Debug)]
pub(super) struct Samples {
    stride: u64,
    until_next: u64,
    samples: Vec<Sample>,
}

impl Samples {
    /// Creates the storage for a trial of about this many packets, and up to twice as many.
    pub fn new(packets_expected: u64) -> Samples {
        // The stride is odd: fixed batches are powers of two, and each position in a message must be sampled.
        let stride = packets_expected.div_ceil(SAMPLES_MAX as u64 / 2).max(1) | 1;
        let mut samples = vec![Sample { arrival_ns: 1, latency_ns: 1 }; SAMPLES_MAX];
        samples.clear();
        Samples { stride, until_next: 1, samples }
    }

    /// Records a packet if it is to be sampled.
    pub fn add(&mut self, arrival_ns: u64, latency_ns: u64) {
        self.until_next -= 1;
        if self.until_next > 0 {
            return;
        }
        self.until_next = self.stride;
        if self.samples.len() < SAMPLES_MAX {
            self.samples.push(Sample { arrival_ns, latency_ns: latency_ns.min(u64::from(u32::MAX)) as u32 });
        }
    }

    /// Returns the latencies of the packets whose arrival time is wanted.
    pub fn latencies_ns(&self, is_wanted: impl Fn(u64) -> bool) -> Vec<u64> {
        let wanted = self.samples.iter().filter(|sample| is_wanted(sample.arrival_ns));
        wanted.map(|sample| u64::from(sample.latency_ns)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_packets_are_all_recorded() {
        let mut samples = Samples::new(100);
        (0..100).for_each(|at| samples.add(at, 2 * at));
        assert_eq!(samples.latencies_ns(|arrival_ns| arrival_ns < 3), [0, 2, 4]);
        assert_eq!(samples.latencies_ns(|_| true).len(), 100);
    }

    #[test]
    fn every_position_in_a_message_is_sampled_and_nothing_is_allocated() {
        let expected = 2_000_000;
        let mut samples = Samples::new(expected);
        let room = samples.samples.capacity();
        (0..2 * expected).for_each(|at| samples.add(at, at % 32));
        let latencies_ns = samples.latencies_ns(|_| true);
        assert!((SAMPLES_MAX / 4..=SAMPLES_MAX).contains(&latencies_ns.len()), "{}", latencies_ns.len());
        let positions: Vec<usize> =
            (0..32).map(|position| latencies_ns.iter().filter(|ns| **ns == position).count()).collect();
        assert!(positions.iter().all(|count| count.abs_diff(positions[0]) <= 1), "{positions:?}");
        assert_eq!(samples.samples.capacity(), room);
    }
}
