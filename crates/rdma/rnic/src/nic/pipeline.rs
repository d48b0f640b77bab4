//! Packets between the scheduler and the wire: doorbells, fetch decisions and staged packets.

use std::collections::VecDeque;

use sim::Time;

use super::fifo::pop_front_if;
use super::host_qp::PendingResponse;
use super::limits::MTU_BYTES_MAX;
use super::profile::CostModel;

/// What a packet takes of the buffer ahead of the wire besides its payload.
pub(super) const PACKET_BYTES: u32 = 64;

/// A packet that waits for its data, or for the wire.
#[derive(Clone, Copy, Debug)]
pub(super) struct StagedPacket {
    /// When its data is there.
    pub at: Time,
    pub qp: u32,
    pub send_epoch: u8,
    pub generation: u8,
    pub bytes: u32,
    pub item: StagedItem,
}

/// A staged packet as it waits: half a cache line, for a ring of them is walked through. Replies wait beside it.
#[derive(Clone, Copy, Debug)]
pub(super) struct CompactStaged {
    pub at: Time,
    qp: u32,
    /// Of payload: an MTU at most.
    bytes: u16,
    send_epoch: u8,
    generation: u8,
    item: CompactItem,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum CompactItem {
    Request { index: u32, packet: u32, is_again: bool },
    ReRequest { index: u32, packet: u32, packets: u32 },
    Response,
}

const _: () = assert!(size_of::<CompactStaged>() <= 32, "a staged packet is more than half a cache line");

/// Which packet.
#[derive(Clone, Copy, Debug)]
pub(super) enum StagedItem {
    Request {
        index: u32,
        packet: u32,
        is_again: bool,
    },
    ReRequest {
        index: u32,
        packet: u32,
        packets: u32,
    },
    /// The reply as it stood, `packet` being the one to send.
    Response(PendingResponse),
}

/// A decision whose work requests are being fetched.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decision {
    pub at: Time,
    pub qp: u32,
    /// Bytes of the buffer that are kept for it.
    pub reserved: u32,
}

/// From doorbells to the wire.
#[derive(Debug, Default)]
pub(super) struct Pipeline {
    pub doorbells: VecDeque<(Time, u32)>,
    /// The schedule queue.
    pub ready: VecDeque<u32>,
    pub decisions: VecDeque<Decision>,
    pub staged: VecDeque<CompactStaged>,
    /// Those of the staged packets that are replies.
    staged_responses: VecDeque<PendingResponse>,
    /// Bytes reserved and staged.
    pub ahead_bytes: u32,
    /// When the link to the host's memory has carried what was asked for.
    dma_free_at: Time,
    /// When the driver last came by: packets that were ready then wait for the wire, not for time.
    pub polled_at: Time,
}

impl Pipeline {
    /// When something is due; [`Time::MAX`] when nothing is.
    pub fn deadline(&self) -> Time {
        let doorbell = self.doorbells.front().map_or(Time::MAX, |(at, _)| *at);
        let decision = self.decisions.front().map_or(Time::MAX, |decision| decision.at);
        let staged = self.staged.front().map(|staged| staged.at).filter(|at| *at > self.polled_at);
        doorbell.min(decision).min(staged.unwrap_or(Time::MAX))
    }

    pub fn push(&mut self, staged: &StagedPacket) {
        let StagedPacket { at, qp, send_epoch, generation, bytes, item } = *staged;
        let item = match item {
            StagedItem::Request { index, packet, is_again } => CompactItem::Request { index, packet, is_again },
            StagedItem::ReRequest { index, packet, packets } => CompactItem::ReRequest { index, packet, packets },
            StagedItem::Response(response) => {
                self.staged_responses.push_back(response);
                CompactItem::Response
            }
        };
        self.ahead_bytes += bytes + PACKET_BYTES;
        self.staged.push_back(CompactStaged { at, qp, bytes: bytes as u16, send_epoch, generation, item });
    }

    /// The next packet whose data is there.
    pub fn pop(&mut self, now: Time) -> Option<StagedPacket> {
        let CompactStaged { at, qp, bytes, send_epoch, generation, item } =
            pop_front_if(&mut self.staged, |staged| staged.at <= now)?;
        let item = match item {
            CompactItem::Request { index, packet, is_again } => StagedItem::Request { index, packet, is_again },
            CompactItem::ReRequest { index, packet, packets } => StagedItem::ReRequest { index, packet, packets },
            CompactItem::Response => {
                StagedItem::Response(self.staged_responses.pop_front().expect("each has its reply beside it"))
            }
        };
        let bytes = u32::from(bytes);
        self.ahead_bytes -= bytes + PACKET_BYTES;
        Some(StagedPacket { at, qp, send_epoch, generation, bytes, item })
    }

    /// When the link from the host's memory has carried so many bytes more.
    pub fn dma_transfer(&mut self, now: Time, costs: &CostModel, bytes: u32) -> Time {
        self.dma_free_at = self.dma_free_at.max(now) + costs.dma_bytes(bytes);
        self.dma_free_at
    }
}

// The payload of a staged packet is counted in 16 bits.
const _: () = assert!(MTU_BYTES_MAX <= u16::MAX as u32);
