//! Errors of changes to the tables.

use ipnet::{Ipv4Net, Ipv6Net};
use thiserror::Error;

use crate::GroupId;

/// Why a change was rejected. The tables are unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Error {
    /// All blocks for /24s with longer IPv4 prefixes are in use.
    #[error("{prefix}: {blocks_max} other /24s, the maximum, contain prefixes longer than /24: aggregate routes")]
    BlocksFull {
        /// The prefix to insert.
        prefix: Ipv4Net,
        /// [`crate::v4::BLOCKS_MAX`].
        blocks_max: usize,
    },
    /// All nodes of the IPv6 trie are in use.
    #[error("{prefix}: all {nodes_max} nodes of the IPv6 table are in use: aggregate routes")]
    NodesFull {
        /// The prefix to insert.
        prefix: Ipv6Net,
        /// [`crate::v6::NODES_MAX`].
        nodes_max: usize,
    },
    /// All group numbers are in use.
    #[error("all {groups_max} next-hop groups are in use: remove groups without a route")]
    GroupsFull {
        /// [`crate::GROUPS_MAX`].
        groups_max: u16,
    },
    /// Too many next hops in a group.
    #[error("a next-hop group of {hops} hops: at most {hops_max} are allowed")]
    TooManyHops {
        /// Number of hops.
        hops: usize,
        /// [`crate::HOPS_MAX`].
        hops_max: usize,
    },
    /// No such group.
    #[error("next-hop group {}: does not exist; add it first", group.get())]
    GroupUnknown {
        /// The group.
        group: GroupId,
    },
    /// Routes use the group.
    #[error("next-hop group {}: {routes} routes use it; remove them first", group.get())]
    GroupInUse {
        /// The group.
        group: GroupId,
        /// Number of routes.
        routes: u32,
    },
    /// Unlinked memory cannot be reused, because a reader that may hold it does not end its batch.
    #[error("a reader has been in one batch for {waited_ms} ms and no memory is left: end batches early")]
    ReaderStalled {
        /// Duration of the wait in ms.
        waited_ms: u64,
    },
}
