//! Synthetic routing tables with the size and the distribution of the Internet's, generated from a seed.
//!
//! The distributions of lengths, first bits and clustering are *measured*: they are those of a sample that RIPE's
//! Routing Information Service collected in 2021, as published in the repository zhu849/IP-Address-Lookup-Algorithms: a
//! tenth of the IPv4 prefixes, drawn at random (111,175), and all IPv6 prefixes (92,582). The prefixes themselves are
//! random.

use std::collections::HashSet;

use ipnet::{Ipv4Net, Ipv6Net};
use sim::Random;

/// Number of IPv4 prefixes of each length in the sample.
#[rustfmt::skip] // A table.
const LENGTHS_V4: [(u8, u32); 25] = [
    (8, 4), (9, 2), (10, 5), (11, 15), (12, 40), (13, 75), (14, 113), (15, 218), (16, 1656), (17, 1079), (18, 1798),
    (19, 3458), (20, 5350), (21, 6557), (22, 12736), (23, 11463), (24, 62904), (25, 276), (26, 208), (27, 180),
    (28, 198), (29, 461), (30, 412), (31, 91), (32, 1876),
];

/// Number of IPv4 prefixes in the sample by first octet, 0 to 223, without private ones.
#[rustfmt::skip] // A table.
const FIRST_OCTETS: [u32; 224] = [
    0, 335, 278, 8, 7, 876, 7, 0, 226, 0, 0, 0, 576, 92, 446, 36, 7, 103, 15, 0, 50, 0, 0, 724, 843, 2, 0, 471, 0, 0,
    1, 547, 54, 0, 4, 28, 231, 736, 437, 63, 53, 888, 180, 302, 34, 2714, 778, 113, 0, 319, 305, 63, 166, 1, 61, 94, 4,
    26, 462, 332, 174, 632, 643, 679, 1398, 735, 1487, 781, 650, 965, 477, 294, 832, 9, 714, 281, 207, 712, 705, 576,
    626, 492, 391, 321, 421, 784, 273, 473, 562, 778, 220, 1325, 416, 533, 712, 895, 261, 129, 227, 173, 35, 227, 357,
    3109, 642, 301, 238, 314, 161, 555, 390, 380, 294, 314, 276, 465, 488, 508, 450, 375, 192, 285, 545, 535, 406, 540,
    26, 0, 318, 300, 155, 421, 194, 77, 279, 74, 160, 212, 630, 246, 216, 241, 273, 294, 206, 103, 285, 201, 337, 266,
    159, 272, 316, 96, 677, 251, 478, 223, 172, 338, 355, 243, 520, 169, 310, 324, 183, 375, 863, 123, 1001, 281, 313,
    483, 240, 200, 568, 1678, 609, 663, 462, 785, 420, 225, 460, 3040, 1226, 993, 818, 1183, 2128, 497, 1708, 1424,
    1269, 1109, 833, 494, 1210, 1199, 2071, 1429, 2171, 2255, 1072, 762, 901, 978, 1224, 1264, 1137, 671, 827, 887, 177,
    21, 1632, 729, 322, 263, 475, 220, 384, 315,
];

/// Number of IPv6 prefixes of each length in the sample.
#[rustfmt::skip] // A table.
const LENGTHS_V6: [(u8, u32); 57] = [
    (16, 1), (19, 1), (20, 13), (21, 6), (22, 7), (23, 5), (24, 28), (25, 7), (26, 14), (27, 19), (28, 108), (29, 3078),
    (30, 598), (31, 205), (32, 14543), (33, 1850), (34, 1569), (35, 801), (36, 3891), (37, 603), (38, 1082), (39, 360),
    (40, 4778), (41, 613), (42, 1162), (43, 401), (44, 5488), (45, 553), (46, 2314), (47, 1500), (48, 44136), (49, 143),
    (50, 52), (51, 43), (52, 146), (53, 116), (54, 29), (55, 22), (56, 318), (58, 1), (59, 5), (60, 6), (61, 1),
    (62, 2), (63, 3), (64, 1130), (65, 1), (80, 1), (81, 2), (112, 4), (120, 1), (122, 2), (123, 3), (125, 25),
    (126, 410), (127, 216), (128, 165),
];

/// The first 12 bits of the 540 distinct IPv6 /20s in the sample, and the number of /20s that begin with them.
const FIRST_BITS_V6: [(u32, u32); 8] =
    [(0x2a0, 236), (0x240, 149), (0x260, 93), (0x280, 37), (0x200, 8), (0x2a1, 8), (0x2c0, 6), (0x261, 3)];

/// Fraction of IPv4 routes that are more specifics of another route: about half (APNIC's BGP reports).
const NESTED_V4: f64 = 0.5;

/// Fraction of sites with more specific IPv6 routes that have a covering route, so that somewhat more than half of all
/// routes are more specifics: 51% of the sample, 57% in APNIC's reports of 2024.
const SITES_WITH_ROUTE: f64 = 0.5;

/// Number of distinct IPv6 /32s with more specific routes, per route.
const SITES_PER_ROUTE: f64 = 7615.0 / 92_582.0;

/// Mean number of adjacent routes of one length: of IPv4 (a guess from the size of the table and its coverage), and of
/// IPv6 up to /32 and beyond, chosen so that the trie has about as many paths as for the sample (whose /48s have 2.2,
/// but lie closer together than random ones).
const RUN_MEAN_V4: f64 = 3.0;
const RUN_MEAN_V6: f64 = 1.5;
const RUN_MEAN_V6_LONG: f64 = 3.0;

/// Maximum number of draws per route: in dense regions, many draws yield a prefix that exists already.
const DRAWS_PER_ROUTE: usize = 64;

/// A prefix: the address bits from the highest bit on, and the length.
type Key = (u128, u8);

/// A discrete distribution, as cumulative weights.
struct Weights(Vec<f64>);

impl Weights {
    fn new(weights: impl Iterator<Item = f64>) -> Weights {
        let sums = weights.scan(0.0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        });
        Weights(sums.collect())
    }

    /// Returns the distribution in which rank `r` weighs 1 / (r + offset): it fits the sample's clustering.
    fn harmonic(ranks: usize, offset: f64) -> Weights {
        Weights::new((0..ranks).map(|rank| 1.0 / (rank as f64 + offset)))
    }

    fn draw(&self, random: &mut Random) -> usize {
        let at = random.unit() * self.0.last().copied().unwrap_or_default();
        self.0.partition_point(|sum| *sum <= at).min(self.0.len() - 1)
    }
}

/// A table under construction.
struct TableBuilder {
    random: Random,
    keys: Vec<Key>,
    taken: HashSet<Key>,
}

impl TableBuilder {
    fn new(seed: u64, routes: usize) -> TableBuilder {
        let random = Random::new(seed, "routing table");
        TableBuilder { random, keys: Vec::with_capacity(routes), taken: HashSet::with_capacity(routes) }
    }

    /// Replaces the bits behind the first `decided` by random ones, and clears those behind `length`.
    fn with_random_bits(&mut self, bits: u128, decided: u8, length: u8) -> u128 {
        let noise = u128::from(self.random.bits()) << 64 | u128::from(self.random.bits());
        let bits = bits & !low_mask(128 - decided) | noise & low_mask(128 - decided);
        bits & !low_mask(128 - length)
    }

    /// Adds a run of adjacent routes of one length that begins at `bits`, and returns the number of new ones.
    fn add_run(&mut self, bits: u128, length: u8, mean: f64, most: usize) -> usize {
        let step = 1_u128 << (128 - length);
        let mut added = 0;
        for index in 0..most as u128 {
            let key = (bits.wrapping_add(index * step), length);
            // A run stays within an aligned group of 1,024 prefixes.
            if key.0 >> (128 - length) >> 10 != bits >> (128 - length) >> 10 {
                break;
            }
            if self.taken.insert(key) {
                self.keys.push(key);
                added += 1;
            }
            if !self.random.chance(1.0 - 1.0 / mean) {
                break;
            }
        }
        added
    }

    /// Adds `quota` routes of a length in runs that begin at the bits that `start` returns.
    fn fill(&mut self, length: u8, quota: usize, run: f64, mut start: impl FnMut(&mut TableBuilder) -> u128) {
        let mut missing = quota;
        for _ in 0..quota * DRAWS_PER_ROUTE {
            if missing == 0 {
                break;
            }
            let bits = start(self);
            missing -= self.add_run(bits, length, run, missing);
        }
    }

    /// Returns the prefixes in random order.
    fn into_shuffled(mut self) -> Vec<Key> {
        shuffle(&mut self.keys, &mut self.random);
        self.keys
    }
}

fn shuffle<T>(items: &mut [T], random: &mut Random) {
    for index in (1..items.len()).rev() {
        items.swap(index, random.below(index as u64 + 1) as usize);
    }
}

/// Returns a mask of the lowest `bits` bits.
fn low_mask(bits: u8) -> u128 {
    if bits == 0 { 0 } else { u128::MAX >> (128 - bits) }
}

/// Returns the number of routes of each length, shortest first, for a table of `routes`.
fn quotas(lengths: &[(u8, u32)], routes: usize) -> Vec<(u8, usize)> {
    let total: u64 = lengths.iter().map(|(_, count)| u64::from(*count)).sum();
    let share = |sum: u64| (sum * routes as u64 / total) as usize;
    let mut sum = 0;
    let quota = |(length, count): &(u8, u32)| {
        let before = share(sum);
        sum += u64::from(*count);
        (*length, share(sum) - before)
    };
    lengths.iter().map(quota).collect()
}

/// Returns `routes` distinct IPv4 prefixes in random order, or a few less if all prefixes of a length are used up. The
/// same seed yields the same table.
pub fn v4(seed: u64, routes: usize) -> Vec<Ipv4Net> {
    let mut builder = TableBuilder::new(seed, routes);
    let octets = Weights::new(FIRST_OCTETS.iter().map(|count| f64::from(*count)));
    for (length, quota) in quotas(&LENGTHS_V4, routes) {
        let shorter = builder.keys.len();
        builder.fill(length, quota, RUN_MEAN_V4, |builder| {
            let is_nested = shorter > 0 && builder.random.chance(NESTED_V4);
            let (bits, decided) = if is_nested {
                let parent = builder.random.below(shorter as u64) as usize;
                builder.keys[parent]
            } else {
                ((octets.draw(&mut builder.random) as u128) << 120, 8)
            };
            builder.with_random_bits(bits, decided, length)
        });
    }
    let net = |(bits, length): Key| Ipv4Net::new(((bits >> 96) as u32).into(), length).expect("a length of IPv4's");
    builder.into_shuffled().into_iter().map(net).collect()
}

/// Returns `routes` distinct IPv6 prefixes in random order, or a few less if all prefixes of a length are used up. The
/// same seed yields the same table.
pub fn v6(seed: u64, routes: usize) -> Vec<Ipv6Net> {
    let mut builder = TableBuilder::new(seed, routes);
    let regions = regions_v6(&mut builder);
    // Allocations are spread more evenly over /20s than announcements are.
    let region_weights = Weights::harmonic(regions.len(), 20.0);
    let (short, long): (Vec<_>, Vec<_>) =
        quotas(&LENGTHS_V6, routes).into_iter().partition(|(length, _)| *length <= 32);
    for (length, quota) in short {
        builder.fill(length, quota, RUN_MEAN_V6, |builder| {
            let region = regions[region_weights.draw(&mut builder.random)];
            builder.with_random_bits(region, length.min(20), length)
        });
    }
    let sites: Vec<u128> = (0..((routes as f64 * SITES_PER_ROUTE) as usize).max(1))
        .map(|_| {
            let has_route = !builder.keys.is_empty() && builder.random.chance(SITES_WITH_ROUTE);
            let (bits, decided) = if has_route {
                let index = builder.random.below(builder.keys.len() as u64) as usize;
                builder.keys[index]
            } else {
                (regions[region_weights.draw(&mut builder.random)], 20)
            };
            builder.with_random_bits(bits, decided, 32)
        })
        .collect();
    let site_weights = Weights::harmonic(sites.len(), 4.0);
    for (length, quota) in long {
        builder.fill(length, quota, RUN_MEAN_V6_LONG, |builder| {
            let rank = site_weights.draw(&mut builder.random);
            // Sites with many /48s are not those with many shorter routes: otherwise most /48s would be more specifics
            // of these.
            let site = if length < 48 { sites[sites.len() - 1 - rank] } else { sites[rank] };
            builder.with_random_bits(site, 32, length)
        });
    }
    let net = |(bits, length): Key| Ipv6Net::new(bits.into(), length).expect("a length of IPv6's");
    builder.into_shuffled().into_iter().map(net).collect()
}

/// Returns distinct /20s with the first bits of the sample, in random order.
fn regions_v6(builder: &mut TableBuilder) -> Vec<u128> {
    let mut regions = Vec::new();
    for (first, count) in FIRST_BITS_V6 {
        let mut seconds: Vec<u128> = (0..256).collect();
        for _ in 0..count {
            let second = seconds.swap_remove(builder.random.below(seconds.len() as u64) as usize);
            regions.push((u128::from(first) << 8 | second) << 108);
        }
    }
    shuffle(&mut regions, &mut builder.random);
    regions
}

/// Returns `count` random addresses, each within a route drawn with equal probability.
pub fn addresses_v4(seed: u64, routes: &[Ipv4Net], count: usize) -> Vec<u32> {
    let mut random = Random::new(seed, "addresses");
    let mut draw = || {
        let route = routes[random.below(routes.len() as u64) as usize];
        route.network().to_bits() | random.bits() as u32 & route.hostmask().to_bits()
    };
    (0..count).map(|_| draw()).collect()
}

/// Like [`addresses_v4`], for IPv6.
pub fn addresses_v6(seed: u64, routes: &[Ipv6Net], count: usize) -> Vec<u128> {
    let mut random = Random::new(seed, "addresses");
    let mut draw = || {
        let route = routes[random.below(routes.len() as u64) as usize];
        let noise = u128::from(random.bits()) << 64 | u128::from(random.bits());
        route.network().to_bits() | noise & route.hostmask().to_bits()
    };
    (0..count).map(|_| draw()).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    /// Returns the fraction of prefixes that are more specifics of another one.
    fn nested(keys: &BTreeSet<Key>) -> f64 {
        let lies = |&&(bits, length): &&Key| {
            (1..length).any(|shorter| keys.contains(&(bits & !low_mask(128 - shorter), shorter)))
        };
        keys.iter().filter(lies).count() as f64 / keys.len() as f64
    }

    fn check_lengths(keys: &BTreeSet<Key>, sample: &[(u8, u32)]) {
        let total: u32 = sample.iter().map(|(_, count)| count).sum();
        let mut counts = BTreeMap::new();
        keys.iter().for_each(|(_, length)| *counts.entry(*length).or_insert(0.0) += 1.0);
        for (length, count) in sample {
            let expected = f64::from(*count) / f64::from(total) * keys.len() as f64;
            let found = counts.get(length).copied().unwrap_or(0.0);
            assert!((found - expected).abs() <= 2.0 + expected * 0.01, "/{length}: {found}, not {expected}");
        }
    }

    #[test]
    fn ipv4_tables_have_the_lengths_and_nesting_of_the_sample() {
        let keys: BTreeSet<Key> =
            v4(1, 90_000).iter().map(|net| (u128::from(net.network().to_bits()) << 96, net.prefix_len())).collect();
        assert_eq!(keys.len(), 90_000, "the prefixes are distinct");
        check_lengths(&keys, &LENGTHS_V4);
        let nested = nested(&keys);
        assert!((0.40..0.65).contains(&nested), "{nested} of the routes are more specifics");
    }

    #[test]
    fn ipv6_tables_have_the_lengths_and_nesting_of_the_sample() {
        let keys: BTreeSet<Key> = v6(1, 92_582).iter().map(|net| (net.network().to_bits(), net.prefix_len())).collect();
        assert!(keys.len() > 92_500, "{}", keys.len());
        check_lengths(&keys, &LENGTHS_V6);
        let nested = nested(&keys);
        assert!((0.45..0.60).contains(&nested), "{nested} of the routes are more specifics, 0.51 in the sample");
        // The number of distinct paths at a depth determines the size of a trie: 11,241 and 16,715 in the sample.
        let paths = |bits: u8| {
            keys.iter().filter(|(_, length)| *length > bits).map(|(key, _)| key >> (128 - bits)).collect::<HashSet<_>>()
        };
        assert!((8_000..14_000).contains(&paths(26).len()), "{} paths of 26 bits", paths(26).len());
        assert!((12_000..24_000).contains(&paths(44).len()), "{} paths of 44 bits", paths(44).len());
    }

    #[test]
    fn the_same_seed_yields_the_same_table_and_addresses_lie_in_it() {
        let routes = v4(7, 2_000);
        assert_eq!(routes, v4(7, 2_000));
        assert_ne!(routes, v4(8, 2_000));
        for address in addresses_v4(1, &routes, 500) {
            assert!(routes.iter().any(|route| route.contains(&std::net::Ipv4Addr::from(address))));
        }
        let routes = v6(7, 1_000);
        assert_eq!(routes, v6(7, 1_000));
        for address in addresses_v6(1, &routes, 500) {
            assert!(routes.iter().any(|route| route.contains(&std::net::Ipv6Addr::from(address))));
        }
    }
}
