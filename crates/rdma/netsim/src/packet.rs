//! Packets in flight, kept in one arena so that no packet needs an allocation of its own.

use crate::topology::{HOSTS_MAX, HostId};

/// Largest size of a packet on the wire, in bytes: a jumbo frame with preamble and inter-frame gap.
pub const PACKET_BYTES_MAX: u32 = 9_238;
/// Index that means no packet: the end of a list.
const NONE: u32 = u32::MAX;

/// The index of a packet in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PacketId(pub u32);

/// The part of a packet that every switch reads, four to a cache line.
///
/// The transport header lies in an array of its own, because only the hosts touch it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame {
    /// The value that ECMP hashes.
    pub label: u32,
    /// The next packet in the same queue, or the next free index.
    next: u32,
    /// Size on the wire, with headers, checksums, preamble and gap.
    pub bytes: u16,
    from: u16,
    to: u16,
    pub class: TrafficClass,
    /// The set of [`PacketFlag`]s.
    flags: u8,
}

/// The part of a packet that only networks with PFC or trimming need.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FrameExtra {
    /// The port by which it entered the switch that holds it.
    pub ingress: u32,
    /// Its size in bytes once it is trimmed.
    pub trimmed_bytes: u16,
}

/// Something that happened to a packet on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum PacketFlag {
    /// A switch set its ECN congestion mark.
    EcnMarked = 1,
    /// A switch cut off its payload.
    Trimmed = 1 << 1,
    /// Its checksum is wrong.
    Corrupt = 1 << 2,
}

/// Which of a port's two queues a packet takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrafficClass {
    /// The priority queue: trimmed packets, and what endpoints put there.
    Control,
    /// Everything else; only this queue is paused and marked.
    Data,
}

/// All packets in flight.
#[derive(Debug)]
pub(crate) struct PacketArena<Header> {
    frames: Vec<Frame>,
    headers: Vec<Header>,
    /// Empty unless `has_extras`.
    extras: Vec<FrameExtra>,
    has_extras: bool,
    free: u32,
    in_use: usize,
}

impl<Header: Copy> PacketArena<Header> {
    /// Creates an empty arena; `has_extras` says whether it keeps a [`FrameExtra`] for each packet.
    pub fn new(has_extras: bool) -> Self {
        let (frames, headers, extras) = (Vec::new(), Vec::new(), Vec::new());
        Self { frames, headers, extras, has_extras, free: NONE, in_use: 0 }
    }

    pub fn add(&mut self, frame: Frame, extra: FrameExtra, header: Header) -> PacketId {
        self.in_use += 1;
        if self.free == NONE {
            self.frames.push(frame);
            self.headers.push(header);
            if self.has_extras {
                self.extras.push(extra);
            }
            return PacketId(u32::try_from(self.frames.len() - 1).expect("fewer than 2^32 packets are in flight"));
        }
        let id = PacketId(self.free);
        self.free = self.frames[id.0 as usize].next;
        self.frames[id.0 as usize] = frame;
        self.headers[id.0 as usize] = header;
        if self.has_extras {
            self.extras[id.0 as usize] = extra;
        }
        id
    }

    pub fn copy(&mut self, id: PacketId) -> PacketId {
        self.add(*self.frame(id), self.extra(id), *self.header(id))
    }

    /// Returns the packet's [`FrameExtra`], or the default if the arena keeps none.
    pub fn extra(&self, id: PacketId) -> FrameExtra {
        self.extras.get(id.0 as usize).copied().unwrap_or_default()
    }

    pub fn set_ingress(&mut self, id: PacketId, ingress: u32) {
        if let Some(extra) = self.extras.get_mut(id.0 as usize) {
            extra.ingress = ingress;
        }
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

    /// Returns the number of packets in flight.
    pub fn in_use(&self) -> usize {
        self.in_use
    }

    pub fn memory_bytes(&self) -> usize {
        self.frames.capacity() * size_of::<Frame>()
            + self.headers.capacity() * size_of::<Header>()
            + self.extras.capacity() * size_of::<FrameExtra>()
    }
}

// Host numbers and packet sizes fit 16 bits.
const _: () = assert!(HOSTS_MAX <= 1 << u16::BITS && PACKET_BYTES_MAX <= u16::MAX as u32);

impl Frame {
    pub fn new(bytes: u16, from: HostId, to: HostId, label: u32, class: TrafficClass) -> Self {
        Self { bytes, from: from.0 as u16, to: to.0 as u16, label, next: NONE, class, flags: 0 }
    }

    pub fn from(&self) -> HostId {
        HostId(self.from.into())
    }

    pub fn to(&self) -> HostId {
        HostId(self.to.into())
    }

    pub fn has(&self, flag: PacketFlag) -> bool {
        self.flags & flag as u8 != 0
    }

    pub fn set(&mut self, flag: PacketFlag) {
        self.flags |= flag as u8;
    }
}

/// A FIFO queue of packets, linked through the arena.
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

    pub fn push<Header: Copy>(&mut self, arena: &mut PacketArena<Header>, id: PacketId) {
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

    pub fn pop<Header: Copy>(&mut self, arena: &PacketArena<Header>) -> Option<PacketId> {
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
    fn indices_are_reused_and_queues_keep_their_order() {
        let mut arena: PacketArena<u64> = PacketArena::new(false);
        let frame = |bytes| Frame::new(bytes, HostId(0), HostId(1), 0, TrafficClass::Data);
        let mut fifo = Fifo::EMPTY;
        for round in 0..3_u64 {
            for index in 0..10 {
                let id = arena.add(frame(100 + index as u16), FrameExtra::default(), round * 10 + index);
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
        assert_eq!((arena.in_use(), arena.frames.len()), (0, 10));
    }

    #[test]
    fn a_frame_fits_a_quarter_of_a_cache_line() {
        assert!(size_of::<Frame>() <= 16, "{}", size_of::<Frame>());
    }

    #[test]
    fn a_copy_has_the_frame_the_flags_and_the_extra_of_its_original() {
        let mut arena: PacketArena<()> = PacketArena::new(true);
        let frame = Frame::new(9_238, HostId(HOSTS_MAX - 1), HostId(7), 3, TrafficClass::Data);
        let id = arena.add(frame, FrameExtra { ingress: 0, trimmed_bytes: 100 }, ());
        arena.set_ingress(id, 70_000);
        arena.frame_mut(id).set(PacketFlag::Trimmed);
        let copy = arena.copy(id);
        let (frame, extra) = (*arena.frame(copy), arena.extra(copy));
        assert_eq!((frame.bytes, frame.from(), frame.to()), (9_238, HostId(HOSTS_MAX - 1), HostId(7)));
        assert_eq!(
            [PacketFlag::EcnMarked, PacketFlag::Trimmed, PacketFlag::Corrupt].map(|flag| frame.has(flag)),
            [false, true, false]
        );
        assert_eq!((extra.ingress, extra.trimmed_bytes), (70_000, 100));
    }
}
