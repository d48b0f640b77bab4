//! Values of keys of congestion controls: quantities with their ranges. Errors name the value and the range.

use serde::de::{Deserialize, Deserializer, Error};

/// Shortest time between two actions of a sender, in nanoseconds.
const TIME_NS_MIN: f64 = 10.0;
/// Longest time, in nanoseconds.
const TIME_NS_MAX: f64 = 1e9;
/// Highest rate in Mb/s.
const MBPS_MAX: f64 = 1e7;
/// Lowest and highest rate of a link to the host's memory in Gb/s.
const PCIE_GBPS: std::ops::RangeInclusive<f64> = 1.0..=4000.0;
/// Most packets of a window.
const PACKETS_MAX: f64 = 1e6;
/// Smallest window in packets: one packet in 10,000 round trips.
const PACKETS_MIN: f64 = 1e-4;
/// Smallest and largest window in bytes.
const WINDOW_BYTES: std::ops::RangeInclusive<u64> = 256..=1_000_000_000;

fn refused<E: Error>(value: impl std::fmt::Display, what: &str, remedy: &str) -> E {
    E::custom(format!("'{value}' is not {what}; write {remedy}"))
}

/// A time in nanoseconds.
pub(super) fn time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    let ns = config::nanoseconds(deserializer)?;
    if (TIME_NS_MIN..=TIME_NS_MAX).contains(&ns) {
        return Ok(Some(ns));
    }
    Err(refused(format_args!("{ns} ns"), "in range", "a time from 10 ns to 1 s, as in \"55 us\""))
}

/// A time in nanoseconds, or 0 for "at once".
pub(super) fn time_or_zero<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    let ns = config::nanoseconds(deserializer)?;
    if ns == 0.0 || (TIME_NS_MIN..=TIME_NS_MAX).contains(&ns) {
        return Ok(Some(ns));
    }
    Err(refused(format_args!("{ns} ns"), "in range", "0, or a time from 10 ns to 1 s, as in \"50 us\""))
}

/// A rate in Mb/s.
pub(super) fn mbps<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    let mbps = f64::deserialize(deserializer)?;
    if (0.001..=MBPS_MAX).contains(&mbps) {
        return Ok(Some(mbps));
    }
    Err(refused(mbps, "a rate in range", "Mb/s from 0.001 to 10000000"))
}

/// The rate of a link to the host's memory in Gb/s.
pub(super) fn pcie_gbps<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    let gbps = f64::deserialize(deserializer)?;
    if PCIE_GBPS.contains(&gbps) {
        return Ok(Some(gbps));
    }
    Err(refused(gbps, "a rate in range", "Gb/s from 1 to 4000"))
}

/// A share.
pub(super) fn share<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    let value = f64::deserialize(deserializer)?;
    if value > 0.0 && value <= 1.0 {
        return Ok(Some(value));
    }
    Err(refused(value, "in range", "a number above 0 and at most 1"))
}

/// A number of packets, which may be a fraction.
pub(super) fn packets<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    let value = f64::deserialize(deserializer)?;
    if (PACKETS_MIN..=PACKETS_MAX).contains(&value) {
        return Ok(Some(value));
    }
    Err(refused(value, "a number of packets in range", "0.0001 to 1000000"))
}

/// A window in bytes.
pub(super) fn window_bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    let bytes = config::bytes(deserializer)?;
    if WINDOW_BYTES.contains(&bytes) {
        return Ok(Some(bytes as u32));
    }
    Err(refused(bytes, "a window in range", "bytes from 256 to 1000000000"))
}

/// A number of bytes, or 0 for none.
pub(super) fn counter_bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    let bytes = config::bytes(deserializer)?;
    u32::try_from(bytes).map(Some).map_err(|_| refused(bytes, "in range", "0 for none, or at most 4294967295 bytes"))
}

/// Packets between two acknowledgements.
pub(super) fn ack_packets<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    match u32::deserialize(deserializer)? {
        packets @ 1..=256 => Ok(packets),
        packets => Err(refused(packets, "in range", "1 to 256 packets")),
    }
}
