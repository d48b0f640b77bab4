//! Events per second with the RDMA endpoint: `cargo bench -p netsim --bench fct [-- TOPOLOGY MILLISECONDS]`.

use std::time::Instant;

use netsim::network::{Network, NetworkConfig};
use netsim::rdma::{PathProperties, RdmaConfig, RdmaEndpoint, profile};
use netsim::topology::TopologyPreset;
use netsim::transport::TransportConfig;
use netsim::workload::{SizeDistribution, Workload};
use sim::{Span, Time};

/// Returns the topology and the duration in nanoseconds from the command line, or the default ones.
fn runs() -> Vec<(TopologyPreset, f64)> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let [name, ms] = &arguments[..] else {
        return vec![(TopologyPreset::LeafSpine256, 1e6), (TopologyPreset::ThreeTier1024, 5e5)];
    };
    let preset = TopologyPreset::ALL.into_iter().find(|preset| preset.name() == name).expect("the name of a topology");
    vec![(preset, ms.parse::<f64>().expect("milliseconds") * 1e6)]
}

fn main() {
    for (preset, during_ns) in runs() {
        let config = NetworkConfig::new(preset.topology(), 1);
        let sizes = SizeDistribution::find("cache-follower").expect("a built-in distribution");
        let workload = Workload::Poisson { sizes, load: 0.5, duration: Span::from_ns(during_ns) };
        let flows = workload.flows(&config.topology, 1).expect("a valid load");
        let path = PathProperties {
            rate: config.topology.links()[0].rate,
            slowest: config.topology.links()[0].rate,
            round_trip: Span::from_ns(9000.0),
            links: 4,
        };
        let rdma = RdmaConfig::new(profile(&TransportConfig::default(), &path));
        let endpoints = RdmaEndpoint::for_hosts(rdma, config.topology.hosts()).expect("a valid NIC profile");
        let mut network = Network::new(&config, endpoints, flows);
        let started = Instant::now();
        network.run_flows(Time::from_ps(1_000_000_000_000));
        let (events, s) = (network.counters().events, started.elapsed().as_secs_f64());
        println!(
            "{}: {} of {} flows, {events} events in {s:.2} s: {:.2} M per second; {:.1} MB; {:?} {:?}",
            preset.name(),
            network.finished_flows().len(),
            network.flows().len(),
            events as f64 / s / 1e6,
            network.memory_bytes() as f64 / 1e6,
            network.endpoint_counters(),
            network.counters()
        );
    }
}
