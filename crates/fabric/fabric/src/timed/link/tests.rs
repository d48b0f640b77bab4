//! The tests set the time, so each result is exact. The conformance suite uses the real clock.

use super::*;
use crate::heap::{self, CondvarDoorbell, HeapLink};
use crate::timed::timing::PacketCosts;
use crate::timed::{LinkTiming, Pacer, STALL_NS_MAX, WindowTypes, memory_bytes};
use crate::{Coherence, Doorbell, Inbound, MemoryInbound, MemoryOutbound, Outbound, Slice, WaitOutcome, train_both};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::Duration;
use volmem::Region;
use volmem::sync::Ordering;

const WINDOW_BYTES: usize = 4096;
const ONE_WAY_NS: u64 = 500;

/// One byte per nanosecond, packets of 256 bytes with 24 bytes of overhead: round figures.
const TIMING: LinkTiming =
    LinkTiming { one_way_ns: ONE_WAY_NS, bytes_per_us: 1000, header_bytes: 24, payload_bytes_max: 256 };

/// A clock that the test and waiters advance. If `advances_per_read` is set, each read advances it by a nanosecond
/// instead, and waits do not, so that threads have all the time that they need.
#[derive(Debug, Clone, Default)]
struct ManualClock {
    now_ns: Arc<AtomicU64>,
    advances_per_read: bool,
}

impl Clock for ManualClock {
    fn now_ns(&self) -> u64 {
        self.now_ns.fetch_add(self.advances_per_read.into(), Ordering::SeqCst)
    }

    fn wait_until(&self, time_ns: u64) {
        if !self.advances_per_read {
            self.now_ns.fetch_max(time_ns, Ordering::SeqCst);
        }
        thread::yield_now();
    }
}

type TestLink = TimedLink<HeapLink, ManualClock>;

fn setup(pacer: &Pacer) -> TimedConfig {
    TimedConfig { window_bytes: WINDOW_BYTES, timing: TIMING, pacer: pacer.clone() }
}

fn pair_in(memory_bytes: usize) -> (TestLink, TestLink, ManualClock) {
    let clock = ManualClock::default();
    let (a, b) = pair_by(&clock, memory_bytes);
    (a, b, clock)
}

/// A pair whose journals hold 64 records, with a clock that advances by reads.
fn short_pair() -> (TestLink, TestLink) {
    pair_by(&ManualClock { advances_per_read: true, ..ManualClock::default() }, SHORT_BYTES)
}

const SHORT_BYTES: usize = 2 * 64 + 2 * 64 * 64;

fn pair_by(clock: &ManualClock, memory_bytes: usize) -> (TestLink, TestLink) {
    let (a, b) = heap::pair(memory_bytes);
    let timed = |link| TimedLink::with_clock(link, setup(&Pacer::new()), clock.clone()).expect("a timed link");
    let (mut a, mut b) = (timed(a), timed(b));
    assert!(train_both(&mut a, &mut b));
    (a, b)
}

fn pair() -> (TestLink, TestLink, ManualClock) {
    pair_in(memory_bytes(WINDOW_BYTES, TIMING).expect("a timing"))
}

fn word(inbound: &impl Inbound, offset: usize) -> u64 {
    inbound.load_u64(offset, Ordering::Acquire)
}

/// The nanosecond at which a condition becomes true.
fn time_of(clock: &ManualClock, what: impl Fn() -> bool) -> u64 {
    let begun_ns = clock.now_ns();
    (begun_ns..begun_ns + 100_000)
        .find(|&now_ns| {
            clock.wait_until(now_ns);
            what()
        })
        .expect("in a while")
}

#[test]
fn miri_a_word_arrives_after_transmission_time_and_delay() {
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
    // Each write is three full packets and one of 232 bytes, each word a packet of 32 bytes.
    let write_ns = 1000 + 4 * 24;
    let arrived_ns = time_of(&clock, || word(&inbound, 2048) == 10);
    assert_eq!(arrived_ns, 10 * (write_ns + 32) + ONE_WAY_NS);
    // After a pause the link is free immediately.
    clock.wait_until(1_000_000);
    outbound.store_u64(8, 1, Ordering::Release);
    assert_eq!(time_of(&clock, || word(&inbound, 8) == 1), 1_000_000 + 32 + ONE_WAY_NS);
}

#[test]
fn transmission_times_below_a_nanosecond_add_up() {
    let costs = PacketCosts::new(LinkTiming { bytes_per_us: 121_000, ..TIMING }).expect("a timing");
    let pacer = Pacer::new();
    let end_ns = (0..1_000).fold(0, |_, _| pacer.reserve(0, costs.busy_ticks(8)));
    // 32 bytes at 121 bytes per nanosecond take 0.2645 ns. Time is counted in 64ths of a nanosecond.
    assert!((250..=265).contains(&end_ns), "{end_ns} ns for a thousand");
}

/// Two parts of a link, as two processes would hold them.
#[test]
fn parts_of_a_link_have_journals_of_their_own_and_share_its_rate() {
    let part_bytes = memory_bytes(WINDOW_BYTES, TIMING).expect("a timing");
    let (mut a, mut b) = heap::pair(2 * part_bytes);
    assert!(train_both(&mut a, &mut b));
    let clock = ManualClock::default();
    let pacer = Pacer::in_region(Region::heap(64));
    let part = |link: &HeapLink, index: usize, pacer: &Pacer| {
        let (inbound, outbound) = (link.inbound(), link.outbound());
        let (offset, clock) = (index * part_bytes, clock.clone());
        let slices = (inbound.slice(offset, part_bytes), outbound.slice(offset, part_bytes));
        TimedWindows::<HeapLink, _>::with_clock(slices.0, slices.1, link.doorbell(), setup(pacer), clock)
            .expect("windows")
    };
    let (a0, a1) = (part(&a, 0, &pacer), part(&a, 1, &pacer));
    let (b0, b1) = (part(&b, 0, &Pacer::new()), part(&b, 1, &Pacer::new()));
    a0.outbound().write(0, &[1; 256]);
    a1.outbound().write(0, &[2; 256]);
    let (in0, in1) = (b0.inbound(), b1.inbound());
    assert_eq!(time_of(&clock, || word(&in0, 0) != 0), 280 + ONE_WAY_NS);
    assert_eq!(word(&in1, 0), 0);
    assert_eq!(time_of(&clock, || word(&in1, 0) != 0), 2 * 280 + ONE_WAY_NS);
    assert_eq!((word(&in0, 248), word(&in1, 248)), (0x0101_0101_0101_0101, 0x0202_0202_0202_0202));
}

/// A program that holds a part of a link's memory, with a doorbell of its own.
struct Program;

impl WindowTypes for Program {
    type Inbound = MemoryInbound;
    type Outbound = MemoryOutbound;
    type Doorbell = CondvarDoorbell;
}

#[test]
fn miri_windows_need_no_link() {
    let memory_bytes = memory_bytes(WINDOW_BYTES, TIMING).expect("a timing");
    let (to_a, to_b) = (Region::heap(memory_bytes), Region::heap(memory_bytes));
    let (bell_a, bell_b) = CondvarDoorbell::pair();
    let clock = ManualClock::default();
    let windows = |own: &Region, peers: &Region, bell: &CondvarDoorbell| {
        let (inbound, outbound) = (MemoryInbound::new(own.clone()), MemoryOutbound::new(peers.clone()));
        let setup = setup(&Pacer::new());
        TimedWindows::<Program, _>::with_clock(inbound, outbound, bell.clone(), setup, clock.clone()).expect("windows")
    };
    let (a, b) = (windows(&to_a, &to_b, &bell_a), windows(&to_b, &to_a, &bell_b));
    a.outbound().store_u64(0, 7, Ordering::Release);
    a.doorbell(bell_a).ring();
    assert_eq!(b.doorbell(bell_b).wait(Some(Duration::ZERO)), WaitOutcome::Rung);
    assert_eq!(word(&b.inbound(), 0), 7);
}

#[test]
fn miri_a_wait_for_a_ring_ends_when_the_stores_before_it_have_arrived() {
    let (a, b, clock) = pair();
    a.outbound().write(0, &[1; 256]);
    a.doorbell().ring();
    assert_eq!(b.doorbell().wait(Some(Duration::ZERO)), WaitOutcome::Rung);
    assert_eq!(clock.now_ns(), 280 + 32 + ONE_WAY_NS);
    assert_ne!(word(&b.inbound(), 0), 0);
    assert_eq!(b.doorbell().wait(Some(Duration::ZERO)), WaitOutcome::TimedOut);
}

#[test]
fn miri_a_flush_takes_a_round_trip_after_all_stores() {
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
fn a_store_to_a_full_journal_stalls_and_wakes_the_peer() {
    let (a, b) = short_pair();
    let (outbound, inbound, bell) = (a.outbound(), b.inbound(), b.doorbell());
    thread::scope(|scope| {
        let sleeper = scope.spawn(move || {
            while word(&inbound, 0) != 1_000 {
                assert_eq!(bell.wait(Some(Duration::from_secs(60))), WaitOutcome::Rung, "the sleeper was not woken");
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

/// Neither endpoint loads from its window before it has stored everything, except for what it does while it stalls.
#[test]
fn both_endpoints_may_stall_at_once() {
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
fn a_link_whose_peer_does_not_load_for_long_is_lost_until_it_is_trained_again() {
    let (mut a, mut b, clock) = pair_in(SHORT_BYTES);
    (0..200).for_each(|_| a.outbound().store_u64(0, 1, Ordering::Release));
    assert!(a.is_lost());
    assert!(clock.now_ns() >= STALL_NS_MAX);
    assert_eq!((a.state(), b.state()), (LinkState::Down, LinkState::Up), "the peer learns it by training");
    a.train();
    assert_eq!((a.state(), b.state()), (LinkState::Training, LinkState::Down));
    assert!(train_both(&mut a, &mut b));
    assert_eq!(word(&b.inbound(), 0), 0);
    a.outbound().store_u64(0, 2, Ordering::Release);
    a.outbound().flush();
    assert_eq!(word(&b.inbound(), 0), 2);
}

#[test]
fn miri_stores_under_way_when_the_link_goes_down_do_not_arrive_in_a_later_epoch() {
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

/// A link whose endpoint `b` has stored these words in the journal of `a`.
fn with_garbage(words: &[(usize, u64)]) -> TestLink {
    let (a, b) = heap::pair(memory_bytes(WINDOW_BYTES, TIMING).expect("a timing"));
    let mut b = b;
    let mut a = TimedLink::with_clock(a, setup(&Pacer::new()), ManualClock::default()).expect("a timed link");
    assert!(train_both(&mut a, &mut b));
    words.iter().for_each(|(offset, value)| b.outbound().store_u64(*offset, *value, Ordering::Release));
    a
}

#[test]
fn garbage_in_a_journal_takes_only_the_link_down() {
    const RECORD: usize = 128;
    let destination = |offset: u64, len_bytes: u64| offset | len_bytes << 48;
    let beyond = [
        (0, destination(WINDOW_BYTES as u64, 8)),
        (0, destination(WINDOW_BYTES as u64 - 7, 8)),
        (0, destination(0, 1025)),
        (0, destination((1 << 48) - 1, 64)),
        (0, destination(0, 65_535)),
        (u64::MAX, destination(0, 8)),
    ];
    for (due_ns, destination) in beyond {
        let a = with_garbage(&[(RECORD + 8, due_ns), (RECORD + 16, destination), (RECORD, 1)]);
        let _ = word(&a.inbound(), 0);
        a.windows.wait_for_arrivals();
        assert_eq!((a.is_lost(), a.state()), (true, LinkState::Down), "{due_ns} {destination:#x}");
        a.outbound().write(0, &[1; 100]);
        a.outbound().flush();
    }
    // A record of no bytes, tags out of order and rings in the far future do no harm.
    let a = with_garbage(&[(RECORD, 7), (RECORD + 64, 1), (64, u64::MAX)]);
    a.windows.wait_for_arrivals();
    assert_eq!((a.is_lost(), word(&a.inbound(), 0)), (false, 0));
}

#[test]
fn credit_for_more_than_was_sent_takes_the_link_down() {
    let a = with_garbage(&[(0, 1 << 40), (8, 1 << 40)]);
    (0..200).for_each(|_| a.outbound().store_u64(0, 1, Ordering::Release));
    assert!(a.is_lost());
}

#[test]
fn an_invalid_configuration_is_refused_in_one_line() {
    let refusal = |memory_bytes, window_bytes, timing| {
        let setup = TimedConfig { window_bytes, timing, pacer: Pacer::new() };
        let text = TimedLink::new(heap::pair(memory_bytes).0, setup).expect_err("not refused").to_string();
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
