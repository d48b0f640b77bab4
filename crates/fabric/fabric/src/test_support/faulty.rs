//! A link with faults: stores of the wrapped link are delayed, reordered, corrupted or lost by a seeded plan.
//!
//! Time is virtual and set by [`FaultyLink::tick`], and the same seed and the same calls give the same faults. When a
//! thread panics while it drops a faulty link, the seed is printed.
//!
//! * **Delay**: a store becomes visible when it is due. Stores keep their order, and so do rings between them.
//! * **Write combining**: words become visible in any order and at any time up to a fence. A lane that omits the fence
//!   between payload and tag fails here and nowhere else, because ordinary x86 memory keeps stores in order.
//! * **Corruption**: a bit of a stored word flips.
//! * **Loss**: the link goes down at both endpoints. Stores in flight, and stores before the next training, are
//!   dropped.
//!
//! The faults affect the direction away from the wrapped endpoint. Wrap both endpoints for faults in both directions.

mod wire;

use super::random::Random;
use crate::window::assert_whole_lines;
use crate::{Coherence, Doorbell, Epoch, Link, LinkState, Outbound, Scratchpad, Slice, WaitOutcome};
use std::fmt;
use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use volmem::sync::Ordering;
use wire::{Item, Piece, WORD_BYTES, Wire, pieces};

/// The kinds of faults and their frequencies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FaultPlan {
    /// Seed of every choice.
    pub seed: u64,
    /// Whether stores are write-combined. The outbound window then reports [`Coherence::WriteCombined`].
    pub is_write_combined: bool,
    /// Delay of a store, in virtual time.
    pub delay_ns: RangeInclusive<u64>,
    /// Number of words with a flipped bit, per million.
    pub corruptions_per_million_words: u32,
    /// Number of words before which the link is lost, per million.
    pub losses_per_million_words: u32,
    /// Time for which a lost link cannot be trained, in virtual time.
    pub outage_ns: RangeInclusive<u64>,
}

impl FaultPlan {
    /// A plan without faults, on which other plans are based.
    pub fn none(seed: u64) -> Self {
        Self {
            seed,
            is_write_combined: false,
            delay_ns: 0..=0,
            corruptions_per_million_words: 0,
            losses_per_million_words: 0,
            outage_ns: 0..=0,
        }
    }

    /// A plan with write-combined stores and no other faults.
    pub fn write_combined(seed: u64) -> Self {
        Self { is_write_combined: true, ..Self::none(seed) }
    }
}

/// Numbers of faults so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FaultCounts {
    /// Words stored, whole or in part.
    pub words_stored: u64,
    /// Words that never arrive.
    pub words_dropped: u64,
    /// Words that arrive with a flipped bit.
    pub words_corrupted: u64,
    /// Losses of the link.
    pub losses: u64,
}

/// One endpoint of a link, with faults on what it sends.
pub struct FaultyLink<L: Link>(Shared<L>);

impl<L: Link> FaultyLink<L> {
    /// Wraps an endpoint of a link.
    pub fn new(link: L, plan: FaultPlan) -> Self {
        Self(Shared(Arc::new(Mutex::new(State::new(link, plan)))))
    }

    /// Advances virtual time to `now_ns`, unless it is later already. What is due becomes visible.
    pub fn tick(&self, now_ns: u64) {
        self.0.lock().tick(now_ns);
    }

    /// Loses the link now, for a time that the plan determines.
    pub fn lose(&self) {
        self.0.lock().lose();
    }

    /// The seed of the plan.
    pub fn seed(&self) -> u64 {
        self.0.lock().plan.seed
    }

    /// The numbers of faults so far.
    pub fn counts(&self) -> FaultCounts {
        self.0.lock().counts
    }

    /// Number of stores that are not visible to the peer yet.
    pub fn stores_in_flight(&self) -> usize {
        self.0.lock().wire.stores_in_flight()
    }
}

impl<L: Link> fmt::Debug for FaultyLink<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.0.lock();
        write!(f, "FaultyLink({:?}, {:?})", state.plan, state.counts)
    }
}

impl<L: Link> Link for FaultyLink<L> {
    type Inbound = L::Inbound;
    type Outbound = FaultyOutbound<L>;
    type Doorbell = FaultyDoorbell<L>;
    type Scratchpad = FaultyScratchpad<L>;

    fn inbound(&self) -> L::Inbound {
        self.0.lock().link.inbound()
    }

    fn outbound(&self) -> FaultyOutbound<L> {
        let len_bytes = self.0.lock().outbound.len_bytes();
        FaultyOutbound { shared: self.0.clone(), offset: 0, len_bytes }
    }

    fn doorbell(&self) -> FaultyDoorbell<L> {
        let inner = self.0.lock().doorbell.clone();
        FaultyDoorbell { shared: self.0.clone(), inner }
    }

    fn scratchpad(&self) -> FaultyScratchpad<L> {
        let inner = self.0.lock().link.scratchpad();
        FaultyScratchpad { shared: self.0.clone(), inner }
    }

    fn state(&self) -> LinkState {
        self.0.lock().link.state()
    }

    fn epoch(&self) -> Epoch {
        self.0.lock().link.epoch()
    }

    fn train(&mut self) -> LinkState {
        self.0.lock().train()
    }

    fn take_down(&mut self) {
        self.0.lock().take_down();
    }
}

/// The peer's window, with faults.
pub struct FaultyOutbound<L: Link> {
    shared: Shared<L>,
    offset: usize,
    len_bytes: usize,
}

impl<L: Link> FaultyOutbound<L> {
    /// Offset of a span in the whole window. It is checked now, because the bytes may arrive later.
    fn checked(&self, offset: usize, len_bytes: usize) -> usize {
        let inside = offset <= self.len_bytes && len_bytes <= self.len_bytes - offset;
        assert!(inside, "span {offset}+{len_bytes} outside a window of {} bytes", self.len_bytes);
        self.offset + offset
    }
}

impl<L: Link> Clone for FaultyOutbound<L> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), ..*self }
    }
}

impl<L: Link> Slice for FaultyOutbound<L> {
    fn slice(&self, offset: usize, len_bytes: usize) -> Self {
        assert_whole_lines(offset, len_bytes);
        Self { shared: self.shared.clone(), offset: self.checked(offset, len_bytes), len_bytes }
    }
}

impl<L: Link> Outbound for FaultyOutbound<L> {
    fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    fn coherence(&self) -> Coherence {
        let state = self.shared.lock();
        if state.plan.is_write_combined { Coherence::WriteCombined } else { state.outbound.coherence() }
    }

    /// Release order has no effect on a write-combined mapping, and none here.
    fn store_u64(&self, offset: usize, value: u64, _order: Ordering) {
        let at = self.checked(offset, WORD_BYTES);
        assert!(offset.is_multiple_of(WORD_BYTES), "word at unaligned offset {offset}");
        self.shared.lock().store(at, &value.to_ne_bytes());
    }

    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        let at = self.checked(offset, len_bytes);
        let mut bytes = vec![0; len_bytes];
        // SAFETY: the caller guarantees that `source` is readable for `len_bytes`, and the vector has that length. No
        // reference to the source is made, because another party may write it.
        unsafe { source.copy_to_nonoverlapping(bytes.as_mut_ptr(), len_bytes) };
        self.shared.lock().store(at, &bytes);
    }

    /// `None`: stores through an address would not be subject to faults.
    fn pointer(&self, offset: usize, len_bytes: usize) -> Option<NonNull<u8>> {
        self.checked(offset, len_bytes);
        None
    }

    fn fence(&self) {
        self.shared.lock().fence();
    }

    /// Advances virtual time until everything has arrived.
    fn flush(&self) {
        self.shared.lock().flush();
    }
}

/// A doorbell whose rings are delayed like stores.
pub struct FaultyDoorbell<L: Link> {
    shared: Shared<L>,
    inner: L::Doorbell,
}

impl<L: Link> Clone for FaultyDoorbell<L> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), inner: self.inner.clone() }
    }
}

impl<L: Link> Doorbell for FaultyDoorbell<L> {
    fn ring(&self) {
        self.shared.lock().ring();
    }

    /// Waits in real time for a ring, which the sender's ticks deliver.
    fn wait(&self, timeout: Option<Duration>) -> WaitOutcome {
        self.inner.wait(timeout)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.descriptor()
    }
}

/// A scratchpad whose words do not arrive during an outage.
pub struct FaultyScratchpad<L: Link> {
    shared: Shared<L>,
    inner: L::Scratchpad,
}

impl<L: Link> Clone for FaultyScratchpad<L> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), inner: self.inner.clone() }
    }
}

impl<L: Link> Scratchpad for FaultyScratchpad<L> {
    fn words(&self) -> usize {
        self.inner.words()
    }

    fn write(&self, index: usize, value: u32) {
        assert!(index < self.words(), "scratchpad word {index} of {}", self.words());
        if !self.shared.lock().is_out() {
            self.inner.write(index, value);
        }
    }

    fn read(&self, index: usize) -> u32 {
        self.inner.read(index)
    }
}

/// State that the link and all its handles share.
struct Shared<L: Link>(Arc<Mutex<State<L>>>);

impl<L: Link> Shared<L> {
    /// A poisoned lock is ignored: the state is consistent after each step.
    fn lock(&self) -> MutexGuard<'_, State<L>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<L: Link> Clone for Shared<L> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

struct State<L: Link> {
    link: L,
    outbound: L::Outbound,
    doorbell: L::Doorbell,
    plan: FaultPlan,
    counts: FaultCounts,
    random: Random,
    wire: Wire,
    outage_ns_end: u64,
}

impl<L: Link> State<L> {
    fn new(link: L, plan: FaultPlan) -> Self {
        Self {
            outbound: link.outbound(),
            doorbell: link.doorbell(),
            counts: FaultCounts::default(),
            random: Random::new(plan.seed),
            wire: Wire::new(plan.is_write_combined, plan.delay_ns.clone()),
            outage_ns_end: 0,
            link,
            plan,
        }
    }

    fn is_out(&self) -> bool {
        self.wire.now_ns() < self.outage_ns_end
    }

    /// Returns whether the link is up. If not, drops the stores in flight.
    fn is_up(&mut self) -> bool {
        let is_up = self.link.state() == LinkState::Up;
        if !is_up {
            self.drop_all();
        }
        is_up
    }

    fn drop_all(&mut self) {
        self.counts.words_dropped += self.wire.clear() as u64;
    }

    fn lose(&mut self) {
        self.take_down();
        let outage_ns = self.random.within(&self.plan.outage_ns);
        self.outage_ns_end = self.wire.now_ns().saturating_add(outage_ns);
        self.counts.losses += 1;
    }

    fn take_down(&mut self) {
        self.drop_all();
        self.link.take_down();
    }

    fn train(&mut self) -> LinkState {
        if self.is_out() {
            return LinkState::Down;
        }
        if self.is_up() { LinkState::Up } else { self.link.train() }
    }

    fn tick(&mut self, now_ns: u64) {
        self.wire.tick(now_ns, &mut self.random);
        self.deliver();
    }

    fn store(&mut self, offset: usize, bytes: &[u8]) {
        for piece in pieces(offset, bytes) {
            self.store_piece(piece);
            self.deliver();
        }
    }

    fn store_piece(&mut self, mut piece: Piece) {
        self.counts.words_stored += 1;
        if self.random.is_one_of_million(self.plan.losses_per_million_words) && self.is_up() {
            self.lose();
        }
        if !self.is_up() {
            self.counts.words_dropped += 1;
            return;
        }
        if self.random.is_one_of_million(self.plan.corruptions_per_million_words) {
            self.corrupt(&mut piece);
        }
        self.wire.store(piece, &mut self.random);
    }

    /// Flips a bit of one of the stored bytes.
    fn corrupt(&mut self, piece: &mut Piece) {
        let stored: Vec<usize> = (0..WORD_BYTES).filter(|&index| piece.has(index)).collect();
        let index = stored[self.random.below(stored.len())];
        piece.bytes[index] ^= 1 << self.random.below(8);
        self.counts.words_corrupted += 1;
    }

    fn fence(&mut self) {
        if self.is_up() {
            self.wire.fence(&mut self.random);
            self.deliver();
        }
    }

    fn flush(&mut self) {
        if self.is_up() {
            self.wire.fence(&mut self.random);
            self.wire.wait_for_all();
            self.deliver();
            self.outbound.flush();
        }
    }

    fn ring(&mut self) {
        if self.is_up() {
            self.wire.ring(&mut self.random);
            self.deliver();
        }
    }

    /// Applies what is due to the wrapped link.
    fn deliver(&mut self) {
        while self.is_up() {
            match self.wire.arrival() {
                Some(Item::Store(piece)) => apply(&self.outbound, &piece),
                Some(Item::Fence) => self.outbound.fence(),
                Some(Item::Ring) => self.doorbell.ring(),
                None => break,
            }
        }
    }
}

/// Prints what is needed to repeat a failure.
impl<L: Link> Drop for State<L> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "fabric::test_support::faulty: seed {:#x}; plan {:?}; {:?}",
                self.plan.seed, self.plan, self.counts
            );
        }
    }
}

/// Stores a whole word as a word, and parts of a word byte by byte.
fn apply(outbound: &impl Outbound, piece: &Piece) {
    if piece.is_whole() {
        outbound.store_u64(piece.offset, u64::from_ne_bytes(piece.bytes), Ordering::Release);
        return;
    }
    for index in (0..WORD_BYTES).filter(|&index| piece.has(index)) {
        outbound.write(piece.offset + index, &piece.bytes[index..=index]);
    }
}

#[cfg(test)]
mod tests;
