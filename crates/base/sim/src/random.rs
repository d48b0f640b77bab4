//! Reproducible randomness.

use rand_core::{RngCore, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// The stream of random numbers of one component.
#[derive(Clone, Debug)]
pub struct Random(Xoshiro256PlusPlus);

/// Returns the 64-bit FNV-1a hash of a name, which is the same on every machine.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

impl Random {
    /// Creates the stream of `component` in the run with this seed.
    pub fn new(seed: u64, component: &str) -> Self {
        Self(Xoshiro256PlusPlus::seed_from_u64(seed ^ hash(component)))
    }

    /// Returns 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a uniformly distributed number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns an exponentially distributed number with this mean: the time between independent events.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -(1.0 - self.unit()).ln() * mean
    }

    /// Returns a number in [0, `bound`), uniform except for a bias of `bound` / 2^64.
    ///
    /// # Panics
    /// If `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "there is no number below 0");
        ((u128::from(self.bits()) * u128::from(bound)) >> 64) as u64
    }

    /// Returns true with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.unit() < probability
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_and_a_component_make_a_stream() {
        let draw = |seed, component| {
            let mut random = Random::new(seed, component);
            [random.bits(), random.bits()]
        };
        assert_eq!(draw(1, "device"), draw(1, "device"));
        assert_ne!(draw(1, "device"), draw(2, "device"));
        assert_ne!(draw(1, "device"), draw(1, "memory"));
    }

    #[test]
    fn numbers_are_uniform_and_in_range() {
        let mut random = Random::new(7, "test");
        let mut counts = [0_u32; 10];
        for _ in 0..100_000 {
            counts[random.below(10) as usize] += 1;
            let unit = random.unit();
            assert!((0.0..1.0).contains(&unit), "{unit}");
        }
        assert!(counts.iter().all(|count| (9_500..10_500).contains(count)), "{counts:?}");
        let hits = (0..100_000).filter(|_| random.chance(0.25)).count();
        assert!((24_000..26_000).contains(&hits), "{hits}");
        assert!(!random.chance(0.0));
    }

    #[test]
    fn times_between_independent_events_have_their_mean_and_half_are_below_its_ln_2() {
        let mut random = Random::new(7, "test");
        let times: Vec<f64> = (0..100_000).map(|_| random.exponential(50.0)).collect();
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        let below = times.iter().filter(|time| **time < 50.0 * std::f64::consts::LN_2).count();
        assert!((49.0..51.0).contains(&mean) && (49_000..51_000).contains(&below), "{mean} {below}");
        assert!(times.iter().all(|time| *time >= 0.0));
    }
}
