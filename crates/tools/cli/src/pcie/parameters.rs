//! Shared parts of `bench`, `sweep`, `compare` and `import`: test parameters on the command line, tables and plots of
//! results.

use std::path::Path;

use anyhow::{Context, Result};
use pcie::result::{Outcome, PredictionNote, Provenance, TestResult};
use pcie::test::{Iommu, Numa, Order};
use pcie_bench::memory::Pages;
use pcie_bench::registry::DeviceOptions;
use serde::de::DeserializeOwned;
use stats::{Align, Table};

use super::figures::{Labelled, plots};
use super::sizes::{Size, Sizes};
use crate::wrong_use::WrongUse;

/// Default number of latencies of a test.
pub const LATENCY_SAMPLES: u64 = 1 << 18;
/// Default number of transfers of a bandwidth test.
pub const BANDWIDTH_SAMPLES: u64 = 1 << 20;
/// Default number of transfers of each bandwidth test of a sweep: a figure has hundreds of tests, and with this number
/// the error of a rate is smaller than the width of its line.
pub const SWEEP_BANDWIDTH_SAMPLES: u64 = 1 << 17;

/// Options that apply only to some devices.
#[derive(clap::Args)]
pub struct DeviceArguments {
    /// Pages of the window of device memory: 4k, thp (2 MB, transparent), 2m or 1g (both from the kernel's pool)
    /// [default: 4k]
    #[arg(long, value_name = "SIZE", value_parser = parse_keyword::<Pages>)]
    pages: Option<Pages>,
    /// The BAR of device pci:ADDRESS [default: the largest]
    #[arg(long, value_name = "NUMBER")]
    bar: Option<u8>,
    /// Tests that write may overwrite what the BAR of device pci:ADDRESS holds
    #[arg(long)]
    overwrite: bool,
}

impl DeviceArguments {
    /// Returns the options in the form in which devices accept them.
    pub fn options(&self) -> DeviceOptions {
        DeviceOptions { pages: self.pages.unwrap_or_default(), bar: self.bar, may_overwrite: self.overwrite }
    }

    /// Refuses options that none of these devices uses.
    pub fn check(&self, devices: &[String]) -> Result<()> {
        let is_used = |prefix: &str| devices.iter().any(|name| name.split(':').next() == Some(prefix));
        for (is_given, option, prefix, device, remedy) in [
            (self.pages.is_some(), "--pages", "memory", "memory", "; the pages of an IOMMU are those of --iommu"),
            (self.bar.is_some(), "--bar", "pci", "pci:ADDRESS", ""),
            (self.overwrite, "--overwrite", "pci", "pci:ADDRESS", ""),
        ] {
            if is_given && !is_used(prefix) {
                let devices = devices.join(", ");
                let what = format!("{option} has no effect on {devices}; leave it out, or choose device {device}");
                return Err(WrongUse::of(what + remedy).into());
            }
        }
        Ok(())
    }
}

/// Parses a keyword of `T` as it is spelled in results.
pub fn parse_keyword<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(serde_json::Value::String(text.to_owned())).map_err(|error| {
        let text = error.to_string().replace('`', "'");
        text.replace("unknown variant", "there is no").replace(", expected one of", "; choose one of")
    })
}

/// Parses a transfer size or an offset.
pub fn parse_bytes(text: &str) -> Result<u32, String> {
    let Size(bytes) = text.parse()?;
    u32::try_from(bytes).map_err(|_| format!("{bytes} bytes are too many; choose at most 4096"))
}

/// Converts transfer sizes.
pub fn parse_bytes_list(sizes: &Sizes) -> Result<Vec<u32>> {
    let small = |bytes: &u64| u32::try_from(*bytes).map_err(|_| format!("a transfer of {bytes} bytes is too large"));
    sizes.0.iter().map(small).collect::<Result<_, _>>().map_err(|error| WrongUse::of(error).into())
}

/// Classifies an error of the benchmark as wrong use or failure.
pub fn classified(error: pcie_bench::Error) -> anyhow::Error {
    if error.is_wrong_use() { WrongUse::of(error).into() } else { error.into() }
}

/// Returns results as a table with a row for each.
pub fn table(results: &[TestResult]) -> String {
    const HEADS: [(&str, Align); 12] = [
        ("DEVICE", Align::Left),
        ("TEST", Align::Left),
        ("SIZE B", Align::Right),
        ("WINDOW", Align::Right),
        ("STATE", Align::Left),
        ("p50 ns", Align::Right),
        ("p95 ns", Align::Right),
        ("p99 ns", Align::Right),
        ("p99.9 ns", Align::Right),
        ("max ns", Align::Right),
        ("Gb/s", Align::Right),
        ("", Align::Left),
    ];
    let mut table = Table::new(&HEADS);
    for result in results {
        let mut cells = vec![
            result.device.clone(),
            result.test.test.to_string(),
            result.test.size_bytes.to_string(),
            units::size(result.test.window_bytes),
            state(result),
        ];
        let ns = |ns: f64| format!("{ns:.1}");
        match &result.outcome {
            Outcome::Latency(latency) => {
                cells.extend([latency.p50_ns, latency.p95_ns].map(ns));
                cells.push(latency.p99_ns.map_or("-".to_owned(), ns));
                cells.extend([latency.p999_ns, latency.max_ns].map(ns));
                cells.push(String::new());
            }
            Outcome::Bandwidth(bandwidth) => {
                cells.extend(std::iter::repeat_n(String::new(), 5));
                cells.push(format!("{:.3}", bandwidth.gbps));
            }
        }
        cells.push(provenance(result.provenance, result.prediction.as_ref()));
        table.row(cells);
    }
    table.render() + &predictions(results.iter())
}

/// Returns a line for each predicted device, which says what its figures rest on.
pub fn predictions<'a>(results: impl Iterator<Item = &'a TestResult>) -> String {
    let mut lines: Vec<String> = Vec::new();
    for result in results {
        let Some(prediction) = &result.prediction else { continue };
        let line = format!("{} is a prediction; it rests on {}.\n", result.device, prediction.rests_on);
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    if lines.is_empty() { String::new() } else { format!("\n{}", lines.concat()) }
}

/// Returns the state of the caches, and every parameter that is not at its default.
pub fn state(result: &TestResult) -> String {
    let test = &result.test;
    let cache = test.cache.name();
    let iommu = if test.iommu == Iommu::Off { String::new() } else { format!(" iommu-{}", test.iommu.name()) };
    let numa = if test.numa == Numa::Remote { " remote" } else { "" };
    let order = if test.order == Order::Sequential { " sequential" } else { "" };
    let offset = |name: &str, bytes: u32| if bytes == 0 { String::new() } else { format!(" {name}+{bytes}") };
    let offsets = offset("host", test.host_offset_bytes) + &offset("device", test.device_offset_bytes);
    format!("{cache}{iommu}{numa}{order}{offsets}")
}

/// Returns where the figure comes from and, if it is a prediction, how far it may be off.
pub fn provenance(provenance: Provenance, prediction: Option<&PredictionNote>) -> String {
    use Provenance::{Measured, Modelled, Published};
    let word = match (provenance, prediction) {
        (_, Some(PredictionNote { error_percent: Some(error), .. })) => return format!("prediction, +-{error:.0}%"),
        (_, Some(_)) => "prediction, error unknown",
        (Measured, None) => "measured",
        (Modelled, None) => "modelled",
        (Published, None) => "published",
    };
    word.to_owned()
}

/// Creates the directory for plots. Called before anything is measured, so that a failure is reported at once.
pub fn make_directory(directory: Option<&Path>) -> Result<()> {
    let Some(directory) = directory else { return Ok(()) };
    std::fs::create_dir_all(directory)
        .map_err(|error| WrongUse::of(format!("cannot create the directory {}: {error}", directory.display())).into())
}

/// Writes all plots of the results and logs their paths.
pub fn write_plots(directory: &Path, results: &[Labelled<'_>]) -> Result<()> {
    for (name, figure) in plots(results) {
        for path in figure.write(directory, &name).with_context(|| format!("plot {name}"))? {
            eprintln!("crosslane: wrote {}", path.display());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pcie::test::Kind;

    #[test]
    fn keywords_are_spelled_as_in_results_and_an_error_lists_all_of_them() {
        assert_eq!(parse_keyword::<Kind>("bw-rdwr"), Ok(Kind::BwRdwr));
        assert_eq!(parse_keyword::<Iommu>("4k"), Ok(Iommu::Pages4K));
        let error = parse_keyword::<Kind>("lat").unwrap_err();
        assert!(
            error.contains("'lat'") && error.contains("; choose one of") && error.contains("'lat-wrrd'"),
            "{error}"
        );
    }
}
