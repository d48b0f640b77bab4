//! Tests of `crosslane bench rnic`.

use std::process::Command;

fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_crosslane")).args(["bench", "rnic"]).args(arguments).output();
    let output = output.expect("the command runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_report_has_every_experiment() {
    let (code, out, error) = run(&["--quick", "--rounds", "1", "--json"]);
    assert_eq!(code, Some(0), "{error}");
    let report: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!((&report["schema"], &report["rounds"]), (&"crosslane.bench.rnic/1".into(), &1.into()));
    let rows = report["rows"].as_array().expect("rows");
    for experiment in ["round_trips", "round_trips_beside_busy_thread", "writes"] {
        assert!(rows.iter().any(|row| row["experiment"] == experiment), "{experiment} in {out}");
    }
}

#[test]
fn wrong_use_is_one_line_with_a_remedy() {
    for arguments in [&["--bytes", "0"][..], &["--bytes", "65001"], &["--write-bytes", "262145"], &["--rounds", "0"]] {
        let (code, _, error) = run(arguments);
        assert_eq!((code, error.lines().count()), (Some(2), 1), "{error}");
    }
}
