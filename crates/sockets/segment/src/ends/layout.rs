//! Where the parts of an end's memory, and of its own state, lie.

use lane::{ELASTIC_RINGS, LargerRings, Layout, SLOT_BYTES};

/// Version of the layout and of the meaning of its words. Ends of different versions do not meet.
pub const LAYOUT_VERSION: u32 = 1;

const PAGE_BYTES: usize = 4096;
/// Slots of a small ring. Both small rings together fill half of a first-level cache of 32 KiB; where they filled all
/// of it, a round trip of 1 KiB took 1.5 times as long.
const SMALL_SLOTS: u64 = 128;
/// Slots of a small ring that are used in each lap, in memory of an end: with the words they fill two pages.
const SMALL_SLOTS_USED: u64 = 115;

const FORWARD_OFFSET: usize = 0;
const BACK_OFFSET: usize = FORWARD_OFFSET + Layout::FORWARD_BYTES;
const SMALL_OFFSET: usize = BACK_OFFSET + Layout::BACK_BYTES;
const SMALL_BYTES: usize = SMALL_SLOTS_USED as usize * SLOT_BYTES;
const RINGS_OFFSET: usize = (SMALL_OFFSET + SMALL_BYTES).next_multiple_of(PAGE_BYTES);
const _: () = assert!(RINGS_OFFSET == 2 * PAGE_BYTES);

/// Offset of the big ring in a span of a window, behind a small ring of which all slots are used.
const BIG_IN_WINDOW_OFFSET: usize = (SMALL_OFFSET + SMALL_SLOTS as usize * SLOT_BYTES).next_multiple_of(PAGE_BYTES);
/// Slots of that big ring.
const BIG_SLOTS: u64 = 4096;
pub(super) const BIG_BYTES: usize = BIG_SLOTS as usize * SLOT_BYTES;
/// Size in bytes of a span, a whole number of pages.
pub(crate) const SPAN_BYTES: usize = BIG_IN_WINDOW_OFFSET + BIG_BYTES;

/// Returns the offsets of the words that must be zero before an end has its memory.
pub(super) fn words() -> impl Iterator<Item = usize> {
    (0..SMALL_OFFSET).step_by(size_of::<u64>())
}

const BESIDE_FIN: usize = FORWARD_OFFSET + Layout::SPARE_BESIDE_FIN;
const BESIDE_SENDERS_SLEEP: usize = FORWARD_OFFSET + Layout::SPARE_BESIDE_SLEEP;
const BESIDE_RECEIVERS_SLEEP: usize = BACK_OFFSET + Layout::SPARE_BESIDE_SLEEP;

/// A word by which an end tells the other one how its directions move. Numbers are those of moves, from 1 on; the crate
/// `path` gives the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Word {
    /// Sending direction: the move that this end is about to end.
    Down = BESIDE_FIN,
    /// Sending direction: the move that has ended, and how.
    Ended = BESIDE_FIN + 8,
    /// Sending direction: the position of the lane at which that move ended.
    EndsAt = BESIDE_FIN + 16,
    /// Sending direction: the last move that was given up before it began.
    Withdrawn = BESIDE_FIN + 24,
    /// Sending direction: changes before a message that was sent after something else that only the kernel shows to
    /// the receiver's process. Ends of earlier releases leave it 0 and do not look at it.
    Order = BESIDE_FIN + 32,
    /// Sending direction: the move for which this end asks.
    Ask = BESIDE_SENDERS_SLEEP,
    /// Sending direction: the last move that began to use the lane.
    Up = BESIDE_SENDERS_SLEEP + 8,
    /// Sending direction: the bytes of the TCP stream before that move.
    UpAt = BESIDE_SENDERS_SLEEP + 16,
    /// Sending direction: the position of the lane at which that move begins.
    Start = BESIDE_SENDERS_SLEEP + 24,
    /// Sending direction: the bytes of that lane that this end writes to TCP after its end, by itself.
    Repeated = BESIDE_SENDERS_SLEEP + 32,
    /// Receiving direction: the last move whose receiver reads nothing more from the lane.
    Frozen = BESIDE_RECEIVERS_SLEEP,
    /// Receiving direction: the read position of that receiver.
    FrozenHead = BESIDE_RECEIVERS_SLEEP + 8,
    /// Receiving direction: the ring of that position, and the offset in its record.
    FrozenPlace = BESIDE_RECEIVERS_SLEEP + 16,
    /// Receiving direction: the last move to which this end agrees.
    Ok = BESIDE_RECEIVERS_SLEEP + 24,
    /// Not 0: this end does not read any more, or is closed. A sender loads it with every message.
    Closed = BESIDE_RECEIVERS_SLEEP + 32,
}

const _: () = assert!(Word::Order as usize + 8 <= BESIDE_FIN + Layout::SPARE_BESIDE_FIN_WORDS * 8);
const _: () = assert!(Word::Repeated as usize + 8 <= BESIDE_SENDERS_SLEEP + Layout::SPARE_BESIDE_SLEEP_WORDS * 8);
const _: () = assert!(Word::Closed as usize + 8 <= BESIDE_RECEIVERS_SLEEP + Layout::SPARE_BESIDE_SLEEP_WORDS * 8);

/// Offset of the small ring in the memory of an end.
pub const SMALL_RING_OFFSET: usize = SMALL_OFFSET;
/// Slots of the small ring, each of a cache line.
pub const SMALL_RING_SLOTS: usize = SMALL_SLOTS_USED as usize;

/// Bytes of the state that the processes which hold an end share, in memory of their own: zero for a new connection.
pub const OWN_STATE_BYTES: usize = 4 * volmem::CACHE_LINE_BYTES;
/// Offset in that state of the sender's part.
pub const SENDER_STATE_OFFSET: usize = 0;
/// Offset in that state of the receiver's part.
pub const RECEIVER_STATE_OFFSET: usize = SENDER_STATE_OFFSET + Layout::PRODUCER_STATE_BYTES;
/// Offset in that state of the words that the user of the lanes has, for example for the numbers of moves.
pub const OWN_WORDS_OFFSET: usize = RECEIVER_STATE_OFFSET + Layout::CONSUMER_STATE_BYTES;
/// Number of these words.
pub const OWN_WORDS: usize = (OWN_STATE_BYTES - OWN_WORDS_OFFSET) / size_of::<u64>();

/// Returns the bytes of the memory of an end whose sender holds up to `capacity_bytes` unread bytes.
pub const fn bytes_for(capacity_bytes: usize) -> usize {
    bytes_with(LargerRings::count_for(capacity_bytes))
}

const fn bytes_with(rings: u8) -> usize {
    RINGS_OFFSET + LargerRings::bytes_together(rings)
}

/// Returns the unread bytes that the largest of `rings` rings holds.
pub(super) const fn capacity_of(rings: u8) -> usize {
    LargerRings::bytes_of(rings as usize - 1)
}

/// Returns the number of larger rings of memory of this size; `None` if no end has such memory.
pub(super) fn rings_of(len_bytes: usize) -> Option<u8> {
    (1..=ELASTIC_RINGS as u8).find(|rings| bytes_with(*rings) == len_bytes)
}

/// Returns the layout of the lane whose sender writes memory of this size; `None` if no end has such memory.
pub(super) fn layout_in(len_bytes: usize) -> Option<Layout> {
    if len_bytes == SPAN_BYTES { Some(in_window()) } else { rings_of(len_bytes).map(layout) }
}

/// Returns the layout of the lane whose sender writes a span of a window, which has one large ring: spans have a fixed
/// size.
const fn in_window() -> Layout {
    Layout {
        small_slots_used: SMALL_SLOTS,
        big_offset: BIG_IN_WINDOW_OFFSET,
        big_slots: BIG_SLOTS,
        elastic: None,
        ..layout(1)
    }
}

/// Returns the layout of the lane whose sender writes memory with this number of larger rings.
const fn layout(rings: u8) -> Layout {
    Layout {
        forward_offset: FORWARD_OFFSET,
        back_offset: BACK_OFFSET,
        small_offset: SMALL_OFFSET,
        small_slots: SMALL_SLOTS,
        small_slots_used: SMALL_SLOTS_USED,
        big_offset: 0,
        big_slots: 0,
        elastic: Some(LargerRings::in_a_row(RINGS_OFFSET, rings)),
    }
}
