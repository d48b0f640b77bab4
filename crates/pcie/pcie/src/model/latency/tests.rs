//! Latencies calculated by hand, and properties of all paths.

use proptest::prelude::*;

use super::*;
use crate::model::{CompletionSize, Mode};

/// Generation 3 x8: 63.01538 bits a nanosecond, so a byte takes 0.1269531 ns.
const BYTE_NS: f64 = 8.0 / 63.015_384_615_384_62;

fn model(generation: u8, lanes: u8) -> Model {
    let (generation, lanes) = (Generation::new(generation).unwrap(), Lanes::new(lanes).unwrap());
    Model::new(Mode::Corrected, Link { generation, lanes, ..Link::PUBLISHED }, CompletionSize::Mps).unwrap()
}

/// One link of 1 m, root complex 10, memory 30 to read and 5 to write.
fn path(switch: Option<PcieSwitch>) -> PciePath {
    let link = LinkHop { length_m: 1.0, ns_per_m: 7.0, generation: None, lanes: None, switch: None };
    let path = PciePath {
        name: "test".to_owned(),
        source: "none".to_owned(),
        device_ns: 3.0,
        links: vec![link],
        root_complex_ns: 10.0,
        memory_read_ns: 30.0,
        memory_write_ns: 5.0,
    };
    match switch {
        Some(switch) => path.with_switches(1, &switch),
        None => path,
    }
}

#[track_caller]
fn assert_ns(latency: &LatencyBreakdown, expected_ns: f64) {
    assert!((latency.latency_ns - expected_ns).abs() < 1e-6, "{latency:?} is not {expected_ns}");
}

#[test]
fn a_small_read_takes_a_request_a_completion_and_the_constants() {
    // 24 bytes there, 20 + 64 back.
    let latency = path(None).read_latency(&model(3, 8), 64, 0).unwrap();
    assert_ns(&latency, 3.0 + 24.0 * BYTE_NS + 7.0 + 10.0 + 30.0 + 84.0 * BYTE_NS + 7.0);
    let parts: Vec<(&str, &str)> = latency.parts.iter().map(|part| (part.hop.as_str(), part.what)).collect();
    assert_eq!(
        parts,
        [
            ("device", "processing"),
            ("link 1", "header of the last request"),
            ("link 1", "propagation"),
            ("root complex", "processing"),
            ("memory", "read"),
            ("link 1", "header of the last completion"),
            ("link 1", "data, and packets ahead"),
            ("link 1", "propagation"),
        ]
    );
}

#[test]
fn a_large_read_waits_for_its_own_packets_only() {
    // Two requests; four completions of 256 back to back, once the first request is answered.
    let latency = path(None).read_latency(&model(3, 8), 1024, 0).unwrap();
    assert_ns(&latency, 3.0 + 24.0 * BYTE_NS + 7.0 + 40.0 + 4.0 * 276.0 * BYTE_NS + 7.0);
}

#[test]
fn a_write_takes_its_packets_and_the_constants() {
    let latency = path(None).write_latency(&model(3, 8), 512, 0).unwrap();
    assert_ns(&latency, 3.0 + 2.0 * 280.0 * BYTE_NS + 7.0 + 10.0 + 5.0);
}

#[test]
fn a_read_behind_a_write_waits_for_it_at_memory() {
    // The write is visible at 3 + 88 B + 7 + 15; the request behind it reaches memory earlier, at 3 + 112 B + 7 + 10.
    let latency = path(None).write_read_latency(&model(3, 8), 64, 0).unwrap();
    assert_ns(&latency, 3.0 + 88.0 * BYTE_NS + 7.0 + 15.0 + 30.0 + 84.0 * BYTE_NS + 7.0);
}

#[test]
fn switches_store_and_forward_or_cut_through() {
    let store = PcieSwitch { forward_ns: 100.0, cut_through: false };
    let cut = PcieSwitch { forward_ns: 100.0, cut_through: true };
    let constants_ns = 3.0 + 7.0 + 100.0 + 7.0 + 10.0 + 5.0;
    // Store-and-forward: both packets on the first link, the last one again on the second.
    let latency = path(Some(store)).write_latency(&model(3, 8), 512, 0).unwrap();
    assert_ns(&latency, constants_ns + 3.0 * 280.0 * BYTE_NS);
    // Cut-through: the second link lags by one header.
    let latency = path(Some(cut)).write_latency(&model(3, 8), 512, 0).unwrap();
    assert_ns(&latency, constants_ns + 2.0 * 280.0 * BYTE_NS + 24.0 * BYTE_NS);
}

#[test]
fn a_slower_second_link_is_the_bottleneck() {
    let mut path = path(Some(PcieSwitch { forward_ns: 100.0, cut_through: false }));
    path.links[1].lanes = Some(Lanes::new(4).unwrap());
    let latency = path.write_latency(&model(3, 8), 512, 0).unwrap();
    let constants_ns = 3.0 + 7.0 + 100.0 + 7.0 + 10.0 + 5.0;
    assert_ns(&latency, constants_ns + 280.0 * BYTE_NS + 2.0 * 280.0 * 2.0 * BYTE_NS);
}

/// Generation 6 x16: 1024 bits a nanosecond; a flit of 256 bytes takes 2 ns, however much of it is used. A read of 64
/// bytes is a flit there and one back; of 256 bytes, two back, for 12 + 256 bytes.
#[test]
fn a_packet_arrives_with_its_last_flit() {
    let constants_ns = 3.0 + 7.0 + 40.0 + 7.0;
    assert_ns(&path(None).read_latency(&model(6, 16), 64, 0).unwrap(), constants_ns + 4.0);
    assert_ns(&path(None).read_latency(&model(6, 16), 256, 0).unwrap(), constants_ns + 6.0);
    // Two packets share flits: 2 * (16 + 256) bytes in three of 236.
    assert_ns(&path(None).write_latency(&model(6, 16), 512, 0).unwrap(), 3.0 + 6.0 + 7.0 + 15.0);
}

#[test]
fn invalid_paths_are_refused() {
    let direct = DIRECT;
    assert_eq!(PciePath::direct().links.len(), 1);
    for (text, words) in [
        (direct.replace("length_m = 0.25", "length_m = \"25 ns\""), &["links[0].length_m", "'25 ns'", "meters"][..]),
        (direct.replace("device_ns = 0", "device_ns = \"1 m\""), &["device_ns", "'1 m'", "nanoseconds"]),
        (direct.replace("device_ns = 0", "device_us = 0"), &["device_us", "expected"]),
        (direct.replace("[[links]]\nlength_m = 0.25", "links = []"), &["links", "at least one"]),
        (format!("{direct}[[links]]\nlength_m = 1\n"), &["links[0]", "no switch"]),
        (format!("{direct}[links.switch]\nforward_ns = 1\n"), &["links[0].switch", "leave it out"]),
        (format!("{direct}lanes = 3\n"), &["links[0].lanes", "3 lanes", "1, 2, 4"]),
        (direct.replace("device_ns = 0", "device_ns = 1e30"), &["device_ns", "1000000000", "out of range"]),
        (direct.replace("length_m = 0.25", "length_m = 1e6"), &["links[0].length_m", "1000000", "0 to 1000"]),
        (direct.replace("length_m = 0.25", "length_m = 1\nns_per_m = 1e3"), &["links[0].ns_per_m", "1000", "100"]),
    ] {
        let text = match text.contains("links = []") {
            true => format!("links = []\n{}", text.replace("links = []", "")),
            false => text,
        };
        let error = PciePath::parse("mine.toml", &text).unwrap_err().to_string();
        for word in ["mine.toml"].iter().chain(words) {
            assert!(error.contains(word), "{word:?} in {error:?}");
        }
    }
}

#[test]
fn the_example_in_the_documentation_is_a_valid_path() {
    let name = "name = \"behind a switch\"";
    let text = crate::example(include_str!("../../../../../../docs/pcie-model.md"), name);
    assert_eq!(PciePath::parse("docs", &text).unwrap().links.len(), 2);
}

/// Found by the property below: completions arrive at the second link exactly when it becomes free.
#[test]
fn rounding_does_not_cost_a_flit() {
    let path = path(None).with_switches(2, &PcieSwitch { forward_ns: 188.058505537679, cut_through: false });
    let model = model(7, 1);
    let read = path.read_latency(&model, 241, 1072).unwrap();
    let both = path.write_read_latency(&model, 241, 1072).unwrap();
    assert!(both.latency_ns > read.latency_ns, "{} and {}", both.latency_ns, read.latency_ns);
}

proptest! {
    #[test]
    fn parts_add_up_and_nothing_is_faster_than_its_bytes(
        generation in 1..=7_u8, lanes in prop::sample::select(vec![1, 4, 16]), size in 1..20_000_u64,
        offset in 0..4096_u64, switches in 0..3_usize, forward_ns in 0.0..200.0_f64, cut_through: bool
    ) {
        let model = model(generation, lanes);
        let path = path(None).with_switches(switches, &PcieSwitch { forward_ns, cut_through });
        let read = path.read_latency(&model, size, offset).unwrap();
        let write = path.write_latency(&model, size, offset).unwrap();
        let both = path.write_read_latency(&model, size, offset).unwrap();
        for latency in [&read, &write, &both] {
            let sum_ns: f64 = latency.parts.iter().map(|part| part.ns).sum();
            prop_assert!((sum_ns - latency.latency_ns).abs() < 1e-6);
            prop_assert!(latency.parts.iter().all(|part| part.ns >= 0.0));
            prop_assert!(latency.latency_ns > size as f64 * 8.0 / model.raw_gbps());
        }
        prop_assert!(both.latency_ns > write.latency_ns && both.latency_ns > read.latency_ns);
        let stored = path_like(&path, false).write_latency(&model, size, offset).unwrap();
        prop_assert!(write.latency_ns <= stored.latency_ns + 1e-6);
    }
}

fn path_like(path: &PciePath, cut_through: bool) -> PciePath {
    let mut path = path.clone();
    for switch in path.links.iter_mut().filter_map(|link| link.switch.as_mut()) {
        switch.cut_through = cut_through;
    }
    path
}
