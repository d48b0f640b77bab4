//! Modelled links for programs that store into windows themselves: the parameters that make their stores as slow as
//! those of the proxy.
//!
//! ```text
//!    0  one way          nanoseconds
//!    8  rate             bytes in a microsecond
//!   16  header           bytes of a packet besides its payload
//! 16  header           bytes of a packet's header
//! 24  payload          largest payload of a packet, in bytes
//! 32  inbound pace     offset in the memory of the pacer of the link to the receiver's node
//! 40  outbound pace    offset of the pacer of the link from that node
//!
//! All words are 0 where the link is not modelled.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use fabric::timed::{LinkTiming, Pacer};
use rustix::io::Errno;
use volmem::{Mapping, Region};

/// Size of an encoded model in bytes.
pub const MODEL_BYTES: usize = MODEL_WORDS * size_of::<u64>();
/// Number of words of a model.
pub const MODEL_WORDS: usize = 6;

const PAGE_BYTES: usize = 4096;

/// The parameters of a modelled link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkModel {
    /// The delay and rate of stores.
    pub timing: LinkTiming,
    /// Offset in the memory of the page with the pacer of the link to this endpoint's node.
    pub inbound_pace_offset: u64,
    /// Offset of the page with the pacer of the link from this endpoint's node.
    pub outbound_pace_offset: u64,
}

impl LinkModel {
    /// Returns the model as words.
    pub fn to_words(self) -> [u64; MODEL_WORDS] {
        let LinkTiming { one_way_ns, bytes_per_us, header_bytes, payload_bytes_max } = self.timing;
        let [inbound, outbound] = [self.inbound_pace_offset, self.outbound_pace_offset];
        [one_way_ns, bytes_per_us, header_bytes, payload_bytes_max, inbound, outbound]
    }

    /// Decodes words that a peer may have written; the user checks whether such a link is possible. Returns `None` for
    /// a link that is not modelled.
    pub fn from_words(words: [u64; MODEL_WORDS]) -> Option<Self> {
        let [one_way_ns, bytes_per_us, header_bytes, payload_bytes_max, inbound_pace_offset, outbound_pace_offset] =
            words;
        let timing = LinkTiming { one_way_ns, bytes_per_us, header_bytes, payload_bytes_max };
        (words != [0; MODEL_WORDS]).then_some(Self { timing, inbound_pace_offset, outbound_pace_offset })
    }

    /// Encodes a model, or its absence, for a handshake.
    pub fn encode(model: Option<Self>) -> [u8; MODEL_BYTES] {
        let mut bytes = [0; MODEL_BYTES];
        let words = model.map_or([0; MODEL_WORDS], Self::to_words);
        for (place, word) in bytes.chunks_exact_mut(size_of::<u64>()).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// Decodes the result of [`LinkModel::encode`]. Returns `None` if there is no model.
    pub fn decode(bytes: &[u8; MODEL_BYTES]) -> Option<Self> {
        let (words, _) = bytes.as_chunks();
        Self::from_words(std::array::from_fn(|index| u64::from_ne_bytes(words[index])))
    }
}

/// A modelled link of a connection, with the pacers that all its senders share: a page in each window, written by the
/// node that stores there.
#[derive(Debug, Clone)]
pub struct ModelledLink {
    /// The parameters of the link.
    pub model: LinkModel,
    /// The pacer of the link from this endpoint's node.
    pub pace: Pacer,
    /// The pacer of the link to this endpoint's node.
    pub peers_pace: Pacer,
}

impl ModelledLink {
    /// Maps the pacers. The caller has checked that the memory cannot be truncated.
    ///
    /// # Errors
    /// `INVAL` for offsets that are not page-aligned or are beyond the memory.
    pub fn map(memory: BorrowedFd<'_>, model: LinkModel) -> Result<Self, Errno> {
        let [peers_pace, pace] = [model.inbound_pace_offset, model.outbound_pace_offset].map(|at| map_pace(memory, at));
        Ok(Self { model, pace: pace?, peers_pace: peers_pace? })
    }
}

/// Maps the pacer in the page at `offset` of the memory.
///
/// # Errors
/// As [`ModelledLink::map`].
pub fn map_pace(memory: BorrowedFd<'_>, offset: u64) -> Result<Pacer, Errno> {
    let ends_within = offset
        .checked_add(PAGE_BYTES as u64)
        .is_some_and(|end| rustix::fs::fstat(memory).is_ok_and(|stat| end <= stat.st_size as u64));
    if !ends_within {
        return Err(Errno::INVAL);
    }
    let mapping = Mapping::at(memory, offset, PAGE_BYTES).map_err(|_| Errno::INVAL)?;
    Ok(Pacer::in_region(Region::of_mapping(Arc::new(mapping))))
}
