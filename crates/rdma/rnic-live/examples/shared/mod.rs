//! What the examples have in common: rounds that alternate.

/// Numbers on the command line, with what is taken where there are none.
pub fn numbers<const COUNT: usize>(usage: &str, defaults: [usize; COUNT]) -> [usize; COUNT] {
    let mut numbers = defaults;
    let words: Vec<String> = std::env::args().skip(1).collect();
    for (index, word) in words.iter().enumerate() {
        match (word.parse(), numbers.get_mut(index)) {
            (Ok(number), Some(place)) if number > 0 => *place = number,
            _ => {
                eprintln!("'{word}' is not expected here; {usage}");
                std::process::exit(2);
            }
        }
    }
    numbers
}

/// A measurement, by name, of which every round has one.
pub struct Entry {
    pub name: &'static str,
    pub measure: Box<dyn FnMut() -> Vec<f64>>,
}

impl Entry {
    pub fn new(name: &'static str, measure: impl FnMut() -> Vec<f64> + 'static) -> Self {
        Self { name, measure: Box::new(measure) }
    }
}

/// The samples of all rounds of each entry: every second round goes backwards, so that none is always first.
pub fn alternate(entries: &mut [Entry], rounds: usize) -> Vec<Vec<f64>> {
    let mut samples: Vec<Vec<f64>> = entries.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        let mut order: Vec<usize> = (0..entries.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for index in order {
            samples[index].extend((entries[index].measure)());
        }
    }
    samples.iter_mut().for_each(|samples| samples.sort_by(f64::total_cmp));
    samples
}

/// Of sorted samples.
pub fn quantile(sorted: &[f64], quantile: f64) -> f64 {
    sorted.get(((sorted.len() as f64 - 1.0) * quantile).round() as usize).copied().unwrap_or(f64::NAN)
}
