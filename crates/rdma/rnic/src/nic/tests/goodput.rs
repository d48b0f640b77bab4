//! Goodput over one modelled wire of 100 Gb/s: a small version of what the packet simulator measures over networks.

use sim::{Span, Time};

use super::pair::{Impairments, Pair};
use crate::nic::{CongestionControl, Dcqcn, Dctcp, NicProfile, Swift, Timely, TransportPolicy};
use crate::verbs::{CompletionStatus, RemoteBuffer, SendKind};
use crate::wire::Service;

/// Time of a packet of 1024 bytes with all its headers on a wire of 100 Gb/s.
const PACKET_NS: f64 = 88.0;
const ONE_WAY_NS: f64 = 2000.0;

struct Load {
    qps: usize,
    bytes: u32,
    depth: u64,
    loss: f64,
    end_us: f64,
}

/// Returns the goodput of completed WRITEs in Gb/s.
fn goodput(profile: NicProfile, load: &Load) -> (f64, Pair) {
    goodput_as(profile, load, |remote| SendKind::Write(remote, None))
}

fn goodput_as(profile: NicProfile, load: &Load, kind: impl Fn(RemoteBuffer) -> SendKind) -> (f64, Pair) {
    let mut pair = Pair::new(profile, 7);
    pair.packet_time = Span::from_ns(PACKET_NS);
    pair.delay = Span::from_ns(ONE_WAY_NS);
    pair.impairments = Impairments { loss: load.loss, ..Impairments::NONE };
    let qps: Vec<_> = (0..load.qps).map(|_| pair.connect(Service::Rc)[0]).collect();
    let to = pair.remote(0, 0);
    for turn in 0..load.depth {
        for qp in &qps {
            pair.send(0, *qp, turn, kind(to), 0, load.bytes);
        }
    }
    let end = Time::ZERO + Span::from_ns(load.end_us * 1000.0);
    let mut done_bytes = 0;
    while pair.step(end) {
        for completion in std::mem::take(&mut pair.completions[0]) {
            assert_eq!(completion.status, CompletionStatus::Success);
            done_bytes += u64::from(load.bytes);
            pair.send(0, completion.qp, completion.id, kind(to), 0, load.bytes);
        }
    }
    (done_bytes as f64 * 8.0 / (load.end_us * 1000.0), pair)
}

fn profile(policy: TransportPolicy) -> NicProfile {
    let mut profile = NicProfile::modelled(policy);
    if policy == TransportPolicy::Irn {
        // Bandwidth times round trip, including PCIe.
        profile.congestion = CongestionControl::BdpWindow { bytes: 120_000 };
    }
    profile
}

/// With the same seed and wire for each policy.
fn goodput_at_loss(policy: TransportPolicy, loss: f64, end_us: f64) -> f64 {
    goodput(profile(policy), &Load { qps: 1, bytes: 65_536, depth: 16, loss, end_us }).0
}

#[test]
fn at_one_percent_loss_srnic_is_near_line_rate_and_three_times_go_back_n() {
    let srnic = goodput_at_loss(TransportPolicy::Srnic, 0.01, 3000.0);
    let irn = goodput_at_loss(TransportPolicy::Irn, 0.01, 3000.0);
    let go_back_n = goodput_at_loss(TransportPolicy::GoBackN, 0.01, 3000.0);
    // The wire carries 93 Gb/s of payload, or 92.1 after losses.
    assert!(srnic >= 90.0, "{srnic}");
    assert!(srnic >= 0.98 * irn, "{srnic} {irn}");
    assert!(srnic >= 3.0 * go_back_n, "{srnic} {go_back_n}");
    assert!(irn > go_back_n, "{irn} {go_back_n}");
}

#[test]
fn read_responses_are_repaired_before_they_end() {
    let load = || Load { qps: 1, bytes: 65_536, depth: 16, loss: 0.01, end_us: 2000.0 };
    let (gbps, pair) = goodput_as(profile(TransportPolicy::Srnic), &load(), SendKind::Read);
    assert!(gbps > 80.0, "{gbps}: {:?}", pair.nics[0].counters());
    let (go_back_n, _) = goodput_as(profile(TransportPolicy::GoBackN), &load(), SendKind::Read);
    assert!(gbps > 3.0 * go_back_n, "{gbps} {go_back_n}");
}

/// Every packet is marked, and every round trip exceeds the target.
#[test]
fn every_kind_of_congestion_control_slows_a_sender_down() {
    let (initial_bytes, bytes_max) = (120_000, 400_000);
    let controls = [
        CongestionControl::Dctcp(Dctcp::published(initial_bytes, bytes_max, 1024)),
        CongestionControl::Swift(Swift {
            target: Span::from_ns(3000.0),
            scaling_range: Span::ZERO,
            ..Swift::htsim(1, initial_bytes, bytes_max)
        }),
        CongestionControl::Dcqcn(Dcqcn::published(100_000_000_000)),
        CongestionControl::Dcqcn(Dcqcn::scaled(100_000_000_000, 100_000_000_000)),
        CongestionControl::Timely(Timely {
            rtt_low: Span::from_ns(1000.0),
            rtt_high: Span::from_ns(1000.0),
            ..Timely::scaled(100_000_000_000, 100_000_000_000)
        }),
        CongestionControl::BdpWindow { bytes: 8192 },
    ];
    for policy in [TransportPolicy::Srnic, TransportPolicy::GoBackN] {
        for congestion in controls {
            let profile = NicProfile { congestion, ..NicProfile::modelled(policy) };
            let mut pair = Pair::new(profile, 7);
            pair.packet_time = Span::from_ns(PACKET_NS);
            pair.delay = Span::from_ns(ONE_WAY_NS);
            pair.impairments = Impairments { mark: 1.0, ..Impairments::NONE };
            let qp = pair.connect(Service::Rc)[0];
            let to = pair.remote(0, 0);
            (0..8).for_each(|id| pair.send(0, qp, id, SendKind::Write(to, None), 0, 1 << 19));
            pair.run();
            let gbps = 8.0 * f64::from(1 << 22) / (pair.now.ps() as f64 / 1000.0);
            assert!((0.005..45.0).contains(&gbps), "{policy:?} {congestion:?}: {gbps}");
            assert_eq!(pair.completions[0].len(), 8);
        }
    }
}

#[test]
fn without_loss_every_policy_fills_the_wire() {
    for policy in
        [TransportPolicy::Srnic, TransportPolicy::Irn, TransportPolicy::GoBackN, TransportPolicy::ConnectionCache]
    {
        let gbps = goodput_at_loss(policy, 0.0, 1000.0);
        assert!(gbps > 91.0, "{policy:?}: {gbps}");
    }
}

#[test]
fn a_busy_queue_pair_leaves_the_slow_path_between_losses() {
    let load = Load { qps: 1, bytes: 65_536, depth: 16, loss: 0.001, end_us: 2000.0 };
    let (_, pair) = goodput(profile(TransportPolicy::Srnic), &load);
    let counters = pair.nics[1].counters();
    assert!(counters.slow_returns >= 5, "{counters:?}");
    assert!(counters.slow_headers * 5 < counters.received_packets, "{counters:?}");
    let share = counters.software_busy.ns() / 2_000_000.0;
    assert!(share < 0.05, "published: 5% or less of a core: {share}");
}

/// Returns the goodput in Gb/s of messages of one packet, sent on each queue pair alternately.
fn goodput_of(policy: TransportPolicy, qps: usize) -> f64 {
    let depth = (512 / qps as u64).max(1);
    goodput(profile(policy), &Load { qps, bytes: 1024, depth, loss: 0.0, end_us: 1000.0 }).0
}

#[test]
fn srnic_fills_the_wire_over_many_queue_pairs_and_a_context_cache_does_not() {
    for qps in [1, 256, 4096] {
        let gbps = goodput_of(TransportPolicy::Srnic, qps);
        assert!(gbps > 90.0, "{qps}: {gbps}");
    }
    let gbps = [256, 512, 4096].map(|qps| goodput_of(TransportPolicy::ConnectionCache, qps));
    assert!(gbps[0] > 90.0 && gbps[1] < 75.0, "the knee: {gbps:?}");
    assert!((45.0..58.0).contains(&gbps[2]), "the published half: {gbps:?}");
}

#[test]
fn a_small_message_takes_two_consecutive_dma_reads() {
    let mut pair = Pair::new(NicProfile::modelled(TransportPolicy::Srnic), 1);
    pair.delay = Span::from_ns(300.0);
    pair.packet_time = Span::from_ns(10.0);
    let qps = pair.connect(Service::Rc);
    pair.receive(1, qps[1], 1, 0, 64);
    pair.send(0, qps[0], 1, SendKind::Send(None), 0, 64);
    while pair.completions[1].is_empty() && pair.step(Time::MAX) {}
    let us = pair.now.ps() as f64 / 1e6;
    assert!((2.9..3.3).contains(&us), "published 3.3 us: {us}");
}
