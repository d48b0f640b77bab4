//! The two windows of a timed link, or of a part of one.

use super::clock::{Clock, Monotonic};
use super::journal::{DUE, Plan, Reader, Writer};
use super::timing::{Costs, Pace};
use super::{Parts, Setup, TimedDoorbell, TimedError};
use crate::memory_link::is_window_size;
use crate::window::{assert_one_line, assert_whole_lines};
use crate::{Coherence, Doorbell, Epoch, Inbound, Outbound, Slice};
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use volmem::sync::{Ordering, fence};
use volmem::{CACHE_LINE_BYTES, Region};

/// How long a store waits for a peer that does not look at its full journal, before the link is lost.
pub const STALL_NS_MAX: u64 = 2_000_000_000;
/// Steps of that wait.
const STALL_STEP_NS_MIN: u64 = 1_000;
const STALL_STEP_NS_MAX: u64 = 200_000;

const OFFSET_BITS: u32 = 48;
const WORD_BYTES: usize = size_of::<u64>();
/// No record's tag: tags are counted from one.
const NO_TAG: u64 = u64::MAX;

/// The two windows of a part of a link, made of any two windows of a wrapped link: its own, or slices of them. Whoever
/// makes them again, for instance after training, first sees to it that the wrapped ones are zero at both ends.
pub struct Windows<L: Parts, C: Clock = Monotonic>(Arc<Shared<L, C>>);

impl<L: Parts> Windows<L> {
    /// Timed windows in a wrapped link that is up; `doorbell` wakes the peer when it must look.
    ///
    /// # Errors
    /// [`TimedError`].
    pub fn new(
        inbound: L::Inbound,
        outbound: L::Outbound,
        doorbell: L::Doorbell,
        setup: Setup,
    ) -> Result<Self, TimedError> {
        Self::with_clock(inbound, outbound, doorbell, setup, Monotonic)
    }
}

impl<L: Parts, C: Clock> Windows<L, C> {
    /// As [`Windows::new`], by another clock.
    ///
    /// # Errors
    /// [`TimedError`].
    pub fn with_clock(
        inbound: L::Inbound,
        outbound: L::Outbound,
        doorbell: L::Doorbell,
        setup: Setup,
        clock: C,
    ) -> Result<Self, TimedError> {
        let windows = Self::idle(inbound, outbound, doorbell, setup, clock)?;
        windows.begin(Epoch(1));
        Ok(windows)
    }

    /// Windows that carry nothing before they [begin](Self::begin).
    pub(super) fn idle(
        inbound: L::Inbound,
        outbound: L::Outbound,
        doorbell: L::Doorbell,
        setup: Setup,
        clock: C,
    ) -> Result<Self, TimedError> {
        Shared::new(inbound, outbound, doorbell, setup, clock).map(|shared| Self(Arc::new(shared)))
    }

    /// This node's window.
    pub fn inbound(&self) -> TimedInbound<L, C> {
        let inbound = self.0.lock_reader().inbound().clone();
        TimedInbound { window: self.0.window.clone(), inbound, shared: self.0.clone() }
    }

    /// The peer's window.
    pub fn outbound(&self) -> TimedOutbound<L, C> {
        TimedOutbound { shared: self.0.clone(), offset: 0, len_bytes: self.0.window.len_bytes() }
    }

    /// A doorbell whose rings arrive after the stores through these windows. Where several parts of a link share one
    /// bell, whoever it wakes settles each of its parts: [`Windows::settle`].
    pub fn doorbell(&self, inner: L::Doorbell) -> TimedDoorbell<L, C> {
        TimedDoorbell { shared: self.0.clone(), inner }
    }

    /// Waits until the peer's last ring is due: what it stored before has arrived then.
    pub fn settle(&self) {
        self.0.settle();
    }

    /// Whether the peer wrote nonsense, or did not look for too long: these windows carry nothing any more.
    pub fn is_lost(&self) -> bool {
        self.0.is_lost.load(Ordering::Acquire)
    }

    /// Begins an epoch, if it has not begun: with an empty journal, and a window of zeros.
    pub(super) fn begin(&self, epoch: Epoch) {
        if self.0.epoch.load(Ordering::Acquire) == epoch.0 {
            return;
        }
        let mut writer = self.0.lock_writer();
        let mut reader = self.0.lock_reader();
        writer.0.reset();
        reader.reset();
        self.0.expected.store(1, Ordering::Release);
        self.0.epoch.store(epoch.0, Ordering::Release);
    }

    /// Ends the epoch: what is stored from now on goes nowhere, what is under way stays there.
    pub(super) fn end(&self) {
        let _writer = self.0.lock_writer();
        let _reader = self.0.lock_reader();
        self.0.epoch.store(Epoch::NONE.0, Ordering::Release);
        self.0.expected.store(NO_TAG, Ordering::Release);
        self.0.is_lost.store(false, Ordering::Release);
    }
}

impl<L: Parts, C: Clock> fmt::Debug for Windows<L, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Windows({} bytes, {:?})", self.0.window.len_bytes(), self.0.costs)
    }
}

/// Held by all handles of a pair of windows. Locks are taken in the order of the fields.
pub(super) struct Shared<L: Parts, C: Clock> {
    /// With the bell that wakes a peer whose journal is full.
    writer: Mutex<(Writer<L>, L::Doorbell)>,
    reader: Mutex<Reader<L>>,
    /// Tag of the next record.
    expected: AtomicU64,
    /// The epoch that has begun, or none.
    epoch: AtomicU32,
    is_lost: AtomicBool,
    /// What the reader has put together.
    window: Region,
    plan_in: Plan,
    costs: Costs,
    pace: Pace,
    clock: C,
}

impl<L: Parts, C: Clock> Shared<L, C> {
    fn new(
        inbound: L::Inbound,
        outbound: L::Outbound,
        doorbell: L::Doorbell,
        setup: Setup,
        clock: C,
    ) -> Result<Self, TimedError> {
        let Setup { window_bytes, timing, pace } = setup;
        let costs = Costs::new(timing)?;
        if !is_window_size(window_bytes) || window_bytes >> OFFSET_BITS != 0 {
            return Err(TimedError::WindowSize { window_bytes });
        }
        let plan = |found_bytes| {
            let advised_bytes = Plan::memory_bytes(window_bytes, costs.piece_bytes);
            Plan::of(found_bytes, costs.piece_bytes).ok_or(TimedError::Memory { found_bytes, advised_bytes })
        };
        let (plan_in, plan_out) = (plan(inbound.len_bytes())?, plan(outbound.len_bytes())?);
        let window = Region::heap(window_bytes);
        let writer = Writer::new(outbound.clone(), inbound.clone(), plan_out);
        let reader = Reader::new(inbound, outbound, plan_in, window.clone(), costs.piece_bytes);
        Ok(Self {
            writer: Mutex::new((writer, doorbell)),
            reader: Mutex::new(reader),
            expected: AtomicU64::new(NO_TAG),
            epoch: AtomicU32::new(Epoch::NONE.0),
            is_lost: AtomicBool::new(false),
            window,
            plan_in,
            costs,
            pace,
            clock,
        })
    }

    /// A panic elsewhere is somebody else's; a journal is whole after each step.
    fn lock_writer(&self) -> MutexGuard<'_, (Writer<L>, L::Doorbell)> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_reader(&self) -> MutexGuard<'_, Reader<L>> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn carries(&self) -> bool {
        self.epoch.load(Ordering::Acquire) != Epoch::NONE.0 && !self.is_lost.load(Ordering::Acquire)
    }

    /// Sends a store on its way, in pieces.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes`.
    unsafe fn store(&self, offset: usize, source: *const u8, len_bytes: usize) {
        // The way begins with the call: what the emulation does from here on is hidden in it.
        let mut begun_ns = self.clock.now_ns();
        let mut writer = self.lock_writer();
        for at in (0..len_bytes).step_by(self.costs.piece_bytes) {
            let piece_bytes = self.costs.piece_bytes.min(len_bytes - at);
            if !self.carries() {
                return;
            }
            if !writer.0.has_room(piece_bytes) {
                if !self.wait_for_room(&mut writer, piece_bytes) {
                    return;
                }
                begun_ns = self.clock.now_ns();
            }
            // SAFETY: the caller's, from what is not yet sent on.
            unsafe {
                writer.0.append((&self.costs, &self.pace), begun_ns, offset + at, source.add(at), piece_bytes);
            }
            if at + piece_bytes < len_bytes {
                begun_ns = self.clock.now_ns();
            }
        }
    }

    /// The peer is woken to look at its journal, and this end's is looked at: the peer may wait for the same.
    #[cold]
    fn wait_for_room(&self, (writer, doorbell): &mut (Writer<L>, L::Doorbell), len_bytes: usize) -> bool {
        let begun_ns = self.clock.now_ns();
        let mut step_ns = STALL_STEP_NS_MIN;
        loop {
            if writer.load_credit().is_err() {
                self.lose();
                return false;
            }
            if writer.has_room(len_bytes) {
                return true;
            }
            let now_ns = self.clock.now_ns();
            if now_ns.saturating_sub(begun_ns) > STALL_NS_MAX {
                self.lose();
                return false;
            }
            doorbell.ring();
            self.pump(now_ns);
            self.clock.wait_until(now_ns + step_ns);
            step_ns = (step_ns * 2).min(STALL_STEP_NS_MAX);
        }
    }

    fn lose(&self) {
        self.is_lost.store(true, Ordering::Release);
        self.expected.store(NO_TAG, Ordering::Release);
    }

    /// Puts what is due into the window. It was `now_ns` a moment ago.
    fn pump(&self, now_ns: u64) {
        let mut reader = self.lock_reader();
        if self.carries() && reader.pump(now_ns, &self.clock, &self.expected).is_err() {
            self.lose();
        }
    }

    pub(super) fn announce_ring(&self) {
        let mut writer = self.lock_writer();
        if self.carries() {
            writer.0.announce_ring(&self.costs, &self.pace, self.clock.now_ns());
        }
    }

    pub(super) fn settle(&self) {
        if !self.carries() {
            return;
        }
        let due_ns = self.lock_reader().ring_due_ns(self.clock.now_ns(), self.costs.one_way_ns);
        self.clock.wait_until(due_ns);
        self.pump(due_ns);
    }

    /// A read that follows the stores to the peer, and its answer. What was stored late by a thread that was held up
    /// counts from when it was there to be seen.
    fn flush(&self) {
        let due_ns = {
            let writer = self.lock_writer();
            if !self.carries() {
                return;
            }
            writer.0.flush();
            writer.0.due_ns_last()
        };
        fence(Ordering::SeqCst);
        self.clock.wait_until(due_ns.max(self.clock.now_ns() + self.costs.one_way_ns) + self.costs.one_way_ns);
    }
}

/// This node's window: its loads show what has arrived.
pub struct TimedInbound<L: Parts, C: Clock = Monotonic> {
    window: Region,
    inbound: L::Inbound,
    shared: Arc<Shared<L, C>>,
}

impl<L: Parts, C: Clock> TimedInbound<L, C> {
    /// Lets arrive what is due: one look at a line when there is nothing.
    #[inline]
    fn arrive(&self) {
        let expected = self.shared.expected.load(Ordering::Acquire);
        let record = self.shared.plan_in.record(expected.wrapping_sub(1));
        self.inbound.invalidate(record, CACHE_LINE_BYTES);
        if self.inbound.load_u64(record, Ordering::Acquire) != expected || expected == NO_TAG {
            return;
        }
        let due_ns = self.inbound.load_u64(record + DUE, Ordering::Relaxed);
        let now_ns = self.shared.clock.now_ns();
        if due_ns <= now_ns {
            self.shared.pump(now_ns);
        }
    }
}

impl<L: Parts, C: Clock> Clone for TimedInbound<L, C> {
    fn clone(&self) -> Self {
        Self { window: self.window.clone(), inbound: self.inbound.clone(), shared: self.shared.clone() }
    }
}

impl<L: Parts, C: Clock> Slice for TimedInbound<L, C> {
    fn slice(&self, offset: usize, len_bytes: usize) -> Self {
        assert_whole_lines(offset, len_bytes);
        Self { window: self.window.sub(offset, len_bytes), ..self.clone() }
    }
}

impl<L: Parts, C: Clock> Inbound for TimedInbound<L, C> {
    #[inline]
    fn len_bytes(&self) -> usize {
        self.window.len_bytes()
    }

    #[inline]
    fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
        self.arrive();
        self.window.load_u64(offset, order)
    }

    #[inline]
    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        self.window.store_u64(offset, value, order);
    }

    #[inline]
    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        self.arrive();
        // SAFETY: the caller's.
        unsafe { self.window.read_to(offset, destination, len_bytes) }
    }

    #[inline]
    fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8> {
        self.arrive();
        self.window.pointer(offset, len_bytes)
    }
}

/// The peer's window, a way off.
pub struct TimedOutbound<L: Parts, C: Clock = Monotonic> {
    shared: Arc<Shared<L, C>>,
    offset: usize,
    len_bytes: usize,
}

impl<L: Parts, C: Clock> TimedOutbound<L, C> {
    /// Where the span begins in the whole window.
    #[inline]
    fn checked(&self, offset: usize, len_bytes: usize) -> usize {
        let inside = offset <= self.len_bytes && len_bytes <= self.len_bytes - offset;
        assert!(inside, "span {offset}+{len_bytes} outside a window of {} bytes", self.len_bytes);
        self.offset + offset
    }

    #[inline]
    fn checked_words(&self, offset: usize, len_bytes: usize) -> usize {
        assert!(offset.is_multiple_of(WORD_BYTES), "word at unaligned offset {offset}");
        self.checked(offset, len_bytes)
    }
}

impl<L: Parts, C: Clock> Clone for TimedOutbound<L, C> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), ..*self }
    }
}

impl<L: Parts, C: Clock> Slice for TimedOutbound<L, C> {
    fn slice(&self, offset: usize, len_bytes: usize) -> Self {
        assert_whole_lines(offset, len_bytes);
        Self { shared: self.shared.clone(), offset: self.checked(offset, len_bytes), len_bytes }
    }
}

impl<L: Parts, C: Clock> Outbound for TimedOutbound<L, C> {
    #[inline]
    fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// As the mapping of a bridge: each store is a packet, and what belongs together is stored together.
    #[inline]
    fn coherence(&self) -> Coherence {
        Coherence::WriteCombined
    }

    fn store_u64(&self, offset: usize, value: u64, _order: Ordering) {
        let at = self.checked_words(offset, WORD_BYTES);
        // SAFETY: a word is readable.
        unsafe { self.shared.store(at, (&raw const value).cast(), WORD_BYTES) };
    }

    /// One packet, and one record of the journal.
    fn store_line(&self, offset: usize, words: &[u64]) {
        assert_one_line(offset, words);
        let at = self.checked_words(offset, size_of_val(words));
        // SAFETY: a slice is readable.
        unsafe { self.shared.store(at, words.as_ptr().cast(), size_of_val(words)) };
    }

    /// The same: stores keep their order.
    fn store_line_fenced(&self, offset: usize, words: &[u64]) {
        self.store_line(offset, words);
    }

    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        let at = self.checked(offset, len_bytes);
        // SAFETY: the caller's.
        unsafe { self.shared.store(at, source, len_bytes) };
    }

    /// None: every store has to come by here.
    fn pointer(&self, offset: usize, len_bytes: usize) -> Option<NonNull<u8>> {
        self.checked(offset, len_bytes);
        None
    }

    /// Nothing to do: stores keep their order.
    #[inline]
    fn fence(&self) {}

    fn flush(&self) {
        self.shared.flush();
    }
}
