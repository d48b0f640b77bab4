//! Measured latency that the modelled parts do not explain, for example from power states or interrupts of the chipset.

use sim::{Random, Span};

use super::parameters::TailParameters;

/// A distribution given by its quantiles.
#[derive(Clone, Debug)]
pub struct Tail {
    quantiles: Vec<(f64, f64)>,
}

impl Tail {
    /// Returns the distribution, which is uniform between two quantiles.
    pub fn new(parameters: &TailParameters) -> Self {
        Self { quantiles: parameters.quantiles.iter().map(|quantile| (quantile[0], quantile[1])).collect() }
    }

    /// Draws the wait of one request.
    pub fn draw(&self, random: &mut Random) -> Span {
        let share = random.unit();
        let above = self.quantiles.partition_point(|&(quantile, _)| quantile <= share);
        let (low, high) = (self.quantiles[above.max(1) - 1], self.quantiles[above.min(self.quantiles.len() - 1)]);
        let width = (high.0 - low.0).max(f64::MIN_POSITIVE);
        let position = ((share - low.0) / width).clamp(0.0, 1.0);
        Span::from_ns(low.1 + (high.1 - low.1) * position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_have_the_quantiles_given() {
        let quantiles = vec![[0.0, 10.0], [0.5, 20.0], [0.99, 100.0], [1.0, 5000.0]];
        let tail = Tail::new(&TailParameters { quantiles });
        let mut random = Random::new(5, "tail");
        let mut draws: Vec<f64> = (0..100_000).map(|_| tail.draw(&mut random).ns()).collect();
        draws.sort_by(f64::total_cmp);
        assert!(draws[0] >= 10.0 && (draws[50_000] - 20.0).abs() < 0.5 && (draws[99_000] - 100.0).abs() < 60.0);
        assert!(draws[99_999] > 4000.0 && draws[99_999] <= 5000.0);
    }
}
