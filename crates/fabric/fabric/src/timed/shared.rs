//! Timed windows whose whole state lies in shared memory: a store lies in place at once, with its arrival time beside
//! it, and loads return what has arrived.
//!
//! [`TimedWindows`](super::TimedWindows) keep a journal that the receiver applies to a window of its own: its positions
//! and locks belong to one process, and a sender stalls while the receiver does not load. Here neither endpoint depends
//! on the other, and any number of processes and threads may hold an endpoint, pass it on, be stopped or be killed.
//!
//! ```text
//!   the window
//!   a history for each word of its first part: count | due, value | ... seven of them          [written by the peer]
//!   a time for each line behind that part: when what was stored there last arrives             [written by the peer]
//! ```
//!
//! * **Words.** In the first part of a window each word has a history: a load returns the last value that has arrived.
//!   Up to seven stores of one word that are in flight have an entry each. Of more than seven, the last ones arrive
//!   together, with the last of them.
//! * **Lines.** In the second part a line reads as zeros while a store to it is in flight. That is enough for the rings
//!   of lanes, whose records are found by a word that is not zero and are not overwritten before they are read. So bulk
//!   data is copied only once.
//! * **Rate.** All writers of one link share a [`Pacer`], which the peer can read too. On a real link the completion of
//!   a read pushes the earlier posted writes of the other side ahead of it, so a [flush](Outbound::flush) waits for
//!   those.
//! * **Records.** The two words that publish a record after its payload are reserved together with the payload, and
//!   sent with it: the delay hides the time that the emulation takes for the payload.
//! * **Order.** What is reserved later arrives later, in whichever window and by whichever process.
//!
//! Whatever a peer writes into times and histories, each call ends. At worst the peer's own stores are seen too early,
//! too late or not at all.

mod layout;
mod span;

pub use layout::SharedLayout;

use super::clock::{Clock, Monotonic};
use super::error::TimedError;
use super::timing::{LinkTiming, Pacer, PacketCosts};
use crate::window::assert_one_line;
use crate::{Coherence, Inbound, Outbound, Slice};
use span::{Context, RECORD_WORDS, Span};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use volmem::Region;
use volmem::sync::Ordering;

const WORD_BYTES: usize = size_of::<u64>();

/// How to make windows in shared memory.
#[derive(Debug, Clone)]
pub struct SharedConfig {
    /// Layout of both windows.
    pub layout: SharedLayout,
    /// How long stores take.
    pub timing: LinkTiming,
    /// The pacer of the link from this node to the peer.
    pub pacer: Pacer,
    /// The pacer of the link from the peer to this node, which is only read.
    pub peer_pacer: Pacer,
}

/// The two windows of a part of a link, in memory that the programs of both endpoints share.
#[derive(Debug)]
pub struct SharedWindows<C: Clock = Monotonic> {
    inbound: SharedInbound<C>,
    outbound: SharedOutbound<C>,
}

impl SharedWindows {
    /// Makes windows in `inbound`, this node's memory, and `outbound`, the peer's.
    ///
    /// # Errors
    /// [`TimedError`].
    pub fn new(inbound: &Region, outbound: &Region, config: SharedConfig) -> Result<Self, TimedError> {
        Self::with_clock(inbound, outbound, config, Monotonic)
    }
}

impl<C: Clock> SharedWindows<C> {
    /// Makes windows like [`SharedWindows::new`], with another clock.
    ///
    /// # Errors
    /// [`TimedError`].
    pub fn with_clock(inbound: &Region, outbound: &Region, config: SharedConfig, clock: C) -> Result<Self, TimedError> {
        let SharedConfig { layout, timing, pacer, peer_pacer } = config;
        layout.check()?;
        for memory in [inbound, outbound] {
            let (found_bytes, advised_bytes) = (memory.len_bytes(), layout.memory_bytes());
            if found_bytes < advised_bytes {
                return Err(TimedError::Memory { found_bytes, advised_bytes });
            }
        }
        let costs = PacketCosts::new(timing)?;
        let context = Arc::new(Context { layout, costs, pacer, peer_pacer, seen_ns: AtomicU64::new(0), clock });
        let span = |memory: &Region| Span {
            memory: memory.clone(),
            offset: 0,
            len_bytes: layout.window_bytes,
            context: context.clone(),
        };
        Ok(Self {
            inbound: SharedInbound(span(inbound)),
            outbound: SharedOutbound(span(outbound), ReservedWords::default()),
        })
    }

    /// This node's window.
    pub fn inbound(&self) -> SharedInbound<C> {
        self.inbound.clone()
    }

    /// The peer's window.
    pub fn outbound(&self) -> SharedOutbound<C> {
        self.outbound.clone()
    }

    /// Waits until what the peer has stored so far has arrived: for a process that was woken by a ring, which may be
    /// faster than the modelled link.
    pub fn wait_for_arrivals(&self) {
        self.inbound.0.context.wait_for_arrivals();
    }
}

/// The words that this handle has reserved with a payload: how many are left, and when they arrive.
#[derive(Debug, Default)]
struct ReservedWords {
    words: AtomicU64,
    due_ns: AtomicU64,
}

impl ReservedWords {
    fn set(&self, due_ns: u64) {
        self.due_ns.store(due_ns, Ordering::Relaxed);
        self.words.store(RECORD_WORDS, Ordering::Relaxed);
    }

    /// Takes one reserved word and returns its arrival time; `None` if none is left.
    #[inline]
    fn take(&self) -> Option<u64> {
        let left = self.words.load(Ordering::Relaxed).checked_sub(1)?;
        self.words.store(left, Ordering::Relaxed);
        Some(self.due_ns.load(Ordering::Relaxed))
    }
}

/// This node's window. Loads return what has arrived.
#[derive(Debug)]
pub struct SharedInbound<C: Clock = Monotonic>(Span<C>);

impl<C: Clock> Clone for SharedInbound<C> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<C: Clock> Slice for SharedInbound<C> {
    fn slice(&self, offset: usize, len_bytes: usize) -> Self {
        Self(self.0.slice(offset, len_bytes))
    }
}

impl<C: Clock> Inbound for SharedInbound<C> {
    #[inline]
    fn len_bytes(&self) -> usize {
        self.0.len_bytes
    }

    /// Always an acquire load: the arrival time is loaded before and after the value.
    #[inline]
    fn load_u64(&self, offset: usize, _order: Ordering) -> u64 {
        let at = self.0.checked_words(offset, WORD_BYTES);
        if self.0.is_word(at) { self.0.load_word(at) } else { self.0.load_in_line(at) }
    }

    #[inline]
    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        let at = self.0.checked_words(offset, WORD_BYTES);
        if self.0.is_word(at) {
            self.0.store_own_word(at, value, order);
        } else {
            self.0.memory.store_u64(at, value, order);
        }
    }

    /// Of a line that is written during the read, which a ring's lines never are, bytes may be seen before they arrive.
    #[inline]
    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        let at = self.0.checked(offset, len_bytes);
        let words_bytes = self.0.bytes_in_words(at, len_bytes);
        // SAFETY: the caller guarantees that `destination` is writable for `len_bytes` and outside the window. The two
        // parts are disjoint and together have that length.
        unsafe {
            self.0.read_words(at, destination, words_bytes);
            self.0.read_lines(at + words_bytes, destination.add(words_bytes), len_bytes - words_bytes);
        }
    }

    /// Address of lines whose stores have arrived, for records that were found.
    #[inline]
    fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8> {
        let at = self.0.checked(offset, len_bytes);
        self.0.memory.pointer(at, len_bytes)
    }
}

/// The peer's window. Stores arrive after the delay.
#[derive(Debug)]
pub struct SharedOutbound<C: Clock = Monotonic>(Span<C>, ReservedWords);

impl<C: Clock> Clone for SharedOutbound<C> {
    fn clone(&self) -> Self {
        Self(self.0.clone(), ReservedWords::default())
    }
}

impl<C: Clock> Slice for SharedOutbound<C> {
    fn slice(&self, offset: usize, len_bytes: usize) -> Self {
        Self(self.0.slice(offset, len_bytes), ReservedWords::default())
    }
}

impl<C: Clock> Outbound for SharedOutbound<C> {
    #[inline]
    fn len_bytes(&self) -> usize {
        self.0.len_bytes
    }

    /// Coherent as the memory: programs get no other memory, and each store arrives after those before it.
    #[inline]
    fn coherence(&self) -> Coherence {
        Coherence::Coherent
    }

    #[inline]
    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        let at = self.0.checked_words(offset, WORD_BYTES);
        if self.0.is_word(at) {
            self.0.put_word(at, value, self.0.context.reserve(WORD_BYTES));
        } else {
            let due_ns = self.1.take().unwrap_or_else(|| self.0.context.reserve(WORD_BYTES));
            self.0.mark_lines(at, WORD_BYTES, due_ns);
            self.0.memory.store_u64(at, value, order);
        }
    }

    /// Stores the words as one packet.
    #[inline]
    fn store_line(&self, offset: usize, words: &[u64]) {
        assert_one_line(offset, words);
        let at = self.0.checked_words(offset, size_of_val(words));
        let due_ns = self.0.context.reserve(size_of_val(words));
        if self.0.is_word(at) {
            for (index, word) in words.iter().enumerate().rev() {
                self.0.put_word(at + index * WORD_BYTES, *word, due_ns);
            }
        } else {
            self.0.mark_lines(at, size_of_val(words), due_ns);
            self.0.memory.publish_words(at, words);
        }
    }

    #[inline]
    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        let at = self.0.checked(offset, len_bytes);
        let words_bytes = self.0.bytes_in_words(at, len_bytes);
        // SAFETY: the caller guarantees that `source` is readable for `len_bytes`. The two parts are disjoint and
        // together have that length.
        unsafe {
            self.0.write_words(at, source, words_bytes);
            if words_bytes < len_bytes {
                let rest_bytes = len_bytes - words_bytes;
                self.1.set(self.0.write_lines(at + words_bytes, source.add(words_bytes), rest_bytes));
            }
        }
    }

    /// `None`: stores through an address would have no arrival time.
    fn pointer(&self, offset: usize, len_bytes: usize) -> Option<NonNull<u8>> {
        self.0.checked(offset, len_bytes);
        None
    }

    fn prefetch_for_writes(&self, offset: usize, len_bytes: usize) {
        self.0.memory.prefetch_for_writes(self.0.checked(offset, len_bytes), len_bytes);
    }

    fn demote(&self, offset: usize, len_bytes: usize) {
        self.0.memory.demote(self.0.checked(offset, len_bytes), len_bytes);
    }

    /// Does nothing: a store that publishes has release order, and is reserved after its payload.
    #[inline]
    fn fence(&self) {}

    fn flush(&self) {
        self.0.context.flush();
    }
}

#[cfg(test)]
mod tests;
