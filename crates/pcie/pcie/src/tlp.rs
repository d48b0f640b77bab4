//! Transaction layer packets outside flit mode: what they say, how they are written, and what they cost on the wire.
//!
//! * [`Repr`] is a packet's meaning, small enough to be copied about: the simulator's currency.
//! * [`packet`]: [`Packet`] looks at bytes that anybody may have sent; [`Repr::parse`] and [`Repr::emit`] lead from one
//!   to the other.
//! * [`prefix`], [`crc`], [`dllp`]: what stands before a packet, behind it and between two.
//! * [`explain`], [`dump`]: a packet field by field, and packets in text, for people.
//!
//! Source: PCI Express Base Specification 5.0, chapters 2 and 3. In flit mode (generation 6) headers differ; what a
//! packet costs there is the model's affair.

pub mod crc;
pub mod dllp;
pub mod dump;
pub mod explain;
pub mod packet;
pub mod prefix;
#[cfg(test)]
mod tests;

pub use dllp::Dllp;
pub use packet::{Packet, PacketError};
pub use prefix::Prefix;

use std::fmt;

use crate::link::AddressWidth;

/// Bytes of a double word, the unit of headers and payloads.
pub const DW_BYTES: u32 = 4;
/// Framing, sequence number and link CRC of a packet outside flit mode: start and end symbols, two bytes of sequence
/// and four of CRC up to generation 2; a start token of four bytes with the sequence in it, and the CRC, up to
/// generation 5.
pub const FRAMING_BYTES: u32 = 8;
/// Bytes of a data link layer packet with its framing outside flit mode.
pub const DLLP_BYTES: u32 = 8;
/// Bytes of the end-to-end checksum.
pub const ECRC_BYTES: u32 = 4;
/// Payload bytes that one data credit stands for.
pub const DATA_CREDIT_BYTES: u32 = 16;
/// The largest payload or request of all, in double words.
pub const LENGTH_DW_MAX: u32 = 1024;

/// A function of a device: eight bits of bus, five of device, three of function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DeviceId(pub u16);

impl fmt::Display for DeviceId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:02x}:{:02x}.{}", self.0 >> 8, self.0 >> 3 & 0x1f, self.0 & 7)
    }
}

/// What a packet is and what it is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Repr {
    /// A memory request.
    Memory(MemoryRequest),
    /// A request to I/O space.
    Io(IoRequest),
    /// A configuration request.
    Config(ConfigRequest),
    /// A completion, with or without data.
    Completion(Completion),
    /// A message.
    Message(Message),
}

/// What a memory request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryOp {
    /// MRd: completions with data answer.
    Read,
    /// MWr: posted, nothing answers.
    Write,
    /// FetchAdd: a completion brings the old value.
    FetchAdd,
    /// Swap: a completion brings the old value.
    Swap,
    /// CAS: carries what to compare with, then what to write; a completion brings the old value.
    CompareAndSwap,
    /// DMWr, a deferrable write: answered by a completion without data.
    DeferrableWrite,
}

/// MRd, MWr, DMWr or an atomic operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryRequest {
    /// What it asks for.
    pub op: MemoryOp,
    /// Address of the first double word: a multiple of four.
    pub address: u64,
    /// Header of three or four double words.
    pub width: AddressWidth,
    /// Double words asked for or carried, 1 to 1024.
    pub length_dw: u32,
    /// Which bytes of the first double word count. Not used by atomic operations, nor with hints.
    pub first_byte_enable: u8,
    /// Which bytes of the last double word count; 0 when there is one only.
    pub last_byte_enable: u8,
    /// Who asks.
    pub requester: DeviceId,
    /// Names the request in its completions; ten bits.
    pub tag: u16,
    /// Common to all packets.
    pub common: Common,
}

/// What every packet has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Common {
    /// Traffic class, 0 to 7.
    pub traffic_class: u8,
    /// ID-based ordering (IDO), relaxed ordering (RO), no snoop (NS): bits 2, 1, 0.
    pub attributes: u8,
    /// Translated or not (AT), 0 to 3.
    pub address_type: u8,
    /// How the data will be used (TH, PH), 0 to 3; memory requests only.
    pub processing_hint: Option<u8>,
    /// The payload is known to be wrong (EP).
    pub is_poisoned: bool,
    /// A checksum follows (TD).
    pub has_ecrc: bool,
}

/// IORd or IOWr; one double word at a 32-bit address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IoRequest {
    /// IOWr rather than IORd.
    pub is_write: bool,
    /// Address of the double word: a multiple of four.
    pub address: u32,
    /// Which bytes count.
    pub first_byte_enable: u8,
    /// Who asks.
    pub requester: DeviceId,
    /// Names the request in its completion; ten bits.
    pub tag: u16,
    /// Common to all packets.
    pub common: Common,
}

/// CfgRd or CfgWr, of type 0 or 1; one double word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConfigRequest {
    /// CfgWr rather than CfgRd.
    pub is_write: bool,
    /// Type 1: to be passed on by a bridge.
    pub is_type_1: bool,
    /// Whose registers.
    pub target: DeviceId,
    /// Which register, in bytes: 0 to 4092, a multiple of four.
    pub register: u16,
    /// Which bytes count.
    pub first_byte_enable: u8,
    /// Who asks.
    pub requester: DeviceId,
    /// Names the request in its completion; ten bits.
    pub tag: u16,
    /// Common to all packets.
    pub common: Common,
}

/// How a request went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CompletionStatus {
    /// SC.
    Successful,
    /// UR.
    UnsupportedRequest,
    /// CRS.
    ConfigurationRetry,
    /// CA.
    CompleterAbort,
}

/// Cpl or CplD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Completion {
    /// Who answers.
    pub completer: DeviceId,
    /// Who had asked.
    pub requester: DeviceId,
    /// Of the request.
    pub tag: u16,
    /// How it went.
    pub status: CompletionStatus,
    /// Bytes of the request that are still to come, these included: 1 to 4096.
    pub byte_count: u16,
    /// Low seven bits of the address of the first byte carried.
    pub lower_address: u8,
    /// Double words carried: 0 makes it a Cpl.
    pub length_dw: u32,
    /// Common to all packets.
    pub common: Common,
}

/// Msg or MsgD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// How it finds its way: bits r[2:0].
    pub routing: u8,
    /// What it says.
    pub code: u8,
    /// Double words carried: 0 makes it a Msg.
    pub length_dw: u32,
    /// Bytes 8 to 15 of the header: address, target or vendor's own.
    pub rest: u64,
    /// Who says it.
    pub requester: DeviceId,
    /// Tag, eight bits, for messages that have one.
    pub tag: u8,
    /// Common to all packets.
    pub common: Common,
}

/// The three kinds of flow control, and of ordering.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FlowClass {
    /// Writes to memory and messages.
    Posted,
    /// Everything that is answered.
    NonPosted,
    /// The answers.
    Completion,
}

/// Receive buffer that a packet takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Credits {
    /// One a packet.
    pub header: u32,
    /// One for every 16 bytes of payload begun.
    pub data: u32,
}

impl Repr {
    /// Which credits it needs, and which packets it may not overtake.
    pub fn flow_class(&self) -> FlowClass {
        match self {
            Self::Memory(request) if request.op == MemoryOp::Write => FlowClass::Posted,
            Self::Memory(_) | Self::Io(_) | Self::Config(_) => FlowClass::NonPosted,
            Self::Completion(_) => FlowClass::Completion,
            Self::Message(_) => FlowClass::Posted,
        }
    }

    /// Bytes of the header without prefixes: 12 or 16.
    pub fn header_bytes(&self) -> u32 {
        match self {
            Self::Memory(request) => match request.width {
                AddressWidth::Bits32 => 3 * DW_BYTES,
                AddressWidth::Bits64 => 4 * DW_BYTES,
            },
            Self::Io(_) | Self::Config(_) | Self::Completion(_) => 3 * DW_BYTES,
            Self::Message(_) => 4 * DW_BYTES,
        }
    }

    /// Bytes of payload, in whole double words.
    pub fn payload_bytes(&self) -> u32 {
        let length_dw = match self {
            Self::Memory(request) if request.op == MemoryOp::Read => 0,
            Self::Memory(request) => request.length_dw,
            Self::Io(request) => u32::from(request.is_write),
            Self::Config(request) => u32::from(request.is_write),
            Self::Completion(completion) => completion.length_dw,
            Self::Message(message) => message.length_dw,
        };
        length_dw * DW_BYTES
    }

    /// What every packet has.
    pub fn common(&self) -> &Common {
        match self {
            Self::Memory(request) => &request.common,
            Self::Io(request) => &request.common,
            Self::Config(request) => &request.common,
            Self::Completion(completion) => &completion.common,
            Self::Message(message) => &message.common,
        }
    }

    /// Bytes on the wire outside flit mode: framing, header, payload, checksum, link CRC.
    pub fn wire_bytes(&self) -> u32 {
        let ecrc_bytes = if self.common().has_ecrc { ECRC_BYTES } else { 0 };
        FRAMING_BYTES + self.header_bytes() + self.payload_bytes() + ecrc_bytes
    }

    /// Receive buffer that it takes.
    pub fn credits(&self) -> Credits {
        Credits { header: 1, data: self.payload_bytes().div_ceil(DATA_CREDIT_BYTES) }
    }
}
