//! Forwarding tables: how many lookups a core makes in a full table, beside how many loads it makes at the same places;
//! how long a table takes to build, and what changes cost while somebody reads.
//!
//! All figures are *measured*, in the process that calls. Keys are random addresses of random routes. Lookups and floor
//! take turns in rounds, so that a ratio of both is of one and the same machine; a figure is the median of its rounds,
//! and the best round stands beside it.

use std::hint::black_box;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fib::{GroupId, Reader, Writer};
use ipnet::IpNet;
use memmap2::{Advice, MmapMut};
use serde::Serialize;
use sim::Random;

use crate::table::Table;

/// Next-hop groups that routes lead to: as many as a router at an exchange has neighbours.
const GROUPS: u32 = 256;

/// Keys, used in turn: many times what a first-level cache has.
const KEYS: usize = 1 << 20;

/// Lookups of a batch: a vector of packets.
const BATCH: usize = 256;

/// A page of the larger size.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Of tables and keys.
    pub seed: u64,
    /// Routes of IPv4.
    pub routes_v4: usize,
    /// Routes of IPv6.
    pub routes_v6: usize,
    /// Rounds of each figure.
    pub rounds: usize,
    /// Lookups of a round.
    pub lookups: usize,
    /// Changes of routes, half of them removals.
    pub updates: usize,
}

impl Options {
    /// As reported: half a minute.
    pub fn full() -> Options {
        Options { seed: 1, routes_v4: 900_000, routes_v6: 200_000, rounds: 101, lookups: 1 << 20, updates: 1_000_000 }
    }

    /// The same tables, fewer rounds: a few seconds.
    pub fn quick() -> Options {
        Options { rounds: 25, updates: 100_000, ..Options::full() }
    }
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Results {
    /// IPv4.
    pub v4: Family,
    /// IPv6.
    pub v6: Family,
    /// Changes while one reader looks up without a pause.
    pub updates: Vec<Updates>,
    /// What the writer alone needs, without the routes themselves, in bytes.
    pub writer_bytes: usize,
}

/// A figure of several rounds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Rounds {
    /// The median.
    pub median: f64,
    /// The best: nearest to what the machine does when nobody else wants it.
    pub best: f64,
}

/// One of the two tables.
#[derive(Clone, Debug, Serialize)]
pub struct Family {
    /// Routes in it.
    pub routes: usize,
    /// To insert all of them into empty tables, one after another, in no order.
    pub build_ms: f64,
    /// What readers look into, in bytes.
    pub bytes: usize,
    /// Millions of lookups a second in batches, one core.
    pub mlookups_per_s: Rounds,
    /// Millions of loads a second of 2 bytes at random places of as much memory as the table has, independent of one
    /// another: what no table with a load for each lookup can be faster than, when keys are as random.
    pub floor_mloads_per_s: Rounds,
    /// A lookup whose key depends on the one before, in ns.
    pub dependent_ns: Rounds,
    /// A load whose place depends on the one before, in ns, in the same memory as the floor.
    pub floor_dependent_ns: Rounds,
    /// The share of keys that found a group: all of them.
    pub found: f64,
}

/// Changes of routes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Updates {
    /// 4 or 6.
    pub version: u8,
    /// Changes a second with nobody reading.
    pub alone_per_s: f64,
    /// Changes a second while one reader looks up without a pause.
    pub per_s: f64,
    /// Millions of lookups a second of that reader meanwhile.
    pub mlookups_per_s: f64,
    /// And with nobody writing, on the same thread and keys.
    pub mlookups_per_s_before: f64,
}

/// What was measured of a table that may have routes of one family only.
#[derive(Clone, Debug, Serialize)]
pub struct OfTable {
    /// IPv4, if there are routes of it.
    pub v4: Option<Family>,
    /// IPv6, if there are routes of it.
    pub v6: Option<Family>,
    /// Changes while one reader looks up without a pause, of each family that there is.
    pub updates: Vec<Updates>,
    /// What the writer alone needs, without the routes themselves, in bytes.
    pub writer_bytes: usize,
}

/// How often [`run`] says that something begins.
pub const STEPS: u64 = 5;

/// Measures everything, of a generated table with routes of both families; `step` hears what begins.
///
/// # Errors
/// When there is no memory for tables.
pub fn run(options: &Options, step: &mut dyn FnMut(&str)) -> io::Result<Results> {
    let table = Table::generated(options.seed, options.routes_v4, options.routes_v6);
    let OfTable { v4, v6, updates, writer_bytes } = of_table(options, &table, step)?;
    let (v4, v6) = v4.zip(v6).ok_or_else(|| io::Error::other("no routes of one family: ask for some of both"))?;
    Ok(Results { v4, v6, updates, writer_bytes })
}

/// How often [`of_table`] says that something begins.
pub fn steps_of_table(table: &Table) -> u64 {
    1 + 2 * u64::from(!table.v4.is_empty()) + 2 * u64::from(!table.v6.is_empty())
}

/// Measures everything, of this table; `step` hears what begins. Routes lead to as many groups as the table has next
/// hops, or to [`GROUPS`].
///
/// # Errors
/// When there is no memory for tables, or no room in them.
pub fn of_table(options: &Options, table: &Table, step: &mut dyn FnMut(&str)) -> io::Result<OfTable> {
    step("tables");
    let (mut writer, mut reader) = fib::tables::<u32>()?;
    let groups: Vec<GroupId> =
        (0..GROUPS).map(|hop| writer.add_group(&[hop]).map_err(io::Error::other)).collect::<io::Result<_>>()?;
    let group =
        |(at, (prefix, way)): (usize, (IpNet, Option<usize>))| (prefix, groups[way.unwrap_or(at) % groups.len()]);
    let (routes_v4, routes_v6): (Vec<_>, Vec<_>) =
        table.routes().enumerate().map(group).partition(|(prefix, _)| matches!(prefix, IpNet::V4(_)));
    let builds_ms = [build(&mut writer, &routes_v4)?, build(&mut writer, &routes_v6)?];
    let bytes = writer.memory_use();
    let (mut found, mut updates) = ([None, None], Vec::new());
    if !table.v4.is_empty() {
        step("lookups of IPv4");
        let keys = fib::generate::addresses_v4(options.seed, &table.v4, KEYS);
        let lookups = Lookups { options, bytes: bytes.v4, keys: &keys };
        found[0] = Some(lookups.measure(&mut reader)?.of_family(routes_v4.len(), builds_ms[0], bytes.v4));
        step("changes of IPv4");
        updates.push(churn(options, &mut writer, &reader, &routes_v4, &keys, &groups)?);
    }
    if !table.v6.is_empty() {
        step("lookups of IPv6");
        let keys = fib::generate::addresses_v6(options.seed, &table.v6, KEYS);
        let lookups = Lookups { options, bytes: bytes.v6, keys: &keys };
        found[1] = Some(lookups.measure(&mut reader)?.of_family(routes_v6.len(), builds_ms[1], bytes.v6));
        step("changes of IPv6");
        updates.push(churn(options, &mut writer, &reader, &routes_v6, &keys, &groups)?);
    }
    let [v4, v6] = found;
    Ok(OfTable { v4, v6, updates, writer_bytes: bytes.writer })
}

/// Inserts all routes, and says how many milliseconds that took.
fn build(writer: &mut Writer<u32>, routes: &[(IpNet, GroupId)]) -> io::Result<f64> {
    let start = Instant::now();
    for (route, group) in routes {
        writer.insert(*route, *group).map_err(io::Error::other)?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

/// An address of either family, as its table takes it.
trait Address: Copy + Sync {
    /// 4 or 6.
    const VERSION: u8;
    fn lookup(tables: &fib::Tables<u32>, keys: &[Self], groups: &mut [Option<GroupId>]);
    /// The same address, `zero` being zero, which the processor must wait for.
    fn after(self, zero: u16) -> Self;
}

impl Address for u32 {
    const VERSION: u8 = 4;

    fn lookup(tables: &fib::Tables<u32>, keys: &[u32], groups: &mut [Option<GroupId>]) {
        tables.v4.lookup_batch(keys, groups);
    }

    fn after(self, zero: u16) -> u32 {
        self | u32::from(zero) << 8
    }
}

impl Address for u128 {
    const VERSION: u8 = 6;

    fn lookup(tables: &fib::Tables<u32>, keys: &[u128], groups: &mut [Option<GroupId>]) {
        tables.v6.lookup_batch(keys, groups);
    }

    fn after(self, zero: u16) -> u128 {
        self | u128::from(zero) << 112
    }
}

/// The figures of one table.
struct Rates {
    lookups: Rounds,
    floor: Rounds,
    dependent: Rounds,
    floor_dependent: Rounds,
    found: f64,
}

impl Rates {
    fn of_family(self, routes: usize, build_ms: f64, bytes: usize) -> Family {
        Family {
            routes,
            build_ms,
            bytes,
            mlookups_per_s: self.lookups,
            floor_mloads_per_s: self.floor,
            dependent_ns: self.dependent,
            floor_dependent_ns: self.floor_dependent,
            found: self.found,
        }
    }
}

/// One table's lookups.
struct Lookups<'a, A> {
    options: &'a Options,
    /// The table's.
    bytes: usize,
    keys: &'a [A],
}

impl<A: Address> Lookups<'_, A> {
    fn measure(&self, reader: &mut Reader<u32>) -> io::Result<Rates> {
        let memory = FloorMemory::new(self.bytes)?;
        let mut random = Random::new(self.options.seed, "floor");
        let places: Vec<u32> = (0..KEYS).map(|_| random.below(memory.len() as u64) as u32).collect();
        let (mut lookups, mut floor, mut dependent, mut floor_dependent) = (vec![], vec![], vec![], vec![]);
        // Once before it counts.
        let found = overlapped(reader, self.keys, KEYS).found as f64 / KEYS as f64;
        let (many, few) = (self.options.lookups, self.options.lookups / 16);
        for round in 0..self.options.rounds {
            // Each round goes on where the one before ended: none finds in its cache what that left there.
            let (keys, places) = (rotated(self.keys, round * many), rotated(&places, round * many));
            lookups.push(overlapped(reader, keys, many).per_s() / 1e6);
            floor.push(1e-6 / seconds_each(many, |count| memory.load(places, count)));
            dependent.push(1e9 * seconds_each(few, |count| one_after_another(reader, keys, count)));
            floor_dependent.push(1e9 * seconds_each(few, |count| memory.chase(places, count)));
        }
        let largest = f64::max as fn(f64, f64) -> f64;
        Ok(Rates {
            lookups: rounds(lookups, largest),
            floor: rounds(floor, largest),
            dependent: rounds(dependent, f64::min),
            floor_dependent: rounds(floor_dependent, f64::min),
            found,
        })
    }
}

/// The list from a place on, by whole batches; half of it at least.
fn rotated<T>(list: &[T], place: usize) -> &[T] {
    &list[place % (list.len() / 2) / BATCH * BATCH..]
}

/// Lookups and how long they took.
struct Count {
    lookups: usize,
    found: usize,
    elapsed: Duration,
}

impl Count {
    fn per_s(&self) -> f64 {
        self.lookups as f64 / self.elapsed.as_secs_f64()
    }
}

/// At least `lookups` lookups in batches.
fn overlapped<A: Address>(reader: &mut Reader<u32>, keys: &[A], lookups: usize) -> Count {
    let mut groups = [None; BATCH];
    let (mut done, mut found) = (0, 0);
    let start = Instant::now();
    for keys in keys.chunks_exact(BATCH).cycle() {
        if done >= lookups {
            break;
        }
        reader.batch(|tables| A::lookup(tables, keys, &mut groups));
        found += black_box(&groups).iter().flatten().count();
        done += BATCH;
    }
    Count { lookups: done, found, elapsed: start.elapsed() }
}

/// Lookups each of which waits for the one before.
fn one_after_another<A: Address>(reader: &mut Reader<u32>, keys: &[A], lookups: usize) {
    let never = black_box(0);
    let mut zero = 0;
    for keys in keys.chunks_exact(BATCH).cycle().take(lookups / BATCH) {
        reader.batch(|tables| {
            for key in keys {
                let mut group = [None];
                A::lookup(tables, &[key.after(zero)], &mut group);
                zero = group[0].map_or(0, GroupId::get) & never;
            }
        });
    }
    black_box(zero);
}

fn seconds_each(count: usize, work: impl FnOnce(usize)) -> f64 {
    let start = Instant::now();
    work(count);
    start.elapsed().as_secs_f64() / count as f64
}

fn rounds(mut values: Vec<f64>, better: fn(f64, f64) -> f64) -> Rounds {
    values.sort_by(f64::total_cmp);
    let median = values[values.len() / 2];
    Rounds { median, best: values.into_iter().fold(median, better) }
}

/// As much memory as a table has, in large pages as that.
struct FloorMemory {
    map: MmapMut,
}

impl FloorMemory {
    fn new(bytes: usize) -> io::Result<FloorMemory> {
        let bytes = bytes.next_multiple_of(HUGE_PAGE_BYTES);
        let mut map = MmapMut::map_anon(bytes)?;
        // Where there are none, the table has none either.
        let _ = map.advise(Advice::HugePage);
        map.fill(0);
        Ok(FloorMemory { map })
    }

    /// Numbers of 2 bytes.
    fn len(&self) -> usize {
        self.map.len() / 2
    }

    #[inline]
    fn at(&self, place: u32) -> u16 {
        let at = place as usize * 2;
        u16::from_ne_bytes([self.map[at], self.map[at + 1]])
    }

    fn load(&self, places: &[u32], count: usize) {
        let mut loaded = [0; BATCH];
        for places in places.chunks_exact(BATCH).cycle().take(count / BATCH) {
            for (loaded, place) in loaded.iter_mut().zip(places) {
                *loaded = self.at(*place);
            }
            black_box(&loaded);
        }
    }

    fn chase(&self, places: &[u32], count: usize) {
        let mut zero = 0;
        for place in places.iter().cycle().take(count) {
            zero = self.at(*place | u32::from(zero));
        }
        black_box(zero);
    }
}

/// Removes routes and inserts them again, with nobody reading and with somebody.
fn churn<A: Address>(
    options: &Options,
    writer: &mut Writer<u32>,
    reader: &Reader<u32>,
    routes: &[(IpNet, GroupId)],
    keys: &[A],
    groups: &[GroupId],
) -> io::Result<Updates> {
    let alone_per_s = change(options, writer, routes, groups)?;
    let is_over = AtomicBool::new(false);
    let mut readers = (reader.clone(), reader.clone());
    let before = overlapped(&mut readers.0, keys, options.lookups).per_s();
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let start = Instant::now();
            let mut lookups = 0;
            // At least once: who is late to begin still reads.
            loop {
                lookups += overlapped(&mut readers.1, rotated(keys, lookups), BATCH * 16).lookups;
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
            }
            lookups as f64 / start.elapsed().as_secs_f64()
        });
        let per_s = change(options, writer, routes, groups);
        is_over.store(true, Ordering::Relaxed);
        let meanwhile = reading.join().expect("a reader that does not panic");
        Ok(Updates {
            version: A::VERSION,
            alone_per_s,
            per_s: per_s?,
            mlookups_per_s: meanwhile / 1e6,
            mlookups_per_s_before: before / 1e6,
        })
    })
}

/// Changes a second: a route removed, and inserted again, to another group than it led to.
fn change(
    options: &Options,
    writer: &mut Writer<u32>,
    routes: &[(IpNet, GroupId)],
    groups: &[GroupId],
) -> io::Result<f64> {
    let mut random = Random::new(options.seed, "updates");
    let start = Instant::now();
    for _ in 0..options.updates / 2 {
        let (route, _) = routes[random.below(routes.len() as u64) as usize];
        let group = groups[random.below(groups.len() as u64) as usize];
        writer.remove(route).map_err(io::Error::other)?;
        writer.insert(route, group).map_err(io::Error::other)?;
    }
    Ok(options.updates as f64 / start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_run_measures_everything() {
        let options = Options { seed: 3, routes_v4: 2_000, routes_v6: 500, rounds: 2, lookups: 1 << 14, updates: 200 };
        let mut steps = 0;
        let results = run(&options, &mut |_| steps += 1).expect("memory");
        assert_eq!(steps, STEPS);
        for family in [&results.v4, &results.v6] {
            assert_eq!(family.found, 1.0, "keys of routes are found");
            let figures = [family.mlookups_per_s, family.floor_mloads_per_s, family.dependent_ns];
            assert!(figures.iter().all(|figure| figure.median > 0.0), "{family:?}");
        }
        assert!(results.updates.iter().all(|updates| updates.per_s > 0.0 && updates.mlookups_per_s > 0.0));
    }

    #[test]
    fn a_table_of_one_family_has_figures_of_that_one_only() {
        let options = Options { seed: 3, routes_v4: 0, routes_v6: 0, rounds: 1, lookups: 1 << 12, updates: 20 };
        let (table, mut steps) = (Table::generated(3, 0, 200), 0);
        let found = of_table(&options, &table, &mut |_| steps += 1).expect("memory");
        assert_eq!(steps, steps_of_table(&table));
        assert!(found.v4.is_none() && found.v6.is_some_and(|family| family.found == 1.0));
        assert_eq!(found.updates.iter().map(|updates| updates.version).collect::<Vec<_>>(), [6]);
        let error = run(&options, &mut |_| ()).expect_err("nothing to measure");
        assert_eq!(error.to_string(), "no routes of one family: ask for some of both");
    }
}
