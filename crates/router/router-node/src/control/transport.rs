//! Packets to another node: over a unix socket where both are on one machine, over TCP where not. Neither ever waits.
//! The kernel says whose the other end of a unix socket is; what goes over TCP is sealed.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use ::control::{Channel, ChannelError, Received, peer_uid};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, socket_with, sockopt,
};

use super::seal::{End, Key, Seal, TAG_BYTES, random};
use super::words::{ControlError, MESSAGE_BYTES_MAX};

/// Connections that the kernel keeps until they are accepted: all other nodes may come at once, and again.
const BACKLOG: i32 = 64;
/// Bytes before a message on TCP: its length, little-endian.
const LENGTH_BYTES: usize = 4;
/// Bytes of a message at most of who has not shown yet that it has the key: a hello, or a greeting.
const STRANGER_BYTES_MAX: usize = 256;
/// Messages that wait for the other end's hello: a greeting, and a good-bye.
const EARLY_MAX: usize = 2;
/// Bytes read from TCP at a time.
const READ_BYTES: usize = 64 << 10;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// Where a node is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A unix socket.
    Path(PathBuf),
    /// A TCP socket.
    Far(FarPlace),
}

/// Where a node of another machine is reached, and from where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FarPlace {
    /// Its address.
    pub address: SocketAddr,
    /// This node's own: who connects from elsewhere is none of the cluster's.
    pub from: IpAddr,
    /// The cluster's key.
    pub key: Key,
}

/// Where other nodes connect to.
#[derive(Debug)]
pub enum Listener {
    /// Nodes of this machine, and of the same user.
    Local(OwnedFd),
    /// Nodes of other machines, which have one of these addresses.
    Far(TcpListener, Key, Vec<IpAddr>),
}

/// Who has come.
#[derive(Debug)]
pub enum Visitor {
    /// Perhaps a node.
    Node(Transport),
    /// None, for it comes from there.
    Stranger(IpAddr),
    /// A process of another user, or one that was gone before it was looked at.
    Nobody,
}

impl Listener {
    /// Listens. Whoever calls holds the node's lock, so a socket that lies at a path is stale. Of other machines only
    /// those are heard that have an address of `known`.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn bind(place: &Place, known: Vec<IpAddr>) -> io::Result<Self> {
        match place {
            Place::Path(path) => Self::bind_path(path),
            Place::Far(FarPlace { address, key, .. }) => {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Ok(Self::Far(listener, key.clone(), known))
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

    /// Who has come, if anybody has.
    pub fn accept(&self) -> Option<Visitor> {
        match self {
            Self::Local(listener) => {
                let socket = accept_with(listener, FLAGS).ok()?;
                let own = rustix::process::geteuid().as_raw();
                let is_own = peer_uid(&socket).is_ok_and(|uid| uid == own || uid == 0);
                let channel = || Visitor::Node(Transport::Local(Channel::new(socket)));
                Some(if is_own { channel() } else { Visitor::Nobody })
            }
            Self::Far(listener, key, known) => {
                let (socket, from) = listener.accept().ok()?;
                // A socket of both families says who comes by IPv4 in words of IPv6.
                let from = from.ip().to_canonical();
                if !known.contains(&from) {
                    return Some(Visitor::Stranger(from));
                }
                let stream = Stream::new(socket, key.clone(), End::Accepting);
                Some(stream.map_or(Visitor::Nobody, |stream| Visitor::Node(Transport::Far(Box::new(stream)))))
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Local(listener) => listener.as_fd(),
            Self::Far(listener, ..) => listener.as_fd(),
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
    Far(Box<Stream>),
}

impl Transport {
    /// Connects, or begins to; `None` where nobody listens.
    pub fn connect(place: &Place) -> Option<Self> {
        match place {
            Place::Path(path) => Channel::connect(path).ok().map(Self::Local),
            Place::Far(place) => Stream::connect(place).ok().map(Box::new).map(Self::Far),
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

    /// The process at the other end, where it is of this machine and the kernel tells.
    pub fn process(&self) -> Option<u32> {
        match self {
            Self::Local(channel) => {
                let process = sockopt::socket_peercred(channel).ok()?.pid;
                Some(process.as_raw_nonzero().get().unsigned_abs())
            }
            Self::Far(_) => None,
        }
    }

    /// The address at the other end, where it is of another machine.
    pub fn from(&self) -> Option<IpAddr> {
        match self {
            Self::Local(_) => None,
            Self::Far(stream) => stream.socket.peer_addr().ok().map(|address| address.ip().to_canonical()),
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

/// Packets on TCP: their lengths before them, and sealed. The first one each way is a hello.
#[derive(Debug)]
pub struct Stream {
    socket: TcpStream,
    seal: Seal,
    /// Packets that cannot be sealed before the other end's hello.
    early: Vec<Vec<u8>>,
    out: Vec<u8>,
    came: Vec<u8>,
}

impl Stream {
    fn new(socket: TcpStream, key: Key, end: End) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        let seal = Seal::new(key, end, random()?);
        let mut stream = Self { socket, seal, early: Vec::new(), out: Vec::new(), came: Vec::new() };
        stream.push(&stream.seal.hello());
        Ok(stream)
    }

    fn connect(place: &FarPlace) -> io::Result<Self> {
        let family = if place.address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = socket_with(family, SocketType::STREAM, FLAGS, None)?;
        sockopt::set_tcp_nodelay(&socket, true)?;
        bind(&socket, &SocketAddr::new(place.from, 0))?;
        match connect(&socket, &place.address) {
            // Writable once it is connected.
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        Self::new(TcpStream::from(socket), place.key.clone(), End::Connecting)
    }

    fn push(&mut self, frame: &[u8]) {
        self.out.extend((frame.len() as u32).to_le_bytes());
        self.out.extend(frame);
    }

    fn send(&mut self, packet: &[u8]) -> io::Result<bool> {
        if !self.flush()? {
            return Ok(false);
        }
        match self.seal.seal(packet) {
            Some(sealed) => self.push(&sealed),
            None if self.early.len() < EARLY_MAX => self.early.push(packet.to_vec()),
            None => return Ok(false),
        }
        self.flush()?;
        Ok(true)
    }

    /// Takes the other end's hello, and seals what has waited for it.
    fn begin(&mut self, hello: &[u8]) -> Result<(), ControlError> {
        self.seal.begin(hello)?;
        for packet in std::mem::take(&mut self.early) {
            if let Some(sealed) = self.seal.seal(&packet) {
                self.push(&sealed);
            }
        }
        self.flush().map(drop).map_err(gone)
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
            if let Some(frame) = self.whole()? {
                if self.seal.is_begun() {
                    return self.seal.open(&frame).map(|packet| Some(packet.to_vec()));
                }
                self.begin(&frame)?;
                continue;
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
        if !self.seal.is_known() && bytes > STRANGER_BYTES_MAX {
            return Err(ControlError::Unsealed);
        }
        if bytes > MESSAGE_BYTES_MAX + TAG_BYTES {
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

    const HOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn key(folder: &tempfile::TempDir, name: &str) -> Key {
        let path = folder.path().join(name);
        if !path.exists() {
            Key::create(&path).unwrap();
        }
        Key::read(&path).unwrap()
    }

    /// Where two nodes of one machine meet, and two of several.
    fn places(folder: &tempfile::TempDir) -> [Place; 2] {
        let address = SocketAddr::new(HOST, 0);
        [Place::Path(folder.path().join("s")), Place::Far(FarPlace { address, from: HOST, key: key(folder, "key") })]
    }

    fn accepted(listener: &Listener) -> Visitor {
        let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
        assert_eq!(poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&limit)), Ok(1));
        listener.accept().unwrap()
    }

    fn pair(place: &Place) -> (Transport, Transport) {
        pair_with(place, None)
    }

    /// Two ends, of which the connecting one may have another key.
    fn pair_with(place: &Place, key: Option<Key>) -> (Transport, Transport) {
        let listener = Listener::bind(place, vec![HOST]).unwrap();
        let mut place = place.clone();
        if let (Listener::Far(listener, ..), Place::Far(far)) = (&listener, &mut place) {
            far.address = listener.local_addr().unwrap();
            far.key = key.unwrap_or_else(|| far.key.clone());
        }
        let one = Transport::connect(&place).unwrap();
        let Visitor::Node(other) = accepted(&listener) else { panic!("a node has come") };
        (one, other)
    }

    /// Both ends of a connection over TCP have said their hellos.
    fn begun(pair: (Transport, Transport)) -> (Transport, Transport) {
        let (mut one, mut other) = pair;
        let (to_one, to_other) = greet(&mut one, &mut other);
        assert_eq!((to_one.unwrap().0, to_other.unwrap().0), (b"other".to_vec(), b"one".to_vec()));
        (one, other)
    }

    /// Both say something, and look until something has come to them, or what keeps it from that.
    fn greet(one: &mut Transport, other: &mut Transport) -> (Result<Came, ControlError>, Result<Came, ControlError>) {
        assert!(one.send(b"one", &[]).unwrap() && other.send(b"other", &[]).unwrap());
        let (mut to_one, mut to_other) = (None, None);
        loop {
            for (end, came) in [(&mut *one, &mut to_one), (&mut *other, &mut to_other)] {
                if came.is_none() {
                    *came = end.receive().transpose();
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
    fn packets_keep_their_bounds_whatever_carries_them_and_the_end_is_told() {
        let folder = tempfile::tempdir().unwrap();
        for place in places(&folder) {
            let (mut one, mut other) = begun(pair(&place));
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
        for place in places(&folder) {
            let (mut one, mut other) = begun(pair(&place));
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
        let folder = tempfile::tempdir().unwrap();
        let [_, far] = places(&folder);
        let length = |bytes: u32, pair: (Transport, Transport)| {
            let (mut one, mut other) = pair;
            let Transport::Far(stream) = &mut one else { panic!("no TCP") };
            stream.socket.write_all(&bytes.to_le_bytes()).unwrap();
            received(&mut other).unwrap_err()
        };
        assert!(matches!(length(u32::MAX, begun(pair(&far))), ControlError::Senseless(_)));
        // Of a stranger much less is taken.
        let mut strange = pair(&far);
        strange.0.flush().unwrap();
        assert_eq!(length(STRANGER_BYTES_MAX as u32 + 1, strange), ControlError::Unsealed);
    }

    #[test]
    fn who_has_another_key_hears_nothing_and_both_say_why() {
        let folder = tempfile::tempdir().unwrap();
        let [_, far] = places(&folder);
        let (mut one, mut other) = pair_with(&far, Some(key(&folder, "another")));
        let (to_one, to_other) = greet(&mut one, &mut other);
        assert_eq!([to_one, to_other].map(Result::unwrap_err), [ControlError::OtherKey, ControlError::OtherKey]);
    }

    /// A socket of somebody who says what he likes to an end that listens.
    fn stranger(place: &Place) -> (TcpStream, Transport) {
        let (Transport::Far(one), mut other) = pair(place) else { panic!("no TCP") };
        one.socket.set_nonblocking(false).unwrap();
        other.flush().unwrap();
        (one.socket, other)
    }

    fn say(mut socket: &TcpStream, frame: &[u8]) {
        socket.write_all(&(frame.len() as u32).to_le_bytes()).unwrap();
        socket.write_all(frame).unwrap();
    }

    fn hear(mut socket: &TcpStream) -> Vec<u8> {
        let mut length = [0; LENGTH_BYTES];
        socket.read_exact(&mut length).unwrap();
        let mut frame = vec![0; u32::from_le_bytes(length) as usize];
        socket.read_exact(&mut frame).unwrap();
        frame
    }

    #[test]
    fn who_seals_nothing_is_refused_and_so_is_a_conversation_that_was_overheard() {
        let folder = tempfile::tempdir().unwrap();
        let [_, far] = places(&folder);
        // A greeting as it was before there were keys.
        let (socket, mut other) = stranger(&far);
        say(&socket, &[0, 1, 7, 2, 9]);
        assert_eq!(received(&mut other).unwrap_err(), ControlError::Unsealed);
        // What a node has said, and what somebody says once more who has heard it.
        let mut node = Seal::new(key(&folder, "key"), End::Connecting, random().unwrap());
        let (socket, mut other) = stranger(&far);
        say(&socket, &node.hello());
        node.begin(&hear(&socket)).unwrap();
        let sealed = node.seal(b"greeting").unwrap();
        say(&socket, &sealed);
        assert_eq!(received(&mut other).unwrap().0, b"greeting");
        let (socket, mut other) = stranger(&far);
        say(&socket, &node.hello());
        say(&socket, &sealed);
        assert_eq!(received(&mut other).unwrap_err(), ControlError::OtherKey);
    }

    #[test]
    fn who_comes_from_elsewhere_is_turned_away() {
        let folder = tempfile::tempdir().unwrap();
        let [_, Place::Far(far)] = places(&folder) else { panic!("no TCP") };
        let elsewhere: IpAddr = "127.0.0.9".parse().unwrap();
        let listener = Listener::bind(&Place::Far(far.clone()), vec![HOST]).unwrap();
        let Listener::Far(socket, ..) = &listener else { panic!("no TCP") };
        let address = socket.local_addr().unwrap();
        let come = |from: IpAddr| {
            let one = Transport::connect(&Place::Far(FarPlace { address, from, ..far.clone() })).unwrap();
            (accepted(&listener), one).0
        };
        assert!(matches!(come(elsewhere), Visitor::Stranger(from) if from == elsewhere));
        assert!(matches!(come(HOST), Visitor::Node(_)));
    }
}
