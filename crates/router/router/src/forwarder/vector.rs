//! Vectors of packets, and the stages that they pass through.

use fib::GroupId;

use crate::{AdjacencyId, Hop, NodeId, Packet, PortId};

/// The most packets that go through the stages together.
pub const VECTOR_PACKETS_MAX: usize = 256;

/// A stage of the fast path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// Frames are taken apart and checked.
    Parse,
    /// What is not usual is dealt with, a packet at a time.
    Slow,
    /// Destinations are looked up.
    Lookup,
    /// A hop is chosen and taken from the packets.
    Rewrite,
    /// Packets get their frame's header and go to their queues.
    Enqueue,
}

/// Is told when a stage ends: a clock, for who measures.
pub trait StageProbe {
    /// So many packets went through a stage, which ends now.
    fn mark(&mut self, stage: Stage, packets: usize);
}

/// Nobody measures.
impl StageProbe for () {
    #[inline(always)]
    fn mark(&mut self, _stage: Stage, _packets: usize) {}
}

/// What the stages hand on, by packet.
pub(super) struct Vector<A> {
    pub(super) packets: Vec<Packet>,
    /// Where each came in.
    pub(super) ports: Box<[PortId; VECTOR_PACKETS_MAX]>,
    pub(super) addresses: Box<[A; VECTOR_PACKETS_MAX]>,
    pub(super) groups: Box<[Option<GroupId>; VECTOR_PACKETS_MAX]>,
    /// Where each goes; [`SLOW_PATH`] sends it to the slow path.
    pub(super) hops: Box<[Hop; VECTOR_PACKETS_MAX]>,
    pub(super) flows: Box<[u32; VECTOR_PACKETS_MAX]>,
}

impl<A: Copy + Default> Vector<A> {
    fn new() -> Vector<A> {
        Vector {
            packets: Vec::with_capacity(VECTOR_PACKETS_MAX),
            ports: Box::new([PortId::NOWHERE; VECTOR_PACKETS_MAX]),
            addresses: Box::new([A::default(); VECTOR_PACKETS_MAX]),
            groups: Box::new([None; VECTOR_PACKETS_MAX]),
            hops: Box::new([SLOW_PATH; VECTOR_PACKETS_MAX]),
            flows: Box::new([0; VECTOR_PACKETS_MAX]),
        }
    }

    /// One more, of those that a vector has at most.
    #[inline(always)]
    pub(super) fn push(&mut self, packet: Packet, port: PortId, address: A) {
        let at = self.packets.len() % VECTOR_PACKETS_MAX;
        self.ports[at] = port;
        self.addresses[at] = address;
        self.packets.push(packet);
    }
}

/// The slow path finds out where it goes, and why not.
pub(super) const SLOW_PATH: Hop = Hop { node: NodeId(0), port: PortId::NOWHERE, adjacency: AdjacencyId(u16::MAX) };

/// Room for the packets that are under way between stages.
pub(super) struct Vectors {
    pub(super) v4: Vector<u32>,
    pub(super) v6: Vector<u128>,
    /// Whole frames.
    pub(super) slow: Vec<Packet>,
}

impl Vectors {
    pub(super) fn new() -> Vectors {
        Vectors { v4: Vector::new(), v6: Vector::new(), slow: Vec::with_capacity(VECTOR_PACKETS_MAX) }
    }
}
