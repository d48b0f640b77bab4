//! Packet filters of a network namespace that packets between two of its interfaces may touch: nftables, legacy
//! iptables, and the filters of `tc`.
//!
//! Not found are filters that no other packet of an interface passes either: those of a bridge apply before a bridge
//! delivers a frame and after it accepts one, and XDP programs run before a port receives a frame. Filters of packets
//! from and to this node itself (hooks input and output) are the kernel's in any case. BPF programs of type netfilter
//! are not found.

mod nftables;
mod traffic_control;
mod x_tables;

use std::os::fd::BorrowedFd;

use netlink_packet_core::NlasIterator;
use rustix::net::{RecvFlags, netlink};

use crate::InterfaceIndex;
use crate::netlink::NetlinkError;
use crate::netlink::socket::{ReceiveError, Socket};
use crate::system::set_option;

/// `RTNLGRP_TC`, as a bit mask.
const GROUP_TC: u32 = 1 << 3;
/// `NFNLGRP_NFTABLES`.
const GROUP_NFTABLES: libc::c_int = 7;

/// Finds packet filters, and watches for changes, in the network namespace in which it was opened. Legacy iptables
/// and `tcx` report no changes.
pub struct FilterWatch {
    /// Events and dumps of nftables, if the kernel has them.
    nftables: Option<(Socket, Socket)>,
    tc_events: Socket,
    tc_dumps: Socket,
}

impl FilterWatch {
    /// Subscribes to changes.
    pub fn open() -> Result<FilterWatch, NetlinkError> {
        let nftables = Socket::open_protocol(Some(netlink::NETFILTER), 0).ok().and_then(|events| {
            set_option(events.as_fd(), libc::SOL_NETLINK, libc::NETLINK_ADD_MEMBERSHIP, &GROUP_NFTABLES).ok()?;
            Some((events, Socket::open_protocol(Some(netlink::NETFILTER), 0).ok()?))
        });
        Ok(FilterWatch { nftables, tc_events: Socket::open(GROUP_TC)?, tc_dumps: Socket::open(0)? })
    }

    /// Returns descriptors that are readable when filters may have changed.
    pub fn wakes(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.nftables.iter().map(|(events, _)| events.as_fd()).chain([self.tc_events.as_fd()])
    }

    /// Returns whether nftables or `tc` may have changed since the last call.
    pub fn has_changed(&mut self) -> bool {
        let nftables = self.nftables.as_mut().is_some_and(|(events, _)| drain(events));
        drain(&mut self.tc_events) || nftables
    }

    /// Returns a description of each filter that packets between these interfaces may touch, in a fixed order.
    pub fn find(&mut self, interfaces: &[(InterfaceIndex, String)]) -> Result<Vec<String>, NetlinkError> {
        let mut found = match &mut self.nftables {
            Some((_, dumps)) => or_none(nftables::find(dumps, interfaces))?,
            None => Vec::new(),
        };
        found.extend(FilterWatch::find_polled(interfaces));
        found.extend(or_none(traffic_control::find(&mut self.tc_dumps, interfaces))?);
        Ok(found)
    }

    /// Returns the part of [`FilterWatch::find`] that is to be polled: the kernel does not report changes of it.
    pub fn find_polled(interfaces: &[(InterfaceIndex, String)]) -> Vec<String> {
        let mut found = x_tables::find().unwrap_or_default();
        found.extend(traffic_control::find_tcx(interfaces));
        found
    }
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
