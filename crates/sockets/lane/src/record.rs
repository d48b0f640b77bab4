//! The format of a record: tag and header, then payload, in contiguous slots.

use crate::{Corrupt, ELASTIC_RINGS};

/// Bytes of a slot, which is one cache line.
pub const SLOT_BYTES: usize = volmem::CACHE_LINE_BYTES;
/// Bytes of the tag and of the header word (length, kind, stamp).
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
const KIND_BITS: u32 = 4;
const STAMP_SHIFT: u32 = LEN_BITS + KIND_BITS;
const LEN_MASK: u64 = (1 << LEN_BITS) - 1;
const KIND_MASK: u64 = (1 << KIND_BITS) - 1;
const KIND_DATA: u64 = 1;
const KIND_SWITCH: u64 = 2;
const KIND_OPEN: u64 = 3;
const KIND_URGENT: u64 = 4;

/// Bits of a [stamp](crate::Producer::set_stamp).
pub const STAMP_BITS: u32 = u64::BITS - STAMP_SHIFT;

/// The kind of a record, with its length or target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Record {
    /// Payload of this many bytes.
    Data(usize),
    /// A switch record: the next record is in this ring.
    Switch(u8),
    /// Payload of this many bytes so far: the sender may append more, or make it [`Record::Data`].
    Open(usize),
    /// One urgent byte, an [`Urgent`].
    Urgent,
}

/// An urgent byte (`MSG_OOB`), at its position in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Urgent {
    /// The byte itself.
    pub byte: u8,
    /// Number of this urgent byte in the lane, counted by the sender.
    pub number: u32,
}

impl Urgent {
    /// Encodes the byte and its number in one word, which is not 0 if the number is not 0.
    pub const fn to_word(self) -> u64 {
        self.byte as u64 | (self.number as u64) << u8::BITS
    }

    /// Decodes a word that a peer wrote; every word is valid.
    pub const fn of_word(word: u64) -> Self {
        Self { byte: word as u8, number: (word >> u8::BITS) as u32 }
    }
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

/// Returns the stamp in a header word.
#[inline]
pub(crate) fn stamp_of(word: u64) -> u64 {
    word >> STAMP_SHIFT
}

impl Record {
    /// Returns the header word: length, kind, and the stamp in the bits above.
    #[inline(always)]
    pub(crate) fn encode(self, stamp: u64) -> u64 {
        let (len, kind) = match self {
            Record::Data(len_bytes) => (len_bytes as u64, KIND_DATA),
            Record::Switch(ring) => (ring.into(), KIND_SWITCH),
            Record::Open(len_bytes) => (len_bytes as u64, KIND_OPEN),
            Record::Urgent => (1, KIND_URGENT),
        };
        len | kind << LEN_BITS | stamp << STAMP_SHIFT
    }

    /// Decodes a header word that a peer wrote. `slots_max` is the maximum number of slots of a record at its position.
    #[inline]
    pub(crate) fn decode(word: u64, slots_max: u64) -> Result<Self, Corrupt> {
        let len = word & LEN_MASK;
        let len_bytes = len as usize;
        let fits = (1..=RECORD_BYTES_MAX).contains(&len_bytes) && slots_of(len_bytes) <= slots_max;
        match word >> LEN_BITS & KIND_MASK {
            KIND_DATA if fits => Ok(Record::Data(len_bytes)),
            KIND_OPEN if fits => Ok(Record::Open(len_bytes)),
            KIND_URGENT if fits && len == 1 => Ok(Record::Urgent),
            KIND_SWITCH if len <= ELASTIC_RINGS as u64 => Ok(Record::Switch(len as u8)),
            _ => Err(Corrupt { what: "record header", value: word }),
        }
    }

    /// Returns the payload length of a header word that a peer wrote, if it is a data record of one slot.
    #[inline(always)]
    pub(crate) fn decode_inline(word: u64) -> Option<usize> {
        let len_bytes = (word & (KIND_MASK << LEN_BITS | LEN_MASK)).wrapping_sub(KIND_DATA << LEN_BITS);
        (1..=INLINE_BYTES as u64).contains(&len_bytes).then_some(len_bytes as usize)
    }
}
