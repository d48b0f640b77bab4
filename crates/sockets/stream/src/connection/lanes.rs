//! The lanes of the two directions, in the memory that the two ends have exchanged.

use crate::kernel::Tcp;
use fabric::{Inbound, MemoryInbound, MemoryOutbound, Outbound, shm};
use lane::{Consumer, Corrupt, LargerRings, Layout, Producer, UrgentHandling};
use meeting::{Memory, Met, Offer, Reason};
use path::Word;
use rustix::io::Errno;
use socket::descriptor::hidden;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use volmem::sync::Ordering;
use volmem::{Mapping, Region};

/// Offset of the published words, eight bytes each.
const WORDS: usize = 0;
const BEGINS_AT: usize = WORDS + 8 * 8;
const ENDS_IN: usize = WORDS + 8 * 9;
const CLOSED: usize = WORDS + 8 * 10;

const SMALL_OFFSET: usize = 4096;
const LAYOUT: Layout = Layout {
    forward_offset: 512,
    back_offset: 1024,
    small_offset: SMALL_OFFSET,
    small_slots: 128,
    small_slots_used: 115,
    big_offset: 0,
    big_slots: 0,
    elastic: Some(LargerRings::in_a_row(16384)),
};

/// The memory of this end.
pub(super) struct OwnMemory {
    /// Present until it was passed to the peer: its number is one that the program would get.
    memfd: Option<OwnedFd>,
    mapping: Arc<Mapping>,
    memory: Memory,
}

impl OwnMemory {
    /// Creates the memory of an end.
    pub fn create(_tcp: Tcp) -> Result<Self, Errno> {
        let (memfd, mapping) = shm::create(LAYOUT.window_bytes()).map_err(|_| Errno::NOMEM)?;
        let mut secret = [0_u8; 8];
        rustix::rand::getrandom(&mut secret, rustix::rand::GetRandomFlags::empty())?;
        let secret = u64::from_ne_bytes(secret) | 1;
        let memory = Memory { bytes: LAYOUT.window_bytes() as u64, secret };
        Ok(Self { memfd: Some(memfd), mapping: Arc::new(mapping), memory })
    }

    /// Calls `pass` with what is passed to the peer, and closes the descriptor.
    pub fn pass<R>(&mut self, pass: impl FnOnce(&Offer<'_>) -> Result<R, Reason>) -> Result<R, Reason> {
        let memfd = self.memfd.take().ok_or(Reason::Descriptors)?;
        let passed = pass(&Offer { descriptor: memfd.as_fd(), memory: self.memory });
        hidden::close(memfd);
        passed
    }
}

/// Returns the lanes of an end that has met the other.
pub(super) fn of_meeting(own: OwnMemory, met: &Met) -> Result<(OutLane, InLane), Errno> {
    let peer = shm::open(met.peer_memory.as_fd(), LAYOUT.window_bytes()).map_err(|_| Errno::INVAL)?;
    let inbound = MemoryInbound::new(Region::of_mapping(own.mapping));
    let outbound = MemoryOutbound::new(Region::of_mapping(Arc::new(peer)));
    let mut producer = Producer::new(outbound.clone(), inbound.clone(), LAYOUT, met.incoming.secret);
    let mut consumer = Consumer::new(inbound.clone(), outbound.clone(), LAYOUT, met.outgoing.secret);
    producer.set_capacity(CAPACITY);
    consumer.set_capacity(CAPACITY);
    let outgoing = OutLane { producer, inbound: inbound.clone(), outbound: outbound.clone() };
    Ok((outgoing, InLane { consumer, inbound, outbound }))
}

/// Each end's share of a lane's capacity.
const CAPACITY: usize = 3 << 20;

fn offset_of(word: Word) -> usize {
    WORDS + 8 * word as usize
}

/// The lane that this end writes.
pub(super) struct OutLane {
    producer: Producer<MemoryOutbound, MemoryInbound>,
    inbound: MemoryInbound,
    outbound: MemoryOutbound,
}

impl OutLane {
    #[inline(always)]
    pub fn load(&self, word: Word) -> u64 {
        self.inbound.load_u64(offset_of(word), Ordering::Acquire)
    }

    pub fn store(&mut self, word: Word, value: u64) {
        self.outbound.store_u64(offset_of(word), value, Ordering::Release);
    }

    /// Begins a move of the direction to the lane.
    pub fn begin(&mut self, bytes_written: u64) {
        self.outbound.store_u64(BEGINS_AT, bytes_written, Ordering::Release);
    }

    /// Ends the lane's part of the stream.
    pub fn end(&mut self) {
        self.producer.publish_staged();
        self.outbound.store_u64(ENDS_IN, self.producer.position(), Ordering::Release);
    }

    /// Tells the peer that this end is closed.
    pub fn note_closed(&mut self) {
        self.outbound.store_u64(CLOSED, 1, Ordering::Release);
    }

    /// Returns whether the peer has closed its end.
    #[inline(always)]
    pub fn has_peer_closed(&self) -> bool {
        self.inbound.load_u64(CLOSED, Ordering::Acquire) != 0
    }

    pub fn set_prefers_waiting(&mut self, prefers_waiting: bool) {
        self.producer.set_prefers_waiting(prefers_waiting);
    }

    /// # Errors
    /// As [`Producer::write_from`].
    ///
    /// # Safety
    /// As [`Producer::write_from`].
    #[inline(always)]
    pub unsafe fn write_from(&mut self, source: *const u8, len_bytes: usize) -> Result<usize, Corrupt> {
        // SAFETY: as this function's contract says; the memory is not the program's.
        unsafe {
            if self.producer.write_short_from(source, len_bytes, false) {
                return Ok(len_bytes);
            }
            self.producer.write_from(source, len_bytes)
        }
    }

    pub fn take_wake_request(&mut self) -> bool {
        self.producer.take_wake_request()
    }

    pub fn announce_sleep(&mut self) {
        self.producer.announce_sleep();
    }

    /// Returns whether a send would find room. A violation counts as room: the send reports it.
    pub fn is_writable(&self) -> bool {
        self.producer.is_writable().unwrap_or(true)
    }

    /// Returns whether a send would find room in the present ring.
    pub fn may_have_room(&self) -> bool {
        self.producer.is_ring_writable().unwrap_or(true)
    }

    /// Returns the bytes that the peer has not read, by whole slots.
    pub fn unsent_bytes(&self) -> usize {
        self.producer.unread_slots().unwrap_or(0) as usize * lane::SLOT_BYTES
    }

    /// Returns what the peer has left in the lane, after its first `skip` bytes.
    pub fn unread_after(&mut self, _skip: usize) -> Result<Option<(*const u8, usize)>, Corrupt> {
        Err(Corrupt { what: "a frozen lane", value: 0 })
    }
}

/// The lane that this end reads.
pub(super) struct InLane {
    consumer: Consumer<MemoryInbound, MemoryOutbound>,
    inbound: MemoryInbound,
    outbound: MemoryOutbound,
}

impl InLane {
    pub fn load(&self, word: Word) -> u64 {
        self.inbound.load_u64(offset_of(word), Ordering::Acquire)
    }

    pub fn store(&mut self, word: Word, value: u64) {
        self.outbound.store_u64(offset_of(word), value, Ordering::Release);
    }

    /// Returns the bytes that the peer had written to TCP when the move began.
    pub fn begins_at(&self) -> u64 {
        self.inbound.load_u64(BEGINS_AT, Ordering::Acquire)
    }

    /// Begins to read the lane of a move.
    pub fn enter(&mut self) {}

    /// Returns whether everything is read; `None` for an end that is elsewhere.
    pub fn has_reached_end(&self) -> Option<bool> {
        let is_any = self.consumer.may_have_data();
        Some(!is_any)
    }

    /// Publishes up to where this end has read.
    pub fn publish_cursor(&mut self, _has_entered: bool) {}

    /// Returns whether the peer has closed its end.
    pub fn has_peer_closed(&self) -> bool {
        self.inbound.load_u64(CLOSED, Ordering::Acquire) != 0
    }

    #[inline(always)]
    pub fn may_have_data(&self) -> bool {
        self.consumer.may_have_data()
    }

    pub fn announce_sleep(&mut self) {
        self.consumer.announce_sleep();
    }

    pub fn take_wake_request(&mut self) -> bool {
        self.consumer.take_wake_request()
    }

    /// # Errors
    /// As [`Consumer::unread_bytes`].
    pub fn unread_bytes(&self) -> Result<usize, Corrupt> {
        self.consumer.unread_bytes()
    }

    /// Returns a number that grows with each arrival.
    pub fn arrivals(&self, seen: u64) -> u64 {
        self.consumer.arrivals(seen).unwrap_or(u64::MAX >> 4)
    }

    /// # Errors
    /// As [`Consumer::read_to`].
    ///
    /// # Safety
    /// As [`Consumer::read_to`].
    #[inline(always)]
    pub unsafe fn read_to(&mut self, destination: *mut u8, len_bytes: usize) -> Result<usize, Corrupt> {
        // SAFETY: as this function's contract says.
        unsafe {
            match self.consumer.read_short_to(destination, len_bytes) {
                lane::ShortRead::Read(bytes) => Ok(bytes),
                lane::ShortRead::Empty => Ok(0),
                lane::ShortRead::UseReadTo => self.consumer.read_to(destination, len_bytes),
            }
        }
    }

    /// # Errors
    /// As [`Consumer::peek_to`].
    ///
    /// # Safety
    /// As [`Consumer::peek_to`].
    pub unsafe fn peek_to(&self, skip: usize, destination: *mut u8, len_bytes: usize) -> Result<usize, Corrupt> {
        // SAFETY: as this function's contract says.
        unsafe { self.consumer.peek_to(skip, destination, len_bytes, |_, _| UrgentHandling::Include) }
    }

    /// Consumes bytes without copying them.
    pub fn discard(&mut self, len_bytes: usize) -> Result<usize, Corrupt> {
        let mut done = 0;
        while done < len_bytes {
            let Some(chunk) = self.consumer.peek()? else { break };
            let bytes = chunk.len_bytes.min(len_bytes - done);
            self.consumer.consume(bytes)?;
            done += bytes;
        }
        Ok(done)
    }
}
