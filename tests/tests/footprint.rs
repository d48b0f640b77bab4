//! What connections cost while they carry little or nothing: counts, not times.

use std::time::Duration;

use system_tests::Rack;
use system_tests::place::{package_file, python};

const RUN_LIMIT: Duration = Duration::from_secs(120);
/// Until a connection carries bulk.
const TOUCHED_KIB_MAX: f64 = 64.0;
/// A wait that looks again every millisecond would sleep a thousand times in the second that is counted.
const IDLE_SWITCHES_MAX: f64 = 100.0;
/// Of the second that is counted: one that spins uses all of it.
const IDLE_CPU_MS_MAX: f64 = 250.0;

/// Runs fifty connections; `ROLE FACT NUMBER` by line.
fn measure() -> Vec<(String, f64)> {
    let rack = Rack::new();
    let mut command = rack.require_lane(python());
    let (finished, traffic) = rack.run_watched(command.arg(package_file("python/idle_and_memory.py")), RUN_LIMIT);
    rack.assert_over_lanes("the fifty", traffic, 1);
    let finished = finished.must_succeed();
    let fact = |line: &str| {
        let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("'{line}': {finished}"));
        (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("'{line}': {finished}")))
    };
    finished.stdout.lines().map(fact).collect()
}

/// One fact of both ends.
#[track_caller]
fn of_both(facts: &[(String, f64)], what: &str) -> Vec<f64> {
    let found: Vec<f64> =
        facts.iter().filter(|(name, _)| name.ends_with(&format!(" {what}"))).map(|(_, value)| *value).collect();
    assert_eq!(found.len(), 2, "{what} of both ends: {facts:?}");
    found
}

#[test]
fn a_connection_touches_little_memory_and_does_nothing_while_idle() {
    let facts = measure();
    for when in ["touched_kib_connected", "touched_kib_used"] {
        let touched_kib: f64 = of_both(&facts, when).iter().sum();
        assert!(touched_kib > 0.0 && touched_kib <= TOUCHED_KIB_MAX, "{when}: {facts:?}");
    }
    assert!(of_both(&facts, "idle_switches").iter().all(|count| *count <= IDLE_SWITCHES_MAX), "{facts:?}");
    assert!(of_both(&facts, "idle_cpu_ms").iter().all(|ms| *ms <= IDLE_CPU_MS_MAX), "{facts:?}");
}
