//! The rig of `crosslane bench windows` in which programs and proxies take turns in two loops.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use system_tests::{Process, place};

/// Of each size: hand-overs take milliseconds each where others want the same processors.
const TRIPS: u64 = 50;
const LIMIT: Duration = Duration::from_secs(240);

/// That all bytes came back, and that proxies have sent them, the command looks itself.
#[test]
#[ignore = "spins on two cores, and starves what is tested beside it; in ./x exam"]
fn four_parties_in_two_loops_bring_every_byte_back_by_frames_through_partitions() {
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return;
    }
    let mut command = Command::new(place::crosslane());
    command.args(["bench", "windows", "--interleaved", "--json", "--trips", &TRIPS.to_string()]);
    let finished = Process::start(&mut command).wait(LIMIT).must_succeed();
    let report: Value = serde_json::from_str(&finished.stdout).expect("JSON");
    let measured = &report["where_cores_suffice"];
    assert_eq!((&measured["kind"], &measured["failures"]), (&"measured".into(), &Value::Array(Vec::new())));
    let rows = measured["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 12, "six sizes, asking both parties and asking whose turn it is");
    for row in rows {
        assert_eq!(row["latency"]["samples"].as_u64(), Some(TRIPS), "{row}");
        // A frame each way at least.
        assert!(row["frames_per_trip"].as_f64().is_some_and(|frames| frames >= 2.0), "{row}");
    }
}
