//! How far a simulated system is from what was published of the real one.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::facts::{Fact, Statistic, Tolerance};
use crate::host::{HostError, Interface, System};
use crate::test::{Cache, Iommu, Kind, Numa, Test};

/// Samples of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effort {
    /// Latencies.
    pub latencies: u64,
    /// Latencies where the cache has to fill first.
    pub latencies_filling: u64,
    /// Transfers of bandwidth tests.
    pub transfers: u64,
}

impl Effort {
    /// While parameters are searched for.
    pub const SEARCH: Self = Self { latencies: 3_000, latencies_filling: 24_000, transfers: 20_000 };
    /// For a quick look.
    pub const QUICK: Self = Self { latencies: 8_000, latencies_filling: 120_000, transfers: 30_000 };
    /// For figures that are quoted.
    pub const FULL: Self = Self { latencies: 200_000, latencies_filling: 2_000_000, transfers: 400_000 };

    /// Of one test.
    fn of(self, test: &Test) -> u64 {
        let is_filling = test.test == Kind::LatWrrd && test.window_bytes > 1 << 16;
        match (test.test.is_latency(), is_filling) {
            (false, _) => self.transfers,
            (true, false) => self.latencies,
            (true, true) => self.latencies_filling,
        }
    }
}

/// A figure, published and simulated.
#[derive(Clone, Debug, PartialEq)]
pub struct Residual {
    /// The test in words.
    pub label: String,
    /// Which figure of it.
    pub statistic: &'static str,
    /// Of the real system.
    pub published: f64,
    /// Of the simulated one.
    pub simulated: f64,
    /// How far apart they may be.
    pub tolerance: f64,
    /// Whether they must be that near.
    pub is_required: bool,
}

impl fmt::Display for Residual {
    /// One line of a table.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (label, statistic, difference) = (&self.label, self.statistic, self.difference());
        let (published, simulated, tolerance) = (self.published, self.simulated, self.tolerance);
        write!(
            formatter,
            "{label:44} {statistic:18} {published:9.2} {simulated:9.2} {difference:+9.2} of {tolerance:.2}"
        )
    }
}

impl Residual {
    /// Simulated less published.
    pub fn difference(&self) -> f64 {
        self.simulated - self.published
    }

    /// Whether it is near enough.
    pub fn is_met(&self) -> bool {
        self.difference().abs() <= self.tolerance
    }
}

/// What a test brought, as far as facts ask for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    median_ns: f64,
    p99_ns: f64,
    average_ns: f64,
    gbps: f64,
}

/// What tests brought on a system whose parameters stand still.
pub(super) type Known = HashMap<(Test, Interface), Figures>;

impl Figures {
    fn new(mut latencies_ns: Vec<f64>, gbps: f64) -> Self {
        let average_ns = latencies_ns.iter().sum::<f64>() / latencies_ns.len().max(1) as f64;
        latencies_ns.sort_unstable_by(f64::total_cmp);
        let quantile = |share: f64| {
            let index = (latencies_ns.len() as f64 * share).ceil() as usize;
            latencies_ns.get(index.saturating_sub(1)).copied().unwrap_or_default()
        };
        Self { median_ns: quantile(0.5), p99_ns: quantile(0.99), average_ns, gbps }
    }

    fn value(&self, statistic: Statistic) -> f64 {
        match statistic {
            Statistic::MedianNs => self.median_ns,
            Statistic::P99Ns => self.p99_ns,
            Statistic::AverageNs => self.average_ns,
            Statistic::Gbps => self.gbps,
        }
    }
}

/// Runs a test; the first half of latencies only fills caches.
fn figures(system: &System, test: &Test, interface: Interface, effort: Effort) -> Result<Figures, HostError> {
    let test = Test { samples: effort.of(test), ..test.clone() };
    let mut latencies_ns = Vec::new();
    let mut taken = 0;
    let summary = system.run_by(&test, interface, &mut |latency_ns| {
        taken += 1;
        if taken > test.samples / 2 {
            latencies_ns.push(latency_ns);
        }
    })?;
    Ok(Figures::new(latencies_ns, summary.gbps()))
}

/// Every fact against `system`; facts of one test share its run, and runs share this machine's cores.
///
/// # Errors
/// When a test cannot be run on it.
pub fn residuals(system: &System, facts: &[Fact], effort: Effort) -> Result<Vec<Residual>, HostError> {
    residuals_beyond(&mut Known::new(), system, facts, effort)
}

/// The same, where some tests may have been run before, by the same effort; those that were not are known afterwards.
pub(super) fn residuals_beyond(
    known: &mut Known,
    system: &System,
    facts: &[Fact],
    effort: Effort,
) -> Result<Vec<Residual>, HostError> {
    let mut seen = HashSet::new();
    let tests = facts.iter().map(|fact| (fact.test.clone(), fact.interface));
    let missing: Vec<_> = tests.filter(|test| !known.contains_key(test) && seen.insert(test.clone())).collect();
    let found = run_all(system, &missing, effort)?;
    known.extend(missing.into_iter().zip(found));
    let mut all = Vec::new();
    for fact in facts {
        let figures = known.get(&(fact.test.clone(), fact.interface)).expect("every fact's test was run");
        all.push(Residual {
            label: fact.label(),
            statistic: fact.statistic.name(),
            published: fact.value,
            simulated: figures.value(fact.statistic),
            tolerance: fact.tolerance.of(fact.value),
            is_required: fact.is_required,
        });
    }
    all.extend(derived(facts, &all));
    Ok(all)
}

/// Runs all tests, each core taking the next that nobody has; a run is the same whoever does it.
fn run_all(system: &System, tests: &[(Test, Interface)], effort: Effort) -> Result<Vec<Figures>, HostError> {
    let next = AtomicUsize::new(0);
    let workers = std::thread::available_parallelism().map_or(1, NonZeroUsize::get).min(tests.len().max(1));
    let work = || {
        let mut done = Vec::new();
        while let Some((index, (test, interface))) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            tests.get(index).map(|test| (index, test))
        } {
            done.push((index, figures(system, test, *interface, effort)));
        }
        done
    };
    let mut done: Vec<(usize, Result<Figures, HostError>)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a run does not panic")).collect()
    });
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, figures)| figures).collect()
}

/// Figures that several facts make together, worked out alike from published and simulated ones.
fn derived(facts: &[Fact], residuals: &[Residual]) -> Vec<Residual> {
    let pairs: Vec<(&Fact, &Residual)> = facts.iter().zip(residuals).collect();
    let mut all = Vec::new();
    let mut add = |label: &str, statistic, published: f64, simulated, tolerance: Tolerance| {
        let (label, tolerance) = (label.to_owned(), tolerance.of(published));
        all.push(Residual { label, statistic, published, simulated, tolerance, is_required: true });
    };
    if let Some((published, simulated)) = both(&pairs, ddio) {
        let label = "DDIO, from 8 B lat-wrrd by window";
        add(label, "capacity MiB", published.0, simulated.0, Tolerance::Percent(15.0));
        add(label, "cost of a miss ns", published.1, simulated.1, Tolerance::Ns(10.0));
    }
    if let Some((published, simulated)) = both(&pairs, remote_loss) {
        add("bw-rd 64 B, remote against local", "loss in points", published, simulated, Tolerance::Ns(3.0));
    }
    all
}

/// A function of the published figures, and the same of the simulated ones.
fn both<T>(pairs: &[(&Fact, &Residual)], function: impl Fn(&[(&Fact, f64)]) -> Option<T>) -> Option<(T, T)> {
    let published: Vec<(&Fact, f64)> = pairs.iter().map(|(fact, residual)| (*fact, residual.published)).collect();
    let simulated: Vec<(&Fact, f64)> = pairs.iter().map(|(fact, residual)| (*fact, residual.simulated)).collect();
    Some((function(&published)?, function(&simulated)?))
}

/// Capacity for lines that a device wrote, in MiB, and what a miss costs, in nanoseconds: the least squares of
/// average = L0 + (1 - min(1, capacity / window)) * cost over 8 B lat-wrrd by window. Capacity is tried in steps of
/// 0.01 MiB.
fn ddio(figures: &[(&Fact, f64)]) -> Option<(f64, f64)> {
    let points: Vec<(f64, f64)> = figures
        .iter()
        .filter(|(fact, _)| {
            let test = &fact.test;
            fact.statistic == Statistic::AverageNs
                && (test.test, test.size_bytes, test.cache) == (Kind::LatWrrd, 8, Cache::Cold)
                && test.iommu == Iommu::Off
        })
        .map(|(fact, average_ns)| (fact.test.window_bytes as f64 / f64::from(1 << 20), *average_ns))
        .collect();
    if points.len() < 3 {
        return None;
    }
    let fits = (10..1000).map(|step| {
        let capacity_mib = f64::from(step) / 100.0;
        let line: Vec<(f64, f64)> = points.iter().map(|(mib, ns)| (1.0 - (capacity_mib / mib).min(1.0), *ns)).collect();
        let (slope, error) = least_squares(&line);
        (error, capacity_mib, slope)
    });
    fits.min_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, capacity_mib, cost_ns)| (capacity_mib, cost_ns))
}

/// Slope of the line nearest to the points, and the squares of what it misses them by.
fn least_squares(points: &[(f64, f64)]) -> (f64, f64) {
    let count = points.len() as f64;
    let (mean_x, mean_y) = (
        points.iter().map(|point| point.0).sum::<f64>() / count,
        points.iter().map(|point| point.1).sum::<f64>() / count,
    );
    let spread: f64 = points.iter().map(|point| (point.0 - mean_x).powi(2)).sum();
    let slope =
        points.iter().map(|point| (point.0 - mean_x) * (point.1 - mean_y)).sum::<f64>() / spread.max(f64::MIN_POSITIVE);
    let error = points.iter().map(|point| (point.1 - mean_y - slope * (point.0 - mean_x)).powi(2)).sum();
    (slope, error)
}

/// What remote memory costs of the bandwidth of 64 B reads, in percent of local memory's.
fn remote_loss(figures: &[(&Fact, f64)]) -> Option<f64> {
    let find = |numa| {
        let is_it = |test: &Test| {
            (test.test, test.size_bytes, test.window_bytes) == (Kind::BwRd, 64, 8192)
                && (test.numa, test.iommu, test.cache) == (numa, Iommu::Off, Cache::HostWarm)
        };
        figures.iter().find(|(fact, _)| is_it(&fact.test)).map(|(_, gbps)| *gbps)
    };
    let (local, remote) = (find(Numa::Local)?, find(Numa::Remote)?);
    Some((1.0 - remote / local) * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fit::facts;

    #[test]
    fn ddio_of_published_figures_is_what_the_reference_found() {
        for (system, capacity_mib, cost_ns) in [("ib", 1.40, 76.0), ("hsw", 1.35, 84.0)] {
            let facts = facts::built_in(system).unwrap();
            let figures: Vec<(&Fact, f64)> = facts.iter().map(|fact| (fact, fact.value)).collect();
            let (found_mib, found_ns) = ddio(&figures).unwrap();
            assert!((found_mib / capacity_mib - 1.0).abs() < 0.03, "{system}: {found_mib} MiB");
            assert!((found_ns - cost_ns).abs() < 3.0, "{system}: {found_ns} ns");
        }
    }

    /// Every figure that is required, on both calibrated systems. Few samples: deterministic all the same.
    #[test]
    fn calibrated_systems_meet_their_targets() {
        let mut missed = Vec::new();
        for name in ["hsw", "ib"] {
            let system = System::named(name).unwrap();
            let all = residuals(&system, &facts::built_in(name).unwrap(), Effort::QUICK).unwrap();
            for residual in &all {
                let verdict = match (residual.is_met(), residual.is_required) {
                    (true, _) => "ok",
                    (false, true) => "MISSED",
                    (false, false) => "off",
                };
                println!("{name} {verdict:6} {residual}");
            }
            missed.extend(all.into_iter().filter(|one| one.is_required && !one.is_met()));
        }
        assert!(missed.is_empty(), "{} missed: {missed:#?}", missed.len());
    }
}
