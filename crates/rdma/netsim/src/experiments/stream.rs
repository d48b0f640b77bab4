//! Many queue pairs of two hosts that send without end.

use pcie::result::Provenance;
use rnic::nic::Counters;
use serde::Serialize;
use sim::{Random, Span, Time};

use super::error::{ExperimentError, in_range};
use crate::endpoint::{ETHERNET_BYTES, Endpoint, EndpointCounters, Flow, IP_UDP_BYTES};
use crate::impairment::Impairments;
use crate::network::{Network, NetworkConfig};
use crate::rate::LinkRate;
use crate::rdma::{PathProperties, REQUESTS_MAX, RdmaConfig, RdmaEndpoint, profile};
use crate::switch::SwitchConfig;
use crate::topology::{HostId, Tiers, leaf_spine};
use crate::transport::{CongestionAlgorithm, TransportConfig, TransportPolicy};

/// Queue pairs at most: a run with so many takes a minute.
const QPS_MAX: u32 = 1 << 20;
/// Messages under way of all queue pairs together, at least; each has one at least.
const MESSAGES_MIN: u32 = 512;
/// Messages under way of one queue pair, at most.
const MESSAGES_OF_QP_MAX: u32 = 64;
/// Of messages by chance, the share of the line that they are offered at.
const OFFERED_SHARE: f64 = 0.99;
/// Bytes of a WRITE's packet on the line besides its payload: Ethernet's, IP's, UDP's, and RoCEv2's with the selective
/// extension.
const LINE_HEADERS_BYTES: u64 = (ETHERNET_BYTES + IP_UDP_BYTES) as u64 + 12 + 16 + 8 + 4;

/// Whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpOrder {
    /// Each queue pair has a message under way at any time, and all take turns.
    RoundRobin,
    /// A message of a queue pair drawn by chance whenever the line has room for one: what comes next is nobody's guess.
    Random,
}

/// Bytes of a message, at most.
const MESSAGE_BYTES_MAX: f64 = (1 << 30) as f64;

/// Two hosts on one switch; one writes to the other by many queue pairs in turn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamExperiment {
    /// Both hosts' NIC.
    pub transport: TransportConfig,
    /// Of both hosts' lines.
    pub gbps: f64,
    /// The share of packets lost on the sender's line, each way.
    pub loss: f64,
    /// Queue pairs.
    pub qps: u32,
    /// Which of them sends next.
    pub turns: QpOrder,
    /// Bytes of each message.
    pub message_bytes: u32,
    /// Of each line.
    pub delay: Span,
    /// Nothing is counted before this.
    pub warmup: Span,
    /// What is counted lasts so long.
    pub duration: Span,
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
    /// What reading contexts took of the link from the host's memory, the busier NIC's; 0 where all are on chip.
    pub context_read_gbps: f64,
    /// What writing them back took of the link there, the busier NIC's.
    pub context_write_gbps: f64,
    /// Of packets that arrived, the share that waited for a context.
    pub parked_share: f64,
    /// Packets dropped because too many waited.
    pub parking_drops: u64,
    /// Things that happened in the simulation.
    pub events: u64,
}

impl StreamExperiment {
    /// Goodput by queue pairs: messages of one packet, so that consecutive packets are never of one queue pair.
    pub fn by_qps(policy: TransportPolicy, qps: u32, gbps: f64, seed: u64) -> Self {
        Self {
            transport: TransportConfig { policy, mtu_bytes: 4096, congestion: CongestionAlgorithm::None },
            gbps,
            loss: 0.0,
            qps,
            turns: QpOrder::RoundRobin,
            message_bytes: 4096,
            delay: Span::from_ns(1000.0),
            warmup: Span::from_ns(5e6),
            duration: Span::from_ns(1e7),
            seed,
        }
    }

    /// Goodput by loss: one queue pair sends messages of many packets, and nothing but loss slows it down.
    pub fn by_loss(policy: TransportPolicy, loss: f64, gbps: f64, seed: u64) -> Self {
        let transport = TransportConfig { policy, mtu_bytes: 1024, congestion: CongestionAlgorithm::None };
        let duration = Span::from_ns(4e7);
        Self { transport, loss, qps: 1, message_bytes: 1 << 20, duration, ..Self::by_qps(policy, 1, gbps, seed) }
    }

    /// Runs it.
    ///
    /// # Errors
    /// When a number makes no sense, or requests fail.
    pub fn run(&self) -> Result<StreamResult, ExperimentError> {
        in_range("loss", self.loss, 0.0, 0.5)?;
        in_range("gbps", self.gbps, 1.0, 1600.0)?;
        in_range("size", self.message_bytes.into(), 1.0, MESSAGE_BYTES_MAX)?;
        let rate = LinkRate::from_gbps(self.gbps).expect("a rate in range");
        // Should the NIC not keep up, queue pairs have room for all that is sent by chance, and twice that.
        let least = match self.turns {
            QpOrder::RoundRobin => 1,
            QpOrder::Random => self.messages(rate).div_ceil(REQUESTS_MAX.into()) * 2,
        };
        in_range("qps", self.qps.into(), least as f64, QPS_MAX.into())?;
        let mut network = self.network(rate)?;
        let (begin, end) = (Time::ZERO + self.warmup, Time::ZERO + self.warmup + self.duration);
        network.run_until(begin);
        let before = counted(&network);
        network.run_until(end);
        let failed = network.endpoints().iter().map(RdmaEndpoint::failed).sum();
        if failed > 0 {
            return Err(ExperimentError::Failed { failed, flows: network.flows().len() });
        }
        let after = counted(&network);
        let [sent, received] = [0, 1].map(|host| after[host].0.since(before[host].0));
        let since = |of: fn(&Counters) -> u64| [0, 1].map(|host| of(&after[host].1) - of(&before[host].1));
        let most = |of| since(of).into_iter().max().unwrap_or(0);
        let both = |of| since(of).iter().sum::<u64>();
        let share = |part: u64, of: u64| if of == 0 { 0.0 } else { part as f64 / of as f64 };
        let gbps = |bytes: u64| bytes as f64 * 8.0 / self.duration.ns();
        let misses = both(|nic| nic.cache_misses);
        let pool = network.endpoints()[0].nic().profile().pool;
        let (read_bytes, write_bytes) = pool.map_or((0, 0), |pool| (pool.read_bytes.into(), pool.write_bytes.into()));
        Ok(StreamResult {
            provenance: Provenance::Modelled,
            goodput_gbps: gbps(received.delivered_bytes),
            slow_path_share: share(received.slow_path_headers, received.received_packets).min(1.0),
            slow_path_core_share: received.software_ps as f64 / self.duration.ps() as f64,
            retransmitted_share: share(sent.retransmitted_packets, sent.sent_packets),
            spurious_share: share(received.spurious_packets, received.received_packets),
            timeouts: sent.timeouts,
            context_miss_share: share(misses, misses + both(|nic| nic.cache_hits)),
            context_read_gbps: gbps(most(|nic| nic.contexts_fetched) * read_bytes),
            context_write_gbps: gbps(most(|nic| nic.contexts_written_back) * write_bytes),
            parked_share: share(since(|nic| nic.parked_packets)[1], received.received_packets),
            parking_drops: both(|nic| nic.drop_parking),
            events: network.counters().events,
        })
    }

    fn network(&self, rate: LinkRate) -> Result<Network<RdmaEndpoint>, ExperimentError> {
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
        let loss = Impairments::uniform_loss(self.loss);
        let impairments = vec![(0, 0, loss.clone()), (0, 1, loss)];
        let config = NetworkConfig { topology, switches: SwitchConfig::default(), impairments, seed: self.seed };
        let round_trip = self.delay * 4 + rate.transmission_time(u64::from(self.transport.mtu_bytes) * 2);
        let rdma = RdmaConfig {
            seed: self.seed,
            ..RdmaConfig::new(profile(&self.transport, &PathProperties { rate, round_trip }))
        };
        Ok(Network::new(&config, RdmaEndpoint::for_hosts(rdma, 2)?, self.flows(rate)))
    }

    fn flows(&self, rate: LinkRate) -> Vec<Flow> {
        let flow = |start, connection| Flow {
            start,
            from: HostId(0),
            to: HostId(1),
            bytes: self.message_bytes.into(),
            connection: Some(connection),
            repeats: self.turns == QpOrder::RoundRobin,
        };
        if self.turns == QpOrder::RoundRobin {
            let of_qp = MESSAGES_MIN.div_ceil(self.qps).clamp(1, MESSAGES_OF_QP_MAX);
            // Each queue pair once, then each once more: the order in which they stay.
            return (0..self.qps * of_qp).map(|number| flow(Time::ZERO, number % self.qps)).collect();
        }
        let mut random = Random::new(self.seed, "turns");
        let every_ps = self.every_ps(rate);
        let start = |message: u64| Time::from_ps((message as f64 * every_ps) as u64);
        (0..self.messages(rate)).map(|message| flow(start(message), random.below(self.qps.into()) as u32)).collect()
    }

    /// How far messages by chance are apart: with all its headers each takes a little less of the line.
    fn every_ps(&self, rate: LinkRate) -> f64 {
        let packets = self.message_bytes.div_ceil(self.transport.mtu_bytes).max(1);
        let line_bytes = u64::from(self.message_bytes) + u64::from(packets) * LINE_HEADERS_BYTES;
        rate.transmission_time(line_bytes).ps() as f64 / OFFERED_SHARE
    }

    /// How many messages by chance there are.
    fn messages(&self, rate: LinkRate) -> u64 {
        ((self.warmup + self.duration).ps() as f64 / self.every_ps(rate)) as u64
    }
}

/// Both hosts' counters.
fn counted(network: &Network<RdmaEndpoint>) -> Vec<(EndpointCounters, Counters)> {
    network.endpoints().iter().map(|endpoint| (endpoint.counters(), *endpoint.nic().counters())).collect()
}
