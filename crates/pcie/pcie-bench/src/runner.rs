//! Runs one test on one device.

use pcie::result::{Bandwidth, Outcome, PredictionNote, SCHEMA, TestResult};
use pcie::test::Test;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::statistics::Recorder;

/// Largest number of samples that are kept one by one, of all tests together: 256 MiB, or 16 latency tests as long as
/// the published ones.
pub const RAW_SAMPLES_MAX: u64 = 1 << 25;

/// Checks that samples kept one by one fit into memory.
///
/// # Errors
/// They are more than [`RAW_SAMPLES_MAX`].
pub fn check_raw<'a>(tests: impl Iterator<Item = &'a Test>) -> Result<()> {
    let latencies = tests.filter(|test| test.test.is_latency());
    let samples = latencies.map(|test| test.samples).fold(0, u64::saturating_add);
    if samples > RAW_SAMPLES_MAX {
        return Error::wrong_use(format!(
            "--raw keeps every sample, and {samples} are too many; choose fewer samples or tests, at most \
             {RAW_SAMPLES_MAX} together"
        ));
    }
    Ok(())
}

/// Checks, prepares and runs a test.
///
/// # Errors
/// Names what is invalid in the test, what the device does not support, or what failed.
pub fn run(device: &mut dyn Device, test: &Test, raw: bool) -> Result<TestResult> {
    test.check()?;
    if raw {
        check_raw(std::iter::once(test))?;
    }
    device.check(test)?;
    device.prepare(test)?;
    let outcome = if test.test.is_latency() {
        let mut recorder = Recorder::new(raw);
        device.latencies(test, &mut |ns| recorder.add(ns))?;
        Outcome::Latency(recorder.finish(device.timer())?)
    } else {
        Outcome::Bandwidth(rate(test, device.bandwidth(test)?)?)
    };
    let info = device.info();
    Ok(TestResult {
        schema: SCHEMA.to_owned(),
        provenance: info.provenance,
        device: info.name.clone(),
        description: info.description.clone(),
        link: info.link,
        prediction: info.prediction.as_ref().map(|prediction| PredictionNote {
            rests_on: prediction.rests_on.clone(),
            error_percent: prediction.error_percent(test),
        }),
        test: test.clone(),
        outcome,
    })
}

fn rate(test: &Test, elapsed_ns: f64) -> Result<Bandwidth> {
    if elapsed_ns <= 0.0 {
        return Error::failed(format!(
            "{} transfers took less than the clock can measure; raise --samples",
            test.samples
        ));
    }
    let transfers_per_ns = test.samples as f64 / elapsed_ns;
    let gbps = transfers_per_ns * f64::from(test.size_bytes) * 8.0;
    Ok(Bandwidth { gbps, mtransfers_per_s: transfers_per_ns * 1e3, elapsed_ns })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{DeviceInfo, Timer};
    use crate::testing::test;
    use pcie::result::Provenance;
    use pcie::test::{Cache, Kind};

    /// A device whose transfers take alternately 10 and 20 ns.
    struct Steady(DeviceInfo, Vec<&'static str>);

    impl Device for Steady {
        fn info(&self) -> &DeviceInfo {
            &self.0
        }

        fn check(&self, test: &Test) -> Result<()> {
            if test.cache == Cache::Cold { Error::wrong_use("never cold") } else { Ok(()) }
        }

        fn prepare(&mut self, _: &Test) -> Result<()> {
            self.1.push("prepare");
            Ok(())
        }

        fn timer(&self) -> Timer {
            Timer { cost_ns: 1.0, step_ns: 2.0 }
        }

        fn latencies(&mut self, test: &Test, sink: &mut (dyn FnMut(f64) + Send)) -> Result<()> {
            self.1.push("latencies");
            (0..test.samples).for_each(|index| sink(if index % 2 == 0 { 10.0 } else { 20.0 }));
            Ok(())
        }

        fn bandwidth(&mut self, test: &Test) -> Result<f64> {
            self.1.push("bandwidth");
            Ok(test.samples as f64 * 15.0)
        }
    }

    fn steady() -> Steady {
        let name = "steady".to_owned();
        Steady(
            DeviceInfo {
                name,
                description: "a test".into(),
                provenance: Provenance::Modelled,
                link: None,
                prediction: None,
            },
            Vec::new(),
        )
    }

    #[test]
    fn samples_that_memory_cannot_hold_are_refused() {
        let long = Test { samples: RAW_SAMPLES_MAX + 1, cache: Cache::HostWarm, ..test(Kind::LatRd) };
        let error = run(&mut steady(), &long, true).unwrap_err();
        assert!(error.is_wrong_use() && error.to_string().contains("33554433 are too many"), "{error}");
        let half = Test { samples: RAW_SAMPLES_MAX / 2 + 1, ..long.clone() };
        assert!(check_raw([&half].into_iter()).is_ok() && check_raw([&half, &half].into_iter()).is_err());
        let rate = Test { test: Kind::BwRd, ..long };
        assert!(check_raw([&rate].into_iter()).is_ok(), "a rate has no samples");
    }

    #[test]
    fn a_latency_test_yields_a_distribution() {
        let mut device = steady();
        let result = run(&mut device, &test(Kind::LatRd), true).unwrap();
        assert_eq!(device.1, ["prepare", "latencies"]);
        assert_eq!((result.schema.as_str(), result.device.as_str()), (SCHEMA, "steady"));
        let Outcome::Latency(latency) = result.outcome else { panic!("a latency") };
        assert_eq!((latency.average_ns, latency.min_ns, latency.max_ns), (15.0, 10.0, 20.0));
        assert_eq!((latency.raw_ns.len(), latency.timer_step_ns), (1000, 2.0));
    }

    #[test]
    fn a_bandwidth_test_yields_a_rate() {
        let result = run(&mut steady(), &test(Kind::BwRd), false).unwrap();
        let Outcome::Bandwidth(bandwidth) = result.outcome else { panic!("a bandwidth") };
        assert!((bandwidth.gbps - 64.0 * 8.0 / 15.0).abs() < 1e-9, "{bandwidth:?}");
        assert!((bandwidth.mtransfers_per_s - 1000.0 / 15.0).abs() < 1e-9, "{bandwidth:?}");
    }

    #[test]
    fn an_invalid_test_never_reaches_the_device() {
        let mut device = steady();
        let small = Test { window_bytes: 1024, size_bytes: 2048, ..test(Kind::BwRd) };
        assert!(run(&mut device, &small, false).unwrap_err().is_wrong_use());
        let cold = Test { cache: Cache::Cold, ..test(Kind::BwRd) };
        assert_eq!(run(&mut device, &cold, false).unwrap_err().to_string(), "never cold");
        assert!(device.1.is_empty());
    }
}
