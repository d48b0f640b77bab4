//! Rendezvous of two processes on one machine: `listen` publishes a name in the rack, `connect` uses it, and `accept`
//! gets both addresses. Between programs nothing else is needed: the connection starts on its lifeline, and its memory
//! follows when it pays off (`connection::lifeline`). If one endpoint is a proxy's, the first message, a handshake,
//! transfers the memory.
//!
//! The connecting endpoint binds its lifeline to the name of the [`Tuple`] before it connects, so `accept` gets both
//! addresses without waiting, and no tuple exists twice. Nothing here waits for a peer: if a step does not succeed at
//! once, the connection uses kernel TCP. Only a connection to another node takes longer: it is a `RemoteConnect` until
//! the answer has arrived.

#![allow(unsafe_code)] // Descriptor numbers of the program, and what the kernel writes.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::fs::OFlags;
use rustix::io::{Errno, FdFlags};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrAny, SocketAddrUnix, SocketFlags,
    SocketType,
};
use stats_page::FallbackReason;

use crate::descriptor::hidden::{HiddenFd, Need, close};
use crate::descriptor::received;
use crate::process::socket_option::{SocketOption, get_raw};
use crate::rendezvous::address::{
    Opener, Tuple, canonical, destination, ephemeral_candidates, ephemeral_ports, local_source,
};
use crate::rendezvous::directory::{ListenerName, Rack, RackLock, is_in_any_rack, netns_cookie};
use crate::rendezvous::handshake::Handshake;
use crate::rendezvous::local_page::MemoryFds;
use crate::rendezvous::name_key::NameKey;
use crate::rendezvous::reasons;
use segment::{Segment, Side};

/// A lane listener: a hidden AF_UNIX socket with a name in the rack. When it is dropped, the socket is closed, and the
/// name is removed unless another process still listens on the same socket.
#[derive(Debug)]
pub struct LaneListener {
    fd: Option<HiddenFd>,
    name: ListenerName,
    rack: Arc<Rack>,
}

impl LaneListener {
    /// Returns the present number of the hidden socket, which is never -1 while the listener lives.
    pub fn fd(&self) -> RawFd {
        self.fd.as_ref().map_or(-1, HiddenFd::raw)
    }

    /// Returns the hidden socket, for waiting on it.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().and_then(HiddenFd::get)
    }

    /// Sets whether the hidden socket stays open through `exec`, as the program's listener does.
    pub fn set_inheritable(&self, inheritable: bool) {
        self.fd.as_ref().map(|fd| fd.set_inheritable(inheritable));
    }

    /// Returns the key of the names that connecting endpoints have.
    pub fn key(&self) -> NameKey {
        self.rack.key()
    }

    /// Returns its name in the rack.
    pub fn name(&self) -> ListenerName {
        self.name
    }
}

impl Drop for LaneListener {
    fn drop(&mut self) {
        // The socket is closed first: then the kernel can tell whether a forked process still listens.
        drop(self.fd.take());
        let _ = self.rack.remove_if_stale(&self.name);
    }
}

/// Adds a lane listener for a TCP listener bound to `bound`, in the rack of the calling thread. `netns` is the cookie
/// of the network namespace that the TCP listener was created in.
///
/// # Errors
/// Those of [`listen_in`] and [`Rack::current`]; `XDEV` if the calling thread is in another namespace.
pub fn listen(
    bound: SocketAddr,
    netns: u64,
    v6_only: bool,
    reuse_port: bool,
    backlog: i32,
) -> Result<LaneListener, Errno> {
    listen_in(&rack_of(netns)?, bound, v6_only, reuse_port, backlog)
}

/// Adds a lane listener, as [`listen`] does, for a TCP socket on which another process may listen as well because both
/// have inherited it: each client connects to one of the two.
///
/// # Errors
/// Those of [`listen`]; `ADDRINUSE` only when there are too many listeners.
pub fn listen_on_shared_socket(
    bound: SocketAddr,
    netns: u64,
    v6_only: bool,
    backlog: i32,
) -> Result<LaneListener, Errno> {
    listen_as(&rack_of(netns)?, bound, |lock| lock.free_name_on_shared_socket(v6_only), backlog)
}

/// Returns the rack of the calling thread if that is in the network namespace of this cookie.
pub(super) fn rack_of(netns: u64) -> Result<Arc<Rack>, Errno> {
    let is_there = netns_cookie(unix_stream()?.as_fd()) == netns;
    if is_there { Rack::current() } else { Err(Errno::XDEV) }
}

/// Adds a lane listener in a rack.
///
/// # Errors
/// `ADDRINUSE` when a live listener has the address and does not share it, `BUSY` when the rack stays locked, `MFILE`
/// and similar errors when there is no descriptor for the socket.
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
    // Still under the lock: a name that is bound but does not listen yet would look stale.
    rustix::net::listen(&socket, backlog)?;
    drop(lock);
    let fd = HiddenFd::hide(socket, Need::Required);
    if fd.is_err() {
        let _ = rack.remove_if_stale(&name);
    }
    // Failures are ignored: the sweep only cleans up.
    let _ = rack.sweep();
    rack.sweep_other_namespaces_once();
    Ok(LaneListener { fd: Some(fd?), name, rack: Arc::clone(rack) })
}

/// A new connection, as the endpoint that has called `connect` sees it.
#[derive(Debug)]
pub struct Connected {
    /// The kernel object to install behind the program's descriptor: closed at `exec`, non-blocking.
    pub lifeline: OwnedFd,
    /// Its addresses, in canonical form.
    pub tuple: Tuple,
    /// The connection's memory.
    pub segment: Segment,
    /// The descriptors of that memory.
    pub memory: Option<MemoryFds>,
    /// Whether the other endpoint is the proxy of this node, for a listener of another.
    pub is_remote: bool,
}

/// The reason why a connection gets no lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoLane {
    /// The reason for the stats page.
    pub reason: FallbackReason,
    /// The error of the system call that failed, if one did.
    pub errno: Option<Errno>,
}

impl NoLane {
    pub(super) fn new(reason: FallbackReason) -> Self {
        Self { reason, errno: None }
    }

    pub(super) fn with_errno(reason: FallbackReason, errno: Errno) -> Self {
        Self { reason, errno: Some(errno) }
    }

    /// Returns the reason for a lifeline that could not be bound to a name.
    pub(super) fn of_bind_error(errno: Errno) -> Self {
        match errno {
            Errno::ADDRINUSE => Self::with_errno(FallbackReason::PortInUse, errno),
            Errno::ADDRNOTAVAIL => Self::with_errno(FallbackReason::ResourceLimit, errno),
            _ => Self::resource_limit_or(FallbackReason::HandshakeFailed)(errno),
        }
    }

    /// Returns the reason for a lifeline or memory that could not be created.
    pub(super) fn of_creation_error(errno: Errno) -> Self {
        let denied = reasons::is_denied(errno);
        let reason = if denied { FallbackReason::Sandbox } else { FallbackReason::HandshakeFailed };
        Self::resource_limit_or(reason)(errno)
    }

    /// Returns a conversion of errors: `ResourceLimit` for an exhausted resource, `Sandbox` where AF_UNIX sockets are
    /// denied, and `reason` for all others.
    pub(super) fn resource_limit_or(reason: FallbackReason) -> impl Fn(Errno) -> Self {
        move |errno| match errno {
            Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS | Errno::NOSPC => {
                Self::with_errno(FallbackReason::ResourceLimit, errno)
            }
            Errno::AFNOSUPPORT => Self::with_errno(FallbackReason::Sandbox, errno),
            _ => Self::with_errno(reason, errno),
        }
    }
}

/// The arguments of a connect.
#[derive(Clone, Copy, Debug)]
pub struct ConnectRequest {
    /// The address that the program has passed.
    pub destination: SocketAddr,
    /// The address that its socket is bound to; an unspecified address or port 0 is chosen.
    pub source: Option<SocketAddr>,
    /// The node of the program, the source of unbound connections to other nodes.
    pub node: Option<IpAddr>,
    /// The kind of process that connects.
    pub opener: Opener,
}

/// The addresses of a request, completed as the kernel would.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route {
    pub(super) destination: SocketAddr,
    pub(super) source: IpAddr,
    /// 0 if the port is to be chosen.
    pub(super) port: u16,
}

impl ConnectRequest {
    pub(super) fn route(&self) -> Result<Route, NoLane> {
        let destination = destination(self.destination);
        let scope = if let SocketAddr::V6(v6) = destination { v6.scope_id() } else { 0 };
        let bound = self.source.map(canonical);
        // A node's own address is local even if the machine, which may be several nodes, does not have it.
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
                return Err(NoLane::new(FallbackReason::SocketOption));
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

/// Returns whether the address is that of one of several nodes on one machine: in 127.77.0.0/16 or fd00:77::/32.
pub(super) fn is_node(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.octets()[..2] == [127, 77],
        IpAddr::V6(v6) => v6.segments()[..2] == [0xfd00, 0x77],
    }
}

impl Route {
    /// Returns whether the socket connects to its own address, as TCP allows.
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

/// Connects to a lane listener in a rack, if there is one for the destination, without waiting for it, and sends the
/// handshake.
///
/// # Errors
/// The reason why there is no lane; the program's connection uses kernel TCP then.
pub fn connect_in(rack: &Rack, request: &ConnectRequest) -> Result<Connected, NoLane> {
    let mut memory = None;
    let (lifeline, tuple) = connect_lifeline(rack, request.route()?, new_lifeline()?, request.opener, || {
        if memory.is_none() {
            memory = Some(new_memory()?);
        }
        Ok(())
    })?;
    hand_over_memory(lifeline, tuple, memory.map_or_else(new_memory, Ok)?).map(|connected| *connected)
}

pub(super) fn new_lifeline() -> Result<OwnedFd, NoLane> {
    unix_stream().map_err(NoLane::of_creation_error)
}

pub(super) fn new_memory() -> Result<(Segment, OwnedFd), NoLane> {
    Segment::create(Side::Connector).map_err(NoLane::of_creation_error)
}

/// Connects the lifeline to a listener. `prepare` obtains what the connection needs, before the first listener is
/// contacted.
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
    // The lifeline is bound first: its name tells the listener who connects.
    let tuple = bind_tuple(lifeline.as_fd(), &route, random, opener, &rack.key()).map_err(NoLane::of_bind_error)?;
    // A listener at the exact address is the most frequent case and the best match, so the rack is searched only
    // without one.
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
        false => Err(NoLane::with_errno(FallbackReason::AccessDenied, Errno::PERM)),
    }
}

/// Transfers the memory of a connection to the process that the lifeline leads to.
#[inline(never)] // Its variables are not to add to the caller's on a small stack.
pub(super) fn hand_over_memory(
    lifeline: OwnedFd,
    tuple: Tuple,
    memory: (Segment, OwnedFd),
) -> Result<Box<Connected>, NoLane> {
    check_trusted(lifeline.as_fd())?;
    let (segment, memfd) = memory;
    let broken = NoLane::resource_limit_or(FallbackReason::HandshakeFailed);
    send_handshake(lifeline.as_fd(), &segment, memfd.as_fd()).map_err(broken)?;
    // Only now: the other endpoint maps its memory while the first pages are allocated here.
    segment.set_up();
    let memory = Some(MemoryFds::of_memfd(memfd));
    Ok(Box::new(Connected { lifeline, tuple, segment, memory, is_remote: false }))
}

/// Returns the listeners that match a destination, the best first; those that share an address are rotated by a random
/// number.
pub(super) fn listeners_for(rack: &Rack, destination: SocketAddr, random: u32) -> Result<Vec<ListenerName>, Errno> {
    let mut names = rack.names_for(destination)?;
    // A sort of small keys: that of whole names has 2 to 4 KiB of them on the stack.
    names.sort_by_cached_key(|name| name.member);
    if !names.is_empty() {
        let turns = random as usize % names.len();
        names.rotate_left(turns);
    }
    names.sort_by_cached_key(|name| name.rank_for(destination));
    Ok(names)
}

/// Binds a lifeline to the name of a tuple that no lane has: with the port that the route names, or a free one.
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
            return Err(Errno::ADDRINUSE); // A chosen port must not connect the socket to itself.
        }
        let address = |opener| SocketAddrUnix::new_abstract_name(&tuple.name(opener, key)?);
        if opener == Opener::SharingProgram {
            // Fails if a program that does not share has the tuple.
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

/// Connects the lifeline to the first of the listeners that is live and has room. `prepare` is called before: a
/// connection that is accepted and then abandoned would be a reset for the server.
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
                // Its owner was killed. The first process that notices this cleans up, unless the address is locked.
                let _ = rack.try_remove_if_stale(name);
            }
            Err(Errno::NOENT) => {}
            Err(errno @ Errno::AGAIN) => outcome = NoLane::with_errno(FallbackReason::HandshakeFailed, errno),
            Err(errno @ (Errno::ACCESS | Errno::PERM)) => {
                outcome = NoLane::with_errno(FallbackReason::AccessDenied, errno)
            }
            Err(errno) => outcome = NoLane::resource_limit_or(FallbackReason::HandshakeFailed)(errno),
        }
    }
    Err(outcome)
}

/// Returns whether the process at the other endpoint is of the same user or root; on the accepting side, also if it is
/// of the user who created the listener, because a server may have changed its user since.
///
/// # Errors
/// Those of getsockopt.
pub(crate) fn is_trusted(lifeline: BorrowedFd<'_>, listener: Option<BorrowedFd<'_>>) -> Result<bool, Errno> {
    let peer = peer_uid(lifeline)?;
    if peer == 0 || peer == rustix::process::geteuid().as_raw() {
        return Ok(true);
    }
    // The kernel records at `listen` who has called it, and reports that for the listener itself.
    listener.map_or(Ok(false), |listener| peer_uid(listener).map(|owner| owner == peer))
}

pub(super) fn peer_uid(socket: BorrowedFd<'_>) -> Result<u32, Errno> {
    // Not rustix's function: its PID cannot be zero, which is the PID of a process in another namespace.
    let mut credentials = [0_u8; size_of::<libc::ucred>()];
    let option = SocketOption { level: libc::SOL_SOCKET, name: libc::SO_PEERCRED };
    let length = get_raw(socket, option, &mut credentials)?;
    let uid = credentials.get(4..8).filter(|_| length == credentials.len()).and_then(|uid| uid.try_into().ok());
    uid.map(u32::from_ne_bytes).ok_or(Errno::PROTO)
}

/// Returns a number that differs from call to call and from process to process, for spreading load and avoiding
/// collisions. It is not secret.
pub(crate) fn spread_u32() -> u32 {
    // Multiplication by 2^64 divided by the golden ratio: the low bits of the clock, which differ most, become the high
    // ones.
    (crate::process::clock::ticks().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}

pub(super) fn unix_stream() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

pub(crate) fn send_handshake(lifeline: BorrowedFd<'_>, segment: &Segment, memfd: BorrowedFd<'_>) -> Result<(), Errno> {
    let handshake = Handshake { secrets: segment.secrets(), spans: None }.encode();
    match send_with_descriptor(lifeline, &handshake, Some(memfd)) {
        // The server may close the connection at once: the program is connected, and finds the end of the stream when
        // it reads.
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
/// Returns the tuple in the address of a connecting endpoint, as seen from there, and the kind of that process.
pub(super) fn tuple_of(address: &SocketAddrAny, key: &NameKey) -> Option<(Tuple, Opener)> {
    match sun_path(address)? {
        [0, name @ ..] => Tuple::from_name(name, key).ok(),
        _ => None,
    }
}

/// Returns `sun_path` of an AF_UNIX address, of any bytes that a peer may have chosen.
fn sun_path(address: &SocketAddrAny) -> Option<&[u8]> {
    if address.address_family() != AddressFamily::UNIX {
        return None;
    }
    // SAFETY: rustix guarantees that the address is initialized for `addr_len` bytes, and it outlives the slice.
    let bytes = unsafe { std::slice::from_raw_parts(address.as_ptr().cast::<u8>(), address.addr_len() as usize) };
    bytes.get(size_of::<libc::sa_family_t>()..)
}

/// Receives a message. Returns its length, the descriptors that came with it, and whether there were more than this
/// process could receive.
pub(crate) fn receive_with_descriptors(
    lifeline: BorrowedFd<'_>,
    bytes: &mut [u8],
) -> Result<(usize, Vec<OwnedFd>, bool), Errno> {
    let mut fds: Vec<OwnedFd> = Vec::new();
    let spans = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }];
    // SAFETY: the only span is the slice.
    let received = unsafe { received::receive(lifeline.as_raw_fd(), &spans, 0, |fd| fds.push(fd)) }?;
    Ok((received.bytes, fds, received.is_cut))
}

/// Sets the modes of a lifeline to those of the program's descriptor that it replaces.
///
/// # Errors
/// Those of fcntl.
pub fn set_modes(lifeline: BorrowedFd<'_>, cloexec: bool, nonblocking: bool) -> Result<(), Errno> {
    rustix::fs::fcntl_setfl(lifeline, if nonblocking { OFlags::NONBLOCK } else { OFlags::empty() })?;
    rustix::io::fcntl_setfd(lifeline, if cloexec { FdFlags::CLOEXEC } else { FdFlags::empty() })
}

/// Adopts the lane listener behind a descriptor that the program before `exec` has left. Returns `None` if it is not a
/// lane listener, which stays open, or if this process cannot accept on it. It is then closed, so that clients which
/// find it use kernel TCP: it belongs to another version of the library, or to a rack of a previous user of the
/// process.
pub fn adopt_listener(fd: RawFd) -> Option<LaneListener> {
    // SAFETY: the descriptor is only queried; the kernel answers a closed number with an error.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    let path = path_of(socket).filter(|path| is_in_any_rack(path))?;
    let mut listens = [0_u8; 4];
    let option = SocketOption { level: libc::SOL_SOCKET, name: libc::SO_ACCEPTCONN };
    get_raw(socket, option, &mut listens).ok().filter(|_| i32::from_ne_bytes(listens) != 0)?;
    // SAFETY: this library has created the descriptor before `exec`, as its name in a rack directory shows, and no
    // other code of this program owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let rack = Rack::current().ok().filter(|rack| rack.contains_path(&path));
    let (Some(rack), Some(name)) = (rack, ListenerName::from_path(&path)) else {
        close(fd);
        return None;
    };
    let fd = HiddenFd::adopt(fd, Need::Required).ok()?;
    Some(LaneListener { fd: Some(fd), name, rack })
}

/// Returns the path that an AF_UNIX socket is bound to.
pub(super) fn path_of(socket: BorrowedFd<'_>) -> Option<Vec<u8>> {
    path_in(rustix::net::getsockname(socket).ok()?)
}

pub(super) fn path_in(address: SocketAddrAny) -> Option<Vec<u8>> {
    let path = sun_path(&address)?.split(|byte| *byte == 0).next()?;
    (!path.is_empty()).then(|| path.to_vec())
}
