//! `crosslane pcie bench`: one test on one device.

use anyhow::Result;
use pcie::result::{Latency, Outcome, TestResult};
use pcie::test::{Cache, Iommu, Kind, Numa, Order, Test};
use pcie_bench::{registry, runner};

use super::parameters::{self, OfDevice, judged, small, word};
use super::sizes::Size;
use crate::output;

/// A test with all parameters of the published method.
#[derive(clap::Args)]
#[command(after_help = examples())]
pub struct Options {
    /// What is measured: sim:SYSTEM (a simulated host), memory (this machine's), pci:ADDRESS (a BAR), cuda:N (a GPU)
    #[arg(long, value_name = "DEVICE")]
    device: String,
    /// lat-rd, lat-wrrd, bw-rd, bw-wr or bw-rdwr
    #[arg(long, value_name = "TEST", value_parser = word::<Kind>)]
    test: Kind,
    /// Bytes of a transfer
    #[arg(long, value_name = "BYTES", default_value = "64", value_parser = small)]
    size: u32,
    /// Memory over which transfers wander, 1K to 64M
    #[arg(long, value_name = "BYTES", default_value = "8K")]
    window: Size,
    /// What the caches hold before: cold, host-warm or device-warm
    #[arg(long, value_name = "STATE", default_value = "cold", value_parser = word::<Cache>)]
    cache: Cache,
    /// Address translation: off, 4k (pages) or 2m
    #[arg(long, value_name = "PAGES", default_value = "off", value_parser = word::<Iommu>)]
    iommu: Iommu,
    /// Memory on the device's socket or another: local or remote
    #[arg(long, value_name = "PLACE", default_value = "local", value_parser = word::<Numa>)]
    numa: Numa,
    /// Order of visits: random or sequential
    #[arg(long, value_name = "ORDER", default_value = "random", value_parser = word::<Order>)]
    order: Order,
    /// Where in its cache line a transfer begins, 0 to 63
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = small)]
    host_offset: u32,
    /// Where in its line the device's buffer begins, 0 to 63
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = small)]
    device_offset: u32,
    /// Latencies, or transfers timed together [default: 262144 latencies, 1048576 transfers; published runs took
    /// 2097152 and 8388608]
    #[arg(long, value_name = "COUNT")]
    samples: Option<u64>,
    /// Of everything random
    #[arg(long, value_name = "NUMBER", default_value = "1")]
    seed: u64,
    /// Add every sample to the JSON, in order
    #[arg(long, requires = "json")]
    raw: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    of_device: OfDevice,
}

fn examples() -> String {
    let systems: Vec<&str> = pcie::host::names().collect();
    format!(
        "Simulated systems: {}; or a parameter file, as in sim:./mine.toml.\n\n\
         Examples:\n  \
         crosslane pcie bench --device sim:hsw --test lat-rd --cache host-warm\n  \
         crosslane pcie bench --device sim:hsw --test bw-rd --size 256 --window 1M --iommu 4k --json\n  \
         crosslane pcie bench --device memory --test lat-wrrd --size 8 --cache device-warm\n\n\
         JSON has p50_ns, p95_ns, p99_ns, max_ns and the whole distribution of a latency, or gbps of a bandwidth; \
         docs/pcie-result.schema.json describes it, docs/pcie-bench.md the devices.",
        systems.join(", ")
    )
}

pub fn main(options: &Options) -> Result<()> {
    let test = options.test();
    test.check().map_err(|error| judged(error.into()))?;
    let mut device = registry::open(&options.device, options.of_device.options()).map_err(judged)?;
    let result = runner::run(device.as_mut(), &test, options.raw).map_err(judged)?;
    if options.json {
        return output::print(&(serde_json::to_string(&result)? + "\n"));
    }
    output::print(&text(&result))
}

impl Options {
    fn test(&self) -> Test {
        let usual = if self.test.is_latency() { parameters::LATENCY_SAMPLES } else { parameters::BANDWIDTH_SAMPLES };
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
            samples: self.samples.unwrap_or(usual),
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
    let trimmed = latency.trimmed_average_ns.map(|ns| format!(" ({ns:.1} without 0.1% at either end)"));
    format!(
        "{samples} samples: average {:.1} ns{}, smallest {:.1}; the timer's own {:.1} ns are subtracted, its step is \
         {:.2} ns\n",
        latency.average_ns,
        trimmed.unwrap_or_default(),
        latency.min_ns,
        latency.timer_cost_ns,
        latency.timer_step_ns
    )
}
