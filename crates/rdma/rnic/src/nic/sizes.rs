//! How large the engine's structures are, for the ledger.

use std::cmp::Reverse;

use sim::Time;

use super::context::Context;
use super::control_queue::{QueuedEntry, ReceiveTracker};
use super::host_qp::{HostQp, SendEntry};
use super::pool::{ContextFetch, DirectoryEntry, PARKED_LINK_BYTES, PoolSlot};
use super::scoreboard::Scoreboard;
use crate::verbs::ReceiveRequest;

/// Bytes of the engine's structures, as the compiler lays them out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StructureSizes {
    /// What hardware knows of a queue pair.
    pub context: usize,
    /// What the scheduler needs for a queue pair: its places in the event mux and the schedule queue, and its timer.
    pub scheduler: usize,
    /// What a queue pair has in the host's memory besides its requests.
    pub host: usize,
    /// A request of a send queue.
    pub send: usize,
    /// A request of a receive queue.
    pub receive: usize,
    /// What the slow path's software knows of a queue pair in which something is missing, each way; without the lists
    /// of what is missing and of what waits for it.
    pub slow_path: usize,
    /// A header in the control queue.
    pub control_entry: usize,
    /// Where contexts come and go: what is on chip of every queue pair, be its context there or not.
    pub entry: usize,
    /// There: a place for a context, besides the context itself; its exact timer with it.
    pub slot: usize,
    /// There: a context that is wanted.
    pub fetch: usize,
    /// There: what a packet that waits in the receive buffer takes besides itself.
    pub parked_link: usize,
}

impl StructureSizes {
    /// Those of the engine.
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
