//! Readers beside a writer that never stops: no lookup ever finds what was not right at some moment of it.
//!
//! What a hop is tells for whom it was made: each route gets a group of its own, whose hops are the route's number.
//! Groups, blocks and nodes come round again and again, so one that is used again too early leads to a hop that does
//! not fit the address.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fib::{GroupId, HOPS_MAX, Reader, Writer};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use sim::Random;

/// Routes that are there all the time, each with a number.
const BASES: u32 = 16;

/// Routes in each of them that come and go.
const CHILDREN: u32 = 24;

/// A number that says which base, and which route in it: 0 is the base itself.
fn number(base: u32, child: u32) -> u32 {
    base << 16 | child
}

/// The base's route, or one in it, of which many lie in the same /24, or far down the same way of a trie.
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

/// An address of the route, in 128 bits or in the lowest 32.
fn address_in(route: IpNet, random: &mut Random) -> u128 {
    let noise = u128::from(random.bits()) << 64 | u128::from(random.bits());
    match route {
        IpNet::V4(net) => u128::from(net.network().to_bits() | noise as u32 & net.hostmask().to_bits()),
        IpNet::V6(net) => net.network().to_bits() | noise & net.hostmask().to_bits(),
    }
}

/// What a reader does until it is over; how many lookups.
fn read(mut reader: Reader<u32>, is_v6: bool, seed: u64, is_over: &AtomicBool) -> u64 {
    let mut random = Random::new(seed, "reader");
    let mut lookups = 0;
    while !is_over.load(Ordering::Relaxed) {
        let places: Vec<(u32, u128)> = (0..256)
            .map(|_| {
                let (base, child) = (random.below(BASES.into()) as u32, random.below(CHILDREN.into()) as u32);
                (base, address_in(route(base, child, is_v6), &mut random))
            })
            .collect();
        let mut groups: Vec<Option<GroupId>> = vec![None; places.len()];
        let hash = random.bits() as u32;
        reader.batch(|tables| {
            if is_v6 {
                let keys: Vec<u128> = places.iter().map(|(_, address)| *address).collect();
                tables.v6.lookup_batch(&keys, &mut groups);
            } else {
                let keys: Vec<u32> = places.iter().map(|(_, address)| *address as u32).collect();
                tables.v4.lookup_batch(&keys, &mut groups);
            }
            for ((base, address), group) in places.iter().zip(&groups) {
                let group = group.unwrap_or_else(|| panic!("{address:x}: no route, and there always is one"));
                let hop = tables.groups.select(group, hash).expect("a hop");
                let found = route(hop >> 16, hop & 0xffff, is_v6);
                let fits = match found {
                    IpNet::V4(net) => net.contains(&std::net::Ipv4Addr::from_bits(*address as u32)),
                    IpNet::V6(net) => net.contains(&std::net::Ipv6Addr::from_bits(*address)),
                };
                assert!(fits && hop >> 16 == *base, "{address:x} was sent by {found}");
            }
        });
        lookups += places.len() as u64;
    }
    lookups
}

/// A group of the route's own: one hop, or several.
fn group_of(writer: &mut Writer<u32>, number: u32, hops: usize) -> GroupId {
    writer.add_group(&vec![number; hops.clamp(1, HOPS_MAX)]).expect("a number")
}

/// Changes routes `updates` times, each time with a new group, and takes the old group out.
fn write(writer: &mut Writer<u32>, is_v6: bool, seed: u64, updates: u64) {
    let mut random = Random::new(seed, "writer");
    for update in 0..updates {
        let (base, child) = (random.below(BASES.into()) as u32, random.below(CHILDREN.into()) as u32);
        let route = route(base, child, is_v6);
        // A base's route is replaced, never removed.
        let before = if child > 0 && random.chance(0.5) {
            writer.remove(route).expect("room")
        } else {
            let group = group_of(writer, number(base, child), random.below(20) as usize);
            writer.insert(route, group).expect("room")
        };
        if let Some(group) = before {
            // Two routes of one prefix have one group: numbers beyond the table's own are never shared.
            writer.remove_group(group).expect("the group of one route");
        }
        if update % 64 == 0 {
            let group = writer.get(self::route(base, 0, is_v6)).expect("a base");
            writer.set_group(group, &vec![number(base, 0); 1 + update as usize % HOPS_MAX]).expect("room");
        }
    }
}

fn updates_beside_readers(is_v6: bool, updates: u64) {
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
                let over = Over(is_over);
                lookups.fetch_add(read(reader, is_v6, seed, over.0), Ordering::Relaxed);
            });
        }
        let mut done = 0;
        // A reader that panics ends it; `scope` tells.
        while done < updates && !is_over.load(Ordering::Relaxed) {
            write(&mut writer, is_v6, done, 1_000);
            done += 1_000;
        }
        is_over.store(true, Ordering::Relaxed);
    });
    println!("{updates} updates beside {} lookups", lookups.into_inner());
}

/// Says that it is over when a reader ends, in a panic too.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn no_reader_sees_a_wrong_next_hop_beside_updates_of_ipv4() {
    updates_beside_readers(false, 40_000);
}

#[test]
fn no_reader_sees_a_wrong_next_hop_beside_updates_of_ipv6() {
    updates_beside_readers(true, 40_000);
}

#[test]
#[ignore = "a million updates of each table; in ./x exam"]
fn no_reader_sees_a_wrong_next_hop_beside_a_million_updates() {
    updates_beside_readers(false, 1_000_000);
    updates_beside_readers(true, 1_000_000);
}

#[test]
fn a_reader_that_stays_makes_a_writer_fail_with_the_reason_once_there_is_no_other_room() {
    let (mut writer, mut reader) = fib::tables::<u32>().expect("memory");
    let group = writer.add_group(&[1]).expect("a number");
    let batch = reader.pin();
    let route = "192.0.2.1/32".parse().expect("a prefix");
    for _ in 0..fib::v4::BLOCKS_MAX {
        writer.insert(route, group).expect("blocks that nobody has seen");
        writer.remove(route).expect("no need of room");
    }
    let start = Instant::now();
    let error = writer.insert(route, group).expect_err("all blocks wait for the reader");
    assert!(matches!(error, fib::Error::ReaderStalled { .. }), "{error}");
    assert!(start.elapsed() >= Duration::from_secs(1), "it was waited for");
    assert_eq!(writer.get(route), None, "nothing has changed");
    drop(batch);
    writer.insert(route, group).expect("the reader has left");
    assert_eq!(reader.batch(|tables| tables.v4.lookup([192, 0, 2, 1].into())), Some(group));
}
