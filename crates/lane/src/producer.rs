//! The sending end.

use crate::layout::Ring;
use crate::record::{HEADER_BYTES, INLINE_BYTES, RECORD_BYTES_MAX, Record, SLOT_BYTES, slots_of, tag};
use crate::{Corrupt, Layout};
use fabric::{Inbound, Outbound};
use std::ptr::NonNull;
use volmem::sync::{Ordering, fence};

const TAIL: usize = 0;
const CREDIT_SEEN: usize = 8;
const IN_BIG_RING: usize = 16;
const TAIL_LIMIT: usize = 24;

/// The sending end of a lane.
///
/// Its cursor lives in the sender's own window, so that processes which share the connection (after `fork`) share the position.
/// `&mut self` stands for "one at a time": whoever shares a producer must exclude the others. A violation garbles the stream and
/// nothing else.
#[derive(Debug)]
pub struct Producer<O, I> {
    outbound: O,
    inbound: I,
    layout: Layout,
    secret: u64,
}

/// A span reserved in place: fill it, then [`Producer::commit`].
#[derive(Debug, Clone, Copy)]
pub struct Reservation {
    /// Where to write; write only.
    pub pointer: NonNull<u8>,
    /// Bytes that may be written.
    pub len_bytes: usize,
}

impl<O: Outbound, I: Inbound> Producer<O, I> {
    /// Attaches to the lane that `layout` describes: `outbound` is the receiver's window, `inbound` the sender's own.
    /// Both ends must use the same `secret`. A fresh lane starts from zeroed windows.
    ///
    /// # Panics
    /// If the layout does not fit the windows.
    pub fn new(outbound: O, inbound: I, layout: Layout, secret: u64) -> Self {
        layout.check(inbound.len_bytes(), outbound.len_bytes());
        Self { outbound, inbound, layout, secret }
    }

    /// Sends as much of the `len_bytes` at `source` as there is room for; returns how much that was.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    ///
    /// # Safety
    /// `source` is readable for `len_bytes`.
    #[inline]
    pub unsafe fn write_from(&mut self, source: *const u8, len_bytes: usize) -> Result<usize, Corrupt> {
        let mut sent_bytes = 0;
        while sent_bytes < len_bytes {
            let rest_bytes = len_bytes - sent_bytes;
            let room_bytes = self.room_for(rest_bytes)?;
            if room_bytes == 0 {
                break;
            }
            let record_bytes = rest_bytes.min(room_bytes);
            // SAFETY: the caller's span, from what is not yet sent on.
            unsafe { self.publish_copy(source.add(sent_bytes), record_bytes) };
            sent_bytes += record_bytes;
        }
        Ok(sent_bytes)
    }

    /// Sends as much of `source` as there is room for; returns how much that was.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    pub fn write(&mut self, source: &[u8]) -> Result<usize, Corrupt> {
        // SAFETY: a slice is readable.
        unsafe { self.write_from(source.as_ptr(), source.len()) }
    }

    /// Reserves room for one record of up to `len_bytes_max` bytes, to be filled in place. `None` when there is no room now, or
    /// the window cannot be written in place.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    pub fn reserve(&mut self, len_bytes_max: usize) -> Result<Option<Reservation>, Corrupt> {
        let room_bytes = self.room_for(len_bytes_max)?;
        if room_bytes == 0 {
            return Ok(None);
        }
        let len_bytes = len_bytes_max.min(room_bytes);
        let start = self.ring().slot_offset(self.tail()) + HEADER_BYTES;
        Ok(self.outbound.pointer(start, len_bytes).map(|pointer| Reservation { pointer, len_bytes }))
    }

    /// Publishes the first `len_bytes` of the last reservation; zero gives it up.
    ///
    /// # Panics
    /// If more is committed than a record may carry at this place.
    pub fn commit(&mut self, len_bytes: usize) {
        if len_bytes == 0 {
            return;
        }
        let fits = len_bytes <= RECORD_BYTES_MAX && slots_of(len_bytes) <= self.ring().slots_to_end(self.tail());
        assert!(fits, "commit of {len_bytes} bytes was not reserved");
        self.publish(Record::Data(len_bytes), slots_of(len_bytes));
    }

    /// Says that nothing follows. Idempotent; needs no room.
    pub fn finish(&mut self) {
        self.outbound.fence();
        self.outbound.store_u64(self.layout.fin(), self.tail().wrapping_add(1), Ordering::Release);
    }

    /// Whether at least a quarter of the ring is free: the level at which a sleeping sender is woken.
    ///
    /// # Errors
    /// [`Corrupt`] if the receiver returned impossible credit.
    pub fn is_writable(&mut self) -> Result<bool, Corrupt> {
        if self.can_grow() {
            return Ok(true);
        }
        let ring = self.ring();
        let wanted = ring.slots / 4;
        if self.free_slots(ring, self.inbound_word(CREDIT_SEEN))? >= wanted {
            return Ok(true);
        }
        let credit = self.reload_credit()?;
        Ok(self.free_slots(ring, credit)? >= wanted)
    }

    /// Whether the receiver has consumed every byte sent.
    pub fn is_drained(&self) -> bool {
        self.inbound.load_u64(self.layout.credit(), Ordering::Acquire) == self.tail()
    }

    /// Slots sent so far: grows with every record.
    pub fn position(&self) -> u64 {
        self.tail()
    }

    /// Asks the receiver to ring when room has come back. Look at [`Producer::is_writable`] once more before sleeping.
    pub fn announce_sleep(&mut self) {
        self.outbound.store_u64(self.layout.producer_asleep(), 1, Ordering::Release);
        self.outbound.flush();
        fence(Ordering::SeqCst);
    }

    /// Takes [`Producer::announce_sleep`] back.
    pub fn cancel_sleep(&mut self) {
        self.outbound.store_u64(self.layout.producer_asleep(), 0, Ordering::Relaxed);
    }

    /// Whether the receiver sleeps and must be rung for what was sent before this call. Takes the request: ring once.
    #[inline]
    pub fn take_wake_request(&mut self) -> bool {
        fence(Ordering::SeqCst);
        let asleep = self.inbound.load_u64(self.layout.consumer_asleep(), Ordering::Relaxed) != 0;
        if asleep {
            self.inbound.store_u64(self.layout.consumer_asleep(), 0, Ordering::Relaxed);
        }
        asleep
    }

    /// Payload bytes that the next record can carry, moving to the big ring when `wanted_bytes` ask for it.
    #[inline]
    fn room_for(&mut self, wanted_bytes: usize) -> Result<usize, Corrupt> {
        if wanted_bytes <= INLINE_BYTES && self.tail() < self.inbound_word(TAIL_LIMIT) {
            return Ok(INLINE_BYTES);
        }
        self.room_by_credit(wanted_bytes)
    }

    #[cold]
    fn room_by_credit(&mut self, wanted_bytes: usize) -> Result<usize, Corrupt> {
        let ring = self.ring();
        // The small ring keeps one slot back, for the record that leaves it.
        let kept_slots = u64::from(self.can_grow());
        let free = |lane: &Self, credit| lane.free_slots(ring, credit).map(|slots| slots.saturating_sub(kept_slots));
        let mut free_slots = free(self, self.inbound_word(CREDIT_SEEN))?;
        if free_slots < slots_of(wanted_bytes.min(RECORD_BYTES_MAX)) {
            let credit = self.reload_credit()?;
            free_slots = free(self, credit)?;
        }
        if kept_slots == 1 && (slots_of(wanted_bytes) > ring.slots / 2 || free_slots < slots_of(wanted_bytes)) {
            self.publish(Record::Switch, 1);
            self.set_inbound_word(IN_BIG_RING, 1);
            self.set_inbound_word(TAIL_LIMIT, 0);
            return self.room_by_credit(wanted_bytes);
        }
        self.set_inbound_word(TAIL_LIMIT, self.tail().wrapping_add(free_slots));
        let slots = free_slots.min(ring.slots_to_end(self.tail()));
        Ok((slots as usize * SLOT_BYTES).saturating_sub(HEADER_BYTES).min(RECORD_BYTES_MAX))
    }

    #[inline]
    unsafe fn publish_copy(&mut self, source: *const u8, len_bytes: usize) {
        let slot = self.ring().slot_offset(self.tail());
        if len_bytes <= INLINE_BYTES {
            // SAFETY: the caller's span.
            unsafe { self.copy_inline(slot + HEADER_BYTES, source, len_bytes) };
        } else {
            // SAFETY: the caller's span.
            unsafe { self.outbound.write_from(slot + HEADER_BYTES, source, len_bytes) };
        }
        self.publish(Record::Data(len_bytes), slots_of(len_bytes));
    }

    /// A small payload goes as whole words: all stores of a small record hit one line, and no library call is made.
    #[inline]
    unsafe fn copy_inline(&self, offset: usize, source: *const u8, len_bytes: usize) {
        const WORD_BYTES: usize = size_of::<u64>();
        let mut words = [0_u64; INLINE_BYTES / WORD_BYTES];
        // SAFETY: the caller's span, and at most `INLINE_BYTES`.
        unsafe { std::ptr::copy_nonoverlapping(source, words.as_mut_ptr().cast::<u8>(), len_bytes) };
        for (index, word) in words.iter().enumerate().take(len_bytes.div_ceil(WORD_BYTES)) {
            self.outbound.store_u64(offset + index * WORD_BYTES, *word, Ordering::Relaxed);
        }
    }

    /// Makes a record visible: header, fence, tag. The payload is in place.
    #[inline]
    fn publish(&mut self, record: Record, slots: u64) {
        let position = self.tail();
        let slot = self.ring().slot_offset(position);
        self.outbound.store_u64(slot + 8, record.encode(), Ordering::Relaxed);
        self.outbound.fence();
        self.outbound.store_u64(slot, tag(self.secret, position), Ordering::Release);
        self.set_inbound_word(TAIL, position.wrapping_add(slots));
    }

    fn free_slots(&self, ring: Ring, credit: u64) -> Result<u64, Corrupt> {
        let used = self.tail().wrapping_sub(credit);
        // After a switch, what is unread in the small ring counts too: never more than the big ring holds.
        ring.slots.checked_sub(used).ok_or(Corrupt { what: "credit", value: credit })
    }

    fn reload_credit(&mut self) -> Result<u64, Corrupt> {
        let credit = self.inbound.load_u64(self.layout.credit(), Ordering::Acquire);
        let seen = self.inbound_word(CREDIT_SEEN);
        let advance = credit.wrapping_sub(seen);
        if advance > self.tail().wrapping_sub(seen) {
            return Err(Corrupt { what: "credit", value: credit });
        }
        self.set_inbound_word(CREDIT_SEEN, credit);
        Ok(credit)
    }

    fn can_grow(&self) -> bool {
        self.layout.big_slots != 0 && self.inbound_word(IN_BIG_RING) == 0
    }

    #[inline]
    fn ring(&self) -> Ring {
        Ring::of(&self.layout, self.inbound_word(IN_BIG_RING) != 0)
    }

    #[inline]
    fn tail(&self) -> u64 {
        self.inbound_word(TAIL)
    }

    #[inline]
    fn inbound_word(&self, field: usize) -> u64 {
        self.inbound.load_u64(self.layout.producer_cursor() + field, Ordering::Relaxed)
    }

    #[inline]
    fn set_inbound_word(&mut self, field: usize, value: u64) {
        self.inbound.store_u64(self.layout.producer_cursor() + field, value, Ordering::Relaxed);
    }
}
