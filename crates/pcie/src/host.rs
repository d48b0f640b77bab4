//! A simulated host in virtual time: what a device would measure on a machine that is described by a parameter file.
//!
//! A request goes through these parts, each a module that knows nothing of the others:
//!
//! ```text
//!  device engines, tags ── credits ── wire up ──► queue ── IOMMU ── order ── cache ── memory
//!                  ▲                                                                     │
//!                  └───────────── wire down ◄── credits ── completions, split ◄──────────┘
//! ```
//!
//! The same seed makes the same run, to the byte; nothing here reads a clock. [`System`] is the way in:
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
mod iommu;
mod memory;
mod packets;
pub mod parameters;
pub mod path;
mod root_complex;
mod run;
mod tails;
mod wire;

use thiserror::Error;

pub use self::parameters::{ParameterError, Parameters, names};
use self::run::Run;
use crate::link::Link;
use crate::test::{Numa, Test, TestError};

/// A machine with a device in it, ready to be tested.
#[derive(Clone, Debug, PartialEq)]
pub struct System {
    name: String,
    parameters: Parameters,
}

/// How the device does a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interface {
    /// By a DMA engine: any size.
    Dma,
    /// By a command of a program on the device: small ones (the published `lat_cmd` tests).
    Command,
}

/// What a run came to; latencies went to its sink.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Transfers done; of a read-and-write test, of each direction.
    pub transfers: u64,
    /// Bytes of one.
    pub size_bytes: u32,
    /// How long it took, in virtual time.
    pub elapsed_ns: f64,
    /// Packets on the link, both directions.
    pub tlps: u64,
    /// Packets that were sent again because they arrived damaged.
    pub replays: u64,
    /// Translations that were not in the IOTLB.
    pub iotlb_misses: u64,
    /// Translations.
    pub iotlb_lookups: u64,
}

/// A run that is not possible.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum HostError {
    /// The system.
    #[error(transparent)]
    Parameters(#[from] ParameterError),
    /// The test.
    #[error(transparent)]
    Test(#[from] TestError),
    /// The two together.
    #[error("system '{system}' has one socket, so there is no remote memory; use local memory or another system")]
    OneSocket {
        /// Its name.
        system: String,
    },
    /// More samples than virtual time lasts.
    #[error("{0} samples are too many to simulate; choose at most {SAMPLES_MAX}")]
    Samples(u64),
    /// A bandwidth test by command.
    #[error("bandwidth tests go by DMA; take a latency test for commands")]
    CommandBandwidth,
}

/// The longest run: virtual time must not end before it.
pub const SAMPLES_MAX: u64 = 1 << 36;

impl Summary {
    /// Payload in 10^9 bits a second; of a read-and-write test, of each direction.
    pub fn gbps(&self) -> f64 {
        self.transfers as f64 * f64::from(self.size_bytes) * 8.0 / self.elapsed_ns
    }

    /// Transfers a second, in millions; of a read-and-write test, of each direction.
    pub fn mtransfers_per_s(&self) -> f64 {
        self.transfers as f64 * 1e3 / self.elapsed_ns
    }
}

impl System {
    /// One of [`names`].
    ///
    /// # Errors
    /// When there is none of this name.
    pub fn named(name: &str) -> Result<Self, HostError> {
        Ok(Self { name: name.to_owned(), parameters: Parameters::named(name)? })
    }

    /// The system of a parameter file's text; `file` is its name in errors.
    ///
    /// # Errors
    /// What is wrong with it, in one line.
    pub fn from_toml(file: &str, text: &str) -> Result<Self, HostError> {
        Ok(Self { name: file.to_owned(), parameters: Parameters::parse(file, text)? })
    }

    /// A system of these parameters.
    pub fn new(name: &str, parameters: Parameters) -> Self {
        Self { name: name.to_owned(), parameters }
    }

    /// As it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// All that is known of it.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Processor, chipset and device in words.
    pub fn description(&self) -> &str {
        &self.parameters.description
    }

    /// The link between host and device.
    pub fn link(&self) -> &Link {
        &self.parameters.link
    }

    /// How the device does the transfers of `test`, as in the published tests: small latencies by command.
    pub fn interface_of(&self, test: &Test) -> Interface {
        let is_small = test.size_bytes <= self.parameters.device.command_bytes_max;
        if test.test.is_latency() && is_small { Interface::Command } else { Interface::Dma }
    }

    /// Runs `test`; `sink` gets each latency in nanoseconds as the device's timer shows it, in order. Bandwidth tests
    /// give it nothing.
    ///
    /// # Errors
    /// When the test is not possible, or not on this system.
    pub fn run(&self, test: &Test, sink: &mut dyn FnMut(f64)) -> Result<Summary, HostError> {
        self.run_by(test, self.interface_of(test), sink)
    }

    /// Runs `test` by this interface, whatever its size.
    ///
    /// # Errors
    /// When the test is not possible, or not on this system.
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
        Ok(Run::new(&self.parameters, test, interface).run(sink))
    }
}
