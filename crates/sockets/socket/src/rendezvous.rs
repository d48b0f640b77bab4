//! How two processes meet: `listen` leaves a name in the rack, `connect` follows it, and `accept` learns both
//! addresses. Between programs that is all: the connection begins on its lifeline, and its memory follows when it pays
//! (`connection::lifeline`). Where a proxy is at one end, the first message, a hello, hands the memory over.
//!
//! The connecting end binds its lifeline to the name of the [`Tuple`] before it connects, so `accept` knows both
//! addresses without waiting for anything, and no tuple exists twice. Nothing here waits for a peer: whatever does not
//! work at once is a reason to take kernel TCP instead. Only a connection to another node is not done at once: it is
//! [`Underway`] until the answer from there has come.

#![allow(unsafe_code)] // Descriptor numbers of the program, and the credentials that the kernel writes.

mod far;
pub mod reasons;

pub use far::{Progress, Reply, Underway, answer, connect_in_windows, leads_far, listen_for_far, may_lend, try_place};
pub(crate) use far::{adopt as adopt_in_windows, adopt_on_device};

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use ledger::FallbackReason;
use rustix::fs::OFlags;
use rustix::io::{Errno, FdFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::address::{Opener, Tuple, canonical, destination, ephemeral_candidates, ephemeral_ports, local_source};
use crate::descriptors::{HiddenFd, Need, close};
use crate::hello::{HELLO_BYTES, Hello, HelloError};
use crate::home::MemoryFds;
use crate::monitor;
use crate::name_key::NameKey;
use crate::rack::{ListenerName, Rack, RackLock, is_in_any_rack, netns_cookie};
use crate::segment::{Segment, Side};
use crate::socket_option::{SocketOption, get_raw};

/// Strangers that one call of `accept` sends away.
const STRANGERS_MAX: usize = 64;
/// Descriptors a hello may bring at least before they are cut off; one is right.
const HELLO_FDS_MAX: usize = 4;

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
pub fn listen_beside(bound: SocketAddr, netns: u64, v6_only: bool, backlog: i32) -> Result<LaneListener, Errno> {
    listen_as(&rack_of(netns)?, bound, |lock| lock.free_name_beside(v6_only), backlog)
}

/// The caller's rack, if that is in the network namespace of this cookie.
fn rack_of(netns: u64) -> Result<Arc<Rack>, Errno> {
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

fn listen_as(
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
    pub is_far: bool,
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
    fn because(reason: FallbackReason) -> Self {
        Self { reason, errno: None }
    }

    fn failed(reason: FallbackReason, errno: Errno) -> Self {
        Self { reason, errno: Some(errno) }
    }

    /// For a lifeline that gets no name.
    fn unbound(errno: Errno) -> Self {
        match errno {
            Errno::ADDRINUSE => Self::failed(FallbackReason::PortInUse, errno),
            Errno::ADDRNOTAVAIL => Self::failed(FallbackReason::NoFreePort, errno),
            _ => Self::ran_out_or(FallbackReason::HandshakeFailed)(errno),
        }
    }

    /// For a call that may fail because something ran out, or else for `reason`.
    fn ran_out_or(reason: FallbackReason) -> impl Fn(Errno) -> Self {
        move |errno| match errno {
            Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS | Errno::NOSPC => {
                Self::failed(FallbackReason::ResourceLimit, errno)
            }
            _ => Self::failed(reason, errno),
        }
    }
}

/// Connects to a lane listener in the caller's rack. `bound` is what `getsockname` says of the program's TCP socket,
/// `netns` is the cookie of the network namespace that the socket was made in; it `shares` its address with others or
/// does not.
///
/// # Errors
/// As [`connect_in`], and `RackUnavailable`; `NamespaceDiffers` where the calling thread is in another namespace: what
/// the socket reaches is of its own.
pub fn connect(
    to: SocketAddr,
    bound: Option<SocketAddr>,
    shares: bool,
    netns: u64,
) -> Result<Progress, FallbackReason> {
    let node = crate::settings::settings().node;
    let opener = if shares { Opener::SharingProgram } else { Opener::Program };
    let request = Request { destination: to, source: bound, node, opener };
    connect_now(&request, netns).map_err(|no_lane| no_lane.reason)
}

fn connect_now(request: &Request, netns: u64) -> Result<Progress, NoLane> {
    // Asked before the rack is opened, because a program that only talks to other machines needs none.
    let route = request.route();
    let may_be_far = request.may_be_far(&route);
    if let (Err(no_lane), false) = (route, may_be_far) {
        return Err(no_lane);
    }
    let lifeline = new_lifeline()?;
    if netns_cookie(lifeline.as_fd()) != netns {
        return Err(NoLane::because(FallbackReason::NamespaceDiffers));
    }
    let unavailable = |errno| NoLane::failed(reasons::of_rack_error(errno), errno);
    let rack = Rack::current_for(lifeline.as_fd()).map_err(unavailable)?;
    if may_be_far && monitor::is_there(&rack) {
        return far::connect(rack, request, lifeline);
    }
    let route = route?;
    if crate::settings::settings().honours_filters {
        return Err(NoLane::because(FallbackReason::PacketFilters));
    }
    let (lifeline, tuple) = match approach(&rack, route, lifeline, request.opener, || Ok(())) {
        Err(NoLane { errno: Some(Errno::ADDRINUSE), .. }) if route.port != 0 => return Ok(Progress::TupleInUse),
        Err(NoLane { reason: FallbackReason::NoListener, .. }) => {
            return Err(NoLane::because(reasons::of_nobody(&rack, route.destination)));
        }
        approached => approached?,
    };
    check_trusted(lifeline.as_fd())?;
    Ok(Progress::Reached { lifeline, tuple })
}

/// What a program asks of `connect`.
#[derive(Clone, Copy, Debug)]
pub struct Request {
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
struct Route {
    destination: SocketAddr,
    source: IpAddr,
    /// 0 for one to be chosen.
    port: u16,
}

impl Request {
    fn route(&self) -> Result<Route, NoLane> {
        let destination = destination(self.destination);
        let scope = if let SocketAddr::V6(v6) = destination { v6.scope_id() } else { 0 };
        let bound = self.source.map(canonical);
        // A node's own address is its own even where the machine, which is several nodes, does not have it.
        let known = match (self.opener, bound) {
            (Opener::Proxy, Some(bound)) => Some(bound.ip()),
            _ => self.node.filter(|node| *node == destination.ip()),
        };
        let default = match known.map_or_else(|| local_source(destination.ip(), scope), |known| Ok(Some(known))) {
            Ok(Some(_)) if destination.port() == 0 => return Err(NoLane::because(FallbackReason::NoListener)),
            Ok(Some(source)) => source,
            Ok(None) => return Err(NoLane::because(FallbackReason::RemoteAddress)),
            Err(errno) => return Err(NoLane::ran_out_or(FallbackReason::RemoteAddress)(errno)),
        };
        let source = match bound.map(|bound| bound.ip()).filter(|ip| !ip.is_unspecified()) {
            Some(ip) if ip.is_ipv4() != destination.is_ipv4() => {
                return Err(NoLane::because(FallbackReason::UnsupportedCall));
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
fn is_node(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.octets()[..2] == [127, 77],
        IpAddr::V6(v6) => v6.segments()[..2] == [0xfd00, 0x77],
    }
}

impl Route {
    /// Whether the socket connects to its own address, as TCP allows.
    fn leads_to_itself(&self) -> bool {
        let tuple = self.tuple(self.port);
        self.port != 0 && tuple.local == tuple.peer
    }

    fn tuple(&self, port: u16) -> Tuple {
        let mut local = SocketAddr::new(self.source, port);
        if let (SocketAddr::V6(local), SocketAddr::V6(peer)) = (&mut local, self.destination) {
            local.set_scope_id(peer.scope_id());
        }
        Tuple { local: canonical(local), peer: self.destination }
    }
}

/// Connects to a lane listener in a rack, if there is one for the destination, without waiting for it, and says hello.
///
/// # Errors
/// Why there is no lane; the program's connection is kernel TCP's then.
pub fn connect_in(rack: &Rack, request: &Request) -> Result<Connected, NoLane> {
    connect_by(rack, request.route()?, new_lifeline()?, request.opener)
}

fn new_lifeline() -> Result<OwnedFd, NoLane> {
    unix_stream().map_err(NoLane::ran_out_or(FallbackReason::HandshakeFailed))
}

fn connect_by(rack: &Rack, route: Route, lifeline: OwnedFd, opener: Opener) -> Result<Connected, NoLane> {
    let mut memory = None;
    let (lifeline, tuple) = approach(rack, route, lifeline, opener, || {
        if memory.is_none() {
            memory = Some(new_memory()?);
        }
        Ok(())
    })?;
    introduce(lifeline, tuple, memory.map_or_else(new_memory, Ok)?)
}

fn new_memory() -> Result<(Segment, OwnedFd), NoLane> {
    Segment::create(Side::Connector).map_err(NoLane::ran_out_or(FallbackReason::HandshakeFailed))
}

/// Gets the lifeline to a listener. `prepare` gets what the connection needs before the first listener hears of it.
fn approach(
    rack: &Rack,
    route: Route,
    lifeline: OwnedFd,
    opener: Opener,
    mut prepare: impl FnMut() -> Result<(), NoLane>,
) -> Result<(OwnedFd, Tuple), NoLane> {
    if route.leads_to_itself() {
        return Err(NoLane::because(FallbackReason::ToItself));
    }
    let random = spread_u32();
    // The tuple first: with its name the listener learns who comes.
    let tuple = bind_tuple(lifeline.as_fd(), &route, random, opener, &rack.key()).map_err(NoLane::unbound)?;
    // The one listener that has the very address is most often there, and is the best: only without it the rack is
    // searched.
    let exact = ListenerName::new(route.destination, false, None);
    if reach(rack, lifeline.as_fd(), &[exact], &mut prepare).is_err() {
        let unavailable = NoLane::ran_out_or(FallbackReason::RackUnavailable);
        let listeners = listeners_for(rack, route.destination, random).map_err(unavailable)?;
        reach(rack, lifeline.as_fd(), &listeners, prepare)?;
    }
    Ok((lifeline, tuple))
}

fn check_trusted(lifeline: BorrowedFd<'_>) -> Result<(), NoLane> {
    match is_trusted(lifeline, None).map_err(NoLane::ran_out_or(FallbackReason::HandshakeFailed))? {
        true => Ok(()),
        false => Err(NoLane::failed(FallbackReason::PeerRefused, Errno::PERM)),
    }
}

/// Hands the memory of a connection to whom the lifeline has reached.
fn introduce(lifeline: OwnedFd, tuple: Tuple, memory: (Segment, OwnedFd)) -> Result<Connected, NoLane> {
    check_trusted(lifeline.as_fd())?;
    let (segment, memfd) = memory;
    let broken = NoLane::ran_out_or(FallbackReason::HandshakeFailed);
    send_hello(lifeline.as_fd(), &segment, memfd.as_fd()).map_err(broken)?;
    // Only now: while the first pages are found here, the other end maps them there.
    segment.set_up();
    Ok(Connected { lifeline, tuple, segment, memory: Some(MemoryFds::of_memfd(memfd)), is_far: false })
}

/// The listeners that answer for a destination, the best first; those that share an address in turn, from a random one.
fn listeners_for(rack: &Rack, destination: SocketAddr, random: u32) -> Result<Vec<ListenerName>, Errno> {
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
fn bind_tuple(
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
fn reach(
    rack: &Rack,
    lifeline: BorrowedFd<'_>,
    names: &[ListenerName],
    mut prepare: impl FnMut() -> Result<(), NoLane>,
) -> Result<(), NoLane> {
    let mut outcome = NoLane::because(FallbackReason::NoListener);
    for name in names {
        prepare()?;
        match rack.address_of(name).and_then(|address| rustix::net::connect(lifeline, &address)) {
            Ok(()) => return Ok(()),
            Err(Errno::CONNREFUSED) => {
                // Its owner was killed. Whoever finds that out first cleans up, unless somebody is at the rack just
                // now.
                let _ = rack.remove_if_stale_unless_locked(name);
            }
            Err(Errno::NOENT) => {}
            Err(errno @ Errno::AGAIN) => outcome = NoLane::failed(FallbackReason::BacklogFull, errno),
            Err(errno @ (Errno::ACCESS | Errno::PERM)) => outcome = NoLane::failed(FallbackReason::PeerRefused, errno),
            Err(errno) => outcome = NoLane::ran_out_or(FallbackReason::HandshakeFailed)(errno),
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

fn peer_uid(socket: BorrowedFd<'_>) -> Result<u32, Errno> {
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
    (crate::clock::ticks().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}

fn unix_stream() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

pub(crate) fn send_hello(lifeline: BorrowedFd<'_>, segment: &Segment, memfd: BorrowedFd<'_>) -> Result<(), Errno> {
    let hello = Hello { secrets: segment.secrets(), place: None }.encode();
    match send_with_descriptor(lifeline, &hello, Some(memfd)) {
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

/// A new connection, seen from the end that called `accept`. Its memory comes by [`receive_hello`].
#[derive(Debug)]
pub struct Accepted {
    /// The kernel object that is the program's descriptor.
    pub lifeline: OwnedFd,
    /// Its addresses, canonical.
    pub tuple: Tuple,
    /// Who is at the other end.
    pub opener: Opener,
}

/// Takes a connection from a lane listener, without waiting. `key` is that of the listener's rack, `flags` are
/// `SOCK_NONBLOCK` and `SOCK_CLOEXEC`. Strangers, who have no tuple of this rack for a name or are another user's, are
/// sent away.
///
/// # Errors
/// `AGAIN` when there is none, `CONNABORTED` when there were only strangers, and what `accept4(2)` answers.
pub fn accept(lane_fd: RawFd, key: &NameKey, flags: i32) -> Result<Accepted, Errno> {
    if lane_fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: not -1; the number of a listener that the caller keeps open. Were it closed, the calls would fail.
    let listener = unsafe { BorrowedFd::borrow_raw(lane_fd) };
    let mut socket_flags = SocketFlags::empty();
    socket_flags.set(SocketFlags::NONBLOCK, flags & libc::SOCK_NONBLOCK != 0);
    socket_flags.set(SocketFlags::CLOEXEC, flags & libc::SOCK_CLOEXEC != 0);
    for strangers in 0..STRANGERS_MAX {
        let (lifeline, name) = match rustix::net::acceptfrom_with(listener, socket_flags) {
            Err(Errno::CONNABORTED | Errno::INTR) => continue,
            Err(Errno::AGAIN) if strangers > 0 => break,
            outcome => outcome?,
        };
        match name.as_ref().and_then(|name| tuple_of(name, key)) {
            Some((tuple, opener)) if is_trusted(lifeline.as_fd(), Some(listener)) == Ok(true) => {
                return Ok(Accepted { lifeline, tuple: tuple.reversed(), opener });
            }
            _ => close(lifeline),
        }
    }
    Err(Errno::CONNABORTED)
}

/// The tuple of a lifeline that was accepted before, as its connecting end has it, and who that is.
pub(crate) fn peer_of(lifeline: BorrowedFd<'_>, key: &NameKey) -> Option<(Tuple, Opener)> {
    rustix::net::getpeername(lifeline).ok().flatten().and_then(|name| tuple_of(&name, key))
}

/// The tuple in the address of a connecting end, seen from there, and who that is.
fn tuple_of(address: &SocketAddrAny, key: &NameKey) -> Option<(Tuple, Opener)> {
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

/// Why the first message on a lifeline is not a hello to go on with.
#[derive(Debug)]
pub enum Refused {
    /// The peer is gone, and has not said anything.
    Closed,
    /// What it said is no hello of ours.
    Hello(HelloError),
    /// It brought this many descriptors, or more than can be counted, instead of one.
    Descriptors(usize),
    /// The descriptor it brought is not a sealed memfd of the right size, or cannot be mapped.
    Memory(Errno),
    /// It cannot be received.
    System(Errno),
}

impl Refused {
    /// For the ledger.
    pub fn reason(&self) -> FallbackReason {
        match self {
            Self::Hello(HelloError::Version(_) | HelloError::SegmentBytes(_)) => FallbackReason::VersionMismatch,
            Self::Memory(errno) | Self::System(errno) => {
                NoLane::ran_out_or(FallbackReason::HandshakeFailed)(*errno).reason
            }
            _ => FallbackReason::HandshakeFailed,
        }
    }
}

/// Receives the hello of an accepted connection, without waiting: its memory, and the descriptor of that. `None`: not
/// there yet.
///
/// # Errors
/// What the peer sent instead. Descriptors that came with it are closed.
pub fn receive_hello(lifeline: BorrowedFd<'_>) -> Result<Option<(Segment, Option<MemoryFds>)>, Refused> {
    let mut bytes = [0_u8; HELLO_BYTES];
    let (length, mut fds, cut_off) = match receive_with_descriptors(lifeline, &mut bytes) {
        Ok(received) => received,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(errno) => return Err(Refused::System(errno)),
    };
    let outcome = judge(&bytes[..length], fds.len() + usize::from(cut_off));
    match (outcome, fds.pop()) {
        (Ok(hello), Some(memfd)) => open_segment(hello, memfd).map(Some),
        (outcome, memfd) => {
            fds.into_iter().chain(memfd).for_each(close);
            Err(outcome.err().unwrap_or(Refused::Descriptors(0)))
        }
    }
}

/// A message's length, the descriptors that came with it, and whether there were more than are taken.
pub(crate) fn receive_with_descriptors(
    lifeline: BorrowedFd<'_>,
    bytes: &mut [u8],
) -> Result<(usize, Vec<OwnedFd>, bool), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(HELLO_FDS_MAX))];
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

fn judge(bytes: &[u8], descriptors: usize) -> Result<Hello, Refused> {
    if bytes.is_empty() {
        return Err(Refused::Closed);
    }
    let hello = Hello::decode(bytes).map_err(Refused::Hello)?;
    if descriptors == 1 { Ok(hello) } else { Err(Refused::Descriptors(descriptors)) }
}

fn open_segment(hello: Hello, memory: OwnedFd) -> Result<(Segment, Option<MemoryFds>), Refused> {
    let opened = match hello.place {
        None => match Segment::open(&memory, hello.secrets) {
            Ok(segment) => Ok((segment, MemoryFds::of_memfd(memory))),
            Err(errno) => {
                close(memory);
                Err(errno)
            }
        },
        Some(place) => far::open_place(memory, place, Side::Acceptor, hello.secrets),
    };
    opened.map(|(segment, memory)| (segment, Some(memory))).map_err(Refused::Memory)
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
    let rack = Rack::current().ok().filter(|rack| rack.holds(&path));
    let (Some(rack), Some(name)) = (rack, ListenerName::from_path(&path)) else {
        close(fd);
        return None;
    };
    let fd = HiddenFd::adopt(fd, Need::Required).ok()?;
    Some(LaneListener { fd: Some(fd), name, rack })
}

/// The path that an AF_UNIX socket is bound to.
fn path_of(socket: BorrowedFd<'_>) -> Option<Vec<u8>> {
    path_in(rustix::net::getsockname(socket).ok()?)
}

fn path_in(address: SocketAddrAny) -> Option<Vec<u8>> {
    if address.address_family() != AddressFamily::UNIX {
        return None;
    }
    // SAFETY: the address is initialized for its length.
    let bytes = unsafe { std::slice::from_raw_parts(address.as_ptr().cast::<u8>(), address.addr_len() as usize) };
    let path = bytes.get(size_of::<libc::sa_family_t>()..)?.split(|byte| *byte == 0).next()?;
    (!path.is_empty()).then(|| path.to_vec())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::name_key::tests::OTHER_KEY;
    use crate::rack::tests::Scratch;
    use rustix::fs::{MemfdFlags, SealFlags};
    use rustix::pipe::{PipeFlags, pipe_with};
    use std::collections::HashSet;
    use std::io::{BufRead, BufReader};
    use std::os::fd::{AsRawFd, IntoRawFd};
    use std::process::{Child, Command, Stdio};
    use std::sync::OnceLock;

    /// A rack of its own, and the two ends of a rendezvous in it.
    struct Meeting {
        _scratch: Scratch,
        rack: Arc<Rack>,
    }

    impl Meeting {
        fn new() -> Self {
            let scratch = Scratch::new();
            let rack = Arc::new(scratch.rack());
            Self { _scratch: scratch, rack }
        }

        fn listen(&self, bound: &str) -> LaneListener {
            listen_in(&self.rack, address(bound), false, false, 1024).unwrap()
        }

        fn connect(&self, to: &str) -> Result<Connected, NoLane> {
            self.connect_from(to, None)
        }

        fn connect_from(&self, to: &str, source: Option<&str>) -> Result<Connected, NoLane> {
            let source = source.map(address);
            connect_in(&self.rack, &Request { destination: address(to), source, node: None, opener: Opener::Program })
        }

        fn names(&self) -> HashSet<String> {
            self.rack.names().unwrap().iter().map(ToString::to_string).collect()
        }

        /// A listener of this name made by hand, with a small backlog.
        fn listen_by_hand(&self, name: &str, backlog: i32) -> OwnedFd {
            let socket = unix_stream().unwrap();
            let name = ListenerName::parse(name).unwrap();
            self.rack.lock(name.address).unwrap().bind(socket.as_fd(), &name).unwrap();
            rustix::net::listen(&socket, backlog).unwrap();
            socket
        }
    }

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn accept_now(listener: &LaneListener) -> Accepted {
        accept(listener.fd(), &listener.key(), libc::SOCK_CLOEXEC).unwrap()
    }

    /// Names without a secret key belong to the whole network namespace, where other runs of these tests may be: a port
    /// that the kernel has given to this process tells them apart.
    pub(crate) fn own_port() -> u16 {
        static PORT: OnceLock<std::net::TcpListener> = OnceLock::new();
        let listener = PORT.get_or_init(|| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        listener.local_addr().unwrap().port()
    }

    fn reason<T: std::fmt::Debug>(outcome: Result<T, NoLane>) -> FallbackReason {
        outcome.unwrap_err().reason
    }

    #[test]
    fn a_server_that_closes_before_the_hello_comes_has_connected() {
        let meeting = Meeting::new();
        let listener = meeting.listen("127.0.0.1:7001");
        let request =
            Request { destination: address("127.0.0.1:7001"), source: None, node: None, opener: Opener::Program };
        let lifeline = unix_stream().unwrap();
        bind_tuple(lifeline.as_fd(), &request.route().unwrap(), 1, Opener::Program, &meeting.rack.key()).unwrap();
        reach(&meeting.rack, lifeline.as_fd(), &[listener.name()], || Ok(())).unwrap();
        close(accept(listener.fd(), &listener.key(), 0).unwrap().lifeline);
        let (segment, memfd) = Segment::create(Side::Connector).unwrap();
        assert_eq!(send_hello(lifeline.as_fd(), &segment, memfd.as_fd()), Ok(()));
    }

    #[test]
    fn both_ends_get_one_memory_and_each_others_address() {
        let meeting = Meeting::new();
        let listener = meeting.listen("127.0.0.1:6379");
        let connected = meeting.connect("127.0.0.1:6379").unwrap();
        let accepted = accept_now(&listener);
        assert_eq!(accepted.tuple, connected.tuple.reversed());
        assert_eq!(accepted.tuple.local, address("127.0.0.1:6379"));
        assert_eq!(accepted.tuple.peer.ip(), address("127.0.0.1:1").ip());
        assert!(ephemeral_ports().contains(&accepted.tuple.peer.port()));
        let (segment, memfd) = receive_hello(accepted.lifeline.as_fd()).unwrap().unwrap();
        assert_eq!(segment.secrets(), connected.segment.secrets());
        let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
        assert_eq!(inode(&memfd.unwrap().memfd), inode(&connected.memory.unwrap().memfd));
        assert!(receive_hello(accepted.lifeline.as_fd()).unwrap().is_none(), "the hello comes once");
        assert!(matches!(accept(listener.fd(), &listener.key(), 0), Err(Errno::AGAIN)));
    }

    #[test]
    fn sources_and_destinations_are_those_of_tcp() {
        let _no_child = crate::forks::none();
        let meeting = Meeting::new();
        let _v4 = meeting.listen("0.0.0.0:80");
        let _v6 = meeting.listen("[::1]:80");
        let bound = ["0.0.0.0", "[::]", "[::ffff:127.0.0.5]"].map(|ip| format!("{ip}:{}", own_port()));
        for (to, source, local, peer) in [
            ("127.77.0.2:80", None, "127.0.0.1", "127.77.0.2:80"),
            ("0.0.0.0:80", None, "127.0.0.1", "127.0.0.1:80"),
            ("[::]:80", None, "::1", "[::1]:80"),
            ("[::ffff:127.0.0.1]:80", None, "127.0.0.1", "127.0.0.1:80"),
            ("127.0.0.1:80", Some("127.77.0.9:0"), "127.77.0.9", "127.0.0.1:80"),
            ("127.0.0.1:80", Some(bound[0].as_str()), "127.0.0.1", "127.0.0.1:80"),
            ("127.0.0.1:80", Some(bound[1].as_str()), "127.0.0.1", "127.0.0.1:80"),
            ("127.0.0.1:80", Some(bound[2].as_str()), "127.0.0.5", "127.0.0.1:80"),
        ] {
            let tuple = meeting.connect_from(to, source).unwrap().tuple;
            assert_eq!(
                (tuple.local.ip().to_string(), tuple.peer),
                (local.to_owned(), address(peer)),
                "{to} {source:?}"
            );
            let port = source.map_or(0, |source| address(source).port());
            assert!(port == 0 || tuple.local.port() == port);
        }
        assert_eq!(reason(meeting.connect_from("127.0.0.1:80", Some("[::1]:9"))), FallbackReason::UnsupportedCall);
        for bound in ["127.0.0.1:80", "0.0.0.0:80"] {
            assert_eq!(reason(meeting.connect_from("127.0.0.1:80", Some(bound))), FallbackReason::ToItself);
        }
    }

    #[test]
    fn a_source_port_that_a_connection_has_is_said_to_be_in_use() {
        let meeting = Meeting::new();
        let _listener = meeting.listen("127.0.0.1:80");
        let _first = meeting.connect_from("127.0.0.1:80", Some("127.0.0.1:9")).unwrap();
        assert_eq!(reason(meeting.connect_from("127.0.0.1:80", Some("127.0.0.1:9"))), FallbackReason::PortInUse);
        assert_eq!(NoLane::unbound(Errno::ADDRNOTAVAIL).reason, FallbackReason::NoFreePort);
    }

    #[test]
    fn a_node_is_the_source_towards_other_nodes_only() {
        let meeting = Meeting::new();
        let _listener = meeting.listen("0.0.0.0:80");
        let node = Some(IpAddr::from([127, 77, 0, 2]));
        let local = |to: &str, source: Option<&str>| {
            let request =
                Request { destination: address(to), source: source.map(address), node, opener: Opener::Program };
            connect_in(&meeting.rack, &request).unwrap().tuple.local.ip().to_string()
        };
        assert_eq!(local("127.77.0.1:80", None), "127.77.0.2");
        assert_eq!(local("127.77.0.1:80", Some("0.0.0.0:0")), "127.77.0.2");
        assert_eq!(local("127.77.0.1:80", Some("127.0.0.9:0")), "127.0.0.9");
        assert_eq!(local("127.0.0.1:80", None), "127.0.0.1");
    }

    #[test]
    fn without_a_listener_or_to_another_machine_there_is_no_lane() {
        let meeting = Meeting::new();
        let _listener = meeting.listen("0.0.0.0:80");
        assert_eq!(reason(meeting.connect("127.0.0.1:81")), FallbackReason::NoListener);
        assert_eq!(reason(meeting.connect("[::1]:80")), FallbackReason::NoListener);
        assert_eq!(reason(meeting.connect("127.0.0.1:0")), FallbackReason::NoListener);
        assert_eq!(reason(meeting.connect("198.51.100.7:80")), FallbackReason::RemoteAddress);
        assert_eq!(reason(meeting.connect("[2001:db8::7]:80")), FallbackReason::RemoteAddress);
    }

    #[test]
    fn the_exact_listener_is_found_before_the_unspecified_ones() {
        let meeting = Meeting::new();
        let any6 = meeting.listen("[::]:80");
        assert!(meeting.connect("127.0.0.1:80").is_ok());
        accept_now(&any6);
        let any4 = meeting.listen("0.0.0.0:80");
        assert!(meeting.connect("127.0.0.1:80").is_ok());
        accept_now(&any4);
        let exact = meeting.listen("127.0.0.1:80");
        assert!(meeting.connect("127.0.0.1:80").is_ok());
        accept_now(&exact);
        assert!(meeting.connect("[::1]:80").is_ok());
        accept_now(&any6);
    }

    #[test]
    fn listeners_that_share_an_address_all_get_connections() {
        let meeting = Meeting::new();
        let share = || listen_in(&meeting.rack, address("127.0.0.1:80"), false, true, 1).unwrap();
        let listeners = [share(), share(), share()];
        assert_eq!(meeting.names().len(), 3);
        let mut reached = HashSet::new();
        // Three names, each picked with a third of the chances: all but surely each in so many connections.
        for _ in 0..200 {
            let _connected = meeting.connect("127.0.0.1:80").unwrap();
            let taker = listeners.iter().position(|listener| accept(listener.fd(), &listener.key(), 0).is_ok());
            reached.insert(taker.expect("one of them has the connection"));
        }
        assert_eq!(reached.len(), 3);
    }

    #[test]
    fn an_address_is_not_shared_with_those_who_do_not() {
        let _no_child = crate::forks::none();
        let meeting = Meeting::new();
        let listen = |shared| listen_in(&meeting.rack, address("127.0.0.1:80"), false, shared, 1);
        let first = listen(false).unwrap();
        assert_eq!(listen(false).unwrap_err(), Errno::ADDRINUSE);
        assert_eq!(listen(true).unwrap_err(), Errno::ADDRINUSE);
        drop(first);
        assert!(meeting.names().is_empty());
        let _shared = listen(true).unwrap();
        assert_eq!(listen(false).unwrap_err(), Errno::ADDRINUSE);
        assert!(listen(true).is_ok());
    }

    #[test]
    fn a_name_stays_while_another_process_listens_on_the_same_socket() {
        let _no_child = crate::forks::none();
        let meeting = Meeting::new();
        let listener = meeting.listen("127.0.0.1:80");
        // As a forked child has it.
        // SAFETY: the listener is alive.
        let childs = rustix::io::dup(unsafe { BorrowedFd::borrow_raw(listener.fd()) }).unwrap();
        drop(listener);
        assert!(meeting.names().contains("127.0.0.1:80"));
        let _connected = meeting.connect("127.0.0.1:80").unwrap();
        assert!(accept(childs.as_raw_fd(), &meeting.rack.key(), 0).is_ok());
        drop(childs);
        assert_eq!(reason(meeting.connect("127.0.0.1:80")), FallbackReason::NoListener);
        assert!(meeting.names().is_empty(), "whoever finds a stale name removes it");
    }

    #[test]
    fn an_inherited_listener_of_another_rack_or_version_is_closed_so_that_clients_take_tcp() {
        let _no_child = crate::forks::none();
        let meeting = Meeting::new();
        let folder = meeting.rack.path().parent().unwrap().join("other/v1/net-1");
        std::fs::create_dir_all(&folder).unwrap();
        let first_version = folder.join("127.0.0.1:80");
        let other_rack = meeting.rack.path_of(&ListenerName::parse("127.0.0.1:80").unwrap());
        std::fs::create_dir(other_rack.parent().unwrap()).unwrap();
        let listen_at = |path: &std::path::Path| {
            let listener = unix_stream().unwrap();
            rustix::net::bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
            rustix::net::listen(&listener, 1).unwrap();
            listener.into_raw_fd()
        };
        let reach = |path| rustix::net::connect(unix_stream().unwrap(), &SocketAddrUnix::new(path).unwrap());
        for path in [&first_version, &other_rack] {
            let fd = listen_at(path);
            assert_eq!(reach(path), Ok(()));
            assert!(adopt_listener(fd).is_none());
            assert_eq!(reach(path), Err(Errno::CONNREFUSED));
        }
        let programs_own = folder.parent().unwrap().join("127.0.0.1:80");
        let fd = listen_at(&programs_own);
        assert!(adopt_listener(fd).is_none());
        assert_eq!(reach(&programs_own), Ok(()));
        // SAFETY: made above.
        unsafe { rustix::io::close(fd) };
    }

    #[test]
    fn a_tuple_is_unique_until_its_connecting_end_is_gone() {
        let _no_child = crate::forks::none();
        let meeting = Meeting::new();
        let listener = meeting.listen("127.0.0.1:80");
        let source = format!("127.0.0.9:{}", own_port());
        let connect = || meeting.connect_from("127.0.0.1:80", Some(&source));
        let first = connect().unwrap();
        let accepted = accept_now(&listener);
        let second = connect();
        assert_eq!(second.unwrap_err().errno, Some(Errno::ADDRINUSE));
        drop(first);
        assert!(connect().is_ok());
        drop(accepted);
    }

    /// Anybody can bind abstract names. A name that others can compute takes the port from the connecting end.
    #[test]
    fn names_that_are_bound_without_the_key_take_no_port() {
        let _no_child = crate::forks::none();
        let meeting = Meeting::new();
        let listener = meeting.listen("127.0.0.1:80");
        let tuple = Tuple { local: SocketAddr::from(([127, 0, 0, 8], own_port())), peer: address("127.0.0.1:80") };
        let first_version = format!("crosslane/1/{}>{}", tuple.local, tuple.peer).into_bytes();
        let bind = |name: &[u8]| {
            let socket = unix_stream().unwrap();
            let bound = rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name).unwrap());
            bound.map(|()| socket)
        };
        let squatters =
            [first_version, tuple.name(Opener::Program, &OTHER_KEY).unwrap()].map(|name| bind(&name).unwrap());
        let source = tuple.local.to_string();
        let connected = meeting.connect_from("127.0.0.1:80", Some(&source)).unwrap();
        assert_eq!((connected.tuple, accept_now(&listener).tuple.reversed()), (tuple, tuple));
        let keyed = tuple.name(Opener::Program, &meeting.rack.key()).unwrap();
        assert_eq!(bind(&keyed).unwrap_err(), Errno::ADDRINUSE, "it is ours");
        drop(squatters);
    }

    #[test]
    fn many_connections_have_as_many_tuples() {
        let meeting = Meeting::new();
        let _listener = meeting.listen("127.0.0.1:80");
        let connections: Vec<_> = (0..300).map(|_| meeting.connect("127.0.0.1:80").unwrap()).collect();
        let tuples: HashSet<_> = connections.iter().map(|connected| connected.tuple).collect();
        assert_eq!(tuples.len(), connections.len());
    }

    #[test]
    fn a_full_backlog_is_not_waited_for() {
        let meeting = Meeting::new();
        let _full = meeting.listen_by_hand("127.0.0.1:80", 1);
        let mut waiting = Vec::new();
        let refusal = loop {
            match meeting.connect("127.0.0.1:80") {
                Ok(connected) => waiting.push(connected),
                Err(refusal) => break refusal,
            }
            assert!(waiting.len() < 10);
        };
        assert_eq!(refusal.reason, FallbackReason::BacklogFull);
    }

    /// Connects to a listener without being a connecting end of ours; `name` is bound before.
    fn stranger(meeting: &Meeting, listener: &LaneListener, name: Option<&[u8]>) -> OwnedFd {
        let socket = unix_stream().unwrap();
        if let Some(name) = name {
            rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name).unwrap()).unwrap();
        }
        rustix::net::connect(&socket, &meeting.rack.address_of(&listener.name()).unwrap()).unwrap();
        socket
    }

    #[test]
    fn strangers_are_sent_away_and_the_next_in_line_is_taken() {
        let meeting = Meeting::new();
        let listener = meeting.listen("127.0.0.1:80");
        let unique = format!("nonsense {}", meeting.rack.path().display());
        // One of the first version, whose names had no code, and one of another rack.
        let tuple = Tuple { local: SocketAddr::from(([127, 0, 0, 7], own_port())), peer: address("127.0.0.1:80") };
        let strangers = [
            stranger(&meeting, &listener, None),
            stranger(&meeting, &listener, Some(&unique.as_bytes()[..unique.len().min(100)])),
            stranger(&meeting, &listener, Some(&[0xff; 107])),
            stranger(&meeting, &listener, Some(format!("crosslane/1/{}>{}", tuple.local, tuple.peer).as_bytes())),
            stranger(&meeting, &listener, Some(&tuple.name(Opener::Program, &OTHER_KEY).unwrap())),
        ];
        let connected = meeting.connect("127.0.0.1:80").unwrap();
        assert_eq!(accept_now(&listener).tuple.reversed(), connected.tuple);
        for stranger in strangers {
            assert_eq!(rustix::io::read(&stranger, &mut [0; 1]), Ok(0), "closed");
        }
    }

    #[test]
    fn another_users_process_is_sent_away() {
        let _no_child = crate::forks::none();
        if !rustix::process::geteuid().is_root() {
            return; // Only root can be somebody else.
        }
        let listener = unix_stream().unwrap();
        let name = format!("crosslane-test-{}", own_port());
        let place = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        rustix::net::bind(&listener, &place).unwrap();
        rustix::net::listen(&listener, 8).unwrap();
        let come_as = |uid: u32| {
            let place = place.clone();
            std::thread::spawn(move || {
                // SAFETY: the raw call changes the credentials of this thread only, and the thread ends below.
                assert_eq!(unsafe { crate::system::call!(libc::SYS_setresuid, uid, uid, uid) }, 0);
                let socket = unix_stream().unwrap();
                let tuple =
                    Tuple { local: SocketAddr::from(([127, 0, 0, 3], own_port())), peer: address("127.0.0.3:2") };
                let own = SocketAddrUnix::new_abstract_name(&tuple.name(Opener::Program, &OTHER_KEY).unwrap()).unwrap();
                rustix::net::bind(&socket, &own).unwrap();
                rustix::net::connect(&socket, &place).unwrap();
                socket
            })
            .join()
            .unwrap()
        };
        drop(come_as(65_534));
        assert_eq!(accept(listener.as_raw_fd(), &OTHER_KEY, 0).unwrap_err(), Errno::CONNABORTED);
        drop(come_as(0));
        assert_eq!(accept(listener.as_raw_fd(), &OTHER_KEY, 0).unwrap().tuple.peer.port(), own_port());
    }

    /// An accepted lifeline, and the connecting end's that has said nothing yet.
    fn silent_pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
    }

    fn say(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
    }

    fn valid_hello() -> ([u8; HELLO_BYTES], OwnedFd) {
        let (segment, memfd) = Segment::create(Side::Connector).unwrap();
        (Hello { secrets: segment.secrets(), place: None }.encode(), memfd)
    }

    #[test]
    fn a_hello_that_has_not_come_is_not_waited_for_and_one_that_never_will_is_an_end() {
        let _no_child = crate::forks::none();
        let (ours, theirs) = silent_pair();
        assert!(receive_hello(ours.as_fd()).unwrap().is_none());
        drop(theirs);
        assert!(matches!(receive_hello(ours.as_fd()), Err(Refused::Closed)));
    }

    #[test]
    fn hellos_without_exactly_one_memory_are_refused() {
        let (hello, memfd) = valid_hello();
        for count in [0, 2, 3, 4, 5, 16] {
            let (ours, theirs) = silent_pair();
            say(&theirs, &hello, &vec![memfd.as_fd(); count]);
            let refused = receive_hello(ours.as_fd()).unwrap_err();
            let Refused::Descriptors(found) = refused else { panic!("{count}: {refused:?}") };
            assert!(found == count || (found > HELLO_FDS_MAX && count > HELLO_FDS_MAX), "{count}: {found}");
        }
    }

    #[test]
    fn junk_and_other_versions_are_refused() {
        let (hello, memfd) = valid_hello();
        let mut newer = hello;
        newer[8] ^= 0x80;
        for (bytes, expected) in [
            (&b"GET / HTTP/1.0\r\n\r\n"[..], FallbackReason::HandshakeFailed),
            (&hello[..39], FallbackReason::HandshakeFailed),
            (&[0x55; 4000], FallbackReason::HandshakeFailed),
            (&newer, FallbackReason::VersionMismatch),
        ] {
            let (ours, theirs) = silent_pair();
            say(&theirs, bytes, &[memfd.as_fd()]);
            assert_eq!(receive_hello(ours.as_fd()).unwrap_err().reason(), expected);
        }
    }

    #[test]
    fn memory_that_could_be_cut_under_us_is_refused() {
        let (hello, _memfd) = valid_hello();
        let memory = |bytes: usize, seals: SealFlags| {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let memfd = rustix::fs::memfd_create("crosslane-test", flags).unwrap();
            rustix::fs::ftruncate(&memfd, bytes as u64).unwrap();
            rustix::fs::fcntl_add_seals(&memfd, seals).unwrap();
            memfd
        };
        let both = SealFlags::SHRINK | SealFlags::GROW;
        for memfd in [
            memory(Segment::SEGMENT_BYTES, SealFlags::empty()),
            memory(Segment::SEGMENT_BYTES, SealFlags::GROW),
            memory(Segment::SEGMENT_BYTES - 4096, both),
            memory(0, both),
            std::fs::File::open("/dev/zero").unwrap().into(),
            unix_stream().unwrap(),
        ] {
            let (ours, theirs) = silent_pair();
            say(&theirs, &hello, &[memfd.as_fd()]);
            assert!(matches!(receive_hello(ours.as_fd()), Err(Refused::Memory(_))));
        }
    }

    #[test]
    fn descriptors_that_come_with_nonsense_are_closed() {
        let _no_child = crate::forks::none();
        let (hello, _memfd) = valid_hello();
        for (bytes, count) in [(&b"nonsense"[..], 1), (&hello, 1), (&hello, 3), (&hello, 16)] {
            let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
            let (ours, theirs) = silent_pair();
            say(&theirs, bytes, &vec![writer.as_fd(); count]);
            assert!(receive_hello(ours.as_fd()).is_err());
            drop(writer);
            assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0), "the end of the pipe: no writer is left");
        }
    }

    #[test]
    fn modes_follow_the_programs_descriptor() {
        let (lifeline, _other) = silent_pair();
        for (cloexec, nonblocking) in [(true, false), (false, true), (true, true), (false, false)] {
            set_modes(lifeline.as_fd(), cloexec, nonblocking).unwrap();
            let modes = rustix::fs::fcntl_getfl(&lifeline).unwrap();
            let flags = rustix::io::fcntl_getfd(&lifeline).unwrap();
            assert_eq!((flags.contains(FdFlags::CLOEXEC), modes.contains(OFlags::NONBLOCK)), (cloexec, nonblocking));
        }
    }

    #[test]
    fn accepted_descriptors_have_the_modes_asked_for() {
        let meeting = Meeting::new();
        let listener = meeting.listen("127.0.0.1:80");
        for flags in [0, libc::SOCK_CLOEXEC, libc::SOCK_NONBLOCK, libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK] {
            let _connected = meeting.connect("127.0.0.1:80").unwrap();
            let accepted = accept(listener.fd(), &listener.key(), flags).unwrap();
            let cloexec = rustix::io::fcntl_getfd(&accepted.lifeline).unwrap().contains(FdFlags::CLOEXEC);
            let nonblocking = rustix::fs::fcntl_getfl(&accepted.lifeline).unwrap().contains(OFlags::NONBLOCK);
            assert_eq!((cloexec, nonblocking), (flags & libc::SOCK_CLOEXEC != 0, flags & libc::SOCK_NONBLOCK != 0));
        }
        assert_eq!(accept(-1, &meeting.rack.key(), 0).unwrap_err(), Errno::BADF);
    }

    /// Run by the tests below in a process of its own: listens, says so, and stays until it is killed.
    #[test]
    fn child_of_other_tests() {
        let Some(rack) = std::env::var_os("CROSSLANE_TEST_RACK") else { return };
        let rack = Arc::new(Rack::open(rack.as_ref()).unwrap());
        let _listeners = [("127.0.0.1:80", false), ("127.0.0.1:81", true)]
            .map(|(bound, shared)| listen_in(&rack, address(bound), false, shared, 1).unwrap());
        println!("\nlistening");
        let mut line = String::new();
        let _ = std::io::stdin().read_line(&mut line);
    }

    struct Server(Child);

    impl Server {
        fn start(meeting: &Meeting) -> Self {
            let rack = meeting.rack.path().parent().and_then(|version| version.parent()).unwrap();
            let _child = crate::forks::one();
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "rendezvous::tests::child_of_other_tests", "--nocapture"])
                .env("CROSSLANE_TEST_RACK", rack)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let listening = lines.map_while(Result::ok).any(|line| line == "listening");
            let server = Self(child);
            assert!(listening, "the server did not get to listen");
            server
        }

        fn kill(mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    impl Drop for Server {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_killed_servers_name_stops_nobody() {
        let meeting = Meeting::new();
        let server = Server::start(&meeting);
        let held = listen_in(&meeting.rack, address("127.0.0.1:80"), false, false, 1);
        assert_eq!(held.unwrap_err(), Errno::ADDRINUSE);
        assert!(meeting.connect("127.0.0.1:80").is_ok());
        server.kill();
        assert!(meeting.names().contains("127.0.0.1:80"), "nobody has cleaned up yet");
        let next = Server::start(&meeting);
        assert!(meeting.connect("127.0.0.1:80").is_ok());
        next.kill();
        let listener = meeting.listen("127.0.0.1:80");
        assert!(meeting.connect("127.0.0.1:80").is_ok());
        accept_now(&listener);
    }

    #[test]
    fn listeners_remove_what_killed_ones_left_at_other_addresses() {
        let meeting = Meeting::new();
        Server::start(&meeting).kill();
        assert_eq!(meeting.names().len(), 2);
        let _listeners: Vec<_> = (90..94).map(|port| meeting.listen(&format!("127.0.0.1:{port}"))).collect();
        assert_eq!(meeting.names(), (90..94).map(|port| format!("127.0.0.1:{port}")).collect());
    }

    #[test]
    fn a_connecting_end_finds_the_living_among_the_dead() {
        let meeting = Meeting::new();
        let server = Server::start(&meeting);
        let alive = listen_in(&meeting.rack, address("127.0.0.1:81"), false, true, 1).unwrap();
        server.kill();
        for _ in 0..20 {
            let _connected = meeting.connect("127.0.0.1:81").unwrap();
            accept_now(&alive);
        }
        assert_eq!(reason(meeting.connect("127.0.0.1:80")), FallbackReason::NoListener);
    }

    #[test]
    fn starters_at_once_get_one_name_and_no_one_loses_its_own() {
        let meeting = Meeting::new();
        Server::start(&meeting).kill();
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let start = || listen_in(&meeting.rack, address("127.0.0.1:80"), false, false, 1);
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(start)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let started: Vec<_> = outcomes.iter().filter(|outcome| outcome.is_ok()).collect();
        assert_eq!(started.len(), 1);
        // Who does not get at the lock in time, on a machine that does other things, does not start either.
        let is_late = |errno: &Errno| matches!(*errno, Errno::ADDRINUSE | Errno::BUSY);
        assert!(outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).all(is_late), "{outcomes:?}");
        assert!(meeting.connect("127.0.0.1:80").is_ok(), "the one that started can be reached");
    }
}
