//! The transport engine: the life of queue pairs from RESET to ERR, and of packets from a posted work request to its
//! completion.
//!
//! [`Nic`] has no I/O. A driver, live or simulated, posts work requests, passes in packets that the wire format
//! accepted, asks for packets whenever the wire is idle, and calls [`Nic::advance`] no later than [`Nic::deadline`]. It
//! may make any call at any time, as long as time does not go backwards. Packets that arrive in order cause no
//! allocation.
//!
//! [`Context`] holds the state that the hardware of a real NIC would keep on chip, at most 230 bytes for each queue
//! pair. State in the host's memory and the software of the slow path are separate from it, and reached with the delays
//! of [`CostModel`].
//!
//! State and parameters, which do not know [`Nic`]:
//!
//! | module | contents |
//! |---|---|
//! | `policy`, `profile`, `limits` | the kind of NIC: transport policy, sizes, costs, bounds |
//! | `memory` | the host's memory, as the engine uses it |
//! | `congestion`, `counters`, `event`, `error` | congestion control; counters, events and errors for the driver |
//! | `context`, `context_table`, `host_qp` | the state of a queue pair, on chip and in the host's memory |
//! | `pipeline`, `timers`, `cache`, `pool` | scheduled packets, timers, and contexts on chip |
//! | `handover`, `control_queue` | the slow path: the owner of the receive side; queues to and from software |
//! | `scoreboard`, `response_tracker`, `packet_bitmap` | selective repeat: missing packets and responses |
//! | `request_error`, `segmentation`, `fifo` | shared helpers |
//! | `sizes` | sizes of the structures, for the memory budget |
//!
//! The engine, `engine`, and the files that implement its work:
//!
//! | module | contents |
//! |---|---|
//! | `control`, `resources`, `posting` | the verbs: queue pairs; memory, completion queues, SRQs; work requests |
//! | `schedule`, `emit` | the send side: scheduling, fetching, and building packets |
//! | `requester`, `read_response` | acknowledgements, retransmission, completions, READ and atomic responses |
//! | `responder`, `responder_in_order`, ... | requests of the peer, by service and loss recovery |
//! | `slow_path` | the software of the slow path |
//! | `observation` | what a program may observe of a queue pair's sending side |
//! | `paging`, `local_memory` | contexts that move between chip and host; scatter/gather lists |

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
mod handover;
mod host_qp;
mod limits;
mod local_memory;
mod memory;
mod observation;
mod packet_bitmap;
mod paging;
mod pipeline;
mod policy;
mod pool;
mod posting;
mod profile;
mod read_response;
mod request_error;
mod requester;
mod resources;
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

pub use congestion::{CongestionControl, Dcqcn, Dctcp, Swift, Timely};
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
pub use observation::SendLimit;
pub use packet_bitmap::PacketBitmap;
pub use policy::{ContextStorage, LossRecovery, TransportPolicy};
pub use profile::{
    ContextCacheConfig, ContextPoolConfig, CostModel, NicProfile, ProfileError, RetransmitTimeout, Scheduling,
};
pub use sizes::StructureSizes;
