//! NIC profiles of simulations: the engine's policies with their modelled costs.

use std::sync::OnceLock;

use pcie::host::System;
use pcie::link::{Lanes, Link};
use pcie::model::{Access, CompletionSize, Mode, Model};
use pcie::test::{Cache, Iommu, Kind, Numa, Order, Test};
use rnic::nic::{
    CongestionControl, Context, ContextCacheConfig, ContextPoolConfig, CostModel, Dcqcn, LossRecovery, NicProfile,
    RetransmitTimeout,
};
use sim::Span;

use crate::rate::LinkRate;
use crate::transport::{AckTimeout, CongestionAlgorithm, TransportConfig};
use crate::workload::FLOWS_MAX;

/// The properties of a path from which a NIC derives its window and rate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PathProperties {
    /// Rate of the host's link.
    pub rate: LinkRate,
    /// Longest round-trip time of the empty network.
    pub round_trip: Span,
}

impl PathProperties {
    /// Returns the bandwidth-delay product plus one packet.
    fn bdp_bytes(&self, mtu_bytes: u32) -> u32 {
        (self.rate.gbps() * self.round_trip.ns() / 8.0) as u32 + mtu_bytes
    }
}

/// Returns the profile of a NIC with these transport settings.
pub fn profile(config: &TransportConfig, path: &PathProperties) -> NicProfile {
    let bdp = path.bdp_bytes(config.mtu_bytes);
    let congestion = match config.congestion {
        CongestionAlgorithm::None => CongestionControl::None,
        CongestionAlgorithm::BdpWindow => CongestionControl::BdpWindow { bytes: bdp },
        CongestionAlgorithm::Dctcp => CongestionControl::Dctcp { initial_bytes: bdp, bytes_max: 2 * bdp },
        CongestionAlgorithm::Swift => CongestionControl::Swift {
            target: path.round_trip + path.round_trip,
            initial_bytes: bdp,
            bytes_max: 2 * bdp,
        },
        CongestionAlgorithm::Dcqcn => CongestionControl::Dcqcn(Dcqcn::published((path.rate.gbps() * 1e9) as u64)),
    };
    let modelled = NicProfile::modelled(config.policy);
    // SRNIC's FPGA prototype has the published PCIe round trip of 1 us, and IRN is modelled with the same; a commercial
    // NIC has the PCIe latency of a server of its time.
    let costs = if config.policy.is_selective() { modelled.costs } else { commercial_costs() };
    // Calibrated to the published goodput of a ConnectX-6 at 16,384 queue pairs (52 of 97 Gb/s) with full packets of
    // 4096 bytes. The knee at 256 queue pairs and all points between follow from the model.
    let miss = costs.dma_read * CACHE_READS;
    let cache = modelled.cache.map(|cache| ContextCacheConfig { fetches: CACHE_FETCHES, miss, ..cache });
    // One queue pair per flow, in case all flows overlap.
    let qps = FLOWS_MAX as u32;
    let pool = modelled.pool.map(with_pcie_bytes);
    // IRN has published time-outs, which replace the queue pair's attribute.
    let has_own_timeout =
        config.ack_timeout == AckTimeout::Auto || config.policy.loss_recovery() != LossRecovery::SelectiveOnChip;
    let retransmit_timeout = if has_own_timeout { modelled.retransmit_timeout } else { RetransmitTimeout::Attribute };
    NicProfile { mtu_bytes: config.mtu_bytes, congestion, costs, cache, pool, qps, retransmit_timeout, ..modelled }
}

/// Sets the PCIe bytes that reading and writing back a context take on a Gen3 x16 link, by the `pcie` crate's model.
fn with_pcie_bytes(pool: ContextPoolConfig) -> ContextPoolConfig {
    let lanes = Lanes::new(16).expect("16 lanes are a valid width");
    let link = Link { lanes, ..Link::PUBLISHED };
    let model = Model::new(Mode::Corrected, link, CompletionSize::Mps).expect("this mode covers every link");
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
        CostModel { dma_read, dma_byte_ps: (8000.0 / bandwidth.gbps()).round() as u64, ..CostModel::modelled() }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modelled_pcie_bytes_of_a_context_are_those_of_its_tlps() {
        let pool = ContextPoolConfig::modelled();
        assert_eq!(with_pcie_bytes(pool), pool);
    }

    #[test]
    fn a_commercial_nic_reads_its_hosts_memory_in_half_a_microsecond() {
        let costs = commercial_costs();
        assert!((400.0..700.0).contains(&costs.dma_read.ns()), "{costs:?}");
        assert!((20..=64).contains(&costs.dma_byte_ps), "{costs:?}");
    }
}
