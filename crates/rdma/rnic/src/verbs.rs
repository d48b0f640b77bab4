//! What programs see of a NIC, in the words of the verbs (InfiniBand Architecture Specification, volume 1, chapters 10
//! and 11).

mod access;
mod completion;
mod completion_queue;
mod memory;
mod modify;
mod shared_receive_queue;
mod state;
mod work;

pub use access::Access;
pub use completion::{Completion, CompletionKind, CompletionStatus};
pub use completion_queue::{CQ_ENTRIES_MAX, CompletionQueue, CompletionQueueError, Notify};
pub use memory::{Bind, MemoryError, MemoryTable, ProtectionDomain, RegionKeys, Registration, Requester, WindowKind};
pub use modify::{AttributeSet, Attributes, Mtu, QpAttributes, TransitionError, check_transition};
pub use shared_receive_queue::{SRQ_REQUESTS_MAX, SharedReceiveQueue, SharedReceiveQueueError, Taken};
pub use state::{QpState, StateError};
pub use work::{Address, Datagram, LKey, MESSAGE_BYTES_MAX, Receive, Remote, SGES_MAX, Send, SendKind, Sge};
