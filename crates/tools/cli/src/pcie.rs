//! `crosslane pcie`: what a PCIe link, a host and a device on it give.

mod answer;
mod bandwidth;
mod bench;
mod compare;
mod decode;
mod figures;
mod fit;
mod import;
mod latency;
mod link;
mod nic;
mod parameters;
pub mod sizes;
mod sweep;

use anyhow::Result;
use clap::Subcommand;

/// Everything under `crosslane pcie`.
#[derive(Subcommand)]
pub enum Command {
    /// What a link leaves for reads and writes of any size, by the protocol's arithmetic
    Bandwidth(bandwidth::Options),
    /// What a network card moves over a link, and the smallest frames that sustain a line
    Nic(nic::Options),
    /// How long a transfer takes at least, part by part: links, switches, root complex, memory
    Latency(latency::Options),
    /// Explain packets of the transaction or the data link layer, given in hex, field by field
    Decode(decode::Options),
    /// Run a test of pcie-bench: latency or bandwidth of a simulated host, this machine's memory, a BAR or a GPU
    Bench(bench::Options),
    /// Run every combination of lists of parameters, and draw the paper's figures
    Sweep(Box<sweep::Options>),
    /// Two sets of results side by side, with their differences
    Compare(compare::Options),
    /// Read the data published with the paper
    Import(import::Options),
    /// Calibrate the simulated hosts to the published ones, and print how far every figure is off
    Fit(fit::Options),
}

/// Does what was asked.
pub fn main(command: &Command) -> Result<()> {
    match command {
        Command::Bandwidth(options) => bandwidth::main(options),
        Command::Nic(options) => nic::main(options),
        Command::Latency(options) => latency::main(options),
        Command::Decode(options) => decode::main(options),
        Command::Bench(options) => bench::main(options),
        Command::Sweep(options) => sweep::main(options),
        Command::Compare(options) => compare::main(options),
        Command::Import(options) => import::main(options),
        Command::Fit(options) => fit::main(options),
    }
}
