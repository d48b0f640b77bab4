//! The programming interface of a NIC: the verbs of the InfiniBand Architecture Specification, volume 1, chapters 10
//! and 11.

mod access;
mod address;
mod completion;
mod completion_queue;
mod connection;
mod memory;
mod modify;
mod sge;
mod shared_receive_queue;
mod state;
mod work;

pub use access::AccessFlags;
pub use address::{DatagramDestination, NicAddress};
pub use completion::{Completion, CompletionKind, CompletionStatus};
pub use completion_queue::{CQ_ENTRIES_MAX, CompletionQueue, CompletionQueueError, CqNotify};
pub use connection::RcConnection;
pub use memory::{
    BindInfo, MemoryError, MemoryTable, ProtectionContext, ProtectionDomain, RegionKeys, Registration, WindowKind,
};
pub use modify::{AttributeSet, Mtu, QpAttributes, TransitionError, check_transition};
pub use sge::{LKey, SGES_MAX, Sge};
pub use shared_receive_queue::{SRQ_REQUESTS_MAX, SharedReceiveQueue, SharedReceiveQueueError, TakenReceive};
pub use state::{QpState, StateError};
pub use work::{MESSAGE_BYTES_MAX, ReceiveRequest, RemoteBuffer, SendKind, SendRequest};
