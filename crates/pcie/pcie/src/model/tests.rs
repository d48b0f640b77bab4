//! The figures of the published model, corrected figures calculated by hand, and properties of all models.

use proptest::prelude::*;

use super::*;
use crate::link::{Generation, Lanes, ReadBoundary, TransferLimit};

/// Accepted difference from the published figures.
const TOLERANCE_GBPS: f64 = 1e-4;

fn link(generation: u8, lanes: u8, mps_bytes: u32) -> Link {
    Link {
        generation: Generation::new(generation).unwrap(),
        lanes: Lanes::new(lanes).unwrap(),
        mps_bytes: TransferLimit::new(mps_bytes).unwrap(),
        ..Link::PUBLISHED
    }
}

fn published(link: Link) -> Model {
    Model::new(Mode::Published, link, CompletionSize::Mps).unwrap()
}

fn corrected(link: Link) -> Model {
    Model::new(Mode::Corrected, link, CompletionSize::Mps).unwrap()
}

fn figures(model: &Model, size_bytes: u64) -> [f64; 3] {
    let bandwidth = model.bandwidth(size_bytes, 0).unwrap();
    [bandwidth.write_gbps, bandwidth.read_gbps, bandwidth.readwrite_gbps]
}

#[track_caller]
fn assert_near(found: f64, expected: f64, tolerance: f64) {
    assert!((found - expected).abs() <= tolerance, "{found} is not {expected} +- {tolerance}");
}

#[track_caller]
fn assert_figures(model: &Model, size_bytes: u64, expected: [f64; 3], tolerance: f64) {
    for (found, expected) in figures(model, size_bytes).into_iter().zip(expected) {
        assert_near(found, expected, tolerance);
    }
}

#[test]
fn published_bandwidth_of_the_measured_link() {
    let model = published(Link::PUBLISHED);
    assert_near(model.raw_gbps(), 63.01538, 1e-5);
    assert_near(model.tlp_gbps(), 57.8847656, 1e-7);
    for (size_bytes, expected) in [
        (1, [2.3154, 2.4119, 1.1813]),
        (60, [41.3463, 43.4136, 32.1582]),
        (64, [42.0980, 44.1027, 33.0770]),
        (128, [48.7451, 50.0625, 42.0980]),
        (256, [52.9232, 53.6902, 48.7451]),
        (257, [48.7750, 50.0888, 45.2170]),
        (512, [52.9232, 53.6902, 50.7483]),
        (513, [50.7605, 51.8235, 46.9114]),
        (1024, [52.9232, 53.6902, 50.7483]),
        (1500, [52.8146, 53.5970, 50.5986]),
        (2048, [52.9232, 53.6902, 50.7483]),
    ] {
        assert_figures(&model, size_bytes, expected, TOLERANCE_GBPS);
    }
}

#[test]
fn published_bandwidth_of_other_links() {
    let short = Link { address: AddressWidth::Bits32, ..Link::PUBLISHED };
    assert_figures(&published(short), 64, [44.103, 44.103, 35.621], 5e-4);
    let checked = Link { ecrc: true, ..Link::PUBLISHED };
    assert_figures(&published(checked), 64, [40.268, 42.098, 30.872], 5e-4);
    assert_near(published(link(3, 8, 128)).tlp_gbps(), 56.6659, TOLERANCE_GBPS);
    assert_figures(&published(link(3, 8, 128)), 64, [41.212, 43.174, 32.381], 5e-4);
    let fast = published(link(5, 16, 256));
    assert_near(fast.tlp_gbps(), 454.800, 5e-4);
    assert_figures(&fast, 64, [330.76, 346.51, 259.89], 5e-3);
    assert_figures(&fast, 256, [415.82, 421.84, 382.99], 5e-3);
    for chunks in 1..=32 {
        let model = Model::new(Mode::Published, Link::PUBLISHED, CompletionSize::Rcb).unwrap();
        assert_near(figures(&model, 64 * chunks)[1], 44.1027, TOLERANCE_GBPS);
    }
}

/// The figures of the published program: generation, lanes, MPS; bandwidth of packets, writes, reads, both of 333 bytes
/// (MRRS 512, 64-bit addresses). Two of the rows contain its misprints.
#[test]
fn published_bandwidth_of_all_generations() {
    for ((generation, lanes, mps_bytes), tlp_gbps, expected) in [
        ((1, 1, 128), 1.859777, [1.529150, 1.575842, 1.443603]),
        ((1, 8, 512), 12.981643, [12.108928, 12.246139, 11.346161]),
        ((1, 32, 2048), 58.309574, [54.389603, 55.005916, 50.963486]),
        ((2, 4, 1024), 15.189619, [14.168468, 14.329017, 13.275966]),
        ((2, 32, 4096), 120.214927, [112.133251, 113.403883, 105.069739]),
        ((3, 16, 256), 113.700060, [99.375643, 101.507025, 93.486716]),
        ((4, 2, 128), 29.175198, [23.988496, 24.720970, 22.646483]),
        ((4, 16, 512), 229.246726, [213.835181, 216.258243, 200.365248]),
        ((5, 8, 4096), 245.004419, [228.533534, 231.123149, 214.137720]),
        ((6, 16, 256), 873.291969, [763.270933, 779.641355, 718.040063]),
        ((6, 1, 128), 57.435746, [47.224947, 48.666930, 44.582992]),
        ((7, 32, 1024), 3517.752001, [3281.264472, 3318.445939, 3074.570647]),
    ] {
        let model = published(link(generation, lanes, mps_bytes));
        assert_near(model.tlp_gbps(), tlp_gbps, TOLERANCE_GBPS);
        assert_figures(&model, 333, expected, TOLERANCE_GBPS);
    }
}

/// Acknowledgements and credits of 8 bytes each, on all lanes together, once in 203 symbol times of a lane:
/// 63.01538 * (1 - 8 / (203 * 8) - 8 / (203 * 8) - 4 / 1538) = 62.2307.
#[test]
fn corrected_limits_are_times_of_a_lane() {
    for (link, tlp_gbps) in
        [(Link::PUBLISHED, 62.231), (link(3, 16, 256), 124.953), (link(5, 16, 256), 499.81), (link(3, 1, 256), 7.6103)]
    {
        assert_near(corrected(link).tlp_gbps(), tlp_gbps, 6e-3);
    }
}

/// Aligned transfers of whole double words cost the same as in the published model:
/// 64 * 62.2307 / (64 + 24) = 45.2587, 64 * 62.2307 / (64 + 20) = 47.4138, 64 * 62.2307 / (64 + 24 + 24) = 35.5604.
#[test]
fn corrected_bandwidth_of_aligned_transfers() {
    let model = corrected(Link::PUBLISHED);
    assert_figures(&model, 64, [45.2587, 47.4138, 35.5604], TOLERANCE_GBPS);
    let (ours, theirs) = (figures(&model, 1500), figures(&published(Link::PUBLISHED), 1500));
    let ratio = model.tlp_gbps() / published(Link::PUBLISHED).tlp_gbps();
    for (found, expected) in ours.into_iter().zip(theirs) {
        assert_near(found, expected * ratio, TOLERANCE_GBPS);
    }
}

fn traffic(model: &Model, access: Access, size_bytes: u64, offset_bytes: u64) -> (u64, u64) {
    let traffic = model.traffic(access, model.span(size_bytes, offset_bytes).unwrap());
    (traffic.sent_bytes, traffic.received_bytes)
}

#[test]
fn corrected_packets_carry_whole_double_words() {
    let model = corrected(Link::PUBLISHED);
    // One byte: a header of 16 with framing of 8, and a double word.
    assert_eq!(traffic(&model, Access::Write, 1, 0), (28, 0));
    assert_eq!(traffic(&model, Access::Read, 1, 0), (24, 24));
    // Bytes 3 and 4 lie in two double words.
    assert_eq!(traffic(&model, Access::Write, 2, 3), (32, 0));
    // 257 bytes: 256 and one, the one carried in 4.
    assert_eq!(traffic(&model, Access::Write, 257, 0), (24 + 256 + 24 + 4, 0));
}

#[test]
fn corrected_misaligned_transfers_are_split() {
    let model = corrected(Link::PUBLISHED);
    // 32..544 meets 256 and 512: three writes; 512: two requests. Completions: 32..64, 64..320, 320..512 of the first
    // request and 512..544 of the second.
    assert_eq!(traffic(&model, Access::Write, 512, 32), (3 * 24 + 512, 0));
    assert_eq!(traffic(&model, Access::Read, 512, 32), (2 * 24, 4 * 20 + 512));
    // 60..70: completions 60..64 and 64..72, which hold three double words.
    assert_eq!(traffic(&model, Access::Read, 10, 60), (24, 2 * 20 + 12));
    // 4090..4102 crosses 4 KB: two of all; 4088..4096 and 4096..4104 in double words.
    assert_eq!(traffic(&model, Access::Write, 12, 4090), (2 * 24 + 16, 0));
    assert_eq!(traffic(&model, Access::Read, 12, 4090), (2 * 24, 2 * 20 + 16));
}

/// A completion ends with its request of 128 bytes even if a packet could carry more: four of each for 512 bytes. The
/// published model counts two completions.
#[test]
fn corrected_completions_end_with_their_request() {
    let link = Link { mrrs_bytes: TransferLimit::new(128).unwrap(), ..Link::PUBLISHED };
    assert_eq!(traffic(&corrected(link), Access::Read, 512, 0), (4 * 24, 4 * 20 + 512));
    assert_eq!(traffic(&published(link), Access::Read, 512, 0), (4 * 24, 2 * 20 + 512));
}

/// No framing, no link CRC, no acknowledgements: headers of 16 and 12 bytes in the 236 bytes of packets of a flit.
#[test]
fn packets_in_flits_have_no_framing() {
    let model = corrected(link(6, 16, 256));
    assert_near(model.raw_gbps(), 1024.0, 1e-9);
    assert_eq!(traffic(&model, Access::Write, 64, 0), (16 + 64, 0));
    assert_eq!(traffic(&model, Access::Read, 64, 0), (16, 12 + 64));
    // Byte enables: 4 more in the request. An address inside a double word: 4 more in the completion.
    assert_eq!(traffic(&model, Access::Write, 62, 0), (16 + 4 + 64, 0));
    assert_eq!(traffic(&model, Access::Read, 62, 2), (16 + 4, 12 + 4 + 64));
    // The ECRC is a trailer of 4 bytes in flit mode too.
    let checked = Link { ecrc: true, ..link(6, 16, 256) };
    assert_eq!(traffic(&corrected(checked), Access::Write, 64, 0), (16 + 64 + 4, 0));
}

#[test]
fn invalid_sizes_offsets_and_links_are_refused() {
    let model = corrected(Link::PUBLISHED);
    assert_eq!(model.bandwidth(0, 0), Err(ModelError::Size(0)));
    assert_eq!(model.bandwidth(SIZE_BYTES_MAX + 1, 0), Err(ModelError::Size(SIZE_BYTES_MAX + 1)));
    assert_eq!(model.bandwidth(64, 4096), Err(ModelError::Offset(4096)));
    assert_eq!(published(Link::PUBLISHED).bandwidth(64, 1), Err(ModelError::PublishedOffset(1)));
    assert_eq!(Model::new(Mode::Published, link(3, 12, 256), CompletionSize::Mps), Err(ModelError::PublishedLanes));
}

fn any_link() -> impl Strategy<Value = Link> {
    let lanes = prop::sample::select(vec![1, 2, 4, 8, 16, 32]);
    let limit = || prop::sample::select(TransferLimit::ALL.to_vec());
    let width = prop::sample::select(vec![AddressWidth::Bits32, AddressWidth::Bits64]);
    let boundary = prop::sample::select(vec![64, 128]);
    (1..=7_u8, lanes, limit(), limit(), width, boundary, any::<bool>()).prop_map(
        |(generation, lanes, mps_bytes, mrrs_bytes, address, rcb, ecrc)| Link {
            generation: Generation::new(generation).unwrap(),
            lanes: Lanes::new(lanes).unwrap(),
            mps_bytes,
            mrrs_bytes,
            rcb_bytes: ReadBoundary::new(rcb).unwrap(),
            address,
            ecrc,
        },
    )
}

fn any_model() -> impl Strategy<Value = Model> {
    let mode = prop::sample::select(vec![Mode::Published, Mode::Corrected]);
    let completions = prop::sample::select(vec![CompletionSize::Mps, CompletionSize::Rcb]);
    (mode, any_link(), completions).prop_map(|(mode, link, chunks)| Model::new(mode, link, chunks).unwrap())
}

proptest! {
    #[test]
    fn data_never_exceeds_packets_nor_packets_the_link(
        model in any_model(), size in 1..20_000_u64, offset in 0..4096_u64
    ) {
        let offset = if model.mode() == Mode::Published { 0 } else { offset };
        let bandwidth = model.bandwidth(size, offset).unwrap();
        prop_assert!(model.tlp_gbps() < model.raw_gbps());
        for gbps in [bandwidth.write_gbps, bandwidth.read_gbps] {
            prop_assert!(0.0 < gbps && gbps < model.tlp_gbps());
            prop_assert!(bandwidth.readwrite_gbps <= gbps);
        }
    }

    #[test]
    fn a_larger_payload_limit_never_costs_more_bytes(model in any_model(), size in 1..20_000_u64) {
        let index = model.link().mps_bytes.index();
        let larger = TransferLimit::ALL[(index + 1).min(TransferLimit::ALL.len() - 1)];
        let link = Link { mps_bytes: larger, ..*model.link() };
        let wider = Model { link, ..model };
        for access in [Access::Read, Access::Write] {
            let (before, after) = (traffic(&model, access, size, 0), traffic(&wider, access, size, 0));
            prop_assert!(after.0 <= before.0 && after.1 <= before.1);
        }
    }

    #[test]
    fn larger_transfers_cost_more_bytes(model in any_model(), size_dw in 1..5_000_u64) {
        for access in [Access::Read, Access::Write] {
            let of = |size_bytes| traffic(&model, access, size_bytes, 0);
            let (before, after) = (of(4 * size_dw), of(4 * size_dw + 4));
            prop_assert!(before.0 <= after.0 && before.1 <= after.1);
            // In flit mode a double word of byte enables may make the smaller transfer more expensive.
            let ragged = of(4 * size_dw - 1);
            prop_assert!(model.is_flit_mode() || ragged.0 <= before.0 && ragged.1 <= before.1);
        }
    }

    #[test]
    fn full_packets_are_the_most_efficient(model in any_model(), size in 1..4097_u64) {
        let full_bytes = u64::from(model.link().mps_bytes.bytes());
        let (part, full) = (model.bandwidth(size, 0).unwrap(), model.bandwidth(full_bytes, 0).unwrap());
        // Several full packets are as efficient as one, except for rounding.
        prop_assert!(part.write_gbps <= full.write_gbps * (1.0 + 1e-12));
    }

    #[test]
    fn alignment_never_costs_more_than_misalignment(link in any_link(), size in 1..10_000_u64, offset in 1..4096_u64) {
        let model = corrected(link);
        let (aligned, misaligned) = (model.bandwidth(size, 0).unwrap(), model.bandwidth(size, offset).unwrap());
        prop_assert!(misaligned.write_gbps <= aligned.write_gbps);
        prop_assert!(misaligned.read_gbps <= aligned.read_gbps);
    }
}
