//! Applies arbitrary changes to a table: lookups must return the same as a naive longest-prefix match.
#![no_main]

use std::cell::Cell;
use std::collections::BTreeMap;

use arbitrary::Arbitrary;
use fib::{GroupId, Reader, Writer};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Change {
    /// Bits of the prefix: few distinct values, so that prefixes are nested.
    address: u16,
    length: u8,
    /// The group of the route; 0 removes the route.
    group: u8,
    is_v6: bool,
}

const GROUPS: usize = 5;

impl Change {
    /// Returns the prefix, without very short ones, each of which covers millions of entries.
    fn prefix(&self) -> IpNet {
        let bits = u32::from(self.address);
        if self.is_v6 {
            // Four bits each at four positions of the address, including the last.
            let part = |index: u32, shift: u32| u128::from(bits >> (4 * index) & 0xf) << shift;
            let address = 0x2001 << 112 | part(0, 104) | part(1, 80) | part(2, 62) | part(3, 0);
            return Ipv6Net::new(address.into(), 16 + self.length % 113).expect("a length").trunc().into();
        }
        let address = bits << 17 | bits >> 12;
        Ipv4Net::new(address.into(), 14 + self.length % 19).expect("a length").trunc().into()
    }
}

struct Tables {
    writer: Writer<u32>,
    reader: Reader<u32>,
    groups: Vec<GroupId>,
}

thread_local!(static TABLES: Cell<Option<Tables>> = const { Cell::new(None) });

fn tables() -> Tables {
    let (mut writer, reader) = fib::tables().expect("memory");
    let groups = (0..GROUPS as u32).map(|hop| writer.add_group(&[hop]).expect("a number")).collect();
    Tables { writer, reader, groups }
}

fn expected(routes: &BTreeMap<IpNet, GroupId>, address: IpNet) -> Option<GroupId> {
    let covering = routes.iter().filter(|(prefix, _)| prefix.contains(&address));
    covering.max_by_key(|(prefix, _)| prefix.prefix_len()).map(|(_, group)| *group)
}

fuzz_target!(|changes: Vec<Change>| {
    let mut tables = TABLES.take().unwrap_or_else(tables);
    let mut routes = BTreeMap::new();
    for change in changes.iter().take(64) {
        let prefix = change.prefix();
        let before = match usize::from(change.group) % (GROUPS + 1) {
            0 => tables.writer.remove(prefix).map(|before| (before, routes.remove(&prefix))),
            group => {
                let group = tables.groups[group - 1];
                tables.writer.insert(prefix, group).map(|before| (before, routes.insert(prefix, group)))
            }
        };
        let (before, oracle) = before.expect("room");
        assert_eq!(before, oracle);
    }
    for change in changes.iter().take(64) {
        let prefix = change.prefix();
        for address in [prefix.network(), prefix.broadcast()] {
            let found = tables.reader.batch(|tables| match address {
                std::net::IpAddr::V4(address) => tables.v4.lookup(address),
                std::net::IpAddr::V6(address) => tables.v6.lookup(address),
            });
            assert_eq!(found, expected(&routes, address.into()), "{address}");
        }
    }
    for prefix in routes.keys() {
        tables.writer.remove(*prefix).expect("room");
    }
    assert_eq!(tables.writer.routes(), (0, 0));
    assert_eq!(tables.writer.memory_use().v6, (1 << 20) * 4, "all nodes are free");
    TABLES.set(Some(tables));
});
