//! Which packets go together, and when.
//!
//! A fixed batch waits until it is full, or until its oldest packet has waited for so long. That is right at one load.
//! An adaptive one takes what is there, so that packets go together exactly when they come faster than they leave. It
//! does not wait to be filled unless somebody is short of time. Four things bound it:
//!
//! * **What overlaps.** The first packet of a message waits for its last, and the other node begins when it has all of
//!   it. So while nothing presses, a message has as many packets as let the last of all that wait be there soonest:
//!   many short packets, few long ones. What messages take is learnt ([`Latency`]). None takes longer than the target.
//! * **Lateness.** Once the oldest packet has used half the target, rate is what helps, and messages are as long as
//!   they may be ([`Limit`]): where long ones cost more, or save nothing, no more than so many bytes.
//! * **A node that is nearly busy**, this one or the other, which says so in its messages. The busier it is, the more
//!   packets are worth a message ([`super::Occupancy`]), and fewer wait for others, or until the oldest has used half
//!   the target; all of it, where none but full messages are worth it. Long packets are worth one sooner: most of what
//!   they cost is their bytes.
//! * **A peer that is behind.** Where the other node is the bottleneck, packets never queue up here, but small messages
//!   do over there, each at the price of a message. So the more packets are under way, the more go together: few
//!   messages are under way at any time. What comes meanwhile is kept together here, where it costs nothing, until the
//!   peer has caught up, there are enough, or the oldest packet has used half the target.

use std::collections::VecDeque;

use sim::{Span, Time};
use thiserror::Error;

use super::lengths::FULL_BYTES;
use super::{FIXED_PACKETS_MAX, Latency, Limit, PACKETS_MAX, Sample, message};

/// How packets are put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// So many, 1 to [`FIXED_PACKETS_MAX`], or fewer once the oldest has waited for so long.
    Fixed {
        /// How many.
        packets: u8,
        /// How long the oldest waits at most.
        wait: Span,
    },
    /// As many as wait, within a target.
    Adaptive {
        /// What a packet is to take from here to the other node, where load allows it.
        target: Span,
    },
}

/// A policy that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{what} of {value}; choose {least} to {most}")]
pub struct PolicyError {
    what: &'static str,
    value: u64,
    least: u64,
    most: u64,
}

impl Policy {
    /// How long a fixed batch waits to be filled: 10 us, as in the models that this is compared with.
    pub const WAIT: Span = Span::from_ps(10_000_000);
    /// What an adaptive one aims at: 10 us, below the published 14 us of a hop.
    pub const TARGET: Span = Span::from_ps(10_000_000);
    /// No target is longer.
    const TARGET_MAX: Span = Span::from_ps(1_000_000_000_000);

    /// A fixed batch of so many packets, with the usual wait.
    pub const fn fixed(packets: u8) -> Policy {
        Policy::Fixed { packets, wait: Self::WAIT }
    }

    /// Adaptive, with the usual target.
    pub const fn adaptive() -> Policy {
        Policy::Adaptive { target: Self::TARGET }
    }

    /// Whether it can be.
    ///
    /// # Errors
    /// Names what cannot be.
    pub fn check(&self) -> Result<(), PolicyError> {
        let (what, value, least, most) = match self {
            Policy::Fixed { packets, .. } => ("batches", u64::from(*packets), 1, FIXED_PACKETS_MAX as u64),
            Policy::Adaptive { target } => ("a target in picoseconds", target.ps(), 1, Self::TARGET_MAX.ps()),
        };
        if (least..=most).contains(&value) { Ok(()) } else { Err(PolicyError { what, value, least, most }) }
    }
}

/// A message counts for so many packets at least, whatever was learnt: packets that go together cost both nodes less,
/// and what is learnt from one length of packets cannot tell a message's part in it.
const MESSAGE_PACKETS_MIN: f64 = 4.0;

/// More packets go together only where more are worth a message: the first of them waits for all, and the other node
/// could have begun.
const USUAL_PACKETS_MAX: usize = 32;

/// So many bytes are worth a message, however few packets they are: to copy them takes several times what the message
/// does, and each node has to wait for all of them.
const ENOUGH_BYTES: usize = 8 << 10;

/// How long the oldest packet waits: half the target, and all of it where none but full messages are worth it, for
/// there is no time for any more of them.
fn waits_at_most(target: Span, is_full_only: bool) -> Span {
    if is_full_only { target } else { Span::from_ps(target.ps() / 2) }
}

/// How many packets are worth a message, the more of the two, and how long it may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchTarget {
    /// By how busy the two nodes are. [`PACKETS_MAX`]: there is no time for any but full messages.
    pub by_occupancy: usize,
    /// By what the peer has yet to take in: as many as make a few messages of so many.
    pub by_under_way: usize,
    /// How long a message may be.
    pub limit: Limit,
}

impl BatchTarget {
    fn least(self) -> usize {
        self.by_occupancy.max(self.by_under_way)
    }

    fn is_full_only(self) -> bool {
        self.by_occupancy >= PACKETS_MAX
    }
}

/// A packet that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queued<T> {
    /// The packet.
    pub item: T,
    /// Its length.
    pub bytes: u16,
    /// Since when it waits.
    pub since: Time,
}

/// Packets that wait for one node.
#[derive(Debug)]
pub struct Batcher<T> {
    policy: Policy,
    queue: VecDeque<Queued<T>>,
    queue_packets_max: usize,
    queue_bytes: usize,
    message_bytes_max: usize,
    latency: Latency,
}

impl<T> Batcher<T> {
    /// With room for so many packets, and messages of so many bytes. `latency`: what those take, as far as it is known.
    ///
    /// # Panics
    /// On a policy that cannot be, see [`Policy::check`], or no room.
    pub fn new(policy: Policy, queue_packets_max: usize, message_bytes_max: usize, latency: Latency) -> Batcher<T> {
        assert!(policy.check().is_ok() && queue_packets_max > 0, "{policy:?} with room for {queue_packets_max}");
        Batcher {
            policy,
            queue: VecDeque::with_capacity(queue_packets_max),
            queue_packets_max,
            queue_bytes: 0,
            message_bytes_max,
            latency,
        }
    }

    /// Messages are made so from now on.
    ///
    /// # Panics
    /// On a policy that cannot be, see [`Policy::check`].
    pub fn set_policy(&mut self, policy: Policy) {
        assert!(policy.check().is_ok(), "{policy:?}");
        self.policy = policy;
    }

    /// Packets that wait.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Adds a packet of so many bytes.
    ///
    /// # Errors
    /// The packet, when there is no room.
    #[inline]
    pub fn push(&mut self, now: Time, bytes: u16, item: T) -> Result<(), T> {
        if self.queue.len() >= self.queue_packets_max {
            return Err(item);
        }
        self.queue_bytes += usize::from(bytes);
        self.queue.push_back(Queued { item, bytes, since: now });
        Ok(())
    }

    /// How many packets are to go now; of an adaptive batch, no more than a message holds, nor fewer than are worth one
    /// unless the oldest has waited for long.
    #[inline]
    pub fn due(&self, now: Time, worth: BatchTarget) -> usize {
        let Some(oldest) = self.queue.front() else { return 0 };
        let waited = now.since(oldest.since);
        match self.policy {
            Policy::Fixed { packets, wait } => {
                let wanted = usize::from(packets);
                if self.queue.len() >= wanted || waited >= wait { self.queue.len().min(wanted) } else { 0 }
            }
            Policy::Adaptive { target } => self.in_one_message(self.adaptive_due(target, waited, worth)),
        }
    }

    #[inline]
    fn adaptive_due(&self, target: Span, waited: Span, worth: BatchTarget) -> usize {
        let queued = self.longest(waited >= target, worth);
        if waited >= waits_at_most(target, worth.is_full_only()) {
            return queued;
        }
        if worth.least() <= 1 {
            // Nothing presses.
            return self.within(self.overlapping(queued), target.ns());
        }
        if queued < worth.least().min(PACKETS_MAX) && self.queue_bytes < ENOUGH_BYTES {
            return 0;
        }
        // Where there is no time for any but full ones, shorter messages would only be more of them.
        if worth.is_full_only() { queued } else { self.within(queued, target.ns()) }
    }

    /// How many of those that wait a message has at most: as many as are usual, or worth one, and as it may have bytes,
    /// if all were of one length. Where long messages cost more, or save nothing, no more packets are worth one than
    /// that.
    #[inline]
    fn longest(&self, is_late: bool, worth: BatchTarget) -> usize {
        let queued = self.queue.len().min(worth.least().max(USUAL_PACKETS_MAX));
        let is_behind = worth.limit.is_tried && worth.is_full_only() && is_late;
        let bytes_max = if is_behind { FULL_BYTES } else { worth.limit.bytes };
        if self.queue_bytes <= bytes_max {
            return queued;
        }
        let by_bytes = bytes_max * self.queue.len() / self.queue_bytes;
        queued.min(by_bytes.max(1))
    }

    /// How many of the first `goes` packets one message holds, one of them at least. What is left of them would be a
    /// small message, and whether that is worth it is asked by itself.
    #[inline]
    fn in_one_message(&self, goes: usize) -> usize {
        // All that wait are at least as many bytes as those that would go, and known without a look at them.
        if goes <= 1 || message::length(goes, self.queue_bytes) <= self.message_bytes_max {
            return goes;
        }
        let lengths = self.queue.iter().take(goes).map(|queued| usize::from(queued.bytes));
        message::fit(self.message_bytes_max, lengths).0.max(1)
    }

    /// How many of the first `queued` packets a message is to have so that the last of all that wait is there soonest.
    ///
    /// This node makes a message while the other one takes in the one before. With k of n packets a message, each of
    /// which takes `m + k p`, the last is there after `n / k + 1` of those: soonest with `k = sqrt(n m / p)`.
    #[inline]
    fn overlapping(&self, queued: usize) -> usize {
        let waiting = self.queue.len() as f64;
        let message_packets = self.latency.message_packets(self.queue_bytes as f64 / waiting);
        let packets = (waiting * message_packets.max(MESSAGE_PACKETS_MIN)).sqrt();
        (packets.ceil() as usize).min(queued)
    }

    /// How many of the first `queued` packets a message takes within a time; one always goes.
    #[inline]
    fn within(&self, queued: usize, target_ns: f64) -> usize {
        let is_within = |packets: usize, bytes: usize| self.latency.expected_ns(packets, bytes) <= target_ns;
        let lengths = self.queue.iter().take(queued).map(|queued| usize::from(queued.bytes));
        // All that wait are at least as many bytes as those that would go, and known without a look at them.
        if is_within(queued, self.queue_bytes) || is_within(queued, lengths.clone().sum()) {
            return queued;
        }
        let mut bytes = 0;
        let fits = |(before, length): &(usize, usize)| {
            bytes += length;
            is_within(before + 1, bytes)
        };
        lengths.enumerate().take_while(fits).count().max(1)
    }

    /// When [`Batcher::due`] is to be asked again at the latest, whatever else happens: it may say once more that none
    /// is.
    pub fn deadline(&self) -> Option<Time> {
        let oldest = self.queue.front()?;
        let wait = match self.policy {
            Policy::Fixed { wait, .. } => wait,
            Policy::Adaptive { target } => waits_at_most(target, false),
        };
        Some(oldest.since + wait)
    }

    /// Those that wait, the oldest first.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = &Queued<T>> + Clone {
        self.queue.iter()
    }

    /// Takes the oldest out.
    pub fn pop(&mut self) -> Option<Queued<T>> {
        let oldest = self.queue.pop_front()?;
        self.queue_bytes -= usize::from(oldest.bytes);
        Some(oldest)
    }

    /// Learns what a message took.
    pub fn learn(&mut self, sample: &Sample) {
        self.latency.learn(sample);
    }

    /// What messages take, as far as it is known.
    pub fn latency(&self) -> &Latency {
        &self.latency
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSAGE_BYTES_MAX: usize = 49_152;

    const SHORT: Limit = Limit { bytes: 12_500, is_tried: false };
    const NOTHING_PRESSES: BatchTarget = BatchTarget { by_occupancy: 1, by_under_way: 0, limit: SHORT };

    const FULL_ONLY: BatchTarget = BatchTarget {
        by_occupancy: PACKETS_MAX,
        limit: Limit { bytes: FULL_BYTES, is_tried: false },
        ..NOTHING_PRESSES
    };

    /// A node, this one or the peer, is so busy.
    fn busy(by_occupancy: usize) -> BatchTarget {
        let limit = if by_occupancy < PACKETS_MAX { SHORT } else { Limit { bytes: FULL_BYTES, ..SHORT } };
        BatchTarget { by_occupancy, limit, ..NOTHING_PRESSES }
    }

    /// The peer has so much yet to take in.
    fn behind(by_under_way: usize) -> BatchTarget {
        BatchTarget { by_under_way, ..NOTHING_PRESSES }
    }

    fn at(us: f64) -> Time {
        Time::ZERO + Span::from_ns(us * 1000.0)
    }

    fn with(policy: Policy, packets: usize, bytes: u16) -> Batcher<usize> {
        let mut batcher = Batcher::new(policy, 100, MESSAGE_BYTES_MAX, Latency::default());
        (0..packets).for_each(|item| batcher.push(at(0.0), bytes, item).unwrap());
        batcher
    }

    fn teach(batcher: &mut Batcher<usize>, ns: impl Fn(usize, usize) -> f64) {
        for round in 0..3000 {
            let packets = 1 + round * 7 % PACKETS_MAX;
            let bytes = packets * (64 + round * 13 % 1436);
            batcher.learn(&Sample { packets, bytes, took: Span::from_ns(ns(packets, bytes)) });
        }
    }

    #[test]
    fn a_fixed_batch_goes_when_it_is_full_or_its_oldest_packet_has_waited() {
        let batcher = with(Policy::fixed(8), 7, 64);
        assert_eq!(batcher.deadline(), Some(at(10.0)));
        assert_eq!((batcher.due(at(9.9), NOTHING_PRESSES), batcher.due(at(10.0), NOTHING_PRESSES)), (0, 7));
        assert_eq!(with(Policy::fixed(8), 8, 64).due(at(0.0), FULL_ONLY), 8);
        assert_eq!(with(Policy::fixed(8), 20, 64).due(at(0.0), NOTHING_PRESSES), 8);
        assert_eq!(with(Policy::fixed(1), 0, 64).due(at(99.0), NOTHING_PRESSES), 0);
    }

    #[test]
    fn an_adaptive_one_takes_what_is_there() {
        for (queued, goes) in [(0, 0), (1, 1), (5, 5), (7, 7)] {
            assert_eq!(with(Policy::adaptive(), queued, 64).due(at(0.0), NOTHING_PRESSES), goes);
        }
        assert_eq!(with(Policy::adaptive(), 90, 64).due(at(0.0), behind(15)), 32);
    }

    #[test]
    fn more_packets_than_usual_go_together_where_as_many_are_worth_a_message() {
        let due = |us, worth| with(Policy::adaptive(), 90, 64).due(at(us), worth);
        assert_eq!([busy(20), busy(40), behind(50), FULL_ONLY].map(|worth| due(0.0, worth)), [32, 40, 50, 64]);
        assert_eq!([NOTHING_PRESSES, busy(40), FULL_ONLY].map(|worth| due(99.0, worth)), [32, 40, 64], "however late");
    }

    #[test]
    fn while_the_peer_is_behind_small_messages_wait_for_it_but_not_for_ever() {
        let batcher = with(Policy::adaptive(), 5, 64);
        let due = [(4.9, 6), (4.9, 5), (4.9, 0), (5.0, 31)].map(|(us, least)| batcher.due(at(us), behind(least)));
        assert_eq!(due, [0, 5, 5, 5]);
        assert_eq!(batcher.deadline(), Some(at(5.0)));
        assert_eq!(
            [5.0, 9.9, 10.0].map(|us| batcher.due(at(us), FULL_ONLY)),
            [0, 0, 5],
            "no time for any but full ones"
        );
        assert_eq!(
            with(Policy::adaptive(), 70, 64).due(at(0.0), behind(63)),
            63,
            "a full one, nearly, costs the peer least"
        );
    }

    #[test]
    fn eight_kib_are_worth_a_message_however_few_packets_they_are() {
        for (packets, bytes, due) in [(5, 1500, 0), (6, 1500, 6), (63, 64, 0), (64, 64, 64)] {
            assert_eq!(with(Policy::adaptive(), packets, bytes).due(at(0.0), FULL_ONLY), due, "{packets} of {bytes} B");
        }
    }

    #[test]
    fn no_more_goes_than_a_message_holds_and_the_rest_is_asked_about_by_itself() {
        let holding = |message_bytes_max| {
            let mut batcher = Batcher::new(Policy::adaptive(), 100, message_bytes_max, Latency::default());
            (0..17).for_each(|item| batcher.push(at(0.0), 1500, item).unwrap());
            batcher
        };
        // A header of 16 bytes, and 8 a packet.
        let mut batcher = holding(16 + 8 * 1508);
        assert_eq!([(0.0, 8), (0.0, 64), (10.0, 64)].map(|(us, least)| batcher.due(at(us), busy(least))), [8, 8, 8]);
        assert_eq!(holding(16 + 8 * 1508 - 1).due(at(0.0), busy(8)), 7);
        assert_eq!(holding(100).due(at(0.0), busy(8)), 1, "one always goes");
        (0..16).for_each(|_| _ = batcher.pop());
        let due = [(0.0, 8), (5.0, 8), (9.9, 64), (10.0, 64)].map(|(us, least)| batcher.due(at(us), busy(least)));
        assert_eq!(due, [0, 1, 0, 1], "one of 17 is not worth a message yet");
    }

    #[test]
    fn where_none_but_full_messages_are_worth_it_they_may_take_longer_than_the_target() {
        // By what is published 22 of 1500 B take 9.9 us.
        let batcher = with(Policy::adaptive(), 40, 1500);
        let busy = BatchTarget { limit: FULL_ONLY.limit, ..busy(31) };
        assert_eq!([busy, FULL_ONLY].map(|worth| batcher.due(at(0.0), worth)), [22, 32]);
    }

    #[test]
    fn a_message_is_as_long_as_it_may_be_while_there_is_time_for_more_of_them() {
        let due = |packets, bytes, us, worth| with(Policy::adaptive(), packets, bytes).due(at(us), worth);
        assert_eq!(due(40, 1500, 0.0, behind(31)), 8, "whatever is under way");
        assert_eq!(due(40, 1500, 5.0, NOTHING_PRESSES), 8, "and however late");
        assert_eq!([7, 20, 64].map(|least| due(40, 1500, 5.0, busy(least))), [8, 8, 32], "and whatever is worth one");
        assert_eq!((due(9, 1500, 5.0, behind(1)), due(8, 1500, 5.0, behind(1))), (8, 8));
        assert_eq!((due(40, 390, 5.0, behind(1)), due(40, 50_000, 5.0, behind(1))), (32, 1), "one always goes");
    }

    #[test]
    fn full_messages_are_short_where_long_ones_cost_more_but_who_is_late_does_not_try_it() {
        let due = |us, limit| with(Policy::adaptive(), 40, 1500).due(at(us), BatchTarget { limit, ..FULL_ONLY });
        assert_eq!([0.0, 5.0, 10.0, 99.0].map(|us| due(us, SHORT)), [8, 8, 8, 8]);
        let tried = Limit { is_tried: true, ..SHORT };
        assert_eq!([0.0, 5.0, 9.9, 10.0].map(|us| due(us, tried)), [8, 8, 8, 32]);
        let worth = BatchTarget { limit: tried, ..busy(31) };
        assert_eq!(with(Policy::adaptive(), 40, 500).due(at(99.0), worth), 25, "nor are more worth one");
    }

    #[test]
    fn while_nothing_presses_what_waits_goes_in_messages_that_overlap() {
        // By what is published a message takes 27 times what a packet of 64 B does, and 4.7 times one of 1500 B.
        for (queued, bytes, goes) in [(25, 64, 25), (40, 64, 32), (4, 1500, 4), (20, 1500, 8), (40, 1500, 8)] {
            assert_eq!(
                with(Policy::adaptive(), queued, bytes).due(at(0.0), NOTHING_PRESSES),
                goes,
                "of {queued} x {bytes} B"
            );
        }
    }

    #[test]
    fn a_message_takes_no_longer_than_its_target_unless_it_is_late() {
        let mut batcher = with(Policy::adaptive(), 40, 500);
        teach(&mut batcher, |packets, bytes| 1750.0 + 50.0 * packets as f64 + 1.5 * bytes as f64);
        // 1,800 + 9 x 800 ns are below 10 us, 10 x 800 are below, 11 are not.
        assert_eq!((batcher.due(at(0.0), NOTHING_PRESSES), batcher.due(at(0.0), behind(11))), (10, 10));
        assert_eq!(batcher.due(at(5.0), NOTHING_PRESSES), 25, "late, and long");
        teach(&mut batcher, |_, _| 50_000.0);
        assert_eq!(batcher.due(at(0.0), NOTHING_PRESSES), 1, "one always goes");
    }

    #[test]
    fn what_there_is_no_room_for_comes_back() {
        let mut batcher = with(Policy::adaptive(), 100, 64);
        assert_eq!(batcher.push(at(0.0), 64, 7), Err(7));
        assert_eq!(batcher.pop().unwrap().item, 0);
        assert_eq!(batcher.push(at(0.0), 64, 7), Ok(()));
        assert_eq!((batcher.len(), batcher.queue_bytes), (100, 6400));
    }

    #[test]
    fn policies_that_cannot_be_are_refused() {
        assert_eq!(Policy::fixed(33).check().unwrap_err().to_string(), "batches of 33; choose 1 to 32");
        assert!(Policy::fixed(0).check().is_err() && Policy::Adaptive { target: Span::ZERO }.check().is_err());
        assert!(Policy::fixed(32).check().is_ok() && Policy::adaptive().check().is_ok());
    }
}
