//! The benchmark of PCI Express: the five tests of pcie-bench with all their parameters, on a simulated host, on this
//! machine's memory, on the BAR of a PCI device and on a GPU.
//!
//! * [`device`]: what the benchmark asks of a device; [`device::open`] finds one by its name.
//! * [`runner`]: one test on one device, in the result form of the `pcie` crate.

#![allow(unsafe_code)] // Flushing caches, mapping registers, reading time stamps, calling a GPU's driver.

pub mod compare;
pub mod cuda;
pub mod device;
pub mod error;
pub mod files;
pub mod import;
pub mod memory;
pub mod pci;
pub mod runner;
pub mod simulated;
pub mod statistics;
pub mod sweep;

mod clock;
mod lines;
mod order;
#[cfg(any(test, feature = "test-support"))]
pub mod testing;

pub use error::{Error, Result};
