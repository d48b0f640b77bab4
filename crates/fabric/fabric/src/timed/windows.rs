//! The two windows of a timed link, or of a part of one.

use super::clock::{Clock, Monotonic};
use super::error::TimedError;
use super::journal::{DUE, JournalLayout, Reader, Writer};
use super::timing::{LinkTiming, Pacer, PacketCosts};
use super::window_types::WindowTypes;
use crate::memory_link::is_window_size;
use crate::window::{assert_one_line, assert_whole_lines};
use crate::{Coherence, Doorbell, Epoch, Inbound, Outbound, Slice, WaitOutcome};
use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use volmem::sync::{Ordering, fence};
use volmem::{CACHE_LINE_BYTES, Region};

/// How to make timed windows.
#[derive(Debug, Clone)]
pub struct TimedConfig {
    /// Bytes of the window. Both endpoints have the same value.
    pub window_bytes: usize,
    /// How long stores take.
    pub timing: LinkTiming,
    /// The pacer of the link that the windows belong to.
    pub pacer: Pacer,
}

/// Returns the recommended size of the wrapped window for a timed window of `window_bytes`.
///
/// # Errors
/// [`TimedError::Timing`].
pub fn memory_bytes(window_bytes: usize, timing: LinkTiming) -> Result<usize, TimedError> {
    Ok(JournalLayout::memory_bytes(window_bytes, PacketCosts::new(timing)?.piece_bytes))
}

/// How long a store waits for a peer that does not read its full journal, before the link is lost.
pub const STALL_NS_MAX: u64 = 2_000_000_000;
/// First and longest step of that wait.
const STALL_STEP_NS_MIN: u64 = 1_000;
const STALL_STEP_NS_MAX: u64 = 200_000;

const OFFSET_BITS: u32 = 48;
const WORD_BYTES: usize = size_of::<u64>();
/// Tag of no record.
const NO_TAG: u64 = u64::MAX;

/// The two windows of a part of a link, made of any two windows of a wrapped link: its own, or slices of them. Before
/// they are made again, for instance after training, the wrapped windows must be zeroed at both endpoints.
pub struct TimedWindows<L: WindowTypes, C: Clock = Monotonic>(Arc<Shared<L, C>>);

impl<L: WindowTypes> TimedWindows<L> {
    /// Makes timed windows in a wrapped link that is up. `doorbell` wakes the peer when its journal is full.
    ///
    /// # Errors
    /// [`TimedError`].
    pub fn new(
        inbound: L::Inbound,
        outbound: L::Outbound,
        doorbell: L::Doorbell,
        config: TimedConfig,
    ) -> Result<Self, TimedError> {
        Self::with_clock(inbound, outbound, doorbell, config, Monotonic)
    }
}

impl<L: WindowTypes, C: Clock> TimedWindows<L, C> {
    /// Makes windows like [`TimedWindows::new`], with another clock.
    ///
    /// # Errors
    /// [`TimedError`].
    pub fn with_clock(
        inbound: L::Inbound,
        outbound: L::Outbound,
        doorbell: L::Doorbell,
        config: TimedConfig,
        clock: C,
    ) -> Result<Self, TimedError> {
        let windows = Self::idle(inbound, outbound, doorbell, config, clock)?;
        windows.begin(Epoch(1));
        Ok(windows)
    }

    /// Makes windows that carry nothing before they [begin](Self::begin).
    pub(super) fn idle(
        inbound: L::Inbound,
        outbound: L::Outbound,
        doorbell: L::Doorbell,
        config: TimedConfig,
        clock: C,
    ) -> Result<Self, TimedError> {
        Shared::new(inbound, outbound, doorbell, config, clock).map(|shared| Self(Arc::new(shared)))
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
    /// doorbell, a process that it wakes calls [`TimedWindows::wait_for_arrivals`] for each of its parts.
    pub fn doorbell(&self, inner: L::Doorbell) -> TimedDoorbell<L, C> {
        TimedDoorbell { shared: self.0.clone(), inner }
    }

    /// Waits until the peer's last ring is due. What the peer stored before it has arrived then.
    pub fn wait_for_arrivals(&self) {
        self.0.wait_for_arrivals();
    }

    /// Whether the peer violated the protocol, or did not load for [`STALL_NS_MAX`]. Lost windows carry nothing.
    pub fn is_lost(&self) -> bool {
        self.0.is_lost.load(Ordering::Acquire)
    }

    /// Begins an epoch, if it has not begun, with an empty journal and a zeroed window.
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

    /// Ends the epoch: later stores are dropped, and stores in flight do not arrive.
    pub(super) fn end(&self) {
        let _writer = self.0.lock_writer();
        let _reader = self.0.lock_reader();
        self.0.epoch.store(Epoch::NONE.0, Ordering::Release);
        self.0.expected.store(NO_TAG, Ordering::Release);
        self.0.is_lost.store(false, Ordering::Release);
    }
}

impl<L: WindowTypes, C: Clock> fmt::Debug for TimedWindows<L, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TimedWindows({} bytes, {:?})", self.0.window.len_bytes(), self.0.costs)
    }
}

/// State that all handles of a pair of windows share. Locks are taken in the order of the fields.
pub(super) struct Shared<L: WindowTypes, C: Clock> {
    /// The journal, and the doorbell that wakes a peer whose journal is full.
    writer: Mutex<(Writer<L>, L::Doorbell)>,
    reader: Mutex<Reader<L>>,
    /// Tag of the next record to apply.
    expected: AtomicU64,
    /// The epoch that has begun, or [`Epoch::NONE`].
    epoch: AtomicU32,
    is_lost: AtomicBool,
    /// The window that the journal is applied to.
    window: Region,
    inbound_layout: JournalLayout,
    costs: PacketCosts,
    pacer: Pacer,
    clock: C,
}

impl<L: WindowTypes, C: Clock> Shared<L, C> {
    fn new(
        inbound: L::Inbound,
        outbound: L::Outbound,
        doorbell: L::Doorbell,
        config: TimedConfig,
        clock: C,
    ) -> Result<Self, TimedError> {
        let TimedConfig { window_bytes, timing, pacer } = config;
        let costs = PacketCosts::new(timing)?;
        if !is_window_size(window_bytes) || window_bytes >> OFFSET_BITS != 0 {
            return Err(TimedError::WindowSize { window_bytes });
        }
        let plan = |found_bytes| {
            let advised_bytes = JournalLayout::memory_bytes(window_bytes, costs.piece_bytes);
            JournalLayout::of(found_bytes, costs.piece_bytes).ok_or(TimedError::Memory { found_bytes, advised_bytes })
        };
        let (inbound_layout, plan_out) = (plan(inbound.len_bytes())?, plan(outbound.len_bytes())?);
        let window = Region::heap(window_bytes);
        let writer = Writer::new(outbound.clone(), inbound.clone(), plan_out);
        let reader = Reader::new(inbound, outbound, inbound_layout, window.clone(), costs.piece_bytes);
        Ok(Self {
            writer: Mutex::new((writer, doorbell)),
            reader: Mutex::new(reader),
            expected: AtomicU64::new(NO_TAG),
            epoch: AtomicU32::new(Epoch::NONE.0),
            is_lost: AtomicBool::new(false),
            window,
            inbound_layout,
            costs,
            pacer,
            clock,
        })
    }

    /// A poisoned lock is ignored: the journal is consistent after each step.
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

    /// Appends a store to the journal, in pieces.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes`.
    unsafe fn store(&self, offset: usize, source: *const u8, len_bytes: usize) {
        // The delay begins with the call, so it hides the time that the emulation takes.
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
            // SAFETY: `at + piece_bytes` is at most `len_bytes`, for which the caller guarantees that `source` is
            // readable.
            unsafe {
                writer.0.append((&self.costs, &self.pacer), begun_ns, offset + at, source.add(at), piece_bytes);
            }
            if at + piece_bytes < len_bytes {
                begun_ns = self.clock.now_ns();
            }
        }
    }

    /// Waits for room in the journal. Wakes the peer to read its journal, and applies this endpoint's journal: the peer
    /// may wait for the same.
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

    /// Applies what is due. `now_ns` is a recent time.
    fn pump(&self, now_ns: u64) {
        let mut reader = self.lock_reader();
        if self.carries() && reader.pump(now_ns, &self.clock, &self.expected).is_err() {
            self.lose();
        }
    }

    pub(super) fn announce_ring(&self) {
        let mut writer = self.lock_writer();
        if self.carries() {
            writer.0.announce_ring(&self.costs, &self.pacer, self.clock.now_ns());
        }
    }

    pub(super) fn wait_for_arrivals(&self) {
        if !self.carries() {
            return;
        }
        let due_ns = self.lock_reader().ring_due_ns(self.clock.now_ns(), self.costs.one_way_ns);
        self.clock.wait_until(due_ns);
        self.pump(due_ns);
    }

    /// Waits as long as a read across the link: a request behind the stores to the peer, and its completion. A store
    /// that was delayed by the emulation counts from when it became visible.
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

/// This node's window. Loads return what has arrived.
pub struct TimedInbound<L: WindowTypes, C: Clock = Monotonic> {
    window: Region,
    inbound: L::Inbound,
    shared: Arc<Shared<L, C>>,
}

impl<L: WindowTypes, C: Clock> TimedInbound<L, C> {
    /// Applies what is due. Costs a load of one line when there is nothing.
    #[inline]
    fn apply_due(&self) {
        let expected = self.shared.expected.load(Ordering::Acquire);
        let record = self.shared.inbound_layout.record(expected.wrapping_sub(1));
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

impl<L: WindowTypes, C: Clock> Clone for TimedInbound<L, C> {
    fn clone(&self) -> Self {
        Self { window: self.window.clone(), inbound: self.inbound.clone(), shared: self.shared.clone() }
    }
}

impl<L: WindowTypes, C: Clock> Slice for TimedInbound<L, C> {
    fn slice(&self, offset: usize, len_bytes: usize) -> Self {
        assert_whole_lines(offset, len_bytes);
        Self { window: self.window.sub(offset, len_bytes), ..self.clone() }
    }
}

impl<L: WindowTypes, C: Clock> Inbound for TimedInbound<L, C> {
    #[inline]
    fn len_bytes(&self) -> usize {
        self.window.len_bytes()
    }

    #[inline]
    fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
        self.apply_due();
        self.window.load_u64(offset, order)
    }

    #[inline]
    fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        self.window.store_u64(offset, value, order);
    }

    #[inline]
    unsafe fn read_to(&self, offset: usize, destination: *mut u8, len_bytes: usize) {
        self.apply_due();
        // SAFETY: the caller guarantees that `destination` is writable for `len_bytes` and outside the window.
        unsafe { self.window.read_to(offset, destination, len_bytes) }
    }

    #[inline]
    fn pointer(&self, offset: usize, len_bytes: usize) -> NonNull<u8> {
        self.apply_due();
        self.window.pointer(offset, len_bytes)
    }
}

/// The peer's window. Stores arrive after the delay.
pub struct TimedOutbound<L: WindowTypes, C: Clock = Monotonic> {
    shared: Arc<Shared<L, C>>,
    offset: usize,
    len_bytes: usize,
}

impl<L: WindowTypes, C: Clock> TimedOutbound<L, C> {
    /// Offset in the whole window of a span of this slice.
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

impl<L: WindowTypes, C: Clock> Clone for TimedOutbound<L, C> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), ..*self }
    }
}

impl<L: WindowTypes, C: Clock> Slice for TimedOutbound<L, C> {
    fn slice(&self, offset: usize, len_bytes: usize) -> Self {
        assert_whole_lines(offset, len_bytes);
        Self { shared: self.shared.clone(), offset: self.checked(offset, len_bytes), len_bytes }
    }
}

impl<L: WindowTypes, C: Clock> Outbound for TimedOutbound<L, C> {
    #[inline]
    fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Like the mapping of a PCIe bridge: each store is a packet, so words that belong together are stored together.
    #[inline]
    fn coherence(&self) -> Coherence {
        Coherence::WriteCombined
    }

    fn store_u64(&self, offset: usize, value: u64, _order: Ordering) {
        let at = self.checked_words(offset, WORD_BYTES);
        // SAFETY: the pointer is to a local word of `WORD_BYTES`.
        unsafe { self.shared.store(at, (&raw const value).cast(), WORD_BYTES) };
    }

    /// Stores the words as one packet and one record of the journal.
    fn store_line(&self, offset: usize, words: &[u64]) {
        assert_one_line(offset, words);
        let at = self.checked_words(offset, size_of_val(words));
        // SAFETY: the pointer and the length are those of a slice.
        unsafe { self.shared.store(at, words.as_ptr().cast(), size_of_val(words)) };
    }

    /// Needs no fence: stores arrive in order.
    fn store_line_fenced(&self, offset: usize, words: &[u64]) {
        self.store_line(offset, words);
    }

    unsafe fn write_from(&self, offset: usize, source: *const u8, len_bytes: usize) {
        let at = self.checked(offset, len_bytes);
        // SAFETY: the caller guarantees that `source` is readable for `len_bytes`.
        unsafe { self.shared.store(at, source, len_bytes) };
    }

    /// `None`: stores through an address would not go through the journal.
    fn pointer(&self, offset: usize, len_bytes: usize) -> Option<NonNull<u8>> {
        self.checked(offset, len_bytes);
        None
    }

    /// Does nothing: stores arrive in order.
    #[inline]
    fn fence(&self) {}

    fn flush(&self) {
        self.shared.flush();
    }
}

/// A doorbell whose rings arrive after the stores before them.
pub struct TimedDoorbell<L: WindowTypes, C: Clock = Monotonic> {
    shared: Arc<Shared<L, C>>,
    inner: L::Doorbell,
}

impl<L: WindowTypes, C: Clock> Clone for TimedDoorbell<L, C> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), inner: self.inner.clone() }
    }
}

impl<L: WindowTypes, C: Clock> Doorbell for TimedDoorbell<L, C> {
    /// Rings the wrapped doorbell at once. The waiter that it wakes waits until the ring is due.
    fn ring(&self) {
        self.shared.announce_ring();
        self.inner.ring();
    }

    /// Waits for a ring, and then until the stores before it have arrived.
    fn wait(&self, timeout: Option<Duration>) -> WaitOutcome {
        let outcome = self.inner.wait(timeout);
        if outcome == WaitOutcome::Rung {
            self.shared.wait_for_arrivals();
        }
        outcome
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.descriptor()
    }
}
