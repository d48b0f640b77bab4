//! Checks of processors and of hardware for windows between hosts. Crosslane on one machine needs none of it.

use std::fs;
use std::path::Path;

use pcie_bench::cuda::RequiredLibrary;

use super::Check;

/// PCI vendor and device ID of QEMU's inter-VM shared memory (ivshmem).
const IVSHMEM: (&str, &str) = ("0x1af4", "0x1110");

/// Returns one check for each kind of hardware.
pub fn checks() -> Vec<Check> {
    checks_of(Path::new("/sys"), Path::new("/dev"))
}

fn checks_of(sys: &Path, dev: &Path) -> Vec<Check> {
    let devices = |name, folder: &str, what| devices(name, &sys.join(folder), what);
    vec![
        numa(sys),
        devices("ntb", "bus/ntb/devices", "an NTB adapter and its kernel driver (modprobe ntb_transport)"),
        ivshmem(sys),
        devices("cxl", "bus/cxl/devices", "a CXL memory device, and modprobe cxl_acpi cxl_mem"),
        devices("dax", "bus/dax/devices", "CXL or persistent memory, configured as a DAX device with ndctl or daxctl"),
        iommu(sys),
        vfio(sys, dev),
        rdma(sys),
        cuda(),
    ]
}

fn numa(sys: &Path) -> Check {
    let is_node = |name: &String| name.strip_prefix("node").is_some_and(|rest| rest.parse::<u32>().is_ok());
    match entries(&sys.join("devices/system/node")).iter().filter(|name| is_node(name)).count() {
        0 | 1 => Check::ok("numa", "1 node"),
        nodes => {
            let remedy = "numactl --cpunodebind=0 --membind=0 keeps both endpoints of a connection on one node";
            Check::note("numa", format!("{nodes} nodes"), remedy)
        }
    }
}

/// Checks the IOMMU, without which VFIO gives no program the interrupts of a device.
fn iommu(sys: &Path) -> Check {
    match entries(&sys.join("kernel/iommu_groups")).len() {
        0 => {
            let remedy = "only for PCI devices by VFIO: boot with intel_iommu=on or amd_iommu=on";
            Check::note("iommu", "no device group", remedy)
        }
        groups => Check::ok("iommu", format!("device groups: {groups}")),
    }
}

fn vfio(sys: &Path, dev: &Path) -> Check {
    let container = dev.join("vfio/vfio");
    if !container.exists() {
        let remedy = "only for PCI devices with doorbell interrupts (mode = \"vfio\"): modprobe vfio-pci";
        return Check::note("vfio", format!("no {}", container.display()), remedy);
    }
    let bound = entries(&sys.join("bus/pci/drivers/vfio-pci"));
    let bound: Vec<String> = bound.into_iter().filter(|name| name.contains(':')).collect();
    let remedy = "only for PCI devices with doorbell interrupts: echo vfio-pci > driver_override of one";
    found_or("vfio", &bound, "no device is bound to vfio-pci", remedy)
}

fn rdma(sys: &Path) -> Check {
    let found = entries(&sys.join("class/infiniband"));
    found_or("rdma", &found, "no device", "only to compare with RDMA: modprobe rdma_rxe adds a software device")
}

/// Checks the CUDA libraries by loading them as the benchmark does, so that the loader finds their paths.
fn cuda() -> Check {
    let found = RequiredLibrary::ALL.map(|library| library.found().ok_or(library));
    match found {
        [Ok(driver), Ok(compiler)] => Check::ok("cuda", format!("{driver} {compiler}")),
        [Err(missing), _] | [_, Err(missing)] => {
            let remedy = format!("only for 'crosslane pcie bench --device cuda': {}", missing.remedy);
            Check::note("cuda", format!("no {}", missing.name()), remedy)
        }
    }
}

fn devices(name: &'static str, folder: &Path, what: &str) -> Check {
    found_or(name, &entries(folder), "no device", &format!("only for windows between hosts: {what}"))
}

/// Returns a check that lists the devices found, or says that none is.
fn found_or(name: &'static str, found: &[String], none: &str, remedy: &str) -> Check {
    if found.is_empty() { Check::note(name, none, remedy) } else { Check::ok(name, found.join(" ")) }
}

fn entries(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

fn ivshmem(sys: &Path) -> Check {
    let bus = sys.join("bus/pci/devices");
    let reads = |device: &str, file: &str| fs::read_to_string(bus.join(device).join(file));
    let is = |device: &str, file: &str, value: &str| reads(device, file).is_ok_and(|found| found.trim() == value);
    let found: Vec<String> = entries(&bus)
        .into_iter()
        .filter(|device| is(device, "vendor", IVSHMEM.0) && is(device, "device", IVSHMEM.1))
        .collect();
    let remedy = "only for windows between virtual machines: qemu -device ivshmem-plain with a shared memory backend";
    found_or("ivshmem", &found, "no device", remedy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;

    #[test]
    fn present_hardware_is_found_and_missing_hardware_is_a_note() {
        let root = tempfile::tempdir().unwrap();
        let (sys, dev) = (root.path().join("sys"), root.path().join("dev"));
        let found = |name: &str| {
            let checks = checks_of(&sys, &dev);
            let check = checks.into_iter().find(|check| check.name == name).unwrap();
            (check.status, check.found)
        };
        for name in ["ntb", "ivshmem", "cxl", "dax", "iommu", "vfio", "rdma"] {
            assert_eq!(found(name).0, Status::Note, "{name}");
        }
        for folder in [
            "bus/cxl/devices/mem0",
            "kernel/iommu_groups/7",
            "bus/pci/drivers/vfio-pci/0000:00:04.0",
            "class/infiniband/rxe0",
            "devices/system/node/node0",
            "devices/system/node/node1",
            "devices/system/node/power",
            "bus/pci/devices/0000:00:05.0",
        ] {
            fs::create_dir_all(sys.join(folder)).unwrap();
        }
        fs::write(sys.join("bus/pci/devices/0000:00:05.0/vendor"), "0x1af4\n").unwrap();
        fs::write(sys.join("bus/pci/devices/0000:00:05.0/device"), "0x1110\n").unwrap();
        fs::create_dir_all(dev.join("vfio/vfio")).unwrap();
        for (name, status, text) in [
            ("cxl", Status::Ok, "mem0"),
            ("iommu", Status::Ok, "device groups: 1"),
            ("vfio", Status::Ok, "0000:00:04.0"),
            ("rdma", Status::Ok, "rxe0"),
            ("ivshmem", Status::Ok, "0000:00:05.0"),
            ("numa", Status::Note, "2 nodes"),
        ] {
            assert_eq!(found(name), (status, text.to_owned()), "{name}");
        }
    }
}
