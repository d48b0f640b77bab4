//! The words of an endpoint: its owner's state, and what its peer writes.

use crate::model::MODEL_WORDS;

pub(crate) const SECRET_TO_ACCEPTOR: usize = 200;
pub(crate) const SECRET_TO_CONNECTOR: usize = 208;

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
pub(crate) const CLOSED_IN_TIME: usize = 344;
/// Where the [`LinkModel`] of the link lies in an end's own state, zeros where it is none.
pub(crate) const MODEL_OFFSETS: [usize; MODEL_WORDS] = [232, 240, 248, 352, 360, 368];

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
pub(crate) const HOLDER_NAMES: usize = 256;

pub(crate) fn holder_offset(index: usize) -> usize {
    assert!(index < HOLDERS_NAMED_MAX, "holder {index} of {HOLDERS_NAMED_MAX}");
    HOLDER_NAMES + index * size_of::<u64>()
}
