//! The control plane of a node.
//!
//! A monitor opens the device of its rack, trains the links to all other nodes, and communicates with their monitors
//! over a control lane in partition 0 of each window. It answers programs that query listeners of other nodes, keeps a
//! proxy running that forwards their data, and reports its status to the command line. It is one thread with one
//! `poll`.
//!
//! * `session`, `listener_queries`: state machines without I/O.
//! * `peer`, `neighbours`: a link from training to loss; the links to all nodes.
//! * `rack_subscription`: the rack in etcd, the node's lease, and changes.
//! * `registry`: listeners of this node's programs.
//! * `proxy_child`, `adopted_proxy`, `retained_connections`: the proxy, and connections that outlive it.
//! * `node_state`: the state of a node, and how its parts affect each other; `client_requests`, `proxy_messages` and
//!   `rack_updates` extend it.
//! * `node`: the event loop ([`Monitor`]), which calls all of them.
//!
//! Input of a peer can take down only its own link. Input of a program is answered or dropped. A proxy that ends is
//! started again.

mod adopted_proxy;
mod client_requests;
mod clients;
mod device;
mod error;
mod host;
mod listener_queries;
mod metrics;
mod neighbours;
mod node;
mod node_state;
mod peer;
mod proxy_child;
mod proxy_messages;
mod rack_subscription;
mod rack_updates;
mod registry;
mod retained_connections;
mod session;
mod settings;
mod status;

pub use device::{check_device, open as open_device, server_bytes, vectors};
pub use error::MonitorError;
pub use node::Monitor;
pub use session::VERSION as PROTOCOL_VERSION;
pub use settings::{EtcdSource, MonitorSettings};
