//! Benchmark of forwarding tables: the lookups a second of one core in a full table, compared with its random loads
//! from as much memory; the time to build a table; and the cost of changes while a reader looks up.
//!
//! All figures are *measured* in the calling process. Keys are random addresses of random routes. Rounds of lookups and
//! of loads (the floor) alternate, so that their ratio refers to the same state of the machine. A figure is the median
//! over its rounds; the best round is reported next to it.

use std::hint::black_box;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fib::{GroupId, Reader, Writer};
use ipnet::IpNet;
use memmap2::{Advice, MmapMut};
use serde::Serialize;
use sim::Random;

use crate::statistics::Rounds;
use crate::table::Table;

/// The number of next-hop groups that routes lead to: as many as a router at an Internet exchange has neighbours.
const GROUPS: u32 = 256;

/// The number of keys, used round robin: many times what a first-level cache holds.
const KEYS: usize = 1 << 20;

/// Lookups in a batch: a vector of packets.
const BATCH: usize = 256;

/// The size of a huge page.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// What a run measures.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The seed of tables and keys.
    pub seed: u64,
    /// The number of IPv4 routes.
    pub routes_v4: usize,
    /// The number of IPv6 routes.
    pub routes_v6: usize,
    /// The rounds of each figure.
    pub rounds: usize,
    /// The lookups of a round.
    pub lookups: usize,
    /// The number of route changes, half of them removals.
    pub updates: usize,
}

impl Options {
    /// The options of the committed results: half a minute.
    pub fn full() -> Options {
        Options { seed: 1, routes_v4: 900_000, routes_v6: 200_000, rounds: 101, lookups: 1 << 20, updates: 1_000_000 }
    }

    /// The same tables with fewer rounds: a few seconds.
    pub fn quick() -> Options {
        Options { rounds: 25, updates: 100_000, ..Options::full() }
    }
}

/// The results of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Results {
    /// IPv4.
    pub v4: Family,
    /// IPv6.
    pub v6: Family,
    /// Route changes while one reader looks up without a pause.
    pub updates: Vec<Updates>,
    /// The memory of the writer alone, without the routes themselves, in bytes.
    pub writer_bytes: usize,
}

/// The results for the table of one family.
#[derive(Clone, Debug, Serialize)]
pub struct Family {
    /// The number of routes.
    pub routes: usize,
    /// The time to insert all routes into empty tables, one after another, in random order, in ms.
    pub build_ms: f64,
    /// The memory that readers access, in bytes.
    pub bytes: usize,
    /// Millions of lookups a second in batches, on one core.
    pub mlookups_per_s: Rounds,
    /// Millions of independent loads of 2 bytes a second at random offsets of as much memory as the table has: the
    /// upper bound for a table that needs one load for each lookup, with keys as random.
    pub floor_mloads_per_s: Rounds,
    /// The time of a lookup whose key depends on the previous result, in ns.
    pub dependent_ns: Rounds,
    /// The time of a load whose offset depends on the previous value, in ns, in the same memory as the floor.
    pub floor_dependent_ns: Rounds,
    /// The share of keys for which a group was found: 1, unless the table is wrong.
    pub found: f64,
}

/// The rate of route changes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Updates {
    /// 4 or 6.
    pub version: u8,
    /// Changes a second without a reader.
    pub alone_per_s: f64,
    /// Changes a second while one reader looks up without a pause.
    pub per_s: f64,
    /// Millions of lookups a second of that reader during the changes.
    pub mlookups_per_s: f64,
    /// Millions of lookups a second without changes, on the same thread and keys.
    pub mlookups_per_s_before: f64,
}

/// The results for a table that may have routes of one family only.
#[derive(Clone, Debug, Serialize)]
pub struct FibTableResults {
    /// IPv4, if the table has IPv4 routes.
    pub v4: Option<Family>,
    /// IPv6, if the table has IPv6 routes.
    pub v6: Option<Family>,
    /// Route changes while one reader looks up without a pause, for each family in the table.
    pub updates: Vec<Updates>,
    /// The memory of the writer alone, without the routes themselves, in bytes.
    pub writer_bytes: usize,
}

/// The number of steps that [`run`] reports.
pub const STEPS: u64 = 5;

/// Measures everything on a generated table with routes of both families; `step` is called with the name of each step
/// that begins.
///
/// # Errors
/// Fails if there is no memory for the tables.
pub fn run(options: &Options, step: &mut dyn FnMut(&str)) -> io::Result<Results> {
    let table = Table::generated(options.seed, options.routes_v4, options.routes_v6);
    let FibTableResults { v4, v6, updates, writer_bytes } = run_table(options, &table, step)?;
    let (v4, v6) = v4.zip(v6).ok_or_else(|| io::Error::other("no routes of one family; ask for routes of both"))?;
    Ok(Results { v4, v6, updates, writer_bytes })
}

/// Returns the number of steps that [`run_table`] reports.
pub fn steps_of_table(table: &Table) -> u64 {
    1 + 2 * u64::from(!table.v4.is_empty()) + 2 * u64::from(!table.v6.is_empty())
}

/// Measures everything on this table; `step` is called with the name of each step that begins. Routes lead to as many
/// groups as the table has next hops, or to [`GROUPS`].
///
/// # Errors
/// Fails if there is no memory for the tables or they have no room.
pub fn run_table(options: &Options, table: &Table, step: &mut dyn FnMut(&str)) -> io::Result<FibTableResults> {
    step("tables");
    let (mut writer, mut reader) = fib::tables::<u32>()?;
    let groups: Vec<GroupId> =
        (0..GROUPS).map(|hop| writer.add_group(&[hop]).map_err(io::Error::other)).collect::<io::Result<_>>()?;
    let group = |(at, (prefix, next_hop)): (usize, (IpNet, Option<usize>))| {
        (prefix, groups[next_hop.unwrap_or(at) % groups.len()])
    };
    let (routes_v4, routes_v6): (Vec<_>, Vec<_>) =
        table.routes().enumerate().map(group).partition(|(prefix, _)| matches!(prefix, IpNet::V4(_)));
    let builds_ms = [build(&mut writer, &routes_v4)?, build(&mut writer, &routes_v6)?];
    let bytes = writer.memory_use();
    let (mut found, mut updates) = ([None, None], Vec::new());
    if !table.v4.is_empty() {
        step("lookups, IPv4");
        let keys = fib::generate::addresses_v4(options.seed, &table.v4, KEYS);
        let lookups = Lookups { options, bytes: bytes.v4, keys: &keys };
        found[0] = Some(lookups.measure(&mut reader)?.of_family(routes_v4.len(), builds_ms[0], bytes.v4));
        step("route changes, IPv4");
        updates.push(churn(options, &mut writer, &reader, &routes_v4, &keys, &groups)?);
    }
    if !table.v6.is_empty() {
        step("lookups, IPv6");
        let keys = fib::generate::addresses_v6(options.seed, &table.v6, KEYS);
        let lookups = Lookups { options, bytes: bytes.v6, keys: &keys };
        found[1] = Some(lookups.measure(&mut reader)?.of_family(routes_v6.len(), builds_ms[1], bytes.v6));
        step("route changes, IPv6");
        updates.push(churn(options, &mut writer, &reader, &routes_v6, &keys, &groups)?);
    }
    let [v4, v6] = found;
    Ok(FibTableResults { v4, v6, updates, writer_bytes: bytes.writer })
}

/// Inserts all routes, and returns the milliseconds that this took.
fn build(writer: &mut Writer<u32>, routes: &[(IpNet, GroupId)]) -> io::Result<f64> {
    let start = Instant::now();
    for (route, group) in routes {
        writer.insert(*route, *group).map_err(io::Error::other)?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

/// An address of either family, as a lookup key.
trait Address: Copy + Sync {
    /// 4 or 6.
    const VERSION: u8;
    fn lookup(tables: &fib::Tables<u32>, keys: &[Self], groups: &mut [Option<GroupId>]);
    /// Returns the same address, given that `zero` is 0, with a data dependency that the processor must wait for.
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

/// The lookups in one table.
struct Lookups<'a, A> {
    options: &'a Options,
    /// The memory of the table, in bytes.
    bytes: usize,
    keys: &'a [A],
}

impl<A: Address> Lookups<'_, A> {
    fn measure(&self, reader: &mut Reader<u32>) -> io::Result<Rates> {
        let memory = FloorMemory::new(self.bytes)?;
        let mut random = Random::new(self.options.seed, "floor");
        let offsets: Vec<u32> = (0..KEYS).map(|_| random.below(memory.len() as u64) as u32).collect();
        let (mut lookups, mut floor, mut dependent, mut floor_dependent) = (vec![], vec![], vec![], vec![]);
        // A first run, which is not counted, warms the caches.
        let found = batched_lookups(reader, self.keys, KEYS).found as f64 / KEYS as f64;
        let (many, few) = (self.options.lookups, self.options.lookups / 16);
        for round in 0..self.options.rounds {
            // Each round continues where the previous one ended, so that it does not find its data in the cache.
            let (keys, offsets) = (rotated(self.keys, round * many), rotated(&offsets, round * many));
            lookups.push(batched_lookups(reader, keys, many).per_s() / 1e6);
            floor.push(1e-6 / seconds_each(many, |count| memory.load(offsets, count)));
            dependent.push(1e9 * seconds_each(few, |count| dependent_lookups(reader, keys, count)));
            floor_dependent.push(1e9 * seconds_each(few, |count| memory.chase(offsets, count)));
        }
        Ok(Rates {
            lookups: Rounds::of_rates(lookups),
            floor: Rounds::of_rates(floor),
            dependent: Rounds::of_times(dependent),
            floor_dependent: Rounds::of_times(floor_dependent),
            found,
        })
    }
}

/// Returns the list from an index on, aligned to whole batches; at least half of the list remains.
fn rotated<T>(list: &[T], offset: usize) -> &[T] {
    &list[offset % (list.len() / 2) / BATCH * BATCH..]
}

/// A number of lookups and the time that they took.
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

/// Makes at least `lookups` lookups in batches.
fn batched_lookups<A: Address>(reader: &mut Reader<u32>, keys: &[A], lookups: usize) -> Count {
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

/// Makes lookups each of which waits for the previous one.
fn dependent_lookups<A: Address>(reader: &mut Reader<u32>, keys: &[A], lookups: usize) {
    let zero_mask = black_box(0);
    let mut zero = 0;
    for keys in keys.chunks_exact(BATCH).cycle().take(lookups / BATCH) {
        reader.batch(|tables| {
            for key in keys {
                let mut group = [None];
                A::lookup(tables, &[key.after(zero)], &mut group);
                zero = group[0].map_or(0, GroupId::get) & zero_mask;
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

/// As much memory as a table has, in huge pages like the table.
struct FloorMemory {
    map: MmapMut,
}

impl FloorMemory {
    fn new(bytes: usize) -> io::Result<FloorMemory> {
        let bytes = bytes.next_multiple_of(HUGE_PAGE_BYTES);
        let mut map = MmapMut::map_anon(bytes)?;
        // If there are no huge pages, the table has none either.
        let _ = map.advise(Advice::HugePage);
        map.fill(0);
        Ok(FloorMemory { map })
    }

    /// The length in numbers of 2 bytes.
    fn len(&self) -> usize {
        self.map.len() / 2
    }

    #[inline]
    fn at(&self, offset: u32) -> u16 {
        let at = offset as usize * 2;
        u16::from_ne_bytes([self.map[at], self.map[at + 1]])
    }

    fn load(&self, offsets: &[u32], count: usize) {
        let mut loaded = [0; BATCH];
        for offsets in offsets.chunks_exact(BATCH).cycle().take(count / BATCH) {
            for (loaded, offset) in loaded.iter_mut().zip(offsets) {
                *loaded = self.at(*offset);
            }
            black_box(&loaded);
        }
    }

    fn chase(&self, offsets: &[u32], count: usize) {
        let mut zero = 0;
        for offset in offsets.iter().cycle().take(count) {
            zero = self.at(*offset | u32::from(zero));
        }
        black_box(zero);
    }
}

/// Removes routes and inserts them again, without a reader and with one.
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
    let before = batched_lookups(&mut readers.0, keys, options.lookups).per_s();
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let start = Instant::now();
            let mut lookups = 0;
            // At least once, so that a reader that starts late still reads.
            loop {
                lookups += batched_lookups(&mut readers.1, rotated(keys, lookups), BATCH * 16).lookups;
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
            }
            lookups as f64 / start.elapsed().as_secs_f64()
        });
        let per_s = change(options, writer, routes, groups);
        is_over.store(true, Ordering::Relaxed);
        let during_changes = reading.join().expect("a reader that does not panic");
        Ok(Updates {
            version: A::VERSION,
            alone_per_s,
            per_s: per_s?,
            mlookups_per_s: during_changes / 1e6,
            mlookups_per_s_before: before / 1e6,
        })
    })
}

/// Returns the changes a second; a change removes a route, or inserts it again with a random group.
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
        let found = run_table(&options, &table, &mut |_| steps += 1).expect("memory");
        assert_eq!(steps, steps_of_table(&table));
        assert!(found.v4.is_none() && found.v6.is_some_and(|family| family.found == 1.0));
        assert_eq!(found.updates.iter().map(|updates| updates.version).collect::<Vec<_>>(), [6]);
        let error = run(&options, &mut |_| ()).expect_err("nothing to measure");
        assert_eq!(error.to_string(), "no routes of one family; ask for routes of both");
    }
}
