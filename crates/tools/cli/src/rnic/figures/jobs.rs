//! The simulations, each with the figures whose values it computes.

use netsim::experiments::{
    ExperimentError, FctExperiment, LatencyExperiment, Observers, PathUse, QpOrder, RateExperiment, SprayExperiment,
    StreamExperiment,
};
use netsim::topology::TopologyPreset;
use netsim::transport::TransportConfig;
use netsim::workload::SizeDistribution;
use pcie::result::Provenance;
use rnic::memory_budget::{MemoryBudget, MemoryLocation};
use rnic::nic::TransportPolicy;
use sim::Span;

use super::{Depth, Row};

/// Work requests of each queue pair in the budget of host memory. Memory on chip does not depend on it.
const DEPTH: u32 = 64;
const BYTES_PER_MB: f64 = 1e6;

/// One simulation, or one memory budget.
#[derive(Clone, Copy)]
pub enum Job {
    ByQps(StreamExperiment),
    ByLoss(StreamExperiment),
    BySkew(SprayExperiment),
    Latency(LatencyExperiment),
    Rate(RateExperiment),
    Memory(TransportPolicy, u32),
    Flows { preset: TopologyPreset, load: f64, transport: TransportPolicy, during: Span, seed: u64 },
}

/// The name of a figure, and one of its values.
pub type FigureRow = (&'static str, Row);

fn modelled(series: impl Into<String>, x: f64, y: f64) -> Row {
    Row { series: series.into(), x, y, provenance: Provenance::Modelled, published: None, published_of: None }
}

impl Job {
    /// Runs the simulation and returns its values.
    pub fn run(&self) -> Result<Vec<FigureRow>, ExperimentError> {
        match self {
            Self::ByQps(plan) => {
                let order = if plan.qp_order == QpOrder::Random { ", random order" } else { "" };
                let (series, x) = (plan.transport.policy.name().to_owned() + order, f64::from(plan.qps));
                let (result, qps) = (plan.run()?, "goodput-by-qps");
                let mut rows = vec![(qps, modelled(series.clone(), x, result.goodput_gbps))];
                if plan.transport.policy == TransportPolicy::SrnicPaged {
                    let gbps = result.context_read_gbps + result.context_write_gbps;
                    rows.push(("contexts-by-qps", modelled(series, x, gbps)));
                }
                Ok(rows)
            }
            Self::ByLoss(plan) => {
                let (result, series, x) = (plan.run()?, plan.transport.policy.name(), plan.loss * 100.0);
                let mut rows = vec![("goodput-by-loss", modelled(series, x, result.goodput_gbps))];
                if plan.transport.policy == TransportPolicy::Srnic {
                    let core = modelled("receiver", x, result.slow_path_core_share * 100.0);
                    let headers = modelled("headers in software", x, result.slow_path_share * 100.0);
                    rows.extend([("slow-path-by-loss", core), ("slow-path-by-loss", headers)]);
                }
                Ok(rows)
            }
            Self::BySkew(plan) => {
                let run = |path_use| SprayExperiment { path_use, ..*plan }.run();
                let share = run(PathUse::Sprayed)?.goodput_gbps / run(PathUse::InOrder)?.goodput_gbps;
                let (policy, skew_us) = (plan.transport.policy.name(), plan.skew.ns() / 1000.0);
                let series = format!("{policy}, {} Gb/s, {} % lost", plan.gbps, plan.loss * 100.0);
                Ok(vec![("spray-by-skew", modelled(series, skew_us, share * 100.0))])
            }
            Self::Rate(plan) => {
                let series = format!("{}, queue pairs {}", plan.policy.name(), plan.qps);
                Ok(vec![("rate-by-size", modelled(series, f64::from(plan.message_bytes), plan.run()?.mops))])
            }
            Self::Latency(plan) => {
                let (series, x) = (plan.policy.name(), f64::from(plan.size_bytes));
                Ok(vec![("latency-by-size", modelled(series, x, plan.run()?.p50_us))])
            }
            Self::Memory(policy, qps) => {
                let bytes = MemoryBudget::new(*policy, *qps, DEPTH).total(MemoryLocation::OnChip);
                let series = policy.name();
                Ok(vec![("memory-by-qps", modelled(series, f64::from(*qps), bytes as f64 / BYTES_PER_MB))])
            }
            Self::Flows { preset, load, transport, during, seed } => flows(*preset, *load, *transport, *during, *seed),
        }
    }
}

fn flows(
    preset: TopologyPreset,
    load: f64,
    transport: TransportPolicy,
    during: Span,
    seed: u64,
) -> Result<Vec<FigureRow>, ExperimentError> {
    let sizes = SizeDistribution::find("cache-follower").expect("the distribution is built in");
    let plan = TransportConfig { policy: transport, ..TransportConfig::default() };
    let result = FctExperiment::published(preset, sizes, load, plan, during, seed)?.run(Observers::default())?;
    let (mean, p99) = match preset {
        TopologyPreset::LeafSpine256 => ("slowdown-256-mean", "slowdown-256-p99"),
        TopologyPreset::ThreeTier1024 => ("slowdown-1024-mean", "slowdown-1024-p99"),
        TopologyPreset::ThreeTier4096 => ("slowdown-4096-mean", "slowdown-4096-p99"),
    };
    let series = format!("{}, load {load}", transport.name());
    // A bin of few flows has no p99.
    let rows = |figure, value: fn(&netsim::results::SummaryStats) -> Option<f64>| {
        let row = |bin: &netsim::results::SizeBin| {
            Some((figure, modelled(series.clone(), bin.bytes_max as f64, value(&bin.slowdown)?)))
        };
        result.bins.iter().filter_map(row).collect::<Vec<_>>()
    };
    Ok([rows(mean, |slowdown| Some(slowdown.mean)), rows(p99, |slowdown| slowdown.p99)].concat())
}

/// Returns all simulations, the longest first.
pub fn all(depth: Depth, seed: u64) -> Vec<Job> {
    let is_quick = depth == Depth::Quick;
    let mut jobs = [networks(depth, seed), paths(is_quick, seed), rates(is_quick, seed)].concat();
    let losses: &[f64] = if is_quick { &[0.0, 0.01] } else { &[0.0, 0.0001, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05] };
    for transport in [TransportPolicy::Srnic, TransportPolicy::Irn, TransportPolicy::GoBackN] {
        jobs.extend(losses.iter().map(|loss| Job::ByLoss(StreamExperiment::by_loss(transport, *loss, 100.0, seed))));
    }
    let qps: &[u32] = if is_quick {
        &[128, 1024, 10_000, 16_384]
    } else {
        &[1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 10_000, 16_384]
    };
    for nic in [TransportPolicy::Srnic, TransportPolicy::ConnectionCache, TransportPolicy::SrnicPaged] {
        jobs.extend(qps.iter().map(|qps| Job::ByQps(StreamExperiment::by_qps(nic, *qps, 100.0, seed))));
    }
    let many: &[u32] = if is_quick { &[100_000] } else { &[10_000, 30_000, 100_000] };
    for qps in many {
        let plan = StreamExperiment::by_qps(TransportPolicy::SrnicPaged, *qps, 100.0, seed);
        if *qps > 16_384 {
            jobs.push(Job::ByQps(plan));
        }
        jobs.push(Job::ByQps(StreamExperiment { qp_order: QpOrder::Random, ..plan }));
    }
    let sizes: &[u32] = if is_quick { &[64, 4096] } else { &[8, 64, 256, 1024, 4096, 16_384, 65_536] };
    for nic in [TransportPolicy::Srnic, TransportPolicy::Irn, TransportPolicy::ConnectionCache] {
        jobs.extend(sizes.iter().map(|size| Job::Latency(LatencyExperiment::new(nic, *size, seed))));
    }
    for policy in [TransportPolicy::Srnic, TransportPolicy::Irn, TransportPolicy::SrnicPaged] {
        jobs.extend([100, 1000, 10_000, 100_000].map(|qps| Job::Memory(policy, qps)));
    }
    jobs
}

fn paths(is_quick: bool, seed: u64) -> Vec<Job> {
    let (skews_us, rates): (&[f64], &[f64]) =
        if is_quick { (&[1.0], &[100.0]) } else { (&[0.0, 1.0, 4.0], &[100.0, 400.0]) };
    let mut jobs = Vec::new();
    for (gbps, loss) in rates.iter().flat_map(|gbps| [0.0, 0.001, 0.01].map(|loss| (*gbps, loss))) {
        jobs.extend(skews_us.iter().map(|us| {
            let plan = SprayExperiment::new(TransportPolicy::Srnic, PathUse::Sprayed, gbps, seed);
            Job::BySkew(SprayExperiment { skew: Span::from_ns(us * 1000.0), loss, ..plan })
        }));
    }
    jobs
}

fn rates(is_quick: bool, seed: u64) -> Vec<Job> {
    let sizes: &[u32] = if is_quick { &[64] } else { &[8, 64, 256, 1024, 4096] };
    let nics = [
        (TransportPolicy::Srnic, 1),
        (TransportPolicy::Srnic, 128),
        (TransportPolicy::Srnic, 10_000),
        (TransportPolicy::ConnectionCache, 128),
        (TransportPolicy::ConnectionCache, 10_000),
    ];
    let job = |(nic, qps), size: &u32| Job::Rate(RateExperiment::new(nic, qps, 200.0, *size, seed));
    nics.into_iter().flat_map(|nic| sizes.iter().map(move |size| job(nic, size))).collect()
}

fn networks(depth: Depth, seed: u64) -> Vec<Job> {
    let transports = [TransportPolicy::Srnic, TransportPolicy::Irn, TransportPolicy::GoBackN];
    let of = |preset, loads: &[f64], ms: f64, transports: &[TransportPolicy]| {
        let job = |(load, transport): (f64, TransportPolicy)| Job::Flows {
            preset,
            load,
            transport,
            during: Span::from_ns(ms * 1e6),
            seed,
        };
        let pairs = loads.iter().flat_map(|load| transports.iter().map(move |transport| (*load, *transport)));
        pairs.map(job).collect::<Vec<_>>()
    };
    match depth {
        Depth::Quick => of(TopologyPreset::LeafSpine256, &[0.5], 0.05, &transports[..1]),
        Depth::Default => [
            of(TopologyPreset::ThreeTier1024, &[0.5], 1.0, &transports),
            of(TopologyPreset::LeafSpine256, &[0.7, 0.5], 2.0, &transports),
        ]
        .concat(),
        Depth::Long => [
            // This network is oversubscribed 4:1, so these loads are twice and half of what its leaves carry.
            of(TopologyPreset::ThreeTier4096, &[0.5, 0.125], 10.0, &transports),
            of(TopologyPreset::ThreeTier1024, &[0.7, 0.5], 10.0, &transports),
            of(TopologyPreset::LeafSpine256, &[0.7, 0.5], 10.0, &transports),
        ]
        .concat(),
    }
}
