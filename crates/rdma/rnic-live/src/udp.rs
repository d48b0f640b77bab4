//! Packet I/O over UDP: RoCEv2 packets, or those of its selective extension.
//!
//! Datagrams are sent with the *don't fragment* flag and as ECN-capable, from a socket that is bound to one address and
//! not connected. For such a socket the kernel writes an IPv4 identification of 0, which the packet's checksum covers.

use std::collections::HashMap;
use std::io::{ErrorKind, IoSliceMut};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use quinn_udp::{EcnCodepoint, RecvMeta, Transmit, UdpSocketState};
use rnic::verbs::NicAddress;
use rnic::wire::{Encapsulation, IpAddresses, PACKET_BYTES_MAX};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::packet_io::{PacketIo, PacketIoError, ReceivedPacket};

/// Size of a receive buffer, which holds datagrams of one sender coalesced by the kernel (GRO).
const RECEIVE_BYTES: usize = 65_536;
/// Receive buffers filled by one system call. More would make one that finds a single datagram slower; a second one
/// shows that there are no more, and streams are coalesced.
const RECEIVES: usize = 2;
/// Most bytes sent to one peer by one system call: a datagram's length has 16 bits and includes the IP and UDP headers.
const SEND_BYTES_MAX: usize = 65_000;
/// Size requested for the socket's kernel buffers, which the kernel may reduce.
const SOCKET_BYTES: usize = 4 << 20;
/// Most datagrams sent by one system call where the kernel segments them (GSO).
const SEGMENTS_MAX: usize = 60;

/// A UDP socket and its peers.
pub struct UdpIo {
    socket: UdpSocket,
    state: UdpSocketState,
    local: SocketAddr,
    peers: Vec<SocketAddr>,
    addresses: HashMap<SocketAddr, NicAddress>,
    inbox: Inbox,
    outbox: Outbox,
    segments_max: usize,
    expects_nics: bool,
    rejected: u64,
    send_failures: u64,
}

struct Inbox {
    buffers: [Box<[u8]>; RECEIVES],
    metas: [RecvMeta; RECEIVES],
    filled: usize,
    /// The buffer of the next datagram, and its first byte there.
    buffer: usize,
    at: usize,
    /// Whether the last call left buffers empty, so that another call would find nothing.
    is_drained: bool,
}

impl Inbox {
    fn new() -> Self {
        Self {
            buffers: std::array::from_fn(|_| vec![0; RECEIVE_BYTES].into_boxed_slice()),
            metas: [RecvMeta::default(); RECEIVES],
            filled: 0,
            buffer: 0,
            at: 0,
            is_drained: false,
        }
    }

    /// Returns the buffer and the range of the next datagram.
    fn next(&mut self) -> Option<(usize, Range<usize>)> {
        while self.buffer < self.filled {
            let RecvMeta { len, stride, .. } = self.metas[self.buffer];
            if self.at < len {
                let range = self.at..len.min(self.at + stride.max(1));
                self.at = range.end;
                return Some((self.buffer, range));
            }
            (self.buffer, self.at) = (self.buffer + 1, 0);
        }
        None
    }

    fn filled(&mut self, count: usize) {
        (self.filled, self.buffer, self.at) = (count, 0, 0);
        self.is_drained = count < RECEIVES;
    }
}

/// Packets to one peer, all but the last of the same length, to be sent by one system call.
#[derive(Default)]
struct Outbox {
    to: Option<NicAddress>,
    bytes: Vec<u8>,
    segment_bytes: usize,
    segments: usize,
    /// Whether the last packet was shorter, so that no packet can follow.
    is_closed: bool,
}

impl Outbox {
    fn has_room(&self, to: NicAddress, bytes: usize, segments_max: usize) -> bool {
        self.to.is_none()
            || self.to == Some(to)
                && !self.is_closed
                && bytes <= self.segment_bytes
                && self.segments < segments_max
                && self.bytes.len() + bytes <= SEND_BYTES_MAX
    }

    fn push(&mut self, to: NicAddress, packet: &[u8]) {
        if self.to.is_none() {
            (self.to, self.segment_bytes) = (Some(to), packet.len());
        }
        self.is_closed = packet.len() < self.segment_bytes;
        self.bytes.extend_from_slice(packet);
        self.segments += 1;
    }

    fn clear(&mut self) {
        self.bytes.clear();
        (self.to, self.segments, self.is_closed) = (None, 0, false);
    }
}

fn system_error(call: &str, at: SocketAddr, remedy: &'static str) -> impl Fn(std::io::Error) -> PacketIoError {
    let call = format!("{call} at {at}");
    move |error| PacketIoError::System { call: call.clone(), error, remedy }
}

impl UdpIo {
    /// Binds a new socket to this address; with port 0 the kernel chooses the port.
    ///
    /// # Errors
    /// When the address is not a unicast address of this machine or is in use.
    pub fn bind(address: SocketAddr) -> Result<Self, PacketIoError> {
        if address.ip().is_unspecified() || address.ip().is_multicast() {
            let what = "is not a unicast address";
            let remedy = "give the address that peers send to, because their packets' checksums cover it";
            return Err(PacketIoError::Address { address: address.to_string(), what, remedy });
        }
        let error = |call| system_error(call, address, "choose a free port and an address of this machine");
        let socket = UdpSocket::bind(address).map_err(error("bind"))?;
        let local = socket.local_addr().map_err(error("getsockname"))?;
        let state = UdpSocketState::new((&socket).into()).map_err(error("setsockopt"))?;
        // A failure is ignored: smaller buffers only cause more losses, which are recovered.
        let _ = state.set_recv_buffer_size((&socket).into(), SOCKET_BYTES);
        let _ = state.set_send_buffer_size((&socket).into(), SOCKET_BYTES);
        Ok(Self {
            socket,
            state,
            local,
            peers: Vec::new(),
            addresses: HashMap::new(),
            inbox: Inbox::new(),
            outbox: Outbox::default(),
            segments_max: SEGMENTS_MAX,
            expects_nics: false,
            rejected: 0,
            send_failures: 0,
        })
    }

    /// Returns the address of this socket.
    pub fn local(&self) -> SocketAddr {
        self.local
    }

    /// Adds a peer and returns its number; a peer added again keeps its number.
    ///
    /// # Errors
    /// When its address family differs from this socket's.
    pub fn add_peer(&mut self, peer: SocketAddr) -> Result<NicAddress, PacketIoError> {
        if let Some(known) = self.addresses.get(&self.peer_key(peer)) {
            return Ok(*known);
        }
        if peer.is_ipv4() != self.local.is_ipv4() {
            let (what, remedy) = ("has another family than this socket", "use IPv4 with IPv4, IPv6 with IPv6");
            return Err(PacketIoError::Address { address: peer.to_string(), what, remedy });
        }
        let address = NicAddress(self.peers.len() as u32);
        self.peers.push(peer);
        self.addresses.insert(self.peer_key(peer), address);
        Ok(address)
    }

    /// Declares that the peers are NICs or Linux' `rdma_rxe` rather than sockets of this type.
    ///
    /// Such peers send from ports of their choice, so that a sender is identified by its IP address alone. They
    /// increment the IPv4 identification, which sockets do not report. And they verify the identification of received
    /// datagrams, so that packets are sent one by one: the kernel or NIC that segments a batch would increment it.
    ///
    /// # Panics
    /// If there are peers already.
    pub fn expect_nics(&mut self) {
        assert!(self.peers.is_empty(), "the kind of peers is set before any is added");
        (self.expects_nics, self.segments_max) = (true, 1);
    }

    /// Returns the key by which a peer with this address is looked up.
    fn peer_key(&self, address: SocketAddr) -> SocketAddr {
        if self.expects_nics { SocketAddr::new(address.ip(), 0) } else { address }
    }

    /// Returns the descriptor that becomes readable when a datagram arrives.
    pub fn wait_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Returns whether no datagram is buffered here, received or unsent: [`UdpIo::wait_fd`] would not become readable
    /// for those.
    pub fn is_idle(&self) -> bool {
        self.inbox.buffer >= self.inbox.filled && self.outbox.to.is_none()
    }

    /// Returns the number of datagrams that the kernel refused to send. The transport recovers their packets.
    pub fn send_failures(&self) -> u64 {
        self.send_failures
    }

    fn peer(&self, address: NicAddress) -> Result<SocketAddr, PacketIoError> {
        self.peers.get(address.0 as usize).copied().ok_or(PacketIoError::Peer(address.0))
    }

    /// Sends the packets of the outbox. Returns whether it is empty afterwards.
    fn send_outbox(&mut self) -> Result<bool, PacketIoError> {
        let Some(to) = self.outbox.to else { return Ok(true) };
        let transmit = Transmit {
            destination: self.peer(to)?,
            ecn: Some(EcnCodepoint::Ect0),
            contents: &self.outbox.bytes,
            segment_size: (self.outbox.segments > 1).then_some(self.outbox.segment_bytes),
            src_ip: None,
        };
        match self.state.try_send((&self.socket).into(), &transmit) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.raw_os_error() == Some(Errno::MSGSIZE.raw_os_error()) => {
                let call = format!("sendmsg of {} bytes from {}", self.outbox.segment_bytes, self.local);
                let remedy = "choose a smaller MTU for the queue pair, because its packets must not be fragmented";
                return Err(PacketIoError::System { call, error, remedy });
            }
            // No route, a full queue or a firewall: the same as a loss on the way.
            Err(_) => self.send_failures += self.outbox.segments as u64,
        }
        self.outbox.clear();
        Ok(true)
    }

    /// Receives datagrams from the kernel. Returns whether there were any.
    fn fill_inbox(&mut self) -> Result<bool, PacketIoError> {
        if std::mem::take(&mut self.inbox.is_drained) {
            return Ok(false);
        }
        let Inbox { buffers, metas, .. } = &mut self.inbox;
        let mut slices = buffers.each_mut().map(|buffer| IoSliceMut::new(buffer));
        match self.state.recv((&self.socket).into(), &mut slices, metas) {
            Ok(count) => {
                self.inbox.filled(count);
                Ok(count > 0)
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(system_error("recvmmsg", self.local, "create a new socket")(error)),
        }
    }
}

/// Returns the headers of the datagram around a packet between two addresses of the same family.
fn encapsulation(from: SocketAddr, to: SocketAddr) -> Option<Encapsulation> {
    let addresses = match (from.ip(), to.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            IpAddresses::V4 { source, destination, identification: 0, dont_fragment: true }
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => IpAddresses::V6 { source, destination },
        _ => return None,
    };
    Some(Encapsulation { addresses, source_port: from.port(), destination_port: to.port() })
}

impl PacketIo for UdpIo {
    fn encapsulation(&self, to: NicAddress) -> Result<Option<Encapsulation>, PacketIoError> {
        Ok(encapsulation(self.local, self.peer(to)?))
    }

    fn send(&mut self, to: NicAddress, packet: &[u8]) -> Result<bool, PacketIoError> {
        self.peer(to)?;
        let segments_max = self.state.max_gso_segments().clamp(1, self.segments_max);
        if !self.outbox.has_room(to, packet.len(), segments_max) && !self.send_outbox()? {
            return Ok(false);
        }
        self.outbox.push(to, packet);
        Ok(true)
    }

    fn flush(&mut self) -> Result<(), PacketIoError> {
        self.send_outbox().map(drop)
    }

    fn receive(&mut self) -> Result<Option<ReceivedPacket<'_>>, PacketIoError> {
        loop {
            let Some((buffer, range)) = self.inbox.next() else {
                if self.fill_inbox()? {
                    continue;
                }
                return Ok(None);
            };
            let meta = self.inbox.metas[buffer];
            let Some(from) =
                self.addresses.get(&self.peer_key(meta.addr)).copied().filter(|_| range.len() <= PACKET_BYTES_MAX)
            else {
                self.rejected += 1;
                continue;
            };
            let is_marked = meta.ecn == Some(EcnCodepoint::Ce);
            let packet = &self.inbox.buffers[buffer][range];
            let (encapsulation, has_identification) = (encapsulation(meta.addr, self.local), !self.expects_nics);
            return Ok(Some(ReceivedPacket { from, is_marked, encapsulation, has_identification, packet }));
        }
    }

    fn wait(&mut self, limit: Option<Duration>) -> Result<(), PacketIoError> {
        let wanted = if self.outbox.to.is_some() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        match poll(&mut [PollFd::new(&self.socket, wanted)], limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(system_error("poll", self.local, "create a new socket")(errno.into())),
        }
    }

    fn rejected(&self) -> u64 {
        self.rejected
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    fn pair(host: &str) -> Option<(UdpIo, UdpIo)> {
        let bind = || UdpIo::bind(SocketAddr::new(host.parse().unwrap(), 0));
        let (mut a, mut b) = (bind().ok()?, bind().ok()?);
        assert_eq!(a.add_peer(b.local()).unwrap(), NicAddress(0));
        assert_eq!(b.add_peer(a.local()).unwrap(), NicAddress(0));
        Some((a, b))
    }

    fn next(wire: &mut UdpIo) -> Option<Vec<u8>> {
        for _ in 0..100 {
            if let Some(arrival) = wire.receive().unwrap() {
                return Some(arrival.packet.to_vec());
            }
            wire.wait(Some(TIMEOUT / 100)).unwrap();
        }
        None
    }

    #[test]
    fn packets_keep_their_boundaries_in_batches() {
        let (mut a, mut b) = pair("127.0.0.1").unwrap();
        let packets: Vec<Vec<u8>> =
            [100, 100, 100, 40, 100, 300, 300, 20].iter().zip(1..).map(|(bytes, id)| vec![id; *bytes]).collect();
        for packet in &packets {
            assert!(a.send(NicAddress(0), packet).unwrap());
        }
        a.flush().unwrap();
        for packet in packets {
            assert_eq!(next(&mut b), Some(packet));
        }
        assert!(b.receive().unwrap().is_none());
        assert_eq!((a.send_failures(), b.rejected()), (0, 0));
    }

    #[test]
    fn sender_and_receiver_agree_on_the_encapsulation() {
        for host in ["127.0.0.1", "::1"] {
            let Some((mut a, mut b)) = pair(host) else {
                assert_eq!(host, "::1", "IPv4 must be available, IPv6 may be missing");
                continue;
            };
            let sent = a.encapsulation(NicAddress(0)).unwrap();
            assert!(a.send(NicAddress(0), &[7; 64]).unwrap());
            a.flush().unwrap();
            b.wait(Some(TIMEOUT)).unwrap();
            let arrival = b.receive().unwrap().unwrap();
            assert_eq!((arrival.encapsulation, arrival.from, arrival.is_marked), (sent, NicAddress(0), false));
        }
    }

    #[test]
    fn datagrams_of_unknown_senders_are_dropped_and_counted() {
        let (mut a, mut b) = pair("127.0.0.1").unwrap();
        let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
        stranger.send_to(b"hello", b.local()).unwrap();
        assert!(a.send(NicAddress(0), b"known").unwrap());
        a.flush().unwrap();
        assert_eq!(next(&mut b), Some(b"known".to_vec()));
        assert_eq!(b.rejected(), 1);
    }

    #[test]
    fn a_nic_is_identified_by_its_address_independently_of_the_port() {
        let mut wire = UdpIo::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        wire.expect_nics();
        let nic = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(wire.add_peer("127.0.0.1:4791".parse().unwrap()).unwrap(), NicAddress(0));
        nic.send_to(b"from any port", wire.local()).unwrap();
        wire.wait(Some(TIMEOUT)).unwrap();
        let arrival = wire.receive().unwrap().unwrap();
        assert_eq!(
            (arrival.from, arrival.has_identification, arrival.packet),
            (NicAddress(0), false, &b"from any port"[..])
        );
        assert_eq!(arrival.encapsulation.unwrap().source_port, nic.local_addr().unwrap().port());
    }

    #[test]
    fn invalid_addresses_are_refused() {
        for (address, text) in
            [("0.0.0.0:4791", "address '0.0.0.0:4791' is not a unicast address"), ("[::]:0", "not a unicast")]
        {
            let error = UdpIo::bind(address.parse().unwrap()).err().unwrap().to_string();
            assert!(error.contains(text), "{error}");
        }
        let mut wire = UdpIo::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        assert!(wire.add_peer("[::1]:9".parse().unwrap()).is_err());
        assert!(matches!(wire.send(NicAddress(0), &[1]), Err(PacketIoError::Peer(0))));
    }
}
