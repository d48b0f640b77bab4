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
pub struct Untaken {
    /// Why.
    pub why: Why,
    /// Not even one of several ways is.
    pub is_whole: bool,
}

/// Why a route is not taken as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// By an interface that is no port: other nodes, and packets at ports, have no business there.
    NoPort(InterfaceIndex),
    /// The kernel wraps the packets, which the router does not.
    Encapsulated,
    /// It is for shorter packets than its port is.
    Mtu(u32),
}

/// How many routes are not taken, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// By interfaces that are no ports.
    pub no_port: u64,
    /// With encapsulation.
    pub encapsulated: u64,
    /// Taken, but for their own MTU.
    pub mtu: u64,
}

impl Counts {
    fn of(&mut self, why: Why) -> &mut u64 {
        match why {
            Why::NoPort(_) => &mut self.no_port,
            Why::Encapsulated => &mut self.encapsulated,
            Why::Mtu(_) => &mut self.mtu,
        }
    }
}

/// The routes that are there and not taken.
#[derive(Debug, Default)]
pub struct AllUntaken {
    routes: BTreeMap<RouteKey, Untaken>,
    counts: Counts,
    /// Since the node began.
    told: Counts,
}

impl AllUntaken {
    /// What there is to say of a route, from now on. The log is to be told when that is new: `true`.
    pub fn set(&mut self, key: RouteKey, untaken: Option<Untaken>) -> bool {
        let former = match untaken {
            Some(untaken) => self.routes.insert(key, untaken),
            None => self.routes.remove(&key),
        };
        former.into_iter().for_each(|former| *self.counts.of(former.why) -= 1);
        let Some(untaken) = untaken else { return false };
        *self.counts.of(untaken.why) += 1;
        if former == Some(untaken) {
            return false;
        }
        let told = self.told.of(untaken.why);
        *told += 1;
        *told <= LINES_MAX || told.is_power_of_two()
    }

    /// How many there are.
    pub fn counts(&self) -> Counts {
        self.counts
    }
}

impl Untaken {
    /// A line for the log, with the remedy. `interface` is the name of the one that is no port.
    pub fn line(self, prefix: IpNet, interface: &str) -> String {
        let left = match self.is_whole {
            true => "is not the cluster's: packets that come in at ports take a wider one, or none",
            false => "is not the cluster's in this way: packets that come in at ports take its other ways",
        };
        match self.why {
            Why::NoPort(_) => format!(
                "the kernel's route to {prefix} by '{interface}', which is no port, {left}; give the node a port \
                 '{interface}' in the cluster file, or, where they must not leave by another port, run 'ip route add \
                 blackhole {prefix} metric 40000'"
            ),
            Why::Encapsulated => format!(
                "the kernel's route to {prefix} with encapsulation {left}: the router would send them unwrapped; route \
                 them to a port that is an Ethernet tunnel's interface (vxlan, gretap)"
            ),
            Why::Mtu(bytes) => format!(
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
        let mut all = AllUntaken::default();
        let key = |number: u32| RouteKey { prefix: "192.0.2.0/24".parse().unwrap(), metric: number };
        let untaken = Untaken { why: Why::NoPort(InterfaceIndex(7)), is_whole: true };
        assert!(all.set(key(0), Some(untaken)) && !all.set(key(0), Some(untaken)));
        let lines = (1..1000).filter(|number| all.set(key(*number), Some(untaken))).count();
        assert_eq!((lines, all.counts().no_port), (31 + 4, 1000));
        let other = Untaken { why: Why::Encapsulated, ..untaken };
        assert!(all.set(key(0), Some(other)), "a flood hides no other reason");
        (0..1000).for_each(|number| assert!(!all.set(key(number), None)));
        assert_eq!(all.counts(), Counts::default());
    }
}
