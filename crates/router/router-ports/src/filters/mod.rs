//! What a network namespace does to packets between two of its interfaces, besides routing by its main table: filters
//! of nftables, legacy iptables, legacy arptables and `tc`, queueing disciplines that shape, IPsec policies, policy
//! routing, virtual servers, and BPF programs of type netfilter.
//!
//! Not found are filters that no other packet of an interface passes either: those of a bridge apply before a bridge
//! delivers a frame and after it accepts one, and XDP programs run before a port receives a frame. Filters of packets
//! from and to this node itself (hooks input and output) are the kernel's in any case.

mod ipsec;
mod nftables;
mod own_addresses;
mod rules;
mod traffic_control;
mod virtual_server;
mod x_tables;

use std::os::fd::BorrowedFd;

use netlink_packet_core::NlasIterator;
use rustix::net::{Protocol, RecvFlags, netlink};

use self::own_addresses::OwnAddresses;
use crate::InterfaceIndex;
use crate::netlink::NetlinkError;
use crate::netlink::socket::{ReceiveError, Socket};
use crate::system::set_option;
use crate::xdp::netfilter_programs;

/// `RTNLGRP_TC`, `RTNLGRP_IPV4_IFADDR`, `RTNLGRP_IPV4_RULE`, `RTNLGRP_IPV6_IFADDR` and `RTNLGRP_IPV6_RULE`, as a bit
/// mask.
const GROUPS: u32 = 1 << 3 | 1 << 4 | 1 << 7 | 1 << 8 | 1 << 18;
/// `NFNLGRP_NFTABLES`.
const GROUP_NFTABLES: libc::c_int = 7;
/// `XFRMNLGRP_POLICY`.
const GROUP_POLICIES: libc::c_int = 4;
/// The hooks of BPF programs of type netfilter that packets between interfaces pass.
const HOOKS: [(u32, &str); 3] = [(0, "prerouting"), (2, "forward"), (4, "postrouting")];
/// `NFPROTO_IPV6`; the other family of such programs is IPv4.
const FAMILY_IPV6: u32 = 10;

/// Finds packet filters, and watches for changes, in the network namespace in which it was opened. Legacy tables,
/// `tcx`, virtual servers and BPF programs of type netfilter report no changes.
pub struct FilterWatch {
    nftables: Option<Family>,
    ipsec: Option<Family>,
    route_events: Socket,
    route_dumps: Socket,
}

/// A netlink family that the kernel may be built without.
struct Family {
    events: Socket,
    dumps: Socket,
}

impl Family {
    fn open(protocol: Protocol, group: libc::c_int) -> Option<Family> {
        let events = Socket::open_protocol(Some(protocol), 0).ok()?;
        set_option(events.as_fd(), libc::SOL_NETLINK, libc::NETLINK_ADD_MEMBERSHIP, &group).ok()?;
        Some(Family { events, dumps: Socket::open_protocol(Some(protocol), 0).ok()? })
    }
}

impl FilterWatch {
    /// Subscribes to changes.
    pub fn open() -> Result<FilterWatch, NetlinkError> {
        Ok(FilterWatch {
            nftables: Family::open(netlink::NETFILTER, GROUP_NFTABLES),
            ipsec: Family::open(netlink::XFRM, GROUP_POLICIES),
            route_events: Socket::open(GROUPS)?,
            route_dumps: Socket::open(0)?,
        })
    }

    /// Returns descriptors that are readable when filters may have changed.
    pub fn wakes(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let families = [&self.nftables, &self.ipsec].into_iter().flatten();
        families.map(|family| family.events.as_fd()).chain([self.route_events.as_fd()])
    }

    /// Returns whether filters that report changes may have changed since the last call.
    pub fn has_changed(&mut self) -> bool {
        let mut has_changed = drain(&mut self.route_events);
        for family in [&mut self.nftables, &mut self.ipsec].into_iter().flatten() {
            has_changed |= drain(&mut family.events);
        }
        has_changed
    }

    /// Returns a description of each filter that packets between these interfaces may touch, in a fixed order.
    pub fn find(&mut self, interfaces: &[(InterfaceIndex, String)]) -> Result<Vec<String>, NetlinkError> {
        let mut found = match &mut self.nftables {
            Some(family) => or_none(nftables::find(&mut family.dumps, interfaces))?,
            None => Vec::new(),
        };
        found.extend(FilterWatch::find_polled(interfaces));
        found.extend(or_none(traffic_control::find(&mut self.route_dumps, interfaces))?);
        let own = OwnAddresses::read(&mut self.route_dumps)?;
        if let Some(family) = &mut self.ipsec {
            found.extend(or_none(ipsec::find(&mut family.dumps, &own))?);
            found.extend(or_none(ipsec::find_default(&mut family.dumps))?);
        }
        found.extend(or_none(rules::find(&mut self.route_dumps, interfaces, &own))?);
        Ok(found)
    }

    /// Returns the part of [`FilterWatch::find`] that is to be polled: the kernel does not report changes of it.
    pub fn find_polled(interfaces: &[(InterfaceIndex, String)]) -> Vec<String> {
        let mut found = x_tables::find();
        found.extend(traffic_control::find_tcx(interfaces));
        found.extend(netfilter_programs().into_iter().filter_map(describe_program));
        found.extend(virtual_server::find());
        found
    }
}

/// Describes a BPF program of type netfilter, if packets between interfaces pass its hook.
fn describe_program((family, hook): (u32, u32)) -> Option<String> {
    let (_, hook) = HOOKS.into_iter().find(|(number, _)| *number == hook)?;
    let family = if family == FAMILY_IPV6 { "IPv6" } else { "IPv4" };
    Some(format!("BPF netfilter program of some network namespace, {family}, hook {hook}"))
}

/// Receives all events, and returns whether there were any, or some were lost.
fn drain(events: &mut Socket) -> bool {
    let mut has_changed = false;
    loop {
        match events.receive(RecvFlags::DONTWAIT, |_| Ok(())) {
            Ok(()) | Err(ReceiveError::Lost) => has_changed = true,
            Err(ReceiveError::Empty) => return has_changed,
            Err(ReceiveError::Failed(_)) => return true,
        }
    }
}

/// A kernel that is built without a kind of filters refuses to dump them.
fn or_none(found: Result<Vec<String>, NetlinkError>) -> Result<Vec<String>, NetlinkError> {
    let is_absent = |error: &NetlinkError| match error {
        NetlinkError::Refused { source, .. } => {
            matches!(source.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP | libc::EPROTONOSUPPORT))
        }
        _ => false,
    };
    match found {
        Err(error) if is_absent(&error) => Ok(Vec::new()),
        found => found,
    }
}

/// Iterates over the netlink attributes in `bytes`: their types, and their contents.
fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    NlasIterator::new(bytes).map_while(Result::ok).map(|attribute| {
        let (kind, bytes) = (attribute.kind(), usize::from(attribute.length()));
        (kind, &attribute.into_inner()[4..bytes])
    })
}

/// Returns the contents of the first attribute of this type.
fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(of, _)| *of == kind).map(|(_, contents)| contents)
}

/// Returns the text of an attribute, without the terminating zero.
fn text(contents: &[u8]) -> String {
    String::from_utf8_lossy(contents).trim_end_matches('\0').to_owned()
}

#[cfg(test)]
mod tests;
