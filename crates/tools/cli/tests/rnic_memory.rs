//! Tests of `crosslane rnic memory`, whose JSON keys scripts read.

mod command;

use command::{assert_fails, crosslane, stdout};
use serde_json::Value;

fn json(arguments: &[&str]) -> Value {
    let words: Vec<&str> = ["rnic", "memory"].iter().chain(arguments).chain(&["--json"]).copied().collect();
    let output = crosslane(&words);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    serde_json::from_str(&stdout(&output)).unwrap()
}

#[test]
fn srnic_with_10000_queue_pairs_fits_into_the_published_memory() {
    let answer = json(&["--nic", "srnic", "--qps", "10000"]);
    let bytes = |key: &str| answer[key].as_u64().unwrap_or_else(|| panic!("no {key}: {answer}"));
    let mut sum = 0;
    for (key, published) in [
        ("qpc_bytes", 2_300_000),
        ("sq_scheduler_bytes", 300_000),
        ("mtt_bytes", 1_200_000),
        ("rx_buffer_bytes", 600_000),
    ] {
        assert!((1..=published).contains(&bytes(key)), "{key} {}", bytes(key));
        assert_eq!(answer["published"][key], published);
        sum += bytes(key);
    }
    assert!((sum..=4_400_000).contains(&bytes("total_bytes")), "{}", bytes("total_bytes"));
    let rows = answer["structures"].as_array().unwrap();
    let chip = rows.iter().filter(|row| row["place"] == "chip").map(|row| row["bytes"].as_u64().unwrap());
    assert_eq!(chip.sum::<u64>(), bytes("total_bytes"));
    for row in rows {
        let provenance = row["provenance"].as_str().unwrap();
        assert!(["measured", "modelled", "published"].contains(&provenance), "{row}");
    }
}

#[test]
fn paged_contexts_fit_100000_queue_pairs_into_the_memory_of_srnic_for_10000() {
    let total = |nic, qps| json(&["--nic", nic, "--qps", qps])["total_bytes"].as_u64().unwrap();
    let (paged, srnic) = (total("srnic-paged", "100000"), total("srnic", "10000"));
    assert!(paged <= srnic && srnic <= 4_400_000, "{paged} {srnic}");
    let answer = json(&["--nic", "srnic-paged", "--qps", "100000"]);
    let parts = ["qpc_bytes", "sq_scheduler_bytes", "directory_bytes", "mtt_bytes", "rx_buffer_bytes"];
    assert!(parts.iter().all(|key| answer[key].as_u64().unwrap() > 0), "{answer}");
}

#[test]
fn every_policy_has_a_budget_and_a_table() {
    for nic in ["srnic", "srnic-paged", "irn", "go-back-n", "connection-cache"] {
        let answer = json(&["--nic", nic, "--qps", "100"]);
        assert_eq!((&answer["nic"], &answer["qps"]), (&Value::from(nic), &Value::from(100)));
        let text = stdout(&crosslane(&["rnic", "memory", "--nic", nic, "--qps", "100"]));
        assert!(text.contains("QP contexts") && text.contains("measured"), "{text}");
        assert!(text.contains(&answer["total_bytes"].to_string()), "{text}");
    }
}

#[test]
fn an_invalid_option_is_one_line_and_exit_code_2() {
    for (arguments, words) in [
        (&["--nic", "cx6"][..], &["'cx6'", "srnic", "connection-cache"][..]),
        (&["--qps", "0"], &["0", "1..="]),
        (&["--qps", "16777217"], &["16777217"]),
        (&["--depth", "65537"], &["65537"]),
    ] {
        let words_all: Vec<&str> = ["rnic", "memory"].iter().chain(arguments).copied().collect();
        assert_fails(&crosslane(&words_all), 2, words);
    }
}
