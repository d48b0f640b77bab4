//! The protocols between a node's monitor, its proxy and the command line.
//!
//! * [`Channel`] carries messages, each a JSON text in a packet of a unix socket, with its descriptors. JSON is used
//!   because this is not a data path and packets can be read in a trace.
//! * [`proxy`]: the monitor passes the device to its proxy, announces links and epochs, and requests listeners in place
//!   of remote ones.
//! * [`command`]: the command line sends versioned requests to a server; monitors and router nodes are such servers.
//! * [`monitor`]: the requests to a monitor: return the status, or stop.
//! * [`MetricsServer`]: serves the metrics of a monitor or a router node.
//! * [`SilenceTimer`]: when a peer that is not heard counts as lost.
//!
//! Programs query the listeners of other nodes at the same socket as the command line. The format of these queries is
//! in `socket::rack::monitor`, which must not depend on libc.

mod channel;
pub mod command;
mod counters;
mod metrics;
pub mod monitor;
pub mod proxy;
mod silence;

pub use channel::{Channel, ChannelError, MESSAGE_BYTES_MAX, Received, peer_uid};
pub use metrics::MetricsServer;
pub use silence::SilenceTimer;
