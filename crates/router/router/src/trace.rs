//! Packets that are followed on their way: those that a [`Filter`] matches take the slow path, which tells each step.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use packet::flow::Flow;
use packet::{Protocol, ipv4, ipv6};

use crate::{AdjacencyId, DropReason, Hop, NodeId, PortId, Time};

/// Which packets are followed. What is `None` matches all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Where they come from.
    pub source: Option<IpNet>,
    /// Where they go.
    pub destination: Option<IpNet>,
    /// What they carry.
    pub protocol: Option<Protocol>,
    /// From or to which port of TCP, UDP and their like.
    pub transport_port: Option<u16>,
    /// After so many packets, no more are followed.
    pub packets_max: u32,
}

impl Filter {
    /// Every packet, up to so many.
    pub fn all(packets_max: u32) -> Filter {
        Filter { source: None, destination: None, protocol: None, transport_port: None, packets_max }
    }

    /// Whether packets of this flow are followed.
    pub fn matches(&self, flow: &Flow) -> bool {
        let contains = |network: &Option<IpNet>, address: &IpAddr| network.is_none_or(|net| net.contains(address));
        contains(&self.source, &flow.source)
            && contains(&self.destination, &flow.destination)
            && self.protocol.is_none_or(|protocol| protocol == flow.protocol)
            && self.transport_port.is_none_or(|port| port == flow.source_port || port == flow.destination_port)
    }
}

/// Where a followed packet was, and what became of it there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TracedStep {
    /// When.
    pub time: Time,
    /// The packet: all that is told of it.
    pub flow: Flow,
    /// What.
    pub step: Step,
}

/// One step of a packet's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Came in at a port.
    Received(PortId),
    /// Came from the node's own kernel.
    FromKernel,
    /// Came from another node.
    FromNode,
    /// Was made here: an answer, or an error.
    Generated,
    /// The tables say this hop, out of so many equal ones.
    LookedUp {
        /// The chosen one.
        hop: Hop,
        /// How many there were.
        hops: u16,
    },
    /// Left for another node.
    ToNode(NodeId),
    /// Went to the node's own kernel.
    ToKernel,
    /// Left by a port.
    Sent(PortId),
    /// Waits for a neighbour's hardware address.
    AwaitsNeighbour(PortId, AdjacencyId),
    /// Was cut into so many fragments.
    Fragmented(u16),
    /// An ICMP error about it was made: type and code.
    IcmpErrorSent(u8, u8),
    /// Went no further.
    Dropped(DropReason),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Received(port) => write!(f, "received at port {}", port.0),
            Step::FromKernel => f.write_str("from the kernel"),
            Step::FromNode => f.write_str("from another node"),
            Step::Generated => f.write_str("made here"),
            Step::LookedUp { hop, hops } => {
                let Hop { node, port, adjacency } = hop;
                write!(f, "looked up: node {}, port {}, adjacency {}, of {hops} equal", node.0, port.0, adjacency.0)
            }
            Step::ToNode(node) => write!(f, "to node {}", node.0),
            Step::ToKernel => f.write_str("to the kernel"),
            Step::Sent(port) => write!(f, "sent by port {}", port.0),
            Step::AwaitsNeighbour(port, adjacency) => {
                write!(f, "waits for neighbour {} of port {}", adjacency.0, port.0)
            }
            Step::Fragmented(fragments) => write!(f, "cut into {fragments} fragments"),
            Step::IcmpErrorSent(kind, code) => write!(f, "answered by ICMP {kind}/{code}"),
            Step::Dropped(reason) => write!(f, "dropped: {reason}"),
        }
    }
}

/// The flow of an IP packet, when it is one.
pub(crate) fn flow_of(bytes: &[u8]) -> Option<Flow> {
    match bytes.first()? >> 4 {
        4 => ipv4::Packet::new_checked(bytes).ok().map(|packet| Flow::from_v4(&packet)),
        6 => ipv6::Packet::new_checked(bytes).ok().map(|packet| Flow::from_v6(&packet)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(text: &str, ports: (u16, u16)) -> Flow {
        let (source, destination) = text.split_once(' ').expect("two addresses");
        let (source, destination) = (source.parse().expect("an address"), destination.parse().expect("an address"));
        Flow { source, destination, protocol: Protocol::TCP, source_port: ports.0, destination_port: ports.1 }
    }

    #[test]
    fn a_filter_matches_what_it_says_and_all_that_it_leaves_open() {
        let all = Filter::all(1);
        let http = flow("10.0.0.1 192.0.2.7", (5000, 80));
        assert!(all.matches(&http) && all.matches(&flow("2001:db8::1 2001:db8::2", (0, 0))));
        let net = |text: &str| Some(text.parse().expect("a network"));
        assert!(Filter { source: net("10.0.0.0/8"), ..all }.matches(&http));
        assert!(!Filter { destination: net("10.0.0.0/8"), ..all }.matches(&http));
        assert!(!Filter { source: net("::/0"), ..all }.matches(&http), "another family");
        assert!(Filter { transport_port: Some(80), ..all }.matches(&http.reversed()), "either port");
        assert!(!Filter { transport_port: Some(443), ..all }.matches(&http));
        assert!(!Filter { protocol: Some(Protocol::UDP), ..all }.matches(&http));
    }
}
