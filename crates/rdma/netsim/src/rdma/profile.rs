//! NICs of simulations: the engine's policies, with what they cost.

use std::sync::OnceLock;

use pcie::host::System;
use pcie::link::{Lanes, Link};
use pcie::model::{Access, Completions, Mode, Model};
use pcie::test::{Cache, Iommu, Kind, Numa, Order, Test};
use rnic::nic::{CongestionControl, Context, ContextCache, ContextPool, Costs, Dcqcn, Policy, Profile};
use sim::Span;

use crate::rate::LinkRate;
use crate::transport::{CongestionAlgorithm, TransportConfig, TransportPolicy};
use crate::workload::FLOWS_MAX;

/// What a NIC's window and rate depend on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PathProperties {
    /// Of the host's line.
    pub rate: LinkRate,
    /// The longest round trip of an empty network.
    pub round_trip: Span,
}

impl PathProperties {
    /// Bandwidth times delay, and a packet.
    fn bdp_bytes(&self, mtu_bytes: u32) -> u32 {
        (self.rate.gbps() * self.round_trip.ns() / 8.0) as u32 + mtu_bytes
    }
}

/// The NIC of a plan, at the end of a PCIe link.
pub fn profile(config: &TransportConfig, path: &PathProperties) -> Profile {
    let policy = match config.policy {
        TransportPolicy::Srnic => Policy::Srnic,
        TransportPolicy::SrnicPaged => Policy::SrnicPaged,
        TransportPolicy::Irn => Policy::Irn,
        TransportPolicy::GoBackN => Policy::GoBackN,
        TransportPolicy::ConnectionCache => Policy::ConnectionCache,
    };
    let bdp = path.bdp_bytes(config.mtu_bytes);
    let congestion = match config.congestion {
        CongestionAlgorithm::None => CongestionControl::None,
        CongestionAlgorithm::BdpWindow => CongestionControl::BdpWindow { bytes: bdp },
        CongestionAlgorithm::Dctcp => CongestionControl::Dctcp { first_bytes: bdp, most_bytes: 2 * bdp },
        CongestionAlgorithm::Swift => CongestionControl::Swift {
            target: path.round_trip + path.round_trip,
            first_bytes: bdp,
            most_bytes: 2 * bdp,
        },
        CongestionAlgorithm::Dcqcn => CongestionControl::Dcqcn(Dcqcn::published((path.rate.gbps() * 1e9) as u64)),
    };
    let modelled = Profile::modelled(policy);
    // A prototype of SRNIC on an FPGA has the round trip of 1 us that was published with it, and IRN beside it too; a
    // commercial NIC what a server of its time gives.
    let costs = if policy.is_selective() { modelled.costs } else { commercial_costs() };
    // Calibrated to the published goodput of a ConnectX-6 at 16,384 queue pairs (52 of 97 Gb/s) with full packets of
    // 4096 bytes: the knee at 256 and all between follow.
    let miss = costs.dma_read * CACHE_READS;
    let cache = modelled.cache.map(|cache| ContextCache { fetches: CACHE_FETCHES, miss, ..cache });
    // A queue pair for each flow, should they all overlap.
    let qps = FLOWS_MAX as u32;
    let pool = modelled.pool.map(with_link_bytes);
    Profile { mtu_bytes: config.mtu_bytes, congestion, costs, cache, pool, qps, ..modelled }
}

/// What a context's way there and back takes of PCIe of generation 3, as the `pcie` crate counts it.
fn with_link_bytes(pool: ContextPool) -> ContextPool {
    let lanes = Lanes::new(16).expect("such links exist");
    let link = Link { lanes, ..Link::PUBLISHED };
    let model = Model::new(Mode::Corrected, link, Completions::Mps).expect("this mode knows every link");
    // One lies in 256 bytes of its own.
    let span = model.span(size_of::<Context>() as u64, 0).expect("a context is a transfer");
    let read_bytes = model.traffic(Access::Read, span).received_bytes as u32;
    let write_bytes = model.traffic(Access::Write, span).sent_bytes as u32;
    ContextPool { read_bytes, write_bytes, ..pool }
}

/// A miss reads context, request and translation, one after the other; so many misses are served at a time.
const CACHE_READS: u64 = 3;
const CACHE_FETCHES: u32 = 3;

/// The simulated server that a commercial NIC is plugged into, and bytes of what it reads for its own needs.
const SERVER: &str = "ice-lake";
const SMALL_BYTES: u32 = 64;
const LARGE_BYTES: u32 = 4096;
const SAMPLES: u64 = 2000;

/// *Modelled*: reads of the host's memory as the `pcie` crate simulates them.
fn commercial_costs() -> Costs {
    static COSTS: OnceLock<Costs> = OnceLock::new();
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
        let server = System::named(SERVER).expect("it comes with the program");
        let mut latencies_ns = Vec::with_capacity(SAMPLES as usize);
        let mut run = |test| server.run(&test, &mut |ns| latencies_ns.push(ns)).expect("the tests make sense");
        run(test(Kind::LatRd, SMALL_BYTES));
        let bandwidth = run(test(Kind::BwRd, LARGE_BYTES));
        latencies_ns.sort_unstable_by(f64::total_cmp);
        let dma_read = Span::from_ns(latencies_ns[latencies_ns.len() / 2]);
        Costs { dma_read, dma_byte_ps: (8000.0 / bandwidth.gbps()).round() as u64, ..Costs::modelled() }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_takes_of_the_link_what_its_packets_take() {
        let pool = ContextPool::modelled();
        assert_eq!(with_link_bytes(pool), pool);
    }

    #[test]
    fn a_commercial_nic_reads_its_hosts_memory_in_half_a_microsecond() {
        let costs = commercial_costs();
        assert!((400.0..700.0).contains(&costs.dma_read.ns()), "{costs:?}");
        assert!((20..=64).contains(&costs.dma_byte_ps), "{costs:?}");
    }
}
