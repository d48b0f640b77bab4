//! `crosslane pcie`: models and measures PCIe links, hosts and devices.

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
mod predictions;
mod report;
pub mod sizes;
mod sweep;

use anyhow::Result;
use clap::Subcommand;

/// Subcommands of `crosslane pcie`.
#[derive(Subcommand)]
pub enum Command {
    /// Compute the bandwidth of a link for reads and writes of any size, from the protocol overhead
    Bandwidth(bandwidth::Options),
    /// Compute the throughput of a network card over a link, and the smallest frames that sustain line rate
    Nic(nic::Options),
    /// Compute the minimum latency of a transfer, part by part: links, switches, root complex, memory
    Latency(latency::Options),
    /// Decode packets of the transaction layer or the data link layer, given in hex, field by field
    Decode(decode::Options),
    /// Run a test of pcie-bench: latency or bandwidth of a simulated host, this machine's memory, a BAR or a GPU
    Bench(bench::Options),
    /// Run every combination of lists of parameters, and plot the paper's figures
    Sweep(Box<sweep::Options>),
    /// Compare two sets of results
    Compare(compare::Options),
    /// Convert the data published with the paper to results
    Import(import::Options),
    /// Calibrate the simulated hosts to the published ones, and print the deviation of every figure
    Fit(fit::Options),
    /// Compare the predictions for current servers with published figures, and print their stated errors
    Predictions(predictions::Options),
}

/// Runs the subcommand.
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
        Command::Predictions(options) => predictions::main(options),
    }
}
