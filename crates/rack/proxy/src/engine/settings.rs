//! How an engine works.

use crate::connection::{CREDIT_BYTES_INITIAL, CREDIT_BYTES_MAX};
use crate::frame::LinkSide;
use crate::placement::Placement;

/// How an engine works.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineSettings {
    /// Which side of the link this node is.
    pub side: LinkSide,
    /// The first number that this engine gives to a connection.
    pub number_first: u32,
    /// The difference between consecutive numbers: how many engines of this node share the link.
    pub number_step: u32,
    /// A secret that keeps the peer from choosing connection numbers that collide in the hash table.
    pub secret: u64,
    /// Bound on simultaneous connections.
    pub connections_max: usize,
    /// Bytes that a connection sends before the next one is served; `usize::MAX` switches slicing off.
    pub slice_bytes: usize,
    /// Unread bytes in a partition beyond which only short messages are added.
    pub backlog_bytes: usize,
    /// Bound on the bytes in flight to one connection.
    pub credit_bytes: u32,
    /// Bytes are retained until the peer has acknowledged them, so that connections can outlive the link. Both nodes
    /// must agree.
    pub is_failover: bool,
    /// How long a connection is polled after it was last active.
    pub poll_ns: u64,
    /// When a connection changes its class; `None` keeps all in the class in which they began.
    pub placement: Option<Placement>,
}

impl EngineSettings {
    /// Returns the defaults for an engine that has its side of a link to itself.
    pub fn new(side: LinkSide) -> Self {
        Self {
            side,
            number_first: 0,
            number_step: 1,
            secret: 0,
            connections_max: 65_536,
            slice_bytes: 2 << 10,
            backlog_bytes: 32 << 10,
            credit_bytes: 256 << 10,
            is_failover: false,
            poll_ns: 50_000,
            placement: Some(Placement::default()),
        }
    }

    pub(super) fn check(&self) {
        assert!(self.slice_bytes > 0 && self.connections_max > 0 && self.number_step > 0, "{self:?}");
        assert!((CREDIT_BYTES_INITIAL..=CREDIT_BYTES_MAX / 2).contains(&self.credit_bytes), "{self:?}");
    }
}
