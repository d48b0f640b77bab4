//! The record: one header, then payload, in contiguous slots.

use crate::{Corrupt, ELASTIC_RINGS};

/// Bytes of a slot: one cache line.
pub const SLOT_BYTES: usize = volmem::CACHE_LINE_BYTES;
/// Bytes of the header: tag, then length and kind.
pub(crate) const HEADER_BYTES: usize = 16;
/// Payload bytes that travel in the header's own cache line.
pub const INLINE_BYTES: usize = SLOT_BYTES - HEADER_BYTES;
/// Payload bytes of the longest record: a chunk, small enough that the sender's copy and the receiver's overlap in
/// shared cache.
pub const RECORD_BYTES_MAX: usize = 256 * SLOT_BYTES - HEADER_BYTES;

/// Slots of the longest record that both ends move by a short path: 4 KiB and the header.
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

/// What a record is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Record {
    /// Payload of this many bytes.
    Data(usize),
    /// The next record is in this ring.
    Switch(u8),
    /// Payload of this many bytes so far: the sender may append more, or make it [`Record::Data`].
    Open(usize),
    /// One byte that is urgent: an [`Urgent`].
    Urgent,
}

/// An urgent byte, at its place in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Urgent {
    /// The byte itself.
    pub byte: u8,
    /// Which urgent byte of the lane it is, as the sender counts them.
    pub number: u32,
}

impl Urgent {
    /// In one word, which is never 0 where the number is not.
    pub const fn to_word(self) -> u64 {
        self.byte as u64 | (self.number as u64) << u8::BITS
    }

    /// What a peer wrote.
    pub const fn of_word(word: u64) -> Self {
        Self { byte: word as u8, number: (word >> u8::BITS) as u32 }
    }
}

/// The word that says "a record starts here", for this position of this lane and no other.
#[inline]
pub(crate) fn tag(secret: u64, position: u64) -> u64 {
    secret ^ position.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Slots that a record with this much payload takes.
#[inline]
pub(crate) fn slots_of(payload_bytes: usize) -> u64 {
    (payload_bytes + HEADER_BYTES).div_ceil(SLOT_BYTES) as u64
}

/// The stamp in a header word.
#[inline]
pub(crate) fn stamp_of(word: u64) -> u64 {
    word >> STAMP_SHIFT
}

impl Record {
    /// The header word: length, kind, and in the bits above the stamp.
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

    /// Decodes a header word that a peer wrote; `slots_max` is how many slots a record may have at its place.
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

    /// Payload bytes, if a header word that a peer wrote says that they are in the header's own slot.
    #[inline(always)]
    pub(crate) fn decode_inline(word: u64) -> Option<usize> {
        let len_bytes = (word & (KIND_MASK << LEN_BITS | LEN_MASK)).wrapping_sub(KIND_DATA << LEN_BITS);
        (1..=INLINE_BYTES as u64).contains(&len_bytes).then_some(len_bytes as usize)
    }
}
