//! The state of an address under duplicate address detection (RFC 5227, RFC 4862), without I/O.

use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use ipnet::IpNet;
use sim::Random;

use crate::Time;
use crate::config::PortConfig;
use crate::local_addresses::is_link_local_v6;

/// The state of a configured address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimState {
    /// Being probed for, not used yet.
    Tentative,
    /// In use.
    Assigned,
    /// Used by another host: not used here until the port goes down and up, or is configured with it again.
    Duplicate,
}

/// A step of a claim.
#[derive(Clone, Copy)]
pub(super) enum ClaimStep {
    /// Sends a probe: a request for the address from the unspecified address.
    Probe,
    /// Assigns the address.
    Assign,
    /// Announces the address (RFC 5227, section 2.3).
    Announce,
}

/// The minimum and maximum delay after a step; random, so that nodes started together do not stay synchronized.
type Pause = (Duration, Duration);

const fn pause(seconds_min: u64, seconds_max: u64) -> Pause {
    (Duration::from_secs(seconds_min), Duration::from_secs(seconds_max))
}

/// Delay before the first step: PROBE_WAIT (RFC 5227, section 1.1) and MAX_RTR_SOLICITATION_DELAY (RFC 4862, section
/// 5.4.2).
const FIRST_PROBE_DELAY: Pause = pause(0, 1);
/// PROBE_NUM, PROBE_MIN, PROBE_MAX, ANNOUNCE_WAIT, ANNOUNCE_NUM and ANNOUNCE_INTERVAL (RFC 5227, section 1.1).
const STEPS_V4: [(ClaimStep, Pause); 6] = [
    (ClaimStep::Probe, pause(1, 2)),
    (ClaimStep::Probe, pause(1, 2)),
    (ClaimStep::Probe, pause(2, 2)),
    (ClaimStep::Assign, pause(0, 0)),
    (ClaimStep::Announce, pause(2, 2)),
    (ClaimStep::Announce, pause(0, 0)),
];
/// DupAddrDetectTransmits (RFC 4862, section 5.1) and RetransTimer (RFC 4861, section 10).
const STEPS_V6: [(ClaimStep, Pause); 2] = [(ClaimStep::Probe, pause(1, 1)), (ClaimStep::Assign, pause(0, 0))];
/// DEFEND_INTERVAL (RFC 5227, section 1.1).
pub(super) const DEFEND_INTERVAL: Duration = Duration::from_secs(10);
/// Interval at which a claim checks whether its port is up.
pub(super) const LINK_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A configured address of a port.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    pub(super) network: IpNet,
    pub(super) state: ClaimState,
    steps_done: usize,
    /// When the next step is due.
    pub(super) due: Option<Time>,
    /// When another host last used the address.
    pub(super) conflict: Option<Time>,
}

impl Claim {
    fn new(network: IpNet, first_due: Option<Time>) -> Claim {
        let state = if first_due.is_some() { ClaimState::Tentative } else { ClaimState::Assigned };
        Claim { network, state, steps_done: 0, due: first_due, conflict: None }
    }

    /// Returns the next step, and sets when the one after it is due.
    pub(super) fn step(&mut self, now: Time, random: &mut Random) -> Option<ClaimStep> {
        let steps = if self.network.addr().is_ipv4() { &STEPS_V4[..] } else { &STEPS_V6[..] };
        let (step, pause) = *steps.get(self.steps_done)?;
        self.steps_done += 1;
        self.due = (self.steps_done < steps.len()).then(|| now + random_delay(pause, random));
        Some(step)
    }
}

fn random_delay((min, max): Pause, random: &mut Random) -> Duration {
    min + (max - min).mul_f64(random.unit())
}

/// Returns the claims of a port's addresses; addresses that it had before keep their state.
pub(super) fn new_claims(now: Time, config: &PortConfig, former: &[Claim], random: &mut Random) -> Vec<Claim> {
    let first_due = config.probes.then(|| now + random_delay(FIRST_PROBE_DELAY, random));
    let claim = |network: IpNet| {
        let same = former.iter().find(|former| former.network == network);
        same.copied().unwrap_or_else(|| Claim::new(network, first_due))
    };
    addresses_of(config).into_iter().map(claim).collect()
}

/// Returns when the first probe of a new claim is due.
pub(super) fn first_probe_due(claims: &[Claim]) -> Option<Time> {
    claims.iter().filter(|claim| claim.steps_done == 0).filter_map(|claim| claim.due).min()
}

/// Returns the IPv6 addresses in use or being probed for, whose solicited-node groups the port must receive.
pub(super) fn listened_v6(claims: &[Claim]) -> impl Iterator<Item = Ipv6Addr> + '_ {
    claims.iter().filter(|claim| claim.state != ClaimState::Duplicate).filter_map(|claim| match claim.network.addr() {
        IpAddr::V6(address) => Some(address),
        IpAddr::V4(_) => None,
    })
}

/// Returns the addresses in use.
pub(super) fn assigned(claims: &[Claim]) -> Vec<IpNet> {
    claims.iter().filter(|claim| claim.state == ClaimState::Assigned).map(|claim| claim.network).collect()
}

/// Returns the addresses of a port. A port without a kernel that has IPv6 addresses, but no link-local one, gets one
/// from its MAC address (RFC 4291, appendix A), because neighbour discovery requires it.
fn addresses_of(config: &PortConfig) -> Vec<IpNet> {
    let mut addresses = config.addresses.clone();
    let has_v6 = addresses.iter().any(|network| matches!(network, IpNet::V6(_)));
    if !config.has_kernel && has_v6 && !addresses.iter().any(|network| is_link_local_v6(network.addr())) {
        let [a, b, c, d, e, f] = config.mac.0.map(u16::from);
        let address = Ipv6Addr::new(0xfe80, 0, 0, 0, (a ^ 2) << 8 | b, c << 8 | 0xff, 0xfe00 | d, e << 8 | f);
        addresses.extend(IpNet::new(address.into(), 64));
    }
    addresses
}
