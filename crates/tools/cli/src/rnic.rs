//! `crosslane rnic`: models of the RDMA NIC whose engine is the crate `rnic`.

mod figures;
mod memory;
mod policy_argument;
mod sim;

use anyhow::Result;
use clap::Subcommand;

/// Subcommands of `crosslane rnic`.
#[derive(Subcommand)]
pub enum Command {
    /// Show the memory that a kind of NIC needs on chip and in the host for a number of queue pairs
    Memory(memory::Options),
    /// Reproduce the figures of the SRNIC paper (goodput, memory, latency, slowdown) with the published values, and
    /// compute goodput over several paths and message rates
    Figures(figures::Options),
    /// Simulate the NIC in a network: goodput, loss, several paths, latency, message rate, flows
    #[command(subcommand)]
    Sim(sim::Command),
}

/// Runs the subcommand.
pub fn main(command: &Command) -> Result<()> {
    match command {
        Command::Memory(options) => memory::main(options),
        Command::Figures(options) => figures::main(options),
        Command::Sim(command) => sim::main(command),
    }
}
