//! Residuals: deviations of a simulated system from the figures published for the real one.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::targets::{CalibrationTarget, Statistic, Tolerance};
use crate::host::{HostError, Interface, System};
use crate::test::{Cache, Iommu, Kind, Numa, Test};

/// Number of samples of each kind of test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleCounts {
    /// Latencies of a latency test.
    pub latencies: u64,
    /// Latencies of a test that first has to fill the cache.
    pub latencies_filling: u64,
    /// Transfers of a bandwidth test.
    pub transfers: u64,
}

impl SampleCounts {
    /// For the search for parameters.
    pub const SEARCH: Self = Self { latencies: 3_000, latencies_filling: 24_000, transfers: 20_000 };
    /// For quick checks.
    pub const QUICK: Self = Self { latencies: 8_000, latencies_filling: 120_000, transfers: 30_000 };
    /// For figures that are quoted.
    pub const FULL: Self = Self { latencies: 200_000, latencies_filling: 2_000_000, transfers: 400_000 };

    /// Returns the number of samples of one test.
    fn of(self, test: &Test) -> u64 {
        let is_filling = test.test == Kind::LatWrrd && test.window_bytes > 1 << 16;
        match (test.test.is_latency(), is_filling) {
            (false, _) => self.transfers,
            (true, false) => self.latencies,
            (true, true) => self.latencies_filling,
        }
    }
}

/// A published figure and the simulated one.
#[derive(Clone, Debug, PartialEq)]
pub struct Residual {
    /// Description of the test.
    pub label: String,
    /// Name of the figure.
    pub statistic: &'static str,
    /// Published value of the real system.
    pub published: f64,
    /// Value of the simulated system.
    pub simulated: f64,
    /// Largest permitted deviation.
    pub tolerance: f64,
    /// Whether the tolerance must be met.
    pub is_required: bool,
}

impl fmt::Display for Residual {
    /// Formats one line of a table.
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
    /// Returns the simulated minus the published value.
    pub fn difference(&self) -> f64 {
        self.simulated - self.published
    }

    /// Returns whether the deviation is within the tolerance.
    pub fn is_met(&self) -> bool {
        self.difference().abs() <= self.tolerance
    }
}

/// The figures of a test for which there are targets.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    median_ns: f64,
    p99_ns: f64,
    average_ns: f64,
    gbps: f64,
}

/// Figures of tests that have run on a system with unchanged parameters.
pub(super) type FigureCache = HashMap<(Test, Interface), Figures>;

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

/// Runs a test. The first half of the latencies is discarded, because it fills the caches.
fn figures(system: &System, test: &Test, interface: Interface, samples: SampleCounts) -> Result<Figures, HostError> {
    let test = Test { samples: samples.of(test), ..test.clone() };
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

/// Returns the residuals of `system` for all targets. Targets of one test share a run, and runs are distributed over
/// the cores of this machine.
///
/// # Errors
/// A test cannot run on the system.
pub fn residuals(
    system: &System,
    targets: &[CalibrationTarget],
    samples: SampleCounts,
) -> Result<Vec<Residual>, HostError> {
    cached_residuals(&mut FigureCache::new(), system, targets, samples)
}

/// Returns the same, with figures of earlier runs with the same number of samples taken from `known`, and adds new ones
/// to it.
pub(super) fn cached_residuals(
    known: &mut FigureCache,
    system: &System,
    targets: &[CalibrationTarget],
    samples: SampleCounts,
) -> Result<Vec<Residual>, HostError> {
    let mut seen = HashSet::new();
    let tests = targets.iter().map(|target| (target.test.clone(), target.interface));
    let missing: Vec<_> = tests.filter(|test| !known.contains_key(test) && seen.insert(test.clone())).collect();
    let found = run_all(system, &missing, samples)?;
    known.extend(missing.into_iter().zip(found));
    let mut all = Vec::new();
    for target in targets {
        let figures = known.get(&(target.test.clone(), target.interface)).expect("the test of every target has run");
        all.push(Residual {
            label: target.label(),
            statistic: target.statistic.name(),
            published: target.value,
            simulated: figures.value(target.statistic),
            tolerance: target.tolerance.of(target.value),
            is_required: target.is_required,
        });
    }
    all.extend(derived(targets, &all));
    Ok(all)
}

/// Runs all tests on all cores. Each worker takes the next test that has not started; a result does not depend on the
/// worker.
fn run_all(system: &System, tests: &[(Test, Interface)], samples: SampleCounts) -> Result<Vec<Figures>, HostError> {
    let next = AtomicUsize::new(0);
    let workers = std::thread::available_parallelism().map_or(1, NonZeroUsize::get).min(tests.len().max(1));
    let work = || {
        let mut done = Vec::new();
        while let Some((index, (test, interface))) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            tests.get(index).map(|test| (index, test))
        } {
            done.push((index, figures(system, test, *interface, samples)));
        }
        done
    };
    let mut done: Vec<(usize, Result<Figures, HostError>)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a simulation does not panic")).collect()
    });
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, figures)| figures).collect()
}

/// Returns residuals of figures that several targets determine together, computed in the same way from published and
/// simulated ones.
fn derived(targets: &[CalibrationTarget], residuals: &[Residual]) -> Vec<Residual> {
    let pairs: Vec<(&CalibrationTarget, &Residual)> = targets.iter().zip(residuals).collect();
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

/// Applies a function to the published figures and to the simulated ones.
fn both<T>(
    pairs: &[(&CalibrationTarget, &Residual)],
    function: impl Fn(&[(&CalibrationTarget, f64)]) -> Option<T>,
) -> Option<(T, T)> {
    let published: Vec<(&CalibrationTarget, f64)> =
        pairs.iter().map(|(target, residual)| (*target, residual.published)).collect();
    let simulated: Vec<(&CalibrationTarget, f64)> =
        pairs.iter().map(|(target, residual)| (*target, residual.simulated)).collect();
    Some((function(&published)?, function(&simulated)?))
}

/// Returns the DDIO capacity for lines that a device wrote, in MiB, and the cost of a miss, in nanoseconds: the least
/// squares fit of average = L0 + (1 - min(1, capacity / window)) * cost to 8 B lat-wrrd by window. The capacity is
/// searched in steps of 0.01 MiB.
fn ddio(figures: &[(&CalibrationTarget, f64)]) -> Option<(f64, f64)> {
    let points: Vec<(f64, f64)> = figures
        .iter()
        .filter(|(target, _)| {
            let test = &target.test;
            target.statistic == Statistic::AverageNs
                && (test.test, test.size_bytes, test.cache) == (Kind::LatWrrd, 8, Cache::Cold)
                && test.iommu == Iommu::Off
        })
        .map(|(target, average_ns)| (target.test.window_bytes as f64 / f64::from(1 << 20), *average_ns))
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

/// Returns the slope of the least squares line, and its sum of squared residuals.
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

/// Returns the loss of bandwidth of 64 B reads from remote memory, in percent of that from local memory.
fn remote_loss(figures: &[(&CalibrationTarget, f64)]) -> Option<f64> {
    let find = |numa| {
        let is_it = |test: &Test| {
            (test.test, test.size_bytes, test.window_bytes) == (Kind::BwRd, 64, 8192)
                && (test.numa, test.iommu, test.cache) == (numa, Iommu::Off, Cache::HostWarm)
        };
        figures.iter().find(|(target, _)| is_it(&target.test)).map(|(_, gbps)| *gbps)
    };
    let (local, remote) = (find(Numa::Local)?, find(Numa::Remote)?);
    Some((1.0 - remote / local) * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fit::targets;

    #[test]
    fn ddio_capacity_of_the_published_figures_matches_the_reference() {
        for (system, capacity_mib, cost_ns) in [("ib", 1.40, 76.0), ("hsw", 1.35, 84.0)] {
            let targets = targets::built_in(system).unwrap();
            let figures: Vec<(&CalibrationTarget, f64)> = targets.iter().map(|target| (target, target.value)).collect();
            let (found_mib, found_ns) = ddio(&figures).unwrap();
            assert!((found_mib / capacity_mib - 1.0).abs() < 0.03, "{system}: {found_mib} MiB");
            assert!((found_ns - cost_ns).abs() < 3.0, "{system}: {found_ns} ns");
        }
    }

    /// Checks every required figure on both calibrated systems. The samples are few, but the runs are deterministic.
    #[test]
    fn calibrated_systems_meet_their_targets() {
        let mut missed = Vec::new();
        for name in ["hsw", "ib"] {
            let system = System::named(name).unwrap();
            let all = residuals(&system, &targets::built_in(name).unwrap(), SampleCounts::QUICK).unwrap();
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
