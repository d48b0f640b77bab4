//! The data plane between two kernels: connections of programs, carried over the partitions of a link's windows.
//!
//! ```text
//!   program ── segment ── engine ══ partition (lane pair in a window) ══ engine ── segment ── program
//! ```
//!
//! An [`Engine`] stands between one or two partitions (one per [`Class`]) and the proxy's endpoints of connections
//! ([`LocalEndpoint`]). It is sans-IO: it reads no clock, makes no system call and never blocks. Its driver passes in
//! the time, the lanes and the local endpoints, calls [`Engine::poll`] while there is work, and
//! [`Engine::prepare_sleep`] before it blocks. The same engine runs live and in virtual time (crate `proxy-sim`).
//!
//! * **One copy** on each side: from the ring of the sending program to the outbound window, and from the inbound
//!   window to the ring of the receiving program.
//! * **Credit**: a connection sends no more than its receiver has granted. A connection whose program does not read
//!   stalls only itself: none of its bytes wait in a partition.
//! * **Slicing**: a connection sends at most one slice before the others are served, as in deficit round robin. With
//!   oversubscribed processors the slice is longer if no other connection was active recently. A connection that
//!   becomes active again with few bytes to send is served first, like the new flows of FQ-CoDel (RFC 8290).
//! * **Classes**: streams move to a partition of their own, and back when they stop being streams. A marker, the last
//!   frame in the old partition, keeps the order of bytes.
//! * **Failover**, optional: bytes are retained until the peer has acknowledged them, at the cost of one more copy. An
//!   engine whose link is lost is detached with its connections, attached to another transport, and resumes at the
//!   position that the peer reports.
//! * **Idle connections cost nothing**: only recently active connections are polled. The programs of the others are
//!   asked to ring.
//! * **Hostile peers**: a frame affects at most the connection that it names. A violation that cannot be attributed to
//!   a connection is a [`LinkFault`], which takes the link down.

mod connection;
mod counters;
pub mod driver;
pub mod engine;
pub mod frame;
mod local;
mod placement;
mod retransmit;
mod table;

pub use connection::{CREDIT_BYTES_INITIAL, CREDIT_BYTES_MAX, OpenPayload};
pub use counters::EngineCounters;
pub use engine::{
    DetachedEngine, Engine, EngineEvent, EngineSettings, LinkFault, PartitionLanes, PollOutcome, SuspendedConnection,
};
pub use local::{Broken, Input, LocalEndpoint};
pub use placement::{Class, Placement};
pub use table::ConnectionKey;
