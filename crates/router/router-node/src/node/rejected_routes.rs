//! Routes of the kernel's that packets through the router do not take as they stand there: the log names them, and they
//! are counted.

use std::collections::BTreeMap;

use ipnet::IpNet;
use router_ports::InterfaceIndex;
use router_ports::netlink::RouteKey;

/// Lines in the log for each reason before only every doubling of their number is one: a management interface may
/// have a full table.
const LINES_MAX: u64 = 32;

/// What of a route is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RejectedRoute {
    /// RejectReason.
    pub reason: RejectReason,
    /// Not even one of several ways is.
    pub is_entire_route: bool,
}

/// RejectReason a route is not taken as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectReason {
    /// By an interface that is no port: other nodes, and packets at ports, have no business there.
    NoPort(InterfaceIndex),
    /// The kernel wraps the packets, which the router does not.
    Encapsulated,
    /// It is for shorter packets than its port is.
    Mtu(u32),
}

/// How many routes are not taken, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RejectedCounts {
    /// By interfaces that are no ports.
    pub no_port: u64,
    /// With encapsulation.
    pub encapsulated: u64,
    /// Taken, but for their own MTU.
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

/// The routes that are there and not taken.
#[derive(Debug, Default)]
pub struct RejectedRoutes {
    routes: BTreeMap<RouteKey, RejectedRoute>,
    counts: RejectedCounts,
    /// Since the node began.
    told: RejectedCounts,
}

impl RejectedRoutes {
    /// What there is to say of a route, from now on. The log is to be told when that is new: `true`.
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
        let told = self.told.of(rejected.reason);
        *told += 1;
        *told <= LINES_MAX || told.is_power_of_two()
    }

    /// How many there are.
    pub fn counts(&self) -> RejectedCounts {
        self.counts
    }
}

impl RejectedRoute {
    /// A line for the log, with the remedy. `interface` is the name of the one that is no port.
    pub fn line(self, prefix: IpNet, interface: &str) -> String {
        let left = match self.is_entire_route {
            true => "is not the cluster's: packets that come in at ports take a wider one, or none",
            false => "is not the cluster's in this way: packets that come in at ports take its other ways",
        };
        match self.reason {
            RejectReason::NoPort(_) => format!(
                "the kernel's route to {prefix} by '{interface}', which is no port, {left}; give the node a port \
                 '{interface}' in the cluster file, or, where they must not leave by another port, run 'ip route add \
                 blackhole {prefix} metric 40000'"
            ),
            RejectReason::Encapsulated => format!(
                "the kernel's route to {prefix} with encapsulation {left}: the router would send them unwrapped; route \
                 them to a port that is an Ethernet tunnel's interface (vxlan, gretap)"
            ),
            RejectReason::Mtu(bytes) => format!(
                "mtu {bytes} of the kernel's route to {prefix} is not heeded by the router, which goes by ports' MTUs; \
                 lower the MTU of its interface"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_is_said_once_and_a_flood_of_them_now_and_then() {
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
