//! How fast a line is.

use sim::Span;

/// Picoseconds that a bit takes at 1 Mb/s.
const PS_PER_BIT_AT_1_MBPS: u64 = 1_000_000;
/// Lines slower or faster than this are a mistake.
const MBPS_RANGE: std::ops::RangeInclusive<u64> = 1..=10_000_000;

/// Bits a second of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate {
    mbps: u64,
}

impl Rate {
    /// So many Gb/s, to the nearest Mb/s; `None` below 0.001 and above 10000.
    pub fn from_gbps(gbps: f64) -> Option<Self> {
        let mbps = (gbps * 1000.0).round() as u64;
        MBPS_RANGE.contains(&mbps).then_some(Self { mbps })
    }

    /// In Gb/s.
    pub fn gbps(self) -> f64 {
        self.mbps as f64 / 1000.0
    }

    /// How long the line is busy with this many bytes, to the nearest picosecond.
    pub fn span(self, bytes: u64) -> Span {
        Span::from_ps((bytes * 8 * PS_PER_BIT_AT_1_MBPS + self.mbps / 2) / self.mbps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_takes_80_ps_at_100_gbps() {
        let rate = Rate::from_gbps(100.0).unwrap();
        assert_eq!(rate.span(1), Span::from_ps(80));
        assert_eq!(Rate::from_gbps(400.0).unwrap().span(1000), Span::from_ps(20_000));
        assert_eq!(Rate::from_gbps(0.3).unwrap().span(1).ps(), 26_667);
        assert!((rate.gbps() - 100.0).abs() < 1e-9);
    }

    #[test]
    fn no_line_has_no_rate() {
        for gbps in [0.0, -1.0, f64::NAN, 1e9] {
            assert_eq!(Rate::from_gbps(gbps), None, "{gbps}");
        }
    }
}
