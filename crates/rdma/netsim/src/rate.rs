//! The data rate of a link.

use std::num::NonZero;

use sim::Span;

/// Transmission time of a byte at 1 Mb/s, in picoseconds.
const PS_PER_BYTE_AT_1_MBPS: u64 = 8_000_000;
/// Accepted rates; anything outside is taken for a mistake.
const MBPS_RANGE: std::ops::RangeInclusive<u64> = 1..=10_000_000;

/// The data rate of a link, in whole Mb/s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkRate {
    mbps: u32,
    /// Transmission time of a byte if it is a whole number of picoseconds, which saves a division per packet.
    byte_ps: Option<NonZero<u32>>,
}

impl LinkRate {
    /// Creates a rate from Gb/s, rounded to the nearest Mb/s; `None` below 0.001 and above 10000.
    pub fn from_gbps(gbps: f64) -> Option<Self> {
        let mbps = (gbps * 1000.0).round() as u64;
        if !MBPS_RANGE.contains(&mbps) {
            return None;
        }
        let byte_ps = PS_PER_BYTE_AT_1_MBPS / mbps;
        let is_whole = byte_ps * mbps == PS_PER_BYTE_AT_1_MBPS;
        Some(Self { mbps: mbps as u32, byte_ps: NonZero::new(byte_ps as u32).filter(|_| is_whole) })
    }

    /// Returns the rate in Gb/s.
    pub fn gbps(self) -> f64 {
        f64::from(self.mbps) / 1000.0
    }

    /// Returns the rate in Mb/s.
    pub fn mbps(self) -> u64 {
        self.mbps.into()
    }

    /// Returns how long the link is busy with `bytes` bytes, to the nearest picosecond.
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
    fn rates_out_of_range_are_refused() {
        for gbps in [0.0, -1.0, f64::NAN, 1e9] {
            assert_eq!(LinkRate::from_gbps(gbps), None, "{gbps}");
        }
    }
}
