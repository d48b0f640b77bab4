//! What the benchmark asks of a device, and how a device is named.

use pcie::link::Link;
use pcie::result::Provenance;
use pcie::test::Test;

use crate::cuda::Cuda;
use crate::error::{Error, Result};
use crate::memory::{Memory, Pages};
use crate::pci::Pci;
use crate::simulated::Simulated;

/// What a device is.
#[derive(Clone, Debug)]
pub struct About {
    /// As on the command line.
    pub name: String,
    /// Host, device and link in words, as far as known.
    pub words: String,
    /// Where its numbers come from.
    pub provenance: Provenance,
    /// The link, where it is known.
    pub link: Option<Link>,
}

/// The timer that latencies are taken with.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timer {
    /// What reading it costs; already subtracted from what a device reports.
    pub cost_ns: f64,
    /// Its step.
    pub step_ns: f64,
}

/// Something that reads and writes memory across a link, or stands for it.
pub trait Device: Send {
    /// What it is.
    fn about(&self) -> &About;

    /// Whether it can do a test, which is possible as such.
    ///
    /// # Errors
    /// What it cannot do, and what to ask instead.
    fn check(&self, test: &Test) -> Result<()>;

    /// Makes everything ready: memory, clocks, warm-up. What a cache must hold before each visit is the run's affair,
    /// because a visit changes it.
    ///
    /// # Errors
    /// What the machine refused.
    fn prepare(&mut self, test: &Test) -> Result<()>;

    /// Its timer, known once a test is prepared.
    fn timer(&self) -> Timer;

    /// Takes `test.samples` latencies, in nanoseconds, and hands them over in order.
    ///
    /// # Errors
    /// What failed on the way.
    fn latencies(&mut self, test: &Test, sink: &mut (dyn FnMut(f64) + Send)) -> Result<()>;

    /// Makes `test.samples` transfers and returns the nanoseconds they took together; of a read-and-write test, so
    /// many in each direction.
    ///
    /// # Errors
    /// What failed on the way.
    fn bandwidth(&mut self, test: &Test) -> Result<f64>;
}

/// What only some devices ask.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceOptions {
    /// Pages of `memory`.
    pub pages: Pages,
    /// The BAR of `pci:`.
    pub bar: Option<u8>,
    /// Whether what the BAR holds may be overwritten.
    pub may_overwrite: bool,
}

/// Opens a device by its name: `sim:SYSTEM`, `memory`, `pci:ADDRESS`, `cuda:N`.
///
/// # Errors
/// An unknown name, or a device that is not there.
pub fn open(name: &str, options: DeviceOptions) -> Result<Box<dyn Device>> {
    match name.split_once(':') {
        None if name == "memory" => Ok(Box::new(Memory::open(options.pages)?)),
        Some(("cuda", index)) => Ok(Box::new(Cuda::open(index)?)),
        Some(("pci", address)) => Ok(Box::new(Pci::open(address, options.bar, options.may_overwrite)?)),
        Some(("sim", system)) => Ok(Box::new(Simulated::open(system)?)),
        _ => Error::wrong_use(format!(
            "device '{name}' is not known; choose sim:SYSTEM, memory, pci:ADDRESS (as 0000:00:04.0) or cuda:N"
        )),
    }
}
