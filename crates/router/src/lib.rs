//! The forwarding path of a router, without I/O: time, randomness, packets and routes are handed in, packets and
//! counters come out.
//!
//! A router is a *cluster* of nodes, each with ports of its own. A packet is looked up once, by the node that it comes
//! in at; what it found, a [`Hop`], goes with it to the node that sends it.
#![forbid(unsafe_code)]

pub mod balance;
pub mod batch;
mod hop;
mod pool;
mod port;

pub use hop::{AdjacencyId, Hop, NODES_MAX, NodeId, PORTS_MAX, PortId};
pub use pool::{Packet, Pool};
pub use port::Port;
