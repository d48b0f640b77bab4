//! The figures of the published NICs, their corrections, and invalid files.

use super::*;
use crate::link::{Generation, Lanes, Link};
use crate::model::CompletionSize;

const TOLERANCE_GBPS: f64 = 1e-4;

fn model(mode: Mode) -> Model {
    Model::new(mode, Link::PUBLISHED, CompletionSize::Mps).unwrap()
}

fn nic(name: &str) -> NicModel {
    NicModel::built_in(name).unwrap()
}

fn figures(name: &str, model: &Model, packet_bytes: u64) -> [f64; 3] {
    let bandwidth = nic(name).bandwidth(model, packet_bytes, 0).unwrap();
    [bandwidth.bidirectional_gbps, bandwidth.tx_gbps, bandwidth.rx_gbps]
}

#[track_caller]
fn assert_figures(found: [f64; 3], expected: [f64; 3]) {
    for (found, expected) in found.into_iter().zip(expected) {
        assert!((found - expected).abs() <= TOLERANCE_GBPS, "{found} is not {expected}");
    }
}

#[test]
fn published_bandwidth_of_the_nics() {
    for (packet_bytes, simple, kernel, dpdk) in [
        (60, [12.5836, 20.6731, 19.7334], [17.6344, 23.2313, 27.1600], [20.6485, 35.3046, 28.0088]),
        (64, [13.2308, 21.5385, 20.5813], [18.4356, 24.1344, 28.0919], [21.5135, 36.1868, 28.9424]),
        (256, [31.3951, 40.7102, 39.8347], [37.7109, 42.8900, 45.7538], [40.6878, 50.3389, 46.3078]),
        (1024, [44.3668, 49.7265, 48.9059], [47.1570, 50.5104, 50.9281], [48.2609, 52.8112, 51.0983]),
        (1514, [46.1736, 50.8929, 50.0786], [48.1803, 51.4456, 51.4947], [48.9540, 53.0373, 51.6122]),
    ] {
        let model = model(Mode::Published);
        assert_figures(figures("simple", &model, packet_bytes), simple);
        assert_figures(figures("kernel", &model, packet_bytes), kernel);
        assert_figures(figures("dpdk", &model, packet_bytes), dpdk);
    }
}

/// The formulas of the published program for batches of 160 packets, worked with W = R = 24 and C = 20 (64-bit
/// addresses) for packets of 64 bytes; h = 1 under Linux.
///
/// Transmit, received: (4+24)160 + (3*20+640)160/40 + (20+64)160 + 24*160 = 24 560; sent: 2*24*160/40 + 24*160 +
/// (24+128)160/8 + (4+24)160/32 + (4+20)160 = 11 052. Receive, received: (4+24)160/32 + (16+20)160 + 24*160/8 = 6 380;
/// sent: (24+64)160 + (16+24)160 + (4+24)160/32 + (4+20)160/8 = 21 100.
#[test]
fn published_traffic_of_a_batch() {
    let (nic, model) = (nic("kernel"), model(Mode::Published));
    let packet = model.span(64, 0).unwrap();
    for (direction, received_bytes, sent_bytes) in
        [(Direction::Transmit, 24_560.0, 11_052.0), (Direction::Receive, 6_380.0, 21_100.0)]
    {
        let traffic = nic.traffic(&model, direction, packet);
        assert!((traffic.received_bytes * 160.0 - received_bytes).abs() < 1e-9, "{traffic:?}");
        assert!((traffic.sent_bytes * 160.0 - sent_bytes).abs() < 1e-9, "{traffic:?}");
    }
}

/// With the request for the receive descriptor included, the simple NIC sends 100 bytes to transmit and 204 to receive
/// 64: 64 / 304 of the packet bandwidth. With the published packet bandwidth of 57.8848 that is 12.1863, with the
/// corrected one of 62.2307 it is 13.1012; 256 bytes: 256 / (100 + 396) = 256 / 496, so 29.8760 and 32.1191.
#[test]
fn corrected_traffic_includes_the_request_for_the_receive_descriptor() {
    let (published, corrected) = (model(Mode::Published), model(Mode::Corrected));
    for (packet_bytes, with_published_link, with_corrected_link) in [(64, 12.1863, 13.1012), (256, 29.8760, 32.1191)] {
        let bidirectional_gbps = figures("simple", &corrected, packet_bytes)[0];
        assert!((bidirectional_gbps - with_corrected_link).abs() <= TOLERANCE_GBPS, "{bidirectional_gbps}");
        let rescaled_gbps = bidirectional_gbps * published.tlp_gbps() / corrected.tlp_gbps();
        assert!((rescaled_gbps - with_published_link).abs() <= TOLERANCE_GBPS, "{rescaled_gbps}");
    }
}

/// The other two published NICs overwrite the same bytes: 24 a packet, here of 64 bytes.
#[test]
fn corrected_traffic_of_batches_includes_it_too() {
    for name in ["kernel", "dpdk"] {
        let sent_bytes =
            |model: Model| nic(name).traffic(&model, Direction::Receive, model.span(64, 0).unwrap()).sent_bytes;
        assert_eq!(sent_bytes(model(Mode::Corrected)) - sent_bytes(model(Mode::Published)), 24.0, "{name}");
    }
}

#[test]
fn published_frames_that_sustain_40_gbps() {
    for (name, frame_bytes) in [("simple", 584), ("kernel", 300), ("dpdk", 182)] {
        let found = nic(name).smallest_frame(&model(Mode::Published), 40.0, FRAME_BYTES_MAX).unwrap();
        assert_eq!(found, Some(frame_bytes), "{name}");
    }
    // 64 bytes at 100 Gb/s never fit through 57.9.
    assert_eq!(nic("dpdk").smallest_frame(&model(Mode::Published), 100.0, FRAME_BYTES_MAX), Ok(None));
}

#[test]
fn frames_from_the_smallest_on_are_sustained_and_the_one_before_is_not() {
    let model = model(Mode::Corrected);
    for name in NicModel::built_in_names() {
        let nic = nic(name);
        let smallest = nic.smallest_frame(&model, 40.0, 1518).unwrap().unwrap();
        let is_sustained = |frame_bytes: u64| {
            // On the wire a frame takes 20 bytes more than its size, on PCIe 4 bytes less.
            let packet_bytes = frame_bytes - 4;
            let needed_gbps = 40.0 * packet_bytes as f64 / (frame_bytes + 20) as f64;
            nic.bandwidth(&model, packet_bytes, 0).unwrap().bidirectional_gbps >= needed_gbps
        };
        assert!((smallest..=1518).all(is_sustained), "{name}");
        assert!(smallest == FRAME_BYTES_MIN || !is_sustained(smallest - 1), "{name}");
    }
}

fn x16(generation: u8) -> Model {
    let link =
        Link { generation: Generation::new(generation).unwrap(), lanes: Lanes::new(16).unwrap(), ..Link::PUBLISHED };
    Model::new(Mode::Corrected, link, CompletionSize::Mps).unwrap()
}

#[track_caller]
fn assert_traffic(name: &str, generation: u8, packet_bytes: u64, transmit: [f64; 2], receive: [f64; 2]) {
    let model = x16(generation);
    let packet = model.span(packet_bytes, 0).unwrap();
    for (direction, expected) in [(Direction::Transmit, transmit), (Direction::Receive, receive)] {
        let found = nic(name).traffic(&model, direction, packet);
        let found = [found.sent_bytes, found.received_bytes];
        let is_near = found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-9);
        assert!(is_near, "{name} {direction:?} {packet_bytes} B: {found:?}, not {expected:?}");
    }
}

/// Generation 5: W = R = 24, C = 20, MPS 256, MRRS 512. 60 bytes and their length fill 64: a descriptor of 960 bytes
/// has room for 14 of them behind its 32, so 928 bytes: 2 requests, 4 completions. Transmit, sent: 2*24/14 +
/// (64+24)/32; received: (928+4*20)/14 + (8+24)/64. Receive with `mlx5-dpdk`, sent: 24/4 + (60+24) + (128+24)/8;
/// received: (64+20)/4; with `mlx5-mprq`, sent: 24/64 + (60+24) + (64+24)/7; received: (32+20)/64.
#[test]
fn traffic_of_small_packets_in_descriptors() {
    let transmit = [24.0 / 7.0 + 2.75, 72.5];
    assert_traffic("mlx5-dpdk", 5, 60, transmit, [109.0, 21.0]);
    assert_traffic("mlx5-mprq", 5, 60, transmit, [84.375 + 88.0 / 7.0, 0.8125]);
}

/// Flits: W = R = 16, C = 12. Transmit, sent: 2*16/14 + (64+16)/32; received: (928+4*12)/14 + (8+16)/64. Receive, sent:
/// 16/64 + (60+16) + (64+16)/7; received: (32+12)/64.
#[test]
fn traffic_of_small_packets_in_flits() {
    assert_traffic("mlx5-mprq", 6, 60, [16.0 / 7.0 + 2.5, 488.0 / 7.0 + 0.375], [76.25 + 80.0 / 7.0, 0.6875]);
}

/// 268 bytes and their length have 272: 3 fit. 269 bytes have an address of 16 bytes in a descriptor of 32 + 32 * 16 =
/// 544 bytes, which takes 2 requests and 3 completions, and are read by a request of their own, which 2 completions of
/// 256 and 16 bytes answer (whole double words). The descriptor of 848 bytes takes 2 requests and 4 completions.
#[test]
fn traffic_changes_at_the_largest_packet_within_a_descriptor() {
    let model = x16(5);
    let transmit = |bytes| nic("mlx5-dpdk").traffic(&model, Direction::Transmit, model.span(bytes, 0).unwrap());
    let near = |found: PacketTraffic, sent_bytes: f64, received_bytes: f64| {
        let is_near =
            (found.sent_bytes - sent_bytes).abs() < 1e-9 && (found.received_bytes - received_bytes).abs() < 1e-9;
        assert!(is_near, "{found:?}, not {sent_bytes} and {received_bytes}");
    };
    near(transmit(268), 48.0 / 3.0 + 2.75, (848.0 + 80.0) / 3.0 + 0.5);
    near(transmit(269), 48.0 / 32.0 + 24.0 + 2.75, 604.0 / 32.0 + (272.0 + 40.0) + 0.5);
}

/// Transmit, sent: 24 (descriptor) + 24 (packet) + 88 (completion) + (88 + 28) / 32; received: 32 (doorbell) + 68
/// (descriptor) + 80 (packet) + 32/32. Receive, sent: 84 (packet) + 88 (completion) + 116/32 + (24 + 2*24 + 88) / 128
/// (640 bytes take 2 requests and 3 completions); received: (52 + 700 + 32) / 128 + 1.
#[test]
fn traffic_of_the_kernel_has_a_doorbell_and_a_completion_for_each_packet() {
    assert_traffic("mlx5-kernel", 5, 60, [139.625, 181.0], [176.875, 7.125]);
}

/// 400 Gb/s carry 60 of each 84 bytes: 285.7 Gb/s of packets. Generation 5 x16 leaves 499.81 for packets of PCIe, and
/// `mlx5-mprq` sends 103.125 bytes for each both ways (the sums above): 290.8. A byte more needs 287.1, but sends
/// another double word, and a descriptor has 11 packets of 80 bytes instead of 14 of 64: 84.375 + 4 + 88/7 + 48/11 +
/// 2.75 = 108.06 bytes for 61, 282.1 Gb/s. At 800 Gb/s, 571.4 and 574.1 are needed: generation 6 leaves 941.5, and 60
/// bytes send 92.46: 610.9; 61 send the byte enables too: 76.25 + 8 + 80/7 + 32/11 + 2.5 = 101.09: 568.1.
#[test]
fn compressed_completions_and_shared_descriptors_fill_400_and_800_gbps_with_small_frames() {
    let mprq = nic("mlx5-mprq");
    for (generation, line_gbps, packet_bytes, sent_bytes) in [
        (5, 400.0, 60, 103.125),
        (5, 400.0, 61, 84.375 + 4.0 + 88.0 / 7.0 + 48.0 / 11.0 + 2.75),
        (6, 800.0, 60, 76.25 + 80.0 / 7.0 + 16.0 / 7.0 + 2.5),
        (6, 800.0, 61, 76.25 + 8.0 + 80.0 / 7.0 + 32.0 / 11.0 + 2.5),
    ] {
        let model = x16(generation);
        let found = mprq.bandwidth(&model, packet_bytes, 0).unwrap().bidirectional_gbps;
        let expected = packet_bytes as f64 * model.tlp_gbps() / sent_bytes;
        assert!((found - expected).abs() < 1e-9, "{generation}, {packet_bytes} B: {found}, not {expected}");
        let is_filled = found >= line_packet_gbps(Mode::Corrected, line_gbps, packet_bytes);
        assert_eq!(is_filled, packet_bytes == 60, "{generation}, {packet_bytes} B: {found}");
    }
}

#[test]
fn smallest_frames_at_400_and_800_gbps() {
    for (generation, line_gbps, mprq, dpdk, kernel) in [
        (5, 400.0, Some(70), Some(302), None),
        (6, 400.0, Some(64), Some(64), Some(130)),
        (5, 800.0, None, None, None),
        (6, 800.0, Some(70), Some(322), None),
        (7, 800.0, Some(64), Some(64), Some(130)),
    ] {
        let smallest = |name| nic(name).smallest_frame(&x16(generation), line_gbps, 1518).unwrap();
        let found = ["mlx5-mprq", "mlx5-dpdk", "mlx5-kernel"].map(smallest);
        assert_eq!(found, [mprq, dpdk, kernel], "generation {generation}, {line_gbps} Gb/s");
    }
}

#[test]
fn ethernet_frames_have_20_bytes_between_them() {
    // 64 bytes of which 60 cross PCIe take 84 on the wire; the published program uses 60 + 20, at least 84.
    assert_eq!(line_packet_gbps(Mode::Corrected, 84.0, 60), 60.0);
    assert_eq!(line_packet_gbps(Mode::Published, 84.0, 60), 60.0);
    assert_eq!(line_packet_gbps(Mode::Corrected, 124.0, 100), 100.0);
    assert_eq!(line_packet_gbps(Mode::Published, 120.0, 100), 100.0);
}

const PACKETS: &str = r#"
name = "mine"
description = "packets alone"
source = "none"
[[transmit]]
step = "packet"
bytes = "frame"
[[receive]]
step = "packet"
bytes = "frame"
"#;

/// A packet within a descriptor.
const INLINE: &str = "step = \"descriptor-fetch\"\nbytes = \"frame\"\n";

#[test]
fn a_nic_with_packets_alone_reaches_the_bandwidth_of_the_link() {
    for mode in [Mode::Published, Mode::Corrected] {
        let (nic, model) = (NicModel::parse("mine.toml", PACKETS).unwrap(), model(mode));
        for packet_bytes in [64, 1500] {
            let (card, link) =
                (nic.bandwidth(&model, packet_bytes, 0).unwrap(), model.bandwidth(packet_bytes, 0).unwrap());
            assert_eq!(card.rx_gbps, link.write_gbps);
            assert_eq!(card.tx_gbps, link.read_gbps);
            assert_eq!(card.bidirectional_gbps, link.readwrite_gbps);
        }
    }
}

#[test]
fn every_kind_of_step_has_its_traffic() {
    let model = model(Mode::Corrected);
    let packet = model.span(64, 0).unwrap();
    for (kind, sent_bytes, received_bytes) in [
        ("doorbell", 0.0, 4.0 * 2.0 + 24.0),
        ("pointer-read", 20.0 + 8.0, 24.0),
        ("descriptor-fetch", 24.0, 20.0 + 8.0),
        ("descriptor-write-back", 24.0 + 8.0, 0.0),
        ("pointer-write-back", 24.0 + 8.0, 0.0),
        ("interrupt", 24.0 + 8.0, 0.0),
    ] {
        let text = format!("{PACKETS}[[receive]]\nstep = \"{kind}\"\nbytes = 4\nitems = 2\npackets = 1\n");
        let nic = NicModel::parse("mine.toml", &text).unwrap();
        assert_eq!(nic.receive[1].step.name(), kind);
        let traffic = nic.receive[1].traffic(&model, Direction::Receive, packet);
        assert_eq!(traffic, PacketTraffic { sent_bytes, received_bytes }, "{kind}");
    }
}

#[test]
fn invalid_files_are_refused() {
    let with = |step: &str| format!("{PACKETS}[[receive]]\n{step}\n");
    for (text, words) in [
        (with("step = \"doorbell\"\nbytes = \"4 ns\""), &["line 13", "receive[1].bytes", "'4 ns'", "\"frame\""][..]),
        (with("step = \"doorbell\"\nbytes = 0"), &["receive[1].bytes", "'0'", "1 to 4096"]),
        (with("step = \"doorbell\"\nbytes = 5000"), &["receive[1].bytes", "'5000'", "1 to 4096"]),
        (with("step = \"doorbel\"\nbytes = 4"), &["line 12", "receive[1].step", "doorbel", "pointer-read"]),
        (with("step = \"doorbell\"\nbytes = 4\npackets = 0"), &["receive[1].packets", "'0'", "1 to 65536"]),
        (with("step = \"doorbell\"\nbytes = 4\nitems = -1"), &["receive[1].items", "-1"]),
        (with("step = \"packet\"\nbytes = \"frame\"\nitems = 2"), &["receive[1].items", "'2'", "leave it out"]),
        (with("step = \"doorbell\"\nbytes = 4\nbatch = 4"), &["line 14", "batch", "expected", "items"]),
        (with("step = \"doorbell\"\nbytes = 4\nalign_bytes = 0"), &["align_bytes", "'0'", "1 to 4096"]),
        (with("step = \"doorbell\"\nbytes = 4\nprefix_bytes = 4097"), &["prefix_bytes", "'4097'", "0 to 4096"]),
        (with("step = \"doorbell\"\nbytes = 4\npacket_bytes_max = 0"), &["packet_bytes_max", "'0'", "1 or more"]),
        (with("step = \"descriptor-fetch\"\nbytes = \"frame\"\nitems = 2"), &["items", "access_bytes_max"]),
        (with(&format!("{INLINE}items = 2\naccess_bytes_max = 900")), &["access_bytes_max", "packet_bytes_max"]),
        (
            with(&format!("{INLINE}header_bytes = 4\npacket_bytes_max = 64\naccess_bytes_max = 67")),
            &["access_bytes_max", "'67'", "68 or more"],
        ),
        (with(&format!("{INLINE}packet_bytes_max = 64\naccess_bytes_max = 9000")), &["'9000'", "at most 4096"]),
        (
            with(&format!("{INLINE}packet_bytes_max = 64\naccess_bytes_max = 900\npackets = 2")),
            &["packets", "leave one out"],
        ),
        (
            PACKETS.replacen("bytes = \"frame\"", "bytes = \"frame\"\npacket_bytes_max = 99", 1),
            &["transmit", "if it has 100 bytes"],
        ),
        (
            PACKETS.replacen("bytes = \"frame\"", "bytes = \"frame\"\npacket_bytes_min = 2", 1),
            &["transmit", "if it has 1 bytes"],
        ),
        (with("step = \"doorbell\""), &["receive[1]", "missing", "bytes"]),
        (
            PACKETS.replacen("[[transmit]]\nstep = \"packet\"\nbytes = \"frame\"", "transmit = []", 1),
            &["transmit", "frame"],
        ),
        ("name = 3".to_owned(), &["line 1", "name", "3"]),
    ] {
        let error = NicModel::parse("mine.toml", &text).unwrap_err().to_string();
        assert_eq!(error.lines().count(), 1);
        for word in ["mine.toml"].iter().chain(words) {
            assert!(error.contains(word), "{word:?} in {error:?}");
        }
    }
}

#[test]
fn the_example_in_the_documentation_is_a_valid_nic() {
    let text = crate::example(include_str!("../../../../../../docs/pcie-model.md"), "name = \"mine\"");
    let nic = NicModel::parse("docs", &text).unwrap();
    assert_eq!((nic.transmit.len(), nic.transmit[0].packets()), (2, 40));
}
