//! This machine's own memory as the device under test: one core models the device, another the host, and loads and
//! stores are the transfers.
//!
//! A core caches what it loads, whereas a DMA engine has no cache. Therefore the state that a test requires is set
//! before each pass over the window, and a pass visits every unit once.

mod mailbox;
mod placement;
mod topology;
mod window;

use std::sync::atomic::{Ordering, fence};

use machine::Machine;
use pcie::result::Provenance;
use pcie::test::{Cache, Iommu, Kind, LINE_BYTES, Numa, PAGE_BYTES, Test};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::cache_lines;
use crate::clock::Clock;
use crate::device::{Device, DeviceInfo, Timer};
use crate::error::{Error, Result};
use crate::order::Visits;
use mailbox::{Mailbox, Request};
use placement::PagePlacement;
use topology::{Roles, Topology};
use window::Window;

pub use window::Pages;

/// Bytes touched to evict the window from the caches, as in the published benchmark.
const THRASHED_BYTES: usize = 64 << 20;
/// Number of transfers that are timed together.
const BATCH: usize = 256;

/// The device `memory`.
pub struct Memory {
    info: DeviceInfo,
    /// The part of the description that does not depend on the test.
    machine: String,
    pages: Pages,
    topology: Topology,
    ready: Option<Ready>,
}

/// State of a prepared test.
struct Ready {
    clock: Clock,
    window: Window,
    roles: Roles,
}

impl Memory {
    /// Opens the memory of this machine. Whether resources are missing depends on the test.
    pub fn open(pages: Pages) -> Self {
        let machine = format!(
            "loads and stores of one core, a second core as the host; {}",
            Machine::describe(None).description()
        );
        let name = "memory".to_owned();
        let info = DeviceInfo {
            name,
            description: machine.clone(),
            provenance: Provenance::Measured,
            link: None,
            prediction: None,
        };
        Self { info, machine, pages, topology: Topology::of_this_machine(), ready: None }
    }

    /// Returns the page placement of a window, if it is the one that the test requires.
    fn placement(&self, window: &Window, roles: Roles) -> Result<PagePlacement> {
        window.placement((self.topology.count() > 1).then_some(roles.memory_node))
    }

    /// Checks that the kernel has not moved the pages of the window.
    fn check_placement(&self) -> Result<()> {
        let Some(ready) = &self.ready else { return Ok(()) };
        self.placement(&ready.window, ready.roles).map(|_| ())
    }

    /// Runs `work` on the device core while the host core serves requests.
    fn on_cores<T: Send>(&self, test: &Test, work: impl FnOnce(&mut Pass<'_>) -> Result<T> + Send) -> Result<T> {
        let Some(ready) = &self.ready else { return Error::failed("memory: run before it was prepared") };
        let mailbox = Mailbox::default();
        std::thread::scope(|scope| {
            let host = scope.spawn(|| {
                pin(ready.roles.host_core)?;
                mailbox.serve(&ready.window, test.size_bytes as usize);
                Ok(())
            });
            let device = scope.spawn(|| {
                let _close = mailbox::CloseOnDrop(&mailbox);
                pin(ready.roles.device_core)?;
                work(&mut Pass::new(test, ready, &mailbox))
            });
            let done = joined(device);
            joined(host).and(done)
        })
    }
}

fn joined<T>(thread: std::thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Pins this thread to a core.
fn pin(core: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).map_err(|error| Error::system(format!("memory: pinning to core {core}"), error))
}

impl Device for Memory {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn check(&self, test: &Test) -> Result<()> {
        if test.iommu != Iommu::Off {
            return Error::wrong_use(
                "memory: --iommu does not apply, because loads and stores pass no IOMMU; \
                 choose page sizes by --pages 4k|thp|2m|1g",
            );
        }
        cache_lines::check("memory", test.cache)?;
        if test.numa == Numa::Remote { self.topology.check_remote() } else { Ok(()) }
    }

    fn prepare(&mut self, test: &Test) -> Result<()> {
        self.ready = None; // the pool of huge pages may be too small for two windows
        let roles = self.topology.roles(test.numa)?;
        let window = Window::map(test.window_bytes, self.pages)?;
        if self.topology.count() > 1 {
            window.prefer(roles.memory_node)?;
        }
        // The kernel allocates a page on the node of the core that touches it first.
        let touched = &window;
        std::thread::scope(|scope| {
            let core = if test.numa == Numa::Remote { roles.host_core } else { roles.device_core };
            joined(scope.spawn(move || {
                pin(core)?;
                touched.fill(0);
                Ok(())
            }))
        })?;
        let placement = self.placement(&window, roles)?;
        let core = |core| format!("{core} (node {})", self.topology.node_of(core));
        let (device, host) = (core(roles.device_core), core(roles.host_core));
        self.info.description =
            format!("{}; window {placement}, device on core {device}, host on core {host}", self.machine);
        self.ready = Some(Ready { clock: Clock::calibrated(), window, roles });
        Ok(())
    }

    fn timer(&self) -> Timer {
        self.ready.as_ref().map(|ready| ready.clock.timer()).unwrap_or_default()
    }

    fn latencies(&mut self, test: &Test, sink: &mut (dyn FnMut(f64) + Send)) -> Result<()> {
        self.on_cores(test, |pass| pass.latencies(sink))?;
        self.check_placement()
    }

    fn bandwidth(&mut self, test: &Test) -> Result<f64> {
        let elapsed_ns = self.on_cores(test, |pass| pass.bandwidth())?;
        self.check_placement()?;
        Ok(elapsed_ns)
    }
}

/// The passes over the window, as executed by the device core.
struct Pass<'a> {
    test: &'a Test,
    ready: &'a Ready,
    mailbox: &'a Mailbox,
    visits: Visits,
    number: u64,
    /// Memory of the device, in which transfers begin and end.
    buffer: Vec<u8>,
    buffer_start: usize,
}

impl<'a> Pass<'a> {
    fn new(test: &'a Test, ready: &'a Ready, mailbox: &'a Mailbox) -> Self {
        // Space to begin at a line boundary, and then at the offset.
        let buffer = vec![0_u8; PAGE_BYTES as usize + 2 * LINE_BYTES as usize];
        let to_line = buffer.as_ptr().align_offset(LINE_BYTES as usize);
        let buffer_start = to_line + test.device_offset_bytes as usize;
        Self { test, ready, mailbox, visits: Visits::of(test), number: 0, buffer, buffer_start }
    }

    /// Begins a pass: brings the caches into the state that the test requires.
    fn begin(&mut self) -> Result<()> {
        self.number += 1;
        let value = self.number as u8;
        match self.test.cache {
            Cache::HostWarm => self.mailbox.call(Request::Fill(value)).map(|_| ()),
            Cache::DeviceWarm => {
                self.ready.window.fill(value);
                Ok(())
            }
            Cache::Cold => {
                if self.number == 1 {
                    thrash();
                }
                self.ready.window.fill(value);
                self.ready.window.flush();
                Ok(())
            }
        }
    }

    fn address(&self, index: u64) -> u64 {
        self.test.address_of(self.visits.unit(self.number, index))
    }

    /// Loads one transfer.
    #[inline]
    fn read(&mut self, address: u64) {
        let bytes = self.buffer_start..self.buffer_start + self.test.size_bytes as usize;
        self.ready.window.read(address, &mut self.buffer[bytes]);
    }

    /// Stores one transfer.
    #[inline]
    fn write(&mut self, address: u64) {
        let bytes = self.buffer_start..self.buffer_start + self.test.size_bytes as usize;
        self.ready.window.write(address, &self.buffer[bytes]);
    }

    /// Measures the latencies.
    fn latencies(&mut self, sink: &mut dyn FnMut(f64)) -> Result<()> {
        let mut left = self.test.samples;
        while left > 0 {
            self.begin()?;
            let visits = left.min(self.visits.units());
            for index in 0..visits {
                sink(self.latency(self.address(index))?);
            }
            left -= visits;
        }
        Ok(())
    }

    fn latency(&mut self, address: u64) -> Result<f64> {
        let clock = self.ready.clock;
        if self.test.test == Kind::LatRd {
            return Ok(clock.ns(Clock::interval(|| self.read(address))));
        }
        let stored = Clock::interval(|| {
            self.write(address);
            fence(Ordering::SeqCst); // completes when the stores are visible to every core
        });
        let loaded = self.mailbox.call(Request::Load(address))?;
        Ok(clock.ns(stored) + clock.ns(loaded))
    }

    /// Makes the transfers and returns the sum of the times of their batches.
    fn bandwidth(&mut self) -> Result<f64> {
        let mut left = self.test.transfers();
        let mut elapsed_ns = 0.0;
        while left > 0 {
            self.begin()?;
            let visits = left.min(self.visits.units());
            for first in (0..visits).step_by(BATCH) {
                let last = visits.min(first + BATCH as u64);
                let mut addresses = [0; BATCH];
                let batch = &mut addresses[..(last - first) as usize];
                batch.iter_mut().zip(first..last).for_each(|(address, index)| *address = self.address(index));
                elapsed_ns += self.ready.clock.ns(Clock::interval(|| self.transfer(batch, first)));
            }
            left -= visits;
        }
        Ok(elapsed_ns)
    }

    /// Makes one batch of transfers, of which the first is number `first` of its pass.
    fn transfer(&mut self, addresses: &[u64], first: u64) {
        match self.test.test {
            Kind::BwWr => addresses.iter().for_each(|address| self.write(*address)),
            Kind::BwRdwr => {
                for (address, index) in addresses.iter().zip(first..) {
                    if index % 2 == 0 { self.read(*address) } else { self.write(*address) }
                }
            }
            _ => addresses.iter().for_each(|address| self.read(*address)),
        }
        if self.test.test != Kind::BwRd {
            fence(Ordering::SeqCst); // the measured time includes the last stores
        }
    }
}

/// Touches other memory, to evict everything else from the caches of this core.
fn thrash() {
    let mut other = vec![1_u8; THRASHED_BYTES];
    other.iter_mut().step_by(LINE_BYTES as usize).for_each(|byte| *byte = byte.wrapping_add(1));
    std::hint::black_box(&other);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::run;
    use crate::testing::test;
    use pcie::result::Outcome;

    fn memory() -> Memory {
        Memory::open(Pages::Base)
    }

    #[test]
    fn every_latency_test_yields_the_requested_number_of_samples() {
        for kind in [Kind::LatRd, Kind::LatWrrd] {
            for cache in [Cache::Cold, Cache::HostWarm, Cache::DeviceWarm] {
                // Three passes over the window, of which the last is partial.
                let test = Test { cache, samples: 300, ..test(kind) };
                let result = run(&mut memory(), &test, true).unwrap();
                let Outcome::Latency(latency) = result.outcome else { panic!("a latency") };
                assert_eq!(latency.raw_ns.len(), 300, "{kind} {cache:?}");
                assert!(latency.max_ns > 0.0 && latency.timer_step_ns > 0.0);
            }
        }
    }

    #[test]
    fn every_bandwidth_test_yields_a_rate() {
        for kind in [Kind::BwRd, Kind::BwWr, Kind::BwRdwr] {
            for cache in [Cache::Cold, Cache::HostWarm, Cache::DeviceWarm] {
                let test = Test { cache, samples: 20_000, device_offset_bytes: 3, ..test(kind) };
                let result = run(&mut memory(), &test, false).unwrap();
                let Outcome::Bandwidth(bandwidth) = result.outcome else { panic!("a bandwidth") };
                assert!(bandwidth.gbps > 0.0 && bandwidth.elapsed_ns > 0.0, "{kind} {cache:?}");
            }
        }
    }

    #[test]
    fn a_test_with_an_iommu_is_refused() {
        let test = Test { iommu: Iommu::Pages4K, ..test(Kind::BwRd) };
        let error = memory().check(&test).unwrap_err();
        assert!(error.is_wrong_use() && error.to_string().contains("--pages"), "{error}");
    }

    #[test]
    fn a_write_and_read_test_loads_what_was_stored() {
        let test = Test { size_bytes: 8, ..test(Kind::LatWrrd) };
        let mut memory = memory();
        memory.prepare(&test).unwrap();
        let found = memory.on_cores(&test, |pass| {
            pass.begin()?;
            let start = pass.buffer_start;
            pass.buffer[start..start + 8].copy_from_slice(b"crosslan");
            pass.latency(64)?;
            let mut found = [0; 8];
            pass.ready.window.read(64, &mut found);
            Ok(found)
        });
        assert_eq!(&found.unwrap(), b"crosslan");
    }
}
