//! The format of a record: tag and header, then payload, in contiguous slots.
//!
//! The header has the length in its lowest bits, the kind above it, and zeros above that. A header with any other bit
//! set is corrupt, as one of an unknown kind is: each record has a single header that a peer may write, and the short
//! path compares all of it without a mask.

use crate::{Corrupt, ELASTIC_RINGS};

/// Bytes of a slot, which is one cache line.
pub const SLOT_BYTES: usize = volmem::CACHE_LINE_BYTES;
/// Bytes of the tag and of the header word (length and kind).
pub(crate) const HEADER_BYTES: usize = 16;
/// Payload bytes that fit the cache line of the tag and header.
pub const INLINE_BYTES: usize = SLOT_BYTES - HEADER_BYTES;
/// Payload bytes of the longest record, small enough that the sender's copy and the receiver's copy overlap in time
/// while the bytes are in a shared cache.
pub const RECORD_BYTES_MAX: usize = 256 * SLOT_BYTES - HEADER_BYTES;

/// Slots of the longest record for which both endpoints have a short path: 4 KiB and the header.
pub(crate) const SHORT_SLOTS_MAX: u64 = 65;
/// Payload bytes of the longest message that [`crate::Producer::write_short_from`] sends.
pub const SHORT_BYTES_MAX: usize = SHORT_SLOTS_MAX as usize * SLOT_BYTES - HEADER_BYTES;

const LEN_BITS: u32 = 16;
const LEN_MASK: u64 = (1 << LEN_BITS) - 1;
const KIND_DATA: u64 = 1;
const KIND_SWITCH: u64 = 2;
const KIND_OPEN: u64 = 3;

/// The kind of a record, with its length or target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Record {
    /// Payload of this many bytes.
    Data(usize),
    /// A switch record: the next record is in this ring.
    Switch(u8),
    /// Payload of this many bytes so far: the sender may append more, or make it [`Record::Data`].
    Open(usize),
}

/// The read position of a receiver that reads nothing more, as it publishes it for the sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FrozenCursor {
    /// Position of the record.
    pub head: u64,
    /// Ring of the record.
    pub ring: u8,
    /// Bytes of the record that are read.
    pub offset_bytes: usize,
}

impl FrozenCursor {
    pub(crate) const fn encode(self) -> [u64; 2] {
        [self.head, self.ring as u64 | (self.offset_bytes as u64) << u8::BITS]
    }

    /// Decodes words that a peer wrote; every position is to be checked.
    pub(crate) const fn decode([head, place]: [u64; 2]) -> Self {
        Self { head, ring: place as u8, offset_bytes: (place >> u8::BITS) as usize }
    }
}

/// Returns the word that marks the start of a record at this position of this lane.
#[inline]
pub(crate) fn tag(secret: u64, position: u64) -> u64 {
    secret ^ position.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Returns the number of slots of a record with `payload_bytes`.
#[inline]
pub(crate) fn slots_of(payload_bytes: usize) -> u64 {
    (payload_bytes + HEADER_BYTES).div_ceil(SLOT_BYTES) as u64
}

impl Record {
    /// Returns the header word.
    #[inline(always)]
    pub(crate) fn encode(self) -> u64 {
        let (len, kind) = match self {
            Record::Data(len_bytes) => (len_bytes as u64, KIND_DATA),
            Record::Switch(ring) => (ring.into(), KIND_SWITCH),
            Record::Open(len_bytes) => (len_bytes as u64, KIND_OPEN),
        };
        len | kind << LEN_BITS
    }

    /// Decodes a header word that a peer wrote. `slots_max` is the maximum number of slots of a record at its position.
    #[inline]
    pub(crate) fn decode(word: u64, slots_max: u64) -> Result<Self, Corrupt> {
        let len = word & LEN_MASK;
        let len_bytes = len as usize;
        let fits = (1..=RECORD_BYTES_MAX).contains(&len_bytes) && slots_of(len_bytes) <= slots_max;
        match word >> LEN_BITS {
            KIND_DATA if fits => Ok(Record::Data(len_bytes)),
            KIND_OPEN if fits => Ok(Record::Open(len_bytes)),
            KIND_SWITCH if len <= ELASTIC_RINGS as u64 => Ok(Record::Switch(len as u8)),
            _ => Err(Corrupt { what: "record header", value: word }),
        }
    }

    /// Returns the payload length of a header word that a peer wrote, if it is a data record of one slot.
    #[inline(always)]
    pub(crate) fn decode_inline(word: u64) -> Option<usize> {
        let len_bytes = word.wrapping_sub(KIND_DATA << LEN_BITS);
        (1..=INLINE_BYTES as u64).contains(&len_bytes).then_some(len_bytes as usize)
    }
}
