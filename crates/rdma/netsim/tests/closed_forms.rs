//! Compares simulations with closed forms.

use netsim::endpoint::{Flow, Framing};
use netsim::ideal::IdealFct;
use netsim::network::{Network, NetworkConfig};
use netsim::rate::LinkRate;
use netsim::sliding_window::{SlidingWindow, SlidingWindowConfig};
use netsim::topology::{HostId, Tiers, TopologyPreset, dumbbell, leaf_spine};
use sim::{Span, Time};

fn window() -> SlidingWindowConfig {
    SlidingWindowConfig { payload_bytes: 1000, window: 4096, timeout: Span::from_ns(1e7) }
}

fn flow(from: u32, to: u32, bytes: u64) -> Flow {
    Flow::new(Time::ZERO, HostId(from), HostId(to), bytes)
}

fn run(config: &NetworkConfig, flows: Vec<Flow>) -> Network<SlidingWindow> {
    let mut network = Network::new(config, SlidingWindow::for_hosts(window(), config.topology.hosts()), flows);
    assert!(network.run_flows(Time::from_ps(1_000_000_000_000)), "all flows finish within a second");
    network
}

fn packet_bytes(framing: Framing) -> u64 {
    u64::from(framing.payload_bytes + framing.overhead_bytes)
}

#[test]
fn a_flow_alone_takes_its_ideal_completion_time_to_the_picosecond() {
    for preset in [TopologyPreset::LeafSpine256, TopologyPreset::ThreeTier1024, TopologyPreset::ThreeTier4096] {
        let config = NetworkConfig::new(preset.topology(), 1);
        let ideal = IdealFct::new(&config.topology, window().framing());
        for (to, bytes) in [(1, 64), (1, 1_000_000), (20, 3000), (config.topology.hosts() - 1, 777_777)] {
            let network = run(&config, vec![flow(0, to, bytes)]);
            let end = network.finished_flows()[0].at.since(Time::ZERO);
            assert_eq!(end, ideal.fct(&flow(0, to, bytes)), "{} to {to}, {bytes} B", preset.name());
        }
    }
}

#[test]
fn an_incast_drains_at_its_receivers_rate() {
    let (gbps, senders, bytes) = (100.0, 15_u32, 200_000_u64);
    let rate = LinkRate::from_gbps(gbps).unwrap();
    let tiers = Tiers { leaves: 1, hosts_per_leaf: senders + 1, ..TopologyPreset::LeafSpine256.tiers() };
    let config = NetworkConfig::new(leaf_spine(&tiers).unwrap(), 1);
    let network = run(&config, (1..=senders).map(|from| flow(from, 0, bytes)).collect());
    let last = network.finished_flows().iter().map(|end| end.at).max().unwrap();
    // The receiver's link is busy from the first packet's arrival at the switch until the last packet has left it.
    let framing = window().framing();
    let packets = u64::from(senders) * bytes / 1000;
    let delay = tiers.delay;
    let data = rate.transmission_time(packet_bytes(framing))
        + delay
        + rate.transmission_time(packet_bytes(framing)) * packets
        + delay;
    let ack = (rate.transmission_time(framing.ack_bytes.into()) + delay) * 2;
    let (expected, one) = (Time::ZERO + data + ack, rate.transmission_time(packet_bytes(framing)));
    assert!(last.max(expected).since(last.min(expected)) <= one, "{last:?}, not {expected:?}");
    assert_eq!((network.counters().dropped_packets, network.packets_in_flight()), (0, 0));
}

#[test]
fn a_dumbbells_bottleneck_is_fully_used() {
    let rate = |gbps| LinkRate::from_gbps(gbps).unwrap();
    let (hosts, bytes) = (4_u32, 500_000_u64);
    let delay = Span::from_ns(500.0);
    let config = NetworkConfig::new(dumbbell(hosts, rate(100.0), rate(50.0), delay).unwrap(), 1);
    let network = run(&config, (0..hosts).map(|from| flow(from, hosts + from, bytes)).collect());
    let last = network.finished_flows().iter().map(|end| end.at).max().unwrap();
    let framing = window().framing();
    let packets = u64::from(hosts) * bytes / 1000;
    let edge = rate(100.0).transmission_time(packet_bytes(framing)) + delay;
    let middle = rate(50.0).transmission_time(packet_bytes(framing)) * packets + delay;
    let back = rate(100.0).transmission_time(84) * 2 + rate(50.0).transmission_time(84) + delay * 3;
    let (expected, one) =
        (Time::ZERO + edge + middle + edge + back, rate(50.0).transmission_time(packet_bytes(framing)));
    assert!(last.max(expected).since(last.min(expected)) <= one, "{last:?}, not {expected:?}");
}
