//! Machines without a network device, connected by the memory of one device.
//!
//! Programs and nodes on several machines are tested with every change; the lab itself, and devices that racks do not
//! use, in `./x exam`. Guests are emulated, about twenty times slower than the machine, so no test depends on time.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use lab::{Device, Lab, LabFailure, Node, Report};
use system_tests::{LocalNodes, Process, c, paths};

/// Guests share two cores with other tests and builds, so this limit only ends a test that hangs.
const LIMIT: Duration = Duration::from_secs(1200);

fn builds() -> PathBuf {
    paths::target().join("release")
}

/// A lab with a committed script and the programs of this build.
fn committed(script: &str) -> Lab {
    Lab::of_script(&paths::package_file(&format!("lab/{script}"))).unwrap().crosslane(&builds()).limit(LIMIT)
}

fn of(script: &str) -> Lab {
    Lab::new().crosslane(&builds()).script(script).limit(LIMIT)
}

/// Starts this machine as another node of a lab: node 1, whose peer is guest a, node 0.
fn host_link(running: &lab::RunningLab) -> Process {
    let socket = running.device_socket().expect("a served device").display().to_string();
    let mut command = Command::new(builds().join("lab-link"));
    Process::start(command.args([&format!("server:{socket}"), "1", "2", "0"]))
}

#[test]
fn two_guests_without_a_network_train_a_link_over_a_shared_bar() {
    let report = committed("link.sh").run().unwrap().must_succeed();
    for node in [Node::A, Node::B] {
        assert!(report.output(node).contains("write-combined"), "{report}");
        assert!(report.output(node).contains("100 rounds"), "{report}");
    }
}

#[test]
fn a_guest_and_this_machine_wake_each_other_by_interrupts() {
    let script = "lab-link vfio:$DEVICE 0 2 1";
    let running = of(script).guests(1).device(Device::Vfio).start().unwrap();
    let host = host_link(&running);
    let report = running.finish().unwrap().must_succeed();
    let host = host.wait(LIMIT).must_succeed();
    for output in [report.output(Node::A), &host.stdout] {
        assert!(output.contains("100 rounds") && output.contains("woken by interrupts"), "{host}{report}");
    }
}

/// A rack of guest a and this machine, which accesses the device through its server.
const GUEST_AND_HOST: &str = r#"version = 1
[device]
backend = "pci"
[timeouts]
query_ns = "2500 ms"
silence_ns = "30 s"
[[nodes]]
name = "a"
address = "127.77.0.1"
device = "0000:00:04.0"
[[nodes]]
name = "b"
address = "127.77.0.2"
backend = "shm"
"#;

/// The guest brings its node up and reports it; its stream is complete when the script ends.
const GUEST_BESIDE_HOST: &str = r#"
sed "s/0000:00:04.0/$DEVICE/" /beside.toml >"$RACK"
crosslane up --rack "$RACK" --node a
host up
wait_for lanes lab-stream connect 127.77.0.2:9001 3
"#;

#[test]
fn programs_of_a_guest_and_of_this_machine_communicate_through_windows() {
    let host = LocalNodes::of_file(GUEST_AND_HOST);
    let lab = of(GUEST_BESIDE_HOST).guests(1).device(Device::Doorbell).file(&host.rack_file(), "/beside.toml");
    let mut running = lab.start().unwrap();
    let directory = PathBuf::from(host.status()["nodes"][1]["directory"].as_str().unwrap());
    let rack = directory.parent().unwrap();
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory).unwrap();
    std::os::unix::fs::symlink(running.device_socket().unwrap(), rack.join("device.sock")).unwrap();
    // Not by 'up', because 'down' would then also end the device server, which is this process.
    let monitor = Process::start(&mut host.command(&["monitor", "--rack", host.rack(), "--node", "b"]));
    running.wait_for_guest(Node::A, "up").unwrap();
    let mut server = host.run(1);
    let server = Process::start(server.arg(builds().join("lab-stream")).args(["serve", "127.77.0.2:9001", "3"]));
    running.release(Node::A);
    let report = running.finish().unwrap().must_succeed();
    let server = server.wait(LIMIT).must_succeed();
    for output in [report.output(Node::A), &server.stdout] {
        assert!(output.contains("bytes received intact"), "{report}{server}");
    }
    drop(monitor);
}

/// A rack of this machine, whose `up` starts the device server, and of a guest that gets the device from it.
const HOST_AND_GUEST: &str = r#"version = 1
[device]
backend = "pci"
mode = "vfio"
[timeouts]
query_ns = "2500 ms"
silence_ns = "30 s"
[[nodes]]
name = "host"
address = "127.77.0.1"
backend = "shm"
[[nodes]]
name = "a"
address = "127.77.0.2"
device = "0000:00:04.0"
"#;

/// The guest connects to this machine, accepts a connection, and has one open when its machine is killed.
const GUEST_OF_A_HOST: &str = r#"
sed "s/0000:00:04.0/$DEVICE/" /rack.toml >"$RACK"
crosslane up --rack "$RACK" --node a
host up
wait_for lanes lab-stream connect 127.77.0.1:9001 1
lanes lab-stream serve 127.77.0.2:9002 1
lanes lab-stream serve 127.77.0.2:9003 1000 &
host serving
kill $!
crosslane down --rack "$RACK"
"#;

/// Node `host` of a rack, up on this machine.
struct HostNode(LocalNodes);

impl HostNode {
    fn up() -> Self {
        let node = Self(LocalNodes::of_file(HOST_AND_GUEST));
        node.0.finish("up", &["--node", "host"]).must_succeed();
        node
    }

    /// The socket of the device server, from which guests get their device.
    fn device_socket(&self) -> PathBuf {
        PathBuf::from(self.0.status()["nodes"][0]["directory"].as_str().unwrap()).with_file_name("device.sock")
    }

    /// One connection with the guest, with traffic in both directions.
    fn stream(&self, role: &str, address: &str, seconds: &str) -> Process {
        let mut command = self.0.run_on("host");
        Process::start(command.arg(builds().join("lab-stream")).args([role, address, seconds]))
    }

    /// As [`HostNode::stream`], to a server that may not listen yet.
    fn connect_and_finish(&self, address: &str) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let finished = self.stream("connect", address, "1").wait(LIMIT);
            if !finished.stderr.contains("refused") {
                finished.must_succeed();
                return;
            }
            assert!(Instant::now() < deadline, "{finished}");
        }
    }

    /// As [`HostNode::connect_and_finish`] for a connection that stays open: returns once bytes have arrived.
    fn connect_and_stay(&self, address: &str) -> Process {
        let (deadline, bytes_before) = (Instant::now() + LIMIT, self.bytes_received());
        let mut client = self.stream("connect", address, "1000");
        while self.bytes_received() == bytes_before {
            assert!(Instant::now() < deadline, "no bytes from {address}");
            if !client.is_running() {
                client = self.stream("connect", address, "1000");
            }
        }
        client
    }

    /// Bytes that this machine's proxy has received.
    fn bytes_received(&self) -> u64 {
        let stat = self.0.finish("stat", &["--json"]).must_succeed();
        let stat: serde_json::Value = serde_json::from_str(&stat.stdout).unwrap();
        stat["proxies"][0]["bytes_received"].as_u64().unwrap()
    }
}

#[test]
fn a_guest_of_the_device_server_connects_again_after_it_was_killed() {
    let host = HostNode::up();
    let socket = host.device_socket();
    let lab = of(GUEST_OF_A_HOST).guests(1).device(Device::Vfio).vectors(3).device_server(&socket);
    let mut running = lab.file(&host.0.rack_file(), "/rack.toml").start().unwrap();
    for is_first in [true, false] {
        running.wait_for_guest(Node::A, "up").unwrap();
        let server = host.stream("serve", "127.77.0.1:9001", "1");
        running.release(Node::A);
        let server = server.wait(LIMIT).must_succeed();
        assert!(server.stdout.contains("bytes received intact"), "{server}");
        host.connect_and_finish("127.77.0.2:9002");
        running.wait_for_guest(Node::A, "serving").unwrap();
        if is_first {
            let client = host.connect_and_stay("127.77.0.2:9003");
            running.kill(Node::A);
            let client = client.wait(LIMIT).must_exit_with(1);
            // One of its threads sees the reset and the other only the end; which one does is random.
            assert!(client.stderr.contains("reset") || client.stderr.contains("ended after"), "{client}");
            running.boot(Node::A).unwrap();
        }
    }
    running.release(Node::A);
    let report = running.finish().unwrap().must_succeed();
    assert_eq!(report.output(Node::A).matches("bytes received intact").count(), 4, "{report}");
}

#[test]
fn redis_serves_another_guest_without_a_network_through_proxies_and_directly() {
    redis(Device::Plain);
}

#[test]
fn redis_is_served_over_vfio_with_doorbells_through_proxies_and_directly() {
    redis(Device::Vfio);
}

#[test]
#[ignore = "takes minutes; in ./x exam"]
fn redis_is_served_over_dax_memory_through_proxies_and_directly() {
    redis(Device::Dax);
}

fn redis(device: Device) {
    let report = committed("redis.sh").device(device).built(hand_on()).run().unwrap().must_succeed();
    let direct_runs = match device {
        Device::Dax => 2, // Coherent, and treated as non-coherent.
        _ => 1,
    };
    assert_eq!(report.output(Node::B).matches("\"GET\",").count(), 2 + 2 * direct_runs, "{report}");
    must_be_passed_on(&report, direct_runs);
}

#[test]
fn killed_stopped_and_passed_on_programs_under_vfio_do_not_block_the_device() {
    let report = committed("direct.sh").built(hand_on()).run().unwrap().must_succeed();
    must_be_passed_on(&report, 1);
}

/// Built once for tests that run concurrently.
fn hand_on() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let flags = ["-O2", "-Wall", "-Wextra", "-Werror"];
    BUILT.get_or_init(|| c::build("hand-on", &[paths::package_file("lab/hand_on.c")], &flags))
}

#[track_caller]
fn must_be_passed_on(report: &Report, times: usize) {
    for who in ["at first", "by message", "after exec"] {
        let answers = report.output(Node::B).matches(&format!("answered {who}")).count();
        assert_eq!(answers, times, "{who}: {report}");
    }
}

#[test]
#[ignore = "runs the C suite in an emulated guest: twenty minutes; in ./x exam"]
fn the_suite_passes_with_the_kernel_of_debian_12() {
    let library = paths::library();
    let lab = committed("suite.sh").built(c::semantics()).file(&library, "/usr/lib/libcrosslane.so");
    lab.limit(3 * LIMIT).run().unwrap().must_succeed();
}

#[test]
fn streams_in_both_directions_arrive_intact() {
    committed("streams.sh").run().unwrap().must_succeed();
}

#[test]
#[ignore = "takes minutes; in ./x exam"]
fn nginx_and_iperf_are_served_between_guests() {
    committed("web.sh").run().unwrap().must_succeed();
}

#[test]
fn a_killed_proxy_and_a_killed_monitor_come_back() {
    committed("kills.sh").run().unwrap().must_succeed();
}

#[test]
fn a_node_survives_garbage_from_its_peer_and_trains_again() {
    let report = committed("spoil.sh").run().unwrap().must_succeed();
    // Either node may see the garbage first and repair it.
    let seen = [Node::A, Node::B].into_iter().any(|node| report.output(node).contains("overwrote the header"));
    assert!(seen, "{report}");
}

#[test]
fn a_killed_guest_resets_its_connections_and_serves_again_when_it_is_back() {
    let mut lab = committed("guest-kill.sh").start().unwrap();
    kill_and_boot_again(&mut lab);
    lab.finish().unwrap().must_succeed();
}

/// The host's side of `guest-kill.sh`.
fn kill_and_boot_again(lab: &mut lab::RunningLab) {
    lab.wait_for_guest(Node::A, "serving").unwrap();
    lab.wait_for_guest(Node::B, "connected").unwrap();
    lab.kill(Node::A);
    lab.release(Node::B);
    lab.wait_for_guest(Node::B, "reset").unwrap();
    lab.boot(Node::A).unwrap();
    lab.wait_for_guest(Node::A, "serving").unwrap();
    lab.release(Node::B);
    lab.wait_for_guest(Node::B, "again").unwrap();
    lab.release(Node::B);
    lab.release(Node::A);
}

#[test]
#[ignore = "streams for minutes; in ./x exam"]
fn on_every_device_streams_arrive_intact_and_nodes_survive_kills_and_garbage() {
    for device in [Device::Vfio, Device::Dax] {
        committed("streams.sh").device(device).run().unwrap().must_succeed();
    }
    for script in ["kills.sh", "spoil.sh"] {
        committed(script).device(Device::Dax).run().unwrap().must_succeed();
    }
    let mut lab = committed("guest-kill.sh").device(Device::Vfio).start().unwrap();
    kill_and_boot_again(&mut lab);
    lab.finish().unwrap().must_succeed();
}

#[test]
#[ignore = "streams for a minute; in ./x exam"]
fn a_stream_between_guests_survives_its_link_over_a_network() {
    committed("failover.sh").run().unwrap().must_succeed();
}

#[test]
#[ignore = "reports rates and asserts nothing about them"]
fn bulk_between_guests_is_measured() {
    let report = committed("bulk.sh").run().unwrap().must_succeed();
    println!("{report}");
}

#[test]
#[ignore = "boots eight guests: two minutes"]
fn every_device_carries_words_and_links() {
    for device in [Device::Plain, Device::Doorbell, Device::Dax] {
        committed("words.sh").device(device).run().unwrap().must_succeed();
    }
    for (device, words) in [
        (Device::Doorbell, "woken by polling"),
        (Device::Vfio, "woken by interrupts"),
        (Device::Dax, "woken by polling"),
    ] {
        let report = committed("link.sh").device(device).run().unwrap().must_succeed();
        for node in [Node::A, Node::B] {
            assert!(report.output(node).contains(words), "{report}");
        }
    }
}

#[test]
fn a_guest_of_a_mesh_of_three_may_be_killed_and_come_back() {
    const ALL: [Node; 3] = [Node::A, Node::B, Node::C];
    let mut lab = committed("mesh.sh").start().unwrap();
    let wait_for = |lab: &mut lab::RunningLab, nodes: &[Node], what| {
        for &node in nodes {
            lab.wait_for_guest(node, what).unwrap();
        }
    };
    wait_for(&mut lab, &ALL, "meshed");
    lab.kill(Node::C);
    ALL[..2].iter().for_each(|&node| lab.release(node));
    wait_for(&mut lab, &ALL[..2], "apart");
    lab.boot(Node::C).unwrap();
    wait_for(&mut lab, &ALL[2..], "meshed");
    lab.release(Node::C);
    wait_for(&mut lab, &ALL[2..], "apart");
    ALL.iter().for_each(|&node| lab.release(node));
    wait_for(&mut lab, &ALL, "again");
    ALL.iter().for_each(|&node| lab.release(node));
    lab.finish().unwrap().must_succeed();
}

#[test]
#[ignore = "boots a guest twice: half a minute"]
fn a_killed_guest_comes_back_and_its_links_with_it() {
    let script = "lab-link vfio:$DEVICE 0 2 1\nhost linked";
    let mut running = of(script).guests(1).device(Device::Vfio).start().unwrap();
    for _ in 0..2 {
        let host = host_link(&running);
        running.wait_for_guest(Node::A, "linked").unwrap();
        host.wait(LIMIT).must_succeed();
        let machine = running.pid(Node::A).unwrap();
        running.kill(Node::A);
        assert!(!PathBuf::from(format!("/proc/{machine}")).exists());
        running.boot(Node::A).unwrap();
    }
    let host = host_link(&running);
    running.wait_for_guest(Node::A, "linked").unwrap();
    running.release(Node::A);
    running.finish().unwrap().must_succeed();
    host.wait(LIMIT).must_succeed();
}

#[test]
#[ignore = "boots five guests: a minute"]
fn the_exit_code_tells_how_a_lab_ended_and_its_machines_are_gone() {
    let failed = of("[ $NODE = a ] || exit 7; sleep 1000").run().unwrap();
    assert_eq!((failed.code(), &failed.failure), (7, &None), "{failed}");

    let late = of("echo up; sleep 1000").guests(1).limit(Duration::from_secs(30)).run().unwrap();
    assert_eq!(late.code(), 124, "{late}");
    assert!(matches!(&late.failure, Some(LabFailure::TimeOver { limit_s: 30, running }) if running == &[Node::A]));

    let died = of("poweroff -f; sleep 1000").guests(1).run().unwrap();
    assert_eq!((died.code(), &died.failure), (1, &Some(LabFailure::Died { node: Node::A })), "{died}");

    let interrupt = Arc::new(AtomicBool::new(false));
    let lab = of("host here").guests(1).device(Device::Doorbell).interrupted_by(interrupt.clone());
    let mut running = lab.start().unwrap();
    running.wait_for_guest(Node::A, "here").unwrap();
    let machine = PathBuf::from(format!("/proc/{}", running.pid(Node::A).unwrap()));
    let socket = running.device_socket().unwrap().to_owned();
    assert!(machine.exists() && socket.exists());
    interrupt.store(true, Ordering::Relaxed);
    assert_eq!(running.finish().unwrap().code(), 130);
    assert!(!machine.exists() && !socket.exists() && !socket.parent().unwrap().exists());
}
