//! Ephemeral ports: the range of the machine, and the order in which a connection tries them.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{Mode, OFlags};

/// Number of ephemeral ports that are probed at random in each half of the range before it is searched in order. If a
/// third of a half is free, all of its probes fail once in 400,000 times.
const RANDOM_PROBES: u32 = 32;
/// Number of ephemeral ports that are tried in order before a connection gets no lane. Only lanes of the same rack can
/// have taken the names, so if none is found nearly the whole range is in use.
const SEQUENTIAL_TRIES_MAX: usize = 1024;
/// The kernel's default, for machines where /proc cannot be read.
const EPHEMERAL_PORTS_DEFAULT: (u16, u16) = (32_768, 60_999);

/// Returns the range of ephemeral ports of this machine, which is read once.
pub fn ephemeral_ports() -> RangeInclusive<u16> {
    // The low end is in the upper half and the high end in the lower half; no range ends at port 0, so 0 means "not
    // read".
    static RANGE: AtomicU32 = AtomicU32::new(0);
    let known = RANGE.load(Ordering::Relaxed);
    if known != 0 {
        return (known >> 16) as u16..=known as u16;
    }
    let (low, high) = read_ephemeral_ports().unwrap_or(EPHEMERAL_PORTS_DEFAULT);
    RANGE.store(u32::from(low) << 16 | u32::from(high), Ordering::Relaxed);
    low..=high
}

fn read_ephemeral_ports() -> Option<(u16, u16)> {
    let path = c"/proc/sys/net/ipv4/ip_local_port_range";
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut bytes = [0_u8; 64];
    let length = rustix::io::read(&file, &mut bytes).ok()?;
    parse_port_range(std::str::from_utf8(&bytes[..length]).ok()?)
}

fn parse_port_range(text: &str) -> Option<(u16, u16)> {
    let mut words = text.split_ascii_whitespace();
    let low: u16 = words.next()?.parse().ok()?;
    let high: u16 = words.next()?.parse().ok()?;
    (low >= 1 && low <= high).then_some((low, high))
}

/// Returns ephemeral ports in the order in which to try them: a few at random, then a part of the range in order, from
/// a random position. A few are tried twice.
///
/// The kernel's `connect` prefers ports at an even distance from the start of the range. Lanes prefer the others, so a
/// server rarely sees the same address on a lane and on kernel TCP at once.
pub fn ephemeral_candidates(range: RangeInclusive<u16>, random: u32) -> impl Iterator<Item = u16> {
    let low = u32::from(*range.start());
    let ports = u32::from(*range.end()) - low + 1;
    let at_random = [1, 0].into_iter().flat_map(move |parity| {
        let count = (ports + 1 - parity) / 2;
        let probes = if count == 0 { 0 } else { RANDOM_PROBES };
        (0..probes).map(move |probe| low + 2 * (scramble(random, probe) % count) + parity)
    });
    let in_order = (0..ports).map(move |step| low + (random % ports + step) % ports).take(SEQUENTIAL_TRIES_MAX);
    at_random.chain(in_order).map(|port| port as u16)
}

/// Returns a different number for each probe, without a pattern that two processes could share (the finalizer of
/// MurmurHash3).
fn scramble(random: u32, probe: u32) -> u32 {
    let mut bits = random.wrapping_add(probe.wrapping_mul(0x9e37_79b9));
    bits = (bits ^ bits >> 16).wrapping_mul(0x85eb_ca6b);
    bits = (bits ^ bits >> 13).wrapping_mul(0xc2b2_ae35);
    bits ^ bits >> 16
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn all_ports_of_a_small_range_are_tried_and_those_at_odd_distances_first(
            low in 1..60_000_u16,
            more in 0..SEQUENTIAL_TRIES_MAX as u16,
            random: u32,
        ) {
            let range = low..=low + more;
            let tried: Vec<u16> = ephemeral_candidates(range.clone(), random).collect();
            let mut sorted = tried.clone();
            sorted.sort_unstable();
            sorted.dedup();
            prop_assert!(sorted.iter().copied().eq(range));
            let odd = if more == 0 { 0 } else { RANDOM_PROBES as usize };
            prop_assert!(tried[..odd].iter().all(|port| (port - low) % 2 == 1));
        }
    }

    #[test]
    fn the_ports_of_a_large_range_are_not_all_tried_and_the_first_ones_are_spread() {
        for random in [0, 1, u32::MAX, 0x1234_5678] {
            let tried: Vec<u16> = ephemeral_candidates(32_768..=60_999, random).collect();
            assert_eq!(tried.len(), 2 * RANDOM_PROBES as usize + SEQUENTIAL_TRIES_MAX);
            let spread = &tried[..RANDOM_PROBES as usize];
            assert!(spread.iter().min().unwrap().abs_diff(*spread.iter().max().unwrap()) > 10_000, "{spread:?}");
        }
    }

    #[test]
    fn port_ranges_are_read_as_the_kernel_writes_them() {
        assert_eq!(parse_port_range("32768\t60999\n"), Some((32768, 60999)));
        for text in ["", "1", "0 5", "9 8", "a b", "1 70000"] {
            assert_eq!(parse_port_range(text), None, "{text:?}");
        }
        assert!(!ephemeral_ports().is_empty());
    }
}
