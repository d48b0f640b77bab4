//! A link whose windows and scratchpads lie in memory, with any kind of memory and doorbell.

use crate::{Doorbell, Epoch, Link, LinkState, Memory, MemoryInbound, MemoryOutbound, Scratchpad, Training};
use volmem::sync::Ordering;
use volmem::{CACHE_LINE_BYTES, Region};

/// Number of words of a scratchpad in memory.
pub const SCRATCHPAD_WORDS: usize = 8;

/// Bytes of the control block of each window, written by the peer: the training word, then the scratchpad, each in a
/// line of its own.
pub(crate) const CONTROL_BYTES: usize = 2 * CACHE_LINE_BYTES;

const WORD_BYTES: usize = size_of::<u64>();
/// Offset of the training word in a control block. It has a line of its own.
pub(crate) const TRAINING_WORD: usize = 0;
const SCRATCHPAD_OFFSET: usize = CACHE_LINE_BYTES;

const _: () = assert!(SCRATCHPAD_OFFSET + SCRATCHPAD_WORDS * WORD_BYTES <= CONTROL_BYTES);

/// The memory of one node that the other one writes.
#[derive(Debug, Clone)]
pub(crate) struct Side<M = Region> {
    pub window: M,
    pub control: M,
}

/// Contents of a link's memory before its first training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InitialContents {
    /// Zeros. The memory is not touched before it is used.
    Zeroed,
    /// Anything.
    Unknown,
}

/// One endpoint of a link in memory `M`, with a doorbell `D`.
#[derive(Debug)]
pub struct MemoryLink<D, M = Region> {
    own: Side<M>,
    peer: Side<M>,
    doorbell: D,
    training: Training,
    contents: InitialContents,
    /// The last epoch for which this node's cache has been cleared of lines of the peer's window.
    invalidated: Epoch,
}

impl<D, M: Memory> MemoryLink<D, M> {
    /// Attaches the endpoint whose node owns `own`. Withdraws the training word of an earlier holder of this endpoint.
    pub(crate) fn attach(own: Side<M>, peer: Side<M>, doorbell: D, contents: InitialContents) -> Self {
        let training = Training::attach(load(&own.control, TRAINING_WORD));
        let link = Self { own, peer, doorbell, training, contents, invalidated: Epoch::NONE };
        link.publish();
        link
    }

    fn peer_word(&self) -> u32 {
        load(&self.own.control, TRAINING_WORD)
    }

    /// Publishes the training word, after all stores of this endpoint in the peer's window.
    fn publish(&self) {
        self.peer.window.barrier();
        store(&self.peer.control, TRAINING_WORD, self.training.word());
    }

    /// Invalidates the peer's window in this node's cache. This is needed before the training word says "stopped",
    /// because a modified line could be written back in the next epoch. It is needed again once the peer has zeroed its
    /// window, because a store to a stale line would write back the rest of it.
    fn invalidate_peer_window(&self) {
        self.peer.window.invalidate_lines(0, self.peer.window.len_bytes());
    }

    /// Zeroes the own window, except in the first epoch of memory that was zero, which is not touched before it is
    /// used.
    fn zero_window(own: &M, epoch: Epoch, contents: InitialContents) {
        if epoch == Epoch(1) && contents == InitialContents::Zeroed {
            return;
        }
        for offset in (0..own.len_bytes()).step_by(WORD_BYTES) {
            own.store_u64(offset, 0, Ordering::Relaxed);
        }
        own.write_back(0, own.len_bytes());
        own.barrier();
    }
}

impl<D: Doorbell + Clone, M: Memory> Link for MemoryLink<D, M> {
    type Inbound = MemoryInbound<M>;
    type Outbound = MemoryOutbound<M>;
    type Doorbell = D;
    type Scratchpad = MemoryScratchpad<M>;

    fn inbound(&self) -> MemoryInbound<M> {
        MemoryInbound::new(self.own.window.clone())
    }

    fn outbound(&self) -> MemoryOutbound<M> {
        MemoryOutbound::new(self.peer.window.clone())
    }

    fn doorbell(&self) -> D {
        self.doorbell.clone()
    }

    fn scratchpad(&self) -> MemoryScratchpad<M> {
        MemoryScratchpad::new(self.own.control.clone(), self.peer.control.clone())
    }

    fn state(&self) -> LinkState {
        self.training.state(self.peer_word())
    }

    fn epoch(&self) -> Epoch {
        self.training.epoch()
    }

    fn train(&mut self) -> LinkState {
        let word_before = self.training.word();
        let (own, contents) = (&self.own.window, &mut self.contents);
        self.training.step(load(&self.own.control, TRAINING_WORD), |epoch| {
            Self::zero_window(own, epoch, *contents);
            *contents = InitialContents::Unknown; // Epochs start again after the last one.
        });
        if self.training.word() != word_before {
            self.invalidate_peer_window();
        }
        self.publish();
        let state = self.state();
        if state == LinkState::Up && self.invalidated != self.training.epoch() {
            self.invalidate_peer_window();
            self.invalidated = self.training.epoch();
        }
        state
    }

    fn take_down(&mut self) {
        self.training.take_down();
        self.publish();
    }
}

/// A scratchpad in memory.
#[derive(Debug, Clone)]
pub struct MemoryScratchpad<M = Region> {
    own: M,
    peer: M,
}

impl<M: Memory> MemoryScratchpad<M> {
    /// Makes the scratchpad of two control blocks.
    pub(crate) fn new(own: M, peer: M) -> Self {
        Self { own, peer }
    }
}

impl<M: Memory> Scratchpad for MemoryScratchpad<M> {
    fn words(&self) -> usize {
        SCRATCHPAD_WORDS
    }

    fn write(&self, index: usize, value: u32) {
        store(&self.peer, word_offset(index), value);
    }

    fn read(&self, index: usize) -> u32 {
        load(&self.own, word_offset(index))
    }
}

fn word_offset(index: usize) -> usize {
    assert!(index < SCRATCHPAD_WORDS, "scratchpad word {index} of {SCRATCHPAD_WORDS}");
    SCRATCHPAD_OFFSET + index * WORD_BYTES
}

/// Loads a word. Its upper half is ignored: the peer can store anything there.
fn load(control: &impl Memory, offset: usize) -> u32 {
    control.invalidate_lines(offset, WORD_BYTES);
    control.load_u64(offset, Ordering::Acquire) as u32
}

fn store(control: &impl Memory, offset: usize, value: u32) {
    control.store_u64(offset, u64::from(value), Ordering::Release);
    control.write_back(offset, WORD_BYTES);
    control.barrier();
}

/// Whether the size is a positive multiple of the cache line, which lanes need.
pub(crate) fn is_window_size(window_bytes: usize) -> bool {
    window_bytes != 0 && window_bytes.is_multiple_of(CACHE_LINE_BYTES)
}
