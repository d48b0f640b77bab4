//! Lanes: rings in memory that two programs, or two nodes, share. Packets keep their order and none is lost, so that
//! what the transport adds is what it costs.
//!
//! A packet stands in the byte stream of a lane after its length (16 bits, little end first). There is no checksum: it
//! is memory.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use fabric::shm::{EventfdDoorbell, ShmLink};
use fabric::{Doorbell, Inbound, Link, MemoryInbound, MemoryOutbound};
use lane::{Consumer, Corrupt, Layout, Producer};
use rnic::verbs::Address;
use rnic::wire::{Encapsulation, PACKET_BYTES_MAX};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::wire::{Arrival, Wire, WireError};

/// Bytes before each packet.
const LENGTH_BYTES: usize = size_of::<u16>();
/// What is taken out of a lane at a time.
const INBOX_BYTES: usize = 4 * (LENGTH_BYTES + PACKET_BYTES_MAX);
/// 8 KiB for those who say little, 256 KiB for bulk, as connections have.
const LAYOUT: Layout = Layout::packed(128, 4096);

/// Bytes of each window of a link for [`Lanes::add_peer`].
pub const WINDOW_BYTES: usize = LAYOUT.window_bytes();

/// Lanes to peers.
#[derive(Default)]
pub struct Lanes {
    /// By their addresses; nothing where one was removed.
    peers: Vec<Option<Peer>>,
    /// Who is looked at next.
    turn: usize,
    strangers: u64,
}

struct Peer {
    to: Producer<MemoryOutbound, MemoryInbound>,
    from: Consumer<MemoryInbound, MemoryOutbound>,
    bell: EventfdDoorbell,
    inbox: Inbox,
    /// The end of a packet that found no room.
    rest: Vec<u8>,
    is_to_be_rung: bool,
    /// It broke the protocol of the lane: nothing of it is looked at any more.
    is_broken: bool,
}

/// Bytes of a lane that are packets, and the beginning of one.
struct Inbox {
    bytes: Box<[u8]>,
    at: usize,
    end: usize,
}

impl Inbox {
    fn new() -> Self {
        Self { bytes: vec![0; INBOX_BYTES].into_boxed_slice(), at: 0, end: 0 }
    }

    /// Where the next whole packet lies; an error when its length cannot be.
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

    /// Room behind what is there, which is moved to the front.
    fn room(&mut self) -> &mut [u8] {
        self.bytes.copy_within(self.at..self.end, 0);
        (self.at, self.end) = (0, self.end - self.at);
        &mut self.bytes[self.end..]
    }
}

impl Peer {
    /// Where its next packet lies in its inbox.
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

    /// Whether nothing is left of what found no room.
    fn send_rest(&mut self) -> Result<bool, Corrupt> {
        if self.rest.is_empty() {
            return Ok(true);
        }
        let sent = self.to.write(&self.rest)?;
        self.is_to_be_rung |= sent > 0;
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
        if std::mem::take(&mut self.is_to_be_rung) && self.to.take_wake_request() {
            self.bell.ring();
        }
        Ok(())
    }

    /// Asks to be rung; false when there is something to do already.
    fn announce(&mut self) -> bool {
        self.from.announce_sleep();
        if !self.rest.is_empty() {
            self.to.announce_sleep();
        }
        let has_room = || !self.rest.is_empty() && self.to.is_writable().unwrap_or(true);
        !self.from.may_have_data() && !has_room()
    }

    fn cancel(&mut self) {
        self.from.cancel_sleep();
        self.to.cancel_sleep();
        self.bell.wait(Some(Duration::ZERO));
    }
}

impl Lanes {
    /// Lanes to nobody yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the other end of a fresh link known. `secret` is known to both ends alone, random, and not zero.
    ///
    /// # Errors
    /// When the link's windows are too small.
    pub fn add_peer(&mut self, link: &ShmLink, secret: u64) -> Result<Address, WireError> {
        let found = link.inbound().len_bytes();
        if found < WINDOW_BYTES {
            return Err(WireError::Window { found, needed: WINDOW_BYTES });
        }
        let peer = Peer {
            to: Producer::new(link.outbound(), link.inbound(), LAYOUT, secret),
            from: Consumer::new(link.inbound(), link.outbound(), LAYOUT, secret),
            bell: link.doorbell(),
            inbox: Inbox::new(),
            rest: Vec::with_capacity(LENGTH_BYTES + PACKET_BYTES_MAX),
            is_to_be_rung: false,
            is_broken: false,
        };
        let index = self.peers.iter().position(Option::is_none).unwrap_or(self.peers.len());
        if index == self.peers.len() {
            self.peers.push(None);
        }
        self.peers[index] = Some(peer);
        Ok(Address(index as u32))
    }

    /// Forgets a peer and lets go of its memory. Its address may become another peer's: queue pairs that are connected
    /// to it must be gone.
    pub fn remove_peer(&mut self, address: Address) {
        if let Some(peer) = self.peers.get_mut(address.0 as usize) {
            *peer = None;
        }
    }

    /// Peers whose lanes ended because they broke their protocol.
    pub fn broken(&self) -> usize {
        self.peers.iter().flatten().filter(|peer| peer.is_broken).count()
    }

    /// What becomes readable when a peer rings.
    pub fn wakes(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.peers.iter().flatten().filter_map(|peer| peer.bell.descriptor())
    }

    /// Asks all peers to ring; false when there is something to do already. [`Lanes::woke`] follows in either case.
    pub fn may_sleep(&mut self) -> bool {
        let heard = self.peers.iter_mut().flatten().filter(|peer| !peer.is_broken);
        // Each must be asked, whatever the others say.
        let busy = heard.map(|peer| usize::from(!peer.announce())).sum::<usize>();
        busy == 0
    }

    /// After sleeping: peers need not ring any more.
    pub fn woke(&mut self) {
        self.peers.iter_mut().flatten().for_each(Peer::cancel);
    }

    fn heard(&mut self, index: usize) -> Option<&mut Peer> {
        self.peers.get_mut(index)?.as_mut().filter(|peer| !peer.is_broken)
    }

    /// What a peer's fault means: it is not heard any more, and others are not harmed.
    fn judge<T>(&mut self, index: usize, done: Result<T, Corrupt>) -> Option<T> {
        if done.is_err()
            && let Some(peer) = self.heard(index)
        {
            peer.is_broken = true;
            self.strangers += 1;
        }
        done.ok()
    }
}

impl Wire for Lanes {
    fn datagram(&self, to: Address) -> Result<Option<Encapsulation>, WireError> {
        self.peers.get(to.0 as usize).and_then(Option::as_ref).map(|_| None).ok_or(WireError::Peer(to.0))
    }

    fn send(&mut self, to: Address, packet: &[u8]) -> Result<bool, WireError> {
        let index = to.0 as usize;
        self.datagram(to)?;
        let Some(peer) = self.heard(index) else { return Ok(true) }; // lost
        let sent = peer.send(packet);
        Ok(self.judge(index, sent).unwrap_or(true))
    }

    fn flush(&mut self) -> Result<(), WireError> {
        for index in 0..self.peers.len() {
            if let Some(peer) = self.heard(index) {
                let flushed = peer.flush();
                self.judge(index, flushed);
            }
        }
        Ok(())
    }

    fn receive(&mut self) -> Result<Option<Arrival<'_>>, WireError> {
        for _ in 0..self.peers.len() {
            let index = self.turn % self.peers.len();
            let next = self.heard(index).map_or(Ok(None), Peer::next);
            if let Some(Some(range)) = self.judge(index, next) {
                let peer = self.peers[index].as_ref().expect("its packet was found just now");
                return Ok(Some(Arrival {
                    from: Address(index as u32),
                    is_marked: false,
                    datagram: None,
                    is_identified: true,
                    packet: &peer.inbox.bytes[range],
                }));
            }
            self.turn = index + 1;
        }
        Ok(None)
    }

    fn wait(&mut self, limit: Option<Duration>) -> Result<(), WireError> {
        let may_sleep = self.may_sleep();
        let mut descriptors: Vec<PollFd<'_>> =
            self.wakes().map(|bell| PollFd::from_borrowed_fd(bell, PollFlags::IN)).collect();
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let waited = if may_sleep { poll(&mut descriptors, limit.as_ref()) } else { Ok(0) };
        drop(descriptors);
        self.woke();
        match waited {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => {
                let (call, remedy) = ("poll of doorbells".to_owned(), "make the links anew");
                Err(WireError::System { call, error: errno.into(), remedy })
            }
        }
    }

    fn strangers(&self) -> u64 {
        self.strangers
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

    fn pair() -> (Lanes, Lanes) {
        let (first, second) = links();
        let (mut a, mut b) = (Lanes::new(), Lanes::new());
        assert_eq!(a.add_peer(&first, SECRET).unwrap(), Address(0));
        assert_eq!(b.add_peer(&second, SECRET).unwrap(), Address(0));
        (a, b)
    }

    fn packet(number: usize) -> Vec<u8> {
        (0..1 + number * 37 % PACKET_BYTES_MAX).map(|at| (at ^ number) as u8).collect()
    }

    #[test]
    fn packets_keep_their_order_and_bounds_when_the_lane_fills_up() {
        let (mut a, mut b) = pair();
        let (mut sent, mut received, mut refused) = (0, 0, 0);
        while received < 2000 {
            while sent < 2000 && a.send(Address(0), &packet(sent)).unwrap() {
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
    fn a_sleeper_is_woken_by_a_packet() {
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
            assert!(a.send(Address(0), b"wake up").unwrap());
            a.flush().unwrap();
            assert_eq!(sleeper.join().unwrap(), b"wake up");
        });
    }

    #[test]
    fn a_peer_with_an_impossible_length_is_not_heard_any_more_and_others_are() {
        let (mut a, mut b) = pair();
        let (first, second) = links();
        let mut hostile = Producer::new(first.outbound(), first.inbound(), LAYOUT, SECRET);
        let mallory = b.add_peer(&second, SECRET).unwrap();
        for length in [0, PACKET_BYTES_MAX as u16 + 1] {
            hostile.write(&length.to_le_bytes()).unwrap();
        }
        hostile.write(&[1; 300]).unwrap();
        assert!(b.receive().unwrap().is_none());
        assert_eq!((b.broken(), b.strangers()), (1, 1));
        assert!(b.send(mallory, b"as good as lost").unwrap());
        assert!(a.send(Address(0), b"still here").unwrap());
        a.flush().unwrap();
        assert_eq!(b.receive().unwrap().unwrap().packet, b"still here");
        assert!(matches!(b.send(Address(9), b"?"), Err(WireError::Peer(9))));
    }

    #[test]
    fn a_peer_that_was_removed_gives_its_address_and_its_memory_to_the_next() {
        let (mut a, mut b) = pair();
        b.remove_peer(Address(0));
        assert!(matches!(b.send(Address(0), b"nobody"), Err(WireError::Peer(0))));
        assert!(b.receive().unwrap().is_none() && b.wakes().next().is_none());
        assert!(a.send(Address(0), b"to nobody").unwrap());
        a.flush().unwrap();
        let (first, second) = links();
        a.remove_peer(Address(0));
        assert_eq!(a.add_peer(&first, SECRET).unwrap(), Address(0));
        assert_eq!(b.add_peer(&second, SECRET).unwrap(), Address(0));
        assert!(a.send(Address(0), b"to the next").unwrap());
        a.flush().unwrap();
        assert_eq!(b.receive().unwrap().unwrap().packet, b"to the next");
    }

    #[test]
    fn a_window_that_is_too_small_is_refused() {
        let (link, _parts) = shm::create_link(4096).unwrap();
        let error = Lanes::new().add_peer(&link, SECRET).unwrap_err().to_string();
        assert_eq!(error, format!("a link with windows of 4096 bytes; lanes need {WINDOW_BYTES}"));
    }
}
