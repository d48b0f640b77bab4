//! The conformance suite of the backends of `fabric`, on the devices of guests.
//!
//! If a guest can open a device twice, one guest has both endpoints of a link: over a BAR through sysfs, and over DAX
//! memory, also as if the caches of the nodes were not coherent. Two guests with an endpoint each run the same suite
//! over VFIO, whose device has one owner and whose doorbells are interrupts, and over the other devices.
//!
//! The test copies itself into the guest. There [`VARIABLE`] names the backend, and the same test runs the suite, or
//! its part of it.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use fabric::device::{Device, DeviceConfig, DeviceLayout, DeviceLink, NodeSlot, PciAccess};
use fabric::test_support::conformance::{self as suite, PartyBarrier, SingleProcess, TwoParty, WINDOW_BYTES};
use fabric::test_support::faulty::{FaultPlan, FaultyLink};
use fabric::{Coherence, Endpoint};
use lab::Lab;
use volmem::{Mapping, Region};

/// Tells the copy of this program in a guest how to open its device: one of the names that [`open`] knows.
const VARIABLE: &str = "CONFORMANCE_DEVICE";
/// Guests share two cores with other tests, so this limit only ends a test that hangs.
const LIMIT: Duration = Duration::from_secs(1200);
/// Some tests have two links at once, which must not overlap: each new link is between the next two nodes.
const NODES: u8 = 8;
/// Number of pairs of nodes that two guests use for links, in turn; the next pair is the rendezvous of the guests.
const LINK_PAIRS: u8 = 2;

#[test]
fn the_devices_of_guests_pass_the_suite_of_all_backends() {
    if let Ok(way) = std::env::var(VARIABLE) {
        return run_suite(&way);
    }
    let dax = lab::Device::Dax;
    for (kind, way) in [(lab::Device::Plain, "pci"), (dax, "coherent"), (dax, "non-coherent")] {
        let lab = Lab::new().guests(1).device(kind);
        run_in_guests(lab, way, "the_devices_of_guests_pass_the_suite_of_all_backends");
    }
}

#[test]
fn two_guests_pass_the_suite_over_vfio() {
    if let Ok(way) = std::env::var(VARIABLE) {
        return Party::new(&way).run_suite();
    }
    let lab = Lab::new().device(lab::Device::Vfio).devices(LINK_PAIRS + 1);
    run_in_guests(lab, "vfio", "two_guests_pass_the_suite_over_vfio");
}

#[test]
#[ignore = "boots eight guests: two minutes; in ./x exam"]
fn two_guests_pass_the_suite_on_every_other_device() {
    if let Ok(way) = std::env::var(VARIABLE) {
        return Party::new(&way).run_suite();
    }
    let dax = lab::Device::Dax;
    let doorbell = lab::Device::Doorbell; // Without interrupts, which sysfs does not provide.
    let ways = [(lab::Device::Plain, "pci"), (doorbell, "pci"), (dax, "coherent"), (dax, "non-coherent")];
    for (kind, way) in ways {
        let lab = Lab::new().device(kind);
        run_in_guests(lab, way, "two_guests_pass_the_suite_on_every_other_device");
    }
}

/// Runs one of these tests in all guests of a lab.
fn run_in_guests(lab: Lab, way: &str, test: &str) {
    let program = std::env::current_exe().unwrap();
    let name = program.file_name().unwrap().to_string_lossy().into_owned();
    let run = format!("{VARIABLE}={way} {name} --exact {test} --include-ignored --nocapture");
    let script = format!("barrier booted\n{run}"); // No guest waits for one that still boots.
    let report = lab.built(&program).script(&script).limit(LIMIT).run().unwrap().must_succeed();
    println!("{report}");
    for guest in &report.guests {
        assert!(guest.output.contains("1 passed"), "{report}");
    }
}

/// Checks all facts, on unchanged links and on links whose stores are write-combined.
macro_rules! facts {
    (($bare:expr, $faulty:expr, $after:expr) $($fact:ident)*) => {
        $(
            let begun = Instant::now();
            suite::$fact($bare);
            suite::$fact($faulty);
            println!("{}: {} ms{}", stringify!($fact), begun.elapsed().as_millis(), $after(stringify!($fact)));
        )*
    };
}

fn faulty(link: DeviceLink, end: Endpoint) -> FaultyLink<DeviceLink> {
    FaultyLink::new(link, FaultPlan::write_combined(1 + end as u64))
}

fn run_suite(way: &str) {
    let bare = SingleProcess::new(|window_bytes| pair(way, window_bytes));
    let faulty = SingleProcess::new(|window_bytes| {
        let (a, b) = pair(way, window_bytes);
        (faulty(a, Endpoint::A), faulty(b, Endpoint::B))
    });
    fabric::for_each_conformance_test!(facts!(&bare, &faulty, |_: &str| ""));
}

/// Both endpoints of a link over one device, each with its own mapping. The remains of an earlier link of these nodes
/// are erased: a new link has no epoch.
fn pair(way: &str, window_bytes: usize) -> (DeviceLink, DeviceLink) {
    static NEXT: AtomicU8 = AtomicU8::new(0);
    let first = NodeSlot(2 * (NEXT.fetch_add(1, Ordering::Relaxed) % (NODES / 2)));
    let second = NodeSlot(first.0 + 1);
    forget_link(&memory(), first, second, window_bytes);
    let open = |own| open(way, &variable("DEVICE"), own, window_bytes);
    (open(first).link(second), open(second).link(first))
}

/// Opens a guest's device as a node.
fn open(way: &str, device: &str, own: NodeSlot, window_bytes: usize) -> Device {
    let config = DeviceConfig { window_bytes: Some(window_bytes), ..DeviceConfig::new(own, NODES) };
    let opened = match way {
        "pci" => Device::open_pci(device, PciAccess::Sysfs, &config),
        "vfio" => Device::open_pci(device, PciAccess::Vfio, &config),
        "coherent" => Device::open_dax(Path::new(device), Coherence::Coherent, &config),
        "non-coherent" => Device::open_dax(Path::new(device), Coherence::NonCoherent, &config),
        _ => panic!("no way '{way}'"),
    };
    opened.unwrap_or_else(|error| panic!("{error}"))
}

fn forget_link(memory: &Region, first: NodeSlot, second: NodeSlot, window_bytes: usize) {
    let layout = DeviceLayout::new(NODES, window_bytes).unwrap();
    for block in [layout.control(first, second), layout.control(second, first)] {
        memory.write(block.start, &vec![0; block.len()]);
    }
}

/// A variable that the guest's init program has set.
fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("no {name} in the environment"))
}

fn memory() -> Region {
    let file = File::options().read(true).write(true).open(variable("MEMORY")).unwrap();
    let mapping = Mapping::new(file.as_fd(), variable("MEMORY_BYTES").parse().unwrap()).unwrap();
    Region::of_mapping(Arc::new(mapping))
}

/// One of two guests.
struct Party {
    own: Endpoint,
    way: String,
    /// The devices of the pairs of nodes: the same one if it can be opened repeatedly.
    devices: Vec<String>,
    meeting: Rc<PartyBarrier<DeviceLink>>,
    memory: Region,
    /// Kept open, because the rendezvous and the memory use it.
    _met_by: Device,
    /// Links opened.
    links: Cell<u8>,
    /// The open device of each pair of nodes, kept for its interrupts until the next link is opened.
    opened: RefCell<[Option<Device>; LINK_PAIRS as usize]>,
}

impl Party {
    fn new(way: &str) -> Self {
        let own = if variable("NODE") == "a" { Endpoint::A } else { Endpoint::B };
        let devices: Vec<String> = variable("DEVICES").split(',').map(str::to_owned).collect();
        let [first, second] = nodes_of(LINK_PAIRS, own);
        let device = open(way, &devices[usize::from(LINK_PAIRS) % devices.len()], first, WINDOW_BYTES);
        let meeting = Rc::new(PartyBarrier::new(&device.link(second)));
        let (memory, way) = (memory_of(&device, second), way.to_owned());
        let (links, opened) = (Cell::new(0), RefCell::default());
        Self { own, way, devices, meeting, memory, _met_by: device, links, opened }
    }

    fn run_suite(&self) {
        let bare = TwoParty::new(self.own, self.meeting.clone(), |window_bytes| self.open(window_bytes));
        let faulty =
            TwoParty::new(self.own, self.meeting.clone(), |window_bytes| faulty(self.open(window_bytes), self.own));
        fabric::for_each_conformance_test!(facts!(&bare, &faulty, |fact: &str| self.interrupts_of(fact)));
    }

    /// Opens this guest's endpoint of a new link, after the remains of an earlier link of these nodes were erased.
    fn open(&self, window_bytes: usize) -> DeviceLink {
        let pair = self.links.get() % LINK_PAIRS;
        self.links.set(self.links.get().wrapping_add(1));
        let [own, peer] = nodes_of(pair, self.own);
        let opened = &mut self.opened.borrow_mut()[usize::from(pair)];
        *opened = None; // A device under VFIO can be opened only once at a time.
        if self.own == Endpoint::A {
            forget_link(&self.memory, own, peer, window_bytes);
        }
        self.meeting.wait();
        let device = open(&self.way, self.device_at(pair), own, window_bytes);
        opened.insert(device).link(peer)
    }

    fn device_at(&self, pair: u8) -> &str {
        &self.devices[usize::from(pair) % self.devices.len()]
    }

    /// The interrupts of the last link; a fact about doorbells must have caused some if the device has interrupts.
    fn interrupts_of(&self, fact: &str) -> String {
        if self.way != "vfio" {
            return String::new();
        }
        let address = self.device_at(self.links.get().wrapping_sub(1) % LINK_PAIRS);
        let count = interrupts(address);
        assert!(fact != "rings_both_ways_never_get_lost" || count > 0, "no interrupt of {address}");
        format!(", {count} interrupts")
    }
}

/// The slots of this guest and of the other one in a pair of nodes.
fn nodes_of(pair: u8, own: Endpoint) -> [NodeSlot; 2] {
    [own, own.other()].map(|end| NodeSlot(2 * pair + end as u8))
}

/// All memory of a device that is not open otherwise.
fn memory_of(device: &Device, peer: NodeSlot) -> Region {
    let (descriptor, [window, _]) = device.windows_in_memory(peer);
    let begin = window - device.layout().window(peer, device.own_slot()).start as u64;
    let len_bytes = usize::try_from(device.end_in_memory() - begin).unwrap();
    Region::of_mapping(Arc::new(Mapping::at(descriptor, begin, len_bytes).unwrap()))
}

/// Interrupts of a device under VFIO since it was opened.
fn interrupts(address: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/interrupts").unwrap();
    let lines = text.lines().filter(|line| line.contains("vfio") && line.contains(address));
    let counts = lines.flat_map(|line| line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()));
    counts.sum()
}
