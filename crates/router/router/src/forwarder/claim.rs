//! The state of own addresses under duplicate address detection, without I/O.

use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use ipnet::IpNet;
use sim::Random;

use crate::Time;
use crate::config::PortConfig;

/// Where an own address stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimState {
    /// It is looked for, and not used yet.
    Tentative,
    /// It is used.
    Assigned,
    /// Somebody else has it: it is not used, until its port goes down and up again or is told of it anew.
    Duplicate,
}

/// What is done for an address, one after the other.
#[derive(Clone, Copy)]
pub(super) enum ClaimStep {
    /// Ask who has it, as nobody.
    Probe,
    /// Use it from now on.
    Assign,
    /// Tell everybody.
    Announce,
}

/// What passes after a step, at least and at most, so that nodes that began at once do not go on at once.
type Pause = (Duration, Duration);

const fn pause(seconds_min: u64, seconds_max: u64) -> Pause {
    (Duration::from_secs(seconds_min), Duration::from_secs(seconds_max))
}

/// Before the first step: PROBE_WAIT of RFC 5227, section 1.1, and MAX_RTR_SOLICITATION_DELAY as RFC 4862, section
/// 5.4.2, has it.
const FIRST_PROBE_DELAY: Pause = pause(0, 1);
/// PROBE_NUM, PROBE_MIN, PROBE_MAX, ANNOUNCE_WAIT, ANNOUNCE_NUM and ANNOUNCE_INTERVAL of RFC 5227, section 1.1.
const STEPS_V4: [(ClaimStep, Pause); 6] = [
    (ClaimStep::Probe, pause(1, 2)),
    (ClaimStep::Probe, pause(1, 2)),
    (ClaimStep::Probe, pause(2, 2)),
    (ClaimStep::Assign, pause(0, 0)),
    (ClaimStep::Announce, pause(2, 2)),
    (ClaimStep::Announce, pause(0, 0)),
];
/// DupAddrDetectTransmits and RetransTimer, as RFC 4862, section 5.1, and RFC 4861, section 10, have them.
const STEPS_V6: [(ClaimStep, Pause); 2] = [(ClaimStep::Probe, pause(1, 1)), (ClaimStep::Assign, pause(0, 0))];
/// DEFEND_INTERVAL of RFC 5227, section 1.1.
pub(super) const DEFEND_INTERVAL: Duration = Duration::from_secs(10);
/// How often it is looked whether a port is up.
pub(super) const LINK_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// An own address of a port's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    pub(super) network: IpNet,
    pub(super) state: ClaimState,
    steps_done: usize,
    /// When the next step is due.
    pub(super) due: Option<Time>,
    /// When somebody else used it last.
    pub(super) conflict: Option<Time>,
}

impl Claim {
    fn new(network: IpNet, first_due: Option<Time>) -> Claim {
        let state = if first_due.is_some() { ClaimState::Tentative } else { ClaimState::Assigned };
        Claim { network, state, steps_done: 0, due: first_due, conflict: None }
    }

    /// The next step; when the one after it is due is noted.
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

/// The addresses of a port that is told of them: those that it has already stay where they stand.
pub(super) fn new_claims(now: Time, config: &PortConfig, former: &[Claim], random: &mut Random) -> Vec<Claim> {
    let first_due = config.probes.then(|| now + random_delay(FIRST_PROBE_DELAY, random));
    let claim = |network: IpNet| {
        let same = former.iter().find(|former| former.network == network);
        same.copied().unwrap_or_else(|| Claim::new(network, first_due))
    };
    addresses_of(config).into_iter().map(claim).collect()
}

/// When the first step of those that are new is due.
pub(super) fn first_probe_due(claims: &[Claim]) -> Option<Time> {
    claims.iter().filter(|claim| claim.steps_done == 0).filter_map(|claim| claim.due).min()
}

/// Addresses of IPv6 that are used or looked for: those whose neighbours ask for them must be heard.
pub(super) fn listened_v6(claims: &[Claim]) -> impl Iterator<Item = Ipv6Addr> + '_ {
    claims.iter().filter(|claim| claim.state != ClaimState::Duplicate).filter_map(|claim| match claim.network.addr() {
        IpAddr::V6(address) => Some(address),
        IpAddr::V4(_) => None,
    })
}

/// Those that are used.
pub(super) fn assigned(claims: &[Claim]) -> Vec<IpNet> {
    claims.iter().filter(|claim| claim.state == ClaimState::Assigned).map(|claim| claim.network).collect()
}

/// A port's own addresses. One without a kernel gets a link-local address by its hardware address (RFC 4291, appendix
/// A) where none is given: neighbours must be able to ask for it.
fn addresses_of(config: &PortConfig) -> Vec<IpNet> {
    let mut addresses = config.addresses.clone();
    let is_link_local = |network: &IpNet| match network.addr() {
        IpAddr::V6(address) => address.is_unicast_link_local(),
        IpAddr::V4(_) => false,
    };
    let has_v6 = addresses.iter().any(|network| matches!(network, IpNet::V6(_)));
    if !config.has_kernel && has_v6 && !addresses.iter().any(is_link_local) {
        let [a, b, c, d, e, f] = config.mac.0.map(u16::from);
        let address = std::net::Ipv6Addr::new(0xfe80, 0, 0, 0, (a ^ 2) << 8 | b, c << 8 | 0xff, 0xfe00 | d, e << 8 | f);
        addresses.extend(IpNet::new(address.into(), 64));
    }
    addresses
}
