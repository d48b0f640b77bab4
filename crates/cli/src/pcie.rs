//! `crosslane pcie`: what a PCIe link, a host and a device on it give.

mod bandwidth;
mod link;
mod sizes;

use anyhow::Result;
use clap::Subcommand;

/// Everything under `crosslane pcie`.
#[derive(Subcommand)]
pub enum Command {
    /// What a link leaves for reads and writes of any size, by the protocol's arithmetic
    Bandwidth(bandwidth::Options),
}

/// Does what was asked.
pub fn main(command: &Command) -> Result<()> {
    match command {
        Command::Bandwidth(options) => bandwidth::main(options),
    }
}
