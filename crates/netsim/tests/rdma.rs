//! The RDMA engine as an endpoint.

use netsim::endpoint::{Endpoint, Flow};
use netsim::ideal::Ideal;
use netsim::impairment::{Impairments, Loss};
use netsim::network::{Network, NetworkPlan};
use netsim::rdma::{PathPlan, Rdma, RdmaPlan, profile};
use netsim::scenario::{Congestion, Transport, TransportPlan};
use netsim::switch::SwitchPlan;
use netsim::topology::{HostId, Preset, Tiers, Topology, leaf_spine};
use rnic::nic::{Policy, Profile};
use sim::{Span, Time};

const POLICIES: [Policy; 3] = [Policy::Srnic, Policy::Irn, Policy::GoBackN];

fn topology(hosts: u32) -> Topology {
    let tiers = Tiers { leaves: 1, hosts_per_leaf: hosts, spines: 1, ..Preset::LeafSpine256.tiers() };
    leaf_spine(&tiers).unwrap()
}

fn plan(topology: Topology, impairments: Vec<(usize, usize, Impairments)>) -> NetworkPlan {
    NetworkPlan { topology, switches: SwitchPlan::default(), impairments, seed: 1 }
}

fn flow(from: u32, to: u32, bytes: u64) -> Flow {
    Flow { start: Time::ZERO, from: HostId(from), to: HostId(to), bytes, connection: None, repeats: false }
}

fn ran(plan: &NetworkPlan, rdma: RdmaPlan, flows: Vec<Flow>) -> Network<Rdma> {
    let fleet = Rdma::fleet(rdma, plan.topology.hosts()).unwrap();
    let mut network = Network::new(plan, fleet, flows);
    let all_ended = network.run_flows(Time::from_ps(1_000_000_000_000));
    assert!(all_ended, "at {:?}: {:?}, {:?}", network.now(), network.endpoint_counters(), network.counters());
    assert!(network.endpoints().iter().all(|endpoint| endpoint.failed() == 0), "no request fails");
    network
}

#[test]
fn a_flow_alone_takes_its_closed_form_and_a_packet_for_the_headers_at_most() {
    for policy in POLICIES {
        let rdma = RdmaPlan::new(Profile { mtu_bytes: 1000, ack_packets: 1, ..Profile::new(policy) });
        let plan = plan(topology(2), Vec::new());
        let ideal = Ideal::new(&plan.topology, rdma.framing());
        for bytes in [1, 64, 1000, 5000, 100_000] {
            let network = ran(&plan, rdma, vec![flow(0, 1, bytes)]);
            let (took, best) = (network.ends()[0].at.since(Time::ZERO), ideal.span(&flow(0, 1, bytes)));
            // RETH, and the selective extension on every packet.
            let packets = bytes.div_ceil(1000);
            let more = took.ps() as f64 / best.ps() as f64;
            assert!(took >= best && more < 1.02 + 0.04 * (packets > 1) as u64 as f64, "{policy:?} {bytes}: {more}");
        }
    }
}

#[test]
fn listed_losses_are_sent_again_and_nothing_else() {
    let lists = [vec![0], vec![5], vec![3, 4, 5], vec![1, 50, 99], vec![98, 99], (10..30).collect()];
    for (policy, lost) in
        [Policy::Srnic, Policy::Irn].into_iter().flat_map(|policy| lists.clone().map(|list| (policy, list)))
    {
        let loss = Impairments { loss: Loss::Listed(lost.clone()), ..Impairments::default() };
        let plan = plan(topology(2), vec![(0, 0, loss)]);
        let rdma = RdmaPlan::new(Profile { mtu_bytes: 1000, ..Profile::new(policy) });
        let network = ran(&plan, rdma, vec![flow(0, 1, 100_000)]);
        let counted = network.endpoint_counters();
        assert_eq!((counted.delivered_bytes, network.counters().lost_packets), (100_000, lost.len() as u64));
        let again = counted.retransmitted_packets - counted.spurious_packets;
        assert_eq!(again, lost.len() as u64, "{policy:?} {lost:?}: {counted:?}");
    }
}

fn goodput_gbps(policy: Transport, loss: f64) -> f64 {
    let topology = topology(2);
    let path = PathPlan { rate: topology.lines()[0].rate, round_trip: Span::from_ns(4500.0) };
    let transport = TransportPlan { policy, mtu_bytes: 4096, congestion: Congestion::BdpWindow };
    let rdma = RdmaPlan::new(profile(&transport, &path));
    let impaired = [(0, 0, Impairments::losing(loss)), (0, 1, Impairments::losing(loss))];
    let plan = plan(topology, impaired.to_vec());
    let fleet = Rdma::fleet(rdma, 2).unwrap();
    let flows = (0..32).map(|number| Flow { connection: Some(number % 8), repeats: true, ..flow(0, 1, 262_144) });
    let mut network = Network::new(&plan, fleet, flows.collect());
    let (warm, end) = (Time::from_ps(1_000_000_000), Time::from_ps(5_000_000_000));
    network.run_until(warm);
    let before = network.endpoints()[1].counters();
    network.run_until(end);
    let after = network.endpoints()[1].counters().since(before);
    after.delivered_bytes as f64 * 8.0 / (end - warm).ns()
}

#[test]
fn goodput_by_loss_goes_srnic_irn_go_back_n() {
    for loss in [0.0, 0.001, 0.01] {
        let [srnic, irn, go_back_n] =
            [Transport::Srnic, Transport::Irn, Transport::GoBackN].map(|policy| goodput_gbps(policy, loss));
        eprintln!("loss {loss}: srnic {srnic:.1}, irn {irn:.1}, go-back-n {go_back_n:.1} Gb/s");
        assert!(srnic >= 0.98 * irn && irn >= go_back_n * 0.99, "{loss}: {srnic} {irn} {go_back_n}");
    }
}
