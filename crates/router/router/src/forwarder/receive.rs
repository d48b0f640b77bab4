//! Frames and packets that the fast path left aside: taken apart slowly, and told why when they go no further.

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
use crate::{Packet, PortId};

/// What is to be done with an intact packet.
enum Verdict {
    /// It is forwarded, or is for this node.
    Forward,
    /// It has IPv4 options, which are looked at first.
    Options,
    /// It is neighbour discovery.
    Discovery,
    /// It asks who listens to groups.
    Query,
    /// It is for a link-local address of the port's own.
    LocalLinkLocal,
}

impl Forwarder {
    /// A whole frame that is not usual.
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
            self.counters.ports[usize::from(of.0)].received.add(packet.len());
        }
        let port = of;
        let origin = Origin::Port(port);
        let is_group = !destination.is_unicast();
        if !is_group && self.l2(port).is_none_or(|l2| l2.mac != destination) {
            return self.discard(ctx, packet, origin, DropReason::OtherMac);
        }
        // What a bridge or a group brings back says nothing of others (RFC 4862, section 5.4.3).
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

    /// The port that frames of this VLAN are of; 0 is a tag that names none.
    fn port_of_tag(&self, port: PortId, id: u16) -> Option<PortId> {
        if id == 0 {
            return Some(port);
        }
        let state = &self.ports[usize::from(port.0)];
        let (_, of) = state.vlans.iter().find(|(of_id, _)| *of_id == id)?;
        Some(*of)
    }

    /// An IP packet that came without a frame.
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
                // Without what padded the frame.
                ctx.pool.resize(&mut packet, bytes);
                verdict
            }
            Err(reason) => return self.discard(ctx, packet, origin, reason),
        };
        match (verdict, origin) {
            (Verdict::Forward, _) => self.forward(ctx, packet, origin, None),
            (Verdict::Options, _) => self.receive_options(ctx, packet, origin),
            (Verdict::Discovery, Origin::Port(port)) => self.receive_discovery(ctx, packet, port),
            (Verdict::Query, Origin::Port(port)) => self.receive_query(ctx, packet, port),
            (Verdict::LocalLinkLocal, Origin::Port(port)) => self.deliver_link_local(ctx, packet, port),
            _ => self.discard(ctx, packet, origin, DropReason::LinkLocal),
        }
    }

    /// RFC 1812, sections 4.2.2.11, 5.2.2, 5.3.4 and 5.3.7. With the packet's true length.
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

    /// RFC 8200, section 3, and RFC 4291, section 2.
    fn check_v6(&self, bytes: &[u8], origin: Origin, is_group: bool) -> Result<(Verdict, usize), DropReason> {
        let packet =
            ipv6::Packet::new_checked(bytes).map_err(|error| drop_reason_of(error, bytes, ipv6::HEADER_BYTES))?;
        if packet.payload_bytes() == 0 && packet.next_header() == Protocol(0) {
            return Err(DropReason::TotalLength);
        }
        let (source, destination) = (packet.source(), packet.destination());
        let is_near = destination.is_multicast() || destination.is_unicast_link_local();
        if source.is_multicast() || source.is_loopback() {
            return Err(DropReason::MartianSource);
        }
        // Before own sources are: who uses an address of ours says so as that address.
        if is_near && is_discovery(&packet) {
            return Ok((Verdict::Discovery, packet.total_bytes()));
        }
        // To whichever address of the port (RFC 3810, section 5.1.15).
        if Query::parse(&packet).is_some() && (is_near || self.is_of_port(origin, destination)) {
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

    /// Whether it is an address of the port that the packet came in at.
    fn is_of_port(&self, origin: Origin, address: Ipv6Addr) -> bool {
        matches!(origin, Origin::Port(port) if self.addresses(port).iter().any(|own| own.addr() == address))
    }

    /// Options are done here, whoever is next to have the packet.
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

/// Whether it is a message of neighbour discovery that came over no router (RFC 4861, section 6.1 and 7.1).
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
