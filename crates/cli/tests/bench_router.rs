//! `crosslane bench router`: the line that scripts use.

mod command;

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
}
