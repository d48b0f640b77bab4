//! The BAR of a PCI device, mapped through sysfs: a core of this machine reads and writes the device's memory.
//!
//! Accesses are words of 8 bytes, one after the other, so that their number and width are known. Bulk writes use the
//! write-combined mapping if the kernel provides one.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use machine::Machine;
use pcie::result::Provenance;
use pcie::test::{Cache, Iommu, Kind, Numa, PAGE_BYTES, Test};
use volmem::{Mapping, Region};

use crate::clock::Clock;
use crate::device::{Device, DeviceInfo, Timer};
use crate::error::{Error, Result};
use crate::files;
use crate::order::Visits;

/// The sysfs folder of PCI devices, which has an entry for each address.
pub(crate) const DEVICES: &str = "/sys/bus/pci/devices";
const WORD_BYTES: u64 = 8;
/// Resource flag `IORESOURCE_MEM`: memory, not I/O ports.
const FLAG_MEMORY: u64 = 0x200;
/// Number of resources that are BARs; the expansion ROM and the windows of bridges follow them.
const BARS: usize = 6;
/// Offset of the command register in the configuration space, and its Memory Space Enable bit.
const COMMAND_OFFSET: usize = 4;
const COMMAND_MEMORY: u8 = 2;
/// Number of transfers that are timed together.
const BATCH: u64 = 256;

/// A BAR that is ready for tests.
pub struct Pci {
    info: DeviceInfo,
    folder: PathBuf,
    bar: usize,
    bar_bytes: u64,
    may_write: bool,
    ready: Option<(Clock, Region)>,
}

impl Pci {
    /// Opens a BAR of the device at `address` (such as `0000:00:04.0`), by default the largest. Its contents are
    /// overwritten only with `may_write`.
    ///
    /// # Errors
    /// The device or the BAR does not exist, or the BAR cannot be mapped.
    pub fn open(address: &str, bar: Option<u8>, may_write: bool) -> Result<Self> {
        Self::open_in(Path::new(DEVICES), address, bar, may_write)
    }

    fn open_in(devices: &Path, address: &str, bar: Option<u8>, may_write: bool) -> Result<Self> {
        let is_name =
            !address.is_empty() && address.bytes().all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte));
        let folder = devices.join(address);
        if !is_name || !folder.join("resource").exists() {
            return Error::wrong_use(format!(
                "pci: there is no device '{address}'; lspci -D lists the devices; write one as pci:0000:00:04.0"
            ));
        }
        let bars = bars(&files::read_text(&folder.join("resource"))?);
        let largest = || bars.iter().max_by_key(|(_, bytes)| *bytes);
        let found = bar.map_or_else(largest, |wanted| bars.iter().find(|(bar, _)| *bar == usize::from(wanted)));
        let Some((bar, bar_bytes)) = found.copied() else {
            let wanted = bar.map_or("a BAR".to_owned(), |bar| format!("BAR {bar}"));
            let there: Vec<String> = bars.iter().map(|(bar, bytes)| format!("{bar} ({bytes} bytes)")).collect();
            let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
            return Error::wrong_use(format!("pci: {address} has no {wanted} with memory; it has {there}"));
        };
        let file = folder.join(format!("resource{bar}"));
        if !file.exists() {
            return Error::wrong_use(format!(
                "pci: BAR {bar} of {address} cannot be mapped: this kernel offers no {}; choose another device",
                file.display()
            ));
        }
        let fact = |name: &str| files::read_text(&folder.join(name)).unwrap_or_default().trim().to_owned();
        let (speed, width) = (fact("current_link_speed"), fact("current_link_width"));
        let link = if speed.is_empty() { String::new() } else { format!("link {speed} x{width}, ") };
        let description = format!(
            "BAR {bar} of {}:{}, {link}accessed by words of 8 bytes; {}",
            fact("vendor"),
            fact("device"),
            Machine::describe(None).description()
        );
        let name = format!("pci:{address}");
        // No link: its limit for DMA transfers does not bound the words that a core loads and stores.
        let info = DeviceInfo { name, description, provenance: Provenance::Measured, link: None, prediction: None };
        Ok(Self { info, folder, bar, bar_bytes, may_write, ready: None })
    }

    /// Returns the file to map for a test: the write-combined one for bulk writes, if the kernel provides it.
    fn file_for(&self, test: &Test) -> PathBuf {
        let combined = self.folder.join(format!("resource{}_wc", self.bar));
        let is_bulk = matches!(test.test, Kind::BwWr | Kind::BwRdwr);
        if is_bulk && combined.exists() { combined } else { self.folder.join(format!("resource{}", self.bar)) }
    }
}

/// Returns number and size of each memory BAR, from the text of `resource`.
fn bars(resource: &str) -> Vec<(usize, u64)> {
    let number = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let bar = |(index, line): (usize, &str)| {
        let numbers: Vec<u64> = line.split_whitespace().filter_map(number).collect();
        let [start, end, flags] = numbers[..] else { return None };
        (end > start && flags & FLAG_MEMORY != 0).then(|| (index, end - start + 1))
    };
    resource.lines().take(BARS).enumerate().filter_map(bar).collect()
}

impl Device for Pci {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn check(&self, test: &Test) -> Result<()> {
        let unless = |is_fine: bool, text: String| if is_fine { Ok(()) } else { Error::wrong_use(text) };
        let is_whole = |bytes: u32| u64::from(bytes).is_multiple_of(WORD_BYTES);
        unless(
            is_whole(test.size_bytes) && is_whole(test.host_offset_bytes),
            "pci: a BAR is accessed by words of 8 bytes; choose --size and --host-offset as multiples of 8".to_owned(),
        )?;
        unless(
            test.window_bytes <= self.bar_bytes,
            format!("pci: BAR {} has {} bytes; choose a --window that fits", self.bar, self.bar_bytes),
        )?;
        unless(
            test.cache == Cache::Cold
                && test.iommu == Iommu::Off
                && test.numa == Numa::Local
                && test.device_offset_bytes == 0,
            "pci: --cache, --iommu, --numa and --device-offset do not apply to a BAR; omit them".to_owned(),
        )?;
        let reads = matches!(test.test, Kind::LatRd | Kind::BwRd);
        unless(
            reads || self.may_write,
            format!(
                "pci: {} overwrites what BAR {} holds; add --overwrite if nothing there is needed",
                test.test, self.bar
            ),
        )
    }

    fn prepare(&mut self, test: &Test) -> Result<()> {
        // Unmap first: a second mapping of the same memory would inherit the cache attributes of the first.
        self.ready = None;
        let config = self.folder.join("config");
        let command = fs::read(&config).map_err(|source| Error::File { path: config, source })?;
        if command.get(COMMAND_OFFSET).is_none_or(|byte| byte & COMMAND_MEMORY == 0) {
            let enable = self.folder.join("enable");
            return Error::failed(format!(
                "pci: the device does not respond to memory accesses; as root: echo 1 > {}",
                enable.display()
            ));
        }
        let path = self.file_for(test);
        let what = || format!("pci: mapping {}", path.display());
        let file = fs::File::options().read(true).write(true).open(&path);
        let file = file.map_err(|error| Error::system(what(), error))?;
        let bytes = test.window_bytes.next_multiple_of(PAGE_BYTES).min(self.bar_bytes);
        let mapping = Mapping::new(file.as_fd(), bytes as usize).map_err(|error| Error::system(what(), error))?;
        self.ready = Some((Clock::calibrated(), Region::of_mapping(Arc::new(mapping))));
        Ok(())
    }

    fn timer(&self) -> Timer {
        self.ready.as_ref().map(|(clock, _)| clock.timer()).unwrap_or_default()
    }

    fn latencies(&mut self, test: &Test, sink: &mut (dyn FnMut(f64) + Send)) -> Result<()> {
        let (clock, bar) = self.ready()?;
        for address in addresses(test, test.samples) {
            let ticks = Clock::interval(|| {
                if test.test == Kind::LatWrrd {
                    store(bar, address, test.size_bytes);
                }
                load(bar, address, test.size_bytes);
            });
            sink(clock.ns(ticks));
        }
        Ok(())
    }

    fn bandwidth(&mut self, test: &Test) -> Result<f64> {
        let (clock, bar) = self.ready()?;
        let mut visits = addresses(test, test.transfers()).zip(0_u64..).peekable();
        let mut elapsed_ns = 0.0;
        while visits.peek().is_some() {
            let batch: Vec<(u64, u64)> = visits.by_ref().take(BATCH as usize).collect();
            let ticks = Clock::interval(|| {
                for (address, index) in &batch {
                    let writes = test.test == Kind::BwWr || test.test == Kind::BwRdwr && index % 2 == 1;
                    if writes { store(bar, *address, test.size_bytes) } else { load(bar, *address, test.size_bytes) }
                }
            });
            elapsed_ns += clock.ns(ticks);
        }
        // A read that follows posted writes completes only after they have reached the device.
        let read_back = Clock::interval(|| {
            fence(Ordering::SeqCst);
            load(bar, test.address_of(0), WORD_BYTES as u32);
        });
        let writes = !matches!(test.test, Kind::BwRd);
        Ok(elapsed_ns + if writes { clock.ns(read_back) } else { 0.0 })
    }
}

impl Pci {
    fn ready(&self) -> Result<(&Clock, &Region)> {
        match &self.ready {
            Some((clock, bar)) => Ok((clock, bar)),
            None => Error::failed("pci: run before it was prepared"),
        }
    }
}

/// Returns the addresses of `visits` transfers, pass after pass.
fn addresses(test: &Test, visits: u64) -> impl Iterator<Item = u64> {
    let order = Visits::of(test);
    (0..visits).map(move |visit| test.address_of(order.unit(visit / order.units(), visit % order.units())))
}

#[inline]
fn load(bar: &Region, address: u64, size_bytes: u32) {
    for offset in (0..u64::from(size_bytes)).step_by(WORD_BYTES as usize) {
        std::hint::black_box(bar.load_u64((address + offset) as usize, Ordering::Relaxed));
    }
}

/// Stores in each word its own address.
#[inline]
fn store(bar: &Region, address: u64, size_bytes: u32) {
    for offset in (0..u64::from(size_bytes)).step_by(WORD_BYTES as usize) {
        bar.store_u64((address + offset) as usize, address + offset, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runner::run;
    use crate::testing;
    use pcie::result::Outcome;

    /// Creates a folder like the one in sysfs, with a device that has a register BAR, I/O ports and a memory BAR of 16
    /// KiB.
    fn device(command: u8) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("0000:00:04.0");
        fs::create_dir(&folder).unwrap();
        let resource = "0x00000000febf1000 0x00000000febf10ff 0x0000000000040200\n\
                        0x000000000000c000 0x000000000000c01f 0x0000000000040101\n\
                        0x00000000fe000000 0x00000000fe003fff 0x000000000014220c\n\
                        0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        fs::write(folder.join("resource"), resource).unwrap();
        fs::write(folder.join("config"), [0xf4, 0x1a, 0x10, 0x11, command, 0, 0, 0]).unwrap();
        fs::write(folder.join("resource2"), vec![0; 16 << 10]).unwrap();
        root
    }

    fn test(kind: Kind) -> Test {
        Test { cache: Cache::Cold, samples: 500, ..testing::test(kind) }
    }

    #[test]
    fn every_test_runs_on_a_bar() {
        let root = device(COMMAND_MEMORY);
        for kind in Kind::ALL {
            let mut pci = Pci::open_in(root.path(), "0000:00:04.0", None, true).unwrap();
            match run(&mut pci, &test(kind), true).unwrap().outcome {
                Outcome::Latency(latency) => assert_eq!(latency.raw_ns.len(), 500),
                Outcome::Bandwidth(bandwidth) => assert!(bandwidth.gbps > 0.0),
            }
        }
        let written = fs::read(root.path().join("0000:00:04.0/resource2")).unwrap();
        let word = |at: usize| u64::from_le_bytes(written[at..at + 8].try_into().unwrap());
        assert_eq!([word(8), word(8184), word(8192)], [8, 8184, 0], "only the window is written");
    }

    /// As in a sweep: each test uses the mapping that suits it.
    #[test]
    fn one_device_runs_several_tests() {
        let root = device(COMMAND_MEMORY);
        let file = |name: &str| root.path().join("0000:00:04.0").join(name);
        fs::write(file("resource2_wc"), vec![0; 16 << 10]).unwrap();
        let mut pci = Pci::open_in(root.path(), "0000:00:04.0", None, true).unwrap();
        for kind in [Kind::LatRd, Kind::BwWr, Kind::BwRd] {
            run(&mut pci, &test(kind), false).unwrap();
        }
        let is_written = |name: &str| fs::read(file(name)).unwrap().iter().any(|byte| *byte != 0);
        assert_eq!((is_written("resource2"), is_written("resource2_wc")), (false, true));
    }

    #[test]
    fn an_unsupported_test_is_refused_before_the_bar_is_touched() {
        let root = device(COMMAND_MEMORY);
        let open = |may_write| Pci::open_in(root.path(), "0000:00:04.0", Some(2), may_write).unwrap();
        for (test, words) in [
            (Test { size_bytes: 60, ..test(Kind::LatRd) }, "multiples of 8"),
            (Test { window_bytes: 32 << 10, ..test(Kind::LatRd) }, "16384 bytes"),
            (Test { cache: Cache::HostWarm, ..test(Kind::LatRd) }, "--cache"),
            (test(Kind::BwWr), "--overwrite"),
        ] {
            let error = open(false).check(&test).unwrap_err();
            assert!(error.is_wrong_use() && error.to_string().contains(words), "{error}");
        }
        assert!(open(true).check(&test(Kind::BwWr)).is_ok());
    }

    #[test]
    fn a_missing_device_or_bar_is_named() {
        let root = device(0);
        let open = |address: &str, bar| Pci::open_in(root.path(), address, bar, false);
        for (address, bar, words) in [
            ("0000:00:09.0", None, "no device '0000:00:09.0'"),
            ("../etc", None, "no device"),
            ("", None, "no device"),
            ("0000:00:04.0", Some(0), "BAR 0 of 0000:00:04.0 cannot be mapped: this kernel offers no"),
            ("0000:00:04.0", Some(1), "no BAR 1 with memory; it has 0 (256 bytes), 2 (16384 bytes)"),
        ] {
            let error = open(address, bar).err().unwrap();
            assert!(error.is_wrong_use() && error.to_string().contains(words), "{error}");
        }
        let error = run(&mut open("0000:00:04.0", None).unwrap(), &test(Kind::LatRd), false).unwrap_err();
        assert!(error.to_string().contains("echo 1 >"), "{error}");
    }
}
