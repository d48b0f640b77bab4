//! Kernel routes of a routing daemon that restarts: see [`super::super::stale_routes`].

use router_ports::netlink::RouteKey;

use super::super::candidate::{CandidateRoute, NextHop, of_kernel};
use super::super::effect::Effect;
use super::super::stale_routes::StaleOfProtocol;
use super::LocalRoutes;

impl LocalRoutes {
    /// Records the protocols of the former and the new kernel route with this key.
    pub(super) fn count_of_protocol(&mut self, key: RouteKey, former: Option<u8>, new: Option<u8>) {
        if new.is_none() {
            self.stale.forget(&key);
        }
        new.into_iter().for_each(|protocol| self.stale.add(protocol));
        former.into_iter().for_each(|protocol| self.stale.remove(protocol));
    }

    /// Removes what a route of the kernel replaces: a daemon may have come back with another metric.
    pub(super) fn replace_stale_routes(&mut self, key: RouteKey, protocol: u8) {
        self.stale.forget(&key);
        for other in self.stale.others(protocol, key) {
            self.set_candidate(other.prefix, of_kernel(other.metric), None);
        }
    }

    /// Removes a route that the kernel has removed, unless the daemon that installed it may be restarting.
    pub(super) fn remove_kernel_route(&mut self, key: RouteKey) {
        let Some(protocol) = self.kernel_candidate(key).map(|candidate| candidate.protocol) else { return };
        if self.stale.withhold(protocol, key) {
            self.remove_lost_hops(key);
        } else {
            self.set_candidate(key.prefix, of_kernel(key.metric), None);
        }
    }

    fn kernel_candidate(&self, key: RouteKey) -> Option<&CandidateRoute> {
        let of_prefix = self.candidates.get(&key.prefix)?;
        let (_, id) = of_prefix.iter().find(|(preference, _)| *preference == of_kernel(key.metric))?;
        Some(self.routes.get(id))
    }

    /// Removes the next hops of a route that cannot be used any more, and the route with the last one: the routing
    /// daemon would have.
    fn remove_lost_hops(&mut self, key: RouteKey) {
        let Some(candidate) = self.kernel_candidate(key) else { return };
        let mut left = candidate.clone();
        left.next_hops.retain(|(next_hop, _)| self.is_alive(*next_hop));
        if left.next_hops.len() < candidate.next_hops.len() {
            let is_left = !left.next_hops.is_empty();
            self.set_candidate(key.prefix, of_kernel(key.metric), is_left.then_some(left));
        }
    }

    /// Returns whether the port of a next hop is up, and its gateway answers as far as is known.
    fn is_alive(&self, next_hop: NextHop) -> bool {
        let Some(port) = next_hop.port() else { return true };
        let config = self.port(port);
        let NextHop::Via(_, gateway) = next_hop else { return config.is_up };
        let has_address = config.addresses.iter().any(|network| network.addr().is_ipv4() == gateway.is_ipv4());
        config.is_up && has_address && !self.gateways.is_unreachable(port, gateway)
    }

    /// Sets for how long routes of a routing daemon are kept while it restarts; zero: they are not.
    pub fn set_stale_routes_ns(&mut self, keep_ns: u64) {
        self.stale.set_keep_ns(keep_ns);
    }

    /// Removes stale routes whose time is over, or whose ports or gateways have gone, and decides whether routes that
    /// the kernel has removed become stale.
    pub fn poll_stale_routes(&mut self, now_ns: u64) {
        if std::mem::take(&mut self.is_stale_check_due) {
            self.stale.keys().into_iter().for_each(|key| self.remove_lost_hops(key));
        }
        let (removed, events) = self.stale.poll(now_ns);
        for key in removed {
            self.set_candidate(key.prefix, of_kernel(key.metric), None);
        }
        self.effects.extend(events.into_iter().map(Effect::StaleRoutes));
    }

    /// Returns when [`LocalRoutes::poll_stale_routes`] is due; zero for at once.
    pub fn stale_routes_due_ns(&self) -> Option<u64> {
        if self.is_stale_check_due { Some(0) } else { self.stale.due_ns() }
    }

    /// Returns the stale routes by protocol.
    pub fn stale_routes(&self) -> impl Iterator<Item = StaleOfProtocol> {
        self.stale.iter()
    }
}
