//! Tests of `crosslane rnic sim` with command lines that scripts use.

mod command;

use std::io::Write;

use command::{assert_fails, crosslane, stdout};
use serde_json::Value;

fn answer(line: &str) -> Value {
    let arguments: Vec<&str> = ["rnic", "sim"].into_iter().chain(line.split(' ')).collect();
    let output = crosslane(&arguments);
    assert!(output.status.success(), "{line}: {output:?}");
    serde_json::from_str(&stdout(&output)).unwrap()
}

fn number(answer: &Value, key: &str) -> f64 {
    let value = key.split('.').fold(answer, |value, part| &value[part]);
    value.as_f64().unwrap_or_else(|| panic!("no number {key} in {answer}"))
}

#[test]
fn every_experiment_prints_its_figures() {
    let qps = answer("qps --nic connection-cache --qps 300 --gbps 100 --seed 1 --json");
    assert!((50.0..98.0).contains(&number(&qps, "goodput_gbps")) && qps["provenance"] == "modelled");
    let chance = answer("qps --nic srnic-paged --qps 300 --turns chance --size 1024 --gbps 10 --json");
    assert!(number(&chance, "goodput_gbps") > 8.0 && number(&chance, "context_read_gbps") >= 0.0, "{chance}");
    let loss = answer("loss --transport srnic --loss 0.01 --gbps 10 --seed 1 --json");
    assert!(number(&loss, "goodput_gbps") > 8.0 && (0.0..=1.0).contains(&number(&loss, "slow_path_share")));
    let latency = answer("latency --nic srnic --size 64 --json");
    assert!(number(&latency, "p50_us") > 1.0 && number(&latency, "p99_us") >= number(&latency, "p50_us"));
    let fct = answer(
        "fct --topology leaf-spine-256 --workload storage-2019 --load 0.5 --transport srnic --seed 1 --json \
         --duration-ms 0.005",
    );
    for key in ["events", "events_per_s", "slowdown.mean", "slowdown.p50", "slowdown.p99", "memory_bytes"] {
        assert!(number(&fct, key) >= 1.0, "{key}");
    }
}

#[test]
fn a_load_above_the_capacity_of_an_oversubscribed_network_is_a_warning() {
    let of = |load| ["rnic", "sim", "fct", "--topology", "three-tier-4096", "--duration-ms", "0.001", "--load", load];
    let stderr = |load| String::from_utf8(crosslane(&of(load)).stderr).unwrap();
    let line = stderr("0.5");
    assert!(line.contains("--load 0.5 is 1.99 times what three-tier-4096 carries") && line.contains("0.25"), "{line}");
    assert_eq!(stderr("0.125"), "");
}

#[test]
fn a_scenario_file_is_simulated_and_an_invalid_one_is_named() {
    let mut file = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    let text = "version = 1\n[topology]\nkind = \"dumbbell\"\nhosts_per_side = 2\nhost_gbps = 100\nmiddle_gbps = 40\n\
                [workload]\nkind = \"permutation\"\nbytes = 20000\n";
    file.write_all(text.as_bytes()).unwrap();
    let path = file.path().to_str().unwrap().to_owned();
    let pcap = tempfile::NamedTempFile::new().unwrap();
    let answer = answer(&format!("run {path} --json --pcap {} --pcap-host 1", pcap.path().display()));
    let magic = std::fs::read(pcap.path()).unwrap();
    assert_eq!(u32::from_be_bytes(magic[..4].try_into().unwrap()), 0xa1b2_3c4d, "a pcap file in nanoseconds");
    assert_eq!((number(&answer, "flows"), number(&answer, "flows_ended")), (4.0, 4.0));
    let names = [&answer["file"], &answer["topology"], &answer["workload"], &answer["load"]];
    assert_eq!(names, [&Value::from(path.as_str()), &"dumbbell-4".into(), &"permutation".into(), &Value::Null]);
    file.write_all(b"senders = 0\nspeed = 3\n").unwrap();
    assert_fails(&crosslane(&["rnic", "sim", "run", &path]), 2, &[&path, "line 11", "speed"]);
    assert_fails(&crosslane(&["rnic", "sim", "qps", "--qps", "0"]), 2, &["qps 0; take 1 to 1048576"]);
    assert_fails(&crosslane(&["rnic", "sim", "fct", "--workload", "cache"]), 2, &["cache-follower"]);
    assert_fails(&crosslane(&["rnic", "sim", "fct", "--load", "1.5"]), 2, &["a load of 1.5; take more than 0"]);
}

#[test]
fn flows_that_do_not_finish_are_counted_and_fail_the_run() {
    let mut file = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    let text = "version = 1\nuntil = \"1 us\"\n[topology]\nkind = \"dumbbell\"\nhosts_per_side = 2\nhost_gbps = 100\n\
                middle_gbps = 40\n[workload]\nkind = \"permutation\"\nbytes = 20000\n[transport]\nack_timeout = ";
    file.write_all(text.as_bytes()).unwrap();
    let path = file.path().to_str().unwrap().to_owned();
    let run = crosslane(&["rnic", "sim", "run", &path]);
    assert_fails(&run, 2, &[&path]);
    file.write_all(b"\"67 ms\"\n").unwrap();
    let run = crosslane(&["rnic", "sim", "run", &path, "--json"]);
    let error = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.code() == Some(1) && error.contains("0 of 4 flows failed and 4 did not finish"), "{error}");
    let report: Value = serde_json::from_slice(&run.stdout).unwrap();
    let counts = ["flows", "flows_ended", "flows_failed", "flows_unfinished"].map(|key| number(&report, key));
    assert_eq!((counts, number(&report, "ack_timeout_us")), ([4.0, 0.0, 0.0, 4.0], 67_108.864));
    let run = crosslane(&["rnic", "sim", "run", &path]);
    assert!(String::from_utf8_lossy(&run.stdout).contains("0 failed, 4 did not finish"), "{run:?}");
    let refused = crosslane(&["rnic", "sim", "fct", "--ack-timeout", "1e30"]);
    assert_fails(&refused, 2, &["'1e30' is not an ACK timeout; write auto, off, or a time"]);
}
