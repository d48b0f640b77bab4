//! Programs with libraries of different releases in one rack, this one and each that `frozen` keeps: all connections
//! work. Those of the release whose connections were not the kernel's find no lane.

use std::path::{Path, PathBuf};
use std::process::Command;

use system_tests::paths::{frozen_library, library, python};
use system_tests::{Process, Rack, Server, WAIT_MAX, start_server};

const ROUNDS: usize = 300;
/// The libraries of 55916a72, whose connections are AF_UNIX streams, and of 2d302bdb, the first release whose
/// connections are the kernel's; both stripped.
const FROZEN: [&str; 2] = ["before-kernel-connections", "kernel-connections"];

/// Exchanges short messages, which makes each connection busy, and long ones.
const CLIENT: &str = r#"
import os, socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20) as server:
    for size in [8] * int(sys.argv[2]) + [100_000, 8, 1_000_000, 8]:
        data = os.urandom(size)
        server.sendall(data)
        got = b""
        while len(got) < size:
            more = server.recv(size - len(got))
            assert more, "the connection has ended"
            got += more
        assert got == data
    server.shutdown(socket.SHUT_WR)
    assert server.recv(1) == b""
print("echoed")
"#;

const SERVER: &str = r#"
import socket, sys, threading
def serve(client):
    with client:
        while data := client.recv(1 << 20):
            client.sendall(data)
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])), reuse_port=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"#;

fn python_with(rack: &Rack, library: &Path, script: &str) -> Command {
    let mut command = rack.run(&["--library", library.to_str().expect("a path in UTF-8")], python());
    command.args(["-c", script]);
    command
}

fn start(rack: &Rack, library: &Path) -> Server {
    start_server(|port| {
        let mut command = python_with(rack, library, SERVER);
        command.arg(port.to_string());
        command
    })
}

fn start_client(rack: &Rack, library: &Path, port: u16) -> Process {
    Process::start(python_with(rack, library, CLIENT).args([port.to_string(), ROUNDS.to_string()]))
}

#[track_caller]
fn must_echo(client: Process) {
    assert_eq!(client.wait(WAIT_MAX).must_succeed().stdout, "echoed\n");
}

#[test]
fn programs_of_two_releases_reach_each_other() {
    FROZEN.iter().for_each(|earlier| reach_each_other([frozen_library(earlier), library()]));
}

fn reach_each_other(releases: [PathBuf; 2]) {
    let rack = Rack::new();
    for of_server in &releases {
        let server = start(&rack, of_server);
        for of_client in [&releases[0], &releases[1], &releases[0]] {
            must_echo(start_client(&rack, of_client, server.port));
        }
        let clients: Vec<_> = (0..6).map(|number| start_client(&rack, &releases[number % 2], server.port)).collect();
        clients.into_iter().for_each(must_echo);
    }
}

/// A server of one release listens beside one of the other release at the same port, as during an upgrade, in both
/// orders.
#[test]
fn servers_of_two_releases_share_a_port_while_one_replaces_the_other() {
    FROZEN.iter().for_each(|earlier| replace_each_other([frozen_library(earlier), library()]));
}

fn replace_each_other(releases: [PathBuf; 2]) {
    for (before, after) in [(&releases[0], &releases[1]), (&releases[1], &releases[0])] {
        let rack = Rack::new();
        let server = start(&rack, before);
        must_echo(start_client(&rack, before, server.port));
        let mut command = python_with(&rack, after, SERVER);
        let next = Process::start(command.arg(server.port.to_string()));
        let clients: Vec<_> = (0..6).map(|number| start_client(&rack, &releases[number % 2], server.port)).collect();
        clients.into_iter().for_each(must_echo);
        assert!(next.is_running(), "{}", next.stderr());
        let port = server.port;
        drop(server);
        must_echo(start_client(&rack, before, port));
        must_echo(start_client(&rack, after, port));
    }
}
