//! The neighbour table: maps the addresses on a port's networks to MAC addresses, with the states of RFC 4861 for both
//! IPv6 and IPv4 (ARP).
//!
//! The table is sans-IO: it returns what must be done as [`Action`]s. Each neighbour has an *adjacency*, whose number
//! other nodes of the cluster use. A freed number is reused only after a delay, so that no packet in flight reaches the
//! wrong neighbour.

mod action;
mod adjacency;
mod bounds;
mod state;
mod table;
#[cfg(test)]
mod tests;
mod timing;

pub(crate) use action::{Action, NeighbourUpdate};
pub(crate) use adjacency::{Adjacency, PortL2};
pub use state::{Neighbour, NeighbourState};
pub(crate) use table::Neighbours;
