//! The memory of one connection: one sealed memfd, or, between nodes whose programs may store into windows themselves,
//! a span of each of the two windows.
//!
//! In a memfd:
//!
//! ```text
//!   endpoint of the connecting end, endpoint of the accepting end, each:
//!     the end's own state
//!     status: written by the peer
//!     forward block and cursor of the lane that comes in
//!     back block and cursor of the lane that goes out
//!   small rings (7360 bytes): of the accepting end, of the connecting end
//!   larger rings (32 KiB to 16 MiB, each twice the one before): of the accepting end, of the connecting end
//! ```
//!
//! What comes before the larger rings has 16 KiB: so much a connection keeps, whatever it has carried. The larger ones
//! have memory only while they hold something: where they lie costs addresses and nothing else. The endpoints and the
//! start of a ring share a page, because finding and zeroing a page costs more than any system call of a connect: a
//! connection that carries little touches two.
//!
//! In windows each end has a span of its own node's: its endpoint, the small ring and the big ring that come in.
//! Whatever an end loads lies in its own span, so that nothing is loaded across the link. Where the link is slowed down
//! to a model, what belongs to that ([`fabric::timed::SharedWindows`]) lies behind it in the span. In windows of memory
//! that is no ordinary memory, the end's own state lies [apart](split_endpoint) from them.
//!
//! An end's own state lies here so that processes sharing the connection after `fork`, `exec` or `SCM_RIGHTS` need
//! nothing but the memfd. The peer can write there too; whatever is loaded from it is checked like any other word, and
//! the worst a peer does by it is to garble its own connection.

// Memory that a peer can write, and descriptors of callers.
#![allow(unsafe_code)]

mod endpoint;
mod layout;
pub mod model;
mod segment;
mod split_endpoint;
mod words;

pub use endpoint::Endpoint;
pub use layout::{CAPACITY_BYTES_MAX, LAYOUT_VERSION, Side, layout_to};
pub use segment::{LocalPageReceiver, LocalPageSender, Receiver, Secrets, Segment, Sender, TimedReceiver, TimedSender};
pub use words::{
    BY_LANE_BOTH, BY_LANE_RECEIVE, BY_LANE_SEND, HOLDERS_NAMED_MAX, IS_CONFINED, LEFT_SILENTLY, OwnSnapshot, OwnState,
    PeerStatus, RAISES_SIGNAL, RECEIVES_ONLY, SHUT_BOTH_WAYS,
};
