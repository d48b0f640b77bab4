//! ivshmem devices through VFIO: interrupts arrive as eventfds, and a register interrupts peers.
//!
//! The device does no DMA, so no memory is mapped for it in the IOMMU. VFIO needs the IOMMU all the same.
//!
//! The memory is mapped through the sysfs file of BAR 2 if the kernel permits it. A mapping made by VFIO would keep the
//! device open, so that a program with a part of the memory would keep it from this node's next monitor. VFIO claims a
//! BAR when it first maps it. Kernels with `CONFIG_IO_STRICT_DEVMEM` then refuse the sysfs file and revoke its
//! mappings, so all processes of a node use the same way.

use super::backing_file;
use super::error::DeviceProblem;
use super::format::VECTORS_MAX;
use super::interrupts::Interrupts;
use super::memory::Caching;
use super::opened::OpenedMemory;
use super::pci::{MEMORY_BAR, REGISTERS_BAR, REGISTERS_BYTES, Sysfs, map_registers};
use crate::eventfd;
use rustix::io::{Errno, pread, pwrite};
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl, opcode};
use std::ffi::{CString, c_void};
use std::fs;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use volmem::Mapping;

/// Request numbers of `<linux/vfio.h>`.
const GROUP: u8 = b';';
const GET_API_VERSION: u8 = 100;
const CHECK_EXTENSION: u8 = 101;
const SET_IOMMU: u8 = 102;
const GROUP_GET_STATUS: u8 = 103;
const GROUP_SET_CONTAINER: u8 = 104;
const GROUP_GET_DEVICE_FD: u8 = 106;
const DEVICE_GET_REGION_INFO: u8 = 108;
const DEVICE_GET_IRQ_INFO: u8 = 109;
const DEVICE_SET_IRQS: u8 = 110;

const API_VERSION: i32 = 0;
const TYPE1_IOMMU: usize = 1;
const GROUP_IS_VIABLE: u32 = 1;
const REGION_CAN_BE_MAPPED: u32 = 4;
const CONFIGURATION_REGION: u32 = 7;
const MSIX: u32 = 2;
const SET_BY_EVENTFD_AND_TRIGGER: u32 = 1 << 2 | 1 << 5;

/// Offset of the command register in the configuration space, and its bits Memory Space Enable and Bus Master Enable.
const COMMAND_OFFSET: u64 = 4;
const COMMAND_MEMORY_AND_MASTER: u8 = 2 | 4;

/// Offset of the register IVPosition: this device's ID at the server.
const POSITION_REGISTER: usize = 8;

const CONTAINER_PATH: &str = "/dev/vfio/vfio";

#[repr(C)]
struct GroupStatus {
    argsz: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct RegionInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    cap_offset: u32,
    size: u64,
    offset: u64,
}

#[repr(C)]
struct IrqInfo {
    argsz: u32,
    flags: u32,
    index: u32,
    count: u32,
}

#[repr(C)]
struct IrqSet {
    argsz: u32,
    flags: u32,
    index: u32,
    start: u32,
    count: u32,
    eventfds: [i32; VECTORS_MAX],
}

/// An ioctl request with its argument: a number, or the address of a structure.
struct Request {
    number: u8,
    argument: *mut c_void,
}

// SAFETY: `opcode` and `as_ptr` return the request's own number and argument, the kernel writes at most to the
// argument, and the output is the ioctl's return value.
unsafe impl Ioctl for Request {
    type Output = i32;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        opcode::none(GROUP, self.number)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.argument
    }

    unsafe fn output_from_ptr(output: IoctlOutput, _argument: *mut c_void) -> Result<i32, Errno> {
        Ok(output)
    }
}

/// Makes a request whose argument is a number or absent.
fn request(file: impl AsFd, number: u8, argument: usize) -> Result<i32, Errno> {
    let argument = std::ptr::without_provenance_mut(argument);
    // SAFETY: the kernel does not dereference the argument of the requests that are made this way.
    unsafe { ioctl(file, Request { number, argument }) }
}

/// Makes a request whose argument is a structure that begins with its size, or an `int` (`GROUP_SET_CONTAINER`).
fn request_with<T>(file: impl AsFd, number: u8, argument: &mut T) -> Result<i32, Errno> {
    // SAFETY: the structures are those of the header: `repr(C)`, of integers only. Their first word is their size, and
    // the kernel accesses no more than that. Of an `int` it reads four bytes.
    unsafe { ioctl(file, Request { number, argument: std::ptr::from_mut(argument).cast() }) }
}

fn size_word<T>() -> u32 {
    size_of::<T>() as u32
}

pub(super) fn open(address: &str, vectors: usize) -> Result<OpenedMemory, DeviceProblem> {
    let sysfs = Sysfs::find(address)?;
    check_driver(&sysfs, address)?;
    let (container, group) = open_group(&group_path(&sysfs)?)?;
    let device = device_of(&group, address)?;
    let registers_info = region(&device, REGISTERS_BAR as u32)?;
    if registers_info.flags & REGION_CAN_BE_MAPPED == 0 || registers_info.size < REGISTERS_BYTES as u64 {
        return Err(DeviceProblem::unsuitable("its registers cannot be mapped through VFIO", "open it through sysfs"));
    }
    let memory = match memory_by_sysfs(&sysfs) {
        Ok(memory) => memory,
        Err(problem) => memory_by_vfio(&device, &problem)?,
    };
    enable(&device)?;
    let own_eventfds = set_interrupts(&device, vectors)?;
    let registers = (device, registers_info.offset);
    let mapped = map_registers(&registers)?;
    let position = mapped.load(POSITION_REGISTER);
    let own_id = u16::try_from(position).map_err(|_| {
        let found = format!("its ID at the server is {position:#x}, which is not of 16 bits");
        DeviceProblem::unsuitable(found, "connect QEMU's device to a running ivshmem server (chardev=...)")
    })?;
    let interrupts =
        Interrupts { own_id: Some(own_id), own_eventfds, registers: Some(mapped), ..Interrupts::default() };
    Ok(OpenedMemory {
        name: address.to_owned(),
        caching: memory.caching,
        descriptor: memory.descriptor,
        offset_bytes: memory.offset_bytes,
        len_bytes: memory.len_bytes,
        lease_obstacle: memory.lease_obstacle,
        interrupts,
        registers: Some(registers),
        server: None,
        kept_open: vec![group, container],
    })
}

/// BAR 2, and the way to map it.
struct MemoryBar {
    caching: Caching,
    descriptor: OwnedFd,
    offset_bytes: u64,
    len_bytes: u64,
    /// See [`OpenedMemory::lease_obstacle`].
    lease_obstacle: Option<String>,
}

/// Opens the memory through its sysfs file, which does not keep the device open.
fn memory_by_sysfs(sysfs: &Sysfs) -> Result<MemoryBar, DeviceProblem> {
    let (caching, path) = sysfs.memory_file();
    let len_bytes = sysfs.bar_bytes(MEMORY_BAR);
    let descriptor = backing_file::open(&path)?;
    // Only an attempt to map shows that VFIO has claimed the BAR, or that the kernel is locked down.
    Mapping::at(descriptor.as_fd(), 0, len_bytes as usize).map_err(|error| {
        let remedy = "boot with iomem=relaxed, or use mode = \"sysfs\"";
        DeviceProblem::unsuitable(format!("mmap of {}: {error}", path.display()), remedy)
    })?;
    Ok(MemoryBar { caching, descriptor, offset_bytes: 0, len_bytes, lease_obstacle: None })
}

/// Opens the memory through the VFIO device, which then stays open as long as the mapping. `problem` is the reason that
/// the sysfs file cannot be used.
fn memory_by_vfio(device: &OwnedFd, problem: &DeviceProblem) -> Result<MemoryBar, DeviceProblem> {
    let memory = region(device, MEMORY_BAR as u32)?;
    if memory.flags & REGION_CAN_BE_MAPPED == 0 || memory.size == 0 {
        return Err(DeviceProblem::unsuitable("its memory cannot be mapped through VFIO", "open it through sysfs"));
    }
    let descriptor =
        rustix::io::fcntl_dupfd_cloexec(device, 0).map_err(DeviceProblem::system("fcntl F_DUPFD_CLOEXEC"))?;
    Ok(MemoryBar {
        caching: Caching::Uncached,
        descriptor,
        offset_bytes: memory.offset,
        len_bytes: memory.size,
        lease_obstacle: Some(format!("under VFIO only its proxy can map its memory: {problem}")),
    })
}

fn check_driver(sysfs: &Sysfs, address: &str) -> Result<(), DeviceProblem> {
    let driver = fs::read_link(sysfs.folder.join("driver")).unwrap_or_default();
    let driver = driver.file_name().unwrap_or_default().to_string_lossy();
    if driver == "vfio-pci" {
        return Ok(());
    }
    let found = if driver.is_empty() { "no driver is bound".to_owned() } else { format!("driver {driver} is bound") };
    let remedy = format!(
        "as root: modprobe vfio-pci; echo vfio-pci > {}/driver_override; echo {address} > /sys/bus/pci/drivers_probe",
        sysfs.folder.display()
    );
    Err(DeviceProblem::unsuitable(found, remedy))
}

fn group_path(sysfs: &Sysfs) -> Result<std::path::PathBuf, DeviceProblem> {
    let link = fs::read_link(sysfs.folder.join("iommu_group")).map_err(|_| {
        let remedy = "boot with an IOMMU (intel_iommu=on), or open it through sysfs";
        DeviceProblem::unsuitable("it is in no IOMMU group", remedy)
    })?;
    Ok(Path::new("/dev/vfio").join(link.file_name().unwrap_or_default()))
}

/// Opens a VFIO container with the device's group in it.
fn open_group(path: &Path) -> Result<(OwnedFd, OwnedFd), DeviceProblem> {
    let container = backing_file::open(Path::new(CONTAINER_PATH))?;
    let version = request(&container, GET_API_VERSION, 0).map_err(DeviceProblem::system("VFIO_GET_API_VERSION"))?;
    let has_type1 = request(&container, CHECK_EXTENSION, TYPE1_IOMMU) == Ok(1);
    if version != API_VERSION || !has_type1 {
        let found = format!("VFIO version {version}, {} type 1 IOMMU", if has_type1 { "with" } else { "without" });
        return Err(DeviceProblem::unsuitable(found, "modprobe vfio_iommu_type1, or open it through sysfs"));
    }
    let group = backing_file::open(path)?;
    let mut status = GroupStatus { argsz: size_word::<GroupStatus>(), flags: 0 };
    request_with(&group, GROUP_GET_STATUS, &mut status).map_err(DeviceProblem::system("VFIO_GROUP_GET_STATUS"))?;
    if status.flags & GROUP_IS_VIABLE == 0 {
        let found = format!("VFIO group {} is not viable", path.display());
        return Err(DeviceProblem::unsuitable(found, "bind every device of the group to vfio-pci"));
    }
    let mut number = container.as_raw_fd();
    request_with(&group, GROUP_SET_CONTAINER, &mut number)
        .map_err(DeviceProblem::system("VFIO_GROUP_SET_CONTAINER"))?;
    request(&container, SET_IOMMU, TYPE1_IOMMU).map_err(DeviceProblem::system("VFIO_SET_IOMMU"))?;
    Ok((container, group))
}

fn device_of(group: &OwnedFd, address: &str) -> Result<OwnedFd, DeviceProblem> {
    let name = CString::new(address).map_err(DeviceProblem::system("the device's address"))?;
    let argument = name.as_ptr().cast_mut().cast();
    // SAFETY: the kernel reads the name, which is a C string, and writes nothing.
    let number = unsafe { ioctl(group, Request { number: GROUP_GET_DEVICE_FD, argument }) };
    let number = number.map_err(DeviceProblem::system("VFIO_GROUP_GET_DEVICE_FD"))?;
    // SAFETY: the kernel has just returned this descriptor, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

fn region(device: &OwnedFd, index: u32) -> Result<RegionInfo, DeviceProblem> {
    let mut info = RegionInfo { argsz: size_word::<RegionInfo>(), index, ..RegionInfo::default() };
    request_with(device, DEVICE_GET_REGION_INFO, &mut info)
        .map_err(DeviceProblem::system("VFIO_DEVICE_GET_REGION_INFO"))?;
    Ok(info)
}

/// Enables memory accesses and bus mastering: an MSI-X interrupt is a memory write by the device.
fn enable(device: &OwnedFd) -> Result<(), DeviceProblem> {
    let offset = region(device, CONFIGURATION_REGION)?.offset + COMMAND_OFFSET;
    let mut command = [0; 2];
    pread(device, &mut command, offset).map_err(DeviceProblem::system("reading the PCI command register"))?;
    command[0] |= COMMAND_MEMORY_AND_MASTER;
    pwrite(device, &command, offset).map_err(DeviceProblem::system("writing the PCI command register"))?;
    Ok(())
}

/// Creates an eventfd for each of the first `vectors` interrupts.
fn set_interrupts(device: &OwnedFd, vectors: usize) -> Result<Vec<OwnedFd>, DeviceProblem> {
    let mut info = IrqInfo { argsz: size_word::<IrqInfo>(), flags: 0, index: MSIX, count: 0 };
    request_with(device, DEVICE_GET_IRQ_INFO, &mut info).map_err(DeviceProblem::system("VFIO_DEVICE_GET_IRQ_INFO"))?;
    if vectors > VECTORS_MAX || (info.count as usize) < vectors {
        let found = format!("it has {} interrupts, {vectors} are needed (at most {VECTORS_MAX})", info.count);
        return Err(DeviceProblem::unsuitable(found, "give QEMU's device that many vectors, or use fewer partitions"));
    }
    let eventfds: Result<Vec<OwnedFd>, Errno> = (0..vectors).map(|_| eventfd::create()).collect();
    let eventfds = eventfds.map_err(DeviceProblem::system("eventfd"))?;
    let mut set = IrqSet {
        argsz: size_word::<IrqSet>(),
        flags: SET_BY_EVENTFD_AND_TRIGGER,
        index: MSIX,
        start: 0,
        count: vectors as u32,
        eventfds: [-1; VECTORS_MAX],
    };
    for (number, eventfd) in set.eventfds.iter_mut().zip(&eventfds) {
        *number = eventfd.as_raw_fd();
    }
    request_with(device, DEVICE_SET_IRQS, &mut set).map_err(DeviceProblem::system("VFIO_DEVICE_SET_IRQS"))?;
    Ok(eventfds)
}

#[cfg(test)]
mod tests {
    use super::super::pci::tests::{devices, sysfs};
    use super::*;

    #[test]
    fn the_memory_is_mapped_through_the_sysfs_file_of_its_bar() {
        let root = devices(&[]);
        let memory = memory_by_sysfs(&sysfs(&root).unwrap()).unwrap();
        assert_eq!((memory.caching, memory.offset_bytes, memory.len_bytes), (Caching::Uncached, 0, 1 << 20));
        assert_eq!(memory.lease_obstacle, None);
    }

    #[test]
    fn a_file_that_cannot_be_mapped_is_named_with_the_remedy() {
        let root = devices(&[]);
        let sysfs = sysfs(&root).unwrap();
        std::os::unix::fs::symlink("/dev/null", sysfs.folder.join("resource2_wc")).unwrap();
        let problem = memory_by_sysfs(&sysfs).err().expect("a device that maps nothing").to_string();
        assert!(problem.contains("resource2_wc: No such device") && problem.contains("iomem=relaxed"), "{problem}");
    }
}
