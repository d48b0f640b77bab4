//! How two processes meet: `listen` leaves a name in the rack, `connect` follows it, and `accept` learns both
//! addresses. Between programs that is all: the connection begins on its lifeline, and its memory follows when it pays
//! (`connection::lifeline`). Where a proxy is at one end, the first message, a handshake, hands the memory over.
//!
//! The connecting end binds its lifeline to the name of the [`Tuple`] before it connects, so `accept` knows both
//! addresses without waiting for anything, and no tuple exists twice. Nothing here waits for a peer: whatever does not
//! work at once is a reason to take kernel TCP instead. Only a connection to another node is not done at once: it is
//! [`RemoteConnect`] until the answer from there has come.

#![allow(unsafe_code)] // Descriptor numbers of the program, and the credentials that the kernel writes.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::fs::OFlags;
use rustix::io::{Errno, FdFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType,
};
use stats_page::FallbackReason;

use crate::descriptor::hidden::{HiddenFd, Need, close};
use crate::process::socket_option::{SocketOption, get_raw};
use crate::rendezvous::address::{
    Opener, Tuple, canonical, destination, ephemeral_candidates, ephemeral_ports, local_source,
};
use crate::rendezvous::directory::{ListenerName, Rack, RackLock, is_in_any_rack, netns_cookie};
use crate::rendezvous::handshake::Handshake;
use crate::rendezvous::local_page::MemoryFds;
use crate::rendezvous::name_key::NameKey;
use segment::{Segment, Side};

/// Descriptors a handshake may bring at least before they are cut off; one is right.
pub(super) const HANDSHAKE_FDS_MAX: usize = 4;

/// A lane listener: a hidden AF_UNIX socket with a name in the rack. When it is dropped the socket is closed, and the
/// name removed unless another process still listens on the same socket.
#[derive(Debug)]
pub struct LaneListener {
    fd: Option<HiddenFd>,
    name: ListenerName,
    rack: Arc<Rack>,
}

impl LaneListener {
    /// The present number of the hidden socket; -1 never while it lives.
    pub fn fd(&self) -> RawFd {
        self.fd.as_ref().map_or(-1, HiddenFd::raw)
    }

    /// The hidden socket, for waiting on it.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().and_then(HiddenFd::get)
    }

    /// Says whether the hidden socket outlives `exec`, as the program's listener does.
    pub fn set_inheritable(&self, inheritable: bool) {
        self.fd.as_ref().map(|fd| fd.set_inheritable(inheritable));
    }

    /// The key of the names that connecting ends have.
    pub fn key(&self) -> NameKey {
        self.rack.key()
    }

    /// Its name in the rack.
    pub fn name(&self) -> ListenerName {
        self.name
    }
}

impl Drop for LaneListener {
    fn drop(&mut self) {
        // Closed first: then the kernel knows whether a forked process still listens, and nobody's pid has to be asked.
        drop(self.fd.take());
        let _ = self.rack.remove_if_stale(&self.name);
    }
}

/// Adds a lane listener for a TCP listener bound to `bound`, in the caller's rack. `netns` is the cookie of the network
/// namespace that the TCP listener was made in.
///
/// # Errors
/// As [`listen_in`], and those of [`Rack::current`]; `XDEV` where the calling thread is in another namespace.
pub fn listen(
    bound: SocketAddr,
    netns: u64,
    v6_only: bool,
    reuse_port: bool,
    backlog: i32,
) -> Result<LaneListener, Errno> {
    listen_in(&rack_of(netns)?, bound, v6_only, reuse_port, backlog)
}

/// As [`listen`], of a TCP socket on which another process may listen as well, because both have it from who bound it:
/// clients come to one or the other then.
///
/// # Errors
/// As [`listen`]; `ADDRINUSE` only where there are too many.
pub fn listen_on_shared_socket(
    bound: SocketAddr,
    netns: u64,
    v6_only: bool,
    backlog: i32,
) -> Result<LaneListener, Errno> {
    listen_as(&rack_of(netns)?, bound, |lock| lock.free_name_on_shared_socket(v6_only), backlog)
}

/// The caller's rack, if that is in the network namespace of this cookie.
pub(super) fn rack_of(netns: u64) -> Result<Arc<Rack>, Errno> {
    let is_there = netns_cookie(unix_stream()?.as_fd()) == netns;
    if is_there { Rack::current() } else { Err(Errno::XDEV) }
}

/// Adds a lane listener in a rack.
///
/// # Errors
/// `ADDRINUSE` when a live listener that does not share has the address, `BUSY` when the rack stays locked, `MFILE` and
/// its kin when there is no room for the socket.
pub fn listen_in(
    rack: &Arc<Rack>,
    bound: SocketAddr,
    v6_only: bool,
    reuse_port: bool,
    backlog: i32,
) -> Result<LaneListener, Errno> {
    listen_as(rack, bound, |lock| lock.free_name(v6_only, reuse_port), backlog)
}

pub(super) fn listen_as(
    rack: &Arc<Rack>,
    address: SocketAddr,
    free_name: impl FnOnce(&RackLock<'_>) -> Result<ListenerName, Errno>,
    backlog: i32,
) -> Result<LaneListener, Errno> {
    let socket = unix_stream()?;
    let lock = rack.lock(canonical(address))?;
    let name = free_name(&lock)?;
    lock.bind(socket.as_fd(), &name)?;
    // Still under the lock: a name that is bound but does not listen yet looks stale to nobody then.
    rustix::net::listen(&socket, backlog)?;
    drop(lock);
    let fd = HiddenFd::hide(socket, Need::Required);
    if fd.is_err() {
        let _ = rack.remove_if_stale(&name);
    }
    // Only tidying up.
    let _ = rack.sweep();
    Ok(LaneListener { fd: Some(fd?), name, rack: Arc::clone(rack) })
}

/// A new connection, seen from the end that called `connect`.
#[derive(Debug)]
pub struct Connected {
    /// The kernel object that is to stand behind the program's descriptor: closed at `exec`, non-blocking.
    pub lifeline: OwnedFd,
    /// Its addresses, canonical.
    pub tuple: Tuple,
    /// The connection's memory.
    pub segment: Segment,
    /// The descriptors of that memory.
    pub memory: Option<MemoryFds>,
    /// Whether the proxy of this node is at the other end, for a listener of another.
    pub is_remote: bool,
}

/// Why a connection gets no lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoLane {
    /// For the ledger.
    pub reason: FallbackReason,
    /// What a system call answered, where one did.
    pub errno: Option<Errno>,
}

impl NoLane {
    pub(super) fn new(reason: FallbackReason) -> Self {
        Self { reason, errno: None }
    }

    pub(super) fn with_errno(reason: FallbackReason, errno: Errno) -> Self {
        Self { reason, errno: Some(errno) }
    }

    /// For a lifeline that gets no name.
    pub(super) fn of_bind_error(errno: Errno) -> Self {
        match errno {
            Errno::ADDRINUSE => Self::with_errno(FallbackReason::PortInUse, errno),
            Errno::ADDRNOTAVAIL => Self::with_errno(FallbackReason::NoFreePort, errno),
            _ => Self::resource_limit_or(FallbackReason::HandshakeFailed)(errno),
        }
    }

    /// For a call that may fail because something ran out, or else for `reason`.
    pub(super) fn resource_limit_or(reason: FallbackReason) -> impl Fn(Errno) -> Self {
        move |errno| match errno {
            Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS | Errno::NOSPC => {
                Self::with_errno(FallbackReason::ResourceLimit, errno)
            }
            _ => Self::with_errno(reason, errno),
        }
    }
}

/// What a program asks of `connect`.
#[derive(Clone, Copy, Debug)]
pub struct ConnectRequest {
    /// The address it named.
    pub destination: SocketAddr,
    /// What its socket is bound to; an unspecified address or port 0 is free to be chosen.
    pub source: Option<SocketAddr>,
    /// Its node, the source of unbound connections to other nodes.
    pub node: Option<IpAddr>,
    /// Who asks.
    pub opener: Opener,
}

/// A request with everything known that the kernel decides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route {
    pub(super) destination: SocketAddr,
    pub(super) source: IpAddr,
    /// 0 for one to be chosen.
    pub(super) port: u16,
}

impl ConnectRequest {
    pub(super) fn route(&self) -> Result<Route, NoLane> {
        let destination = destination(self.destination);
        let scope = if let SocketAddr::V6(v6) = destination { v6.scope_id() } else { 0 };
        let bound = self.source.map(canonical);
        // A node's own address is its own even where the machine, which is several nodes, does not have it.
        let known = match (self.opener, bound) {
            (Opener::Proxy, Some(bound)) => Some(bound.ip()),
            _ => self.node.filter(|node| *node == destination.ip()),
        };
        let default = match known.map_or_else(|| local_source(destination.ip(), scope), |known| Ok(Some(known))) {
            Ok(Some(_)) if destination.port() == 0 => return Err(NoLane::new(FallbackReason::NoListener)),
            Ok(Some(source)) => source,
            Ok(None) => return Err(NoLane::new(FallbackReason::RemoteAddress)),
            Err(errno) => return Err(NoLane::resource_limit_or(FallbackReason::RemoteAddress)(errno)),
        };
        let source = match bound.map(|bound| bound.ip()).filter(|ip| !ip.is_unspecified()) {
            Some(ip) if ip.is_ipv4() != destination.is_ipv4() => {
                return Err(NoLane::new(FallbackReason::UnsupportedCall));
            }
            Some(ip) => ip,
            None => {
                let is_alike = |node: &IpAddr| is_node(destination.ip()) && node.is_ipv4() == destination.is_ipv4();
                self.node.filter(is_alike).unwrap_or(default)
            }
        };
        Ok(Route { destination, source, port: bound.map_or(0, |bound| bound.port()) })
    }
}

/// Whether the address is one of several nodes on one machine: of 127.77.0.0/16, or of fd00:77::/32.
pub(super) fn is_node(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.octets()[..2] == [127, 77],
        IpAddr::V6(v6) => v6.segments()[..2] == [0xfd00, 0x77],
    }
}

impl Route {
    /// Whether the socket connects to its own address, as TCP allows.
    pub(super) fn is_self_connection(&self) -> bool {
        let tuple = self.tuple(self.port);
        self.port != 0 && tuple.local == tuple.peer
    }

    pub(super) fn tuple(&self, port: u16) -> Tuple {
        let mut local = SocketAddr::new(self.source, port);
        if let (SocketAddr::V6(local), SocketAddr::V6(peer)) = (&mut local, self.destination) {
            local.set_scope_id(peer.scope_id());
        }
        Tuple { local: canonical(local), peer: self.destination }
    }
}

/// Connects to a lane listener in a rack, if there is one for the destination, without waiting for it, and says
/// handshake.
///
/// # Errors
/// Why there is no lane; the program's connection is kernel TCP's then.
pub fn connect_in(rack: &Rack, request: &ConnectRequest) -> Result<Connected, NoLane> {
    connect_by(rack, request.route()?, new_lifeline()?, request.opener)
}

pub(super) fn new_lifeline() -> Result<OwnedFd, NoLane> {
    unix_stream().map_err(NoLane::resource_limit_or(FallbackReason::HandshakeFailed))
}

pub(super) fn connect_by(rack: &Rack, route: Route, lifeline: OwnedFd, opener: Opener) -> Result<Connected, NoLane> {
    let mut memory = None;
    let (lifeline, tuple) = connect_lifeline(rack, route, lifeline, opener, || {
        if memory.is_none() {
            memory = Some(new_memory()?);
        }
        Ok(())
    })?;
    hand_over_memory(lifeline, tuple, memory.map_or_else(new_memory, Ok)?)
}

pub(super) fn new_memory() -> Result<(Segment, OwnedFd), NoLane> {
    Segment::create(Side::Connector).map_err(NoLane::resource_limit_or(FallbackReason::HandshakeFailed))
}

/// Gets the lifeline to a listener. `prepare` gets what the connection needs before the first listener hears of it.
pub(super) fn connect_lifeline(
    rack: &Rack,
    route: Route,
    lifeline: OwnedFd,
    opener: Opener,
    mut prepare: impl FnMut() -> Result<(), NoLane>,
) -> Result<(OwnedFd, Tuple), NoLane> {
    if route.is_self_connection() {
        return Err(NoLane::new(FallbackReason::ToItself));
    }
    let random = spread_u32();
    // The tuple first: with its name the listener learns who comes.
    let tuple = bind_tuple(lifeline.as_fd(), &route, random, opener, &rack.key()).map_err(NoLane::of_bind_error)?;
    // The one listener that has the very address is most often there, and is the best: only without it the rack is
    // searched.
    let exact = ListenerName::new(route.destination, false, None);
    if connect_to_first(rack, lifeline.as_fd(), &[exact], &mut prepare).is_err() {
        let unavailable = NoLane::resource_limit_or(FallbackReason::RackUnavailable);
        let listeners = listeners_for(rack, route.destination, random).map_err(unavailable)?;
        connect_to_first(rack, lifeline.as_fd(), &listeners, prepare)?;
    }
    Ok((lifeline, tuple))
}

pub(super) fn check_trusted(lifeline: BorrowedFd<'_>) -> Result<(), NoLane> {
    match is_trusted(lifeline, None).map_err(NoLane::resource_limit_or(FallbackReason::HandshakeFailed))? {
        true => Ok(()),
        false => Err(NoLane::with_errno(FallbackReason::PeerRefused, Errno::PERM)),
    }
}

/// Hands the memory of a connection to whom the lifeline has reached.
pub(super) fn hand_over_memory(
    lifeline: OwnedFd,
    tuple: Tuple,
    memory: (Segment, OwnedFd),
) -> Result<Connected, NoLane> {
    check_trusted(lifeline.as_fd())?;
    let (segment, memfd) = memory;
    let broken = NoLane::resource_limit_or(FallbackReason::HandshakeFailed);
    send_handshake(lifeline.as_fd(), &segment, memfd.as_fd()).map_err(broken)?;
    // Only now: while the first pages are found here, the other end maps them there.
    segment.set_up();
    Ok(Connected { lifeline, tuple, segment, memory: Some(MemoryFds::of_memfd(memfd)), is_remote: false })
}

/// The listeners that answer for a destination, the best first; those that share an address in turn, from a random one.
pub(super) fn listeners_for(rack: &Rack, destination: SocketAddr, random: u32) -> Result<Vec<ListenerName>, Errno> {
    let mut names = rack.names_for(destination)?;
    names.sort_unstable_by_key(|name| name.member);
    if !names.is_empty() {
        let turns = random as usize % names.len();
        names.rotate_left(turns);
    }
    names.sort_by_key(|name| name.rank_for(destination));
    Ok(names)
}

/// Binds a lifeline to the name of a tuple that no lane has: the port asked for, or a free one.
pub(super) fn bind_tuple(
    lifeline: BorrowedFd<'_>,
    route: &Route,
    random: u32,
    opener: Opener,
    key: &NameKey,
) -> Result<Tuple, Errno> {
    let bind = |port| {
        let tuple = route.tuple(port);
        if tuple.local == tuple.peer {
            return Err(Errno::ADDRINUSE); // Nobody chooses a port by chance that leads to itself.
        }
        let address = |opener| SocketAddrUnix::new_abstract_name(&tuple.name(opener, key)?);
        if opener == Opener::SharingProgram {
            // Nobody has it under the name of a program that does not share.
            rustix::net::bind(unix_stream()?, &address(Opener::Program)?)?;
        }
        rustix::net::bind(lifeline, &address(opener)?).map(|()| tuple)
    };
    if route.port != 0 {
        return bind(route.port);
    }
    for port in ephemeral_candidates(ephemeral_ports(), random) {
        match bind(port) {
            Err(Errno::ADDRINUSE) => {}
            outcome => return outcome,
        }
    }
    Err(Errno::ADDRNOTAVAIL)
}

/// Connects the lifeline to the first of the listeners that lives and has room, after `prepare`: a connection that is
/// accepted and then given up would be a reset for the server.
pub(super) fn connect_to_first(
    rack: &Rack,
    lifeline: BorrowedFd<'_>,
    names: &[ListenerName],
    mut prepare: impl FnMut() -> Result<(), NoLane>,
) -> Result<(), NoLane> {
    let mut outcome = NoLane::new(FallbackReason::NoListener);
    for name in names {
        prepare()?;
        match rack.address_of(name).and_then(|address| rustix::net::connect(lifeline, &address)) {
            Ok(()) => return Ok(()),
            Err(Errno::CONNREFUSED) => {
                // Its owner was killed. Whoever finds that out first cleans up, unless somebody is at the rack just
                // now.
                let _ = rack.try_remove_if_stale(name);
            }
            Err(Errno::NOENT) => {}
            Err(errno @ Errno::AGAIN) => outcome = NoLane::with_errno(FallbackReason::BacklogFull, errno),
            Err(errno @ (Errno::ACCESS | Errno::PERM)) => {
                outcome = NoLane::with_errno(FallbackReason::PeerRefused, errno)
            }
            Err(errno) => outcome = NoLane::resource_limit_or(FallbackReason::HandshakeFailed)(errno),
        }
    }
    Err(outcome)
}

/// Whether the process at the other end is of our own user or root; on the accepting end, also of the user who made the
/// listener, because a server may have given up that user's rights since.
///
/// # Errors
/// What getsockopt answers.
pub(crate) fn is_trusted(lifeline: BorrowedFd<'_>, listener: Option<BorrowedFd<'_>>) -> Result<bool, Errno> {
    let peer = peer_uid(lifeline)?;
    if peer == 0 || peer == rustix::process::geteuid().as_raw() {
        return Ok(true);
    }
    // The kernel notes at `listen` who called it, and answers with that for the listener itself.
    listener.map_or(Ok(false), |listener| peer_uid(listener).map(|owner| owner == peer))
}

pub(super) fn peer_uid(socket: BorrowedFd<'_>) -> Result<u32, Errno> {
    // Not rustix's: its pid cannot be zero, and the pid of a process in another namespace is.
    let mut credentials = [0_u8; size_of::<libc::ucred>()];
    let option = SocketOption { level: libc::SOL_SOCKET, name: libc::SO_PEERCRED };
    let length = get_raw(socket, option, &mut credentials)?;
    let uid = credentials.get(4..8).filter(|_| length == credentials.len()).and_then(|uid| uid.try_into().ok());
    uid.map(u32::from_ne_bytes).ok_or(Errno::PROTO)
}

/// A number that differs from call to call and from process to process, for spreading load and avoiding collisions:
/// whoever guesses it gains nothing.
pub(crate) fn spread_u32() -> u32 {
    // 2^64 divided by the golden ratio: the low bits of the clock, which differ most, come to count most.
    (crate::process::clock::ticks().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}

pub(super) fn unix_stream() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

pub(crate) fn send_handshake(lifeline: BorrowedFd<'_>, segment: &Segment, memfd: BorrowedFd<'_>) -> Result<(), Errno> {
    let handshake = Handshake { secrets: segment.secrets(), spans: None }.encode();
    match send_with_descriptor(lifeline, &handshake, Some(memfd)) {
        // The server has closed already, as it may: the program is connected, and finds the end when it looks.
        Err(Errno::PIPE) => Ok(()),
        Err(Errno::CONNRESET) => {
            segment.note_reset();
            Ok(())
        }
        sent => sent,
    }
}

pub(crate) fn send_with_descriptor(
    lifeline: BorrowedFd<'_>,
    bytes: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> Result<(), Errno> {
    let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(Errno::NOBUFS);
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = rustix::net::sendmsg(lifeline, &[IoSlice::new(bytes)], &mut control, flags)?;
    if sent == bytes.len() { Ok(()) } else { Err(Errno::PROTO) }
}

/// The tuple of a lifeline that was accepted before, as its connecting end has it, and who that is.
pub(crate) fn peer_of(lifeline: BorrowedFd<'_>, key: &NameKey) -> Option<(Tuple, Opener)> {
    rustix::net::getpeername(lifeline).ok().flatten().and_then(|name| tuple_of(&name, key))
}

/// The tuple in the address of a connecting end, seen from there, and who that is.
pub(super) fn tuple_of(address: &SocketAddrAny, key: &NameKey) -> Option<(Tuple, Opener)> {
    if address.address_family() != AddressFamily::UNIX {
        return None;
    }
    let length = address.addr_len() as usize;
    // SAFETY: the address is initialized for its length.
    let bytes = unsafe { std::slice::from_raw_parts(address.as_ptr().cast::<u8>(), length) };
    match bytes.get(size_of::<libc::sa_family_t>()..)? {
        [0, name @ ..] => Tuple::from_name(name, key).ok(),
        _ => None,
    }
}

/// A message's length, the descriptors that came with it, and whether there were more than are taken.
pub(crate) fn receive_with_descriptors(
    lifeline: BorrowedFd<'_>,
    bytes: &mut [u8],
) -> Result<(usize, Vec<OwnedFd>, bool), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(HANDSHAKE_FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(lifeline, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
    let mut fds: Vec<OwnedFd> = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok((received.bytes, fds, received.flags.contains(ReturnFlags::CTRUNC)))
}

/// Gives a lifeline the modes of the program's descriptor that it stands in for.
///
/// # Errors
/// What fcntl answers.
pub fn set_modes(lifeline: BorrowedFd<'_>, cloexec: bool, nonblocking: bool) -> Result<(), Errno> {
    rustix::fs::fcntl_setfl(lifeline, if nonblocking { OFlags::NONBLOCK } else { OFlags::empty() })?;
    rustix::io::fcntl_setfd(lifeline, if cloexec { FdFlags::CLOEXEC } else { FdFlags::empty() })
}

/// The lane listener behind a descriptor that the program before `exec` left; `None` when it is none, and stays open,
/// or when nobody could accept there. Then it is closed, so that clients which find it take kernel TCP: it is another
/// version's of this library, or of another rack, which a user that the process was before has.
pub fn adopt_listener(fd: RawFd) -> Option<LaneListener> {
    // SAFETY: only asked what it is; a closed number is answered with an error.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    let path = path_of(socket).filter(|path| is_in_any_rack(path))?;
    let mut listens = [0_u8; 4];
    let option = SocketOption { level: libc::SOL_SOCKET, name: libc::SO_ACCEPTCONN };
    get_raw(socket, option, &mut listens).ok().filter(|_| i32::from_ne_bytes(listens) != 0)?;
    // SAFETY: made by this library before `exec`, as its name and place say; nobody in this program owns it yet.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let rack = Rack::current().ok().filter(|rack| rack.contains_path(&path));
    let (Some(rack), Some(name)) = (rack, ListenerName::from_path(&path)) else {
        close(fd);
        return None;
    };
    let fd = HiddenFd::adopt(fd, Need::Required).ok()?;
    Some(LaneListener { fd: Some(fd), name, rack })
}

/// The path that an AF_UNIX socket is bound to.
pub(super) fn path_of(socket: BorrowedFd<'_>) -> Option<Vec<u8>> {
    path_in(rustix::net::getsockname(socket).ok()?)
}

pub(super) fn path_in(address: SocketAddrAny) -> Option<Vec<u8>> {
    if address.address_family() != AddressFamily::UNIX {
        return None;
    }
    // SAFETY: the address is initialized for its length.
    let bytes = unsafe { std::slice::from_raw_parts(address.as_ptr().cast::<u8>(), address.addr_len() as usize) };
    let path = bytes.get(size_of::<libc::sa_family_t>()..)?.split(|byte| *byte == 0).next()?;
    (!path.is_empty()).then(|| path.to_vec())
}
