//! `crosslane bench router`: the line that scripts use.

mod command;

use std::io::Write;

use command::{assert_fails, crosslane, stdout};
/// The keys that scripts read.
#[test]
#[ignore = "a minute or two of both cores; in ./x exam"]
fn the_benchmark_of_the_router_answers_with_the_keys_that_scripts_read() {
    let output = crosslane(&["bench", "router", "--quick", "--json"]);
    assert!(output.status.success(), "{output:?}");
    let answer: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    for key in ["core_mpps_64b", "fib_v4_mlookups_per_s", "rnic_batch_gain_64b"] {
        assert!(answer[key].as_f64().is_some_and(|number| number > 0.0), "{key}: {}", answer[key]);
    }
    let rows = answer["adaptive"].as_array().unwrap();
    assert!(!rows.is_empty());
    for row in rows {
        for key in ["size_bytes", "load_mpps", "p50_us", "p99_us", "best_fixed_batch", "best_fixed_p99_us"] {
            assert!(row[key].is_number(), "{key} in {row}");
        }
    }
}

#[test]
fn what_it_does_not_know_is_named() {
    assert_fails(&crosslane(&["bench", "router", "--seed", "x"]), 2, &["--seed"]);
    assert_fails(&crosslane(&["bench", "router", "--links", "3"]), 2, &["--links"]);
    assert_fails(&crosslane(&["bench", "router", "--mrt", "a", "--prefixes", "b"]), 2, &["--mrt", "--prefixes"]);
}

#[test]
fn a_file_of_routes_that_is_no_good_is_one_line_before_anything_is_measured() {
    let missing = crosslane(&["bench", "router", "--mrt", "/nowhere/rib"]);
    assert_fails(&missing, 2, &["/nowhere/rib: No such file"]);
    let mut list = tempfile::NamedTempFile::new().unwrap();
    list.write_all(b"10.0.0.0/8\n10.0.0.0/40\n").unwrap();
    let path = list.path().to_str().unwrap();
    let broken = crosslane(&["bench", "router", "--quick", "--prefixes", path]);
    assert_fails(&broken, 2, &[path, "line 2: '10.0.0.0/40' is not a prefix"]);
    assert_fails(&crosslane(&["bench", "router", "--mrt", path]), 2, &[path, "record 1:"]);
}
