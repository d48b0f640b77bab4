//! What the nodes of a cluster say to each other.
//!
//! Each node has a connection to each other one: the node with the higher number connects. On it go greetings, beats,
//! the routes of each node, and what its interconnect needs to be wired. Nothing here does I/O but `transport`.
//!
//! * [`words`]: the messages.
//! * [`announcements`]: what a node announces, with the order in which that changed, so that every other node is told
//!   the latest and only that, whenever it can take it.
//! * [`session`]: one connection, from the greeting to its end.
//! * [`seal`]: how nodes of several machines know each other.
//! * [`transport`]: packets over a unix socket or TCP.

pub mod announcements;
pub mod message;
pub mod seal;
pub mod session;
pub mod transport;

pub use announcements::Announcements;
pub use message::{
    AnnouncedHop, AnnouncedRoute, ControlError, Hello, METRIC_NEIGHBOUR, Origin, RouteChange, RouteKind,
};
pub use seal::{Key, KeyError};
pub use session::{OutgoingPacket, Session, SessionEvent, SessionTimers};
