//! Shared devices, and QEMU's arguments for them.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

/// The one device of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Device {
    /// ivshmem-plain: a PCI BAR of shared memory, and nothing else
    Plain,
    /// ivshmem-doorbell: the same with interrupts, from the device server
    Doorbell,
    /// ivshmem-doorbell behind an IOMMU, bound to vfio-pci
    Vfio,
    /// Persistent memory as /dev/dax0.0
    Dax,
    /// No device at all
    None,
}

impl Device {
    /// Returns its name on the command line and in a guest's DEVICE_KIND.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Doorbell => "doorbell",
            Self::Vfio => "vfio",
            Self::Dax => "dax",
            Self::None => "none",
        }
    }

    /// Returns whether the device server provides it.
    pub fn is_served(self) -> bool {
        matches!(self, Self::Doorbell | Self::Vfio)
    }

    /// Returns the kernel modules that a guest needs for it, without their dependencies.
    pub fn modules(self) -> &'static [&'static str] {
        match self {
            Self::Plain | Self::Doorbell | Self::None => &[],
            Self::Vfio => &["vfio-pci", "vfio_iommu_type1"],
            Self::Dax => &["nfit", "nd_pmem", "dax_pmem", "device_dax"],
        }
    }

    /// Returns additional kernel parameters.
    pub fn kernel_parameters(self) -> &'static str {
        if self == Self::Vfio { "intel_iommu=on" } else { "" }
    }

    /// Returns the QEMU machine type that supports it.
    pub fn machine(self) -> &'static str {
        match self {
            Self::Vfio => "q35,accel=tcg,kernel-irqchip=split",
            Self::Dax => "q35,accel=tcg,nvdimm=on",
            _ => "q35,accel=tcg",
        }
    }

    /// Returns the suffix of QEMU's `-m` option after the size of a guest's private memory.
    pub fn memory_arguments(self, ram_bytes: u64, size_bytes: u64) -> String {
        if self != Self::Dax {
            return String::new();
        }
        let mib_max = (ram_bytes + 2 * size_bytes).next_multiple_of(1 << 30) >> 20;
        format!(",slots=1,maxmem={mib_max}M")
    }

    /// Returns QEMU's arguments for `count` devices. Only a device server provides more than one.
    pub fn arguments(self, memory: &OwnedFd, size_bytes: u64, socket: &Path, vectors: u32, count: u8) -> Vec<String> {
        // QEMU opens files by path only. Through this process, the memfd has a path.
        let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
        let backend = format!("memory-backend-file,id=memory,share=on,size={size_bytes},mem-path={path}");
        let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let served = (0..count).flat_map(|index| {
            let server = format!("socket,id=server{index},path={}", socket.display());
            let doorbell = format!("ivshmem-doorbell,chardev=server{index},vectors={vectors}");
            owned(&["-chardev", &server, "-device", &doorbell])
        });
        match self {
            Self::Plain => owned(&["-object", &backend, "-device", "ivshmem-plain,memdev=memory"]),
            Self::Doorbell => served.collect(),
            Self::Vfio => owned(&["-device", "intel-iommu,intremap=on"]).into_iter().chain(served).collect(),
            Self::Dax => owned(&["-object", &backend, "-device", "nvdimm,memdev=memory"]),
            Self::None => vec![],
        }
    }
}
