//! Transfer of connections to other programs and processes: by `exec`, and by `SCM_RIGHTS`.
//!
//! The state of a connection is in its memory and its lifeline. For a connection in windows, a [lease](span_lease)
//! takes the place of the memfd, or, in the windows of a device, its [local page](crate::rendezvous::local_page)
//! together with a descriptor of that memory. These are hidden descriptors with the same close-on-exec flag as the
//! program's, so they pass through `exec` with it; and they are appended to the descriptors of a message that carries
//! the lifeline. A process that gets all of them identifies its endpoint by the lifeline's inode. If both endpoints
//! have switched to lanes at the same moment, an endpoint has two memories, and the second one records that it holds
//! the incoming lane. After `exec`, the descriptor that belongs to a local page is the one on which its spans are
//! marked as leased.

use super::attempt::record_lane_connection;
use crate::connection::{self, Connection, ConnectionParams, InitialPath};
use crate::descriptor::hidden::{self, InheritedKind};
use crate::entry::{self, Entry};
use crate::listener;
use crate::listener::{DeferredAccept, Listener, ListenerInner};
use crate::options::{OptionRecord, inspect};
use crate::process::settings::settings;
use crate::process::system::inode_of;
use crate::rendezvous;
use crate::rendezvous::address::{Opener, Tuple};
use crate::rendezvous::local_page::{LocalPage, MemoryFds};
use crate::rendezvous::span_lease;
use rustix::fs::OFlags;
use rustix::io::Errno;
use segment::{Segment, Side};
use stats_page::Role;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

/// Adopts the connections that this program has inherited through `exec`. Costs one system call if there are none.
pub fn adopt_inherited() {
    if settings().off {
        return;
    }
    let inherited = hidden::inherited();
    let of_kind = |kind| inherited.iter().filter(move |(_, found)| *found == kind).map(|(fd, _)| *fd);
    let sockets: Vec<RawFd> = of_kind(InheritedKind::Socket).collect();
    for &socket in &sockets {
        adopt_listener(socket, &sockets, |fd, lane_fd| DeferredAccept::inherited(fd, lane_fd, &sockets));
    }
    listener::close_orphaned_queues(&sockets);
    let (memfds, others): (Vec<RawFd>, Vec<RawFd>) =
        of_kind(InheritedKind::Memfd).partition(|&fd| is_connection_memory(fd));
    let mut others: Vec<RawFd> = of_kind(InheritedKind::Other).chain(others).collect();
    let mut unadopted = Vec::new();
    for memfd in memfds {
        let take_device =
            |page: LocalPage| others.iter().position(|&fd| is_lease_of(page, fd)).map(|index| others.remove(index));
        let device = local_page_of(memfd).and_then(take_device);
        // SAFETY: this library has created the descriptors before `exec`, and no other code of this program knows them
        // yet.
        unadopted.extend(adopt(unsafe { memory_of(memfd, device) }, &sockets).err());
    }
    for memory in unadopted {
        let _ = adopt_rest(memory, &sockets);
    }
    sockets.iter().for_each(|&socket| adopt_lifeline(socket, &sockets));
}

/// Makes a connection of a lifeline that came without memory, because it had none: it starts, or continues, as a plain
/// stream.
fn adopt_lifeline(fd: RawFd, sockets: &[RawFd]) {
    if !matches!(entry::get(fd), Entry::None) || !entry::can_hold(fd) {
        return;
    }
    let local = |(role, side)| Some((side, role, tuple_of(fd, role).filter(|(_, is_remote)| !is_remote)?.0));
    let roles = [(Role::Connect, Side::Connector), (Role::Accept, Side::Acceptor)];
    let Some((side, role, tuple)) = roles.into_iter().find_map(local) else { return };
    let inode = inode_of(fd);
    let is_another = |other: &&RawFd| **other != fd && inode_of(**other) == inode;
    let others: Vec<RawFd> = sockets.iter().filter(is_another).copied().collect();
    let known =
        others.iter().find_map(|&other| entry::connection(other)).or_else(|| connection::find_by_lifeline_inode(inode));
    match known {
        Some(connection) => add_lifeline(connection, fd),
        None => open_transferred(fd, &others, (tuple, role, false), InitialPath::Lifeline(side)),
    }
}

/// Returns the descriptors to send instead of `rights`, which include the memory of lane connections.
///
/// # Errors
/// `TOOMANYREFS` for a connection that has lanes but no descriptor of their memory, because that was closed to make
/// room for the program, and for one whose handshake has not arrived: a receiver could not use its lifeline alone.
pub fn send_rights(rights: &[RawFd]) -> Result<Vec<RawFd>, Errno> {
    let mut all = rights.to_vec();
    for &fd in rights {
        match entry::get(fd) {
            Entry::Connection(connection) => {
                connection.prepare_to_be_sent();
                let memory = connection.memory();
                if memory.is_empty() && !connection.needs_no_memory() {
                    return Err(Errno::TOOMANYREFS);
                }
                connection.note_shared();
                all.extend(memory);
            }
            Entry::Listener(listener) => all.push(listener.lane_fd()),
            Entry::Stream(stream) => stream.with_options(OptionRecord::note_sent),
            _ => {}
        }
    }
    Ok(all)
}

/// One or two descriptors of a received message.
enum ReceivedPart {
    Other(RawFd),
    /// A descriptor that may be a connection's memory, and the device that belongs to it.
    Memory(RawFd, Option<RawFd>),
}

/// Received descriptors of which no connection has been made yet.
enum Unadopted {
    Other(RawFd),
    Memory(MemoryFds),
}

/// Returns the descriptors of a message received from `carrier` that are for the program; the memory of connections
/// among them is removed and used.
pub fn receive_rights(carrier: RawFd, rights: &[RawFd]) -> Vec<RawFd> {
    let (mut received, mut others) = (Vec::new(), Vec::new());
    let mut rights = rights.iter().copied().peekable();
    while let Some(fd) = rights.next() {
        if is_connection_memory(fd) {
            let device = local_page_of(fd).and_then(|page| rights.next_if(|&next| is_memory_of(page, next)));
            received.push(ReceivedPart::Memory(fd, device));
        } else {
            received.push(ReceivedPart::Other(fd));
            others.push(fd);
        }
    }
    let for_program: Vec<RawFd> =
        others.iter().copied().filter(|&fd| !adopt_listener(fd, &others, DeferredAccept::for_listener)).collect();
    let mut unadopted = Vec::new();
    for part in received {
        match part {
            ReceivedPart::Other(fd) => {
                unadopted.extend(Some(Unadopted::Other(fd)).filter(|_| for_program.contains(&fd)))
            }
            ReceivedPart::Memory(memfd, device) => {
                // SAFETY: the descriptors have just been received, and no other code knows their numbers.
                let memory = unsafe { memory_of(memfd, device) };
                if memory.device.is_none() || is_from_trusted(carrier) {
                    unadopted.extend(adopt(memory, &for_program).err().map(Unadopted::Memory));
                }
            }
        }
    }
    let mut returned = Vec::new();
    for part in unadopted {
        match part {
            Unadopted::Other(fd) => returned.push(fd),
            Unadopted::Memory(memory) => {
                let foreign = adopt_rest(memory, &for_program).err();
                returned.extend(foreign.into_iter().flat_map(MemoryFds::into_all).map(OwnedFd::into_raw_fd));
            }
        }
    }
    for_program.iter().for_each(|&fd| adopt_lifeline(fd, &for_program));
    returned
}

/// Returns whether the peer of a socket may pass a device that is to be mapped here. Any process may pass a memfd: it
/// cannot be truncated under a mapping, as a device could by a process that controls it. An unconnected socket, to
/// which any process can send, has no peer.
fn is_from_trusted(carrier: RawFd) -> bool {
    // SAFETY: the descriptor is borrowed for one query, during a call of the program that names it.
    rendezvous::is_trusted(unsafe { BorrowedFd::borrow_raw(carrier) }, None) == Ok(true)
}

/// # Safety
/// The descriptors are open, and no other code owns them.
unsafe fn memory_of(memfd: RawFd, device: Option<RawFd>) -> MemoryFds {
    // SAFETY: the caller guarantees that the descriptors are open and that no other code owns them.
    let own = |fd| unsafe { OwnedFd::from_raw_fd(fd) };
    MemoryFds { device: device.map(own), ..MemoryFds::of_memfd(own(memfd)) }
}

/// Makes a listener of a hidden lane listener and its TCP listener among `sockets`. `deferral_of` creates its deferral
/// of connections. Returns false if `fd` is not a lane listener.
fn adopt_listener(
    fd: RawFd,
    sockets: &[RawFd],
    deferral_of: impl FnOnce(RawFd, RawFd) -> Result<Option<DeferredAccept>, Errno>,
) -> bool {
    let Some(lane) = rendezvous::adopt_listener(fd) else { return false };
    let address = lane.name().address;
    let descriptors: Vec<RawFd> = sockets.iter().copied().filter(|&fd| inspect::listens_on(fd, address)).collect();
    let is_known = descriptors.iter().any(|&fd| matches!(entry::get(fd), Entry::Listener(_)));
    if descriptors.is_empty() || is_known {
        return true;
    }
    let is_nonblocking = inspect::remembered_mode(lane.fd());
    let inner = ListenerInner {
        is_v6: address.is_ipv6(),
        descriptors: descriptors.clone(),
        options: OptionRecord::default(),
        deferral: deferral_of(descriptors[0], lane.fd()).unwrap_or_default(),
        lane: Some(lane),
        ..ListenerInner::default()
    };
    let listener = Listener::open(inner, is_nonblocking);
    for descriptor in descriptors {
        entry::set(descriptor, Entry::Listener(listener));
    }
    listener.set_inheritable(false);
    true
}

/// Returns whether a descriptor is a connection's memory or takes its place: a segment, a lease or a local page.
fn is_connection_memory(fd: RawFd) -> bool {
    // SAFETY: the descriptor is only queried; the kernel answers a closed number with an error.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    Segment::is_segment(fd) || span_lease::spans_of(borrowed).is_some() || local_page_of(fd).is_some()
}

fn local_page_of(fd: RawFd) -> Option<LocalPage> {
    // SAFETY: the descriptor is only queried; the kernel answers a closed number with an error.
    LocalPage::read(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Returns whether a descriptor is one of the memory that a local page describes.
fn is_memory_of(page: LocalPage, fd: RawFd) -> bool {
    // SAFETY: the descriptor is only queried; the kernel answers a closed number with an error.
    page.describes(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Returns whether a descriptor is one of the memory that a local page describes, and leased for the connection: the
/// program may have opened the device itself.
fn is_lease_of(page: LocalPage, fd: RawFd) -> bool {
    // SAFETY: the descriptor is only queried; the kernel answers a closed number with an error.
    is_memory_of(page, fd) && span_lease::is_marked_on(unsafe { BorrowedFd::borrow_raw(fd) }, page.spans)
}

/// Returns the endpoints that a holder of the memory may have.
#[inline(never)] // Its variables are not to add to the caller's on a small stack.
fn endpoints_in(MemoryFds { memfd, device, .. }: &MemoryFds) -> Vec<Segment> {
    if let Some(device) = device {
        return rendezvous::adopt_on_device(memfd, device.as_fd()).into_iter().collect();
    }
    if span_lease::spans_of(memfd.as_fd()).is_some() {
        return rendezvous::adopt_in_windows(memfd.as_fd()).into_iter().collect();
    }
    [Side::Connector, Side::Acceptor].into_iter().filter_map(|side| Segment::adopt(memfd, side).ok()).collect()
}

/// Returns the endpoints in a memory whose lifeline is among `sockets`, with all descriptors of that lifeline.
fn endpoints_with_lifelines(memory: &MemoryFds, sockets: &[RawFd]) -> Vec<(Segment, Vec<RawFd>)> {
    let find = |segment: Segment| {
        let inode = segment.lifeline_inode();
        let lifelines: Vec<RawFd> = sockets.iter().copied().filter(|&fd| inode_of(fd) == Some(inode)).collect();
        (inode != 0 && !lifelines.is_empty()).then_some((segment, lifelines))
    };
    endpoints_in(memory).into_iter().filter_map(find).collect()
}

/// Makes a connection of the memory and of its lifeline among `sockets`.
///
/// # Errors
/// The memory, if no connection was made: [`adopt_rest`] decides whether the program gets it.
fn adopt(memory: MemoryFds, sockets: &[RawFd]) -> Result<(), MemoryFds> {
    // A program that holds both endpoints has the memory twice, once for each.
    let is_new = |(segment, lifelines): &(Segment, Vec<RawFd>)| {
        !segment.only_receives() && !matches!(entry::get(lifelines[0]), Entry::Connection(_))
    };
    let found = endpoints_with_lifelines(&memory, sockets).into_iter().find(is_new);
    let Some((segment, lifelines)) = found else { return Err(memory) };
    match connection::find_by_segment(&segment) {
        Some(connection) => lifelines.iter().for_each(|fd| add_lifeline(connection, *fd)),
        None => open_adopted(lifelines[0], &lifelines[1..], segment, memory),
    }
    Ok(())
}

/// After all connections have been adopted: uses memory in which a connection only receives, and closes duplicates.
///
/// # Errors
/// The memory, if it only looks like that of a connection, and belongs to the program.
fn adopt_rest(memory: MemoryFds, sockets: &[RawFd]) -> Result<(), MemoryFds> {
    let found = endpoints_with_lifelines(&memory, sockets);
    if found.is_empty() {
        return Err(memory);
    }
    for (segment, lifelines) in found.into_iter().filter(|(segment, _)| segment.only_receives()) {
        if let Entry::Connection(connection) = entry::get(lifelines[0])
            && let Ok(memfd) = memory.memfd.try_clone()
        {
            connection.adopt_inbound(segment, memfd);
        }
    }
    Ok(())
}

/// Adds a descriptor of a connection that this process already holds.
fn add_lifeline(connection: &'static Connection, fd: RawFd) {
    connection.add_descriptor(fd);
    entry::set(fd, Entry::Connection(connection));
    super::descriptor::set_cloexec(fd);
}

fn open_adopted(fd: RawFd, others: &[RawFd], segment: Segment, memory: MemoryFds) {
    let role = if segment.side() == Side::Connector { Role::Connect } else { Role::Accept };
    let Some((tuple, is_remote)) = tuple_of(fd, role) else { return };
    open_transferred(fd, others, (tuple, role, is_remote), InitialPath::Lanes(segment, memory.adopt().ok()));
}

fn open_transferred(fd: RawFd, others: &[RawFd], (tuple, role, is_remote): (Tuple, Role, bool), path: InitialPath) {
    // SAFETY: the descriptor is only queried; the kernel answers a closed number with an error.
    let flags = rustix::fs::fcntl_getfl(unsafe { BorrowedFd::borrow_raw(fd) }).unwrap_or(OFlags::empty());
    let params = ConnectionParams {
        fd,
        tuple,
        options: OptionRecord::default(),
        nonblocking: flags.contains(OFlags::NONBLOCK),
        slot: Some(record_lane_connection(fd, tuple, role, is_remote)),
    };
    let is_alone = matches!(path, InitialPath::Lifeline(_));
    let connection = Connection::open(params, path);
    connection.note_shared();
    if is_alone {
        connection.read_options_of_lifeline();
    }
    entry::set(fd, Entry::Connection(connection));
    for &other in others {
        connection.add_descriptor(other);
        entry::set(other, Entry::Connection(connection));
    }
    super::descriptor::follow_cloexec(connection);
}

/// Returns whether a descriptor is a connection's lifeline, by its name. The code in the name is not checked: the
/// lifeline may be of another user, whose key cannot be read here.
pub fn is_lifeline(fd: RawFd) -> bool {
    [Role::Connect, Role::Accept].into_iter().any(|role| tuple_of(fd, role).is_some())
}

/// Returns both addresses, from the name that the connecting endpoint has given the lifeline, and whether the other
/// endpoint is a proxy's.
fn tuple_of(fd: RawFd, role: Role) -> Option<(Tuple, bool)> {
    // SAFETY: the descriptor is only queried; the kernel answers a closed number with an error.
    let lifeline = unsafe { BorrowedFd::borrow_raw(fd) };
    let name = match role {
        Role::Connect => rustix::net::getsockname(lifeline).ok()?,
        Role::Accept => rustix::net::getpeername(lifeline).ok()??,
        Role::Listen => return None,
    };
    let name = rustix::net::SocketAddrUnix::try_from(name).ok()?;
    let (tuple, opener) = Tuple::from_unauthenticated_name(name.abstract_name()?).ok()?;
    Some(match role {
        Role::Connect => (tuple, rendezvous::is_connected_to_proxy(lifeline)),
        Role::Accept | Role::Listen => (tuple.reversed(), opener == Opener::Proxy),
    })
}
