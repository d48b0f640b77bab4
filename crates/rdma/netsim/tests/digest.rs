//! Digests of runs of 64 hosts: an optimization must not change a result. A commit that changes what a NIC or a switch
//! does changes a digest and says so.

use netsim::endpoint::Flow;
use netsim::impairment::Impairments;
use netsim::network::{Network, NetworkConfig};
use netsim::rdma::{PathProperties, RdmaConfig, RdmaEndpoint, profile};
use netsim::switch::{LoadBalancing, Pfc, SwitchConfig};
use netsim::topology::{HostId, Tiers, TopologyPreset, leaf_spine};
use netsim::transport::{CongestionAlgorithm, TransportConfig};
use rnic::nic::TransportPolicy;
use sim::{Random, Span, Time};

const HOSTS: u64 = 64;
const FLOWS: usize = 600;

/// Returns flows computed from integers alone, so that they are the same on every machine.
fn flows() -> Vec<Flow> {
    let mut random = Random::new(1, "flows");
    let mut starts: Vec<u64> = (0..FLOWS).map(|_| random.below(60_000_000)).collect();
    starts.sort_unstable();
    let mut flow = |start| {
        let from = random.below(HOSTS) as u32;
        let to = (from + 1 + random.below(HOSTS - 1) as u32) % HOSTS as u32;
        let most = [300, 8_000, 120_000][random.below(3) as usize];
        let bytes = 1 + random.below(most);
        Flow::new(Time::from_ps(start), HostId(from), HostId(to), bytes)
    };
    starts.into_iter().map(&mut flow).collect()
}

/// Returns the 64-bit FNV-1a hash of the words' bytes.
fn digest(words: impl IntoIterator<Item = u64>) -> u64 {
    let bytes = words.into_iter().flat_map(u64::to_le_bytes);
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn run(
    policy: TransportPolicy,
    congestion: CongestionAlgorithm,
    switches: SwitchConfig,
    impairments: &Impairments,
) -> u64 {
    let tiers = Tiers { leaves: 4, hosts_per_leaf: 16, spines: 4, ..TopologyPreset::LeafSpine256.tiers() };
    let topology = leaf_spine(&tiers).unwrap();
    let path = PathProperties {
        rate: topology.links()[0].rate,
        slowest: topology.links()[0].rate,
        round_trip: Span::from_ps(9_000_000),
        links: 4,
    };
    let rdma = RdmaConfig::new(profile(&TransportConfig { policy, congestion, ..TransportConfig::default() }, &path));
    let links = 0..topology.links().len();
    let impairments = links.flat_map(|link| [0, 1].map(|end| (link, end, impairments.clone()))).collect();
    let config = NetworkConfig { topology, switches, impairments, seed: 1 };
    let mut network = Network::new(&config, RdmaEndpoint::for_hosts(rdma, HOSTS as u32).unwrap(), flows());
    assert!(network.run_flows(Time::from_ps(1_000_000_000_000)));
    let (counters, endpoints) = (network.counters(), network.endpoint_counters());
    let of_network = [counters.events, counters.sent_packets, counters.delivered_packets, counters.lost_packets];
    let of_switches = [counters.dropped_packets, counters.trimmed_packets, counters.marked_packets, counters.pauses];
    let of_endpoints =
        [endpoints.sent_packets, endpoints.retransmitted_packets, endpoints.spurious_packets, endpoints.timeouts];
    let of_software =
        [endpoints.slow_path_headers, endpoints.software_ps, counters.queue_max_bytes, counters.buffer_max_bytes];
    let finished = network.finished_flows().iter().flat_map(|end| [u64::from(end.id.0), end.at.ps()]);
    digest(finished.chain([of_network, of_switches, of_endpoints, of_software].concat()))
}

fn lossy() -> Impairments {
    Impairments { reorder: 0.01, reorder_delay_max: Span::from_ps(4_000_000), ..Impairments::uniform_loss(0.002) }
}

#[test]
fn runs_of_64_hosts_have_their_recorded_digests() {
    let small = SwitchConfig { buffer_bytes: 600_000, ..SwitchConfig::default() };
    let pausing = SwitchConfig { buffer_bytes: 2_000_000, pfc: Some(Pfc::default()), ..SwitchConfig::default() };
    let trimming = SwitchConfig { trimming: true, load_balancing: LoadBalancing::PacketSpraying, ..small.clone() };
    let (none, lossy, plain) = (Impairments::default(), lossy(), SwitchConfig::default());
    let runs = [
        ("srnic", run(TransportPolicy::Srnic, CongestionAlgorithm::Dctcp, plain.clone(), &none)),
        ("irn", run(TransportPolicy::Irn, CongestionAlgorithm::BdpWindow, plain.clone(), &lossy)),
        ("go-back-n", run(TransportPolicy::GoBackN, CongestionAlgorithm::Dcqcn, pausing, &lossy)),
        ("connection-cache", run(TransportPolicy::ConnectionCache, CongestionAlgorithm::None, small, &none)),
        ("srnic, lossy", run(TransportPolicy::Srnic, CongestionAlgorithm::Swift, plain, &lossy)),
        ("srnic, trimmed", run(TransportPolicy::Srnic, CongestionAlgorithm::None, trimming, &none)),
    ];
    let expected: [(&str, u64); 6] = [
        ("srnic", 0xe872_8269_97bb_2e06),
        ("irn", 0x5ca8_f676_b487_169b),
        ("go-back-n", 0x7078_a31d_2ec6_7c5f),
        ("connection-cache", 0x5e09_935d_809d_1ca9),
        ("srnic, lossy", 0xd41d_1f6f_7a04_44a9),
        ("srnic, trimmed", 0x58aa_68df_1681_4927),
    ];
    assert_eq!(format!("{runs:x?}"), format!("{expected:x?}"));
}
