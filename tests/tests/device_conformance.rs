//! The suite that every backend of `fabric` passes, on the devices of guests: a BAR through sysfs, and DAX memory, also
//! as if nodes' caches knew nothing of each other. (VFIO's device has one owner, and the suite needs two ends.)
//!
//! This program takes itself along: in the guest, where [`VARIABLE`] names the device, the same test runs the suite.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use fabric::Coherence;
use fabric::conformance::{self as suite, OneProcess};
use fabric::device::{Device, DeviceLink, Layout, Mode, Seat, Slot};
use fabric::faulty::{FaultPlan, Faulty};
use lab::{Lab, Node};
use volmem::{Mapping, Region};

/// Names the device to the copy of this program in a guest, as `pci:ADDRESS`, `coherent:PATH` or `non-coherent:PATH`.
const VARIABLE: &str = "CONFORMANCE_DEVICE";
const TEST: &str = "the_devices_of_guests_pass_the_suite_of_all_backends";
/// Guests share two cores with whatever else is tested: this only ends what hangs.
const LIMIT: Duration = Duration::from_secs(1200);
/// Some tests have two links at once, which must not meet: each new one is between the next two nodes.
const NODES: u8 = 8;

#[test]
fn the_devices_of_guests_pass_the_suite_of_all_backends() {
    if let Ok(device) = std::env::var(VARIABLE) {
        return run_suite(&device);
    }
    let dax = lab::Device::Dax;
    for (kind, prefix) in [(lab::Device::Plain, "pci"), (dax, "coherent"), (dax, "non-coherent")] {
        let program = std::env::current_exe().unwrap();
        let name = program.file_name().unwrap().to_string_lossy().into_owned();
        let script = format!("{VARIABLE}={prefix}:$DEVICE {name} --exact {TEST} --nocapture");
        let lab = Lab::new().guests(1).device(kind).built(&program).script(&script).limit(LIMIT);
        let report = lab.run().unwrap().must_succeed();
        assert!(report.output(Node::A).contains("1 passed"), "{report}");
    }
}

fn run_suite(device: &str) {
    let bare = OneProcess::new(|window_bytes| pair(device, window_bytes));
    let faulty = OneProcess::new(|window_bytes| {
        let (a, b) = pair(device, window_bytes);
        (Faulty::new(a, FaultPlan::write_combined(1)), Faulty::new(b, FaultPlan::write_combined(2)))
    });
    macro_rules! facts {
        (() $($fact:ident)*) => {
            $(
                let begun = Instant::now();
                suite::$fact(&bare);
                suite::$fact(&faulty);
                println!("{}: {} s", stringify!($fact), begun.elapsed().as_secs());
            )*
        };
    }
    fabric::conformance_facts!(facts!());
}

/// Both ends of a link over the one device, each with a mapping of its own. Nothing is there of one that was in the
/// same place before: a new link has no epoch.
fn pair(device: &str, window_bytes: usize) -> (DeviceLink, DeviceLink) {
    static NEXT: AtomicU8 = AtomicU8::new(0);
    let first = Slot(2 * (NEXT.fetch_add(1, Ordering::Relaxed) % (NODES / 2)));
    let second = Slot(first.0 + 1);
    let layout = Layout::new(NODES, window_bytes).unwrap();
    let memory = memory();
    for block in [layout.control(first, second), layout.control(second, first)] {
        memory.write(block.start, &vec![0; block.len()]);
    }
    let open = |own| {
        let seat = Seat { window_bytes: Some(window_bytes), ..Seat::new(own, NODES) };
        match device.split_once(':').unwrap() {
            ("pci", address) => Device::open_pci(address, Mode::Sysfs, &seat).unwrap(),
            ("coherent", path) => Device::open_dax(Path::new(path), Coherence::Coherent, &seat).unwrap(),
            (_, path) => Device::open_dax(Path::new(path), Coherence::NonCoherent, &seat).unwrap(),
        }
    };
    (open(first).link(second), open(second).link(first))
}

/// The guest's device, as its first program has found it.
fn memory() -> Region {
    let of = |name| std::env::var(name).unwrap();
    let file = File::options().read(true).write(true).open(of("MEMORY")).unwrap();
    let mapping = Mapping::new(file.as_fd(), of("MEMORY_BYTES").parse().unwrap()).unwrap();
    Region::of_mapping(Arc::new(mapping))
}
