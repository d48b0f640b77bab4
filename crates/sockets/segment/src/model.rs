//! Links that are slowed down to a model, for programs that store into windows themselves: what they must know of one
//! to be as late as it is.
//!
//! ```text
//!    0  one way          nanoseconds
//!    8  rate             bytes in a microsecond
//!   16  header           bytes of a packet besides its payload
//!   24  payload          bytes in a packet at most
//!   32  pace in          offset of the word by which the link to the receiver's node is shared, in the memory
//!   40  pace out         the same of the link from there
//! ```
//!
//! All zero where a link is none such.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use fabric::timed::{LinkTiming, Pacer};
use rustix::io::Errno;
use volmem::{Mapping, Region};

/// Bytes of a model in a message.
pub const MODEL_BYTES: usize = MODEL_WORDS * size_of::<u64>();
/// Words of a model.
pub const MODEL_WORDS: usize = 6;

const PAGE_BYTES: usize = 4096;

/// A modelled link, as a program must know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkModel {
    /// How long stores take.
    pub timing: LinkTiming,
    /// Where in the memory the page of the link to this end's node begins.
    pub inbound_pace_offset: u64,
    /// Where that of the link from it begins.
    pub outbound_pace_offset: u64,
}

impl LinkModel {
    /// As words.
    pub fn to_words(self) -> [u64; MODEL_WORDS] {
        let LinkTiming { one_way_ns, bytes_per_us, header_bytes, payload_bytes_max } = self.timing;
        let [inbound, outbound] = [self.inbound_pace_offset, self.outbound_pace_offset];
        [one_way_ns, bytes_per_us, header_bytes, payload_bytes_max, inbound, outbound]
    }

    /// The model in words that anybody may have written: whether a link can be so is for its user to check. `None`: it
    /// is no such link.
    pub fn from_words(words: [u64; MODEL_WORDS]) -> Option<Self> {
        let [one_way_ns, bytes_per_us, header_bytes, payload_bytes_max, inbound_pace_offset, outbound_pace_offset] =
            words;
        let timing = LinkTiming { one_way_ns, bytes_per_us, header_bytes, payload_bytes_max };
        (words != [0; MODEL_WORDS]).then_some(Self { timing, inbound_pace_offset, outbound_pace_offset })
    }

    /// Encodes a model, or that there is none, for a handshake.
    pub fn encode(model: Option<Self>) -> [u8; MODEL_BYTES] {
        let mut bytes = [0; MODEL_BYTES];
        let words = model.map_or([0; MODEL_WORDS], Self::to_words);
        for (place, word) in bytes.chunks_exact_mut(size_of::<u64>()).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// Decodes what [`LinkModel::encode`] wrote. `None` for anything else, and for no model.
    pub fn decode(bytes: &[u8; MODEL_BYTES]) -> Option<Self> {
        let (words, _) = bytes.as_chunks();
        Self::from_words(std::array::from_fn(|index| u64::from_ne_bytes(words[index])))
    }
}

/// A modelled link that a connection goes over, with what all share who write over it: a page in each window, written
/// by the node that stores there.
#[derive(Debug, Clone)]
pub struct ModelledLink {
    /// What it is like.
    pub model: LinkModel,
    /// The link from this end's node.
    pub pace: Pacer,
    /// The link to it.
    pub peers_pace: Pacer,
}

impl ModelledLink {
    /// Maps what is shared; the caller has seen that nobody can cut the memory off.
    ///
    /// # Errors
    /// `INVAL` for offsets between pages or where there is no memory.
    pub fn map(memory: BorrowedFd<'_>, model: LinkModel) -> Result<Self, Errno> {
        let [peers_pace, pace] = [model.inbound_pace_offset, model.outbound_pace_offset].map(|at| map_pace(memory, at));
        Ok(Self { model, pace: pace?, peers_pace: peers_pace? })
    }
}

/// The pace in the page at an offset of the memory.
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
