//! Workloads: which hosts send how much to which others, and when.

mod distribution;

use sim::{Random, Span, Time};
use thiserror::Error;

use crate::endpoint::Flow;
use crate::topology::{HostId, NetworkNode, Topology};

pub use distribution::SizeDistribution;

/// Largest number of flows of a workload.
pub const FLOWS_MAX: usize = 10_000_000;
/// Largest size of a flow: one message, of no more packets than packet sequence numbers can distinguish.
pub const FLOW_BYTES_MAX: u64 = 1 << 29;
const PS_PER_S: f64 = 1e12;

/// A pattern of flows.
#[derive(Clone, Debug, PartialEq)]
pub enum Workload {
    /// Every host sends to one other host and receives from one other host, all at once.
    Permutation {
        /// Bytes of each flow.
        bytes: u64,
    },
    /// Many hosts send to one host at once.
    Incast {
        /// Number of senders.
        senders: u32,
        /// Bytes of each flow.
        bytes: u64,
    },
    /// Every host sends to every other host at once.
    AllToAll {
        /// Bytes of each flow.
        bytes: u64,
    },
    /// Flows start at every host as a Poisson process, each to a random other host.
    Poisson {
        /// Distribution of the flows' sizes.
        sizes: SizeDistribution,
        /// Mean rate of a host's message bytes as a share of its link's rate: above 0, at most 1.
        load: f64,
        /// Time during which flows start.
        duration: Span,
    },
    /// The flows of a file.
    Trace(Vec<Flow>),
}

/// A workload that a network cannot carry.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum WorkloadError {
    /// The load is out of range.
    #[error("a load of {load}; take more than 0 and at most 1 of a host's rate")]
    Load {
        /// The load given.
        load: f64,
    },
    /// The number of senders is out of range.
    #[error("{senders} senders among {hosts} hosts; take 1 to {}", hosts - 1)]
    Senders {
        /// The number of senders given.
        senders: u32,
        /// Number of hosts.
        hosts: u32,
    },
    /// A flow's host does not exist, or is both sender and receiver.
    #[error("flow {index} goes from host {from} to host {to} of {hosts}; name two hosts from 0 to {}", hosts - 1)]
    Hosts {
        /// Index of the flow in the list.
        index: usize,
        /// Its sender.
        from: u32,
        /// Its receiver.
        to: u32,
        /// Number of hosts.
        hosts: u32,
    },
    /// A flow is larger than a message can be.
    #[error("a flow of {bytes} bytes; at most {FLOW_BYTES_MAX}: divide it into several flows")]
    TooLarge {
        /// Size of the flow.
        bytes: u64,
    },
    /// There are too many flows to hold in memory.
    #[error("about {flows:.0} flows; at most {FLOWS_MAX}: take a shorter time, fewer hosts or larger flows")]
    TooMany {
        /// Expected number of flows.
        flows: f64,
    },
}

fn flow(start: Time, from: u32, to: u32, bytes: u64) -> Flow {
    Flow::new(start, HostId(from), HostId(to), bytes)
}

impl Workload {
    /// Returns the name of the pattern; for Poisson arrivals, that of the size distribution.
    pub fn name(&self) -> &str {
        match self {
            Self::Permutation { .. } => "permutation",
            Self::Incast { .. } => "incast",
            Self::AllToAll { .. } => "all-to-all",
            Self::Poisson { sizes, .. } => &sizes.name,
            Self::Trace(_) => "trace",
        }
    }

    /// Returns the load of Poisson arrivals, and `None` for other patterns.
    pub fn load(&self) -> Option<f64> {
        match self {
            Self::Poisson { load, .. } => Some(*load),
            _ => None,
        }
    }

    /// Returns the flows of a run with this seed, ordered by start time.
    ///
    /// # Errors
    /// When the network cannot carry the workload.
    pub fn flows(&self, topology: &Topology, seed: u64) -> Result<Vec<Flow>, WorkloadError> {
        let hosts = topology.hosts();
        let mut random = Random::new(seed, "workload");
        let flows = match self {
            Self::Permutation { bytes } => permutation(hosts, *bytes, &mut random),
            Self::Incast { senders, bytes } => incast(hosts, *senders, *bytes, &mut random)?,
            Self::AllToAll { bytes } => all_to_all(hosts, *bytes)?,
            Self::Poisson { sizes, load, duration } => poisson(topology, sizes, *load, *duration, seed)?,
            Self::Trace(flows) => from_trace(hosts, flows)?,
        };
        check_count(flows.len() as f64)?;
        match flows.iter().map(|flow| flow.bytes).find(|bytes| *bytes > FLOW_BYTES_MAX) {
            Some(bytes) => Err(WorkloadError::TooLarge { bytes }),
            None => Ok(flows),
        }
    }
}

fn check_count(flows: f64) -> Result<(), WorkloadError> {
    if flows > FLOWS_MAX as f64 { Err(WorkloadError::TooMany { flows }) } else { Ok(()) }
}

/// One random cycle through all hosts.
fn permutation(hosts: u32, bytes: u64, random: &mut Random) -> Vec<Flow> {
    let mut order: Vec<u32> = (0..hosts).collect();
    for index in (1..order.len()).rev() {
        order.swap(index, random.below(index as u64 + 1) as usize);
    }
    let next = order.iter().cycle().skip(1);
    order.iter().zip(next).map(|(from, to)| flow(Time::ZERO, *from, *to, bytes)).collect()
}

fn incast(hosts: u32, senders: u32, bytes: u64, random: &mut Random) -> Result<Vec<Flow>, WorkloadError> {
    if senders == 0 || senders >= hosts {
        return Err(WorkloadError::Senders { senders, hosts });
    }
    let to = random.below(hosts.into()) as u32;
    let step = (hosts - 1) / senders;
    // The senders are spread evenly over the network, so that the receiver's link is the bottleneck.
    Ok((0..senders).map(|index| flow(Time::ZERO, (to + 1 + index * step) % hosts, to, bytes)).collect())
}

fn all_to_all(hosts: u32, bytes: u64) -> Result<Vec<Flow>, WorkloadError> {
    check_count(f64::from(hosts) * f64::from(hosts - 1))?;
    // In each round every host receives from a different one.
    let round = |distance: u32| (0..hosts).map(move |from| flow(Time::ZERO, from, (from + distance) % hosts, bytes));
    Ok((1..hosts).flat_map(round).collect())
}

fn poisson(
    topology: &Topology,
    sizes: &SizeDistribution,
    load: f64,
    duration: Span,
    seed: u64,
) -> Result<Vec<Flow>, WorkloadError> {
    if !(load > 0.0 && load <= 1.0) {
        return Err(WorkloadError::Load { load });
    }
    let hosts = topology.hosts();
    let mut rates = vec![0.0; hosts as usize];
    for link in topology.links() {
        for end in link.ends {
            if let NetworkNode::Host(host) = end {
                rates[host.0 as usize] = link.rate.gbps() * 1e9 / 8.0;
            }
        }
    }
    let per_s = |rate: f64| load * rate / sizes.mean_bytes();
    check_count(rates.iter().map(|rate| per_s(*rate)).sum::<f64>() * duration.ps() as f64 / PS_PER_S)?;
    let mut flows = Vec::new();
    for (from, rate) in rates.iter().enumerate() {
        let mut random = Random::new(seed, &format!("flows of host {from}"));
        let (mut at, mean_ps) = (0.0, PS_PER_S / per_s(*rate));
        loop {
            at += random.exponential(mean_ps);
            if at >= duration.ps() as f64 {
                break;
            }
            let to = (from as u64 + 1 + random.below(u64::from(hosts) - 1)) % u64::from(hosts);
            flows.push(flow(Time::from_ps(at as u64), from as u32, to as u32, sizes.size_at(random.unit())));
        }
    }
    flows.sort_by_key(|flow| flow.start);
    Ok(flows)
}

fn from_trace(hosts: u32, flows: &[Flow]) -> Result<Vec<Flow>, WorkloadError> {
    let is_wrong = |flow: &Flow| flow.from == flow.to || flow.from.0.max(flow.to.0) >= hosts;
    if let Some(index) = flows.iter().position(is_wrong) {
        let Flow { from, to, .. } = flows[index];
        return Err(WorkloadError::Hosts { index, from: from.0, to: to.0, hosts });
    }
    let mut flows = flows.to_vec();
    flows.sort_by_key(|flow| flow.start);
    Ok(flows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::TopologyPreset;

    #[test]
    fn in_a_permutation_every_host_sends_to_one_and_receives_from_one() {
        let flows = Workload::Permutation { bytes: 9 }.flows(&TopologyPreset::LeafSpine256.topology(), 3).unwrap();
        let mut to: Vec<u32> = flows.iter().map(|flow| flow.to.0).collect();
        to.sort_unstable();
        assert_eq!(to, (0..256).collect::<Vec<_>>());
        assert!(flows.iter().all(|flow| flow.from != flow.to));
    }

    #[test]
    fn poisson_arrivals_have_the_load_asked_for() {
        let topology = TopologyPreset::LeafSpine256.topology();
        let sizes = SizeDistribution::find("web-search").unwrap();
        let duration = Span::from_ps(100_000_000_000);
        let workload = |load| Workload::Poisson { sizes: sizes.clone(), load, duration };
        let flows = workload(0.5).flows(&topology, 1).unwrap();
        let gbps = flows.iter().map(|flow| flow.bytes).sum::<u64>() as f64 * 8.0 / 1e9 / 0.1 / 256.0;
        assert!((gbps / 50.0 - 1.0).abs() < 0.05, "{gbps}");
        assert!(flows.is_sorted_by_key(|flow| flow.start));
        assert_eq!(flows, workload(0.5).flows(&topology, 1).unwrap());
        assert_ne!(flows, workload(0.5).flows(&topology, 2).unwrap());
        for (load, text) in [(0.0, "a load of 0;"), (1.01, "a load of 1.01; take more than 0 and at most 1")] {
            assert!(workload(load).flows(&topology, 1).unwrap_err().to_string().starts_with(text));
        }
    }

    #[test]
    fn workloads_that_a_network_cannot_carry_are_refused() {
        let topology = TopologyPreset::LeafSpine256.topology();
        let error = |workload: Workload| workload.flows(&topology, 1).unwrap_err().to_string();
        assert_eq!(error(Workload::Incast { senders: 256, bytes: 1 }), "256 senders among 256 hosts; take 1 to 255");
        let large = vec![flow(Time::ZERO, 1, 2, 5_000_000_000)];
        assert_eq!(
            error(Workload::Trace(large)),
            "a flow of 5000000000 bytes; at most 536870912: divide it into several flows"
        );
        let flows = vec![flow(Time::ZERO, 1, 1, 9)];
        assert_eq!(
            error(Workload::Trace(flows)),
            "flow 0 goes from host 1 to host 1 of 256; name two hosts from 0 to 255"
        );
        assert_eq!(Workload::AllToAll { bytes: 1 }.flows(&topology, 1).unwrap().len(), 256 * 255);
        assert_eq!(Workload::Incast { senders: 255, bytes: 1 }.flows(&topology, 1).unwrap().len(), 255);
    }
}
