//! The benchmark of PCI Express: the five tests of pcie-bench with all their parameters, on a simulated host, on this
//! machine's memory, on the BAR of a PCI device and on a GPU.
//!
//! * [`device`]: the interface that every device implements; [`registry::open`] opens one by its name.
//! * [`runner`]: runs one test on one device and returns a result of the `pcie` crate.

#![allow(unsafe_code)] // Flushing caches, mapping registers, reading time stamps, calling a GPU's driver.

pub mod compare;
pub mod cuda;
pub mod device;
pub mod error;
pub mod files;
pub mod import;
pub mod memory;
pub mod pci;
pub mod registry;
pub mod runner;
pub mod simulated;
pub mod statistics;
pub mod sweep;

mod cache_lines;
mod clock;
mod order;
#[cfg(any(test, feature = "test-support"))]
pub mod testing;

pub use error::{Error, Result};
