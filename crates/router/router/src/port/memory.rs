//! Ports without a device: the two endpoints of a wire in memory, for tests, and a packet generator, for benchmarks.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use packet::ethernet::HEADER_BYTES;
use packet::{checksum::Sum, ipv4, ipv6};

use crate::counters::Traffic;
use crate::port::PortLosses;
use crate::{Packet, Pool, Port};

/// Frames in flight in one direction.
struct Wire {
    memory: Vec<u8>,
    frame_bytes_max: usize,
    /// Lengths of the frames, oldest first, which occupy consecutive slots of a ring.
    lengths: VecDeque<usize>,
    first: usize,
    frames_max: usize,
}

impl Wire {
    fn new(frames_max: usize, frame_bytes_max: usize) -> Arc<Mutex<Wire>> {
        Arc::new(Mutex::new(Wire {
            memory: vec![0; frames_max * frame_bytes_max],
            frame_bytes_max,
            lengths: VecDeque::with_capacity(frames_max),
            first: 0,
            frames_max,
        }))
    }

    fn is_full(&self) -> bool {
        self.lengths.len() == self.frames_max
    }

    fn slot(&mut self, at: usize, bytes: usize) -> &mut [u8] {
        let begin = at % self.frames_max * self.frame_bytes_max;
        &mut self.memory[begin..begin + bytes]
    }

    fn push(&mut self, frame: &[u8]) {
        let at = self.first + self.lengths.len();
        self.slot(at, frame.len()).copy_from_slice(frame);
        self.lengths.push_back(frame.len());
    }

    fn pop(&mut self, pool: &mut Pool) -> Option<Packet> {
        let bytes = *self.lengths.front()?;
        let first = self.first;
        let packet = pool.alloc_copy(self.slot(first, bytes))?;
        self.lengths.pop_front();
        self.first = (first + 1) % self.frames_max;
        Some(packet)
    }
}

/// An endpoint of a wire in memory.
pub struct MemoryPort {
    inbound: Arc<Mutex<Wire>>,
    outbound: Arc<Mutex<Wire>>,
    losses: PortLosses,
}

/// Creates the endpoints of a wire that holds `frames_max` frames of `frame_bytes_max` in each direction. A full wire
/// leaves frames with the sender.
pub fn pair(frames_max: usize, frame_bytes_max: usize) -> (MemoryPort, MemoryPort) {
    assert!(frames_max > 0, "a wire must hold at least one frame");
    let (forward, backward) = (Wire::new(frames_max, frame_bytes_max), Wire::new(frames_max, frame_bytes_max));
    let first = MemoryPort { inbound: backward.clone(), outbound: forward.clone(), losses: PortLosses::default() };
    let second = MemoryPort { inbound: forward, outbound: backward, losses: PortLosses::default() };
    (first, second)
}

/// Locks a wire. Ignores poisoning, because no code panics while holding the lock.
fn lock(wire: &Mutex<Wire>) -> MutexGuard<'_, Wire> {
    wire.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Port for MemoryPort {
    fn receive(&mut self, pool: &mut Pool, into: &mut Vec<Packet>, packets_max: usize) -> io::Result<usize> {
        let mut wire = lock(&self.inbound);
        for count in 0..packets_max {
            if wire.lengths.front().is_some_and(|bytes| *bytes > pool.bytes_max()) {
                wire.lengths.pop_front();
                wire.first = (wire.first + 1) % wire.frames_max;
                self.losses.receive_unusable += 1;
                continue;
            }
            match wire.pop(pool) {
                Some(packet) => into.push(packet),
                None => return Ok(count),
            }
        }
        Ok(packets_max)
    }

    fn transmit(&mut self, pool: &mut Pool, from: &mut VecDeque<Packet>) -> io::Result<usize> {
        let mut wire = lock(&self.outbound);
        let waiting = from.len();
        while !wire.is_full() {
            let Some(packet) = from.pop_front() else { break };
            let frame = pool.bytes(&packet);
            if frame.len() <= wire.frame_bytes_max {
                wire.push(frame);
            } else {
                self.losses.transmit_refused += 1;
            }
            pool.free(packet);
        }
        Ok(waiting - from.len())
    }

    fn wakes(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn may_sleep(&mut self) -> bool {
        lock(&self.inbound).lengths.is_empty()
    }

    fn losses(&self) -> PortLosses {
        self.losses
    }
}

/// The destinations of a [`Generator`], used in turn.
#[derive(Clone, Debug)]
pub enum Destinations {
    /// IPv4 addresses.
    V4(Vec<u32>),
    /// IPv6 addresses.
    V6(Vec<u128>),
}

/// A port that generates packets as fast as they are received, or at the offered rate, and discards transmitted ones.
///
/// It writes only headers into buffers, a minimal substitute for the DMA of a NIC; payloads have arbitrary content.
pub struct Generator {
    /// A template for each length.
    headers: Vec<HeaderTemplate>,
    header: usize,
    destinations: Destinations,
    destination: usize,
    /// The receive ring; `None` for a port that always has a frame.
    ring: Option<Ring>,
    sent: Traffic,
}

struct HeaderTemplate {
    bytes: [u8; HEADER_BYTES + ipv6::HEADER_BYTES],
    frame_bytes: usize,
    sum: u64,
}

struct Ring {
    waiting: u64,
    frames_max: u64,
    overflows: u64,
}

impl Generator {
    /// Creates a generator of packets with the Ethernet header `ethernet` and these frame lengths in turn, without the
    /// frame check sequence.
    pub fn new(ethernet: [u8; HEADER_BYTES], frame_bytes: &[usize], destinations: Destinations) -> Generator {
        let is_v4 = matches!(destinations, Destinations::V4(_));
        let count = match &destinations {
            Destinations::V4(addresses) => addresses.len(),
            Destinations::V6(addresses) => addresses.len(),
        };
        assert!(count > 0 && !frame_bytes.is_empty(), "a generator needs a destination and a length");
        let headers = frame_bytes.iter().map(|bytes| HeaderTemplate::new(ethernet, *bytes, is_v4)).collect();
        Generator { headers, header: 0, destinations, destination: 0, ring: None, sent: Traffic::default() }
    }

    /// Adds a receive ring of `frames_max` frames, which [`Generator::offer`] fills.
    #[must_use]
    pub fn with_ring(mut self, frames_max: u64) -> Generator {
        self.ring = Some(Ring { waiting: 0, frames_max, overflows: 0 });
        self
    }

    /// Adds `frames` to the receive ring. Those that exceed its capacity are lost.
    pub fn offer(&mut self, frames: u64) {
        let Some(ring) = &mut self.ring else { return };
        let room = ring.frames_max - ring.waiting;
        ring.waiting += frames.min(room);
        ring.overflows += frames.saturating_sub(room);
    }

    /// Returns the frames transmitted to the port.
    pub fn transmitted(&self) -> Traffic {
        self.sent
    }
}

impl HeaderTemplate {
    fn new(ethernet: [u8; HEADER_BYTES], frame_bytes: usize, is_v4: bool) -> HeaderTemplate {
        let mut bytes = [0; HEADER_BYTES + ipv6::HEADER_BYTES];
        bytes[..HEADER_BYTES].copy_from_slice(&ethernet);
        let protocol = packet::Protocol::UDP;
        if is_v4 {
            let header = ipv4::Repr {
                source: std::net::Ipv4Addr::new(198, 18, 0, 1),
                destination: std::net::Ipv4Addr::UNSPECIFIED,
                protocol,
                ttl: 64,
                traffic_class: 0,
                identification: 0,
                do_not_fragment: true,
                payload_bytes: frame_bytes - HEADER_BYTES - ipv4::HEADER_BYTES,
            };
            header.emit(&mut bytes[HEADER_BYTES..]);
            bytes[HEADER_BYTES + 10..HEADER_BYTES + 12].fill(0);
        } else {
            let header = ipv6::Repr {
                source: std::net::Ipv6Addr::new(0x2001, 0x2, 0, 0, 0, 0, 0, 1),
                destination: std::net::Ipv6Addr::UNSPECIFIED,
                next_header: protocol,
                hop_limit: 64,
                traffic_class: 0,
                flow_label: 0,
                payload_bytes: frame_bytes - HEADER_BYTES - ipv6::HEADER_BYTES,
            };
            header.emit(&mut bytes[HEADER_BYTES..]);
        }
        let sum = Sum::new().add_bytes(&bytes[HEADER_BYTES..HEADER_BYTES + ipv4::HEADER_BYTES]).folded();
        HeaderTemplate { bytes, frame_bytes, sum: u64::from(sum) }
    }

    #[inline]
    fn write_v4(&self, frame: &mut [u8], destination: u32) {
        const END: usize = HEADER_BYTES + ipv4::HEADER_BYTES;
        let Some(frame) = frame.first_chunk_mut::<END>() else { return };
        frame.copy_from_slice(&self.bytes[..END]);
        frame[END - 4..].copy_from_slice(&destination.to_be_bytes());
        let sum = self.sum + u64::from(destination >> 16) + u64::from(destination & 0xffff);
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
        frame[HEADER_BYTES + 10..HEADER_BYTES + 12].copy_from_slice(&sum.to_be_bytes());
    }

    #[inline]
    fn write_v6(&self, frame: &mut [u8], destination: u128) {
        const END: usize = HEADER_BYTES + ipv6::HEADER_BYTES;
        let Some(frame) = frame.first_chunk_mut::<END>() else { return };
        frame.copy_from_slice(&self.bytes);
        frame[END - 16..].copy_from_slice(&destination.to_be_bytes());
    }
}

/// Returns the current index and advances it modulo `count`.
#[inline]
fn next_index(at: &mut usize, count: usize) -> usize {
    let now = *at;
    *at = if now + 1 == count { 0 } else { now + 1 };
    now
}

impl Port for Generator {
    fn receive(&mut self, pool: &mut Pool, into: &mut Vec<Packet>, packets_max: usize) -> io::Result<usize> {
        let waiting = self.ring.as_ref().map_or(u64::MAX, |ring| ring.waiting);
        let count_max = packets_max.min(usize::try_from(waiting).unwrap_or(usize::MAX));
        let mut count = 0;
        while count < count_max {
            let Some(mut packet) = pool.alloc() else { break };
            let header = &self.headers[next_index(&mut self.header, self.headers.len())];
            pool.resize(&mut packet, header.frame_bytes);
            let frame = pool.bytes_mut(&packet);
            match &self.destinations {
                Destinations::V4(all) => header.write_v4(frame, all[next_index(&mut self.destination, all.len())]),
                Destinations::V6(all) => header.write_v6(frame, all[next_index(&mut self.destination, all.len())]),
            }
            into.push(packet);
            count += 1;
        }
        if let Some(ring) = &mut self.ring {
            ring.waiting -= count as u64;
        }
        Ok(count)
    }

    fn transmit(&mut self, pool: &mut Pool, from: &mut VecDeque<Packet>) -> io::Result<usize> {
        let count = from.len();
        for packet in from.drain(..) {
            self.sent.add(packet.on_wire(HEADER_BYTES));
            pool.free(packet);
        }
        Ok(count)
    }

    fn wakes(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn may_sleep(&mut self) -> bool {
        self.ring.as_ref().is_some_and(|ring| ring.waiting == 0)
    }

    fn losses(&self) -> PortLosses {
        let receive_overflows = self.ring.as_ref().map_or(0, |ring| ring.overflows);
        PortLosses { receive_overflows, ..PortLosses::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_arrive_in_order_and_no_more_than_the_wire_holds() {
        let mut pool = Pool::new(16, 256, 32);
        let (mut first, mut second) = pair(4, 100);
        for round in 0..5_u8 {
            let mut queue: VecDeque<Packet> = (0..6).filter_map(|n| pool.alloc_copy(&[round * 8 + n; 60])).collect();
            assert_eq!(first.transmit(&mut pool, &mut queue).expect("memory does not fail"), 4);
            assert_eq!(queue.len(), 2, "the rest stays with the sender");
            queue.drain(..).for_each(|packet| pool.free(packet));
            assert!(!second.may_sleep());
            let mut received = Vec::new();
            assert_eq!(second.receive(&mut pool, &mut received, 3).expect("memory does not fail"), 3);
            assert_eq!(second.receive(&mut pool, &mut received, 3).expect("memory does not fail"), 1);
            assert!(second.may_sleep());
            for (n, packet) in received.drain(..).enumerate() {
                assert_eq!(pool.bytes(&packet), [round * 8 + n as u8; 60]);
                pool.free(packet);
            }
        }
        assert_eq!(pool.available(), 16);
        let mut queue: VecDeque<Packet> = pool.alloc_copy(&[0; 101]).into_iter().collect();
        assert_eq!(first.transmit(&mut pool, &mut queue).expect("memory does not fail"), 1);
        assert_eq!((first.losses().transmit_refused, pool.available()), (1, 16), "longer than a slot of the wire");
    }

    #[test]
    fn generated_packets_are_valid_and_use_destinations_in_turn() {
        let mut pool = Pool::new(16, 256, 32);
        let destinations = [0x0a00_0001, 0xc0a8_ffff, 0xdfff_fffe];
        let mut generator = Generator::new([2; 14], &[60, 128], Destinations::V4(destinations.to_vec()));
        let mut packets = Vec::new();
        assert_eq!(generator.receive(&mut pool, &mut packets, 6).expect("memory does not fail"), 6);
        for (at, packet) in packets.iter().enumerate() {
            let frame = pool.bytes(packet);
            let view = ipv4::Packet::new_checked(&frame[HEADER_BYTES..]).expect("a valid packet");
            assert!(view.verify_checksum(), "packet {at}");
            assert_eq!(view.destination().to_bits(), destinations[at % 3]);
            assert_eq!((frame.len(), view.total_bytes()), ([60, 128][at % 2], [46, 114][at % 2]));
        }
        let mut queue = VecDeque::from(packets);
        generator.transmit(&mut pool, &mut queue).expect("memory does not fail");
        assert_eq!((generator.transmitted().packets, pool.available()), (6, 16));
    }

    #[test]
    fn frames_offered_to_a_full_ring_are_lost_and_counted() {
        let mut pool = Pool::new(16, 256, 32);
        let mut generator = Generator::new([2; 14], &[74], Destinations::V6(vec![1])).with_ring(8);
        generator.offer(5);
        generator.offer(5);
        assert_eq!(generator.losses().receive_overflows, 2);
        let mut packets = Vec::new();
        assert_eq!(generator.receive(&mut pool, &mut packets, 100).expect("memory does not fail"), 8);
        assert!(generator.may_sleep());
        let view = ipv6::Packet::new_checked(&pool.bytes(&packets[0])[HEADER_BYTES..]).expect("a valid packet");
        assert_eq!((view.destination().to_bits(), view.total_bytes()), (1, 60));
    }
}
