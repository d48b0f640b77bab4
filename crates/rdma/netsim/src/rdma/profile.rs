//! NIC profiles of simulations: the engine's policies with their modelled costs.

use std::sync::OnceLock;

use pcie::host::System;
use pcie::link::{Generation, Lanes, Link};
use pcie::model::{Access, CompletionSize, Mode, Model};
use pcie::test::{Cache, Iommu, Kind, Numa, Order, Test};
use rnic::nic::{
    Context, ContextCacheConfig, ContextPoolConfig, CostModel, LossRecovery, NicProfile, RetransmitTimeout, Scheduling,
};
use sim::Span;

use super::path::PathProperties;
use crate::transport::{AckTimeout, IrnKeys, LineRate, TransportConfig};
use crate::workload::FLOWS_MAX;

/// Rate of the network link for which the engine's modelled NIC fetches ahead.
const MODELLED_GBPS: f64 = 100.0;

/// Returns the profile of a NIC with these transport settings.
pub fn profile(config: &TransportConfig, path: &PathProperties) -> NicProfile {
    let modelled = NicProfile::modelled(config.policy);
    // SRNIC's FPGA prototype has the published PCIe round trip of 1 us, and IRN is modelled with the same; a commercial
    // NIC has the PCIe latency of a server of its time.
    let costs = match config.nic_latency {
        false => CostModel::ZERO,
        true if config.policy.is_selective() => modelled.costs,
        true => commercial_costs(),
    };
    let costs = match config.pcie_gbps {
        Some(gbps) if config.nic_latency => CostModel { dma_byte_ps: byte_ps(gbps), ..costs },
        _ => costs,
    };
    // Calibrated to the published goodput of a ConnectX-6 at 16,384 queue pairs (52 of 97 Gb/s) with full packets of
    // 4096 bytes. The knee at 256 queue pairs and all points between follow from the model.
    let miss = costs.dma_read * CACHE_READS;
    let cache = modelled.cache.map(|cache| ContextCacheConfig { fetches: CACHE_FETCHES, miss, ..cache });
    // A packet counts as in flight from when the NIC begins to read it from the host's memory.
    let between_acks = (config.ack_packets - 1) * config.mtu_bytes;
    let congestion = config.congestion_control(&LineRate {
        rate: path.rate,
        bdp_bytes: path.bytes_in(path.round_trip, config.mtu_bytes),
        window_bytes: path.bytes_in(path.round_trip + costs.dma_read, config.mtu_bytes) + between_acks,
        links: path.links,
        round_trip: path.round_trip,
    });
    // What a NIC fetches ahead grows with the rate: SRNIC needs 25 KB in flight at 100 Gb/s.
    let times = (path.rate.gbps() / MODELLED_GBPS).ceil().max(1.0) as u32;
    let ahead_bytes = modelled.scheduling.ahead_bytes * times;
    // Like most simulators, a NIC that takes no time sends a packet of each queue pair in turn.
    let quantum_bytes = if config.nic_latency { modelled.scheduling.quantum_bytes * times } else { 1 };
    // One queue pair per flow, in case all flows overlap.
    let qps = FLOWS_MAX as u32;
    let pool = modelled.pool.map(with_pcie_bytes);
    // IRN has published time-outs, which replace the queue pair's attribute.
    let has_own_timeout =
        config.ack_timeout == AckTimeout::Auto || config.policy.loss_recovery() != LossRecovery::SelectiveOnChip;
    let own_timeout = with_irn_keys(stretched(modelled.retransmit_timeout, path), &config.irn);
    let retransmit_timeout = if has_own_timeout { own_timeout } else { RetransmitTimeout::Attribute };
    let TransportConfig { mtu_bytes, ack_packets, window_packets, .. } = *config;
    NicProfile {
        mtu_bytes,
        ack_packets,
        window_packets,
        congestion,
        costs,
        scheduling: Scheduling { quantum_bytes, ahead_bytes, ..modelled.scheduling },
        cache,
        pool,
        qps,
        retransmit_timeout,
        ..modelled
    }
}

/// Returns the picoseconds of a byte at this rate, at least one.
fn byte_ps(gbps: f64) -> u64 {
    ((8000.0 / gbps).round() as u64).max(1)
}

/// Returns the modelled link of this generation with 16 lanes, and the default limits of its packets.
pub fn pcie_model(generation: Generation) -> Model {
    let lanes = Lanes::new(16).expect("16 lanes are a valid width");
    let link = Link { generation, lanes, ..Link::PUBLISHED };
    Model::new(Mode::Corrected, link, CompletionSize::Mps).expect("this mode covers every link")
}

/// Returns the rate in Gb/s at which a NIC reads its host's memory over [`pcie_model`]'s link.
pub fn pcie_read_gbps(generation: Generation) -> f64 {
    pcie_model(generation).bandwidth(LARGE_BYTES.into(), 0).expect("a page is a valid transfer").read_gbps
}

/// Returns timeouts that are long enough for the network. A tail loss probe needs it before a round trip was measured.
fn stretched(timeout: RetransmitTimeout, path: &PathProperties) -> RetransmitTimeout {
    match timeout {
        RetransmitTimeout::Attribute => timeout,
        RetransmitTimeout::LowHigh { low, high, packets } => {
            RetransmitTimeout::LowHigh { low: path.stretched(low), high: path.stretched(high), packets }
        }
        RetransmitTimeout::Probe { least, first } => RetransmitTimeout::Probe { least, first: path.stretched(first) },
    }
}

fn with_irn_keys(timeout: RetransmitTimeout, keys: &IrnKeys) -> RetransmitTimeout {
    let RetransmitTimeout::LowHigh { low, high, packets } = timeout else { return timeout };
    RetransmitTimeout::LowHigh {
        low: keys.timeout_low.map_or(low, Span::from_ns),
        high: keys.timeout_high.map_or(high, Span::from_ns),
        packets: keys.low_packets.unwrap_or(packets),
    }
}

/// Sets the PCIe bytes that reading and writing back a context take on a Gen3 x16 link, by the `pcie` crate's model.
fn with_pcie_bytes(pool: ContextPoolConfig) -> ContextPoolConfig {
    let model = pcie_model(Link::PUBLISHED.generation);
    // Each context lies in 256 bytes of its own.
    let span = model.span(size_of::<Context>() as u64, 0).expect("a context is a valid transfer");
    let read_bytes = model.traffic(Access::Read, span).received_bytes as u32;
    let write_bytes = model.traffic(Access::Write, span).sent_bytes as u32;
    ContextPoolConfig { read_bytes, write_bytes, ..pool }
}

/// Sequential reads of host memory on a context cache miss: context, work request and address translation.
const CACHE_READS: u64 = 3;
/// Context cache misses served concurrently.
const CACHE_FETCHES: u32 = 3;

/// The simulated server of the commercial NIC.
const SERVER: &str = "ice-lake";
/// Size of the reads whose latency is measured.
const SMALL_BYTES: u32 = 64;
/// Size of the reads whose bandwidth is measured.
const LARGE_BYTES: u32 = 4096;
const SAMPLES: u64 = 2000;

/// Returns the costs of a commercial NIC (*modelled*): its reads of host memory are simulated by the `pcie` crate.
fn commercial_costs() -> CostModel {
    static COSTS: OnceLock<CostModel> = OnceLock::new();
    *COSTS.get_or_init(|| {
        let test = |kind, size_bytes| Test {
            test: kind,
            size_bytes,
            window_bytes: 65_536,
            host_offset_bytes: 0,
            device_offset_bytes: 0,
            order: Order::Random,
            cache: Cache::HostWarm,
            iommu: Iommu::Off,
            numa: Numa::Local,
            samples: SAMPLES,
            seed: 1,
        };
        let server = System::named(SERVER).expect("a built-in system");
        let mut latencies_ns = Vec::with_capacity(SAMPLES as usize);
        let mut run = |test| server.run(&test, &mut |ns| latencies_ns.push(ns)).expect("a valid test");
        run(test(Kind::LatRd, SMALL_BYTES));
        let bandwidth = run(test(Kind::BwRd, LARGE_BYTES));
        latencies_ns.sort_unstable_by(f64::total_cmp);
        let dma_read = Span::from_ns(latencies_ns[latencies_ns.len() / 2]);
        CostModel { dma_read, dma_byte_ps: byte_ps(bandwidth.gbps()), ..CostModel::modelled() }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rate::LinkRate;

    #[test]
    fn modelled_pcie_bytes_of_a_context_are_those_of_its_tlps() {
        let pool = ContextPoolConfig::modelled();
        assert_eq!(with_pcie_bytes(pool), pool);
    }

    #[test]
    fn a_nic_of_a_faster_link_fetches_more_ahead_over_the_given_pcie() {
        let rate = |gbps| LinkRate::from_gbps(gbps).unwrap();
        let of = |gbps, pcie_gbps| {
            let path = PathProperties::of_cable(rate(gbps), Span::from_ns(8000.0));
            let found = profile(&TransportConfig { pcie_gbps, ..TransportConfig::default() }, &path);
            (found.scheduling.quantum_bytes, found.scheduling.ahead_bytes, found.costs.dma_byte_ps)
        };
        assert_eq!(of(40.0, None), of(100.0, None));
        assert_eq!(of(100.0, None), (16_384, 65_536, 64));
        assert_eq!(of(400.0, Some(500.0)), (65_536, 262_144, 16));
        let rates = ["3", "4", "5"].map(|generation| pcie_read_gbps(generation.parse().unwrap()));
        assert!(rates[0] > 100.0 && rates[1] > 200.0 && rates[2] > 400.0 && rates[2] < 512.0, "{rates:?}");
    }

    #[test]
    fn a_commercial_nic_reads_its_hosts_memory_in_half_a_microsecond() {
        let costs = commercial_costs();
        assert!((400.0..700.0).contains(&costs.dma_read.ns()), "{costs:?}");
        assert!((20..=64).contains(&costs.dma_byte_ps), "{costs:?}");
    }
}
