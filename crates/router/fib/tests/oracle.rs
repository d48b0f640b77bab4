//! Compares the tables with a naive longest-prefix match, in random histories that shrink.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};

use fib::{GroupId, Reader, Writer};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use proptest::collection::vec;
use proptest::prelude::*;

/// Longest-prefix match by trying every length that any prefix had.
#[derive(Default)]
struct Oracle {
    routes: HashMap<IpNet, GroupId>,
    lengths: BTreeSet<u8>,
}

impl Oracle {
    fn lookup(&self, of: impl Fn(u8) -> Option<IpNet>) -> Option<GroupId> {
        self.lengths.iter().rev().find_map(|bits| self.routes.get(&of(*bits)?.trunc()).copied())
    }

    fn lookup_v4(&self, address: u32) -> Option<GroupId> {
        self.lookup(|bits| Ipv4Net::new(address.into(), bits).ok().map(IpNet::V4))
    }

    fn lookup_v6(&self, address: u128) -> Option<GroupId> {
        self.lookup(|bits| Ipv6Net::new(address.into(), bits).ok().map(IpNet::V6))
    }
}

#[derive(Clone, Debug)]
enum Change {
    Insert(IpNet, usize),
    /// By index among all prefixes inserted so far.
    Remove(usize),
}

/// Uses few values for each part of an address, so that prefixes nest and adjoin.
fn v4_prefix() -> impl Strategy<Value = IpNet> {
    let part = prop_oneof![Just(0_u32), Just(1), Just(127), Just(128), Just(255)];
    let bits = prop_oneof![4 => 14_u8..=32, 1 => 6_u8..14, 4 => 24_u8..=32];
    (vec(part, 3), bits).prop_map(|(parts, bits)| {
        let address = 10 << 24 | parts[0] << 16 | parts[1] << 8 | parts[2];
        Ipv4Net::new(address.into(), bits).expect("a length").trunc().into()
    })
}

fn v6_prefix() -> impl Strategy<Value = IpNet> {
    let part = prop_oneof![Just(0_u128), Just(1), Just(0x8000), Just(0xffff), Just(0x0fff)];
    let bits = prop_oneof![1 => 12_u8..20, 8 => 20_u8..=64, 2 => 64_u8..=128, 1 => 126_u8..=128];
    (vec(part, 7), bits).prop_map(|(parts, bits)| {
        let address = parts.iter().fold(0x2001, |address, part| address << 16 | part);
        Ipv6Net::new(address.into(), bits).expect("a length").trunc().into()
    })
}

fn changes(prefix: impl Strategy<Value = IpNet>) -> impl Strategy<Value = Vec<Change>> {
    let insert = (prefix, 0..4_usize).prop_map(|(prefix, group)| Change::Insert(prefix, group));
    let remove = any::<prop::sample::Index>().prop_map(|index| Change::Remove(index.index(64)));
    vec(prop_oneof![3 => insert, 2 => remove], 1..64)
}

fn groups(writer: &mut Writer<u32>) -> Vec<GroupId> {
    (0..4).map(|hop| writer.add_group(&[hop]).expect("a number")).collect()
}

struct Case {
    writer: Writer<u32>,
    reader: Reader<u32>,
    oracle: Oracle,
    groups: Vec<GroupId>,
    named: Vec<IpNet>,
}

impl Case {
    fn new() -> Case {
        let (mut writer, reader) = fib::tables().expect("memory");
        let groups = groups(&mut writer);
        Case { writer, reader, oracle: Oracle::default(), groups, named: Vec::new() }
    }

    fn apply(&mut self, change: &Change) {
        match *change {
            Change::Insert(prefix, group) => {
                let group = self.groups[group];
                let before = self.writer.insert(prefix, group).expect("room");
                assert_eq!(before, self.oracle.routes.insert(prefix, group), "the former group of {prefix}");
                self.oracle.lengths.insert(prefix.prefix_len());
                self.named.push(prefix);
            }
            Change::Remove(index) => {
                let Some(&prefix) = self.named.get(index) else { return };
                let before = self.writer.remove(prefix).expect("no reader stays");
                assert_eq!(before, self.oracle.routes.remove(&prefix), "the former group of {prefix}");
            }
        }
    }

    /// Checks the first and last addresses of the most recent prefixes, and the addresses next to them.
    fn check(&mut self, prefixes: usize) {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for prefix in self.named.iter().rev().take(prefixes) {
            match prefix {
                IpNet::V4(prefix) => {
                    let (first, last) = (prefix.network().to_bits(), prefix.broadcast().to_bits());
                    v4.extend([first, last, first.wrapping_sub(1), last.wrapping_add(1)]);
                }
                IpNet::V6(prefix) => {
                    let (first, last) = (prefix.network().to_bits(), prefix.broadcast().to_bits());
                    v6.extend([first, last, first.wrapping_sub(1), last.wrapping_add(1)]);
                }
            }
        }
        let (mut found_v4, mut found_v6) = (vec![None; v4.len()], vec![None; v6.len()]);
        self.reader.batch(|tables| {
            tables.v4.lookup_batch(&v4, &mut found_v4);
            tables.v6.lookup_batch(&v6, &mut found_v6);
        });
        for (address, found) in v4.into_iter().zip(found_v4) {
            assert_eq!(found, self.oracle.lookup_v4(address), "{}", std::net::Ipv4Addr::from(address));
        }
        for (address, found) in v6.into_iter().zip(found_v6) {
            assert_eq!(found, self.oracle.lookup_v6(address), "{}", std::net::Ipv6Addr::from(address));
        }
    }

    /// Runs a history in the tables that the previous one left empty.
    fn run(changes: &[Change]) {
        thread_local!(static CASE: Cell<Option<Case>> = const { Cell::new(None) });
        let mut case = CASE.take().unwrap_or_else(Case::new);
        for (index, change) in changes.iter().enumerate() {
            case.apply(change);
            case.check(if index % 8 == 7 { usize::MAX } else { 3 });
        }
        case.check_writer();
        // Without routes the tables are as in the beginning.
        for index in 0..case.named.len() {
            case.apply(&Change::Remove(index));
        }
        case.check(usize::MAX);
        assert_eq!(case.writer.routes(), (0, 0));
        assert_eq!(case.writer.memory_use().v4, (1 << 24) * 2, "all blocks are free");
        assert_eq!(case.writer.memory_use().v6, (1 << 20) * 4, "all nodes are free");
        for group in std::mem::take(&mut case.groups) {
            case.writer.remove_group(group).expect("no route uses it");
        }
        case.groups = groups(&mut case.writer);
        (case.oracle, case.named) = Default::default();
        CASE.set(Some(case));
    }

    fn check_writer(&self) {
        let mut routes: Vec<(IpNet, GroupId)> =
            self.oracle.routes.iter().map(|(prefix, group)| (*prefix, *group)).collect();
        routes.sort();
        let v4 = self.writer.routes_v4().map(|(prefix, group)| (prefix.into(), group));
        let v6 = self.writer.routes_v6().map(|(prefix, group)| (prefix.into(), group));
        let mut written: Vec<(IpNet, GroupId)> = v4.chain(v6).collect();
        written.sort();
        assert_eq!(written, routes);
    }
}

/// Each case takes a millisecond or two; the fuzz target `fib_tables` runs more of them.
fn config() -> ProptestConfig {
    let config = ProptestConfig::default();
    ProptestConfig { failure_persistence: None, cases: config.cases.min(1_000), ..config }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn every_history_of_ipv4_routes_matches_the_oracle(changes in changes(v4_prefix())) {
        Case::run(&changes);
    }

    #[test]
    fn every_history_of_ipv6_routes_matches_the_oracle(changes in changes(v6_prefix())) {
        Case::run(&changes);
    }
}

#[test]
fn a_default_route_matches_addresses_without_another_route() {
    let mut case = Case::new();
    let prefixes = ["0.0.0.0/0", "::/0", "192.0.2.128/25", "2001:db8::/33", "0.0.0.0/1", "8000::/1"];
    for (index, prefix) in prefixes.iter().enumerate() {
        case.apply(&Change::Insert(prefix.parse().expect("a prefix"), index % 4));
        case.check(usize::MAX);
    }
    for index in 0..prefixes.len() {
        case.apply(&Change::Remove(index));
        case.check(usize::MAX);
    }
}
