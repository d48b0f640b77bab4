//! Time is handed in, so each fact is exact; real clocks are for the conformance suite.

use super::*;
use crate::heap::{self, CondvarDoorbell, HeapLink};
use crate::{Coherence, MemoryInbound, MemoryOutbound, train_both};
use std::sync::atomic::AtomicU64;
use std::thread;
use volmem::Region;
use volmem::sync::Ordering;

const WINDOW_BYTES: usize = 4096;
const ONE_WAY_NS: u64 = 500;

/// A byte a nanosecond, packets of 256 bytes and 24 more: round figures.
const TIMING: LinkTiming =
    LinkTiming { one_way_ns: ONE_WAY_NS, bytes_per_us: 1000, header_bytes: 24, payload_bytes_max: 256 };

/// Time goes on when the test or a waiter says so; or by itself, a nanosecond a look, and waits do not hurry it: then
/// threads have all the time that they need.
#[derive(Debug, Clone, Default)]
struct Handed {
    now_ns: Arc<AtomicU64>,
    is_unhurried: bool,
}

impl Clock for Handed {
    fn now_ns(&self) -> u64 {
        self.now_ns.fetch_add(self.is_unhurried.into(), Ordering::SeqCst)
    }

    fn wait_until(&self, time_ns: u64) {
        if !self.is_unhurried {
            self.now_ns.fetch_max(time_ns, Ordering::SeqCst);
        }
        thread::yield_now();
    }
}

type TestLink = Timed<HeapLink, Handed>;

fn setup(pace: &Pace) -> Setup {
    Setup { window_bytes: WINDOW_BYTES, timing: TIMING, pace: pace.clone() }
}

fn pair_in(memory_bytes: usize) -> (TestLink, TestLink, Handed) {
    let clock = Handed::default();
    let (a, b) = pair_by(&clock, memory_bytes);
    (a, b, clock)
}

/// A pair whose journals take 64 records, by an unhurried clock.
fn short_pair() -> (TestLink, TestLink) {
    pair_by(&Handed { is_unhurried: true, ..Handed::default() }, SHORT_BYTES)
}

const SHORT_BYTES: usize = 2 * 64 + 2 * 64 * 64;

fn pair_by(clock: &Handed, memory_bytes: usize) -> (TestLink, TestLink) {
    let (a, b) = heap::pair(memory_bytes);
    let timed = |link| Timed::with_clock(link, setup(&Pace::new()), clock.clone()).expect("a timed link");
    let (mut a, mut b) = (timed(a), timed(b));
    assert!(train_both(&mut a, &mut b));
    (a, b)
}

fn pair() -> (TestLink, TestLink, Handed) {
    pair_in(memory_bytes(WINDOW_BYTES, TIMING).expect("a timing"))
}

fn word(inbound: &impl Inbound, offset: usize) -> u64 {
    inbound.load_u64(offset, Ordering::Acquire)
}

/// When something becomes true, at the nanosecond.
fn time_of(clock: &Handed, what: impl Fn() -> bool) -> u64 {
    let begun_ns = clock.now_ns();
    (begun_ns..begun_ns + 100_000)
        .find(|&now_ns| {
            clock.wait_until(now_ns);
            what()
        })
        .expect("in a while")
}

#[test]
fn miri_a_word_arrives_after_its_packet_and_the_way() {
    let (a, b, clock) = pair();
    clock.wait_until(1_000);
    a.outbound().store_u64(8, 7, Ordering::Release);
    let inbound = b.inbound();
    clock.wait_until(1_000 + 32 + ONE_WAY_NS - 1);
    assert_eq!(word(&inbound, 8), 0);
    clock.wait_until(1_000 + 32 + ONE_WAY_NS);
    assert_eq!(word(&inbound, 8), 7);
}

#[test]
fn miri_a_line_is_one_packet_and_one_record() {
    let (a, b, clock) = pair();
    a.outbound().store_line(64, &[1, 2, 3]);
    let inbound = b.inbound();
    let arrived_ns = time_of(&clock, || word(&inbound, 64) == 1);
    assert_eq!(arrived_ns, 24 + 24 + ONE_WAY_NS);
    assert_eq!([word(&inbound, 72), word(&inbound, 80), word(&inbound, 88)], [2, 3, 0]);
    assert_eq!(a.outbound().coherence(), Coherence::WriteCombined);
}

#[test]
fn packets_follow_one_another_at_the_rate_of_the_link() {
    let (a, b, clock) = pair_in(1 << 16);
    let (outbound, inbound) = (a.outbound(), b.inbound());
    for round in 0..10 {
        outbound.write(0, &[1; 1000]);
        outbound.store_u64(2048, round + 1, Ordering::Release);
    }
    // Each write is three whole packets and one of 232 bytes, each word a packet of 32.
    let write_ns = 1000 + 4 * 24;
    let arrived_ns = time_of(&clock, || word(&inbound, 2048) == 10);
    assert_eq!(arrived_ns, 10 * (write_ns + 32) + ONE_WAY_NS);
    // After a pause the link is free at once.
    clock.wait_until(1_000_000);
    outbound.store_u64(8, 1, Ordering::Release);
    assert_eq!(time_of(&clock, || word(&inbound, 8) == 1), 1_000_000 + 32 + ONE_WAY_NS);
}

#[test]
fn short_packets_on_a_fast_link_add_up_to_what_they_take() {
    let costs = timing::Costs::new(LinkTiming { bytes_per_us: 121_000, ..TIMING }).expect("a timing");
    let pace = Pace::new();
    let end_ns = (0..1_000).fold(0, |_, _| pace.book(0, costs.busy_ticks(8)));
    // 32 bytes at 121 bytes a nanosecond are 0.2645 ns; time is counted in 64ths.
    assert!((250..=265).contains(&end_ns), "{end_ns} ns for a thousand");
}

/// Two parts of a link, as two processes would have them.
#[test]
fn parts_of_a_link_have_journals_of_their_own_and_share_its_rate() {
    let part_bytes = memory_bytes(WINDOW_BYTES, TIMING).expect("a timing");
    let (mut a, mut b) = heap::pair(2 * part_bytes);
    assert!(train_both(&mut a, &mut b));
    let clock = Handed::default();
    let pace = Pace::in_region(Region::heap(64));
    let part = |link: &HeapLink, index: usize, pace: &Pace| {
        let (inbound, outbound) = (link.inbound(), link.outbound());
        let (offset, clock) = (index * part_bytes, clock.clone());
        let slices = (inbound.slice(offset, part_bytes), outbound.slice(offset, part_bytes));
        Windows::<HeapLink, _>::with_clock(slices.0, slices.1, link.doorbell(), setup(pace), clock).expect("windows")
    };
    let (a0, a1) = (part(&a, 0, &pace), part(&a, 1, &pace));
    let (b0, b1) = (part(&b, 0, &Pace::new()), part(&b, 1, &Pace::new()));
    a0.outbound().write(0, &[1; 256]);
    a1.outbound().write(0, &[2; 256]);
    let (in0, in1) = (b0.inbound(), b1.inbound());
    assert_eq!(time_of(&clock, || word(&in0, 0) != 0), 280 + ONE_WAY_NS);
    assert_eq!(word(&in1, 0), 0);
    assert_eq!(time_of(&clock, || word(&in1, 0) != 0), 2 * 280 + ONE_WAY_NS);
    assert_eq!((word(&in0, 248), word(&in1, 248)), (0x0101_0101_0101_0101, 0x0202_0202_0202_0202));
}

/// A program that was handed its part of a link's memory, and rings as it likes.
struct Program;

impl Parts for Program {
    type Inbound = MemoryInbound;
    type Outbound = MemoryOutbound;
    type Doorbell = CondvarDoorbell;
}

#[test]
fn miri_windows_need_no_link() {
    let memory_bytes = memory_bytes(WINDOW_BYTES, TIMING).expect("a timing");
    let (to_a, to_b) = (Region::heap(memory_bytes), Region::heap(memory_bytes));
    let (bell_a, bell_b) = CondvarDoorbell::pair();
    let clock = Handed::default();
    let windows = |own: &Region, peers: &Region, bell: &CondvarDoorbell| {
        let (inbound, outbound) = (MemoryInbound::new(own.clone()), MemoryOutbound::new(peers.clone()));
        let setup = setup(&Pace::new());
        Windows::<Program, _>::with_clock(inbound, outbound, bell.clone(), setup, clock.clone()).expect("windows")
    };
    let (a, b) = (windows(&to_a, &to_b, &bell_a), windows(&to_b, &to_a, &bell_b));
    a.outbound().store_u64(0, 7, Ordering::Release);
    a.doorbell(bell_a).ring();
    assert_eq!(b.doorbell(bell_b).wait(Some(Duration::ZERO)), WaitOutcome::Rung);
    assert_eq!(word(&b.inbound(), 0), 7);
}

#[test]
fn miri_a_ring_is_taken_when_the_stores_before_it_have_arrived() {
    let (a, b, clock) = pair();
    a.outbound().write(0, &[1; 256]);
    a.doorbell().ring();
    assert_eq!(b.doorbell().wait(Some(Duration::ZERO)), WaitOutcome::Rung);
    assert_eq!(clock.now_ns(), 280 + 32 + ONE_WAY_NS);
    assert_ne!(word(&b.inbound(), 0), 0);
    assert_eq!(b.doorbell().wait(Some(Duration::ZERO)), WaitOutcome::TimedOut);
}

#[test]
fn miri_a_flush_takes_a_round_trip_behind_all_stores() {
    let (a, b, clock) = pair();
    a.outbound().write(0, &[1; 256]);
    a.outbound().flush();
    assert_eq!(clock.now_ns(), 280 + 2 * ONE_WAY_NS);
    assert_ne!(word(&b.inbound(), 0), 0);
}

#[test]
fn the_journal_wraps_and_loses_nothing() {
    let (a, b, clock) = pair();
    let (outbound, inbound) = (a.outbound(), b.inbound());
    let mut expected = vec![0; WINDOW_BYTES];
    for round in 0..2_000_usize {
        let len_bytes = round * 37 % 1500;
        let offset = round * 101 % (WINDOW_BYTES - len_bytes);
        outbound.write(offset, &vec![round as u8; len_bytes]);
        expected[offset..offset + len_bytes].fill(round as u8);
        clock.wait_until(clock.now_ns() + 5_000);
        let mut found = vec![0; WINDOW_BYTES];
        inbound.read(0, &mut found);
        assert!(found == expected, "round {round}");
    }
}

#[test]
fn a_store_stalls_while_the_journal_is_full_and_wakes_who_should_look() {
    let (a, b) = short_pair();
    let (outbound, inbound, bell) = (a.outbound(), b.inbound(), b.doorbell());
    thread::scope(|scope| {
        let sleeper = scope.spawn(move || {
            while word(&inbound, 0) != 1_000 {
                assert_eq!(bell.wait(Some(Duration::from_secs(60))), WaitOutcome::Rung, "nobody woke the sleeper");
            }
        });
        for round in 1..=1_000 {
            outbound.store_u64(0, round, Ordering::Release);
        }
        a.doorbell().ring();
        sleeper.join().expect("the sleeper");
    });
    assert!(!a.is_lost());
}

/// Neither end looks at its window before it has stored everything, but for what it does while it stalls.
#[test]
fn both_ends_may_stall_at_once() {
    let (a, b) = short_pair();
    let exchange = |link: &TestLink| {
        let (outbound, inbound) = (link.outbound(), link.inbound());
        (1..=5_000).for_each(|round| outbound.store_u64(0, round, Ordering::Release));
        while word(&inbound, 0) != 5_000 {
            thread::yield_now();
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| exchange(&a));
        exchange(&b);
    });
    assert!(!a.is_lost() && !b.is_lost());
}

#[test]
fn a_peer_that_does_not_look_for_long_has_lost_the_link_until_it_is_trained_again() {
    let (mut a, mut b, clock) = pair_in(SHORT_BYTES);
    (0..200).for_each(|_| a.outbound().store_u64(0, 1, Ordering::Release));
    assert!(a.is_lost());
    assert!(clock.now_ns() >= STALL_NS_MAX);
    assert_eq!((a.state(), b.state()), (LinkState::Down, LinkState::Up), "the peer learns it from training");
    a.train();
    assert_eq!((a.state(), b.state()), (LinkState::Training, LinkState::Down));
    assert!(train_both(&mut a, &mut b));
    assert_eq!(word(&b.inbound(), 0), 0);
    a.outbound().store_u64(0, 2, Ordering::Release);
    a.outbound().flush();
    assert_eq!(word(&b.inbound(), 0), 2);
}

#[test]
fn miri_what_is_under_way_when_the_link_goes_down_arrives_in_no_later_epoch() {
    let (mut a, mut b, clock) = pair();
    a.outbound().write(0, &[1; 300]);
    b.take_down();
    assert!(train_both(&mut a, &mut b));
    clock.wait_until(1_000_000);
    assert_eq!((word(&b.inbound(), 0), word(&b.inbound(), 296)), (0, 0));
    a.outbound().store_u64(0, 3, Ordering::Release);
    a.outbound().flush();
    assert_eq!(word(&b.inbound(), 0), 3);
}

/// A link whose end `b` is a peer that writes what it likes into the journal of `a`.
fn poked(pokes: &[(usize, u64)]) -> TestLink {
    let (a, b) = heap::pair(memory_bytes(WINDOW_BYTES, TIMING).expect("a timing"));
    let mut b = b;
    let mut a = Timed::with_clock(a, setup(&Pace::new()), Handed::default()).expect("a timed link");
    assert!(train_both(&mut a, &mut b));
    pokes.iter().for_each(|(offset, value)| b.outbound().store_u64(*offset, *value, Ordering::Release));
    a
}

#[test]
fn nonsense_in_a_journal_takes_the_link_down_and_nothing_else() {
    const RECORD: usize = 128;
    let place = |offset: u64, len_bytes: u64| offset | len_bytes << 48;
    let beyond = [
        (0, place(WINDOW_BYTES as u64, 8)),
        (0, place(WINDOW_BYTES as u64 - 7, 8)),
        (0, place(0, 1025)),
        (0, place((1 << 48) - 1, 64)),
        (0, place(0, 65_535)),
        (u64::MAX, place(0, 8)),
    ];
    for (due_ns, place) in beyond {
        let a = poked(&[(RECORD + 8, due_ns), (RECORD + 16, place), (RECORD, 1)]);
        let _ = word(&a.inbound(), 0);
        a.windows.settle();
        assert_eq!((a.is_lost(), a.state()), (true, LinkState::Down), "{due_ns} {place:#x}");
        a.outbound().write(0, &[1; 100]);
        a.outbound().flush();
    }
    // A record of nothing, tags out of turn and rings in the far future do no harm.
    let a = poked(&[(RECORD, 7), (RECORD + 64, 1), (64, u64::MAX)]);
    a.windows.settle();
    assert_eq!((a.is_lost(), word(&a.inbound(), 0)), (false, 0));
}

#[test]
fn credit_for_more_than_was_sent_takes_the_link_down() {
    let a = poked(&[(0, 1 << 40), (8, 1 << 40)]);
    (0..200).for_each(|_| a.outbound().store_u64(0, 1, Ordering::Release));
    assert!(a.is_lost());
}

#[test]
fn a_setup_that_no_link_can_have_is_refused_in_one_line() {
    let refusal = |memory_bytes, window_bytes, timing| {
        let setup = Setup { window_bytes, timing, pace: Pace::new() };
        let text = Timed::new(heap::pair(memory_bytes).0, setup).expect_err("not refused").to_string();
        assert!(text.starts_with("timed link: ") && text.contains("; ") && !text.contains('\n'), "{text}");
        text
    };
    let small = refusal(1024, WINDOW_BYTES, TIMING);
    assert!(small.contains("a journal in 1024 bytes is too small; give it 8320 bytes"), "{small}");
    assert!(refusal(1 << 20, 100, TIMING).contains("window of 100 bytes"));
    let text = refusal(1 << 20, WINDOW_BYTES, LinkTiming { bytes_per_us: 0, ..TIMING });
    assert!(text.contains("bytes_per_us = 0; use 1 to 100000000"), "{text}");
    refusal(1 << 20, WINDOW_BYTES, LinkTiming { payload_bytes_max: 8192, ..TIMING });
    refusal(1 << 20, WINDOW_BYTES, LinkTiming { one_way_ns: u64::MAX, ..TIMING });
}
