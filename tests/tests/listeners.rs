//! Which process serves a listening socket after its server has ended.

use std::process::Command;
use std::time::Duration;

use system_tests::paths::{package_file, python};
use system_tests::{Process, Rack};

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
