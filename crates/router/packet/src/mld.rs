//! Multicast listener discovery for IPv6 (RFC 3810, and RFC 2710 for version 1): what a listener is asked and says, so
//! that switches that look on send it what goes to its groups. Neighbour solicitations do: without a report, nobody
//! finds an address behind such a switch.

use std::net::Ipv6Addr;
use std::time::Duration;

use crate::icmpv6::{self, pseudo};
use crate::octets::{array_at, put, u16_at};
use crate::{Protocol, ipv6};

/// To whom reports go: everybody who hears of version 2.
pub const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x16);
/// The hop limit of every report, and of every query.
pub const HOP_LIMIT: u8 = 1;
/// The type of a query, of both versions.
pub const QUERY: u8 = 130;
/// The type of a report.
pub const REPORT: u8 = 143;
/// The type of a report of version 1.
pub const REPORT_V1: u8 = 131;
/// Bytes behind the IPv6 header of a report of version 1.
pub const PAYLOAD_BYTES_V1: usize = ALERT.len() + MESSAGE_BYTES_V1;
/// The most groups of one report: what every link carries.
pub const GROUPS_MAX: usize = 60;

/// The hop-by-hop header that says *router alert* (RFC 2711), and two bytes of padding.
const ALERT: [u8; 8] = [Protocol::ICMPV6.0, 0, 5, 2, 0, 0, 1, 0];
const HEADER_BYTES: usize = 8;
const RECORD_BYTES: usize = 20;
/// Queries and reports of version 1 are so long; queries of version 2 longer, by sources too.
const MESSAGE_BYTES_V1: usize = 24;
const QUERY_BYTES: usize = 28;
const SOURCE_BYTES: usize = 16;
/// Of a hop-by-hop header: what pads one byte, and what says *router alert*.
const PAD_ONE: u8 = 0;
const ROUTER_ALERT: u8 = 5;

/// Why a listener says so (RFC 3810, section 5.2.12). It listens to whoever sends to the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RecordType {
    /// It still does.
    ModeIsExclude = 2,
    /// From now on.
    ChangeToExclude = 4,
}

/// Bytes behind the IPv6 header of a report on so many groups, [`GROUPS_MAX`] at most.
pub fn payload_bytes(groups: usize) -> usize {
    ALERT.len() + HEADER_BYTES + RECORD_BYTES * groups.min(GROUPS_MAX)
}

/// Writes what follows the IPv6 header of a report, whose next header is [`crate::ipv6::HOP_BY_HOP`], to the front of
/// `bytes`, which has room for [`payload_bytes`]; says how many they are. Groups beyond [`GROUPS_MAX`] are left out.
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

/// Writes what follows the IPv6 header of a report of version 1 on one group, to which it goes: [`PAYLOAD_BYTES_V1`].
pub fn emit_report_v1(bytes: &mut [u8], source: Ipv6Addr, group: Ipv6Addr) {
    put(bytes, 0, &ALERT);
    let message = &mut bytes[ALERT.len()..PAYLOAD_BYTES_V1];
    put(message, 0, &[REPORT_V1, 0, 0, 0, 0, 0, 0, 0]);
    put(message, 8, &group.octets());
    let checksum = pseudo(source, group, message.len()).add_bytes(message).checksum();
    put(message, 2, &checksum.to_be_bytes());
}

/// What a router asks listeners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query {
    /// Whether it is of version 1, and so must the answer be.
    pub is_v1: bool,
    /// An answer comes within this time.
    pub response_max: Duration,
    /// Of which group; `None` is of all. Sources that it names do not count: who listens to all of them says so.
    pub group: Option<Ipv6Addr>,
}

impl Query {
    /// The query that a packet is, when all holds together (RFC 3810, sections 6.2 and 8.1).
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

/// The Maximum Response Code of version 2 (RFC 3810, section 5.1.3): a number, or one with an exponent.
fn response_ms(code: u16) -> u64 {
    let (mantissa, exponent) = (u64::from(code & 0xfff), code >> 12 & 7);
    if code < 0x8000 { code.into() } else { (mantissa | 0x1000) << (exponent + 3) }
}

/// Whether a hop-by-hop header, by itself or the first of several, says that routers are to look at what follows.
fn has_router_alert(header: &[u8]) -> bool {
    let Some(bytes) = header.get(1).map(|length| (usize::from(*length) + 1) * 8) else { return false };
    let Some(mut options) = header.get(2..bytes) else { return false };
    // Each turn takes a byte at least.
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

    /// A query with this behind the group's address, in a packet with these options.
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
    fn queries_of_both_versions_are_told_by_their_length() {
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
        assert_eq!(read(&query(&ALERT, 1, group, &with_source[..19])), None, "a source that is cut off");
        for rest in [&[0][..], &[0; 2], &[0; 3]] {
            assert_eq!(read(&query(&ALERT, 1, group, rest)), None, "{rest:?}");
        }
    }

    #[test]
    fn what_came_over_a_router_or_without_its_alert_is_no_query() {
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
