//! Readers alongside a writer that never pauses: every lookup returns what was true at some moment of it.
//!
//! A hop identifies the route for which it was made: each route has a group of its own, whose hops are the number of
//! the route. Groups, blocks and nodes are reused constantly, so that one reused too early leads to a hop that does not
//! match the address.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fib::{GroupId, HOPS_MAX, Reader, Writer};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use sim::Random;

/// Number of permanent routes.
const BASES: u32 = 16;

/// Number of more specific routes in each of them, which are inserted and removed.
const CHILDREN: u32 = 24;

/// Encodes a base route and a route in it; child 0 is the base itself.
fn number(base: u32, child: u32) -> u32 {
    base << 16 | child
}

/// Returns a route by base and child; many children share a /24, or a long path of the trie.
fn route(base: u32, child: u32, is_v6: bool) -> IpNet {
    if is_v6 {
        let bits = 0x2001_0db8_u128 << 96 | u128::from(base) << 80;
        let lengths = [60, 64, 52, 96, 128, 50];
        let (address, length) = match child {
            0 => (bits, 48),
            _ => (bits | u128::from(child) << 68, lengths[child as usize % lengths.len()]),
        };
        return Ipv6Net::new(address.into(), length).expect("a length").trunc().into();
    }
    let bits = 10 << 24 | base << 16;
    let lengths = [25, 27, 32, 24, 29, 22];
    let (address, length) = match child {
        0 => (bits, 16),
        _ => (bits | child << 9 | child << 5 & 0xff, lengths[child as usize % lengths.len()]),
    };
    Ipv4Net::new(address.into(), length).expect("a length").trunc().into()
}

/// Returns a random address in the route, in 128 bits or in the lowest 32.
fn address_in(route: IpNet, random: &mut Random) -> u128 {
    let noise = u128::from(random.bits()) << 64 | u128::from(random.bits());
    match route {
        IpNet::V4(net) => u128::from(net.network().to_bits() | noise as u32 & net.hostmask().to_bits()),
        IpNet::V6(net) => net.network().to_bits() | noise & net.hostmask().to_bits(),
    }
}

/// Looks up random addresses until `is_over`, and returns the number of lookups.
fn read(mut reader: Reader<u32>, is_v6: bool, seed: u64, is_over: &AtomicBool) -> u64 {
    let mut random = Random::new(seed, "reader");
    let mut lookups = 0;
    while !is_over.load(Ordering::Relaxed) {
        let targets: Vec<(u32, u128)> = (0..256)
            .map(|_| {
                let (base, child) = (random.below(BASES.into()) as u32, random.below(CHILDREN.into()) as u32);
                (base, address_in(route(base, child, is_v6), &mut random))
            })
            .collect();
        let mut groups: Vec<Option<GroupId>> = vec![None; targets.len()];
        let hash = random.bits() as u32;
        reader.batch(|tables| {
            if is_v6 {
                let keys: Vec<u128> = targets.iter().map(|(_, address)| *address).collect();
                tables.v6.lookup_batch(&keys, &mut groups);
            } else {
                let keys: Vec<u32> = targets.iter().map(|(_, address)| *address as u32).collect();
                tables.v4.lookup_batch(&keys, &mut groups);
            }
            for ((base, address), group) in targets.iter().zip(&groups) {
                let group = group.unwrap_or_else(|| panic!("{address:x}: no route, but its base route is permanent"));
                let hop = tables.groups.select(group, hash).expect("a hop");
                let found = route(hop >> 16, hop & 0xffff, is_v6);
                let fits = match found {
                    IpNet::V4(net) => net.contains(&std::net::Ipv4Addr::from_bits(*address as u32)),
                    IpNet::V6(net) => net.contains(&std::net::Ipv6Addr::from_bits(*address)),
                };
                assert!(fits && hop >> 16 == *base, "{address:x} matched {found}");
            }
        });
        lookups += targets.len() as u64;
    }
    lookups
}

/// Adds a group for one route, with one hop or several.
fn group_of(writer: &mut Writer<u32>, number: u32, hops: usize) -> GroupId {
    writer.add_group(&vec![number; hops.clamp(1, HOPS_MAX)]).expect("a number")
}

/// Changes routes `updates` times, each time with a new group, and removes the former group.
fn write(writer: &mut Writer<u32>, is_v6: bool, seed: u64, updates: u64) {
    let mut random = Random::new(seed, "writer");
    for update in 0..updates {
        let (base, child) = (random.below(BASES.into()) as u32, random.below(CHILDREN.into()) as u32);
        let route = route(base, child, is_v6);
        // Base routes are replaced, never removed.
        let before = if child > 0 && random.chance(0.5) {
            writer.remove(route).expect("room")
        } else {
            let group = group_of(writer, number(base, child), random.below(20) as usize);
            writer.insert(route, group).expect("room")
        };
        if let Some(group) = before {
            // Each route has a group of its own.
            writer.remove_group(group).expect("the group of one route");
        }
        if update % 64 == 0 {
            let group = writer.get(self::route(base, 0, is_v6)).expect("a base");
            writer.set_group(group, &vec![number(base, 0); 1 + update as usize % HOPS_MAX]).expect("room");
        }
    }
}

fn updates_alongside_readers(is_v6: bool, updates: u64) {
    let (mut writer, reader) = fib::tables::<u32>().expect("memory");
    for base in 0..BASES {
        let group = group_of(&mut writer, number(base, 0), 1);
        writer.insert(route(base, 0, is_v6), group).expect("room");
    }
    let is_over = AtomicBool::new(false);
    let lookups = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let (reader, is_over, lookups) = (reader.clone(), &is_over, &lookups);
            scope.spawn(move || {
                let over = SetOnDrop(is_over);
                lookups.fetch_add(read(reader, is_v6, seed, over.0), Ordering::Relaxed);
            });
        }
        let mut done = 0;
        // A reader that panics ends the loop; `scope` propagates the panic.
        while done < updates && !is_over.load(Ordering::Relaxed) {
            write(&mut writer, is_v6, done, 1_000);
            done += 1_000;
        }
        is_over.store(true, Ordering::Relaxed);
    });
    println!("{updates} updates alongside {} lookups", lookups.into_inner());
}

/// Sets the flag when a reader ends, including by a panic.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn no_reader_sees_a_wrong_next_hop_during_updates_of_ipv4() {
    updates_alongside_readers(false, 40_000);
}

#[test]
fn no_reader_sees_a_wrong_next_hop_during_updates_of_ipv6() {
    updates_alongside_readers(true, 40_000);
}

#[test]
#[ignore = "a million updates of each table; runs in ./x exam"]
fn no_reader_sees_a_wrong_next_hop_during_a_million_updates() {
    updates_alongside_readers(false, 1_000_000);
    updates_alongside_readers(true, 1_000_000);
}

#[test]
fn a_stalled_reader_makes_the_writer_fail_with_the_reason_once_memory_runs_out() {
    let (mut writer, mut reader) = fib::tables::<u32>().expect("memory");
    let group = writer.add_group(&[1]).expect("a number");
    let batch = reader.pin();
    let route = "192.0.2.1/32".parse().expect("a prefix");
    for _ in 0..fib::v4::BLOCKS_MAX {
        writer.insert(route, group).expect("a block that is still free");
        writer.remove(route).expect("removal needs no block");
    }
    let start = Instant::now();
    let error = writer.insert(route, group).expect_err("all blocks await the reader");
    assert!(matches!(error, fib::Error::ReaderStalled { .. }), "{error}");
    assert!(start.elapsed() >= Duration::from_secs(1), "the writer waited");
    assert_eq!(writer.get(route), None, "nothing has changed");
    drop(batch);
    writer.insert(route, group).expect("the reader has left");
    assert_eq!(reader.batch(|tables| tables.v4.lookup([192, 0, 2, 1].into())), Some(group));
}
