//! Reception of ARP (RFC 826, RFC 5227).

use std::net::IpAddr;

use packet::arp;

use super::send::is_broadcast;
use super::{Context, Forwarder, Origin};
use crate::counters::DropReason;
use crate::local_addresses::is_martian_source_v4;
use crate::neighbour::{NeighbourUpdate, PortL2};
use crate::{Packet, PortId};

impl Forwarder {
    /// Processes an ARP packet.
    pub(super) fn receive_arp(&mut self, ctx: &mut Context<'_>, packet: Packet, port: PortId) {
        let message = arp::Packet::new_checked(ctx.pool.bytes(&packet)).map(|view| arp::Repr::parse(&view));
        let (Ok(message), Some(l2)) = (message, self.l2(port)) else {
            return self.discard(ctx, packet, Origin::Port(port), DropReason::Arp);
        };
        self.discard(ctx, packet, Origin::Port(port), DropReason::Consumed);
        if message.sender_mac == l2.mac || !message.sender_mac.is_unicast() {
            return;
        }
        // A request from the unspecified address is a probe: its sender claims the target address.
        let is_probe = message.sender.is_unspecified() && message.operation == arp::Operation::Request;
        let claimed = if is_probe { message.target } else { message.sender };
        if self.yield_tentative(ctx, port, claimed.into(), Some(message.sender_mac)) {
            return;
        }
        if self.local.has(message.sender.into()) {
            return self.defend(ctx, port, message.sender.into(), Some(message.sender_mac));
        }
        let is_for_us = self.addresses(port).iter().any(|own| own.addr() == IpAddr::V4(message.target));
        if is_for_us || self.neighbours.find(port, message.sender.into()).is_some() {
            self.learn_arp(ctx, port, &message, &l2, is_for_us);
        }
        if is_for_us && message.operation == arp::Operation::Request {
            self.reply_arp(ctx, port, &message, &l2);
        }
    }

    fn learn_arp(&mut self, ctx: &mut Context<'_>, port: PortId, message: &arp::Repr, l2: &PortL2, is_for_us: bool) {
        let address = IpAddr::V4(message.sender);
        let is_on_link = self.addresses(port).iter().any(|network| network.contains(&address));
        // No host has a broadcast address; a host that claims one would receive directed broadcasts.
        let is_broadcast = self.addresses(port).iter().any(|network| is_broadcast(network, address));
        if is_broadcast || is_martian_source_v4(message.sender) {
            return;
        }
        let is_reply = message.operation == arp::Operation::Reply;
        let update = NeighbourUpdate {
            port,
            address,
            mac: message.sender_mac,
            is_solicited: is_reply && is_for_us && message.target_mac == l2.mac,
            overrides: true,
            creates: is_on_link && is_for_us,
            is_configured: false,
        };
        self.neighbours.update(ctx.now, &update, l2);
        self.run_neighbour_actions(ctx);
    }

    fn reply_arp(&mut self, ctx: &mut Context<'_>, port: PortId, request: &arp::Repr, l2: &PortL2) {
        let has_kernel = self.port_config(port).is_none_or(|config| config.has_kernel);
        if has_kernel || !self.may_advertise(ctx.now, port) {
            return;
        }
        let reply = arp::Repr {
            operation: arp::Operation::Reply,
            sender_mac: l2.mac,
            sender: request.target,
            target_mac: request.sender_mac,
            target: request.sender,
        };
        self.send_arp(ctx, port, &reply, request.sender_mac);
    }
}
