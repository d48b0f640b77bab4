//! Kernel routes that are kept while the routing daemon that installed them restarts: the stale routes of graceful
//! restart (RFC 4724), without I/O.
//!
//! The kernel does not say why a route is removed. So a restart is recognised by its effect: all routes of one protocol
//! number are removed in one burst. Removals are withheld until the burst has ended; if routes of the protocol remain,
//! the removals take effect.

use std::collections::{BTreeMap, BTreeSet};

use router_ports::netlink::RouteKey;

/// Time without a further removal after which a burst has ended: ten times the interval in which the kernel's changes
/// are read.
pub const BURST_GAP_NS: u64 = 20_000_000;
/// Maximum duration of a burst, and thus the delay of a removal that is not part of a restart.
pub const BURST_NS_MAX: u64 = 200_000_000;
/// Maximum number of routes that are removed per call: some milliseconds of the control thread.
const REMOVALS_PER_CALL: usize = 4096;

/// Returns whether routes of this protocol number (`rtm_protocol` in rtnetlink(7)) are a daemon's that may restart.
/// Those of the kernel and of administrators (0 to 4), of router advertisements (9), DHCP (16) and keepalived (18,
/// which gives its routes up to another router) are not.
pub fn is_of_routing_daemon(protocol: u8) -> bool {
    !matches!(protocol, 0..=4 | 9 | 16 | 18)
}

/// The stale routes of one protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaleOfProtocol {
    /// The protocol number.
    pub protocol: u8,
    /// Number of stale routes.
    pub routes: usize,
    /// When they are removed.
    pub until_ns: u64,
}

/// A change that [`StaleRoutes::poll`] reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StaleEvent {
    /// The routes of a protocol have become stale.
    Kept(StaleOfProtocol),
    /// Stale routes of a protocol did not come back in time.
    Expired {
        /// The protocol number.
        protocol: u8,
        /// Number of routes.
        routes: usize,
    },
}

/// The routes of one protocol. Those in the three sets are not in the kernel.
#[derive(Debug, Default)]
struct Protocol {
    /// Number of all its routes that this node uses.
    routes: usize,
    /// The removals of the current burst.
    burst: BTreeSet<RouteKey>,
    /// Whether the burst has grown since the last poll.
    has_grown: bool,
    /// When the burst began, and when it last grew.
    burst_ns: Option<(u64, u64)>,
    stale: BTreeSet<RouteKey>,
    until_ns: u64,
    /// Routes that are about to be removed.
    leaving: BTreeSet<RouteKey>,
}

impl Protocol {
    fn sets(&self) -> [&BTreeSet<RouteKey>; 3] {
        [&self.burst, &self.stale, &self.leaving]
    }

    fn has_none_in_kernel(&self) -> bool {
        self.routes == self.burst.len() + self.stale.len() + self.leaving.len()
    }

    /// Returns when the burst is decided; `None` without a burst.
    fn burst_end_ns(&self) -> Option<u64> {
        let (began_ns, last_ns) = self.burst_ns.filter(|_| !self.burst.is_empty())?;
        Some((last_ns + BURST_GAP_NS).min(began_ns + BURST_NS_MAX))
    }

    fn due_ns(&self) -> Option<u64> {
        if self.has_grown || !self.leaving.is_empty() {
            return Some(0);
        }
        let stale_ns = (!self.stale.is_empty()).then_some(self.until_ns);
        self.burst_end_ns().into_iter().chain(stale_ns).min()
    }

    /// Ends the time of stale routes if it is over.
    fn expire(&mut self, number: u8, now_ns: u64) -> Option<StaleEvent> {
        if self.stale.is_empty() || now_ns < self.until_ns {
            return None;
        }
        let routes = self.stale.len();
        self.leaving.append(&mut self.stale);
        Some(StaleEvent::Expired { protocol: number, routes })
    }

    /// Decides the burst: its routes become stale as soon as the kernel has no other routes of the protocol, and are
    /// removed if it still has some when the burst has ended.
    fn decide(&mut self, number: u8, now_ns: u64, keep_ns: u64) -> Option<StaleEvent> {
        if std::mem::take(&mut self.has_grown) {
            let began_ns = self.burst_ns.map_or(now_ns, |(began_ns, _)| began_ns);
            self.burst_ns = Some((began_ns, now_ns));
        }
        let end_ns = self.burst_end_ns()?;
        if self.has_none_in_kernel() {
            // Routes that vanish again before all have come back are not kept any longer than the others.
            if self.stale.is_empty() {
                self.until_ns = now_ns.saturating_add(keep_ns);
            }
            self.stale.append(&mut self.burst);
            let (routes, until_ns) = (self.stale.len(), self.until_ns);
            return Some(StaleEvent::Kept(StaleOfProtocol { protocol: number, routes, until_ns }));
        }
        if now_ns >= end_ns {
            self.leaving.append(&mut self.burst);
        }
        None
    }
}

/// The routes of all routing daemons, by protocol number.
#[derive(Debug, Default)]
pub struct StaleRoutes {
    keep_ns: u64,
    protocols: BTreeMap<u8, Protocol>,
}

impl StaleRoutes {
    /// Sets how long stale routes are kept, from the next restart on. Zero: no route is kept, and those that are stale
    /// are removed.
    pub fn set_keep_ns(&mut self, keep_ns: u64) {
        self.keep_ns = keep_ns;
        if keep_ns > 0 {
            return;
        }
        for protocol in self.protocols.values_mut() {
            let Protocol { burst, stale, leaving, .. } = protocol;
            leaving.append(burst);
            leaving.append(stale);
        }
    }

    /// Records that the node uses one more route of the protocol.
    pub fn add(&mut self, protocol: u8) {
        self.protocols.entry(protocol).or_default().routes += 1;
    }

    /// Records that the node uses one route of the protocol less.
    pub fn remove(&mut self, protocol: u8) {
        let Some(of_protocol) = self.protocols.get_mut(&protocol) else { return };
        of_protocol.routes = of_protocol.routes.saturating_sub(1);
        if of_protocol.routes == 0 {
            self.protocols.remove(&protocol);
        }
    }

    /// Records that the kernel has removed a route that the node uses. Returns whether the node is to use it still.
    pub fn withhold(&mut self, protocol: u8, key: RouteKey) -> bool {
        if self.keep_ns == 0 || !is_of_routing_daemon(protocol) {
            return false;
        }
        let Some(of_protocol) = self.protocols.get_mut(&protocol) else { return false };
        if of_protocol.burst.is_empty() {
            of_protocol.burst_ns = None;
        }
        of_protocol.has_grown |= of_protocol.burst.insert(key);
        true
    }

    /// Forgets that a route is not in the kernel: it has come back, or the node does not use it any more.
    pub fn forget(&mut self, key: &RouteKey) {
        for protocol in self.protocols.values_mut() {
            let Protocol { burst, stale, leaving, .. } = protocol;
            [burst, stale, leaving].into_iter().for_each(|set| _ = set.remove(key));
        }
    }

    /// Returns the routes of the protocol to the same prefix, with other metrics, that are used though the kernel does
    /// not have them.
    pub fn others(&self, protocol: u8, key: RouteKey) -> Vec<RouteKey> {
        let of_prefix = RouteKey { metric: 0, ..key }..=RouteKey { metric: u32::MAX, ..key };
        let Some(found) = self.protocols.get(&protocol) else { return Vec::new() };
        let others = found.sets().into_iter().flat_map(|set| set.range(of_prefix.clone()));
        others.filter(|other| **other != key).copied().collect()
    }

    /// Returns all routes that are used though the kernel does not have them.
    pub fn keys(&self) -> Vec<RouteKey> {
        self.protocols.values().flat_map(Protocol::sets).flatten().copied().collect()
    }

    /// Returns at most 4096 routes to remove now, and what has changed.
    pub fn poll(&mut self, now_ns: u64) -> (Vec<RouteKey>, Vec<StaleEvent>) {
        let (mut removed, mut events) = (Vec::new(), Vec::new());
        for (number, protocol) in &mut self.protocols {
            events.extend(protocol.expire(*number, now_ns));
            events.extend(protocol.decide(*number, now_ns, self.keep_ns));
            let room = REMOVALS_PER_CALL - removed.len();
            removed.extend((0..room).map_while(|_| protocol.leaving.pop_first()));
        }
        (removed, events)
    }

    /// Returns when [`StaleRoutes::poll`] is due; zero for at once.
    pub fn due_ns(&self) -> Option<u64> {
        self.protocols.values().filter_map(Protocol::due_ns).min()
    }

    /// Returns the stale routes by protocol.
    pub fn iter(&self) -> impl Iterator<Item = StaleOfProtocol> {
        self.protocols.iter().filter(|(_, of_protocol)| !of_protocol.stale.is_empty()).map(|(number, of_protocol)| {
            StaleOfProtocol { protocol: *number, routes: of_protocol.stale.len(), until_ns: of_protocol.until_ns }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BGP: u8 = 186;
    const OSPF: u8 = 188;
    const MS: u64 = 1_000_000;
    const KEEP_NS: u64 = 60_000 * MS;

    fn key(number: u32) -> RouteKey {
        RouteKey { prefix: "192.0.2.0/24".parse().unwrap(), metric: number }
    }

    /// A node that uses these numbers of routes of BGP and OSPF.
    fn routes(bgp: u32, ospf: u32) -> StaleRoutes {
        let mut routes = StaleRoutes::default();
        routes.set_keep_ns(KEEP_NS);
        (0..bgp).for_each(|_| routes.add(BGP));
        (0..ospf).for_each(|_| routes.add(OSPF));
        routes
    }

    fn withhold(routes: &mut StaleRoutes, keys: std::ops::Range<u32>) {
        keys.for_each(|number| assert!(routes.withhold(BGP, key(number))));
    }

    /// Polls, and stops using the routes that are to be removed, as the caller does.
    fn poll(routes: &mut StaleRoutes, now_ms: u64) -> (usize, Vec<StaleEvent>) {
        let (removed, events) = routes.poll(now_ms * MS);
        for key in &removed {
            routes.forget(key);
            routes.remove(BGP);
        }
        (removed.len(), events)
    }

    fn kept(routes: usize, until_ns: u64) -> StaleEvent {
        StaleEvent::Kept(StaleOfProtocol { protocol: BGP, routes, until_ns })
    }

    #[test]
    fn routes_that_all_vanish_are_kept_until_the_timer_ends() {
        let mut routes = routes(3, 2);
        withhold(&mut routes, 0..2);
        assert_eq!(poll(&mut routes, 5), (0, vec![]));
        withhold(&mut routes, 2..3);
        assert_eq!(poll(&mut routes, 10), (0, vec![kept(3, 10 * MS + KEEP_NS)]));
        assert_eq!((routes.due_ns(), routes.iter().count()), (Some(10 * MS + KEEP_NS), 1));
        assert_eq!(poll(&mut routes, 60_009), (0, vec![]));
        assert_eq!(poll(&mut routes, 60_010), (3, vec![StaleEvent::Expired { protocol: BGP, routes: 3 }]));
        assert_eq!((routes.due_ns(), routes.iter().count()), (None, 0));
    }

    #[test]
    fn a_few_withdrawn_routes_are_removed_when_no_further_one_follows() {
        let mut routes = routes(100, 0);
        withhold(&mut routes, 0..2);
        assert_eq!((routes.due_ns(), poll(&mut routes, 1)), (Some(0), (0, vec![])));
        assert_eq!(routes.due_ns(), Some(MS + BURST_GAP_NS));
        assert_eq!(poll(&mut routes, 20), (0, vec![]));
        assert_eq!(poll(&mut routes, 21), (2, vec![]));
        assert_eq!(routes.due_ns(), None);
    }

    #[test]
    fn a_burst_that_goes_on_delays_removals_by_a_bounded_time() {
        let mut routes = routes(100, 0);
        let mut removed = Vec::new();
        for number in 0..30 {
            withhold(&mut routes, number..number + 1);
            removed.push(poll(&mut routes, u64::from(number) * 15).0);
        }
        assert_eq!(removed.iter().position(|removed| *removed > 0), Some(14), "at 210 ms");
        assert_eq!(removed[14], 15);
    }

    #[test]
    fn routes_that_come_back_stay_and_the_others_go() {
        let mut routes = routes(3, 0);
        withhold(&mut routes, 0..3);
        assert_eq!(poll(&mut routes, 0).1, [kept(3, KEEP_NS)]);
        routes.forget(&key(1));
        assert_eq!(routes.iter().map(|of_protocol| of_protocol.routes).collect::<Vec<_>>(), [2]);
        assert_eq!(poll(&mut routes, 60_000), (2, vec![StaleEvent::Expired { protocol: BGP, routes: 2 }]));
        assert!(routes.withhold(BGP, key(1)), "it is in use");
    }

    #[test]
    fn a_withdrawal_among_routes_that_have_come_back_is_followed() {
        let mut routes = routes(3, 0);
        withhold(&mut routes, 0..3);
        poll(&mut routes, 0);
        [0, 1].iter().for_each(|number| routes.forget(&key(*number)));
        withhold(&mut routes, 0..1);
        assert_eq!(poll(&mut routes, 1000), (0, vec![]));
        assert_eq!(poll(&mut routes, 1020), (1, vec![]));
        assert_eq!(routes.keys(), [key(2)], "which is still stale");
    }

    #[test]
    fn repeated_restarts_keep_no_route_for_longer_than_the_timer() {
        let mut routes = routes(2, 0);
        withhold(&mut routes, 0..2);
        poll(&mut routes, 0);
        routes.forget(&key(0));
        withhold(&mut routes, 0..1);
        assert_eq!(poll(&mut routes, 50_000).1, [kept(2, KEEP_NS)]);
        // A restart after which all routes have come back is over.
        routes.forget(&key(0));
        routes.forget(&key(1));
        withhold(&mut routes, 0..2);
        assert_eq!(poll(&mut routes, 55_000).1, [kept(2, 55_000 * MS + KEEP_NS)]);
    }

    #[test]
    fn without_the_timer_and_for_other_protocols_nothing_is_withheld() {
        let mut routes = routes(1, 0);
        for protocol in [0, 2, 3, 4, 9, 16, 18] {
            routes.add(protocol);
            assert!(!routes.withhold(protocol, key(0)), "{protocol}");
        }
        assert!(!routes.withhold(OSPF, key(0)), "no route of it is in use");
        withhold(&mut routes, 0..1);
        poll(&mut routes, 0);
        routes.set_keep_ns(0);
        assert_eq!((routes.due_ns(), poll(&mut routes, 1)), (Some(0), (1, vec![])));
        routes.add(BGP);
        assert!(!routes.withhold(BGP, key(0)));
    }

    #[test]
    fn very_many_routes_are_removed_in_parts() {
        let mut routes = routes(10_000, 0);
        withhold(&mut routes, 0..10_000);
        poll(&mut routes, 0);
        let parts: Vec<usize> = (0..3).map(|_| poll(&mut routes, 60_000).0).collect();
        assert_eq!((parts, routes.due_ns()), (vec![4096, 4096, 1808], None));
    }

    #[test]
    fn a_route_that_comes_back_with_another_metric_replaces_the_stale_one() {
        let mut routes = routes(2, 0);
        withhold(&mut routes, 5..7);
        poll(&mut routes, 0);
        assert_eq!(routes.others(BGP, key(6)), [key(5)]);
        let elsewhere = RouteKey { prefix: "198.51.100.0/24".parse().unwrap(), metric: 5 };
        assert!(routes.others(BGP, elsewhere).is_empty() && routes.others(OSPF, key(6)).is_empty());
    }
}
