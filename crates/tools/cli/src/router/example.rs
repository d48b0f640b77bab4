//! `crosslane router example`: a cluster file to begin with.

use anyhow::Result;

use crate::output;

/// What the example is of.
#[derive(clap::Args)]
pub struct Options {
    /// How many nodes
    #[arg(long, value_name = "COUNT", default_value = "3", value_parser = clap::value_parser!(u8).range(2..=8))]
    nodes: u8,
}

/// Prints it.
pub fn main(options: &Options) -> Result<()> {
    output::print(&router_node::cluster::example(options.nodes))
}
