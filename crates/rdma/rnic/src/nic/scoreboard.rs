//! The SACK scoreboard: the slow path's record of packets in flight, which have arrived, and which are missing and
//! since when. It exists only while packets are missing.
//!
//! A packet is lost when a packet that was sent later has arrived, and the reordering window has passed since (RACK,
//! RFC 8985, with the clock that packets carry and acknowledgements echo). A retransmission is judged in the same way:
//! by the echo of packets that were sent after it.

use sim::{Span, Time};

use super::packet_bitmap::PacketBitmap;
use super::policy::TransportPolicy;
use super::segmentation::TICK_PS;
use crate::wire::{Psn, SelectiveAck};

/// Number of packets that the bitmap of an acknowledgement covers, including the first missing one.
const SACK_PACKETS: u32 = 1 + u128::BITS;
/// Each retransmission that was needed reduces the reordering window by this fraction.
const WINDOW_DECAY_PART: u64 = 64;

/// A missing packet.
#[derive(Clone, Copy, Debug)]
struct MissingPacket {
    psn: Psn,
    since: Time,
    state: LossState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LossState {
    /// Overtaken, but perhaps only late.
    Overtaken,
    /// Queued for retransmission.
    Queued,
    /// Retransmitted at this tick.
    Sent(u16),
}

/// The result of processing an acknowledgement.
#[derive(Debug, Default)]
pub(super) struct LossReport {
    /// Packets to retransmit.
    pub lost: Vec<Psn>,
    /// The largest delay of a packet that was late but not lost.
    pub lateness: Option<Span>,
    /// Number of retransmitted packets that were only late.
    pub spurious: u64,
    /// Number of retransmitted packets that had been lost.
    pub repaired: u64,
}

/// The scoreboard of a queue pair.
#[derive(Clone, Debug)]
pub(super) struct Scoreboard {
    base: Psn,
    /// Bit i: the packet `base + i` has arrived.
    arrived: PacketBitmap,
    arrived_count: u32,
    /// All packets before this have arrived or are in `missing`.
    examined_to: Psn,
    missing: Vec<MissingPacket>,
}

impl Scoreboard {
    pub fn new(base: Psn) -> Box<Self> {
        Box::new(Self { base, arrived: PacketBitmap::EMPTY, arrived_count: 0, examined_to: base, missing: Vec::new() })
    }

    /// Returns the number of packets that arrived after the first missing one.
    pub const fn arrived(&self) -> u32 {
        self.arrived_count
    }

    /// Returns whether no packet is known to be missing.
    pub fn is_clean(&self) -> bool {
        self.missing.is_empty() && self.arrived_count == 0
    }

    /// Returns whether a packet has arrived.
    pub fn has(&self, psn: Psn) -> bool {
        u32::try_from(psn.after(self.base)).map_or(true, |bit| self.arrived.has(bit))
    }

    /// Processes an acknowledgement. `unacked` is hardware's first unacknowledged PSN.
    pub fn on_ack(
        &mut self,
        now: Time,
        unacked: Psn,
        sack: &SelectiveAck,
        reordering_window: Span,
        policy: TransportPolicy,
    ) -> LossReport {
        self.advance(unacked);
        let first = sack.expected.plus(1).after(self.base);
        match u32::try_from(first) {
            Ok(first) => self.arrived.or_window(first, sack.arrived),
            Err(_) => self.arrived.or_window(0, sack.arrived.checked_shr(first.unsigned_abs()).unwrap_or(0)),
        }
        if let Ok(bit) = u32::try_from(sack.newest.after(self.base)) {
            self.arrived.set(bit);
        }
        self.arrived_count = self.arrived.count();
        self.note_missing(now, sack);
        self.detect_losses(now, sack, reordering_window, policy)
    }

    /// Processes the report that only the header of a packet arrived. Returns true if it must be retransmitted and is
    /// not queued already.
    pub fn on_trim_nak(&mut self, now: Time, unacked: Psn, psn: Psn) -> bool {
        self.advance(unacked);
        if self.has(psn) {
            return false;
        }
        match self.missing.iter_mut().find(|missing| missing.psn == psn) {
            Some(missing) => std::mem::replace(&mut missing.state, LossState::Queued) != LossState::Queued,
            None => {
                self.missing.push(MissingPacket { psn, since: now, state: LossState::Queued });
                true
            }
        }
    }

    /// Notes that all packets before `unacked` have arrived.
    fn advance(&mut self, unacked: Psn) {
        let by = unacked.after(self.base);
        if by > 0 {
            self.arrived.advance(by.cast_unsigned());
            self.base = unacked;
            if self.examined_to.after(unacked) < 0 {
                self.examined_to = unacked;
            }
        }
    }

    /// Records packets that were overtaken and are covered by the acknowledgement.
    fn note_missing(&mut self, now: Time, sack: &SelectiveAck) {
        let end = self.base.plus(self.arrived.end());
        let sack_end = sack.expected.plus(SACK_PACKETS);
        let end = if end.after(sack_end) > 0 { sack_end } else { end };
        while end.after(self.examined_to) > 0 {
            let is_known = self.missing.iter().any(|missing| missing.psn == self.examined_to);
            if !self.has(self.examined_to) && !is_known {
                self.missing.push(MissingPacket { psn: self.examined_to, since: now, state: LossState::Overtaken });
            }
            self.examined_to = self.examined_to.plus(1);
        }
    }

    fn detect_losses(
        &mut self,
        now: Time,
        sack: &SelectiveAck,
        reordering_window: Span,
        policy: TransportPolicy,
    ) -> LossReport {
        let mut found = LossReport::default();
        let (base, arrived) = (self.base, &self.arrived);
        let is_there = |psn: Psn| u32::try_from(psn.after(base)).map_or(true, |bit| arrived.has(bit));
        let window_ticks = reordering_window.ps().div_ceil(TICK_PS);
        self.missing.retain_mut(|missing| {
            let is_there = is_there(missing.psn);
            match missing.state {
                LossState::Overtaken if is_there => found.note_lateness(now.since(missing.since)),
                LossState::Overtaken if now.since(missing.since) >= reordering_window => {
                    missing.state = LossState::Queued;
                    found.lost.push(missing.psn);
                }
                // It arrived while its retransmission was on the way to the wire.
                LossState::Queued if is_there => {
                    found.spurious += 1;
                    found.note_lateness(now.since(missing.since));
                }
                LossState::Sent(tick) if is_there => {
                    // The echoed clock tells which copy arrived.
                    let is_first = sack.newest == missing.psn && after(tick, sack.echo) > 0;
                    if is_first {
                        found.spurious += 1;
                        found.note_lateness(now.since(missing.since));
                    } else {
                        found.repaired += 1;
                    }
                }
                LossState::Sent(tick) if policy.has_slow_path() => {
                    let is_covered = sack.expected.plus(SACK_PACKETS).after(missing.psn) > 0;
                    if is_covered && i64::from(after(sack.echo, tick)) > window_ticks as i64 {
                        missing.state = LossState::Queued;
                        found.lost.push(missing.psn);
                    }
                }
                _ => {}
            }
            !is_there
        });
        found
    }

    /// Returns packets that are missing for longer than the reordering window.
    pub fn overdue(&mut self, now: Time, reordering_window: Span) -> Vec<Psn> {
        let mut lost = Vec::new();
        for missing in &mut self.missing {
            if missing.state == LossState::Overtaken && now.since(missing.since) >= reordering_window {
                missing.state = LossState::Queued;
                lost.push(missing.psn);
            }
        }
        lost
    }

    /// Returns when the next missing packet exceeds the reordering window.
    pub fn due(&self, reordering_window: Span) -> Option<Time> {
        let waiting = self.missing.iter().filter(|missing| missing.state == LossState::Overtaken);
        waiting.map(|missing| missing.since + reordering_window).min()
    }

    /// Notes that a retransmission left.
    pub fn on_retransmit(&mut self, psn: Psn, tick: u16) {
        self.set_state(psn, LossState::Sent(tick));
    }

    /// Notes that a packet is queued for retransmission for another reason.
    pub fn mark_queued(&mut self, psn: Psn) {
        self.set_state(psn, LossState::Queued);
    }

    fn set_state(&mut self, psn: Psn, state: LossState) {
        if let Some(missing) = self.missing.iter_mut().find(|missing| missing.psn == psn) {
            missing.state = state;
        }
    }

    /// Queues the first missing packets for retransmission, at most `max`; `first` is missing in any case.
    pub fn requeue(&mut self, first: Psn, max: u32) -> Vec<Psn> {
        self.advance(first);
        self.arrived_count = self.arrived.count();
        let (base, arrived) = (self.base, &self.arrived);
        self.missing.retain(|missing| u32::try_from(missing.psn.after(base)).is_ok_and(|bit| !arrived.has(bit)));
        let mut lost = Vec::new();
        if !self.missing.iter().any(|missing| missing.psn == first) {
            lost.push(first);
        }
        for missing in self.missing.iter_mut().take((max as usize).saturating_sub(lost.len())) {
            missing.state = LossState::Queued;
            lost.push(missing.psn);
        }
        lost
    }
}

impl LossReport {
    fn note_lateness(&mut self, lateness: Span) {
        self.lateness = self.lateness.max(Some(lateness));
    }

    /// Returns the reordering window, reduced by the retransmissions that were needed.
    pub fn shrink_window(&self, reordering_window: Span) -> Span {
        let part = reordering_window.ps() / WINDOW_DECAY_PART * self.repaired.min(WINDOW_DECAY_PART / 2);
        Span::from_ps(reordering_window.ps() - part)
    }
}

/// Returns the distance between two 16-bit clocks, in ticks.
const fn after(tick: u16, other: u16) -> i16 {
    tick.wrapping_sub(other).cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    const REORDERING: Span = Span::ZERO;

    fn at(us: u64) -> Time {
        Time::from_ps(us * 1_000_000)
    }

    fn numbers(found: &LossReport) -> Vec<u32> {
        found.lost.iter().map(|psn| psn.get()).collect()
    }

    fn sack(expected: u32, newest: u32, arrived: u128, echo: u16) -> SelectiveAck {
        SelectiveAck { expected: Psn::new(expected), newest: Psn::new(newest), arrived, marked: 0, echo }
    }

    #[test]
    fn every_overtaken_packet_is_lost_and_not_only_the_first() {
        let mut board = Scoreboard::new(Psn::new(10));
        // 10, 12 and 15 are missing; 11, 13, 14 and 16 arrived.
        let found = board.on_ack(at(1), Psn::new(10), &sack(10, 16, 0b10_1101, 0), REORDERING, TransportPolicy::Srnic);
        assert_eq!(numbers(&found), [10, 12, 15]);
        assert_eq!(board.arrived(), 4);
        let again = board.on_ack(at(2), Psn::new(10), &sack(10, 17, 0b110_1101, 0), REORDERING, TransportPolicy::Srnic);
        assert_eq!(numbers(&again), [] as [u32; 0], "each once");
    }

    #[test]
    fn packets_beyond_the_sack_bitmap_do_not_count_as_missing() {
        let mut board = Scoreboard::new(Psn::new(0));
        let found = board.on_ack(at(1), Psn::new(0), &sack(0, 300, u128::MAX, 0), REORDERING, TransportPolicy::Srnic);
        assert_eq!(numbers(&found), [0]);
    }

    #[test]
    fn a_retransmission_is_lost_when_a_later_packet_arrived() {
        let mut board = Scoreboard::new(Psn::new(0));
        assert_eq!(
            numbers(&board.on_ack(at(9), Psn::new(0), &sack(0, 1, 1, 5), REORDERING, TransportPolicy::Srnic)),
            [0]
        );
        board.on_retransmit(Psn::new(0), 20);
        let same_tick = sack(0, 2, 0b11, 20);
        assert_eq!(numbers(&board.on_ack(at(30), Psn::new(0), &same_tick, REORDERING, TransportPolicy::Srnic)), []);
        let later = sack(0, 3, 0b111, 21);
        let mut irn = board.clone();
        assert_eq!(numbers(&board.on_ack(at(31), Psn::new(0), &later, REORDERING, TransportPolicy::Srnic)), [0]);
        assert_eq!(numbers(&irn.on_ack(at(31), Psn::new(0), &later, REORDERING, TransportPolicy::Irn)), []);
    }

    #[test]
    fn a_late_packet_measures_the_reordering() {
        let mut board = Scoreboard::new(Psn::new(0));
        let wait = Span::from_ps(8_000_000);
        let found = board.on_ack(at(1), Psn::new(0), &sack(0, 1, 1, 0), wait, TransportPolicy::Srnic);
        assert_eq!(numbers(&found), []);
        assert_eq!(board.due(wait), Some(at(9)));
        assert_eq!(board.overdue(at(8), wait), []);
        let found = board.on_ack(at(6), Psn::new(2), &sack(2, 0, 0, 0), wait, TransportPolicy::Srnic);
        assert_eq!(found.lateness, Some(Span::from_ps(5_000_000)));
        assert!(board.is_clean());
    }

    #[test]
    fn a_packet_that_arrives_before_its_retransmission_leaves_was_late() {
        let mut board = Scoreboard::new(Psn::new(0));
        let lost = board.on_ack(at(9), Psn::new(0), &sack(0, 1, 1, 5), REORDERING, TransportPolicy::Srnic);
        assert_eq!(numbers(&lost), [0]);
        let found = board.on_ack(at(11), Psn::new(3), &sack(3, 2, 0, 6), REORDERING, TransportPolicy::Srnic);
        assert_eq!((found.spurious, found.repaired), (1, 0));
        assert_eq!(found.lateness, Some(Span::from_ps(2_000_000)));
        assert!(board.is_clean());
    }

    #[test]
    fn a_late_first_copy_is_recognized_by_its_echo() {
        let mut board = Scoreboard::new(Psn::new(0));
        board.on_ack(at(9), Psn::new(0), &sack(0, 1, 1, 5), REORDERING, TransportPolicy::Srnic);
        board.on_retransmit(Psn::new(0), 20);
        let mut repaired = board.clone();
        let first = board.on_ack(at(22), Psn::new(2), &sack(2, 0, 0, 4), REORDERING, TransportPolicy::Srnic);
        assert_eq!((first.spurious, first.repaired), (1, 0));
        let second = repaired.on_ack(at(22), Psn::new(2), &sack(2, 0, 0, 20), REORDERING, TransportPolicy::Srnic);
        assert_eq!((second.spurious, second.repaired), (0, 1));
    }
}
