//! How much longer flows take in a network full of others.

use pcie::result::Provenance;
use serde::Serialize;
use sim::{Span, Time};

use super::error::ExperimentError;
use crate::endpoint::{EndpointCounters, Flow};
use crate::ideal::IdealFct;
use crate::network::{Network, NetworkConfig, NetworkCounters, PacketTap};
use crate::rdma::{self, PathProperties, RdmaConfig, RdmaEndpoint, profile};
use crate::results::{SizeBin, SummaryStats, flow_results, size_bins};
use crate::scenario::Scenario;
use crate::switch::SwitchConfig;
use crate::topology::{HostId, Topology, TopologyPreset};
use crate::transport::TransportConfig;
use crate::workload::{SizeDistribution, Workload};

/// Flows in a network.
#[derive(Clone, Debug)]
pub struct FctExperiment {
    /// The network.
    pub network: NetworkConfig,
    /// What happens in it, in order of its start.
    pub flows: Vec<Flow>,
    /// What endpoints do.
    pub transport: TransportConfig,
    /// When the run ends, whatever is left to do.
    pub until: Time,
}

/// What the flows suffered.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FctResult {
    /// Of the figures.
    pub provenance: Provenance,
    /// Things that happened in the simulation.
    pub events: u64,
    /// Virtual time that passed.
    pub simulated_us: f64,
    /// Hosts.
    pub hosts: u32,
    /// Flows that were to be moved.
    pub flows: usize,
    /// Those that were, until the end.
    pub flows_ended: usize,
    /// By how much longer flows took than alone in the network.
    pub slowdown: SummaryStats,
    /// The same by size, 5% of the flows a bin.
    pub bins: Vec<SizeBin>,
    /// Bytes of messages that arrived by time, of a host on average.
    pub goodput_gbps_per_host: f64,
    /// Times to the end of all flows.
    pub fct_us: SummaryStats,
    /// What switches and lines counted.
    pub network: NetworkCounters,
    /// What endpoints counted.
    pub endpoints: EndpointCounters,
    /// Requests that failed.
    pub failed: u64,
    /// Bytes of memory that the simulation held at its end, as far as it can tell.
    pub memory_bytes: usize,
}

impl FctExperiment {
    /// Poisson arrivals in a published network, as published.
    ///
    /// # Errors
    /// When there can be no such load.
    pub fn published(
        preset: TopologyPreset,
        sizes: SizeDistribution,
        load: f64,
        transport: TransportConfig,
        duration: Span,
        seed: u64,
    ) -> Result<Self, ExperimentError> {
        let topology = preset.topology();
        let flows = Workload::Poisson { sizes, load, duration }.flows(&topology, seed)?;
        let network = NetworkConfig { topology, switches: SwitchConfig::default(), impairments: Vec::new(), seed };
        // Whatever is left then is not going to come.
        Ok(Self { network, flows, transport, until: Time::ZERO + duration + Span::from_ns(1e9) })
    }

    /// What a file says.
    pub fn from_scenario(scenario: &Scenario) -> Self {
        let Scenario { network, flows, transport, until, .. } = scenario.clone();
        Self { network, flows, transport, until }
    }

    /// Runs it.
    ///
    /// # Errors
    /// When there can be no such NIC.
    pub fn run(&self, tap: Option<Box<dyn PacketTap<rnic::wire::Header>>>) -> Result<FctResult, ExperimentError> {
        let topology = &self.network.topology;
        let rate = topology.host_link(HostId(0)).rate;
        let path = PathProperties { rate, round_trip: longest_round_trip(topology) };
        let rdma = RdmaConfig { seed: self.network.seed, ..RdmaConfig::new(profile(&self.transport, &path)) };
        let endpoints = RdmaEndpoint::for_hosts(rdma, topology.hosts())?;
        let mut network = Network::new(&self.network, endpoints, self.flows.clone());
        if let Some(tap) = tap {
            network.set_tap(rdma::header_tap(tap));
        }
        network.run_flows(self.until);
        let ended = flow_results(&network, &IdealFct::new(topology, rdma.framing()));
        let endpoints = network.endpoint_counters();
        let mut slowdowns: Vec<f64> = ended.iter().map(|flow| flow.slowdown).collect();
        let mut fcts_us: Vec<f64> = ended.iter().map(|flow| flow.fct.ns() / 1000.0).collect();
        let passed = network.now().since(Time::ZERO);
        let gbps = endpoints.delivered_bytes as f64 * 8.0 / passed.ns().max(1.0);
        Ok(FctResult {
            provenance: Provenance::Modelled,
            events: network.counters().events,
            simulated_us: passed.ns() / 1000.0,
            hosts: topology.hosts(),
            flows: self.flows.len(),
            flows_ended: ended.len(),
            slowdown: SummaryStats::of(&mut slowdowns),
            bins: size_bins(&ended),
            goodput_gbps_per_host: gbps / f64::from(topology.hosts()),
            fct_us: SummaryStats::of(&mut fcts_us),
            network: network.counters(),
            endpoints,
            failed: network.endpoints().iter().map(RdmaEndpoint::failed).sum(),
            memory_bytes: network.memory_bytes(),
        })
    }
}

/// Of two hosts: the first one and whichever is farthest from it; a packet of a byte and its acknowledgement.
fn longest_round_trip(topology: &Topology) -> Span {
    let framing = crate::endpoint::Framing { payload_bytes: 1, overhead_bytes: 1000, ack_bytes: 86 };
    let ideal = IdealFct::new(topology, framing);
    let to =
        |to| Flow { start: Time::ZERO, from: HostId(0), to: HostId(to), bytes: 1, connection: None, repeats: false };
    (1..topology.hosts()).map(|host| ideal.fct(&to(host))).max().unwrap_or(Span::ZERO)
}
