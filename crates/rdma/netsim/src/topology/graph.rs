//! The graph of a network: hosts, switches and the links between them.

use sim::Span;
use thiserror::Error;

use crate::rate::LinkRate;

/// The number of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostId(pub u32);

/// The number of a switch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SwitchId(pub u32);

/// A node of the network: what a link ends at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NetworkNode {
    /// A host, which has one link.
    Host(HostId),
    /// A switch.
    Switch(SwitchId),
}

/// A full-duplex link with the same rate and delay in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetworkLink {
    /// The nodes at its two ends.
    pub ends: [NetworkNode; 2],
    /// The data rate.
    pub rate: LinkRate,
    /// The propagation delay.
    pub delay: Span,
}

/// The graph of a network, checked by [`Topology::new`].
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    hosts: u32,
    switches: u32,
    links: Vec<NetworkLink>,
    names: Vec<String>,
}

/// Why a graph is no network.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TopologyError {
    /// A network needs two hosts.
    #[error("{hosts} hosts; a network has at least 2")]
    TooFewHosts {
        /// Number of hosts.
        hosts: u32,
    },
    /// More nodes than the simulator can number.
    #[error("{what} {count}; at most {most}")]
    TooMany {
        /// The kind of node.
        what: &'static str,
        /// Their number.
        count: u64,
        /// The largest number allowed.
        most: u64,
    },
    /// A host has no link or several.
    #[error("host {host} has {links} links; give each host exactly one")]
    HostLinks {
        /// The host's name.
        host: String,
        /// Its number of links.
        links: usize,
    },
    /// There is no path between two hosts.
    #[error("host {host} cannot be reached from host {from}; link their switches")]
    Unreachable {
        /// The host that cannot be reached.
        host: String,
        /// The host from which it cannot be reached.
        from: String,
    },
    /// A link joins a node with itself.
    #[error("a link joins {node} with itself; connect it to two different nodes")]
    Loop {
        /// The node's name.
        node: String,
    },
    /// A parameter of a named shape is invalid.
    #[error("{what} {value}; {remedy}")]
    Shape {
        /// The parameter's name.
        what: &'static str,
        /// Its value.
        value: String,
        /// A value that is valid.
        remedy: &'static str,
    },
}

impl TopologyError {
    pub(crate) fn limit(what: &'static str, count: u64, most: u32) -> Result<(), Self> {
        if count > most.into() { Err(Self::TooMany { what, count, most: most.into() }) } else { Ok(()) }
    }
}

/// Largest number of hosts.
pub const HOSTS_MAX: u32 = 65_536;
/// Largest number of switches.
pub const SWITCHES_MAX: u32 = 16_384;

impl Topology {
    /// Creates a topology after checking that every host has one link and reaches every other host.
    ///
    /// # Errors
    /// When the graph is no such network.
    pub fn new(hosts: u32, switches: u32, links: Vec<NetworkLink>) -> Result<Self, TopologyError> {
        let names = (0..hosts).map(|host| format!("h{host}")).chain((0..switches).map(|switch| format!("s{switch}")));
        Self::named(hosts, switches, links, names.collect())
    }

    /// Creates a topology like [`Topology::new`], with the names of the hosts followed by those of the switches.
    ///
    /// # Errors
    /// When the graph is no such network.
    ///
    /// # Panics
    /// If there is not one name per node, or a link ends at a node that does not exist.
    pub fn named(
        hosts: u32,
        switches: u32,
        links: Vec<NetworkLink>,
        names: Vec<String>,
    ) -> Result<Self, TopologyError> {
        if hosts < 2 {
            return Err(TopologyError::TooFewHosts { hosts });
        }
        TopologyError::limit("hosts", hosts.into(), HOSTS_MAX)?;
        TopologyError::limit("switches", switches.into(), SWITCHES_MAX)?;
        assert_eq!(names.len(), (hosts + switches) as usize, "a name for each node");
        let topology = Self { hosts, switches, links, names };
        topology.check_links()?;
        topology.check_reachability()?;
        Ok(topology)
    }

    /// Returns the number of hosts.
    pub fn hosts(&self) -> u32 {
        self.hosts
    }

    /// Returns the number of switches.
    pub fn switches(&self) -> u32 {
        self.switches
    }

    /// Returns the links.
    pub fn links(&self) -> &[NetworkLink] {
        &self.links
    }

    /// Returns a node's name.
    pub fn name(&self, node: NetworkNode) -> &str {
        &self.names[self.index(node)]
    }

    /// Returns the link of a host.
    pub fn host_link(&self, host: HostId) -> &NetworkLink {
        let end = NetworkNode::Host(host);
        self.links.iter().find(|link| link.ends.contains(&end)).expect("every host has one link")
    }

    /// Returns the rate of the fastest host's link.
    pub fn fastest_host(&self) -> LinkRate {
        let has_host = |link: &&NetworkLink| link.ends.iter().any(|end| matches!(end, NetworkNode::Host(_)));
        let rates = self.links.iter().filter(has_host).map(|link| link.rate);
        rates.max().expect("every host has one link")
    }

    /// Returns the index of a node: hosts come first.
    fn index(&self, node: NetworkNode) -> usize {
        match node {
            NetworkNode::Host(host) => host.0 as usize,
            NetworkNode::Switch(switch) => (self.hosts + switch.0) as usize,
        }
    }

    fn check_links(&self) -> Result<(), TopologyError> {
        let mut links_of = vec![0_usize; self.names.len()];
        for link in &self.links {
            if link.ends[0] == link.ends[1] {
                return Err(TopologyError::Loop { node: self.name(link.ends[0]).to_owned() });
            }
            link.ends.iter().for_each(|end| links_of[self.index(*end)] += 1);
        }
        match links_of[..self.hosts as usize].iter().position(|links| *links != 1) {
            Some(host) => Err(TopologyError::HostLinks { host: self.names[host].clone(), links: links_of[host] }),
            None => Ok(()),
        }
    }

    fn check_reachability(&self) -> Result<(), TopologyError> {
        let mut neighbors = vec![Vec::new(); self.names.len()];
        for link in &self.links {
            let [a, b] = link.ends.map(|end| self.index(end));
            neighbors[a].push(b);
            neighbors[b].push(a);
        }
        let mut reached = vec![false; self.names.len()];
        let mut to_visit = vec![0];
        reached[0] = true;
        while let Some(node) = to_visit.pop() {
            for &next in &neighbors[node] {
                if !std::mem::replace(&mut reached[next], true) {
                    to_visit.push(next);
                }
            }
        }
        match reached[..self.hosts as usize].iter().position(|reached| !reached) {
            Some(host) => {
                Err(TopologyError::Unreachable { host: self.names[host].clone(), from: self.names[0].clone() })
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(a: NetworkNode, b: NetworkNode) -> NetworkLink {
        NetworkLink { ends: [a, b], rate: LinkRate::from_gbps(100.0).unwrap(), delay: Span::from_ns(1000.0) }
    }

    const H: fn(u32) -> NetworkNode = |host| NetworkNode::Host(HostId(host));
    const S: fn(u32) -> NetworkNode = |switch| NetworkNode::Switch(SwitchId(switch));

    #[test]
    fn an_invalid_graph_is_refused_with_a_remedy() {
        for (hosts, switches, links, expected) in [
            (1, 0, vec![], "1 hosts; a network has at least 2"),
            (
                3,
                2,
                vec![link(H(0), S(0)), link(H(1), S(0)), link(H(2), S(1))],
                "host h2 cannot be reached from host h0; link their switches",
            ),
            (2, 1, vec![link(H(0), S(0))], "host h1 has 0 links; give each host exactly one"),
            (
                2,
                1,
                vec![link(H(0), S(0)), link(H(1), S(0)), link(H(1), S(0))],
                "host h1 has 2 links; give each host exactly one",
            ),
            (2, 1, vec![link(S(0), S(0))], "a link joins s0 with itself; connect it to two different nodes"),
            (70_000, 1, vec![], "hosts 70000; at most 65536"),
        ] {
            assert_eq!(Topology::new(hosts, switches, links).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn two_directly_connected_hosts_are_a_network() {
        let topology = Topology::new(2, 0, vec![link(H(0), H(1))]).unwrap();
        assert_eq!((topology.hosts(), topology.switches(), topology.name(H(1))), (2, 0, "h1"));
    }
}
