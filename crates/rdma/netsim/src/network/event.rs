//! The events of a run.

use crate::packet::PacketId;

/// Something that happens at a point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A packet arrives at a port.
    Arrive { port: u32, packet: PacketId },
    /// A port has finished its transmission.
    TxDone { port: u32 },
    /// A host's deadline has come.
    Wake { host: u32 },
    /// The next flow of the list starts.
    StartFlow,
    /// A neighbor pauses or resumes a port.
    Pause { port: u32, is_on: bool },
    /// The run ends.
    Stop,
}

/// An event packed into 8 bytes, because a hundred thousand of them are pending: the kind in the highest bits, then the
/// port or host, then the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PackedEvent(u32, u32);

/// Bits of a port or host number in a [`PackedEvent`].
const NUMBER_BITS: u32 = 29;
/// Largest number of ports.
pub(super) const PORTS_MAX: usize = 1 << NUMBER_BITS;

impl From<Event> for PackedEvent {
    fn from(event: Event) -> Self {
        let (kind, number, packet) = match event {
            Event::Arrive { port, packet } => (0, port, packet.0),
            Event::TxDone { port } => (1, port, 0),
            Event::Wake { host } => (2, host, 0),
            Event::StartFlow => (3, 0, 0),
            Event::Pause { port, is_on } => (4, port, is_on.into()),
            Event::Stop => (5, 0, 0),
        };
        Self(kind << NUMBER_BITS | number, packet)
    }
}

impl From<PackedEvent> for Event {
    fn from(PackedEvent(kind_and_number, packet): PackedEvent) -> Self {
        let number = kind_and_number % PORTS_MAX as u32;
        match kind_and_number >> NUMBER_BITS {
            0 => Self::Arrive { port: number, packet: PacketId(packet) },
            1 => Self::TxDone { port: number },
            2 => Self::Wake { host: number },
            3 => Self::StartFlow,
            4 => Self::Pause { port: number, is_on: packet != 0 },
            _ => Self::Stop,
        }
    }
}

const _: () = assert!(size_of::<PackedEvent>() == 8, "an event with its time exceeds a quarter of a cache line");
