//! The TCP sockets of a program, each with its path and the reason for it.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};

use socket::rack::address::local_source;
use stats_page::reader::Connection;
use stats_page::{DataPath, FallbackReason};
use stream::remote::PROXY_NET;

use super::reason::{DENIED_BY_RULES, Reason};
use crate::lanes;
use crate::processes::program::exclusion;
use crate::processes::tcp::{self, State, TcpSocket};
use crate::processes::{Processes, Program};
use crate::rack_dir::shared::{SharedView, on_machine};

/// What a program does with a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It has connected it.
    Connect,
    /// It has accepted it.
    Accept,
    /// It listens.
    Listen,
}

impl Role {
    /// Returns the word that is printed.
    pub fn name(self) -> &'static str {
        match self {
            Self::Connect => stats_page::Role::Connect.name(),
            Self::Accept => stats_page::Role::Accept.name(),
            Self::Listen => "listen",
        }
    }
}

impl From<stats_page::Role> for Role {
    fn from(role: stats_page::Role) -> Self {
        match role {
            stats_page::Role::Connect => Self::Connect,
            stats_page::Role::Accept => Self::Accept,
        }
    }
}

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
    /// The other side has reported that reason.
    pub is_reported: bool,
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
        if recorded.is_none() && in_kernel.is_none() && !self.program.is_tcp(fd) {
            return None;
        }
        let state = in_kernel.map_or(State::Unconnected, |socket| socket.state);
        Some(match (recorded, state) {
            (_, State::Listening) => self.listener(fd, in_kernel),
            (Some(recorded), _)
                if recorded.path != DataPath::Kernel && self.why_left_lanes(recorded, inode).is_none() =>
            {
                self.with_lane(fd, recorded, in_kernel)
            }
            _ => self.in_kernel((fd, inode), recorded, in_kernel),
        })
    }

    /// Returns why a connection that has met its other end has gone back to kernel TCP, if that is known. By what it
    /// receives is noted only by its next receive.
    fn why_left_lanes(&self, recorded: &Connection, inode: u64) -> Option<FallbackReason> {
        if recorded.path == DataPath::Kernel || !recorded.sends_on_tcp {
            return None;
        }
        if self.is_switched_off() {
            return Some(FallbackReason::SwitchedOff);
        }
        if self.is_confined() {
            return Some(FallbackReason::Sandbox);
        }
        self.processes.is_shared(inode).then_some(FallbackReason::SharedSocket)
    }

    /// Returns whether the program's library has counted that a sandbox denies it lanes, also by a filter that the
    /// program has installed itself: all its connections use kernel TCP then.
    fn is_confined(&self) -> bool {
        self.program.page().is_some_and(|page| page.fallbacks.contains_key(FallbackReason::Sandbox.name()))
    }

    fn is_switched_off(&self) -> bool {
        self.program.rack().is_some_and(|rack| lanes::are_off(&self.program.seen_from_here(&rack)))
    }

    fn with_lane(&self, fd: i32, recorded: &Connection, socket: Option<&'a TcpSocket>) -> Socket<'a> {
        let addresses = recorded.local.zip(recorded.peer);
        let by_page = addresses.and_then(|(local, peer)| self.processes.other_side_of_lane(local, peer));
        let by_page = by_page.map(|program| OtherSide {
            program: Some(program),
            uid: program.uid,
            is_in_same_namespace: program.namespace == self.program.namespace,
            reason: None,
        });
        Socket {
            program: self.program,
            fd,
            path: Some(recorded.path),
            role: Some(recorded.role.into()),
            state: socket.map_or(State::Connected, |socket| socket.state),
            local: recorded.local,
            peer: recorded.peer,
            reason: None,
            is_reported: false,
            other_side: by_page.or_else(|| self.other_side(socket?)),
        }
    }

    /// Describes a listening socket by what its clients may use.
    fn listener(&self, fd: i32, socket: Option<&'a TcpSocket>) -> Socket<'a> {
        let local = socket.map(|socket| socket.local);
        let obstacle = self.program.obstacle().map(Reason::Program);
        let reason = obstacle.or_else(|| self.of_program(local.map(|local| local.port())));
        let path = if reason.is_some() { DataPath::Kernel } else { DataPath::Lane };
        Socket {
            program: self.program,
            fd,
            path: (reason != Some(Reason::OtherRelease)).then_some(path),
            role: Some(Role::Listen),
            state: State::Listening,
            local,
            peer: None,
            reason,
            is_reported: false,
            other_side: None,
        }
    }

    fn in_kernel(
        &self,
        (fd, inode): (i32, u64),
        recorded: Option<&Connection>,
        socket: Option<&'a TcpSocket>,
    ) -> Socket<'a> {
        let connected = socket.filter(|socket| socket.peer.port() != 0);
        let role = recorded.map(|recorded| recorded.role.into());
        let role = role.or_else(|| connected.map(|socket| self.likely_role(socket)));
        let other_side = connected.and_then(|socket| self.other_side(socket));
        let known = recorded.and_then(|recorded| recorded.reason.or_else(|| self.why_left_lanes(recorded, inode)));
        let reason = match known {
            _ if connected.is_none() => self.program.obstacle().map_or(Reason::NotConnected, Reason::Program),
            Some(known) => self.recorded_reason(known, connected, other_side.as_ref()),
            None => self.unrecorded_reason((fd, inode), connected, other_side.as_ref()),
        };
        let is_known = !matches!(reason, Reason::OtherRelease | Reason::Unpublished);
        Socket {
            program: self.program,
            fd,
            path: is_known.then_some(DataPath::Kernel),
            role,
            state: socket.map_or(State::Unconnected, |socket| socket.state),
            local: socket.map(|socket| socket.local),
            peer: connected.map(|socket| socket.peer),
            reason: Some(reason),
            is_reported: recorded.is_some_and(|recorded| recorded.is_reported),
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
            reason: program.and_then(|program| program.recorded(other.inode)?.reason),
        })
    }

    /// Returns the reason for a connection whose reason the library has recorded. That the other side does not look for
    /// a lane, it has from that side's silence alone.
    fn recorded_reason(
        &self,
        known: FallbackReason,
        socket: Option<&TcpSocket>,
        other: Option<&OtherSide<'_>>,
    ) -> Reason {
        if known != FallbackReason::NoAnswer {
            return Reason::Recorded(known);
        }
        let remote = socket.filter(|socket| other.is_none() && self.is_of_other_machine(socket.peer));
        let own = Reason::Recorded(if remote.is_some() { FallbackReason::RemoteAddress } else { known });
        self.of_other_side(socket, other).unwrap_or(own)
    }

    /// Returns the reason for a connection of which the library has recorded none.
    fn unrecorded_reason(
        &self,
        (fd, inode): (i32, u64),
        socket: Option<&TcpSocket>,
        other: Option<&OtherSide<'_>>,
    ) -> Reason {
        if let Some(obstacle) = self.program.obstacle() {
            return Reason::Program(obstacle);
        }
        let own = || self.of_program(socket.and_then(|socket| self.server_port(socket)));
        let by_socket = || {
            let option = self.program.raises_signals(fd).then_some(FallbackReason::SocketOption);
            let sandbox = || self.is_confined().then_some(FallbackReason::Sandbox);
            let shared = || self.processes.is_shared(inode).then_some(FallbackReason::SharedSocket);
            option.or_else(sandbox).or_else(shared).map(Reason::Recorded)
        };
        let unpublished = || self.program.is_unpublished().then_some(Reason::Unpublished);
        let of_other = || self.of_other_side(socket, other);
        own().or_else(of_other).or_else(by_socket).or_else(unpublished).unwrap_or(Reason::NotBusy)
    }

    /// Returns why a connection has no lane, from what is known of its other side. A proxy says nothing of the program
    /// for which it stands.
    fn of_other_side(&self, socket: Option<&TcpSocket>, other: Option<&OtherSide<'_>>) -> Option<Reason> {
        let socket = socket.filter(|socket| !is_of_proxy(socket.peer))?;
        from_other_side(self.program, other?, self.likely_role(socket), self.server_port(socket))
    }

    /// Returns whether an address is none of the network namespace, as far as that can be known.
    fn is_of_other_machine(&self, address: SocketAddr) -> bool {
        let scope = if let SocketAddr::V6(v6) = address { v6.scope_id() } else { 0 };
        self.program.namespace == self.processes.own_namespace() && local_source(address.ip(), scope) == Ok(None)
    }

    /// Returns the server's port of a connection, as the programs' rules know it; `None` for another node's, of which
    /// the kernel knows the port of a proxy.
    fn server_port(&self, socket: &TcpSocket) -> Option<u16> {
        match self.likely_role(socket) {
            Role::Accept => Some(socket.local.port()),
            _ => Some(socket.peer.port()).filter(|_| !is_of_proxy(socket.peer)),
        }
    }

    /// Returns why a program that has loaded the library gets no lanes by a port of a server.
    fn of_program(&self, port: Option<u16>) -> Option<Reason> {
        if self.program.is_of_other_release() {
            return Some(Reason::OtherRelease);
        }
        let switched_off = || self.is_switched_off().then_some(FallbackReason::SwitchedOff);
        let excluded = exclusion(&self.program.settings(), port).or_else(switched_off);
        excluded.or_else(|| self.rack_obstacle()).map(Reason::Recorded)
    }

    /// Returns why the program cannot use its rack directory, if it has no page there.
    fn rack_obstacle(&self) -> Option<FallbackReason> {
        if self.program.page().is_some() {
            return None;
        }
        let rack = self.program.rack().map(|rack| self.program.seen_from_here(&rack))?;
        match SharedView::of(&rack) {
            Ok(Some(shared)) if shared.is_usable(on_machine(self.program.uid)) => return None,
            Ok(None) => {}
            _ => return Some(FallbackReason::RackUnavailable),
        }
        match std::fs::symlink_metadata(rack) {
            Ok(found) if owner(&found) != self.program.uid => Some(FallbackReason::RackOfOtherUser),
            Ok(found) if is_usable(&found) => None,
            // The library creates the default directory when it first needs it.
            Err(error) if error.kind() == ErrorKind::NotFound && !self.program.names_rack() => None,
            _ => Some(FallbackReason::RackUnavailable),
        }
    }
}

/// Returns why a connection has no lane, from what is known of its other side.
fn from_other_side(program: &Program, other: &OtherSide<'_>, role: Role, port: Option<u16>) -> Option<Reason> {
    match shared_by(program, other.program) {
        Some(shared) => {
            let (from, to) = if role == Role::Accept { (other.uid, program.uid) } else { (program.uid, other.uid) };
            if !may_reach(&shared, from, to, port) {
                return Some(Reason::Recorded(DENIED_BY_RULES));
            }
        }
        None if other.uid != program.uid => return Some(Reason::Recorded(FallbackReason::OtherUser)),
        None if !other.is_in_same_namespace => return Some(Reason::Recorded(FallbackReason::NamespaceDiffers)),
        None => {}
    }
    let peer = other.program?;
    if let Some(obstacle) = peer.obstacle() {
        return Some(Reason::Peer(obstacle));
    }
    let racks = program.rack_identity().zip(peer.rack_identity());
    if racks.is_some_and(|(own, other)| own != other) {
        return Some(Reason::OtherRack);
    }
    let own = other.reason.filter(|reason| *reason != FallbackReason::NoAnswer);
    let own = own.or_else(|| exclusion(&peer.settings(), port));
    let release = || peer.is_of_other_release().then_some(FallbackReason::VersionMismatch);
    own.or_else(release).map(Reason::Recorded)
}

/// Returns the shared rack in which both programs meet. One that cannot be examined may meet in any.
fn shared_by(program: &Program, other: Option<&Program>) -> Option<SharedView> {
    let is_same = |other: &Program| other.rack_identity().is_some_and(|rack| program.rack_identity() == Some(rack));
    program.shared_rack().filter(|_| other.is_none_or(is_same))
}

/// Returns whether the rules of a shared rack allow clients of one user to reach servers of another at a port; any port
/// if that is not known.
pub fn may_reach(shared: &SharedView, from: u32, to: u32, port: Option<u16>) -> bool {
    let (from, to) = (on_machine(from), on_machine(to));
    let rules = shared.rules().unwrap_or_default();
    match port {
        Some(port) => rules.allow(from, to, port),
        None => from == to || rules.all().iter().any(|rule| (rule.from, rule.to) == (from, to)),
    }
}

/// Returns whether an address is that of a node's proxy, which stands for a program of another node.
fn is_of_proxy(address: SocketAddr) -> bool {
    matches!(tcp::canonical(address).ip(), IpAddr::V4(v4) if v4.octets().starts_with(&PROXY_NET))
}

fn owner(found: &std::fs::Metadata) -> u32 {
    std::os::unix::fs::MetadataExt::uid(found)
}

fn is_usable(found: &std::fs::Metadata) -> bool {
    found.is_dir() && std::os::unix::fs::MetadataExt::mode(found) & 0o077 == 0
}
