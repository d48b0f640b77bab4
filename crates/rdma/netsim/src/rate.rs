//! How fast a line is.

use std::num::NonZero;

use sim::Span;

/// Picoseconds that a byte takes at 1 Mb/s.
const PS_PER_BYTE_AT_1_MBPS: u64 = 8_000_000;
/// Lines slower or faster than this are a mistake.
const MBPS_RANGE: std::ops::RangeInclusive<u64> = 1..=10_000_000;

/// Bits a second of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkRate {
    mbps: u32,
    /// What a byte takes, where that is a whole number of picoseconds: then no packet needs a division.
    byte_ps: Option<NonZero<u32>>,
}

impl LinkRate {
    /// So many Gb/s, to the nearest Mb/s; `None` below 0.001 and above 10000.
    pub fn from_gbps(gbps: f64) -> Option<Self> {
        let mbps = (gbps * 1000.0).round() as u64;
        if !MBPS_RANGE.contains(&mbps) {
            return None;
        }
        let byte_ps = PS_PER_BYTE_AT_1_MBPS / mbps;
        let is_whole = byte_ps * mbps == PS_PER_BYTE_AT_1_MBPS;
        Some(Self { mbps: mbps as u32, byte_ps: NonZero::new(byte_ps as u32).filter(|_| is_whole) })
    }

    /// In Gb/s.
    pub fn gbps(self) -> f64 {
        f64::from(self.mbps) / 1000.0
    }

    /// In Mb/s.
    pub fn mbps(self) -> u64 {
        self.mbps.into()
    }

    /// How long the line is busy with this many bytes, to the nearest picosecond.
    pub fn transmission_time(self, bytes: u64) -> Span {
        let mbps = u64::from(self.mbps);
        Span::from_ps(match self.byte_ps {
            Some(byte_ps) => bytes * u64::from(byte_ps.get()),
            None => (bytes * PS_PER_BYTE_AT_1_MBPS + mbps / 2) / mbps,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_takes_80_ps_at_100_gbps() {
        let rate = LinkRate::from_gbps(100.0).unwrap();
        assert_eq!(rate.transmission_time(1), Span::from_ps(80));
        assert_eq!(LinkRate::from_gbps(400.0).unwrap().transmission_time(1000), Span::from_ps(20_000));
        assert_eq!(LinkRate::from_gbps(0.3).unwrap().transmission_time(1).ps(), 26_667);
        assert!((rate.gbps() - 100.0).abs() < 1e-9);
    }

    #[test]
    fn no_line_has_no_rate() {
        for gbps in [0.0, -1.0, f64::NAN, 1e9] {
            assert_eq!(LinkRate::from_gbps(gbps), None, "{gbps}");
        }
    }
}
