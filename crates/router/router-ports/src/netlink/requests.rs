//! Requests to the kernel for changes.

use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use ipnet::IpNet;
use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NLMSG_ERROR};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::RouteNetlinkMessage as Message;
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage};
use netlink_packet_route::link::{InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};
use netlink_packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState as Nud};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use packet::ethernet::MacAddress;
use rustix::net::RecvFlags;

use super::convert;
use super::model::PROTOCOL_CROSSLANE;
use super::monitor::routes_of;
use super::socket::{NetlinkError, Socket, refused};
use crate::InterfaceIndex;

/// The largest number of requests in flight: the answers must fit into the receive queue.
const REQUESTS_MAX: usize = 256;
/// Errors of a removal that mean that the entry does not exist.
const ERRORS_IF_ABSENT: [i32; 2] = [libc::ESRCH, libc::ENOENT];
/// Errors of an addition that mean that the entry exists.
const ERRORS_IF_PRESENT: [i32; 1] = [libc::EEXIST];

/// A route of this router, with protocol [`PROTOCOL_CROSSLANE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RouteRequest {
    /// The destination prefix.
    pub prefix: IpNet,
    /// The metric; the kernel prefers the lowest.
    pub metric: u32,
    /// The output interface.
    pub interface: InterfaceIndex,
    /// The gateway; `None` if the destination is directly reachable on the interface.
    pub gateway: Option<IpAddr>,
}

/// One endpoint of a pair of virtual Ethernet interfaces.
#[derive(Clone, Copy, Debug)]
pub struct VethEndpoint<'a> {
    /// The name, at most 15 bytes.
    pub name: &'a str,
    /// The network namespace in which it is created; `None` means that of the calling thread.
    pub namespace: Option<BorrowedFd<'a>>,
    /// The hardware address; `None` means a random one.
    pub mac: Option<MacAddress>,
}

/// A socket for requests.
pub struct Requests {
    socket: Socket,
}

impl Requests {
    /// Opens a socket in the calling thread's network namespace.
    pub fn open() -> Result<Requests, NetlinkError> {
        Ok(Requests { socket: Socket::open(0)? })
    }

    /// Sets an interface up.
    pub fn set_up(&mut self, interface: InterfaceIndex) -> Result<(), NetlinkError> {
        self.set_link(format!("to set {interface} up"), interface, LinkFlags::Up, None)
    }

    /// Sets an interface down.
    pub fn set_down(&mut self, interface: InterfaceIndex) -> Result<(), NetlinkError> {
        self.set_link(format!("to set {interface} down"), interface, LinkFlags::empty(), None)
    }

    /// Sets the MTU of an interface.
    pub fn set_mtu(&mut self, interface: InterfaceIndex, bytes: u32) -> Result<(), NetlinkError> {
        let mut message = LinkMessage::default();
        message.header.index = interface.0;
        message.attributes.push(LinkAttribute::Mtu(bytes));
        self.request(format!("an MTU of {bytes} B on {interface}"), Message::SetLink(message), 0)
    }

    /// Returns the interface that an interface belongs to, such as a bridge, a bond or a VRF.
    pub fn controller_of(&mut self, interface: InterfaceIndex) -> Result<Option<InterfaceIndex>, NetlinkError> {
        let mut message = LinkMessage::default();
        message.header.index = interface.0;
        match self.socket.ask(Message::GetLink(message))? {
            Some(Message::NewLink(message)) => Ok(convert::link(&message).and_then(|link| link.controller)),
            _ => Ok(None),
        }
    }

    fn set_link(
        &mut self,
        request: String,
        interface: InterfaceIndex,
        flags: LinkFlags,
        attribute: Option<LinkAttribute>,
    ) -> Result<(), NetlinkError> {
        let mut message = LinkMessage::default();
        message.header.index = interface.0;
        message.header.flags = flags;
        message.header.change_mask = LinkFlags::Up;
        message.attributes.extend(attribute);
        self.request(request, Message::SetLink(message), 0)
    }

    /// Creates a pair of virtual Ethernet interfaces.
    pub fn add_veth(&mut self, one: VethEndpoint, other: VethEndpoint) -> Result<(), NetlinkError> {
        let mut message = veth_endpoint(one);
        let peer = InfoData::Veth(InfoVeth::Peer(veth_endpoint(other)));
        message.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Veth), LinkInfo::Data(peer)]));
        let request = format!("a veth pair {} and {}", one.name, other.name);
        self.request(request, Message::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// For tests: creates a bridge with these interfaces, and sets all of them up.
    #[cfg(test)]
    pub(crate) fn add_bridge(&mut self, name: &str, members: &[InterfaceIndex]) -> Result<(), NetlinkError> {
        let mut message = LinkMessage::default();
        message.attributes.push(LinkAttribute::IfName(name.to_string()));
        message.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Bridge)]));
        self.request(format!("a bridge {name}"), Message::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)?;
        let bridge = crate::Interface::by_name(name).expect("the bridge was just created").index;
        self.set_up(bridge)?;
        for member in members {
            let controller = LinkAttribute::Controller(bridge.0);
            self.set_link(format!("{member} in {name}"), *member, LinkFlags::Up, Some(controller))?;
        }
        Ok(())
    }

    /// Removes an interface; a pair of virtual Ethernet interfaces is removed with either of them.
    pub fn remove_link(&mut self, interface: InterfaceIndex) -> Result<(), NetlinkError> {
        let mut message = LinkMessage::default();
        message.header.index = interface.0;
        self.request(format!("to remove {interface}"), Message::DelLink(message), 0)
    }

    /// Adds an address to an interface, without duplicate address detection.
    pub fn add_address(&mut self, interface: InterfaceIndex, network: IpNet) -> Result<(), NetlinkError> {
        let message = Message::NewAddress(address(interface, network));
        self.request(format!("address {network} on {interface}"), message, NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Removes an address from an interface.
    pub fn remove_address(&mut self, interface: InterfaceIndex, network: IpNet) -> Result<(), NetlinkError> {
        let message = Message::DelAddress(address(interface, network));
        self.request(format!("to remove address {network} from {interface}"), message, 0)
    }

    /// Adds a permanent neighbour entry.
    pub fn add_neighbour(
        &mut self,
        interface: InterfaceIndex,
        address: IpAddr,
        mac: MacAddress,
    ) -> Result<(), NetlinkError> {
        let mut message = NeighbourMessage::default();
        message.header.family = family(address);
        message.header.ifindex = interface.0;
        message.header.state = Nud::Permanent;
        let destination = match address {
            IpAddr::V4(ip) => NeighbourAddress::Inet(ip),
            IpAddr::V6(ip) => NeighbourAddress::Inet6(ip),
        };
        message.attributes.push(NeighbourAttribute::Destination(destination));
        message.attributes.push(NeighbourAttribute::LinkLayerAddress(mac.0.to_vec()));
        let request = format!("neighbour {address} on {interface}");
        self.request(request, Message::NewNeighbour(message), NLM_F_CREATE | NLM_F_REPLACE)
    }

    /// Installs routes of this router in the main table. An existing route with the same prefix and metric stays: to
    /// change a route, remove it first.
    pub fn install_routes(&mut self, routes: &[RouteRequest]) -> Result<(), NetlinkError> {
        self.request_all(
            routes,
            |route| Message::NewRoute(own_route(route)),
            NLM_F_CREATE | NLM_F_EXCL,
            &ERRORS_IF_PRESENT,
        )
    }

    /// Removes routes of this router from the main table; routes that do not exist are ignored.
    pub fn remove_routes(&mut self, routes: &[RouteRequest]) -> Result<(), NetlinkError> {
        self.request_all(routes, |route| Message::DelRoute(own_route(route)), 0, &ERRORS_IF_ABSENT)
    }

    /// Removes all routes with the router's protocol number from the main table, including those of earlier runs, and
    /// returns their number.
    pub fn remove_own_routes(&mut self) -> Result<usize, NetlinkError> {
        let mut count = 0;
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut own = Vec::new();
            self.socket.dump(&routes_of(family), &mut own, Vec::clear, |own, message| {
                let Message::NewRoute(route) = message else { return };
                let header = &route.header;
                let is_main = header.table == RouteHeader::RT_TABLE_MAIN;
                if is_main && u8::from(header.protocol) == PROTOCOL_CROSSLANE {
                    own.push(route);
                }
            })?;
            self.request_all(&own, |route| Message::DelRoute(route.clone()), 0, &ERRORS_IF_ABSENT)?;
            count += own.len();
        }
        Ok(count)
    }

    pub(super) fn request(&mut self, request: String, message: Message, flags: u16) -> Result<(), NetlinkError> {
        let mut bytes = Vec::new();
        self.socket.write(message, NLM_F_ACK | flags, &mut bytes);
        self.socket.send(&bytes)?;
        match self.answers(1, &[])? {
            Some((_, error)) => Err(refused(request, error)),
            None => Ok(()),
        }
    }

    /// Sends all requests in groups, independent of the results of others, and returns the first refusal after all have
    /// been answered.
    fn request_all<T: std::fmt::Debug>(
        &mut self,
        all: &[T],
        message: impl Fn(&T) -> Message,
        flags: u16,
        errors_ignored: &[i32],
    ) -> Result<(), NetlinkError> {
        let (mut bytes, mut refusal) = (Vec::new(), Ok(()));
        for group in all.chunks(REQUESTS_MAX) {
            bytes.clear();
            let mut first = None;
            for one in group {
                let sequence = self.socket.write(message(one), NLM_F_ACK | flags, &mut bytes);
                first.get_or_insert(sequence);
            }
            self.socket.send(&bytes)?;
            if let Some((sequence, error)) = self.answers(group.len(), errors_ignored)? {
                let index = sequence.wrapping_sub(first.unwrap_or(sequence)) as usize;
                refusal = refusal.and_then(|()| Err(refused(format!("{:?}", group.get(index)), error)));
            }
        }
        refusal
    }

    /// Waits for `count` answers, and returns the sequence number and the error of the first refusal.
    fn answers(&mut self, count: usize, errors_ignored: &[i32]) -> Result<Option<(u32, i32)>, NetlinkError> {
        let (mut answered, mut refusal) = (0, None);
        while answered < count {
            let received = self.socket.receive(RecvFlags::empty(), |raw| {
                if raw.kind == NLMSG_ERROR {
                    answered += 1;
                    let error = raw.error();
                    let is_ignored = error == 0 || errors_ignored.contains(&error);
                    refusal = refusal.or((!is_ignored).then_some((raw.sequence, error)));
                }
                Ok(())
            });
            received.map_err(|error| error.while_doing("waiting for an answer"))?;
        }
        Ok(refusal)
    }
}

fn veth_endpoint(end: VethEndpoint) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.attributes.push(LinkAttribute::IfName(end.name.to_string()));
    message.attributes.extend(end.namespace.map(|fd| LinkAttribute::NetNsFd(fd.as_raw_fd())));
    message.attributes.extend(end.mac.map(|mac| LinkAttribute::Address(mac.0.to_vec())));
    message
}

fn address(interface: InterfaceIndex, network: IpNet) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = family(network.addr());
    message.header.prefix_len = network.prefix_len();
    message.header.index = interface.0;
    message.header.flags = AddressHeaderFlags::Nodad;
    message.attributes.push(AddressAttribute::Local(network.addr()));
    message.attributes.push(AddressAttribute::Address(network.addr()));
    message
}

pub(super) fn own_route(route: &RouteRequest) -> RouteMessage {
    let mut message = RouteMessage::default();
    let header = &mut message.header;
    header.address_family = family(route.prefix.addr());
    header.destination_prefix_length = route.prefix.prefix_len();
    header.table = RouteHeader::RT_TABLE_MAIN;
    header.protocol = RouteProtocol::from(PROTOCOL_CROSSLANE);
    header.scope = if route.gateway.is_none() { RouteScope::Link } else { RouteScope::Universe };
    header.kind = RouteType::Unicast;
    let destination = RouteAddress::from(route.prefix.addr());
    message.attributes.push(RouteAttribute::Destination(destination));
    message.attributes.push(RouteAttribute::Priority(route.metric));
    message.attributes.push(RouteAttribute::Oif(route.interface.0));
    message.attributes.extend(route.gateway.map(|gateway| RouteAttribute::Gateway(gateway.into())));
    message
}

fn family(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}
