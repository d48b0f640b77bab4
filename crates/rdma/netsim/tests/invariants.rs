//! Invariants under every impairment and switch setting: every loss is counted, every copy is detected, no buffer
//! overflows, and the seed determines the run.

use netsim::endpoint::Flow;
use netsim::impairment::{GilbertElliott, Impairments, Loss};
use netsim::network::{Network, NetworkConfig};
use netsim::sliding_window::{SlidingWindow, SlidingWindowConfig};
use netsim::switch::{LoadBalancing, Pfc, SwitchConfig};
use netsim::topology::{HostId, Tiers, TopologyPreset, leaf_spine};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use sim::{Random, Span, Time};

const HOSTS: u32 = 12;

fn config(switches: SwitchConfig, impairments: &Impairments, seed: u64) -> NetworkConfig {
    let tiers = Tiers { leaves: 3, hosts_per_leaf: HOSTS / 3, spines: 2, ..TopologyPreset::LeafSpine256.tiers() };
    let topology = leaf_spine(&tiers).unwrap();
    let links = topology.links().len();
    let everywhere = (0..links).flat_map(|link| [(link, 0, impairments.clone()), (link, 1, impairments.clone())]);
    NetworkConfig { impairments: everywhere.collect(), topology, switches, seed }
}

fn flows(seed: u64, count: usize, bytes_max: u64) -> Vec<Flow> {
    let mut random = Random::new(seed, "flows");
    let mut starts: Vec<u64> = (0..count).map(|_| random.below(20_000_000)).collect();
    starts.sort_unstable();
    let flow = |start| {
        let from = random.below(HOSTS.into()) as u32;
        let to = (from + 1 + random.below(u64::from(HOSTS) - 1) as u32) % HOSTS;
        let bytes = 1 + random.below(bytes_max);
        Flow::new(Time::from_ps(start), HostId(from), HostId(to), bytes)
    };
    starts.into_iter().map(flow).collect()
}

fn incast(bytes: u64) -> Vec<Flow> {
    (1..HOSTS).map(|from| Flow::new(Time::ZERO, HostId(from), HostId(0), bytes)).collect()
}

fn run(config: &NetworkConfig, flows: Vec<Flow>) -> Network<SlidingWindow> {
    let window = SlidingWindowConfig { payload_bytes: 1000, window: 64, timeout: Span::from_ns(200_000.0) };
    let mut network = Network::new(config, SlidingWindow::for_hosts(window, HOSTS), flows);
    assert!(network.run_flows(Time::from_ps(10_000_000_000_000)), "all flows finish within ten seconds");
    network
}

/// Asserts that every packet is accounted for, every byte was delivered once and every flow finished once.
fn assert_conserved(network: &Network<SlidingWindow>) {
    let (counters, endpoints) = (network.counters(), network.endpoint_counters());
    let lost = counters.lost_packets + counters.corrupt_packets + counters.dropped_packets;
    let found = counters.delivered_packets + lost + network.packets_in_flight() as u64;
    assert_eq!(endpoints.sent_packets + counters.doubled_packets, found, "{counters:?}");
    assert_eq!(endpoints.delivered_bytes, network.flows().iter().map(|flow| flow.bytes).sum::<u64>());
    let mut finished: Vec<u32> = network.finished_flows().iter().map(|end| end.id.0).collect();
    finished.sort_unstable();
    assert_eq!(finished, (0..network.flows().len() as u32).collect::<Vec<_>>());
}

/// Sets its own number of cases, because each case is a simulation; the macro would take PROPTEST_CASES.
#[test]
fn packets_and_bytes_are_conserved_under_every_impairment() {
    let shares = [0.0..0.2, 0.0..0.1, 0.0..0.05];
    let switches = (any::<bool>(), any::<bool>(), any::<bool>());
    let strategy = (0..1000_u64, 0..3_usize, shares, switches, 20_000..500_000_u64);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(48));
    let outcome = runner.run(&strategy, |(seed, loss, shares, switches, buffer_bytes)| {
        run_impaired(seed, loss, shares, switches, buffer_bytes);
        Ok(())
    });
    outcome.unwrap();
}

fn run_impaired(
    seed: u64,
    loss: usize,
    [reorder, duplicate, corrupt]: [f64; 3],
    (trimming, sprays, pauses): (bool, bool, bool),
    buffer_bytes: u64,
) {
    let losses = [
        Loss::None,
        Loss::Uniform(0.02),
        Loss::GilbertElliott(GilbertElliott { to_bad: 0.002, to_good: 0.1, loss_good: 0.0, loss_bad: 0.5 }),
    ];
    let impairments = Impairments {
        loss: losses[loss].clone(),
        reorder,
        reorder_delay_max: Span::from_ns(5000.0),
        duplicate,
        corrupt,
    };
    let switches = SwitchConfig {
        // PFC needs headroom for every port in addition.
        buffer_bytes: if pauses { 1_500_000 + buffer_bytes } else { buffer_bytes },
        trimming: trimming && !pauses,
        pfc: pauses.then(Pfc::default),
        load_balancing: if sprays { LoadBalancing::PacketSpraying } else { LoadBalancing::Ecmp },
        ..SwitchConfig::default()
    };
    let network = run(&config(switches, &impairments, seed), flows(seed, 60, 100_000));
    assert_conserved(&network);
    assert!(!pauses || network.counters().dropped_packets == 0, "PFC drops nothing");
}

#[test]
fn the_seed_determines_the_run() {
    let impairments =
        Impairments { reorder: 0.1, reorder_delay_max: Span::from_ns(900.0), ..Impairments::uniform_loss(0.01) };
    let of = |seed| {
        let network = run(&config(SwitchConfig::default(), &impairments, seed), flows(1, 80, 200_000));
        (network.counters(), network.endpoint_counters(), network.finished_flows().to_vec())
    };
    assert_eq!(of(1), of(1));
    assert_ne!(of(1), of(2));
}

#[test]
fn pfc_drops_nothing_where_a_full_buffer_would_drop() {
    let small = SwitchConfig { buffer_bytes: 800_000, ..SwitchConfig::default() };
    let without = run(&config(small.clone(), &Impairments::default(), 1), incast(300_000));
    let paused = SwitchConfig { pfc: Some(Pfc::default()), ..small };
    let with = run(&config(paused, &Impairments::default(), 1), incast(300_000));
    assert_conserved(&without);
    assert_conserved(&with);
    assert!(without.counters().dropped_packets > 0 && without.counters().pauses == 0);
    assert!(with.counters().dropped_packets == 0 && with.counters().pauses > 0);
    assert_eq!(with.endpoint_counters().retransmitted_packets, 0);
}

#[test]
fn trimmed_packets_are_forwarded_where_whole_ones_would_be_dropped() {
    let small = SwitchConfig { buffer_bytes: 100_000, trimming: true, ..SwitchConfig::default() };
    let network = run(&config(small, &Impairments::default(), 1), incast(300_000));
    assert_conserved(&network);
    let counters = network.counters();
    assert!(counters.trimmed_packets > 100 && counters.dropped_packets * 10 < counters.trimmed_packets, "{counters:?}");
}

#[test]
fn a_long_queue_marks_packets_and_a_short_one_does_not() {
    let network = run(&config(SwitchConfig::default(), &Impairments::default(), 1), incast(300_000));
    let counters = network.counters();
    assert!(counters.marked_packets > 0 && counters.queue_max_bytes > 400_000, "{counters:?}");
    let few = run(&config(SwitchConfig::default(), &Impairments::default(), 1), incast(10_000));
    assert_eq!(few.counters().marked_packets, 0);
}

#[test]
fn packet_spraying_reorders_a_flow_and_ecmp_does_not() {
    let run = |load_balancing| {
        let switches = SwitchConfig { load_balancing, ..SwitchConfig::default() };
        run(&config(switches, &Impairments::default(), 1), flows(3, 60, 400_000)).endpoint_counters()
    };
    // This transport takes reordering by more than three packets for a loss.
    assert_eq!(run(LoadBalancing::Ecmp).retransmitted_packets, 0);
    let sprayed = run(LoadBalancing::PacketSpraying);
    assert_eq!(sprayed.spurious_packets, sprayed.retransmitted_packets);
}
