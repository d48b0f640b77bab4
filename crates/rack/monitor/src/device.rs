//! The device of a rack: its required size, whether a node has it, and how it is opened.

use std::path::Path;

use fabric::Coherence;
use fabric::device::{Caching, Device, DeviceConfig, DeviceError, DeviceLayout, NodeSlot, PciAccess, VECTORS_MAX};
use rack::{Backend, PciMode, Rack, RunDir, Trust};
use segment::window::{self, WindowSpans};

const _: () = assert!(rack::SPAN_BYTES == segment::SPAN_BYTES as u64);

/// Returns the bytes of memory for all windows of a rack.
///
/// # Errors
/// If no device can be that large. The message includes the values of the rack file.
fn device_bytes(rack: &Rack) -> Result<u64, String> {
    let layout = DeviceLayout::new(rack.slots() as u8, rack.device.window_bytes as usize);
    layout.map(|layout| layout.bytes() as u64).map_err(|problem| problem.to_string())
}

/// Returns the bytes of memory of a device server for a rack: a power of two, as QEMU's ivshmem requires. `free_bytes`
/// is the memory available on this machine.
///
/// # Errors
/// If no device can be that large, or less memory is available. The message includes the values of the rack file.
pub fn server_bytes(rack: &Rack, free_bytes: u64) -> Result<u64, String> {
    let bytes = device_bytes(rack)?.next_power_of_two();
    if bytes <= free_bytes {
        return Ok(bytes);
    }
    // The largest power of two that is available.
    let largest_bytes = free_bytes.checked_ilog2().map_or(0, |exponent| 1 << exponent);
    let remedy = match DeviceLayout::largest(rack.slots() as u8, largest_bytes) {
        Ok(layout) => format!("make it {} at most", layout.window_bytes()),
        Err(_) => "use a machine with more memory".to_owned(),
    };
    let windows = rack.device.window_bytes;
    Err(format!("windows of {windows} bytes take {bytes} bytes of memory, and {free_bytes} are free; {remedy}"))
}

/// Returns the number of doorbells of a node: one for the monitor, and one for each data partition up to the maximum.
pub fn vectors(rack: &Rack) -> usize {
    (1 + rack.data_partitions().len()).min(VECTORS_MAX)
}

/// Checks, without accessing it, that this machine has the device of a node and that it is large enough.
///
/// # Errors
/// What is missing, and the remedy.
pub fn check_device(rack: &Rack, slot: usize) -> Result<(), String> {
    let node = &rack.nodes[slot];
    let device = node.device.as_deref().unwrap_or_default();
    let found_bytes = match rack.backend_of(node) {
        Backend::Shm => return Ok(()),
        Backend::Pci => pci_bytes(device)?,
        Backend::Dax => dax_bytes(Path::new(device))?,
    };
    let needed_bytes = device_bytes(rack)?;
    if found_bytes >= needed_bytes {
        return Ok(());
    }
    let largest = DeviceLayout::largest(rack.slots() as u8, found_bytes).map(|layout| layout.window_bytes());
    let remedy = match largest {
        Ok(bytes) => format!("set device.window_bytes to {bytes} at most, or use a larger device"),
        Err(_) => "use a larger device".to_owned(),
    };
    let windows = rack.device.window_bytes;
    Err(format!("'{device}' has {found_bytes} bytes, windows of {windows} bytes need {needed_bytes}; {remedy}"))
}

fn pci_bytes(address: &str) -> Result<u64, String> {
    let folder = Path::new("/sys/bus/pci/devices").join(address);
    if !folder.exists() {
        return Err(format!(
            "'{address}' is not on this machine; see 'lspci -D -d 1af4:1110' for the devices of this machine"
        ));
    }
    let memory = std::fs::metadata(folder.join("resource2")).map(|found| found.len());
    memory.map_err(|_| format!("'{address}' has no memory in BAR 2; see 'lspci -D -d 1af4:1110' for suitable devices"))
}

fn dax_bytes(path: &Path) -> Result<u64, String> {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let shown = path.display();
    let found = std::fs::metadata(path).map_err(|error| format!("'{shown}': {error}; name a DAX device or a file"))?;
    if !found.file_type().is_char_device() {
        return Ok(found.len());
    }
    let number = found.rdev();
    let size = format!("/sys/dev/char/{}:{}/size", rustix::fs::major(number), rustix::fs::minor(number));
    let bytes = std::fs::read_to_string(&size).ok().and_then(|text| text.trim().parse().ok());
    bytes.ok_or_else(|| format!("'{shown}' is not a DAX device; see 'daxctl list' for those of this machine"))
}

/// Opens the device as the node in `slot`.
///
/// # Errors
/// Names the device, the problem and the remedy.
pub fn open(rack: &Rack, slot: usize, run_dir: &RunDir) -> Result<Device, DeviceError> {
    let node = &rack.nodes[slot];
    let device = node.device.as_deref().unwrap_or_default();
    let mut config = DeviceConfig::new(NodeSlot(slot as u8), rack.slots() as u8);
    config.window_bytes = Some(rack.device.window_bytes as usize);
    // The part of the window that training clears.
    let link_bytes = if rack.is_coherent() { rack::CONTROL_PARTITION_BYTES } else { rack.window_layout().link_bytes() };
    config.link_bytes = Some(link_bytes as usize);
    config.shares_connection = rack.is_coherent();
    config.vectors = vectors(rack);
    match rack.backend_of(node) {
        Backend::Shm => Device::connect_server(&run_dir.device_socket(), &config),
        Backend::Dax => {
            let coherence = match rack.device.coherence.unwrap_or(rack::Coherence::Coherent) {
                rack::Coherence::Coherent => Coherence::Coherent,
                rack::Coherence::NonCoherent => Coherence::NonCoherent,
            };
            Device::open_dax(device.as_ref(), coherence, &config)
        }
        Backend::Pci => match rack.device.mode.unwrap_or(PciMode::Sysfs) {
            PciMode::Vfio => Device::open_pci(device, PciAccess::Vfio, &config),
            PciMode::Sysfs => {
                config.vectors = 0;
                Device::open_pci(device, PciAccess::Sysfs, &config)
            }
        },
    }
}

/// Returns why programs of this node cannot write windows although the rack file trusts them, or `None`.
pub(crate) fn direct_obstacle(rack: &Rack, device: &Device) -> Option<String> {
    if rack.trust != Trust::Direct {
        return None;
    }
    // Any peer will do, because all windows are in the same memory.
    let peer = device.layout().slots().find(|slot| *slot != device.own_slot())?;
    if let Some(obstacle) = device.lease_obstacle() {
        return Some(obstacle.to_owned());
    }
    if rack.link.is_some() {
        return Some("its link is modelled, and programs read back what they have written".to_owned());
    }
    if device.caching() != Caching::Cached {
        return Some(format!("its memory is {}, and programs read back what they have written", device.caching()));
    }
    let (memory, _) = device.windows_in_memory(peer);
    match window::may_lease(memory) {
        Ok(true) => span_obstacle(rack, device, peer),
        Ok(false) => Some("its memory is a file, which could be truncated while programs use it".to_owned()),
        Err(errno) => Some(format!("its memory cannot be examined: {errno}")),
    }
}

/// Returns why programs could not map their spans. Checked once here, because each program would lose its connections.
fn span_obstacle(rack: &Rack, device: &Device, peer: NodeSlot) -> Option<String> {
    let (memory, [inbound, outbound]) = device.windows_in_memory(peer);
    let (alignment, end_bytes) = (device.alignment(), device.end_in_memory());
    // Memory mapped around the last span would exceed the end of the device, and accesses to it would raise SIGBUS.
    if let Some(alignment) = alignment.filter(|alignment| !end_bytes.is_multiple_of(alignment.bytes())) {
        let align_bytes = alignment.bytes();
        return Some(format!("its {end_bytes} bytes are not a multiple of the alignment of {align_bytes} bytes"));
    }
    let offset_bytes = rack.window_layout().spans?.offset_bytes;
    let place = WindowSpans { alignment, ..WindowSpans::new(inbound + offset_bytes, outbound + offset_bytes) };
    let failed = |errno| format!("a part of its memory cannot be mapped: {errno}");
    window::map(memory, place).err().map(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_or_too_small_device_is_found_before_it_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory");
        let mut rack = Rack::example(3, Backend::Dax, None, Trust::Proxy);
        rack.nodes[1].device = Some(path.display().to_string());
        assert!(check_device(&rack, 1).unwrap_err().contains("No such file"));
        let needed_bytes = device_bytes(&rack).unwrap();
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(needed_bytes - 1).unwrap();
        let error = check_device(&rack, 1).unwrap_err();
        assert!(error.contains(&needed_bytes.to_string()) && error.contains("window_bytes to "), "{error}");
        let largest: u64 = error.split("window_bytes to ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
        rack.device.window_bytes = largest;
        assert_eq!(check_device(&rack, 1), Ok(()));
        rack.device.window_bytes = largest + 4096;
        assert!(check_device(&rack, 1).is_err());
        file.set_len(100).unwrap();
        assert!(check_device(&rack, 1).unwrap_err().ends_with("use a larger device"));
    }

    #[test]
    fn windows_larger_than_memory_are_refused_with_the_largest_that_fit() {
        let mut rack = Rack::example(3, Backend::Shm, None, Trust::Proxy);
        rack.device.window_bytes = 1 << 30;
        assert_eq!(server_bytes(&rack, 8 << 30), Ok(8 << 30));
        let error = server_bytes(&rack, (8 << 30) - 1).unwrap_err();
        assert!(error.starts_with("windows of 1073741824 bytes take 8589934592 bytes"), "{error}");
        rack.device.window_bytes = error.split("make it ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
        assert_eq!(server_bytes(&rack, (8 << 30) - 1), Ok(4 << 30));
        assert!(server_bytes(&rack, 0).unwrap_err().ends_with("more memory"));
    }

    #[test]
    fn programs_are_not_given_memory_that_can_be_truncated_or_read_wrongly() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory");
        let obstacle = |coherence, trust| {
            let mut rack = Rack::example(2, Backend::Dax, None, trust);
            rack.device.coherence = Some(coherence);
            rack.nodes[0].device = Some(path.display().to_string());
            let file = std::fs::File::create(&path).unwrap();
            file.set_len(device_bytes(&rack).unwrap()).unwrap();
            let device = open(&rack, 0, &RunDir::new(folder.path(), &rack, &path)).unwrap();
            direct_obstacle(&rack, &device)
        };
        assert_eq!(obstacle(rack::Coherence::Coherent, Trust::Proxy), None);
        for (coherence, why) in
            [(rack::Coherence::Coherent, "is a file"), (rack::Coherence::NonCoherent, "is non-coherent")]
        {
            let obstacle = obstacle(coherence, Trust::Direct).unwrap();
            assert!(obstacle.contains(why), "{obstacle}");
        }
    }

    #[test]
    fn a_missing_pci_device_is_named() {
        let mut rack = Rack::example(2, Backend::Pci, None, Trust::Proxy);
        rack.nodes[0].device = Some("ffff:ff:1f.7".to_owned());
        assert!(check_device(&rack, 0).unwrap_err().contains("'ffff:ff:1f.7' is not on this machine"));
        assert_eq!(check_device(&Rack::example(2, Backend::Shm, None, Trust::Proxy), 0), Ok(()));
    }
}
