//! The rate of small messages, and what limits it: the link, PCI Express, the NIC's pipeline, or its scheduler.
//!
//! The simulated NIC has latencies, fetches work requests, and occupies its link to the host with data alone. The bytes
//! of doorbells, work requests and completions, and the pipeline's time for a message, are closed formulas here.

use pcie::link::Generation;
use pcie::model::{Access, Traffic};
use pcie::result::Provenance;
use rnic::nic::TransportPolicy;
use rnic::wire::{BTH_BYTES, ICRC_BYTES, PLACEMENT_BYTES, RETH_BYTES};
use serde::Serialize;
use sim::Span;

use super::error::{ExperimentError, in_range};
use super::stream::{MessageDepth, StreamExperiment};
use crate::endpoint::{ETHERNET_BYTES, ETHERNET_BYTES_MIN, IP_UDP_BYTES};
use crate::rdma::{pcie_model, pcie_read_gbps};
use crate::transport::TransportConfig;

/// *Published*: ConnectX-6's 215 million messages per second (NVIDIA, "ConnectX-6 Ethernet Adapter Cards User Manual",
/// Introduction).
pub const PIPELINE_MOPS: f64 = 215.0;
/// *Published*: bytes of a work request (SRNIC's WQE caches hold 8 of 64 bytes for each queue).
const WQE_BYTES: u64 = 64;
/// *Published*: bytes of a completion of mlx5 NICs (`nics/mlx5-kernel.toml` of the crate `pcie` has the source).
const CQE_BYTES: u64 = 64;
/// *Published*: bytes that mlx5 drivers write to ring a doorbell (as above).
const DOORBELL_BYTES: u64 = 8;
/// *Published*: outstanding messages of a queue pair (perftest's default `tx-depth`).
const DEPTH: u32 = 128;
/// Fewest outstanding messages of all queue pairs: several times what the latency of a message asks for.
const ALL_DEPTH: u32 = 4096;
/// A simulated rate above this share of a bound is limited by what the bound stands for.
const BOUND_SHARE: f64 = 0.98;
/// Largest rate of a pipeline in millions of messages a second.
const MOPS_MAX: f64 = 1e5;

/// What limits the rate of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RateLimit {
    /// The bytes of messages and headers on the network link.
    Link,
    /// The bytes of doorbells, work requests, data and completions on PCI Express.
    Pcie,
    /// The pipeline's time for each message.
    Pipeline,
    /// The latency of fetches, the number of fetches in flight, or of messages outstanding.
    Fetches,
}

impl RateLimit {
    /// Returns the name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Link => "link",
            Self::Pcie => "pcie",
            Self::Pipeline => "pipeline",
            Self::Fetches => "fetches",
        }
    }
}

/// Measures how many WRITEs a second one NIC completes, over queue pairs that are served in turn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RateExperiment {
    /// Kind of the NIC.
    pub policy: TransportPolicy,
    /// Number of queue pairs.
    pub qps: u32,
    /// Rate of the network link.
    pub gbps: f64,
    /// Size of each message, at most that of a packet.
    pub message_bytes: u32,
    /// Generation of the NIC's PCI Express link, which has 16 lanes.
    pub generation: Generation,
    /// Messages that the NIC's pipeline processes in a second, in millions.
    pub pipeline_mops: f64,
    /// Seed of everything random.
    pub seed: u64,
}

/// The result of a [`RateExperiment`], in millions of messages a second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RateResult {
    /// Where the figures come from.
    pub provenance: Provenance,
    /// The modelled rate: the smallest of the following.
    pub mops: f64,
    /// What limits it.
    pub limit: RateLimit,
    /// The simulated rate, without what the bounds below account for.
    pub simulated_mops: f64,
    /// The bound of the network link.
    pub link_mops: f64,
    /// The bound of PCI Express.
    pub pcie_mops: f64,
    /// The bound of the pipeline.
    pub pipeline_mops: f64,
}

impl RateExperiment {
    /// Returns an experiment with a link of PCI Express generation 4 and the published pipeline of a ConnectX-6.
    pub fn new(policy: TransportPolicy, qps: u32, gbps: f64, message_bytes: u32, seed: u64) -> Self {
        let generation = Generation::new(4).expect("a generation");
        Self { policy, qps, gbps, message_bytes, generation, pipeline_mops: PIPELINE_MOPS, seed }
    }

    /// Runs the experiment.
    ///
    /// # Errors
    /// When a parameter is out of range or requests fail.
    pub fn run(&self) -> Result<RateResult, ExperimentError> {
        in_range("pipeline_mops", self.pipeline_mops, 0.001, MOPS_MAX)?;
        let stream = self.stream();
        // Longer messages would take more time than is simulated until they arrive in turn.
        in_range("size", self.message_bytes.into(), 1.0, stream.transport.mtu_bytes.into())?;
        let result = stream.run()?;
        let simulated_mops = result.goodput_gbps * 1000.0 / 8.0 / f64::from(self.message_bytes);
        let link_mops = self.gbps * 1000.0 / 8.0 / self.link_bytes() as f64;
        let traffic = self.pcie_traffic();
        let busier_bytes = traffic.sent_bytes.max(traffic.received_bytes);
        let pcie_mops = pcie_model(self.generation).tlp_gbps() * 1000.0 / 8.0 / busier_bytes as f64;
        let bounds =
            [(link_mops, RateLimit::Link), (pcie_mops, RateLimit::Pcie), (self.pipeline_mops, RateLimit::Pipeline)];
        let lowest = bounds.into_iter().min_by(|a, b| a.0.total_cmp(&b.0)).expect("three bounds");
        let limit = if simulated_mops < lowest.0 * BOUND_SHARE { RateLimit::Fetches } else { lowest.1 };
        let (provenance, mops) = (Provenance::Modelled, simulated_mops.min(lowest.0));
        Ok(RateResult {
            provenance,
            mops,
            limit,
            simulated_mops,
            link_mops,
            pcie_mops,
            pipeline_mops: self.pipeline_mops,
        })
    }

    fn stream(&self) -> StreamExperiment {
        let by_qps = StreamExperiment::by_qps(self.policy, self.qps, self.gbps, self.seed);
        let pcie_gbps = Some(pcie_read_gbps(self.generation));
        StreamExperiment {
            transport: TransportConfig { pcie_gbps, ..by_qps.transport },
            message_bytes: self.message_bytes,
            depth: MessageDepth { all_min: ALL_DEPTH, per_qp_max: DEPTH },
            warmup: Span::from_ns(5e5),
            duration: Span::from_ns(5e5),
            ..by_qps
        }
    }

    /// Returns the bytes of a message on the network link: its packet with all headers.
    fn link_bytes(&self) -> u64 {
        let placement_bytes = if self.policy.is_selective() { PLACEMENT_BYTES } else { 0 };
        let of_roce = (BTH_BYTES + RETH_BYTES + placement_bytes + ICRC_BYTES) as u32;
        let bytes = self.message_bytes + ETHERNET_BYTES + IP_UDP_BYTES + of_roce;
        u64::from(bytes.max(ETHERNET_BYTES_MIN))
    }

    /// Returns the PCI Express traffic of a message, as seen from the NIC: a doorbell, a fetched work request, the
    /// data, and a completion. Programs post and NICs fetch one request at a time.
    fn pcie_traffic(&self) -> Traffic {
        let model = pcie_model(self.generation);
        let traffic = |access, bytes: u64| {
            model.traffic(access, model.span(bytes, 0).expect("at most a packet is a valid transfer"))
        };
        let doorbell = traffic(Access::Write, DOORBELL_BYTES).reversed();
        let (request, data) = (traffic(Access::Read, WQE_BYTES), traffic(Access::Read, self.message_bytes.into()));
        doorbell + request + data + traffic(Access::Write, CQE_BYTES)
    }
}
