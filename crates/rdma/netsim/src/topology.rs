//! Hosts, switches, and the links between them.

mod build;
mod graph;
mod routes;

pub use build::{Tiers, TopologyPreset, dumbbell, fat_tree, leaf_spine, three_tier};
pub use graph::{HOSTS_MAX, HostId, NetworkLink, NetworkNode, SWITCHES_MAX, SwitchId, Topology, TopologyError};
pub(crate) use routes::{NextHops, Routes};
