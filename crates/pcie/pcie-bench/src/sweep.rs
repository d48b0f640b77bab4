//! Many tests at once: every combination of lists of parameters, on every device.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use pcie::result::{Provenance, TestResult};
use pcie::test::{Cache, Iommu, Kind, Numa, Order, Test};

use crate::device::{self, Device, DeviceOptions};
use crate::error::{Error, Result};
use crate::runner;

/// Combinations of one sweep at most.
pub const TESTS_MAX: usize = 100_000;

/// Lists of parameters: a sweep makes every combination, the last list varying first.
#[derive(Clone, Debug)]
pub struct Grid {
    /// Names of devices.
    pub devices: Vec<String>,
    /// What is measured.
    pub tests: Vec<Kind>,
    /// Where memory is.
    pub numas: Vec<Numa>,
    /// How addresses are translated.
    pub iommus: Vec<Iommu>,
    /// What the caches hold.
    pub caches: Vec<Cache>,
    /// In which order units are visited.
    pub orders: Vec<Order>,
    /// Sizes of transfers.
    pub sizes_bytes: Vec<u32>,
    /// Sizes of windows.
    pub windows_bytes: Vec<u64>,
    /// Where in their units transfers begin.
    pub host_offsets_bytes: Vec<u32>,
    /// Where in its own line the device's buffer begins.
    pub device_offsets_bytes: Vec<u32>,
    /// Latencies of a latency test.
    pub latency_samples: u64,
    /// Transfers of a bandwidth test.
    pub bandwidth_samples: u64,
    /// Of everything random.
    pub seed: u64,
}

/// One test on one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// The device's name.
    pub device: String,
    /// What to do there.
    pub test: Test,
}

/// How jobs are run.
#[derive(Clone, Copy, Debug)]
pub struct SweepOptions {
    /// What only some devices ask.
    pub device: DeviceOptions,
    /// Simulations that run at a time.
    pub threads: usize,
    /// Whether every sample is kept.
    pub raw: bool,
}

impl Grid {
    /// Every combination, in an order that depends on the lists alone.
    ///
    /// # Errors
    /// If there are more than [`TESTS_MAX`].
    pub fn jobs(&self) -> Result<Vec<Job>> {
        let count = [
            self.devices.len(),
            self.tests.len(),
            self.numas.len(),
            self.iommus.len(),
            self.caches.len(),
            self.orders.len(),
            self.sizes_bytes.len(),
            self.windows_bytes.len(),
            self.host_offsets_bytes.len(),
            self.device_offsets_bytes.len(),
        ];
        let count = count.into_iter().fold(1_usize, usize::saturating_mul);
        if count > TESTS_MAX {
            return Error::wrong_use(format!(
                "{count} combinations are too many for a sweep; ask for {TESTS_MAX} at most"
            ));
        }
        let mut jobs = self.each_kind();
        jobs = varied(jobs, &self.numas, |test, value| test.numa = value);
        jobs = varied(jobs, &self.iommus, |test, value| test.iommu = value);
        jobs = varied(jobs, &self.caches, |test, value| test.cache = value);
        jobs = varied(jobs, &self.orders, |test, value| test.order = value);
        jobs = varied(jobs, &self.sizes_bytes, |test, value| test.size_bytes = value);
        jobs = varied(jobs, &self.windows_bytes, |test, value| test.window_bytes = value);
        jobs = varied(jobs, &self.host_offsets_bytes, |test, value| test.host_offset_bytes = value);
        Ok(varied(jobs, &self.device_offsets_bytes, |test, value| test.device_offset_bytes = value))
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

/// Each job once for each value.
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

/// Runs all jobs and returns their results in the order of the jobs. Simulations run side by side; what is measured on
/// a real device runs alone, after them.
///
/// # Errors
/// Before anything runs: a test or a device that does not fit. Later: the first job that failed.
pub fn run(jobs: &[Job], options: SweepOptions, before: &(dyn Fn(&Job) + Sync)) -> Result<Vec<TestResult>> {
    let (mut simulated, mut measured) = (Vec::new(), Vec::new());
    let mut open = Opened::default();
    for (index, job) in jobs.iter().enumerate() {
        job.test.check()?;
        let device = open.get(&job.device, options.device)?;
        device.check(&job.test)?;
        if device.about().provenance == Provenance::Measured { measured.push(index) } else { simulated.push(index) }
    }
    drop(open);
    let results: Mutex<Vec<Option<Result<TestResult>>>> = Mutex::new(jobs.iter().map(|_| None).collect());
    let run_one = |open: &mut Opened, index: usize| {
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
                let mut open = Opened::default();
                while let Some(index) = simulated.get(next.fetch_add(1, Ordering::Relaxed)) {
                    run_one(&mut open, *index);
                }
            });
        }
    });
    // What a device does after a failure means nothing.
    let mut open = Opened::default();
    measured.into_iter().all(|index| run_one(&mut open, index));
    let results = results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    results.into_iter().map(|result| result.unwrap_or_else(|| Error::failed("a job was left out"))).collect()
}

/// The device of the last job: jobs of one device come one after the other, and a GPU takes half a second to open. No
/// other device holds memory meanwhile.
#[derive(Default)]
struct Opened(Option<(String, Box<dyn Device>)>);

impl Opened {
    fn get(&mut self, name: &str, options: DeviceOptions) -> Result<&mut dyn Device> {
        let same = self.0.take().filter(|(opened, _)| opened == name);
        let device = match same {
            Some((_, device)) => device,
            None => device::open(name, options)?,
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
    fn too_many_combinations_are_refused_before_they_are_made() {
        let many = Grid { windows_bytes: vec![4096; 1000], sizes_bytes: vec![64; 1000], ..grid() };
        assert!(many.jobs().unwrap_err().to_string().contains("2000000 combinations"));
    }

    #[test]
    fn results_come_in_the_order_of_the_jobs() {
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
    fn one_impossible_test_stops_a_sweep_before_it_begins() {
        let jobs = Grid { sizes_bytes: vec![64, 4096], windows_bytes: vec![1024], ..grid() }.jobs().unwrap();
        let error = run(&jobs, OPTIONS, &|_| panic!("nothing may run")).unwrap_err();
        assert!(error.is_wrong_use(), "{error}");
    }
}
