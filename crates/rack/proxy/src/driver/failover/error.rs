//! Why connections of a lost link were not resumed over TCP, or not for long.

use super::frame_decoder::StreamError;
use crate::engine::LinkFault;
use rustix::io::Errno;
use std::net::SocketAddr;
use thiserror::Error;

/// How long after the loss of a link connections may take to be resumed. Then they are reset.
pub(super) const RESUME_NS_MAX: u64 = 5_000_000_000;

/// Why an engine has lost its peer.
#[derive(Debug, Error)]
pub(super) enum FailoverError {
    #[error("no TCP connection to {0}: {1}")]
    Route(SocketAddr, Errno),
    #[error("this node's proxy listens nowhere; see the beginning of this log")]
    NotListening,
    #[error("its proxy listens nowhere; see that node's proxy.log")]
    PeerNotListening,
    #[error("the TCP connection ended")]
    Ended,
    #[error("the TCP connection failed: {0}")]
    Failed(#[from] Errno),
    #[error("another process than the peer's proxy answered")]
    UnexpectedPeer,
    #[error("the other node did not connect within {} s", RESUME_NS_MAX / 1_000_000_000)]
    Timeout,
    #[error("the other node sent an invalid stream: {0}")]
    Stream(#[from] StreamError),
    #[error("the other node violated the protocol: {0}")]
    Fault(#[from] LinkFault),
}
