//! `crosslane rnic`: the RDMA NIC whose engine `rnic` is.

mod figures;
mod memory;
mod policy_argument;
mod sim;

use anyhow::Result;
use clap::Subcommand;

/// Everything under `crosslane rnic`.
#[derive(Subcommand)]
pub enum Command {
    /// What a kind of NIC keeps on chip and in the host's memory, by number of queue pairs
    Memory(memory::Options),
    /// The published figures: goodput, memory, latency, slowdown, as tables and plots, beside what was published
    Figures(figures::Options),
    /// The NIC in a simulated network: goodput, latency, loss, flows
    #[command(subcommand)]
    Sim(sim::Command),
}

/// Does what was asked.
pub fn main(command: &Command) -> Result<()> {
    match command {
        Command::Memory(options) => memory::main(options),
        Command::Figures(options) => figures::main(options),
        Command::Sim(command) => sim::main(command),
    }
}
