//! A router node as a process: `cluster.toml`, sessions with the other nodes, interconnects, and the forwarding loop.
#![forbid(unsafe_code)]

pub mod cluster;
pub mod control;
pub mod interconnect;
pub mod management;
mod node;

pub use node::{Node, NodeError, NodeSettings, restore_kernel_settings};
