//! The headers of one packet, as values: the engine's currency, live and simulated.
//!
//! Source of names and numbers: InfiniBand Architecture Specification 1.x, volume 1, chapter 9 (transport layer).

use std::fmt;

/// A packet sequence number: 24 bits that wrap; the order of two numbers is that of the shorter way around.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Psn(u32);

impl Psn {
    const BITS: u32 = 24;
    const MASK: u32 = (1 << Self::BITS) - 1;

    /// The number's lowest 24 bits.
    pub const fn new(number: u32) -> Self {
        Self(number & Self::MASK)
    }

    /// From 0 to 2^24 - 1.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number `packets` later.
    #[must_use]
    pub const fn plus(self, packets: u32) -> Self {
        Self::new(self.0.wrapping_add(packets))
    }

    /// How many packets `self` is after `other`; negative when before: -2^23 to 2^23 - 1.
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

/// The number of a queue pair at its NIC: 24 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QpNumber(pub u32);

/// The key by which a remote NIC may use a memory region or window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RKey(pub u32);

/// What a queue pair promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Service {
    /// Reliable connection: once, in order, acknowledged.
    Rc,
    /// Unreliable connection: in order or not at all, never acknowledged.
    Uc,
    /// Unreliable datagram: single packets to any queue pair.
    Ud,
}

/// What a packet is for. `First` and `Middle` packets are full, `Last` and `Only` end a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// The first packet of a SEND of several.
    SendFirst,
    /// One in the middle.
    SendMiddle,
    /// The last one; what else it carries is in [`Header::immediate`].
    SendLast,
    /// A SEND of one packet.
    SendOnly,
    /// The first packet of a WRITE of several.
    WriteFirst,
    /// One in the middle.
    WriteMiddle,
    /// The last one.
    WriteLast,
    /// A WRITE of one packet.
    WriteOnly,
    /// Asks for a range of the responder's memory.
    ReadRequest,
    /// The first packet of an answer of several.
    ReadResponseFirst,
    /// One in the middle.
    ReadResponseMiddle,
    /// The last one.
    ReadResponseLast,
    /// An answer of one packet.
    ReadResponseOnly,
    /// Acknowledges, or says what went wrong: [`Header::ack`].
    Acknowledge,
    /// The answer to an atomic operation: the value before.
    AtomicAcknowledge,
    /// Replaces 8 bytes if they are what was expected.
    CompareSwap,
    /// Adds to 8 bytes.
    FetchAdd,
    /// Congestion notification (RoCEv2 annex A17): the sender of this queue pair should slow down.
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

/// What the last packet of a SEND or WRITE hands to the receiver's completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Immediate {
    /// 32 bits of the sender's choice (ImmDt).
    Data(u32),
    /// A key that the receiver's NIC invalidates (IETH). SEND only.
    Invalidate(RKey),
}

/// RETH: which of the responder's memory a WRITE fills or a READ asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reth {
    /// Virtual address at the responder.
    pub address: u64,
    /// Its key.
    pub key: RKey,
    /// Bytes of the whole message; with SRNIC's extension every packet of a WRITE has its own address in `address`.
    pub bytes: u32,
}

/// AtomicETH, or the value of an AtomicAckETH in `swap_or_add`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AtomicEth {
    /// Virtual address at the responder, a multiple of 8; 0 in an answer.
    pub address: u64,
    /// Its key; 0 in an answer.
    pub key: RKey,
    /// What is stored or added; in an answer, the value before.
    pub swap_or_add: u64,
    /// What must be there for the swap.
    pub compare: u64,
}

/// What an acknowledgement says (AETH syndrome, table 45).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Syndrome {
    /// All before and with this packet's number arrived; how many more SENDs there is room for, as the 5-bit code.
    Ack {
        /// The code of table 46; 31: credits are not used.
        credit_code: u8,
    },
    /// No receive was posted; try again after the time of this 5-bit code.
    ReceiverNotReady {
        /// The code of table 46 (RNR timer).
        timer_code: u8,
    },
    /// A number was skipped: send again from this packet's number on.
    SequenceError,
    /// The request cannot be: too long, misaligned, out of order.
    InvalidRequest,
    /// Key, bounds or rights are wrong.
    RemoteAccess,
    /// The responder failed.
    RemoteOperation,
}

/// AETH.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Aeth {
    /// What is said.
    pub syndrome: Syndrome,
    /// Messages that the responder has completed: 24 bits that wrap.
    pub messages: u32,
}

/// Where a packet of a selective policy belongs, so that it can be placed before those that are missing (SRNIC's
/// extension: SEND carries {message number, offset}, READ carries {SQ index, offset}, echoed by responses).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlacementHeader {
    /// Of SENDs and WRITEs with immediate: which receive request it takes, counted on this queue pair from 0, mod 2^24.
    /// Of READs and atomics and their answers: the index in the requester's send queue.
    pub message: u32,
    /// Which packet of its message this is, counted from 0.
    pub packet: u32,
    /// The sender's clock when it left, in units of 1.024 us (of 2^10 ns), mod 2^16; echoed by [`SelectiveAck`].
    pub sent: u16,
}

/// What an acknowledgement of a selective policy adds to AETH (SRNIC's and IRN's SACK).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SelectiveAck {
    /// All before this number arrived.
    pub expected: Psn,
    /// The packet that made this acknowledgement.
    pub newest: Psn,
    /// Bit i: the packet `expected + 1 + i` arrived.
    pub arrived: u128,
    /// Packets marked by congestion since the last acknowledgement.
    pub marked: u16,
    /// [`PlacementHeader::sent`] of `newest`.
    pub echo: u16,
}

/// The headers of a packet after UDP: BTH and whatever its operation carries. The payload goes beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The sender's service.
    pub service: Service,
    /// What the packet is for.
    pub operation: Operation,
    /// To which queue pair of the receiving NIC.
    pub destination: QpNumber,
    /// Its number.
    pub psn: Psn,
    /// Whether the sender wants an acknowledgement soon.
    pub ack_request: bool,
    /// Whether the receiver's program wants to be woken.
    pub solicited: bool,
    /// Congestion was met on the way there (FECN), told to the sender by BECN of the way back.
    pub congestion_echo: bool,
    /// Bytes of payload, without padding.
    pub payload_bytes: u32,
    /// RETH of WRITEs and READs.
    pub reth: Option<Reth>,
    /// AtomicETH or AtomicAckETH.
    pub atomic: Option<AtomicEth>,
    /// ImmDt or IETH.
    pub immediate: Option<Immediate>,
    /// AETH of answers.
    pub aeth: Option<Aeth>,
    /// DETH of datagrams: the sender's queue key and queue pair.
    pub datagram: Option<(u32, QpNumber)>,
    /// The extension of selective policies, on requests and their answers.
    pub placement: Option<PlacementHeader>,
    /// The extension of selective policies, on acknowledgements.
    pub sack: Option<SelectiveAck>,
}

impl Header {
    /// Nothing but who and what.
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
    fn numbers_of_packets_are_ordered_by_the_shorter_way_around() {
        let last = Psn::new(u32::MAX);
        assert_eq!(last.get(), (1 << 24) - 1);
        assert_eq!(last.plus(1), Psn::new(0));
        assert_eq!(last.plus(1).after(last), 1);
        assert_eq!(last.after(last.plus(1)), -1);
        assert_eq!(Psn::new(1 << 23).after(Psn::new(0)), -(1 << 23));
    }
}
