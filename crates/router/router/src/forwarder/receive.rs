//! Reception of exception packets: validates them completely, and determines why they are dropped.

use std::net::{IpAddr, Ipv6Addr};

use packet::ethernet::{EtherType, Frame};
use packet::mld::Query;
use packet::{Error, Protocol, icmpv6, ipv4, ipv6, ndisc};

use super::icmp_error::IcmpError;
use super::options::{self, OptionsError};
use super::{Context, Forwarder, Origin};
use crate::counters::DropReason;
use crate::local_addresses::{is_martian_destination_v4, is_martian_source_v4, is_martian_v6};
use crate::trace::Step;
use crate::{Packet, PortId, TransitPath};

/// How a valid packet is processed.
enum Verdict {
    /// Looked up: forwarded or delivered.
    Forward,
    /// IPv4 options are processed first.
    Options,
    /// Neighbour discovery.
    Discovery,
    /// MLD query.
    Query,
    /// Delivered to a link-local address of the port.
    LocalLinkLocal,
}

impl Forwarder {
    /// Receives a frame of the slow path.
    pub(super) fn receive_frame(&mut self, ctx: &mut Context<'_>, mut packet: Packet, port: PortId) {
        let origin = Origin::Port(port);
        let Ok(frame) = Frame::new_checked(ctx.pool.bytes(&packet)) else {
            return self.discard(ctx, packet, origin, DropReason::Truncated);
        };
        let Ok(network) = frame.network_header() else {
            return self.discard(ctx, packet, origin, DropReason::Truncated);
        };
        let (destination, source) = (frame.destination(), frame.source());
        let Some(of) = self.port_of_tag(port, network.tag.map_or(0, |tag| tag.id)) else {
            return self.discard(ctx, packet, origin, DropReason::Vlan);
        };
        if of != port {
            self.counters.ports[usize::from(of.0)].received.add(packet.on_wire(network.offset));
        }
        let port = of;
        let origin = Origin::Port(port);
        let is_group = !destination.is_unicast();
        if !is_group && self.l2(port).is_none_or(|l2| l2.mac != destination) {
            return self.discard(ctx, packet, origin, DropReason::OtherMac);
        }
        // Our own messages that a bridge or a group reflects carry no information (RFC 4862, section 5.4.3).
        let is_own = self.l2(port).is_some_and(|l2| l2.mac == source);
        ctx.pool.trim_front(&mut packet, network.offset as u16);
        match network.ethertype {
            EtherType::ARP => self.receive_arp(ctx, packet, port),
            EtherType::IPV4 => {
                self.trace_step(ctx, &packet, Step::Received(port));
                let verdict = self.check_v4(ctx.pool.bytes(&packet), origin, is_group);
                self.receive_checked(ctx, packet, origin, verdict);
            }
            EtherType::IPV6 => {
                self.trace_step(ctx, &packet, Step::Received(port));
                let verdict = self.check_v6(ctx.pool.bytes(&packet), origin, is_group);
                if is_own && matches!(verdict, Ok((Verdict::Discovery, _))) {
                    return self.discard(ctx, packet, origin, DropReason::Consumed);
                }
                self.receive_checked(ctx, packet, origin, verdict);
            }
            EtherType::VLAN | EtherType::SERVICE_VLAN => self.discard(ctx, packet, origin, DropReason::Vlan),
            _ => self.discard(ctx, packet, origin, DropReason::EtherType),
        }
    }

    /// Returns the port to which frames of this VLAN belong; 0 marks a priority tag without a VLAN.
    fn port_of_tag(&self, port: PortId, id: u16) -> Option<PortId> {
        if id == 0 {
            return Some(port);
        }
        let state = &self.ports[usize::from(port.0)];
        let (_, of) = state.vlans.iter().find(|(of_id, _)| *of_id == id)?;
        Some(*of)
    }

    /// Receives an IP packet without a frame.
    pub(super) fn receive_ip(&mut self, ctx: &mut Context<'_>, packet: Packet, origin: Origin) {
        let bytes = ctx.pool.bytes(&packet);
        let verdict = match bytes.first().map(|first| first >> 4) {
            Some(4) => self.check_v4(bytes, origin, false),
            Some(6) => self.check_v6(bytes, origin, false),
            Some(_) => Err(DropReason::Version),
            None => Err(DropReason::Truncated),
        };
        self.receive_checked(ctx, packet, origin, verdict);
    }

    fn receive_checked(
        &mut self,
        ctx: &mut Context<'_>,
        mut packet: Packet,
        origin: Origin,
        verdict: Result<(Verdict, usize), DropReason>,
    ) {
        let verdict = match verdict {
            Ok((verdict, bytes)) => {
                // Removes the padding of the frame.
                ctx.pool.resize(&mut packet, bytes);
                verdict
            }
            Err(reason) => return self.discard(ctx, packet, origin, reason),
        };
        match (verdict, origin) {
            (Verdict::Forward, _) => self.forward(ctx, packet, origin, None),
            // The kernel, or another path that has them, processes the options.
            (Verdict::Options, Origin::Port(_)) if self.transit != TransitPath::Router => {
                self.forward(ctx, packet, origin, None)
            }
            (Verdict::Options, _) => self.receive_options(ctx, packet, origin),
            (Verdict::Discovery, Origin::Port(port)) => self.receive_discovery(ctx, packet, port),
            (Verdict::Query, Origin::Port(port)) => self.receive_query(ctx, packet, port),
            (Verdict::LocalLinkLocal, Origin::Port(port)) => self.deliver_link_local(ctx, packet, port),
            _ => self.discard(ctx, packet, origin, DropReason::LinkLocal),
        }
    }

    /// Validates an IPv4 packet (RFC 1812, sections 4.2.2.11, 5.2.2, 5.3.4 and 5.3.7). Also returns its length.
    fn check_v4(&self, bytes: &[u8], origin: Origin, is_group: bool) -> Result<(Verdict, usize), DropReason> {
        let packet =
            ipv4::Packet::new_checked(bytes).map_err(|error| drop_reason_of(error, bytes, ipv4::HEADER_BYTES))?;
        if !packet.verify_checksum() {
            return Err(DropReason::Checksum);
        }
        let (source, destination) = (packet.source(), packet.destination());
        if is_martian_source_v4(source) {
            return Err(DropReason::MartianSource);
        }
        self.check_source(source.into(), origin)?;
        if matches!(origin, Origin::Port(_)) && self.local.has_broadcast(source) {
            return Err(DropReason::MartianSource);
        }
        if destination.is_multicast() {
            return Err(DropReason::Multicast);
        }
        if destination.is_broadcast() {
            return Err(DropReason::Broadcast);
        }
        if is_martian_destination_v4(destination) {
            return Err(DropReason::MartianDestination);
        }
        if is_group {
            return Err(DropReason::LinkBroadcast);
        }
        let verdict = if packet.has_options() { Verdict::Options } else { Verdict::Forward };
        Ok((verdict, packet.total_bytes()))
    }

    fn check_source(&self, source: IpAddr, origin: Origin) -> Result<(), DropReason> {
        let is_from_outside = matches!(origin, Origin::Port(_));
        if is_from_outside && self.local.has(source) { Err(DropReason::OwnSource) } else { Ok(()) }
    }

    /// Validates an IPv6 packet (RFC 8200, section 3; RFC 4291, section 2). Also returns its length.
    fn check_v6(&self, bytes: &[u8], origin: Origin, is_group: bool) -> Result<(Verdict, usize), DropReason> {
        let packet =
            ipv6::Packet::new_checked(bytes).map_err(|error| drop_reason_of(error, bytes, ipv6::HEADER_BYTES))?;
        if packet.payload_bytes() == 0 && packet.next_header() == Protocol(0) {
            return Err(DropReason::TotalLength);
        }
        let (source, destination) = (packet.source(), packet.destination());
        let is_on_link = destination.is_multicast() || destination.is_unicast_link_local();
        if source.is_multicast() || source.is_loopback() {
            return Err(DropReason::MartianSource);
        }
        // Checked before local source addresses are rejected: a conflicting host sends from an address of ours.
        if is_on_link && is_discovery(&packet) {
            return Ok((Verdict::Discovery, packet.total_bytes()));
        }
        // Queries are accepted at any address of the port (RFC 3810, section 5.1.15).
        if Query::parse(&packet).is_some() && (is_on_link || self.is_of_port(origin, destination)) {
            return Ok((Verdict::Query, packet.total_bytes()));
        }
        self.check_source(source.into(), origin)?;
        if destination.is_multicast() {
            return Err(DropReason::Multicast);
        }
        if is_martian_v6(source) {
            return Err(DropReason::MartianSource);
        }
        if is_martian_v6(destination) {
            return Err(DropReason::MartianDestination);
        }
        if is_group {
            return Err(DropReason::LinkBroadcast);
        }
        if !destination.is_unicast_link_local() {
            return Ok((Verdict::Forward, packet.total_bytes()));
        }
        if self.is_of_port(origin, destination) {
            Ok((Verdict::LocalLinkLocal, packet.total_bytes()))
        } else {
            Err(DropReason::LinkLocal)
        }
    }

    /// Returns whether an address is assigned to the ingress port.
    fn is_of_port(&self, origin: Origin, address: Ipv6Addr) -> bool {
        matches!(origin, Origin::Port(port) if self.addresses(port).iter().any(|own| own.addr() == address))
    }

    /// Processes the options of a packet, then forwards it.
    fn receive_options(&mut self, ctx: &mut Context<'_>, packet: Packet, origin: Origin) {
        let own = self.source_v4(origin);
        let bytes = ctx.pool.bytes_mut(&packet);
        match options::process(bytes, own, ctx.now) {
            Ok(()) => self.forward(ctx, packet, origin, None),
            Err(OptionsError::SourceRoute) => {
                self.send_icmp_error(ctx, &packet, origin, IcmpError::SourceRouteFailed);
                self.discard(ctx, packet, origin, DropReason::SourceRoute);
            }
            Err(OptionsError::Malformed { pointer }) => {
                self.send_icmp_error(ctx, &packet, origin, IcmpError::Parameter { pointer });
                self.discard(ctx, packet, origin, DropReason::Options);
            }
        }
    }
}

/// Returns whether a packet is a neighbour discovery message that crossed no router (RFC 4861, sections 6.1 and 7.1).
pub(super) fn is_discovery<T: AsRef<[u8]>>(packet: &ipv6::Packet<T>) -> bool {
    packet.next_header() == Protocol::ICMPV6
        && packet.hop_limit() == ndisc::HOP_LIMIT
        && icmpv6::Packet::new_checked(packet.payload())
            .is_ok_and(|message| (ndisc::ROUTER_SOLICITATION..=137).contains(&message.kind()))
}

fn drop_reason_of(error: Error, bytes: &[u8], header_bytes: usize) -> DropReason {
    match error {
        Error::Truncated { .. } if bytes.len() < header_bytes => DropReason::Truncated,
        Error::Version { .. } => DropReason::Version,
        Error::HeaderLength { .. } => DropReason::HeaderLength,
        _ => DropReason::TotalLength,
    }
}
