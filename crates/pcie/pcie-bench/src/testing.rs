//! Tests and results for the unit tests of this and other crates.

use pcie::link::Link;
use pcie::result::{Bandwidth, Latency, Outcome, Provenance, SCHEMA, TestResult};
use pcie::test::{Cache, Iommu, Kind, Numa, Order, Test};

/// Returns a test of 64-byte transfers in a window of 8 KiB.
pub fn test(kind: Kind) -> Test {
    Test {
        test: kind,
        size_bytes: 64,
        window_bytes: 8192,
        host_offset_bytes: 0,
        device_offset_bytes: 0,
        order: Order::Random,
        cache: Cache::HostWarm,
        iommu: Iommu::Off,
        numa: Numa::Local,
        samples: 1000,
        seed: 1,
    }
}

/// Returns a bandwidth result for a window of 8 KiB.
pub fn bandwidth(device: &str, size_bytes: u32, gbps: f64) -> TestResult {
    let outcome = Outcome::Bandwidth(Bandwidth { gbps, mtransfers_per_s: 1.0, elapsed_ns: 1e6 });
    result(device, Test { size_bytes, ..test(Kind::BwRd) }, outcome)
}

/// Returns a latency result with a distribution of two steps.
pub fn latency(device: &str, size_bytes: u32, p50_ns: f64) -> TestResult {
    let outcome = Outcome::Latency(Latency {
        average_ns: p50_ns * 1.1,
        trimmed_average_ns: Some(p50_ns),
        min_ns: p50_ns,
        p50_ns,
        p95_ns: p50_ns,
        p99_ns: Some(p50_ns),
        p999_ns: p50_ns * 2.0,
        max_ns: p50_ns * 2.0,
        timer_cost_ns: 0.0,
        timer_step_ns: 0.0,
        cdf: vec![(p50_ns, 0.99), (p50_ns * 2.0, 1.0)],
        raw_ns: Vec::new(),
    });
    result(device, Test { size_bytes, ..test(Kind::LatRd) }, outcome)
}

fn result(device: &str, test: Test, outcome: Outcome) -> TestResult {
    TestResult {
        schema: SCHEMA.to_owned(),
        provenance: if device.starts_with("sim:") { Provenance::Modelled } else { Provenance::Published },
        device: device.to_owned(),
        description: "made for a test".to_owned(),
        link: Some(Link::PUBLISHED),
        prediction: None,
        test,
        outcome,
    }
}
