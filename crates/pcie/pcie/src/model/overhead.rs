//! Overhead of the link itself: acknowledgements, credit updates and clock compensation.
//!
//! Source of the limits: PCI Express Base Specification 5.0, tables 3-7 to 3-9 (Ack) and 2-46 to 2-48 (credit
//! updates). Both follow the formula given with the tables: `(MPS + 28) * factor / lanes + internal delay`, in symbol
//! times.

use crate::link::{FLIT_BYTES, FLIT_TLP_BYTES, Generation, Lanes, Link, TransferLimit};
use crate::tlp::DLLP_BYTES;

/// Bytes of headers and framing that the specification adds to the payload in the formula of the limits.
const TLP_OVERHEAD_BYTES: f64 = 28.0;
/// Symbols of a SKP ordered set, which compensates for clock differences (generations 1 and 2; the published model uses
/// it for all).
const SKIP_SYMBOLS: f64 = 4.0;
/// Largest interval between SKP ordered sets, in symbols (generations 1 and 2; the published model uses it for all).
const SKIP_INTERVAL_SYMBOLS: f64 = 1538.0;

/// Limits for the delay of acknowledgements and credit updates, in symbol times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Ack transmission latency limit.
    pub ack_symbols: u32,
    /// Update transmission latency guideline for credits.
    pub credit_symbols: u32,
}

impl Limits {
    /// Returns the limits by the formula of the specification.
    pub fn of(link: &Link) -> Self {
        let symbols = limit_symbols(link);
        Self { ack_symbols: symbols, credit_symbols: symbols }
    }

    /// Returns the limits of the published model: two of its 504 entries are misprints. It has no links of 12 lanes.
    pub fn published(link: &Link) -> Self {
        let mut limits = Self::of(link);
        match (link.generation.number(), link.lanes.count(), link.mps_bytes.bytes()) {
            (1, 32, 2048) => limits.credit_symbols = 248,
            (2, 32, 4096) => limits.ack_symbols = 237,
            _ => {}
        }
        limits
    }
}

/// Returns the share of a link's rate that transaction layer packets can have at most: by the specification's limits,
/// link layer packets and clock compensation take the rest; in flit mode, the other bytes of flits and clock
/// compensation.
pub fn packets_share(link: &Link) -> f64 {
    if link.generation.is_flit_mode() {
        return (1.0 - skip_share()) * f64::from(FLIT_TLP_BYTES) / f64::from(FLIT_BYTES);
    }
    // The limits are symbol times of each lane.
    1.0 - link_layer_share(Limits::of(link), f64::from(link.lanes.count()))
}

/// Returns the share of a link's rate that link layer packets and clock compensation take, if the former are sent at
/// these limits, of which one is the time of `symbol_bytes` on the link.
pub fn link_layer_share(limits: Limits, symbol_bytes: f64) -> f64 {
    let share = |symbols: u32| f64::from(DLLP_BYTES) / (f64::from(symbols) * symbol_bytes);
    share(limits.ack_symbols) + share(limits.credit_symbols) + skip_share()
}

/// Returns the share of a link's time that clock compensation takes.
pub fn skip_share() -> f64 {
    SKIP_SYMBOLS / SKIP_INTERVAL_SYMBOLS
}

fn limit_symbols(link: &Link) -> u32 {
    let bytes = f64::from(link.mps_bytes.bytes()) + TLP_OVERHEAD_BYTES;
    let lanes = f64::from(link.lanes.count());
    (bytes * ack_factor(link.lanes, link.mps_bytes) / lanes + internal_delay_symbols(link.generation)).floor() as u32
}

/// Returns the Ack factor: the number of packets of full payload per acknowledgement, which is larger on wide links.
fn ack_factor(lanes: Lanes, mps_bytes: TransferLimit) -> f64 {
    match (lanes.count(), mps_bytes.bytes()) {
        (1..=4, 128 | 256) => 1.4,
        (1..=8, 512..) => 1.0,
        (8, _) => 2.5,
        (12.., 128 | 256) => 3.0,
        _ => 2.0,
    }
}

/// Returns the internal delay: symbol times from the last symbol of a packet at the receiver to the first symbol of its
/// acknowledgement.
fn internal_delay_symbols(generation: Generation) -> f64 {
    match generation.number() {
        1 => 19.0,
        2 => 70.0,
        _ => 115.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(generation: u8, lanes: u8, of: impl Fn(&Link) -> u32) -> Vec<u32> {
        let (generation, lanes) = (Generation::new(generation).unwrap(), Lanes::new(lanes).unwrap());
        let limit = |mps_bytes| of(&Link { generation, lanes, mps_bytes, ..Link::PUBLISHED });
        TransferLimit::ALL.into_iter().map(limit).collect()
    }

    /// The tables of the specification, MPS 128 to 4096; one row per width.
    #[test]
    fn the_formula_reproduces_the_tables_of_the_specification() {
        let expected = [
            ((1, 1), [237, 416, 559, 1071, 2095, 4143]),
            ((1, 2), [128, 217, 289, 545, 1057, 2081]),
            ((1, 4), [73, 118, 154, 282, 538, 1050]),
            ((1, 8), [67, 107, 86, 150, 278, 534]),
            ((1, 16), [48, 72, 86, 150, 278, 534]),
            ((1, 32), [33, 45, 52, 84, 148, 276]),
            ((2, 1), [288, 467, 610, 1122, 2146, 4194]),
            ((2, 2), [179, 268, 340, 596, 1108, 2132]),
            ((2, 4), [124, 169, 205, 333, 589, 1101]),
            ((2, 8), [118, 158, 137, 201, 329, 585]),
            ((2, 16), [99, 123, 137, 201, 329, 585]),
            ((2, 32), [84, 96, 103, 135, 199, 327]),
            ((3, 1), [333, 512, 655, 1167, 2191, 4239]),
            ((3, 2), [224, 313, 385, 641, 1153, 2177]),
            ((3, 4), [169, 214, 250, 378, 634, 1146]),
            ((3, 8), [163, 203, 182, 246, 374, 630]),
            ((3, 16), [144, 168, 182, 246, 374, 630]),
            ((3, 32), [129, 141, 148, 180, 244, 372]),
        ];
        for ((generation, lanes), limits) in expected {
            assert_eq!(row(generation, lanes, |link| Limits::of(link).ack_symbols), limits);
            assert_eq!(row(generation, lanes, |link| Limits::of(link).credit_symbols), limits);
        }
        // (128 + 28) * 3 / 12 + 19 = 58
        assert_eq!(row(1, 12, |link| Limits::of(link).ack_symbols)[..2], [58, 90]);
    }

    #[test]
    fn the_published_tables_have_two_misprints() {
        let mut differences = Vec::new();
        for generation in 1..=7 {
            for lanes in [1, 2, 4, 8, 16, 32] {
                let right = row(generation, lanes, |link| Limits::of(link).ack_symbols);
                let ack = row(generation, lanes, |link| Limits::published(link).ack_symbols);
                let credit = row(generation, lanes, |link| Limits::published(link).credit_symbols);
                for index in 0..right.len() {
                    if [ack[index], credit[index]] != [right[index]; 2] {
                        differences.push((generation, lanes, ack[index], credit[index], right[index]));
                    }
                }
            }
        }
        assert_eq!(differences, [(1, 32, 148, 248, 148), (2, 32, 237, 327, 327)]);
    }
}
