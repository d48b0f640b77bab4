//! Goodput of many queue pairs between two hosts that send continuously.

use pcie::result::Provenance;
use rnic::nic::NicCounters;
use rnic::nic::TransportPolicy;
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
use crate::transport::{AckTimeout, CongestionAlgorithm, TransportConfig};

/// Largest number of queue pairs: a run with this many takes a minute.
const QPS_MAX: u32 = 1 << 20;
/// Offered load in random order, as a share of the link's rate.
const OFFERED_SHARE: f64 = 0.99;
/// Bytes of a WRITE packet on the wire besides its payload: the headers of Ethernet, IP and UDP, and those of RoCEv2
/// with the selective extension.
const HEADER_BYTES: u64 = (ETHERNET_BYTES + IP_UDP_BYTES) as u64 + 12 + 16 + 8 + 4;

/// The order in which queue pairs send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpOrder {
    /// Each queue pair always has a message outstanding, and the NIC serves them in turn.
    RoundRobin,
    /// Whenever the link has room for a message, a randomly drawn queue pair sends one, so that a NIC cannot predict
    /// which context comes next.
    Random,
}

/// Number of outstanding messages in round-robin order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageDepth {
    /// Fewest of all queue pairs together; each queue pair has at least one.
    pub all_min: u32,
    /// Most of one queue pair.
    pub per_qp_max: u32,
}

/// Largest size of a message.
const MESSAGE_BYTES_MAX: f64 = (1 << 30) as f64;

/// Measures goodput between two hosts on one switch, one of which writes to the other by many queue pairs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamExperiment {
    /// Transport settings of both hosts' NICs.
    pub transport: TransportConfig,
    /// Rate of both hosts' links.
    pub gbps: f64,
    /// Probability of loss on the sender's link, in each direction.
    pub loss: f64,
    /// Number of queue pairs.
    pub qps: u32,
    /// Order in which the queue pairs send.
    pub qp_order: QpOrder,
    /// Outstanding messages in round-robin order.
    pub depth: MessageDepth,
    /// Size of each message.
    pub message_bytes: u32,
    /// Propagation delay of each link.
    pub delay: Span,
    /// Time before counting starts.
    pub warmup: Span,
    /// Time of counting.
    pub duration: Span,
    /// Seed of everything random.
    pub seed: u64,
}

/// The result of a [`StreamExperiment`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StreamResult {
    /// Where the figures come from.
    pub provenance: Provenance,
    /// Rate of message bytes received, each byte counted once.
    pub goodput_gbps: f64,
    /// Share of received data packets whose header was handled by software.
    pub slow_path_share: f64,
    /// Share of one processor core taken by the receiver's slow path.
    pub slow_path_core_share: f64,
    /// Retransmitted data packets, as a share of the packets sent.
    pub retransmitted_share: f64,
    /// Data packets that had arrived before, as a share of those received.
    pub spurious_share: f64,
    /// Retransmission time-outs.
    pub timeouts: u64,
    /// Context lookups that missed on chip, as a share of all; 0 where all contexts are on chip.
    pub context_miss_share: f64,
    /// PCIe bandwidth of context reads from host memory at the busier NIC; 0 where all contexts are on chip.
    pub context_read_gbps: f64,
    /// PCIe bandwidth of context write-backs to host memory at the busier NIC.
    pub context_write_gbps: f64,
    /// Share of received packets that waited for a context.
    pub parked_share: f64,
    /// Packets dropped because too many were waiting for a context.
    pub parking_drops: u64,
    /// Events simulated.
    pub events: u64,
}

impl StreamExperiment {
    /// Returns an experiment on goodput by queue pairs: messages are of one packet, so that consecutive packets belong
    /// to different queue pairs.
    pub fn by_qps(policy: TransportPolicy, qps: u32, gbps: f64, seed: u64) -> Self {
        Self {
            transport: TransportConfig {
                policy,
                mtu_bytes: 4096,
                congestion: CongestionAlgorithm::None,
                ..TransportConfig::default()
            },
            gbps,
            loss: 0.0,
            qps,
            qp_order: QpOrder::RoundRobin,
            depth: MessageDepth { all_min: 512, per_qp_max: 64 },
            message_bytes: 4096,
            delay: Span::from_ns(1000.0),
            warmup: Span::from_ns(5e6),
            duration: Span::from_ns(1e7),
            seed,
        }
    }

    /// Returns an experiment on goodput by loss: one queue pair sends messages of many packets, and only loss slows it
    /// down.
    pub fn by_loss(policy: TransportPolicy, loss: f64, gbps: f64, seed: u64) -> Self {
        let by_qps = Self::by_qps(policy, 1, gbps, seed);
        let transport = TransportConfig { mtu_bytes: 1024, ..by_qps.transport };
        Self { transport, loss, message_bytes: 1 << 20, duration: Span::from_ns(4e7), ..by_qps }
    }

    /// Runs the experiment.
    ///
    /// # Errors
    /// When a parameter is out of range or requests fail.
    pub fn run(&self) -> Result<StreamResult, ExperimentError> {
        in_range("loss", self.loss, 0.0, 0.5)?;
        in_range("gbps", self.gbps, 1.0, 1600.0)?;
        in_range("size", self.message_bytes.into(), 1.0, MESSAGE_BYTES_MAX)?;
        let rate = LinkRate::from_gbps(self.gbps).expect("a rate in range");
        // In random order all messages may wait in the send queues if the NIC does not keep up, so these have room for
        // twice as many.
        let least = match self.qp_order {
            QpOrder::RoundRobin => 1,
            QpOrder::Random => self.messages(rate).div_ceil(REQUESTS_MAX.into()) * 2,
        };
        in_range("qps", self.qps.into(), least as f64, QPS_MAX.into())?;
        let mut network = self.network(rate)?;
        let (begin, end) = (Time::ZERO + self.warmup, Time::ZERO + self.warmup + self.duration);
        network.run_until(begin);
        let before = counters(&network);
        network.run_until(end);
        let failed = network.endpoints().iter().map(RdmaEndpoint::failed).sum();
        if failed > 0 {
            return Err(ExperimentError::Failed { failed, flows: network.flows().len() });
        }
        let after = counters(&network);
        let [sent, received] = [0, 1].map(|host| after[host].0.since(before[host].0));
        let since = |of: fn(&NicCounters) -> u64| [0, 1].map(|host| of(&after[host].1) - of(&before[host].1));
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
        let path = PathProperties::of_cable(rate, round_trip);
        let rdma = match self.transport.ack_timeout {
            // One sender at the rate of the links builds no queue.
            AckTimeout::Auto => RdmaConfig { seed: self.seed, ..RdmaConfig::new(profile(&self.transport, &path)) },
            _ => RdmaConfig::for_network(&self.transport, &path, &config),
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
            repeats: self.qp_order == QpOrder::RoundRobin,
        };
        if self.qp_order == QpOrder::RoundRobin {
            let MessageDepth { all_min, per_qp_max } = self.depth;
            let per_qp = all_min.div_ceil(self.qps).clamp(1, per_qp_max.min(REQUESTS_MAX));
            // Each queue pair once, then each once more; they keep this order.
            return (0..self.qps * per_qp).map(|number| flow(Time::ZERO, number % self.qps)).collect();
        }
        let mut random = Random::new(self.seed, "turns"); // the text selects the random stream
        let interval_ps = self.interval_ps(rate);
        let start = |message: u64| Time::from_ps((message as f64 * interval_ps) as u64);
        (0..self.messages(rate)).map(|message| flow(start(message), random.below(self.qps.into()) as u32)).collect()
    }

    /// Returns the time between messages in random order: each takes slightly less than this on the link.
    fn interval_ps(&self, rate: LinkRate) -> f64 {
        let packets = self.message_bytes.div_ceil(self.transport.mtu_bytes).max(1);
        let wire_bytes = u64::from(self.message_bytes) + u64::from(packets) * HEADER_BYTES;
        rate.transmission_time(wire_bytes).ps() as f64 / OFFERED_SHARE
    }

    /// Returns the number of messages in random order.
    fn messages(&self, rate: LinkRate) -> u64 {
        ((self.warmup + self.duration).ps() as f64 / self.interval_ps(rate)) as u64
    }
}

/// Returns the counters of both hosts.
fn counters(network: &Network<RdmaEndpoint>) -> Vec<(EndpointCounters, NicCounters)> {
    network.endpoints().iter().map(|endpoint| (endpoint.counters(), *endpoint.nic().counters())).collect()
}
