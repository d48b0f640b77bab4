//! `cluster.toml`: which nodes there are, what they are plugged into, and what joins them.
//!
//! A [`Cluster`] is what a file says, checked as far as that goes without looking at the machine. `docs/router.md`
//! explains every key.

mod check;
mod diff;
mod example;
mod file;
mod hash;
mod model;
mod paths;
mod schema;

pub use check::MTU_BYTES_MAX;
pub use diff::{ConfigDiff, batching_policy, diff};
pub use example::example;
pub use file::{ClusterError, ClusterFile};
pub(crate) use hash::fnv1a;
pub use model::{
    ADDRESSES_MAX, Cluster, DEVICE_BYTES_MAX, Interconnect, Node, PortOfNode, ROUTES_MAX, StaticRoute, Timeouts,
    VERSION,
};
pub use paths::{ClusterPaths, NodePaths};
pub use schema::{Balance, Batch, InterconnectKind, PortKind};
