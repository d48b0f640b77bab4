//! Events per second of the network with the minimal endpoint: `cargo bench -p netsim --bench event_rate`.

use std::time::Instant;

use netsim::network::{Network, NetworkConfig};
use netsim::sliding_window::{SlidingWindow, SlidingWindowConfig};
use netsim::topology::TopologyPreset;
use netsim::workload::{SizeDistribution, Workload};
use sim::{Span, Time};

fn main() {
    for preset in [TopologyPreset::LeafSpine256, TopologyPreset::ThreeTier1024] {
        let config = NetworkConfig::new(preset.topology(), 1);
        let sizes = SizeDistribution::find("cache-follower").expect("a built-in distribution");
        let workload = Workload::Poisson { sizes, load: 0.5, duration: Span::from_ns(1e6) };
        let flows = workload.flows(&config.topology, 1).expect("a valid load");
        let window = SlidingWindowConfig { payload_bytes: 1000, window: 128, timeout: Span::from_ns(1e6) };
        let mut network = Network::new(&config, SlidingWindow::for_hosts(window, config.topology.hosts()), flows);
        let started = Instant::now();
        network.run_flows(Time::from_ps(1_000_000_000_000));
        let (events, s) = (network.counters().events, started.elapsed().as_secs_f64());
        println!(
            "{}: {} flows, {events} events in {s:.2} s: {:.2} M per second; {:.1} MB",
            preset.name(),
            network.finished_flows().len(),
            events as f64 / s / 1e6,
            network.memory_bytes() as f64 / 1e6
        );
    }
}
