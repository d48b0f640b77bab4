//! Duplicate address detection for the router's own addresses: RFC 5227 for IPv4, and RFC 4862, section 5.4, for IPv6.
//! An address that another host uses, or probes for at the same time, is not used: two nodes that answer for one
//! address harm both. On ports with a kernel, the kernel does this.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use packet::ethernet::MacAddress;
use packet::{arp, ndisc};

use super::claim::{Claim, ClaimState, ClaimStep, DEFEND_INTERVAL, LINK_CHECK_INTERVAL, assigned};
use super::{Context, Forwarder};
use crate::PortId;
use crate::output::Event;

impl Forwarder {
    /// Iterates over the configured addresses that are not in use: tentative and duplicate ones.
    pub fn unassigned_addresses(&self) -> impl Iterator<Item = (PortId, IpAddr, ClaimState)> + '_ {
        self.ports.iter().enumerate().flat_map(|(port, state)| {
            let unassigned = state.claims.iter().filter(|claim| claim.state != ClaimState::Assigned);
            unassigned.map(move |claim| (PortId(port as u8), claim.network.addr(), claim.state))
        })
    }

    /// Returns whether an address is configured, but not in use.
    pub(super) fn is_unassigned(&self, address: IpAddr) -> bool {
        !self.local.has(address) && self.unassigned_addresses().any(|(_, unassigned, _)| unassigned == address)
    }

    pub(super) fn set_claims_due(&mut self) {
        let steps = self.ports.iter().flat_map(|port| &port.claims).filter_map(|claim| claim.due);
        self.claims_due = steps.chain(self.ports.iter().filter_map(|port| port.listener.due())).min();
    }

    /// Runs the due steps of claims and of MLD listeners.
    pub(super) fn run_claims(&mut self, ctx: &mut Context<'_>) {
        // Join groups first: the answer to a probe goes to the solicited-node group.
        self.send_due_reports(ctx);
        for port in (0..self.ports.len()).map(|port| PortId(port as u8)) {
            let is_up = self.is_port_up(port);
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

    /// Sends a probe for an address from the unspecified address, so that no host learns a binding from it.
    fn probe(&mut self, ctx: &mut Context<'_>, port: PortId, address: IpAddr) {
        let Some(l2) = self.l2(port) else { return };
        self.counters.solicitations_sent += 1;
        match address {
            IpAddr::V4(target) => {
                let probe = arp::Repr {
                    operation: arp::Operation::Request,
                    sender_mac: l2.mac,
                    sender: Ipv4Addr::UNSPECIFIED,
                    target_mac: MacAddress::default(),
                    target,
                };
                self.send_arp(ctx, port, &probe, MacAddress::BROADCAST);
            }
            IpAddr::V6(target) => {
                let probe = ndisc::Message::NeighbourSolicitation { target, source_mac: None };
                let addresses = (Ipv6Addr::UNSPECIFIED, ndisc::solicited_node(target));
                self.send_discovery(ctx, port, &probe, addresses, None);
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

    /// Announces an IPv4 address, so that hosts update bindings to a former owner (RFC 5227, section 2.3).
    fn announce(&mut self, ctx: &mut Context<'_>, port: PortId, address: IpAddr) {
        let (Some(l2), IpAddr::V4(own)) = (self.l2(port), address) else { return };
        let operation = arp::Operation::Request;
        let announcement =
            arp::Repr { operation, sender_mac: l2.mac, sender: own, target_mac: MacAddress::default(), target: own };
        self.send_arp(ctx, port, &announcement, MacAddress::BROADCAST);
    }

    /// Gives up an address that another host uses or probes for, if its claim is tentative. Returns whether it was.
    pub(super) fn yield_tentative(
        &mut self,
        ctx: &mut Context<'_>,
        port: PortId,
        address: IpAddr,
        mac: Option<MacAddress>,
    ) -> bool {
        let Some(state) = self.ports.get_mut(usize::from(port.0)) else { return false };
        let matches = |claim: &&mut Claim| claim.state == ClaimState::Tentative && claim.network.addr() == address;
        let Some(claim) = state.claims.iter_mut().find(matches) else { return false };
        (claim.state, claim.due) = (ClaimState::Duplicate, None);
        self.counters.address_conflicts += 1;
        self.set_claims_due();
        ctx.output.push_event(Event::Duplicate { port, address, mac });
        true
    }

    /// Handles a conflict about an address in use. A router keeps the address, because its hosts depend on it, and
    /// announces it once; not if another conflict occurred just before, so that two hosts do not announce in turn
    /// forever (RFC 5227, section 2.4 c). RFC 4862 has no equivalent for IPv6.
    pub(super) fn defend(&mut self, ctx: &mut Context<'_>, port: PortId, address: IpAddr, mac: Option<MacAddress>) {
        self.counters.address_conflicts += 1;
        let Some(state) = self.ports.get_mut(usize::from(port.0)) else { return };
        let matches = |claim: &&mut Claim| claim.state == ClaimState::Assigned && claim.network.addr() == address;
        let Some(claim) = state.claims.iter_mut().find(matches) else { return };
        let before = claim.conflict.replace(ctx.now);
        if before.is_some_and(|before| ctx.now < before + DEFEND_INTERVAL) {
            return;
        }
        ctx.output.push_event(Event::Conflict { port, address, mac });
        // On a port with a kernel, the kernel defends its addresses.
        if state.config.as_ref().is_some_and(|config| !config.has_kernel) {
            self.announce(ctx, port, address);
        }
    }
}
