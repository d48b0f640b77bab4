//! Packet I/O over lanes: rings in memory that two programs or two nodes share. Packets keep their order and none is
//! lost, so that the cost of the transport itself can be measured.
//!
//! A packet follows its length (16 bits, little endian) in the byte stream of a lane. There is no checksum, because the
//! stream is memory.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use fabric::shm::{EventfdDoorbell, ShmLink};
use fabric::{Doorbell, Inbound, Link, MemoryInbound, MemoryOutbound};
use lane::{Consumer, Corrupt, Layout, Producer};
use rnic::verbs::NicAddress;
use rnic::wire::{Encapsulation, PACKET_BYTES_MAX};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::packet_io::{PacketIo, PacketIoError, ReceivedPacket};

/// Size of the length before each packet.
const LENGTH_BYTES: usize = size_of::<u16>();
/// Most bytes read from a lane at a time.
const INBOX_BYTES: usize = 4 * (LENGTH_BYTES + PACKET_BYTES_MAX);
/// Rings of 8 KiB while little is sent and 256 KiB for bulk, like those of connections.
const LAYOUT: Layout = Layout::packed(128, 4096);

/// Smallest size of a link's windows for [`LaneIo::add_peer`].
pub const WINDOW_BYTES: usize = LAYOUT.window_bytes();

/// Packet I/O over one pair of lanes per peer.
#[derive(Default)]
pub struct LaneIo {
    /// By address; `None` where a peer was removed.
    peers: Vec<Option<Peer>>,
    /// The peer that is polled first by the next receive, for fairness.
    next_peer: usize,
    rejected: u64,
}

struct Peer {
    to: Producer<MemoryOutbound, MemoryInbound>,
    from: Consumer<MemoryInbound, MemoryOutbound>,
    bell: EventfdDoorbell,
    inbox: Inbox,
    /// The rest of a packet that did not fit into the lane.
    rest: Vec<u8>,
    needs_bell: bool,
    /// Whether it violated the protocol of the lane, after which it is ignored.
    is_broken: bool,
}

/// Bytes read from a lane: whole packets, then possibly the beginning of one.
struct Inbox {
    bytes: Box<[u8]>,
    at: usize,
    end: usize,
}

impl Inbox {
    fn new() -> Self {
        Self { bytes: vec![0; INBOX_BYTES].into_boxed_slice(), at: 0, end: 0 }
    }

    /// Returns the range of the next whole packet; an error if its length is invalid.
    fn next(&mut self) -> Result<Option<std::ops::Range<usize>>, Corrupt> {
        let unread = &self.bytes[self.at..self.end];
        let Some(length) = unread.first_chunk().map(|length| usize::from(u16::from_le_bytes(*length))) else {
            return Ok(None);
        };
        if length == 0 || length > PACKET_BYTES_MAX {
            return Err(Corrupt { what: "length of a packet", value: length as u64 });
        }
        if unread.len() < LENGTH_BYTES + length {
            return Ok(None);
        }
        let first = self.at + LENGTH_BYTES;
        self.at = first + length;
        Ok(Some(first..self.at))
    }

    /// Moves the unread bytes to the front and returns the room behind them.
    fn room(&mut self) -> &mut [u8] {
        self.bytes.copy_within(self.at..self.end, 0);
        (self.at, self.end) = (0, self.end - self.at);
        &mut self.bytes[self.end..]
    }
}

impl Peer {
    /// Returns the range of the next packet in the inbox, after reading from the lane if necessary.
    fn next(&mut self) -> Result<Option<std::ops::Range<usize>>, Corrupt> {
        if let Some(range) = self.inbox.next()? {
            return Ok(Some(range));
        }
        if !self.from.may_have_data() {
            return Ok(None);
        }
        let read = self.from.read(self.inbox.room())?;
        self.inbox.end += read;
        if self.from.take_wake_request() {
            self.bell.ring();
        }
        self.inbox.next()
    }

    /// Writes the rest of the last packet. Returns whether all of it has been written.
    fn send_rest(&mut self) -> Result<bool, Corrupt> {
        if self.rest.is_empty() {
            return Ok(true);
        }
        let sent = self.to.write(&self.rest)?;
        self.needs_bell |= sent > 0;
        self.rest.drain(..sent);
        Ok(self.rest.is_empty())
    }

    fn send(&mut self, packet: &[u8]) -> Result<bool, Corrupt> {
        if !self.send_rest()? {
            return Ok(false);
        }
        self.rest.extend_from_slice(&(packet.len() as u16).to_le_bytes());
        self.rest.extend_from_slice(packet);
        self.send_rest()?;
        Ok(true)
    }

    fn flush(&mut self) -> Result<(), Corrupt> {
        self.send_rest()?;
        if std::mem::take(&mut self.needs_bell) && self.to.take_wake_request() {
            self.bell.ring();
        }
        Ok(())
    }

    /// Requests a doorbell ring. Returns false if there is something to do already.
    fn prepare_wait(&mut self) -> bool {
        self.from.announce_sleep();
        if !self.rest.is_empty() {
            self.to.announce_sleep();
        }
        let has_room = || !self.rest.is_empty() && self.to.is_writable().unwrap_or(true);
        !self.from.may_have_data() && !has_room()
    }

    fn finish_wait(&mut self) {
        self.from.cancel_sleep();
        self.to.cancel_sleep();
        self.bell.wait(Some(Duration::ZERO));
    }
}

impl LaneIo {
    /// Creates packet I/O without peers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the peer at the other end of a new link. `secret` is shared by the two ends only, random, and not zero.
    ///
    /// # Errors
    /// When the link's windows are too small.
    pub fn add_peer(&mut self, link: &ShmLink, secret: u64) -> Result<NicAddress, PacketIoError> {
        let found = link.inbound().len_bytes();
        if found < WINDOW_BYTES {
            return Err(PacketIoError::Window { found, needed: WINDOW_BYTES });
        }
        let peer = Peer {
            to: Producer::new(link.outbound(), link.inbound(), LAYOUT, secret),
            from: Consumer::new(link.inbound(), link.outbound(), LAYOUT, secret),
            bell: link.doorbell(),
            inbox: Inbox::new(),
            rest: Vec::with_capacity(LENGTH_BYTES + PACKET_BYTES_MAX),
            needs_bell: false,
            is_broken: false,
        };
        let index = self.peers.iter().position(Option::is_none).unwrap_or(self.peers.len());
        if index == self.peers.len() {
            self.peers.push(None);
        }
        self.peers[index] = Some(peer);
        Ok(NicAddress(index as u32))
    }

    /// Removes a peer and releases its memory. The address may be reused for another peer, so queue pairs connected to
    /// it must be destroyed before.
    pub fn remove_peer(&mut self, address: NicAddress) {
        if let Some(peer) = self.peers.get_mut(address.0 as usize) {
            *peer = None;
        }
    }

    /// Returns the number of peers that are ignored because they violated the protocol.
    pub fn broken(&self) -> usize {
        self.peers.iter().flatten().filter(|peer| peer.is_broken).count()
    }

    /// Returns the descriptors that become readable when a peer rings its doorbell.
    pub fn wait_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.peers.iter().flatten().filter_map(|peer| peer.bell.descriptor())
    }

    /// Requests a doorbell ring from all peers before blocking. Returns false if there is something to do already.
    /// [`LaneIo::finish_wait`] must follow in either case.
    pub fn prepare_wait(&mut self) -> bool {
        let peers = self.peers.iter_mut().flatten().filter(|peer| !peer.is_broken);
        // Not `any`, which would stop early: every peer has to ring.
        let busy = peers.map(|peer| usize::from(!peer.prepare_wait())).sum::<usize>();
        busy == 0
    }

    /// Cancels the requests of [`LaneIo::prepare_wait`] after blocking.
    pub fn finish_wait(&mut self) {
        self.peers.iter_mut().flatten().for_each(Peer::finish_wait);
    }

    fn working_peer(&mut self, index: usize) -> Option<&mut Peer> {
        self.peers.get_mut(index)?.as_mut().filter(|peer| !peer.is_broken)
    }

    /// Marks a peer as broken if `done` is an error, so that it is ignored from now on; other peers are not affected.
    fn note_error<T>(&mut self, index: usize, done: Result<T, Corrupt>) -> Option<T> {
        if done.is_err()
            && let Some(peer) = self.working_peer(index)
        {
            peer.is_broken = true;
            self.rejected += 1;
        }
        done.ok()
    }
}

impl PacketIo for LaneIo {
    fn encapsulation(&self, to: NicAddress) -> Result<Option<Encapsulation>, PacketIoError> {
        self.peers.get(to.0 as usize).and_then(Option::as_ref).map(|_| None).ok_or(PacketIoError::Peer(to.0))
    }

    fn send(&mut self, to: NicAddress, packet: &[u8]) -> Result<bool, PacketIoError> {
        let index = to.0 as usize;
        self.encapsulation(to)?;
        let Some(peer) = self.working_peer(index) else { return Ok(true) }; // the packet is lost
        let sent = peer.send(packet);
        Ok(self.note_error(index, sent).unwrap_or(true))
    }

    fn flush(&mut self) -> Result<(), PacketIoError> {
        for index in 0..self.peers.len() {
            if let Some(peer) = self.working_peer(index) {
                let flushed = peer.flush();
                self.note_error(index, flushed);
            }
        }
        Ok(())
    }

    fn receive(&mut self) -> Result<Option<ReceivedPacket<'_>>, PacketIoError> {
        for _ in 0..self.peers.len() {
            let index = self.next_peer % self.peers.len();
            let next = self.working_peer(index).map_or(Ok(None), Peer::next);
            if let Some(Some(range)) = self.note_error(index, next) {
                let peer = self.peers[index].as_ref().expect("the peer exists: its packet was just found");
                return Ok(Some(ReceivedPacket {
                    from: NicAddress(index as u32),
                    is_marked: false,
                    encapsulation: None,
                    has_identification: true,
                    packet: &peer.inbox.bytes[range],
                }));
            }
            self.next_peer = index + 1;
        }
        Ok(None)
    }

    fn wait(&mut self, limit: Option<Duration>) -> Result<(), PacketIoError> {
        let is_ready_to_block = self.prepare_wait();
        let mut descriptors: Vec<PollFd<'_>> =
            self.wait_fds().map(|bell| PollFd::from_borrowed_fd(bell, PollFlags::IN)).collect();
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let waited = if is_ready_to_block { poll(&mut descriptors, limit.as_ref()) } else { Ok(0) };
        drop(descriptors);
        self.finish_wait();
        match waited {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => {
                let (call, remedy) = ("poll of doorbells".to_owned(), "create new links");
                Err(PacketIoError::System { call, error: errno.into(), remedy })
            }
        }
    }

    fn rejected(&self) -> u64 {
        self.rejected
    }
}

#[cfg(test)]
mod tests {
    use fabric::shm;

    use super::*;

    const SECRET: u64 = 0x5ec2_e700_1234_5678;

    fn links() -> (ShmLink, ShmLink) {
        let (own, parts) = shm::create_link(WINDOW_BYTES).unwrap();
        (own, shm::open_link(parts, WINDOW_BYTES).unwrap())
    }

    fn pair() -> (LaneIo, LaneIo) {
        let (first, second) = links();
        let (mut a, mut b) = (LaneIo::new(), LaneIo::new());
        assert_eq!(a.add_peer(&first, SECRET).unwrap(), NicAddress(0));
        assert_eq!(b.add_peer(&second, SECRET).unwrap(), NicAddress(0));
        (a, b)
    }

    fn packet(number: usize) -> Vec<u8> {
        (0..1 + number * 37 % PACKET_BYTES_MAX).map(|at| (at ^ number) as u8).collect()
    }

    #[test]
    fn packets_keep_their_order_and_boundaries_when_the_lane_is_full() {
        let (mut a, mut b) = pair();
        let (mut sent, mut received, mut refused) = (0, 0, 0);
        while received < 2000 {
            while sent < 2000 && a.send(NicAddress(0), &packet(sent)).unwrap() {
                sent += 1;
            }
            refused += usize::from(sent < 2000);
            a.flush().unwrap();
            while let Some(arrival) = b.receive().unwrap() {
                assert_eq!(arrival.packet, packet(received));
                received += 1;
            }
        }
        assert!(refused > 0, "the lane never filled up");
        assert_eq!((sent, a.broken(), b.broken()), (2000, 0, 0));
    }

    #[test]
    fn a_packet_wakes_a_blocked_receiver() {
        let (mut a, mut b) = pair();
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(move || {
                for _ in 0..1000 {
                    if let Some(arrival) = b.receive().unwrap() {
                        return arrival.packet.to_vec();
                    }
                    b.wait(None).unwrap();
                }
                Vec::new()
            });
            assert!(a.send(NicAddress(0), b"wake up").unwrap());
            a.flush().unwrap();
            assert_eq!(sleeper.join().unwrap(), b"wake up");
        });
    }

    #[test]
    fn a_peer_that_sends_an_invalid_length_is_ignored_and_others_are_not() {
        let (mut a, mut b) = pair();
        let (first, second) = links();
        let mut hostile = Producer::new(first.outbound(), first.inbound(), LAYOUT, SECRET);
        let mallory = b.add_peer(&second, SECRET).unwrap();
        for length in [0, PACKET_BYTES_MAX as u16 + 1] {
            hostile.write(&length.to_le_bytes()).unwrap();
        }
        hostile.write(&[1; 300]).unwrap();
        assert!(b.receive().unwrap().is_none());
        assert_eq!((b.broken(), b.rejected()), (1, 1));
        assert!(b.send(mallory, b"lost").unwrap());
        assert!(a.send(NicAddress(0), b"still here").unwrap());
        a.flush().unwrap();
        assert_eq!(b.receive().unwrap().unwrap().packet, b"still here");
        assert!(matches!(b.send(NicAddress(9), b"?"), Err(PacketIoError::Peer(9))));
    }

    #[test]
    fn the_address_of_a_removed_peer_is_reused() {
        let (mut a, mut b) = pair();
        b.remove_peer(NicAddress(0));
        assert!(matches!(b.send(NicAddress(0), b"nobody"), Err(PacketIoError::Peer(0))));
        assert!(b.receive().unwrap().is_none() && b.wait_fds().next().is_none());
        assert!(a.send(NicAddress(0), b"to nobody").unwrap());
        a.flush().unwrap();
        let (first, second) = links();
        a.remove_peer(NicAddress(0));
        assert_eq!(a.add_peer(&first, SECRET).unwrap(), NicAddress(0));
        assert_eq!(b.add_peer(&second, SECRET).unwrap(), NicAddress(0));
        assert!(a.send(NicAddress(0), b"to the next").unwrap());
        a.flush().unwrap();
        assert_eq!(b.receive().unwrap().unwrap().packet, b"to the next");
    }

    #[test]
    fn windows_that_are_too_small_are_refused() {
        let (link, _parts) = shm::create_link(4096).unwrap();
        let error = LaneIo::new().add_peer(&link, SECRET).unwrap_err().to_string();
        assert_eq!(error, format!("a link with windows of 4096 bytes; lanes need {WINDOW_BYTES}"));
    }
}
