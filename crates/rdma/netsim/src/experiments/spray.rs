//! Goodput of connections whose packets are sprayed over several paths, compared with one path in order.

use pcie::link::Generation;
use pcie::result::Provenance;
use rnic::nic::TransportPolicy;
use serde::Serialize;
use sim::{Span, Time};

use super::error::{ExperimentError, in_range};
use crate::endpoint::{Endpoint, EndpointCounters, Flow};
use crate::impairment::Impairments;
use crate::network::{Network, NetworkConfig};
use crate::rate::LinkRate;
use crate::rdma::{RdmaEndpoint, pcie_read_gbps};
use crate::switch::{LoadBalancing, SwitchConfig};
use crate::topology::{HostId, NetworkLink, NetworkNode, SwitchId, Topology};
use crate::transport::{CongestionAlgorithm, TransportConfig};

/// Largest number of paths, and of pairs of hosts.
const PATHS_MAX: u32 = 64;
/// Largest rate of all paths together in Gb/s: that of one link.
const GBPS_ALL_MAX: f64 = 10_000.0;
/// Network rates up to this one are below that of the modelled NICs' own links to the host.
const MODELLED_PCIE_GBPS: f64 = 100.0;
/// Outstanding messages of each connection.
const MESSAGES: u32 = 16;
/// Longest difference of propagation delays.
const SKEW_US_MAX: f64 = 1000.0;

/// How packets go from one leaf to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PathUse {
    /// One path with the rate of all paths together and the delay of the longest, so that packets stay in order.
    InOrder,
    /// Each packet takes a random path.
    Sprayed,
}

/// Measures goodput between hosts under two leaves, of which each host under the first writes to one under the second
/// by one queue pair. The leaves are joined by several paths through spines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SprayExperiment {
    /// Transport settings of all NICs.
    pub transport: TransportConfig,
    /// Rate of each host's link and of each path.
    pub gbps: f64,
    /// Number of pairs of hosts.
    pub pairs: u32,
    /// Number of paths.
    pub paths: u32,
    /// How packets use the paths.
    pub path_use: PathUse,
    /// How much longer the propagation delay of the longest path is than that of the shortest; those between are
    /// evenly spaced.
    pub skew: Span,
    /// Probability of loss on the senders' links, in each direction.
    pub loss: f64,
    /// Size of each message.
    pub message_bytes: u32,
    /// Propagation delay of each link, without the skew.
    pub delay: Span,
    /// Time before counting starts.
    pub warmup: Span,
    /// Time of counting.
    pub duration: Span,
    /// Seed of everything random.
    pub seed: u64,
}

/// The result of a [`SprayExperiment`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SprayResult {
    /// Where the figures come from.
    pub provenance: Provenance,
    /// Rate of message bytes received by each host under the second leaf, each byte counted once; the mean.
    pub goodput_gbps: f64,
    /// Retransmitted data packets, as a share of the packets sent.
    pub retransmitted_share: f64,
    /// Data packets that had arrived before, as a share of those received.
    pub spurious_share: f64,
    /// Share of received data packets whose header was handled by software.
    pub slow_path_share: f64,
    /// Share of one processor core taken by a receiver's slow path, the mean.
    pub slow_path_core_share: f64,
    /// Retransmission time-outs.
    pub timeouts: u64,
    /// Packets dropped by switches.
    pub dropped_packets: u64,
    /// Events simulated.
    pub events: u64,
}

impl SprayExperiment {
    /// Returns an experiment with four pairs of hosts, eight paths and no congestion control, so that only reordering
    /// and loss slow the connections down. At rates above 100 Gb/s the NICs have PCI Express of generation 5.
    pub fn new(policy: TransportPolicy, path_use: PathUse, gbps: f64, seed: u64) -> Self {
        let transport = TransportConfig {
            policy,
            mtu_bytes: 4096,
            congestion: CongestionAlgorithm::None,
            pcie_gbps: (gbps > MODELLED_PCIE_GBPS).then(|| pcie_read_gbps(Generation::new(5).expect("a generation"))),
            ..TransportConfig::default()
        };
        Self {
            transport,
            gbps,
            pairs: 4,
            paths: 8,
            path_use,
            skew: Span::ZERO,
            loss: 0.0,
            message_bytes: 1 << 20,
            delay: Span::from_ns(1000.0),
            warmup: Span::from_ns(1e6),
            duration: Span::from_ns(4e6),
            seed,
        }
    }

    /// Runs the experiment.
    ///
    /// # Errors
    /// When a parameter is out of range or requests fail.
    pub fn run(&self) -> Result<SprayResult, ExperimentError> {
        in_range("loss", self.loss, 0.0, 0.5)?;
        in_range("paths", self.paths.into(), 1.0, PATHS_MAX.into())?;
        in_range("gbps", self.gbps, 1.0, GBPS_ALL_MAX / f64::from(self.paths))?;
        in_range("pairs", self.pairs.into(), 1.0, PATHS_MAX.into())?;
        in_range("skew_us", self.skew.ns() / 1000.0, 0.0, SKEW_US_MAX)?;
        let mut network = self.network()?;
        let (begin, end) = (Time::ZERO + self.warmup, Time::ZERO + self.warmup + self.duration);
        network.run_until(begin);
        let before: Vec<EndpointCounters> = network.endpoints().iter().map(Endpoint::counters).collect();
        network.run_until(end);
        let failed = network.endpoints().iter().map(RdmaEndpoint::failed).sum();
        if failed > 0 {
            return Err(ExperimentError::Failed { failed, flows: network.flows().len() });
        }
        let counters: Vec<EndpointCounters> =
            network.endpoints().iter().zip(&before).map(|(host, before)| host.counters().since(*before)).collect();
        let (senders, receivers) = counters.split_at(self.pairs as usize);
        let sum = |hosts: &[EndpointCounters], of: fn(&EndpointCounters) -> u64| hosts.iter().map(of).sum::<u64>();
        let share = |part: u64, of: u64| if of == 0 { 0.0 } else { part as f64 / of as f64 };
        let received = sum(receivers, |host| host.received_packets);
        let duration_all = self.duration * u64::from(self.pairs);
        Ok(SprayResult {
            provenance: Provenance::Modelled,
            goodput_gbps: sum(receivers, |host| host.delivered_bytes) as f64 * 8.0 / duration_all.ns(),
            retransmitted_share: share(
                sum(senders, |host| host.retransmitted_packets),
                sum(senders, |host| host.sent_packets),
            ),
            spurious_share: share(sum(receivers, |host| host.spurious_packets), received),
            slow_path_share: share(sum(receivers, |host| host.slow_path_headers), received).min(1.0),
            slow_path_core_share: sum(receivers, |host| host.software_ps) as f64 / duration_all.ps() as f64,
            timeouts: sum(senders, |host| host.timeouts),
            dropped_packets: network.counters().dropped_packets,
            events: network.counters().events,
        })
    }

    fn network(&self) -> Result<Network<RdmaEndpoint>, ExperimentError> {
        let loss = Impairments::uniform_loss(self.loss);
        let senders = 0..self.pairs as usize;
        let config = NetworkConfig {
            topology: self.topology(),
            switches: SwitchConfig { load_balancing: LoadBalancing::PacketSpraying, ..SwitchConfig::default() },
            impairments: senders.flat_map(|link| [0, 1].map(|end| (link, end, loss.clone()))).collect(),
            seed: self.seed,
        };
        let endpoints = RdmaEndpoint::for_network(&self.transport, &config)?;
        let flow = |number| Flow {
            connection: Some(0),
            repeats: true,
            ..Flow::new(
                Time::ZERO,
                HostId(number % self.pairs),
                HostId(self.pairs + number % self.pairs),
                self.message_bytes.into(),
            )
        };
        Ok(Network::new(&config, endpoints, (0..self.pairs * MESSAGES).map(flow).collect()))
    }

    /// Returns the hosts under their leaves, the senders' links first, and then the paths.
    fn topology(&self) -> Topology {
        let rate = |gbps| LinkRate::from_gbps(gbps).expect("a rate in range");
        let switch = |number| NetworkNode::Switch(SwitchId(number));
        let link = |a, b, gbps, delay| NetworkLink { ends: [a, b], rate: rate(gbps), delay };
        let host = |number| link(NetworkNode::Host(HostId(number)), switch(number / self.pairs), self.gbps, self.delay);
        let (paths, path_gbps) = match self.path_use {
            PathUse::InOrder => (1, self.gbps * f64::from(self.paths)),
            PathUse::Sprayed => (self.paths, self.gbps),
        };
        let path = |number: u32| {
            let steps = (self.paths - paths + number, (self.paths - 1).max(1));
            let skew = Span::from_ps(self.skew.ps() * u64::from(steps.0) / u64::from(steps.1));
            let spine = switch(2 + number);
            [link(switch(0), spine, path_gbps, self.delay + skew), link(spine, switch(1), path_gbps, self.delay)]
        };
        let links = (0..self.pairs * 2).map(host).chain((0..paths).flat_map(path));
        Topology::new(self.pairs * 2, 2 + paths, links.collect()).expect("two leaves under spines are a network")
    }
}
