//! Connections that stay the kernel's: what operators see of them, and what they hold when they are idle.

use std::io::Write;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use system_tests::paths::{self, package_file, python};
use system_tests::port::{Server, start_server};
use system_tests::{Process, Rack, WAIT_MAX, is_root};

const RUN_LIMIT: Duration = Duration::from_secs(120);

/// Connects, makes a number of round trips, and keeps the connection.
const CLIENT: &str = "
import socket, sys, time
connection = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
for _ in range(int(sys.argv[2])):
    connection.sendall(b'x' * 100)
    left = 100
    while left:
        left -= len(connection.recv(left))
print('ready', flush=True)
time.sleep(1000)
";
/// Round trips after which a connection uses lanes.
const BUSY: u64 = 50;
const ROUND_TRIP_BYTES: u64 = 100;
/// Requests with which a connection proves busy: the next one and its answer use lanes.
const REQUESTS_BY_TCP: u64 = 5;

fn run(rack: &Rack) -> Command {
    rack.run(&[], python())
}

fn echo_server(command: impl Fn() -> Command) -> Server {
    start_server(|port| {
        let mut command = command();
        command.arg(package_file("python/echo_server.py")).arg(port.to_string());
        command
    })
}

fn client(rack: &Rack, port: u16, round_trips: u64) -> Process {
    let mut command = run(rack);
    let process = Process::start(command.args(["-c", CLIENT, &port.to_string(), &round_trips.to_string()]));
    process.wait_until("its round trips", WAIT_MAX, |process| process.stdout().contains("ready"));
    process
}

/// Returns what `crosslane explain` says of the sockets of a process.
#[track_caller]
fn explained(rack: &Rack, process: &Process) -> Vec<Value> {
    let mut command = rack.bare_command(paths::crosslane());
    let pid = process.pid().to_string();
    let finished = Process::start(command.args(["explain", "--json", "--pid", &pid])).wait(WAIT_MAX).must_succeed();
    let report: Value = serde_json::from_str(&finished.stdout).expect("JSON");
    report["sockets"].as_array().expect("a list").clone()
}

/// Role, path and reason of a socket.
fn verdict(socket: &Value) -> (&str, &str, Option<&str>) {
    (socket["role"].as_str().unwrap_or("?"), socket["path"].as_str().unwrap_or("?"), socket["reason"].as_str())
}

#[test]
fn a_connection_is_explained_before_and_after_it_has_moved() {
    let Some(rack) = Rack::with_lanes() else { return };
    let server = echo_server(|| run(&rack));
    let young = client(&rack, server.port, 1);
    assert_eq!(
        explained(&rack, &young).iter().map(verdict).collect::<Vec<_>>(),
        [("connect", "kernel", Some("not_busy"))]
    );
    drop(young);
    let busy = client(&rack, server.port, BUSY);
    assert_eq!(explained(&rack, &busy).iter().map(verdict).collect::<Vec<_>>(), [("connect", "lane", None)]);
    let at_server = explained(&rack, &server.process);
    assert!(at_server.iter().any(|socket| verdict(socket) == ("listen", "lane", None)), "{at_server:?}");
    assert!(at_server.iter().any(|socket| verdict(socket) == ("accept", "lane", None)), "{at_server:?}");
}

#[test]
fn a_busy_connection_whose_other_side_has_no_library_has_that_reason() {
    let Some(rack) = Rack::with_lanes() else { return };
    let server = echo_server(|| rack.bare_command(python()));
    let busy = client(&rack, server.port, BUSY);
    let sockets = explained(&rack, &busy);
    assert_eq!(sockets.iter().map(verdict).collect::<Vec<_>>(), [("connect", "kernel", Some("peer_not_loaded"))]);
    let traffic = rack.stat().traffic_of_pid(busy.pid()).expect("a page");
    assert_eq!((traffic.lane_bytes, traffic.kernel_bytes), (0, 2 * BUSY * ROUND_TRIP_BYTES));
}

/// An end that is interrupted while it meets the other one makes the connection use TCP for longer, so only a third
/// must be as quick as they should be. The fifth answer may use the lane already.
#[test]
fn connections_move_within_their_first_five_requests() {
    let Some(rack) = Rack::with_lanes() else { return };
    let server = echo_server(|| run(&rack));
    let connections = 9;
    let mut by_tcp = Vec::new();
    for _ in 0..connections {
        let busy = client(&rack, server.port, BUSY);
        let traffic = rack.stat().traffic_of_pid(busy.pid()).expect("a page");
        assert_eq!(traffic.lane_bytes + traffic.kernel_bytes, 2 * BUSY * ROUND_TRIP_BYTES);
        assert_ne!(traffic.lane_bytes, 0, "a busy connection has a lane");
        by_tcp.push(traffic.kernel_bytes);
    }
    let quick = by_tcp.iter().filter(|bytes| **bytes <= 2 * REQUESTS_BY_TCP * ROUND_TRIP_BYTES).count();
    assert!(quick >= connections / 3, "bytes by TCP: {by_tcp:?}");
    let at_server = rack.stat().traffic_of_pid(server.process.pid()).expect("a page");
    assert_eq!(at_server.kernel_bytes, by_tcp.iter().sum::<u64>(), "both ends count the same bytes by TCP");
}

/// A client that makes as many round trips as the lines that it reads say.
const CLIENT_BY_LINE: &str = "
import socket, sys
connection = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
for line in sys.stdin:
    for _ in range(int(line)):
        connection.sendall(b'x' * 100)
        left = 100
        while left:
            left -= len(connection.recv(left))
    print('done', flush=True)
";
/// A connection notices the switch within this time of its waits.
const SWITCH_S: u64 = 1;

#[test]
fn living_connections_go_back_to_tcp_when_lanes_are_switched_off() {
    let Some(rack) = Rack::with_lanes() else { return };
    let server = echo_server(|| run(&rack));
    let mut command = run(&rack);
    command.args(["-c", CLIENT_BY_LINE]).arg(server.port.to_string());
    let (client, mut input) = Process::start_with_input(&mut command);
    let mut rounds = 0;
    let mut exchange = || {
        rounds += 1;
        writeln!(input, "{BUSY}").expect("a client that reads");
        client.wait_until("its round trips", WAIT_MAX, |client| client.stdout().matches("done").count() == rounds);
        rack.stat().traffic_of_pid(client.pid()).expect("a page").lane_bytes
    };
    assert!(exchange() < exchange(), "by lanes");
    Process::start(rack.crosslane("lanes").arg("off")).wait(WAIT_MAX).must_succeed();
    std::thread::sleep(Duration::from_secs(SWITCH_S));
    exchange();
    let before = exchange();
    assert_eq!(exchange(), before, "by TCP");
}

/// Returns what `--require-lane` prints for a client that runs a statement first.
#[track_caller]
fn refusal(rack: &Rack, port: u16, statement: &str) -> String {
    let mut command = rack.require_lane(python());
    let finished =
        Process::start(command.arg(package_file("python/patient_client.py")).args([&port.to_string(), statement]))
            .wait(WAIT_MAX);
    assert!(finished.stderr.contains("Connection reset by peer"), "{finished}");
    finished.stderr.lines().find(|line| line.starts_with("crosslane: ")).unwrap_or_default().to_owned()
}

#[test]
fn a_refusal_names_its_reason() {
    let Some(rack) = Rack::with_lanes() else { return };
    let (server, bare) = (echo_server(|| run(&rack)), echo_server(|| rack.bare_command(python())));
    let names = |line: String, reason: &str| assert!(line.contains(&format!("no lane: {reason}; refused")), "{line}");
    names(refusal(&rack, bare.port, ""), "the peer has not announced itself (16)");
    let limited = "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))";
    names(refusal(&rack, server.port, limited), "the address space of this process is limited (71)");
    if is_root() {
        names(
            refusal(&rack, server.port, "import os; os.setuid(65534)"),
            "the rack directory belongs to another user (73)",
        );
    }
    Process::start(rack.crosslane("lanes").arg("off")).wait(WAIT_MAX).must_succeed();
    names(refusal(&rack, server.port, ""), "lanes are off (64)");
}

/// Sends some bytes with pauses, longer than the time after which a connection without a lane is refused.
const CLIENT_WITH_PAUSES: &str = "
import socket, sys, time
connection = socket.create_connection(('127.0.0.1', int(sys.argv[1])))
for _ in range(4):
    connection.sendall(b'x')
    time.sleep(1.2)
print('sent')
";

/// The peer could agree only with its own transfers, which are as rare.
#[test]
fn a_required_lane_is_not_refused_for_pauses() {
    let Some(rack) = Rack::with_lanes() else { return };
    let server = echo_server(|| rack.require_lane(python()));
    let mut command = rack.require_lane(python());
    let client = Process::start(command.args(["-c", CLIENT_WITH_PAUSES, &server.port.to_string()]));
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "sent\n");
}

/// Runs connections that become idle after some requests, whose report has the lines `ROLE FACT NUMBER`. Returns the
/// numbers of a fact.
fn facts_of_idle(rack: &Rack, connections: u64) -> impl Fn(&str) -> Vec<u64> {
    let mut command = run(rack);
    command.arg(package_file("python/moved_connections.py")).arg(connections.to_string());
    let finished = Process::start(&mut command).wait(RUN_LIMIT).must_succeed();
    move |fact: &str| {
        let of_fact = finished.stdout.lines().filter(|line| line.contains(fact));
        let numbers = of_fact.map(|line| line.rsplit(' ').next().and_then(|number| number.parse().ok()));
        let numbers: Vec<u64> = numbers.map(|number| number.unwrap_or_else(|| panic!("{finished}"))).collect();
        assert_eq!(numbers.len(), 2, "{fact} of both roles: {finished}");
        numbers
    }
}

/// Descriptors of a process of the test that are no connections: the standard ones, the listener, an epoll instance,
/// and what the library has once for a process.
const OTHER_DESCRIPTORS_MAX: u64 = 11;
/// One page of each end.
const TOUCHED_KIB: u64 = 8;

#[test]
fn a_thousand_idle_connections_hold_two_descriptors_and_two_mappings_each_and_do_nothing() {
    let Some(rack) = Rack::with_lanes() else { return };
    let connections = 1000;
    let fact = facts_of_idle(&rack, connections);
    assert_eq!(fact("mappings"), [2 * connections; 2], "own memory and the peer's");
    let descriptors = fact("descriptors");
    assert!(descriptors.iter().all(|count| *count <= 2 * connections + OTHER_DESCRIPTORS_MAX), "{descriptors:?}");
    assert!(descriptors.iter().all(|count| *count > 2 * connections), "all have a bell: {descriptors:?}");
    assert!(fact("touched_kib").iter().sum::<u64>() <= connections * TOUCHED_KIB);
    // The kernel's own work for a process is not its sleep and wake-up.
    assert!(fact("idle_switches").iter().all(|count| *count <= 10) && fact("idle_cpu_ms").iter().all(|ms| *ms <= 20));
}

#[test]
fn a_connection_that_was_read_to_the_end_keeps_only_its_small_rings() {
    let Some(rack) = Rack::with_lanes() else { return };
    let mut command = run(&rack);
    command.arg(package_file("python/drained_memory.py")).arg("16384");
    let finished = Process::start(&mut command).wait(RUN_LIMIT).must_succeed();
    assert_eq!(finished.stdout, "ok\n", "{finished}");
}
