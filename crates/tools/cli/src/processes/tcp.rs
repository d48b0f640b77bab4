//! The TCP sockets of a network namespace.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use procfs::net::{TcpNetEntries, TcpNetEntry, TcpState};
use procfs::process::Process;
use procfs::{FromBufReadSI, current_system_info};

/// How long Linux keeps the addresses of a connection that has ended (`TCP_TIMEWAIT_LEN`).
pub const TIME_WAIT: Duration = Duration::from_secs(60);
/// The kind of a timer of `/proc/net/tcp` that ends TIME-WAIT.
const TIMER_OF_TIME_WAIT: &str = "03";

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
    /// Its connection has ended this long ago, and the kernel keeps its addresses for a minute.
    TimeWait(Duration),
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
            Self::TimeWait(_) => "closed",
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
        let mut table = Self::default();
        for file in ["tcp", "tcp6"] {
            let text = std::fs::read_to_string(format!("/proc/{}/net/{file}", process.pid())).unwrap_or_default();
            let entries = TcpNetEntries::from_buf_read(text.as_bytes(), current_system_info());
            let entries = entries.map_or_else(|_| Vec::new(), |entries| entries.0);
            for (entry, line) in entries.iter().zip(text.lines().skip(1)) {
                table.insert(TcpSocket::new(entry, line));
            }
        }
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

    /// Returns all sockets.
    pub fn sockets(&self) -> impl Iterator<Item = &TcpSocket> {
        self.sockets.iter()
    }

    /// Returns all listening sockets.
    pub fn listeners(&self) -> impl Iterator<Item = &TcpSocket> {
        self.sockets().filter(|socket| socket.state == State::Listening)
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
    /// Creates a socket from its entry, whose line in the kernel's list has the rest of TIME-WAIT.
    fn new(entry: &TcpNetEntry, line: &str) -> Self {
        let state = match entry.state {
            TcpState::Established => State::Connected,
            TcpState::SynSent => State::Connecting,
            TcpState::Listen => State::Listening,
            TcpState::Close => State::Unconnected,
            TcpState::TimeWait => {
                State::TimeWait(TIME_WAIT.saturating_sub(rest_of_time_wait(line).unwrap_or_default()))
            }
            _ => State::Closing,
        };
        let (local, peer) = (canonical(entry.local_address), canonical(entry.remote_address));
        Self { local, peer, state, uid: entry.uid, inode: entry.inode }
    }
}

/// Returns how long the kernel keeps a connection that has ended, by its line in `/proc/net/tcp` (proc_pid_net(5)).
fn rest_of_time_wait(line: &str) -> Option<Duration> {
    let (kind, ticks) = line.split_whitespace().nth(5)?.split_once(':')?;
    let ticks = u64::from_str_radix(ticks, 16).ok().filter(|_| kind == TIMER_OF_TIME_WAIT)?;
    Some(Duration::from_millis(ticks.saturating_mul(1000) / procfs::ticks_per_second()))
}

/// Returns an IPv4 address in the form of an IPv6 one as an IPv4 address, without a scope.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_has_ended_is_listed_with_its_age() {
        let line = "   3: 0100007F:18EB 0100007F:B328 06 00000000:00000000 03:000003E8 00000000     0        0 0 3 0";
        assert_eq!(rest_of_time_wait(line), Some(Duration::from_secs(10)));
        assert_eq!(rest_of_time_wait(&line.replace("03:", "01:")), None);
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (local, peer) = (client.local_addr().unwrap(), client.peer_addr().unwrap());
        let (accepted, _) = listener.accept().unwrap();
        drop(client);
        drop(accepted);
        let table = Table::read(&Process::myself().unwrap());
        let ended = table.sockets().find(|socket| (socket.local, socket.peer) == (local, peer)).unwrap();
        assert!(matches!(ended.state, State::TimeWait(age) if age < TIME_WAIT), "{ended:?}");
    }
}
