//! The on-chip state of a queue pair.

use sim::{Span, Time};

use super::congestion::{CongestionControl, CongestionState};
use super::event::CqNumber;
use super::handover::HardwareReceiver;
use crate::verbs::{AccessFlags, NicAddress, ProtectionDomain, QpState};
use crate::wire::{Psn, QpNumber, Service};

/// Maximum size of a context in bytes (srnic.md: 2.3 MB for 10,000 queue pairs).
pub const CONTEXT_BYTES_MAX: usize = 230;

/// The kind of message that is being received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum InboundMessage {
    /// No message.
    #[default]
    Nothing,
    /// A SEND.
    Send,
    /// A WRITE.
    Write,
}

/// The context of a queue pair: the state that hardware needs. State that grows, or is only read after an error, is in
/// `HostQp`.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    // Deadlines.
    pub(super) retransmit_at: Time,
    pub(super) send_not_before: Time,
    pub(super) pace_at: Time,
    /// The earliest timer entry of this queue pair.
    pub(super) timer_at: Time,
    /// When the packet `timed_psn` was sent.
    pub(super) timed_at: Time,
    // Receiving without selective repeat.
    pub(super) inbound_address: u64,
    pub(super) inbound_left: u32,
    pub(super) inbound_done: u32,
    // Identity.
    pub(super) peer: NicAddress,
    pub(super) peer_qp: QpNumber,
    pub(super) domain: ProtectionDomain,
    pub(super) queue_key: u32,
    pub(super) send_cq: CqNumber,
    pub(super) receive_cq: CqNumber,
    // Sending.
    /// The first PSN that is not acknowledged.
    pub(super) unacked: Psn,
    /// The PSN of the next packet to send.
    pub(super) next: Psn,
    /// The PSN after the last packet that was ever sent.
    pub(super) sent_end: Psn,
    /// The PSN of the packet whose round trip is measured.
    pub(super) timed_psn: Psn,
    /// Number of completed send requests.
    pub(super) send_first: u32,
    /// The index of the send request that is being sent, and its next packet.
    pub(super) send_index: u32,
    pub(super) send_packet: u32,
    /// Number of the peer's receive requests that earlier messages consumed.
    pub(super) send_message: u32,
    /// Smoothed round-trip time and its variation, in units of 64 ps, so that 32 bits hold 0.27 s.
    pub(super) rtt: u32,
    pub(super) rtt_variation: u32,
    /// When a packet was last acknowledged or waiting began, in units of 2^20 ps (1.05 us), mod 2^32 (75 min).
    pub(super) progress_tick: u32,
    /// When the last CNP was sent to the peer, on the same clock.
    pub(super) cnp_tick: u32,
    // Receiving.
    pub(super) receiver: HardwareReceiver,
    /// Message sequence number: number of completed messages.
    pub(super) msn: u32,
    /// Number of receive requests that messages have consumed.
    pub(super) receive_message: u32,
    pub(super) marked: u16,
    /// Bytes that the last quantum took in the transmit buffer, in units of 64 bytes.
    pub(super) last_quantum_64: u16,
    /// The sender's clock in the newest packet.
    pub(super) echo: u16,
    pub(super) mtu_bytes: u16,
    pub(super) reads_open: u8,
    pub(super) reads_max: u8,
    pub(super) ack_timer_code: u8,
    pub(super) rnr_timer_code: u8,
    pub(super) retries: u8,
    pub(super) retries_left: u8,
    pub(super) rnr_retries: u8,
    pub(super) rnr_retries_left: u8,
    /// Incremented to invalidate send requests that are staged.
    pub(super) send_epoch: u8,
    /// Incremented to invalidate everything that is in flight for this queue pair.
    pub(super) generation: u8,
    /// Number of READ and atomic responses that are not completely sent.
    pub(super) responses_open: u8,
    pub(super) backoff: u8,
    pub(super) access: AccessFlags,
    pub(super) service: Service,
    pub(super) state: QpState,
    pub(super) inbound: InboundMessage,
    pub(super) exists: bool,
    /// In the schedule queue, or part of a decision.
    pub(super) is_queued: bool,
    pub(super) is_timing: bool,
    /// A PSN sequence error was reported; no further one until the missing packet arrives.
    pub(super) nak_sent: bool,
    /// The sender went back to the first unacknowledged packet, and no progress was made since.
    pub(super) went_back: bool,
    pub(super) response_is_next: bool,
    /// The slow path's software keeps a scoreboard of the packets that this side sent.
    pub(super) is_tracked: bool,
    pub(super) drain_reported: bool,
    /// An acknowledgement waits until earlier responses are sent.
    pub(super) ack_pending: bool,
    /// A NAK waits until earlier responses are sent; no further request is accepted.
    pub(super) nak_pending: bool,
    pub(super) congestion: CongestionState,
}

const _: () = assert!(size_of::<Context>() <= CONTEXT_BYTES_MAX, "a context must fit its on-chip budget");

impl Context {
    /// Creates a context in the reset state.
    pub(super) fn new(
        service: Service,
        domain: ProtectionDomain,
        cqs: (CqNumber, CqNumber),
        congestion: &CongestionControl,
    ) -> Self {
        Self {
            retransmit_at: Time::MAX,
            send_not_before: Time::ZERO,
            pace_at: Time::ZERO,
            timer_at: Time::MAX,
            timed_at: Time::ZERO,
            inbound_address: 0,
            inbound_left: 0,
            inbound_done: 0,
            peer: NicAddress(0),
            peer_qp: QpNumber(0),
            domain,
            queue_key: 0,
            send_cq: cqs.0,
            receive_cq: cqs.1,
            unacked: Psn::new(0),
            next: Psn::new(0),
            sent_end: Psn::new(0),
            timed_psn: Psn::new(0),
            send_first: 0,
            send_index: 0,
            send_packet: 0,
            send_message: 0,
            rtt: 0,
            rtt_variation: 0,
            progress_tick: 0,
            cnp_tick: LONG_AGO_TICK,
            receiver: HardwareReceiver::new(Psn::new(0)),
            msn: 0,
            receive_message: 0,
            marked: 0,
            last_quantum_64: 0,
            echo: 0,
            mtu_bytes: 0,
            reads_open: 0,
            reads_max: 0,
            ack_timer_code: 0,
            rnr_timer_code: 0,
            retries: 0,
            retries_left: 0,
            rnr_retries: 0,
            rnr_retries_left: 0,
            send_epoch: 0,
            generation: 0,
            responses_open: 0,
            backoff: 0,
            access: AccessFlags::empty(),
            service,
            state: QpState::Reset,
            inbound: InboundMessage::Nothing,
            exists: true,
            is_queued: false,
            is_timing: false,
            nak_sent: false,
            went_back: false,
            response_is_next: false,
            is_tracked: false,
            drain_reported: false,
            ack_pending: false,
            nak_pending: false,
            congestion: CongestionState::new(congestion),
        }
    }

    /// Updates the smoothed round-trip time (RFC 6298, in integers).
    pub(super) fn sample_rtt(&mut self, rtt: Span) {
        let sample = u32::try_from(rtt.ps() / RTT_UNIT_PS).unwrap_or(u32::MAX / 4).clamp(1, u32::MAX / 4);
        if self.rtt == 0 {
            (self.rtt, self.rtt_variation) = (sample, sample / 2);
            return;
        }
        let difference = self.rtt.abs_diff(sample);
        self.rtt_variation = self.rtt_variation - self.rtt_variation / 4 + difference / 4;
        self.rtt = self.rtt - self.rtt / 8 + sample / 8;
    }

    /// Returns the smoothed round-trip time, once one was measured.
    pub(super) fn smoothed_rtt(&self) -> Option<Span> {
        (self.rtt > 0).then(|| Span::from_ps(u64::from(self.rtt) * RTT_UNIT_PS))
    }

    /// Returns the variation of the round-trip time.
    pub(super) fn rtt_variation(&self) -> Span {
        Span::from_ps(u64::from(self.rtt_variation) * RTT_UNIT_PS)
    }

    /// Returns whether a CNP may be sent to the peer, at most once in each period, and notes that it is sent.
    pub(super) fn cnp_due(&mut self, now: Time, period: Span) -> bool {
        let tick = (now.ps() >> PROGRESS_TICK_SHIFT) as u32;
        let is_due = u64::from(tick.wrapping_sub(self.cnp_tick)) << PROGRESS_TICK_SHIFT >= period.ps();
        if is_due {
            self.cnp_tick = tick;
        }
        is_due
    }

    /// Notes that a response arrived, or that waiting begins.
    pub(super) fn note_progress(&mut self, now: Time) {
        self.progress_tick = (now.ps() >> PROGRESS_TICK_SHIFT) as u32;
    }

    /// Returns the time since the last progress.
    pub(super) fn time_since_progress(&self, now: Time) -> Span {
        let ticks = ((now.ps() >> PROGRESS_TICK_SHIFT) as u32).wrapping_sub(self.progress_tick);
        Span::from_ps(u64::from(ticks) << PROGRESS_TICK_SHIFT)
    }

    /// Returns the maximum payload of a packet.
    pub(super) fn mtu(&self) -> u32 {
        u32::from(self.mtu_bytes)
    }
}

/// Unit of round-trip times in the context.
const RTT_UNIT_PS: u64 = 64;

/// Unit of the progress clock: 2^20 ps.
const PROGRESS_TICK_SHIFT: u32 = 20;
/// Half the range of the progress clock before its start.
const LONG_AGO_TICK: u32 = 1 << 31;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_is_no_larger_than_published() {
        assert!(size_of::<Context>() <= CONTEXT_BYTES_MAX, "{}", size_of::<Context>());
    }
}
