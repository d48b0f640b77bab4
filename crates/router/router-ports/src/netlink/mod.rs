//! The kernel's links, addresses, routes and neighbours: told as they are, and kept told.
//!
//! [`Monitor`] says what there is as changes from nothing, and then what changes. [`Requests`] asks the kernel to
//! change.

mod convert;
mod model;
mod monitor;
mod requests;
mod socket;
mod state;
#[cfg(test)]
mod tests;

pub use model::{
    Address, Change, Link, Neighbour, NeighbourState, PROTOCOL_CROSSLANE, Route, RouteHop, RouteKey, RouteKind,
};
pub use monitor::Monitor;
pub use requests::{Requests, RouteRequest, VethEnd};
pub use socket::NetlinkError;
