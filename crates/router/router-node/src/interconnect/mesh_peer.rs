//! The state that a mesh keeps of one peer: queue, messages in flight, acknowledgements, counters.

use std::collections::VecDeque;

use router::batch::message::{Header, MessageError};
use router::batch::{Batcher, Latency, PACKETS_MAX, Parcel, Sample};
use sim::{Span, Time};

use super::carrier::{Ack, FlowLimits};
use super::interface::{InterconnectSettings, PeerCounters, PeerState};

/// Time without an acknowledgement after which one is requested.
pub(super) const ACK_REQUEST_INTERVAL: Span = Span::from_ps(1_000_000_000);
/// Interval of requests to a peer that has not sent a message since it was connected.
const PROBE_INTERVAL: Span = Span::from_ps(10_000_000_000);
/// Adaptive batches are sized so that about this many messages are in flight.
const MESSAGES_IN_FLIGHT: u32 = 8;
/// Maximum batch size by packets in flight. One more means that a node has time for full messages only, which a
/// congested link does not imply.
const BY_IN_FLIGHT_MAX: usize = PACKETS_MAX - 1;
/// One of this many messages that find nothing in flight is timed.
const SAMPLE_EVERY: u32 = 4;
/// The first messages are all timed, until there are this many samples.
pub(super) const SAMPLES_INITIAL: u32 = 64;
/// A time measured by polling counts only if the previous poll was at most this long ago.
const ACK_POLL_GAP_MAX: Span = Span::from_ps(500_000);

/// A message in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct InFlight {
    /// Number of packets sent up to its end, mod 2^32.
    pub(super) end: u32,
    /// Number of bytes sent up to its end.
    pub(super) bytes_end: u64,
    /// Packets of which it contains the end.
    pub(super) completes: u32,
}

/// A message whose delivery is timed.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimedMessage {
    pub(super) end: u32,
    pub(super) packets: usize,
    pub(super) bytes: usize,
    pub(super) sent: Time,
    pub(super) polled: Time,
}

/// The state of one peer.
pub(super) struct Peer {
    pub(super) state: PeerState,
    pub(super) batcher: Batcher<Parcel>,
    pub(super) counters: PeerCounters,
    /// Whether a part of the oldest packet in the queue, which is a large one, was sent.
    pub(super) is_begun: bool,
    /// The large packet of which a part was received.
    pub(super) partial: Option<Parcel>,
    /// Number of packets sent, mod 2^32; each part of a large packet counts.
    pub(super) sent: u32,
    pub(super) sent_bytes: u64,
    pub(super) in_flight: VecDeque<InFlight>,
    /// Number of sent packets that the peer has acknowledged, mod 2^32, and their bytes.
    pub(super) acked: u32,
    pub(super) acked_bytes: u64,
    pub(super) acked_at: Time,
    pub(super) ack_requested_at: Time,
    /// Requests since the last acknowledgement of what is in flight.
    pub(super) requests_unanswered: u64,
    /// Whether the peer has sent a message since it was connected.
    pub(super) has_answered: bool,
    /// Occupancy of the peer, see [`Header::occupancy`], and when it was received.
    pub(super) occupancy: u8,
    pub(super) occupancy_at: Time,
    pub(super) timed: Option<TimedMessage>,
    pub(super) until_sample: u32,
    /// Number of timed messages, up to [`SAMPLES_INITIAL`].
    pub(super) samples: u32,
    /// Number of packets received, mod 2^32, and the number last acknowledged to the peer.
    pub(super) received: u32,
    pub(super) acked_to_peer: u32,
    pub(super) unacked_since: Option<Time>,
    /// Received bytes that were not acknowledged yet.
    pub(super) unacked_bytes: u64,
    pub(super) is_ack_requested: bool,
    /// For the balancer: packets submitted, and packets known to have left the link.
    pub(super) submitted: u64,
    pub(super) completed: u64,
}

impl Peer {
    pub(super) fn new(settings: &InterconnectSettings, limits: &FlowLimits) -> Peer {
        let latency = Latency::new(limits.latency_ns);
        Peer {
            state: PeerState::Absent,
            batcher: Batcher::new(settings.policy, settings.queue_packets, limits.message_bytes_max, latency),
            counters: PeerCounters::default(),
            is_begun: false,
            partial: None,
            sent: 0,
            sent_bytes: 0,
            in_flight: VecDeque::new(),
            acked: 0,
            acked_bytes: 0,
            acked_at: Time::ZERO,
            ack_requested_at: Time::ZERO,
            requests_unanswered: 0,
            has_answered: !limits.acks_in_messages,
            occupancy: 0,
            occupancy_at: Time::ZERO,
            timed: None,
            until_sample: 0,
            samples: 0,
            received: 0,
            acked_to_peer: 0,
            unacked_since: None,
            unacked_bytes: 0,
            is_ack_requested: false,
            submitted: 0,
            completed: 0,
        }
    }

    /// Returns the number of packets in flight.
    pub(super) fn packets_in_flight(&self) -> u32 {
        self.sent.wrapping_sub(self.acked)
    }

    pub(super) fn has_window(&self, limits: &FlowLimits) -> bool {
        self.in_flight.len() < limits.messages_max && self.sent_bytes - self.acked_bytes < limits.bytes_max
    }

    /// Returns the batch size by what is in flight: nearly a full message once half the window is used.
    pub(super) fn by_in_flight(&self, limits: &FlowLimits) -> usize {
        let bytes = self.sent_bytes - self.acked_bytes;
        if bytes > limits.bytes_max / 2 || self.in_flight.len() > limits.messages_max / 2 {
            return BY_IN_FLIGHT_MAX;
        }
        let packets = self.packets_in_flight().saturating_sub(limits.ahead_packets) / MESSAGES_IN_FLIGHT;
        (packets as usize).min(BY_IN_FLIGHT_MAX)
    }

    /// Processes an acknowledgement. One that exceeds what was sent is an error.
    pub(super) fn process_ack(&mut self, now: Time, ack: Ack) -> Result<(), MessageError> {
        (self.occupancy, self.occupancy_at) = (ack.occupancy, now);
        let newly_acked = ack.number.wrapping_sub(self.acked);
        if newly_acked == 0 {
            return Ok(());
        }
        if newly_acked > self.packets_in_flight() {
            return Err(MessageError { what: "an acknowledgement", value: u64::from(ack.number) });
        }
        (self.acked, self.acked_at, self.requests_unanswered) = (ack.number, now, 0);
        while let Some(oldest) = self.in_flight.front().filter(|oldest| is_at_or_before(oldest.end, ack.number)) {
            self.acked_bytes = oldest.bytes_end;
            self.completed += u64::from(oldest.completes);
            self.in_flight.pop_front();
        }
        if let Some(timed) = self.timed.take_if(|timed| is_at_or_before(timed.end, ack.number))
            && now.since(timed.polled) <= ACK_POLL_GAP_MAX
        {
            let took = now.since(timed.sent);
            self.samples = (self.samples + 1).min(SAMPLES_INITIAL);
            self.batcher.learn(&Sample { packets: timed.packets, bytes: timed.bytes, took });
        }
        Ok(())
    }

    /// Records a message of packets or of one part, which contains the ends of `completes` packets.
    pub(super) fn note_sent(&mut self, now: Time, (packets, completes): (usize, usize), bytes: usize, may_time: bool) {
        let was_silent = self.in_flight.is_empty();
        if was_silent {
            self.acked_at = now;
        }
        self.sent = self.sent.wrapping_add(packets as u32);
        self.sent_bytes += bytes as u64;
        let (bytes_end, completes) = (self.sent_bytes, completes as u32);
        self.in_flight.push_back(InFlight { end: self.sent, bytes_end, completes });
        self.counters.sent_messages += 1;
        self.counters.sent_packets += u64::from(completes);
        if may_time && was_silent && self.timed.is_none() {
            self.until_sample = self.until_sample.checked_sub(1).unwrap_or(SAMPLE_EVERY - 1);
            if self.until_sample == 0 || self.samples < SAMPLES_INITIAL {
                self.timed = Some(TimedMessage { end: self.sent, packets, bytes, sent: now, polled: now });
            }
        }
    }

    /// Records a message that was received. Returns whether messages before it were lost.
    pub(super) fn receive_message(&mut self, now: Time, header: &Header, packets: usize) -> Result<bool, MessageError> {
        let lost = header.sequence.wrapping_sub(self.received);
        if lost > i32::MAX as u32 {
            return Err(MessageError { what: "a sequence", value: u64::from(header.sequence) });
        }
        self.is_ack_requested |= header.requests_ack;
        self.has_answered = true;
        self.received = header.sequence.wrapping_add(packets as u32);
        self.counters.lost_packets += u64::from(lost);
        if packets > 0 {
            self.counters.received_messages += 1;
            self.unacked_since.get_or_insert(now);
        }
        Ok(lost > 0)
    }

    /// Records that everything received was acknowledged.
    pub(super) fn note_acked(&mut self) {
        (self.acked_to_peer, self.unacked_since, self.unacked_bytes) = (self.received, None, 0);
    }

    /// Returns when to request an acknowledgement.
    pub(super) fn ack_request_due(&self) -> Option<Time> {
        if self.in_flight.is_empty() {
            return (!self.has_answered).then(|| self.ack_requested_at + PROBE_INTERVAL);
        }
        Some(self.acked_at.max(self.ack_requested_at) + ACK_REQUEST_INTERVAL)
    }
}

/// Returns whether `end` is at or before `ack`, mod 2^32. Their distance never exceeds what is in flight.
fn is_at_or_before(end: u32, ack: u32) -> bool {
    ack.wrapping_sub(end) as i32 >= 0
}
