//! Decides which packets form a message, and when it is sent.
//!
//! A fixed batch waits until it is full, or until its oldest packet has waited for a given time. That is right at one
//! load only. An adaptive batch takes the packets that are queued, so that packets are combined exactly when they
//! arrive faster than they leave. It does not wait to be filled unless a node is short of time. Four things determine
//! its size:
//!
//! - **Overlap.** The first packet of a message waits for its last one, and the peer begins when it has the whole
//!   message. Without pressure, a message therefore has the number of packets with which the last queued packet arrives
//!   soonest: many short packets, few long ones. The latency of messages is modelled online ([`Latency`]). No message
//!   takes longer than the target.
//! - **Lateness.** Once the oldest packet has used half the target, throughput matters most, and messages are as long
//!   as allowed: where long ones cost more, or save nothing, their bytes are limited.
//! - **Load** of this node or the peer, which states its load in its messages. The higher the load, the larger the
//!   batch size ([`super::Occupancy`]); fewer packets wait for others, or until the oldest has used half the target;
//!   all of the target, if only full messages are worth sending. Long packets are sent in smaller batches, because most
//!   of their cost is their bytes.
//! - **A peer that lags.** If the peer is the bottleneck, packets never queue up here, but small messages queue up
//!   there, each at the cost of a message. Therefore the batch size grows with the packets in flight, so that few
//!   messages are in flight. Packets that arrive meanwhile are held back here, where that costs nothing, until the peer
//!   has caught up, the batch is large enough, or the oldest packet has used half the target.

use std::collections::VecDeque;

use sim::{Span, Time};
use thiserror::Error;

use super::latency::{Latency, Sample};
use super::limits::{ENOUGH_BYTES, FIXED_PACKETS_MAX, PACKETS_MAX};
use super::message;

/// How packets are batched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Batches of a fixed size, or smaller ones once the oldest packet has waited for a given time.
    Fixed {
        /// Batch size, 1 to [`FIXED_PACKETS_MAX`].
        packets: u8,
        /// Maximum wait of the oldest packet.
        wait: Span,
    },
    /// Batches of the queued packets, within a latency target.
    Adaptive {
        /// Target of the latency between nodes, if the load allows it.
        target: Span,
    },
}

/// A policy with a parameter out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{what} of {value}; choose {least} to {most}")]
pub struct PolicyError {
    what: &'static str,
    value: u64,
    least: u64,
    most: u64,
}

impl Policy {
    /// Default wait of a fixed batch: 10 us, as in the models used for comparison.
    pub const WAIT: Span = Span::from_ps(10_000_000);
    /// Default target of an adaptive batch: 10 us, below the published 14 us of a hop.
    pub const TARGET: Span = Span::from_ps(10_000_000);
    /// Maximum target.
    const TARGET_MAX: Span = Span::from_ps(1_000_000_000_000);

    /// Returns the policy of fixed batches with the default wait.
    pub const fn fixed(packets: u8) -> Policy {
        Policy::Fixed { packets, wait: Self::WAIT }
    }

    /// Returns the policy of adaptive batches with the default target.
    pub const fn adaptive() -> Policy {
        Policy::Adaptive { target: Self::TARGET }
    }

    /// Validates the parameters.
    ///
    /// # Errors
    /// A parameter is out of range.
    pub fn check(&self) -> Result<(), PolicyError> {
        let (what, value, least, most) = match self {
            Policy::Fixed { packets, .. } => ("batches", u64::from(*packets), 1, FIXED_PACKETS_MAX as u64),
            Policy::Adaptive { target } => ("a target in picoseconds", target.ps(), 1, Self::TARGET_MAX.ps()),
        };
        if (least..=most).contains(&value) { Ok(()) } else { Err(PolicyError { what, value, least, most }) }
    }
}

/// Lower bound of the fixed cost of a message in packets, whatever the model says: batching saves work at both nodes,
/// and samples of one packet length do not determine the fixed cost.
const MESSAGE_PACKETS_MIN: f64 = 4.0;

/// Maximum batch size unless the load calls for more: the first packet waits for all others, while the peer could have
/// begun.
const USUAL_PACKETS_MAX: usize = FIXED_PACKETS_MAX;

/// Returns the maximum wait of the oldest packet: half the target, or all of it if only full messages are worth
/// sending, because there is no time for more messages.
fn wait_max(target: Span, is_full_only: bool) -> Span {
    if is_full_only { target } else { Span::from_ps(target.ps() / 2) }
}

/// The batch size, the larger of two values, and the maximum length of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchTarget {
    /// Batch size by the load of the two nodes. [`PACKETS_MAX`]: there is time only for full messages.
    pub by_occupancy: usize,
    /// Batch size by the packets in flight, so that they form few messages.
    pub by_in_flight: usize,
    /// Maximum bytes of a message. A longer packet forms a message by itself.
    pub bytes_max: usize,
}

impl BatchTarget {
    fn packets_min(self) -> usize {
        self.by_occupancy.max(self.by_in_flight)
    }

    fn is_full_only(self) -> bool {
        self.by_occupancy >= PACKETS_MAX
    }
}

/// A queued packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queued<T> {
    /// The packet.
    pub item: T,
    /// Length in bytes.
    pub bytes: u16,
    /// When it was queued.
    pub since: Time,
}

/// The queue of packets to a node.
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
    /// Creates a queue with its capacity, the maximum length of messages, and an initial latency model.
    ///
    /// # Panics
    /// The policy is invalid, see [`Policy::check`], or the capacity is 0.
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

    /// Changes the policy.
    ///
    /// # Panics
    /// The policy is invalid, see [`Policy::check`].
    pub fn set_policy(&mut self, policy: Policy) {
        assert!(policy.check().is_ok(), "{policy:?}");
        self.policy = policy;
    }

    /// Returns the number of queued packets.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Returns whether no packet is queued.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Queues a packet of `bytes` bytes.
    ///
    /// # Errors
    /// Returns the packet if the queue is full.
    #[inline]
    pub fn push(&mut self, now: Time, bytes: u16, item: T) -> Result<(), T> {
        if self.queue.len() >= self.queue_packets_max {
            return Err(item);
        }
        self.queue_bytes += usize::from(bytes);
        self.queue.push_back(Queued { item, bytes, since: now });
        Ok(())
    }

    /// Returns the number of packets to send now. With an adaptive policy: at most as many as fit in a message, and not
    /// fewer than the batch size unless the oldest packet has waited for long.
    #[inline]
    pub fn due(&self, now: Time, batch: BatchTarget) -> usize {
        let Some(oldest) = self.queue.front() else { return 0 };
        let waited = now.since(oldest.since);
        match self.policy {
            Policy::Fixed { packets, wait } => {
                let wanted = usize::from(packets);
                if self.queue.len() >= wanted || waited >= wait { self.queue.len().min(wanted) } else { 0 }
            }
            Policy::Adaptive { target } => self.in_one_message(self.adaptive_due(target, waited, batch)),
        }
    }

    #[inline]
    fn adaptive_due(&self, target: Span, waited: Span, batch: BatchTarget) -> usize {
        let queued = self.longest(batch);
        if waited >= wait_max(target, batch.is_full_only()) {
            return queued;
        }
        if batch.packets_min() <= 1 {
            // No pressure.
            return self.within(self.overlapping(queued), target.ns());
        }
        if queued < batch.packets_min().min(PACKETS_MAX) && self.queue_bytes < ENOUGH_BYTES {
            return 0;
        }
        // If there is time only for full messages, shorter ones would only be more of them.
        if batch.is_full_only() { queued } else { self.within(queued, target.ns()) }
    }

    /// Returns the maximum number of queued packets in a message: by the default maximum or the batch size, and by the
    /// maximum length, as if all packets had the same length. This also bounds the batch size where long messages cost
    /// more, or save nothing.
    #[inline]
    fn longest(&self, batch: BatchTarget) -> usize {
        let queued = self.queue.len().min(batch.packets_min().max(USUAL_PACKETS_MAX));
        if self.queue_bytes <= batch.bytes_max {
            return queued;
        }
        let by_bytes = batch.bytes_max * self.queue.len() / self.queue_bytes;
        queued.min(by_bytes.max(1))
    }

    /// Returns how many of the first `due_packets` packets fit in one message, at least 1. The rest would form a small
    /// message, about which the next call decides.
    #[inline]
    fn in_one_message(&self, due_packets: usize) -> usize {
        // The total length of the queue is an upper bound that needs no iteration.
        if due_packets <= 1 || message::length(due_packets, self.queue_bytes) <= self.message_bytes_max {
            return due_packets;
        }
        let lengths = self.queue.iter().take(due_packets).map(|queued| usize::from(queued.bytes));
        message::fit(self.message_bytes_max, lengths).0.max(1)
    }

    /// Returns how many of the first `queued` packets a message should have so that the last queued packet arrives
    /// soonest.
    ///
    /// This node assembles a message while the peer processes the previous one. With k of n packets per message, each
    /// of which takes `m + k p`, the last packet arrives after `n / k + 1` of those: soonest with `k = sqrt(n m / p)`.
    #[inline]
    fn overlapping(&self, queued: usize) -> usize {
        let waiting = self.queue.len() as f64;
        let message_packets = self.latency.message_packets(self.queue_bytes as f64 / waiting);
        let packets = (waiting * message_packets.max(MESSAGE_PACKETS_MIN)).sqrt();
        (packets.ceil() as usize).min(queued)
    }

    /// Returns how many of the first `queued` packets a message transfers within a time, at least 1.
    #[inline]
    fn within(&self, queued: usize, target_ns: f64) -> usize {
        let is_within = |packets: usize, bytes: usize| self.latency.expected_ns(packets, bytes) <= target_ns;
        let lengths = self.queue.iter().take(queued).map(|queued| usize::from(queued.bytes));
        // The total length of the queue is an upper bound that needs no iteration.
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

    /// Returns the latest time at which [`Batcher::due`] must be called again. It may return 0 again.
    pub fn deadline(&self) -> Option<Time> {
        let oldest = self.queue.front()?;
        let wait = match self.policy {
            Policy::Fixed { wait, .. } => wait,
            Policy::Adaptive { target } => wait_max(target, false),
        };
        Some(oldest.since + wait)
    }

    /// Iterates over the queued packets, oldest first.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = &Queued<T>> + Clone {
        self.queue.iter()
    }

    /// Removes the oldest packet.
    pub fn pop(&mut self) -> Option<Queued<T>> {
        let oldest = self.queue.pop_front()?;
        self.queue_bytes -= usize::from(oldest.bytes);
        Some(oldest)
    }

    /// Returns the oldest packet, of which `bytes` bytes fewer are to be sent from now on.
    pub fn shorten_oldest(&mut self, bytes: u16) -> Option<&mut T> {
        let oldest = self.queue.front_mut()?;
        oldest.bytes -= bytes;
        self.queue_bytes -= usize::from(bytes);
        Some(&mut oldest.item)
    }

    /// Updates the latency model.
    pub fn learn(&mut self, sample: &Sample) {
        self.latency.learn(sample);
    }

    /// Returns the latency model.
    pub fn latency(&self) -> &Latency {
        &self.latency
    }
}

#[cfg(test)]
mod tests {
    use super::super::limits::MESSAGE_BYTES_MAX;
    use super::*;

    const SLOT_BYTES: usize = 49_152;

    const SHORT_BYTES: usize = 12_500;
    const NOTHING_PRESSES: BatchTarget = BatchTarget { by_occupancy: 1, by_in_flight: 0, bytes_max: SHORT_BYTES };

    const FULL_ONLY: BatchTarget =
        BatchTarget { by_occupancy: PACKETS_MAX, bytes_max: MESSAGE_BYTES_MAX, ..NOTHING_PRESSES };

    /// Returns the target under a load of this node or the peer.
    fn busy(by_occupancy: usize) -> BatchTarget {
        let bytes_max = if by_occupancy < PACKETS_MAX { SHORT_BYTES } else { MESSAGE_BYTES_MAX };
        BatchTarget { by_occupancy, bytes_max, ..NOTHING_PRESSES }
    }

    /// Returns the target with packets in flight.
    fn behind(by_in_flight: usize) -> BatchTarget {
        BatchTarget { by_in_flight, ..NOTHING_PRESSES }
    }

    fn at(us: f64) -> Time {
        Time::ZERO + Span::from_ns(us * 1000.0)
    }

    fn with(policy: Policy, packets: usize, bytes: u16) -> Batcher<usize> {
        let mut batcher = Batcher::new(policy, 100, SLOT_BYTES, Latency::default());
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
    fn a_fixed_batch_is_sent_when_it_is_full_or_its_oldest_packet_has_waited() {
        let batcher = with(Policy::fixed(8), 7, 64);
        assert_eq!(batcher.deadline(), Some(at(10.0)));
        assert_eq!((batcher.due(at(9.9), NOTHING_PRESSES), batcher.due(at(10.0), NOTHING_PRESSES)), (0, 7));
        assert_eq!(with(Policy::fixed(8), 8, 64).due(at(0.0), FULL_ONLY), 8);
        assert_eq!(with(Policy::fixed(8), 20, 64).due(at(0.0), NOTHING_PRESSES), 8);
        assert_eq!(with(Policy::fixed(1), 0, 64).due(at(99.0), NOTHING_PRESSES), 0);
    }

    #[test]
    fn an_adaptive_batch_takes_the_queued_packets() {
        for (queued, due_packets) in [(0, 0), (1, 1), (5, 5), (7, 7)] {
            assert_eq!(with(Policy::adaptive(), queued, 64).due(at(0.0), NOTHING_PRESSES), due_packets);
        }
        assert_eq!(with(Policy::adaptive(), 90, 64).due(at(0.0), behind(15)), 32);
    }

    #[test]
    fn batches_exceed_the_default_maximum_if_the_target_does() {
        let due = |us, batch| with(Policy::adaptive(), 90, 64).due(at(us), batch);
        assert_eq!([busy(20), busy(40), behind(50), FULL_ONLY].map(|batch| due(0.0, batch)), [32, 40, 50, 64]);
        assert_eq!([NOTHING_PRESSES, busy(40), FULL_ONLY].map(|batch| due(99.0, batch)), [32, 40, 64], "however late");
    }

    #[test]
    fn while_the_peer_lags_small_messages_wait_for_it_but_not_forever() {
        let batcher = with(Policy::adaptive(), 5, 64);
        let due = [(4.9, 6), (4.9, 5), (4.9, 0), (5.0, 31)].map(|(us, least)| batcher.due(at(us), behind(least)));
        assert_eq!(due, [0, 5, 5, 5]);
        assert_eq!(batcher.deadline(), Some(at(5.0)));
        assert_eq!([5.0, 9.9, 10.0].map(|us| batcher.due(at(us), FULL_ONLY)), [0, 0, 5], "time only for full messages");
        assert_eq!(
            with(Policy::adaptive(), 70, 64).due(at(0.0), behind(63)),
            63,
            "a nearly full message costs the peer least"
        );
    }

    #[test]
    fn eight_kib_justify_a_message_however_few_packets_they_are() {
        for (packets, bytes, due) in [(5, 1500, 0), (6, 1500, 6), (63, 64, 0), (64, 64, 64)] {
            assert_eq!(with(Policy::adaptive(), packets, bytes).due(at(0.0), FULL_ONLY), due, "{packets} of {bytes} B");
        }
    }

    #[test]
    fn a_batch_fits_in_a_message_and_the_rest_is_decided_separately() {
        let holding = |message_bytes_max| {
            let mut batcher = Batcher::new(Policy::adaptive(), 100, message_bytes_max, Latency::default());
            (0..17).for_each(|item| batcher.push(at(0.0), 1500, item).unwrap());
            batcher
        };
        // A header of 16 bytes, and 8 for each packet.
        let mut batcher = holding(16 + 8 * 1508);
        assert_eq!([(0.0, 8), (0.0, 64), (10.0, 64)].map(|(us, least)| batcher.due(at(us), busy(least))), [8, 8, 8]);
        assert_eq!(holding(16 + 8 * 1508 - 1).due(at(0.0), busy(8)), 7);
        assert_eq!(holding(100).due(at(0.0), busy(8)), 1, "at least one");
        (0..16).for_each(|_| _ = batcher.pop());
        let due = [(0.0, 8), (5.0, 8), (9.9, 64), (10.0, 64)].map(|(us, least)| batcher.due(at(us), busy(least)));
        assert_eq!(due, [0, 1, 0, 1], "the last one of 17 does not justify a message yet");
    }

    #[test]
    fn full_messages_may_exceed_the_target_if_only_they_are_worth_sending() {
        // By the published figures 22 packets of 1500 B take 9.9 us.
        let batcher = with(Policy::adaptive(), 40, 1500);
        let busy = BatchTarget { bytes_max: MESSAGE_BYTES_MAX, ..busy(31) };
        assert_eq!([busy, FULL_ONLY].map(|batch| batcher.due(at(0.0), batch)), [22, 32]);
    }

    #[test]
    fn a_message_is_as_long_as_the_limit_while_there_is_time_for_more_messages() {
        let due = |packets, bytes, us, batch| with(Policy::adaptive(), packets, bytes).due(at(us), batch);
        assert_eq!(due(40, 1500, 0.0, behind(31)), 8, "whatever is in flight");
        assert_eq!(due(40, 1500, 5.0, NOTHING_PRESSES), 8, "and however late");
        assert_eq!([7, 20, 64].map(|least| due(40, 1500, 5.0, busy(least))), [8, 8, 32], "and whatever the load");
        assert_eq!((due(9, 1500, 5.0, behind(1)), due(8, 1500, 5.0, behind(1))), (8, 8));
        assert_eq!((due(40, 390, 5.0, behind(1)), due(40, 50_000, 5.0, behind(1))), (32, 1), "at least one");
    }

    #[test]
    fn full_messages_are_short_where_long_ones_cost_more() {
        let batch = BatchTarget { bytes_max: SHORT_BYTES, ..FULL_ONLY };
        assert_eq!([0.0, 5.0, 10.0, 99.0].map(|us| with(Policy::adaptive(), 40, 1500).due(at(us), batch)), [8; 4]);
        assert_eq!(with(Policy::adaptive(), 40, 500).due(at(99.0), batch), 25);
    }

    #[test]
    fn without_pressure_messages_overlap() {
        // By the published figures a message takes as long as 27 packets of 64 B, or 4.7 packets of 1500 B.
        for (queued, bytes, due_packets) in [(25, 64, 25), (40, 64, 32), (4, 1500, 4), (20, 1500, 8), (40, 1500, 8)] {
            assert_eq!(
                with(Policy::adaptive(), queued, bytes).due(at(0.0), NOTHING_PRESSES),
                due_packets,
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
        assert_eq!(batcher.due(at(5.0), NOTHING_PRESSES), 25, "late, therefore long");
        teach(&mut batcher, |_, _| 50_000.0);
        assert_eq!(batcher.due(at(0.0), NOTHING_PRESSES), 1, "at least one");
    }

    #[test]
    fn a_full_queue_returns_the_packet() {
        let mut batcher = with(Policy::adaptive(), 100, 64);
        assert_eq!(batcher.push(at(0.0), 64, 7), Err(7));
        assert_eq!(batcher.pop().unwrap().item, 0);
        assert_eq!(batcher.push(at(0.0), 64, 7), Ok(()));
        assert_eq!((batcher.len(), batcher.queue_bytes), (100, 6400));
    }

    #[test]
    fn invalid_policies_are_rejected() {
        assert_eq!(Policy::fixed(33).check().unwrap_err().to_string(), "batches of 33; choose 1 to 32");
        assert!(Policy::fixed(0).check().is_err() && Policy::Adaptive { target: Span::ZERO }.check().is_err());
        assert!(Policy::fixed(32).check().is_ok() && Policy::adaptive().check().is_ok());
    }
}
