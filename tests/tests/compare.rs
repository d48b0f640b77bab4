//! `crosslane compare`: a client over kernel TCP and over lanes.

use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;
use system_tests::paths::{package_file, python, repository};
use system_tests::{Finished, Process, Rack, Server, WAIT_MAX, start_server, wait_until};

/// Makes several connections, which are busy after their round trips, and prints a line.
const CLIENT: &str = "
import socket, sys
for _ in range(3):
    with socket.create_connection(('127.0.0.1', int(sys.argv[1]))) as connection:
        for _ in range(50):
            connection.sendall(b'x')
            assert connection.recv(1) == b'x'
print('done')
";

fn server(command: impl Fn() -> Command) -> Server {
    start_server(|port| {
        let mut command = command();
        command.arg(package_file("python/echo_server.py")).arg(port.to_string());
        command
    })
}

fn compare(rack: &Rack, options: &[&str], client: &[&str]) -> Finished {
    Process::start(rack.crosslane("compare").args(options).arg("--").args(client)).wait(WAIT_MAX)
}

fn client(port: u16) -> Vec<String> {
    vec![python().to_str().expect("UTF-8").to_owned(), "-c".to_owned(), CLIENT.to_owned(), port.to_string()]
}

fn words(command: &[String]) -> Vec<&str> {
    command.iter().map(String::as_str).collect()
}

#[test]
fn both_sides_are_measured_and_the_clients_connections_are_counted() {
    let Some(rack) = Rack::with_lanes() else { return };
    let server = server(|| rack.run(&[], python()));
    let client = client(server.port);
    let text = compare(&rack, &["--rounds", "1"], &words(&client)).must_succeed().stdout;
    for part in ["KERNEL TCP", "wall time", "processor time", "3 over lanes, none over kernel TCP", "  done\n"] {
        assert!(text.contains(part), "{part:?} is missing:\n{text}");
    }
    // The variables of this command do not reach the client.
    let mut command = rack.crosslane("compare");
    command.envs([("CROSSLANE_OFF", "1"), ("CROSSLANE_REQUIRE_LANE", "1")]);
    command.args(["--rounds", "2", "--json", "--"]).args(&client);
    let finished = Process::start(&mut command).wait(WAIT_MAX).must_succeed();
    let result: Value = serde_json::from_str(&finished.stdout).expect("JSON");
    let schema = std::fs::read_to_string(repository().join("docs/compare-result.schema.json")).expect("a schema");
    let schema: Value = serde_json::from_str(&schema).expect("a schema");
    jsonschema::validate(&schema, &result).unwrap_or_else(|error| panic!("{error}\n{finished}"));
    assert_eq!(result["connections"], serde_json::json!({"lane": 6, "window": 0, "kernel": 0, "reasons": {}}));
    assert_eq!(result["kernel"]["wall_s"]["rounds"].as_array().map(Vec::len), Some(2));
    assert_eq!(result["lanes"]["output"], serde_json::json!(["done"]));
    assert!(result["lanes"]["cpu_s"]["min"].as_f64().is_some_and(|seconds| seconds > 0.0), "{finished}");
}

#[test]
fn all_processes_of_a_client_are_counted() {
    let Some(rack) = Rack::with_lanes() else { return };
    let server = server(|| rack.run(&[], python()));
    // A child by fork, and the same process after exec.
    let forks = format!("import os\nif pid := os.fork(): os.waitpid(pid, 0)\n{CLIENT}");
    let execs = "import os, socket, sys\nwith socket.create_connection(('127.0.0.1', int(sys.argv[1]))) as it:\n\
                 \x20   for _ in range(50): it.sendall(b'x') or it.recv(1)\n\
                 os.execv(sys.executable, [sys.executable, '-c', sys.argv[2], sys.argv[1]])";
    for (script, count) in [(forks.as_str(), 6), (execs, 4)] {
        let port = server.port.to_string();
        let client = [python().to_str().expect("UTF-8"), "-c", script, &port, CLIENT].map(str::to_owned);
        let finished = compare(&rack, &["--rounds", "1", "--json"], &words(&client)).must_succeed();
        let result: Value = serde_json::from_str(&finished.stdout).expect("JSON");
        assert_eq!(result["connections"]["lane"], count, "{finished}");
    }
}

#[test]
fn a_client_whose_busy_connections_get_no_lane_is_not_compared() {
    let Some(rack) = Rack::with_lanes() else { return };
    let bare = server(|| rack.bare_command(python()));
    let client = client(bare.port);
    compare(&rack, &[], &words(&client)).must_fail_in_one_line(1, &["used no lane", "no_answer", "crosslane run"]);
}

#[test]
fn a_client_of_short_connections_is_compared_and_the_report_says_so() {
    let Some(rack) = Rack::with_lanes() else { return };
    let server = server(|| rack.run(&[], python()));
    let short = client(server.port).iter().map(|word| word.replace("range(50)", "range(1)")).collect::<Vec<_>>();
    for client in [words(&short), vec!["true"]] {
        let text = compare(&rack, &["--rounds", "1"], &client).must_succeed().stdout;
        for part in ["KERNEL TCP", "wall time", "No connection used a lane", "carried three requests or more"] {
            assert!(text.contains(part), "{part:?} is missing:\n{text}");
        }
    }
    let finished = compare(&rack, &["--rounds", "1", "--json"], &words(&short)).must_succeed();
    let result: Value = serde_json::from_str(&finished.stdout).expect("JSON");
    assert_eq!(result["connections"], serde_json::json!({"lane": 0, "window": 0, "kernel": 0, "reasons": {}}));
}

#[test]
fn a_client_that_fails_is_named_with_its_code_and_its_path() {
    let Some(rack) = Rack::with_lanes() else { return };
    let script = "echo first; echo it broke >&2; exit 3";
    compare(&rack, &[], &["sh", "-c", script])
        .must_fail_in_one_line(1, &["over lanes failed", "exit status: 3", "'it broke'"]);
    let server = server(|| rack.run(&[], python()));
    let fails_by_kernel = format!("import os\nassert 'CROSSLANE_OFF' not in os.environ\n{CLIENT}");
    let port = server.port.to_string();
    compare(&rack, &[], &[python().to_str().expect("UTF-8"), "-c", &fails_by_kernel, &port])
        .must_fail_in_one_line(1, &["over kernel TCP failed", "exit status: 1", "AssertionError"]);
    compare(&rack, &[], &["no-such-client"]).must_fail_in_one_line(2, &["'no-such-client'"]);
    compare(&rack, &["--rounds", "0"], &["true"]).must_fail_in_one_line(2, &["--rounds"]);
}

#[test]
fn a_signal_ends_the_client_too() {
    let Some(rack) = Rack::with_lanes() else { return };
    let scratch = rack.scratch();
    let file = scratch.path().join("pid");
    let script = format!("echo $$ > {0}.new; mv {0}.new {0}; exec sleep 1000", file.display());
    let compare = Process::start(rack.crosslane("compare").args(["--", "sh", "-c", &script]));
    compare.wait_until("the client", WAIT_MAX, |_| file.exists());
    let pid = std::fs::read_to_string(&file).expect("a pid");
    compare.signal(Signal::INT);
    compare.wait(WAIT_MAX).must_fail_in_one_line(1, &["ended by a signal"]);
    wait_until("the end of the client", || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
        stat.map_or(true, |text| text.contains(") Z "))
    });
}
