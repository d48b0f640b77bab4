//! The record: one header, then payload, in contiguous slots.

use crate::Corrupt;

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

const KIND_SHIFT: u32 = 32;

/// What a record is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Record {
    /// Payload of this many bytes.
    Data(usize),
    /// The next record is in the big ring.
    Switch,
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

impl Record {
    #[inline]
    pub(crate) fn encode(self) -> u64 {
        match self {
            Record::Data(len_bytes) => len_bytes as u64 | 1 << KIND_SHIFT,
            Record::Switch => 2 << KIND_SHIFT,
        }
    }

    /// Decodes a header word that a peer wrote; `slots_max` is how many slots a record may have at its place.
    #[inline]
    pub(crate) fn decode(word: u64, slots_max: u64) -> Result<Self, Corrupt> {
        let len_bytes = (word & u64::from(u32::MAX)) as usize;
        match word >> KIND_SHIFT {
            1 if (1..=RECORD_BYTES_MAX).contains(&len_bytes) && slots_of(len_bytes) <= slots_max => {
                Ok(Record::Data(len_bytes))
            }
            2 if len_bytes == 0 => Ok(Record::Switch),
            _ => Err(Corrupt { what: "record header", value: word }),
        }
    }

    /// Payload bytes, if a header word that a peer wrote says that they are in the header's own slot.
    #[inline]
    pub(crate) fn decode_inline(word: u64) -> Option<usize> {
        let len_bytes = word.wrapping_sub(1 << KIND_SHIFT);
        (1..=INLINE_BYTES as u64).contains(&len_bytes).then_some(len_bytes as usize)
    }
}
