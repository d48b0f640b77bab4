//! Addresses as TCP would show them: C socket addresses, tuples, ephemeral ports, and which addresses are this
//! machine's.
//!
//! Inside, an IPv4 address is always an IPv4 address. The mapped form `::ffff:a.b.c.d`, which programs with an IPv6
//! socket see, exists only at the edge: [`canonical`] takes it away, [`to_family`] puts it back.

#![allow(unsafe_code)] // Socket addresses in the memory of C callers.

use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::rendezvous::name_key::NameKey;

/// The family of a program's socket, which decides how addresses are shown to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// `AF_INET`.
    V4,
    /// `AF_INET6`.
    V6,
}

impl Family {
    /// The family with this C number, if TCP has it.
    pub fn from_raw(family: i32) -> Option<Self> {
        match family {
            libc::AF_INET => Some(Self::V4),
            libc::AF_INET6 => Some(Self::V6),
            _ => None,
        }
    }

    /// The C number.
    pub fn raw(self) -> i32 {
        match self {
            Self::V4 => libc::AF_INET,
            Self::V6 => libc::AF_INET6,
        }
    }
}

const SOCKADDR_IN_BYTES: usize = size_of::<libc::sockaddr_in>();
const SOCKADDR_IN6_BYTES: usize = size_of::<libc::sockaddr_in6>();
/// The kernel takes IPv6 addresses without their last field, the scope.
const SOCKADDR_IN6_BYTES_MIN: usize = SOCKADDR_IN6_BYTES - 4;
const SOCKADDR_BYTES_MAX: usize = size_of::<libc::sockaddr_storage>();

/// Reads the address a program passed to `bind` or `connect`.
///
/// # Errors
/// `FAULT` for a null pointer, `INVAL` for a length no address has, `AFNOSUPPORT` for another family than IPv4 and
/// IPv6.
///
/// # Safety
/// `pointer` is null or readable for `bytes` bytes.
pub unsafe fn read_sockaddr(pointer: *const libc::sockaddr, bytes: libc::socklen_t) -> Result<SocketAddr, Errno> {
    let bytes = bytes as usize;
    if pointer.is_null() {
        return Err(Errno::FAULT);
    }
    if !(size_of::<libc::sa_family_t>()..=SOCKADDR_BYTES_MAX).contains(&bytes) {
        return Err(Errno::INVAL);
    }
    let mut copy = [0_u8; SOCKADDR_BYTES_MAX];
    // SAFETY: the caller says that `bytes` bytes are readable; they are at most as many as `copy` has, and `copy` is
    // ours alone.
    unsafe { std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), copy.as_mut_ptr(), bytes) };
    decode_sockaddr(&copy[..bytes])
}

/// The address in the bytes of a C socket address.
fn decode_sockaddr(bytes: &[u8]) -> Result<SocketAddr, Errno> {
    let family = libc::sa_family_t::from_ne_bytes(array(bytes, 0).ok_or(Errno::INVAL)?);
    let port = || array(bytes, 2).map(u16::from_be_bytes).ok_or(Errno::INVAL);
    match Family::from_raw(i32::from(family)).ok_or(Errno::AFNOSUPPORT)? {
        Family::V4 if bytes.len() < SOCKADDR_IN_BYTES => Err(Errno::INVAL),
        Family::V4 => {
            let ip = Ipv4Addr::from(array::<4>(bytes, 4).ok_or(Errno::INVAL)?);
            Ok(SocketAddr::V4(SocketAddrV4::new(ip, port()?)))
        }
        Family::V6 if bytes.len() < SOCKADDR_IN6_BYTES_MIN => Err(Errno::INVAL),
        Family::V6 => {
            let flow = u32::from_ne_bytes(array(bytes, 4).ok_or(Errno::INVAL)?);
            let ip = Ipv6Addr::from(array::<16>(bytes, 8).ok_or(Errno::INVAL)?);
            let scope = array(bytes, 24).map_or(0, u32::from_ne_bytes);
            Ok(SocketAddr::V6(SocketAddrV6::new(ip, port()?, flow, scope)))
        }
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

/// The bytes of a C socket address, and how many of them count.
pub fn encode_sockaddr(address: SocketAddr) -> ([u8; SOCKADDR_IN6_BYTES], usize) {
    let mut bytes = [0_u8; SOCKADDR_IN6_BYTES];
    bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
    match address {
        SocketAddr::V4(v4) => {
            bytes[..2].copy_from_slice(&(libc::AF_INET as libc::sa_family_t).to_ne_bytes());
            bytes[4..8].copy_from_slice(&v4.ip().octets());
            (bytes, SOCKADDR_IN_BYTES)
        }
        SocketAddr::V6(v6) => {
            bytes[..2].copy_from_slice(&(libc::AF_INET6 as libc::sa_family_t).to_ne_bytes());
            bytes[4..8].copy_from_slice(&v6.flowinfo().to_ne_bytes());
            bytes[8..24].copy_from_slice(&v6.ip().octets());
            bytes[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
            (bytes, SOCKADDR_IN6_BYTES)
        }
    }
}

/// Writes an address as `getsockname`, `getpeername` and `accept` do: cut to the caller's length, which then says the
/// full length.
///
/// # Errors
/// `FAULT` for a null pointer that would have to be written through, `INVAL` for a negative length.
///
/// # Safety
/// `bytes_inout` is null or readable and writable; `pointer` is null or writable for as many bytes as it says.
pub unsafe fn write_sockaddr(
    address: SocketAddr,
    pointer: *mut libc::sockaddr,
    bytes_inout: *mut libc::socklen_t,
) -> Result<(), Errno> {
    if bytes_inout.is_null() {
        return Err(Errno::FAULT);
    }
    let (bytes, full) = encode_sockaddr(address);
    // SAFETY: not null, and the caller says it is readable.
    let room = unsafe { bytes_inout.read_unaligned() };
    let room = i32::try_from(room).map_err(|_| Errno::INVAL)? as usize;
    let written = full.min(room);
    if pointer.is_null() && written > 0 {
        return Err(Errno::FAULT);
    }
    if written > 0 {
        // SAFETY: `written` is at most what the caller says is writable, and at most the length of `bytes`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), pointer.cast::<u8>(), written) };
    }
    // SAFETY: not null, and the caller says it is writable.
    unsafe { bytes_inout.write_unaligned(full as libc::socklen_t) };
    Ok(())
}

/// The one form of an address used inside: IPv4 unmapped, no flow label, a scope only where it means something.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    let SocketAddr::V6(v6) = address else { return address };
    match v6.ip().to_ipv4_mapped() {
        Some(v4) => SocketAddr::V4(SocketAddrV4::new(v4, v6.port())),
        None => {
            let scope = if is_link_local(v6.ip()) { v6.scope_id() } else { 0 };
            SocketAddr::V6(SocketAddrV6::new(*v6.ip(), v6.port(), 0, scope))
        }
    }
}

fn is_link_local(ip: &Ipv6Addr) -> bool {
    ip.segments()[0] & 0xffc0 == 0xfe80
}

/// The form in which a program with a socket of `family` sees a canonical address.
pub fn to_family(address: SocketAddr, family: Family) -> SocketAddr {
    match (address, family) {
        (SocketAddr::V4(v4), Family::V6) => {
            SocketAddr::V6(SocketAddrV6::new(v4.ip().to_ipv6_mapped(), v4.port(), 0, 0))
        }
        _ => address,
    }
}

/// Where a connection to `address` goes: canonical, and the unspecified address means this machine, as on Linux.
pub fn destination(address: SocketAddr) -> SocketAddr {
    // `::ffff:0.0.0.0` means 127.0.0.1 too, so the mapping goes first.
    let mut address = canonical(address);
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    address
}

/// Both addresses of a connection, canonical, seen from one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuple {
    /// This end's.
    pub local: SocketAddr,
    /// The other end's.
    pub peer: SocketAddr,
}

/// Why bytes are not the name of a tuple.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TupleNameError {
    /// Not one of our names at all.
    Foreign,
    /// A name of ours, of this other version.
    Version(u32),
    /// Ours, but no tuple any end would write.
    Malformed,
    /// The message authentication code is not that of the key.
    Forged,
}

/// Who opened a connection, as its name tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Opener {
    /// The program that has the tuple's local address.
    Program,
    /// A program that shares it with others that are willing to (`SO_REUSEADDR`).
    SharingProgram,
    /// The proxy of this node, for a program of another: where both nodes are on one machine, that program has bound
    /// the tuple's own name.
    Proxy,
}

impl Opener {
    fn separator(self) -> u8 {
        match self {
            Self::Program => b'>',
            Self::SharingProgram => b'}',
            Self::Proxy => b'~',
        }
    }

    fn of_separator(byte: u8) -> Option<Self> {
        [Self::Program, Self::SharingProgram, Self::Proxy].into_iter().find(|opener| opener.separator() == byte)
    }
}

/// What stands before the version in a tuple's name.
const NAME_PREFIX: &[u8] = b"crosslane/";
/// Version of the tuple's name.
const NAME_VERSION: u32 = 3;
/// Prefix and version, the part of the name before the message authentication code.
const NAME_HEAD: &[u8] = b"crosslane/3/";
/// The message authentication code: 128 bits in hexadecimal digits.
const MAC_DIGITS: usize = 32;
/// Bytes an abstract AF_UNIX name can have.
pub const NAME_BYTES_MAX: usize = 107;
/// Bytes that are left for the addresses.
const ADDRESSES_BYTES_MAX: usize = NAME_BYTES_MAX - NAME_HEAD.len() - MAC_DIGITS - 1;
/// An IPv6 address in binary: address, port and scope.
const BINARY_ADDRESS_BYTES: usize = 16 + 2 + 4;
const _: () = assert!(2 * BINARY_ADDRESS_BYTES < ADDRESSES_BYTES_MAX);

impl Tuple {
    /// The same connection seen from the other end.
    #[must_use]
    pub fn reversed(self) -> Self {
        Self { local: self.peer, peer: self.local }
    }

    /// As a program with a socket of `family` sees it.
    #[must_use]
    pub fn to_family(self, family: Family) -> Self {
        Self { local: to_family(self.local, family), peer: to_family(self.peer, family) }
    }

    /// Returns the abstract AF_UNIX name that the connecting end binds its lifeline to:
    /// `crosslane/3/<code>/127.0.0.1:40000>127.0.0.1:6379`, or with `~` for `>` where a proxy stands in for that end,
    /// and with `}` where the program shares its address.
    /// The code is the message authentication code of the rest under the rack's key, so no other user can bind the name
    /// before us. IPv6 addresses that are too long as text are binary.
    ///
    /// The kernel lets a name be bound once, so a tuple is unique among the lanes of a rack, and is free again when the
    /// last descriptor of the connecting end is gone. Abstract names belong to a network namespace already, so that the
    /// name need not say which.
    ///
    /// # Errors
    /// `INVAL` when these cannot be the addresses of a connection.
    pub fn name(&self, opener: Opener, key: &NameKey) -> Result<Vec<u8>, Errno> {
        if !is_valid_endpoint(self.local)
            || !is_valid_endpoint(self.peer)
            || self.local.is_ipv4() != self.peer.is_ipv4()
        {
            return Err(Errno::INVAL);
        }
        let addresses = self.encode_addresses(opener);
        let mac = key.mac(NAME_HEAD, &addresses);
        let mut name = Vec::with_capacity(NAME_BYTES_MAX);
        name.extend_from_slice(NAME_HEAD);
        let _ = write!(name, "{mac:0MAC_DIGITS$x}/"); // Writing to memory cannot fail.
        name.extend_from_slice(&addresses);
        Ok(name)
    }

    /// Returns the tuple in an abstract AF_UNIX name, seen from the end that bound it, and who that is. Anybody can
    /// bind any name, so only a name that [`Tuple::name`] would have written with this key is taken.
    ///
    /// # Errors
    /// What the bytes are instead.
    pub fn from_name(name: &[u8], key: &NameKey) -> Result<(Self, Opener), TupleNameError> {
        let (tuple, opener) = Self::from_unauthenticated_name(name)?;
        let (mac, addresses) = name[NAME_HEAD.len()..].split_at(MAC_DIGITS);
        let mac = std::str::from_utf8(mac).ok().and_then(|digits| u128::from_str_radix(digits, 16).ok());
        // The time that this comparison takes tells nobody anything: whoever can show us a name has come through the
        // rack's private directory, where the key lies.
        if mac == Some(key.mac(NAME_HEAD, &addresses[1..])) { Ok((tuple, opener)) } else { Err(TupleNameError::Forged) }
    }

    /// As [`Tuple::from_name`], without the key: for a lifeline that is known by the memory that came with it, whose
    /// name was authenticated when it was accepted. The process that holds it now may be of a user who cannot read the
    /// key.
    ///
    /// # Errors
    /// What the bytes are instead; never `Forged`.
    pub fn from_unauthenticated_name(name: &[u8]) -> Result<(Self, Opener), TupleNameError> {
        use TupleNameError::{Foreign, Malformed};
        if name.len() > NAME_BYTES_MAX {
            return Err(Foreign);
        }
        let Some(rest) = name.strip_prefix(NAME_HEAD) else {
            let version = name.strip_prefix(NAME_PREFIX).ok_or(Foreign)?;
            let version = version.split(|byte| *byte == b'/').next().and_then(|text| std::str::from_utf8(text).ok());
            let version = version.and_then(|text| text.parse().ok()).filter(|version| *version != NAME_VERSION);
            return Err(version.map_or(Malformed, TupleNameError::Version));
        };
        let (mac, rest) = rest.split_at_checked(MAC_DIGITS).ok_or(Malformed)?;
        let addresses = rest.strip_prefix(b"/").ok_or(Malformed)?;
        let is_mac = mac.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let decoded = Self::decode_addresses(addresses).filter(|_| is_mac);
        decoded.filter(|(tuple, opener)| tuple.encode_addresses(*opener) == addresses).ok_or(Malformed)
    }

    /// Text, or where that does not fit the separator and both addresses in binary.
    fn encode_addresses(&self, opener: Opener) -> Vec<u8> {
        let text = format!("{}{}{}", self.local, char::from(opener.separator()), self.peer).into_bytes();
        match (self.local, self.peer) {
            (SocketAddr::V6(local), SocketAddr::V6(peer)) if text.len() > ADDRESSES_BYTES_MAX => {
                let mut bytes = vec![opener.separator()];
                for address in [local, peer] {
                    bytes.extend_from_slice(&address.ip().octets());
                    bytes.extend_from_slice(&address.port().to_be_bytes());
                    bytes.extend_from_slice(&address.scope_id().to_be_bytes());
                }
                bytes
            }
            _ => text,
        }
    }

    /// What [`Tuple::encode_addresses`] may have encoded, and nothing that cannot be the addresses of a connection.
    fn decode_addresses(bytes: &[u8]) -> Option<(Self, Opener)> {
        let (tuple, opener) = match bytes.split_first() {
            Some((first, rest)) if Opener::of_separator(*first).is_some() => {
                let (local, peer) = rest.split_at_checked(BINARY_ADDRESS_BYTES)?;
                let tuple = Self { local: decode_binary(local)?, peer: decode_binary(peer)? };
                (tuple, Opener::of_separator(*first)?)
            }
            _ => {
                let at = bytes.iter().position(|byte| Opener::of_separator(*byte).is_some())?;
                let parse = |text: &[u8]| std::str::from_utf8(text).ok()?.parse().ok();
                let tuple = Self { local: parse(&bytes[..at])?, peer: parse(&bytes[at + 1..])? };
                (tuple, Opener::of_separator(bytes[at])?)
            }
        };
        let are_valid = is_valid_endpoint(tuple.local) && is_valid_endpoint(tuple.peer);
        (are_valid && tuple.local.is_ipv4() == tuple.peer.is_ipv4()).then_some((tuple, opener))
    }
}

fn decode_binary(bytes: &[u8]) -> Option<SocketAddr> {
    let ip = Ipv6Addr::from(array::<16>(bytes, 0)?);
    let (port, scope) = (array(bytes, 16).map(u16::from_be_bytes)?, array(bytes, 18).map(u32::from_be_bytes)?);
    let has_right_length = bytes.len() == BINARY_ADDRESS_BYTES;
    has_right_length.then(|| SocketAddr::V6(SocketAddrV6::new(ip, port, 0, scope)))
}

/// Whether the address is canonical and one end of a connection can have it.
fn is_valid_endpoint(address: SocketAddr) -> bool {
    let ip = address.ip();
    address == canonical(address) && address.port() != 0 && !ip.is_unspecified() && !ip.is_multicast()
}

/// Ephemeral ports that are probed at random places of each half of the range before it is searched in order. Where a
/// third of a half is free, all of its probes fail once in 400,000 times.
const RANDOM_PROBES: u32 = 32;
/// Ephemeral ports that are tried in order before a connection goes without a lane. Only the rack's own lanes can have
/// taken the names, so where none is found nearly the whole range is in use.
const SEQUENTIAL_TRIES_MAX: usize = 1024;
/// What the kernel uses where /proc cannot be read.
const EPHEMERAL_PORTS_DEFAULT: (u16, u16) = (32_768, 60_999);

/// The range of ephemeral ports of this machine, read once.
pub fn ephemeral_ports() -> RangeInclusive<u16> {
    // Low in the upper half, high in the lower; no range ends at port 0, so 0 is "not read".
    static RANGE: AtomicU32 = AtomicU32::new(0);
    let known = RANGE.load(Ordering::Relaxed);
    if known != 0 {
        return (known >> 16) as u16..=known as u16;
    }
    let (low, high) = read_ephemeral_ports().unwrap_or(EPHEMERAL_PORTS_DEFAULT);
    RANGE.store(u32::from(low) << 16 | u32::from(high), Ordering::Relaxed);
    low..=high
}

fn read_ephemeral_ports() -> Option<(u16, u16)> {
    let path = c"/proc/sys/net/ipv4/ip_local_port_range";
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut bytes = [0_u8; 64];
    let length = rustix::io::read(&file, &mut bytes).ok()?;
    parse_port_range(std::str::from_utf8(&bytes[..length]).ok()?)
}

fn parse_port_range(text: &str) -> Option<(u16, u16)> {
    let mut words = text.split_ascii_whitespace();
    let low: u16 = words.next()?.parse().ok()?;
    let high: u16 = words.next()?.parse().ok()?;
    (low >= 1 && low <= high).then_some((low, high))
}

/// Returns ephemeral ports in the order to try them: a few at random, then a part of the range in order, from a random
/// place. A few are tried twice.
///
/// The kernel's `connect` prefers ports an even distance from the start of the range. Lanes prefer the others, so that
/// a server hardly ever sees one address on a lane and on kernel TCP at once.
pub fn ephemeral_candidates(range: RangeInclusive<u16>, random: u32) -> impl Iterator<Item = u16> {
    let low = u32::from(*range.start());
    let ports = u32::from(*range.end()) - low + 1;
    let at_random = [1, 0].into_iter().flat_map(move |parity| {
        let count = (ports + 1 - parity) / 2;
        let probes = if count == 0 { 0 } else { RANDOM_PROBES };
        (0..probes).map(move |probe| low + 2 * (scramble(random, probe) % count) + parity)
    });
    let in_order = (0..ports).map(move |step| low + (random % ports + step) % ports).take(SEQUENTIAL_TRIES_MAX);
    at_random.chain(in_order).map(|port| port as u16)
}

/// A different place for each probe, without a pattern that two processes could share (the finalizer of MurmurHash3).
fn scramble(random: u32, probe: u32) -> u32 {
    let mut bits = random.wrapping_add(probe.wrapping_mul(0x9e37_79b9));
    bits = (bits ^ bits >> 16).wrapping_mul(0x85eb_ca6b);
    bits = (bits ^ bits >> 13).wrapping_mul(0xc2b2_ae35);
    bits ^ bits >> 16
}

/// Whether the address is one of this machine's, in the network namespace of the caller.
pub fn is_local(ip: IpAddr) -> bool {
    matches!(local_source(ip, 0), Ok(Some(_)))
}

/// The source address TCP would show for a connection to `ip`, if `ip` is one of this machine's.
///
/// The kernel is asked each time, except for loopback addresses: it takes microseconds, and a remembered answer could
/// send a connection to the wrong machine just after an address has moved.
///
/// # Errors
/// What socket, sendto and recvfrom answer; `PROTO` when the kernel's answer makes no sense.
pub fn local_source(ip: IpAddr, scope: u32) -> Result<Option<IpAddr>, Errno> {
    match ip {
        IpAddr::V4(v4) if v4.is_loopback() => Ok(Some(Ipv4Addr::LOCALHOST.into())),
        IpAddr::V6(v6) if v6.is_loopback() => Ok(Some(ip)),
        _ if ip.is_unspecified() || ip.is_multicast() => Ok(None),
        _ => ask_route(ip, scope),
    }
}

const ROUTE_SEQUENCE: u32 = 0x43_52_4f_53;
const HEADER_BYTES: usize = 16;
const ROUTE_BYTES: usize = 12;

fn ask_route(ip: IpAddr, scope: u32) -> Result<Option<IpAddr>, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    let request = route_request(ip, scope);
    rustix::net::send(&socket, &request, SendFlags::empty())?;
    let mut reply = [0_u8; 1024];
    // The kernel has queued its answer before the request returns, so there is nothing to wait for.
    let length = receive(&socket, &mut reply)?;
    parse_route_reply(&reply[..length])
}

fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> Result<usize, Errno> {
    rustix::net::recv(socket, buffer, RecvFlags::DONTWAIT).map(|(length, _)| length)
}

fn route_request(ip: IpAddr, scope: u32) -> Vec<u8> {
    let (family, octets) = match ip {
        IpAddr::V4(v4) => (libc::AF_INET, v4.octets().to_vec()),
        IpAddr::V6(v6) => (libc::AF_INET6, v6.octets().to_vec()),
    };
    let mut request = vec![0_u8; HEADER_BYTES + ROUTE_BYTES];
    request[4..6].copy_from_slice(&libc::RTM_GETROUTE.to_ne_bytes());
    request[6..8].copy_from_slice(&(libc::NLM_F_REQUEST as u16).to_ne_bytes());
    request[8..12].copy_from_slice(&ROUTE_SEQUENCE.to_ne_bytes());
    request[HEADER_BYTES] = family as u8;
    request[HEADER_BYTES + 1] = octets.len() as u8 * 8;
    push_attribute(&mut request, libc::RTA_DST, &octets);
    if scope != 0 {
        push_attribute(&mut request, libc::RTA_OIF, &scope.to_ne_bytes());
    }
    let length = request.len() as u32;
    request[..4].copy_from_slice(&length.to_ne_bytes());
    request
}

fn push_attribute(message: &mut Vec<u8>, kind: u16, value: &[u8]) {
    message.extend_from_slice(&(4 + value.len() as u16).to_ne_bytes());
    message.extend_from_slice(&kind.to_ne_bytes());
    message.extend_from_slice(value);
}

/// The preferred source in the kernel's answer, when the route is a local one.
fn parse_route_reply(reply: &[u8]) -> Result<Option<IpAddr>, Errno> {
    let length = array(reply, 0).map(u32::from_ne_bytes).ok_or(Errno::PROTO)? as usize;
    let kind = array(reply, 4).map(u16::from_ne_bytes).ok_or(Errno::PROTO)?;
    let sequence = array(reply, 8).map(u32::from_ne_bytes).ok_or(Errno::PROTO)?;
    if sequence != ROUTE_SEQUENCE || length > reply.len() {
        return Err(Errno::PROTO);
    }
    if i32::from(kind) == libc::NLMSG_ERROR {
        return Ok(None); // No route there: not an address of ours either.
    }
    if kind != libc::RTM_NEWROUTE || length < HEADER_BYTES + ROUTE_BYTES {
        return Err(Errno::PROTO);
    }
    if reply[HEADER_BYTES + 7] != libc::RTN_LOCAL {
        return Ok(None);
    }
    let attributes = &reply[HEADER_BYTES + ROUTE_BYTES..length];
    let source = find_attribute(attributes, libc::RTA_PREFSRC).or_else(|| find_attribute(attributes, libc::RTA_DST));
    source.and_then(ip_of_octets).map(Some).ok_or(Errno::PROTO)
}

fn find_attribute(mut attributes: &[u8], kind: u16) -> Option<&[u8]> {
    loop {
        let length = usize::from(u16::from_ne_bytes(array(attributes, 0)?));
        let found = u16::from_ne_bytes(array(attributes, 2)?);
        if length < 4 {
            return None;
        }
        if found == kind {
            return attributes.get(4..length);
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}

fn ip_of_octets(octets: &[u8]) -> Option<IpAddr> {
    match octets.len() {
        4 => array::<4>(octets, 0).map(IpAddr::from),
        16 => array::<16>(octets, 0).map(IpAddr::from),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::directory::tests::Scratch;
    use crate::rendezvous::name_key::tests::OTHER_KEY;
    use proptest::prelude::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn any_ip() -> impl Strategy<Value = IpAddr> {
        prop_oneof![
            any::<u32>().prop_map(|bits| IpAddr::from(Ipv4Addr::from(bits))),
            any::<u128>().prop_map(|bits| IpAddr::from(Ipv6Addr::from(bits))),
            any::<u32>().prop_map(|bits| IpAddr::from(Ipv4Addr::from(bits).to_ipv6_mapped())),
            any::<u64>().prop_map(|bits| IpAddr::from(Ipv6Addr::from(0xfe80 << 112 | u128::from(bits)))),
        ]
    }

    fn any_address() -> impl Strategy<Value = SocketAddr> {
        (any_ip(), any::<u16>(), any::<u32>(), 0..10_000_u32).prop_map(|(ip, port, flow, scope)| match ip {
            IpAddr::V4(v4) => SocketAddr::V4(SocketAddrV4::new(v4, port)),
            IpAddr::V6(v6) => SocketAddr::V6(SocketAddrV6::new(v6, port, flow, scope)),
        })
    }

    fn read_back(address: SocketAddr) -> Result<SocketAddr, Errno> {
        let (bytes, length) = encode_sockaddr(address);
        // SAFETY: `length` is at most the length of `bytes`.
        unsafe { read_sockaddr(bytes.as_ptr().cast(), length as u32) }
    }

    proptest! {
        #[test]
        fn a_socket_address_survives_its_c_form(address in any_address()) {
            prop_assert_eq!(read_back(address), Ok(address));
        }

        #[test]
        fn any_bytes_are_an_address_or_an_error(
            bytes in prop::collection::vec(any::<u8>(), 0..140),
            family in 0..12_u16,
        ) {
            let mut bytes = bytes;
            if bytes.len() >= 2 {
                bytes[..2].copy_from_slice(&family.to_ne_bytes());
            }
            // SAFETY: the length is the vector's.
            let read = unsafe { read_sockaddr(bytes.as_ptr().cast(), bytes.len() as u32) };
            let valid = match i32::from(family) {
                libc::AF_INET => (16..=128).contains(&bytes.len()),
                libc::AF_INET6 => (24..=128).contains(&bytes.len()),
                _ => false,
            };
            prop_assert_eq!(read.is_ok(), valid);
        }

        #[test]
        fn canonical_is_a_fixed_point_and_showing_undoes_it(address in any_address()) {
            let once = canonical(address);
            prop_assert_eq!(canonical(once), once);
            prop_assert_eq!(canonical(to_family(once, Family::V6)), once);
        }

        /// Names have room for any two addresses, with any scope.
        #[test]
        fn a_tuple_survives_its_name(local in any_address(), peer in any_address(), by_proxy: bool) {
            let tuple = Tuple { local: canonical(local), peer: canonical(peer) };
            let opener = if by_proxy { Opener::Proxy } else { Opener::Program };
            match tuple.name(opener, &OTHER_KEY) {
                Ok(name) => {
                    prop_assert!(name.len() <= NAME_BYTES_MAX);
                    prop_assert_eq!(Tuple::from_name(&name, &OTHER_KEY), Ok((tuple, opener)));
                    prop_assert_eq!(Tuple::from_unauthenticated_name(&name), Ok((tuple, opener)));
                }
                Err(error) => {
                    let same_family = tuple.local.is_ipv4() == tuple.peer.is_ipv4();
                    let usable = is_valid_endpoint(tuple.local) && is_valid_endpoint(tuple.peer) && same_family;
                    prop_assert!(!usable, "{error} for {tuple:?}");
                }
            }
        }

        #[test]
        fn a_hostile_name_is_an_error_or_has_the_addresses_that_we_would_write(
            head in "(crosslane/3/[0-9a-f]{32}/)?",
            text in "[0-9a-f:.>~}\\[\\]%/]{0,60}",
            binary in prop::option::of(prop::collection::vec(any::<u8>(), 40..50)),
            by_proxy: bool,
        ) {
            let mut name = head.into_bytes();
            match binary {
                Some(binary) => {
                    name.push(if by_proxy { b'~' } else { b'>' });
                    name.extend(binary);
                }
                None => name.extend(text.into_bytes()),
            }
            prop_assert!(Tuple::from_name(&name, &OTHER_KEY).is_err(), "128 bits are not guessed");
            if let Ok((tuple, opener)) = Tuple::from_unauthenticated_name(&name) {
                let ours = tuple.name(opener, &OTHER_KEY).unwrap();
                let addresses = NAME_HEAD.len() + MAC_DIGITS;
                prop_assert_eq!(&ours[addresses..], &name[addresses..]);
            }
        }

        #[test]
        fn any_changed_bit_of_a_name_makes_it_a_strangers(port in 1..u16::MAX, bit in 0..8 * 80_usize) {
            let tuple = Tuple { local: SocketAddr::from(([127, 0, 0, 1], port)), peer: address("127.0.0.1:6379") };
            let mut name = tuple.name(Opener::Program, &OTHER_KEY).unwrap();
            if let Some(byte) = name.get_mut(bit / 8) {
                *byte ^= 1 << (bit % 8);
                prop_assert!(Tuple::from_name(&name, &OTHER_KEY).is_err());
            }
        }

        #[test]
        fn any_bytes_of_a_route_reply_are_taken(reply in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut reply = reply;
            let length = (reply.len() as u32).to_ne_bytes();
            if reply.len() >= 12 {
                reply[..4].copy_from_slice(&length);
                reply[4..6].copy_from_slice(&libc::RTM_NEWROUTE.to_ne_bytes());
                reply[8..12].copy_from_slice(&ROUTE_SEQUENCE.to_ne_bytes());
            }
            let _ = parse_route_reply(&reply);
        }

        #[test]
        fn all_ports_of_a_small_range_are_tried_and_those_at_odd_distances_first(
            low in 1..60_000_u16,
            more in 0..SEQUENTIAL_TRIES_MAX as u16,
            random: u32,
        ) {
            let range = low..=low + more;
            let tried: Vec<u16> = ephemeral_candidates(range.clone(), random).collect();
            let mut sorted = tried.clone();
            sorted.sort_unstable();
            sorted.dedup();
            prop_assert!(sorted.iter().copied().eq(range));
            let odd = if more == 0 { 0 } else { RANDOM_PROBES as usize };
            prop_assert!(tried[..odd].iter().all(|port| (port - low) % 2 == 1));
        }
    }

    #[test]
    fn the_ports_of_a_large_range_are_not_all_tried_and_the_first_ones_are_spread() {
        for random in [0, 1, u32::MAX, 0x1234_5678] {
            let tried: Vec<u16> = ephemeral_candidates(32_768..=60_999, random).collect();
            assert_eq!(tried.len(), 2 * RANDOM_PROBES as usize + SEQUENTIAL_TRIES_MAX);
            let spread = &tried[..RANDOM_PROBES as usize];
            assert!(spread.iter().min().unwrap().abs_diff(*spread.iter().max().unwrap()) > 10_000, "{spread:?}");
        }
    }

    fn name_of(tuple: Tuple, opener: Opener) -> Vec<u8> {
        tuple.name(opener, &OTHER_KEY).unwrap()
    }

    #[test]
    fn tuples_are_named_readably_where_that_fits() {
        let after_code = |name: &[u8]| {
            assert!(name.starts_with(NAME_HEAD) && name.len() <= NAME_BYTES_MAX);
            String::from_utf8(name[NAME_HEAD.len() + MAC_DIGITS..].to_vec()).unwrap()
        };
        let tuple = Tuple { local: address("127.0.0.1:40000"), peer: address("127.0.0.1:6379") };
        assert_eq!(after_code(&name_of(tuple, Opener::Program)), "/127.0.0.1:40000>127.0.0.1:6379");
        assert_eq!(after_code(&name_of(tuple, Opener::Proxy)), "/127.0.0.1:40000~127.0.0.1:6379");
        let tuple = Tuple { local: address("[fe80::1%3]:40000"), peer: address("[fe80::2%3]:80") };
        assert_eq!(after_code(&name_of(tuple, Opener::Program)), "/[fe80::1%3]:40000>[fe80::2%3]:80");
        let longest = address("255.255.255.255:65535");
        let tuple = Tuple { local: longest, peer: longest };
        assert_eq!(after_code(&name_of(tuple, Opener::Proxy)), "/255.255.255.255:65535~255.255.255.255:65535");
    }

    #[test]
    fn the_longest_addresses_fit_a_name() {
        for longest in [
            "[2001:1db8:1111:2222:3333:4444:5555:6666]:65535",
            "[febf:1db8:1111:2222:3333:4444:5555:6666%4294967295]:65535",
        ] {
            let tuple = Tuple { local: address(longest), peer: address(longest) };
            let name = name_of(tuple, Opener::Proxy);
            assert!(name.len() <= NAME_BYTES_MAX);
            assert_eq!(Tuple::from_name(&name, &OTHER_KEY), Ok((tuple, Opener::Proxy)));
        }
    }

    #[test]
    fn a_name_is_another_one_under_another_key() {
        let (scratch, other) = (Scratch::new(), Scratch::new());
        let keys = [scratch.rack().key(), other.rack().key()];
        let tuple = Tuple { local: address("127.0.0.1:40000"), peer: address("127.0.0.1:6379") };
        let names = keys.map(|key| tuple.name(Opener::Program, &key).unwrap());
        assert_ne!(names[0], names[1]);
        assert_eq!(Tuple::from_name(&names[0], &keys[0]), Ok((tuple, Opener::Program)));
        assert_eq!(Tuple::from_name(&names[0], &keys[1]), Err(TupleNameError::Forged));
        assert_eq!(Tuple::from_unauthenticated_name(&names[0]), Ok((tuple, Opener::Program)));
    }

    #[test]
    fn names_nobody_would_write_are_refused() {
        use TupleNameError::{Foreign, Forged, Malformed, Version};
        let code = "0123456789abcdef0123456789abcdef";
        let named = |addresses: &str| format!("crosslane/3/{code}/{addresses}").into_bytes();
        for (name, error) in [
            (b"".to_vec(), Foreign),
            (b"\xff".to_vec(), Foreign),
            (b"other/2/127.0.0.1:1>127.0.0.1:2".to_vec(), Foreign),
            (vec![b'/'; NAME_BYTES_MAX + 1], Foreign),
            (b"crosslane/1/127.0.0.1:1>127.0.0.1:2".to_vec(), Version(1)),
            (b"crosslane/2/whatever".to_vec(), Version(2)),
            (b"crosslane/3".to_vec(), Malformed),
            (b"crosslane/03/".to_vec(), Malformed),
            (b"crosslane/3/127.0.0.1:1>127.0.0.1:2".to_vec(), Malformed),
            (format!("crosslane/3/{}/127.0.0.1:1>127.0.0.1:2", code.to_uppercase()).into_bytes(), Malformed),
            (format!("crosslane/3/{code}0/127.0.0.1:1>127.0.0.1:2").into_bytes(), Malformed),
            (named(""), Malformed),
            (named(">"), Malformed),
            (named("127.0.0.1:01>127.0.0.1:2"), Malformed),
            (named("127.0.0.1:0>127.0.0.1:2"), Malformed),
            (named("0.0.0.0:1>127.0.0.1:2"), Malformed),
            (named("127.0.0.1:1>[::1]:2"), Malformed),
            (named("[::ffff:127.0.0.1]:1>[::ffff:127.0.0.1]:2"), Malformed),
            (named("[0::1]:1>[::1]:2"), Malformed),
            (named("[::1%1]:1>[::1]:2"), Malformed),
            (named("127.0.0.1:1>127.0.0.1:2>127.0.0.1:3"), Malformed),
            (named("127.0.0.1:1~127.0.0.1:2>127.0.0.1:3"), Malformed),
            (named("224.0.0.1:1>127.0.0.1:2"), Malformed),
            (named("127.0.0.1:1>127.0.0.1:2"), Forged),
        ] {
            assert_eq!(Tuple::from_name(&name, &OTHER_KEY), Err(error), "{}", String::from_utf8_lossy(&name));
        }
    }

    #[test]
    fn addresses_that_fit_as_text_are_refused_in_binary() {
        let mut name = b"crosslane/3/0123456789abcdef0123456789abcdef/>".to_vec();
        for _ in 0..2 {
            name.extend_from_slice(&Ipv6Addr::LOCALHOST.octets());
            name.extend_from_slice(&[0, 80, 0, 0, 0, 0]);
        }
        assert_eq!(Tuple::from_unauthenticated_name(&name), Err(TupleNameError::Malformed));
    }

    #[test]
    fn unspecified_destinations_are_this_machine() {
        for (given, meant) in [
            ("0.0.0.0:80", "127.0.0.1:80"),
            ("[::]:80", "[::1]:80"),
            ("[::ffff:0.0.0.0]:80", "127.0.0.1:80"),
            ("[::ffff:127.77.0.1]:80", "127.77.0.1:80"),
            ("[fd00::2%7]:80", "[fd00::2]:80"),
        ] {
            assert_eq!(destination(address(given)), address(meant));
        }
    }

    fn write_cut(given: SocketAddr, room: u32) -> (Result<(), Errno>, [u8; 40], u32) {
        let mut buffer = [0xaa_u8; 40];
        let mut length = room;
        // SAFETY: callers pass a room of at most 40 or one that is refused before anything is written.
        let result = unsafe { write_sockaddr(given, buffer.as_mut_ptr().cast(), &raw mut length) };
        (result, buffer, length)
    }

    #[test]
    fn a_short_buffer_is_cut_and_told_the_full_length() {
        let v4 = address("127.0.0.1:6379");
        let (whole, _) = encode_sockaddr(v4);
        for room in 0..40_u32 {
            let (result, buffer, length) = write_cut(v4, room);
            let written = room.min(16) as usize;
            assert_eq!((result, length), (Ok(()), 16));
            assert_eq!(buffer[..written], whole[..written]);
            assert!(buffer[written..].iter().all(|byte| *byte == 0xaa));
        }
        assert_eq!(write_cut(address("[::1]:1"), 40).2, 28);
        assert_eq!(write_cut(v4, u32::MAX).0, Err(Errno::INVAL));
    }

    #[test]
    fn null_pointers_are_faults() {
        let mut length = 16;
        // SAFETY: null pointers are what the functions promise to refuse.
        unsafe {
            assert_eq!(read_sockaddr(std::ptr::null(), 16), Err(Errno::FAULT));
            assert_eq!(write_sockaddr(address("1.2.3.4:5"), std::ptr::null_mut(), &raw mut length), Err(Errno::FAULT));
            assert_eq!(
                write_sockaddr(address("1.2.3.4:5"), std::ptr::null_mut(), std::ptr::null_mut()),
                Err(Errno::FAULT)
            );
        }
    }

    #[test]
    fn port_ranges_are_read_as_the_kernel_writes_them() {
        assert_eq!(parse_port_range("32768\t60999\n"), Some((32768, 60999)));
        for text in ["", "1", "0 5", "9 8", "a b", "1 70000"] {
            assert_eq!(parse_port_range(text), None, "{text:?}");
        }
        assert!(!ephemeral_ports().is_empty());
    }

    /// The address TCP would use towards `ip`, which needs no listener to be known.
    fn source_by_datagram(ip: IpAddr) -> std::io::Result<IpAddr> {
        let any: IpAddr = if ip.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = std::net::UdpSocket::bind((any, 0))?;
        socket.connect((ip, 9))?;
        Ok(socket.local_addr()?.ip())
    }

    #[test]
    fn the_source_of_a_local_connection_is_the_kernels() {
        let mut ips: Vec<IpAddr> = ["127.0.0.1", "127.77.0.1"].map(|ip| ip.parse().unwrap()).to_vec();
        // The machine's own address towards the outside, where it has one: no packet is sent.
        ips.extend(source_by_datagram("192.0.2.200".parse().unwrap()));
        ips.extend(source_by_datagram("2001:db8::1".parse().unwrap()));
        for ip in ips {
            assert_eq!(local_source(ip, 0), Ok(source_by_datagram(ip).ok()), "{ip}");
            assert!(is_local(ip));
        }
    }

    #[test]
    fn addresses_of_other_machines_are_not_local() {
        for ip in
            ["198.51.100.7", "8.8.8.8", "2001:db8::77", "224.0.0.1", "255.255.255.255", "ff02::1", "0.0.0.0", "::"]
        {
            assert!(!is_local(ip.parse().unwrap()), "{ip}");
        }
    }
}
