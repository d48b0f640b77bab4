//! The TCP sockets of a network namespace.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use procfs::net::{TcpNetEntry, TcpState};
use procfs::process::Process;

/// A TCP socket of the kernel.
#[derive(Clone, Debug)]
pub struct TcpSocket {
    /// Its own address.
    pub local: SocketAddr,
    /// The other side's; port 0 if it is not connected.
    pub peer: SocketAddr,
    /// Its state.
    pub state: State,
    /// The user who created it.
    pub uid: u32,
    /// Its inode; 0 if no process holds it.
    pub inode: u64,
}

/// The states of a TCP socket, as far as they matter here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Neither connected nor listening.
    Unconnected,
    /// `connect` waits for the other side.
    Connecting,
    /// Both directions are open.
    Connected,
    /// At least one direction is closed.
    Closing,
    /// It accepts connections.
    Listening,
}

impl State {
    /// Returns the word that is printed.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unconnected => "unconnected",
            Self::Connecting => "connecting",
            Self::Connected => "connected",
            Self::Closing => "closing",
            Self::Listening => "listening",
        }
    }
}

/// The TCP sockets of one network namespace, in the order of the kernel's list.
#[derive(Default)]
pub struct Table {
    sockets: Vec<TcpSocket>,
    by_inode: HashMap<u64, usize>,
    connections: HashMap<(SocketAddr, SocketAddr), usize>,
}

impl Table {
    /// Reads the table of a process's network namespace. What cannot be read is left out.
    pub fn read(process: &Process) -> Self {
        let entries = process.tcp().into_iter().flatten().chain(process.tcp6().into_iter().flatten());
        let mut table = Self::default();
        entries.map(|entry| TcpSocket::new(&entry)).for_each(|socket| table.insert(socket));
        table
    }

    fn insert(&mut self, socket: TcpSocket) {
        let index = self.sockets.len();
        if socket.inode != 0 {
            self.by_inode.insert(socket.inode, index);
            self.connections.insert((socket.local, socket.peer), index);
        }
        self.sockets.push(socket);
    }

    /// Returns the socket with an inode.
    pub fn by_inode(&self, inode: u64) -> Option<&TcpSocket> {
        self.by_inode.get(&inode).map(|index| &self.sockets[*index])
    }

    /// Returns the socket of a connection that a process holds.
    pub fn connection(&self, local: SocketAddr, peer: SocketAddr) -> Option<&TcpSocket> {
        self.connections.get(&(canonical(local), canonical(peer))).map(|index| &self.sockets[*index])
    }

    /// Returns all listening sockets.
    pub fn listeners(&self) -> impl Iterator<Item = &TcpSocket> {
        self.sockets.iter().filter(|socket| socket.state == State::Listening)
    }

    /// Returns all sockets whose own or other side's port is `port`.
    pub fn with_port(&self, port: u16) -> impl Iterator<Item = &TcpSocket> {
        self.sockets.iter().filter(move |socket| socket.local.port() == port || socket.peer.port() == port)
    }

    /// Returns the listening socket to which the kernel gives connections to an address.
    pub fn listener_at(&self, address: SocketAddr) -> Option<&TcpSocket> {
        let address = canonical(address);
        let any_v4 = address.is_ipv4().then_some(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let candidates = [Some(address.ip()), any_v4, Some(IpAddr::V6(Ipv6Addr::UNSPECIFIED))];
        candidates.into_iter().flatten().find_map(|ip| {
            let at = SocketAddr::new(ip, address.port());
            self.listeners().find(|socket| socket.local == at)
        })
    }
}

impl TcpSocket {
    fn new(entry: &TcpNetEntry) -> Self {
        let state = match entry.state {
            TcpState::Established => State::Connected,
            TcpState::SynSent => State::Connecting,
            TcpState::Listen => State::Listening,
            TcpState::Close => State::Unconnected,
            _ => State::Closing,
        };
        let (local, peer) = (canonical(entry.local_address), canonical(entry.remote_address));
        Self { local, peer, state, uid: entry.uid, inode: entry.inode }
    }
}

/// Returns an IPv4 address in the form of an IPv6 one as an IPv4 address, without a scope.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}
