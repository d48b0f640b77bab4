//! `cluster.toml`: the nodes, their ports, and their interconnect.
//!
//! A [`Cluster`] is a parsed file, checked as far as that needs no access to the machine. `docs/router.md` documents
//! every key.

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
pub(crate) use paths::all_sysctls;
pub use paths::{ClusterPaths, NodePaths};
pub use schema::{Balance, Batch, FilterMode, InterconnectKind, PortKind};
