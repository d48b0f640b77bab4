//! What the slow path's software knows of packets on their way: which arrived, which are missing and since when. It
//! exists only while something is missing.
//!
//! A packet is lost when one that was sent later arrived, and as long as packets overtake each other has passed since
//! (RACK, RFC 8985, by the clock that packets carry and acknowledgements echo). A second copy is judged in the same way
//! as the first: by the echo of what was sent after it.

use sim::{Span, Time};

use super::packet_bitmap::PacketBitmap;
use super::policy::TransportPolicy;
use crate::wire::{Psn, SelectiveAck};

/// Packets that an acknowledgement's bitmap tells of, the first that is missing among them.
const SACK_PACKETS: u32 = 1 + u128::BITS;
/// Picoseconds of a tick of the clock that packets carry.
const TICK_PS: u64 = 1_024_000;
/// Each repair that was needed takes this part of what was learned about reordering away again.
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
    /// It may only be late.
    Overtaken,
    /// It is to be sent again.
    Queued,
    /// It was sent again at this tick.
    Sent(u16),
}

/// What an acknowledgement brought to light.
#[derive(Debug, Default)]
pub(super) struct LossReport {
    /// To be sent again.
    pub lost: Vec<Psn>,
    /// How late the latest packet was that was not lost.
    pub lateness: Option<Span>,
    /// Packets sent again that were only late.
    pub spurious: u64,
    /// Packets that were rightly sent again.
    pub repaired: u64,
}

/// What software knows.
#[derive(Clone, Debug)]
pub(super) struct Scoreboard {
    base: Psn,
    /// Bit i: the packet `base + i` arrived.
    arrived: PacketBitmap,
    arrived_count: u32,
    /// All before this arrived or are in `missing`.
    examined_to: Psn,
    missing: Vec<MissingPacket>,
}

impl Scoreboard {
    pub fn new(base: Psn) -> Box<Self> {
        Box::new(Self { base, arrived: PacketBitmap::EMPTY, arrived_count: 0, examined_to: base, missing: Vec::new() })
    }

    /// Packets behind the first missing one that arrived.
    pub const fn arrived(&self) -> u32 {
        self.arrived_count
    }

    /// Whether nothing is missing that is known of.
    pub fn is_clean(&self) -> bool {
        self.missing.is_empty() && self.arrived_count == 0
    }

    /// Whether a packet arrived.
    pub fn has(&self, psn: Psn) -> bool {
        u32::try_from(psn.after(self.base)).map_or(true, |bit| self.arrived.has(bit))
    }

    /// An acknowledgement; `unacked` is what hardware has made of it and of others.
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

    /// Of this packet only the head arrived. True when it is to be sent again, and nobody said so before.
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

    /// All before this arrived.
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

    /// Notes what is newly missing: overtaken, and within what the acknowledgement tells of.
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
                LossState::Sent(tick) if is_there => {
                    // The echo of the copy that came tells which one it was.
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

    /// What waited for long enough.
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

    /// When the first that waits has waited for long enough.
    pub fn due(&self, reordering_window: Span) -> Option<Time> {
        let waiting = self.missing.iter().filter(|missing| missing.state == LossState::Overtaken);
        waiting.map(|missing| missing.since + reordering_window).min()
    }

    /// A copy left.
    pub fn on_retransmit(&mut self, psn: Psn, tick: u16) {
        for missing in self.missing.iter_mut().filter(|missing| missing.psn == psn) {
            missing.state = LossState::Sent(tick);
        }
    }

    /// A packet is sent again for another reason.
    pub fn mark_queued(&mut self, psn: Psn) {
        for missing in self.missing.iter_mut().filter(|missing| missing.psn == psn) {
            missing.state = LossState::Queued;
        }
    }

    /// Gives up waiting for the first so many that are missing; `first` is missing in any case.
    pub fn requeue(&mut self, first: Psn, most: u32) -> Vec<Psn> {
        self.advance(first);
        self.arrived_count = self.arrived.count();
        let (base, arrived) = (self.base, &self.arrived);
        self.missing.retain(|missing| u32::try_from(missing.psn.after(base)).is_ok_and(|bit| !arrived.has(bit)));
        let mut lost = Vec::new();
        if !self.missing.iter().any(|missing| missing.psn == first) {
            lost.push(first);
        }
        for missing in self.missing.iter_mut().take((most as usize).saturating_sub(lost.len())) {
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

    /// What is left of what was learned about reordering, when repairs were needed.
    pub fn shrink_window(&self, reordering_window: Span) -> Span {
        let part = reordering_window.ps() / WINDOW_DECAY_PART * self.repaired.min(WINDOW_DECAY_PART / 2);
        Span::from_ps(reordering_window.ps() - part)
    }
}

/// How many ticks one clock of 16 bits is after another.
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
    fn every_packet_that_was_overtaken_is_lost_and_not_only_the_first() {
        let mut board = Scoreboard::new(Psn::new(10));
        // 10, 12 and 15 are missing; 11, 13, 14, 16 arrived.
        let found = board.on_ack(at(1), Psn::new(10), &sack(10, 16, 0b10_1101, 0), REORDERING, TransportPolicy::Srnic);
        assert_eq!(numbers(&found), [10, 12, 15]);
        assert_eq!(board.arrived(), 4);
        let again = board.on_ack(at(2), Psn::new(10), &sack(10, 17, 0b110_1101, 0), REORDERING, TransportPolicy::Srnic);
        assert_eq!(numbers(&again), [] as [u32; 0], "each once");
    }

    #[test]
    fn nothing_beyond_what_an_acknowledgement_tells_of_counts_as_missing() {
        let mut board = Scoreboard::new(Psn::new(0));
        let found = board.on_ack(at(1), Psn::new(0), &sack(0, 300, u128::MAX, 0), REORDERING, TransportPolicy::Srnic);
        assert_eq!(numbers(&found), [0]);
    }

    #[test]
    fn a_second_copy_is_lost_when_what_was_sent_after_it_arrived() {
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
    fn what_is_late_teaches_how_long_to_wait() {
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
    fn a_first_copy_that_comes_after_the_second_was_sent_is_known_by_its_echo() {
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
