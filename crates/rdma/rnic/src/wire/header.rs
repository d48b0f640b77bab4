//! The headers of one packet as values.
//!
//! Source of names and numbers: InfiniBand Architecture Specification 1.x, volume 1, chapter 9 (transport layer).

use std::fmt;

/// A packet sequence number: 24 bits that wrap around. Two numbers are ordered by the shorter distance around the
/// circle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Psn(u32);

impl Psn {
    const BITS: u32 = 24;
    const MASK: u32 = (1 << Self::BITS) - 1;

    /// Creates a number from the lowest 24 bits of `number`.
    pub const fn new(number: u32) -> Self {
        Self(number & Self::MASK)
    }

    /// Returns the value, 0 to 2^24 - 1.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the number that is `packets` later.
    #[must_use]
    pub const fn plus(self, packets: u32) -> Self {
        Self::new(self.0.wrapping_add(packets))
    }

    /// Returns the number before this one.
    #[must_use]
    pub const fn previous(self) -> Self {
        Self::new(self.0.wrapping_sub(1))
    }

    /// Returns the distance from `other` to `self` in packets, -2^23 to 2^23 - 1; negative if `self` is before `other`.
    pub const fn after(self, other: Self) -> i32 {
        let unused = u32::BITS - Self::BITS;
        (self.0.wrapping_sub(other.0) << unused).cast_signed() >> unused
    }
}

impl fmt::Display for Psn {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.0)
    }
}

/// A queue pair number: 24 bits, unique within its NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QpNumber(pub u32);

/// The key with which a peer may use a memory region or window (R_Key).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RKey(pub u32);

/// A transport service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Service {
    /// Reliable connection: each message once, in order, acknowledged.
    Rc,
    /// Unreliable connection: messages in order or not at all, without acknowledgements.
    Uc,
    /// Unreliable datagram: single packets to any queue pair.
    Ud,
}

/// The operation of a packet. `First` and `Middle` packets are full; `Last` and `Only` packets end a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// The first packet of a SEND of several packets.
    SendFirst,
    /// A middle packet of a SEND.
    SendMiddle,
    /// The last packet of a SEND; [`Header::immediate`] holds its immediate data or the key to invalidate.
    SendLast,
    /// A SEND of one packet.
    SendOnly,
    /// The first packet of a WRITE of several packets.
    WriteFirst,
    /// A middle packet of a WRITE.
    WriteMiddle,
    /// The last packet of a WRITE.
    WriteLast,
    /// A WRITE of one packet.
    WriteOnly,
    /// Requests a range of the responder's memory.
    ReadRequest,
    /// The first packet of a READ response of several packets.
    ReadResponseFirst,
    /// A middle packet of a READ response.
    ReadResponseMiddle,
    /// The last packet of a READ response.
    ReadResponseLast,
    /// A READ response of one packet.
    ReadResponseOnly,
    /// A positive or negative acknowledgement; [`Header::aeth`] says which.
    Acknowledge,
    /// The response to an atomic operation, with the value before it.
    AtomicAcknowledge,
    /// Replaces 8 bytes if they are equal to the expected value.
    CompareSwap,
    /// Adds to 8 bytes.
    FetchAdd,
    /// Congestion notification packet (CNP, RoCEv2 annex A17): asks the sender on this queue pair to slow down.
    CongestionNotification,
}

impl Operation {
    /// Returns whether this is a packet of a SEND.
    pub const fn is_send(self) -> bool {
        matches!(self, Self::SendFirst | Self::SendMiddle | Self::SendLast | Self::SendOnly)
    }

    /// Returns whether this is a packet of a WRITE.
    pub const fn is_write(self) -> bool {
        matches!(self, Self::WriteFirst | Self::WriteMiddle | Self::WriteLast | Self::WriteOnly)
    }

    /// Returns whether this is a READ or atomic request, which is answered with data.
    pub const fn is_read_or_atomic(self) -> bool {
        matches!(self, Self::ReadRequest | Self::CompareSwap | Self::FetchAdd)
    }

    /// Returns whether this is a packet of a READ response.
    pub const fn is_read_response(self) -> bool {
        matches!(
            self,
            Self::ReadResponseFirst | Self::ReadResponseMiddle | Self::ReadResponseLast | Self::ReadResponseOnly
        )
    }

    /// Returns whether the packet begins a message, and whether it ends one.
    pub const fn message_bounds(self) -> (bool, bool) {
        match self {
            Self::SendFirst | Self::WriteFirst => (true, false),
            Self::SendMiddle | Self::WriteMiddle => (false, false),
            Self::SendLast | Self::WriteLast => (false, true),
            _ => (true, true),
        }
    }
}

/// What the last packet of a SEND or WRITE delivers to the receiver's completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Immediate {
    /// 32 bits of immediate data (ImmDt).
    Data(u32),
    /// A key that the receiver's NIC invalidates (IETH). Only for SEND.
    Invalidate(RKey),
}

/// RDMA extended transport header (RETH): the responder's memory that a WRITE fills or a READ requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reth {
    /// Virtual address at the responder.
    pub address: u64,
    /// The key of that memory.
    pub key: RKey,
    /// Bytes of the whole message. With the selective extension, every packet of a WRITE carries its own address in
    /// `address`.
    pub bytes: u32,
}

/// Atomic extended transport header (AtomicETH), or the value of an AtomicAckETH in `swap_or_add`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AtomicEth {
    /// Virtual address at the responder, a multiple of 8; 0 in a response.
    pub address: u64,
    /// The key of that memory; 0 in a response.
    pub key: RKey,
    /// The value to store or add; in a response, the value before the operation.
    pub swap_or_add: u64,
    /// The expected value of a compare-and-swap.
    pub compare: u64,
}

/// The meaning of an acknowledgement (AETH syndrome, IBA table 45).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Syndrome {
    /// All packets up to and including this PSN have arrived. The 5-bit code says how many more SENDs the responder has
    /// room for.
    Ack {
        /// The credit code of IBA table 46; 31 means that credits are not used.
        credit_code: u8,
    },
    /// No receive request was posted (RNR NAK); retry after the time of the 5-bit code.
    ReceiverNotReady {
        /// The RNR timer code of IBA table 46.
        timer_code: u8,
    },
    /// PSN sequence error: a packet is missing; retransmit from this PSN on.
    SequenceError,
    /// Invalid request: too long, misaligned or out of sequence.
    InvalidRequest,
    /// Remote access error: key, bounds or access rights are wrong.
    RemoteAccess,
    /// Remote operational error: the responder failed.
    RemoteOperation,
}

/// ACK extended transport header (AETH).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Aeth {
    /// The syndrome.
    pub syndrome: Syndrome,
    /// Message sequence number (MSN): messages that the responder has completed, 24 bits that wrap around.
    pub msn: u32,
}

/// Placement header of the selective extension: where a packet belongs, so that its payload can be placed while earlier
/// packets are missing. SRNIC's SEND carries {message number, offset} and its READ {SQ index, offset}; responses echo
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlacementHeader {
    /// For SENDs and WRITEs with immediate data: the receive request that the message consumes, counted on this queue
    /// pair from 0, mod 2^24. For READs, atomics and their responses: the index in the requester's send queue.
    pub message: u32,
    /// The index of the packet in its message, from 0.
    pub packet: u32,
    /// The sender's clock when the packet left, in units of 1.024 us (2^10 ns), mod 2^16. [`SelectiveAck`] echoes it.
    pub sent: u16,
}

/// Selective acknowledgement (SACK) of the selective extension, which follows the AETH.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SelectiveAck {
    /// All packets before this PSN have arrived.
    pub expected: Psn,
    /// The PSN of the packet that caused this acknowledgement.
    pub newest: Psn,
    /// Bit i: the packet `expected + 1 + i` has arrived.
    pub arrived: u128,
    /// Number of packets with a congestion mark since the last acknowledgement.
    pub marked: u16,
    /// [`PlacementHeader::sent`] of the packet `newest`.
    pub echo: u16,
}

/// The headers of a packet after UDP: BTH and the extended headers of its operation. The payload is kept separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The sender's transport service.
    pub service: Service,
    /// The operation.
    pub operation: Operation,
    /// The queue pair of the receiving NIC.
    pub destination: QpNumber,
    /// The packet sequence number.
    pub psn: Psn,
    /// Whether the sender requests an acknowledgement.
    pub ack_request: bool,
    /// Solicited event: whether the receiver's completion queue notifies the program.
    pub solicited: bool,
    /// BECN: packets in the opposite direction met congestion (FECN or a mark).
    pub congestion_echo: bool,
    /// Bytes of payload, without padding.
    pub payload_bytes: u32,
    /// RETH of WRITEs and READs.
    pub reth: Option<Reth>,
    /// AtomicETH or AtomicAckETH.
    pub atomic: Option<AtomicEth>,
    /// ImmDt or IETH.
    pub immediate: Option<Immediate>,
    /// AETH of acknowledgements and responses.
    pub aeth: Option<Aeth>,
    /// DETH of datagrams: the queue key, and the sender's queue pair.
    pub datagram: Option<(u32, QpNumber)>,
    /// Placement header of the selective extension, on requests and responses.
    pub placement: Option<PlacementHeader>,
    /// Selective acknowledgement of the selective extension.
    pub sack: Option<SelectiveAck>,
}

impl Header {
    /// Creates a header without flags, extended headers and payload.
    pub const fn bare(service: Service, operation: Operation, destination: QpNumber, psn: Psn) -> Self {
        Self {
            service,
            operation,
            destination,
            psn,
            ack_request: false,
            solicited: false,
            congestion_echo: false,
            payload_bytes: 0,
            reth: None,
            atomic: None,
            immediate: None,
            aeth: None,
            datagram: None,
            placement: None,
            sack: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_numbers_are_ordered_by_the_shorter_distance() {
        let last = Psn::new(u32::MAX);
        assert_eq!(last.get(), (1 << 24) - 1);
        assert_eq!((last.plus(1), Psn::new(0).previous()), (Psn::new(0), last));
        assert_eq!(last.plus(1).after(last), 1);
        assert_eq!(last.after(last.plus(1)), -1);
        assert_eq!(Psn::new(1 << 23).after(Psn::new(0)), -(1 << 23));
    }
}
