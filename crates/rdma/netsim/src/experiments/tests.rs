use rnic::nic::TransportPolicy;
use sim::{Span, Time};

use super::*;
use crate::network::NetworkConfig;
use crate::rate::LinkRate;
use crate::switch::Pfc;
use crate::topology::{Topology, TopologyPreset, fat_tree};
use crate::transport::{AckTimeout, CongestionAlgorithm, TransportConfig};
use crate::workload::{SizeDistribution, Workload};

fn short(experiment: StreamExperiment) -> StreamResult {
    StreamExperiment { warmup: Span::from_ns(1e6), duration: Span::from_ns(2e6), ..experiment }.run().unwrap()
}

#[test]
fn srnic_keeps_its_goodput_where_a_context_cache_thrashes() {
    let goodput = |nic, qps| short(StreamExperiment::by_qps(nic, qps, 100.0, 1)).goodput_gbps;
    assert!(goodput(TransportPolicy::Srnic, 64) > 97.0 && goodput(TransportPolicy::Srnic, 4000) > 97.0);
    assert!(goodput(TransportPolicy::ConnectionCache, 64) > 97.0);
    assert!(goodput(TransportPolicy::ConnectionCache, 4000) < 70.0);
}

/// With ten times as many queue pairs as SRNIC keeps on chip, no context is on chip when it is needed, neither to send
/// nor to receive a packet.
#[test]
fn a_context_pool_carries_100000_queue_pairs_in_both_orders() {
    for qp_order in [QpOrder::RoundRobin, QpOrder::Random] {
        // Long enough to fill each NIC's pool, so that each context fetched evicts another.
        let experiment =
            StreamExperiment { qp_order, ..StreamExperiment::by_qps(TransportPolicy::SrnicPaged, 100_000, 100.0, 1) };
        let experiment = StreamExperiment { warmup: Span::from_ns(3e6), duration: Span::from_ns(1e6), ..experiment };
        let result = experiment.run().unwrap();
        assert!(result.goodput_gbps > 95.0, "{qp_order:?} {result:?}");
        assert!(result.parked_share > 0.8 && result.parking_drops == 0, "{qp_order:?} {result:?}");
        assert!(result.retransmitted_share < 0.001, "{qp_order:?} {result:?}");
        // A context of 244 bytes is read and written for each packet of 4096.
        let share = (result.context_read_gbps / result.goodput_gbps, result.context_write_gbps / result.goodput_gbps);
        assert!((0.03..0.13).contains(&share.0) && (0.03..0.13).contains(&share.1), "{qp_order:?} {result:?}");
    }
}

/// Here a queue pair is served only every 6 ms, which is longer than its sender keeps retrying.
#[test]
fn waiting_to_be_scheduled_does_not_use_up_retries() {
    for nic in [TransportPolicy::Srnic, TransportPolicy::SrnicPaged] {
        let experiment = StreamExperiment { loss: 0.001, ..StreamExperiment::by_qps(nic, 20_000, 100.0, 1) };
        let result =
            StreamExperiment { warmup: Span::from_ns(1e6), duration: Span::from_ns(9e6), ..experiment }.run().unwrap();
        assert!(result.goodput_gbps > 95.0 && result.retransmitted_share > 0.0, "{result:?}");
    }
}

#[test]
fn losses_take_srnics_slow_path_and_cost_little_goodput() {
    // Time-outs are rare and long, so go-back-N needs a longer run.
    let at = |policy, loss, ms: f64| {
        StreamExperiment { duration: Span::from_ns(ms * 1e6), ..StreamExperiment::by_loss(policy, loss, 100.0, 1) }
            .run()
            .unwrap()
    };
    let (srnic, go_back_n) = (at(TransportPolicy::Srnic, 0.01, 3.0), at(TransportPolicy::GoBackN, 0.01, 30.0));
    assert!(srnic.goodput_gbps > 75.0 && srnic.goodput_gbps > 3.0 * go_back_n.goodput_gbps, "{srnic:?} {go_back_n:?}");
    assert!(srnic.slow_path_share > 0.05 && at(TransportPolicy::Srnic, 0.0, 1.0).slow_path_share == 0.0, "{srnic:?}");
}

/// Returns the goodput of srnic over paths of unequal delays as a share of that in order, and the share of packets that
/// arrived twice.
fn sprayed(gbps: f64, skew_us: f64, loss: f64) -> (f64, f64) {
    let run = |path_use| {
        let experiment = SprayExperiment::new(TransportPolicy::Srnic, path_use, gbps, 1);
        let skew = Span::from_ns(skew_us * 1000.0);
        let (warmup, duration) = (Span::from_ns(5e5), Span::from_ns(1e6));
        SprayExperiment { skew, loss, warmup, duration, ..experiment }.run().unwrap()
    };
    let (in_order, sprayed) = (run(PathUse::InOrder), run(PathUse::Sprayed));
    assert!(sprayed.slow_path_share > in_order.slow_path_share, "packets came out of order: {sprayed:?}");
    (sprayed.goodput_gbps / in_order.goodput_gbps, sprayed.spurious_share)
}

#[test]
fn sprayed_goodput_is_at_least_97_percent_of_that_in_order_with_and_without_loss() {
    for (gbps, skew_us, loss) in
        [(100.0, 0.0, 0.01), (100.0, 1.0, 0.0), (100.0, 1.0, 0.01), (100.0, 4.0, 0.001), (400.0, 1.0, 0.01)]
    {
        let (share, spurious_share) = sprayed(gbps, skew_us, loss);
        assert!(share >= 0.97 && spurious_share < 0.005, "{gbps} {skew_us} {loss}: {share} {spurious_share}");
    }
}

/// With all paths full, only what random choices leave idle is lost.
#[test]
fn sprayed_goodput_on_full_paths_is_at_least_97_percent_of_that_in_order() {
    let run = |path_use| {
        let experiment = SprayExperiment::new(TransportPolicy::Srnic, path_use, 100.0, 1);
        SprayExperiment { pairs: 8, duration: Span::from_ns(1e6), ..experiment }.run().unwrap().goodput_gbps
    };
    let (in_order, sprayed) = (run(PathUse::InOrder), run(PathUse::Sprayed));
    assert!(sprayed >= 0.97 * in_order, "{sprayed} {in_order}");
}

#[test]
fn go_back_n_collapses_on_several_paths() {
    let run = |path_use| {
        let experiment = SprayExperiment::new(TransportPolicy::GoBackN, path_use, 100.0, 1);
        let skew = Span::from_ns(1000.0);
        SprayExperiment { skew, duration: Span::from_ns(1e6), ..experiment }.run().unwrap().goodput_gbps
    };
    assert!(run(PathUse::Sprayed) < 0.1 * run(PathUse::InOrder));
}

fn rate(policy: TransportPolicy, qps: u32, gbps: f64, bytes: u32) -> RateResult {
    RateExperiment::new(policy, qps, gbps, bytes, 1).run().unwrap()
}

#[test]
fn message_rates_fall_with_size_and_stay_below_every_bound() {
    for (policy, qps) in [
        (TransportPolicy::Srnic, 1),
        (TransportPolicy::Srnic, 128),
        (TransportPolicy::Srnic, 10_000),
        (TransportPolicy::ConnectionCache, 128),
    ] {
        let rates = [8, 64, 256, 1024, 4096].map(|bytes| rate(policy, qps, 200.0, bytes));
        for result in &rates {
            let RateResult { mops, simulated_mops, link_mops, pcie_mops, pipeline_mops, .. } = *result;
            assert!(mops > 0.0 && mops <= simulated_mops, "{result:?}");
            assert!(mops <= link_mops && mops <= pcie_mops && mops <= pipeline_mops, "{result:?}");
            assert!(simulated_mops <= link_mops * 1.001, "no more than the link carries: {result:?}");
        }
        let is_monotone = rates.windows(2).all(|pair| pair[1].mops <= pair[0].mops * 1.001);
        assert!(is_monotone, "{policy:?} {qps}: {rates:?}");
        assert!(rates.windows(2).all(|pair| pair[1].pcie_mops < pair[0].pcie_mops), "{rates:?}");
    }
}

#[test]
fn message_rates_name_what_limits_them() {
    let limit = |qps, gbps, bytes| rate(TransportPolicy::Srnic, qps, gbps, bytes).limit;
    // One queue pair gets 16 work requests in each fetch of 1 us.
    assert_eq!((limit(1, 200.0, 64), limit(128, 200.0, 64)), (RateLimit::Fetches, RateLimit::Link));
    assert_eq!(limit(128, 200.0, 8), RateLimit::Pipeline);
    let generation_3 = "3".parse().unwrap();
    let experiment = RateExperiment::new(TransportPolicy::Srnic, 128, 200.0, 64, 1);
    let result = RateExperiment { generation: generation_3, ..experiment }.run().unwrap();
    assert_eq!((result.limit, result.mops), (RateLimit::Pcie, result.pcie_mops));
    let slow = RateExperiment { pipeline_mops: 10.0, ..experiment }.run().unwrap();
    assert_eq!((slow.limit, slow.mops), (RateLimit::Pipeline, 10.0));
}

#[test]
fn latency_of_a_small_message_is_a_few_us_and_grows_with_size() {
    let result =
        LatencyExperiment { messages: 20, ..LatencyExperiment::new(TransportPolicy::Srnic, 64, 1) }.run().unwrap();
    assert!((1.0..5.0).contains(&result.p50_us) && result.p50_us <= result.p99_us, "{result:?}");
    let large =
        LatencyExperiment { messages: 20, ..LatencyExperiment::new(TransportPolicy::Srnic, 65_536, 1) }.run().unwrap();
    assert!(large.p50_us > result.p50_us + 5.0, "64 KiB take at least 5.2 us on the link: {large:?}");
}

#[test]
fn flows_with_the_same_seed_give_the_same_result() {
    let sizes = SizeDistribution::find("storage-2019").unwrap();
    let run = |seed| {
        let duration = Span::from_ns(2e4);
        let experiment = FctExperiment::published(
            TopologyPreset::LeafSpine256,
            sizes.clone(),
            0.3,
            TransportConfig::default(),
            duration,
            seed,
        );
        experiment.unwrap().run(Observers::default()).unwrap()
    };
    let first = run(1);
    assert!(first.flows > 50 && first.flows_ended == first.flows && first.flows_failed == 0, "{first:?}");
    assert!(first.slowdown.mean >= 1.0 && first.bins.len() == 20);
    assert_eq!(first, run(1));
    assert_ne!(first.slowdown, run(2).slowdown);
}

/// Runs flows of go-back-N without congestion control in a lossless network, until all have finished or 100 ms.
fn lossless(topology: Topology, workload: &Workload, ack_timeout: AckTimeout) -> FctResult {
    let flows = workload.flows(&topology, 1).unwrap();
    let mut network = NetworkConfig::new(topology, 1);
    network.switches.pfc = Some(Pfc::default());
    let (policy, congestion) = (TransportPolicy::GoBackN, CongestionAlgorithm::None);
    let transport = TransportConfig { policy, mtu_bytes: 4096, congestion, ack_timeout, ..TransportConfig::default() };
    FctExperiment { network, flows, transport, until: Time::from_ps(100_000_000_000) }
        .run(Observers::default())
        .unwrap()
}

#[test]
fn senders_paused_by_flow_control_neither_retransmit_nor_fail() {
    let incast = Workload::Incast { senders: 15, bytes: 3_000_000 };
    let topology = || fat_tree(4, LinkRate::from_gbps(100.0).unwrap(), Span::from_ns(1000.0)).unwrap();
    let result = lossless(topology(), &incast, AckTimeout::Auto);
    assert_eq!((result.flows_ended, result.flows_failed, result.flows_unfinished), (15, 0, 0), "{result:?}");
    assert_eq!((result.endpoints.retransmitted_packets, result.ack_timeout_us), (0, None), "{result:?}");
    let sizes = SizeDistribution::find("web-search").unwrap();
    let poisson = Workload::Poisson { sizes, load: 0.7, duration: Span::from_ns(5e5) };
    let result = lossless(topology(), &poisson, AckTimeout::Auto);
    assert_eq!((result.flows_ended, result.endpoints.retransmitted_packets), (result.flows, 0), "{result:?}");
    // A timeout below the time that pauses take makes flows fail whose packets are only late.
    let result = lossless(topology(), &incast, AckTimeout::AtLeast(Span::from_ns(8192.0)));
    assert!(result.flows_failed > 0 && result.endpoints.retransmitted_packets > 0, "{result:?}");
    assert_eq!(result.flows, result.flows_ended + result.flows_failed + result.flows_unfinished);
}

#[test]
fn a_flow_alone_has_a_slowdown_of_one_with_and_without_the_latency_of_nics() {
    for nic_latency in [true, false] {
        let network = NetworkConfig::new(TopologyPreset::LeafSpine256.topology(), 1);
        let flows = Workload::Incast { senders: 1, bytes: 500 }.flows(&network.topology, 1).unwrap();
        let transport = TransportConfig { policy: TransportPolicy::GoBackN, nic_latency, ..TransportConfig::default() };
        let until = Time::from_ps(1_000_000_000_000);
        let result = FctExperiment { network, flows, transport, until }.run(Observers::default()).unwrap();
        assert!((1.0..1.001).contains(&result.slowdown.max), "{nic_latency}: {:?}", result.slowdown);
    }
}

#[test]
fn parameters_out_of_range_are_refused() {
    let error = |experiment: StreamExperiment| experiment.run().unwrap_err().to_string();
    assert_eq!(error(StreamExperiment::by_qps(TransportPolicy::Srnic, 0, 100.0, 1)), "qps 0; take 1 to 1048576");
    assert_eq!(error(StreamExperiment::by_loss(TransportPolicy::Srnic, 0.9, 100.0, 1)), "loss 0.9; take 0 to 0.5");
    assert_eq!(error(StreamExperiment::by_qps(TransportPolicy::Irn, 1, f64::NAN, 1)), "gbps NaN; take 1 to 1600");
    let spray = SprayExperiment::new(TransportPolicy::Srnic, PathUse::Sprayed, 100.0, 1);
    let error_of = |experiment: SprayExperiment| experiment.run().unwrap_err().to_string();
    assert_eq!(error_of(SprayExperiment { paths: 0, ..spray }), "paths 0; take 1 to 64");
    assert_eq!(error_of(SprayExperiment { pairs: 65, ..spray }), "pairs 65; take 1 to 64");
    assert_eq!(error_of(SprayExperiment { gbps: 2000.0, ..spray }), "gbps 2000; take 1 to 1250");
    assert_eq!(error_of(SprayExperiment { skew: Span::from_ns(2e6), ..spray }), "skew_us 2000; take 0 to 1000");
    let rate = RateExperiment::new(TransportPolicy::Srnic, 1, 100.0, 64, 1);
    let error_of = |experiment: RateExperiment| experiment.run().unwrap_err().to_string();
    assert_eq!(error_of(RateExperiment { message_bytes: 0, ..rate }), "size 0; take 1 to 4096");
    assert_eq!(error_of(RateExperiment { message_bytes: 4097, ..rate }), "size 4097; take 1 to 4096");
    assert_eq!(error_of(RateExperiment { pipeline_mops: 0.0, ..rate }), "pipeline_mops 0; take 0.001 to 100000");
    let experiment = StreamExperiment::by_qps(TransportPolicy::Irn, 1, 100.0, 1);
    let transport = TransportConfig { mtu_bytes: 9000, congestion: CongestionAlgorithm::None, ..experiment.transport };
    assert!(error(StreamExperiment { transport, ..experiment }).contains("mtu_bytes is 9000; choose 256 to 4096"));
}
