//! The graph of a network: hosts, switches and the links between them.

use sim::Span;
use thiserror::Error;

use crate::rate::LinkRate;

/// A host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostId(pub u32);

/// A switch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SwitchId(pub u32);

/// What a line ends at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NetworkNode {
    /// A host: it has one line.
    Host(HostId),
    /// A switch.
    Switch(SwitchId),
}

/// A line: full duplex, the same both ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetworkLink {
    /// Its ends.
    pub ends: [NetworkNode; 2],
    /// How fast.
    pub rate: LinkRate,
    /// How long a bit is under way.
    pub delay: Span,
}

/// A network's plan; [`Topology::new`] has checked it.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    hosts: u32,
    switches: u32,
    links: Vec<NetworkLink>,
    names: Vec<String>,
}

/// A plan that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TopologyError {
    /// Nobody to talk to.
    #[error("{hosts} hosts; a network has at least 2")]
    TooFewHosts {
        /// So many.
        hosts: u32,
    },
    /// More than this simulator numbers.
    #[error("{what} {count}; at most {most}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// So many.
        count: u64,
        /// Allowed.
        most: u64,
    },
    /// A host has one port.
    #[error("host {host} has {links} links; give each host exactly one")]
    HostLinks {
        /// Which.
        host: String,
        /// How many it has.
        links: usize,
    },
    /// No path.
    #[error("host {host} cannot be reached from host {from}; link their switches")]
    Unreachable {
        /// The one.
        host: String,
        /// The other.
        from: String,
    },
    /// A line from a node to itself.
    #[error("a link joins {node} with itself; connect it to two different nodes")]
    Loop {
        /// Which.
        node: String,
    },
    /// A shape that cannot be built.
    #[error("{what} {value}; {remedy}")]
    Shape {
        /// Which measure.
        what: &'static str,
        /// What it is.
        value: String,
        /// What would do.
        remedy: &'static str,
    },
}

/// Hosts of a network at most.
pub const HOSTS_MAX: u32 = 65_536;
/// Switches of a network at most.
pub const SWITCHES_MAX: u32 = 16_384;

impl Topology {
    /// A plan, checked: every host has one link, and reaches every other one.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn new(hosts: u32, switches: u32, links: Vec<NetworkLink>) -> Result<Self, TopologyError> {
        let names = (0..hosts).map(|host| format!("h{host}")).chain((0..switches).map(|switch| format!("s{switch}")));
        Self::named(hosts, switches, links, names.collect())
    }

    /// The same with names: of the hosts, then of the switches.
    ///
    /// # Errors
    /// What is wrong with it.
    ///
    /// # Panics
    /// If there is not a name for each node, or a line ends at a node that there is not.
    pub fn named(
        hosts: u32,
        switches: u32,
        links: Vec<NetworkLink>,
        names: Vec<String>,
    ) -> Result<Self, TopologyError> {
        if hosts < 2 {
            return Err(TopologyError::TooFewHosts { hosts });
        }
        for (what, count, most) in [("hosts", hosts, HOSTS_MAX), ("switches", switches, SWITCHES_MAX)] {
            if count > most {
                return Err(TopologyError::TooMany { what, count: count.into(), most: most.into() });
            }
        }
        assert_eq!(names.len(), (hosts + switches) as usize, "a name for each node");
        let topology = Self { hosts, switches, links, names };
        topology.check_lines()?;
        topology.check_reach()?;
        Ok(topology)
    }

    /// How many hosts it has.
    pub fn hosts(&self) -> u32 {
        self.hosts
    }

    /// How many switches it has.
    pub fn switches(&self) -> u32 {
        self.switches
    }

    /// Its lines.
    pub fn links(&self) -> &[NetworkLink] {
        &self.links
    }

    /// A node's name.
    pub fn name(&self, node: NetworkNode) -> &str {
        &self.names[self.number(node)]
    }

    /// The line of a host.
    pub fn host_link(&self, host: HostId) -> &NetworkLink {
        let end = NetworkNode::Host(host);
        self.links.iter().find(|link| link.ends.contains(&end)).expect("every host has one link")
    }

    /// A number for each node: hosts first.
    pub(crate) fn number(&self, node: NetworkNode) -> usize {
        match node {
            NetworkNode::Host(host) => host.0 as usize,
            NetworkNode::Switch(switch) => (self.hosts + switch.0) as usize,
        }
    }

    fn check_lines(&self) -> Result<(), TopologyError> {
        let mut lines_of = vec![0_usize; self.names.len()];
        for link in &self.links {
            if link.ends[0] == link.ends[1] {
                return Err(TopologyError::Loop { node: self.name(link.ends[0]).to_owned() });
            }
            link.ends.iter().for_each(|end| lines_of[self.number(*end)] += 1);
        }
        match lines_of[..self.hosts as usize].iter().position(|links| *links != 1) {
            Some(host) => Err(TopologyError::HostLinks { host: self.names[host].clone(), links: lines_of[host] }),
            None => Ok(()),
        }
    }

    fn check_reach(&self) -> Result<(), TopologyError> {
        let mut neighbours = vec![Vec::new(); self.names.len()];
        for link in &self.links {
            let [a, b] = link.ends.map(|end| self.number(end));
            neighbours[a].push(b);
            neighbours[b].push(a);
        }
        let mut reached = vec![false; self.names.len()];
        let mut open = vec![0];
        reached[0] = true;
        while let Some(node) = open.pop() {
            for &next in &neighbours[node] {
                if !std::mem::replace(&mut reached[next], true) {
                    open.push(next);
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
    fn what_is_wrong_with_a_plan_is_said_in_a_line_with_its_remedy() {
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
    fn two_hosts_on_one_cable_are_a_network() {
        let topology = Topology::new(2, 0, vec![link(H(0), H(1))]).unwrap();
        assert_eq!((topology.hosts(), topology.switches(), topology.name(H(1))), (2, 0, "h1"));
    }
}
