//! Neighbour discovery for IPv6 (RFC 4861): the messages that a router sends and understands.
//!
//! Before parsing, callers must check that the packet's hop limit is 255: a packet from beyond the link cannot have it.

use std::net::Ipv6Addr;

use crate::Error;
use crate::error::at_least;
use crate::ethernet::MacAddress;
use crate::icmpv6::{Packet, pseudo};
use crate::octets::{array_at, put, u16_at, u32_at};

/// The hop limit of every neighbour discovery packet.
pub const HOP_LIMIT: u8 = 255;

/// Maximum length in bytes of a [`Message`].
pub const MESSAGE_BYTES_MAX: usize = 64;

/// The type of a router solicitation.
pub const ROUTER_SOLICITATION: u8 = 133;
/// The type of a router advertisement.
pub const ROUTER_ADVERTISEMENT: u8 = 134;
/// The type of a neighbour solicitation.
pub const NEIGHBOUR_SOLICITATION: u8 = 135;
/// The type of a neighbour advertisement.
pub const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
/// The type of a redirect.
pub const REDIRECT: u8 = 137;

const SOURCE_MAC: u8 = 1;
const TARGET_MAC: u8 = 2;
const PREFIX: u8 = 3;
const REDIRECTED: u8 = 4;
const MTU: u8 = 5;

/// Returns the solicited-node multicast address of `address` (RFC 4291, section 2.7.1).
pub fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b, c] = address.octets();
    Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(a), u16::from(b) << 8 | u16::from(c))
}

/// A redirect: tells a host of a better first hop (RFC 4861, section 4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Redirect<'a> {
    /// Target address: the link-local address of a better router, or `destination` if that is on the link.
    pub target: Ipv6Addr,
    /// Destination address that is redirected to the target.
    pub destination: Ipv6Addr,
    /// Link-layer address of the target, if known.
    pub target_mac: Option<MacAddress>,
    /// The packet that caused the redirect: its header and a part of its payload.
    pub original: &'a [u8],
}

impl Redirect<'_> {
    /// Length in bytes without `original`: header, both addresses, the headers of two options and a MAC address.
    pub const OVERHEAD_BYTES: usize = 40 + 8 + 8;

    /// Writes the message and its checksum to the front of `bytes`, which must have room for
    /// [`Redirect::OVERHEAD_BYTES`] and the original, and returns its length. The original is truncated to a multiple
    /// of 8 bytes, the unit of an option's length.
    pub fn emit(&self, bytes: &mut [u8], source: Ipv6Addr, destination: Ipv6Addr) -> usize {
        put(bytes, 0, &[REDIRECT, 0, 0, 0, 0, 0, 0, 0]);
        put(bytes, 8, &self.target.octets());
        put(bytes, 24, &self.destination.octets());
        let at = emit_mac(bytes, 40, TARGET_MAC, self.target_mac);
        // The length field of an option is one byte, counts units of 8 bytes and includes the option's header.
        let eights = (self.original.len() / 8).min(usize::from(u8::MAX) - 1);
        put(bytes, at, &[REDIRECTED, 1 + eights as u8, 0, 0, 0, 0, 0, 0]);
        put(bytes, at + 8, &self.original[..eights * 8]);
        let length = at + 8 + eights * 8;
        let bytes = &mut bytes[..length];
        let checksum = pseudo(source, destination, length).add_bytes(bytes).checksum();
        put(bytes, 2, &checksum.to_be_bytes());
        length
    }
}

/// A prefix information option (RFC 4861, section 4.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// The prefix.
    pub address: Ipv6Addr,
    /// Prefix length, at most 128.
    pub bits: u8,
    /// On-link flag.
    pub on_link: bool,
    /// Autonomous address-configuration flag.
    pub autonomous: bool,
    /// Valid lifetime in seconds; 2^32 - 1 means infinity.
    pub valid_s: u32,
    /// Preferred lifetime in seconds.
    pub preferred_s: u32,
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// Asks routers for an advertisement.
    RouterSolicitation {
        /// Source link-layer address.
        source_mac: Option<MacAddress>,
    },
    /// Announces a router.
    RouterAdvertisement {
        /// Hop limit that hosts should use; 0 means unspecified.
        hop_limit: u8,
        /// Router lifetime in seconds; 0: not a default router.
        lifetime_s: u16,
        /// Source link-layer address.
        source_mac: Option<MacAddress>,
        /// MTU of the link.
        mtu: Option<u32>,
        /// The first advertised prefix.
        prefix: Option<Prefix>,
    },
    /// Asks for the link-layer address of the target.
    NeighbourSolicitation {
        /// Target address.
        target: Ipv6Addr,
        /// Source link-layer address; absent in duplicate address detection.
        source_mac: Option<MacAddress>,
    },
    /// States the link-layer address of the target.
    NeighbourAdvertisement {
        /// Target address.
        target: Ipv6Addr,
        /// Router flag.
        is_router: bool,
        /// Solicited flag: the message answers a solicitation.
        solicited: bool,
        /// Override flag: replaces a cached link-layer address.
        override_known: bool,
        /// Target link-layer address.
        target_mac: Option<MacAddress>,
    },
}

/// The supported options of a message.
#[derive(Default)]
struct Options {
    source_mac: Option<MacAddress>,
    target_mac: Option<MacAddress>,
    mtu: Option<u32>,
    prefix: Option<Prefix>,
}

impl Options {
    fn parse(mut rest: &[u8]) -> Result<Options, Error> {
        let mut options = Options::default();
        // Bounded by the length: each option takes at least 8 bytes.
        while !rest.is_empty() {
            at_least("ND", rest.len(), 8)?;
            let bytes = usize::from(rest[1]) * 8;
            if bytes == 0 {
                return Err(Error::Malformed { protocol: "ND", what: "option of length 0" });
            }
            at_least("ND", rest.len(), bytes)?;
            options.take(&rest[..bytes]);
            rest = &rest[bytes..];
        }
        Ok(options)
    }

    fn take(&mut self, option: &[u8]) {
        match option[0] {
            SOURCE_MAC => self.source_mac = Some(MacAddress(array_at(option, 2))),
            TARGET_MAC => self.target_mac = Some(MacAddress(array_at(option, 2))),
            MTU => self.mtu = Some(u32_at(option, 4)),
            PREFIX if option.len() == 32 && option[2] <= 128 && self.prefix.is_none() => {
                self.prefix = Some(Prefix {
                    address: Ipv6Addr::from(array_at::<16>(option, 16)),
                    bits: option[2],
                    on_link: option[3] & 0x80 != 0,
                    autonomous: option[3] & 0x40 != 0,
                    valid_s: u32_at(option, 4),
                    preferred_s: u32_at(option, 8),
                });
            }
            _ => {}
        }
    }
}

impl Message {
    /// Parses an ICMPv6 message and verifies its checksum and code.
    pub fn parse(bytes: &[u8], source: Ipv6Addr, destination: Ipv6Addr) -> Result<Message, Error> {
        let packet = Packet::new_checked(bytes)?;
        if !packet.verify_checksum(source, destination) {
            return Err(Error::Checksum { protocol: "ND" });
        }
        if packet.code() != 0 {
            return Err(Error::Malformed { protocol: "ND", what: "code" });
        }
        match packet.kind() {
            ROUTER_SOLICITATION => {
                let options = Options::parse(&bytes[8..])?;
                Ok(Message::RouterSolicitation { source_mac: options.source_mac })
            }
            ROUTER_ADVERTISEMENT => parse_router_advertisement(bytes),
            NEIGHBOUR_SOLICITATION => {
                let (target, options) = parse_neighbour(bytes)?;
                Ok(Message::NeighbourSolicitation { target, source_mac: options.source_mac })
            }
            NEIGHBOUR_ADVERTISEMENT => {
                let (target, options) = parse_neighbour(bytes)?;
                Ok(Message::NeighbourAdvertisement {
                    target,
                    is_router: bytes[4] & 0x80 != 0,
                    solicited: bytes[4] & 0x40 != 0,
                    override_known: bytes[4] & 0x20 != 0,
                    target_mac: options.target_mac,
                })
            }
            kind => Err(Error::Kind { protocol: "ND", kind }),
        }
    }

    /// Writes the message and its checksum to the front of `bytes`, which must have room for [`MESSAGE_BYTES_MAX`], and
    /// returns its length.
    pub fn emit(&self, bytes: &mut [u8], source: Ipv6Addr, destination: Ipv6Addr) -> usize {
        let length = self.emit_body(bytes);
        let bytes = &mut bytes[..length];
        let checksum = pseudo(source, destination, length).add_bytes(bytes).checksum();
        put(bytes, 2, &checksum.to_be_bytes());
        length
    }

    fn emit_body(&self, bytes: &mut [u8]) -> usize {
        match *self {
            Message::RouterSolicitation { source_mac } => {
                put(bytes, 0, &[ROUTER_SOLICITATION, 0, 0, 0, 0, 0, 0, 0]);
                emit_mac(bytes, 8, SOURCE_MAC, source_mac)
            }
            Message::RouterAdvertisement { hop_limit, lifetime_s, source_mac, mtu, prefix } => {
                put(bytes, 0, &[ROUTER_ADVERTISEMENT, 0, 0, 0, hop_limit, 0]);
                put(bytes, 6, &lifetime_s.to_be_bytes());
                // Reachable time and retransmission timer: unspecified.
                put(bytes, 8, &[0; 8]);
                let at = emit_mac(bytes, 16, SOURCE_MAC, source_mac);
                let at = emit_mtu(bytes, at, mtu);
                emit_prefix(bytes, at, prefix)
            }
            Message::NeighbourSolicitation { target, source_mac } => {
                put(bytes, 0, &[NEIGHBOUR_SOLICITATION, 0, 0, 0, 0, 0, 0, 0]);
                put(bytes, 8, &target.octets());
                emit_mac(bytes, 24, SOURCE_MAC, source_mac)
            }
            Message::NeighbourAdvertisement { target, is_router, solicited, override_known, target_mac } => {
                let flags = u8::from(is_router) << 7 | u8::from(solicited) << 6 | u8::from(override_known) << 5;
                put(bytes, 0, &[NEIGHBOUR_ADVERTISEMENT, 0, 0, 0, flags, 0, 0, 0]);
                put(bytes, 8, &target.octets());
                emit_mac(bytes, 24, TARGET_MAC, target_mac)
            }
        }
    }
}

fn parse_router_advertisement(bytes: &[u8]) -> Result<Message, Error> {
    at_least("ND", bytes.len(), 16)?;
    let options = Options::parse(&bytes[16..])?;
    Ok(Message::RouterAdvertisement {
        hop_limit: bytes[4],
        lifetime_s: u16_at(bytes, 6),
        source_mac: options.source_mac,
        mtu: options.mtu,
        prefix: options.prefix,
    })
}

fn parse_neighbour(bytes: &[u8]) -> Result<(Ipv6Addr, Options), Error> {
    at_least("ND", bytes.len(), 24)?;
    let target = Ipv6Addr::from(array_at::<16>(bytes, 8));
    if target.is_multicast() {
        return Err(Error::Malformed { protocol: "ND", what: "target: a multicast address" });
    }
    Ok((target, Options::parse(&bytes[24..])?))
}

fn emit_mac(bytes: &mut [u8], at: usize, kind: u8, mac: Option<MacAddress>) -> usize {
    let Some(mac) = mac else { return at };
    put(bytes, at, &[kind, 1]);
    put(bytes, at + 2, &mac.0);
    at + 8
}

fn emit_mtu(bytes: &mut [u8], at: usize, mtu: Option<u32>) -> usize {
    let Some(mtu) = mtu else { return at };
    put(bytes, at, &[MTU, 1, 0, 0]);
    put(bytes, at + 4, &mtu.to_be_bytes());
    at + 8
}

fn emit_prefix(bytes: &mut [u8], at: usize, prefix: Option<Prefix>) -> usize {
    let Some(prefix) = prefix else { return at };
    let flags = u8::from(prefix.on_link) << 7 | u8::from(prefix.autonomous) << 6;
    put(bytes, at, &[PREFIX, 4, prefix.bits, flags]);
    put(bytes, at + 4, &prefix.valid_s.to_be_bytes());
    put(bytes, at + 8, &prefix.preferred_s.to_be_bytes());
    put(bytes, at + 12, &[0; 4]);
    put(bytes, at + 16, &prefix.address.octets());
    at + 32
}
