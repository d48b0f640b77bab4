//! The parsed form of transaction layer packets, independent of their bytes.

use std::fmt;

use crate::link::AddressWidth;

/// Size of a double word (DW), the unit of headers and payloads.
pub const DW_BYTES: u32 = 4;
/// Bytes of framing, sequence number and link CRC of a packet outside flit mode. Up to generation 2 these are start and
/// end symbols, two bytes of sequence number and four of CRC; up to generation 5 a start token of four bytes, which
/// includes the sequence number, and the CRC.
pub const FRAMING_BYTES: u32 = 8;
/// Size of a data link layer packet with its framing outside flit mode.
pub const DLLP_BYTES: u32 = 8;
/// Size of the end-to-end checksum (ECRC).
pub const ECRC_BYTES: u32 = 4;
/// Payload bytes per data credit.
pub const DATA_CREDIT_BYTES: u32 = 16;
/// Largest payload or request, in double words.
pub const LENGTH_DW_MAX: u32 = 1024;

/// The ID of a function: eight bits of bus, five of device, three of function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DeviceId(pub u16);

impl fmt::Display for DeviceId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:02x}:{:02x}.{}", self.0 >> 8, self.0 >> 3 & 0x1f, self.0 & 7)
    }
}

/// A parsed packet.
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

/// The operation of a memory request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryOp {
    /// MRd: answered by completions with data.
    Read,
    /// MWr: posted, not answered.
    Write,
    /// FetchAdd: a completion returns the old value.
    FetchAdd,
    /// Swap: a completion returns the old value.
    Swap,
    /// CAS: carries the compare value, then the swap value; a completion returns the old value.
    CompareAndSwap,
    /// DMWr, deferrable memory write: answered by a completion without data.
    DeferrableWrite,
}

/// A memory request: MRd, MWr, DMWr or an atomic operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryRequest {
    /// The operation.
    pub op: MemoryOp,
    /// Address of the first double word, a multiple of four.
    pub address: u64,
    /// Address width: a header of three or four double words.
    pub width: AddressWidth,
    /// Double words requested or carried, 1 to 1024.
    pub length_dw: u32,
    /// Enabled bytes of the first double word. Not used by atomic operations or with processing hints.
    pub first_byte_enable: u8,
    /// Enabled bytes of the last double word; 0 if there is only one.
    pub last_byte_enable: u8,
    /// The requester.
    pub requester: DeviceId,
    /// Identifies the request in its completions; ten bits.
    pub tag: u16,
    /// Fields common to all packets.
    pub common: CommonFields,
}

/// The header fields common to all packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CommonFields {
    /// Traffic class, 0 to 7.
    pub traffic_class: u8,
    /// ID-based ordering (IDO), relaxed ordering (RO), no snoop (NS): bits 2, 1, 0.
    pub attributes: u8,
    /// Address type (AT), translated or not, 0 to 3.
    pub address_type: u8,
    /// Processing hint (TH, PH), 0 to 3; memory requests only.
    pub processing_hint: Option<u8>,
    /// Whether the payload is known to be wrong (EP).
    pub is_poisoned: bool,
    /// Whether an end-to-end checksum follows (TD).
    pub has_ecrc: bool,
}

/// An I/O request, IORd or IOWr, of one double word at a 32-bit address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IoRequest {
    /// Whether it is an IOWr.
    pub is_write: bool,
    /// Address of the double word, a multiple of four.
    pub address: u32,
    /// Enabled bytes.
    pub first_byte_enable: u8,
    /// The requester.
    pub requester: DeviceId,
    /// Identifies the request in its completion; ten bits.
    pub tag: u16,
    /// Fields common to all packets.
    pub common: CommonFields,
}

/// A configuration request, CfgRd or CfgWr of type 0 or 1, of one double word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConfigRequest {
    /// Whether it is a CfgWr.
    pub is_write: bool,
    /// Whether it is of type 1, to be forwarded by a bridge.
    pub is_type_1: bool,
    /// The function whose register is accessed.
    pub target: DeviceId,
    /// Offset of the register: 0 to 4092, a multiple of four.
    pub register: u16,
    /// Enabled bytes.
    pub first_byte_enable: u8,
    /// The requester.
    pub requester: DeviceId,
    /// Identifies the request in its completion; ten bits.
    pub tag: u16,
    /// Fields common to all packets.
    pub common: CommonFields,
}

/// The status of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CompletionStatus {
    /// Successful completion (SC).
    Successful,
    /// Unsupported request (UR).
    UnsupportedRequest,
    /// Configuration request retry status (CRS).
    ConfigurationRetry,
    /// Completer abort (CA).
    CompleterAbort,
}

/// A completion, Cpl or CplD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Completion {
    /// The completer.
    pub completer: DeviceId,
    /// The requester.
    pub requester: DeviceId,
    /// Tag of the request.
    pub tag: u16,
    /// The status.
    pub status: CompletionStatus,
    /// Remaining bytes of the request, including those carried: 1 to 4096.
    pub byte_count: u16,
    /// Low seven bits of the address of the first byte carried.
    pub lower_address: u8,
    /// Double words carried: 0 in a Cpl.
    pub length_dw: u32,
    /// Fields common to all packets.
    pub common: CommonFields,
}

/// A message, Msg or MsgD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// Routing, bits `r[2:0]`.
    pub routing: u8,
    /// Message code.
    pub code: u8,
    /// Double words carried: 0 in a Msg.
    pub length_dw: u32,
    /// Bytes 8 to 15 of the header: address, target or vendor-defined.
    pub rest: u64,
    /// The requester.
    pub requester: DeviceId,
    /// Tag, eight bits, for messages that have one.
    pub tag: u8,
    /// Fields common to all packets.
    pub common: CommonFields,
}

/// The three classes of flow control and of ordering.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FlowClass {
    /// Memory writes and messages.
    Posted,
    /// Requests that are answered by completions.
    NonPosted,
    /// Completions.
    Completion,
}

/// Flow control credits that a packet consumes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Credits {
    /// Header credits: one per packet.
    pub header: u32,
    /// Data credits: one per 16 bytes of payload, rounded up.
    pub data: u32,
}

impl Repr {
    /// Returns the class of its credits and of its ordering rules.
    pub fn flow_class(&self) -> FlowClass {
        match self {
            Self::Memory(request) if request.op == MemoryOp::Write => FlowClass::Posted,
            Self::Memory(_) | Self::Io(_) | Self::Config(_) => FlowClass::NonPosted,
            Self::Completion(_) => FlowClass::Completion,
            Self::Message(_) => FlowClass::Posted,
        }
    }

    /// Returns the size of the header without prefixes, 12 or 16 bytes.
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

    /// Returns the size of the payload, a whole number of double words.
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

    /// Returns the fields common to all packets.
    pub fn common(&self) -> &CommonFields {
        match self {
            Self::Memory(request) => &request.common,
            Self::Io(request) => &request.common,
            Self::Config(request) => &request.common,
            Self::Completion(completion) => &completion.common,
            Self::Message(message) => &message.common,
        }
    }

    /// Returns the size on the wire outside flit mode: framing, header, payload, end-to-end checksum and link CRC.
    pub fn wire_bytes(&self) -> u32 {
        let ecrc_bytes = if self.common().has_ecrc { ECRC_BYTES } else { 0 };
        FRAMING_BYTES + self.header_bytes() + self.payload_bytes() + ecrc_bytes
    }

    /// Returns the size in flits, which have their own checksum and need no framing. Byte enables that are not all set,
    /// and the two lowest bits of a completion's address that are not both 0, take a double word more.
    pub fn flit_bytes(&self) -> u32 {
        let is_ragged = match self {
            Self::Memory(request) => !matches!((request.first_byte_enable, request.last_byte_enable), (0xF, 0 | 0xF)),
            Self::Completion(completion) => !u32::from(completion.lower_address).is_multiple_of(DW_BYTES),
            _ => false,
        };
        self.wire_bytes() - FRAMING_BYTES + if is_ragged { DW_BYTES } else { 0 }
    }

    /// Returns the flow control credits that it consumes.
    pub fn credits(&self) -> Credits {
        Credits { header: 1, data: self.payload_bytes().div_ceil(DATA_CREDIT_BYTES) }
    }
}
