//! The memory of one connection: a sealed memfd or, between nodes whose programs may store into windows themselves, a
//! span of each of the two windows.
//!
//! Contents of a memfd:
//!
//! ```text
//! endpoint of the connector, endpoint of the acceptor, each:
//! own state
//! status: written by the peer
//! forward block and cursor of the incoming lane
//! back block and cursor of the outgoing lane
//! small rings (7360 bytes): of the acceptor, of the connector
//! larger rings (32 KiB to 16 MiB, each twice the previous one): of the acceptor, of the connector
//! ```
//!
//! The part before the larger rings has 16 KiB, which a connection keeps whatever it has carried. The larger rings only
//! occupy memory while they hold data; otherwise they only take address space. The endpoints share a page with the
//! start of a ring, because faulting in and zeroing a page costs more than any system call of a connect: a connection
//! that carries little touches two pages.
//!
//! In windows, each endpoint has a span of its own node's window: its words, and the small and the big ring of the
//! incoming lane. An endpoint only loads from its own span, so that there are no loads across the link. Over a modelled
//! link, the data of the model ([`fabric::timed::SharedWindows`]) follows in the span. In windows that are not ordinary
//! memory, the endpoint's own state is split from them (module `split_endpoint`).
//!
//! In the module [`ends`], each endpoint has a memory that only it writes, and the state of its own lies in neither.
//!
//! Elsewhere an endpoint's own state is in this memory so that processes which share the connection after `fork`,
//! `exec` or `SCM_RIGHTS` need nothing but the memfd. The peer can write it too. Every word loaded from it is checked,
//! and the worst that a peer can do is to corrupt its own connection.

// The peer can write the memory, and callers pass in raw descriptors.
#![allow(unsafe_code)]

mod endpoint;
pub mod ends;
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
    PeerStatus, RAISES_SIGNAL, RECEIVES_ELSEWHERE, RECEIVES_ONLY, SHUT_BOTH_WAYS,
};
