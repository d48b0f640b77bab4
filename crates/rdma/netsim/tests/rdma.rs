//! The RDMA engine as an endpoint.

use netsim::endpoint::{Endpoint, Flow};
use netsim::experiments::{FctExperiment, Observers};
use netsim::ideal::IdealFct;
use netsim::impairment::{Impairments, Loss};
use netsim::network::{Network, NetworkConfig};
use netsim::rdma::{PathProperties, RdmaConfig, RdmaEndpoint, Verb, profile};
use netsim::switch::{LoadBalancing, Pfc, SwitchConfig};
use netsim::topology::{HostId, Tiers, Topology, TopologyPreset, leaf_spine};
use netsim::transport::{CongestionAlgorithm, TransportConfig};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use rnic::nic::{NicProfile, TransportPolicy};
use sim::{Random, Span, Time};

const POLICIES: [TransportPolicy; 3] = [TransportPolicy::Srnic, TransportPolicy::Irn, TransportPolicy::GoBackN];

fn topology(hosts: u32) -> Topology {
    let tiers = Tiers { leaves: 1, hosts_per_leaf: hosts, spines: 1, ..TopologyPreset::LeafSpine256.tiers() };
    leaf_spine(&tiers).unwrap()
}

fn config(topology: Topology, impairments: Vec<(usize, usize, Impairments)>) -> NetworkConfig {
    NetworkConfig { impairments, ..NetworkConfig::new(topology, 1) }
}

fn flow(from: u32, to: u32, bytes: u64) -> Flow {
    Flow::new(Time::ZERO, HostId(from), HostId(to), bytes)
}

fn run(config: &NetworkConfig, rdma: RdmaConfig, flows: Vec<Flow>) -> Network<RdmaEndpoint> {
    let endpoints = RdmaEndpoint::for_hosts(rdma, config.topology.hosts()).unwrap();
    let mut network = Network::new(config, endpoints, flows);
    let all_finished = network.run_flows(Time::from_ps(1_000_000_000_000));
    assert!(all_finished, "at {:?}: {:?}, {:?}", network.now(), network.endpoint_counters(), network.counters());
    assert!(network.endpoints().iter().all(|endpoint| endpoint.failed() == 0), "no request failed");
    network
}

#[test]
fn a_flow_alone_takes_little_more_than_its_ideal_completion_time() {
    for policy in POLICIES {
        let rdma = RdmaConfig::new(NicProfile { mtu_bytes: 1000, ack_packets: 1, ..NicProfile::new(policy) });
        let config = config(topology(2), Vec::new());
        let ideal = IdealFct::new(&config.topology, rdma.framing());
        for bytes in [1, 64, 1000, 5000, 100_000] {
            let network = run(&config, rdma, vec![flow(0, 1, bytes)]);
            let (fct, best) = (network.finished_flows()[0].at.since(Time::ZERO), ideal.fct(&flow(0, 1, bytes)));
            // The ideal has no RETH, and not the selective extension on every packet.
            let packets = bytes.div_ceil(1000);
            let more = fct.ps() as f64 / best.ps() as f64;
            assert!(fct >= best && more < 1.02 + 0.04 * (packets > 1) as u64 as f64, "{policy:?} {bytes}: {more}");
        }
    }
}

#[test]
fn the_ideal_has_the_latency_of_nics_but_not_what_a_policy_adds() {
    let config = config(topology(2), Vec::new());
    let path = PathProperties::of_network(&config);
    for (policy, nic_latency) in POLICIES.into_iter().flat_map(|policy| [(policy, true), (policy, false)]) {
        let transport = TransportConfig { policy, nic_latency, ..TransportConfig::default() };
        let rdma = RdmaConfig::for_network(&transport, &path, &config);
        let without_latency = IdealFct::new(&config.topology, rdma.framing());
        let ideal = IdealFct::new(&config.topology, rdma.framing()).with_latency(rdma.latency());
        for bytes in [1, 64, 1000, 5000, 100_000] {
            let network = run(&config, rdma, vec![flow(0, 1, bytes)]);
            let fct = network.finished_flows()[0].at.since(Time::ZERO);
            let latency_ns = ideal.fct(&flow(0, 1, bytes)).ns() - without_latency.fct(&flow(0, 1, bytes)).ns();
            match nic_latency {
                true => assert!((1000.0..2000.0).contains(&latency_ns), "{policy:?} {bytes}: {latency_ns}"),
                false => assert_eq!(latency_ns, 0.0),
            }
            // RETH on the first packet, the selective extension on all, and fetches of work requests.
            let headers = if policy.is_selective() { 24 + 24 * bytes.div_ceil(1000) } else { 16 };
            let costs = rdma.profile.costs;
            let fetch = if policy == TransportPolicy::Srnic { costs.dma_read * 2 } else { Span::ZERO };
            let more = fct.ns() - ideal.fct(&flow(0, 1, bytes)).ns();
            assert!(
                more >= 0.0 && more <= 0.1 * headers as f64 * 2.0 + fetch.ns() + 10.0,
                "{policy:?} {bytes}: {more}"
            );
        }
    }
}

#[test]
fn nics_without_latency_send_a_packet_of_each_queue_pair_in_turn() {
    let config = config(topology(3), Vec::new());
    let (policy, congestion) = (TransportPolicy::GoBackN, CongestionAlgorithm::None);
    let transport = TransportConfig { policy, congestion, nic_latency: false, ..TransportConfig::default() };
    let rdma = RdmaConfig::for_network(&transport, &PathProperties::of_network(&config), &config);
    let short = Flow { start: Time::from_ps(20_000_000), ..flow(0, 2, 64) };
    let network = run(&config, rdma, vec![flow(0, 1, 1_000_000), short]);
    let fct = network.finished_flows()[0].at.since(short.start);
    let ideal = IdealFct::new(&config.topology, rdma.framing()).fct(&short);
    // The packet on the wire, one of the long flow, and RETH.
    assert!(fct.ns() - ideal.ns() < 2.0 * 86.6 + 5.0, "{fct}, alone {ideal}");
}

#[test]
fn selective_repeat_retransmits_the_lost_packets_and_no_others() {
    let lists = [vec![0], vec![5], vec![3, 4, 5], vec![1, 50, 99], vec![98, 99], (10..30).collect()];
    for (policy, lost) in [TransportPolicy::Srnic, TransportPolicy::Irn]
        .into_iter()
        .flat_map(|policy| lists.clone().map(|list| (policy, list)))
    {
        let loss = Impairments { loss: Loss::Listed(lost.clone()), ..Impairments::default() };
        let config = config(topology(2), vec![(0, 0, loss)]);
        let rdma = RdmaConfig::new(NicProfile { mtu_bytes: 1000, ..NicProfile::new(policy) });
        let network = run(&config, rdma, vec![flow(0, 1, 100_000)]);
        let counters = network.endpoint_counters();
        assert_eq!((counters.delivered_bytes, network.counters().lost_packets), (100_000, lost.len() as u64));
        let again = counters.retransmitted_packets - counters.spurious_packets;
        assert_eq!(again, lost.len() as u64, "{policy:?} {lost:?}: {counters:?}");
    }
}

fn goodput_gbps(policy: TransportPolicy, loss: f64) -> f64 {
    let topology = topology(2);
    let path = PathProperties {
        rate: topology.links()[0].rate,
        slowest: topology.links()[0].rate,
        round_trip: Span::from_ns(4500.0),
        links: 2,
    };
    let transport = TransportConfig {
        policy,
        mtu_bytes: 4096,
        congestion: CongestionAlgorithm::BdpWindow,
        ..TransportConfig::default()
    };
    let rdma = RdmaConfig::new(profile(&transport, &path));
    let impaired = [(0, 0, Impairments::uniform_loss(loss)), (0, 1, Impairments::uniform_loss(loss))];
    let config = config(topology, impaired.to_vec());
    let endpoints = RdmaEndpoint::for_hosts(rdma, 2).unwrap();
    let flows = (0..32).map(|number| Flow { connection: Some(number % 8), repeats: true, ..flow(0, 1, 262_144) });
    let mut network = Network::new(&config, endpoints, flows.collect());
    let (warmup, end) = (Time::from_ps(1_000_000_000), Time::from_ps(5_000_000_000));
    network.run_until(warmup);
    let before = network.endpoints()[1].counters();
    network.run_until(end);
    let after = network.endpoints()[1].counters().since(before);
    after.delivered_bytes as f64 * 8.0 / (end - warmup).ns()
}

#[test]
fn under_loss_srnic_keeps_up_with_irn_and_irn_with_go_back_n() {
    for loss in [0.0, 0.001, 0.01] {
        let [srnic, irn, go_back_n] = [TransportPolicy::Srnic, TransportPolicy::Irn, TransportPolicy::GoBackN]
            .map(|policy| goodput_gbps(policy, loss));
        eprintln!("loss {loss}: srnic {srnic:.1}, irn {irn:.1}, go-back-n {go_back_n:.1} Gb/s");
        assert!(srnic >= 0.98 * irn && irn >= go_back_n * 0.99, "{loss}: {srnic} {irn} {go_back_n}");
    }
}

/// Returns a network of three leaves, two spines and twelve hosts.
fn fabric(switches: SwitchConfig, impairments: &Impairments, seed: u64) -> NetworkConfig {
    let tiers = Tiers { leaves: 3, hosts_per_leaf: 4, spines: 2, ..TopologyPreset::LeafSpine256.tiers() };
    let topology = leaf_spine(&tiers).unwrap();
    let links = 0..topology.links().len();
    let impairments = links.flat_map(|link| [0, 1].map(|end| (link, end, impairments.clone()))).collect();
    NetworkConfig { topology, switches, impairments, seed }
}

fn flows(seed: u64, count: usize) -> Vec<Flow> {
    let mut random = Random::new(seed, "flows");
    let mut starts: Vec<u64> = (0..count).map(|_| random.below(20_000_000)).collect();
    starts.sort_unstable();
    let flow = |start| {
        let from = random.below(12) as u32;
        let to = (from + 1 + random.below(11) as u32) % 12;
        Flow { start: Time::from_ps(start), ..flow(from, to, 1 + random.below(60_000)) }
    };
    starts.into_iter().map(flow).collect()
}

fn rdma(policy: TransportPolicy, congestion: CongestionAlgorithm) -> RdmaConfig {
    let rate = topology(2).links()[0].rate;
    let transport = TransportConfig { policy, congestion, ..TransportConfig::default() };
    RdmaConfig::new(profile(
        &transport,
        &PathProperties { rate, slowest: rate, round_trip: Span::from_ns(9000.0), links: 4 },
    ))
}

/// Sets its own number of cases, because each case is a simulation; the macro would take PROPTEST_CASES.
#[test]
fn every_flow_finishes_once_and_every_byte_arrives_once_under_every_impairment() {
    let shares = [0.0..0.1, 0.0..0.05, 0.0..0.01];
    let switches = (any::<bool>(), any::<bool>(), any::<bool>());
    let strategy = (0..1000_u64, (0..5_usize, 0..6_usize), 0.0..0.02, shares, switches);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(24));
    let outcome = runner.run(&strategy, |(seed, (policy, congestion), loss, shares, switches)| {
        let policy = TransportPolicy::ALL[policy];
        run_impaired(seed, rdma(policy, CongestionAlgorithm::ALL[congestion]), loss, shares, switches);
        Ok(())
    });
    outcome.unwrap();
}

fn run_impaired(
    seed: u64,
    rdma: RdmaConfig,
    loss: f64,
    [reorder, duplicate, corrupt]: [f64; 3],
    (trimming, sprays, pauses): (bool, bool, bool),
) {
    let reorder_delay_max = Span::from_ns(5000.0);
    let impairments = Impairments { reorder, reorder_delay_max, duplicate, corrupt, ..Impairments::uniform_loss(loss) };
    let switches = SwitchConfig {
        buffer_bytes: 2_000_000,
        trimming: trimming && !pauses,
        pfc: pauses.then(Pfc::default),
        load_balancing: if sprays { LoadBalancing::PacketSpraying } else { LoadBalancing::Ecmp },
        ..SwitchConfig::default()
    };
    let network = run(&fabric(switches, &impairments, seed), rdma, flows(seed, 40));
    let (counters, endpoints) = (network.counters(), network.endpoint_counters());
    assert_eq!(endpoints.delivered_bytes, network.flows().iter().map(|flow| flow.bytes).sum::<u64>());
    let mut finished: Vec<u32> = network.finished_flows().iter().map(|end| end.id.0).collect();
    finished.sort_unstable();
    assert_eq!(finished, (0..40).collect::<Vec<u32>>());
    let lost = counters.lost_packets + counters.corrupt_packets + counters.dropped_packets;
    let found = counters.delivered_packets + lost + network.packets_in_flight() as u64;
    assert_eq!(endpoints.sent_packets + counters.doubled_packets, found);
}

#[test]
fn packet_spraying_causes_no_srnic_retransmissions_except_probes() {
    let switches = SwitchConfig { load_balancing: LoadBalancing::PacketSpraying, ..SwitchConfig::default() };
    let config = fabric(switches, &Impairments::default(), 1);
    let network = run(&config, rdma(TransportPolicy::Srnic, CongestionAlgorithm::Dctcp), flows(3, 200));
    let counters = network.endpoint_counters();
    assert!(counters.slow_path_headers > 0, "packets came out of order: {counters:?}");
    // A probe requests a late acknowledgement; it does not replace a late packet.
    assert_eq!(
        (counters.retransmitted_packets, network.counters().dropped_packets),
        (counters.timeouts, 0),
        "{counters:?}"
    );
}

/// Eleven hosts send to one host at once, through a buffer of a few packets.
#[test]
fn with_trimming_an_incast_has_no_timeouts() {
    let incast = || (1..12).map(|from| flow(from, 0, 300_000)).collect();
    let timeouts = |trimming, policy| {
        let switches = SwitchConfig { buffer_bytes: 100_000, trimming, ..SwitchConfig::default() };
        let config = fabric(switches, &Impairments::default(), 1);
        let network = run(&config, rdma(policy, CongestionAlgorithm::Dctcp), incast());
        let (endpoints, counters) = (network.endpoint_counters(), network.counters());
        assert_eq!(counters.trimmed_packets > 0, trimming, "{counters:?}");
        assert_eq!(endpoints.delivered_bytes, 11 * 300_000);
        (
            endpoints.timeouts,
            endpoints.retransmitted_packets.abs_diff(counters.trimmed_packets + counters.dropped_packets),
        )
    };
    assert_eq!(timeouts(true, TransportPolicy::Srnic), (0, 0));
    assert!(timeouts(false, TransportPolicy::Srnic).0 > 0);
    // IRN may time out while packets are only late, and then sends some again that were not lost.
    let (timeouts, needless) = timeouts(true, TransportPolicy::Irn);
    assert!(needless <= timeouts / 10, "{needless} of {timeouts}");
}

/// One host reads from eleven others at once, through a small buffer.
#[test]
fn trimmed_read_responses_are_requested_again_without_a_timeout() {
    let reads = || (1..12).map(|from| flow(from, 0, 100_000)).collect();
    let run = |trimming, policy| {
        // Large enough for all trimmed packets, but not for all data.
        let switches = SwitchConfig { buffer_bytes: 400_000, trimming, ..SwitchConfig::default() };
        let config = fabric(switches, &Impairments::default(), 1);
        let network =
            run(&config, RdmaConfig { verb: Verb::Read, ..rdma(policy, CongestionAlgorithm::BdpWindow) }, reads());
        let (endpoints, counters) = (network.endpoint_counters(), network.counters());
        assert_eq!((counters.trimmed_packets > 0, counters.dropped_packets == 0), (trimming, trimming), "{counters:?}");
        assert_eq!(endpoints.delivered_bytes, 11 * 100_000);
        (endpoints.timeouts, network.now())
    };
    for policy in [TransportPolicy::Srnic, TransportPolicy::SrnicPaged, TransportPolicy::Irn] {
        let (timeouts, fct) = run(true, policy);
        let (without, longer) = run(false, policy);
        assert_eq!(timeouts, 0, "{policy:?}");
        assert!(without > 0 && fct < longer, "{policy:?}: {without} {fct:?} {longer:?}");
    }
}

#[test]
#[ignore = "tens of millions of events; in ./x exam"]
fn all_flows_of_4096_hosts_finish() {
    let sizes = netsim::workload::SizeDistribution::find("cache-follower").unwrap();
    let duration = Span::from_ns(1e5);
    let transport = TransportConfig::default();
    let config = FctExperiment::published(TopologyPreset::ThreeTier4096, sizes, 0.5, transport, duration, 1).unwrap();
    let result = config.run(Observers::default()).unwrap();
    assert!(result.flows > 500 && result.flows_ended == result.flows && result.flows_failed == 0, "{result:?}");
    assert!(result.slowdown.p50 >= 1.0 && result.memory_bytes / 4096 < 1_000_000, "{result:?}");
}
