//! A timed link between two processes, each with a mapping of its own. Both read the same clock.

use fabric::device::{Device, DeviceConfig, DeviceLayout, DeviceLink, NodeSlot};
use fabric::timed::{LinkTiming, Pacer, TimedConfig, TimedLink, memory_bytes};
use fabric::{Doorbell, Inbound, Link, LinkState, Outbound, WaitOutcome};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};
use volmem::sync::Ordering;

const WINDOW_BYTES: usize = 64 << 10;
const PAYLOAD: usize = 4096;
const ROUNDS: u64 = 500;
const ONE_WAY: Duration = Duration::from_nanos(500);
const PATH_VARIABLE: &str = "FABRIC_TEST_TIMED_PEER";

/// How long a test waits before it reports a link as stuck.
const STUCK_AFTER: Duration = Duration::from_secs(60);

type TestLink = TimedLink<DeviceLink>;

fn timing() -> LinkTiming {
    LinkTiming { one_way_ns: ONE_WAY.as_nanos() as u64, bytes_per_us: 7_775, header_bytes: 24, payload_bytes_max: 256 }
}

fn wrapped_bytes() -> usize {
    memory_bytes(WINDOW_BYTES, timing()).expect("a timing")
}

/// Opens the device in a file as node `own` of two, and trains the link with the other one.
fn link(path: &Path, own: NodeSlot) -> TestLink {
    let config = DeviceConfig { window_bytes: Some(wrapped_bytes()), ..DeviceConfig::new(own, 2) };
    let link = Device::open_file(path, &config).expect("a device").link(NodeSlot(1 - own.0));
    let setup = TimedConfig { window_bytes: WINDOW_BYTES, timing: timing(), pacer: Pacer::new() };
    let mut link = TimedLink::new(link, setup).expect("a timed link");
    let begun = Instant::now();
    while link.train() != LinkState::Up {
        assert!(begun.elapsed() < STUCK_AFTER, "the peer does not train");
        std::thread::yield_now();
    }
    link
}

/// Waits for a round: every seventh by blocking, the others by polling.
fn wait_for(link: &TestLink, round: u64) {
    let (inbound, doorbell) = (link.inbound(), link.doorbell());
    let arrived = || inbound.load_u64(0, Ordering::Acquire) == round;
    if round.is_multiple_of(7) {
        while !arrived() {
            assert_eq!(doorbell.wait(Some(STUCK_AFTER)), WaitOutcome::Rung, "round {round}");
        }
    }
    let begun = Instant::now();
    while !arrived() {
        assert!(begun.elapsed() < STUCK_AFTER, "round {round} is stuck");
        std::thread::yield_now();
    }
    let mut bytes = vec![0; payload_bytes(round)];
    inbound.read(PAYLOAD, &mut bytes);
    assert!(bytes.iter().all(|byte| *byte == round as u8), "round {round}: a tag without its payload");
}

fn payload_bytes(round: u64) -> usize {
    (round * 97 % 9_000) as usize
}

fn send(link: &TestLink, round: u64) {
    let outbound = link.outbound();
    outbound.write(PAYLOAD, &vec![round as u8; payload_bytes(round)]);
    outbound.fence();
    outbound.store_u64(0, round, Ordering::Release);
    if round.is_multiple_of(7) {
        link.doorbell().ring();
    }
}

/// The other process: returns each round.
#[test]
fn peer_of_the_test_below() {
    let Some(path) = std::env::var_os(PATH_VARIABLE) else { return };
    let link = link(Path::new(&path), NodeSlot(1));
    for round in 1..=ROUNDS {
        wait_for(&link, round);
        send(&link, round);
    }
}

#[test]
fn messages_between_two_processes_arrive_whole_in_order_and_not_early() {
    let file = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file in tmpfs");
    let layout = DeviceLayout::new(2, wrapped_bytes()).expect("a layout");
    file.as_file().set_len(layout.bytes() as u64).expect("its length");
    let path = file.path();
    let mut peer = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "peer_of_the_test_below", "--nocapture"])
        .env(PATH_VARIABLE, path)
        .spawn()
        .expect("another process");
    let link = link(path, NodeSlot(0));
    file.close().expect("both have it mapped");
    for round in 1..=ROUNDS {
        let begun = Instant::now();
        send(&link, round);
        wait_for(&link, round);
        assert!(begun.elapsed() >= 2 * ONE_WAY, "round {round} was faster than the link");
    }
    assert!(peer.wait().expect("its end").success());
}
