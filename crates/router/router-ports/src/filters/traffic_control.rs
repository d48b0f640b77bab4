//! Filters of `tc`: those of the queueing disciplines `ingress` and `clsact`, and the BPF programs of `tcx`. Queueing
//! disciplines that shape, delay, drop or reorder packets, which ports bypass.

use super::{attribute, text};
use crate::InterfaceIndex;
use crate::netlink::NetlinkError;
use crate::netlink::socket::Socket;
use crate::xdp::tcx_programs;

/// `linux/rtnetlink.h`.
const GET_QDISC: u16 = 38;
const GET_FILTER: u16 = 46;
const KIND: u16 = 1;
const OPTIONS: u16 = 2;
/// `struct tcmsg`: family and padding, interface, handle, parent, info.
const HEADER_BYTES: usize = 20;
/// The parents of filters: those of `ingress`, and the two of `clsact`.
const PARENT: u32 = 0xffff_0000;
const PARENT_INGRESS: u32 = 0xffff_fff2;
const PARENT_EGRESS: u32 = 0xffff_fff3;
/// Queueing disciplines that packets only wait in while the interface is busy, and those for filters.
const QUEUES: [&str; 15] = [
    "noqueue",
    "mq",
    "mqprio",
    "pfifo_fast",
    "pfifo",
    "bfifo",
    "pfifo_head_drop",
    "fq",
    "codel",
    "fq_codel",
    "pie",
    "fq_pie",
    "sfq",
    "ingress",
    "clsact",
];
/// `linux/pkt_sched.h`: the rate of `cake`, which is 0 if it does not shape.
const CAKE_RATE: u16 = 2;

/// Returns a description of each interface's filters.
pub(super) fn find(socket: &mut Socket, interfaces: &[(InterfaceIndex, String)]) -> Result<Vec<String>, NetlinkError> {
    let mut qdiscs: Vec<(u32, String, bool)> = Vec::new();
    socket.dump_raw(GET_QDISC, &header(0, 0), &mut qdiscs, Vec::clear, |qdiscs, message| {
        let of_interface = interface_of(message).zip(kind_of(message));
        qdiscs.extend(of_interface.map(|(interface, kind)| (interface, kind, is_only_queue(message))));
    })?;
    let mut found = Vec::new();
    for (interface, name) in interfaces {
        let is_of_interface = |(of, _, _): &&(u32, String, bool)| *of == interface.0;
        // The first one is the root, and the others are below it.
        let shaping = qdiscs.iter().filter(is_of_interface).find(|(_, _, is_only_queue)| !is_only_queue);
        found.extend(shaping.map(|(_, kind, _)| format!("tc qdisc {kind}, egress of {name}")));
        for (_, kind, _) in qdiscs.iter().filter(is_of_interface) {
            let parents: &[(u32, &str)] = match kind.as_str() {
                "ingress" => &[(PARENT, "ingress")],
                "clsact" => &[(PARENT_INGRESS, "ingress"), (PARENT_EGRESS, "egress")],
                _ => &[],
            };
            for (parent, direction) in parents {
                let kinds = filters(socket, *interface, *parent)?;
                found.extend(kinds.first().map(|kind| format!("tc {kind} filter, {direction} of {name}")));
            }
        }
    }
    Ok(found)
}

/// Returns whether a queueing discipline neither shapes, delays, drops nor reorders packets of an idle interface.
fn is_only_queue(message: &[u8]) -> bool {
    let kind = kind_of(message).unwrap_or_default();
    let rate = || attribute(attribute(message.get(HEADER_BYTES..)?, OPTIONS)?, CAKE_RATE);
    QUEUES.contains(&kind.as_str()) || kind == "cake" && rate().is_none_or(|rate| rate.iter().all(|byte| *byte == 0))
}

/// Returns a description of the programs that `tcx` runs for these interfaces. The kernel does not report changes.
pub(super) fn find_tcx(interfaces: &[(InterfaceIndex, String)]) -> Vec<String> {
    let directions = [(false, "ingress"), (true, "egress")];
    let all = interfaces.iter().flat_map(|interface| directions.map(|direction| (interface, direction)));
    let found = all.filter(|((interface, _), (is_egress, _))| tcx_programs(*interface, *is_egress) > 0);
    found.map(|((_, name), (_, direction))| format!("tcx program, {direction} of {name}")).collect()
}

/// Returns the kinds of the filters with this parent.
fn filters(socket: &mut Socket, interface: InterfaceIndex, parent: u32) -> Result<Vec<String>, NetlinkError> {
    let mut kinds = Vec::new();
    let request = header(interface.0, parent);
    socket.dump_raw(GET_FILTER, &request, &mut kinds, Vec::clear, |kinds, message| kinds.extend(kind_of(message)))?;
    Ok(kinds)
}

fn header(interface: u32, parent: u32) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[4..8].copy_from_slice(&interface.to_ne_bytes());
    bytes[12..16].copy_from_slice(&parent.to_ne_bytes());
    bytes
}

fn interface_of(message: &[u8]) -> Option<u32> {
    message.get(4..8)?.first_chunk().map(|index| u32::from_ne_bytes(*index))
}

fn kind_of(message: &[u8]) -> Option<String> {
    attribute(message.get(HEADER_BYTES..)?, KIND).map(text)
}
