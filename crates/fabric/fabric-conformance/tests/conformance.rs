//! Every backend passes the same suite. Names begin with `miri_` where Miri can run them: `cargo +nightly miri test
//! miri_`.

// Eighty lines of helpers, shared with the tests of fabric; a crate for them would be longer.
#[path = "../../fabric/tests/support/mod.rs"]
mod support;

use fabric::device::{Device, DeviceConfig, DeviceEvent, DeviceLayout, DeviceLink, NodeSlot};
use fabric::heap::HeapLink;
use fabric::test_support::conformance::{PartyBarrier, TwoParty};
use fabric::test_support::faulty::{FaultPlan, FaultyLink};
use fabric::test_support::non_coherent::{self, CacheBehavior};
use fabric::timed::{
    LinkTiming, Pacer, SharedConfig, SharedInbound, SharedLayout, SharedOutbound, SharedWindows, TimedConfig, TimedLink,
};
use fabric::{Coherence, Endpoint, Epoch, Link, LinkState, heap, shm};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::mpsc::channel;
use std::thread;
use support::Server;
use volmem::Region;

fn shm_pair(window_bytes: usize) -> (shm::ShmLink, shm::ShmLink) {
    let (creator, parts) = shm::create_link(window_bytes).expect("a link");
    (creator, shm::open_link(parts, window_bytes).expect("the peer"))
}

fn config(own: u8, window_bytes: usize) -> DeviceConfig {
    DeviceConfig { window_bytes: Some(window_bytes), ..DeviceConfig::new(NodeSlot(own), 3) }
}

fn device_bytes(window_bytes: usize) -> usize {
    DeviceLayout::new(3, window_bytes).expect("a layout").bytes()
}

/// Nodes 0 and 2 of three, with a file as device.
fn file_pair(path: &Path, coherence: Coherence, window_bytes: usize) -> (DeviceLink, DeviceLink) {
    let open = |own| Device::open_dax(path, coherence, &config(own, window_bytes)).expect("a device");
    (open(0).link(NodeSlot(2)), open(2).link(NodeSlot(0)))
}

fn device_in_memory(window_bytes: usize) -> (DeviceLink, DeviceLink) {
    let memory = support::memory(device_bytes(window_bytes));
    rustix::fs::fchmod(&memory, rustix::fs::Mode::from(0o600)).expect("a mode");
    file_pair(Path::new(&format!("/proc/self/fd/{}", memory.as_raw_fd())), Coherence::Coherent, window_bytes)
}

fn device_in_file(coherence: Coherence, window_bytes: usize) -> (DeviceLink, DeviceLink) {
    let folder = tempfile::tempdir().expect("a folder");
    file_pair(&support::file(folder.path(), device_bytes(window_bytes) as u64), coherence, window_bytes)
}

fn device_by_server(window_bytes: usize) -> (DeviceLink, DeviceLink) {
    let server = Server::start(device_bytes(window_bytes), 2);
    let connect = |own| Device::connect_server(&server.path(), &config(own, window_bytes)).expect("a device");
    let (a, b) = (connect(0), connect(2));
    while !a.poll().expect("a device").contains(&DeviceEvent::PeerDoorbells) {}
    (a.link(NodeSlot(2)), b.link(NodeSlot(0)))
}

/// The delay and rate of a PCIe bridge: half a microsecond one way and 7.8 GB/s.
const TIMING: LinkTiming =
    LinkTiming { one_way_ns: 500, bytes_per_us: 7_800, header_bytes: 24, payload_bytes_max: 256 };

/// Wraps a link in a timed one, whose journal holds all that a test stores before the peer loads.
fn timed<L: Link>(make: impl Fn(usize) -> (L, L), window_bytes: usize) -> (TimedLink<L>, TimedLink<L>) {
    const MEMORY_BYTES: usize = 256 << 10;
    let timed = |link| {
        TimedLink::new(link, TimedConfig { window_bytes, timing: TIMING, pacer: Pacer::new() }).expect("a timed link")
    };
    let (a, b) = make(MEMORY_BYTES);
    (timed(a), timed(b))
}

/// Timed windows in shared memory, beside a link that is trained. An endpoint that trains zeroes its window, which the
/// peer does not access before.
struct SharedLink {
    link: HeapLink,
    windows: SharedWindows,
    memory: Region,
}

impl Link for SharedLink {
    type Inbound = SharedInbound;
    type Outbound = SharedOutbound;
    type Doorbell = <HeapLink as Link>::Doorbell;
    type Scratchpad = <HeapLink as Link>::Scratchpad;

    fn inbound(&self) -> SharedInbound {
        self.windows.inbound()
    }

    fn outbound(&self) -> SharedOutbound {
        self.windows.outbound()
    }

    fn doorbell(&self) -> Self::Doorbell {
        self.link.doorbell()
    }

    fn scratchpad(&self) -> Self::Scratchpad {
        self.link.scratchpad()
    }

    fn state(&self) -> LinkState {
        self.link.state()
    }

    fn epoch(&self) -> Epoch {
        self.link.epoch()
    }

    fn train(&mut self) -> LinkState {
        if self.link.state() == LinkState::Down {
            self.memory.write(0, &vec![0; self.memory.len_bytes()]);
        }
        self.link.train()
    }

    fn take_down(&mut self) {
        self.link.take_down();
    }
}

/// The first `words_bytes` of a window are words with histories, the rest are lines.
fn shared(window_bytes: usize, words_bytes: usize) -> (SharedLink, SharedLink) {
    let layout = SharedLayout { window_bytes, words_bytes: words_bytes.min(window_bytes) };
    let memory = [(); 2].map(|()| Region::heap(layout.memory_bytes()));
    let pacers = [Pacer::new(), Pacer::new()];
    let (a, b) = heap::pair(64);
    let endpoint = |link, own: usize| {
        let (pacer, peer_pacer) = (pacers[own].clone(), pacers[1 - own].clone());
        let setup = SharedConfig { layout, timing: TIMING, pacer, peer_pacer };
        let windows = SharedWindows::new(&memory[own], &memory[1 - own], setup).expect("windows");
        SharedLink { link, windows, memory: memory[own].clone() }
    };
    (endpoint(a, 0), endpoint(b, 1))
}

fn faulty<L: Link>((a, b): (L, L), plan: fn(u64) -> FaultPlan) -> (FaultyLink<L>, FaultyLink<L>) {
    (FaultyLink::new(a, plan(1)), FaultyLink::new(b, plan(2)))
}

/// Runs each test as two parties, one thread each. The first party makes both endpoints of each link.
macro_rules! two_party_tests {
    (($name:ident, $make:expr) $($test:ident)*) => {
        mod $name {
            use super::*;
            $(
                #[test]
                fn $test() {
                    let (barrier_a, barrier_b) = heap::pair(fabric::test_support::conformance::WINDOW_BYTES);
                    let (to_b, from_a) = channel();
                    let open_a = move |window_bytes| {
                        let (a, b) = $make(window_bytes);
                        to_b.send(b).expect("the other party");
                        a
                    };
                    let open_b = move |_| from_a.recv().expect("the other party");
                    thread::scope(|scope| {
                        scope.spawn(move || {
                            let parties = TwoParty::new(Endpoint::B, Rc::new(PartyBarrier::new(&barrier_b)), open_b);
                            fabric::test_support::conformance::$test(&parties);
                        });
                        let parties = TwoParty::new(Endpoint::A, Rc::new(PartyBarrier::new(&barrier_a)), open_a);
                        fabric::test_support::conformance::$test(&parties);
                    });
                }
            )*
        }
    };
}

fabric::for_each_conformance_test!(two_party_tests!(two_party_heap, heap::pair));
fabric::for_each_conformance_test!(two_party_tests!(two_party_device_server, device_by_server));
fabric::for_each_conformance_test!(two_party_tests!(two_party_write_combined_device_non_coherent, |window_bytes| {
    faulty(device_in_file(Coherence::NonCoherent, window_bytes), FaultPlan::write_combined)
}));

fabric::conformance_suite!(miri_heap, heap::pair);
fabric::conformance_suite!(real_shm, shm_pair);
fabric::conformance_suite!(miri_faulty_heap, |window_bytes| faulty(heap::pair(window_bytes), FaultPlan::none));
fabric::conformance_suite!(write_combined_shm, |window_bytes| faulty(
    shm_pair(window_bytes),
    FaultPlan::write_combined
));
fabric::conformance_suite!(device_memory, device_in_memory);
fabric::conformance_suite!(device_file, |window_bytes| device_in_file(Coherence::Coherent, window_bytes));
fabric::conformance_suite!(device_write_combined, |window_bytes| device_in_file(
    Coherence::WriteCombined,
    window_bytes
));
fabric::conformance_suite!(device_non_coherent, |window_bytes| device_in_file(Coherence::NonCoherent, window_bytes));
fabric::conformance_suite!(device_server, device_by_server);
fabric::conformance_suite!(write_combined_device_write_combined, |window_bytes| faulty(
    device_in_file(Coherence::WriteCombined, window_bytes),
    FaultPlan::write_combined
));
fabric::conformance_suite!(write_combined_device_non_coherent, |window_bytes| faulty(
    device_in_file(Coherence::NonCoherent, window_bytes),
    FaultPlan::write_combined
));
fabric::conformance_suite!(faulty_device_server, |window_bytes| faulty(
    device_by_server(window_bytes),
    FaultPlan::none
));
fabric::conformance_suite!(write_combined_device_server, |window_bytes| faulty(
    device_by_server(window_bytes),
    FaultPlan::write_combined
));
// Stores are reordered between fences, as write-combined memory permits, which is within what a link promises.
fabric::conformance_suite!(miri_write_combined_heap, |window_bytes| faulty(
    heap::pair(window_bytes),
    FaultPlan::write_combined
));

fabric::conformance_suite!(explicit_non_coherent, |window_bytes| non_coherent::pair(
    window_bytes,
    CacheBehavior::explicit()
));
fabric::conformance_suite!(spontaneous_non_coherent, |window_bytes| non_coherent::pair(
    window_bytes,
    CacheBehavior::spontaneous(1)
));
fabric::conformance_suite!(faulty_non_coherent, |window_bytes| faulty(
    non_coherent::pair(window_bytes, CacheBehavior::spontaneous(2)),
    FaultPlan::none
));
fabric::conformance_suite!(write_combined_non_coherent, |window_bytes| faulty(
    non_coherent::pair(window_bytes, CacheBehavior::spontaneous(3)),
    FaultPlan::write_combined
));

fabric::conformance_suite!(timed_heap, |window_bytes| timed(heap::pair, window_bytes));
fabric::conformance_suite!(timed_shm, |window_bytes| timed(shm_pair, window_bytes));
fabric::conformance_suite!(timed_non_coherent, |window_bytes| timed(
    |memory_bytes| non_coherent::pair(memory_bytes, CacheBehavior::spontaneous(4)),
    window_bytes
));
fabric::conformance_suite!(write_combined_timed_device, |window_bytes| faulty(
    timed(device_in_memory, window_bytes),
    FaultPlan::write_combined
));
fabric::conformance_suite!(write_combined_timed_heap, |window_bytes| faulty(
    timed(heap::pair, window_bytes),
    FaultPlan::write_combined
));

fabric::conformance_suite!(timed_device, |window_bytes| timed(device_in_memory, window_bytes));
fabric::conformance_suite!(timed_device_server, |window_bytes| timed(device_by_server, window_bytes));

fabric::conformance_suite!(shared_words, |window_bytes| shared(window_bytes, window_bytes));
fabric::conformance_suite!(shared_lines, |window_bytes| shared(window_bytes, 64));
