//! Time is handed in, so each fact is exact; real clocks are for the conformance suite and the programs' own tests.

use super::*;
use proptest::prelude::*;
use std::thread;

const SHAPE: Shape = Shape { window_bytes: 4096, words_bytes: 512 };
const ONE_WAY_NS: u64 = 500;

/// A byte a nanosecond, packets of 256 bytes and 24 more: round figures.
const TIMING: LinkTiming =
    LinkTiming { one_way_ns: ONE_WAY_NS, bytes_per_us: 1000, header_bytes: 24, payload_bytes_max: 256 };
/// A packet of one word.
const WORD_NS: u64 = 32;

/// Time goes on when the test or a waiter says so.
#[derive(Debug, Clone, Default)]
struct Handed(Arc<AtomicU64>);

impl Clock for Handed {
    fn now_ns(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    fn wait_until(&self, time_ns: u64) {
        self.0.fetch_max(time_ns, Ordering::SeqCst);
    }
}

struct Pair {
    a: InPlace<Handed>,
    b: InPlace<Handed>,
    memory: [Region; 2],
    paces: [Pace; 2],
    clock: Handed,
}

impl Pair {
    fn new() -> Self {
        let memory = [(); 2].map(|()| Region::heap(SHAPE.memory_bytes()));
        let paces = [(); 2].map(|()| Pace::in_region(Region::heap(64)));
        let clock = Handed::default();
        let [a, b] = [0, 1].map(|own| end(&memory, &paces, own, &clock));
        Self { a, b, memory, paces, clock }
    }

    /// As another process would have an end that was handed to it.
    fn again(&self, own: usize) -> InPlace<Handed> {
        end(&self.memory, &self.paces, own, &self.clock)
    }

    fn at(&self, time_ns: u64) -> &Self {
        self.clock.wait_until(time_ns);
        self
    }

    /// What b finds.
    fn word(&self, offset: usize) -> u64 {
        self.b.inbound().load_u64(offset, Ordering::Acquire)
    }
}

fn end(memory: &[Region; 2], paces: &[Pace; 2], own: usize, clock: &Handed) -> InPlace<Handed> {
    let (pace, peers_pace) = (paces[own].clone(), paces[1 - own].clone());
    let setup = InPlaceSetup { shape: SHAPE, timing: TIMING, pace, peers_pace };
    InPlace::with_clock(&memory[own], &memory[1 - own], setup, clock.clone()).expect("windows")
}

#[test]
fn miri_a_word_and_a_line_arrive_after_their_packet_and_the_way() {
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

/// Seven at a time each for itself, more of them together.
#[test]
fn miri_a_word_shows_each_value_in_its_time() {
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
fn miri_what_the_owner_stores_is_there_at_once_and_what_is_under_way_comes_after_it() {
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
fn miri_an_end_is_whoever_maps_it() {
    let pair = Pair::new();
    pair.a.outbound().store_u64(0, 1, Ordering::Release);
    pair.again(0).outbound().store_u64(0, 2, Ordering::Release);
    let other = pair.again(1).inbound();
    assert_eq!((pair.at(ONE_WAY_NS + WORD_NS).word(0), other.load_u64(0, Ordering::Acquire)), (1, 1));
    pair.at(ONE_WAY_NS + 2 * WORD_NS);
    assert_eq!((pair.word(0), other.load_u64(0, Ordering::Acquire)), (2, 2), "and both share the rate");
}

#[test]
fn nobody_has_to_look_for_others_to_store() {
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
    // Eleven whole packets and one of 184 bytes, the words that could show a record, and the one behind them.
    let done_ns = 3000 + 12 * 24 + 3 * WORD_NS + ONE_WAY_NS;
    assert_eq!(pair.at(done_ns - 1).word(0), 0);
    assert_eq!(pair.at(done_ns).word(0), 1);
    let mut found = vec![0; 3000];
    pair.b.inbound().read(512, &mut found);
    assert!(found == bytes);
}

/// However long it takes to write it here.
#[test]
fn miri_the_words_that_show_a_record_arrive_with_its_payload() {
    let pair = Pair::new();
    let outbound = pair.a.outbound();
    outbound.write(1040, &[1; 100]);
    pair.at(10_000);
    outbound.store_u64(1032, 2, Ordering::Relaxed);
    outbound.store_u64(1024, 3, Ordering::Release);
    assert_eq!((pair.word(1024), pair.word(1032)), (3, 2));
    outbound.store_u64(1152, 4, Ordering::Release);
    assert_eq!(pair.word(1152), 0, "the third is a store like any other");
    assert_eq!(pair.at(10_000 + WORD_NS + ONE_WAY_NS).word(1152), 4);
}

#[test]
fn miri_of_a_span_that_arrives_the_rest_reads_as_zeros() {
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

/// Else a sleeper that looks once more would miss what was stored before its flag could be seen.
#[test]
fn miri_a_flush_comes_back_behind_what_the_peer_has_stored_before_it_was_seen() {
    let pair = Pair::new();
    pair.a.outbound().store_u64(0, 1, Ordering::Release);
    pair.a.outbound().flush();
    assert_eq!(pair.clock.now_ns(), WORD_NS + 2 * ONE_WAY_NS);
    let begun_ns = pair.clock.now_ns();
    // Its stores take five times as long as the way.
    pair.b.outbound().write(512, &[1; 2560]);
    pair.b.outbound().store_u64(0, 5, Ordering::Release);
    pair.a.outbound().flush();
    assert_eq!(pair.a.inbound().load_u64(0, Ordering::Acquire), 5);
    assert_eq!(pair.clock.now_ns(), begun_ns + 2560 + 10 * 24 + 3 * WORD_NS + ONE_WAY_NS);
}

#[test]
fn miri_whoever_was_woken_early_waits_for_what_was_stored_before() {
    let pair = Pair::new();
    pair.a.outbound().write(512, &[1; 1024]);
    pair.a.outbound().store_u64(0, 1, Ordering::Release);
    pair.b.settle();
    assert_eq!((pair.word(0), pair.clock.now_ns()), (1, 1024 + 4 * 24 + 3 * WORD_NS + ONE_WAY_NS));
}

#[test]
fn a_spoiled_pace_holds_nobody_up_for_long() {
    let spoiled = Region::heap(64);
    spoiled.store_u64(0, u64::MAX, Ordering::Relaxed);
    let pair = Pair { paces: [(); 2].map(|()| Pace::in_region(spoiled.clone())), ..Pair::new() };
    let (a, b) = (pair.again(0), pair.again(1));
    a.outbound().flush();
    a.settle();
    assert!(pair.clock.now_ns() <= 3 * (AHEAD_NS_MAX + ONE_WAY_NS));
    let begun_ns = pair.clock.now_ns();
    a.outbound().store_u64(0, 1, Ordering::Release);
    pair.at(begun_ns + WORD_NS + ONE_WAY_NS);
    assert_eq!(b.inbound().load_u64(0, Ordering::Acquire), 1);
}

#[test]
fn what_is_forgotten_is_what_lies_in_its_place() {
    let pair = Pair::new();
    pair.a.outbound().store_u64(0, 1, Ordering::Release);
    pair.a.outbound().store_u64(504, 2, Ordering::Release);
    assert_eq!((pair.at(1_000).word(0), pair.word(504)), (1, 2));
    SHAPE.forget_words(|at| pair.memory[1].store_u64(at, 0, Ordering::Relaxed));
    assert_eq!((pair.word(0), pair.word(504)), (0, 0));
}

/// Threads of one process, or processes: loads that find a history in the middle of a store never show what was not
/// stored, and values do not go back.
#[test]
fn a_word_only_grows_that_is_stored_in_growing_values_while_others_look() {
    const ROUNDS: u64 = 20_000;
    let timing = LinkTiming { one_way_ns: 0, bytes_per_us: 100_000_000, ..TIMING };
    let memory = [(); 2].map(|()| Region::heap(SHAPE.memory_bytes()));
    let setup = || InPlaceSetup { shape: SHAPE, timing, pace: Pace::new(), peers_pace: Pace::new() };
    let a = InPlace::new(&memory[0], &memory[1], setup()).expect("windows");
    let b = InPlace::new(&memory[1], &memory[0], setup()).expect("windows");
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
fn shapes_that_no_window_has_are_refused() {
    let refused = |shape: Shape, memory_bytes: usize| {
        let memory = [(); 2].map(|()| Region::heap(memory_bytes));
        let setup = InPlaceSetup { shape, timing: TIMING, pace: Pace::new(), peers_pace: Pace::new() };
        InPlace::new(&memory[0], &memory[1], setup).err()
    };
    let bytes = SHAPE.memory_bytes();
    assert_eq!(refused(SHAPE, bytes), None);
    let (found_bytes, advised_bytes) = (bytes - 8, bytes);
    assert_eq!(refused(SHAPE, bytes - 8), Some(TimedError::Memory { found_bytes, advised_bytes }));
    for shape in [Shape { window_bytes: 100, ..SHAPE }, Shape { words_bytes: 8192, ..SHAPE }] {
        assert_eq!(refused(shape, 1 << 16), Some(TimedError::WindowSize { window_bytes: shape.window_bytes }));
    }
    let timing = LinkTiming { bytes_per_us: 0, ..TIMING };
    let setup = InPlaceSetup { shape: SHAPE, timing, pace: Pace::new(), peers_pace: Pace::new() };
    let memory = Region::heap(bytes);
    assert!(matches!(InPlace::new(&memory, &memory, setup), Err(TimedError::Timing { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever a peer writes into histories and times, each call ends and stays inside the window.
    #[test]
    fn nonsense_of_a_peer_ends_in_some_values(
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

    /// Stores of bytes anywhere are what a plain memory would have, once they have arrived.
    #[test]
    fn what_has_arrived_is_what_was_stored(
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
