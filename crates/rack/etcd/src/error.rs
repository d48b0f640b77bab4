//! Errors of calls to etcd.

use thiserror::Error;

/// An error of etcd, or of the data in it.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum EtcdError {
    /// No member of the cluster answers.
    #[error("{address}: {reason}; see that etcd runs there, or give another --rack")]
    Unreachable {
        /// Address of etcd.
        address: String,
        /// The error of the last member.
        reason: String,
    },
    /// TLS files are invalid, or do not match those of etcd.
    #[error("{address}: {reason}")]
    Tls {
        /// Address of etcd.
        address: String,
        /// What is wrong, and the remedy.
        reason: String,
    },
    /// etcd answers with an error.
    #[error("{address}: etcd refuses: {reason}")]
    Refused {
        /// Address of etcd.
        address: String,
        /// etcd's error message.
        reason: String,
    },
    /// The response is not one that etcd sends.
    #[error(
        "{address}: not a response of etcd ({what}); see that --rack names the port for clients of etcd 3.4 or later"
    )]
    UnexpectedResponse {
        /// Address of etcd.
        address: String,
        /// What is wrong with the response.
        what: String,
    },
    /// The keys do not describe a valid rack.
    #[error("{0}")]
    Rack(#[from] rack::RackError),
    /// The prefix contains keys that are not a rack's.
    #[error("{address}: {reason}")]
    PrefixInUse {
        /// Address of the rack.
        address: String,
        /// What is wrong, and the remedy.
        reason: String,
    },
    /// The keys were modified at the same time.
    #[error("{address}: others change the rack at the same time; try again")]
    Conflict {
        /// Address of the rack.
        address: String,
    },
    /// Another monitor holds the node's lease.
    #[error("node '{node}' is up on {host} (process {pid}), as its lease in etcd says; {remedy}")]
    LeaseHeld {
        /// Name of the node.
        node: String,
        /// Host of the other monitor.
        host: String,
        /// Process number of the other monitor.
        pid: u32,
        /// The remedy.
        remedy: String,
    },
    /// A system call failed.
    #[error("{what}: {reason}")]
    System {
        /// The operation or file.
        what: String,
        /// The error of the operating system.
        reason: String,
    },
}
