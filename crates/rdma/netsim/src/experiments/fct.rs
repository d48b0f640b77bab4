//! Flow completion times (FCT) and slowdowns of flows in a loaded network.

use std::io::Write;

use pcie::result::Provenance;
use rnic::nic::RetransmitTimeout;
use serde::Serialize;
use sim::{Span, Time};

use super::error::ExperimentError;
use crate::endpoint::{EndpointCounters, Flow};
use crate::ideal::IdealFct;
use crate::network::{Network, NetworkConfig, NetworkCounters, PacketTap};
use crate::rdma::{self, PathProperties, RdmaConfig, RdmaEndpoint};
use crate::results::{FlowResult, SizeBin, SummaryStats, flow_records, flow_results, size_bins, write_flow_records};
use crate::scenario::Scenario;
use crate::series::SeriesWriter;
use crate::topology::TopologyPreset;
use crate::transport::{AckTimeout, TransportConfig};
use crate::workload::{SizeDistribution, Workload};

/// Measures completion times of flows in a network.
#[derive(Clone, Debug)]
pub struct FctExperiment {
    /// The network.
    pub network: NetworkConfig,
    /// The flows, ordered by start time.
    pub flows: Vec<Flow>,
    /// Settings of the endpoints.
    pub transport: TransportConfig,
    /// When the run ends, even if flows are unfinished.
    pub until: Time,
}

/// What observes a run of an [`FctExperiment`].
#[derive(Default)]
pub struct Observers<'a> {
    /// Observes the packets at the hosts.
    pub tap: Option<Box<dyn PacketTap<rnic::wire::Header>>>,
    /// The interval of samples, and what time series of queues, pauses, windows and rates are written to.
    pub series: Option<(Span, &'a mut dyn Write)>,
    /// What the result of each flow is written to.
    pub flows: Option<&'a mut dyn Write>,
}

/// The result of an [`FctExperiment`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FctResult {
    /// Where the figures come from.
    pub provenance: Provenance,
    /// Events simulated.
    pub events: u64,
    /// Virtual time from the first flow's start to the last event; the run ends with it, or at its latest end.
    pub simulated_us: f64,
    /// Number of hosts.
    pub hosts: u32,
    /// Number of flows.
    pub flows: usize,
    /// Number of flows that finished.
    pub flows_ended: usize,
    /// Number of flows that failed, because a request had no retries left.
    pub flows_failed: usize,
    /// Number of flows that had neither finished nor failed when the run ended.
    pub flows_unfinished: usize,
    /// The ACK timeout of the queue pairs; `None` if there is none.
    pub ack_timeout_us: Option<f64>,
    /// The two timeouts that `irn` has instead, unless an ACK timeout was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub irn_timeouts_us: Option<[f64; 2]>,
    /// Slowdowns of the flows that finished: completion time divided by ideal completion time.
    pub slowdown: SummaryStats,
    /// Slowdowns by flow size, 5% of the flows per bin.
    pub bins: Vec<SizeBin>,
    /// The flows that finished, in the order in which they did.
    #[serde(skip)]
    pub finished: Vec<FlowResult>,
    /// Rate of message bytes received from the first flow's start to the last event, averaged over hosts.
    pub goodput_gbps_per_host: f64,
    /// Flow completion times.
    pub fct_us: SummaryStats,
    /// Counters of switches and links.
    pub network: NetworkCounters,
    /// Counters of endpoints.
    pub endpoints: EndpointCounters,
    /// Estimate of the memory held by the simulation at its end.
    pub memory_bytes: usize,
}

impl FctExperiment {
    /// Returns a published experiment: Poisson arrivals in a preset topology.
    ///
    /// # Errors
    /// When the load is out of range.
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
        let network = NetworkConfig::new(topology, seed);
        // A flow that has not finished a second after the last start never will.
        Ok(Self { network, flows, transport, until: Time::ZERO + duration + Span::from_ns(1e9) })
    }

    /// Returns the experiment of a scenario file.
    pub fn from_scenario(scenario: &Scenario) -> Self {
        let Scenario { network, flows, transport, until, .. } = scenario.clone();
        Self { network, flows, transport, until }
    }

    /// Runs the experiment. What observes it does not change its result.
    ///
    /// # Errors
    /// When the NIC profile is invalid, or an observer's output cannot be written.
    pub fn run(&self, observers: Observers<'_>) -> Result<FctResult, ExperimentError> {
        let topology = &self.network.topology;
        let rdma = RdmaConfig::for_network(&self.transport, &PathProperties::of_network(&self.network), &self.network);
        let endpoints = RdmaEndpoint::for_network(&self.transport, &self.network)?;
        let mut network = Network::new(&self.network, endpoints, self.flows.clone());
        if let Some(tap) = observers.tap {
            network.set_tap(rdma::header_tap(tap));
        }
        match observers.series {
            Some((interval, writer)) => {
                let series = SeriesWriter::new(writer, interval, topology);
                let run = series.and_then(|mut series| series.run(&mut network, self.until));
                run.map_err(ExperimentError::output("the time series"))?;
            }
            None => {
                network.run_flows(self.until);
            }
        }
        let ideal = IdealFct::new(topology, rdma.framing()).with_latency(rdma.latency());
        if let Some(writer) = observers.flows {
            let written = write_flow_records(writer, &flow_records(&network, &ideal));
            written.map_err(ExperimentError::output("the results of flows"))?;
        }
        let finished = flow_results(&network, &ideal);
        let endpoints = network.endpoint_counters();
        let mut slowdowns: Vec<f64> = finished.iter().map(|flow| flow.slowdown).collect();
        let mut fcts_us: Vec<f64> = finished.iter().map(|flow| flow.fct.ns() / 1000.0).collect();
        let first_start = self.flows.first().map_or(Time::ZERO, |flow| flow.start);
        let passed = network.last_event().max(first_start).since(first_start);
        let flows_failed = network.endpoints().iter().map(RdmaEndpoint::failed).sum::<u64>() as usize;
        let gbps = endpoints.delivered_bytes as f64 * 8.0 / passed.ns().max(1.0);
        Ok(FctResult {
            provenance: Provenance::Modelled,
            events: network.counters().events,
            simulated_us: passed.ns() / 1000.0,
            hosts: topology.hosts(),
            flows: self.flows.len(),
            flows_ended: finished.len(),
            flows_failed,
            flows_unfinished: self.flows.len().saturating_sub(finished.len() + flows_failed),
            ack_timeout_us: AckTimeout::of_code(rdma.ack_timer_code).map(|span| span.ns() / 1e3),
            irn_timeouts_us: match rdma.profile.retransmit_timeout {
                RetransmitTimeout::LowHigh { low, high, .. } => Some([low, high].map(|span| span.ns() / 1e3)),
                _ => None,
            },
            slowdown: SummaryStats::of(&mut slowdowns),
            bins: size_bins(&finished),
            finished,
            goodput_gbps_per_host: gbps / f64::from(topology.hosts()),
            fct_us: SummaryStats::of(&mut fcts_us),
            network: network.counters(),
            endpoints,
            memory_bytes: network.memory_bytes(),
        })
    }
}
