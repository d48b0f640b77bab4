//! ivshmem devices through sysfs: the memory is BAR 2, write-combined where the kernel offers that.

use super::backing_file;
use super::error::DeviceProblem;
use super::interrupts::Interrupts;
use super::memory::Caching;
use super::opened::OpenedMemory;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use volmem::{Mapping, Registers};

/// How a PCI device is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PciAccess {
    /// Through the resource files of its BARs in sysfs: needs root, and interrupts do not reach this node.
    Sysfs,
    /// Through VFIO: needs an IOMMU and the driver `vfio-pci`, and interrupts reach this node as eventfds.
    Vfio,
}

const DEVICES: &str = "/sys/bus/pci/devices";

/// PCI vendor ID and device ID of ivshmem.
const IVSHMEM: (&str, &str) = ("0x1af4", "0x1110");

/// BAR 0 has the registers, BAR 1 the MSI-X table where the device has interrupts, BAR 2 the memory.
pub(super) const REGISTERS_BAR: usize = 0;
pub(super) const INTERRUPTS_BAR: usize = 1;
pub(super) const MEMORY_BAR: usize = 2;
pub(super) const REGISTERS_BYTES: usize = 256;

/// `IORESOURCE_MEM` of the kernel's resource flags: memory, not I/O ports.
const FLAG_MEMORY: u64 = 0x200;

/// A PCI device in sysfs.
pub(super) struct Sysfs {
    pub folder: PathBuf,
    bars: Vec<u64>,
}

impl Sysfs {
    /// Finds the ivshmem device at `address`.
    pub(super) fn find(address: &str) -> Result<Self, DeviceProblem> {
        Self::find_in(Path::new(DEVICES), address)
    }

    fn find_in(devices: &Path, address: &str) -> Result<Self, DeviceProblem> {
        let is_address =
            !address.is_empty() && address.bytes().all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte));
        let folder = devices.join(address);
        if !is_address || !folder.join("resource").exists() {
            let remedy = "lspci -D -d 1af4:1110 lists the ivshmem devices of this machine (0000:00:04.0)";
            return Err(DeviceProblem::unsuitable("there is no such PCI device", remedy));
        }
        let fact = |name: &str| read(&folder.join(name)).map(|text| text.trim().to_owned());
        let (vendor, device) = (fact("vendor")?, fact("device")?);
        if (vendor.as_str(), device.as_str()) != IVSHMEM {
            let found = format!("a PCI device {vendor}:{device}, not an ivshmem device 0x1af4:0x1110");
            return Err(DeviceProblem::unsuitable(found, "lspci -D -d 1af4:1110 lists those of this machine"));
        }
        let bars = read(&folder.join("resource"))?.lines().map(bar_bytes).collect();
        Ok(Self { folder, bars })
    }

    /// Bytes of a memory BAR; 0 if there is none.
    pub(super) fn bar_bytes(&self, bar: usize) -> u64 {
        self.bars.get(bar).copied().unwrap_or(0)
    }

    /// Path of a BAR's resource file.
    fn bar_file(&self, bar: usize, suffix: &str) -> PathBuf {
        self.folder.join(format!("resource{bar}{suffix}"))
    }

    /// Caching of the memory, and the path of the file to map.
    pub(super) fn memory_file(&self) -> (Caching, PathBuf) {
        let combined = self.bar_file(MEMORY_BAR, "_wc");
        if combined.exists() {
            (Caching::WriteCombined, combined)
        } else {
            (Caching::Uncached, self.bar_file(MEMORY_BAR, ""))
        }
    }

    /// Enables the device: before that it does not respond to accesses.
    fn enable(&self) -> Result<(), DeviceProblem> {
        let switch = self.folder.join("enable");
        if read(&switch)?.trim() != "0" {
            return Ok(());
        }
        fs::write(&switch, "1").map_err(DeviceProblem::system(format!("writing 1 to {}", switch.display())))
    }
}

fn read(path: &Path) -> Result<String, DeviceProblem> {
    fs::read_to_string(path).map_err(DeviceProblem::system(format!("reading {}", path.display())))
}

/// Size of a BAR from its line of `resource`: begin, end and flags.
fn bar_bytes(line: &str) -> u64 {
    let number = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let numbers: Vec<u64> = line.split_whitespace().filter_map(number).collect();
    match numbers[..] {
        [begin, end, flags] if end > begin && flags & FLAG_MEMORY != 0 => end - begin + 1,
        _ => 0,
    }
}

pub(super) fn open(address: &str) -> Result<OpenedMemory, DeviceProblem> {
    open_sysfs(&Sysfs::find(address)?, address)
}

fn open_sysfs(sysfs: &Sysfs, address: &str) -> Result<OpenedMemory, DeviceProblem> {
    sysfs.enable()?;
    let len_bytes = sysfs.bar_bytes(MEMORY_BAR);
    let (caching, path_memory) = sysfs.memory_file();
    let descriptor = backing_file::open(&path_memory)?;
    // Peers with interrupts block until one arrives. A device without interrupts ignores the doorbell register.
    let interrupts_peers = sysfs.bar_bytes(INTERRUPTS_BAR) > 0 && sysfs.bar_bytes(REGISTERS_BAR) > 0;
    let registers =
        if interrupts_peers { Some((backing_file::open(&sysfs.bar_file(REGISTERS_BAR, ""))?, 0)) } else { None };
    let interrupts =
        Interrupts { registers: registers.as_ref().map(map_registers).transpose()?, ..Interrupts::default() };
    Ok(OpenedMemory {
        name: address.to_owned(),
        caching,
        descriptor,
        offset_bytes: 0,
        len_bytes,
        lease_obstacle: None,
        interrupts,
        registers,
        server: None,
        kept_open: Vec::new(),
    })
}

/// Maps the registers at an offset of a file.
pub(super) fn map_registers((file, offset_bytes): &(OwnedFd, u64)) -> Result<Registers, DeviceProblem> {
    let mapping = Mapping::at(file.as_fd(), *offset_bytes, REGISTERS_BYTES);
    mapping.map(Registers::new).map_err(DeviceProblem::system("mmap of the registers"))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const ADDRESS: &str = "0000:00:04.0";

    /// A folder with the files that sysfs has for a device.
    pub(in super::super) fn devices(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        let folder = root.path().join(ADDRESS);
        fs::create_dir(&folder).expect("a folder");
        let resource = "0x00000000febf1000 0x00000000febf10ff 0x0000000000040200\n\
                        0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                        0x00000000fe000000 0x00000000fe0fffff 0x000000000014220c\n";
        let usual = [("vendor", "0x1af4\n"), ("device", "0x1110\n"), ("enable", "0\n"), ("resource", resource)];
        for (name, text) in usual.iter().chain(files) {
            fs::write(folder.join(name), text).expect("a file");
        }
        fs::File::create(folder.join("resource2")).and_then(|file| file.set_len(1 << 20)).expect("a BAR");
        root
    }

    pub(in super::super) fn sysfs(root: &tempfile::TempDir) -> Result<Sysfs, DeviceProblem> {
        Sysfs::find_in(root.path(), ADDRESS)
    }

    fn found(root: &tempfile::TempDir) -> Result<OpenedMemory, DeviceProblem> {
        open_sysfs(&sysfs(root)?, ADDRESS)
    }

    #[test]
    fn the_memory_is_bar_2_and_the_device_is_enabled() {
        let root = devices(&[]);
        let device = found(&root).expect("a device");
        assert_eq!((device.len_bytes, device.caching), (1 << 20, Caching::Uncached));
        assert_eq!(fs::read_to_string(root.path().join(ADDRESS).join("enable")).expect("a switch"), "1");
        assert!(device.registers.is_none(), "a plain device has no interrupts");
    }

    #[test]
    fn a_write_combined_file_is_preferred() {
        assert_eq!(found(&devices(&[("resource2_wc", "")])).expect("a device").caching, Caching::WriteCombined);
    }

    #[test]
    fn an_absent_device_or_one_that_is_not_ivshmem_is_refused_with_the_remedy() {
        let root = devices(&[("device", "0x1041\n")]);
        let problem = found(&root).err().expect("another device").to_string();
        assert!(problem.contains("0x1af4:0x1041") && problem.contains("lspci"), "{problem}");
        for address in ["0000:00:05.0", "", "../pci", "0000:00:04.0/.."] {
            let problem = Sysfs::find_in(root.path(), address).err().expect("no device").to_string();
            assert!(problem.starts_with("there is no such PCI device"), "{address}: {problem}");
        }
    }
}
