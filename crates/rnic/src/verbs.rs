//! What programs see of a NIC, in the words of the verbs (InfiniBand Architecture Specification, volume 1, chapters 10
//! and 11).

mod completion;
mod state;
mod work;

pub use completion::{Completion, CompletionKind, CompletionStatus};
pub use state::{QpState, StateError};
pub use work::{Address, Datagram, LKey, MESSAGE_BYTES_MAX, Receive, Remote, SGES_MAX, Send, SendKind, Sge};
