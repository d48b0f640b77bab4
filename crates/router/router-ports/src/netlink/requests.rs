//! What the kernel is asked to change.

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

use super::model::PROTOCOL_CROSSLANE;
use super::monitor::routes_of;
use super::socket::{NetlinkError, Socket, refused};
use crate::InterfaceIndex;

/// Requests that are under way at a time: their answers must find room.
const REQUESTS_MAX: usize = 256;
/// What is to be gone is gone.
const ERRORS_OF_GONE: [i32; 2] = [libc::ESRCH, libc::ENOENT];
/// What is to be there is there.
const ERRORS_OF_THERE: [i32; 1] = [libc::EEXIST];

/// A route of the router's own, with protocol [`PROTOCOL_CROSSLANE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RouteRequest {
    /// To where.
    pub prefix: IpNet,
    /// How good; the kernel prefers the lowest.
    pub metric: u32,
    /// Out of which interface.
    pub interface: InterfaceIndex,
    /// To whom; `None` when the destination itself is beyond the interface.
    pub gateway: Option<IpAddr>,
}

/// One end of a pair of virtual Ethernet interfaces.
#[derive(Clone, Copy, Debug)]
pub struct VethEnd<'a> {
    /// At most 15 bytes.
    pub name: &'a str,
    /// The network namespace that it is made in; `None` is the calling thread's.
    pub namespace: Option<BorrowedFd<'a>>,
    /// Its hardware address; `None` is a random one.
    pub mac: Option<MacAddress>,
}

/// A socket for requests.
pub struct Requests {
    socket: Socket,
}

impl Requests {
    /// In the calling thread's network namespace.
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

    /// Sets the length of the longest IP packet that an interface carries.
    pub fn set_mtu(&mut self, interface: InterfaceIndex, bytes: u32) -> Result<(), NetlinkError> {
        let mut message = LinkMessage::default();
        message.header.index = interface.0;
        message.attributes.push(LinkAttribute::Mtu(bytes));
        self.ask(format!("an MTU of {bytes} B on {interface}"), Message::SetLink(message), 0)
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
        self.ask(request, Message::SetLink(message), 0)
    }

    /// Makes a pair of virtual Ethernet interfaces.
    pub fn add_veth(&mut self, one: VethEnd, other: VethEnd) -> Result<(), NetlinkError> {
        let mut message = veth_end(one);
        let peer = InfoData::Veth(InfoVeth::Peer(veth_end(other)));
        message.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Veth), LinkInfo::Data(peer)]));
        let request = format!("a veth pair {} and {}", one.name, other.name);
        self.ask(request, Message::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// For tests: makes a bridge of these interfaces; all of it is up.
    #[cfg(test)]
    pub(crate) fn add_bridge(&mut self, name: &str, members: &[InterfaceIndex]) -> Result<(), NetlinkError> {
        let mut message = LinkMessage::default();
        message.attributes.push(LinkAttribute::IfName(name.to_string()));
        message.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Bridge)]));
        self.ask(format!("a bridge {name}"), Message::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)?;
        let bridge = crate::Interface::by_name(name).expect("it was made").index;
        self.set_up(bridge)?;
        for member in members {
            let controller = LinkAttribute::Controller(bridge.0);
            self.set_link(format!("{member} in {name}"), *member, LinkFlags::Up, Some(controller))?;
        }
        Ok(())
    }

    /// Removes an interface; a pair of virtual ones goes with either end.
    pub fn remove_link(&mut self, interface: InterfaceIndex) -> Result<(), NetlinkError> {
        let mut message = LinkMessage::default();
        message.header.index = interface.0;
        self.ask(format!("to remove {interface}"), Message::DelLink(message), 0)
    }

    /// Gives an interface an address, which is not looked for elsewhere first.
    pub fn add_address(&mut self, interface: InterfaceIndex, network: IpNet) -> Result<(), NetlinkError> {
        let message = Message::NewAddress(address(interface, network));
        self.ask(format!("address {network} on {interface}"), message, NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Takes an address from an interface.
    pub fn remove_address(&mut self, interface: InterfaceIndex, network: IpNet) -> Result<(), NetlinkError> {
        let message = Message::DelAddress(address(interface, network));
        self.ask(format!("to remove address {network} from {interface}"), message, 0)
    }

    /// Says for good who a neighbour is.
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
        self.ask(request, Message::NewNeighbour(message), NLM_F_CREATE | NLM_F_REPLACE)
    }

    /// Puts routes of the router's own into the main table. Who has a route to the same prefix with the same metric
    /// keeps it: to change a route, remove it first.
    pub fn install_routes(&mut self, routes: &[RouteRequest]) -> Result<(), NetlinkError> {
        self.ask_all(routes, |route| Message::NewRoute(own_route(route)), NLM_F_CREATE | NLM_F_EXCL, &ERRORS_OF_THERE)
    }

    /// Takes routes of the router's own out of the main table; what is gone already may be.
    pub fn remove_routes(&mut self, routes: &[RouteRequest]) -> Result<(), NetlinkError> {
        self.ask_all(routes, |route| Message::DelRoute(own_route(route)), 0, &ERRORS_OF_GONE)
    }

    /// Takes all routes of the router's own out of the main table, whoever left them there. Says how many.
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
            self.ask_all(&own, |route| Message::DelRoute(route.clone()), 0, &ERRORS_OF_GONE)?;
            count += own.len();
        }
        Ok(count)
    }

    pub(super) fn ask(&mut self, request: String, message: Message, flags: u16) -> Result<(), NetlinkError> {
        let mut bytes = Vec::new();
        self.socket.write(message, NLM_F_ACK | flags, &mut bytes);
        self.socket.send(&bytes)?;
        match self.answers(1, &[])? {
            Some((_, error)) => Err(refused(request, error)),
            None => Ok(()),
        }
    }

    /// Asks for each, many at a time, whatever becomes of others; the first refusal is the answer, when all have been
    /// answered.
    fn ask_all<T: std::fmt::Debug>(
        &mut self,
        all: &[T],
        message: impl Fn(&T) -> Message,
        flags: u16,
        errors_fine: &[i32],
    ) -> Result<(), NetlinkError> {
        let (mut bytes, mut refusal) = (Vec::new(), Ok(()));
        for some in all.chunks(REQUESTS_MAX) {
            bytes.clear();
            let mut first = None;
            for one in some {
                let sequence = self.socket.write(message(one), NLM_F_ACK | flags, &mut bytes);
                first.get_or_insert(sequence);
            }
            self.socket.send(&bytes)?;
            if let Some((sequence, error)) = self.answers(some.len(), errors_fine)? {
                let index = sequence.wrapping_sub(first.unwrap_or(sequence)) as usize;
                refusal = refusal.and_then(|()| Err(refused(format!("{:?}", some.get(index)), error)));
            }
        }
        refusal
    }

    /// Waits for `count` answers. The first refusal: of which request, and the error.
    fn answers(&mut self, count: usize, errors_fine: &[i32]) -> Result<Option<(u32, i32)>, NetlinkError> {
        let (mut answered, mut refusal) = (0, None);
        while answered < count {
            let received = self.socket.receive(RecvFlags::empty(), |raw| {
                if raw.kind == NLMSG_ERROR {
                    answered += 1;
                    let error = raw.error();
                    let is_fine = error == 0 || errors_fine.contains(&error);
                    refusal = refusal.or((!is_fine).then_some((raw.sequence, error)));
                }
                Ok(())
            });
            received.map_err(|error| error.while_doing("waiting for an answer"))?;
        }
        Ok(refusal)
    }
}

fn veth_end(end: VethEnd) -> LinkMessage {
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
