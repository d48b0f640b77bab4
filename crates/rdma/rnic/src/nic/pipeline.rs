//! The send pipeline: doorbells, the schedule queue, decisions that fetch work requests, and staged packets.

use std::collections::VecDeque;

use sim::Time;

use super::fifo::pop_front_if;
use super::host_qp::PendingResponse;
use super::limits::MTU_BYTES_MAX;
use super::profile::CostModel;

/// Bytes that a packet takes in the transmit buffer in addition to its payload.
pub(super) const PACKET_BYTES: u32 = 64;

/// A packet that waits for its data or for the wire.
#[derive(Clone, Copy, Debug)]
pub(super) struct StagedPacket {
    /// When its data has arrived.
    pub at: Time,
    pub qp: u32,
    pub send_epoch: u8,
    pub generation: u8,
    pub bytes: u32,
    pub item: StagedItem,
}

/// A staged packet in half a cache line, because the ring of them is scanned. Its response, if any, is stored
/// separately.
#[derive(Clone, Copy, Debug)]
pub(super) struct CompactStaged {
    pub at: Time,
    qp: u32,
    /// Bytes of payload, at most an MTU.
    bytes: u16,
    send_epoch: u8,
    generation: u8,
    item: CompactItem,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum CompactItem {
    Request { index: u32, packet: u32, is_retransmission: bool },
    ReRequest { index: u32, packet: u32, packets: u32 },
    Response,
}

const _: () = assert!(size_of::<CompactStaged>() <= 32, "a staged packet must fit half a cache line");

/// The kind of a staged packet.
#[derive(Clone, Copy, Debug)]
pub(super) enum StagedItem {
    Request {
        index: u32,
        packet: u32,
        is_retransmission: bool,
    },
    ReRequest {
        index: u32,
        packet: u32,
        packets: u32,
    },
    /// A copy of the response, in which `packet` is the one to send.
    Response(PendingResponse),
}

/// A scheduling decision whose work requests are being fetched.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decision {
    pub at: Time,
    pub qp: u32,
    /// Bytes of the transmit buffer that are reserved for it.
    pub reserved: u32,
}

/// The send pipeline.
#[derive(Debug, Default)]
pub(super) struct Pipeline {
    pub doorbells: VecDeque<(Time, u32)>,
    /// The schedule queue.
    pub ready: VecDeque<u32>,
    pub decisions: VecDeque<Decision>,
    pub staged: VecDeque<CompactStaged>,
    /// The responses of staged packets, in order.
    staged_responses: VecDeque<PendingResponse>,
    /// Bytes of the transmit buffer that are reserved or used.
    pub ahead_bytes: u32,
    /// When the link to the host's memory becomes free.
    dma_free_at: Time,
    /// When the driver last polled. Packets whose data had arrived by then wait for the wire, not for a deadline.
    pub polled_at: Time,
}

impl Pipeline {
    /// Returns the next deadline, or [`Time::MAX`] if there is none.
    pub fn deadline(&self) -> Time {
        let doorbell = self.doorbells.front().map_or(Time::MAX, |(at, _)| *at);
        let decision = self.decisions.front().map_or(Time::MAX, |decision| decision.at);
        let staged = self.staged.front().map(|staged| staged.at).filter(|at| *at > self.polled_at);
        doorbell.min(decision).min(staged.unwrap_or(Time::MAX))
    }

    pub fn push(&mut self, staged: &StagedPacket) {
        let StagedPacket { at, qp, send_epoch, generation, bytes, item } = *staged;
        let item = match item {
            StagedItem::Request { index, packet, is_retransmission } => {
                CompactItem::Request { index, packet, is_retransmission }
            }
            StagedItem::ReRequest { index, packet, packets } => CompactItem::ReRequest { index, packet, packets },
            StagedItem::Response(response) => {
                self.staged_responses.push_back(response);
                CompactItem::Response
            }
        };
        self.ahead_bytes += bytes + PACKET_BYTES;
        self.staged.push_back(CompactStaged { at, qp, bytes: bytes as u16, send_epoch, generation, item });
    }

    /// Takes the next packet whose data has arrived.
    pub fn pop(&mut self, now: Time) -> Option<StagedPacket> {
        let CompactStaged { at, qp, bytes, send_epoch, generation, item } =
            pop_front_if(&mut self.staged, |staged| staged.at <= now)?;
        let item = match item {
            CompactItem::Request { index, packet, is_retransmission } => {
                StagedItem::Request { index, packet, is_retransmission }
            }
            CompactItem::ReRequest { index, packet, packets } => StagedItem::ReRequest { index, packet, packets },
            CompactItem::Response => {
                StagedItem::Response(self.staged_responses.pop_front().expect("each staged response has an entry here"))
            }
        };
        let bytes = u32::from(bytes);
        self.ahead_bytes -= bytes + PACKET_BYTES;
        Some(StagedPacket { at, qp, send_epoch, generation, bytes, item })
    }

    /// Occupies the link from the host's memory with a transfer; returns when it ends.
    pub fn dma_transfer(&mut self, now: Time, costs: &CostModel, bytes: u32) -> Time {
        self.dma_free_at = self.dma_free_at.max(now) + costs.dma_bytes(bytes);
        self.dma_free_at
    }
}

// The payload of a staged packet is stored in 16 bits.
const _: () = assert!(MTU_BYTES_MAX <= u16::MAX as u32);
