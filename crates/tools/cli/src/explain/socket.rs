//! The TCP sockets of a program, each with its path and the reason for it.

use std::net::SocketAddr;

use socket::rendezvous::address::local_source;
use socket::rendezvous::directory;
use stats_page::reader::{Connection, PageError};
use stats_page::{DataPath, FallbackReason, Role};

use super::reason::Reason;
use crate::processes::tcp::{self, State, TcpSocket};
use crate::processes::{Processes, Program};

/// A TCP socket of a program.
pub struct Socket<'a> {
    /// The program that holds it.
    pub program: &'a Program,
    /// Its descriptor there.
    pub fd: i32,
    /// What carries its bytes; for a listener, what its clients may use. `None` if that is not known.
    pub path: Option<DataPath>,
    /// What the program does with it, as far as that is known.
    pub role: Option<Role>,
    /// Its state.
    pub state: State,
    /// Its own address; `None` if it has none.
    pub local: Option<SocketAddr>,
    /// The other side's address, if it is connected.
    pub peer: Option<SocketAddr>,
    /// Why it has no lane.
    pub reason: Option<Reason>,
    /// The other side.
    pub other_side: Option<OtherSide<'a>>,
}

/// What is known of the other side of a connection.
pub struct OtherSide<'a> {
    /// The program, if the caller may examine it.
    pub program: Option<&'a Program>,
    /// The user who created its socket.
    pub uid: u32,
    /// Whether it is in the same network namespace.
    pub is_in_same_namespace: bool,
    /// The reason that its own library has recorded.
    pub reason: Option<FallbackReason>,
}

/// Returns all TCP sockets of a program, by descriptor.
pub fn of_program<'a>(processes: &'a Processes, program: &'a Program) -> Vec<Socket<'a>> {
    let examination = Examination { processes, program };
    program.sockets.iter().filter_map(|(fd, inode)| examination.socket(*fd, *inode)).collect()
}

struct Examination<'a> {
    processes: &'a Processes,
    program: &'a Program,
}

impl<'a> Examination<'a> {
    fn socket(&self, fd: i32, inode: u64) -> Option<Socket<'a>> {
        let recorded = self.program.recorded(inode);
        let table = self.processes.table(self.program.namespace);
        let in_kernel = table.and_then(|table| table.by_inode(inode));
        match recorded.filter(|recorded| recorded.path != DataPath::Kernel) {
            Some(recorded) => Some(self.with_lane(fd, recorded)),
            None if in_kernel.is_some() || self.program.is_tcp(fd) => Some(self.in_kernel(fd, recorded, in_kernel)),
            None => None,
        }
    }

    fn with_lane(&self, fd: i32, recorded: &Connection) -> Socket<'a> {
        let addresses = recorded.local.zip(recorded.peer);
        let other = addresses.and_then(|(local, peer)| self.processes.other_side_of_lane(local, peer));
        Socket {
            program: self.program,
            fd,
            path: Some(recorded.path),
            role: Some(recorded.role),
            state: if recorded.role == Role::Listen { State::Listening } else { State::Connected },
            local: recorded.local,
            peer: recorded.peer,
            reason: None,
            other_side: other.map(|program| OtherSide {
                program: Some(program),
                uid: program.uid,
                is_in_same_namespace: program.namespace == self.program.namespace,
                reason: None,
            }),
        }
    }

    fn in_kernel(&self, fd: i32, recorded: Option<&Connection>, socket: Option<&'a TcpSocket>) -> Socket<'a> {
        let is_recorded = |role| recorded.is_some_and(|recorded| recorded.role == role);
        let state = socket.map_or(State::Unconnected, |socket| socket.state);
        let connected = socket.filter(|socket| socket.peer.port() != 0);
        let listener = connected.and_then(|socket| kernel_listener(self.program, socket));
        let role = match state {
            State::Listening => Some(Role::Listen),
            _ if is_recorded(Role::Accept) || listener.is_some() => Some(Role::Accept),
            _ if is_recorded(Role::Connect) => Some(Role::Connect),
            _ => connected.map(|socket| self.likely_role(socket)),
        };
        let other_side = connected.and_then(|socket| self.other_side(socket));
        let is_known = state != State::Listening || !self.program.is_unpublished();
        // A listener of such a library is the kernel's, and its clients may use lanes.
        let accepts_lanes = state == State::Listening
            && self.program.shows_busy_connections_only()
            && self.program.obstacle().is_none();
        let peer = connected.map(|socket| socket.peer);
        let known = recorded.and_then(|recorded| recorded.reason).or(listener.and_then(|listener| listener.reason));
        Socket {
            program: self.program,
            fd,
            path: is_known.then_some(if accepts_lanes { DataPath::Lane } else { DataPath::Kernel }),
            role,
            state,
            local: socket.map(|socket| socket.local),
            peer,
            reason: (!accepts_lanes).then(|| self.reason(state, known, peer, other_side.as_ref())),
            other_side,
        }
    }

    /// Returns the role of an unrecorded connection: accepted, if a socket listens at its address.
    fn likely_role(&self, socket: &TcpSocket) -> Role {
        let table = self.processes.table(self.program.namespace);
        let is_server = table.is_some_and(|table| table.listener_at(socket.local).is_some());
        if is_server { Role::Accept } else { Role::Connect }
    }

    fn other_side(&self, socket: &TcpSocket) -> Option<OtherSide<'a>> {
        let (namespace, other) = self.processes.other_side(socket.local, socket.peer, self.program.namespace)?;
        let program = self.processes.holder(other.inode, self.program.pid);
        Some(OtherSide {
            program,
            uid: other.uid,
            is_in_same_namespace: namespace == self.program.namespace,
            reason: program.and_then(|program| recorded_reason(program, other)),
        })
    }

    /// Returns the reason for a socket on kernel TCP, given the one that the library has recorded.
    fn reason(
        &self,
        state: State,
        known: Option<FallbackReason>,
        peer: Option<SocketAddr>,
        other: Option<&OtherSide<'_>>,
    ) -> Reason {
        if let Some(obstacle) = self.program.obstacle() {
            return Reason::Program(obstacle);
        }
        match (known, self.program.page()) {
            (Some(reason), _) if is_about_the_other_side(reason) => {
                self.refined(reason, peer, other).unwrap_or(Reason::Recorded(reason))
            }
            (Some(reason), _) => Reason::Recorded(reason),
            _ if state == State::Unconnected => Reason::NotConnected,
            _ if self.program.shows_busy_connections_only() => {
                // A listener is the kernel's.
                let of_other = other.and_then(|other| from_other_side(self.program, other));
                of_other.unwrap_or(Reason::NotBusy)
            }
            (None, Some(page)) if page.fallbacks.contains_key(FallbackReason::Sandbox.name()) => {
                Reason::Recorded(FallbackReason::Sandbox)
            }
            (None, Some(_)) => Reason::NotSeen,
            (None, None) => self.without_page(),
        }
    }

    /// Returns a more exact reason for a connection whose other side has no lanes. The library has only recorded that
    /// it found no listener.
    fn refined(
        &self,
        known: FallbackReason,
        peer: Option<SocketAddr>,
        other: Option<&OtherSide<'_>>,
    ) -> Option<Reason> {
        if let Some(reason) = other.and_then(|other| from_other_side(self.program, other)) {
            return Some(reason);
        }
        let peer = peer.map(tcp::canonical).filter(|_| known == FallbackReason::NoListener)?;
        let is_elsewhere = self.program.namespace == self.processes.own_namespace() && is_of_other_machine(peer);
        if is_elsewhere {
            return Some(Reason::Recorded(FallbackReason::RemoteAddress));
        }
        let rack = self.program.seen_from_here(&self.program.rack()?);
        let names = rack.join(directory::VERSION).join(format!("net-{}", self.program.namespace));
        let is_of_other_version = directory::has_other_version_at(&names, peer);
        is_of_other_version.then_some(Reason::Recorded(FallbackReason::VersionMismatch))
    }

    /// Returns the reason for a socket of a program whose page cannot be read, or that has none.
    fn without_page(&self) -> Reason {
        match self.program.page_error() {
            Some(PageError::Version { .. } | PageError::Layout) => return Reason::OtherRelease,
            Some(_) => return Reason::NotSeen,
            None => {}
        }
        let rack = self.program.rack().map(|rack| self.program.seen_from_here(&rack));
        match rack.map(std::fs::symlink_metadata) {
            Some(Ok(found)) if owner(&found) != self.program.uid => Reason::Recorded(FallbackReason::RackOfOtherUser),
            Some(Ok(_)) if self.program.is_unpublished() => Reason::Unpublished,
            Some(Ok(found)) if is_usable(&found) => Reason::NotSeen,
            _ => Reason::Recorded(FallbackReason::RackUnavailable),
        }
    }
}

/// Returns the program's listener without lanes from which a connection was accepted.
fn kernel_listener<'a>(program: &'a Program, socket: &TcpSocket) -> Option<&'a Connection> {
    let mut without_lanes = program.page()?.listeners.iter().filter(|listener| listener.path == DataPath::Kernel);
    without_lanes.find(|listener| listener.local.is_some_and(|local| local.port() == socket.local.port()))
}

/// Returns the reason that a program's library has recorded for a connection, or for the listener that accepted it.
fn recorded_reason(program: &Program, socket: &TcpSocket) -> Option<FallbackReason> {
    let recorded = program.recorded(socket.inode).or_else(|| kernel_listener(program, socket));
    recorded.and_then(|recorded| recorded.reason)
}

/// Returns a more exact reason for a connection whose other side has no lanes, from what is known of that side.
fn from_other_side(program: &Program, other: &OtherSide<'_>) -> Option<Reason> {
    if other.uid != program.uid {
        return Some(Reason::Recorded(FallbackReason::OtherUser));
    }
    if !other.is_in_same_namespace {
        return Some(Reason::Recorded(FallbackReason::NamespaceDiffers));
    }
    let peer = other.program?;
    if let Some(obstacle) = peer.obstacle() {
        return Some(Reason::Peer(obstacle));
    }
    let racks = program.rack_identity().zip(peer.rack_identity());
    if racks.is_some_and(|(own, other)| own != other) {
        return Some(Reason::OtherRack);
    }
    let own = other.reason.filter(|reason| !is_about_the_other_side(*reason));
    own.map(Reason::Recorded)
}

/// Returns whether an address is none of this network namespace.
fn is_of_other_machine(address: SocketAddr) -> bool {
    let scope = if let SocketAddr::V6(v6) = address { v6.scope_id() } else { 0 };
    local_source(address.ip(), scope) == Ok(None)
}

/// Returns whether a reason says only that the other side has no lanes.
fn is_about_the_other_side(reason: FallbackReason) -> bool {
    matches!(reason, FallbackReason::NoListener | FallbackReason::PlainClient | FallbackReason::RemoteAddress)
}

fn owner(found: &std::fs::Metadata) -> u32 {
    std::os::unix::fs::MetadataExt::uid(found)
}

fn is_usable(found: &std::fs::Metadata) -> bool {
    found.is_dir() && std::os::unix::fs::MetadataExt::mode(found) & 0o077 == 0
}
