//! The status of a monitor, for the command line and metrics.

use std::process;

use control::monitor::{Direct, Link, Partition, Proxy, Status};

use crate::neighbours::Neighbour;
use crate::node_state::NodeState;

/// Maximum number of listeners, and of remote listeners, in a status.
const LISTENERS_SHOWN_MAX: usize = 256;

impl NodeState {
    /// Returns the status.
    pub(crate) fn status(&self) -> Status {
        let rack = &self.settings.rack;
        let node = self.settings.node();
        let partition = |it: rack::Partition| Partition { class: it.class.as_str().to_owned(), core: it.core };
        Status {
            node: node.name.clone(),
            address: node.address,
            pid: process::id(),
            started_at_ns: self.started_at_ns,
            device: self.device.describe(),
            rack_digest: format!("{:016x}", rack.digest()),
            timing: rack.link.as_ref().map(|link| link.timing.as_str().to_owned()),
            partitions: rack.data_partitions().into_iter().map(partition).collect(),
            direct: rack.window_layout().spans.map(|spans| Direct {
                spans: if self.direct_obstacle.is_none() { spans.count } else { 0 },
                obstacle: self.direct_obstacle.clone(),
            }),
            proxy: self.proxy.process().map(|(pid, is_ready)| Proxy { pid, is_ready }),
            proxy_restarts: self.proxy.restarts(),
            links: self.neighbours.iter().map(|neighbour| self.link(neighbour)).collect(),
            listeners: self.registry.listeners(node.address).into_iter().take(LISTENERS_SHOWN_MAX).collect(),
            remote_listeners: self.listener_queries.ready().take(LISTENERS_SHOWN_MAX).collect(),
            etcd: self.subscription.as_ref().map(|subscription| subscription.status.clone()),
        }
    }

    fn link(&self, neighbour: &Neighbour) -> Link {
        let node = &self.settings.rack.nodes[neighbour.slot];
        Link {
            peer: node.name.clone(),
            address: node.address,
            state: neighbour.peer.state().to_owned(),
            reason: neighbour.peer.reason().map(str::to_owned),
            epoch: neighbour.peer.epoch().0,
            ups: neighbour.peer.ups(),
            round_trip_ns: neighbour.peer.round_trip_ns(),
            carried: self.proxy.report.peers.get(neighbour.slot).copied().unwrap_or_default(),
        }
    }
}
