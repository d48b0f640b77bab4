//! The memory of the lanes between nodes: plain, or with the timing of a modelled link.

use fabric::timed::{LinkTiming, Pacer, SharedConfig, SharedInbound, SharedLayout, SharedOutbound, SharedWindows};
use fabric::{Inbound, MemoryInbound, MemoryOutbound, Outbound};
use lane::Layout;
use volmem::{CACHE_LINE_BYTES, Region};

use super::interface::InterconnectError;

/// 512 KiB: eight large packets of 64 KiB, or several hundred full messages of small ones. A sender without room polls
/// for it or sleeps: in 128 KiB, TCP streams took twice the processor time (docs/results/router.md).
pub(super) const SLOTS: u64 = 8192;
pub(super) const LAYOUT: Layout = Layout::packed(SLOTS, 0);
/// Offset of the word with the peer's [`Ack`]: a cache line of its own between the lane's words and its ring.
pub(super) const ACK_OFFSET: usize = Layout::FORWARD_BYTES + Layout::BACK_BYTES;
/// Bytes before the ring.
pub(super) const WORDS_BYTES: usize = LAYOUT.small_offset;

const _: () = assert!(ACK_OFFSET + CACHE_LINE_BYTES <= WORDS_BYTES);

/// The two windows between a pair of nodes.
pub(super) trait Windows: Send {
    type Inbound: Inbound + Clone;
    type Outbound: Outbound + Clone;

    fn inbound(&self) -> Self::Inbound;
    fn outbound(&self) -> Self::Outbound;
    /// After a doorbell, waits until the stores before it are visible here.
    fn settle(&self);
}

/// Creates windows in zeroed memory that both nodes map.
pub(super) trait Medium: Send {
    type Windows: Windows;

    /// Returns the bytes of memory for one window and its state.
    fn side_bytes(&self) -> usize;

    /// Returns the windows in this node's half and the peer's half.
    fn windows(&self, own: &Region, peer: &Region) -> Result<Self::Windows, InterconnectError>;

    /// Returns the number of packets in flight to a peer that keeps up.
    fn ahead_packets(&self) -> u32;

    /// Returns the one-way latency in nanoseconds.
    fn one_way_ns(&self) -> f64;
}

/// Plain shared memory.
pub(super) struct Direct;

pub(super) struct DirectWindows {
    inbound: MemoryInbound,
    outbound: MemoryOutbound,
}

impl Medium for Direct {
    type Windows = DirectWindows;

    fn side_bytes(&self) -> usize {
        LAYOUT.window_bytes()
    }

    fn windows(&self, own: &Region, peer: &Region) -> Result<DirectWindows, InterconnectError> {
        let (inbound, outbound) = (MemoryInbound::new(own.clone()), MemoryOutbound::new(peer.clone()));
        Ok(DirectWindows { inbound, outbound })
    }

    /// Zero: the transfer of a cache line takes less time than a message.
    fn ahead_packets(&self) -> u32 {
        0
    }

    fn one_way_ns(&self) -> f64 {
        0.0
    }
}

impl Windows for DirectWindows {
    type Inbound = MemoryInbound;
    type Outbound = MemoryOutbound;

    fn inbound(&self) -> MemoryInbound {
        self.inbound.clone()
    }

    fn outbound(&self) -> MemoryOutbound {
        self.outbound.clone()
    }

    fn settle(&self) {}
}

/// Shared memory with the timing of a modelled link.
pub(super) struct Modelled(pub LinkTiming);

const SHAPE: SharedLayout = SharedLayout { window_bytes: LAYOUT.window_bytes(), words_bytes: WORDS_BYTES };
/// Offset, after each window, of the word that holds when the link of its *owner* is free.
const PACE_OFFSET: usize = SHAPE.memory_bytes().next_multiple_of(CACHE_LINE_BYTES);

impl Medium for Modelled {
    type Windows = SharedWindows;

    fn side_bytes(&self) -> usize {
        PACE_OFFSET + CACHE_LINE_BYTES
    }

    fn windows(&self, own: &Region, peer: &Region) -> Result<SharedWindows, InterconnectError> {
        let pace = |side: &Region| Pacer::in_region(side.sub(PACE_OFFSET, CACHE_LINE_BYTES));
        let setup = SharedConfig { layout: SHAPE, timing: self.0, pacer: pace(own), peer_pacer: pace(peer) };
        Ok(SharedWindows::new(&own.sub(0, PACE_OFFSET), &peer.sub(0, PACE_OFFSET), setup)?)
    }

    /// The packets sent in a round trip, at one small packet per 100 ns.
    fn ahead_packets(&self) -> u32 {
        (self.0.one_way_ns * 2 / 100).min(1024) as u32
    }

    fn one_way_ns(&self) -> f64 {
        self.0.one_way_ns as f64
    }
}

impl Windows for SharedWindows {
    type Inbound = SharedInbound;
    type Outbound = SharedOutbound;

    fn inbound(&self) -> SharedInbound {
        SharedWindows::inbound(self)
    }

    fn outbound(&self) -> SharedOutbound {
        SharedWindows::outbound(self)
    }

    fn settle(&self) {
        SharedWindows::wait_for_arrivals(self);
    }
}
