//! Kernel routes that the router does not accept as they are. They are logged and counted.

use std::collections::BTreeMap;

use ipnet::IpNet;
use router_ports::InterfaceIndex;
use router_ports::netlink::RouteKey;

/// Log lines per reason; afterwards only each power of two is logged, as a management interface may have a full table.
const LINES_MAX: u64 = 32;

/// A kernel route that is not accepted as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RejectedRoute {
    /// The reason.
    pub reason: RejectReason,
    /// Whether no next hop of the route is accepted.
    pub is_entire_route: bool,
}

/// Why a route is not accepted as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectReason {
    /// Its interface is not a port: other nodes, and packets that arrive at ports, must not use it.
    NoPort(InterfaceIndex),
    /// The kernel encapsulates its packets; the router cannot.
    Encapsulated,
    /// It has an MTU of its own, which the router ignores.
    Mtu(u32),
}

/// Numbers of routes by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RejectedCounts {
    /// By an interface that is not a port.
    pub no_port: u64,
    /// With encapsulation.
    pub encapsulated: u64,
    /// Accepted without their own MTU.
    pub mtu: u64,
}

impl RejectedCounts {
    fn of(&mut self, reason: RejectReason) -> &mut u64 {
        match reason {
            RejectReason::NoPort(_) => &mut self.no_port,
            RejectReason::Encapsulated => &mut self.encapsulated,
            RejectReason::Mtu(_) => &mut self.mtu,
        }
    }
}

/// The current routes that are not accepted as they are.
#[derive(Debug, Default)]
pub struct RejectedRoutes {
    routes: BTreeMap<RouteKey, RejectedRoute>,
    counts: RejectedCounts,
    /// Log lines by reason since the node started.
    logged: RejectedCounts,
}

impl RejectedRoutes {
    /// Sets or clears the rejection of a route. Returns whether it is to be logged.
    pub fn set(&mut self, key: RouteKey, rejected: Option<RejectedRoute>) -> bool {
        let former = match rejected {
            Some(rejected) => self.routes.insert(key, rejected),
            None => self.routes.remove(&key),
        };
        former.into_iter().for_each(|former| *self.counts.of(former.reason) -= 1);
        let Some(rejected) = rejected else { return false };
        *self.counts.of(rejected.reason) += 1;
        if former == Some(rejected) {
            return false;
        }
        let logged = self.logged.of(rejected.reason);
        *logged += 1;
        *logged <= LINES_MAX || logged.is_power_of_two()
    }

    /// Returns the current numbers.
    pub fn counts(&self) -> RejectedCounts {
        self.counts
    }
}

impl RejectedRoute {
    /// Returns the log line with the remedy. `interface` is the name of the interface that is not a port.
    pub fn line(self, prefix: IpNet, interface: &str) -> String {
        let effect = match self.is_entire_route {
            true => "is not announced: packets that arrive at ports take a less specific route, or none",
            false => "is announced without this next hop: packets that arrive at ports take its other next hops",
        };
        match self.reason {
            RejectReason::NoPort(_) => format!(
                "the kernel's route to {prefix} by '{interface}', which is not a port, {effect}; give the node a port \
                 '{interface}' in the cluster file, or, where they must not leave by another port, run 'ip route add \
                 blackhole {prefix} metric 40000'"
            ),
            RejectReason::Encapsulated => format!(
                "the kernel's route to {prefix} with encapsulation {effect}: the router cannot encapsulate packets; \
                 route them to a port on an Ethernet tunnel interface (vxlan, gretap)"
            ),
            RejectReason::Mtu(bytes) => format!(
                "mtu {bytes} of the kernel's route to {prefix} is ignored by the router, which uses the MTUs of ports; \
                 lower the MTU of its interface"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_is_logged_once_and_many_of_them_rarely() {
        let mut all = RejectedRoutes::default();
        let key = |number: u32| RouteKey { prefix: "192.0.2.0/24".parse().unwrap(), metric: number };
        let rejected = RejectedRoute { reason: RejectReason::NoPort(InterfaceIndex(7)), is_entire_route: true };
        assert!(all.set(key(0), Some(rejected)) && !all.set(key(0), Some(rejected)));
        let lines = (1..1000).filter(|number| all.set(key(*number), Some(rejected))).count();
        assert_eq!((lines, all.counts().no_port), (31 + 4, 1000));
        let other = RejectedRoute { reason: RejectReason::Encapsulated, ..rejected };
        assert!(all.set(key(0), Some(other)), "a flood hides no other reason");
        (0..1000).for_each(|number| assert!(!all.set(key(number), None)));
        assert_eq!(all.counts(), RejectedCounts::default());
    }
}
