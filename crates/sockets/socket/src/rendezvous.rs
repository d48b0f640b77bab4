//! Rendezvous: how two processes find each other, on one machine and between nodes.
//!
//! * [`local`]: lane listeners in the rack [`directory`]; [`name_key`] authenticates the names of connecting endpoints.
//! * [`remote`]: listeners of other nodes, by the [`monitor`] and the proxies. For programs that write windows
//!   themselves, `window_segment` maps the spans, [`span_lease`] shows that they are in use, and [`local_page`] records
//!   where they are.
//! * [`connect`] and [`accept`] use either; [`handshake`] is the first message of a connection that brings its memory;
//!   [`reasons`] determines why a connection has no lane.

mod accept;
pub mod address;
mod connect;
pub mod directory;
pub mod handshake;
pub mod local;
pub(crate) mod local_page;
pub mod monitor;
pub mod name_key;
mod proxy_reply;
pub mod reasons;
mod remote;
pub mod span_lease;
#[cfg(test)]
pub(crate) mod tests;
pub mod window_segment;

pub use accept::{Accepted, HandshakeRejection, accept, receive_handshake};
pub use connect::{connect, is_without_listener};
pub use local::*;
pub use proxy_reply::{ProxyReply, send_reply};
pub use remote::{ConnectProgress, RemoteConnect, connect_in_windows, is_connected_to_proxy, listen_for_remote};
pub use window_segment::{may_lease, try_map_spans};
