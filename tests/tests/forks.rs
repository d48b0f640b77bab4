//! Connections around forks: lanes are used again once one process is left.

use std::io::Write;
use std::process::{ChildStdin, Command};

use system_tests::paths::{package_file, python};
use system_tests::{Process, Rack, Traffic, WAIT_MAX};

/// Bytes that are sent and received in the last step of a parent: 400 exchanges, each of two texts of 7 bytes.
const PARENTS_BYTES: u64 = 400 * 2 * 7 * 2;
const CLIENTS_ROUNDS: u64 = 800;
/// Bytes of the client and those of the server's child.
const CLIENTS_BYTES: u64 = CLIENTS_ROUNDS * 2 * 7;

fn script(rack: &Rack, arguments: &[&str]) -> Command {
    let mut command = rack.run(&[], python());
    command.arg(package_file("python/forks.py")).args(arguments);
    command
}

#[track_caller]
fn await_line(process: &Process, line: &str) {
    process.wait_until(line, WAIT_MAX, |process| process.stdout().lines().any(|printed| printed == line));
}

fn go_on(input: &mut ChildStdin) {
    input.write_all(b"\n").expect("the script reads its input");
}

/// Runs a parent whose child ends in a way. Returns what the parent transfers when it is alone.
fn traffic_alone(way: &str) -> Traffic {
    let rack = Rack::new();
    let (parent, mut input) = Process::start_with_input(&mut script(&rack, &[way]));
    let traffic = || rack.stat().traffic_of_pid(parent.pid()).unwrap_or_default();
    await_line(&parent, "alone");
    let before = traffic();
    go_on(&mut input);
    await_line(&parent, "done");
    let after = traffic();
    go_on(&mut input);
    parent.wait(WAIT_MAX).must_succeed();
    Traffic {
        lane_bytes: after.lane_bytes - before.lane_bytes,
        kernel_bytes: after.kernel_bytes - before.kernel_bytes,
        ..Traffic::default()
    }
}

#[test]
fn a_parent_uses_lanes_again_when_its_child_is_gone() {
    for way in ["exit", "close", "exec", "failed", "killed", "threads"] {
        let traffic = traffic_alone(way);
        let all = Traffic { lane_bytes: PARENTS_BYTES, ..Traffic::default() };
        assert_eq!(traffic, all, "after {way}");
    }
}

#[test]
fn a_parent_stays_on_tcp_when_another_program_may_have_the_connection() {
    let traffic = traffic_alone("bequeathed");
    assert_eq!((traffic.lane_bytes, traffic.kernel_bytes), (0, PARENTS_BYTES), "nobody knows whether the program ends");
}

/// Runs a server that forks after some exchanges, and a client that may do so too. Returns what the two that go on
/// transfer.
fn traffic_of_children(of_server: &str, of_client: &str) -> [Traffic; 2] {
    let rack = Rack::new();
    let server = Process::start(&mut script(&rack, &["server", of_server]));
    server.wait_until("a port", WAIT_MAX, |server| server.stdout().lines().count() == 1);
    let (port, rounds) = (server.stdout(), CLIENTS_ROUNDS.to_string());
    let arguments = ["client", port.trim(), &rounds, of_client];
    let (client, mut input) = Process::start_with_input(&mut script(&rack, &arguments));
    await_line(&client, "done");
    let number = |output: String, line| output.lines().nth(line).and_then(|pid| pid.parse().ok()).expect("a PID");
    let pids: [u32; 2] = [number(client.stdout(), 0), number(server.stdout(), 1)];
    let traffic = pids.map(|pid| rack.stat().traffic_of_pid(pid).unwrap_or_default());
    go_on(&mut input);
    client.wait(WAIT_MAX).must_succeed();
    server.wait(WAIT_MAX).must_succeed();
    traffic
}

#[test]
fn the_child_that_serves_a_connection_of_its_parent_uses_lanes() {
    for traffic in traffic_of_children("0", "0") {
        assert!(traffic.lane_bytes > CLIENTS_BYTES * 9 / 10, "{traffic:?} of {CLIENTS_BYTES}");
    }
}

#[test]
fn a_child_meets_the_peer_of_its_parent_anew_once_the_parent_has_closed() {
    for (of_server, of_client) in [("50", "0"), ("0", "50"), ("50", "50"), ("90", "50"), ("50", "90")] {
        for traffic in traffic_of_children(of_server, of_client) {
            assert!(traffic.lane_bytes > CLIENTS_BYTES * 8 / 10, "{of_server}, {of_client}: {traffic:?}");
        }
    }
}
