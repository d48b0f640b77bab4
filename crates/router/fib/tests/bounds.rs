//! Full tables return errors and stay unchanged.

use fib::{Error, GROUPS_MAX, HOPS_MAX};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

fn host_v4(slot: usize) -> IpNet {
    Ipv4Net::new(((slot as u32) << 8 | 1).into(), 32).expect("a length").into()
}

#[test]
fn long_prefixes_in_too_many_24s_are_rejected_by_name_and_the_others_stay() {
    let (mut writer, mut reader) = fib::tables::<u32>().expect("memory");
    let group = writer.add_group(&[1]).expect("a number");
    for slot in 0..fib::v4::BLOCKS_MAX {
        writer.insert(host_v4(slot), group).expect("room");
    }
    let one_more = host_v4(fib::v4::BLOCKS_MAX);
    let error = writer.insert(one_more, group).expect_err("no block is left");
    assert!(error.to_string().starts_with("0.128.0.1/32: "), "{error}");
    assert_eq!(writer.get(one_more), None);
    reader.batch(|tables| {
        assert_eq!(tables.v4.lookup([0, 128, 0, 1].into()), None);
        assert_eq!(tables.v4.lookup([0, 127, 255, 1].into()), Some(group));
    });
    // A longer prefix in a /24 that has a block, and shorter prefixes anywhere, need no further block.
    writer.insert("0.0.0.128/25".parse().expect("a prefix"), group).expect("room");
    writer.insert("10.0.0.0/24".parse().expect("a prefix"), group).expect("room");
    // Removing a prefix frees its block for another one.
    writer.remove(host_v4(7)).expect("no reader stays");
    writer.insert(one_more, group).expect("the freed block");
    assert_eq!(writer.routes(), (fib::v4::BLOCKS_MAX + 2, 0));
}

#[test]
fn groups_are_limited_by_their_numbers_and_numbers_are_reused() {
    let (mut writer, mut reader) = fib::tables::<u32>().expect("memory");
    let hops: Vec<u32> = (0..HOPS_MAX as u32).collect();
    assert_eq!(writer.add_group(&[&hops[..], &[1]].concat()), Err(Error::TooManyHops { hops: 17, hops_max: 16 }));
    let groups: Vec<_> = (0..GROUPS_MAX).map(|_| writer.add_group(&hops).expect("a number")).collect();
    assert_eq!(writer.add_group(&[1]), Err(Error::GroupsFull { groups_max: GROUPS_MAX }));
    assert_eq!(writer.groups(), usize::from(GROUPS_MAX));
    for (hash, hop) in [(0, 0), (u32::MAX, 15), (1 << 28, 1), ((1 << 28) - 1, 0)] {
        assert_eq!(reader.batch(|tables| tables.groups.select(groups[9], hash)), Some(hop), "{hash:x}");
    }
    let route = "2001:db8::/32".parse().expect("a prefix");
    writer.insert(route, groups[9]).expect("room");
    assert_eq!(writer.remove_group(groups[9]), Err(Error::GroupInUse { group: groups[9], routes: 1 }));
    writer.set_group(groups[9], &[]).expect("a group without hops needs no hop array");
    assert_eq!(reader.batch(|tables| tables.groups.select(groups[9], 5)), None, "no next hop");
    assert_eq!(writer.remove(route), Ok(Some(groups[9])));
    writer.remove_group(groups[9]).expect("no route");
    let unknown = Err(Error::GroupUnknown { group: groups[9] });
    assert_eq!(writer.remove_group(groups[9]), unknown);
    assert_eq!(writer.insert(route, groups[9]).map(|_| ()), unknown);
    assert_eq!(writer.hops(groups[9]).map(|_| ()), unknown);
    assert_eq!(writer.add_group(&[7]), Ok(groups[9]), "the only free number");
    assert_eq!(writer.hops(groups[9]), Ok(vec![7]));
}

#[test]
#[ignore = "half a million nodes; runs in ./x exam"]
fn a_full_trie_rejects_prefixes_by_name_and_keeps_the_others() {
    let (mut writer, mut reader) = fib::tables::<u32>().expect("memory");
    let group = writer.add_group(&[1]).expect("a number");
    let mut random = sim::Random::new(1, "hosts");
    let mut hosts = Vec::new();
    let (error, rejected) = loop {
        let bits = u128::from(random.bits()) << 64 | u128::from(random.bits());
        let host: IpNet = Ipv6Net::new(bits.into(), 128).expect("a length").into();
        match writer.insert(host, group) {
            Ok(_) => hosts.push((bits, host)),
            Err(error) => break (error, host),
        }
        assert!(hosts.len() < fib::v6::NODES_MAX, "each prefix needs a node of its own");
    };
    assert!(matches!(error, Error::NodesFull { .. }), "{error}");
    assert!(error.to_string().starts_with(&rejected.to_string()), "{error}");
    assert!(hosts.len() > 20_000, "{}", hosts.len());
    for (bits, _) in &hosts {
        assert_eq!(reader.batch(|tables| tables.v6.lookup((*bits).into())), Some(group));
    }
    // A default route changes every node and needs no further one.
    let other = writer.add_group(&[2]).expect("a number");
    writer.insert("::/0".parse().expect("a prefix"), other).expect("room for a copy of everything");
    for (bits, host) in hosts {
        assert_eq!(reader.batch(|tables| tables.v6.lookup((bits ^ 1).into())), Some(other));
        writer.remove(host).expect("no reader stays");
    }
    assert_eq!(writer.memory_use().v6, (1 << 20) * 4, "nodes are left over");
}
