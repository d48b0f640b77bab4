//! Packets under way: one place for all of them, and nothing is allocated for one.

use crate::topology::HostId;

/// No packet: the end of a list.
const NONE: u32 = u32::MAX;

/// The place of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PacketId(u32);

/// What the network knows of a packet; what it says to its receiver lies elsewhere, and is touched at the ends only.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    /// On the wire, with everything: headers, checksums, preamble and gap.
    pub bytes: u32,
    pub from: HostId,
    pub to: HostId,
    /// What path selection by flow looks at.
    pub label: u32,
    /// By which port it came into the switch that holds it.
    pub ingress: u32,
    /// The packet behind it in its queue, or the next free place.
    next: u32,
    /// Bytes that are left when it is trimmed.
    pub trimmed_bytes: u16,
    pub class: Class,
    /// Congestion was met.
    pub is_marked: bool,
    /// The payload was cut off.
    pub is_trimmed: bool,
    /// Its checksum is wrong.
    pub is_corrupt: bool,
}

/// Which of a port's queues a packet takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Before everything else: trimmed packets, and what endpoints choose.
    Control,
    /// Everything else; this is what is paused and marked.
    Data,
}

/// All packets under way.
#[derive(Debug)]
pub(crate) struct Arena<Header> {
    frames: Vec<Frame>,
    headers: Vec<Header>,
    free: u32,
    in_use: usize,
    pub in_use_max: usize,
}

impl<Header: Copy> Arena<Header> {
    pub fn new() -> Self {
        Self { frames: Vec::new(), headers: Vec::new(), free: NONE, in_use: 0, in_use_max: 0 }
    }

    pub fn add(&mut self, frame: Frame, header: Header) -> PacketId {
        self.in_use += 1;
        if self.free == NONE {
            self.in_use_max = self.in_use;
            self.frames.push(frame);
            self.headers.push(header);
            return PacketId(u32::try_from(self.frames.len() - 1).expect("fewer than 2^32 packets are under way"));
        }
        let id = PacketId(self.free);
        self.free = self.frames[id.0 as usize].next;
        self.frames[id.0 as usize] = frame;
        self.headers[id.0 as usize] = header;
        id
    }

    pub fn copy(&mut self, id: PacketId) -> PacketId {
        self.add(*self.frame(id), *self.header(id))
    }

    pub fn remove(&mut self, id: PacketId) {
        self.in_use -= 1;
        self.frames[id.0 as usize].next = self.free;
        self.free = id.0;
    }

    pub fn frame(&self, id: PacketId) -> &Frame {
        &self.frames[id.0 as usize]
    }

    pub fn frame_mut(&mut self, id: PacketId) -> &mut Frame {
        &mut self.frames[id.0 as usize]
    }

    pub fn header(&self, id: PacketId) -> &Header {
        &self.headers[id.0 as usize]
    }

    /// Packets under way now.
    pub fn in_use(&self) -> usize {
        self.in_use
    }

    pub fn memory_bytes(&self) -> usize {
        self.frames.capacity() * size_of::<Frame>() + self.headers.capacity() * size_of::<Header>()
    }
}

impl Frame {
    pub fn new(bytes: u32, from: HostId, to: HostId, label: u32, class: Class, trimmed_bytes: u16) -> Self {
        Self {
            bytes,
            from,
            to,
            label,
            ingress: NONE,
            next: NONE,
            trimmed_bytes,
            class,
            is_marked: false,
            is_trimmed: false,
            is_corrupt: false,
        }
    }
}

/// Packets that wait, the first one first: a list through the arena.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fifo {
    head: u32,
    tail: u32,
    pub bytes: u64,
}

impl Fifo {
    pub const EMPTY: Self = Self { head: NONE, tail: NONE, bytes: 0 };

    pub fn is_empty(&self) -> bool {
        self.head == NONE
    }

    pub fn push<Header: Copy>(&mut self, arena: &mut Arena<Header>, id: PacketId) {
        let frame = arena.frame_mut(id);
        frame.next = NONE;
        self.bytes += u64::from(frame.bytes);
        if self.head == NONE {
            self.head = id.0;
        } else {
            arena.frame_mut(PacketId(self.tail)).next = id.0;
        }
        self.tail = id.0;
    }

    pub fn pop<Header: Copy>(&mut self, arena: &Arena<Header>) -> Option<PacketId> {
        if self.head == NONE {
            return None;
        }
        let id = PacketId(self.head);
        self.head = arena.frame(id).next;
        self.bytes -= u64::from(arena.frame(id).bytes);
        Some(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_used_again_and_queues_keep_their_order() {
        let mut arena: Arena<u64> = Arena::new();
        let frame = |bytes| Frame::new(bytes, HostId(0), HostId(1), 0, Class::Data, 64);
        let mut fifo = Fifo::EMPTY;
        for round in 0..3_u64 {
            for index in 0..10 {
                let id = arena.add(frame(100 + index as u32), round * 10 + index);
                fifo.push(&mut arena, id);
            }
            assert_eq!(fifo.bytes, 1045);
            for index in 0..10 {
                let id = fifo.pop(&arena).unwrap();
                assert_eq!(*arena.header(id), round * 10 + index);
                arena.remove(id);
            }
            assert!(fifo.is_empty() && fifo.bytes == 0 && fifo.pop(&arena).is_none());
        }
        assert_eq!((arena.in_use(), arena.in_use_max, arena.frames.len()), (0, 10, 10));
    }

    #[test]
    fn what_the_network_knows_of_a_packet_fits_half_a_cache_line() {
        assert!(size_of::<Frame>() <= 32, "{}", size_of::<Frame>());
    }
}
