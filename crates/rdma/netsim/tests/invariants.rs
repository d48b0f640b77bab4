//! What holds whatever lines and switches do: nothing is lost without being counted, nothing arrives twice unseen, no
//! buffer holds more than it has, and a seed makes a run.

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
        Flow {
            start: Time::from_ps(start),
            from: HostId(from),
            to: HostId(to),
            bytes,
            connection: None,
            repeats: false,
        }
    };
    starts.into_iter().map(flow).collect()
}

fn incast(bytes: u64) -> Vec<Flow> {
    let flow =
        |from| Flow { start: Time::ZERO, from: HostId(from), to: HostId(0), bytes, connection: None, repeats: false };
    (1..HOSTS).map(flow).collect()
}

fn run(config: &NetworkConfig, flows: Vec<Flow>) -> Network<SlidingWindow> {
    let window = SlidingWindowConfig { payload_bytes: 1000, window: 64, timeout: Span::from_ns(200_000.0) };
    let mut network = Network::new(config, SlidingWindow::for_hosts(window, HOSTS), flows);
    assert!(network.run_flows(Time::from_ps(10_000_000_000_000)), "all flows end within ten seconds");
    network
}

/// Every packet is somewhere, every byte was delivered once, every flow ended once.
fn hold(network: &Network<SlidingWindow>) {
    let (counted, ends) = (network.counters(), network.endpoint_counters());
    let gone = counted.lost_packets + counted.corrupt_packets + counted.dropped_packets;
    let found = counted.delivered_packets + gone + network.packets_in_flight() as u64;
    assert_eq!(ends.sent_packets + counted.doubled_packets, found, "{counted:?}");
    assert_eq!(ends.delivered_bytes, network.flows().iter().map(|flow| flow.bytes).sum::<u64>());
    let mut ended: Vec<u32> = network.finished_flows().iter().map(|end| end.id.0).collect();
    ended.sort_unstable();
    assert_eq!(ended, (0..network.flows().len() as u32).collect::<Vec<_>>());
}

/// Not by the macro, which takes PROPTEST_CASES for all: a case is a simulation.
#[test]
fn packets_and_bytes_are_conserved_under_every_impairment() {
    let shares = [0.0..0.2, 0.0..0.1, 0.0..0.05];
    let switches = (any::<bool>(), any::<bool>(), any::<bool>());
    let strategy = (0..1000_u64, 0..3_usize, shares, switches, 20_000..500_000_u64);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(48));
    let outcome = runner.run(&strategy, |(seed, loss, shares, switches, buffer_bytes)| {
        conserved(seed, loss, shares, switches, buffer_bytes);
        Ok(())
    });
    outcome.unwrap();
}

fn conserved(
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
        // Pauses need headroom for every port besides.
        buffer_bytes: if pauses { 1_500_000 + buffer_bytes } else { buffer_bytes },
        trimming: trimming && !pauses,
        pfc: pauses.then(Pfc::default),
        load_balancing: if sprays { LoadBalancing::PacketSpraying } else { LoadBalancing::Ecmp },
        ..SwitchConfig::default()
    };
    let network = run(&config(switches, &impairments, seed), flows(seed, 60, 100_000));
    hold(&network);
    assert!(!pauses || network.counters().dropped_packets == 0, "pauses lose nothing");
}

#[test]
fn a_seed_makes_a_run_and_another_one_another() {
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
fn pauses_lose_nothing_where_a_full_buffer_drops() {
    let small = SwitchConfig { buffer_bytes: 800_000, ..SwitchConfig::default() };
    let without = run(&config(small.clone(), &Impairments::default(), 1), incast(300_000));
    let paused = SwitchConfig { pfc: Some(Pfc::default()), ..small };
    let with = run(&config(paused, &Impairments::default(), 1), incast(300_000));
    hold(&without);
    hold(&with);
    assert!(without.counters().dropped_packets > 0 && without.counters().pauses == 0);
    assert!(with.counters().dropped_packets == 0 && with.counters().pauses > 0);
    assert_eq!(with.endpoint_counters().retransmitted_packets, 0);
}

#[test]
fn trimmed_heads_arrive_where_whole_packets_would_be_dropped() {
    let small = SwitchConfig { buffer_bytes: 100_000, trimming: true, ..SwitchConfig::default() };
    let network = run(&config(small, &Impairments::default(), 1), incast(300_000));
    hold(&network);
    let counted = network.counters();
    assert!(counted.trimmed_packets > 100 && counted.dropped_packets * 10 < counted.trimmed_packets, "{counted:?}");
}

#[test]
fn a_queue_that_grows_marks_packets() {
    let network = run(&config(SwitchConfig::default(), &Impairments::default(), 1), incast(300_000));
    let counted = network.counters();
    assert!(counted.marked_packets > 0 && counted.queue_max_bytes > 400_000, "{counted:?}");
    let few = run(&config(SwitchConfig::default(), &Impairments::default(), 1), incast(10_000));
    assert_eq!(few.counters().marked_packets, 0);
}

#[test]
fn spraying_reorders_a_flow_and_paths_by_flow_do_not() {
    let run = |load_balancing| {
        let switches = SwitchConfig { load_balancing, ..SwitchConfig::default() };
        run(&config(switches, &Impairments::default(), 1), flows(3, 60, 400_000)).endpoint_counters()
    };
    // This transport takes an order that is changed by more than three packets for a loss.
    assert_eq!(run(LoadBalancing::Ecmp).retransmitted_packets, 0);
    let sprayed = run(LoadBalancing::PacketSpraying);
    assert_eq!(sprayed.spurious_packets, sprayed.retransmitted_packets);
}
