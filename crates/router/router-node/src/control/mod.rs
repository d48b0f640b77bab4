//! The control protocol between the nodes of a cluster.
//!
//! Each pair of nodes has one connection, which the node with the higher number opens. It carries hello and keepalive
//! messages, route updates, and the setup of the interconnect. Only `transport` does I/O.
//!
//! * [`message`]: the messages.
//! * [`announcements`]: the announced routes as a log of changes, from which each peer is sent the latest state at its
//!   own pace.
//! * [`session`]: the state machine of one connection.
//! * [`seal`]: authentication between nodes on several machines.
//! * [`transport`]: packets over a unix socket or TCP.

pub mod announcements;
pub mod message;
pub mod seal;
pub mod session;
pub mod transport;

pub use announcements::Announcements;
pub use message::{
    AnnouncedHop, AnnouncedRoute, ControlError, Hello, KeptRoutes, METRIC_NEIGHBOUR, Origin, RouteChange, RouteKind,
};
pub use seal::{Key, KeyError};
pub use session::{OutgoingPacket, Session, SessionEvent, SessionTimers};
