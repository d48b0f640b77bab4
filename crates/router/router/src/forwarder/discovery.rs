//! Reception of neighbour discovery for IPv6 (RFC 4861, section 7.2).

use std::net::{IpAddr, Ipv6Addr};

use packet::ethernet::MacAddress;
use packet::{ipv6, ndisc};

use super::{Context, Forwarder, Origin};
use crate::counters::DropReason;
use crate::neighbour::{NeighbourUpdate, PortL2};
use crate::{Packet, PortId, Time};

/// The all-nodes multicast address.
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// A message and the source address of its packet.
struct ReceivedMessage {
    message: ndisc::Message,
    source: Ipv6Addr,
}

impl Forwarder {
    /// Processes a neighbour discovery packet, whose hop limit the caller has checked.
    pub(super) fn receive_discovery(&mut self, ctx: &mut Context<'_>, packet: Packet, port: PortId) {
        let received = parse_valid(ctx.pool.bytes(&packet));
        let (Some(received), Some(l2)) = (received, self.l2(port)) else {
            return self.discard(ctx, packet, Origin::Port(port), DropReason::NeighbourDiscovery);
        };
        self.discard(ctx, packet, Origin::Port(port), DropReason::Consumed);
        match received.message {
            ndisc::Message::NeighbourSolicitation { target, source_mac } => {
                self.handle_solicitation(ctx, port, &l2, &received, target, source_mac);
            }
            ndisc::Message::NeighbourAdvertisement { target, solicited, override_known, target_mac, .. } => {
                let update = (target, solicited, override_known);
                self.handle_advertisement(ctx, port, &l2, update, target_mac);
            }
            // Router discovery is outside the scope of forwarding.
            ndisc::Message::RouterSolicitation { .. } | ndisc::Message::RouterAdvertisement { .. } => {}
        }
    }

    fn handle_solicitation(
        &mut self,
        ctx: &mut Context<'_>,
        port: PortId,
        l2: &PortL2,
        received: &ReceivedMessage,
        target: Ipv6Addr,
        source_mac: Option<MacAddress>,
    ) {
        // A solicitation from the unspecified address is a probe: its sender claims the target address.
        if received.source.is_unspecified() && self.yield_tentative(ctx, port, target.into(), None) {
            return;
        }
        let is_for_us = self.addresses(port).iter().any(|own| own.addr() == IpAddr::V6(target));
        if !is_for_us {
            return;
        }
        if self.local.has(received.source.into()) {
            return self.defend(ctx, port, received.source.into(), source_mac);
        }
        let is_on_link = self.is_on_link_v6(port, received.source);
        if let Some(mac) = source_mac.filter(|mac| mac.is_unicast() && !received.source.is_unspecified()) {
            let (address, overrides) = (received.source.into(), true);
            let (is_solicited, creates, is_configured) = (false, is_on_link, false);
            let update = NeighbourUpdate { port, address, mac, is_solicited, overrides, creates, is_configured };
            self.neighbours.update(ctx.now, &update, l2);
            self.run_neighbour_actions(ctx);
        }
        let has_kernel = self.port_config(port).is_none_or(|config| config.has_kernel);
        if !has_kernel && self.may_advertise(ctx.now, port) {
            self.advertise(ctx, port, l2, (received.source, source_mac), target);
        }
    }

    /// Takes a token for an ARP reply or a neighbour advertisement.
    pub(super) fn may_advertise(&mut self, now: Time, port: PortId) -> bool {
        self.ports.get_mut(usize::from(port.0)).is_some_and(|state| state.advertisements.take(now))
    }

    /// Answers a solicitation: to all nodes if it was a probe. The neighbour table need not know the host that asks,
    /// as there may be no room for it.
    fn advertise(
        &mut self,
        ctx: &mut Context<'_>,
        port: PortId,
        l2: &PortL2,
        (to, to_mac): (Ipv6Addr, Option<MacAddress>),
        target: Ipv6Addr,
    ) {
        let is_probe = to.is_unspecified();
        let message = ndisc::Message::NeighbourAdvertisement {
            target,
            is_router: true,
            solicited: !is_probe,
            override_known: true,
            target_mac: Some(l2.mac),
        };
        if is_probe {
            return self.send_discovery(ctx, port, &message, (target, ALL_NODES), None);
        }
        let known = self.neighbours.find(port, to.into()).and_then(|adjacency| self.neighbours.mac(adjacency));
        if let Some(mac) = to_mac.filter(|mac| mac.is_unicast()).or(known) {
            self.send_discovery(ctx, port, &message, (target, to), Some(mac));
        }
    }

    fn handle_advertisement(
        &mut self,
        ctx: &mut Context<'_>,
        port: PortId,
        l2: &PortL2,
        (target, is_solicited, overrides): (Ipv6Addr, bool, bool),
        target_mac: Option<MacAddress>,
    ) {
        if self.yield_tentative(ctx, port, target.into(), target_mac) {
            return;
        }
        if self.local.has(target.into()) {
            if target_mac != Some(l2.mac) {
                self.defend(ctx, port, target.into(), target_mac);
            }
            return;
        }
        let Some(adjacency) = self.neighbours.find(port, target.into()) else { return };
        let known = self.neighbours.mac(adjacency);
        let Some(mac) = target_mac.or(known).filter(|mac| mac.is_unicast()) else { return };
        let (address, creates, is_configured) = (target.into(), false, false);
        let update = NeighbourUpdate { port, address, mac, is_solicited, overrides, creates, is_configured };
        self.neighbours.update(ctx.now, &update, l2);
        self.run_neighbour_actions(ctx);
    }

    fn is_on_link_v6(&self, port: PortId, address: Ipv6Addr) -> bool {
        address.is_unicast_link_local()
            || self.addresses(port).iter().any(|network| network.contains(&IpAddr::V6(address)))
    }
}

/// Parses and validates a message (RFC 4861, sections 7.1.1 and 7.1.2).
fn parse_valid(bytes: &[u8]) -> Option<ReceivedMessage> {
    let packet = ipv6::Packet::new_checked(bytes).ok()?;
    let (source, destination) = (packet.source(), packet.destination());
    let message = ndisc::Message::parse(packet.payload(), source, destination).ok()?;
    let is_valid = match message {
        ndisc::Message::NeighbourSolicitation { target, source_mac } if source.is_unspecified() => {
            destination == ndisc::solicited_node(target) && source_mac.is_none()
        }
        ndisc::Message::NeighbourAdvertisement { solicited, .. } => {
            !source.is_unspecified() && (!destination.is_multicast() || !solicited)
        }
        _ => true,
    };
    is_valid.then_some(ReceivedMessage { message, source })
}
