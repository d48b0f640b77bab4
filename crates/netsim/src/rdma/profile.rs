//! NICs of simulations: the engine's policies, with what they cost.

use rnic::nic::{CongestionControl, Dcqcn, Policy, Profile};
use sim::Span;

use crate::rate::Rate;
use crate::scenario::{Congestion, Transport, TransportPlan};

/// What a NIC's window and rate depend on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PathPlan {
    /// Of the host's line.
    pub rate: Rate,
    /// The longest round trip of an empty network.
    pub round_trip: Span,
}

impl PathPlan {
    /// Bandwidth times delay, and a packet.
    fn bdp_bytes(&self, mtu_bytes: u32) -> u32 {
        (self.rate.gbps() * self.round_trip.ns() / 8.0) as u32 + mtu_bytes
    }
}

/// The NIC of a plan, at the end of a PCIe link.
pub fn profile(plan: &TransportPlan, path: &PathPlan) -> Profile {
    let policy = match plan.policy {
        Transport::Srnic => Policy::Srnic,
        Transport::Irn => Policy::Irn,
        Transport::GoBackN => Policy::GoBackN,
        Transport::ConnectionCache => Policy::ConnectionCache,
    };
    let bdp = path.bdp_bytes(plan.mtu_bytes);
    let congestion = match plan.congestion {
        Congestion::None => CongestionControl::None,
        Congestion::BdpWindow => CongestionControl::BdpWindow { bytes: bdp },
        Congestion::Dctcp => CongestionControl::Dctcp { first_bytes: bdp, most_bytes: 2 * bdp },
        Congestion::Swift => CongestionControl::Swift {
            target: path.round_trip + path.round_trip,
            first_bytes: bdp,
            most_bytes: 2 * bdp,
        },
        Congestion::Dcqcn => CongestionControl::Dcqcn(Dcqcn::published((path.rate.gbps() * 1e9) as u64)),
    };
    Profile { mtu_bytes: plan.mtu_bytes, congestion, ..Profile::modelled(policy) }
}
