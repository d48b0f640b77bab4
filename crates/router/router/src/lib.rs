//! The forwarding path of a router as a sans-IO engine: time, randomness, packets and routes are passed in; packets,
//! events and counters come out.
//!
//! A router is a *cluster* of nodes, each with ports of its own. The ingress node looks a packet up once; the resulting
//! [`Hop`] accompanies the packet to the egress node.
#![forbid(unsafe_code)]

pub mod balance;
pub mod batch;
mod config;
mod counters;
mod forwarder;
mod hop;
pub mod interner;
mod local_addresses;
mod neighbour;
mod output;
mod pool;
pub mod port;
mod rate;
pub mod routes;
pub mod sparse_map;
mod time;
mod trace;

pub use config::{Config, Limits, PortConfig, TransitPath, Vlan};
pub use counters::{Counters, DropReason, Drops, PortCounters, Traffic};
pub use forwarder::{ClaimState, Forwarder, NeighboursFull, PortError, Stage, StageProbe, VECTOR_PACKETS_MAX};
pub use hop::{AdjacencyId, Hop, NODES_MAX, NodeId, PORTS_MAX, PortId};
pub use neighbour::{Neighbour, NeighbourState};
pub use output::{Event, Output, RoutedPacket};
pub use pool::{Packet, Pool};
pub use port::{Port, PortLosses};
pub use rate::Rate;
pub use routes::{Rib, RouteError, Tables};
pub use time::Time;
pub use trace::{Filter, Step, TracedStep};
