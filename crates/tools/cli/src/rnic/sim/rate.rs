//! `crosslane rnic sim rate`: messages a second by size, and what limits them.

use anyhow::Result;
use clap::Args;
use netsim::experiments::{PIPELINE_MOPS, RateExperiment, RateResult};
use pcie::link::Generation;
use rnic::nic::TransportPolicy;
use serde::Serialize;
use stats::{Align, Table};

use super::{Common, classified, policy_argument};
use crate::output;

/// Options of `crosslane rnic sim rate`.
#[derive(Args)]
pub struct Rate {
    /// Kind of the NIC
    #[arg(long, value_parser = policy_argument::parser(), default_value = "srnic")]
    nic: TransportPolicy,
    /// Number of queue pairs
    #[arg(long, value_name = "N", default_value_t = 128)]
    qps: u32,
    /// Link rate in Gb/s
    #[arg(long, value_name = "GBPS", default_value_t = 200.0)]
    gbps: f64,
    /// Message sizes, at most 4096 bytes: one packet
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',', default_value = "8,64,256,1024,4096")]
    size: Vec<u32>,
    /// Generation of the NIC's PCIe link with 16 lanes, 1 to 7
    #[arg(long, value_name = "N", default_value = "4")]
    pcie_gen: Generation,
    /// Messages that the NIC's pipeline processes in a second, in millions; the default is published for ConnectX-6
    #[arg(long, value_name = "MOPS", default_value_t = PIPELINE_MOPS)]
    pipeline_mops: f64,
    #[command(flatten)]
    common: Common,
}

#[derive(Serialize)]
struct Row {
    message_bytes: u32,
    #[serde(flatten)]
    result: RateResult,
}

#[derive(Serialize)]
struct Report {
    nic: TransportPolicy,
    qps: u32,
    gbps: f64,
    pcie_gen: u8,
    seed: u64,
    rates: Vec<Row>,
}

/// Runs the experiments and prints the results.
pub fn main(options: &Rate) -> Result<()> {
    let Common { seed, json } = options.common;
    let Rate { nic, qps, gbps, pcie_gen: generation, pipeline_mops, .. } = *options;
    let run = |message_bytes: &u32| {
        let experiment = RateExperiment::new(nic, qps, gbps, *message_bytes, seed);
        let result = RateExperiment { generation, pipeline_mops, ..experiment }.run().map_err(classified)?;
        Ok(Row { message_bytes: *message_bytes, result })
    };
    let rates = options.size.iter().map(run).collect::<Result<Vec<_>>>()?;
    if json {
        return output::print_json(&Report { nic, qps, gbps, pcie_gen: generation.number(), seed, rates });
    }
    output::print(&table(&rates))
}

fn table(rates: &[Row]) -> String {
    let numbers = ["BYTES", "MODELLED Mops/s", "SIMULATED", "LINK", "PCIE", "PIPELINE"];
    let mut heads: Vec<_> = numbers.into_iter().map(|head| (head, Align::Right)).collect();
    heads.push(("LIMIT", Align::Left));
    let mut table = Table::new(&heads);
    for Row { message_bytes, result } in rates {
        let RateResult { mops, simulated_mops, link_mops, pcie_mops, pipeline_mops, limit, .. } = result;
        let rates = [mops, simulated_mops, link_mops, pcie_mops, pipeline_mops].map(|mops| format!("{mops:.2}"));
        let cells = [message_bytes.to_string()].into_iter().chain(rates).chain([limit.name().to_owned()]);
        table.row(cells.collect());
    }
    table.render()
}
