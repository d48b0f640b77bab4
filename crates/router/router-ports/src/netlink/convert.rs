//! Conversion of the library's messages to the model of the router. `None` is returned for what the router does not
//! use.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkLayerType, LinkMessage};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState as Nud,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteNextHop, RouteProtocol,
    RouteType, RouteVia,
};

use packet::ethernet::MacAddress;

use super::model::{
    Address, Link, Neighbour, NeighbourState, PROTOCOL_CROSSLANE, Route, RouteHop, RouteKey, RouteKind,
};
use crate::InterfaceIndex;

/// The kernel's metric for an IPv6 route without an explicit one.
const METRIC_V6_DEFAULT: u32 = 1024;
/// `RT_TABLE_LOCAL` (`linux/rtnetlink.h`).
const TABLE_LOCAL: u32 = 255;

pub(super) fn link(message: &LinkMessage) -> Option<Link> {
    let header = &message.header;
    if header.interface_family != AddressFamily::Unspec {
        return None; // attributes that a bridge or an address family adds
    }
    let mut link = Link {
        index: InterfaceIndex(header.index),
        name: String::new(),
        mac: None,
        mtu_bytes: 0,
        is_up: header.flags.contains(LinkFlags::Up),
        has_carrier: header.flags.contains(LinkFlags::LowerUp),
        controller: None,
    };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Mtu(bytes) => link.mtu_bytes = *bytes,
            LinkAttribute::Controller(index) => {
                link.controller = Some(*index).filter(|it| *it != 0).map(InterfaceIndex)
            }
            LinkAttribute::Address(mac) if header.link_layer_type == LinkLayerType::Ether => {
                link.mac = mac.as_slice().try_into().ok().map(MacAddress);
            }
            _ => {}
        }
    }
    Some(link)
}

pub(super) fn address(message: &AddressMessage) -> Option<Address> {
    let (mut local, mut address) = (None, None);
    let mut flags = AddressFlags::from_bits_retain(u32::from(message.header.flags.bits()));
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Local(ip) => local = Some(*ip),
            AddressAttribute::Address(ip) => address = Some(*ip),
            AddressAttribute::Flags(all) => flags = *all,
            _ => {}
        }
    }
    let own = local.or(address)?;
    let is_optimistic = flags.contains(AddressFlags::Optimistic);
    let is_tentative = flags.contains(AddressFlags::Tentative) && !is_optimistic;
    Some(Address {
        interface: InterfaceIndex(message.header.index),
        network: IpNet::new(own, message.header.prefix_len).ok()?,
        peer: address.filter(|peer| *peer != own),
        is_usable: !is_tentative && !flags.contains(AddressFlags::Dadfailed),
    })
}

pub(super) fn neighbour(message: &NeighbourMessage) -> Option<Neighbour> {
    let header = &message.header;
    if header.flags.contains(NeighbourFlags::Proxy) || header.state == Nud::Noarp {
        return None; // proxy entries; multicast
    }
    let (mut address, mut mac) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)) => address = Some(IpAddr::V4(*ip)),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(ip)) => address = Some(IpAddr::V6(*ip)),
            NeighbourAttribute::LinkLayerAddress(bytes) => mac = bytes.as_slice().try_into().ok().map(MacAddress),
            _ => {}
        }
    }
    let state = match header.state {
        Nud::Permanent => NeighbourState::Permanent,
        Nud::Incomplete | Nud::Failed | Nud::None => NeighbourState::Unresolved,
        _ => NeighbourState::Known,
    };
    let mac = mac.filter(|_| state != NeighbourState::Unresolved);
    Some(Neighbour { interface: InterfaceIndex(header.ifindex), address: address?, mac, state })
}

/// Returns a route, and the next-hop object that it refers to.
pub(super) fn route(message: &RouteMessage) -> Option<(Route, Option<u32>)> {
    let header = &message.header;
    let protocol = u8::from(header.protocol);
    let kind = kind(header.kind)?;
    if protocol == PROTOCOL_CROSSLANE || header.tos != 0 || header.flags.contains(RouteFlags::Cloned) {
        return None;
    }
    let read = Attributes::of(message);
    if !is_of_table(kind, header.protocol, read.table) || header.source_prefix_length != 0 {
        return None;
    }
    let unspecified = match header.address_family {
        AddressFamily::Inet => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        AddressFamily::Inet6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        _ => return None,
    };
    let prefix = IpNet::new(read.destination.unwrap_or(unspecified), header.destination_prefix_length).ok()?;
    let metric_default = if unspecified.is_ipv6() { METRIC_V6_DEFAULT } else { 0 };
    let key = RouteKey { prefix: prefix.trunc(), metric: read.metric.unwrap_or(metric_default) };
    let has_hops = matches!(kind, RouteKind::Unicast | RouteKind::Local);
    let mut hops = if has_hops { read.hops() } else { Vec::new() };
    hops.sort_unstable();
    Some((Route { key, protocol, kind, hops, mtu_bytes: read.mtu_bytes }, read.object))
}

/// Returns whether the route is of the main table or, in table local, was not made by the kernel for an address.
fn is_of_table(kind: RouteKind, protocol: RouteProtocol, table: u32) -> bool {
    match kind {
        RouteKind::Local => protocol != RouteProtocol::Kernel && table == TABLE_LOCAL,
        _ => table == u32::from(RouteHeader::RT_TABLE_MAIN),
    }
}

fn kind(kind: RouteType) -> Option<RouteKind> {
    match kind {
        RouteType::Unicast => Some(RouteKind::Unicast),
        RouteType::Local => Some(RouteKind::Local),
        RouteType::BlackHole => Some(RouteKind::Blackhole),
        RouteType::Unreachable => Some(RouteKind::Unreachable),
        RouteType::Prohibit => Some(RouteKind::Prohibit),
        RouteType::Throw => Some(RouteKind::Throw),
        _ => None,
    }
}

/// The attributes of a route.
struct Attributes<'a> {
    table: u32,
    destination: Option<IpAddr>,
    metric: Option<u32>,
    interface: Option<u32>,
    gateway: Option<IpAddr>,
    multipath: Option<&'a [RouteNextHop]>,
    object: Option<u32>,
    mtu_bytes: Option<u32>,
    is_encapsulated: bool,
}

impl Attributes<'_> {
    fn of(message: &RouteMessage) -> Attributes<'_> {
        let mut read = Attributes {
            table: u32::from(message.header.table),
            destination: None,
            metric: None,
            interface: None,
            gateway: None,
            multipath: None,
            object: None,
            mtu_bytes: None,
            is_encapsulated: message.attributes.iter().any(is_encapsulation),
        };
        for attribute in &message.attributes {
            match attribute {
                RouteAttribute::Table(table) => read.table = *table,
                RouteAttribute::Destination(to) => read.destination = ip(to),
                RouteAttribute::Priority(metric) => read.metric = Some(*metric),
                RouteAttribute::Oif(index) => read.interface = Some(*index),
                RouteAttribute::MultiPath(multipath) => read.multipath = Some(multipath),
                RouteAttribute::NhId(id) => read.object = Some(*id),
                RouteAttribute::Metrics(metrics) => read.mtu_bytes = metrics.iter().find_map(mtu_bytes),
                _ => read.gateway = gateway(attribute).or(read.gateway),
            }
        }
        read
    }

    fn hops(&self) -> Vec<RouteHop> {
        let single = self.interface.map(|index| RouteHop {
            interface: InterfaceIndex(index),
            gateway: self.gateway,
            weight: 1,
            is_encapsulated: self.is_encapsulated,
        });
        match self.multipath {
            Some(multipath) => multipath.iter().map(hop).collect(),
            None => single.into_iter().collect(),
        }
    }
}

fn hop(hop: &RouteNextHop) -> RouteHop {
    RouteHop {
        interface: InterfaceIndex(hop.interface_index),
        gateway: hop.attributes.iter().find_map(gateway),
        weight: u16::from(hop.hops) + 1,
        is_encapsulated: hop.attributes.iter().any(is_encapsulation),
    }
}

fn is_encapsulation(attribute: &RouteAttribute) -> bool {
    matches!(attribute, RouteAttribute::Encap(_) | RouteAttribute::EncapType(_))
}

fn mtu_bytes(metric: &RouteMetric) -> Option<u32> {
    match metric {
        RouteMetric::Mtu(bytes) if *bytes > 0 => Some(*bytes),
        _ => None,
    }
}

fn gateway(attribute: &RouteAttribute) -> Option<IpAddr> {
    match attribute {
        RouteAttribute::Gateway(address) => ip(address),
        RouteAttribute::Via(RouteVia::Inet(address)) => Some(IpAddr::V4(*address)),
        RouteAttribute::Via(RouteVia::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    }
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some(IpAddr::V4(*ip)),
        RouteAddress::Inet6(ip) => Some(IpAddr::V6(*ip)),
        _ => None,
    }
}
