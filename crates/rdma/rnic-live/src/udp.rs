//! UDP: RoCEv2 as it stands on the wire, or its selective extension.
//!
//! Datagrams leave with *do not fragment*, ECN-capable, and from a socket that is bound to one address and connected to
//! none: the kernel then writes an IPv4 identification of 0, which the packet's checksum covers.

use std::collections::HashMap;
use std::io::{ErrorKind, IoSliceMut};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use quinn_udp::{EcnCodepoint, RecvMeta, Transmit, UdpSocketState};
use rnic::verbs::Address;
use rnic::wire::{Encapsulation, IpAddresses, PACKET_BYTES_MAX};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::wire::{Arrival, Wire, WireError};

/// What one call may bring: datagrams of one sender that the kernel has put together.
const RECEIVE_BYTES: usize = 65_536;
/// How many of those a call may bring.
const RECEIVES: usize = 4;
/// What one call may send, to one peer: a datagram's length has 16 bits, of which IP and UDP take some.
const SEND_BYTES_MAX: usize = 65_000;
/// What the kernel is asked to hold for this socket; it gives what it may.
const SOCKET_BYTES: usize = 4 << 20;
/// As many datagrams as one call may send, where the kernel cuts them apart.
const SEGMENTS_MAX: usize = 60;

/// A UDP socket and the peers that it knows.
pub struct Udp {
    socket: UdpSocket,
    state: UdpSocketState,
    local: SocketAddr,
    peers: Vec<SocketAddr>,
    addresses: HashMap<SocketAddr, Address>,
    inbox: Inbox,
    outbox: Outbox,
    segments_max: usize,
    expects_nics: bool,
    strangers: u64,
    unsent: u64,
}

struct Inbox {
    buffers: [Box<[u8]>; RECEIVES],
    metas: [RecvMeta; RECEIVES],
    filled: usize,
    /// The next datagram: of which buffer, from which byte on.
    buffer: usize,
    at: usize,
    /// The last call brought less than it might have: another one would find nothing yet.
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

    /// Where the next datagram lies.
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

/// Packets to one peer, all but the last of one length: one call sends them.
#[derive(Default)]
struct Outbox {
    to: Option<Address>,
    bytes: Vec<u8>,
    segment_bytes: usize,
    segments: usize,
    /// A short one came: nothing more can follow.
    is_closed: bool,
}

impl Outbox {
    fn takes(&self, to: Address, bytes: usize, segments_max: usize) -> bool {
        self.to.is_none()
            || self.to == Some(to)
                && !self.is_closed
                && bytes <= self.segment_bytes
                && self.segments < segments_max
                && self.bytes.len() + bytes <= SEND_BYTES_MAX
    }

    fn push(&mut self, to: Address, packet: &[u8]) {
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

fn failed(call: &str, at: SocketAddr, remedy: &'static str) -> impl Fn(std::io::Error) -> WireError {
    let call = format!("{call} at {at}");
    move |error| WireError::System { call: call.clone(), error, remedy }
}

impl Udp {
    /// A socket of its own at this address; port 0 lets the kernel choose one.
    ///
    /// # Errors
    /// When the address names no single one of this machine's, or is taken.
    pub fn bind(address: SocketAddr) -> Result<Self, WireError> {
        if address.ip().is_unspecified() || address.ip().is_multicast() {
            let what = "is no single address";
            let remedy = "name the one that peers send to: their packets' checksums cover it";
            return Err(WireError::Address { address: address.to_string(), what, remedy });
        }
        let failed = |call| failed(call, address, "choose a free port and an address of this machine");
        let socket = UdpSocket::bind(address).map_err(failed("bind"))?;
        let local = socket.local_addr().map_err(failed("getsockname"))?;
        let state = UdpSocketState::new((&socket).into()).map_err(failed("setsockopt"))?;
        // As much as there is: with less, more is lost, and sent again.
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
            strangers: 0,
            unsent: 0,
        })
    }

    /// Where this socket is.
    pub fn local(&self) -> SocketAddr {
        self.local
    }

    /// Makes a peer known; the same one has the same number.
    ///
    /// # Errors
    /// When it is of another family than this socket.
    pub fn add_peer(&mut self, peer: SocketAddr) -> Result<Address, WireError> {
        if let Some(known) = self.addresses.get(&self.known_by(peer)) {
            return Ok(*known);
        }
        if peer.is_ipv4() != self.local.is_ipv4() {
            let (what, remedy) = ("is of another family than this end's", "use IPv4 with IPv4, IPv6 with IPv6");
            return Err(WireError::Address { address: peer.to_string(), what, remedy });
        }
        let address = Address(self.peers.len() as u32);
        self.peers.push(peer);
        self.addresses.insert(self.known_by(peer), address);
        Ok(address)
    }

    /// Lets peers be NICs, or Linux' `rdma_rxe`, rather than ends of this kind. They send from ports of their choice,
    /// so that who sends is told by the address alone; they count IPv4's identification up, which sockets do not show;
    /// and they look at this end's, which must not be counted up by whoever cuts a batch of datagrams apart.
    ///
    /// # Panics
    /// When there are peers already.
    pub fn expect_nics(&mut self) {
        assert!(self.peers.is_empty(), "what peers are is said before there are any");
        (self.expects_nics, self.segments_max) = (true, 1);
    }

    /// By what a peer is known.
    fn known_by(&self, address: SocketAddr) -> SocketAddr {
        if self.expects_nics { SocketAddr::new(address.ip(), 0) } else { address }
    }

    /// Becomes readable when something has come.
    pub fn wakes(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Whether nothing is here that a sleeper would not be woken for: datagrams that were taken from the kernel, or
    /// that it did not take.
    pub fn may_sleep(&self) -> bool {
        self.inbox.buffer >= self.inbox.filled && self.outbox.to.is_none()
    }

    /// Datagrams that the kernel would not send; their packets are sent again when they are missed.
    pub fn unsent(&self) -> u64 {
        self.unsent
    }

    fn peer(&self, address: Address) -> Result<SocketAddr, WireError> {
        self.peers.get(address.0 as usize).copied().ok_or(WireError::Peer(address.0))
    }

    /// Whether the outbox is empty afterwards.
    fn empty_outbox(&mut self) -> Result<bool, WireError> {
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
                let remedy = "choose a smaller MTU for the queue pair, for routers must not fragment its packets";
                return Err(WireError::System { call, error, remedy });
            }
            // No route, a full queue, a firewall: as good as lost on the way.
            Err(_) => self.unsent += self.outbox.segments as u64,
        }
        self.outbox.clear();
        Ok(true)
    }

    /// Whether something came.
    fn fill_inbox(&mut self) -> Result<bool, WireError> {
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
            Err(error) => Err(failed("recvmmsg", self.local, "make the socket anew")(error)),
        }
    }
}

/// The datagram around a packet from one address to another of the same family.
fn datagram(from: SocketAddr, to: SocketAddr) -> Option<Encapsulation> {
    let addresses = match (from.ip(), to.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            IpAddresses::V4 { source, destination, identification: 0, dont_fragment: true }
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => IpAddresses::V6 { source, destination },
        _ => return None,
    };
    Some(Encapsulation { addresses, source_port: from.port(), destination_port: to.port() })
}

impl Wire for Udp {
    fn datagram(&self, to: Address) -> Result<Option<Encapsulation>, WireError> {
        Ok(datagram(self.local, self.peer(to)?))
    }

    fn send(&mut self, to: Address, packet: &[u8]) -> Result<bool, WireError> {
        self.peer(to)?;
        let segments_max = self.state.max_gso_segments().clamp(1, self.segments_max);
        if !self.outbox.takes(to, packet.len(), segments_max) && !self.empty_outbox()? {
            return Ok(false);
        }
        self.outbox.push(to, packet);
        Ok(true)
    }

    fn flush(&mut self) -> Result<(), WireError> {
        self.empty_outbox().map(drop)
    }

    fn receive(&mut self) -> Result<Option<Arrival<'_>>, WireError> {
        loop {
            let Some((buffer, range)) = self.inbox.next() else {
                if self.fill_inbox()? {
                    continue;
                }
                return Ok(None);
            };
            let meta = self.inbox.metas[buffer];
            let Some(from) =
                self.addresses.get(&self.known_by(meta.addr)).copied().filter(|_| range.len() <= PACKET_BYTES_MAX)
            else {
                self.strangers += 1;
                continue;
            };
            let is_marked = meta.ecn == Some(EcnCodepoint::Ce);
            let packet = &self.inbox.buffers[buffer][range];
            let (datagram, is_identified) = (datagram(meta.addr, self.local), !self.expects_nics);
            return Ok(Some(Arrival { from, is_marked, datagram, is_identified, packet }));
        }
    }

    fn wait(&mut self, limit: Option<Duration>) -> Result<(), WireError> {
        let wanted = if self.outbox.to.is_some() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        match poll(&mut [PollFd::new(&self.socket, wanted)], limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(failed("poll", self.local, "make the socket anew")(errno.into())),
        }
    }

    fn strangers(&self) -> u64 {
        self.strangers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn pair(host: &str) -> Option<(Udp, Udp)> {
        let bind = || Udp::bind(SocketAddr::new(host.parse().unwrap(), 0));
        let (mut a, mut b) = (bind().ok()?, bind().ok()?);
        assert_eq!(a.add_peer(b.local()).unwrap(), Address(0));
        assert_eq!(b.add_peer(a.local()).unwrap(), Address(0));
        Some((a, b))
    }

    fn next(wire: &mut Udp) -> Option<Vec<u8>> {
        for _ in 0..100 {
            if let Some(arrival) = wire.receive().unwrap() {
                return Some(arrival.packet.to_vec());
            }
            wire.wait(Some(PATIENCE / 100)).unwrap();
        }
        None
    }

    #[test]
    fn packets_keep_their_bounds_whether_they_go_together_or_apart() {
        let (mut a, mut b) = pair("127.0.0.1").unwrap();
        let packets: Vec<Vec<u8>> =
            [100, 100, 100, 40, 100, 300, 300, 20].iter().zip(1..).map(|(bytes, id)| vec![id; *bytes]).collect();
        for packet in &packets {
            assert!(a.send(Address(0), packet).unwrap());
        }
        a.flush().unwrap();
        for packet in packets {
            assert_eq!(next(&mut b), Some(packet));
        }
        assert!(b.receive().unwrap().is_none());
        assert_eq!((a.unsent(), b.strangers()), (0, 0));
    }

    #[test]
    fn both_ends_see_the_same_datagram_around_a_packet() {
        for host in ["127.0.0.1", "::1"] {
            let Some((mut a, mut b)) = pair(host) else {
                assert_eq!(host, "::1", "a machine without IPv6 is fine, without IPv4 not");
                continue;
            };
            let sent = a.datagram(Address(0)).unwrap();
            assert!(a.send(Address(0), &[7; 64]).unwrap());
            a.flush().unwrap();
            b.wait(Some(PATIENCE)).unwrap();
            let arrival = b.receive().unwrap().unwrap();
            assert_eq!((arrival.datagram, arrival.from, arrival.is_marked), (sent, Address(0), false));
        }
    }

    #[test]
    fn strangers_are_counted_and_not_heard() {
        let (mut a, mut b) = pair("127.0.0.1").unwrap();
        let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
        stranger.send_to(b"hello", b.local()).unwrap();
        assert!(a.send(Address(0), b"known").unwrap());
        a.flush().unwrap();
        assert_eq!(next(&mut b), Some(b"known".to_vec()));
        assert_eq!(b.strangers(), 1);
    }

    #[test]
    fn a_nic_is_known_by_its_address_whatever_port_it_sends_from() {
        let mut wire = Udp::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        wire.expect_nics();
        let nic = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_eq!(wire.add_peer("127.0.0.1:4791".parse().unwrap()).unwrap(), Address(0));
        nic.send_to(b"from any port", wire.local()).unwrap();
        wire.wait(Some(PATIENCE)).unwrap();
        let arrival = wire.receive().unwrap().unwrap();
        assert_eq!((arrival.from, arrival.is_identified, arrival.packet), (Address(0), false, &b"from any port"[..]));
        assert_eq!(arrival.datagram.unwrap().source_port, nic.local_addr().unwrap().port());
    }

    #[test]
    fn addresses_that_cannot_be_are_refused() {
        for (address, text) in
            [("0.0.0.0:4791", "address '0.0.0.0:4791' is no single address"), ("[::]:0", "no single")]
        {
            let error = Udp::bind(address.parse().unwrap()).err().unwrap().to_string();
            assert!(error.contains(text), "{error}");
        }
        let mut wire = Udp::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        assert!(wire.add_peer("[::1]:9".parse().unwrap()).is_err());
        assert!(matches!(wire.send(Address(0), &[1]), Err(WireError::Peer(0))));
    }
}
