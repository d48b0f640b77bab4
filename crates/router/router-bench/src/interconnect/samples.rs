//! What packets took: of one in so many, in memory that was written before.
//!
//! A trial at a high rate has millions of packets. To note each would need memory that the kernel finds meanwhile, and
//! a vector that grows is copied: the receiver stood still for long enough to lose packets of which the interconnect
//! had lost none.

/// Twice what is expected of a trial, which leaves more than a thousand beyond the 99th percentile.
const SAMPLES_MAX: usize = 1 << 18;

/// One packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sample {
    /// When it came to the sender.
    pub came_ns: u64,
    /// From then to when the other node had it.
    pub took_ns: u32,
}

/// Of the packets that the receiver counts, every so-manieth.
#[derive(Debug)]
pub(super) struct Samples {
    stride: u64,
    until_next: u64,
    samples: Vec<Sample>,
}

impl Samples {
    /// For a trial of about so many packets, and up to twice as many.
    pub fn new(packets_expected: u64) -> Samples {
        // Odd: fixed batches are powers of two, and each packet of a message is to have its turn.
        let stride = packets_expected.div_ceil(SAMPLES_MAX as u64 / 2).max(1) | 1;
        let mut samples = vec![Sample { came_ns: 1, took_ns: 1 }; SAMPLES_MAX];
        samples.clear();
        Samples { stride, until_next: 1, samples }
    }

    /// Notes a packet, if it is its turn.
    pub fn note(&mut self, came_ns: u64, took_ns: u64) {
        self.until_next -= 1;
        if self.until_next > 0 {
            return;
        }
        self.until_next = self.stride;
        if self.samples.len() < SAMPLES_MAX {
            self.samples.push(Sample { came_ns, took_ns: took_ns.min(u64::from(u32::MAX)) as u32 });
        }
    }

    /// What packets took that came at moments that are wanted.
    pub fn took_ns(&self, is_wanted: impl Fn(u64) -> bool) -> Vec<u64> {
        let wanted = self.samples.iter().filter(|sample| is_wanted(sample.came_ns));
        wanted.map(|sample| u64::from(sample.took_ns)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_packets_are_all_noted() {
        let mut samples = Samples::new(100);
        (0..100).for_each(|at| samples.note(at, 2 * at));
        assert_eq!(samples.took_ns(|came_ns| came_ns < 3), [0, 2, 4]);
        assert_eq!(samples.took_ns(|_| true).len(), 100);
    }

    #[test]
    fn of_many_each_place_in_a_message_has_its_turn_and_no_memory_is_asked_for() {
        let expected = 2_000_000;
        let mut samples = Samples::new(expected);
        let room = samples.samples.capacity();
        (0..2 * expected).for_each(|at| samples.note(at, at % 32));
        let took_ns = samples.took_ns(|_| true);
        assert!((SAMPLES_MAX / 4..=SAMPLES_MAX).contains(&took_ns.len()), "{}", took_ns.len());
        let places: Vec<usize> = (0..32).map(|place| took_ns.iter().filter(|ns| **ns == place).count()).collect();
        assert!(places.iter().all(|count| count.abs_diff(places[0]) <= 1), "{places:?}");
        assert_eq!(samples.samples.capacity(), room);
    }
}
