//! A GPU as the device: its threads load and store pinned memory of the host across PCIe.
//!
//! A warp does a transfer: its lanes take a word each, so that their accesses become as few requests as the GPU makes
//! of them. One thread would wait for each word before it asks for the next: 64 bytes took an H100 six times as long.
//!
//! The kernels are compiled at run time, and the driver is loaded then, so that nothing needs a GPU to build. A unit is
//! visited once a launch, because a GPU's caches may serve what a launch has loaded before; between launches the host
//! brings the caches into the state asked for.

mod driver;
mod plan;

use std::ffi::{CStr, CString};
use std::fs;
use std::path::Path;

use machine::Machine;
use pcie::configuration;
use pcie::link::Link;
use pcie::result::Provenance;
use pcie::test::{Cache, Kind, Test};
use stats::median;

use crate::device::{About, Device, Timer};
use crate::error::{Error, Result};
use crate::lines;
use crate::order::Visits;
use crate::pci;
use driver::{Argument, Gpu, Pinned, Words};
use plan::Rate;

pub use driver::Needed;

const SOURCE: &str = include_str!("cuda/kernels.cu");
const WORD_BYTES: u32 = 8;
/// Threads of a block in bandwidth tests: four warps.
const BLOCK_THREADS: u32 = 128;
const WARP_THREADS: u32 = 32;
/// Long enough for a GPU to leave its idle clock, and to measure the clock it has then.
const WARM_UP_NS: u64 = 200_000_000;
const CALIBRATION_NS: u64 = 20_000_000;
const TIMER_SAMPLES: u32 = 4096;
const EMPTY_LAUNCHES: u32 = 4;
/// Passes of each number of warps before one is chosen.
const SWEEPS: u64 = 3;

/// The device.
pub struct Cuda {
    about: About,
    gpu: Gpu,
    window: Option<Pinned>,
    ns_per_tick: f64,
    timer_ticks: u64,
}

impl Cuda {
    /// The GPU of this number.
    ///
    /// # Errors
    /// Names the library or the GPU that is missing.
    pub fn open(index: &str) -> Result<Self> {
        let Ok(number) = index.parse() else {
            return Error::wrong_use(format!("cuda: '{index}' is no number of a GPU; write cuda:0 for the first"));
        };
        let gpu = Gpu::open(number)?;
        let name = format!("cuda:{number}");
        let about = About { name, words: String::new(), provenance: Provenance::Measured, link: None };
        Ok(Self { about, gpu, window: None, ns_per_tick: 0.0, timer_ticks: 0 })
    }

    /// Says what the device is, and what its link is now: an idle GPU may let it rest at a lower speed.
    fn describe(&mut self) {
        self.about.link = link_of(Path::new(pci::DEVICES), &self.gpu.pci_address);
        let link = self.about.link.map(|link| {
            let (mps, mrrs) = (link.mps_bytes, link.mrrs_bytes);
            format!(" on gen{}x{}, MPS {mps} B, MRRS {mrrs} B", link.generation, link.lanes)
        });
        let link = link.unwrap_or_default();
        self.about.words = format!("{} as the device{link}; {}", self.gpu.name, Machine::describe(None).words());
    }

    fn window(&self) -> Result<&Pinned> {
        self.window.as_ref().ok_or_else(|| Error::Failed("cuda: run before it was prepared".to_owned()))
    }

    /// Runs one kernel of one thread that fills `count` words.
    fn words_of(&self, kernel: &CStr, count: usize, arguments: &[Argument]) -> Result<Vec<u64>> {
        let out = self.gpu.upload(&vec![0; count])?;
        let all: Vec<Argument> = [Argument::Wide(out.address)].iter().chain(arguments).copied().collect();
        self.gpu.launch(kernel, 1, 1, &all)?;
        self.gpu.download(&out)
    }

    fn calibrate(&mut self) -> Result<()> {
        self.words_of(c"clock_rate", 2, &[Argument::Wide(WARM_UP_NS)])?;
        let rate = self.words_of(c"clock_rate", 2, &[Argument::Wide(CALIBRATION_NS)])?;
        self.ns_per_tick = rate[1] as f64 / rate[0].max(1) as f64;
        let mut costs = self.words_of(c"timer_cost", TIMER_SAMPLES as usize, &[Argument::Narrow(TIMER_SAMPLES)])?;
        costs.sort_unstable();
        self.timer_ticks = costs[costs.len() / 2];
        Ok(())
    }

    /// Brings the caches into the state that a pass begins with.
    fn begin(&self, test: &Test, pass: u64) -> Result<()> {
        let window = self.window()?;
        let bytes = test.window_bytes as usize;
        if test.cache == Cache::DeviceWarm {
            let arguments = [Argument::Wide(window.address), Argument::Wide(test.window_bytes), Argument::Wide(pass)];
            return self.gpu.launch(c"fill", self.gpu.processors, BLOCK_THREADS, &arguments).map(|_| ());
        }
        // Store by store: what fills memory in bulk may go past the caches.
        for at in (0..bytes).step_by(WORD_BYTES as usize) {
            // SAFETY: the window has as many bytes, and no kernel runs: every launch is waited for.
            unsafe { window.host.add(at).cast::<u64>().write_volatile(pass) };
        }
        if test.cache == Cache::Cold {
            // SAFETY: as above.
            unsafe { lines::flush(window.host, bytes) };
        }
        Ok(())
    }

    /// The addresses of a pass, in the GPU's memory.
    fn addresses(&self, test: &Test, pass: u64, transfers: u64) -> Result<Words<'_>> {
        let visits = Visits::of(test);
        let addresses: Vec<u64> = (0..transfers).map(|index| test.address_of(visits.unit(pass, index))).collect();
        self.gpu.upload(&addresses)
    }

    /// What each number of warps brings: the median of passes between which all others have their turn, for a host that
    /// is busy for a moment would choose by chance.
    fn rates(&self, test: &Test, transfers: u64) -> Result<Vec<Rate>> {
        let held = self.gpu.processors.saturating_mul(self.gpu.processor_threads / WARP_THREADS);
        let mut tried: Vec<(u32, Vec<f64>)> = plan::warps(held).into_iter().map(|warps| (warps, Vec::new())).collect();
        for sweep in 0..SWEEPS {
            for (warps, elapsed_ns) in &mut tried {
                elapsed_ns.push(self.pass(test, sweep, transfers, *warps)?);
            }
        }
        let rate_of = |(warps, elapsed_ns): (u32, Vec<f64>)| {
            median(elapsed_ns).map(|ns| Rate { warps, transfers_per_ns: transfers as f64 / ns })
        };
        Ok(tried.into_iter().filter_map(rate_of).collect())
    }

    /// One pass with so many warps: the nanoseconds of its kernel.
    fn pass(&self, test: &Test, pass: u64, transfers: u64, warps: u32) -> Result<f64> {
        self.begin(test, pass)?;
        let addresses = self.addresses(test, pass, transfers)?;
        let threads = warps * WARP_THREADS;
        let sums = self.gpu.upload(&vec![0; threads as usize])?;
        let mode = match test.test {
            Kind::BwWr => 1,
            Kind::BwRdwr => 2,
            _ => 0,
        };
        let block = threads.min(BLOCK_THREADS);
        let run = |transfers: u64| {
            let arguments = [
                Argument::Wide(self.window()?.address),
                Argument::Wide(addresses.address),
                Argument::Wide(sums.address),
                Argument::Narrow(transfers as u32),
                Argument::Narrow(mode),
            ];
            self.gpu.launch(c"bandwidth", threads.div_ceil(block), block, &arguments)
        };
        // What launching costs without a transfer does not count: the least of it, for an idle GPU is slow to begin.
        let mut empty_ns = f64::INFINITY;
        for _ in 0..EMPTY_LAUNCHES {
            empty_ns = empty_ns.min(run(0)?);
        }
        Ok((run(transfers)? - empty_ns).max(1.0))
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        if let Some(window) = &self.window {
            self.gpu.unpin(window);
        }
    }
}

impl Device for Cuda {
    fn about(&self) -> &About {
        &self.about
    }

    fn check(&self, test: &Test) -> Result<()> {
        plan::check(test)?;
        if test.cache == Cache::Cold && !lines::CAN_FLUSH {
            return Error::wrong_use("cuda: --cache cold needs an instruction that this program has for x86-64 only");
        }
        Ok(())
    }

    fn prepare(&mut self, test: &Test) -> Result<()> {
        if let Some(old) = self.window.take() {
            self.gpu.unpin(&old);
        }
        let source = CString::new(SOURCE).map_err(|_| Error::Failed("cuda: the kernels hold a zero".to_owned()))?;
        self.gpu.load(&source, test.size_bytes / WORD_BYTES)?;
        self.window = Some(self.gpu.pin(test.window_bytes as usize)?);
        self.calibrate()?;
        self.describe();
        Ok(())
    }

    fn timer(&self) -> Timer {
        Timer { cost_ns: self.timer_ticks as f64 * self.ns_per_tick, step_ns: self.ns_per_tick }
    }

    fn latencies(&mut self, test: &Test, sink: &mut (dyn FnMut(f64) + Send)) -> Result<()> {
        let kernel = if test.test == Kind::LatRd { c"lat_rd" } else { c"lat_wrrd" };
        let units = test.units();
        for pass in 0..test.samples.div_ceil(units) {
            let samples = units.min(test.samples - pass * units);
            self.begin(test, pass)?;
            let addresses = self.addresses(test, pass, samples)?;
            let ticks = self.gpu.upload(&vec![0; samples as usize])?;
            let arguments = [
                Argument::Wide(self.window()?.address),
                Argument::Wide(addresses.address),
                Argument::Wide(ticks.address),
                Argument::Narrow(samples as u32),
                Argument::Wide(0),
            ];
            self.gpu.launch(kernel, 1, WARP_THREADS, &arguments)?;
            for ticks in self.gpu.download(&ticks)? {
                sink(ticks.saturating_sub(self.timer_ticks) as f64 * self.ns_per_tick);
            }
        }
        Ok(())
    }

    fn bandwidth(&mut self, test: &Test) -> Result<f64> {
        let units = test.units();
        let rates = self.rates(test, units)?;
        let (best, knee) = plan::best_and_knee(&rates)?;
        self.about.words += &format!("; {best} warps in flight, 95% of the rate from {knee} on");
        // Of a read-and-write test so many in each direction; a pass alternates.
        let directions = if test.test == Kind::BwRdwr { 2 } else { 1 };
        let transfers = test.samples * directions;
        let mut elapsed_ns = 0.0;
        for pass in 0..transfers.div_ceil(units) {
            elapsed_ns += self.pass(test, pass, units.min(transfers - pass * units), best)?;
        }
        Ok(elapsed_ns)
    }
}

/// The link of a device on the bus, as far as its configuration space is to be seen. The driver writes addresses in
/// capitals, the kernel does not.
fn link_of(devices: &Path, address: &str) -> Option<Link> {
    let space = fs::read(devices.join(address.to_ascii_lowercase()).join("config")).ok()?;
    configuration::link(&space)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_is_that_of_the_address() {
        let devices = tempfile::tempdir().unwrap();
        let folder = devices.path().join("0000:b7:00.0");
        fs::create_dir(&folder).unwrap();
        assert_eq!(link_of(devices.path(), "0000:B7:00.0"), None);
        // A list of capabilities, of which the first is PCI Express: MPS 256, MRRS 512, generation 4, eight lanes.
        let mut space = [0; 0x60];
        (space[0x06], space[0x34], space[0x40]) = (0x10, 0x40, 0x10);
        (space[0x48], space[0x49], space[0x52]) = (0x20, 0x20, 0x84);
        fs::write(folder.join("config"), space).unwrap();
        let link = link_of(devices.path(), "0000:B7:00.0").unwrap();
        assert_eq!((link.generation.number(), link.lanes.count(), link.mrrs_bytes.bytes()), (4, 8, 512));
    }

    #[test]
    fn what_is_missing_is_named() {
        for index in ["", "x", "-1"] {
            let error = Cuda::open(index).err().unwrap();
            assert!(error.is_wrong_use() && error.to_string().contains("cuda:0"), "{error}");
        }
        // On a machine with GPUs there are fewer than this many; on one without, the library is missing.
        let error = Cuda::open("4000").err().unwrap();
        assert!(error.is_wrong_use(), "{error}");
        assert_eq!(error.to_string().lines().count(), 1);
    }

    #[test]
    fn every_kernel_that_is_launched_exists() {
        for name in ["timer_cost", "clock_rate", "lat_rd", "lat_wrrd", "bandwidth", "fill"] {
            assert!(SOURCE.contains(&format!("extern \"C\" __global__ void {name}(")), "{name}");
        }
    }
}
