//! Who serves a listening socket when its server has gone, and whom a server refuses.

use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use system_tests::place::{package_file, python};
use system_tests::{PATIENCE, Process, Rack};

const RUN_LIMIT: Duration = Duration::from_secs(120);

fn listeners(mut command: Command) -> Command {
    command.arg(package_file("python/listeners.py"));
    command
}

fn scenarios(command: Command) -> String {
    Process::start(listeners(command).arg("all")).wait(RUN_LIMIT).must_succeed().stdout
}

#[test]
fn a_server_that_has_gone_is_followed_by_whom_it_has_named_and_by_nobody_else() {
    let rack = Rack::new();
    assert_eq!(scenarios(rack.run(&[], python())), scenarios(Command::new(python())));
}

/// As a connection that has died in the queue.
#[test]
fn a_client_that_is_refused_keeps_no_server_waiting() {
    let rack = Rack::new();
    let server = Process::start(listeners(rack.require_lane(python())).arg("--poll-and-accept"));
    server.wait_until("a port", PATIENCE, |server| server.stdout().contains('\n'));
    let port: u16 = server.stdout().trim().parse().unwrap();
    let plain = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let said = server.wait(RUN_LIMIT).must_succeed().stdout;
    drop(plain);
    if !rack.is_bare() {
        assert_eq!(said.lines().skip(1).collect::<Vec<_>>(), ["aborted", "nobody"]);
    }
}
