//! Racks in etcd: where a rack outgrows a file, its description is a handful of keys (docs/rack.md), and each monitor
//! that runs holds a lease.
//!
//! * [`Address`], as in `etcd://HOST:PORT/PREFIX`.
//! * `gateway`: etcd's JSON gateway, which is HTTP; `tls`: the same over TLS.
//! * [`Store`]: a rack's keys below a prefix: read and written as a whole, and watched.
//! * [`Tenure`], [`Lease`]: who runs a node, as its lease says.
//! * [`Keeper`]: what a monitor has of all this: two threads, and a descriptor that says when there is news.
//!
//! What etcd answers is input: bounded in size and time, and checked before it is used.

mod address;
mod gateway;
mod keeper;
mod lease;
mod store;
mod tls;

use thiserror::Error;

pub use address::Address;
pub use gateway::Revision;
pub use keeper::{Keeper, News};
pub use lease::{Held, Lease, LinkState, Tenure};
pub use store::{Pushed, Store, Stored};

/// What is wrong with etcd, or with what it holds.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum EtcdError {
    /// No member answers.
    #[error("{address}: {reason}; see that etcd runs there, or give another --rack")]
    Unreachable {
        /// Which etcd.
        address: String,
        /// Why not.
        reason: String,
    },
    /// Files for TLS make no sense, or do not go with what is there.
    #[error("{address}: {reason}")]
    Tls {
        /// Which etcd.
        address: String,
        /// What is wrong, and the remedy.
        reason: String,
    },
    /// It answers with an error.
    #[error("{address}: etcd refuses: {reason}")]
    Refused {
        /// Which etcd.
        address: String,
        /// In its own words.
        reason: String,
    },
    /// What answers is no etcd, or etcd answers what it never does.
    #[error("{address}: no answer of etcd ({what}); see that --rack names the port for clients of etcd 3.4 or later")]
    Nonsense {
        /// Which etcd.
        address: String,
        /// What is wrong.
        what: String,
    },
    /// What lies there is no rack.
    #[error("{0}")]
    Rack(#[from] rack::RackError),
    /// Something else lies there.
    #[error("{address}: {reason}")]
    Occupied {
        /// Where.
        address: String,
        /// What is wrong, and the remedy.
        reason: String,
    },
    /// Others have written meanwhile.
    #[error("{address}: others change the rack at the same time; try again")]
    Race {
        /// Which rack.
        address: String,
    },
    /// Somebody else is the node.
    #[error("node '{node}' is up on {host} (process {pid}), as its lease in etcd says; {remedy}")]
    Taken {
        /// The node.
        node: String,
        /// The other monitor's machine.
        host: String,
        /// The other monitor.
        pid: u32,
        /// What to do.
        remedy: String,
    },
    /// The machine cannot give what a lease needs.
    #[error("{what}: {reason}")]
    System {
        /// What was attempted.
        what: String,
        /// What the kernel said.
        reason: String,
    },
}
