//! The kernel's links, addresses, routes and neighbours: their state, and its changes.
//!
//! [`Monitor`] reports the state as changes from nothing, and then each change. [`Requests`] asks the kernel for
//! changes.

mod convert;
mod model;
mod monitor;
mod requests;
pub(crate) mod socket;
mod state;
#[cfg(test)]
mod tests;

pub use model::{
    Address, Change, Link, Neighbour, NeighbourState, PROTOCOL_CROSSLANE, Route, RouteHop, RouteKey, RouteKind,
};
pub use monitor::Monitor;
pub use requests::{Requests, RouteRequest, VethEndpoint};
pub use socket::NetlinkError;
