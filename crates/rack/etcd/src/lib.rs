//! Racks in etcd: the description of a rack as keys (docs/rack.md), and the leases of its running monitors.
//!
//! * [`EtcdAddress`] is an address such as `etcd://HOST:PORT/PREFIX`.
//! * `gateway` is a client of etcd's JSON gateway over HTTP; `tls` adds TLS.
//! * [`RackStore`] reads and writes the keys of a rack as a whole.
//! * [`LeaseRecord`] says which monitor runs a node; [`NodeLease`] claims a node and keeps its lease alive.
//! * [`EtcdSession`] runs a monitor's lease and watch in two threads, and reports changes through a descriptor.
//!
//! Responses of etcd are untrusted input: bounded in size and time, and checked before use.

mod error;
mod etcd_address;
mod gateway;
mod lease_record;
mod node_lease;
mod printable;
mod session;
mod store;
mod tls;

pub use error::EtcdError;
pub use etcd_address::EtcdAddress;
pub use gateway::Revision;
pub use lease_record::{LeaseRecord, LeaseValue, LinkState};
pub use node_lease::NodeLease;
pub use session::{EtcdSession, EtcdUpdate};
pub use store::{PushSummary, RackStore, StoredRack};
