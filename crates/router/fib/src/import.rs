//! Imports routing tables from files: uncompressed MRT dumps, as route collectors publish them, and lists of prefixes.
//!
//! Files are read one record or line at a time. All content is validated; a malformed file ends with one error that
//! states the position.

use std::io::{self, BufRead, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use thiserror::Error;

/// Maximum length of a record in bytes: a route seen by a thousand peers takes a tenth of it.
const RECORD_BYTES_MAX: usize = 4 << 20;

/// Maximum length of a line in bytes.
const LINE_BYTES_MAX: u64 = 4096;

const RECORD_HEADER_BYTES: usize = 12;

/// MRT type of table dumps (RFC 6396, section 4.3) and its subtypes; those with additional paths are from RFC 8050.
const TABLE_DUMP_V2: u16 = 13;
const RIB_IPV4_UNICAST: u16 = 2;
const RIB_IPV6_UNICAST: u16 = 4;
const RIB_IPV4_UNICAST_ADD_PATH: u16 = 8;
const RIB_IPV6_UNICAST_ADD_PATH: u16 = 10;

/// BGP path attributes.
const NEXT_HOP: u8 = 3;
const MP_REACH_NLRI: u8 = 14;
/// Attribute flag: the length field has two bytes.
const EXTENDED_LENGTH: u8 = 0x10;

/// An imported route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Prefix; bits beyond its length are zero.
    pub prefix: IpNet,
    /// Next hop, if any; in a dump, that of the first path.
    pub next_hop: Option<IpAddr>,
}

/// Why an import failed.
#[derive(Debug, Error)]
pub enum Error {
    /// The file cannot be read.
    #[error(transparent)]
    Read(#[from] io::Error),
    /// A line is longer than any in a list of prefixes.
    #[error("line {line}: longer than {LINE_BYTES_MAX} bytes; is this a list of prefixes?")]
    LineTooLong {
        /// Line number, from 1 on.
        line: usize,
    },
    /// A line does not begin with a prefix.
    #[error("line {line}: '{text}' is not a prefix; write one like 192.0.2.0/24, optionally followed by a next hop")]
    NotAPrefix {
        /// Line number, from 1 on.
        line: usize,
        /// Text of the line, truncated.
        text: String,
    },
    /// A record of a dump is malformed.
    #[error("record {record}: {what}; is this a complete, uncompressed MRT dump?")]
    Record {
        /// Record number, from 1 on.
        record: usize,
        /// Problem.
        what: &'static str,
    },
}

/// Reads a list of prefixes, one per line. An address in the second column is the next hop; further columns are
/// ignored, as are empty lines and those that begin with `#`.
pub fn prefixes(mut reader: impl BufRead) -> impl Iterator<Item = Result<Route, Error>> {
    let mut line = 0;
    until_error(move || {
        // Each iteration consumes a line, and the file is finite.
        loop {
            line += 1;
            let mut bytes = Vec::new();
            let count = reader.by_ref().take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut bytes)?;
            if count == 0 {
                return Ok(None);
            }
            if count as u64 > LINE_BYTES_MAX {
                return Err(Error::LineTooLong { line });
            }
            let text = String::from_utf8_lossy(&bytes);
            let text = text.trim();
            if !text.is_empty() && !text.starts_with('#') {
                return route_of(text).map(Some).ok_or_else(|| Error::NotAPrefix { line, text: truncated(text) });
            }
        }
    })
}

/// Iterates over what `next` returns, up to the first error: what follows a malformed part of a file has no meaning.
fn until_error(mut next: impl FnMut() -> Result<Option<Route>, Error>) -> impl Iterator<Item = Result<Route, Error>> {
    let mut has_failed = false;
    std::iter::from_fn(move || {
        if has_failed {
            return None;
        }
        let route = next();
        has_failed = route.is_err();
        route.transpose()
    })
}

fn route_of(text: &str) -> Option<Route> {
    let mut words = text.split(|c: char| c.is_whitespace() || c == ',' || c == '|').filter(|word| !word.is_empty());
    let prefix: IpNet = words.next()?.parse().ok()?;
    let next_hop = words.next().and_then(|word| word.parse().ok());
    Some(Route { prefix: prefix.trunc(), next_hop })
}

fn truncated(text: &str) -> String {
    text.chars().take(40).collect()
}

/// Reads the routes of an uncompressed MRT table dump (TABLE_DUMP_V2). Records of other types are skipped.
pub fn mrt(mut reader: impl Read) -> impl Iterator<Item = Result<Route, Error>> {
    let mut record = 0;
    until_error(move || {
        // Each iteration consumes a record, and the file is finite.
        loop {
            record += 1;
            let Some(found) = next_record(&mut reader, record)? else { return Ok(None) };
            let route = parse_rib(found.subtype, &found.body).map_err(|what| Error::Record { record, what })?;
            if route.is_some() {
                return Ok(route);
            }
        }
    })
}

/// A record of a dump.
struct Record {
    /// `None` for types other than table dumps.
    subtype: Option<u16>,
    body: Vec<u8>,
}

/// Reads the next record, or returns `None` at the end of the file.
fn next_record(reader: &mut impl Read, record: usize) -> Result<Option<Record>, Error> {
    let mut header = Vec::with_capacity(RECORD_HEADER_BYTES);
    reader.by_ref().take(RECORD_HEADER_BYTES as u64).read_to_end(&mut header)?;
    if header.is_empty() {
        return Ok(None);
    }
    let malformed = |what| Error::Record { record, what };
    let mut rest = &header[..];
    let (_time, kind) = take_u32(&mut rest).zip(take_u16(&mut rest)).ok_or(malformed("truncated header"))?;
    let (subtype, bytes) = take_u16(&mut rest).zip(take_u32(&mut rest)).ok_or(malformed("truncated header"))?;
    if bytes as usize > RECORD_BYTES_MAX {
        return Err(malformed("length exceeds 4 MiB"));
    }
    let mut body = Vec::new();
    reader.by_ref().take(u64::from(bytes)).read_to_end(&mut body)?;
    if body.len() < bytes as usize {
        return Err(malformed("truncated body"));
    }
    Ok(Some(Record { subtype: (kind == TABLE_DUMP_V2).then_some(subtype), body }))
}

/// Parses the route of a record; returns `None` for a record without one.
fn parse_rib(subtype: Option<u16>, mut body: &[u8]) -> Result<Option<Route>, &'static str> {
    let (width, has_path_id) = match subtype {
        Some(RIB_IPV4_UNICAST) => (32, false),
        Some(RIB_IPV6_UNICAST) => (128, false),
        Some(RIB_IPV4_UNICAST_ADD_PATH) => (32, true),
        Some(RIB_IPV6_UNICAST_ADD_PATH) => (128, true),
        _ => return Ok(None),
    };
    let rest = &mut body;
    take_u32(rest).ok_or("missing sequence number")?;
    let prefix = take_prefix(rest, width)?;
    let entries = take_u16(rest).ok_or("missing entry count")?;
    if entries == 0 {
        return Ok(None);
    }
    // Peer index, originated time and path identifier.
    take(rest, if has_path_id { 10 } else { 6 }).ok_or("truncated path")?;
    let attributes = take_u16(rest).ok_or("truncated path")?;
    let attributes = take(rest, usize::from(attributes)).ok_or("truncated attributes")?;
    Ok(Some(Route { prefix, next_hop: next_hop(attributes)? }))
}

fn take_prefix(rest: &mut &[u8], width: u8) -> Result<IpNet, &'static str> {
    let [bits] = *take(rest, 1).ok_or("missing prefix")? else { return Err("missing prefix") };
    if bits > width {
        return Err("prefix longer than an address");
    }
    let octets = take(rest, usize::from(bits).div_ceil(8)).ok_or("truncated prefix")?;
    let mut address = [0; 16];
    address[..octets.len()].copy_from_slice(octets);
    let bits_of = u128::from_be_bytes(address);
    let net: Option<IpNet> = if width == 32 {
        Ipv4Net::new(Ipv4Addr::from_bits((bits_of >> 96) as u32), bits).ok().map(IpNet::V4)
    } else {
        Ipv6Net::new(Ipv6Addr::from_bits(bits_of), bits).ok().map(IpNet::V6)
    };
    net.map(|net| net.trunc()).ok_or("prefix longer than an address")
}

/// Returns the next hop in the attributes of a path.
fn next_hop(mut attributes: &[u8]) -> Result<Option<IpAddr>, &'static str> {
    let rest = &mut attributes;
    // Bounded by the length: each attribute takes at least three bytes.
    while !rest.is_empty() {
        let [flags, kind] = *take(rest, 2).ok_or("truncated attribute")? else { break };
        let bytes = match flags & EXTENDED_LENGTH {
            0 => take(rest, 1).map(|bytes| usize::from(bytes[0])),
            _ => take_u16(rest).map(usize::from),
        };
        let value = bytes.and_then(|bytes| take(rest, bytes)).ok_or("truncated attribute")?;
        match kind {
            NEXT_HOP => {
                let octets: [u8; 4] = value.try_into().map_err(|_| "next hop is not an address")?;
                return Ok(Some(octets.into()));
            }
            MP_REACH_NLRI => return mp_next_hop(value).map(Some),
            _ => {}
        }
    }
    Ok(None)
}

/// Returns the next hop of an MP_REACH_NLRI attribute, which dumps abbreviate to a length and the next hop (RFC 6396,
/// section 4.3.4), though some contain it in full. A link-local address may follow the global one.
fn mp_next_hop(value: &[u8]) -> Result<IpAddr, &'static str> {
    let mut rest = value;
    if value.first() == Some(&0) {
        // The full attribute begins with the address family, whose first byte is 0, which is not a valid length.
        take(&mut rest, 3).ok_or("truncated next hop")?;
    }
    let bytes = take(&mut rest, 1).ok_or("truncated next hop")?[0];
    let octets = take(&mut rest, usize::from(bytes)).ok_or("truncated next hop")?;
    match octets.len() {
        4 => Ok(<[u8; 4]>::try_from(octets).expect("four").into()),
        16 | 32 => Ok(<[u8; 16]>::try_from(&octets[..16]).expect("sixteen").into()),
        _ => Err("next hop is not an address"),
    }
}

fn take<'a>(rest: &mut &'a [u8], bytes: usize) -> Option<&'a [u8]> {
    let (taken, others) = rest.split_at_checked(bytes)?;
    *rest = others;
    Some(taken)
}

fn take_u16(rest: &mut &[u8]) -> Option<u16> {
    take(rest, 2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
}

fn take_u32(rest: &mut &[u8]) -> Option<u32> {
    take(rest, 4).map(|bytes| u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a record of a dump.
    fn record(kind: u16, subtype: u16, body: &[u8]) -> Vec<u8> {
        let header = [&[0; 4][..], &kind.to_be_bytes(), &subtype.to_be_bytes(), &(body.len() as u32).to_be_bytes()];
        [&header.concat()[..], body].concat()
    }

    /// Returns the body of a record with a prefix and one path with these attributes.
    fn rib(prefix: &[u8], path_id: &[u8], attributes: &[u8]) -> Vec<u8> {
        let length = (attributes.len() as u16).to_be_bytes();
        [&[0, 0, 0, 9][..], prefix, &[0, 1], &[0, 3], &[1, 2, 3, 4], path_id, &length, attributes].concat()
    }

    const ORIGIN: [u8; 4] = [0x40, 1, 1, 0];
    const VIA: [u8; 7] = [0x40, 3, 4, 203, 0, 113, 1];

    fn dump() -> Vec<u8> {
        let via_long = [&[0x90, 14, 0, 17, 16][..], &Ipv6Addr::LOCALHOST.octets()].concat();
        let via_full = [&[0x80, 14, 38, 0, 2, 1, 32][..], &[0x20; 16], &[0xfe; 16], &[0, 0]].concat();
        [
            record(13, 1, b"an index of peers"),
            record(13, RIB_IPV4_UNICAST, &rib(&[20, 10, 1, 0xff], &[], &[&ORIGIN[..], &VIA].concat())),
            record(16, 4, b"an update of a peer"),
            record(13, RIB_IPV6_UNICAST, &rib(&[29, 0x2a, 0, 0x14, 0x57], &[], &via_long)),
            record(13, RIB_IPV4_UNICAST_ADD_PATH, &rib(&[0], &[0, 0, 0, 7], &ORIGIN)),
            record(13, RIB_IPV6_UNICAST_ADD_PATH, &rib(&[8, 0x20], &[0, 0, 0, 7], &via_full)),
        ]
        .concat()
    }

    fn route(prefix: &str, next_hop: Option<&str>) -> Route {
        let next_hop = next_hop.map(|address| address.parse().expect("an address"));
        Route { prefix: prefix.parse().expect("a prefix"), next_hop }
    }

    #[test]
    fn a_dump_of_tables_is_read_record_by_record() {
        let routes: Vec<Route> = mrt(&dump()[..]).map(|route| route.expect("a whole dump")).collect();
        let expected = [
            route("10.1.240.0/20", Some("203.0.113.1")),
            route("2a00:1450::/29", Some("::1")),
            route("0.0.0.0/0", None),
            route("2000::/8", Some("2020:2020:2020:2020:2020:2020:2020:2020")),
        ];
        assert_eq!(routes, expected);
    }

    #[test]
    fn a_truncated_or_malformed_dump_ends_with_the_record_at_fault() {
        let dump = dump();
        let mut whole = 0;
        for length in 0..dump.len() {
            let last = mrt(&dump[..length]).last();
            // A dump truncated between records is valid.
            match last {
                Some(Err(Error::Record { record, .. })) => assert!((1..=6).contains(&record)),
                Some(Ok(_)) | None => whole += 1,
                Some(Err(error)) => panic!("{error}"),
            }
        }
        assert_eq!(whole, 6, "before each record");
        let message = |subtype, body: &[u8]| {
            let bytes = record(13, subtype, body);
            let mut routes = mrt(&bytes[..]);
            let error = routes.next().expect("an error").expect_err("an error");
            assert!(routes.next().is_none(), "nothing is read after an error");
            error.to_string()
        };
        let long_prefix = message(RIB_IPV4_UNICAST, &rib(&[33, 1, 2, 3, 4, 5], &[], &[]));
        assert_eq!(long_prefix, "record 1: prefix longer than an address; is this a complete, uncompressed MRT dump?");
        assert!(message(RIB_IPV4_UNICAST, &rib(&[8, 10], &[], &[0x40, 3, 3, 1, 2, 3])).contains("not an address"));
        assert!(message(RIB_IPV4_UNICAST, &rib(&[8, 10], &[], &[0x50, 3, 1])).contains("truncated"));
        assert!(message(RIB_IPV6_UNICAST, &rib(&[8, 10], &[], &[0x80, 14, 2, 16, 1])).contains("truncated"));
        let long = [&[0; 4][..], &[0, 13, 0, 2], &[0xff; 4]].concat();
        assert!(matches!(mrt(&long[..]).next(), Some(Err(Error::Record { record: 1, what: "length exceeds 4 MiB" }))));
    }

    #[test]
    fn a_list_is_read_line_by_line_and_ends_at_a_line_without_a_prefix() {
        let text = "# routes\n\n192.0.2.128/24 198.51.100.1 5\r\n2001:db8::/32,2001:db8::1\n\
                    10.0.0.0/8 AS65000\nten\n1.0.0.0/8\n";
        let mut routes = prefixes(text.as_bytes());
        let mut next = || routes.next();
        assert_eq!(next().and_then(Result::ok), Some(route("192.0.2.0/24", Some("198.51.100.1"))));
        assert_eq!(next().and_then(Result::ok), Some(route("2001:db8::/32", Some("2001:db8::1"))));
        assert_eq!(next().and_then(Result::ok), Some(route("10.0.0.0/8", None)));
        let error = next().expect("a line").expect_err("no prefix").to_string();
        assert!(error.starts_with("line 6: 'ten' is not a prefix; "), "{error}");
        assert!(next().is_none());
        let wrong = "x".repeat(100);
        let found = prefixes(wrong.as_bytes()).next();
        assert!(matches!(found, Some(Err(Error::NotAPrefix { line: 1, text })) if text.len() == 40));
        // The rest of an overlong line is not read as another line.
        let comment = format!("# {}1.0.0.0/8\n", " ".repeat(LINE_BYTES_MAX as usize - 2));
        for endless in ["x".repeat(10_000), comment] {
            let found: Vec<_> = prefixes(endless.as_bytes()).collect();
            assert!(matches!(found[..], [Err(Error::LineTooLong { line: 1 })]), "{found:?}");
        }
        assert!(matches!(prefixes(&b"10.0.0.0/33\n"[..]).next(), Some(Err(Error::NotAPrefix { .. }))));
    }
}
