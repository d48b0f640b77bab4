//! Candidate routes to a prefix, and which of them is preferred.

use std::net::IpAddr;

use ipnet::IpNet;
use router::interner::InternedId;
use router::{AdjacencyId, PortId};

use crate::control::message::{METRIC_NEIGHBOUR, Origin, RouteKind};

/// A next hop of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NextHop {
    /// The kernel of this node.
    Kernel,
    /// The router itself, for addresses of ports without a kernel interface.
    Router,
    /// The destination itself, on the network of the port.
    OnLink(PortId),
    /// A known neighbour.
    Adjacent(PortId, AdjacencyId),
    /// A gateway whose adjacency the forwarding thread assigns.
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

/// Orders the routes to one prefix: the lowest is preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Preference {
    pub metric: u32,
    pub origin: Origin,
    /// Distinguishes routes of the same metric and origin: neighbours of different ports, static routes.
    pub instance: u32,
}

impl Preference {
    /// Returns the metric that is announced. Other nodes recognise neighbours by it.
    pub fn announced(self) -> u32 {
        match self.origin {
            Origin::Neighbour => METRIC_NEIGHBOUR,
            _ => self.metric.min(METRIC_NEIGHBOUR - 1),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CandidateRoute {
    pub kind: RouteKind,
    /// With weights.
    pub next_hops: Vec<(NextHop, u16)>,
    /// The protocol number of a kernel route; otherwise 0.
    pub protocol: u8,
}

pub const LOCAL: Preference = Preference { metric: 0, origin: Origin::Local, instance: 0 };

pub fn neighbour(port: PortId) -> Preference {
    Preference { metric: METRIC_NEIGHBOUR, origin: Origin::Neighbour, instance: u32::from(port.0) }
}

/// A route of the kernel that is not that of a connected network.
pub fn of_kernel(metric: u32) -> Preference {
    Preference { metric, origin: Origin::Kernel, instance: 0 }
}

/// The connected network of a port without a kernel interface.
pub fn on_port(port: PortId) -> Preference {
    Preference { metric: 0, origin: Origin::Connected, instance: 1 + u32::from(port.0) }
}

pub fn unicast(next_hop: NextHop) -> CandidateRoute {
    CandidateRoute { kind: RouteKind::Unicast, next_hops: vec![(next_hop, 1)], protocol: 0 }
}

/// The candidate routes to one prefix, in the order of their preference. Nearly all prefixes have one.
#[derive(Debug)]
pub enum Candidates {
    One(Preference, InternedId),
    /// Any other number.
    Many(Vec<(Preference, InternedId)>),
}

impl Default for Candidates {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

impl Candidates {
    /// Iterates over the candidates, the preferred one first.
    pub fn iter(&self) -> impl Iterator<Item = (Preference, InternedId)> + '_ {
        let (one, many) = match self {
            Self::One(preference, id) => (Some((*preference, *id)), &[][..]),
            Self::Many(many) => (None, &many[..]),
        };
        one.into_iter().chain(many.iter().copied())
    }

    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Many(many) if many.is_empty())
    }

    /// Sets or removes a candidate. Returns the former one with this preference.
    pub fn set(&mut self, preference: Preference, id: Option<InternedId>) -> Option<InternedId> {
        let mut all: Vec<(Preference, InternedId)> = match (&mut *self, id) {
            (Self::One(known, former), Some(id)) if *known == preference => return Some(std::mem::replace(former, id)),
            (Self::One(known, _), None) if *known != preference => return None,
            (Self::One(known, former), _) => vec![(*known, *former)],
            (Self::Many(many), _) => std::mem::take(many),
        };
        let place = all.binary_search_by_key(&preference, |(known, _)| *known);
        let former = place.ok().map(|at| all.remove(at).1);
        if let Some(id) = id {
            all.insert(place.unwrap_or_else(|at| at), (preference, id));
        }
        *self = match all[..] {
            [(preference, id)] => Self::One(preference, id),
            _ => Self::Many(all),
        };
        former
    }
}

/// Returns whether a prefix is routed. Multicast, loopback and link-local addresses are not.
pub fn is_routed(prefix: &IpNet) -> bool {
    let (address, is_host_or_net) = (prefix.addr(), prefix.prefix_len() > 0);
    let is_link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !(is_host_or_net && (address.is_multicast() || address.is_loopback() || is_link_local))
}
