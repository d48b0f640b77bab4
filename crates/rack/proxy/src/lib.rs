//! The data plane between two kernels: connections of programs, carried over the partitions of a link's windows.
//!
//! ```text
//!   program ── segment ── engine ══ partition (lane pair in a window) ══ engine ── segment ── program
//! ```
//!
//! An [`Engine`] stands between one or two partitions (one a [`Class`]) and the local ends of connections ([`Local`]).
//! It is sans-IO: it reads no clock, makes no system call and waits for nothing. Whoever drives it hands in the time,
//! the lanes and the local ends, calls [`Engine::turn`] while there is something to do, and [`Engine::sleep`] before it
//! sleeps; so the engine that runs live is the one that runs in virtual time.
//!
//! * **One copy** from the ring of the sending program to the outbound window, one from the inbound window to the ring
//!   of the receiving one.
//! * **Credits**: a connection sends no more than its receiver has said it takes. One that nobody reads stalls itself
//!   alone: nothing of it waits in a partition.
//! * **Slicing**: a connection sends at most a slice before the others have their turn, and a longer one in a crowd
//!   where no other was active lately. One that has just come back with little to say goes first.
//! * **Classes**: streams go to a partition of their own, and come back when they are none any more. The order of bytes
//!   is kept by a marker, the last frame in the old partition.
//! * **Failover**, where asked for: bytes are kept until the peer has said that it has them, which costs a copy more.
//!   An engine whose link is lost is detached with its connections, attached to another way, and goes on where the peer
//!   stands.
//! * **Idle costs nothing**: only connections that were active lately are looked at. The others have asked their
//!   programs to ring.
//! * **Hostile peers**: whatever comes, it reaches at most the connection that it names. What cannot be attributed to
//!   one is a [`Fault`]: the link goes down.

mod connection;
mod counters;
pub mod driver;
pub mod engine;
pub mod frame;
mod local;
mod placement;
mod retained;
pub mod simulated;
mod table;

pub use connection::{CREDIT_BYTES_INITIAL, CREDIT_BYTES_MAX, Tuple};
pub use counters::Counters;
pub use engine::{Detached, Engine, Event, Fault, Held, Port, Settings, Turn};
pub use local::{Broken, Input, Local};
pub use placement::{Class, Placement};
pub use table::Key;
