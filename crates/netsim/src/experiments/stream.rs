//! Many queue pairs of two hosts that send without end.

use serde::Serialize;
use sim::{Span, Time};

use super::{ExperimentError, Provenance, in_range};
use crate::endpoint::{Endpoint, EndpointCounters, Flow};
use crate::impairment::Impairments;
use crate::network::{Network, NetworkPlan};
use crate::rate::Rate;
use crate::rdma::{PathPlan, Rdma, RdmaPlan, profile};
use crate::scenario::{Congestion, Transport, TransportPlan};
use crate::switch::SwitchPlan;
use crate::topology::{HostId, Tiers, leaf_spine};

/// Queue pairs at most: as many as numbers of 16 bits tell apart.
const QPS_MAX: u32 = 65_536;
/// Messages under way of all queue pairs together, at least; each has one at least.
const MESSAGES_MIN: u32 = 512;
/// Messages under way of one queue pair, at most.
const MESSAGES_OF_QP_MAX: u32 = 64;

/// Two hosts on one switch; one writes to the other by many queue pairs in turn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamPlan {
    /// Both hosts' NIC.
    pub transport: TransportPlan,
    /// Of both hosts' lines.
    pub gbps: f64,
    /// The share of packets lost on the sender's line, each way.
    pub loss: f64,
    /// Queue pairs.
    pub qps: u32,
    /// Bytes of each message.
    pub message_bytes: u32,
    /// Of each line.
    pub delay: Span,
    /// Nothing is counted before this.
    pub warm: Span,
    /// What is counted lasts so long.
    pub during: Span,
    /// Of everything random.
    pub seed: u64,
}

/// What came through.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StreamResult {
    /// Of the figures.
    pub provenance: Provenance,
    /// Bytes of messages that arrived, each once, by time.
    pub goodput_gbps: f64,
    /// Of data packets that arrived, the share whose header went to software.
    pub slow_path_share: f64,
    /// The share of one processor core that the receiver's slow path took.
    pub slow_path_core_share: f64,
    /// Data packets sent again, of those sent.
    pub retransmitted_share: f64,
    /// Data packets that had arrived before, of those that arrived.
    pub spurious_share: f64,
    /// Times that a sender lost patience.
    pub timeouts: u64,
    /// Uses of a context that did not lie on chip, of all; 0 where none lies elsewhere.
    pub context_miss_share: f64,
    /// Things that happened in the simulation.
    pub events: u64,
}

impl StreamPlan {
    /// Goodput by queue pairs: messages of one packet, so that consecutive packets are never of one queue pair.
    pub fn by_qps(policy: Transport, qps: u32, gbps: f64, seed: u64) -> Self {
        Self {
            transport: TransportPlan { policy, mtu_bytes: 4096, congestion: Congestion::None },
            gbps,
            loss: 0.0,
            qps,
            message_bytes: 4096,
            delay: Span::from_ns(1000.0),
            warm: Span::from_ns(5e6),
            during: Span::from_ns(1e7),
            seed,
        }
    }

    /// Goodput by loss: one queue pair sends messages of many packets, and nothing but loss slows it down.
    pub fn by_loss(policy: Transport, loss: f64, gbps: f64, seed: u64) -> Self {
        let transport = TransportPlan { policy, mtu_bytes: 1024, congestion: Congestion::None };
        let during = Span::from_ns(4e7);
        Self { transport, loss, qps: 1, message_bytes: 1 << 20, during, ..Self::by_qps(policy, 1, gbps, seed) }
    }

    /// Runs it.
    ///
    /// # Errors
    /// When a number makes no sense, or requests fail.
    pub fn run(&self) -> Result<StreamResult, ExperimentError> {
        in_range("qps", self.qps.into(), 1.0, QPS_MAX.into())?;
        in_range("loss", self.loss, 0.0, 0.5)?;
        in_range("gbps", self.gbps, 1.0, 1600.0)?;
        let rate = Rate::from_gbps(self.gbps).expect("a rate in range");
        let mut network = self.network(rate)?;
        let (begin, end) = (Time::ZERO + self.warm, Time::ZERO + self.warm + self.during);
        network.run_until(begin);
        let before: Vec<EndpointCounters> = network.endpoints().iter().map(Endpoint::counters).collect();
        network.run_until(end);
        let failed = network.endpoints().iter().map(Rdma::failed).sum();
        if failed > 0 {
            return Err(ExperimentError::Failed { failed, flows: network.flows().len() });
        }
        let counted = |host: usize| network.endpoints()[host].counters().since(before[host]);
        let (sent, received) = (counted(0), counted(1));
        let share = |part: u64, of: u64| if of == 0 { 0.0 } else { part as f64 / of as f64 };
        let nics = network.endpoints().iter().map(|endpoint| *endpoint.nic().counters());
        let (hits, misses) =
            nics.fold((0, 0), |(hits, misses), nic| (hits + nic.cache_hits, misses + nic.cache_misses));
        Ok(StreamResult {
            provenance: Provenance::Modelled,
            goodput_gbps: received.delivered_bytes as f64 * 8.0 / self.during.ns(),
            slow_path_share: share(received.slow_path_headers, received.received_packets).min(1.0),
            slow_path_core_share: received.software_ps as f64 / self.during.ps() as f64,
            retransmitted_share: share(sent.retransmitted_packets, sent.sent_packets),
            spurious_share: share(received.spurious_packets, received.received_packets),
            timeouts: sent.timeouts,
            context_miss_share: share(misses, hits + misses),
            events: network.counters().events,
        })
    }

    fn network(&self, rate: Rate) -> Result<Network<Rdma>, ExperimentError> {
        let tiers = Tiers {
            pods: 1,
            leaves: 1,
            hosts_per_leaf: 2,
            spines: 1,
            cores_per_spine: 0,
            host_rate: rate,
            leaf_rate: rate,
            core_rate: rate,
            delay: self.delay,
        };
        let topology = leaf_spine(&tiers).expect("two hosts under a switch are a network");
        let loss = Impairments::losing(self.loss);
        let impairments = vec![(0, 0, loss.clone()), (0, 1, loss)];
        let plan = NetworkPlan { topology, switches: SwitchPlan::default(), impairments, seed: self.seed };
        let round_trip = self.delay * 4 + rate.span(u64::from(self.transport.mtu_bytes) * 2);
        let rdma =
            RdmaPlan { seed: self.seed, ..RdmaPlan::new(profile(&self.transport, &PathPlan { rate, round_trip })) };
        let of_qp = MESSAGES_MIN.div_ceil(self.qps).clamp(1, MESSAGES_OF_QP_MAX);
        // Each queue pair once, then each once more: the order in which they stay.
        let flow = |number| Flow {
            start: Time::ZERO,
            from: HostId(0),
            to: HostId(1),
            bytes: self.message_bytes.into(),
            connection: Some(number % self.qps),
            repeats: true,
        };
        Ok(Network::new(&plan, Rdma::fleet(rdma, 2)?, (0..self.qps * of_qp).map(flow).collect()))
    }
}
