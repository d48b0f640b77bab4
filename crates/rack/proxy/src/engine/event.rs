//! What an engine reports to its driver.

use crate::connection::OpenPayload;
use crate::frame::{ConnectionNumber, FrameError};
use crate::table::ConnectionKey;
use lane::Corrupt;
use thiserror::Error;

/// An event that the engine's driver must handle.
#[derive(Debug)]
pub enum EngineEvent<L> {
    /// A program of the other node connects: find its server, then call [`Engine::answer`].
    Open {
        /// Identifies the connection in the answer.
        key: ConnectionKey,
        /// What the other node says about the connection: hostile.
        open_payload: OpenPayload,
    },
    /// The other node has no server for a program of this one.
    Refused {
        /// The program's connection, still open.
        local: L,
        /// The error number that the other node gave: hostile.
        errno: u32,
    },
    /// The peer violated the protocol for one connection, which was reset.
    Violation {
        /// The connection's number.
        number: ConnectionNumber,
        /// The violation.
        what: &'static str,
    },
}

/// A fault after which the link cannot be used: take it down.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LinkFault {
    /// The lane of a partition is corrupt.
    #[error("partition {partition}: {corrupt}")]
    Lane {
        /// Index of the partition in this engine.
        partition: usize,
        /// What is corrupt.
        corrupt: Corrupt,
    },
    /// A record is not a valid frame.
    #[error("partition {partition}: {error}")]
    Frame {
        /// Index of the partition in this engine.
        partition: usize,
        /// What is invalid.
        error: FrameError,
    },
    /// The peer opened a connection with a number that only this node may assign.
    #[error("the peer opened connection {:#x}, a number that only this node assigns", .0.0)]
    ConnectionNumber(ConnectionNumber),
    /// The peer opens connections and does not receive the refusals.
    #[error("the peer opens more than {0} connections and does not receive the refusals")]
    Flood(usize),
}

/// The outcome of a poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PollOutcome {
    /// Something was received or sent: poll again.
    pub progressed: bool,
    /// The peer sleeps: ring its doorbell.
    pub ring_peer: bool,
    /// A short message may wait for this processor: yield to other threads.
    pub should_yield: bool,
}
