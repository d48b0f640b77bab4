//! Vectors of packets, and the stages through which they pass.

use fib::GroupId;

use crate::{AdjacencyId, Hop, NodeId, Packet, PortId};

/// Maximum number of packets in a vector.
pub const VECTOR_PACKETS_MAX: usize = 256;

/// A stage of the fast path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// Frames are parsed, validated and classified.
    Parse,
    /// Exception packets are processed one at a time.
    Slow,
    /// Destinations are looked up in the FIB.
    Lookup,
    /// A next hop is selected, and the TTL is decremented.
    Rewrite,
    /// Packets get an Ethernet header and are placed in transmit queues.
    Enqueue,
}

/// Observes the ends of stages, for measurements.
pub trait StageProbe {
    /// Called when a stage ends that processed `packets` packets.
    fn mark(&mut self, stage: Stage, packets: usize);
}

/// No measurement.
impl StageProbe for () {
    #[inline(always)]
    fn mark(&mut self, _stage: Stage, _packets: usize) {}
}

/// The state that stages pass on, in arrays indexed by packet.
pub(super) struct Vector<A> {
    pub(super) packets: Vec<Packet>,
    /// Ingress ports.
    pub(super) ports: Box<[PortId; VECTOR_PACKETS_MAX]>,
    pub(super) addresses: Box<[A; VECTOR_PACKETS_MAX]>,
    pub(super) groups: Box<[Option<GroupId>; VECTOR_PACKETS_MAX]>,
    /// Selected next hops; [`SLOW_PATH`] marks packets for the slow path.
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

    /// Adds a packet; at most [`VECTOR_PACKETS_MAX`] fit.
    #[inline(always)]
    pub(super) fn push(&mut self, packet: Packet, port: PortId, address: A) {
        let at = self.packets.len() % VECTOR_PACKETS_MAX;
        self.ports[at] = port;
        self.addresses[at] = address;
        self.packets.push(packet);
    }
}

/// Marks a packet for the slow path, which decides where it goes or why it is dropped.
pub(super) const SLOW_PATH: Hop = Hop { node: NodeId(0), port: PortId::NOWHERE, adjacency: AdjacencyId(u16::MAX) };

/// The packets between the stages.
pub(super) struct Vectors {
    pub(super) v4: Vector<u32>,
    pub(super) v6: Vector<u128>,
    /// Exception packets, as whole frames.
    pub(super) slow: Vec<Packet>,
}

impl Vectors {
    pub(super) fn new() -> Vectors {
        Vectors { v4: Vector::new(), v6: Vector::new(), slow: Vec::with_capacity(VECTOR_PACKETS_MAX) }
    }
}
