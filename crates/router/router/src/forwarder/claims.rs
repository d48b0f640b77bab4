//! Own addresses that are looked for on their network before they are used: by RFC 5227 for IPv4, and by RFC 4862,
//! section 5.4, for IPv6. An address that somebody else has, or looks for at the same time, is not used at all: two
//! nodes that answer for one address harm both. Where a port has a kernel, that is the kernel's to do.

use std::net::{IpAddr, Ipv6Addr};

use packet::ethernet::MacAddress;
use packet::{arp, ndisc};

use super::claim::{Claim, ClaimState, ClaimStep, DEFEND_INTERVAL, LINK_CHECK_INTERVAL, assigned};
use super::{Context, Forwarder};
use crate::PortId;
use crate::output::Event;

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
