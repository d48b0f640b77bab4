//! `crosslane router example`: prints a cluster file to start from.

use anyhow::Result;

use crate::output;

/// Options of `crosslane router example`.
#[derive(clap::Args)]
pub struct Options {
    /// Number of nodes
    #[arg(long, value_name = "COUNT", default_value = "3", value_parser = clap::value_parser!(u8).range(2..=8))]
    nodes: u8,
}

/// Prints the cluster file.
pub fn main(options: &Options) -> Result<()> {
    output::print(&router_node::cluster::example(options.nodes))
}
