//! Packets to another node: over a unix socket where both are on one machine, over TCP where not. Neither ever waits.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use ::control::{Channel, ChannelError, Received, peer_uid};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, socket_with, sockopt,
};

use super::words::{ControlError, MESSAGE_BYTES_MAX};

/// Connections that the kernel keeps until they are accepted: all other nodes may come at once, and again.
const BACKLOG: i32 = 64;
/// Bytes before a message on TCP: its length, little-endian.
const LENGTH_BYTES: usize = 4;
/// Bytes read from TCP at a time.
const READ_BYTES: usize = 64 << 10;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// Where a node is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A unix socket.
    Path(PathBuf),
    /// A TCP socket.
    Address(SocketAddr),
}

/// Where other nodes connect to.
#[derive(Debug)]
pub enum Listener {
    /// Nodes of this machine, and of the same user.
    Local(OwnedFd),
    /// Nodes of other machines.
    Far(TcpListener),
}

impl Listener {
    /// Listens. Whoever calls holds the node's lock, so a socket that lies at a path is stale.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn bind(place: &Place) -> io::Result<Self> {
        match place {
            Place::Path(path) => Self::bind_path(path),
            Place::Address(address) => {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Ok(Self::Far(listener))
            }
        }
    }

    fn bind_path(path: &Path) -> io::Result<Self> {
        match rustix::fs::unlink(path) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
        bind(&listener, &SocketAddrUnix::new(path)?)?;
        listen(&listener, BACKLOG)?;
        Ok(Self::Local(listener))
    }

    /// Who has come, if anybody has. Strangers are turned away.
    pub fn accept(&self) -> Option<Transport> {
        match self {
            Self::Local(listener) => {
                let socket = accept_with(listener, FLAGS).ok()?;
                let uid = peer_uid(&socket).ok()?;
                let own = rustix::process::geteuid().as_raw();
                (uid == own || uid == 0).then(|| Transport::Local(Channel::new(socket)))
            }
            Self::Far(listener) => Stream::new(listener.accept().ok()?.0).ok().map(Transport::Far),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Local(listener) => listener.as_fd(),
            Self::Far(listener) => listener.as_fd(),
        }
    }
}

/// A packet that has come, and the descriptors that came with it.
pub type Came = (Vec<u8>, Vec<OwnedFd>);

/// A connection to another node.
#[derive(Debug)]
pub enum Transport {
    /// On one machine.
    Local(Channel),
    /// To another machine.
    Far(Stream),
}

impl Transport {
    /// Connects, or begins to; `None` where nobody listens.
    pub fn connect(place: &Place) -> Option<Self> {
        match place {
            Place::Path(path) => Channel::connect(path).ok().map(Self::Local),
            Place::Address(address) => Stream::connect(*address).ok().map(Self::Far),
        }
    }

    /// Sends a packet with descriptors, which go over unix sockets only. `false`: it has to be tried again once the
    /// socket can be written.
    ///
    /// # Errors
    /// When the connection is gone.
    pub fn send(&mut self, packet: &[u8], descriptors: &[OwnedFd]) -> Result<bool, ControlError> {
        match self {
            Self::Local(channel) => {
                let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
                match channel.send_packet(packet, &descriptors) {
                    Ok(()) => Ok(true),
                    Err(ChannelError::System { error, .. }) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
                    Err(error) => Err(gone(error)),
                }
            }
            Self::Far(stream) => {
                assert!(descriptors.is_empty(), "no descriptor leaves the machine");
                stream.send(packet).map_err(gone)
            }
        }
    }

    /// The next packet with its descriptors, if it has come.
    ///
    /// # Errors
    /// When the connection is gone, or brings what is no packet.
    pub fn receive(&mut self) -> Result<Option<Came>, ControlError> {
        match self {
            Self::Local(channel) => match channel.receive_packet() {
                Ok(Received::Message(packet, descriptors)) => Ok(Some((packet, descriptors))),
                Ok(Received::Nothing) => Ok(None),
                Ok(Received::Ended) => Err(ControlError::Gone(String::new())),
                Err(error) => Err(gone(error)),
            },
            Self::Far(stream) => Ok(stream.receive()?.map(|packet| (packet, Vec::new()))),
        }
    }

    /// Sends what is left of packets that were taken.
    ///
    /// # Errors
    /// When the connection is gone.
    pub fn flush(&mut self) -> Result<(), ControlError> {
        match self {
            Self::Local(_) => Ok(()),
            Self::Far(stream) => stream.flush().map(|_| ()).map_err(gone),
        }
    }

    /// Whether bytes of packets that were taken wait to be sent.
    pub fn has_left(&self) -> bool {
        matches!(self, Self::Far(stream) if !stream.out.is_empty())
    }
}

impl AsFd for Transport {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Local(channel) => channel.as_fd(),
            Self::Far(stream) => stream.socket.as_fd(),
        }
    }
}

fn gone(error: impl std::fmt::Display) -> ControlError {
    ControlError::Gone(format!(" ({error})"))
}

/// Packets with their lengths before them on TCP.
#[derive(Debug)]
pub struct Stream {
    socket: TcpStream,
    out: Vec<u8>,
    came: Vec<u8>,
}

impl Stream {
    fn new(socket: TcpStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        Ok(Self { socket, out: Vec::new(), came: Vec::new() })
    }

    fn connect(address: SocketAddr) -> io::Result<Self> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = socket_with(family, SocketType::STREAM, FLAGS, None)?;
        sockopt::set_tcp_nodelay(&socket, true)?;
        match connect(&socket, &address) {
            // Writable once it is connected.
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        Self::new(TcpStream::from(socket))
    }

    fn send(&mut self, packet: &[u8]) -> io::Result<bool> {
        if !self.flush()? {
            return Ok(false);
        }
        self.out.extend((packet.len() as u32).to_le_bytes());
        self.out.extend(packet);
        self.flush()?;
        Ok(true)
    }

    /// Whether nothing is left.
    fn flush(&mut self) -> io::Result<bool> {
        while !self.out.is_empty() {
            match self.socket.write(&self.out) {
                Ok(bytes) => _ = self.out.drain(..bytes),
                // A connection that is still being made.
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
            if let Some(packet) = self.whole()? {
                return Ok(Some(packet));
            }
            let had = self.came.len();
            self.came.resize(had + READ_BYTES, 0);
            let read = self.socket.read(&mut self.came[had..]);
            self.came.truncate(had + read.as_ref().copied().unwrap_or(0));
            match read {
                Ok(0) => return Err(ControlError::Gone(String::new())),
                Ok(_) => {}
                Err(error) if [io::ErrorKind::WouldBlock, io::ErrorKind::NotConnected].contains(&error.kind()) => {
                    return Ok(None);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(gone(error)),
            }
        }
    }

    /// The first packet of what has come, if all of it is there.
    fn whole(&mut self) -> Result<Option<Vec<u8>>, ControlError> {
        let Some((length, rest)) = self.came.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let bytes = u32::from_le_bytes(*length) as usize;
        if bytes > MESSAGE_BYTES_MAX {
            return Err(ControlError::Senseless(format!("a message of {bytes} bytes")));
        }
        if rest.len() < bytes {
            return Ok(None);
        }
        let packet = rest[..bytes].to_vec();
        self.came.drain(..LENGTH_BYTES + bytes);
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

    fn received(transport: &mut Transport) -> Result<Came, ControlError> {
        loop {
            if let Some(found) = transport.receive()? {
                return Ok(found);
            }
            wait(transport, PollFlags::IN);
        }
    }

    fn pair(place: &Place) -> (Transport, Transport) {
        let listener = Listener::bind(place).unwrap();
        let place = match &listener {
            Listener::Local(_) => place.clone(),
            Listener::Far(listener) => Place::Address(listener.local_addr().unwrap()),
        };
        let one = Transport::connect(&place).unwrap();
        let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
        assert_eq!(poll(&mut [PollFd::new(&listener, PollFlags::IN)], Some(&limit)), Ok(1));
        (one, listener.accept().unwrap())
    }

    #[test]
    fn packets_keep_their_bounds_whatever_carries_them_and_the_end_is_told() {
        let folder = tempfile::tempdir().unwrap();
        for place in [Place::Path(folder.path().join("s")), Place::Address("127.0.0.1:0".parse().unwrap())] {
            let (mut one, mut other) = pair(&place);
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
            assert!(matches!(received(&mut other), Err(ControlError::Gone(_))));
        }
    }

    #[test]
    fn who_does_not_read_fills_the_socket_and_no_memory() {
        let folder = tempfile::tempdir().unwrap();
        for place in [Place::Path(folder.path().join("s")), Place::Address("127.0.0.1:0".parse().unwrap())] {
            let (mut one, mut other) = pair(&place);
            let mut sent = 0;
            while one.send(&[7; 50_000], &[]).unwrap() {
                sent += 1;
                assert!(sent < 10_000, "the kernel keeps 500 MB");
            }
            for _ in 0..sent {
                received(&mut other).unwrap();
                one.flush().unwrap();
            }
            assert!(one.send(&[8], &[]).unwrap());
        }
    }

    #[test]
    fn a_length_that_no_message_has_ends_the_connection() {
        let (mut one, mut other) = pair(&Place::Address("127.0.0.1:0".parse().unwrap()));
        let Transport::Far(stream) = &mut one else { panic!("no TCP") };
        stream.socket.write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert!(matches!(received(&mut other), Err(ControlError::Senseless(_))));
    }
}
