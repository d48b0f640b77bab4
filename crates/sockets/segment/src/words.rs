//! The words of an endpoint: its own state, and what its peer writes.

use crate::model::MODEL_WORDS;

pub(crate) const SECRET_TO_ACCEPTOR: usize = 200;
pub(crate) const SECRET_TO_CONNECTOR: usize = 208;

/// The words of an endpoint's own state, by offset in the endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum OwnState {
    /// Number of processes that hold this endpoint, or may hold it.
    Holders = 0,
    /// Number of holders that rely on wakeups: those that slept when there came to be several holders, or have slept
    /// since. A child that only exits, calls `exec` or writes does not count.
    Users = 8,
    /// Directions that the program has shut down: 1 reading, 2 writing.
    Shutdown = 16,
    /// If not 0, `ECONNRESET` is reported once. A peer that writes the word can achieve no more than that.
    PendingError = 24,
    /// The known state of the peer's endpoint; see `connection::PeerState`.
    Peer = 32,
    /// Directions that use the lanes, and other notes: [`BY_LANE_SEND`] and the constants behind it.
    ByLane = 40,
    /// Options shared by all processes that hold this endpoint, as bits; see `options::SHARED`.
    Options = 48,
    /// The holder of the send lock between processes.
    SendLock = 64,
    /// The holder of the receive lock between processes.
    ReceiveLock = 128,
    /// What this endpoint has done with urgent bytes; see `connection::urgent`.
    Urgent = 136,
    /// Inode of this endpoint's lifeline.
    LifelineInode = 192,
    /// 1 once the endpoint is set up.
    Attached = 216,
    /// In windows, where each endpoint has a memory of its own: 1 for the connector, 2 for the acceptor.
    Side = 224,
}

/// Adjacent words of an endpoint's own state, loaded together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnSnapshot {
    /// [`OwnState::Holders`].
    pub holders: u64,
    /// [`OwnState::Shutdown`].
    pub shutdown: u64,
    /// [`OwnState::Peer`].
    pub peer: u64,
}

/// The words that the peer writes into an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum PeerStatus {
    /// The last urgent byte that the peer has sent. Not used in windows.
    Urgent = 72,
    /// 1: the peer dropped unread data, or requested a reset.
    Reset = 320,
    /// The peer's last descriptor is closed: 1 if it said so itself, [`LEFT_SILENTLY`] if its node's proxy did. Or
    /// [`SHUT_BOTH_WAYS`], while the peer still exists.
    Closed = 328,
    /// 1: the peer has attached.
    Attached = 336,
    /// 1: the peer has short messages of other connections to carry besides this stream. Long copies are then made in
    /// pieces and yield in between if another thread waits for the processor.
    GiveWay = 376,
}

/// Over a modelled link, the peer's close, which arrives behind the data that it sent. [`PeerStatus::Closed`] is stored
/// at once as well, so that this word need not be polled before.
pub(crate) const CLOSED_IN_TIME: usize = 344;
/// Offsets of the [`LinkModel`](crate::model::LinkModel)'s words in an endpoint's own state; zeros where the link is
/// not modelled.
pub(crate) const MODEL_OFFSETS: [usize; MODEL_WORDS] = [232, 240, 248, 352, 360, 368];

/// In [`PeerStatus::Closed`], in windows: the peer was killed, or may have left its endpoint to other processes.
/// Whether that is a reset depends on what it has read.
pub const LEFT_SILENTLY: u64 = 2;

/// In [`PeerStatus::Closed`], not in windows: the peer has shut down both directions. As in TCP, bytes sent to it reset
/// the connection.
pub const SHUT_BOTH_WAYS: u64 = 3;

/// In [`OwnState::ByLane`]: this endpoint sends by its lane.
pub const BY_LANE_SEND: u64 = 1;
/// In [`OwnState::ByLane`]: this endpoint receives by its lane.
pub const BY_LANE_RECEIVE: u64 = 2;
/// In [`OwnState::ByLane`]: the process is under a system call filter, and sends no wakeup when it has made room.
pub const IS_CONFINED: u64 = 4;
/// In [`OwnState::ByLane`]: the program has set a receiver of `SIGURG`.
pub const RAISES_SIGNAL: u64 = 8;
/// In [`OwnState::ByLane`]: this endpoint only receives by this memory. It sends by another one, which it created.
pub const RECEIVES_ONLY: u64 = 16;
/// In [`OwnState::ByLane`]: this endpoint only sends by this memory. It receives by one that its peer created.
pub const RECEIVES_ELSEWHERE: u64 = 32;
/// In [`OwnState::ByLane`]: both directions.
pub const BY_LANE_BOTH: u64 = BY_LANE_SEND | BY_LANE_RECEIVE;

/// Number of holders that can record a name, by which others notice that they are gone.
pub const HOLDERS_NAMED_MAX: usize = 8;
/// Offset of the holders' names, one word each.
pub(crate) const HOLDER_NAMES: usize = 256;

pub(crate) fn holder_offset(index: usize) -> usize {
    assert!(index < HOLDERS_NAMED_MAX, "holder {index} of {HOLDERS_NAMED_MAX}");
    HOLDER_NAMES + index * size_of::<u64>()
}
