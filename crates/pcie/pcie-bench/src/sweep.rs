//! Sweeps: every combination of lists of parameters, on every device.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use pcie::result::{Provenance, TestResult};
use pcie::test::{Cache, Iommu, Kind, Numa, Order, Test};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::registry::{self, DeviceOptions};
use crate::runner;

/// Largest number of combinations in a sweep.
pub const TESTS_MAX: usize = 100_000;

/// Lists of parameters, of which a sweep runs every combination; the last list varies fastest.
#[derive(Clone, Debug)]
pub struct Grid {
    /// Names of devices.
    pub devices: Vec<String>,
    /// Kinds of tests.
    pub tests: Vec<Kind>,
    /// Sockets of the memory.
    pub numas: Vec<Numa>,
    /// Modes of address translation.
    pub iommus: Vec<Iommu>,
    /// States of the caches.
    pub caches: Vec<Cache>,
    /// Orders in which units are visited.
    pub orders: Vec<Order>,
    /// Sizes of transfers.
    pub sizes_bytes: Vec<u32>,
    /// Sizes of windows.
    pub windows_bytes: Vec<u64>,
    /// Offsets of transfers in their units.
    pub host_offsets_bytes: Vec<u32>,
    /// Offsets of the device's buffer in its cache line.
    pub device_offsets_bytes: Vec<u32>,
    /// Number of latencies that a latency test measures.
    pub latency_samples: u64,
    /// Number of transfers that a bandwidth test makes.
    pub bandwidth_samples: u64,
    /// Seed of all random numbers.
    pub seed: u64,
}

/// One test on one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Name of the device.
    pub device: String,
    /// The test to run on it.
    pub test: Test,
}

/// Options of a sweep.
#[derive(Clone, Copy, Debug)]
pub struct SweepOptions {
    /// Options of the devices.
    pub device: DeviceOptions,
    /// Number of simulations that run in parallel.
    pub threads: usize,
    /// Whether results contain every sample.
    pub raw: bool,
}

impl Grid {
    /// Returns every combination once, in an order that depends on the lists only.
    ///
    /// # Errors
    /// There are more than [`TESTS_MAX`] combinations.
    pub fn jobs(&self) -> Result<Vec<Job>> {
        let grid = self.distinct();
        let count = [
            grid.devices.len(),
            grid.tests.len(),
            grid.numas.len(),
            grid.iommus.len(),
            grid.caches.len(),
            grid.orders.len(),
            grid.sizes_bytes.len(),
            grid.windows_bytes.len(),
            grid.host_offsets_bytes.len(),
            grid.device_offsets_bytes.len(),
        ];
        let count = count.into_iter().fold(1_usize, usize::saturating_mul);
        if count > TESTS_MAX {
            return Error::wrong_use(format!(
                "{count} combinations are too many for a sweep; choose at most {TESTS_MAX}"
            ));
        }
        let mut jobs = grid.each_kind();
        jobs = varied(jobs, &grid.numas, |test, value| test.numa = value);
        jobs = varied(jobs, &grid.iommus, |test, value| test.iommu = value);
        jobs = varied(jobs, &grid.caches, |test, value| test.cache = value);
        jobs = varied(jobs, &grid.orders, |test, value| test.order = value);
        jobs = varied(jobs, &grid.sizes_bytes, |test, value| test.size_bytes = value);
        jobs = varied(jobs, &grid.windows_bytes, |test, value| test.window_bytes = value);
        jobs = varied(jobs, &grid.host_offsets_bytes, |test, value| test.host_offset_bytes = value);
        Ok(varied(jobs, &grid.device_offsets_bytes, |test, value| test.device_offset_bytes = value))
    }

    /// Returns these lists without repeated values: a test that runs twice would give two points of one line.
    fn distinct(&self) -> Self {
        Self {
            devices: distinct(&self.devices),
            tests: distinct(&self.tests),
            numas: distinct(&self.numas),
            iommus: distinct(&self.iommus),
            caches: distinct(&self.caches),
            orders: distinct(&self.orders),
            sizes_bytes: distinct(&self.sizes_bytes),
            windows_bytes: distinct(&self.windows_bytes),
            host_offsets_bytes: distinct(&self.host_offsets_bytes),
            device_offsets_bytes: distinct(&self.device_offsets_bytes),
            ..*self
        }
    }

    fn each_kind(&self) -> Vec<Job> {
        let job = |device: &String, kind: Kind| Job {
            device: device.clone(),
            test: Test {
                test: kind,
                size_bytes: 0,
                window_bytes: 0,
                host_offset_bytes: 0,
                device_offset_bytes: 0,
                order: Order::default(),
                cache: Cache::default(),
                iommu: Iommu::default(),
                numa: Numa::default(),
                samples: if kind.is_latency() { self.latency_samples } else { self.bandwidth_samples },
                seed: self.seed,
            },
        };
        self.devices.iter().flat_map(|device| self.tests.iter().map(move |kind| job(device, *kind))).collect()
    }
}

/// Returns the values in the order of their first occurrence.
fn distinct<T: Clone + Eq + Hash>(values: &[T]) -> Vec<T> {
    let mut known = HashSet::new();
    values.iter().filter(|value| known.insert(*value)).cloned().collect()
}

/// Returns each job once for each value.
fn varied<T: Copy>(jobs: Vec<Job>, values: &[T], set: impl Fn(&mut Test, T)) -> Vec<Job> {
    let with = |job: &Job, value: T| {
        let mut job = job.clone();
        set(&mut job.test, value);
        job
    };
    jobs.iter()
        .flat_map(|job| values.iter().map(move |value| (job, *value)))
        .map(|(job, value)| with(job, value))
        .collect()
}

/// Runs all jobs and returns their results in the order of the jobs. Simulations run in parallel; measurements on real
/// devices run alone, after the simulations.
///
/// # Errors
/// A test that is invalid, or that its device does not support, before any job runs; otherwise the first job that
/// failed.
pub fn run(jobs: &[Job], options: SweepOptions, before: &(dyn Fn(&Job) + Sync)) -> Result<Vec<TestResult>> {
    if options.raw {
        runner::check_raw(jobs.iter().map(|job| &job.test))?;
    }
    let (mut simulated, mut measured) = (Vec::new(), Vec::new());
    let mut open = DeviceCache::default();
    for (index, job) in jobs.iter().enumerate() {
        job.test.check()?;
        let device = open.get(&job.device, options.device)?;
        device.check(&job.test)?;
        if device.info().provenance == Provenance::Measured { measured.push(index) } else { simulated.push(index) }
    }
    drop(open);
    let results: Mutex<Vec<Option<Result<TestResult>>>> = Mutex::new(jobs.iter().map(|_| None).collect());
    let run_one = |open: &mut DeviceCache, index: usize| {
        let job = &jobs[index];
        before(job);
        let device = open.get(&job.device, options.device);
        let result = device.and_then(|device| runner::run(device, &job.test, options.raw));
        let is_fine = result.is_ok();
        results.lock().unwrap_or_else(std::sync::PoisonError::into_inner)[index] = Some(result);
        is_fine
    };
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..options.threads.clamp(1, simulated.len().max(1)) {
            scope.spawn(|| {
                let mut open = DeviceCache::default();
                while let Some(index) = simulated.get(next.fetch_add(1, Ordering::Relaxed)) {
                    run_one(&mut open, *index);
                }
            });
        }
    });
    // Results after a failure of the device would be meaningless, so no further measurement runs.
    let mut open = DeviceCache::default();
    measured.into_iter().all(|index| run_one(&mut open, index));
    let results = results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    results.into_iter().map(|result| result.unwrap_or_else(|| Error::failed("a job did not run"))).collect()
}

/// The device of the last job, reused while the name stays the same: jobs of one device are consecutive, and a GPU
/// takes half a second to open. Other devices are closed and hold no memory meanwhile.
#[derive(Default)]
struct DeviceCache(Option<(String, Box<dyn Device>)>);

impl DeviceCache {
    fn get(&mut self, name: &str, options: DeviceOptions) -> Result<&mut dyn Device> {
        let same = self.0.take().filter(|(opened, _)| opened == name);
        let device = match same {
            Some((_, device)) => device,
            None => registry::open(name, options)?,
        };
        Ok(self.0.insert((name.to_owned(), device)).1.as_mut())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid() -> Grid {
        Grid {
            devices: vec!["memory".into()],
            tests: vec![Kind::LatRd, Kind::BwWr],
            numas: vec![Numa::Local],
            iommus: vec![Iommu::Off],
            caches: vec![Cache::HostWarm],
            orders: vec![Order::Random],
            sizes_bytes: vec![64, 256],
            windows_bytes: vec![4096, 8192],
            host_offsets_bytes: vec![0],
            device_offsets_bytes: vec![0],
            latency_samples: 100,
            bandwidth_samples: 200,
            seed: 7,
        }
    }

    const OPTIONS: SweepOptions = SweepOptions { device: DEVICE, threads: 2, raw: false };
    const DEVICE: DeviceOptions = DeviceOptions { pages: crate::memory::Pages::Base, bar: None, may_overwrite: false };

    #[test]
    fn every_combination_is_made_once_in_a_fixed_order() {
        let jobs = grid().jobs().unwrap();
        let found: Vec<_> = jobs
            .iter()
            .map(|job| (job.test.test, job.test.size_bytes, job.test.window_bytes, job.test.samples))
            .collect();
        let expected = [
            (Kind::LatRd, 64, 4096, 100),
            (Kind::LatRd, 64, 8192, 100),
            (Kind::LatRd, 256, 4096, 100),
            (Kind::LatRd, 256, 8192, 100),
            (Kind::BwWr, 64, 4096, 200),
            (Kind::BwWr, 64, 8192, 200),
            (Kind::BwWr, 256, 4096, 200),
            (Kind::BwWr, 256, 8192, 200),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn repeated_values_count_once() {
        let devices = vec!["memory".into(), "memory".into()];
        let twice = Grid { devices, sizes_bytes: vec![64, 256, 64], caches: vec![Cache::Cold; 2], ..grid() };
        assert_eq!(twice.jobs().unwrap(), Grid { caches: vec![Cache::Cold], ..grid() }.jobs().unwrap());
    }

    #[test]
    fn too_many_combinations_are_refused_before_they_are_made() {
        let many = Grid { windows_bytes: (1..=1000).collect(), sizes_bytes: (1..=1000).collect(), ..grid() };
        assert!(many.jobs().unwrap_err().to_string().contains("2000000 combinations"));
    }

    #[test]
    fn results_are_in_the_order_of_the_jobs() {
        let jobs = grid().jobs().unwrap();
        let begun = AtomicUsize::new(0);
        let results = run(&jobs, OPTIONS, &|_| {
            begun.fetch_add(1, Ordering::Relaxed);
        });
        let tests: Vec<Test> = results.unwrap().into_iter().map(|result| result.test).collect();
        assert_eq!(tests, jobs.iter().map(|job| job.test.clone()).collect::<Vec<_>>());
        assert_eq!(begun.into_inner(), jobs.len());
    }

    #[test]
    fn an_invalid_test_stops_a_sweep_before_it_begins() {
        let jobs = Grid { sizes_bytes: vec![64, 4096], windows_bytes: vec![1024], ..grid() }.jobs().unwrap();
        let error = run(&jobs, OPTIONS, &|_| panic!("nothing may run")).unwrap_err();
        assert!(error.is_wrong_use(), "{error}");
    }
}
