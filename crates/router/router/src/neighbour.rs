//! Neighbours: who on a port's network has which hardware address, by RFC 4861's states, for IPv4 (ARP) too.
//!
//! The table is without I/O: what is to be done comes out as [`Action`]s. Each neighbour is an *adjacency*, whose
//! number other nodes of the cluster know; a number that was given back rests for a while before another neighbour gets
//! it, so that nothing under way reaches the wrong one.

mod action;
mod adjacency;
mod state;
mod table;
mod timing;

pub(crate) use action::{Action, NeighbourUpdate};
pub(crate) use adjacency::{Adjacency, PortL2};
pub use state::{Neighbour, NeighbourState};
pub(crate) use table::Neighbours;
