//! Candidate routes to a prefix, and which of them is preferred.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use router::{AdjacencyId, PortId};

use crate::control::message::{METRIC_NEIGHBOUR, Origin, RouteKind};

/// One next_hop of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NextHop {
    /// The node's kernel.
    Kernel,
    /// The router itself, at ports without a kernel.
    Router,
    /// Whoever has the destination, on the port's network.
    OnLink(PortId),
    /// A neighbour whose number is known.
    Adjacent(PortId, AdjacencyId),
    /// A router, whose number the forwarder gives.
    Via(PortId, IpAddr),
}

impl NextHop {
    pub fn port(self) -> Option<PortId> {
        match self {
            NextHop::Kernel | NextHop::Router => None,
            NextHop::OnLink(port) | NextHop::Adjacent(port, _) | NextHop::Via(port, _) => Some(port),
        }
    }
}

/// Which of several routes to the same destinations is taken: the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Preference {
    pub metric: u32,
    pub origin: Origin,
    /// Tells apart what may be there several times: neighbours of different ports, entries of the cluster file.
    pub instance: u32,
}

impl Preference {
    /// What other nodes compare: they know of neighbours by the metric alone.
    pub fn announced(self) -> u32 {
        match self.origin {
            Origin::Neighbour => METRIC_NEIGHBOUR,
            _ => self.metric.min(METRIC_NEIGHBOUR - 1),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CandidateRoute {
    pub kind: RouteKind,
    /// With what each has of the flows beside the others.
    pub next_hops: Vec<(NextHop, u16)>,
}

pub const LOCAL: Preference = Preference { metric: 0, origin: Origin::Local, instance: 0 };

pub fn neighbour(port: PortId) -> Preference {
    Preference { metric: METRIC_NEIGHBOUR, origin: Origin::Neighbour, instance: u32::from(port.0) }
}

/// The network of a port without a kernel.
pub fn on_port(port: PortId) -> Preference {
    Preference { metric: 0, origin: Origin::Connected, instance: 1 + u32::from(port.0) }
}

pub fn unicast(next_hop: NextHop) -> CandidateRoute {
    CandidateRoute { kind: RouteKind::Unicast, next_hops: vec![(next_hop, 1)] }
}

pub fn next_hops_of(candidates: &BTreeMap<Preference, CandidateRoute>) -> BTreeSet<NextHop> {
    candidates.values().flat_map(|candidate| candidate.next_hops.iter().map(|(next_hop, _)| *next_hop)).collect()
}

/// What stays on its link or in its node is not routed.
pub fn is_routed(prefix: &IpNet) -> bool {
    let (address, is_host_or_net) = (prefix.addr(), prefix.prefix_len() > 0);
    let is_link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !(is_host_or_net && (address.is_multicast() || address.is_loopback() || is_link_local))
}
