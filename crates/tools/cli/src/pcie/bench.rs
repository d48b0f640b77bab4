//! `crosslane pcie bench`: runs one test on one device.

use anyhow::Result;
use pcie::result::{Latency, Outcome, TestResult};
use pcie::test::{Cache, Iommu, Kind, Numa, Order, Test};
use pcie_bench::{registry, runner};

use super::parameters::{self, DeviceArguments, classified, parse_bytes, parse_keyword};
use super::sizes::Size;
use crate::output;

/// A test with all parameters of the published method.
#[derive(clap::Args)]
#[command(after_help = examples())]
pub struct Options {
    /// Device: sim:SYSTEM (a simulated host), memory (this machine's), pci:ADDRESS (a BAR), cuda:N (a GPU)
    #[arg(long, value_name = "DEVICE")]
    device: String,
    /// Test: lat-rd, lat-wrrd, bw-rd, bw-wr or bw-rdwr
    #[arg(long, value_name = "TEST", value_parser = parse_keyword::<Kind>)]
    test: Kind,
    /// Transfer size
    #[arg(long, value_name = "BYTES", default_value = "64", value_parser = parse_bytes)]
    size: u32,
    /// Size of the memory that the transfers access, 1K to 64M
    #[arg(long, value_name = "BYTES", default_value = "8K")]
    window: Size,
    /// State of the caches before the test: cold, host-warm or device-warm
    #[arg(long, value_name = "STATE", default_value = "cold", value_parser = parse_keyword::<Cache>)]
    cache: Cache,
    /// Address translation: off, 4k (pages) or 2m
    #[arg(long, value_name = "PAGES", default_value = "off", value_parser = parse_keyword::<Iommu>)]
    iommu: Iommu,
    /// Memory on the device's socket (local) or another (remote)
    #[arg(long, value_name = "PLACE", default_value = "local", value_parser = parse_keyword::<Numa>)]
    numa: Numa,
    /// Access order: random or sequential
    #[arg(long, value_name = "ORDER", default_value = "random", value_parser = parse_keyword::<Order>)]
    order: Order,
    /// Offset of a transfer in its cache line, 0 to 63
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = parse_bytes)]
    host_offset: u32,
    /// Offset of the device's buffer in its cache line, 0 to 63
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = parse_bytes)]
    device_offset: u32,
    /// Number of latencies, or of transfers timed together [default: 262144 latencies, 1048576 transfers; the published
    /// runs used 2097152 and 8388608]
    #[arg(long, value_name = "COUNT")]
    samples: Option<u64>,
    /// Seed of all random choices
    #[arg(long, value_name = "NUMBER", default_value = "1")]
    seed: u64,
    /// Add every sample to the JSON, in order
    #[arg(long, requires = "json")]
    raw: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device_arguments: DeviceArguments,
}

fn examples() -> String {
    let systems: Vec<&str> = pcie::host::names().collect();
    format!(
        "Simulated systems: {}; or a parameter file, as in sim:./mine.toml. Any parameter can be changed, as in \
         sim:ice-lake+device.tags=64+credits.posted_headers=32; device.tlb_entries=1024 gives the device a TLB \
         (ATS).\n\n\
         Examples:\n  \
         crosslane pcie bench --device sim:hsw --test lat-rd --cache host-warm\n  \
         crosslane pcie bench --device sim:hsw --test bw-rd --size 256 --window 1M --iommu 4k --json\n  \
         crosslane pcie bench --device sim:milan+device.tlb_entries=4096 --test bw-rd --window 16M --iommu 4k\n  \
         crosslane pcie bench --device memory --test lat-wrrd --size 8 --cache device-warm\n\n\
         JSON has p50_ns, p95_ns, p99_ns, max_ns and the whole distribution of a latency, or gbps of a bandwidth; \
         docs/pcie-result.schema.json describes it, docs/pcie-bench.md the devices.",
        systems.join(", ")
    )
}

/// Runs the test and prints its result.
pub fn main(options: &Options) -> Result<()> {
    let test = options.test();
    test.check().map_err(|error| classified(error.into()))?;
    options.device_arguments.check(std::slice::from_ref(&options.device))?;
    let mut device = registry::open(&options.device, options.device_arguments.options()).map_err(classified)?;
    let result = runner::run(device.as_mut(), &test, options.raw).map_err(classified)?;
    if options.json {
        return output::print(&(serde_json::to_string(&result)? + "\n"));
    }
    output::print(&text(&result))
}

impl Options {
    fn test(&self) -> Test {
        let default = if self.test.is_latency() { parameters::LATENCY_SAMPLES } else { parameters::BANDWIDTH_SAMPLES };
        Test {
            test: self.test,
            size_bytes: self.size,
            window_bytes: self.window.0,
            host_offset_bytes: self.host_offset,
            device_offset_bytes: self.device_offset,
            order: self.order,
            cache: self.cache,
            iommu: self.iommu,
            numa: self.numa,
            samples: self.samples.unwrap_or(default),
            seed: self.seed,
        }
    }
}

fn text(result: &TestResult) -> String {
    let table = parameters::table(std::slice::from_ref(result));
    let note = match &result.outcome {
        Outcome::Latency(latency) => latency_note(result.test.samples, latency),
        Outcome::Bandwidth(bandwidth) => format!(
            "{} transfers{} in {:.3} ms: {:.3} M a second\n",
            result.test.samples,
            if result.test.test == Kind::BwRdwr { " in each direction" } else { "" },
            bandwidth.elapsed_ns / 1e6,
            bandwidth.mtransfers_per_s
        ),
    };
    format!("{}\n\n{table}\n{note}", result.description)
}

fn latency_note(samples: u64, latency: &Latency) -> String {
    let trimmed = latency.trimmed_average_ns.map(|ns| format!(" ({ns:.1} without the lowest and highest 0.1%)"));
    format!(
        "{samples} samples: average {:.1} ns{}, minimum {:.1}; the timer's overhead of {:.1} ns is subtracted, its \
         resolution is {:.2} ns\n",
        latency.average_ns,
        trimmed.unwrap_or_default(),
        latency.min_ns,
        latency.timer_cost_ns,
        latency.timer_step_ns
    )
}
