//! Changes of the rack in etcd.

use rack::Rack;
use tracing::{info, warn};

use crate::node_state::NodeState;
use crate::rack_subscription::ConfigUpdate;

impl NodeState {
    /// Publishes the states of links in etcd, and applies changes of the rack.
    pub(crate) fn apply_updates(&mut self, now_ns: u64) {
        let Some(subscription) = &mut self.subscription else { return };
        let links = self.neighbours.iter().map(|it| (it.slot, it.peer.state()));
        subscription.publish_links(&self.settings.rack, links);
        for update in subscription.updates(&self.settings) {
            match update {
                ConfigUpdate::MetricsPort(port) => {
                    if let Err(error) = self.metrics.set_port(port) {
                        warn!("{error}");
                    }
                }
                ConfigUpdate::Rack(rack) => self.apply_rack(rack, now_ns),
            }
        }
    }

    /// Applies a rack that differs only in what can change at run time.
    fn apply_rack(&mut self, rack: Rack, now_ns: u64) {
        let nodes_before = self.settings.rack.nodes.len();
        self.settings.rack = rack;
        let rack = &self.settings.rack;
        self.listener_queries.set_timeout(rack.timeouts.query_ns as u64);
        self.registry.grow(rack.nodes.len());
        self.neighbours.set_settings(&self.settings);
        for slot in nodes_before..self.settings.rack.nodes.len() {
            let node = &self.settings.rack.nodes[slot];
            info!(peer = node.name, address = %node.address, "a node has joined the rack");
            self.neighbours.add(&self.settings, &self.device, slot);
        }
        if !self.proxy.reconfigure(self.settings.configuration(self.direct_obstacle.as_deref())) {
            // The proxy would continue with outdated access rules.
            self.end_proxy("killed because it did not accept the changed rack", now_ns);
        }
        let (rack, own) = (&self.settings.rack, self.settings.slot);
        let actions = self.listener_queries.restrict(|peer, port| rack.allows(own, peer, port));
        let withdrawn = self.registry.restrict(|peer, port| rack.allows(peer, own, port));
        self.execute(actions);
        self.neighbours.withdraw(withdrawn);
    }
}
