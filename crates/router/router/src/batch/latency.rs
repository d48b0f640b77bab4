//! What a message takes, learnt while messages go.
//!
//! The published figures fit `L = a + b (n - 1) + c bytes` within 0.22 us (software-router's fit of the KAIST
//! measurements: 1.75 us, 50.6 ns, 0.214 ns); so do messages through memory. The three coefficients follow what is
//! measured, by recursive least squares that forget: a line that is slower today than yesterday is learnt again.

use sim::Span;

/// Of a sample, how much is left after one more: about the last 500 count.
const KEPT: f64 = 0.998;
/// What is not yet known may be anything: the variance of each coefficient before the first sample, in its unit².
const VARIANCES_FIRST: [f64; 3] = [1e6, 1e3, 1.0];
/// No coefficient is known better than so: else what is learnt late would count for nothing, or rounding end it all.
const VARIANCE_MAX: f64 = 1e9;
/// How far a sample may be off what is expected: one that was held up by an interrupt says nothing of the link.
const OFF_MAX: f64 = 4.0;
/// After so many that were far off in a row, the link is another one.
const OFF_IN_A_ROW_MAX: u32 = 32;

/// What one message took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Its packets, at least 1.
    pub packets: usize,
    /// Their bytes, all together.
    pub bytes: usize,
    /// From handing over the first to when the last was seen to be there.
    pub took: Span,
}

/// What messages take.
#[derive(Clone, Debug, PartialEq)]
pub struct Latency {
    /// Of a message of one empty packet, of each further packet, of a byte; in nanoseconds.
    coefficients: [f64; 3],
    variances: [[f64; 3]; 3],
    off_in_a_row: u32,
}

impl Latency {
    /// *Published*: the fit of what a 40 G RoCE NIC took.
    pub const PUBLISHED: [f64; 3] = [1750.0, 50.6, 0.214];

    /// Before anything is learnt: of a message of one empty packet, of each further packet, of a byte; in nanoseconds.
    pub fn new(coefficients: [f64; 3]) -> Latency {
        let mut variances = [[0.0; 3]; 3];
        for (index, variance) in VARIANCES_FIRST.into_iter().enumerate() {
            variances[index][index] = variance;
        }
        Latency { coefficients, variances, off_in_a_row: 0 }
    }

    /// What a message takes besides its packets, in packets of so many bytes.
    pub fn message_packets(&self, bytes: f64) -> f64 {
        let [message, packet, byte] = self.coefficients;
        let packet_ns = packet + byte * bytes;
        if packet_ns > 0.0 { (message / packet_ns).max(0.0) } else { f64::INFINITY }
    }

    /// In nanoseconds, for so many packets with so many bytes all together.
    pub fn expected_ns(&self, packets: usize, bytes: usize) -> f64 {
        let [first, next, byte] = self.coefficients;
        (first + next * packets.saturating_sub(1) as f64 + byte * bytes as f64).max(0.0)
    }

    /// Learns what a message took. One that took much longer than expected is left out, but not for ever.
    pub fn learn(&mut self, sample: &Sample) {
        let took_ns = sample.took.ns();
        let expected_ns = self.expected_ns(sample.packets, sample.bytes);
        if took_ns > OFF_MAX * expected_ns && self.off_in_a_row < OFF_IN_A_ROW_MAX {
            self.off_in_a_row += 1;
            return;
        }
        self.off_in_a_row = 0;
        let inputs = [1.0, sample.packets.saturating_sub(1) as f64, sample.bytes as f64];
        let [first, next, byte] = self.coefficients;
        let error_ns = took_ns - (first + next * inputs[1] + byte * inputs[2]);
        self.correct(inputs, error_ns);
    }

    /// One step of recursive least squares.
    fn correct(&mut self, inputs: [f64; 3], error: f64) {
        let spread = self.variances.map(|row| (0..3).map(|at| row[at] * inputs[at]).sum::<f64>());
        let weight = KEPT + (0..3).map(|at| inputs[at] * spread[at]).sum::<f64>();
        for row in 0..3 {
            self.coefficients[row] += spread[row] / weight * error;
            for column in 0..3 {
                let reduced = self.variances[row][column] - spread[row] * spread[column] / weight;
                self.variances[row][column] = reduced / KEPT;
            }
        }
        // Where nothing new is said of a coefficient, forgetting lets its variance grow without bound.
        for row in 0..3 {
            if self.variances[row][row] > VARIANCE_MAX {
                let scale = (VARIANCE_MAX / self.variances[row][row]).sqrt();
                (0..3).for_each(|at| self.variances[row][at] *= scale);
                (0..3).for_each(|at| self.variances[at][row] *= scale);
            }
        }
    }
}

impl Default for Latency {
    fn default() -> Self {
        Self::new(Self::PUBLISHED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(packets: usize, bytes: usize, took_ns: f64) -> Sample {
        Sample { packets, bytes, took: Span::from_ns(took_ns) }
    }

    fn taught(latency: &mut Latency, seed: u64, samples: usize, truth: impl Fn(usize, usize) -> f64) {
        let mut random = sim::Random::new(seed, "latency");
        for _ in 0..samples {
            let packets = 1 + random.below(32) as usize;
            let bytes = packets * (46 + random.below(1454) as usize);
            let noise = 0.9 + 0.2 * random.below(1000) as f64 / 1000.0;
            latency.learn(&sample(packets, bytes, truth(packets, bytes) * noise));
        }
    }

    fn assert_close(latency: &Latency, truth: impl Fn(usize, usize) -> f64) {
        for (packets, length) in [(1, 46), (8, 46), (32, 46), (1, 1500), (32, 1500)] {
            let (found, wanted) = (latency.expected_ns(packets, packets * length), truth(packets, packets * length));
            assert!((found / wanted - 1.0).abs() < 0.15, "{packets} x {length} B: {found} ns and not {wanted}");
        }
    }

    #[test]
    fn what_messages_take_is_learnt_and_learnt_again_when_the_link_changes() {
        let fast = |packets: usize, bytes: usize| 300.0 + 15.0 * packets as f64 + 0.05 * bytes as f64;
        let slow = |packets: usize, bytes: usize| 9000.0 + 40.0 * packets as f64 + 0.4 * bytes as f64;
        let mut latency = Latency::default();
        taught(&mut latency, 1, 2000, fast);
        assert_close(&latency, fast);
        taught(&mut latency, 2, 6000, slow);
        assert_close(&latency, slow);
    }

    #[test]
    fn a_message_that_was_held_up_teaches_nothing() {
        let mut latency = Latency::default();
        taught(&mut latency, 3, 2000, |packets, _| 1000.0 + 20.0 * packets as f64);
        let before = latency.expected_ns(4, 400);
        latency.learn(&sample(4, 400, 5e6));
        assert_eq!(latency.expected_ns(4, 400), before);
    }

    #[test]
    fn a_million_messages_of_one_kind_leave_it_sane() {
        let mut latency = Latency::default();
        for _ in 0..1_000_000 {
            latency.learn(&sample(1, 46, 250.0));
        }
        assert!((latency.expected_ns(1, 46) - 250.0).abs() < 1.0);
        assert!(latency.expected_ns(32, 48_000).is_finite());
    }
}
