//! The words of a connection's memory through one endpoint: its own state, and what it and the peer publish.

use super::{Medium, Segment};
use crate::words::{
    BY_LANE_RECEIVE, CLOSED_IN_TIME, IS_CONFINED, LEFT_SILENTLY, OwnSnapshot, OwnState, PeerStatus, RAISES_SIGNAL,
    RECEIVES_ELSEWHERE, RECEIVES_ONLY, holder_offset,
};
use fabric::{Inbound, Outbound};
use volmem::sync::Ordering;

impl Segment {
    /// Loads a word of this endpoint's own state.
    #[inline]
    pub fn load(&self, word: OwnState) -> u64 {
        self.own.load_u64(word as usize, Ordering::Relaxed)
    }

    /// Loads the words of this endpoint's own state that every call needs.
    #[inline(always)] // One bounds check for all words.
    pub fn snapshot(&self) -> OwnSnapshot {
        let [holders, _, shutdown, _, peer] = self.own.load_words(OwnState::Holders as usize);
        OwnSnapshot { holders, shutdown, peer }
    }

    /// Stores a word of this endpoint's own state.
    #[inline]
    pub fn store(&self, word: OwnState, value: u64) {
        self.own.store_u64(word as usize, value, Ordering::Relaxed);
    }

    /// Swaps a word of this endpoint's own state and returns the previous value.
    pub fn swap(&self, word: OwnState, value: u64) -> u64 {
        self.own.swap_u64(word as usize, value, Ordering::AcqRel)
    }

    /// Adds to a word of this endpoint's own state; returns the previous value.
    pub fn add(&self, word: OwnState, value: u64) -> u64 {
        self.own.add_u64(word as usize, value, Ordering::AcqRel)
    }

    /// Replaces `current` by `new` in a word of this endpoint's own state; returns the previous value.
    ///
    /// # Errors
    /// The value found, if it is not `current`.
    pub fn compare_exchange(&self, word: OwnState, current: u64, new: u64) -> Result<u64, u64> {
        self.own.compare_exchange_u64(word as usize, current, new)
    }

    /// Adds directions to [`OwnState::ByLane`]; other processes that hold the endpoint may do so concurrently.
    pub fn note_by_lane(&self, directions: u64) {
        self.set_bits(OwnState::ByLane, directions, directions);
    }

    /// Replaces the bits of `mask` in a word that other processes which hold the endpoint may change concurrently.
    pub fn set_bits(&self, word: OwnState, mask: u64, bits: u64) {
        // Bounded, because the peer can write the word as well and must not keep this process busy.
        const TRIES_MAX: usize = 8;
        let mut noted = self.load(word);
        for _ in 0..TRIES_MAX {
            match self.compare_exchange(word, noted, noted & !mask | bits & mask) {
                Ok(_) => return,
                Err(found) => noted = found,
            }
        }
    }

    /// Returns the name in one of the [`HOLDERS_NAMED_MAX`](crate::HOLDERS_NAMED_MAX) slots for holders, 0 if it is
    /// free.
    pub fn holder(&self, index: usize) -> u64 {
        self.own.load_u64(holder_offset(index), Ordering::Acquire)
    }

    /// Replaces a name in the list of holders. Returns `false` if `current` was not in the slot.
    pub fn replace_holder(&self, index: usize, current: u64, new: u64) -> bool {
        self.own.compare_exchange_u64(holder_offset(index), current, new).is_ok()
    }

    /// Returns whether this endpoint only has its incoming lane in this memory, and everything else in another one.
    pub fn only_receives(&self) -> bool {
        self.load(OwnState::ByLane) & RECEIVES_ONLY != 0
    }

    /// Returns whether this endpoint has its incoming lane in another memory.
    pub fn receives_elsewhere(&self) -> bool {
        self.load(OwnState::ByLane) & RECEIVES_ELSEWHERE != 0
    }

    /// Returns the inode of this endpoint's lifeline, 0 while unknown.
    pub fn lifeline_inode(&self) -> u64 {
        self.load(OwnState::LifelineInode)
    }

    /// Loads a word that the peer has written.
    #[inline]
    pub fn status(&self, word: PeerStatus) -> u64 {
        let value = self.own.load_u64(word as usize, Ordering::Acquire);
        match (&self.medium, value) {
            (Medium::Plain(_), _) | (Medium::Modelled(_), 0) => value,
            _ => self.status_elsewhere(word, value),
        }
    }

    /// Over a modelled link, the peer's close arrives behind the data that it has sent, unless this node's proxy
    /// reported it; the other words have no meaning before it. With a local page, the peer's words are in the window.
    #[cold]
    #[inline(never)]
    fn status_elsewhere(&self, word: PeerStatus, value: u64) -> u64 {
        match &self.medium {
            Medium::Modelled(modelled) if word == PeerStatus::Closed && value != LEFT_SILENTLY => {
                modelled.windows.inbound().load_u64(CLOSED_IN_TIME, Ordering::Acquire)
            }
            Medium::Split(split) if value == 0 => split.status(word),
            _ => value,
        }
    }

    /// Stores a word for the peer.
    pub fn publish(&self, word: PeerStatus, value: u64) {
        let peers = match &self.medium {
            Medium::Plain(plain) => &plain.peers,
            Medium::Modelled(modelled) => {
                if word == PeerStatus::Closed {
                    modelled.windows.outbound().store_u64(CLOSED_IN_TIME, value, Ordering::Release);
                }
                &modelled.peers
            }
            Medium::Split(split) => return split.publish(word, value),
        };
        peers.store_u64(word as usize, value, Ordering::Release);
    }

    /// Returns the value of a word that was last stored for the peer; 0 in windows.
    pub fn published(&self, word: PeerStatus) -> u64 {
        match &self.medium {
            Medium::Plain(plain) if !self.is_in_windows => plain.peers.load_u64(word as usize, Ordering::Relaxed),
            _ => 0,
        }
    }

    /// Returns the peer's [`OwnState::ByLane`]; `None` in windows, where it is not visible.
    fn peers_by_lane(&self) -> Option<u64> {
        match &self.medium {
            Medium::Plain(plain) if !self.is_in_windows => {
                Some(plain.peers.load_u64(OwnState::ByLane as usize, Ordering::Acquire))
            }
            _ => None,
        }
    }

    /// Returns whether the peer has noted that it has received everything sent over the lifeline. True in windows,
    /// where nothing is sent over it.
    pub fn peer_receives_by_lane(&self) -> bool {
        self.peers_by_lane().is_none_or(|noted| noted & BY_LANE_RECEIVE != 0)
    }

    /// Returns whether the peer has noted that it sends no wakeup when it has made room.
    pub fn peer_is_confined(&self) -> bool {
        self.peers_by_lane().is_some_and(|noted| noted & IS_CONFINED != 0)
    }

    /// Returns whether the peer has noted that its program has set a receiver of `SIGURG`.
    pub fn peer_raises_signal(&self) -> bool {
        self.peers_by_lane().is_some_and(|noted| noted & RAISES_SIGNAL != 0)
    }

    /// Notes that the connection was reset, which the kernel reported instead of the peer.
    pub fn note_reset(&self) {
        self.own.store_u64(PeerStatus::Reset as usize, 1, Ordering::Release);
    }
}
