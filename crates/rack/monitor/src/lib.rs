//! The control plane of a node.
//!
//! A monitor opens the device of its rack, trains the links to all other nodes, and talks with their monitors over a
//! control lane in partition 0 of each window. It answers programs that ask for a listener of another node, keeps a
//! proxy running that carries their bytes, and tells the command line how things are. It is one thread and one `poll`.
//!
//! * `session`, `questions`: state machines without I/O.
//! * `peer`: a link, from training to loss.
//! * `description`: the rack in etcd, the node's lease there, and what changes.
//! * `registry`: where this node's own programs listen.
//! * `store`: what is kept beyond a proxy.
//! * [`Monitor`]: the process around them.
//!
//! Whatever a peer writes takes down its own link at most; whatever a program sends is answered or dropped; whatever
//! the proxy does, it is started again.

mod clients;
mod description;
mod device;
mod metrics;
mod node;
mod peer;
mod proxy_child;
mod questions;
mod registry;
mod session;
mod store;

pub use description::InEtcd;
pub use device::{check_device, open as open_device, server_bytes, vectors};
pub use node::{Monitor, MonitorError, Settings};
