//! A link whose windows and scratchpads lie in coherent memory, whatever keeps that memory and whatever rings.

use crate::{Doorbell, Epoch, Inbound, Link, LinkState, MemoryInbound, MemoryOutbound, Outbound, Scratchpad, Training};
use volmem::sync::Ordering;
use volmem::{CACHE_LINE_BYTES, Region};

/// Words of a scratchpad in memory.
pub const SCRATCHPAD_WORDS: usize = 8;

/// Bytes of the control block that lies beside each window, written by the peer: the training word, then the
/// scratchpad.
pub(crate) const CONTROL_BYTES: usize = 2 * CACHE_LINE_BYTES;

const WORD_BYTES: usize = size_of::<u64>();
const TRAINING_WORD: usize = 0;
const SCRATCHPAD_OFFSET: usize = CACHE_LINE_BYTES;

const _: () = assert!(SCRATCHPAD_OFFSET + SCRATCHPAD_WORDS * WORD_BYTES <= CONTROL_BYTES);

/// Memory of one node that the other writes.
#[derive(Debug, Clone)]
pub(crate) struct Side {
    pub window: Region,
    pub control: Region,
}

/// One end of a link in coherent memory, rung by `D`.
#[derive(Debug)]
pub struct MemoryLink<D> {
    own: Side,
    peer: Side,
    doorbell: D,
    training: Training,
}

impl<D> MemoryLink<D> {
    /// The end whose node owns `own`. Whatever an earlier holder of this end had published is withdrawn.
    pub(crate) fn attach(own: Side, peer: Side, doorbell: D) -> Self {
        let training = Training::attach(load(&own.control, TRAINING_WORD));
        let link = Self { own, peer, doorbell, training };
        link.publish();
        link
    }

    fn theirs(&self) -> u32 {
        load(&self.own.control, TRAINING_WORD)
    }

    fn publish(&self) {
        store(&self.peer.control, TRAINING_WORD, self.training.word());
    }
}

impl<D: Doorbell + Clone> Link for MemoryLink<D> {
    type Inbound = MemoryInbound;
    type Outbound = MemoryOutbound;
    type Doorbell = D;
    type Scratchpad = MemoryScratchpad;

    fn inbound(&self) -> MemoryInbound {
        MemoryInbound::new(self.own.window.clone())
    }

    fn outbound(&self) -> MemoryOutbound {
        MemoryOutbound::new(self.peer.window.clone())
    }

    fn doorbell(&self) -> D {
        self.doorbell.clone()
    }

    fn scratchpad(&self) -> MemoryScratchpad {
        MemoryScratchpad { own: self.own.control.clone(), peer: self.peer.control.clone() }
    }

    fn state(&self) -> LinkState {
        self.training.state(self.theirs())
    }

    fn epoch(&self) -> Epoch {
        self.training.epoch()
    }

    fn train(&mut self) -> LinkState {
        let inbound = self.inbound();
        self.training.step(self.theirs(), |epoch| clean(&inbound, epoch));
        self.publish();
        self.state()
    }

    fn take_down(&mut self) {
        self.training.take_down();
        // The peer sees the word after every store made before it.
        self.outbound().fence();
        self.publish();
    }
}

/// Zeroes the window, except for the first epoch: then the memory is fresh, and stays untouched until it is used.
fn clean(inbound: &MemoryInbound, epoch: Epoch) {
    if epoch == Epoch(1) {
        return;
    }
    for offset in (0..inbound.len_bytes()).step_by(WORD_BYTES) {
        inbound.store_u64(offset, 0, Ordering::Relaxed);
    }
}

/// A scratchpad in coherent memory.
#[derive(Debug, Clone)]
pub struct MemoryScratchpad {
    own: Region,
    peer: Region,
}

impl Scratchpad for MemoryScratchpad {
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
fn load(control: &Region, offset: usize) -> u32 {
    control.load_u64(offset, Ordering::Acquire) as u32
}

fn store(control: &Region, offset: usize, value: u32) {
    control.store_u64(offset, u64::from(value), Ordering::Release);
}

/// Windows are whole lines, so that lanes can be.
pub(crate) fn is_window_size(window_bytes: usize) -> bool {
    window_bytes != 0 && window_bytes.is_multiple_of(CACHE_LINE_BYTES)
}
