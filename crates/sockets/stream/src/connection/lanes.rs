//! The lanes of the two directions, in the memory that the two ends have exchanged.

use crate::kernel::Tcp;
use lane::{Corrupt, UrgentHandling};
use meeting::{Memory, Met, Offer, Reason};
use path::Word;
use rustix::io::Errno;
use segment::ends::{self, EndMemory, OWN_STATE_BYTES, PeerMemory};
use segment::{Receiver, Sender};
use socket::descriptor::hidden;
use std::os::fd::{AsFd, OwnedFd};
use volmem::Region;

/// Each end's share of a lane's capacity.
const CAPACITY_BYTES: usize = 3 << 20;
/// The largest capacity of a lane of the peer that this end accepts.
const CAPACITY_BYTES_MAX: usize = segment::CAPACITY_BYTES_MAX;
/// The cursor of a receiver that has not entered the lane of the move.
const NOT_ENTERED: u64 = u64::MAX;

/// The memory of this end, and the descriptor by which the peer reads it.
pub(super) struct OwnMemory {
    memory: EndMemory,
    /// Present until it was passed to the peer: its number is one that the program would get.
    descriptor: Option<OwnedFd>,
    offered: Memory,
}

impl OwnMemory {
    /// Creates the memory of an end.
    ///
    /// # Errors
    /// That of the system call that has failed.
    pub fn create(_tcp: Tcp) -> Result<Self, Errno> {
        let (memory, descriptor) = EndMemory::create(2 * CAPACITY_BYTES).map_err(|_| Errno::NOMEM)?;
        let mut secret = [0_u8; 8];
        rustix::rand::getrandom(&mut secret, rustix::rand::GetRandomFlags::empty())?;
        let bytes = memory.region().len_bytes() as u64;
        let offered = Memory { bytes, secret: u64::from_ne_bytes(secret) | 1 };
        Ok(Self { memory, descriptor: Some(descriptor), offered })
    }

    /// Calls `pass` with what is passed to the peer, and closes the descriptor.
    pub fn pass<R>(&mut self, pass: impl FnOnce(&Offer<'_>) -> Result<R, Reason>) -> Result<R, Reason> {
        let descriptor = self.descriptor.take().ok_or(Reason::Descriptors)?;
        let passed = pass(&Offer { descriptor: descriptor.as_fd(), memory: self.offered });
        hidden::close(descriptor);
        passed
    }
}

/// The memory of two ends that have met, before there are lanes in it.
pub(super) struct Shared {
    mine: EndMemory,
    peers: PeerMemory,
    state: Region,
}

impl Shared {
    /// Maps the memory of the peer.
    ///
    /// # Errors
    /// `INVAL` if it is not what it has to be.
    pub fn open(own: OwnMemory, met: &Met) -> Result<Self, Errno> {
        let peers = PeerMemory::open(met.peer_memory.as_fd(), CAPACITY_BYTES_MAX).map_err(|_| Errno::INVAL)?;
        Ok(Self { mine: own.memory, peers, state: Region::heap(OWN_STATE_BYTES) })
    }

    /// Returns the lane that this end writes.
    pub fn outgoing(&self, secret: u64) -> OutLane {
        let mut producer = ends::sender(&self.mine, &self.peers, &self.state, secret);
        producer.set_capacity(CAPACITY_BYTES);
        OutLane { producer, mine: self.mine.clone(), peers: self.peers.clone() }
    }

    /// Returns the lane that this end reads.
    pub fn incoming(&self, secret: u64) -> InLane {
        let mut consumer = ends::receiver(&self.mine, &self.peers, &self.state, secret);
        consumer.set_capacity(CAPACITY_BYTES);
        InLane { consumer, mine: self.mine.clone(), peers: self.peers.clone(), is_corrupt: false }
    }
}

fn place_of(word: Word) -> ends::Word {
    match word {
        Word::Ask => ends::Word::Ask,
        Word::Up => ends::Word::Up,
        Word::Withdrawn => ends::Word::Withdrawn,
        Word::Down => ends::Word::Down,
        Word::Ended => ends::Word::Ended,
        Word::Ok => ends::Word::Ok,
        Word::Frozen => ends::Word::Frozen,
    }
}

/// Writes at most this number of bytes at an address, and returns how many; 0 at the end of what there is.
pub(super) type Fill<'a> = &'a mut dyn FnMut(*mut u8, usize) -> Result<usize, Errno>;

/// What one attempt to fill a lane in place has done.
pub(super) enum Filled {
    Bytes(usize),
    NoRoom,
    Failed(Errno),
}

/// The lane that this end writes.
pub(super) struct OutLane {
    producer: Sender,
    mine: EndMemory,
    peers: PeerMemory,
}

impl OutLane {
    #[inline(always)]
    pub fn load(&self, word: Word) -> u64 {
        self.peers.load(place_of(word))
    }

    pub fn store(&mut self, word: Word, value: u64) {
        self.mine.publish(place_of(word), value);
    }

    /// Begins a move of the direction to the lane.
    pub fn begin(&mut self, bytes_written: u64) {
        let start = self.producer.restart();
        self.mine.publish_start(bytes_written, start);
    }

    /// Ends the lane's part of the stream.
    pub fn end(&mut self) {
        let end = self.producer.end_move();
        self.mine.publish(ends::Word::EndsAt, end);
    }

    /// Tells the peer that this end does not read any more, or is closed.
    pub fn note_closed(&mut self) {
        self.mine.publish(ends::Word::Closed, 1);
    }

    /// Returns whether the peer does not read any more.
    #[inline(always)]
    pub fn has_peer_closed(&self) -> bool {
        self.peers.load(ends::Word::Closed) != 0
    }

    pub fn set_prefers_waiting(&mut self, prefers_waiting: bool) {
        self.producer.set_prefers_waiting(prefers_waiting);
    }

    /// # Errors
    /// As `lane::Producer::write_from`.
    ///
    /// # Safety
    /// As `lane::Producer::write_from`.
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

    /// Sends at most `len_bytes` that `fill` writes in place.
    ///
    /// # Errors
    /// As `lane::Producer::reserve`.
    pub fn fill(&mut self, len_bytes: usize, fill: Fill) -> Result<Filled, Corrupt> {
        let Some(room) = self.producer.reserve(len_bytes)? else { return Ok(Filled::NoRoom) };
        let filled = fill(room.pointer.as_ptr(), room.len_bytes).map(|bytes| bytes.min(room.len_bytes));
        self.producer.commit(filled.unwrap_or(0))?;
        Ok(filled.map_or_else(Filled::Failed, Filled::Bytes))
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

    /// Returns what the peer has left in the lane, after its first `skip` bytes: an address and a length.
    ///
    /// # Errors
    /// [`Corrupt`] if the peer has published an impossible position.
    pub fn unread_after(&mut self, skip: usize) -> Result<Option<(*const u8, usize)>, Corrupt> {
        let cursor = match self.peers.frozen_cursor() {
            [NOT_ENTERED, _] => [self.mine.published(ends::Word::Start), 0],
            cursor => cursor,
        };
        let mut unread = self.producer.unread_from(self.mine.region(), cursor)?;
        let mut skip = skip;
        while let Some(chunk) = unread.chunk() {
            let skipped = chunk.len_bytes.min(skip);
            if skipped < chunk.len_bytes {
                let begin = self.mine.region().pointer(chunk.offset + skipped, chunk.len_bytes - skipped);
                return Ok(Some((begin.as_ptr(), chunk.len_bytes - skipped)));
            }
            unread.consume(skipped);
            skip -= skipped;
        }
        Ok(None)
    }
}

/// The lane that this end reads.
pub(super) struct InLane {
    consumer: Receiver,
    mine: EndMemory,
    peers: PeerMemory,
    /// The peer has published an impossible beginning of the lane.
    is_corrupt: bool,
}

impl InLane {
    pub fn load(&self, word: Word) -> u64 {
        self.peers.load(place_of(word))
    }

    pub fn store(&mut self, word: Word, value: u64) {
        self.mine.publish(place_of(word), value);
    }

    /// Returns the bytes that the peer had written to TCP when the move began.
    pub fn begins_at(&self) -> u64 {
        self.peers.load(ends::Word::UpAt)
    }

    /// Begins to read the lane of a move.
    pub fn enter(&mut self) {
        self.is_corrupt |= self.consumer.restart(self.peers.load(ends::Word::Start)).is_err();
    }

    /// Returns whether everything is read up to the published end; `None` for an impossible end.
    pub fn has_reached_end(&self) -> Option<bool> {
        self.consumer.has_reached(self.peers.load(ends::Word::EndsAt)).ok()
    }

    /// Publishes up to where this end has read.
    pub fn publish_cursor(&mut self, has_entered: bool) {
        let cursor = if has_entered { self.consumer.frozen_cursor() } else { [NOT_ENTERED, 0] };
        self.mine.publish_cursor(cursor);
    }

    /// Returns whether the peer is closed.
    pub fn has_peer_closed(&self) -> bool {
        self.peers.load(ends::Word::Closed) != 0
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
    /// As `lane::Consumer::unread_bytes`.
    pub fn unread_bytes(&self) -> Result<usize, Corrupt> {
        self.consumer.unread_bytes()
    }

    /// Returns a number that grows with each arrival.
    pub fn arrivals(&self, seen: u64) -> u64 {
        self.consumer.arrivals(seen).unwrap_or(u64::MAX >> 4)
    }

    /// # Errors
    /// As `lane::Consumer::read_to`.
    ///
    /// # Safety
    /// As `lane::Consumer::read_to`.
    #[inline(always)]
    pub unsafe fn read_to(&mut self, destination: *mut u8, len_bytes: usize) -> Result<usize, Corrupt> {
        if self.is_corrupt {
            return Err(Corrupt { what: "the beginning of a lane", value: self.peers.load(ends::Word::Start) });
        }
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
    /// As `lane::Consumer::peek_to`.
    ///
    /// # Safety
    /// As `lane::Consumer::peek_to`.
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
