//! Multicast listener discovery for IPv6 (RFC 3810): what a listener says, so that switches that look on send it what
//! goes to its groups. Neighbour solicitations do: without a report, nobody finds an address behind such a switch.

use std::net::Ipv6Addr;

use crate::Protocol;
use crate::icmpv6::pseudo;
use crate::octets::put;

/// To whom reports go: everybody who hears of version 2.
pub const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x16);
/// The hop limit of every report.
pub const HOP_LIMIT: u8 = 1;
/// The type of a report.
pub const REPORT: u8 = 143;
/// The most groups of one report: what every link carries.
pub const GROUPS_MAX: usize = 60;

/// The hop-by-hop header that says *router alert* (RFC 2711), and two bytes of padding.
const ALERT: [u8; 8] = [Protocol::ICMPV6.0, 0, 5, 2, 0, 0, 1, 0];
const HEADER_BYTES: usize = 8;
const RECORD_BYTES: usize = 20;

/// Why a listener says so (RFC 3810, section 5.2.12). It listens to whoever sends to the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Why {
    /// It still does.
    Listens = 2,
    /// From now on.
    Joins = 4,
}

/// Bytes behind the IPv6 header of a report on so many groups, [`GROUPS_MAX`] at most.
pub fn payload_bytes(groups: usize) -> usize {
    ALERT.len() + HEADER_BYTES + RECORD_BYTES * groups.min(GROUPS_MAX)
}

/// Writes what follows the IPv6 header of a report, whose next header is [`crate::ipv6::HOP_BY_HOP`], to the front of
/// `bytes`, which has room for [`payload_bytes`]; says how many they are. Groups beyond [`GROUPS_MAX`] are left out.
pub fn emit_report(bytes: &mut [u8], source: Ipv6Addr, why: Why, groups: &[Ipv6Addr]) -> usize {
    let groups = &groups[..groups.len().min(GROUPS_MAX)];
    let length = payload_bytes(groups.len());
    put(bytes, 0, &ALERT);
    let message = &mut bytes[ALERT.len()..length];
    put(message, 0, &[REPORT, 0, 0, 0, 0, 0, 0, groups.len() as u8]);
    for (record, group) in message[HEADER_BYTES..].chunks_exact_mut(RECORD_BYTES).zip(groups) {
        put(record, 0, &[why as u8, 0, 0, 0]);
        put(record, 4, &group.octets());
    }
    let checksum = pseudo(source, ALL_ROUTERS, message.len()).add_bytes(message).checksum();
    put(message, 2, &checksum.to_be_bytes());
    length
}
