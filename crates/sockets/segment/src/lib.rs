//! The memory of one connection: one sealed memfd, or, between nodes whose programs may store into windows themselves,
//! a span of each of the two windows.
//!
//! In a memfd:
//!
//! ```text
//!   endpoint of the connecting end, endpoint of the accepting end, each:
//!     the end's own state
//!     status: written by the peer
//!     forward block and cursor of the lane that comes in
//!     back block and cursor of the lane that goes out
//!   small rings (7360 bytes): of the accepting end, of the connecting end
//!   larger rings (32 KiB to 16 MiB, each twice the one before): of the accepting end, of the connecting end
//! ```
//!
//! What comes before the larger rings has 16 KiB: so much a connection keeps, whatever it has carried. The larger ones
//! have memory only while they hold something: where they lie costs addresses and nothing else. The endpoints and the
//! start of a ring share a page, because finding and zeroing a page costs more than any system call of a connect: a
//! connection that carries little touches two.
//!
//! In windows each end has a span of its own node's: its endpoint, the small ring and the big ring that come in.
//! Whatever an end loads lies in its own span, so that nothing is loaded across the link. Where the link is slowed down
//! to a model, what belongs to that ([`fabric::timed::SharedWindows`]) lies behind it in the span. In windows of memory
//! that is no ordinary memory, the end's own state lies [apart](split_endpoint)(split_endpoint) from them.
//!
//! An end's own state lies here so that processes sharing the connection after `fork`, `exec` or `SCM_RIGHTS` need
//! nothing but the memfd. The peer can write there too; whatever is loaded from it is checked like any other word, and
//! the worst a peer does by it is to garble its own connection.

// Memory that a peer can write, and descriptors of callers.
#![allow(unsafe_code)]

pub mod model;
mod split_endpoint;

use fabric::device::DeviceMemory;
use fabric::timed::{SharedConfig, SharedInbound, SharedLayout, SharedOutbound, SharedWindows};
use fabric::{Inbound, MemoryInbound, MemoryOutbound, Outbound, shm};
use lane::{Consumer, LargerRings, Layout, Producer};
use rustix::io::Errno;
use split_endpoint::{LocalPageReceiverOf, LocalPageSenderOf, SplitEndpoint};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use volmem::sync::Ordering;
use volmem::{Mapping, Region};

use crate::model::{LinkModel, MODEL_WORDS, ModelledLink};

/// The sending end of an outgoing lane.
pub type Sender = Producer<MemoryOutbound, MemoryInbound>;
/// The receiving end of an incoming lane.
pub type Receiver = Consumer<MemoryInbound, MemoryOutbound>;
/// The sending end of a lane over a modelled link.
pub type TimedSender = Producer<SharedOutbound, SharedInbound>;
/// The receiving end of such a lane.
pub type TimedReceiver = Consumer<SharedInbound, SharedOutbound>;
/// The sending end of a lane in windows of memory that is no ordinary memory.
pub type LocalPageSender = LocalPageSenderOf<DeviceMemory>;
/// The receiving end of such a lane.
pub type LocalPageReceiver = LocalPageReceiverOf<DeviceMemory>;

/// Version of everything in this file and in `handshake`: ends of different versions do not meet.
pub const LAYOUT_VERSION: u32 = 13;

const PAGE_BYTES: usize = 4096;
/// Both small rings together fill half of a first-level cache of 32 KiB: where they filled all of it, a round trip of
/// 1 KiB took half as long again.
const SMALL_SLOTS: u64 = 128;
/// Of a lane between windows.
const BIG_SLOTS: u64 = 4096;

const SMALL_BYTES: usize = SMALL_SLOTS as usize * lane::SLOT_BYTES;
/// Of the small ring in a memfd so many slots are used in each lap: both fill the pages of the endpoints.
const SMALL_SLOTS_USED: u64 = 115;
const SMALL_BYTES_USED: usize = SMALL_SLOTS_USED as usize * lane::SLOT_BYTES;

const FORWARD_OFFSET: usize = 384;
const BACK_OFFSET: usize = FORWARD_OFFSET + Layout::FORWARD_BYTES;
const ENDPOINT_BYTES: usize = BACK_OFFSET + Layout::BACK_BYTES;
const SMALL_OFFSET: usize = 2 * ENDPOINT_BYTES;
const RINGS_OFFSET: usize = SMALL_OFFSET + 2 * SMALL_BYTES_USED;
const _: () = assert!(RINGS_OFFSET == 4 * PAGE_BYTES);
/// Bytes of the big ring of a lane between windows.
const BIG_BYTES: usize = BIG_SLOTS as usize * lane::SLOT_BYTES;
/// Bytes that one direction holds unread at most.
pub const CAPACITY_BYTES_MAX: usize = 16 << 20;

/// A lane between windows: the receiver's half is laid out like the sender's.
const WINDOW_LAYOUT: Layout = Layout {
    forward_offset: FORWARD_OFFSET,
    back_offset: BACK_OFFSET,
    small_offset: ENDPOINT_BYTES,
    small_slots: SMALL_SLOTS,
    small_slots_used: SMALL_SLOTS,
    big_offset: BIG_IN_WINDOW_OFFSET,
    big_slots: BIG_SLOTS,
    elastic: None,
};
const BIG_IN_WINDOW_OFFSET: usize = (ENDPOINT_BYTES + SMALL_BYTES).next_multiple_of(PAGE_BYTES);
/// The same over a modelled link: the endpoint is memory, and behind it lie rings.
const TIMED_SHAPE: SharedLayout = SharedLayout { window_bytes: Segment::WINDOW_BYTES, words_bytes: ENDPOINT_BYTES };

/// The lane to an end in a memfd. Both windows are the whole memory.
pub const fn layout_to(receiver: Side) -> Layout {
    let (receiver, sender) = match receiver {
        Side::Connector => (0, 1),
        Side::Acceptor => (1, 0),
    };
    Layout {
        forward_offset: receiver * ENDPOINT_BYTES + FORWARD_OFFSET,
        back_offset: sender * ENDPOINT_BYTES + BACK_OFFSET,
        small_offset: SMALL_OFFSET + sender * SMALL_BYTES_USED,
        small_slots: SMALL_SLOTS,
        small_slots_used: SMALL_SLOTS_USED,
        big_offset: 0,
        big_slots: 0,
        elastic: Some(LargerRings::in_a_row(RINGS_OFFSET + sender * LargerRings::BYTES)),
    }
}

const SECRET_TO_ACCEPTOR: usize = 200;
const SECRET_TO_CONNECTOR: usize = 208;

/// The words of an end's own state, by offset in its endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum OwnState {
    /// Processes that hold this end, or may.
    Holders = 0,
    /// Those of them that rely on rings: that slept when there came to be several, or have since. A child that only
    /// ends, calls `exec` or writes is none.
    Users = 8,
    /// Directions the program has shut down: 1 reading, 2 writing.
    Shutdown = 16,
    /// Not 0: `ECONNRESET` is to be reported once. Whatever a peer puts here, that is the worst it can mean.
    PendingError = 24,
    /// What is known of the peer's end; see `connection::PeerState`.
    Peer = 32,
    /// Directions that go by the lanes: [`BY_LANE_SEND`], [`BY_LANE_RECEIVE`].
    ByLane = 40,
    /// Options that all processes share that hold this end, a bit each; see `options::SHARED`.
    Options = 48,
    /// Holder of the send lock between processes.
    SendLock = 64,
    /// Holder of the receive lock between processes.
    ReceiveLock = 128,
    /// What this end has made of urgent bytes; see `connection::urgent`.
    Urgent = 136,
    /// Inode of this end's lifeline.
    LifelineInode = 192,
    /// 1 once the end is set up.
    Attached = 216,
    /// In windows, where each end has an endpoint of its own: 1 in that of the connecting end, 2 in the other.
    Side = 224,
}

/// Some of an end's own words, loaded together: they lie side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnSnapshot {
    /// [`OwnState::Holders`].
    pub holders: u64,
    /// [`OwnState::Shutdown`].
    pub shutdown: u64,
    /// [`OwnState::Peer`].
    pub peer: u64,
}

/// The words that the peer writes into an end's endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum PeerStatus {
    /// The urgent byte that the peer has sent last, as [`lane::Urgent::to_word`] has it. Not in windows.
    Urgent = 72,
    /// 1: the peer dropped data of ours unread, or asked for a reset.
    Reset = 320,
    /// The peer's last descriptor is gone: 1 as it said itself, [`LEFT_SILENTLY`] as its node's proxy says. Or the peer
    /// is there, and [`SHUT_BOTH_WAYS`].
    Closed = 328,
    /// 1: the peer has attached.
    Attached = 336,
    /// 1: the peer has short messages of others beside this stream. Long copies are made in pieces then, and give way
    /// in between where somebody waits for the processor.
    GiveWay = 376,
}

/// Over a modelled link, where the peer says that its last descriptor is gone: as late as what it sent before. It says
/// so in [`PeerStatus::Closed`] too, at once, so that nobody has to look here before.
const CLOSED_IN_TIME: usize = 344;
/// Where the [`LinkModel`] of the link lies in an end's own state, zeros where it is none.
const MODEL_OFFSETS: [usize; MODEL_WORDS] = [232, 240, 248, 352, 360, 368];

/// In [`PeerStatus::Closed`], of a connection in windows: the peer was killed, or may have left its end to others;
/// whether that is a reset, what it has read tells.
pub const LEFT_SILENTLY: u64 = 2;

/// In [`PeerStatus::Closed`], not in windows: the peer has shut down both directions. Bytes that are sent to it reset
/// the connection, as TCP has it.
pub const SHUT_BOTH_WAYS: u64 = 3;

/// In [`OwnState::ByLane`]: what this end sends goes by its lane.
pub const BY_LANE_SEND: u64 = 1;
/// In [`OwnState::ByLane`]: what this end receives comes by its lane.
pub const BY_LANE_RECEIVE: u64 = 2;
/// In [`OwnState::ByLane`]: the end is under a system call filter, and does not ring when it has made room.
pub const IS_CONFINED: u64 = 4;
/// In [`OwnState::ByLane`]: the program has named somebody who gets `SIGURG`.
pub const RAISES_SIGNAL: u64 = 8;
/// In [`OwnState::ByLane`]: this end only receives by this memory. What it sends goes by another one, which is the
/// end's.
pub const RECEIVES_ONLY: u64 = 16;
/// In [`OwnState::ByLane`]: both directions.
pub const BY_LANE_BOTH: u64 = BY_LANE_SEND | BY_LANE_RECEIVE;

/// Holders that can sign, with a name each: others can find out that they are gone.
pub const HOLDERS_NAMED_MAX: usize = 8;
/// Names of holders, a word each.
const HOLDER_NAMES: usize = 256;

/// Which end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The end that called `connect`.
    Connector,
    /// The end that called `accept`.
    Acceptor,
}

impl Side {
    /// The end that this one is connected to.
    pub fn other(self) -> Self {
        match self {
            Self::Connector => Self::Acceptor,
            Self::Acceptor => Self::Connector,
        }
    }
}

/// What tells a record of each lane from other bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Secrets {
    /// Of the lane from the connecting end.
    pub to_acceptor: u64,
    /// Of the lane to the connecting end.
    pub to_connector: u64,
}

/// One end's view of a connection's memory.
#[derive(Debug)]
pub struct Segment {
    medium: Medium,
    /// This end's endpoint: in the inbound memory, or in the local page.
    own: Region,
    side: Side,
    secrets: Secrets,
    is_adopted: bool,
    is_in_windows: bool,
}

/// How an end reaches the other one.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "almost every segment is a plain one")]
enum Medium {
    Plain(Plain),
    Modelled(Box<Modelled>),
    Split(Box<SplitEndpoint<DeviceMemory>>),
}

/// Ordinary memory, which both ends share.
#[derive(Debug)]
struct Plain {
    /// Where the incoming lane lies, and what its sender must know of the outgoing one.
    inbound: MemoryInbound,
    outbound: MemoryOutbound,
    incoming: Layout,
    outgoing: Layout,
    /// The other end's endpoint, in the outbound memory.
    peers: Region,
}

/// The windows of an end as a modelled link makes them.
#[derive(Debug)]
struct Modelled {
    windows: SharedWindows,
    model: LinkModel,
    /// As of [`Plain`].
    peers: Region,
}

impl Segment {
    /// Bytes of the memfd.
    pub const SEGMENT_BYTES: usize = RINGS_OFFSET + 2 * LargerRings::BYTES;
    /// Bytes of an end's span in its node's window, whole pages.
    pub const WINDOW_BYTES: usize = BIG_IN_WINDOW_OFFSET + BIG_BYTES;
    /// The same where the link is slowed down to a model.
    pub const TIMED_WINDOW_BYTES: usize = TIMED_SHAPE.memory_bytes().next_multiple_of(PAGE_BYTES);

    /// Bytes of what an end has in its local page whose state lies apart from its span.
    pub const LOCAL_PAGE_BYTES: usize = PAGE_BYTES;

    /// Bytes of an end's span, over a link of that kind.
    pub const fn window_bytes(is_modelled: bool) -> usize {
        if is_modelled { Self::TIMED_WINDOW_BYTES } else { Self::WINDOW_BYTES }
    }

    /// Makes the memory of a connection: the view of its end `side`, and the memfd for the other end. The caller calls
    /// [`Segment::set_up`].
    ///
    /// # Errors
    /// What memfd_create, ftruncate, fcntl, mmap or getrandom answer.
    pub fn create(side: Side) -> Result<(Self, OwnedFd), Errno> {
        let (memfd, mapping) = shm::create(Self::SEGMENT_BYTES).map_err(|_| Errno::NOMEM)?;
        let mut random = [0_u8; 16];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let secrets = Secrets {
            to_acceptor: u64::from_ne_bytes(random[..8].try_into().expect("eight bytes")),
            to_connector: u64::from_ne_bytes(random[8..].try_into().expect("eight bytes")),
        };
        Ok((Self::view(Arc::new(mapping), side, secrets), memfd))
    }

    /// The accepting end's view of memory that the connecting end made.
    ///
    /// # Errors
    /// If `memfd` is not a sealed memfd of exactly this size.
    pub fn open(memfd: &OwnedFd, secrets: Secrets) -> Result<Self, Errno> {
        let mapping = shm::open(memfd.as_fd(), Self::SEGMENT_BYTES).map_err(|_| Errno::INVAL)?;
        let segment = Self::view(Arc::new(mapping), Side::Acceptor, secrets);
        segment.set_up();
        Ok(segment)
    }

    /// The view of the end `side` of memory that came by the lifeline: the other end has made it, and set itself up;
    /// or a process that held this end before.
    ///
    /// # Errors
    /// If `memfd` is not a sealed memfd of exactly this size, or neither end is set up.
    pub fn join(memfd: &OwnedFd, side: Side) -> Result<Self, Errno> {
        let mapping = Arc::new(shm::open(memfd.as_fd(), Self::SEGMENT_BYTES).map_err(|_| Errno::INVAL)?);
        let own = Self::view(Arc::clone(&mapping), side, Secrets::default());
        if own.load(OwnState::Attached) == 1 {
            return own.adopt_rest();
        }
        let maker = Self::view(Arc::clone(&mapping), side.other(), Secrets::default()).adopt_rest()?;
        let segment = Self::view(mapping, side, maker.secrets);
        segment.set_up();
        Ok(segment)
    }

    /// A look at memory that is on its way to the end `side`, which is not set up by it.
    ///
    /// # Errors
    /// As [`Segment::join`].
    pub fn peek(memfd: &OwnedFd, side: Side) -> Result<Self, Errno> {
        let mapping = Arc::new(shm::open(memfd.as_fd(), Self::SEGMENT_BYTES).map_err(|_| Errno::INVAL)?);
        let maker = Self::view(Arc::clone(&mapping), side.other(), Secrets::default()).adopt_rest()?;
        Ok(Self::view(mapping, side, maker.secrets))
    }

    /// The view of an end that another process set up: after `exec` or `SCM_RIGHTS`.
    ///
    /// # Errors
    /// If `memfd` is not a sealed memfd of exactly this size, or nobody has set the end up.
    pub fn adopt(memfd: &OwnedFd, side: Side) -> Result<Self, Errno> {
        let mapping = shm::open(memfd.as_fd(), Self::SEGMENT_BYTES).map_err(|_| Errno::INVAL)?;
        Self::view(Arc::new(mapping), side, Secrets::default()).adopt_rest()
    }

    /// As [`Segment::adopt`], of an end in windows; over a modelled link if one is given, which has to be that of
    /// [`Segment::model`].
    ///
    /// # Errors
    /// If nobody has set the end up, or as [`Segment::in_modelled_windows`].
    ///
    /// # Panics
    /// As [`Segment::in_windows`].
    pub fn adopt_in_windows(inbound: &Region, outbound: &Region, link: Option<ModelledLink>) -> Result<Self, Errno> {
        let (side, secrets) = (Side::Connector, Secrets::default());
        let segment = match link {
            None => Self::in_windows(inbound, outbound, side, secrets),
            Some(link) => Self::in_modelled_windows(inbound, outbound, link, side, secrets)?,
        };
        segment.adopt_by_side()
    }

    /// As [`Segment::adopt`], of an end whose state lies apart from the windows.
    ///
    /// # Errors
    /// If nobody has set the end up.
    ///
    /// # Panics
    /// As [`Segment::with_local_page`].
    pub fn adopt_with_local_page(inbound: DeviceMemory, outbound: DeviceMemory, page: &Region) -> Result<Self, Errno> {
        Self::with_local_page(inbound, outbound, page, Side::Connector, Secrets::default()).adopt_by_side()
    }

    /// The rest of an end that has an endpoint of its own.
    fn adopt_by_side(mut self) -> Result<Self, Errno> {
        self.side = match self.load(OwnState::Side) {
            1 => Side::Connector,
            2 => Side::Acceptor,
            _ => return Err(Errno::NOTCONN),
        };
        self.adopt_rest()
    }

    /// Takes [`Segment::join`] back where nothing has come of it: else the end would be found set up the next time, as
    /// one that a process held before.
    pub fn undo_join(&self) {
        if !self.is_adopted {
            self.store(OwnState::Attached, 0);
        }
    }

    /// What the process that set the end up has left for those who come to hold it.
    fn adopt_rest(mut self) -> Result<Self, Errno> {
        self.is_adopted = true;
        self.secrets = Secrets {
            to_acceptor: self.own.load_u64(SECRET_TO_ACCEPTOR, Ordering::Relaxed),
            to_connector: self.own.load_u64(SECRET_TO_CONNECTOR, Ordering::Relaxed),
        };
        if self.load(OwnState::Attached) == 1 { Ok(self) } else { Err(Errno::NOTCONN) }
    }

    /// Whether a descriptor is the memory of a connection, to judge by its size and seals.
    pub fn is_segment(fd: RawFd) -> bool {
        // SAFETY: only asks; a closed number is answered with an error.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        rustix::fs::fstat(borrowed).is_ok_and(|stat| stat.st_size as usize == Self::SEGMENT_BYTES)
            && rustix::fs::fcntl_get_seals(borrowed).is_ok_and(|seals| seals.contains(rustix::fs::SealFlags::SHRINK))
    }

    /// Whether this end has its incoming lane in this memory, and the rest of it in another.
    pub fn only_receives(&self) -> bool {
        self.load(OwnState::ByLane) & RECEIVES_ONLY != 0
    }

    /// Inode of this end's lifeline, 0 while unknown.
    pub fn lifeline_inode(&self) -> u64 {
        self.load(OwnState::LifelineInode)
    }

    /// The name in one of the [`HOLDERS_NAMED_MAX`] places for holders, 0 where there is none.
    pub fn holder(&self, index: usize) -> u64 {
        self.own.load_u64(holder_offset(index), Ordering::Acquire)
    }

    /// Replaces a name in the list of holders; `false` if it was not there.
    pub fn replace_holder(&self, index: usize, current: u64, new: u64) -> bool {
        self.own.compare_exchange_u64(holder_offset(index), current, new).is_ok()
    }

    /// What tells this connection's records from other bytes.
    pub fn secrets(&self) -> Secrets {
        self.secrets
    }

    /// Whether another process set this end up, or this one before `exec`.
    pub fn is_adopted(&self) -> bool {
        self.is_adopted
    }

    /// Which end this is.
    pub fn side(&self) -> Side {
        self.side
    }

    /// The sending end of the outgoing lane.
    ///
    /// # Panics
    /// In windows that are no ordinary memory: see [`Segment::timed_sender`] and [`Segment::local_page_sender`].
    pub fn sender(&self) -> Sender {
        let Plain { inbound, outbound, outgoing, .. } = self.plain();
        Producer::new(outbound.clone(), inbound.clone(), *outgoing, self.outgoing_secret())
    }

    /// The receiving end of the incoming lane.
    ///
    /// # Panics
    /// As [`Segment::sender`].
    pub fn receiver(&self) -> Receiver {
        let Plain { inbound, outbound, incoming, .. } = self.plain();
        Consumer::new(inbound.clone(), outbound.clone(), *incoming, self.incoming_secret())
    }

    /// Writes, in the place of the other end of new memory, how many bytes that will hold unread.
    ///
    /// # Panics
    /// As [`Segment::sender`].
    pub fn presume_capacity(&self, bytes: usize) {
        let Plain { inbound, outbound, outgoing, .. } = self.plain();
        // Both windows are the whole memory.
        Consumer::new(inbound.clone(), outbound.clone(), *outgoing, self.outgoing_secret()).set_capacity(bytes);
    }

    fn plain(&self) -> &Plain {
        match &self.medium {
            Medium::Plain(plain) => plain,
            _ => panic!("a lane that is not in ordinary memory"),
        }
    }

    fn outgoing_secret(&self) -> u64 {
        match self.side {
            Side::Connector => self.secrets.to_acceptor,
            Side::Acceptor => self.secrets.to_connector,
        }
    }

    fn incoming_secret(&self) -> u64 {
        match self.side {
            Side::Connector => self.secrets.to_connector,
            Side::Acceptor => self.secrets.to_acceptor,
        }
    }

    /// Loads a word of this end's own state.
    #[inline]
    pub fn load(&self, word: OwnState) -> u64 {
        self.own.load_u64(word as usize, Ordering::Relaxed)
    }

    /// Loads what every call asks of this end's own state.
    #[inline(always)] // One check of bounds for all of it.
    pub fn snapshot(&self) -> OwnSnapshot {
        let [holders, _, shutdown, _, peer] = self.own.load_words(OwnState::Holders as usize);
        OwnSnapshot { holders, shutdown, peer }
    }

    /// Stores a word of this end's own state.
    #[inline]
    pub fn store(&self, word: OwnState, value: u64) {
        self.own.store_u64(word as usize, value, Ordering::Relaxed);
    }

    /// Swaps a word of this end's own state.
    pub fn swap(&self, word: OwnState, value: u64) -> u64 {
        self.own.swap_u64(word as usize, value, Ordering::AcqRel)
    }

    /// Adds to a word of this end's own state; returns what it was.
    pub fn add(&self, word: OwnState, value: u64) -> u64 {
        self.own.add_u64(word as usize, value, Ordering::AcqRel)
    }

    /// Replaces `current` by `new` in a word of this end's own state, or returns what was there.
    ///
    /// # Errors
    /// The value found.
    pub fn compare_exchange(&self, word: OwnState, current: u64, new: u64) -> Result<u64, u64> {
        self.own.compare_exchange_u64(word as usize, current, new)
    }

    /// Adds directions to [`OwnState::ByLane`], where another process that holds the end may do so too.
    pub fn note_by_lane(&self, directions: u64) {
        self.set_bits(OwnState::ByLane, directions, directions);
    }

    /// Replaces the bits of `mask` in a word that another process that holds the end may change too.
    pub fn set_bits(&self, word: OwnState, mask: u64, bits: u64) {
        // A peer can write there as well, and is not to keep anybody busy.
        const TRIES_MAX: usize = 8;
        let mut noted = self.load(word);
        for _ in 0..TRIES_MAX {
            match self.compare_exchange(word, noted, noted & !mask | bits & mask) {
                Ok(_) => return,
                Err(found) => noted = found,
            }
        }
    }

    /// Loads what the peer says of itself.
    #[inline]
    pub fn status(&self, word: PeerStatus) -> u64 {
        let value = self.own.load_u64(word as usize, Ordering::Acquire);
        match (&self.medium, value) {
            (Medium::Plain(_), _) | (Medium::Modelled(_), 0) => value,
            _ => self.status_elsewhere(word, value),
        }
    }

    /// Over a modelled link the peer's good-bye comes behind what it has sent; this node's proxy is not that far away.
    /// The other words mean nothing before it. Where this end's state lies apart, the peer's words do not lie beside
    /// it.
    #[cold]
    #[inline(never)]
    fn status_elsewhere(&self, word: PeerStatus, value: u64) -> u64 {
        match &self.medium {
            Medium::Modelled(modelled) if word == PeerStatus::Closed && value != LEFT_SILENTLY => {
                modelled.windows.inbound().load_u64(CLOSED_IN_TIME, Ordering::Acquire)
            }
            Medium::Split(split) if value == 0 => split.status(word),
            _ => value,
        }
    }

    /// Tells the peer.
    pub fn publish(&self, word: PeerStatus, value: u64) {
        let peers = match &self.medium {
            Medium::Plain(plain) => &plain.peers,
            Medium::Modelled(modelled) => {
                if word == PeerStatus::Closed {
                    modelled.windows.outbound().store_u64(CLOSED_IN_TIME, value, Ordering::Release);
                }
                &modelled.peers
            }
            Medium::Split(split) => return split.publish(word, value),
        };
        peers.store_u64(word as usize, value, Ordering::Release);
    }

    /// Whether the peer has come to the end of what was sent to it by the lifeline, as it says itself. Of an end in
    /// windows nothing ever was.
    pub fn peer_receives_by_lane(&self) -> bool {
        match &self.medium {
            Medium::Plain(plain) if !self.is_in_windows => {
                plain.peers.load_u64(OwnState::ByLane as usize, Ordering::Acquire) & BY_LANE_RECEIVE != 0
            }
            _ => true,
        }
    }

    /// Whether the peer does not ring when it has made room, as it says itself.
    pub fn peer_is_confined(&self) -> bool {
        self.peer_has_noted(IS_CONFINED)
    }

    /// Whether the peer's program has named somebody who gets `SIGURG`, as it says itself.
    pub fn peer_raises_signal(&self) -> bool {
        self.peer_has_noted(RAISES_SIGNAL)
    }

    /// Of an end in windows nothing is known.
    fn peer_has_noted(&self, note: u64) -> bool {
        match &self.medium {
            Medium::Plain(plain) if !self.is_in_windows => {
                plain.peers.load_u64(OwnState::ByLane as usize, Ordering::Acquire) & note != 0
            }
            _ => false,
        }
    }

    /// What the peer was told last, as far as its memory says; in windows 0.
    pub fn published(&self, word: PeerStatus) -> u64 {
        match &self.medium {
            Medium::Plain(plain) if !self.is_in_windows => plain.peers.load_u64(word as usize, Ordering::Relaxed),
            _ => 0,
        }
    }

    /// Notes that the kernel says of the peer what it did not say itself: this end was reset.
    pub fn note_reset(&self) {
        self.own.store_u64(PeerStatus::Reset as usize, 1, Ordering::Release);
    }

    fn view(mapping: Arc<Mapping>, side: Side, secrets: Secrets) -> Self {
        let whole = Region::of_mapping(mapping);
        let first = whole.sub(0, ENDPOINT_BYTES);
        let second = whole.sub(ENDPOINT_BYTES, ENDPOINT_BYTES);
        let (own, peers) = match side {
            Side::Connector => (first, second),
            Side::Acceptor => (second, first),
        };
        let plain = Plain {
            inbound: MemoryInbound::new(whole.clone()),
            outbound: MemoryOutbound::new(whole),
            incoming: layout_to(side),
            outgoing: layout_to(side.other()),
            peers,
        };
        Self::of(Medium::Plain(plain), own, side, secrets)
    }

    fn of(medium: Medium, own: Region, side: Side, secrets: Secrets) -> Self {
        Self { medium, own, side, secrets, is_adopted: false, is_in_windows: false }
    }

    /// An end between nodes: `inbound` is its span of its own node's window, `outbound` the other end's of the other
    /// node's. Both are coherent memory of [`Segment::WINDOW_BYTES`], and their endpoints are zero. The caller calls
    /// [`Segment::set_up`].
    ///
    /// # Panics
    /// If a span is of another size.
    pub fn in_windows(inbound: &Region, outbound: &Region, side: Side, secrets: Secrets) -> Self {
        check_spans([inbound, outbound], Self::WINDOW_BYTES);
        let plain = Plain {
            inbound: MemoryInbound::new(inbound.clone()),
            outbound: MemoryOutbound::new(outbound.clone()),
            incoming: WINDOW_LAYOUT,
            outgoing: WINDOW_LAYOUT,
            peers: outbound.sub(0, ENDPOINT_BYTES),
        };
        let own = inbound.sub(0, ENDPOINT_BYTES);
        Self { is_in_windows: true, ..Self::of(Medium::Plain(plain), own, side, secrets) }
    }

    /// As [`Segment::in_windows`], over a link that is slowed down to a model: spans of
    /// [`Segment::TIMED_WINDOW_BYTES`].
    ///
    /// # Errors
    /// `INVAL` for a model that no link can have.
    ///
    /// # Panics
    /// If a span is of another size.
    pub fn in_modelled_windows(
        inbound: &Region,
        outbound: &Region,
        link: ModelledLink,
        side: Side,
        secrets: Secrets,
    ) -> Result<Self, Errno> {
        check_spans([inbound, outbound], Self::TIMED_WINDOW_BYTES);
        let ModelledLink { model, pace, peers_pace } = link;
        let setup = SharedConfig { layout: TIMED_SHAPE, timing: model.timing, pacer: pace, peer_pacer: peers_pace };
        let windows = SharedWindows::new(inbound, outbound, setup).map_err(|_| Errno::INVAL)?;
        let modelled = Modelled { windows, model, peers: outbound.sub(0, ENDPOINT_BYTES) };
        let own = inbound.sub(0, ENDPOINT_BYTES);
        Ok(Self { is_in_windows: true, ..Self::of(Medium::Modelled(Box::new(modelled)), own, side, secrets) })
    }

    /// As [`Segment::in_windows`], of memory that is no ordinary memory; `page` is ordinary memory of
    /// [`Segment::LOCAL_PAGE_BYTES`] that the processes which hold this end share, and zero for a new one.
    ///
    /// # Panics
    /// If a span, or the local page, is of another size.
    pub fn with_local_page(
        inbound: DeviceMemory,
        outbound: DeviceMemory,
        page: &Region,
        side: Side,
        secrets: Secrets,
    ) -> Self {
        use fabric::Memory;
        for span in [&inbound, &outbound] {
            assert_eq!(span.len_bytes(), Self::WINDOW_BYTES, "a connection's span of a window");
        }
        let own = page.sub(0, ENDPOINT_BYTES);
        let medium = Medium::Split(Box::new(SplitEndpoint::new(inbound, outbound, own.clone())));
        Self { is_in_windows: true, ..Self::of(medium, own, side, secrets) }
    }

    /// Over a modelled link, waits until what the peer has sent by now is here: a ring says that there is something,
    /// and has another way.
    pub fn wait_for_arrivals(&self) {
        if let Medium::Modelled(modelled) = &self.medium {
            modelled.windows.wait_for_arrivals();
        }
    }

    /// The model of the link that an end in windows goes over, as those who come to hold it find it. Whatever is
    /// there, a peer may have written it.
    pub fn model(&self) -> Option<LinkModel> {
        LinkModel::from_words(MODEL_OFFSETS.map(|place| self.own.load_u64(place, Ordering::Relaxed)))
    }

    /// The sending end of the outgoing lane, where the link is slowed down to a model.
    pub fn timed_sender(&self) -> Option<TimedSender> {
        let Medium::Modelled(modelled) = &self.medium else { return None };
        let (inbound, outbound) = (modelled.windows.inbound(), modelled.windows.outbound());
        Some(Producer::new(outbound, inbound, WINDOW_LAYOUT, self.outgoing_secret()))
    }

    /// The receiving end of the incoming lane, where the link is slowed down to a model.
    pub fn timed_receiver(&self) -> Option<TimedReceiver> {
        let Medium::Modelled(modelled) = &self.medium else { return None };
        let (inbound, outbound) = (modelled.windows.inbound(), modelled.windows.outbound());
        Some(Consumer::new(inbound, outbound, WINDOW_LAYOUT, self.incoming_secret()))
    }

    /// The sending end of the outgoing lane, where this end's state lies apart from it.
    pub fn local_page_sender(&self) -> Option<LocalPageSender> {
        let Medium::Split(split) = &self.medium else { return None };
        Some(split.sender(self.outgoing_secret()))
    }

    /// The receiving end of the incoming lane, where this end's state lies apart from it.
    pub fn local_page_receiver(&self) -> Option<LocalPageReceiver> {
        let Medium::Split(split) = &self.medium else { return None };
        Some(split.receiver(self.incoming_secret()))
    }

    /// Makes a span of this node's window fit for a connection, while no program reaches it. Old records in the rings
    /// do not matter: the next connection has other secrets.
    pub fn clean_span(inbound: &impl Inbound) {
        clean(inbound.len_bytes(), |offset| inbound.store_u64(offset, 0, Ordering::Relaxed));
    }

    /// Cleans what this node writes in both spans of a connection whose ends have their state apart from them: each
    /// node does so before it says that it takes them, while no program of it reaches them.
    pub fn clean_with_local_page(inbound: &impl Inbound, outbound: &impl Outbound) {
        split_endpoint::clean(inbound, outbound);
    }

    /// As [`Segment::clean_span`], of the other node's window.
    pub fn clean_remote_span(outbound: &impl Outbound) {
        clean(outbound.len_bytes(), |offset| outbound.store_u64(offset, 0, Ordering::Relaxed));
        outbound.flush();
    }

    /// Whether it lies in windows: the lifeline then ends at this node's proxy, which says in memory when the peer's
    /// last descriptor goes, and whose own end tells nothing of the peer.
    #[inline]
    pub fn is_in_windows(&self) -> bool {
        self.is_in_windows
    }

    /// Writes what the other processes that will hold this end must find, and tells the peer that it is there.
    pub fn set_up(&self) {
        self.own.store_u64(SECRET_TO_ACCEPTOR, self.secrets.to_acceptor, Ordering::Relaxed);
        self.own.store_u64(SECRET_TO_CONNECTOR, self.secrets.to_connector, Ordering::Relaxed);
        self.store(OwnState::Holders, 1);
        self.store(OwnState::Users, 1);
        self.store(OwnState::Side, self.side as u64 + 1);
        if let Medium::Modelled(modelled) = &self.medium {
            for (place, word) in MODEL_OFFSETS.into_iter().zip(modelled.model.to_words()) {
                self.own.store_u64(place, word, Ordering::Relaxed);
            }
        }
        self.store(OwnState::Attached, 1);
        if let Medium::Split(split) = &self.medium {
            split.attach();
        }
        self.publish(PeerStatus::Attached, 1);
    }
}

fn check_spans(spans: [&Region; 2], span_bytes: usize) {
    for span in spans {
        assert_eq!(span.len_bytes(), span_bytes, "a connection's span of a window");
    }
}

/// The endpoint of a connection in windows, as the proxy of its node sees it: it tells the program what became of the
/// other one.
#[derive(Debug)]
pub struct Endpoint<I> {
    span: I,
    has_local_page: bool,
}

impl<I: Inbound> Endpoint<I> {
    /// In a span of this node's window.
    pub fn new(span: I) -> Self {
        let is_span = [false, true].map(Segment::window_bytes).contains(&span.len_bytes());
        assert!(is_span, "a connection's span of a window of {} bytes", span.len_bytes());
        Self { span, has_local_page: false }
    }

    /// As [`Endpoint::new`], of a program whose own state lies apart from the span.
    pub fn with_local_page(span: I) -> Self {
        Self { has_local_page: true, ..Self::new(span) }
    }

    /// Whether the program has set its end up: a server has accepted the connection.
    pub fn is_attached(&self) -> bool {
        if self.has_local_page {
            return split_endpoint::is_attached(&self.span);
        }
        self.span.load_u64(OwnState::Attached as usize, Ordering::Acquire) == 1
    }

    /// The other program's last descriptor is gone, and it will not store any more.
    pub fn note_left(&self) {
        if self.has_local_page {
            return split_endpoint::note_left(&self.span);
        }
        if self.span.load_u64(PeerStatus::Closed as usize, Ordering::Acquire) == 0 {
            self.span.store_u64(PeerStatus::Closed as usize, LEFT_SILENTLY, Ordering::Release);
        }
    }

    /// The connection is over at once.
    pub fn note_reset(&self) {
        if self.has_local_page {
            return split_endpoint::note_reset(&self.span);
        }
        self.span.store_u64(PeerStatus::Reset as usize, 1, Ordering::Release);
        self.span.store_u64(PeerStatus::Closed as usize, LEFT_SILENTLY, Ordering::Release);
    }
}

fn clean(span_bytes: usize, store_zero: impl Fn(usize)) {
    (0..ENDPOINT_BYTES).step_by(size_of::<u64>()).for_each(&store_zero);
    if span_bytes == Segment::TIMED_WINDOW_BYTES {
        TIMED_SHAPE.forget_words(store_zero);
    }
}

fn holder_offset(index: usize) -> usize {
    assert!(index < HOLDERS_NAMED_MAX, "holder {index} of {HOLDERS_NAMED_MAX}");
    HOLDER_NAMES + index * size_of::<u64>()
}
