//! Which process serves a listening socket after its server has ended, and clients that a server refuses.

use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use system_tests::paths::{package_file, python};
use system_tests::{Process, Rack, WAIT_MAX};

const RUN_LIMIT: Duration = Duration::from_secs(120);

fn listeners(mut command: Command) -> Command {
    command.arg(package_file("python/listeners.py"));
    command
}

fn scenarios(command: Command) -> String {
    Process::start(listeners(command).arg("all")).wait(RUN_LIMIT).must_succeed().stdout
}

#[test]
fn only_a_successor_serves_the_socket_of_a_dead_server() {
    let rack = Rack::new();
    assert_eq!(scenarios(rack.run(&[], python())), scenarios(Command::new(python())));
}

/// The client looks like one whose connection was reset in the accept queue.
#[test]
fn a_refused_client_does_not_block_accept() {
    let rack = Rack::new();
    let server = Process::start(listeners(rack.require_lane(python())).arg("--poll-and-accept"));
    server.wait_until("a port", WAIT_MAX, |server| server.stdout().contains('\n'));
    let port: u16 = server.stdout().trim().parse().unwrap();
    let plain = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let output = server.wait(RUN_LIMIT).must_succeed().stdout;
    drop(plain);
    if !rack.is_bare() {
        assert_eq!(output.lines().skip(1).collect::<Vec<_>>(), ["aborted", "nobody"]);
    }
}
