//! What a table has no room for, and what it is asked that makes no sense.

use ipnet::{Ipv4Net, Ipv6Net};
use thiserror::Error;

use crate::GroupId;

/// Why tables were not changed. They are as they were before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Error {
    /// IPv4 prefixes longer than /24 lie in more /24s than there are blocks.
    #[error("{prefix}: prefixes longer than /24 lie in {blocks_max} other /24s, the most that there can be: aggregate")]
    BlocksFull {
        /// What was to be inserted.
        prefix: Ipv4Net,
        /// [`crate::v4::BLOCKS_MAX`].
        blocks_max: usize,
    },
    /// The IPv6 trie has as many nodes as it can.
    #[error("{prefix}: the table's {nodes_max} nodes are taken: aggregate")]
    NodesFull {
        /// What was to be inserted.
        prefix: Ipv6Net,
        /// [`crate::v6::NODES_MAX`].
        nodes_max: usize,
    },
    /// All numbers of groups are taken.
    #[error("a next-hop group more than the {groups_max} that there can be: remove groups without a route")]
    GroupsFull {
        /// [`crate::GROUPS_MAX`].
        groups_max: u16,
    },
    /// More hops than a group has.
    #[error("a next-hop group of {hops} hops: at most {hops_max}")]
    TooManyHops {
        /// That were given.
        hops: usize,
        /// [`crate::HOPS_MAX`].
        hops_max: usize,
    },
    /// There is no such group.
    #[error("next-hop group {}: there is none of that number; add it first", group.get())]
    GroupUnknown {
        /// Its number.
        group: GroupId,
    },
    /// Routes lead to the group.
    #[error("next-hop group {}: {routes} routes lead to it; remove them first", group.get())]
    GroupInUse {
        /// Its number.
        group: GroupId,
        /// How many.
        routes: u32,
    },
    /// What was taken out of the table cannot be used again, because a reader that may hold it does not leave.
    #[error(
        "a reader has been in one batch for {waited_ms} ms, and there is no other room: let it leave between batches"
    )]
    ReaderStalled {
        /// For how long it was waited.
        waited_ms: u64,
    },
}
