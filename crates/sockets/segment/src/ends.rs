//! The memory of the two ends of a connection, of which each end writes only its own.
//!
//! An end creates the memory that it writes ([`EndMemory`]), and gives the other end a descriptor that only permits
//! reading; the other end maps that memory read-only ([`PeerMemory`]). What an end has written, the other one cannot
//! change: neither its credit, nor its records, nor the words by which it moves. (Only a process of the same user
//! could, by changing the mode of the file: see [`fabric::shm::create_own`].) What an end reads is the peer's, and each
//! value is loaded once and checked. The cursors of an end are in a third memory, which only the processes that hold
//! this end share ([`OWN_STATE_BYTES`]).
//!
//! ```text
//! memory of an end                                          written          loaded by the peer
//!    0  down, ended, ends at, withdrawn, order              rarely           with each poll
//!   64  sender's sleep; ask; up, up at, start               rarely           when it returns room, and before a move
//!  128  credit, open record                                 with each read   when its ring is full
//!  192  receiver's sleep; frozen at; ok; closed             rarely           with each write
//!  256  small ring: 115 slots                               with each write  with each read
//! 8192  larger rings: 32 KiB and each twice the previous    as needed        as needed
//! ```
//!
//! The first line begins with the lane's word for the end of a stream, which no end writes or looks for: TCP has it.
//!
//! Every line has one writer, and a line that changes with each message has nothing that the other end polls. A
//! connection that carries little touches one page of each end, and both small rings fill less than half of a
//! first-level cache of 32 KiB. The larger rings take address space until they are used, and there are only as many as
//! the capacity requires.
//!
//! Between nodes, the memory of an end is a span of the other node's window ([`EndMemory::in_window`]): each end writes
//! the other node's memory and reads its own. Its size is fixed, so that one ring of 256 KiB takes the place of the
//! larger rings. Both spans are zeroed before either end has its own.
//!
//! How a direction moves to its lane and back, by these words, is the subject of the crate `path`. What belongs to a
//! number of a move is stored before it ([`EndMemory::publish_start`] and its siblings).

mod lanes;
mod layout;
#[cfg(test)]
mod tests;

pub use lanes::{receiver, sender};
pub(crate) use layout::SPAN_BYTES;
pub use layout::{
    LAYOUT_VERSION, OWN_STATE_BYTES, OWN_WORDS, OWN_WORDS_OFFSET, RECEIVER_STATE_OFFSET, SENDER_STATE_OFFSET,
    SMALL_RING_OFFSET, SMALL_RING_SLOTS, Word, bytes_for,
};

use crate::CAPACITY_BYTES_MAX;
use fabric::shm::{self, OwnMemory, ShmError};
use fabric::{Inbound, Outbound};
use layout::rings_of;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use volmem::Region;
use volmem::sync::Ordering;

/// Bytes of the ring of a lane in a window.
pub const WINDOW_RING_BYTES: usize = layout::BIG_BYTES;

/// The memory that this end writes.
#[derive(Debug, Clone)]
pub struct EndMemory {
    region: Region,
    is_releasable: bool,
}

/// The memory that the other end writes, mapped for reading only.
#[derive(Debug, Clone)]
pub struct PeerMemory {
    region: Region,
}

impl EndMemory {
    /// Creates zeroed memory for a sender that holds up to `capacity_bytes` unread bytes, at most
    /// [`CAPACITY_BYTES_MAX`]. Returns it with the descriptor for the other end, which only permits reading. This
    /// process needs no descriptor.
    ///
    /// # Errors
    /// [`ShmError::System`] with the kernel's error.
    pub fn create(capacity_bytes: usize) -> Result<(Self, OwnedFd), ShmError> {
        let OwnMemory { mapping, descriptor, is_releasable } = shm::create_own(bytes_for(capacity_bytes))?;
        Ok((Self { region: Region::of_mapping(Arc::new(mapping)), is_releasable }, descriptor))
    }

    /// The memory of an end in a span of the other node's window, which this end writes.
    ///
    /// # Panics
    /// If it is of another size than [`SPAN_BYTES`](crate::SPAN_BYTES).
    pub fn in_window(span: Region) -> Self {
        assert_eq!(span.len_bytes(), SPAN_BYTES, "a connection's span of a window");
        Self { region: span, is_releasable: false }
    }

    /// Returns whether this is a span of a window, whose lane has the capacity of its ring.
    pub fn is_in_window(&self) -> bool {
        self.region.len_bytes() == SPAN_BYTES
    }

    /// Returns the memory, for [`lane::Producer::unread_from`].
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Returns whether [`lane::Producer::release_memory`] returns memory to the system. It does not where `/proc` is
    /// missing.
    pub fn is_releasable(&self) -> bool {
        self.is_releasable
    }

    /// Publishes a word for the other end, behind everything that was written before.
    pub fn publish(&self, word: Word, value: u64) {
        self.region.store_u64(word as usize, value, Ordering::Release);
    }

    /// Returns the value of a word that was last published: other processes that hold this end may have done so.
    pub fn published(&self, word: Word) -> u64 {
        self.region.load_u64(word as usize, Ordering::Relaxed)
    }

    /// Publishes where the lane of the next move begins: behind `tcp_bytes` bytes of the TCP stream, at the position
    /// `start` ([`lane::Producer::restart`]).
    pub fn publish_start(&self, tcp_bytes: u64, start: u64) {
        self.publish(Word::UpAt, tcp_bytes);
        self.publish(Word::Start, start);
    }

    /// Publishes where this end stopped to read the lane ([`lane::Consumer::frozen_cursor`]).
    pub fn publish_cursor(&self, cursor: [u64; 2]) {
        self.publish(Word::FrozenHead, cursor[0]);
        self.publish(Word::FrozenPlace, cursor[1]);
    }
}

impl PeerMemory {
    /// Maps memory that another end has created. No call on the descriptor can block, and the kernel guarantees that
    /// the memory does not shrink; its owner may still write anything, and return parts of it to the system, which then
    /// read as zeros. A read allocates memory in the reader's name: no more than what a sender of `capacity_bytes_max`
    /// has.
    ///
    /// # Errors
    /// What is wrong with the descriptor.
    pub fn open(descriptor: impl AsFd, capacity_bytes_max: usize) -> Result<Self, ShmError> {
        let bytes_max = bytes_for(capacity_bytes_max);
        let is_size = |len_bytes| len_bytes <= bytes_max && rings_of(len_bytes).is_some();
        let mapping = shm::open_readable(descriptor, is_size)?;
        Ok(Self { region: Region::of_mapping(Arc::new(mapping)) })
    }

    /// The memory of the other end in a span of this node's window.
    ///
    /// # Panics
    /// As [`EndMemory::in_window`].
    pub fn in_window(span: Region) -> Self {
        assert_eq!(span.len_bytes(), SPAN_BYTES, "a connection's span of a window");
        Self { region: span }
    }

    /// Loads a word of the other end, and all that was published before it.
    #[inline]
    pub fn load(&self, word: Word) -> u64 {
        self.region.load_u64(word as usize, Ordering::Acquire)
    }

    /// Returns where the receiver of the last frozen move has stopped.
    pub fn frozen_cursor(&self) -> [u64; 2] {
        [Word::FrozenHead, Word::FrozenPlace].map(|word| self.load(word))
    }
}

/// Clears the words of an end in a span of this node's window.
pub fn clear_span(inbound: &impl Inbound) {
    layout::words().for_each(|at| inbound.store_u64(at, 0, Ordering::Relaxed));
}

/// As [`clear_span`], for a span of the other node's window.
pub fn clear_remote_span(outbound: &impl Outbound) {
    layout::words().for_each(|at| outbound.store_u64(at, 0, Ordering::Relaxed));
    outbound.flush();
}

const _: () = assert!(layout::capacity_of(ELASTIC_RINGS_ALL) == CAPACITY_BYTES_MAX);
const ELASTIC_RINGS_ALL: u8 = lane::ELASTIC_RINGS as u8;
