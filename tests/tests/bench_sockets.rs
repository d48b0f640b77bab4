//! `crosslane bench sockets` and `overhead` over real lanes: checks which values they measure, not the times.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use system_tests::{Process, Rack, paths};

const LIMIT: Duration = Duration::from_secs(240);

/// The report of a run in which every measurement succeeded.
fn report(rack: &Rack, arguments: &[&str]) -> Value {
    let mut command = Command::new(paths::crosslane());
    command.args(["bench", "sockets", "--quick", "--json"]).args(arguments).env("CROSSLANE_RACK", rack.path());
    let finished = Process::start(&mut command).wait(LIMIT).must_succeed();
    let report: Value = serde_json::from_str(&finished.stdout).expect("JSON");
    assert_eq!((&report["kind"], &report["failures"]), (&"measured".into(), &Value::Array(Vec::new())));
    report
}

fn rows<'a>(report: &'a Value, transport: &'a str) -> impl Iterator<Item = &'a Value> {
    report["rows"].as_array().expect("rows").iter().filter(move |row| row["transport"] == transport)
}

#[test]
fn connections_of_every_client_are_counted_over_every_transport() {
    let options = ["--only", "connects,connects-epoll,connects-at-once", "--clients", "7", "--connections", "3"];
    let report = report(&Rack::new(), &[&options[..], &["--rounds", "2"]].concat());
    for transport in ["kernel_tcp", "af_unix", "crosslane"] {
        let found: Vec<&Value> = rows(&report, transport).collect();
        assert_eq!(found.len(), 3, "{transport}: one after the other, by epoll, at once");
        assert!(found.iter().all(|row| row["rate_times_kernel_tcp"].is_number() && row["rounds"] == 2), "{found:?}");
        let at_once = found.iter().find(|row| row["experiment"] == "connects_at_once").expect("at once");
        assert_eq!(at_once["latency"]["samples"], 2 * 7 * 3, "{at_once}");
    }
}

#[test]
fn two_builds_of_the_library_are_compared_round_by_round() {
    let rack = Rack::new();
    let (library, baseline) = (paths::library(), rack.scratch());
    let baseline = baseline.path().join("libcrosslane.so");
    paths::copy_program(&library, &baseline);
    let libraries = ["--library", library.to_str().expect("text"), "--baseline", baseline.to_str().expect("text")];
    let options = ["--only", "message-rate,connects-at-once", "--clients", "3", "--connections", "2"];
    let report = report(&rack, &[&options[..], &libraries].concat());
    assert_eq!(rows(&report, "baseline").count(), 4, "three sizes of messages, and connections");
    assert_eq!(report["rows"].as_array().map(Vec::len), Some(8), "the two builds alone");
    for row in rows(&report, "crosslane") {
        let ratio = &row["time_over_baseline"];
        let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{row}"));
        let (low, high) = (number(&ratio["interval"][0]), number(&ratio["interval"][1]));
        assert!(low <= number(&ratio["median"]) && number(&ratio["median"]) <= high, "{row}");
        assert_eq!(ratio["rounds"], 6, "{row}");
    }
}

#[test]
fn calls_of_a_program_without_lanes_are_measured_with_the_library_and_without_it() {
    let rack = Rack::new();
    let bench = |arguments: &[&str]| {
        let mut command = Command::new(paths::crosslane());
        command.args(["bench", "overhead", "--quick", "--rounds", "1"]).args(arguments);
        Process::start(command.env("CROSSLANE_RACK", rack.path())).wait(LIMIT)
    };
    let report: Value = serde_json::from_str(&bench(&["--json"]).must_succeed().stdout).expect("JSON");
    assert_eq!((&report["schema"], &report["kind"]), (&"crosslane.bench.overhead/1".into(), &"measured".into()));
    let rows = report["rows"].as_array().expect("rows");
    for call in ["connect", "connect_refused", "listen", "accept", "close", "fork", "spawn", "run_program"] {
        let row = rows.iter().find(|row| row["call"] == call).unwrap_or_else(|| panic!("{call} in {report}"));
        assert!(row["with_ns"].as_f64() > Some(0.0) && row["without_ns"].as_f64() > Some(0.0), "{row}");
        assert!(row["is_within"].is_boolean() && row["ratio"]["median"].is_number(), "{row}");
    }
    let text = bench(&[]).must_succeed().stdout;
    assert!(text.contains("connect refused") && text.contains("95% interval"), "{text}");
    bench(&["--library", "/no/such.so"]).must_fail_in_one_line(2, &["--library", "/no/such.so"]);
}
