//! Neighbour discovery for IPv6 (RFC 4861, section 7.2).

use std::net::{IpAddr, Ipv6Addr};

use packet::ethernet::MacAddress;
use packet::{ipv6, ndisc};

use super::{Forwarder, Io, Origin};
use crate::counters::DropReason;
use crate::neighbour::{Heard, Link};
use crate::{Packet, PortId};

/// Where everybody on the link listens.
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// A message and what its packet said.
struct Said {
    message: ndisc::Message,
    source: Ipv6Addr,
}

impl Forwarder {
    /// A packet whose hop limit says that it was sent on the link.
    pub(super) fn receive_discovery(&mut self, io: &mut Io<'_>, packet: Packet, port: PortId) {
        let said = said(io.pool.bytes(&packet));
        let (Some(said), Some(link)) = (said, self.link(port)) else {
            return self.discard(io, packet, Origin::Port(port), DropReason::NeighbourDiscovery);
        };
        self.discard(io, packet, Origin::Port(port), DropReason::Noted);
        match said.message {
            ndisc::Message::NeighbourSolicitation { target, source_mac } => {
                self.solicited(io, port, &link, &said, target, source_mac);
            }
            ndisc::Message::NeighbourAdvertisement { target, solicited, override_known, target_mac, .. } => {
                let heard = (target, solicited, override_known);
                self.advertised(io, port, &link, heard, target_mac);
            }
            // Where hosts find routers is no affair of a router's forwarding.
            ndisc::Message::RouterSolicitation { .. } | ndisc::Message::RouterAdvertisement { .. } => {}
        }
    }

    fn solicited(
        &mut self,
        io: &mut Io<'_>,
        port: PortId,
        link: &Link,
        said: &Said,
        target: Ipv6Addr,
        source_mac: Option<MacAddress>,
    ) {
        // Who asks as nobody looks for an address that it would have itself.
        if said.source.is_unspecified() && self.give_up(io, port, target.into(), None) {
            return;
        }
        let is_for_us = self.addresses(port).iter().any(|own| own.addr() == IpAddr::V6(target));
        if !is_for_us {
            return;
        }
        if self.own.has(said.source.into()) {
            return self.defend(io, port, said.source.into(), source_mac);
        }
        let is_near = self.is_near_v6(port, said.source);
        if let Some(mac) = source_mac.filter(|mac| mac.is_unicast() && !said.source.is_unspecified()) {
            let (address, overrides) = (said.source.into(), true);
            let heard = Heard { port, address, mac, is_solicited: false, overrides, creates: is_near };
            self.neighbours.heard(io.now, &heard, link);
            self.act(io);
        }
        let has_kernel = self.port_config(port).is_none_or(|config| config.has_kernel);
        if !has_kernel && self.answers.take(io.now) {
            self.advertise(io, port, link, said.source, target);
        }
    }

    /// The answer: to all where somebody asked whether it may have the address itself.
    fn advertise(&mut self, io: &mut Io<'_>, port: PortId, link: &Link, to: Ipv6Addr, target: Ipv6Addr) {
        let is_probe = to.is_unspecified();
        let message = ndisc::Message::NeighbourAdvertisement {
            target,
            is_router: true,
            solicited: !is_probe,
            override_known: true,
            target_mac: Some(link.mac),
        };
        if is_probe {
            return self.send_discovery(io, port, &message, (target, ALL_NODES), None);
        }
        let known = self.neighbours.find(port, to.into()).and_then(|adjacency| self.neighbours.mac(adjacency));
        if let Some(mac) = known {
            self.send_discovery(io, port, &message, (target, to), Some(mac));
        }
    }

    fn advertised(
        &mut self,
        io: &mut Io<'_>,
        port: PortId,
        link: &Link,
        (target, is_solicited, overrides): (Ipv6Addr, bool, bool),
        target_mac: Option<MacAddress>,
    ) {
        if self.give_up(io, port, target.into(), target_mac) {
            return;
        }
        if self.own.has(target.into()) {
            if target_mac != Some(link.mac) {
                self.defend(io, port, target.into(), target_mac);
            }
            return;
        }
        let Some(adjacency) = self.neighbours.find(port, target.into()) else { return };
        let known = self.neighbours.mac(adjacency);
        let Some(mac) = target_mac.or(known).filter(|mac| mac.is_unicast()) else { return };
        let heard = Heard { port, address: target.into(), mac, is_solicited, overrides, creates: false };
        self.neighbours.heard(io.now, &heard, link);
        self.act(io);
    }

    fn is_near_v6(&self, port: PortId, address: Ipv6Addr) -> bool {
        address.is_unicast_link_local()
            || self.addresses(port).iter().any(|network| network.contains(&IpAddr::V6(address)))
    }
}

/// The message, when all holds together (RFC 4861, sections 7.1.1 and 7.1.2).
fn said(bytes: &[u8]) -> Option<Said> {
    let packet = ipv6::Packet::new_checked(bytes).ok()?;
    let (source, destination) = (packet.source(), packet.destination());
    let message = ndisc::Message::parse(packet.payload(), source, destination).ok()?;
    let is_sound = match message {
        ndisc::Message::NeighbourSolicitation { target, source_mac } if source.is_unspecified() => {
            destination == ndisc::solicited_node(target) && source_mac.is_none()
        }
        ndisc::Message::NeighbourAdvertisement { solicited, .. } => {
            !source.is_unspecified() && (!destination.is_multicast() || !solicited)
        }
        _ => true,
    };
    is_sound.then_some(Said { message, source })
}
