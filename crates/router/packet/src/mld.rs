//! Multicast listener discovery for IPv6 (RFC 3810, and RFC 2710 for version 1): the messages that a listener receives
//! and sends, so that switches with MLD snooping forward the packets of its groups to it. Neighbour solicitations are
//! such packets: without reports, nobody can resolve an address behind such a switch.

use std::net::Ipv6Addr;
use std::time::Duration;

use crate::icmpv6::{self, pseudo};
use crate::octets::{array_at, put, u16_at};
use crate::{Protocol, ipv6};

/// Destination of reports: all MLDv2-capable routers.
pub const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x16);
/// Hop limit of every report and query.
pub const HOP_LIMIT: u8 = 1;
/// ICMPv6 type of a query of either version.
pub const QUERY: u8 = 130;
/// ICMPv6 type of a report of version 2.
pub const REPORT: u8 = 143;
/// ICMPv6 type of a report of version 1.
pub const REPORT_V1: u8 = 131;
/// Length in bytes of the IPv6 payload of a report of version 1.
pub const PAYLOAD_BYTES_V1: usize = ALERT.len() + MESSAGE_BYTES_V1;
/// Maximum number of groups in a report: fits the smallest MTU of IPv6.
pub const GROUPS_MAX: usize = 60;

/// A hop-by-hop header with the router alert option (RFC 2711) and two bytes of padding.
const ALERT: [u8; 8] = [Protocol::ICMPV6.0, 0, 5, 2, 0, 0, 1, 0];
const HEADER_BYTES: usize = 8;
const RECORD_BYTES: usize = 20;
/// Length of queries and reports of version 1; queries of version 2 are longer and may list sources.
const MESSAGE_BYTES_V1: usize = 24;
const QUERY_BYTES: usize = 28;
const SOURCE_BYTES: usize = 16;
/// Options of a hop-by-hop header: Pad1 and router alert.
const PAD_ONE: u8 = 0;
const ROUTER_ALERT: u8 = 5;

/// The type of a multicast address record (RFC 3810, section 5.2.12). Both are in EXCLUDE mode with an empty source
/// list: the listener accepts every source of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RecordType {
    /// Current state: the listener is in EXCLUDE mode.
    ModeIsExclude = 2,
    /// Change of state: the listener joins the group.
    ChangeToExclude = 4,
}

/// Returns the length in bytes of the IPv6 payload of a report on `groups` groups, of which [`GROUPS_MAX`] fit.
pub fn payload_bytes(groups: usize) -> usize {
    ALERT.len() + HEADER_BYTES + RECORD_BYTES * groups.min(GROUPS_MAX)
}

/// Writes the IPv6 payload of a report, which begins with a [`crate::ipv6::HOP_BY_HOP`] header, to the front of
/// `bytes`, which must have room for [`payload_bytes`], and returns its length. Groups beyond [`GROUPS_MAX`] are left
/// out.
pub fn emit_report(bytes: &mut [u8], source: Ipv6Addr, record_type: RecordType, groups: &[Ipv6Addr]) -> usize {
    let groups = &groups[..groups.len().min(GROUPS_MAX)];
    let length = payload_bytes(groups.len());
    put(bytes, 0, &ALERT);
    let message = &mut bytes[ALERT.len()..length];
    put(message, 0, &[REPORT, 0, 0, 0, 0, 0, 0, groups.len() as u8]);
    for (record, group) in message[HEADER_BYTES..].chunks_exact_mut(RECORD_BYTES).zip(groups) {
        put(record, 0, &[record_type as u8, 0, 0, 0]);
        put(record, 4, &group.octets());
    }
    let checksum = pseudo(source, ALL_ROUTERS, message.len()).add_bytes(message).checksum();
    put(message, 2, &checksum.to_be_bytes());
    length
}

/// Writes the IPv6 payload of a report of version 1, [`PAYLOAD_BYTES_V1`] long, on one group, which is also its
/// destination.
pub fn emit_report_v1(bytes: &mut [u8], source: Ipv6Addr, group: Ipv6Addr) {
    put(bytes, 0, &ALERT);
    let message = &mut bytes[ALERT.len()..PAYLOAD_BYTES_V1];
    put(message, 0, &[REPORT_V1, 0, 0, 0, 0, 0, 0, 0]);
    put(message, 8, &group.octets());
    let checksum = pseudo(source, group, message.len()).add_bytes(message).checksum();
    put(message, 2, &checksum.to_be_bytes());
}

/// A query, with which a router asks for listeners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query {
    /// Whether the query, and therefore the report that answers it, is of version 1.
    pub is_v1: bool,
    /// Maximum delay of a report.
    pub response_max: Duration,
    /// The queried group; `None` for all groups. Queried sources are ignored: the listener accepts every source.
    pub group: Option<Ipv6Addr>,
}

impl Query {
    /// Returns the query in `packet`, or `None` if the packet is not a valid query (RFC 3810, sections 6.2 and 8.1).
    pub fn parse<T: AsRef<[u8]>>(packet: &ipv6::Packet<T>) -> Option<Query> {
        let (source, payload) = (packet.source(), packet.payload());
        if packet.next_header() != ipv6::HOP_BY_HOP
            || packet.hop_limit() != HOP_LIMIT
            || !source.is_unicast_link_local()
        {
            return None;
        }
        let upper =
            packet.upper_layer().ok().filter(|upper| upper.protocol == Protocol::ICMPV6 && upper.fragment.is_none())?;
        let options = payload.get(..upper.offset)?;
        let message = payload.get(upper.offset..)?;
        let view = icmpv6::Packet::new_checked(message).ok()?;
        let is_query = view.kind() == QUERY && view.verify_checksum(source, packet.destination());
        if !is_query || !has_router_alert(options) {
            return None;
        }
        let is_v1 = message.len() == MESSAGE_BYTES_V1;
        let is_v2 = message.len() >= QUERY_BYTES
            && message.len() >= QUERY_BYTES + SOURCE_BYTES * usize::from(u16_at(message, 26));
        if !is_v1 && !is_v2 {
            return None;
        }
        let group = Ipv6Addr::from_bits(u128::from_be_bytes(array_at(message, 8)));
        if !group.is_unspecified() && !group.is_multicast() {
            return None;
        }
        let code = u16_at(message, 4);
        let response_max = Duration::from_millis(if is_v1 { code.into() } else { response_ms(code) });
        Some(Query { is_v1, response_max, group: Some(group).filter(|group| !group.is_unspecified()) })
    }
}

/// Returns the maximum response delay in ms that a Maximum Response Code encodes (RFC 3810, section 5.1.3).
fn response_ms(code: u16) -> u64 {
    let (mantissa, exponent) = (u64::from(code & 0xfff), code >> 12 & 7);
    if code < 0x8000 { code.into() } else { (mantissa | 0x1000) << (exponent + 3) }
}

/// Returns whether the hop-by-hop header at the front of `header` has a router alert option.
fn has_router_alert(header: &[u8]) -> bool {
    let Some(bytes) = header.get(1).map(|length| (usize::from(*length) + 1) * 8) else { return false };
    let Some(mut options) = header.get(2..bytes) else { return false };
    // Bounded by the length: each iteration consumes at least one byte.
    while let [kind, rest @ ..] = options {
        options = match (*kind, rest) {
            (PAD_ONE, rest) => rest,
            (ROUTER_ALERT, [2, ..]) => return true,
            (_, [length, data @ ..]) => data.get(usize::from(*length)..).unwrap_or_default(),
            (_, []) => &[],
        };
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTER: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 9);
    const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

    /// Returns a packet with these hop-by-hop options and a query in which `rest` follows the group address.
    fn query(options: &[u8], code: u16, group: Ipv6Addr, rest: &[u8]) -> Vec<u8> {
        let code = code.to_be_bytes();
        let mut message = [&[QUERY, 0, 0, 0, code[0], code[1], 0, 0][..], &group.octets(), rest].concat();
        let checksum = pseudo(ROUTER, ALL_NODES, message.len()).add_bytes(&message).checksum();
        message[2..4].copy_from_slice(&checksum.to_be_bytes());
        let payload_bytes = options.len() + message.len();
        let mut packet = vec![0; ipv6::HEADER_BYTES];
        ipv6::Repr {
            traffic_class: 0,
            flow_label: 0,
            payload_bytes,
            next_header: ipv6::HOP_BY_HOP,
            hop_limit: HOP_LIMIT,
            source: ROUTER,
            destination: ALL_NODES,
        }
        .emit(&mut packet);
        [packet, options.to_vec(), message].concat()
    }

    fn read(bytes: &[u8]) -> Option<Query> {
        Query::parse(&ipv6::Packet::new_checked(bytes).expect("a whole packet"))
    }

    #[test]
    fn queries_of_both_versions_are_distinguished_by_their_length() {
        let group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 7);
        let is = |is_v1, milliseconds, group| {
            Some(Query { is_v1, response_max: Duration::from_millis(milliseconds), group })
        };
        assert_eq!(read(&query(&ALERT, 10_000, Ipv6Addr::UNSPECIFIED, &[])), is(true, 10_000, None));
        assert_eq!(read(&query(&ALERT, 0x8000, Ipv6Addr::UNSPECIFIED, &[])), is(true, 0x8000, None));
        assert_eq!(read(&query(&ALERT, 0x7fff, group, &[2, 125, 0, 0])), is(false, 0x7fff, Some(group)));
        assert_eq!(read(&query(&ALERT, 0x8000, group, &[2, 125, 0, 0])), is(false, 32_768, Some(group)));
        assert_eq!(read(&query(&ALERT, 0xffff, group, &[2, 125, 0, 0])), is(false, 0x1fff << 10, Some(group)));
        let with_source = [&[2, 125, 0, 1][..], &[7; 16]].concat();
        assert_eq!(read(&query(&ALERT, 1, group, &with_source)), is(false, 1, Some(group)));
        assert_eq!(read(&query(&ALERT, 1, group, &with_source[..19])), None, "a truncated source");
        for rest in [&[0][..], &[0; 2], &[0; 3]] {
            assert_eq!(read(&query(&ALERT, 1, group, rest)), None, "{rest:?}");
        }
    }

    #[test]
    fn queries_that_crossed_a_router_or_lack_a_router_alert_are_rejected() {
        let with = |options: &[u8]| read(&query(options, 1, Ipv6Addr::UNSPECIFIED, &[])).is_some();
        assert!(with(&ALERT) && with(&[58, 0, 0, 0, 5, 2, 0, 0]) && with(&[58, 0, 1, 0, 5, 2, 0, 0]));
        for options in [[58, 0, 1, 4, 5, 2, 0, 0], [58, 0, 0, 0, 0, 0, 0, 5], [58, 0, 0, 0, 0, 0, 0, 9]] {
            assert!(!with(&options), "{options:?}");
        }
        assert!(!with(&[58, 0, 1, 255, 5, 2, 0, 0]));
        let good = query(&ALERT, 1, Ipv6Addr::UNSPECIFIED, &[]);
        for (at, value) in [(7, 2), (8, 0x20), (6, 58), (48, 131), (50, 1), (56, 0x20)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert_eq!(read(&bad), None, "byte {at}");
        }
    }
}
