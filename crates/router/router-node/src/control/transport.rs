//! Packets between nodes: over a unix socket on one machine, over TCP between machines. No call blocks. The kernel
//! reports the user of the peer of a unix socket; packets over TCP are authenticated.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use ::control::{Channel, ChannelError, Received, peer_uid};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, socket_with, sockopt,
};

use super::message::{ControlError, MESSAGE_BYTES_MAX};
use super::seal::{Key, Role, Seal, TAG_BYTES, random_bytes};

/// Backlog of the listening socket: all other nodes may connect at once, and retry.
const BACKLOG: i32 = 64;
/// Length prefix of a frame on TCP, little-endian.
const LENGTH_BYTES: usize = 4;
/// Maximum frame length in bytes before the peer is authenticated: enough for a nonce or a hello.
const UNAUTHENTICATED_BYTES_MAX: usize = 256;
/// Maximum number of packets that wait for the peer's nonce: a hello, and a packet that ends the session.
const UNSEALED_MAX: usize = 2;
/// Bytes per read from TCP.
const READ_BYTES: usize = 64 << 10;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// The control address of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlAddress {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP socket.
    Tcp(TcpAddress),
}

/// The control address of a node on another machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpAddress {
    /// Its address.
    pub address: SocketAddr,
    /// This node's address. Connections from addresses that are not in the cluster file are refused.
    pub local_ip: IpAddr,
    /// The cluster's key.
    pub key: Key,
}

/// The listening socket of a node.
#[derive(Debug)]
pub enum Listener {
    /// Accepts processes of this machine that run as the same user or root.
    Unix(OwnedFd),
    /// Accepts connections from these addresses.
    Tcp(TcpListener, Key, Vec<IpAddr>),
}

/// An accepted connection.
#[derive(Debug)]
pub enum Accepted {
    /// A connection that may be from a node.
    Peer(Transport),
    /// A connection from an address that is not in the cluster file.
    UnknownAddress(IpAddr),
    /// A process of another user, or a connection that was already closed.
    Refused,
}

impl Listener {
    /// Listens on an address. The caller holds the node's lock, so an existing socket at the path is stale. TCP
    /// connections are accepted only from addresses in `known`.
    ///
    /// # Errors
    /// Returns the error of the kernel.
    pub fn bind(address: &ControlAddress, known: Vec<IpAddr>) -> io::Result<Self> {
        match address {
            ControlAddress::Unix(path) => Self::bind_unix(path),
            ControlAddress::Tcp(TcpAddress { address, key, .. }) => {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Ok(Self::Tcp(listener, key.clone(), known))
            }
        }
    }

    fn bind_unix(path: &Path) -> io::Result<Self> {
        match rustix::fs::unlink(path) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
        bind(&listener, &SocketAddrUnix::new(path)?)?;
        listen(&listener, BACKLOG)?;
        Ok(Self::Unix(listener))
    }

    /// Accepts the next connection, if there is one.
    pub fn accept(&self) -> Option<Accepted> {
        match self {
            Self::Unix(listener) => {
                let socket = accept_with(listener, FLAGS).ok()?;
                let own = rustix::process::geteuid().as_raw();
                let is_own = peer_uid(&socket).is_ok_and(|uid| uid == own || uid == 0);
                let channel = || Accepted::Peer(Transport::Unix(Channel::new(socket)));
                Some(if is_own { channel() } else { Accepted::Refused })
            }
            Self::Tcp(listener, key, known) => {
                let (socket, from) = listener.accept().ok()?;
                // A dual-stack socket reports IPv4 peers as IPv4-mapped IPv6 addresses.
                let from = from.ip().to_canonical();
                if !known.contains(&from) {
                    return Some(Accepted::UnknownAddress(from));
                }
                let stream = SealedStream::new(socket, key.clone(), Role::Responder);
                Some(stream.map_or(Accepted::Refused, |stream| Accepted::Peer(Transport::Tcp(Box::new(stream)))))
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener, ..) => listener.as_fd(),
        }
    }
}

/// A received packet with its descriptors.
pub type ReceivedPacket = (Vec<u8>, Vec<OwnedFd>);

/// A connection to another node.
#[derive(Debug)]
pub enum Transport {
    /// A node on this machine.
    Unix(Channel),
    /// A node on another machine.
    Tcp(Box<SealedStream>),
}

impl Transport {
    /// Starts to connect; `None` when there is no listener.
    pub fn connect(address: &ControlAddress) -> Option<Self> {
        match address {
            ControlAddress::Unix(path) => Channel::connect(path).ok().map(Self::Unix),
            ControlAddress::Tcp(address) => SealedStream::connect(address).ok().map(Box::new).map(Self::Tcp),
        }
    }

    /// Sends a packet with descriptors, which only unix sockets carry. Returns `false` when the packet has to be sent
    /// again once the socket is writable.
    ///
    /// # Errors
    /// Returns an error when the connection is closed.
    pub fn send(&mut self, packet: &[u8], descriptors: &[OwnedFd]) -> Result<bool, ControlError> {
        match self {
            Self::Unix(channel) => {
                let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
                match channel.send_packet(packet, &descriptors) {
                    Ok(()) => Ok(true),
                    Err(ChannelError::System { error, .. }) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
                    Err(error) => Err(disconnected(error)),
                }
            }
            Self::Tcp(stream) => {
                assert!(descriptors.is_empty(), "no descriptor leaves the machine");
                stream.send(packet).map_err(disconnected)
            }
        }
    }

    /// Receives the next packet with its descriptors, if one has arrived.
    ///
    /// # Errors
    /// Returns an error when the connection is closed, or delivers an invalid packet.
    pub fn receive(&mut self) -> Result<Option<ReceivedPacket>, ControlError> {
        match self {
            Self::Unix(channel) => match channel.receive_packet() {
                Ok(Received::Message(packet, descriptors)) => Ok(Some((packet, descriptors))),
                Ok(Received::Nothing) => Ok(None),
                Ok(Received::Ended) => Err(ControlError::Disconnected(String::new())),
                Err(error) => Err(disconnected(error)),
            },
            Self::Tcp(stream) => Ok(stream.receive()?.map(|packet| (packet, Vec::new()))),
        }
    }

    /// Sends buffered bytes of accepted packets.
    ///
    /// # Errors
    /// Returns an error when the connection is closed.
    pub fn flush(&mut self) -> Result<(), ControlError> {
        match self {
            Self::Unix(_) => Ok(()),
            Self::Tcp(stream) => stream.flush().map(|_| ()).map_err(disconnected),
        }
    }

    /// Returns the process ID of a peer on this machine.
    pub fn peer_pid(&self) -> Option<u32> {
        match self {
            Self::Unix(channel) => {
                let process = sockopt::socket_peercred(channel).ok()?.pid;
                Some(process.as_raw_nonzero().get().unsigned_abs())
            }
            Self::Tcp(_) => None,
        }
    }

    /// Returns the address of a peer on another machine.
    pub fn peer_ip(&self) -> Option<IpAddr> {
        match self {
            Self::Unix(_) => None,
            Self::Tcp(stream) => stream.socket.peer_addr().ok().map(|address| address.ip().to_canonical()),
        }
    }

    /// Returns whether bytes of accepted packets wait to be sent.
    pub fn has_unsent(&self) -> bool {
        matches!(self, Self::Tcp(stream) if !stream.send_buffer.is_empty())
    }
}

impl AsFd for Transport {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(channel) => channel.as_fd(),
            Self::Tcp(stream) => stream.socket.as_fd(),
        }
    }
}

fn disconnected(error: impl std::fmt::Display) -> ControlError {
    ControlError::Disconnected(format!(" ({error})"))
}

/// Length-prefixed, sealed packets on TCP. The first frame in each direction has the nonce.
#[derive(Debug)]
pub struct SealedStream {
    socket: TcpStream,
    seal: Seal,
    /// Packets that wait for the peer's nonce.
    unsealed: Vec<Vec<u8>>,
    send_buffer: Vec<u8>,
    receive_buffer: Vec<u8>,
}

impl SealedStream {
    fn new(socket: TcpStream, key: Key, role: Role) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        let seal = Seal::new(key, role, random_bytes()?);
        let mut stream =
            Self { socket, seal, unsealed: Vec::new(), send_buffer: Vec::new(), receive_buffer: Vec::new() };
        stream.push(&stream.seal.nonce_message());
        Ok(stream)
    }

    fn connect(address: &TcpAddress) -> io::Result<Self> {
        let family = if address.address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = socket_with(family, SocketType::STREAM, FLAGS, None)?;
        sockopt::set_tcp_nodelay(&socket, true)?;
        bind(&socket, &SocketAddr::new(address.local_ip, 0))?;
        match connect(&socket, &address.address) {
            // The socket becomes writable once it is connected.
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        Self::new(TcpStream::from(socket), address.key.clone(), Role::Initiator)
    }

    fn push(&mut self, frame: &[u8]) {
        self.send_buffer.extend((frame.len() as u32).to_le_bytes());
        self.send_buffer.extend(frame);
    }

    fn send(&mut self, packet: &[u8]) -> io::Result<bool> {
        if !self.flush()? {
            return Ok(false);
        }
        match self.seal.seal(packet) {
            Some(sealed) => self.push(&sealed),
            None if self.unsealed.len() < UNSEALED_MAX => self.unsealed.push(packet.to_vec()),
            None => return Ok(false),
        }
        self.flush()?;
        Ok(true)
    }

    /// Processes the peer's nonce, and seals the packets that wait for it.
    fn receive_nonce(&mut self, message: &[u8]) -> Result<(), ControlError> {
        self.seal.receive_nonce(message)?;
        for packet in std::mem::take(&mut self.unsealed) {
            if let Some(sealed) = self.seal.seal(&packet) {
                self.push(&sealed);
            }
        }
        self.flush().map(drop).map_err(disconnected)
    }

    /// Writes buffered bytes. Returns whether the buffer is empty.
    fn flush(&mut self) -> io::Result<bool> {
        while !self.send_buffer.is_empty() {
            match self.socket.write(&self.send_buffer) {
                Ok(bytes) => _ = self.send_buffer.drain(..bytes),
                // The connection is not established yet.
                Err(error) if [io::ErrorKind::WouldBlock, io::ErrorKind::NotConnected].contains(&error.kind()) => {
                    return Ok(false);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn receive(&mut self) -> Result<Option<Vec<u8>>, ControlError> {
        loop {
            if let Some(frame) = self.next_frame()? {
                if self.seal.is_keyed() {
                    return self.seal.open(&frame).map(|packet| Some(packet.to_vec()));
                }
                self.receive_nonce(&frame)?;
                continue;
            }
            let had = self.receive_buffer.len();
            self.receive_buffer.resize(had + READ_BYTES, 0);
            let read = self.socket.read(&mut self.receive_buffer[had..]);
            self.receive_buffer.truncate(had + read.as_ref().copied().unwrap_or(0));
            match read {
                Ok(0) => return Err(ControlError::Disconnected(String::new())),
                Ok(_) => {}
                Err(error) if [io::ErrorKind::WouldBlock, io::ErrorKind::NotConnected].contains(&error.kind()) => {
                    return Ok(None);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(disconnected(error)),
            }
        }
    }

    /// Removes the first complete frame from the receive buffer.
    fn next_frame(&mut self) -> Result<Option<Vec<u8>>, ControlError> {
        let Some((length, rest)) = self.receive_buffer.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let bytes = u32::from_le_bytes(*length) as usize;
        if !self.seal.is_peer_authenticated() && bytes > UNAUTHENTICATED_BYTES_MAX {
            return Err(ControlError::Unauthenticated);
        }
        if bytes > MESSAGE_BYTES_MAX + TAG_BYTES {
            return Err(ControlError::Malformed(format!("a message of {bytes} bytes")));
        }
        if rest.len() < bytes {
            return Ok(None);
        }
        let packet = rest[..bytes].to_vec();
        self.receive_buffer.drain(..LENGTH_BYTES + bytes);
        Ok(Some(packet))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn wait(transport: &Transport, flags: PollFlags) {
        let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
        assert_eq!(poll(&mut [PollFd::new(transport, flags)], Some(&limit)), Ok(1));
    }

    fn received(transport: &mut Transport) -> Result<ReceivedPacket, ControlError> {
        loop {
            if let Some(found) = transport.receive()? {
                return Ok(found);
            }
            wait(transport, PollFlags::IN);
        }
    }

    const HOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn key(folder: &tempfile::TempDir, name: &str) -> Key {
        let path = folder.path().join(name);
        if !path.exists() {
            Key::create(&path).unwrap();
        }
        Key::read(&path).unwrap()
    }

    /// A control address of each kind.
    fn addresses(folder: &tempfile::TempDir) -> [ControlAddress; 2] {
        let address = SocketAddr::new(HOST, 0);
        [
            ControlAddress::Unix(folder.path().join("s")),
            ControlAddress::Tcp(TcpAddress { address, local_ip: HOST, key: key(folder, "key") }),
        ]
    }

    fn accepted(listener: &Listener) -> Accepted {
        let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
        assert_eq!(poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&limit)), Ok(1));
        listener.accept().unwrap()
    }

    fn pair(address: &ControlAddress) -> (Transport, Transport) {
        pair_with(address, None)
    }

    /// Returns both endpoints of a connection, the connecting one optionally with another key.
    fn pair_with(address: &ControlAddress, key: Option<Key>) -> (Transport, Transport) {
        let listener = Listener::bind(address, vec![HOST]).unwrap();
        let mut address = address.clone();
        if let (Listener::Tcp(listener, ..), ControlAddress::Tcp(tcp)) = (&listener, &mut address) {
            tcp.address = listener.local_addr().unwrap();
            tcp.key = key.unwrap_or_else(|| tcp.key.clone());
        }
        let one = Transport::connect(&address).unwrap();
        let Accepted::Peer(other) = accepted(&listener) else { panic!("no connection of a node") };
        (one, other)
    }

    /// Completes the handshake of a TCP connection.
    fn established(pair: (Transport, Transport)) -> (Transport, Transport) {
        let (mut one, mut other) = pair;
        let (to_one, to_other) = exchange(&mut one, &mut other);
        assert_eq!((to_one.unwrap().0, to_other.unwrap().0), (b"other".to_vec(), b"one".to_vec()));
        (one, other)
    }

    /// Sends one packet in each direction and polls until each endpoint has received a packet or an error.
    fn exchange(
        one: &mut Transport,
        other: &mut Transport,
    ) -> (Result<ReceivedPacket, ControlError>, Result<ReceivedPacket, ControlError>) {
        assert!(one.send(b"one", &[]).unwrap() && other.send(b"other", &[]).unwrap());
        let (mut to_one, mut to_other) = (None, None);
        loop {
            for (endpoint, result) in [(&mut *one, &mut to_one), (&mut *other, &mut to_other)] {
                if result.is_none() {
                    *result = endpoint.receive().transpose();
                }
            }
            match (to_one, to_other) {
                (Some(to_one), Some(to_other)) => return (to_one, to_other),
                still => (to_one, to_other) = still,
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn packets_keep_their_boundaries_and_a_close_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        for address in addresses(&folder) {
            let (mut one, mut other) = established(pair(&address));
            for bytes in [1, 70, 60_000] {
                while !one.send(&vec![bytes as u8; bytes], &[]).unwrap() {
                    wait(&one, PollFlags::OUT);
                }
            }
            one.flush().unwrap();
            for bytes in [1, 70, 60_000] {
                let (packet, _) = received(&mut other).unwrap();
                assert_eq!((packet.len(), packet[0]), (bytes, bytes as u8));
                one.flush().unwrap();
            }
            drop(one);
            assert!(matches!(received(&mut other), Err(ControlError::Disconnected(_))));
        }
    }

    #[test]
    fn a_peer_that_does_not_read_fills_the_socket_and_no_memory() {
        let folder = tempfile::tempdir().unwrap();
        for address in addresses(&folder) {
            let (mut one, mut other) = established(pair(&address));
            let mut sent = 0;
            while one.send(&[7; 50_000], &[]).unwrap() {
                sent += 1;
                assert!(sent < 10_000, "the kernel buffers 500 MB");
            }
            for _ in 0..sent {
                received(&mut other).unwrap();
                one.flush().unwrap();
            }
            assert!(one.send(&[8], &[]).unwrap());
        }
    }

    #[test]
    fn an_invalid_length_ends_the_connection() {
        let folder = tempfile::tempdir().unwrap();
        let [_, tcp] = addresses(&folder);
        let length = |bytes: u32, pair: (Transport, Transport)| {
            let (mut one, mut other) = pair;
            let Transport::Tcp(stream) = &mut one else { panic!("no TCP") };
            stream.socket.write_all(&bytes.to_le_bytes()).unwrap();
            received(&mut other).unwrap_err()
        };
        assert!(matches!(length(u32::MAX, established(pair(&tcp))), ControlError::Malformed(_)));
        // Before authentication the limit is much lower.
        let mut unauthenticated = pair(&tcp);
        unauthenticated.0.flush().unwrap();
        assert_eq!(length(UNAUTHENTICATED_BYTES_MAX as u32 + 1, unauthenticated), ControlError::Unauthenticated);
    }

    #[test]
    fn a_peer_with_another_key_is_refused_by_both_endpoints() {
        let folder = tempfile::tempdir().unwrap();
        let [_, tcp] = addresses(&folder);
        let (mut one, mut other) = pair_with(&tcp, Some(key(&folder, "another")));
        let (to_one, to_other) = exchange(&mut one, &mut other);
        assert_eq!([to_one, to_other].map(Result::unwrap_err), [ControlError::KeyMismatch, ControlError::KeyMismatch]);
    }

    /// A raw socket connected to a listening node.
    fn raw_peer(address: &ControlAddress) -> (TcpStream, Transport) {
        let (Transport::Tcp(one), mut other) = pair(address) else { panic!("no TCP") };
        one.socket.set_nonblocking(false).unwrap();
        other.flush().unwrap();
        (one.socket, other)
    }

    fn write_frame(mut socket: &TcpStream, frame: &[u8]) {
        socket.write_all(&(frame.len() as u32).to_le_bytes()).unwrap();
        socket.write_all(frame).unwrap();
    }

    fn read_frame(mut socket: &TcpStream) -> Vec<u8> {
        let mut length = [0; LENGTH_BYTES];
        socket.read_exact(&mut length).unwrap();
        let mut frame = vec![0; u32::from_le_bytes(length) as usize];
        socket.read_exact(&mut frame).unwrap();
        frame
    }

    #[test]
    fn unauthenticated_and_replayed_messages_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let [_, tcp] = addresses(&folder);
        // A hello of a release before authentication.
        let (socket, mut other) = raw_peer(&tcp);
        write_frame(&socket, &[0, 1, 7, 2, 9]);
        assert_eq!(received(&mut other).unwrap_err(), ControlError::Unauthenticated);
        // Messages of an authenticated node, and their replay on a new connection.
        let mut node = Seal::new(key(&folder, "key"), Role::Initiator, random_bytes().unwrap());
        let (socket, mut other) = raw_peer(&tcp);
        write_frame(&socket, &node.nonce_message());
        node.receive_nonce(&read_frame(&socket)).unwrap();
        let sealed = node.seal(b"hello").unwrap();
        write_frame(&socket, &sealed);
        assert_eq!(received(&mut other).unwrap().0, b"hello");
        let (socket, mut other) = raw_peer(&tcp);
        write_frame(&socket, &node.nonce_message());
        write_frame(&socket, &sealed);
        assert_eq!(received(&mut other).unwrap_err(), ControlError::KeyMismatch);
    }

    #[test]
    fn connections_from_unknown_addresses_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let [_, ControlAddress::Tcp(tcp)] = addresses(&folder) else { panic!("no TCP") };
        let elsewhere: IpAddr = "127.0.0.9".parse().unwrap();
        let listener = Listener::bind(&ControlAddress::Tcp(tcp.clone()), vec![HOST]).unwrap();
        let Listener::Tcp(socket, ..) = &listener else { panic!("no TCP") };
        let address = socket.local_addr().unwrap();
        let accept_from = |from: IpAddr| {
            let one = Transport::connect(&ControlAddress::Tcp(TcpAddress { address, local_ip: from, ..tcp.clone() }))
                .unwrap();
            (accepted(&listener), one).0
        };
        assert!(matches!(accept_from(elsewhere), Accepted::UnknownAddress(from) if from == elsewhere));
        assert!(matches!(accept_from(HOST), Accepted::Peer(_)));
    }
}
