//! A simulated host in virtual time: predicts what a device would measure on a machine that a parameter file describes.
//!
//! A request passes through these parts, each of which is a module that does not depend on the others:
//!
//! ```text
//!  device engines, tags ── credits ── wire up ──► queue ── IOMMU ── port ── order ── cache ── memory
//!                  ▲                                                                             │
//!                  └───────────── wire down ◄── credits ── completions, split ◄──────────────────┘
//! ```
//!
//! The same seed gives an identical run, because nothing here reads a clock. [`System`] is the entry point:
//!
//! ```
//! use pcie::host::System;
//! use pcie::test::{Cache, Iommu, Kind, Numa, Order, Test};
//!
//! let test = Test {
//!     test: Kind::BwRd, size_bytes: 64, window_bytes: 8192, host_offset_bytes: 0, device_offset_bytes: 0,
//!     order: Order::Random, cache: Cache::HostWarm, iommu: Iommu::Off, numa: Numa::Local, samples: 10_000, seed: 1,
//! };
//! let summary = System::named("hsw")?.run(&test, &mut |_latency_ns| ())?;
//! assert!(summary.gbps() > 25.0);
//! # Ok::<(), pcie::host::HostError>(())
//! ```

mod cache;
mod credits;
mod device_tlb;
mod iommu;
mod line_rate;
mod memory;
mod packets;
pub mod parameters;
pub mod path;
mod port;
pub mod prediction;
mod root_complex;
mod run;
mod tails;
mod tlb;
mod wire;

use thiserror::Error;

use self::parameters::Change;
pub use self::parameters::{ParameterError, Parameters, names};
use self::prediction::Prediction;
use self::run::Run;
use crate::link::Link;
use crate::test::{Numa, Test, TestError};

/// A machine with a device, ready to be tested.
#[derive(Clone, Debug, PartialEq)]
pub struct System {
    name: String,
    parameters: Parameters,
}

/// How the device makes a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Interface {
    /// With a DMA engine: transfers of any size.
    Dma,
    /// With a command of a program on the device: small transfers (the published `lat_cmd` tests).
    Command,
}

/// The summary of a run. Its latencies were passed to the sink.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Number of transfers; of a read-and-write test, in each direction.
    pub transfers: u64,
    /// Bytes of a transfer.
    pub size_bytes: u32,
    /// Duration of the run in virtual time.
    pub elapsed_ns: f64,
    /// Transaction layer packets in both directions.
    pub tlps: u64,
    /// Packets that were retransmitted because they arrived corrupted.
    pub replays: u64,
    /// Translations that missed the IOTLB.
    pub iotlb_misses: u64,
    /// All translations.
    pub iotlb_lookups: u64,
}

/// Why a run is not possible.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum HostError {
    /// The parameters of the system are invalid.
    #[error(transparent)]
    Parameters(#[from] ParameterError),
    /// The test is invalid.
    #[error(transparent)]
    Test(#[from] TestError),
    /// The system does not support the test.
    #[error("system '{system}' has one socket, so there is no remote memory; use local memory or another system")]
    OneSocket {
        /// Name of the system.
        system: String,
    },
    /// More samples than a run simulates.
    #[error("{0} samples are too many to simulate; choose at most {SAMPLES_MAX}")]
    Samples(u64),
    /// The times of the system are so long that virtual time does not suffice.
    #[error(
        "{samples} samples last longer than virtual time, which ends after 213 days; choose at most {transfers}, or \
         shorter times"
    )]
    TooLong {
        /// Transfers that were simulated.
        transfers: u64,
        /// Transfers that were to be simulated.
        samples: u64,
    },
    /// A bandwidth test cannot use commands.
    #[error("bandwidth tests use DMA; choose a latency test for commands")]
    CommandBandwidth,
}

/// Largest number of samples of a run: an hour's work.
pub const SAMPLES_MAX: u64 = 1 << 36;

impl Summary {
    /// Returns the payload in 10^9 bits a second; of a read-and-write test, in each direction.
    pub fn gbps(&self) -> f64 {
        self.transfers as f64 * f64::from(self.size_bytes) * 8.0 / self.elapsed_ns
    }

    /// Returns millions of transfers a second; of a read-and-write test, in each direction.
    pub fn mtransfers_per_s(&self) -> f64 {
        self.transfers as f64 * 1e3 / self.elapsed_ns
    }
}

impl System {
    /// Returns one of the systems in [`names`].
    ///
    /// # Errors
    /// There is no system of this name.
    pub fn named(name: &str) -> Result<Self, HostError> {
        Ok(Self { name: name.to_owned(), parameters: Parameters::named(name)? })
    }

    /// Returns the system that the text of a parameter file describes; `file` is its name in errors. It is a prediction
    /// whose error is not known, unless the file itself states what it rests on.
    ///
    /// # Errors
    /// The file is invalid; the error has one line.
    pub fn from_toml(file: &str, text: &str) -> Result<Self, HostError> {
        let mut table = parameters::table(file, text)?;
        // The errors that a base states are not those of a file that changes it.
        table.remove("prediction");
        let own = parameters::own_section(text, "prediction").map(|section| table.insert("prediction".into(), section));
        let mut parameters = Parameters::from_table(file, text, table)?;
        if own.is_none() {
            parameters.prediction = Some(Prediction::unchecked(format!("the parameters of {file}")));
        }
        Ok(Self { name: file.to_owned(), parameters })
    }

    /// Returns this system with other values for some parameters, given as `section.key=value`, and named after them.
    /// It is a prediction whose error is not known.
    ///
    /// # Errors
    /// There is no such parameter, or its value is invalid; the error has one line.
    pub fn changed(file: &str, text: &str, changes: &[&str]) -> Result<Self, HostError> {
        let (mut table, mut made) = (parameters::table(file, text)?, Vec::new());
        for change in changes {
            made.push(Change::parse(file, change)?);
        }
        parameters::apply(file, &mut table, &made)?;
        let made: Vec<String> = made.iter().map(Change::to_string).collect();
        let name = format!("{file}+{}", made.join("+"));
        let mut parameters = Parameters::from_table(&name, "", table)?;
        let changes = made.join(", ");
        parameters.prediction = Some(Prediction::unchecked(format!("the parameters of {file}, with {changes}")));
        Ok(Self { name, parameters })
    }

    /// Returns a system with these parameters.
    pub fn new(name: &str, parameters: Parameters) -> Self {
        Self { name: name.to_owned(), parameters }
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the parameters.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Returns a description of processor, chipset and device.
    pub fn description(&self) -> &str {
        &self.parameters.description
    }

    /// Returns the link between host and device.
    pub fn link(&self) -> &Link {
        &self.parameters.link
    }

    /// Returns how the device makes the transfers of `test`, as in the published tests: small ones of latency tests by
    /// command.
    pub fn interface_of(&self, test: &Test) -> Interface {
        let is_small = test.size_bytes <= self.parameters.device.command_bytes_max;
        if test.test.is_latency() && is_small { Interface::Command } else { Interface::Dma }
    }

    /// Runs `test`. `sink` receives each latency in order, in nanoseconds as the device's timer shows it. A bandwidth
    /// test does not call it.
    ///
    /// # Errors
    /// The test is invalid, or this system does not support it.
    pub fn run(&self, test: &Test, sink: &mut dyn FnMut(f64)) -> Result<Summary, HostError> {
        self.run_by(test, self.interface_of(test), sink)
    }

    /// Runs `test` with this interface, regardless of the transfer size.
    ///
    /// # Errors
    /// The test is invalid, or this system does not support it.
    pub fn run_by(&self, test: &Test, interface: Interface, sink: &mut dyn FnMut(f64)) -> Result<Summary, HostError> {
        test.check()?;
        if test.numa == Numa::Remote && self.parameters.numa.sockets < 2 {
            return Err(HostError::OneSocket { system: self.name.clone() });
        }
        if test.samples > SAMPLES_MAX {
            return Err(HostError::Samples(test.samples));
        }
        if interface == Interface::Command && !test.test.is_latency() {
            return Err(HostError::CommandBandwidth);
        }
        Run::new(&self.parameters, test, interface).run(sink)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{CompletionSize, Mode, Model};
    use crate::test::{Cache, Iommu, Kind, Order};

    fn test(kind: Kind, size_bytes: u32, window_bytes: u64) -> Test {
        Test {
            test: kind,
            size_bytes,
            window_bytes,
            host_offset_bytes: 0,
            device_offset_bytes: 0,
            order: Order::Random,
            cache: Cache::HostWarm,
            iommu: Iommu::Off,
            numa: Numa::Local,
            samples: 4000,
            seed: 1,
        }
    }

    /// Returns the latencies of `test` on `system`, sorted.
    fn latencies(system: &System, test: &Test) -> Vec<f64> {
        let mut all = Vec::new();
        system.run(test, &mut |latency_ns| all.push(latency_ns)).unwrap();
        all.sort_by(f64::total_cmp);
        all
    }

    fn median(system: &System, test: &Test) -> f64 {
        latencies(system, test)[test.samples as usize / 2]
    }

    fn gbps(system: &System, test: &Test) -> f64 {
        system.run(test, &mut |_| ()).unwrap().gbps()
    }

    fn changed(name: &str, change: impl FnOnce(&mut Parameters)) -> System {
        let mut parameters = Parameters::named(name).unwrap();
        change(&mut parameters);
        System::new("changed", parameters)
    }

    #[test]
    fn the_seed_determines_the_run() {
        let system = System::named("bdw").unwrap();
        let run = |seed| {
            let test = Test { seed, iommu: Iommu::Pages4K, cache: Cache::Cold, ..test(Kind::LatWrrd, 64, 1 << 22) };
            let mut all = Vec::new();
            let summary = system.run(&test, &mut |latency_ns| all.push(latency_ns.to_bits())).unwrap();
            (summary, all)
        };
        assert_eq!(run(7), run(7));
        assert_ne!(run(7).1, run(8).1);
    }

    #[test]
    fn every_system_runs_every_test() {
        for name in names() {
            let system = System::named(name).unwrap();
            for kind in Kind::ALL {
                for (size_bytes, iommu) in
                    [(1, Iommu::Off), (8, Iommu::Pages2M), (64, Iommu::Pages4K), (4096, Iommu::Off)]
                {
                    let test = Test { iommu, samples: 200, ..test(kind, size_bytes, 1 << 16) };
                    let mut taken = 0;
                    let summary = system.run(&test, &mut |_| taken += 1).unwrap();
                    assert_eq!(taken, if kind.is_latency() { 200 } else { 0 }, "{name} {kind}");
                    let raw_gbps = f64::from(system.link().lanes.count()) * system.link().generation.transfers_gtps();
                    assert!(summary.gbps() > 0.0 && summary.gbps() < raw_gbps, "{name} {kind} {}", summary.gbps());
                }
            }
        }
    }

    #[test]
    fn packets_are_counted_both_ways() {
        let system = System::named("hsw").unwrap();
        let count = |kind, size_bytes| system.run(&test(kind, size_bytes, 8192), &mut |_| ()).unwrap().tlps;
        assert_eq!(count(Kind::BwRd, 64), 2 * 4000, "a request and a completion");
        assert_eq!(count(Kind::BwWr, 512), 2 * 4000, "two packets of MPS");
        assert_eq!(count(Kind::BwRd, 256), 5 * 4000, "a request and four completions of RCB");
    }

    #[test]
    fn one_tag_permits_one_outstanding_read() {
        let system = changed("hsw", |parameters| parameters.device.tags = 1);
        let test = test(Kind::BwRd, 64, 8192);
        let device = &system.parameters().device;
        let outside_ns = device.dma_done_ns + 64.0 * device.receive_byte_ns;
        let latency_ns = latencies(&system, &Test { test: Kind::LatRd, ..test.clone() }).iter().sum::<f64>() / 4000.0;
        let expected = 64.0 * 8.0 / (latency_ns - outside_ns);
        assert!((gbps(&system, &test) / expected - 1.0).abs() < 0.01, "{} of {expected}", gbps(&system, &test));
    }

    #[test]
    fn few_credits_limit_writes_to_credits_per_round_trip() {
        let system = changed("hsw", |parameters| {
            parameters.credits.posted_headers = 2;
            parameters.device.write_interval_ns = 0.0;
        });
        // Two packets of 88 bytes a round trip: the time of the second on the wire, 60 ns to the host, and 60 ns until
        // its credit returns.
        let wire_ns = 88.0 * 8.0 / wire::packet_gbps(system.link(), system.parameters().wire.up_dllp_share);
        let expected = 2.0 * 64.0 * 8.0 / (wire_ns + 120.0);
        let found = gbps(&system, &test(Kind::BwWr, 64, 8192));
        assert!((found / expected - 1.0).abs() < 0.02, "{found}, not {expected}");
    }

    #[test]
    fn a_read_does_not_pass_a_posted_write() {
        let test = test(Kind::LatWrrd, 64, 8192);
        let usual = median(&System::named("ib").unwrap(), &test);
        let slow = median(&changed("ib", |parameters| parameters.root_complex.write_order_ns += 2000.0), &test);
        assert!(slow - usual > 1800.0, "{usual} and {slow}");
        let alone = Test { test: Kind::LatRd, ..test };
        let slow_alone = changed("ib", |parameters| parameters.root_complex.write_order_ns += 2000.0);
        assert_eq!(median(&slow_alone, &alone), median(&System::named("ib").unwrap(), &alone));
    }

    #[test]
    fn corrupted_packets_are_retransmitted_and_cost_bandwidth() {
        let system = changed("hsw", |parameters| parameters.wire.bit_error_rate = 1e-5);
        let test = test(Kind::BwWr, 256, 8192);
        let summary = system.run(&test, &mut |_| ()).unwrap();
        let expected = 1.0 - (1.0_f64 - 1e-5).powi(280 * 8);
        let share = summary.replays as f64 / summary.tlps as f64;
        assert!((share - expected).abs() < 0.01, "{share}, not {expected}");
        assert!(summary.gbps() < gbps(&System::named("hsw").unwrap(), &test) * 0.95);
    }

    #[test]
    fn superpages_keep_the_bandwidth_that_small_pages_lose() {
        let system = System::named("hsw").unwrap();
        let run = |iommu| gbps(&system, &Test { iommu, samples: 20_000, ..test(Kind::BwRd, 64, 64 << 20) });
        assert!(run(Iommu::Pages2M) > 0.97 * run(Iommu::Off));
        assert!(run(Iommu::Pages4K) < 0.5 * run(Iommu::Off));
    }

    #[test]
    fn ddio_capacity_depends_on_the_size_of_the_cache() {
        let median = |name, window_bytes| {
            let test = Test { cache: Cache::DeviceWarm, ..test(Kind::LatRd, 64, window_bytes) };
            median(&System::named(name).unwrap(), &test)
        };
        // Two of twenty ways: 1.5 MB of the 15 MB of hsw2, 2.5 MB of the 25 MB of bdw. Of a window of twice that size,
        // half of the lines are evicted.
        assert_eq!(median("hsw2", 2 << 20), median("hsw2", 8192));
        assert!(median("hsw2", 4 << 20) > median("hsw2", 8192) + 50.0);
        assert_eq!(median("bdw", 4 << 20), median("bdw", 8192));
        assert!(median("bdw", 8 << 20) > median("bdw", 8192) + 50.0);
    }

    #[test]
    fn published_figures_of_systems_that_are_not_calibrated_are_met() {
        let snb = System::named("snb").unwrap();
        for (size_bytes, cache, printed_ns) in [
            (64, Cache::Cold, 613.0),
            (64, Cache::HostWarm, 560.0),
            (8, Cache::Cold, 480.0),
            (8, Cache::HostWarm, 413.0),
        ] {
            let found = median(&snb, &Test { cache, ..test(Kind::LatRd, size_bytes, 8192) });
            assert!((found - printed_ns).abs() < 14.0, "snb {size_bytes} B {cache:?}: {found}, not {printed_ns}");
        }
        let e3 = Test { cache: Cache::Cold, samples: 100_000, ..test(Kind::LatRd, 64, 8192) };
        let all = latencies(&System::named("e3").unwrap(), &e3);
        for (share, printed_ns) in [(0.0, 493.0), (0.5, 1213.0), (0.9, 2213.0), (0.95, 3480.0), (0.99, 5693.0)] {
            let found = all[(share * all.len() as f64) as usize];
            assert!((found / printed_ns - 1.0).abs() < 0.05, "e3 {share}: {found}, not {printed_ns}");
        }
    }

    fn with(base: &str, changes: &[&str]) -> System {
        System::changed(base, parameters::built_in(base).unwrap(), changes).unwrap()
    }

    #[test]
    fn writes_hold_their_credits_until_they_are_committed() {
        // SIGCOMM 2024 (Understanding the Host Network): 92 lines of 64 B for 300 ns each are at most 19.6 GB/s.
        let system = with("ice-lake", &["credits.posted_headers=92", "root_complex.write_commit_ns=300"]);
        let unbound = with("ice-lake", &["credits.posted_headers=0", "credits.posted_data=0"]);
        let test = Test { cache: Cache::Cold, ..test(Kind::BwWr, 256, 1 << 20) };
        let lines = with("ice-lake", &["credits.posted_headers=0", "credits.posted_data=368"]);
        let wire = &lines.parameters().wire;
        let hold_ns = 300.0 + wire.latency_ns + lines.parameters().credits.update_ns;
        let expected = 368.0 * 16.0 * 8.0 / hold_ns;
        let found = gbps(&lines, &test);
        assert!((found / expected - 1.0).abs() < 0.03, "{found}, not {expected}");
        assert!(gbps(&system, &test) > found && gbps(&unbound, &test) > 1.5 * found);
    }

    #[test]
    fn a_device_with_a_tlb_requests_each_translation_once() {
        let system = with("ice-lake", &["device.tlb_entries=32"]);
        let pages = 16;
        for kind in Kind::ALL {
            let test = Test { iommu: Iommu::Pages4K, ..test(kind, 64, pages * 4096) };
            let summary = system.run(&test, &mut |_| ()).unwrap();
            assert_eq!((summary.iotlb_lookups, summary.iotlb_misses), (pages, pages), "{kind}");
        }
    }

    #[test]
    fn a_miss_of_the_device_costs_a_round_trip_and_a_hit_nothing() {
        let (plain, ats) = (System::named("ice-lake").unwrap(), with("ice-lake", &["device.tlb_entries=64"]));
        let test = |iommu, window_bytes| Test { iommu, ..test(Kind::LatRd, 64, window_bytes) };
        let without = median(&plain, &test(Iommu::Off, 8192));
        assert_eq!(median(&ats, &test(Iommu::Pages4K, 8192)), without, "all but two hit");
        // Of 16,384 pages nearly all miss in both TLBs.
        let extra = median(&ats, &test(Iommu::Pages4K, 64 << 20)) - median(&plain, &test(Iommu::Off, 64 << 20));
        let parameters = ats.parameters();
        let expected = 2.0 * parameters.wire.latency_ns + parameters.iommu.walk_ns;
        assert!((extra - expected).abs() < 10.0, "{extra}, not {expected}");
    }

    #[test]
    fn a_large_device_tlb_spares_the_bandwidth_that_the_iotlb_loses() {
        let test = Test { iommu: Iommu::Pages4K, samples: 400_000, ..test(Kind::BwRd, 64, 4 << 20) };
        let off = gbps(&System::named("ice-lake").unwrap(), &Test { iommu: Iommu::Off, ..test.clone() });
        let plain = gbps(&System::named("ice-lake").unwrap(), &test);
        let ats = gbps(&with("ice-lake", &["device.tlb_entries=4096"]), &test);
        assert!(plain < 0.2 * off && ats > 0.9 * off, "{plain}, {ats} of {off}");
    }

    #[test]
    fn translations_take_their_share_of_the_link() {
        // Nothing limits but the link from the host, which carries 28 bytes for each translation beside 84 of data.
        let free = ["iommu.walkers=256", "iommu.read_queue=60000", "iommu.line_replay_ns=0", "iommu.read_hold_ns=0"];
        let device = ["device.tags=1024", "device.read_interval_ns=0", "device.bus_transfer_ns=0"];
        let more = ["device.tlb_entries=1", "device.tlb_transfers_ahead=4096", "root_complex.port_line_ns=0"];
        let credits = ["credits.non_posted_headers=0", "credits.non_posted_data=0", "link.lanes=4"];
        let system = with("ice-lake", &[&free[..], &device, &more, &credits].concat());
        let test = Test { iommu: Iommu::Pages4K, samples: 40_000, ..test(Kind::BwRd, 64, 64 << 20) };
        let without = gbps(&system, &Test { iommu: Iommu::Off, ..test.clone() });
        let expected = without * 84.0 / (84.0 + 28.0);
        let found = gbps(&system, &test);
        assert!((found / expected - 1.0).abs() < 0.03, "{found}, not {expected} of {without}");
    }

    #[test]
    fn a_changed_system_is_named_after_its_changes_and_a_prediction() {
        let system = with("hsw", &["device.tags=64", "iommu.replacement=lru"]);
        assert_eq!(system.name(), "hsw+device.tags=64+iommu.replacement=lru");
        assert_eq!((system.parameters().device.tags, system.parameters().iommu.entries), (64, 121));
        let prediction = system.parameters().prediction.clone().unwrap();
        assert!(prediction.rests_on.contains("device.tags=64"), "{prediction:?}");
        assert_eq!(prediction.error_percent(&test(Kind::BwRd, 64, 8192)), None);
        for (change, words) in [
            ("device.tags=0", &["device.tags", "1 to 1024"][..]),
            ("device.tagz=1", &["tagz"]),
            ("devices.tags=1", &["devices", "iommu, link"]),
            ("tags=1", &["tags=1", "SECTION.KEY=VALUE"]),
            ("device.tags", &["device.tags", "SECTION.KEY=VALUE"]),
            ("device.tags=many", &["device.tags", "many", "a whole number from 0"]),
            ("wire.latency_ns=many", &["wire.latency_ns", "many", "a number;"]),
            ("device.tags=", &["device.tags=", "no valid value"]),
            ("device.tags=5\n[x]", &["device.tags=5\\n[x]", "no valid value"]),
            ("device.tags=5 # five", &["# five", "no valid value"]),
            ("prediction.rests_on=x", &["no section 'prediction'"]),
            ("memory.refresh_ns=8000", &["memory.refresh_ns", "less than 7800"]),
            ("device.tags=1e400", &["device.tags"]),
        ] {
            let hsw = parameters::built_in("hsw").unwrap();
            let error = System::changed("hsw", hsw, &[change]).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)) && !error.contains('\n'), "{change}: {error}");
        }
    }

    #[test]
    fn a_parameter_is_changed_once() {
        let change = |changes: &[&str]| System::changed("milan", parameters::built_in("milan").unwrap(), changes);
        let error = change(&["device.tags=64", "link.lanes=8", " device . tags = 32"]).unwrap_err().to_string();
        assert!(error.contains("device.tags a second time"), "{error}");
        let spaces = change(&[" device.tags = 64 "]).unwrap();
        assert_eq!((spaces.name(), spaces.parameters().device.tags), ("milan+device.tags=64", 64));
        let error = change(&["prediction.bandwidth_error_percent=1"]).unwrap_err().to_string();
        assert!(error.contains("no section 'prediction'"), "{error}");
    }

    #[test]
    fn a_run_that_virtual_time_cannot_hold_is_refused() {
        for (kind, change) in [
            (Kind::BwRd, "device.read_interval_ns=1e9"),
            (Kind::BwWr, "device.write_interval_ns=1e9"),
            (Kind::BwRdwr, "device.bus_transfer_ns=1e9"),
            (Kind::LatRd, "root_complex.read_ns=1e9"),
            (Kind::LatWrrd, "device.write_done_ns=1e9"),
        ] {
            let long = Test { samples: SAMPLES_MAX, ..test(kind, 64, 8192) };
            let error = with("hsw", &[change]).run(&long, &mut |_| ()).unwrap_err();
            let HostError::TooLong { transfers, .. } = error else { panic!("{kind}: {error}") };
            assert!((4_000_000..10_000_000).contains(&transfers), "{kind}: half of 213 days, not {transfers} s");
            assert!(error.to_string().contains(&format!("at most {transfers},")), "{error}");
        }
    }

    #[test]
    fn nothing_in_a_current_nic_limits_but_link_and_rate_of_requests() {
        // Reads and writes together, each way: the link carries a request of 24 bytes for each read beside the write.
        for (changes, share) in [(&["device.tags=768"][..], 0.96), (&["link.generation=6"], 0.96)] {
            let system = with("sapphire-rapids", changes);
            let test = Test { cache: Cache::Cold, samples: 20_000, ..test(Kind::BwRdwr, 4096, 1 << 20) };
            let raw = wire::packet_gbps(system.link(), system.parameters().wire.up_dllp_share);
            let found = gbps(&system, &test);
            let headers = if system.link().generation.is_flit_mode() { 16.0 } else { 24.0 };
            let bound = raw * 4096.0 / (4096.0 + 9.0 * headers);
            assert!(found > share * bound && found < bound * 1.01, "{changes:?}: {found} of {bound}");
        }
    }

    #[track_caller]
    fn assert_bound(system: &System, sizes: &[(u32, u32)]) {
        let model = Model::new(Mode::Corrected, *system.link(), CompletionSize::Mps).unwrap();
        for (bytes, offset) in sizes.iter().copied() {
            let bound = model.bandwidth(bytes.into(), offset.into()).unwrap();
            let bounds = [bound.read_gbps, bound.write_gbps, bound.readwrite_gbps];
            let places =
                if system.parameters().numa.sockets > 1 { &[Numa::Local, Numa::Remote][..] } else { &[Numa::Local] };
            for (kind, bound) in [Kind::BwRd, Kind::BwWr, Kind::BwRdwr].into_iter().zip(bounds) {
                for numa in places.iter().copied() {
                    let test = Test { host_offset_bytes: offset, samples: 2000, numa, ..test(kind, bytes, 1 << 20) };
                    let found = gbps(system, &test);
                    assert!(found <= bound, "{}, {kind} of {bytes} bytes, {numa:?}: {found} of {bound}", system.name());
                }
            }
        }
    }

    #[test]
    fn no_system_carries_more_than_its_link_can() {
        for name in names() {
            assert_bound(&System::named(name).unwrap(), &[(8, 0), (64, 0), (61, 3), (512, 0), (2048, 0), (4096, 0)]);
        }
    }

    /// Whatever a file says: here that nothing but the link limits, and that link layer packets take nothing.
    #[test]
    fn no_changed_system_carries_more_than_its_link_can() {
        let ends =
            ["device.tags=256", "device.read_interval_ns=0", "device.write_interval_ns=0", "wire.up_dllp_share=0"];
        for generation in 1..=7 {
            for (lanes, mps_bytes) in [(1, 128), (4, 256), (8, 512), (16, 512), (16, 256)] {
                let link = [
                    format!("link.generation={generation}"),
                    format!("link.lanes={lanes}"),
                    format!("link.mps_bytes={mps_bytes}"),
                    "link.mrrs_bytes=512".to_owned(),
                    "wire.down_dllp_share=0".to_owned(),
                ];
                let changes: Vec<&str> = link.iter().map(String::as_str).chain(ends).collect();
                let system = with("sapphire-rapids", &changes);
                assert_bound(&system, &[(64, 0), (4096, 0), (61, 3)]);
            }
        }
    }

    #[test]
    fn the_links_between_sockets_bound_reads_and_writes_of_remote_memory_together() {
        let system = with("milan", &["numa.link_gbps=100"]);
        for (kind, directions) in [(Kind::BwRd, 1.0), (Kind::BwWr, 1.0), (Kind::BwRdwr, 2.0)] {
            for bytes in [64, 1500, 4096] {
                let lines_bytes = f64::from(bytes).div_euclid(64.0) * 64.0 + if bytes % 64 == 0 { 0.0 } else { 64.0 };
                let test = |numa| Test { cache: Cache::Cold, samples: 20_000, numa, ..test(kind, bytes, 64 << 20) };
                let crossed = gbps(&system, &test(Numa::Remote)) * directions * lines_bytes / f64::from(bytes);
                assert!((97.0..=100.0).contains(&crossed), "{kind} of {bytes} bytes: {crossed}");
                let local = gbps(&system, &test(Numa::Local));
                assert_eq!(
                    local,
                    gbps(&System::named("milan").unwrap(), &test(Numa::Local)),
                    "{kind} of {bytes} bytes"
                );
            }
        }
        // Whatever the credits: here, the host accepts all writes at once.
        let infinite = with("milan", &["numa.link_gbps=100", "credits.posted_headers=0", "credits.posted_data=0"]);
        let writes = gbps(&infinite, &Test { numa: Numa::Remote, samples: 20_000, ..test(Kind::BwWr, 4096, 64 << 20) });
        assert!((97.0..=100.0).contains(&writes), "{writes}");
    }

    #[test]
    fn strict_ordering_bounds_writes_alone() {
        let strict = with("milan", &["device.relaxed_ordering=false"]);
        let test = |kind| Test { cache: Cache::Cold, samples: 20_000, ..test(kind, 4096, 64 << 20) };
        let writes = gbps(&strict, &test(Kind::BwWr));
        assert!((145.0..=150.0).contains(&writes), "{writes}");
        let milan = System::named("milan").unwrap();
        assert_eq!(gbps(&strict, &test(Kind::BwRd)), gbps(&milan, &test(Kind::BwRd)));
        assert!(gbps(&milan, &test(Kind::BwWr)) > 230.0);
        let hsw = parameters::built_in("hsw").unwrap();
        let error = System::changed("hsw", hsw, &["device.relaxed_ordering=false"]).unwrap_err().to_string();
        assert!(error.contains("device.relaxed_ordering") && error.contains("strict_write_gbps"), "{error}");
    }

    #[test]
    fn translations_are_requested_for_transfers_of_the_test_only() {
        let system = with("ice-lake", &["device.tlb_entries=65536", "device.tlb_transfers_ahead=65536"]);
        let test = Test { iommu: Iommu::Pages4K, order: Order::Sequential, ..test(Kind::BwRdwr, 4096, 64 << 20) };
        let summary = system.run(&Test { samples: 1000, ..test }, &mut |_| ()).unwrap();
        assert_eq!(summary.iotlb_lookups, 2000, "a page for each of 1000 reads and 1000 writes");
    }

    #[test]
    fn a_file_of_ones_own_is_a_prediction_whose_error_is_not_known() {
        let prediction = |text| System::from_toml("mine.toml", text).unwrap().parameters().prediction.clone().unwrap();
        assert_eq!(prediction("base = \"ice-lake\""), Prediction::unchecked("the parameters of mine.toml".into()));
        let own = "base = \"hsw\"\n[prediction]\nrests_on = \"a data sheet\"\nlatency_error_percent = 5.0\n";
        assert_eq!(
            (prediction(own).rests_on.as_str(), prediction(own).latency_error_percent),
            ("a data sheet", Some(5.0))
        );
        let own = prediction("base = \"ice-lake\"\n[prediction]\nrests_on = \"a data sheet\"\n");
        assert_eq!(own, Prediction::unchecked("a data sheet".into()), "without the errors of the base");
    }

    #[test]
    fn a_test_that_cannot_run_is_refused_with_a_remedy() {
        let hsw = System::named("hsw").unwrap();
        let error = |test: &Test| hsw.run(test, &mut |_| ()).unwrap_err().to_string();
        let good = test(Kind::BwRd, 64, 8192);
        assert!(error(&Test { numa: Numa::Remote, ..good.clone() }).contains("one socket"));
        assert!(error(&Test { samples: u64::MAX, ..good.clone() }).contains("at most"));
        assert!(error(&Test { size_bytes: 0, ..good.clone() }).contains("choose 1 to 4096"));
        assert_eq!(hsw.run_by(&good, Interface::Command, &mut |_| ()), Err(HostError::CommandBandwidth));
        let unknown = System::named("pentium").unwrap_err().to_string();
        assert!(unknown.contains("pentium") && unknown.contains("genoa"), "{unknown}");
    }
}
