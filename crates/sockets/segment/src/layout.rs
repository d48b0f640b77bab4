//! The layout of rings and words in the memory of a connection.

use fabric::timed::SharedLayout;
use lane::{LargerRings, Layout};

/// Version of the layout and of the handshake. Endpoints of different versions do not connect.
pub const LAYOUT_VERSION: u32 = 14;

pub(crate) const PAGE_BYTES: usize = 4096;
/// Slots of a small ring. Both small rings together fill half of a first-level cache of 32 KiB; where they filled all
/// of it, a round trip of 1 KiB took 1.5 times as long.
pub(crate) const SMALL_SLOTS: u64 = 128;
/// Slots of the big ring of a lane between windows.
pub(crate) const BIG_SLOTS: u64 = 4096;

const SMALL_BYTES: usize = SMALL_SLOTS as usize * lane::SLOT_BYTES;
/// Slots of a small ring in a memfd that are used in each lap; with them, both rings exactly fill the pages of the
/// endpoints.
pub(crate) const SMALL_SLOTS_USED: u64 = 115;
const SMALL_BYTES_USED: usize = SMALL_SLOTS_USED as usize * lane::SLOT_BYTES;

const FORWARD_OFFSET: usize = 384;
/// Offset of the receiver's own state in an endpoint.
pub(crate) const RECEIVER_STATE_OFFSET: usize = FORWARD_OFFSET + Layout::FORWARD_BYTES;
const BACK_OFFSET: usize = RECEIVER_STATE_OFFSET + Layout::CONSUMER_STATE_BYTES;
/// Offset of the sender's own state in an endpoint.
pub(crate) const SENDER_STATE_OFFSET: usize = BACK_OFFSET + Layout::BACK_BYTES;
pub(crate) const ENDPOINT_BYTES: usize = SENDER_STATE_OFFSET + Layout::PRODUCER_STATE_BYTES;
const SMALL_OFFSET: usize = 2 * ENDPOINT_BYTES;
pub(crate) const RINGS_OFFSET: usize = SMALL_OFFSET + 2 * SMALL_BYTES_USED;
const _: () = assert!(RINGS_OFFSET == 4 * PAGE_BYTES);
/// Bytes of the big ring of a lane between windows.
pub(crate) const BIG_BYTES: usize = BIG_SLOTS as usize * lane::SLOT_BYTES;
/// Largest number of unread bytes in one direction.
pub const CAPACITY_BYTES_MAX: usize = 16 << 20;

/// A lane between windows. The receiver's half is laid out like the sender's.
pub(crate) const WINDOW_LAYOUT: Layout = Layout {
    forward_offset: FORWARD_OFFSET,
    back_offset: BACK_OFFSET,
    small_offset: ENDPOINT_BYTES,
    small_slots: SMALL_SLOTS,
    small_slots_used: SMALL_SLOTS,
    big_offset: BIG_IN_WINDOW_OFFSET,
    big_slots: BIG_SLOTS,
    elastic: None,
};
const BIG_IN_WINDOW_OFFSET: usize = (ENDPOINT_BYTES + SMALL_BYTES).next_multiple_of(PAGE_BYTES);
/// The layout of a span over a modelled link: the endpoint is shared memory, and the rings follow it.
pub(crate) const TIMED_SHAPE: SharedLayout = SharedLayout { window_bytes: WINDOW_BYTES, words_bytes: ENDPOINT_BYTES };

/// Returns the layout of the lane towards `receiver` in a memfd. Both windows of the lane are the whole memory.
pub const fn layout_to(receiver: Side) -> Layout {
    let (receiver, sender) = match receiver {
        Side::Connector => (0, 1),
        Side::Acceptor => (1, 0),
    };
    Layout {
        forward_offset: receiver * ENDPOINT_BYTES + FORWARD_OFFSET,
        back_offset: sender * ENDPOINT_BYTES + BACK_OFFSET,
        small_offset: SMALL_OFFSET + sender * SMALL_BYTES_USED,
        small_slots: SMALL_SLOTS,
        small_slots_used: SMALL_SLOTS_USED,
        big_offset: 0,
        big_slots: 0,
        elastic: Some(LargerRings::in_a_row(RINGS_OFFSET + sender * LargerRings::BYTES)),
    }
}

/// Size in bytes of an endpoint's span in its node's window, a whole number of pages.
pub(crate) const WINDOW_BYTES: usize = BIG_IN_WINDOW_OFFSET + BIG_BYTES;
/// The same over a modelled link.
pub(crate) const TIMED_WINDOW_BYTES: usize = TIMED_SHAPE.memory_bytes().next_multiple_of(PAGE_BYTES);

/// One of the two endpoints of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The endpoint that called `connect`.
    Connector,
    /// The endpoint that called `accept`.
    Acceptor,
}

impl Side {
    /// Returns the other endpoint of the connection.
    pub fn other(self) -> Self {
        match self {
            Self::Connector => Self::Acceptor,
            Self::Acceptor => Self::Connector,
        }
    }
}
