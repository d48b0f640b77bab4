//! What the kernel says of the other endpoint's TCP socket (`sock_diag(7)`, `linux/inet_diag.h`), without privileges.
//!
//! The request has both addresses, so the kernel looks up one socket and lists nothing. It falls back to a listener of
//! the address, which is why the state has to be checked.
//!
//! The kernel looks in the network namespace of the netlink socket. Passed to another process, such a socket has the
//! kernel look in the namespace of who passes it ([`look_up_through`]): what it says of the namespace and of the socket
//! there is true. The user of the socket is not: it is a number of the user namespace of who made the netlink socket.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socket_with};

use crate::endpoint::{Endpoint, netns_cookie};
use crate::system::{Descriptor, Kept, option};
use crate::tuple::Tuple;

const NLMSGHDR_BYTES: usize = 16;
const REQUEST_BYTES: usize = NLMSGHDR_BYTES + 56;
/// Bytes of a message header and of `struct inet_diag_msg`.
const ENTRY_BYTES: usize = NLMSGHDR_BYTES + 72;
/// Room for an answer with its attributes, which are not read.
const ROOM_BYTES: usize = 512;
/// `SOCK_DIAG_BY_FAMILY` (`linux/sock_diag.h`).
const BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST` (`linux/netlink.h`).
const REQUEST: u16 = 1;
/// The number of the last request, which distinguishes its answer from those to earlier ones.
static SEQUENCE: AtomicU32 = AtomicU32::new(0);
/// The socket of the last look-up: to make and close one takes as long as the look-up.
static KEPT: Kept = Kept::new();
/// `TCP_ESTABLISHED` (`linux/tcp_states.h`).
const ESTABLISHED: u8 = 1;
/// `TCP_LISTEN`.
const LISTEN: u8 = 10;
/// `TCP_CLOSE_WAIT` and `TCP_FIN_WAIT1`, `TCP_FIN_WAIT2`: one direction has ended.
const HALF_CLOSED: [u8; 3] = [8, 4, 5];

/// A TCP socket of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// `SO_COOKIE`.
    pub cookie: u64,
    /// The user who made the socket, or accepted it: not always the present holder.
    pub uid: u32,
    /// State (`linux/tcp_states.h`).
    pub state: u8,
    /// Inode, 0 before the connection is accepted.
    pub inode: u32,
    /// Bytes that are received and not consumed (`rcv_nxt - copied_seq`), with a received FIN. Unlike `FIONREAD`, this
    /// does not end at an urgent mark.
    pub unread_bytes: u32,
}

impl Entry {
    /// Returns whether the socket is an endpoint of a connection, and not a listener or what is left of a connection.
    pub fn is_connected(&self) -> bool {
        self.state == ESTABLISHED || HALF_CLOSED.contains(&self.state)
    }
}

/// The result of a look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookUp {
    /// The kernel does not answer: a sandbox forbids it, the kernel lacks `inet_diag`, or this process is in another
    /// network namespace than the connection.
    Unavailable,
    /// There is no such socket in this network namespace.
    Nothing,
    /// The socket.
    Found(Entry),
}

/// Looks up the other endpoint of a connection, in three system calls (five if it is not found), without blocking. The
/// first time takes five calls more, after which the socket is kept.
pub fn look_up_peer(endpoint: &Endpoint) -> LookUp {
    if let Some(kept) = KEPT.take() {
        let found = look_up_peer_by(kept.as_fd(), endpoint);
        if found != LookUp::Unavailable {
            KEPT.keep(kept);
            return found;
        }
        // It is of another namespace than the connection. Or a process that was created without this library's
        // knowledge, and uses the same socket, has taken the answer.
    }
    let Ok(fresh) = open() else { return LookUp::Unavailable };
    let found = look_up_peer_by(fresh.as_fd(), endpoint);
    if found == LookUp::Unavailable {
        drop(Descriptor::from(fresh));
    } else if let Ok(hidden) = Descriptor::kept(fresh) {
        KEPT.keep(hidden);
    }
    found
}

/// Closes the socket that is kept for look-ups: in the child of a fork, which shares it with its parent, and for a
/// program that has no descriptors left.
pub fn close_kept() {
    drop(KEPT.take());
}

fn look_up_peer_by(netlink: BorrowedFd<'_>, endpoint: &Endpoint) -> LookUp {
    // A process can have moved to another namespace, in which the same addresses are those of another connection.
    if netns_cookie(netlink) != endpoint.netns_cookie {
        return LookUp::Unavailable;
    }
    ask_for_peer(netlink, endpoint)
}

/// Looks up the other endpoint of a connection in the network namespace with a cookie, by a netlink socket that a peer
/// has passed, without blocking. The peer may use the socket too, and take an answer: there is none then.
pub fn look_up_through(netlink: BorrowedFd<'_>, endpoint: &Endpoint, cookie: u64) -> LookUp {
    let number = |name| option(netlink, libc::SOL_SOCKET, name).map(i32::from_ne_bytes);
    let is_for_look_ups = number(libc::SO_DOMAIN) == Some(libc::AF_NETLINK)
        && number(libc::SO_PROTOCOL) == Some(libc::NETLINK_SOCK_DIAG)
        && number(libc::SO_TYPE) == Some(libc::SOCK_DGRAM);
    if !is_for_look_ups || cookie == 0 || netns_cookie(netlink) != cookie {
        return LookUp::Unavailable;
    }
    match ask(netlink, endpoint.tuple.reversed()) {
        Ok(answer) => answer,
        Err(_) => LookUp::Unavailable,
    }
}

/// Returns a new socket for look-ups in this process's network namespace, to be passed to a peer.
pub(crate) fn socket_to_pass() -> Option<Descriptor> {
    open().ok().map(Descriptor::from)
}

fn ask_for_peer(netlink: BorrowedFd<'_>, endpoint: &Endpoint) -> LookUp {
    match ask(netlink, endpoint.tuple.reversed()) {
        // A kernel without `tcp_diag` also says that there is no such socket, of this endpoint too.
        Ok(LookUp::Nothing) if ask(netlink, endpoint.tuple) == Ok(LookUp::Nothing) => LookUp::Unavailable,
        answer => answer.unwrap_or(LookUp::Unavailable),
    }
}

/// Looks up the socket with a tuple in this process's network namespace. `None` if there is none, or the kernel does
/// not answer.
pub fn look_up(tuple: Tuple) -> Option<Entry> {
    let netlink = Descriptor::from(open().ok()?);
    match ask(netlink.as_fd(), tuple) {
        Ok(LookUp::Found(entry)) => Some(entry),
        _ => None,
    }
}

/// Looks up the socket that listens at an address in this process's network namespace, also one that listens at all
/// addresses. `None` if there is none, or the kernel does not answer.
pub fn look_up_listener(address: SocketAddr) -> Option<Entry> {
    let netlink = Descriptor::from(open().ok()?);
    // No connection has the port 0, so the kernel finds what a new one would reach.
    let tuple = Tuple::new(address, SocketAddr::new(address.ip(), 0));
    let mut room = [0_u8; ROOM_BYTES];
    parse_entry(request_answer(netlink.as_fd(), tuple, &mut room).ok()?).filter(|entry| entry.state == LISTEN)
}

/// Returns the addresses of all sockets that listen in this process's network namespace, with the users who made them:
/// those of IPv4 and those of IPv6. Empty if the kernel does not answer.
pub fn listeners() -> Vec<(SocketAddr, u32)> {
    let unspecified: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
    let tuples = unspecified.map(|ip| Tuple { local: SocketAddr::new(ip, 0), peer: SocketAddr::new(ip, 0) });
    tuples.into_iter().flat_map(|tuple| dump_listeners(tuple).unwrap_or_default()).collect()
}

/// `NLM_F_DUMP`.
const DUMP: u16 = 0x300;
/// Room for a part of a dump.
const DUMP_BYTES: usize = 32 << 10;

fn dump_listeners(family: Tuple) -> Result<Vec<(SocketAddr, u32)>, Errno> {
    let netlink = Descriptor::from(open()?);
    let mut request = request(family, next_sequence());
    request[6..8].copy_from_slice(&(REQUEST | DUMP).to_ne_bytes());
    request[NLMSGHDR_BYTES + 4..NLMSGHDR_BYTES + 8].copy_from_slice(&(1_u32 << LISTEN).to_ne_bytes());
    rustix::net::send(netlink.as_fd(), &request, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    let (mut found, mut room) = (Vec::new(), vec![0_u8; DUMP_BYTES]);
    loop {
        let (length, _) = rustix::net::recv(netlink.as_fd(), &mut room[..], RecvFlags::DONTWAIT)?;
        let mut rest = &room[..length.min(DUMP_BYTES)];
        while let Some(bytes) = rest.get(..4) {
            let bytes = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
            let Some(message) = rest.get(..bytes).filter(|_| bytes >= NLMSGHDR_BYTES) else { return Ok(found) };
            // NLMSG_DONE, or an error.
            let Some(entry) = parse_entry(message) else { return Ok(found) };
            found.extend(local_of(message).map(|local| (local, entry.uid)));
            rest = &rest[(bytes.next_multiple_of(4)).min(rest.len())..];
        }
    }
}

/// Returns the local address of an entry.
fn local_of(message: &[u8]) -> Option<SocketAddr> {
    let body = message.get(NLMSGHDR_BYTES..)?;
    let port = u16::from_be_bytes(body.get(4..6)?.try_into().ok()?);
    let address = body.get(8..24)?;
    let ip: IpAddr = match i32::from(body[0]) {
        libc::AF_INET => <[u8; 4]>::try_from(&address[..4]).ok()?.into(),
        _ => <[u8; 16]>::try_from(address).ok()?.into(),
    };
    Some(SocketAddr::new(ip, port))
}

fn open() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(netlink::SOCK_DIAG))
}

fn next_sequence() -> u32 {
    SEQUENCE.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
}

/// Sends a request and receives its answer, which the kernel has queued before the send returns.
#[inline(never)] // Threads may have 16 KiB of stack.
fn ask(netlink: BorrowedFd<'_>, tuple: Tuple) -> Result<LookUp, Errno> {
    let mut room = [0_u8; ROOM_BYTES];
    request_answer(netlink, tuple, &mut room).map(|answer| parse(answer, tuple))
}

/// Returns the answer to a request.
///
/// # Errors
/// Those of `send(2)` and `recv(2)`, and `BADMSG` for an answer to another request.
fn request_answer<'a>(
    netlink: BorrowedFd<'_>,
    tuple: Tuple,
    room: &'a mut [u8; ROOM_BYTES],
) -> Result<&'a [u8], Errno> {
    let sequence = next_sequence();
    let kernel = SocketAddrNetlink::new(0, 0);
    rustix::net::sendto(netlink, &request(tuple, sequence), SendFlags::DONTWAIT | SendFlags::NOSIGNAL, &kernel)?;
    let (length, _, from) = rustix::net::recvfrom(netlink, &mut room[..], RecvFlags::DONTWAIT)?;
    let answer = &room[..length.min(ROOM_BYTES)];
    // A process with the right to do so in its namespace can send to a socket of another process.
    let is_kernels = from.and_then(|from| SocketAddrNetlink::try_from(from).ok()).is_some_and(|from| from.pid() == 0);
    if is_kernels && answer.get(8..12) == Some(&sequence.to_ne_bytes()) { Ok(answer) } else { Err(Errno::BADMSG) }
}

/// Returns a `struct nlmsghdr` with a `struct inet_diag_req_v2` for any state and cookie.
fn request(tuple: Tuple, sequence: u32) -> [u8; REQUEST_BYTES] {
    let mut bytes = [0; REQUEST_BYTES];
    bytes[..4].copy_from_slice(&(REQUEST_BYTES as u32).to_ne_bytes());
    bytes[4..6].copy_from_slice(&BY_FAMILY.to_ne_bytes());
    bytes[6..8].copy_from_slice(&REQUEST.to_ne_bytes());
    bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
    let body = &mut bytes[NLMSGHDR_BYTES..];
    // A socket of IPv6 with mapped addresses is found by its IPv4 addresses as well.
    body[0] = if tuple.local.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 } as u8;
    body[1] = libc::IPPROTO_TCP as u8;
    body[4..8].fill(0xff); // Any state.
    body[8..44].copy_from_slice(&addresses(tuple));
    body[48..].fill(0xff); // Any cookie: both words are INET_DIAG_NOCOOKIE. The interface before them is 0: any.
    bytes
}

/// Returns the ports and addresses of `struct inet_diag_sockid`.
fn addresses(tuple: Tuple) -> [u8; 36] {
    let mut bytes = [0; 36];
    bytes[..2].copy_from_slice(&tuple.local.port().to_be_bytes());
    bytes[2..4].copy_from_slice(&tuple.peer.port().to_be_bytes());
    for (part, address) in bytes[4..].chunks_exact_mut(16).zip([tuple.local, tuple.peer]) {
        copy_ip(part, address);
    }
    bytes
}

fn copy_ip(part: &mut [u8], address: SocketAddr) {
    match address.ip() {
        IpAddr::V4(ip) => part[..4].copy_from_slice(&ip.octets()),
        IpAddr::V6(ip) => part.copy_from_slice(&ip.octets()),
    }
}

/// Parses an answer.
fn parse(answer: &[u8], tuple: Tuple) -> LookUp {
    let word = |at: usize| answer.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_ne_bytes);
    // NLMSG_ERROR: the negative error follows the header.
    if kind_of(answer) == Some(2) && word(NLMSGHDR_BYTES) == Some(-libc::ENOENT as u32) {
        return LookUp::Nothing;
    }
    match parse_entry(answer) {
        // A listener, which has no peer.
        Some(_) if answer[NLMSGHDR_BYTES + 4..NLMSGHDR_BYTES + 8] != addresses(tuple)[..4] => LookUp::Nothing,
        Some(entry) => LookUp::Found(entry),
        None => LookUp::Unavailable,
    }
}

/// Returns the type of a message.
fn kind_of(answer: &[u8]) -> Option<u16> {
    answer.get(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes)
}

/// Parses the entry of a socket; `None` if an answer has none.
fn parse_entry(answer: &[u8]) -> Option<Entry> {
    if kind_of(answer) != Some(BY_FAMILY) || answer.len() < ENTRY_BYTES {
        return None;
    }
    let body = &answer[NLMSGHDR_BYTES..];
    let number = |at: usize| u32::from_ne_bytes(std::array::from_fn(|index| body[at + index]));
    let cookie = u64::from(number(48)) << 32 | u64::from(number(44));
    Some(Entry { cookie, uid: number(64), state: body[1], inode: number(68), unread_bytes: number(56) })
}
