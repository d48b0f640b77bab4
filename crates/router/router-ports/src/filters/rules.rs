//! Policy routing: rules of `ip rule` (`linux/fib_rules.h`) that choose another table than main, or none.

use super::own_addresses::OwnAddresses;
use super::{attribute, text};
use crate::InterfaceIndex;
use crate::netlink::NetlinkError;
use crate::netlink::socket::Socket;

const GET_RULE: u16 = 34;
/// `struct fib_rule_hdr`: family, lengths of destination and source, TOS, table, two bytes, action, flags.
const HEADER_BYTES: usize = 12;
const ACTION_TO_TABLE: u8 = 1;
const ACTION_NOP: u8 = 3;
const FLAG_INVERT: u32 = 2;
const DESTINATION: u16 = 1;
const SOURCE: u16 = 2;
const INPUT_INTERFACE: u16 = 3;
const PRIORITY: u16 = 6;
const MARK: u16 = 10;
const MASK: u16 = 16;
const SUPPRESS_GROUP: u16 = 13;
const SUPPRESS_PREFIX_BITS: u16 = 14;
const TABLE: u16 = 15;
const OUTPUT_INTERFACE: u16 = 17;
const L3_MASTER: u16 = 19;
const USERS: u16 = 20;
/// The tables default, main and local.
const TABLES: std::ops::RangeInclusive<u32> = 253..=255;
/// No suppression.
const NONE: u32 = u32::MAX;

/// Returns a description of each rule that packets between these interfaces may match.
pub(super) fn find(
    socket: &mut Socket,
    interfaces: &[(InterfaceIndex, String)],
    own: &OwnAddresses,
) -> Result<Vec<String>, NetlinkError> {
    let mut found = Vec::new();
    socket.dump_raw(GET_RULE, &[0; HEADER_BYTES], &mut found, Vec::clear, |found, message| {
        found.extend(describe(message, interfaces, own));
    })?;
    Ok(found)
}

/// Parses a rule; returns `None` for one that does not matter.
fn describe(message: &[u8], interfaces: &[(InterfaceIndex, String)], own: &OwnAddresses) -> Option<String> {
    let (header, attributes) = message.split_at_checked(HEADER_BYTES)?;
    let family = u16::from(header[0]);
    let name = match i32::from(family) {
        libc::AF_INET => "IPv4",
        libc::AF_INET6 => "IPv6",
        // Rules of multicast routing.
        _ => return None,
    };
    let number = |kind: u16| attribute(attributes, kind).and_then(word);
    let is_inverted = word(&header[8..]).is_some_and(|flags| flags & FLAG_INVERT != 0);
    let is_foreign =
        |kind: u16, bits: u8| attribute(attributes, kind).is_some_and(|address| own.is_all_of(family, address, bits));
    let from = attribute(attributes, INPUT_INTERFACE).map(text);
    // Packets have marks only because of filters, which are found themselves, and forwarded ones belong to user 0. The
    // kernel applies rules for an output interface to sockets, and those for L3 masters to members of a VRF.
    let matches_none = is_foreign(DESTINATION, header[1])
        || is_foreign(SOURCE, header[2])
        || from.is_some_and(|from| interfaces.iter().all(|(_, name)| *name != from))
        || number(MARK).unwrap_or(0) & number(MASK).unwrap_or(u32::MAX) != 0
        || attribute(attributes, OUTPUT_INTERFACE).is_some()
        || attribute(attributes, L3_MASTER).is_some_and(|is_for_masters| is_for_masters != [0])
        || number(USERS).is_some_and(|first| first != 0);
    let suppresses =
        [SUPPRESS_GROUP, SUPPRESS_PREFIX_BITS].into_iter().any(|kind| number(kind).unwrap_or(NONE) != NONE);
    let table = number(TABLE).unwrap_or(u32::from(header[4]));
    let is_harmless = match header[7] {
        ACTION_NOP => true,
        ACTION_TO_TABLE => TABLES.contains(&table) && !suppresses,
        _ => false,
    };
    let matters = !is_harmless && (is_inverted || !matches_none);
    matters.then(|| format!("{name} policy routing rule of priority {}", number(PRIORITY).unwrap_or(0)))
}

/// Reads a number in the byte order of the machine.
fn word(contents: &[u8]) -> Option<u32> {
    contents.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}
