//! A router node as a process: `cluster.toml`, other nodes, interconnects, the loop that forwards.
#![forbid(unsafe_code)]

pub mod cluster;
pub mod control;
pub mod interconnect;
pub mod management;
mod node;

pub use node::{Node, NodeError, NodeSettings};
