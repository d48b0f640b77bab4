//! The interface that every device of the benchmark implements.

use pcie::host::prediction::Prediction;
use pcie::link::Link;
use pcie::result::Provenance;
use pcie::test::Test;

use crate::error::Result;

/// Describes a device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Name of the device on the command line.
    pub name: String,
    /// Description of host, device and link, as far as known.
    pub description: String,
    /// Where the figures come from.
    pub provenance: Provenance,
    /// The link, where it is known.
    pub link: Option<Link>,
    /// What a prediction rests on.
    pub prediction: Option<Prediction>,
}

/// Properties of the timer that measures latencies.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timer {
    /// Cost of a reading; it is already subtracted from the latencies that a device reports.
    pub cost_ns: f64,
    /// Resolution: all readings are multiples of it.
    pub step_ns: f64,
}

/// A device that reads and writes memory across a link, or a model of one.
pub trait Device: Send {
    /// Returns the description of the device.
    fn info(&self) -> &DeviceInfo;

    /// Checks whether the device can run `test`, which is valid in itself.
    ///
    /// # Errors
    /// Names what the device cannot do, and the alternative.
    fn check(&self, test: &Test) -> Result<()>;

    /// Prepares memory and clocks, and warms up. The state of the caches is set during the run, because a run changes
    /// it.
    ///
    /// # Errors
    /// Names the resource that the machine refused.
    fn prepare(&mut self, test: &Test) -> Result<()>;

    /// Returns the properties of the timer, which are known once a test is prepared.
    fn timer(&self) -> Timer;

    /// Measures `test.samples` latencies and passes them to `sink` in order, in nanoseconds.
    ///
    /// # Errors
    /// Names the operation that failed.
    fn latencies(&mut self, test: &Test, sink: &mut (dyn FnMut(f64) + Send)) -> Result<()>;

    /// Makes `test.samples` transfers, or as many in each direction of a read-and-write test, and returns the
    /// nanoseconds they took in total.
    ///
    /// # Errors
    /// Names the operation that failed.
    fn bandwidth(&mut self, test: &Test) -> Result<f64>;
}
