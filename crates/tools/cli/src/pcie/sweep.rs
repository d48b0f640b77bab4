//! `crosslane pcie sweep`: runs every combination of lists of parameters.

use std::path::PathBuf;
use std::sync::Mutex;

use anyhow::Result;
use crosslane_bench::Progress;
use pcie::test::{Cache, Iommu, Kind, Numa, Order};
use pcie_bench::files;
use pcie_bench::sweep::{self, Grid, Job, SweepOptions};

use super::figures::{Labelled, PaperFigure};
use super::parameters::{self, DeviceArguments, classified, parse_bytes, parse_bytes_list, parse_keyword};
use super::sizes::Sizes;
use crate::output;

/// The options that a figure replaces.
const LISTS: [&str; 9] = ["test", "size", "window", "cache", "iommu", "numa", "order", "host_offset", "device_offset"];

/// Options of `crosslane pcie sweep`: lists of parameters, or a figure of the paper. Repeated values count once.
#[derive(clap::Args)]
pub struct Options {
    /// Devices: sim:SYSTEM, memory, pci:ADDRESS, cuda:N
    #[arg(long, value_name = "DEVICE,...", value_delimiter = ',', required = true)]
    device: Vec<String>,
    /// Run the tests of a figure of the paper instead of the lists below
    #[arg(long, value_enum, conflicts_with_all = LISTS)]
    figure: Option<PaperFigure>,
    /// Tests: lat-rd, lat-wrrd, bw-rd, bw-wr, bw-rdwr
    #[arg(long, value_name = "TEST,...", value_delimiter = ',', value_parser = parse_keyword::<Kind>)]
    #[arg(required_unless_present = "figure")]
    test: Vec<Kind>,
    /// Transfer sizes: a list or a range, as in 64,128 or 64..2048:64
    #[arg(long, value_name = "BYTES,...", default_value = "64")]
    size: Sizes,
    /// Sizes of the memory that the transfers access, 1K to 64M
    #[arg(long, value_name = "BYTES,...", default_value = "8K")]
    window: Sizes,
    /// States of the caches before the test: cold, host-warm, device-warm
    #[arg(long, value_name = "STATE,...", value_delimiter = ',', default_value = "cold")]
    #[arg(value_parser = parse_keyword::<Cache>)]
    cache: Vec<Cache>,
    /// Address translation: off, 4k, 2m
    #[arg(long, value_name = "PAGES,...", value_delimiter = ',', default_value = "off")]
    #[arg(value_parser = parse_keyword::<Iommu>)]
    iommu: Vec<Iommu>,
    /// Memory on the device's socket (local) or another (remote)
    #[arg(long, value_name = "PLACE,...", value_delimiter = ',', default_value = "local")]
    #[arg(value_parser = parse_keyword::<Numa>)]
    numa: Vec<Numa>,
    /// Access orders: random, sequential
    #[arg(long, value_name = "ORDER,...", value_delimiter = ',', default_value = "random")]
    #[arg(value_parser = parse_keyword::<Order>)]
    order: Vec<Order>,
    /// Offsets of a transfer in its cache line, 0 to 63
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',', default_value = "0", value_parser = parse_bytes)]
    host_offset: Vec<u32>,
    /// Offsets of the device's buffer in its cache line, 0 to 63
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',', default_value = "0", value_parser = parse_bytes)]
    device_offset: Vec<u32>,
    /// Number of latencies of each test, or of transfers timed together [default: 262144 latencies, 131072 transfers]
    #[arg(long, value_name = "COUNT")]
    samples: Option<u64>,
    /// Seed of all random choices
    #[arg(long, value_name = "NUMBER", default_value = "1")]
    seed: u64,
    /// Number of concurrent simulations [default: number of cores]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,
    /// Add every sample to the JSON, in order
    #[arg(long, requires = "json")]
    raw: bool,
    /// Write plots of all results into this directory, as SVG and PNG
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
    /// Print JSON: a list of results
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device_arguments: DeviceArguments,
}

/// Runs all tests, prints the results and writes plots if requested.
pub fn main(options: &Options) -> Result<()> {
    options.device_arguments.check(&options.device)?;
    let jobs = options.grid()?.jobs().map_err(classified)?;
    let threads = options.jobs.map(usize::from);
    let sweep_options = SweepOptions {
        device: options.device_arguments.options(),
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
    let results = sweep::run(&jobs, sweep_options, &before).map_err(classified)?;
    drop(progress);
    let text = if options.json { files::json(&results).map_err(classified)? } else { parameters::table(&results) };
    output::print(&text)?;
    match &options.plot {
        None => Ok(()),
        Some(directory) => parameters::write_plots(directory, &Labelled::unlabelled(&results)),
    }
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
            sizes_bytes: parse_bytes_list(&self.size)?,
            windows_bytes: self.window.0.clone(),
            host_offsets_bytes: self.host_offset.clone(),
            device_offsets_bytes: self.device_offset.clone(),
            latency_samples: self.samples.unwrap_or(parameters::LATENCY_SAMPLES),
            bandwidth_samples: self.samples.unwrap_or(parameters::SWEEP_BANDWIDTH_SAMPLES),
            seed: self.seed,
        };
        Ok(match self.figure {
            None => grid,
            Some(figure) => figure.grid(grid),
        })
    }
}
