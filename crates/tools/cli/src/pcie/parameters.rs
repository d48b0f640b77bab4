//! What `bench` and `sweep` share: parameters of tests on the command line, results as text, files of pictures.

use std::path::Path;

use super::figures::{Labelled, pictures};
use anyhow::{Context, Result};
use pcie::result::{Outcome, TestResult};
use pcie::test::{Cache, Iommu, Numa, Order};
use pcie_bench::memory::Pages;
use pcie_bench::registry::DeviceOptions;
use serde::de::DeserializeOwned;
use stats::{Align, Table};

use super::sizes::{Size, Sizes};
use crate::wrong_use::WrongUse;

/// Latencies of a test that says no number.
pub const LATENCY_SAMPLES: u64 = 1 << 18;
/// Transfers of a bandwidth test that says no number.
pub const BANDWIDTH_SAMPLES: u64 = 1 << 20;
/// Transfers of each bandwidth test of a sweep that says no number: a figure has hundreds, and this many move a rate by
/// less than its line is wide.
pub const SWEEP_BANDWIDTH_SAMPLES: u64 = 1 << 17;

/// What only some devices ask.
#[derive(clap::Args)]
pub struct OfDevice {
    /// Pages of the window of device memory: 4k, thp (2 MB, transparent), 2m or 1g (both from the kernel's pool)
    #[arg(long, value_name = "SIZE", default_value = "4k", value_parser = word::<Pages>)]
    pages: Pages,
    /// The BAR of device pci:ADDRESS [default: the largest]
    #[arg(long, value_name = "NUMBER")]
    bar: Option<u8>,
    /// Tests that write may overwrite what the BAR of device pci:ADDRESS holds
    #[arg(long)]
    overwrite: bool,
}

impl OfDevice {
    /// As the devices take them.
    pub fn options(&self) -> DeviceOptions {
        DeviceOptions { pages: self.pages, bar: self.bar, may_overwrite: self.overwrite }
    }
}

/// One of the words that the result form has for `T`.
pub fn word<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(serde_json::Value::String(text.to_owned())).map_err(|error| {
        let text = error.to_string().replace('`', "'");
        text.replace("unknown variant", "there is no").replace(", expected one of", "; choose one of")
    })
}

/// A size of a transfer or an offset.
pub fn small(text: &str) -> Result<u32, String> {
    let Size(bytes) = text.parse()?;
    u32::try_from(bytes).map_err(|_| format!("{bytes} bytes are too many; choose 4096 at most"))
}

/// Sizes of transfers: one, a list or a range.
pub fn small_list(sizes: &Sizes) -> Result<Vec<u32>> {
    let small = |bytes: &u64| u32::try_from(*bytes).map_err(|_| format!("a transfer of {bytes} bytes is too large"));
    sizes.0.iter().map(small).collect::<Result<_, _>>().map_err(|error| WrongUse::of(error).into())
}

/// An error of the benchmark with its exit code.
pub fn judged(error: pcie_bench::Error) -> anyhow::Error {
    if error.is_wrong_use() { WrongUse::of(error).into() } else { error.into() }
}

/// Results as a table, a row each.
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
        cells.push(provenance(result).to_owned());
        table.row(cells);
    }
    table.render()
}

/// Caches and everything that is not as usual.
pub fn state(result: &TestResult) -> String {
    let test = &result.test;
    let cache = match test.cache {
        Cache::Cold => "cold",
        Cache::HostWarm => "host-warm",
        Cache::DeviceWarm => "device-warm",
    };
    let iommu = match test.iommu {
        Iommu::Off => "",
        Iommu::Pages4K => " iommu-4k",
        Iommu::Pages2M => " iommu-2m",
    };
    let numa = if test.numa == Numa::Remote { " remote" } else { "" };
    let order = if test.order == Order::Sequential { " sequential" } else { "" };
    let offset = |name: &str, bytes: u32| if bytes == 0 { String::new() } else { format!(" {name}+{bytes}") };
    let offsets = offset("host", test.host_offset_bytes) + &offset("device", test.device_offset_bytes);
    format!("{cache}{iommu}{numa}{order}{offsets}")
}

fn provenance(result: &TestResult) -> &'static str {
    use pcie::result::Provenance::{Measured, Modelled, Published};
    match result.provenance {
        Measured => "measured",
        Modelled => "modelled",
        Published => "published",
    }
}

/// Makes the directory for pictures before anything is measured, not after.
pub fn make_directory(directory: Option<&Path>) -> Result<()> {
    let Some(directory) = directory else { return Ok(()) };
    std::fs::create_dir_all(directory)
        .map_err(|error| WrongUse::of(format!("cannot make the directory {}: {error}", directory.display())).into())
}

/// Writes every picture the results give and says which.
pub fn write_pictures(directory: &Path, results: &[Labelled<'_>]) -> Result<()> {
    for (name, figure) in pictures(results) {
        for path in figure.write(directory, &name).with_context(|| format!("picture {name}"))? {
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
    fn words_are_those_of_the_result_form_and_others_are_answered_with_all_of_them() {
        assert_eq!(word::<Kind>("bw-rdwr"), Ok(Kind::BwRdwr));
        assert_eq!(word::<Iommu>("4k"), Ok(Iommu::Pages4K));
        let error = word::<Kind>("lat").unwrap_err();
        assert!(
            error.contains("'lat'") && error.contains("; choose one of") && error.contains("'lat-wrrd'"),
            "{error}"
        );
    }
}
