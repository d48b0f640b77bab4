//! The memory that lanes between nodes lie in: as it is, or as late as over a modelled link.

use fabric::timed::{LinkTiming, Pacer, SharedConfig, SharedInbound, SharedLayout, SharedOutbound, SharedWindows};
use fabric::{Inbound, MemoryInbound, MemoryOutbound, Outbound};
use lane::Layout;
use volmem::{CACHE_LINE_BYTES, Region};

use super::interface::InterconnectError;

/// 128 KiB: some hundred full messages of small packets, or three of long ones; both directions stay in a second-level
/// cache.
pub(super) const SLOTS: u64 = 2048;
pub(super) const LAYOUT: Layout = Layout::packed(SLOTS, 0);
/// Where a peer says what it has taken in ([`Ack`]): in a line of its own, between the lane's words and its ring.
pub(super) const ACK_OFFSET: usize = Layout::FORWARD_BYTES + Layout::BACK_BYTES;
/// What is no ring.
pub(super) const WORDS_BYTES: usize = LAYOUT.small_offset;

const _: () = assert!(ACK_OFFSET + CACHE_LINE_BYTES <= WORDS_BYTES);

/// The two windows of a pair of nodes.
pub(super) trait Windows: Send {
    type Inbound: Inbound + Clone;
    type Outbound: Outbound + Clone;

    fn inbound(&self) -> Self::Inbound;
    fn outbound(&self) -> Self::Outbound;
    /// After a ring: waits until what was stored before it is here.
    fn settle(&self);
}

/// How windows are made of memory that both nodes map, zero at first.
pub(super) trait Medium: Send {
    type Windows: Windows;

    /// Bytes of memory for one window and what belongs to it.
    fn side_bytes(&self) -> usize;

    /// This node's half, then the peer's.
    fn windows(&self, own: &Region, peer: &Region) -> Result<Self::Windows, InterconnectError>;

    /// How many packets are under way to a peer that is not behind.
    fn ahead_packets(&self) -> u32;

    /// How late everything is.
    fn one_way_ns(&self) -> f64;
}

/// Memory as it is.
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

    /// None: what two cores pass on takes less than a message.
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

/// Memory as late as over a link.
pub(super) struct Modelled(pub LinkTiming);

const SHAPE: SharedLayout = SharedLayout { window_bytes: LAYOUT.window_bytes(), words_bytes: WORDS_BYTES };
/// Behind each window: when the link is free that its *owner* writes over.
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

    /// What goes over the link in the time of a round trip, a small packet each 100 ns.
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
