//! How two processes find each other, on one machine and between nodes.
//!
//! * [`local`]: lane listeners in the rack [`directory`]; [`name_key`] authenticates the names of connecting endpoints.
//! * [`remote`]: listeners of other nodes, by the [`monitor`] and the proxies; [`span_lease`] and [`local_page`] are
//!   for programs that write windows themselves.
//! * [`connect`] and [`accept`] use either; [`handshake`] is the first message of a connection that brings its memory;
//!   `reasons` finds out afterwards why a connection has no lane.

mod accept;
pub mod address;
mod connect;
pub mod directory;
pub mod handshake;
pub mod local;
pub(crate) mod local_page;
pub mod monitor;
pub mod name_key;
pub mod reasons;
mod remote;
pub mod span_lease;
#[cfg(test)]
pub(crate) mod tests;

pub use accept::{Accepted, HandshakeRejection, accept, receive_handshake};
pub use connect::connect;
pub use local::*;
pub use remote::{
    ConnectProgress, ProxyReply, RemoteConnect, connect_in_windows, is_connected_to_proxy, listen_for_remote,
    may_lease, send_reply, try_map_spans,
};
pub(crate) use remote::{adopt as adopt_in_windows, adopt_on_device};
