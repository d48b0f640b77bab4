//! Latency of one message at a time, as half of its round trip.

use pcie::result::Provenance;
use rnic::nic::TransportPolicy;
use serde::Serialize;
use sim::{Span, Time};
use stats::nearest_rank;

use super::error::{ExperimentError, in_range};
use crate::endpoint::Flow;
use crate::network::{Network, NetworkConfig};
use crate::rate::LinkRate;
use crate::rdma::{PathProperties, RdmaConfig, RdmaEndpoint, Verb, profile};
use crate::topology::{HostId, NetworkLink, NetworkNode, Topology};
use crate::transport::{CongestionAlgorithm, TransportConfig};

/// Largest message: the size of the receive requests of [`Verb::Echo`].
const BYTES_MAX: f64 = (1 << 20) as f64;
/// Propagation delay of the cable between the two hosts, 5 m.
const CABLE_NS: f64 = 25.0;

/// Measures latency between two directly connected hosts: one sends a message, the other's program sends as many bytes
/// back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatencyExperiment {
    /// Kind of both hosts' NICs.
    pub policy: TransportPolicy,
    /// Size of a message.
    pub size_bytes: u32,
    /// Rate of the link.
    pub gbps: f64,
    /// Number of messages, sent one after the other.
    pub messages: u32,
    /// Seed of everything random.
    pub seed: u64,
}

/// The result of a [`LatencyExperiment`]: half of the round-trip times, as perftest reports them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LatencyResult {
    /// Where the figures come from.
    pub provenance: Provenance,
    /// The median.
    pub p50_us: f64,
    /// The 99th percentile.
    pub p99_us: f64,
    /// The 99.9th percentile.
    pub p999_us: f64,
    /// The maximum.
    pub max_us: f64,
    /// Number of messages.
    pub messages: u32,
}

impl LatencyExperiment {
    /// Returns the published experiment: one link of 100 Gb/s.
    pub fn new(policy: TransportPolicy, size_bytes: u32, seed: u64) -> Self {
        Self { policy, size_bytes, gbps: 100.0, messages: 1000, seed }
    }

    /// Runs the experiment.
    ///
    /// # Errors
    /// When a parameter is out of range or requests fail.
    pub fn run(&self) -> Result<LatencyResult, ExperimentError> {
        in_range("size", self.size_bytes.into(), 1.0, BYTES_MAX)?;
        in_range("gbps", self.gbps, 1.0, 1600.0)?;
        in_range("messages", self.messages.into(), 1.0, 1e6)?;
        let rate = LinkRate::from_gbps(self.gbps).expect("a rate in range");
        let link = NetworkLink {
            ends: [0, 1].map(|host| NetworkNode::Host(HostId(host))),
            rate,
            delay: Span::from_ns(CABLE_NS),
        };
        let topology = Topology::new(2, 0, vec![link]).expect("two directly connected hosts are a network");
        let config = NetworkConfig::new(topology, self.seed);
        let transport = TransportConfig {
            policy: self.policy,
            mtu_bytes: 4096,
            congestion: CongestionAlgorithm::None,
            ..TransportConfig::default()
        };
        let nic = profile(&transport, &PathProperties::of_cable(rate, Span::from_ns(CABLE_NS) * 2));
        let rdma = RdmaConfig { verb: Verb::Echo, seed: self.seed, ..RdmaConfig::new(nic) };
        let flow = Flow {
            start: Time::ZERO,
            from: HostId(0),
            to: HostId(1),
            bytes: self.size_bytes.into(),
            connection: Some(0),
            repeats: true,
        };
        let mut network = Network::new(&config, RdmaEndpoint::for_hosts(rdma, 2)?, vec![flow]);
        let mut halves_us = Vec::with_capacity(self.messages as usize);
        let mut started = Time::ZERO;
        while halves_us.len() < self.messages as usize {
            let before = network.counters().flows_ended;
            if !network.run_until_finished(before + 1) {
                return Err(ExperimentError::Failed { failed: 1, flows: halves_us.len() + 1 });
            }
            halves_us.push((network.now() - started).ns() / 2000.0);
            started = network.now();
        }
        halves_us.sort_unstable_by(f64::total_cmp);
        let at = |share| nearest_rank(&halves_us, share).expect("at least one message");
        Ok(LatencyResult {
            provenance: Provenance::Modelled,
            p50_us: at(0.5),
            p99_us: at(0.99),
            p999_us: at(0.999),
            max_us: at(1.0),
            messages: self.messages,
        })
    }
}
