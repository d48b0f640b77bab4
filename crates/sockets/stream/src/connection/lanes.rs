//! The lanes of the two directions, in the memory that the two ends have exchanged.

use crate::kernel::Tcp;
use crate::order;
use fabric::{Inbound, MemoryInbound};
use lane::{Chunk, Corrupt, MemoryRelease, ShortRead, Span};
use libc::iovec;
use meeting::{Memory, Met, Offer, Reason};
use path::Word;
use rustix::io::Errno;
use segment::ends::{self, EndMemory, OWN_STATE_BYTES, PeerMemory};
use segment::window::{self, WindowSpans};
use segment::{Receiver, Sender};
use socket::accounting::memory_budget;
use socket::descriptor::hidden;
use socket::process::clock::{TICKS_PER_MILLISECOND, ticks};
use std::os::fd::{AsFd, OwnedFd};
use volmem::Region;

/// The least bytes for which TCP must have room when a move begins: between two network namespaces, the kernel's first
/// send buffers are small.
const ROOM_BYTES_MIN: usize = 16 << 10;
/// Room from which a lane holds about as much as TCP would, whose buffers grow.
const AMPLE_ROOM_BYTES: usize = 64 << 10;
/// The most bytes that a lane holds unread.
const CAPACITY_BYTES_MAX_OWN: usize = 3 << 20;
/// The largest capacity of a lane of the peer that this end accepts.
const CAPACITY_BYTES_MAX: usize = segment::CAPACITY_BYTES_MAX;
/// Milliseconds after which a direction goes back to TCP if its lane is full and the receiver has not entered it, or
/// does not read what is less than TCP would hold.
const ENTRY_PATIENCE_MS: u64 = 100;
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
    pub fn create() -> Result<Self, Errno> {
        let (memory, descriptor) = EndMemory::create(CAPACITY_BYTES_MAX_OWN).map_err(|_| Errno::NOMEM)?;
        let mut secret = [0_u8; 8];
        rustix::rand::getrandom(&mut secret, rustix::rand::GetRandomFlags::empty())?;
        let bytes = memory.region().len_bytes() as u64;
        let offered = Memory::own(bytes, u64::from_ne_bytes(secret) | 1);
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
    /// Maps the memory of the peer, or the spans of windows that take the place of both memories: only a proxy has
    /// those.
    ///
    /// # Errors
    /// `INVAL` if it is not what it has to be.
    pub fn open(own: OwnMemory, met: &Met, is_peer_proxy: bool) -> Result<Self, Errno> {
        memory_budget::init_limits();
        if let Some(given) = met.incoming.window {
            let spans = WindowSpans::of_kind(given.kind, given.inbound_offset, given.outbound_offset);
            let spans = spans.filter(|_| is_peer_proxy).ok_or(Errno::INVAL)?;
            let [inbound, outbound] = window::map(met.peer_memory.as_fd(), spans)?;
            let (mine, peers) = (EndMemory::in_window(outbound), PeerMemory::in_window(inbound));
            return Ok(Self { mine, peers, state: Region::heap(OWN_STATE_BYTES) });
        }
        let peers = PeerMemory::open(met.peer_memory.as_fd(), CAPACITY_BYTES_MAX).map_err(|_| Errno::INVAL)?;
        Ok(Self { mine: own.memory, peers, state: Region::heap(OWN_STATE_BYTES) })
    }

    /// Returns the lane that this end writes.
    pub fn outgoing(&self, secret: u64) -> OutLane {
        let mut producer = ends::sender(&self.mine, &self.peers, &self.state, secret);
        producer.set_budget(&memory_budget::PROCESS_BUDGET);
        let (mine, peers) = (self.mine.clone(), self.peers.clone());
        OutLane {
            producer,
            mine,
            peers,
            is_entered: false,
            is_narrow: false,
            full: None,
            has_left: false,
            unread_from: Ok(None),
            epoch: 0,
        }
    }

    /// Returns the lane that this end reads.
    pub fn incoming(&self, secret: u64) -> InLane {
        let consumer = ends::receiver(&self.mine, &self.peers, &self.state, secret);
        InLane { consumer, mine: self.mine.clone(), peers: self.peers.clone(), entered: 0, is_corrupt: false, epoch: 0 }
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

/// A lane that was found full.
#[derive(Clone, Copy)]
struct Full {
    /// When, by the processor's clock.
    since_ticks: u64,
    /// What the peer had not read.
    unread_bytes: usize,
}

/// The lane that this end writes.
pub(super) struct OutLane {
    producer: Sender,
    mine: EndMemory,
    peers: PeerMemory,
    /// The peer has begun to read the lane of this move.
    is_entered: bool,
    /// TCP has so little room that the lane holds less than TCP would in time.
    is_narrow: bool,
    /// The lane was found full, before the peer has entered it or while it is narrow.
    full: Option<Full>,
    /// The lane has ended since [`OutLane::take_left`].
    has_left: bool,
    /// Where in the lane that has ended the bytes begin that follow on TCP; `None` if none do.
    unread_from: Result<Option<[u64; 2]>, Corrupt>,
    /// The epoch of the last message, see [`order`].
    epoch: u64,
}

impl OutLane {
    #[inline(always)]
    pub fn load(&self, word: Word) -> u64 {
        self.peers.load(place_of(word))
    }

    pub fn store(&mut self, word: Word, value: u64) {
        self.mine.publish(place_of(word), value);
    }

    /// Tells the receiver, before a message, whether this process has used the kernel since the last one.
    #[inline(always)]
    pub fn note_order(&mut self) {
        let epoch = order::epoch();
        if self.epoch != epoch {
            self.epoch = epoch;
            self.mine.publish(ends::Word::Order, epoch);
        }
    }

    /// Returns whether TCP has so much room that a move may begin. The lane holds no more than TCP has room for at
    /// every moment, so that the direction can go back at once. Until the peer enters it, it holds three quarters of
    /// that: then it has room when the peer has read what TCP had, as TCP would have.
    pub fn may_begin(&mut self, room: usize) -> bool {
        if room >= ROOM_BYTES_MIN {
            self.set_room(room - room / 4);
        }
        room >= ROOM_BYTES_MIN
    }

    /// Bounds the lane by what TCP has room for. Returns whether that is enough for the lane.
    fn set_room(&mut self, room: usize) -> bool {
        if self.mine.is_in_window() {
            // The large ring has a fixed size. Without room for that, a lane that begins stays in the small one.
            let is_enough = room >= ends::WINDOW_RING_BYTES;
            self.producer.set_capacity(if is_enough { room } else { 1 });
            return is_enough;
        }
        self.producer.set_capacity(room.clamp(ROOM_BYTES_MIN, CAPACITY_BYTES_MAX_OWN));
        self.is_narrow = room < AMPLE_ROOM_BYTES;
        room >= ROOM_BYTES_MIN
    }

    /// Begins a move of the direction to the lane.
    pub fn begin(&mut self, bytes_written: u64) {
        let start = self.producer.restart();
        (self.is_entered, self.full) = (false, None);
        self.mine.publish_start(bytes_written, start);
    }

    /// Called when the lane is full. Lets it hold more bytes once the peer has begun to read it, and so has received
    /// all that was in TCP. Returns whether it may hold more.
    pub fn note_entered(&mut self, tcp: Tcp) -> bool {
        let has_entered = !self.is_entered && self.producer.has_restarted();
        if has_entered {
            (self.is_entered, self.full) = (true, None);
            self.note_send_buffer(tcp);
        } else if !self.is_entered || self.is_narrow {
            let unread_bytes = self.unsent_bytes();
            if self.full.is_none_or(|full| full.unread_bytes != unread_bytes) {
                self.full = Some(Full { since_ticks: ticks(), unread_bytes });
            }
        }
        has_entered
    }

    /// Returns whether the lane was full before the peer had entered it, and either the peer has entered it since, or
    /// this has lasted for so long that TCP may be the better path: TCP has room again once the peer has read a part of
    /// what is in it, and this lane not before the peer has read all of that. The same for a lane that holds less than
    /// TCP would, and that the peer does not read.
    pub fn is_entry_due(&self, now_ticks: u64) -> bool {
        let Some(Full { since_ticks, unread_bytes }) = self.full else { return false };
        let is_late = || now_ticks.wrapping_sub(since_ticks) > ENTRY_PATIENCE_MS * TICKS_PER_MILLISECOND;
        match self.is_entered {
            false => self.producer.has_restarted() || is_late(),
            true => self.is_narrow && is_late() && unread_bytes == self.unsent_bytes(),
        }
    }

    /// Ends the lane's part of the stream. What the receiver has left follows on TCP: by its own position if
    /// `is_frozen`, otherwise by its credit.
    pub fn end(&mut self, is_frozen: bool) {
        self.has_left = true;
        let end = self.producer.end_move();
        self.mine.publish(ends::Word::EndsAt, end);
        self.unread_from = match self.peers.frozen_cursor() {
            [NOT_ENTERED, _] if is_frozen => Ok(Some([self.mine.published(ends::Word::Start), 0])),
            cursor if is_frozen => Ok(Some(cursor)),
            // TCP answers bytes for a peer that does not receive with a reset.
            _ if self.has_peer_closed() => Ok(None),
            _ => self.producer.credited_cursor(self.mine.region()).map(Some),
        };
        if !is_frozen {
            // A receiver that publishes an impossible position has the connection reset by the next call.
            let repeated = match self.unread_from {
                Ok(Some(from)) => self.producer.unread_from(self.mine.region(), from).map_or(0, |it| it.len_bytes()),
                Ok(None) | Err(_) => 0,
            };
            self.mine.publish(ends::Word::Repeated, repeated as u64);
        }
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

    /// Notes that the socket may have room for another number of bytes. Returns whether that is enough for a lane.
    pub fn note_send_buffer(&mut self, tcp: Tcp) -> bool {
        self.set_room(tcp.room())
    }

    /// Returns whether the lane has ended since the last call: the kernel is to report room from then on.
    pub fn take_left(&mut self) -> bool {
        std::mem::take(&mut self.has_left)
    }

    /// Returns whether the lane that has ended was frozen by its receiver, which reads nothing more in it.
    pub fn was_frozen(&self) -> bool {
        path::EndWord::from_word(self.mine.published(ends::Word::Ended)).is_resent
    }

    pub fn set_prefers_waiting(&mut self, prefers_waiting: bool) {
        self.producer.set_prefers_waiting(prefers_waiting);
    }

    /// # Safety
    /// As `lane::Producer::write_short_from`.
    #[inline(always)]
    pub unsafe fn write_short(&mut self, source: *const u8, len_bytes: usize, is_awaited: bool) -> bool {
        // SAFETY: as this function's contract says; the memory is not the program's.
        unsafe { self.producer.write_short_from(source, len_bytes, is_awaited) }
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

    /// Sends bytes of another lane or window with a single copy, as far as there is room.
    ///
    /// # Errors
    /// As `lane::Producer::write_span`.
    #[inline]
    pub fn write_span<I: Inbound>(&mut self, span: &Span<'_, I>) -> Result<usize, Corrupt> {
        self.producer.write_span(span)
    }

    /// Returns whether the lane has grown beyond its small ring.
    #[inline]
    pub fn has_grown(&self) -> bool {
        self.producer.memory_bytes() > 0
    }

    /// Returns the memory of a lane that has grown to the system, if everything is read. Returns whether it has.
    pub fn shrink(&mut self) -> bool {
        self.mine.is_releasable() && self.producer.release_memory() != lane::MemoryRelease::InUse
    }

    /// Ends [`OutLane::announce_sleep`].
    pub fn cancel_sleep(&mut self) {
        self.producer.cancel_sleep();
    }

    /// Returns the bytes of memory that the lane has beyond its small ring.
    #[inline]
    pub fn memory_bytes(&self) -> usize {
        self.producer.memory_bytes()
    }

    /// Returns that memory to the system if everything is read.
    pub fn release_memory(&mut self) -> MemoryRelease {
        if self.mine.is_releasable() { self.producer.release_memory() } else { MemoryRelease::NothingUsed }
    }

    pub fn position(&self) -> u64 {
        self.producer.position()
    }

    /// Lets the peer's processor find what was written since `position` sooner.
    pub fn demote_since(&self, position: u64) {
        self.producer.demote_since(position);
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

    /// As [`OutLane::is_writable`], after the lane was allowed to hold more if the peer has entered it.
    pub fn has_room(&mut self, tcp: Tcp) -> bool {
        self.is_writable() || (self.note_entered(tcp) && self.is_writable())
    }

    /// Returns whether a send would find room in the present ring.
    pub fn may_have_room(&self) -> bool {
        self.producer.is_ring_writable().unwrap_or(true)
    }

    /// Returns the bytes that the peer has not read, by whole slots.
    pub fn unsent_bytes(&self) -> usize {
        self.producer.unread_slots().unwrap_or(0) as usize * lane::SLOT_BYTES
    }

    /// Stores what of the lane that has [ended](OutLane::end) follows on TCP, after its first `skip` bytes, as far as
    /// there are spans for it. Returns the number of spans.
    ///
    /// # Errors
    /// [`Corrupt`] if the peer has published an impossible position.
    pub fn unread_after(&mut self, skip: usize, spans: &mut [iovec]) -> Result<usize, Corrupt> {
        let Some(from) = self.unread_from? else { return Ok(0) };
        let mut unread = self.producer.unread_from(self.mine.region(), from)?;
        let (mut skip, mut count) = (skip, 0);
        while count < spans.len()
            && let Some(chunk) = unread.chunk()
        {
            let skipped = chunk.len_bytes.min(skip);
            let len_bytes = chunk.len_bytes - skipped;
            if len_bytes > 0 {
                let begin = self.mine.region().pointer(chunk.offset + skipped, len_bytes);
                spans[count] = iovec { iov_base: begin.as_ptr().cast(), iov_len: len_bytes };
                count += 1;
            }
            unread.consume(chunk.len_bytes);
            skip -= skipped;
        }
        Ok(count)
    }
}

/// The lane that this end reads.
pub(super) struct InLane {
    consumer: Receiver,
    mine: EndMemory,
    peers: PeerMemory,
    /// Where the last lane that was entered begins.
    entered: u64,
    /// The peer has published an impossible beginning of the lane.
    is_corrupt: bool,
    /// The peer's epoch with the last bytes that were read, see [`order`].
    epoch: u64,
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

    /// Begins to read the lane of a move, unless a call that does not take bytes has done so.
    pub fn enter(&mut self) {
        let start = self.peers.load(ends::Word::Start);
        if self.entered != start {
            self.entered = start;
            self.is_corrupt |= self.consumer.restart(start).is_err();
        }
    }

    /// Returns whether everything is read up to the published end; `None` for an impossible end.
    pub fn has_reached_end(&self) -> Option<bool> {
        self.consumer.has_reached(self.peers.load(ends::Word::EndsAt)).ok()
    }

    /// Returns the number of bytes of the lane that follow on TCP, if it has ended without being frozen.
    pub fn bytes_repeated(&self) -> u64 {
        self.peers.load(ends::Word::Repeated)
    }

    /// Returns the number of bytes that follow on TCP and are in the lane too, if the lane of this move has ended so.
    pub fn bytes_on_both(&self, number: path::MoveNumber) -> u64 {
        let end = path::EndWord::from_word(self.load(Word::Ended));
        let is_repeated = end.number == number && !end.is_resent;
        if is_repeated { self.bytes_repeated() } else { 0 }
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
        self.consumer.may_have_record()
    }

    /// Returns whether the peer's process has used the kernel before it sent what is unread, as far as it is known.
    #[inline]
    pub fn follows_use_of_kernel(&self) -> bool {
        self.peers.load(ends::Word::Order) != self.epoch
    }

    /// Notes that the program receives what is there.
    #[inline(always)]
    pub fn note_order(&mut self) {
        self.epoch = self.peers.load(ends::Word::Order);
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

    /// # Safety
    /// As `lane::Consumer::read_short_to`.
    #[inline(always)]
    pub unsafe fn read_short(&mut self, destination: *mut u8, len_bytes: usize) -> ShortRead {
        if self.is_corrupt {
            return ShortRead::UseReadTo;
        }
        // SAFETY: as this function's contract says.
        unsafe { self.consumer.read_short_to(destination, len_bytes) }
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
        unsafe { self.consumer.peek_to(skip, destination, len_bytes) }
    }

    /// Ends [`InLane::announce_sleep`].
    pub fn cancel_sleep(&mut self) {
        self.consumer.cancel_sleep();
    }

    /// Returns the next bytes in one piece, which stay in the lane.
    ///
    /// # Errors
    /// As `lane::Consumer::peek`.
    #[inline]
    pub fn peek(&mut self) -> Result<Option<Chunk>, Corrupt> {
        if self.is_corrupt {
            return Err(Corrupt { what: "the beginning of a lane", value: self.peers.load(ends::Word::Start) });
        }
        self.consumer.peek()
    }

    /// Returns the bytes of such a piece.
    #[inline]
    pub fn span(&self, chunk: Chunk) -> Span<'_, MemoryInbound> {
        self.consumer.span(chunk)
    }

    /// Consumes bytes that were copied.
    ///
    /// # Errors
    /// As `lane::Consumer::consume`.
    #[inline]
    pub fn consume(&mut self, len_bytes: usize) -> Result<(), Corrupt> {
        self.consumer.consume(len_bytes)
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
