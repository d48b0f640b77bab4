//! What a node's monitor says to its proxy and to the command line.
//!
//! * [`Channel`] carries messages: a JSON text each, in a packet of a unix socket, with the descriptors that belong to
//!   it. JSON, because nothing here is on a data path, and because a packet can then be read in a trace.
//! * [`proxy`]: the monitor hands its proxy the device, names links and epochs, and asks for mirrored listeners.
//! * [`monitor`]: the command line asks a monitor for its state, or to end.
//!
//! A program's question for a listener of another node arrives at the same socket as the command line's; its words are
//! `socket::rendezvous::monitor`'s, which must do without libc.

mod channel;
pub mod monitor;
pub mod proxy;

pub use channel::{Channel, ChannelError, MESSAGE_BYTES_MAX, Received, peer_uid};
