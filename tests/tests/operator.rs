//! What an operator sees: variables set by hand, reasons, refusals.

use std::path::Path;
use std::process::Command;

use system_tests::place::{library, python};
use system_tests::{Finished, PATIENCE, Process, Rack};

/// The library without the command, as where a command line is not the operator's to change.
fn by_hand(rack: &Rack, variables: &[(&str, &str)], script: &str) -> Command {
    let mut command = rack.bare_command(python());
    command.args(["-c", script]).env("LD_PRELOAD", library()).env("CROSSLANE_RACK", rack.path());
    command.envs(variables.iter().copied());
    command
}

fn ended(mut command: Command) -> Finished {
    Process::start(&mut command).wait(PATIENCE)
}

const SAYS_SO: &str = "print('ran')";
/// A program that takes no lane, in a rack where nobody listens.
const ECHOES_TO_ITSELF: &str = "
import socket, threading
listener = socket.socket()
listener.bind(('127.0.0.1', 0))
listener.listen()
try:
    client = socket.create_connection(listener.getsockname())
    listener.accept()[0].sendall(b'x')
    print(client.recv(1))
except ConnectionRefusedError:
    print('refused')
";

#[test]
fn a_variable_that_is_not_understood_keeps_the_program_from_running() {
    let rack = Rack::new();
    if rack.is_bare() {
        return;
    }
    for (name, value, remedy) in [
        ("CROSSLANE_REQUIRE_LANE", "treu", "set 1"),
        ("CROSSLANE_FILTERS", "honor", "set honour"),
        ("CROSSLANE_ONLY", "http", "80,6000-6100"),
        ("CROSSLANE_NODE", "q7", "a letter"),
        ("CROSSLANE_OFF", "2", "set 1"),
    ] {
        let finished = ended(by_hand(&rack, &[(name, value)], SAYS_SO)).must_exit_with(2);
        let line = finished.stderr.strip_suffix('\n').expect("a line");
        assert!(line.starts_with(&format!("crosslane: {name}='{value}': ")) && line.contains(remedy), "{line}");
        assert!(!line.contains('\n') && finished.stdout.is_empty(), "{finished}");
    }
    let off = ended(by_hand(&rack, &[("CROSSLANE_OFF", "yes"), ("CROSSLANE_NODE", "q7")], SAYS_SO)).must_succeed();
    assert_eq!((off.stdout.as_str(), off.stderr.as_str()), ("ran\n", ""));
}

#[test]
fn a_switch_may_be_a_word_and_valid_variables_say_nothing() {
    let rack = Rack::new();
    if rack.is_bare() {
        return;
    }
    let fallback = [("CROSSLANE_ONLY", "1"), ("CROSSLANE_NODE", "b")];
    for (value, outcome) in [("no", "b'x'\n"), ("False", "b'x'\n"), ("0", "b'x'\n"), ("", "b'x'\n")] {
        let variables = [&fallback[..], &[("CROSSLANE_REQUIRE_LANE", value)]].concat();
        let finished = ended(by_hand(&rack, &variables, ECHOES_TO_ITSELF)).must_succeed();
        assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), (outcome, ""), "{value}");
    }
    for value in ["1", "true", "YES", "on"] {
        // What filters see gets no lane.
        let variables = [("CROSSLANE_FILTERS", "honour"), ("CROSSLANE_REQUIRE_LANE", value)];
        let finished = ended(by_hand(&rack, &variables, ECHOES_TO_ITSELF)).must_succeed();
        assert_eq!(finished.stdout, "refused\n", "{value}: {finished}");
        assert!(finished.stderr.contains("packet filters"), "{finished}");
    }
}

#[test]
fn a_variable_that_nothing_reads_is_warned_of_in_one_line() {
    let rack = Rack::new();
    if rack.is_bare() {
        return;
    }
    let finished = ended(by_hand(&rack, &[("CROSSLANE_REQUIRELANE", "1")], SAYS_SO)).must_succeed();
    assert_eq!(finished.stdout, "ran\n");
    assert!(finished.stderr.starts_with("crosslane: CROSSLANE_REQUIRELANE: "), "{finished}");
    assert_eq!(finished.stderr.lines().count(), 1, "{finished}");
}

#[test]
fn a_rack_that_is_named_and_not_there_is_not_made() {
    let rack = Rack::new();
    if rack.is_bare() {
        return;
    }
    let missing = rack.path().join("mistyped");
    let named = missing.to_str().expect("a name");
    let finished = ended(by_hand(&rack, &[("CROSSLANE_RACK", named)], ECHOES_TO_ITSELF)).must_succeed();
    assert_eq!(finished.stdout, "b'x'\n", "kernel TCP goes on");
    assert!(finished.stderr.starts_with(&format!("crosslane: rack '{named}' is not there; ")), "{finished}");
    assert_eq!(finished.stderr.lines().count(), 1, "{finished}");
    assert!(!missing.exists());
}

#[test]
fn the_default_directory_is_made() {
    let rack = Rack::new();
    if rack.is_bare() {
        return;
    }
    let runtime = rack.path().to_str().expect("a name");
    let variables = [("CROSSLANE_RACK", ""), ("XDG_RUNTIME_DIR", runtime)];
    let finished = ended(by_hand(&rack, &variables, ECHOES_TO_ITSELF)).must_succeed();
    assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("b'x'\n", ""));
    assert!(Path::new(runtime).join("crosslane/v1/stat").is_dir());
}
