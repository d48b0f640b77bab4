//! The sizes of the engine's structures, for the memory budget.

use std::cmp::Reverse;

use sim::Time;

use super::context::Context;
use super::control_queue::{QueuedEntry, ReceiveTracker};
use super::host_qp::{HostQp, SendEntry};
use super::pool::{ContextFetch, DirectoryEntry, PARKED_LINK_BYTES, PoolSlot};
use super::scoreboard::Scoreboard;
use crate::verbs::ReceiveRequest;

/// Sizes of the engine's structures in bytes, as the compiler lays them out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StructureSizes {
    /// The context of a queue pair.
    pub context: usize,
    /// The scheduler's state of a queue pair: its places in the event mux and the schedule queue, and its timer.
    pub scheduler: usize,
    /// The state of a queue pair in the host's memory, without its requests.
    pub host: usize,
    /// A request of a send queue.
    pub send: usize,
    /// A request of a receive queue.
    pub receive: usize,
    /// The slow path's state of a queue pair with missing packets, for both directions, without the lists of missing
    /// packets and of waiting actions.
    pub slow_path: usize,
    /// An entry of the control queue.
    pub control_entry: usize,
    /// For paged contexts: the directory entry of every queue pair.
    pub entry: usize,
    /// For paged contexts: a slot of the pool without the context, and its exact timer.
    pub slot: usize,
    /// For paged contexts: a requested context.
    pub fetch: usize,
    /// For paged contexts: the overhead of a packet that waits in the receive buffer.
    pub parked_link: usize,
}

impl StructureSizes {
    /// Returns the sizes.
    pub const fn of_engine() -> Self {
        Self {
            context: size_of::<Context>(),
            scheduler: 2 * size_of::<u32>() + size_of::<Reverse<(Time, u32)>>(),
            host: size_of::<HostQp>(),
            send: size_of::<SendEntry>(),
            receive: size_of::<ReceiveRequest>(),
            slow_path: size_of::<ReceiveTracker>() + size_of::<Scoreboard>(),
            control_entry: size_of::<QueuedEntry>(),
            entry: size_of::<DirectoryEntry>(),
            slot: size_of::<PoolSlot>() + size_of::<Reverse<(Time, u32)>>(),
            fetch: size_of::<ContextFetch>(),
            parked_link: PARKED_LINK_BYTES,
        }
    }
}
