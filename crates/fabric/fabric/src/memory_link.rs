//! A link whose windows and scratchpads lie in memory, whatever keeps that memory and whatever rings.

use crate::{Doorbell, Epoch, Link, LinkState, Memory, MemoryInbound, MemoryOutbound, Scratchpad, Training};
use volmem::sync::Ordering;
use volmem::{CACHE_LINE_BYTES, Region};

/// Words of a scratchpad in memory.
pub const SCRATCHPAD_WORDS: usize = 8;

/// Bytes of the control block that lies beside each window, written by the peer: the training word, then the
/// scratchpad, each in a line of its own.
pub(crate) const CONTROL_BYTES: usize = 2 * CACHE_LINE_BYTES;

const WORD_BYTES: usize = size_of::<u64>();
/// Where a control block has the training word, in a line of its own.
pub(crate) const TRAINING_WORD: usize = 0;
const SCRATCHPAD_OFFSET: usize = CACHE_LINE_BYTES;

const _: () = assert!(SCRATCHPAD_OFFSET + SCRATCHPAD_WORDS * WORD_BYTES <= CONTROL_BYTES);

/// Memory of one node that the other writes.
#[derive(Debug, Clone)]
pub(crate) struct Side<M = Region> {
    pub window: M,
    pub control: M,
}

/// What is in the memory of a link before its first training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InitialContents {
    /// Zeros: it stays untouched until it is used.
    Zeroed,
    /// Whatever somebody left there.
    Unknown,
}

/// One end of a link in memory `M`, rung by `D`.
#[derive(Debug)]
pub struct MemoryLink<D, M = Region> {
    own: Side<M>,
    peer: Side<M>,
    doorbell: D,
    training: Training,
    before: InitialContents,
    /// The epoch for which no line of the peer's window is left in this node's cache.
    scrubbed: Epoch,
}

impl<D, M: Memory> MemoryLink<D, M> {
    /// The end whose node owns `own`. Whatever an earlier holder of this end had published is withdrawn.
    pub(crate) fn attach(own: Side<M>, peer: Side<M>, doorbell: D, before: InitialContents) -> Self {
        let training = Training::attach(load(&own.control, TRAINING_WORD));
        let link = Self { own, peer, doorbell, training, before, scrubbed: Epoch::NONE };
        link.publish();
        link
    }

    fn theirs(&self) -> u32 {
        load(&self.own.control, TRAINING_WORD)
    }

    /// Behind all stores that this end has made in the peer's window.
    fn publish(&self) {
        self.peer.window.barrier();
        store(&self.peer.control, TRAINING_WORD, self.training.word());
    }

    /// Takes the peer's window out of this node's cache. Before saying "stopped", because a changed line could be
    /// written back into the next epoch; and once the peer's window is clean, because a store to an old line would
    /// bring the rest of it back.
    fn scrub(&self) {
        self.peer.window.invalidate_lines(0, self.peer.window.len_bytes());
    }

    /// Zeroes the own window, except for the first epoch of memory that was zero: it stays untouched until it is used.
    fn clean(own: &M, epoch: Epoch, before: InitialContents) {
        if epoch == Epoch(1) && before == InitialContents::Zeroed {
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
        self.training.state(self.theirs())
    }

    fn epoch(&self) -> Epoch {
        self.training.epoch()
    }

    fn train(&mut self) -> LinkState {
        let word_before = self.training.word();
        let (own, before) = (&self.own.window, &mut self.before);
        self.training.step(load(&self.own.control, TRAINING_WORD), |epoch| {
            Self::clean(own, epoch, *before);
            *before = InitialContents::Unknown; // Epochs begin again one day.
        });
        if self.training.word() != word_before {
            self.scrub();
        }
        self.publish();
        let state = self.state();
        if state == LinkState::Up && self.scrubbed != self.training.epoch() {
            self.scrub();
            self.scrubbed = self.training.epoch();
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
    /// The scratchpad of two control blocks.
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

/// The upper half of a word is the peer's to spoil, and ignored.
fn load(control: &impl Memory, offset: usize) -> u32 {
    control.invalidate_lines(offset, WORD_BYTES);
    control.load_u64(offset, Ordering::Acquire) as u32
}

fn store(control: &impl Memory, offset: usize, value: u32) {
    control.store_u64(offset, u64::from(value), Ordering::Release);
    control.write_back(offset, WORD_BYTES);
    control.barrier();
}

/// Windows are whole lines, so that lanes can be.
pub(crate) fn is_window_size(window_bytes: usize) -> bool {
    window_bytes != 0 && window_bytes.is_multiple_of(CACHE_LINE_BYTES)
}
