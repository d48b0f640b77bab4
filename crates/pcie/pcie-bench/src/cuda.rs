//! A GPU as the device: its threads load and store pinned memory of the host across PCIe.
//!
//! A warp does a transfer: its lanes access consecutive words of 8 bytes, which the GPU coalesces into as few requests
//! as it can. A single thread would wait for each word before it requests the next: on an H100 it took six times as
//! long for 64 bytes.
//!
//! The kernels are compiled and the driver is loaded at run time, so that a build needs no GPU. Each launch visits a
//! unit only once, because the caches of the GPU may serve repeated loads of a launch; between launches the host brings
//! the caches into the state that the test requires.

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

use crate::cache_lines;
use crate::device::{Device, DeviceInfo, Timer};
use crate::error::{Error, Result};
use crate::order::Visits;
use crate::pci;
use driver::{DeviceBuffer, Gpu, KernelArgument, PinnedBuffer};
use plan::{Rate, WORD_BYTES};

pub use driver::RequiredLibrary;

const SOURCE: &str = include_str!("cuda/kernels.cu");
/// Threads of a block in bandwidth tests: four warps.
const BLOCK_THREADS: u32 = 128;
const WARP_THREADS: u32 = 32;
/// Duration of the warm-up, in which a GPU leaves its idle clock.
const WARM_UP_NS: u64 = 200_000_000;
/// Duration over which the clock is measured afterwards.
const CALIBRATION_NS: u64 = 20_000_000;
const TIMER_SAMPLES: u32 = 4096;
const EMPTY_LAUNCHES: u32 = 4;
/// Passes for each number of warps before one is chosen.
const SWEEPS: u64 = 3;

/// A GPU that is ready for tests.
pub struct Cuda {
    info: DeviceInfo,
    gpu: Gpu,
    window: Option<PinnedBuffer>,
    ns_per_tick: f64,
    timer_ticks: u64,
}

impl Cuda {
    /// Opens the GPU number `index`.
    ///
    /// # Errors
    /// Names the library or the GPU that is missing.
    pub fn open(index: &str) -> Result<Self> {
        let Ok(number) = index.parse() else {
            return Error::wrong_use(format!("cuda: '{index}' is not the number of a GPU; write cuda:0 for the first"));
        };
        let gpu = Gpu::open(number)?;
        let name = format!("cuda:{number}");
        let info = DeviceInfo {
            name,
            description: String::new(),
            provenance: Provenance::Measured,
            link: None,
            prediction: None,
        };
        Ok(Self { info, gpu, window: None, ns_per_tick: 0.0, timer_ticks: 0 })
    }

    /// Updates the description and the link. The link is read after a warm-up, because an idle GPU may reduce its
    /// speed.
    fn describe(&mut self) {
        self.info.link = link_of(Path::new(pci::DEVICES), &self.gpu.pci_address);
        let link = self.info.link.map(|link| {
            let (mps, mrrs) = (link.mps_bytes, link.mrrs_bytes);
            format!(" on gen{}x{}, MPS {mps} B, MRRS {mrrs} B", link.generation, link.lanes)
        });
        let link = link.unwrap_or_default();
        self.info.description =
            format!("{} as the device{link}; {}", self.gpu.name, Machine::describe(None).description());
    }

    fn window(&self) -> Result<&PinnedBuffer> {
        self.window.as_ref().ok_or_else(|| Error::Failed("cuda: run before it was prepared".to_owned()))
    }

    /// Runs a kernel with one thread that writes `count` words, and returns the words.
    fn words_of(&self, kernel: &CStr, count: usize, arguments: &[KernelArgument]) -> Result<Vec<u64>> {
        let out = self.gpu.upload(&vec![0; count])?;
        let all: Vec<KernelArgument> = [KernelArgument::U64(out.address)].iter().chain(arguments).copied().collect();
        self.gpu.launch(kernel, 1, 1, &all)?;
        self.gpu.download(&out)
    }

    fn calibrate(&mut self) -> Result<()> {
        self.words_of(c"clock_rate", 2, &[KernelArgument::U64(WARM_UP_NS)])?;
        let rate = self.words_of(c"clock_rate", 2, &[KernelArgument::U64(CALIBRATION_NS)])?;
        self.ns_per_tick = rate[1] as f64 / rate[0].max(1) as f64;
        let mut costs = self.words_of(c"timer_cost", TIMER_SAMPLES as usize, &[KernelArgument::U32(TIMER_SAMPLES)])?;
        costs.sort_unstable();
        self.timer_ticks = costs[costs.len() / 2];
        Ok(())
    }

    /// Brings the caches into the state that a pass begins with.
    fn begin(&self, test: &Test, pass: u64) -> Result<()> {
        let window = self.window()?;
        let bytes = test.window_bytes as usize;
        if test.cache == Cache::DeviceWarm {
            let arguments = [
                KernelArgument::U64(window.address),
                KernelArgument::U64(test.window_bytes),
                KernelArgument::U64(pass),
            ];
            return self.gpu.launch(c"fill", self.gpu.processors, BLOCK_THREADS, &arguments).map(|_| ());
        }
        // Individual stores, because a bulk fill may bypass the caches.
        for at in (0..bytes).step_by(WORD_BYTES as usize) {
            // SAFETY: `at` is below `bytes`, the pinned length, and a multiple of 8; `launch` returns only after its
            // kernel is complete, so nothing else accesses the window.
            unsafe { window.host.add(at).cast::<u64>().write_volatile(pass) };
        }
        if test.cache == Cache::Cold {
            // SAFETY: the window has `bytes` bytes of pinned host memory, which stay mapped until `unpin`.
            unsafe { cache_lines::flush(window.host, bytes) };
        }
        Ok(())
    }

    /// Uploads the addresses of a pass to the GPU's memory.
    fn addresses(&self, test: &Test, pass: u64, transfers: u64) -> Result<DeviceBuffer<'_>> {
        let visits = Visits::of(test);
        let addresses: Vec<u64> = (0..transfers).map(|index| test.address_of(visits.unit(pass, index))).collect();
        self.gpu.upload(&addresses)
    }

    /// Measures the rate of each number of warps: the median of passes that alternate with those of all other numbers,
    /// so that a short load on the host does not decide the choice.
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

    /// Runs one pass with `warps` warps and returns the nanoseconds of its kernel.
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
                KernelArgument::U64(self.window()?.address),
                KernelArgument::U64(addresses.address),
                KernelArgument::U64(sums.address),
                KernelArgument::U32(transfers as u32),
                KernelArgument::U32(mode),
            ];
            self.gpu.launch(c"bandwidth", threads.div_ceil(block), block, &arguments)
        };
        // The cost of a launch without transfers is subtracted. It is the smallest of several, because the first
        // launches on an idle GPU are slow.
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
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn check(&self, test: &Test) -> Result<()> {
        plan::check(test)?;
        cache_lines::check("cuda", test.cache)
    }

    fn prepare(&mut self, test: &Test) -> Result<()> {
        if let Some(old) = self.window.take() {
            self.gpu.unpin(&old);
        }
        let source = CString::new(SOURCE)
            .map_err(|_| Error::Failed("cuda: the source of the kernels contains a NUL byte".to_owned()))?;
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
                KernelArgument::U64(self.window()?.address),
                KernelArgument::U64(addresses.address),
                KernelArgument::U64(ticks.address),
                KernelArgument::U32(samples as u32),
                KernelArgument::U64(0),
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
        self.info.description += &format!("; {best} warps in flight, 95% of the rate from {knee} on");
        let transfers = test.transfers();
        let mut elapsed_ns = 0.0;
        for pass in 0..transfers.div_ceil(units) {
            elapsed_ns += self.pass(test, pass, units.min(transfers - pass * units), best)?;
        }
        Ok(elapsed_ns)
    }
}

/// Returns the link of a device on the bus, if its configuration space is readable. The driver writes addresses in
/// upper case, the kernel in lower case.
fn link_of(devices: &Path, address: &str) -> Option<Link> {
    let space = fs::read(devices.join(address.to_ascii_lowercase()).join("config")).ok()?;
    configuration::link(&space)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_of_an_address_is_read_from_its_configuration_space() {
        let devices = tempfile::tempdir().unwrap();
        let folder = devices.path().join("0000:b7:00.0");
        fs::create_dir(&folder).unwrap();
        assert_eq!(link_of(devices.path(), "0000:B7:00.0"), None);
        // A capability list whose first entry is PCI Express: MPS 256, MRRS 512, generation 4, eight lanes.
        let mut space = [0; 0x60];
        (space[0x06], space[0x34], space[0x40]) = (0x10, 0x40, 0x10);
        (space[0x48], space[0x49], space[0x52]) = (0x20, 0x20, 0x84);
        fs::write(folder.join("config"), space).unwrap();
        let link = link_of(devices.path(), "0000:B7:00.0").unwrap();
        assert_eq!((link.generation.number(), link.lanes.count(), link.mrrs_bytes.bytes()), (4, 8, 512));
    }

    #[test]
    fn a_missing_gpu_is_named() {
        for index in ["", "x", "-1"] {
            let error = Cuda::open(index).err().unwrap();
            assert!(error.is_wrong_use() && error.to_string().contains("cuda:0"), "{error}");
        }
        // A machine with GPUs has fewer than this many; on one without, the library is missing.
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
