//! Opens a device by its name on the command line.

use crate::cuda::Cuda;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::{Memory, Pages};
use crate::pci::Pci;
use crate::simulated::Simulated;

/// Options that only some devices use.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceOptions {
    /// Page size of the window of `memory`.
    pub pages: Pages,
    /// The BAR of `pci:`.
    pub bar: Option<u8>,
    /// Whether tests may overwrite the contents of the BAR.
    pub may_overwrite: bool,
}

/// Opens a device by its name: `sim:SYSTEM`, `memory`, `pci:ADDRESS`, `cuda:N`.
///
/// # Errors
/// An unknown name, or a device that this machine does not have.
pub fn open(name: &str, options: DeviceOptions) -> Result<Box<dyn Device>> {
    match name.split_once(':') {
        None if name == "memory" => Ok(Box::new(Memory::open(options.pages))),
        Some(("cuda", index)) => Ok(Box::new(Cuda::open(index)?)),
        Some(("pci", address)) => Ok(Box::new(Pci::open(address, options.bar, options.may_overwrite)?)),
        Some(("sim", system)) => Ok(Box::new(Simulated::open(system)?)),
        _ => Error::wrong_use(format!(
            "device '{name}' is not known; choose sim:SYSTEM, memory, pci:ADDRESS (as 0000:00:04.0) or cuda:N"
        )),
    }
}
