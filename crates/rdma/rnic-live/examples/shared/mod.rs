//! Parts shared by the examples: command-line numbers, and measurements in alternating rounds.

/// Parses numbers from the command line, with defaults for missing ones. Exits with 2 if an argument is invalid.
pub fn numbers<const COUNT: usize>(usage: &str, defaults: [usize; COUNT]) -> [usize; COUNT] {
    let mut numbers = defaults;
    for (index, argument) in std::env::args().skip(1).enumerate() {
        match (argument.parse(), numbers.get_mut(index)) {
            (Ok(value), Some(number)) if value > 0 => *number = value,
            _ => {
                eprintln!("'{argument}' is not expected here; {usage}");
                std::process::exit(2);
            }
        }
    }
    numbers
}

/// A named measurement that is repeated in every round.
pub struct Measurement {
    pub name: &'static str,
    pub measure: Box<dyn FnMut() -> Vec<f64>>,
}

impl Measurement {
    pub fn new(name: &'static str, measure: impl FnMut() -> Vec<f64> + 'static) -> Self {
        Self { name, measure: Box::new(measure) }
    }
}

/// Runs all measurements in each round and returns the sorted samples of each. Every second round runs in reverse
/// order, so that no measurement is always first.
pub fn run_alternating(measurements: &mut [Measurement], rounds: usize) -> Vec<Vec<f64>> {
    let mut samples: Vec<Vec<f64>> = measurements.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        let mut order: Vec<usize> = (0..measurements.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for index in order {
            samples[index].extend((measurements[index].measure)());
        }
    }
    samples.iter_mut().for_each(|samples| samples.sort_by(f64::total_cmp));
    samples
}

/// Returns a quantile, 0 to 1, of sorted samples.
pub fn quantile(sorted: &[f64], quantile: f64) -> f64 {
    sorted.get(((sorted.len() as f64 - 1.0) * quantile).round() as usize).copied().unwrap_or(f64::NAN)
}
