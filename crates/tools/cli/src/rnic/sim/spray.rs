//! `crosslane rnic sim spray`: goodput over several paths, compared with one path in order.

use anyhow::Result;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use netsim::experiments::{PathUse, SprayExperiment, SprayResult};
use netsim::transport::{CongestionAlgorithm, TransportConfig};
use rnic::nic::TransportPolicy;
use serde::Serialize;
use sim::Span;
use stats::{Align, Table};

use super::{Common, classified, policy_argument};
use crate::output;

/// Options of `crosslane rnic sim spray`.
#[derive(Args)]
pub struct Spray {
    /// Transport policy: detection and recovery of losses
    #[arg(long, value_parser = policy_argument::parser(), default_value = "srnic")]
    transport: TransportPolicy,
    /// Rate of each host's link and of each path in Gb/s; above 100, NICs have PCIe generation 5
    #[arg(long, value_name = "GBPS", default_value_t = 100.0)]
    gbps: f64,
    /// Number of sending hosts, each with a receiver of its own
    #[arg(long, value_name = "N", default_value_t = 4)]
    pairs: u32,
    /// Number of paths
    #[arg(long, value_name = "N", default_value_t = 8)]
    paths: u32,
    /// How much longer the longest path's propagation delay is than the shortest's, in microseconds
    #[arg(long, value_name = "US", default_value_t = 0.0)]
    skew_us: f64,
    /// Share of packets lost in each direction
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    loss: f64,
    /// Message bytes in a full packet
    #[arg(long, value_name = "BYTES", default_value_t = 4096)]
    mtu: u32,
    /// Congestion control
    #[arg(long, value_parser = congestion_parser(), default_value = "none")]
    congestion: CongestionAlgorithm,
    #[command(flatten)]
    common: Common,
}

fn congestion_parser() -> impl TypedValueParser<Value = CongestionAlgorithm> {
    PossibleValuesParser::new(CongestionAlgorithm::ALL.map(CongestionAlgorithm::name)).map(|name| {
        let named = |algorithm: &CongestionAlgorithm| algorithm.name() == name;
        CongestionAlgorithm::ALL.into_iter().find(named).unwrap_or_default()
    })
}

#[derive(Serialize)]
struct Report {
    transport: TransportPolicy,
    congestion: CongestionAlgorithm,
    gbps: f64,
    pairs: u32,
    paths: u32,
    skew_us: f64,
    loss: f64,
    mtu_bytes: u32,
    seed: u64,
    /// Goodput with spraying divided by that in order.
    goodput_share: f64,
    in_order: SprayResult,
    sprayed: SprayResult,
}

/// Runs both experiments and prints the results.
pub fn main(options: &Spray) -> Result<()> {
    let Common { seed, json } = options.common;
    let Spray { transport, congestion, gbps, pairs, paths, skew_us, loss, mtu: mtu_bytes, .. } = *options;
    let run = |path_use| {
        let experiment = SprayExperiment::new(transport, path_use, gbps, seed);
        let transport = TransportConfig { mtu_bytes, congestion, ..experiment.transport };
        let skew = Span::from_ns(skew_us * 1000.0);
        SprayExperiment { transport, pairs, paths, skew, loss, ..experiment }.run().map_err(classified)
    };
    let (in_order, sprayed) = (run(PathUse::InOrder)?, run(PathUse::Sprayed)?);
    let goodput_share = sprayed.goodput_gbps / in_order.goodput_gbps;
    if json {
        return output::print_json(&Report {
            transport,
            congestion,
            gbps,
            pairs,
            paths,
            skew_us,
            loss,
            mtu_bytes,
            seed,
            goodput_share,
            in_order,
            sprayed,
        });
    }
    output::print(&table(goodput_share, &in_order, &sprayed))
}

fn table(goodput_share: f64, in_order: &SprayResult, sprayed: &SprayResult) -> String {
    let heads = [("MODELLED", Align::Left), ("IN ORDER", Align::Right), ("SPRAYED", Align::Right)];
    let mut table = Table::new(&heads);
    let mut row = |what: &str, value: &dyn Fn(&SprayResult) -> String| {
        table.row(vec![what.to_owned(), value(in_order), value(sprayed)]);
    };
    let percent = |share: f64| format!("{:.2} %", share * 100.0);
    row("goodput of a host", &|result| format!("{:.2} Gb/s", result.goodput_gbps));
    row("data packets retransmitted", &|result| percent(result.retransmitted_share));
    row("data packets received twice", &|result| percent(result.spurious_share));
    row("headers processed in software", &|result| percent(result.slow_path_share));
    row("core utilisation of the slow path", &|result| percent(result.slow_path_core_share));
    row("time-outs", &|result| result.timeouts.to_string());
    row("packets dropped by switches", &|result| result.dropped_packets.to_string());
    table.row(vec!["goodput relative to that in order".to_owned(), percent(1.0), percent(goodput_share)]);
    table.render()
}
