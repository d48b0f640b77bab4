//! Nodes that share a device: they open and close it in any order, in one process or several, and some are hostile.

mod support;

use fabric::device::{
    Caching, Device, DeviceConfig, DeviceError, DeviceEvent, DeviceLayout, DeviceLink, DeviceProblem, NodeSlot, Vector,
};
use fabric::{Doorbell, Epoch, Inbound, Link, LinkState, Outbound, Scratchpad, WaitOutcome, train_both};
use proptest::prelude::*;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::{Message, Server, start_sending};
use tempfile::TempDir;
use volmem::{Mapping, Region};

const WINDOW_BYTES: usize = 8192;
const A: NodeSlot = NodeSlot(0);
const B: NodeSlot = NodeSlot(1);
const C: NodeSlot = NodeSlot(2);

/// How long a test waits before it reports nodes as stuck.
const STUCK_AFTER: Duration = Duration::from_secs(30);

fn layout() -> DeviceLayout {
    DeviceLayout::new(3, WINDOW_BYTES).expect("a layout")
}

fn config(own: NodeSlot) -> DeviceConfig {
    DeviceConfig { window_bytes: Some(WINDOW_BYTES), vectors: 2, ..DeviceConfig::new(own, 3) }
}

fn file() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = support::file(folder.path(), layout().bytes() as u64);
    (folder, path)
}

fn open(path: &Path, own: NodeSlot) -> Device {
    Device::open_file(path, &config(own)).unwrap_or_else(|error| panic!("{error}"))
}

/// The memory as a hostile node maps it.
fn raw(path: &Path) -> Region {
    let file = std::fs::File::options().read(true).write(true).open(path).expect("the file");
    Region::of_mapping(Arc::new(Mapping::new(file.as_fd(), layout().bytes()).expect("a mapping")))
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < STUCK_AFTER, "stuck: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Checks that both directions carry bytes.
fn assert_carries(a: &DeviceLink, b: &DeviceLink) {
    for (from, to) in [(a, b), (b, a)] {
        let bytes = [from.peer().0 + 1; 100];
        from.outbound().write(WINDOW_BYTES - 100, &bytes);
        from.outbound().flush();
        let mut read = [0; 100];
        to.inbound().read(WINDOW_BYTES - 100, &mut read);
        assert_eq!(read, bytes);
    }
}

#[test]
fn every_pair_of_three_nodes_has_a_link_of_its_own() {
    let (_folder, path) = file();
    let nodes = [A, B, C].map(|own| open(&path, own));
    let link = |own: usize, peer: usize| nodes[own].link([A, B, C][peer]);
    let mut links = [(link(0, 1), link(1, 0)), (link(1, 2), link(2, 1)), (link(2, 0), link(0, 2))];
    for (one, other) in &mut links {
        assert!(train_both(one, other));
    }
    for (number, (one, other)) in links.iter().enumerate() {
        one.outbound().write(0, &[2 * number as u8 + 1; WINDOW_BYTES]);
        other.outbound().write(0, &[2 * number as u8 + 2; WINDOW_BYTES]);
        one.scratchpad().write(7, number as u32);
    }
    for (number, (one, other)) in links.iter().enumerate() {
        let contents = |link: &DeviceLink| {
            let mut bytes = vec![0; WINDOW_BYTES];
            link.inbound().read(0, &mut bytes);
            bytes
        };
        assert_eq!(contents(other), [2 * number as u8 + 1; WINDOW_BYTES]);
        assert_eq!(contents(one), [2 * number as u8 + 2; WINDOW_BYTES]);
        assert_eq!(other.scratchpad().read(7), number as u32);
        assert_eq!((one.state(), other.state()), (LinkState::Up, LinkState::Up));
    }
}

#[test]
fn nodes_may_open_the_device_in_any_order_and_again() {
    let (_folder, path) = file();
    let mut epoch_last = Epoch::NONE;
    for (first, second) in [(A, B), (B, A)] {
        let early = open(&path, first);
        let mut early = early.link(second);
        assert_ne!(early.train(), LinkState::Up, "the peer has not opened the device");
        assert_ne!(early.train(), LinkState::Up, "the peer has not opened the device");
        let mut late = open(&path, second).link(first);
        assert!(train_both(&mut early, &mut late));
        assert_carries(&early, &late);
        drop(late); // Without leaving the epoch, as when it is killed.
        let mut late = open(&path, second).link(first);
        assert_eq!((early.state(), late.state()), (LinkState::Down, LinkState::Down));
        assert!(train_both(&mut late, &mut early));
        let mut bytes = [9; 100];
        late.inbound().read(WINDOW_BYTES - 100, &mut bytes);
        assert_eq!(bytes, [0; 100], "bytes of an earlier epoch");
        assert_carries(&early, &late);
        assert!(late.epoch() > epoch_last, "{} after {epoch_last}", late.epoch());
        epoch_last = late.epoch();
        // Both nodes close the device here, and its memory keeps its contents.
    }
}

#[test]
fn a_node_that_opens_the_device_again_resets_what_it_had_published() {
    let (_folder, path) = file();
    let (a, b) = (open(&path, A), open(&path, B));
    a.link(B).scratchpad().write(3, 7);
    a.heartbeat();
    assert_eq!((b.link(A).scratchpad().read(3), b.heartbeat_of(A)), (7, (1, false)));
    a.heartbeat_without_monitor();
    assert_eq!(b.heartbeat_of(A), (2, true));
    drop(a);
    let _successor = open(&path, A);
    assert_eq!((b.link(A).scratchpad().read(3), b.heartbeat_of(A)), (0, (0, false)));
}

#[test]
fn a_heartbeat_is_seen_by_all_peers_and_its_number_grows() {
    let (_folder, path) = file();
    let [a, b, c] = [A, B, C].map(|own| open(&path, own));
    for number in 1..4 {
        a.heartbeat();
        assert_eq!(
            [b.heartbeat_of(A), c.heartbeat_of(A), a.heartbeat_of(B)],
            [(number, false), (number, false), (0, false)]
        );
    }
}

#[test]
fn a_process_that_does_not_train_sees_that_the_peer_left_the_epoch() {
    let (_folder, path) = file();
    let (a, b) = (open(&path, A), open(&path, B));
    let (mut to_b, mut to_a) = (a.link(B), b.link(A));
    assert!(train_both(&mut to_b, &mut to_a));
    let epoch = to_b.epoch();
    assert!(a.is_peer_ready(B, epoch) && !a.is_peer_ready(B, Epoch(epoch.0 + 1)) && !a.is_peer_ready(C, epoch));
    to_a.take_down();
    assert!(!a.is_peer_ready(B, epoch));
}

/// Fills everything that node C writes, and the header, with `garbage`.
fn fill(memory: &Region, layout: &DeviceLayout, garbage: &[u64]) {
    let spans = [A, B].map(|peer| [layout.control(C, peer), layout.window(C, peer)]);
    let spans = spans.into_iter().flatten().chain(std::iter::once(0..4096));
    for (index, offset) in spans.flat_map(|span| span.step_by(8)).enumerate() {
        memory.store_u64(offset, garbage[index % garbage.len()], std::sync::atomic::Ordering::Release);
    }
}

fn garbage() -> impl Strategy<Value = Vec<u64>> {
    let plausible = any::<u32>().prop_map(|word| u64::from(!word) << 32 | u64::from(word));
    let last_epoch = (u32::MAX - 7..=u32::MAX).prop_map(|word| u64::from(!word) << 32 | u64::from(word));
    prop::collection::vec(prop_oneof![any::<u64>(), plausible, last_epoch, Just(u64::MAX), Just(0)], 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_node_that_writes_garbage_takes_down_only_its_own_links(
        floods in prop::collection::vec((garbage(), 0..4_usize), 1..6)
    ) {
        let (_folder, path) = file();
        let memory = raw(&path);
        let (a, b) = (open(&path, A), open(&path, B));
        let (mut a_to_b, mut b_to_a) = (a.link(B), b.link(A));
        let (mut a_to_c, mut b_to_c) = (a.link(C), b.link(C));
        prop_assert!(train_both(&mut a_to_b, &mut b_to_a));
        for (garbage, steps) in floods {
            fill(&memory, &layout(), &garbage);
            for _ in 0..steps {
                a_to_c.train();
                b_to_c.train();
                a_to_c.scratchpad().read(0);
                a_to_c.doorbell().ring();
                a_to_c.doorbell().wait(Some(Duration::ZERO));
                let rung = a.vector_doorbell(Vector(1)).take();
                prop_assert!(rung.iter().all(|peer| *peer == C));
            }
            prop_assert_eq!((a_to_b.state(), b_to_a.state()), (LinkState::Up, LinkState::Up));
            prop_assert_eq!(a_to_b.doorbell().wait(Some(Duration::ZERO)), WaitOutcome::TimedOut);
            assert_carries(&a_to_b, &b_to_a);
        }
        b.poll().unwrap();
        let c = open(&path, C);
        let mut c_to_a = c.link(A);
        prop_assert!(train_both(&mut c_to_a, &mut a_to_c), "an honest node in the same slot gets its link");
        prop_assert!(train_both(&mut b_to_c, &mut c.link(B)));
        assert_carries(&c_to_a, &a_to_c);
    }
}

#[test]
fn a_damaged_header_is_repaired_and_a_node_can_open_the_device_again() {
    let (_folder, path) = file();
    let (a, b) = (open(&path, A), open(&path, B));
    assert_eq!(a.poll().expect("a poll"), []);
    raw(&path).write(0, &[0xee; 4096]);
    assert_eq!(a.poll().expect("a poll"), [DeviceEvent::HeaderRepaired]);
    assert_eq!(b.poll().expect("a poll"), []);
    drop(b);
    open(&path, B);
}

fn refused(answer: Result<Device, DeviceError>) -> DeviceError {
    let error = answer.expect_err("refused");
    assert_eq!(error.to_string().lines().count(), 1, "{error}");
    error
}

#[test]
fn a_configuration_that_does_not_fit_is_refused_in_one_line() {
    let (_folder, path) = file();
    let open = |config: &DeviceConfig| refused(Device::open_file(&path, config));
    let name = path.display().to_string();
    for (config, words) in [
        (
            DeviceConfig { window_bytes: Some(1 << 20), ..config(A) },
            "3 nodes with windows of 1048576 bytes need 6299648",
        ),
        (
            DeviceConfig { window_bytes: None, nodes: 32, ..config(A) },
            "32 nodes with windows of 4096 bytes need 4321280",
        ),
        (DeviceConfig { nodes: 33, ..config(A) }, "33 nodes: use 2 to 32"),
        (DeviceConfig { nodes: 1, ..config(A) }, "1 nodes: use 2 to 32"),
        (DeviceConfig { window_bytes: Some(100), ..config(A) }, "windows of 100 bytes"),
        (config(NodeSlot(3)), "node 3 of 3"),
    ] {
        let error = open(&config).to_string();
        assert!(error.contains(&name) && error.contains(words), "{words}: {error}");
    }
    assert_eq!(std::fs::read(&path).expect("the file"), vec![0; layout().bytes()], "the file was written");
}

#[test]
fn a_device_of_another_rack_or_version_or_unknown_is_refused_and_not_written() {
    for (offset, word, words) in [
        (0, 0x7f45_4c46_u64, "0x7f454c46, which is not a Crosslane layout"),
        (8, 2, "layout version 2, this program has 1"),
        (16, 2, "laid out for 2 nodes, the rack has 3"),
        (24, 4096, "laid out for 4096 bytes per window, the rack has 8192"),
    ] {
        let (_folder, path) = file();
        drop(open(&path, A));
        raw(&path).write(offset, &word.to_le_bytes());
        let before = std::fs::read(&path).expect("the file");
        let error = refused(Device::open_file(&path, &config(B))).to_string();
        assert!(error.contains(words) && error.contains("clear its first 4096 bytes"), "{error}");
        assert!(std::fs::read(&path).expect("the file") == before, "{words}: the device was written");
        Device::open_file(&path, &DeviceConfig { overwrite: true, ..config(B) }).expect("told to overwrite");
    }
}

#[test]
fn a_file_that_others_can_write_and_other_kinds_of_files_are_refused() {
    let (folder, path) = file();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).expect("a mode");
    let error = refused(Device::open_file(&path, &config(A)));
    let owner = std::fs::metadata(&path).expect("the file").uid();
    assert!(error.to_string().contains(&format!("owned by user {owner}, mode 666")), "{error}");
    for (path, words) in [
        (Path::new("/dev/null"), "a character device without a size"),
        (folder.path(), "open"),
        (Path::new("/nonexistent"), "No such file"),
    ] {
        let error = refused(Device::open_file(path, &config(A)));
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn a_file_that_has_shrunk_is_an_error_before_it_is_accessed() {
    let (_folder, path) = file();
    let a = open(&path, A);
    let file = std::fs::File::options().write(true).open(&path).expect("the file");
    file.set_len(4096).expect("a length");
    let error = a.poll().expect_err("it shrank");
    assert!(matches!(error.problem, DeviceProblem::Shrunk { found_bytes: 4096, .. }), "{error}");
}

fn is_readable(descriptor: BorrowedFd<'_>) -> bool {
    let at_once = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut polled = [rustix::event::PollFd::new(&descriptor, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut polled, Some(&at_once)).expect("poll") == 1
}

fn connect(server: &Server, own: NodeSlot) -> Device {
    Device::connect_server(&server.path(), &config(own)).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn clients_of_a_server_learn_when_others_connect_and_disconnect() {
    let server = Server::start(layout().bytes(), 2);
    let a = connect(&server, A);
    let socket = a.descriptor().expect("a socket");
    assert_eq!(a.poll().expect("a poll"), []);
    let b = connect(&server, B);
    wait_until("a message of the server", || is_readable(socket));
    wait_until("b's doorbells", || a.poll().expect("a poll") == [DeviceEvent::PeerDoorbells]);
    drop(b);
    let mut changes = Vec::new();
    wait_until("b to disconnect", || {
        changes.extend(a.poll().expect("a poll"));
        changes.contains(&DeviceEvent::NodesGone(vec![B]))
    });
}

#[test]
fn a_ring_reaches_a_client_whose_doorbells_became_known_later() {
    let server = Server::start(layout().bytes(), 2);
    let a = connect(&server, A);
    let b = connect(&server, B);
    let doorbell = b.vector_doorbell(Vector(1));
    a.doorbell(B, Vector(1)).ring(); // The server's messages have not been read.
    let eventfd = doorbell.descriptor().expect("an eventfd");
    assert!(!is_readable(eventfd));
    wait_until("b's doorbells", || {
        a.poll().expect("a poll");
        is_readable(eventfd)
    });
    assert_eq!(doorbell.take().into_iter().collect::<Vec<_>>(), [A]);
}

#[test]
fn a_vector_doorbell_returns_which_peers_rang_and_takes_their_rings() {
    let server = Server::start(layout().bytes(), 2);
    let [a, b, c] = [A, B, C].map(|own| connect(&server, own));
    for node in [&a, &b] {
        wait_until("the doorbells", || node.poll().expect("a poll").is_empty());
    }
    let doorbell = c.vector_doorbell(Vector(1));
    assert!(doorbell.take().is_empty());
    a.doorbell(C, Vector(1)).ring();
    b.doorbell(C, Vector(1)).ring();
    b.doorbell(C, Vector(0)).ring();
    assert_eq!(doorbell.take().into_iter().collect::<Vec<_>>(), [A, B]);
    assert!(doorbell.take().is_empty());
    assert_eq!(c.vector_doorbell(Vector(0)).wait(None).into_iter().collect::<Vec<_>>(), [B]);
}

#[test]
fn a_ring_of_another_peer_is_left_for_its_waiter() {
    let server = Server::start(layout().bytes(), 2);
    let [a, b, c] = [A, B, C].map(|own| connect(&server, own));
    a.doorbell(C, Vector::MONITOR).ring();
    let (from_a, from_b) = (c.doorbell(A, Vector::MONITOR), c.doorbell(B, Vector::MONITOR));
    assert_eq!(from_b.wait(Some(Duration::from_millis(5))), WaitOutcome::TimedOut);
    assert!(is_readable(from_a.descriptor().expect("an eventfd")), "the ring can still be polled");
    assert_eq!(from_a.wait(Some(Duration::ZERO)), WaitOutcome::Rung);
    std::thread::scope(|scope| {
        let waiters = [from_a, from_b].map(|doorbell| scope.spawn(move || doorbell.wait(Some(STUCK_AFTER))));
        for node in [b, a] {
            wait_until("the doorbells", || node.poll().expect("a poll").is_empty());
            node.doorbell(C, Vector::MONITOR).ring();
        }
        waiters.into_iter().for_each(|waiter| assert_eq!(waiter.join().expect("a waiter"), WaitOutcome::Rung));
    });
}

#[test]
fn a_device_survives_its_server() {
    let messages = |own| {
        let eventfd = || Some(rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).expect("an eventfd"));
        let memory = support::memory(layout().bytes());
        vec![(0, None), (own, None), (-1, Some(memory)), (own, eventfd()), (own, eventfd())]
    };
    let (_folder, path) = start_sending(messages(5));
    let a = Device::connect_server(&path, &config(A)).expect("a device");
    let mut changes = Vec::new();
    wait_until("the server to exit", || {
        changes.extend(a.poll().expect("a poll"));
        changes == [DeviceEvent::ServerGone]
    });
    assert_eq!(a.poll().expect("a poll"), []);
    a.link(B).train();
}

#[test]
fn a_server_that_violates_the_protocol_is_refused_with_its_path() {
    let memory = || Some(support::memory(layout().bytes()));
    let eventfd = || Some(rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).expect("an eventfd"));
    let growing = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::ALLOW_SEALING).expect("a memfd");
    let cases: [(Vec<Message>, &str); 8] = [
        (vec![], "the server closed the connection"),
        (vec![(1, None)], "protocol version 1"),
        (vec![(0, None), (3, None), (4, None)], "sent 4 instead of the memory"),
        (vec![(0, None), (70_000, None), (-1, memory())], "client ID 70000"),
        (vec![(0, None), (3, None), (-1, Some(growing))], "may be truncated"),
        (vec![(0, None), (3, None), (-1, memory()), (3, memory())], "instead of an eventfd"),
        (vec![(0, None), (3, None), (-1, memory()), (-2, eventfd())], "client ID -2"),
        (vec![(0, None), (3, None), (-1, memory()), (3, eventfd())], "the server closed the connection"),
    ];
    for (messages, words) in cases {
        let (_folder, path) = start_sending(messages);
        let error = refused(Device::connect_server(&path, &config(A))).to_string();
        assert!(error.contains(&path.display().to_string()) && error.contains(words), "{words}: {error}");
    }
    let error = refused(Device::connect_server(Path::new("/nonexistent"), &config(A))).to_string();
    assert!(error.contains("crosslane device-server"), "{error}");
}

#[test]
fn a_device_that_is_handed_over_has_windows_and_doorbells_and_leaves_training_alone() {
    let server = Server::start(layout().bytes(), 2);
    let (a, b) = (connect(&server, A), connect(&server, B));
    wait_until("the doorbells", || a.poll().expect("a poll").contains(&DeviceEvent::PeerDoorbells));
    let (mut to_b, mut to_a) = (a.link(B), b.link(A));
    assert!(train_both(&mut to_b, &mut to_a));
    let (bytes, descriptors) = a.hand_over().expect("a handover");
    let proxy = Device::take_over(&bytes, descriptors).expect("a device");
    assert_eq!((proxy.own_slot(), proxy.layout(), proxy.vectors()), (A, layout(), 2));
    assert_eq!((to_b.state(), to_a.state()), (LinkState::Up, LinkState::Up));
    assert!(proxy.is_peer_ready(B, to_b.epoch()));
    proxy.outbound(B).write(64, b"from the proxy");
    proxy.doorbell(B, Vector(1)).ring();
    assert_eq!(b.vector_doorbell(Vector(1)).wait(None).into_iter().next(), Some(A));
    let mut read = [0; 14];
    b.inbound(A).read(64, &mut read);
    assert_eq!(&read, b"from the proxy");
    b.doorbell(A, Vector(1)).ring();
    assert_eq!(proxy.vector_doorbell(Vector(1)).wait(None).into_iter().next(), Some(B));
    assert_eq!((to_b.state(), to_a.state()), (LinkState::Up, LinkState::Up));
}

#[test]
fn a_process_that_took_over_a_device_interrupts_new_peers_for_earlier_rings() {
    let server = Server::start(layout().bytes(), 2);
    let a = connect(&server, A);
    let (bytes, descriptors) = a.hand_over().expect("a handover");
    let proxy = Device::take_over(&bytes, descriptors).expect("a device");
    let b = connect(&server, B);
    proxy.doorbell(B, Vector(1)).ring();
    wait_until("the doorbells", || a.poll().expect("a poll").contains(&DeviceEvent::PeerDoorbells));
    while b.vector_doorbell(Vector(1)).take().is_empty() {}
    proxy.doorbell(B, Vector(1)).ring();
    let (bytes, descriptors) = a.hand_over().expect("a handover");
    proxy.update_peers(&bytes, descriptors).expect("an update");
    let doorbell = b.vector_doorbell(Vector(1));
    assert!(is_readable(doorbell.descriptor().expect("an eventfd")), "the pending ring interrupts immediately");
    assert_eq!(doorbell.take().into_iter().next(), Some(A));
}

#[test]
fn a_node_that_shares_its_connection_is_gone_after_both_processes_exit() {
    let server = Server::start(layout().bytes(), 2);
    let a = Device::connect_server(&server.path(), &DeviceConfig { shares_connection: true, ..config(A) })
        .expect("a device");
    let b = connect(&server, B);
    let (bytes, descriptors) = a.hand_over().expect("a handover");
    let proxy = Device::take_over(&bytes, descriptors).expect("a device");
    drop(a);
    // The server has sent everything about other clients before it announces that c has disconnected.
    drop(connect(&server, C));
    wait_until("c to disconnect", || b.poll().expect("a poll").contains(&DeviceEvent::NodesGone(vec![C])));
    proxy.heartbeat_without_monitor();
    assert_eq!(b.heartbeat_of(A), (1, true));
    drop(proxy);
    wait_until("a to disconnect", || b.poll().expect("a poll").contains(&DeviceEvent::NodesGone(vec![A])));
}

#[test]
fn a_malformed_handover_is_refused() {
    let (_folder, path) = file();
    let a = open(&path, A);
    let (bytes, _) = a.hand_over().expect("a handover");
    let text = String::from_utf8(bytes).expect("text");
    let replaced = |from: &str, to: &str| text.replacen(from, to, 1).into_bytes();
    let changed = [
        replaced("device-2", "device-3"),
        replaced("\n0 3", "\n3 3"),
        replaced("0 3 8192", "0 3 99999936"),
        replaced("cached", "warm"),
        replaced("- 0 0 0", "- 0 1 0"),
        replaced("- 0 0 0", "0 0 0 0"),
        replaced("- 0 0 0", "- 0 0 1"),
        replaced("- 0 0 0", "- 1 0 0"),
        replaced("- 0 0 0", "- 0 -1 0"),
        b"\xff".to_vec(),
        Vec::new(),
    ];
    for bytes in &changed {
        let (_, descriptors) = a.hand_over().expect("a handover");
        refused(Device::take_over(bytes, descriptors));
    }
    let (bytes, mut descriptors) = a.hand_over().expect("a handover");
    refused(Device::take_over(&bytes, Vec::new()));
    descriptors.extend(a.hand_over().expect("a handover").1);
    refused(Device::take_over(&bytes, descriptors));
    assert_eq!(
        Device::take_over(&bytes, a.hand_over().expect("a handover").1).expect("a device").caching(),
        Caching::Cached
    );
}

const OTHER_NODE: &str = "FABRIC_TEST_OTHER_NODE";
const ROUNDS: u64 = 200;

/// Trains until the peer has trained too.
fn bring_up(device: &Device, link: &mut DeviceLink) {
    wait_until("training", || {
        device.poll().expect("a poll");
        link.doorbell().ring();
        link.train() == LinkState::Up
    });
}

/// Returns each word, and blocks in between.
fn other_node(path: &Path) {
    let device = Device::connect_server(path, &config(B)).expect("a device");
    let mut link = device.link(A);
    bring_up(&device, &mut link);
    let (doorbell, inbound, outbound) = (link.doorbell_of(Vector(1)), link.inbound(), link.outbound());
    for round in 1..=ROUNDS {
        while inbound.load_u64(0, std::sync::atomic::Ordering::Acquire) < round {
            assert_eq!(doorbell.wait(Some(STUCK_AFTER)), WaitOutcome::Rung);
        }
        outbound.store_u64(0, round, std::sync::atomic::Ordering::Release);
        outbound.flush();
        doorbell.ring();
    }
}

#[test]
fn nodes_in_two_processes_exchange_words_and_one_that_was_killed_returns() {
    if let Some(path) = std::env::var_os(OTHER_NODE) {
        return other_node(Path::new(&path));
    }
    let name = "nodes_in_two_processes_exchange_words_and_one_that_was_killed_returns";
    let server = Server::start(layout().bytes(), 2);
    let device = connect(&server, A);
    let mut link = device.link(B);
    for round_last in [ROUNDS / 2, ROUNDS] {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        let mut peer = command.args(["--exact", name]).env(OTHER_NODE, server.path()).spawn().expect("a peer");
        bring_up(&device, &mut link);
        let (doorbell, inbound, outbound) = (link.doorbell_of(Vector(1)), link.inbound(), link.outbound());
        for round in 1..=round_last {
            outbound.store_u64(0, round, std::sync::atomic::Ordering::Release);
            outbound.flush();
            doorbell.ring();
            while inbound.load_u64(0, std::sync::atomic::Ordering::Acquire) < round {
                assert_eq!(doorbell.wait(Some(STUCK_AFTER)), WaitOutcome::Rung);
            }
        }
        if round_last == ROUNDS {
            assert!(peer.wait().expect("the peer").success());
        } else {
            peer.kill().expect("the peer");
            peer.wait().expect("the peer");
        }
        let mut changes = Vec::new();
        wait_until("the peer to disconnect", || {
            changes.extend(device.poll().expect("a poll"));
            changes.contains(&DeviceEvent::NodesGone(vec![B]))
        });
        link.take_down();
    }
}

#[test]
fn training_does_not_zero_a_window_behind_the_links_part() {
    let (_folder, path) = file();
    let nodes = [A, B].map(|own| {
        let config = DeviceConfig { link_bytes: Some(4096), ..config(own) };
        Device::open_file(&path, &config).unwrap_or_else(|error| panic!("{error}"))
    });
    let [a, b] = &nodes;
    for offset in [0, 4096, WINDOW_BYTES - 8] {
        a.outbound(B).store_u64(offset, 7, volmem::sync::Ordering::Relaxed);
    }
    let (mut to_b, mut to_a) = (a.link(B), b.link(A));
    assert!(train_both(&mut to_b, &mut to_a));
    let words =
        [0, 4096, WINDOW_BYTES - 8].map(|offset| b.inbound(A).load_u64(offset, volmem::sync::Ordering::Relaxed));
    assert_eq!(words, [0, 7, 7]);
    assert_eq!((to_b.outbound().len_bytes(), a.outbound(B).len_bytes()), (4096, WINDOW_BYTES));
    let (memory, begins) = a.windows_in_memory(B);
    assert_eq!(memory.try_clone_to_owned().map(|_| ()).ok(), Some(()));
    assert_eq!(begins, [layout().window(B, A), layout().window(A, B)].map(|span| span.start as u64));
    for link_bytes in [0, 100, WINDOW_BYTES + 4096] {
        let config = DeviceConfig { link_bytes: Some(link_bytes), ..config(A) };
        assert!(Device::open_file(&path, &config).is_err(), "{link_bytes}");
    }
}
