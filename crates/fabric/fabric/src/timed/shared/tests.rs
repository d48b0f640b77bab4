//! The tests set the time, so each result is exact. The conformance suite and the programs' own tests use the real
//! clock.

use super::span::AHEAD_NS_MAX;
use super::*;
use proptest::prelude::*;
use std::thread;

const SHAPE: SharedLayout = SharedLayout { window_bytes: 4096, words_bytes: 512 };
const ONE_WAY_NS: u64 = 500;

/// One byte per nanosecond, packets of 256 bytes with 24 bytes of overhead: round figures.
const TIMING: LinkTiming =
    LinkTiming { one_way_ns: ONE_WAY_NS, bytes_per_us: 1000, header_bytes: 24, payload_bytes_max: 256 };
/// Transmission time of a packet with one word.
const WORD_NS: u64 = 32;

/// A clock that only the test and waiters advance.
#[derive(Debug, Clone, Default)]
struct ManualClock(Arc<AtomicU64>);

impl Clock for ManualClock {
    fn now_ns(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    fn wait_until(&self, time_ns: u64) {
        self.0.fetch_max(time_ns, Ordering::SeqCst);
    }
}

struct Pair {
    a: SharedWindows<ManualClock>,
    b: SharedWindows<ManualClock>,
    memory: [Region; 2],
    pacers: [Pacer; 2],
    clock: ManualClock,
}

impl Pair {
    fn new() -> Self {
        let memory = [(); 2].map(|()| Region::heap(SHAPE.memory_bytes()));
        let pacers = [(); 2].map(|()| Pacer::in_region(Region::heap(64)));
        let clock = ManualClock::default();
        let [a, b] = [0, 1].map(|own| endpoint(&memory, &pacers, own, &clock));
        Self { a, b, memory, pacers, clock }
    }

    /// The endpoint as another process would map it.
    fn reopened(&self, own: usize) -> SharedWindows<ManualClock> {
        endpoint(&self.memory, &self.pacers, own, &self.clock)
    }

    fn at(&self, time_ns: u64) -> &Self {
        self.clock.wait_until(time_ns);
        self
    }

    /// The word that b loads.
    fn word(&self, offset: usize) -> u64 {
        self.b.inbound().load_u64(offset, Ordering::Acquire)
    }
}

fn endpoint(memory: &[Region; 2], pacers: &[Pacer; 2], own: usize, clock: &ManualClock) -> SharedWindows<ManualClock> {
    let (pacer, peer_pacer) = (pacers[own].clone(), pacers[1 - own].clone());
    let setup = SharedConfig { layout: SHAPE, timing: TIMING, pacer, peer_pacer };
    SharedWindows::with_clock(&memory[own], &memory[1 - own], setup, clock.clone()).expect("windows")
}

#[test]
fn miri_a_word_and_a_line_arrive_after_transmission_time_and_delay() {
    for offset in [8, 1032] {
        let pair = Pair::new();
        pair.at(1_000).a.outbound().store_u64(offset, 7, Ordering::Release);
        assert_eq!(pair.at(1_000 + WORD_NS + ONE_WAY_NS - 1).word(offset), 0);
        assert_eq!(pair.at(1_000 + WORD_NS + ONE_WAY_NS).word(offset), 7);
        let pair = Pair::new();
        pair.a.outbound().store_line(offset - 8, &[1, 2, 3]);
        assert_eq!(pair.at(24 + 24 + ONE_WAY_NS - 1).word(offset), 0);
        assert_eq!(pair.at(24 + 24 + ONE_WAY_NS).word(offset), 2);
    }
}

/// Up to seven stores arrive one by one, more of them together.
#[test]
fn miri_each_value_of_a_word_arrives_at_its_time() {
    let pair = Pair::new();
    let outbound = pair.a.outbound();
    (1..=6).for_each(|value| outbound.store_u64(64, value, Ordering::Release));
    for value in 0..=6 {
        assert_eq!(pair.at(ONE_WAY_NS + value * WORD_NS).word(64), value);
    }
    let begun_ns = pair.clock.now_ns();
    (11..=30).for_each(|value| outbound.store_u64(64, value, Ordering::Release));
    let mut seen = Vec::new();
    for packet in 0..=20 {
        seen.push(pair.at(begun_ns + ONE_WAY_NS + packet * WORD_NS).word(64));
    }
    let mut ordered = seen.clone();
    ordered.sort_unstable();
    assert_eq!((seen[0], seen[20], &seen), (6, 30, &ordered));
    assert!(seen.iter().enumerate().all(|(packet, value)| *value <= 10 + packet as u64 || *value == 6), "{seen:?}");
}

#[test]
fn miri_a_store_of_the_owner_is_visible_at_once_and_stores_under_way_follow_it() {
    let pair = Pair::new();
    let inbound = pair.b.inbound();
    inbound.store_u64(0, 3, Ordering::Relaxed);
    assert_eq!(pair.word(0), 3);
    pair.a.outbound().store_u64(0, 1, Ordering::Release);
    inbound.store_u64(0, 4, Ordering::Relaxed);
    assert_eq!(pair.word(0), 4);
    assert_eq!(pair.at(1_000).word(0), 1);
    inbound.store_u64(0, 0, Ordering::Relaxed);
    pair.a.outbound().store_u64(0, 2, Ordering::Release);
    assert_eq!(pair.word(0), 0);
    assert_eq!(pair.at(2_000).word(0), 2);
}

#[test]
fn miri_two_mappings_of_an_endpoint_are_one_endpoint() {
    let pair = Pair::new();
    pair.a.outbound().store_u64(0, 1, Ordering::Release);
    pair.reopened(0).outbound().store_u64(0, 2, Ordering::Release);
    let other = pair.reopened(1).inbound();
    assert_eq!((pair.at(ONE_WAY_NS + WORD_NS).word(0), other.load_u64(0, Ordering::Acquire)), (1, 1));
    pair.at(ONE_WAY_NS + 2 * WORD_NS);
    assert_eq!((pair.word(0), other.load_u64(0, Ordering::Acquire)), (2, 2), "and both share the rate");
}

#[test]
fn stores_do_not_wait_for_loads_of_the_peer() {
    let pair = Pair::new();
    let outbound = pair.a.outbound();
    (0..10_000).for_each(|value| outbound.store_u64(0, value, Ordering::Release));
    outbound.write(512, &[7; 3584]);
    outbound.flush();
    assert_eq!((pair.word(0), pair.word(512), pair.word(4088)), (9_999, 0x0707_0707_0707_0707, 0x0707_0707_0707_0707));
}

#[test]
fn bulk_is_no_faster_than_the_link() {
    let pair = Pair::new();
    let bytes: Vec<u8> = (0..3000).map(|index| index as u8).collect();
    pair.a.outbound().write(512, &bytes);
    pair.a.outbound().store_u64(0, 1, Ordering::Release);
    // Eleven full packets and one of 184 bytes, the words that could publish a record, and the word after them.
    let done_ns = 3000 + 12 * 24 + 3 * WORD_NS + ONE_WAY_NS;
    assert_eq!(pair.at(done_ns - 1).word(0), 0);
    assert_eq!(pair.at(done_ns).word(0), 1);
    let mut found = vec![0; 3000];
    pair.b.inbound().read(512, &mut found);
    assert!(found == bytes);
}

/// However long the emulation takes to write the payload.
#[test]
fn miri_the_words_that_publish_a_record_arrive_with_its_payload() {
    let pair = Pair::new();
    let outbound = pair.a.outbound();
    outbound.write(1040, &[1; 100]);
    pair.at(10_000);
    outbound.store_u64(1032, 2, Ordering::Relaxed);
    outbound.store_u64(1024, 3, Ordering::Release);
    assert_eq!((pair.word(1024), pair.word(1032)), (3, 2));
    outbound.store_u64(1152, 4, Ordering::Release);
    assert_eq!(pair.word(1152), 0, "the third word is an ordinary store");
    assert_eq!(pair.at(10_000 + WORD_NS + ONE_WAY_NS).word(1152), 4);
}

#[test]
fn miri_the_part_of_a_span_that_has_not_arrived_reads_as_zeros() {
    let pair = Pair::new();
    let outbound = pair.a.outbound();
    // Pieces of 1024 bytes: four packets.
    outbound.write(500, &[9; 12 + 1024 + 200]);
    let piece_ns = 1024 + 4 * 24;
    let found = |time_ns: u64| {
        let mut bytes = vec![0; 12 + 1024 + 200];
        pair.at(time_ns).b.inbound().read(500, &mut bytes);
        [&bytes[..12], &bytes[12..12 + 1024], &bytes[12 + 1024..]].map(|part| part.iter().all(|byte| *byte == 9))
    };
    let words_ns = 12 + 24 + ONE_WAY_NS;
    assert_eq!(found(words_ns - 1), [false; 3]);
    assert_eq!(found(words_ns), [true, false, false]);
    assert_eq!(found(words_ns + piece_ns), [true, true, false]);
    assert_eq!(found(words_ns + piece_ns + 224 + 2 * WORD_NS), [true; 3]);
}

/// Otherwise a waiter that polls once more before it blocks would miss what was stored before its flag could be seen.
#[test]
fn miri_a_flush_waits_for_what_the_peer_stored_before_it() {
    let pair = Pair::new();
    pair.a.outbound().store_u64(0, 1, Ordering::Release);
    pair.a.outbound().flush();
    assert_eq!(pair.clock.now_ns(), WORD_NS + 2 * ONE_WAY_NS);
    let begun_ns = pair.clock.now_ns();
    // These stores take five times as long as the delay.
    pair.b.outbound().write(512, &[1; 2560]);
    pair.b.outbound().store_u64(0, 5, Ordering::Release);
    pair.a.outbound().flush();
    assert_eq!(pair.a.inbound().load_u64(0, Ordering::Acquire), 5);
    assert_eq!(pair.clock.now_ns(), begun_ns + 2560 + 10 * 24 + 3 * WORD_NS + ONE_WAY_NS);
}

#[test]
fn miri_wait_for_arrivals_waits_for_what_the_peer_has_stored() {
    let pair = Pair::new();
    pair.a.outbound().write(512, &[1; 1024]);
    pair.a.outbound().store_u64(0, 1, Ordering::Release);
    pair.b.wait_for_arrivals();
    assert_eq!((pair.word(0), pair.clock.now_ns()), (1, 1024 + 4 * 24 + 3 * WORD_NS + ONE_WAY_NS));
}

#[test]
fn a_corrupted_pacer_delays_nobody_for_long() {
    let corrupted = Region::heap(64);
    corrupted.store_u64(0, u64::MAX, Ordering::Relaxed);
    let pair = Pair { pacers: [(); 2].map(|()| Pacer::in_region(corrupted.clone())), ..Pair::new() };
    let (a, b) = (pair.reopened(0), pair.reopened(1));
    a.outbound().flush();
    a.wait_for_arrivals();
    assert!(pair.clock.now_ns() <= 3 * (AHEAD_NS_MAX + ONE_WAY_NS));
    let begun_ns = pair.clock.now_ns();
    a.outbound().store_u64(0, 1, Ordering::Release);
    pair.at(begun_ns + WORD_NS + ONE_WAY_NS);
    assert_eq!(b.inbound().load_u64(0, Ordering::Acquire), 1);
}

/// Loads that find a history in the middle of a store never return a value that was not stored, and values do not go
/// back.
#[test]
fn a_reader_of_a_word_that_only_grows_never_sees_it_shrink() {
    const ROUNDS: u64 = 20_000;
    let timing = LinkTiming { one_way_ns: 0, bytes_per_us: 100_000_000, ..TIMING };
    let memory = [(); 2].map(|()| Region::heap(SHAPE.memory_bytes()));
    let setup = || SharedConfig { layout: SHAPE, timing, pacer: Pacer::new(), peer_pacer: Pacer::new() };
    let a = SharedWindows::new(&memory[0], &memory[1], setup()).expect("windows");
    let b = SharedWindows::new(&memory[1], &memory[0], setup()).expect("windows");
    let offset = 64;
    thread::scope(|scope| {
        let (outbound, inbound) = (a.outbound(), b.inbound());
        scope.spawn(move || (1..=ROUNDS).for_each(|value| outbound.store_u64(offset, value, Ordering::Release)));
        let mut last = 0;
        while last < ROUNDS {
            let value = inbound.load_u64(offset, Ordering::Acquire);
            assert!((last..=ROUNDS).contains(&value), "{value} after {last}");
            last = value;
        }
    });
}

#[test]
fn invalid_layouts_and_timings_are_refused() {
    let refused = |layout: SharedLayout, memory_bytes: usize| {
        let memory = [(); 2].map(|()| Region::heap(memory_bytes));
        let setup = SharedConfig { layout, timing: TIMING, pacer: Pacer::new(), peer_pacer: Pacer::new() };
        SharedWindows::new(&memory[0], &memory[1], setup).err()
    };
    let bytes = SHAPE.memory_bytes();
    assert_eq!(refused(SHAPE, bytes), None);
    let (found_bytes, advised_bytes) = (bytes - 8, bytes);
    assert_eq!(refused(SHAPE, bytes - 8), Some(TimedError::Memory { found_bytes, advised_bytes }));
    for layout in [SharedLayout { window_bytes: 100, ..SHAPE }, SharedLayout { words_bytes: 8192, ..SHAPE }] {
        assert_eq!(refused(layout, 1 << 16), Some(TimedError::WindowSize { window_bytes: layout.window_bytes }));
    }
    let timing = LinkTiming { bytes_per_us: 0, ..TIMING };
    let setup = SharedConfig { layout: SHAPE, timing, pacer: Pacer::new(), peer_pacer: Pacer::new() };
    let memory = Region::heap(bytes);
    assert!(matches!(SharedWindows::new(&memory, &memory, setup), Err(TimedError::Timing { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever a peer writes into histories and times, each call ends and accesses only the window.
    #[test]
    fn garbage_of_a_peer_yields_some_values(
        pokes in prop::collection::vec((any::<prop::sample::Index>(), any::<u64>()), 1..60),
    ) {
        let pair = Pair::new();
        let words = SHAPE.memory_bytes() / 8;
        for (index, value) in &pokes {
            for memory in &pair.memory {
                memory.store_u64(index.index(words) * 8, *value, Ordering::Relaxed);
            }
        }
        let mut bytes = vec![0; SHAPE.window_bytes];
        pair.b.inbound().read(0, &mut bytes);
        for offset in (0..SHAPE.window_bytes).step_by(8) {
            let _ = pair.word(offset);
            pair.b.inbound().store_u64(offset, 1, Ordering::Relaxed);
            pair.a.outbound().store_u64(offset, 2, Ordering::Release);
        }
        pair.a.outbound().write(3, &[1; 4000]);
        pair.a.outbound().flush();
    }

    /// Once they have arrived, stores of bytes at any offset have the effect that they have on plain memory.
    #[test]
    fn bytes_that_have_arrived_are_those_that_were_stored(
        writes in prop::collection::vec((0..4096_usize, prop::collection::vec(any::<u8>(), 1..300)), 1..20),
    ) {
        let pair = Pair::new();
        let mut expected = vec![0; SHAPE.window_bytes];
        let mut found = vec![0; SHAPE.window_bytes];
        for (offset, bytes) in &writes {
            let len_bytes = bytes.len().min(SHAPE.window_bytes - offset);
            pair.a.outbound().write(*offset, &bytes[..len_bytes]);
            expected[*offset..offset + len_bytes].copy_from_slice(&bytes[..len_bytes]);
        }
        pair.a.outbound().flush();
        pair.b.inbound().read(0, &mut found);
        prop_assert!(found == expected);
    }
}
