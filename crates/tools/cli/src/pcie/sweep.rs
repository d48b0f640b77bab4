//! `crosslane pcie sweep`: every combination of lists of parameters.

use std::path::PathBuf;
use std::sync::Mutex;

use super::figures::{Labelled, Preset};
use anyhow::Result;
use clap::ValueEnum;
use crosslane_bench::Progress;
use pcie::result::TestResult;
use pcie::test::{Cache, Iommu, Kind, Numa, Order};
use pcie_bench::files;
use pcie_bench::sweep::{self, Grid, Job, SweepOptions};

use super::parameters::{self, OfDevice, judged, small, small_list, word};
use super::sizes::Sizes;
use crate::output;

const LISTS: [&str; 9] = ["test", "size", "window", "cache", "iommu", "numa", "order", "host_offset", "device_offset"];

/// Lists of parameters, or a figure of the paper.
#[derive(clap::Args)]
pub struct Options {
    /// Devices: sim:SYSTEM, memory, pci:ADDRESS, cuda:N
    #[arg(long, value_name = "DEVICE,...", value_delimiter = ',', required = true)]
    device: Vec<String>,
    /// The tests and parameters of a figure of the paper, in place of the lists below
    #[arg(long, value_enum, conflicts_with_all = LISTS)]
    figure: Option<FigureName>,
    /// lat-rd, lat-wrrd, bw-rd, bw-wr, bw-rdwr
    #[arg(long, value_name = "TEST,...", value_delimiter = ',', value_parser = word::<Kind>)]
    #[arg(required_unless_present = "figure")]
    test: Vec<Kind>,
    /// Bytes of a transfer: a list or a range, as in 64,128 or 64..2048:64
    #[arg(long, value_name = "BYTES,...", default_value = "64")]
    size: Sizes,
    /// Memory over which transfers wander, 1K to 64M
    #[arg(long, value_name = "BYTES,...", default_value = "8K")]
    window: Sizes,
    /// What the caches hold before: cold, host-warm, device-warm
    #[arg(long, value_name = "STATE,...", value_delimiter = ',', default_value = "cold", value_parser = word::<Cache>)]
    cache: Vec<Cache>,
    /// Address translation: off, 4k, 2m
    #[arg(long, value_name = "PAGES,...", value_delimiter = ',', default_value = "off", value_parser = word::<Iommu>)]
    iommu: Vec<Iommu>,
    /// Memory on the device's socket or another: local, remote
    #[arg(long, value_name = "PLACE,...", value_delimiter = ',', default_value = "local", value_parser = word::<Numa>)]
    numa: Vec<Numa>,
    /// Order of visits: random, sequential
    #[arg(long, value_name = "ORDER,...", value_delimiter = ',', default_value = "random")]
    #[arg(value_parser = word::<Order>)]
    order: Vec<Order>,
    /// Where in its cache line a transfer begins, 0 to 63
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',', default_value = "0", value_parser = small)]
    host_offset: Vec<u32>,
    /// Where in its line the device's buffer begins, 0 to 63
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',', default_value = "0", value_parser = small)]
    device_offset: Vec<u32>,
    /// Of each test: latencies, or transfers timed together [default: 262144 latencies, 131072 transfers]
    #[arg(long, value_name = "COUNT")]
    samples: Option<u64>,
    /// Of everything random
    #[arg(long, value_name = "NUMBER", default_value = "1")]
    seed: u64,
    /// Simulations that run at a time [default: one a core]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,
    /// Add every sample to the JSON, in order
    #[arg(long, requires = "json")]
    raw: bool,
    /// Write pictures of all results into this directory, as SVG and PNG
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
    /// Print JSON: a list of results
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    of_device: OfDevice,
}

#[derive(Clone, Copy, ValueEnum)]
enum FigureName {
    /// Bandwidth by transfer size
    Bandwidth,
    /// Median latency by transfer size
    Latency,
    /// Distributions of latency, cold and warm
    Cdf,
    /// Latency by window, for each state of the caches
    Cache,
    /// Bandwidth by window, with and without the IOMMU
    Iommu,
    /// Bandwidth by window, local and remote memory
    Numa,
    /// Bandwidth by the transfer's offset in its line
    Offset,
}

pub fn main(options: &Options) -> Result<()> {
    let jobs = options.grid()?.jobs().map_err(judged)?;
    let threads = options.jobs.map(usize::from);
    let sweep_options = SweepOptions {
        device: options.of_device.options(),
        threads: threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from)),
        raw: options.raw,
    };
    parameters::make_directory(options.plot.as_deref())?;
    let progress = Mutex::new(Progress::new(jobs.len() as u64));
    let before = |job: &Job| {
        let detail = format!("{} {} B", job.test.test, job.test.size_bytes);
        let stage = format!("{} tests", jobs.len());
        progress.lock().unwrap_or_else(std::sync::PoisonError::into_inner).step(&stage, &detail);
    };
    let results = sweep::run(&jobs, sweep_options, &before).map_err(judged)?;
    drop(progress);
    output::print(&if options.json { files::json(&results).map_err(judged)? } else { parameters::table(&results) })?;
    match &options.plot {
        None => Ok(()),
        Some(directory) => parameters::write_pictures(directory, &labelled(&results)),
    }
}

fn labelled(results: &[TestResult]) -> Vec<Labelled<'_>> {
    results.iter().map(|result| Labelled { label: "", result }).collect()
}

impl Options {
    fn grid(&self) -> Result<Grid> {
        let grid = Grid {
            devices: self.device.clone(),
            tests: self.test.clone(),
            numas: self.numa.clone(),
            iommus: self.iommu.clone(),
            caches: self.cache.clone(),
            orders: self.order.clone(),
            sizes_bytes: small_list(&self.size)?,
            windows_bytes: self.window.0.clone(),
            host_offsets_bytes: self.host_offset.clone(),
            device_offsets_bytes: self.device_offset.clone(),
            latency_samples: self.samples.unwrap_or(parameters::LATENCY_SAMPLES),
            bandwidth_samples: self.samples.unwrap_or(parameters::SWEEP_BANDWIDTH_SAMPLES),
            seed: self.seed,
        };
        Ok(match self.figure {
            None => grid,
            Some(FigureName::Bandwidth) => Preset::Bandwidth.grid(grid),
            Some(FigureName::Latency) => Preset::Latency.grid(grid),
            Some(FigureName::Cdf) => Preset::Cdf.grid(grid),
            Some(FigureName::Cache) => Preset::Cache.grid(grid),
            Some(FigureName::Iommu) => Preset::Iommu.grid(grid),
            Some(FigureName::Numa) => Preset::Numa.grid(grid),
            Some(FigureName::Offset) => Preset::Offset.grid(grid),
        })
    }
}
