//! Where the rings and words of a connection lie.

use fabric::timed::SharedLayout;
use lane::{LargerRings, Layout};

/// Version of everything in this file and in `handshake`: ends of different versions do not meet.
pub const LAYOUT_VERSION: u32 = 13;

pub(crate) const PAGE_BYTES: usize = 4096;
/// Both small rings together fill half of a first-level cache of 32 KiB: where they filled all of it, a round trip of
/// 1 KiB took half as long again.
const SMALL_SLOTS: u64 = 128;
/// Of a lane between windows.
const BIG_SLOTS: u64 = 4096;

const SMALL_BYTES: usize = SMALL_SLOTS as usize * lane::SLOT_BYTES;
/// Of the small ring in a memfd so many slots are used in each lap: both fill the pages of the endpoints.
const SMALL_SLOTS_USED: u64 = 115;
const SMALL_BYTES_USED: usize = SMALL_SLOTS_USED as usize * lane::SLOT_BYTES;

const FORWARD_OFFSET: usize = 384;
const BACK_OFFSET: usize = FORWARD_OFFSET + Layout::FORWARD_BYTES;
pub(crate) const ENDPOINT_BYTES: usize = BACK_OFFSET + Layout::BACK_BYTES;
const SMALL_OFFSET: usize = 2 * ENDPOINT_BYTES;
pub(crate) const RINGS_OFFSET: usize = SMALL_OFFSET + 2 * SMALL_BYTES_USED;
const _: () = assert!(RINGS_OFFSET == 4 * PAGE_BYTES);
/// Bytes of the big ring of a lane between windows.
const BIG_BYTES: usize = BIG_SLOTS as usize * lane::SLOT_BYTES;
/// Bytes that one direction holds unread at most.
pub const CAPACITY_BYTES_MAX: usize = 16 << 20;

/// A lane between windows: the receiver's half is laid out like the sender's.
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
/// The same over a modelled link: the endpoint is memory, and behind it lie rings.
pub(crate) const TIMED_SHAPE: SharedLayout = SharedLayout { window_bytes: WINDOW_BYTES, words_bytes: ENDPOINT_BYTES };

/// The lane to an end in a memfd. Both windows are the whole memory.
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

/// Bytes of an end's span in its node's window, whole pages.
pub(crate) const WINDOW_BYTES: usize = BIG_IN_WINDOW_OFFSET + BIG_BYTES;
/// The same over a modelled link.
pub(crate) const TIMED_WINDOW_BYTES: usize = TIMED_SHAPE.memory_bytes().next_multiple_of(PAGE_BYTES);

/// Which end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The end that called `connect`.
    Connector,
    /// The end that called `accept`.
    Acceptor,
}

impl Side {
    /// The end that this one is connected to.
    pub fn other(self) -> Self {
        match self {
            Self::Connector => Self::Acceptor,
            Self::Acceptor => Self::Connector,
        }
    }
}
