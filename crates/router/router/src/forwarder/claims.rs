//! Own addresses that are looked for on their network before they are used: by RFC 5227 for IPv4, and by RFC 4862,
//! section 5.4, for IPv6. An address that somebody else has, or looks for at the same time, is not used at all: two
//! nodes that answer for one address harm both. Where a port has a kernel, that is the kernel's to do.

use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use ipnet::IpNet;
use packet::ethernet::MacAddress;
use packet::{arp, ndisc};
use sim::Random;

use super::{Context, Forwarder, addresses_of};
use crate::config::PortConfig;
use crate::output::Event;
use crate::{PortId, Time};

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
enum ClaimStep {
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
const DEFEND_INTERVAL: Duration = Duration::from_secs(10);
/// How often it is looked whether a port is up.
const LINK_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// An own address of a port's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    network: IpNet,
    state: ClaimState,
    steps_done: usize,
    /// When the next step is due.
    due: Option<Time>,
    /// When somebody else used it last.
    conflict: Option<Time>,
}

impl Claim {
    fn new(network: IpNet, first_due: Option<Time>) -> Claim {
        let state = if first_due.is_some() { ClaimState::Tentative } else { ClaimState::Assigned };
        Claim { network, state, steps_done: 0, due: first_due, conflict: None }
    }

    /// The next step; when the one after it is due is noted.
    fn step(&mut self, now: Time, random: &mut Random) -> Option<ClaimStep> {
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

impl Forwarder {
    /// Own addresses that are not used, for they are looked for yet, or somebody else has them.
    pub fn unassigned_addresses(&self) -> impl Iterator<Item = (PortId, IpAddr, ClaimState)> + '_ {
        self.ports.iter().enumerate().flat_map(|(port, state)| {
            let unassigned = state.claims.iter().filter(|claim| claim.state != ClaimState::Assigned);
            unassigned.map(move |claim| (PortId(port as u8), claim.network.addr(), claim.state))
        })
    }

    /// Whether an address would be the node's own, if it were used.
    pub(super) fn is_unassigned(&self, address: IpAddr) -> bool {
        !self.local.has(address) && self.unassigned_addresses().any(|(_, unassigned, _)| unassigned == address)
    }

    pub(super) fn set_claims_due(&mut self) {
        let steps = self.ports.iter().flat_map(|port| &port.claims).filter_map(|claim| claim.due);
        self.claims_due = steps.chain(self.ports.iter().filter_map(|port| port.listener.due())).min();
    }

    /// Does what is due for own addresses.
    pub(super) fn run_claims(&mut self, ctx: &mut Context<'_>) {
        // Before whoever has an address can answer, what goes to its group must come through.
        self.send_due_reports(ctx);
        for port in (0..self.ports.len()).map(|port| PortId(port as u8)) {
            let is_up = self.mtus[usize::from(self.config.node.0)][usize::from(port.0)] > 0;
            for number in 0..self.ports[usize::from(port.0)].claims.len() {
                let claim = &mut self.ports[usize::from(port.0)].claims[number];
                if claim.due.is_none_or(|due| due > ctx.now) {
                    continue;
                }
                if !is_up {
                    claim.due = Some(ctx.now + LINK_CHECK_INTERVAL);
                    continue;
                }
                let (address, step) = (claim.network.addr(), claim.step(ctx.now, &mut self.random));
                match step {
                    Some(ClaimStep::Probe) => self.probe(ctx, port, address),
                    Some(ClaimStep::Assign) => self.assign(ctx, port, number),
                    Some(ClaimStep::Announce) => self.announce(ctx, port, address),
                    None => {}
                }
            }
        }
        self.set_claims_due();
    }

    /// Asks who has an address, as nobody, so that nobody learns of it.
    fn probe(&mut self, ctx: &mut Context<'_>, port: PortId, address: IpAddr) {
        let Some(l2) = self.l2(port) else { return };
        self.counters.solicitations_sent += 1;
        match address {
            IpAddr::V4(target) => {
                let probe = arp::Repr {
                    operation: arp::Operation::Request,
                    sender_mac: l2.mac,
                    sender: std::net::Ipv4Addr::UNSPECIFIED,
                    target_mac: MacAddress::default(),
                    target,
                };
                self.send_arp(ctx, port, &probe, MacAddress::BROADCAST);
            }
            IpAddr::V6(target) => {
                let probe = ndisc::Message::NeighbourSolicitation { target, source_mac: None };
                let way = (Ipv6Addr::UNSPECIFIED, ndisc::solicited_node(target));
                self.send_discovery(ctx, port, &probe, way, None);
            }
        }
    }

    fn assign(&mut self, ctx: &mut Context<'_>, port: PortId, number: usize) {
        let state = &mut self.ports[usize::from(port.0)];
        state.claims[number].state = ClaimState::Assigned;
        state.addresses = assigned(&state.claims);
        self.set_local();
        self.republish_neighbours(port, ctx.output);
    }

    /// Who knew an address of a former owner's learns of the new one (RFC 5227, section 2.3).
    fn announce(&mut self, ctx: &mut Context<'_>, port: PortId, address: IpAddr) {
        let (Some(l2), IpAddr::V4(own)) = (self.l2(port), address) else { return };
        let operation = arp::Operation::Request;
        let announcement =
            arp::Repr { operation, sender_mac: l2.mac, sender: own, target_mac: MacAddress::default(), target: own };
        self.send_arp(ctx, port, &announcement, MacAddress::BROADCAST);
    }

    /// Somebody else has an address, or looks for it too. Whether it is one that this node looks for: it is given up.
    pub(super) fn yield_tentative(
        &mut self,
        ctx: &mut Context<'_>,
        port: PortId,
        address: IpAddr,
        mac: Option<MacAddress>,
    ) -> bool {
        let Some(state) = self.ports.get_mut(usize::from(port.0)) else { return false };
        let is_it = |claim: &&mut Claim| claim.state == ClaimState::Tentative && claim.network.addr() == address;
        let Some(claim) = state.claims.iter_mut().find(is_it) else { return false };
        (claim.state, claim.due) = (ClaimState::Duplicate, None);
        self.counters.address_conflicts += 1;
        self.set_claims_due();
        ctx.output.push_event(Event::Duplicate { port, address, mac });
        true
    }

    /// Somebody else uses an address that this node uses. A router keeps it, for its hosts know no other way: it is
    /// announced once more, unless there was another conflict just before, for two that keep on announcing help nobody
    /// (RFC 5227, section 2.4 c). RFC 4862 has nothing like it for IPv6.
    pub(super) fn defend(&mut self, ctx: &mut Context<'_>, port: PortId, address: IpAddr, mac: Option<MacAddress>) {
        self.counters.address_conflicts += 1;
        let Some(state) = self.ports.get_mut(usize::from(port.0)) else { return };
        let is_it = |claim: &&mut Claim| claim.state == ClaimState::Assigned && claim.network.addr() == address;
        let Some(claim) = state.claims.iter_mut().find(is_it) else { return };
        let before = claim.conflict.replace(ctx.now);
        if before.is_some_and(|before| ctx.now < before + DEFEND_INTERVAL) {
            return;
        }
        ctx.output.push_event(Event::Conflict { port, address, mac });
        // Where a port has a kernel, that is the kernel's to do.
        if state.config.as_ref().is_some_and(|config| !config.has_kernel) {
            self.announce(ctx, port, address);
        }
    }
}
