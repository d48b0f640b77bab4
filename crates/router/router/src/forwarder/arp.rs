//! ARP (RFC 826, RFC 5227).

use std::net::IpAddr;

use packet::arp;

use super::send::is_broadcast;
use super::{Forwarder, Io, Origin};
use crate::counters::DropReason;
use crate::neighbour::{Heard, Link};
use crate::own::is_martian_source_v4;
use crate::{Packet, PortId};

impl Forwarder {
    /// What follows a frame's header.
    pub(super) fn receive_arp(&mut self, io: &mut Io<'_>, packet: Packet, port: PortId) {
        let message = arp::Packet::new_checked(io.pool.bytes(&packet)).map(|view| arp::Repr::parse(&view));
        let (Ok(message), Some(link)) = (message, self.link(port)) else {
            return self.discard(io, packet, Origin::Port(port), DropReason::Arp);
        };
        self.discard(io, packet, Origin::Port(port), DropReason::Noted);
        if message.sender_mac == link.mac || !message.sender_mac.is_unicast() {
            return;
        }
        // Who asks as nobody looks for an address that it would have itself.
        let is_probe = message.sender.is_unspecified() && message.operation == arp::Operation::Request;
        let claimed = if is_probe { message.target } else { message.sender };
        if self.give_up(io, port, claimed.into(), Some(message.sender_mac)) {
            return;
        }
        if self.own.has(message.sender.into()) {
            return self.defend(io, port, message.sender.into(), Some(message.sender_mac));
        }
        let is_for_us = self.addresses(port).iter().any(|own| own.addr() == IpAddr::V4(message.target));
        if is_for_us || self.neighbours.find(port, message.sender.into()).is_some() {
            self.hear_arp(io, port, &message, &link, is_for_us);
        }
        if is_for_us && message.operation == arp::Operation::Request {
            self.answer_arp(io, port, &message, &link);
        }
    }

    fn hear_arp(&mut self, io: &mut Io<'_>, port: PortId, message: &arp::Repr, link: &Link, is_for_us: bool) {
        let address = IpAddr::V4(message.sender);
        let is_near = self.addresses(port).iter().any(|network| network.contains(&address));
        // Nobody has the address of all on a network: who says so would be sent what is for nobody.
        let is_group = self.addresses(port).iter().any(|network| is_broadcast(network, address));
        if is_group || is_martian_source_v4(message.sender) {
            return;
        }
        let is_reply = message.operation == arp::Operation::Reply;
        let heard = Heard {
            port,
            address,
            mac: message.sender_mac,
            is_solicited: is_reply && is_for_us && message.target_mac == link.mac,
            overrides: true,
            creates: is_near && is_for_us,
        };
        self.neighbours.heard(io.now, &heard, link);
        self.act(io);
    }

    fn answer_arp(&mut self, io: &mut Io<'_>, port: PortId, request: &arp::Repr, link: &Link) {
        let has_kernel = self.port_config(port).is_none_or(|config| config.has_kernel);
        if has_kernel || !self.answers.take(io.now) {
            return;
        }
        let reply = arp::Repr {
            operation: arp::Operation::Reply,
            sender_mac: link.mac,
            sender: request.target,
            target_mac: request.sender_mac,
            target: request.sender,
        };
        self.send_arp(io, port, &reply, request.sender_mac);
    }
}
