//! A model of the latency of messages, fitted online.
//!
//! The published figures fit `L = a + b (n - 1) + c bytes` within 0.22 us (software-router's fit of the KAIST
//! measurements: 1.75 us, 50.6 ns, 0.214 ns); so do messages through memory. The three coefficients are estimated by
//! recursive least squares with a forgetting factor, so that the model follows changes of the link.

use sim::Span;

/// Forgetting factor: about the last 500 samples count.
const FORGETTING_FACTOR: f64 = 0.998;
/// Variance of each coefficient before the first sample, in its unit²: large, because nothing is known.
const VARIANCES_FIRST: [f64; 3] = [1e6, 1e3, 1.0];
/// Upper bound of a variance, for numerical stability.
const VARIANCE_MAX: f64 = 1e9;
/// Ratio to the expectation above which a sample is an outlier, such as one delayed by an interrupt.
const OUTLIER_RATIO_MIN: f64 = 4.0;
/// Number of consecutive outliers after which the link is assumed to have changed.
const OUTLIERS_IN_A_ROW_MAX: u32 = 32;

/// The measured latency of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Number of packets, at least 1.
    pub packets: usize,
    /// Total length of the packets in bytes.
    pub bytes: usize,
    /// Time from submission of the first packet to arrival of the last one.
    pub took: Span,
}

/// The latency model.
#[derive(Clone, Debug, PartialEq)]
pub struct Latency {
    /// Latency of a message of one empty packet, of each further packet, and of a byte, in nanoseconds.
    coefficients: [f64; 3],
    variances: [[f64; 3]; 3],
    outliers_in_a_row: u32,
}

impl Latency {
    /// *Published*: the fit for a 40 G RoCE NIC.
    pub const PUBLISHED: [f64; 3] = [1750.0, 50.6, 0.214];

    /// Creates a model with initial coefficients, in the order and units of the fit: `a`, `b` and `c` in nanoseconds.
    pub fn new(coefficients: [f64; 3]) -> Latency {
        let mut variances = [[0.0; 3]; 3];
        for (index, variance) in VARIANCES_FIRST.into_iter().enumerate() {
            variances[index][index] = variance;
        }
        Latency { coefficients, variances, outliers_in_a_row: 0 }
    }

    /// Returns the fixed latency of a message, as a number of packets of `bytes` bytes with the same latency.
    pub fn message_packets(&self, bytes: f64) -> f64 {
        let [message, packet, byte] = self.coefficients;
        let packet_ns = packet + byte * bytes;
        if packet_ns > 0.0 { (message / packet_ns).max(0.0) } else { f64::INFINITY }
    }

    /// Returns the expected latency in nanoseconds of `packets` packets with a total of `bytes` bytes.
    pub fn expected_ns(&self, packets: usize, bytes: usize) -> f64 {
        let [first, next, byte] = self.coefficients;
        (first + next * packets.saturating_sub(1) as f64 + byte * bytes as f64).max(0.0)
    }

    /// Updates the model by a sample. Outliers are ignored, unless many follow in a row.
    pub fn learn(&mut self, sample: &Sample) {
        let took_ns = sample.took.ns();
        let expected_ns = self.expected_ns(sample.packets, sample.bytes);
        if took_ns > OUTLIER_RATIO_MIN * expected_ns && self.outliers_in_a_row < OUTLIERS_IN_A_ROW_MAX {
            self.outliers_in_a_row += 1;
            return;
        }
        self.outliers_in_a_row = 0;
        let inputs = [1.0, sample.packets.saturating_sub(1) as f64, sample.bytes as f64];
        let [first, next, byte] = self.coefficients;
        let error_ns = took_ns - (first + next * inputs[1] + byte * inputs[2]);
        self.correct(inputs, error_ns);
    }

    /// Performs one step of recursive least squares.
    fn correct(&mut self, inputs: [f64; 3], error: f64) {
        let spread = self.variances.map(|row| (0..3).map(|at| row[at] * inputs[at]).sum::<f64>());
        let weight = FORGETTING_FACTOR + (0..3).map(|at| inputs[at] * spread[at]).sum::<f64>();
        for row in 0..3 {
            self.coefficients[row] += spread[row] / weight * error;
            for column in 0..3 {
                let reduced = self.variances[row][column] - spread[row] * spread[column] / weight;
                self.variances[row][column] = reduced / FORGETTING_FACTOR;
            }
        }
        // Without information about a coefficient, forgetting would let its variance grow without bound.
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
    fn the_model_fits_the_link_and_follows_its_changes() {
        let fast = |packets: usize, bytes: usize| 300.0 + 15.0 * packets as f64 + 0.05 * bytes as f64;
        let slow = |packets: usize, bytes: usize| 9000.0 + 40.0 * packets as f64 + 0.4 * bytes as f64;
        let mut latency = Latency::default();
        taught(&mut latency, 1, 2000, fast);
        assert_close(&latency, fast);
        taught(&mut latency, 2, 6000, slow);
        assert_close(&latency, slow);
    }

    #[test]
    fn an_outlier_does_not_change_the_model() {
        let mut latency = Latency::default();
        taught(&mut latency, 3, 2000, |packets, _| 1000.0 + 20.0 * packets as f64);
        let before = latency.expected_ns(4, 400);
        latency.learn(&sample(4, 400, 5e6));
        assert_eq!(latency.expected_ns(4, 400), before);
    }

    #[test]
    fn a_million_identical_messages_keep_the_model_stable() {
        let mut latency = Latency::default();
        for _ in 0..1_000_000 {
            latency.learn(&sample(1, 46, 250.0));
        }
        assert!((latency.expected_ns(1, 46) - 250.0).abs() < 1.0);
        assert!(latency.expected_ns(32, 48_000).is_finite());
    }
}
