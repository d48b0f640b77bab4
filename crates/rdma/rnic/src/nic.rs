//! The transport engine: queue pairs from RESET to ERR, and every packet between posting and completion.
//!
//! [`Nic`] has no I/O. A driver, live or simulated, posts work, hands in packets that passed their checks on the wire,
//! asks for packets whenever the wire is free, and calls [`Nic::advance`] no later than [`Nic::deadline`]. It may call
//! anything at any time, with times that never go back. Nothing is allocated for a packet that comes in order.
//!
//! What hardware of a real NIC would hold is in [`Context`], at most 230 bytes a queue pair; what lies in the host's
//! memory, and the software of the slow path, is kept apart from it and reached with the delays of [`CostModel`]:
//!
//! | module | what |
//! |---|---|
//! | `profile`, `memory` | what is handed in: the kind of NIC, the host's memory |
//! | `congestion`, `counters` | how senders slow down; what is counted |
//! | `control` | the verbs that make, change and destroy; posting and polling |
//! | `context` | what a queue pair has on chip, and in the host's memory |
//! | `schedule` | which queue pair is next: doorbells, the schedule queue, fetching of requests and data |
//! | `emit` | what was scheduled becomes headers and payload |
//! | `requester`, `answers` | acknowledgements, answers with content, completions in order, retries |
//! | `responder` | requests of the peer, in order or placed before those that are missing |
//! | `hand_over`, `software`, `scoreboard`, `bits` | the slow path: who has a queue pair, what software decides |
//! | `sizes` | how large all this is |
//! | `timers`, `cache` | what is due; contexts on chip and their misses |
//! | `pool`, `paging` | contexts in the host's memory, fetched before they are needed |

mod cache;
mod congestion;
mod context;
mod context_table;
mod control;
mod control_queue;
mod counters;
mod emit;
mod engine;
mod error;
mod event;
mod fifo;
pub mod handover;
mod host_qp;
mod limits;
mod local_memory;
mod memory;
mod packet_bitmap;
mod paging;
mod pipeline;
mod policy;
mod pool;
mod profile;
mod read_response;
mod request_error;
mod requester;
mod responder;
mod responder_in_order;
mod responder_selective;
mod responder_unreliable;
mod response_tracker;
mod schedule;
mod scoreboard;
mod segmentation;
mod sizes;
mod slow_path;
#[cfg(test)]
mod tests;
mod timers;

pub use congestion::{CongestionControl, Dcqcn};
pub use context::{CONTEXT_BYTES_MAX, Context};
pub use control::{QpInit, QpStatus};
pub use counters::NicCounters;
pub use engine::{Nic, OutgoingPacket};
pub use error::NicError;
pub use event::{CqNumber, NicEvent, SrqNumber};
pub use limits::{
    DATAGRAM_OFFSET_BYTES, MTU_BYTES_MAX, MTU_BYTES_MIN, QUEUE_REQUESTS_MAX, READS_MAX, WINDOW_PACKETS_MAX,
};
pub use memory::{ByteMemory, HostMemory, MemoryFault, NoMemory};
pub use packet_bitmap::PacketBitmap;
pub use policy::{ContextStorage, LossRecovery, TransportPolicy};
pub use profile::{
    ContextCacheConfig, ContextPoolConfig, CostModel, NicProfile, ProfileError, RetransmitTimeout, Scheduling,
};
pub use sizes::StructureSizes;
