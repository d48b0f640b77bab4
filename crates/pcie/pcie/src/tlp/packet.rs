//! Packets as bytes: a checked view, and conversion to [`Repr`] and back.
//!
//! A packet begins with its prefixes and ends with its payload, or with the end-to-end checksum if it has one. Sequence
//! number and link CRC belong to the link and are not part of it.

use thiserror::Error;

use super::crc;
use super::prefix::{PREFIXES_MAX, Prefix};
use super::repr::{
    CommonFields, Completion, CompletionStatus, ConfigRequest, DW_BYTES, DeviceId, IoRequest, LENGTH_DW_MAX, MemoryOp,
    MemoryRequest, Message, Repr,
};
use crate::link::AddressWidth;
use crate::test::PAGE_BYTES;

const FMT_FOUR_DW: u8 = 0x20;
const FMT_DATA: u8 = 0x40;
const BYTE_COUNT_MAX: u16 = 4096;

mod kind {
    pub const MEMORY: u8 = 0b0_0000;
    pub const IO: u8 = 0b0_0010;
    pub const CONFIG_0: u8 = 0b0_0100;
    pub const CONFIG_1: u8 = 0b0_0101;
    pub const COMPLETION: u8 = 0b0_1010;
    pub const FETCH_ADD: u8 = 0b0_1100;
    pub const SWAP: u8 = 0b0_1101;
    pub const COMPARE_AND_SWAP: u8 = 0b0_1110;
    pub const MESSAGE: u8 = 0b1_0000;
    pub const DEFERRABLE_WRITE: u8 = 0b1_1011;
}

/// Why bytes are not a valid packet, or a [`Repr`] cannot be emitted.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum PacketError {
    /// The bytes end too early.
    #[error("{found} bytes, but this packet has {needed}: the dump is cut off or its length field is wrong")]
    Truncated {
        /// Number of bytes found.
        found: usize,
        /// Number of bytes needed.
        needed: usize,
    },
    /// Something follows the packet.
    #[error("{found} bytes, but this packet has {needed}: something follows it, such as a link checksum")]
    TooLong {
        /// Number of bytes found.
        found: usize,
        /// Number of bytes needed.
        needed: usize,
    },
    /// There are too many prefixes.
    #[error("more than {PREFIXES_MAX} prefixes before a header")]
    Prefixes,
    /// The combination of format and type is unknown.
    #[error("format {format:#05b} with type {kind:#07b} is unknown outside flit mode")]
    Kind {
        /// Format, three bits.
        format: u8,
        /// Type, five bits.
        kind: u8,
    },
    /// The length is not allowed for this kind of packet.
    #[error("a length of {0} double words is not possible for this kind of packet")]
    Length(u32),
    /// The specification forbids the byte enables.
    #[error("byte enables {first:#06b} and {last:#06b} are not allowed with a length of {length_dw} double words")]
    ByteEnables {
        /// Byte enables of the first double word.
        first: u8,
        /// Byte enables of the last double word.
        last: u8,
        /// Length of the request.
        length_dw: u32,
    },
    /// The request crosses a 4 KB boundary.
    #[error("{length_dw} double words at {address:#x} cross a 4 KB boundary")]
    CrossesPage {
        /// Address of the first double word.
        address: u64,
        /// Length of the request.
        length_dw: u32,
    },
    /// The operand of an atomic operation is not naturally aligned.
    #[error("an atomic operation's operand at {0:#x} is not naturally aligned")]
    Unaligned(u64),
    /// The completion status is reserved.
    #[error("completion status {0} is reserved")]
    Status(u8),
    /// A value does not fit its field.
    #[error("{field} cannot be {value:#x}")]
    Field {
        /// The field's name.
        field: &'static str,
        /// The value.
        value: u64,
    },
    /// The payload's length differs from that in the header.
    #[error("a payload of {found} bytes; the header says {needed}")]
    Payload {
        /// Number of bytes given.
        found: usize,
        /// Number of bytes by the header.
        needed: usize,
    },
}

/// A view of bytes that consist of prefixes, header, payload and checksum, as the header says, and nothing more.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    bytes: &'a [u8],
    header_at: usize,
    payload_at: usize,
    ecrc_at: usize,
}

impl<'a> Packet<'a> {
    /// Creates a view of the bytes of one packet.
    ///
    /// # Errors
    /// When there are fewer or more bytes than the header says.
    pub fn new_checked(bytes: &'a [u8]) -> Result<Self, PacketError> {
        let (packet, needed) = Self::locate(bytes)?;
        let found = bytes.len();
        match found {
            _ if found < needed => Err(PacketError::Truncated { found, needed }),
            _ if found > needed => Err(PacketError::TooLong { found, needed }),
            _ => Ok(packet),
        }
    }

    /// Creates a view of the prefixes and the header alone, as error logs keep them. Further bytes are ignored, and the
    /// view has no payload and no checksum.
    ///
    /// # Errors
    /// When the header is incomplete.
    pub fn header_only(bytes: &'a [u8]) -> Result<Self, PacketError> {
        let (packet, _) = Self::locate(bytes)?;
        let end = packet.payload_at;
        Ok(Self { bytes: &bytes[..end], ecrc_at: end, ..packet })
    }

    /// Locates the parts of a packet, and returns the number of bytes needed. Fails if the header is incomplete.
    fn locate(bytes: &'a [u8]) -> Result<(Self, usize), PacketError> {
        const FIRST_DW_BYTES: usize = DW_BYTES as usize;
        let found = bytes.len();
        let mut header_at = 0;
        while bytes.get(header_at).is_some_and(|first| Prefix::starts_with(*first)) {
            header_at += FIRST_DW_BYTES;
            if header_at > PREFIXES_MAX * FIRST_DW_BYTES {
                return Err(PacketError::Prefixes);
            }
        }
        let Some(first_dw) = bytes.get(header_at..header_at + FIRST_DW_BYTES) else {
            return Err(PacketError::Truncated { found, needed: header_at + 3 * FIRST_DW_BYTES });
        };
        let header_bytes = if first_dw[0] & FMT_FOUR_DW != 0 { 16 } else { 12 };
        let payload_at = header_at + header_bytes;
        if found < payload_at {
            return Err(PacketError::Truncated { found, needed: payload_at });
        }
        let has_data = first_dw[0] & FMT_DATA != 0;
        let payload_bytes = if has_data { length_dw(first_dw) * DW_BYTES } else { 0 };
        let ecrc_at = payload_at + payload_bytes as usize;
        let needed = ecrc_at + if first_dw[2] & 0x80 != 0 { 4 } else { 0 };
        Ok((Self { bytes, header_at, payload_at, ecrc_at }, needed))
    }

    /// Returns the prefixes before the header.
    pub fn prefixes(&self) -> impl Iterator<Item = Prefix> + use<'a> {
        let (prefixes, _) = self.bytes[..self.header_at].as_chunks::<4>();
        prefixes.iter().filter_map(|bytes| Prefix::from_bytes(*bytes))
    }

    /// Returns the header, 12 or 16 bytes.
    pub fn header(&self) -> &'a [u8] {
        &self.bytes[self.header_at..self.payload_at]
    }

    /// Returns the payload, a whole number of double words.
    pub fn payload(&self) -> &'a [u8] {
        &self.bytes[self.payload_at..self.ecrc_at]
    }

    /// Returns the received end-to-end checksum.
    pub fn ecrc(&self) -> Option<[u8; 4]> {
        self.bytes[self.ecrc_at..].try_into().ok()
    }

    /// Returns the correct end-to-end checksum.
    pub fn expected_ecrc(&self) -> [u8; 4] {
        ecrc(self.prefixes(), self.header(), self.payload())
    }

    /// Returns the format, three bits: bit 0 is a header of four double words, bit 1 is data.
    pub fn format(&self) -> u8 {
        self.header()[0] >> 5
    }

    /// Returns the type, five bits, which together with the format determines the kind of packet.
    pub fn kind(&self) -> u8 {
        self.header()[0] & 0x1f
    }

    /// Returns the length field, 1 to 1024 double words.
    pub fn length_dw(&self) -> u32 {
        length_dw(self.header())
    }

    fn common(&self) -> CommonFields {
        let header = self.header();
        let has_hint = header[1] & 0x01 != 0;
        let hint_at = header.len() - 1; // the last two bits of the address
        CommonFields {
            traffic_class: header[1] >> 4 & 7,
            attributes: header[1] & 0x04 | header[2] >> 4 & 3,
            address_type: header[2] >> 2 & 3,
            processing_hint: has_hint.then_some(header[hint_at] & 3),
            is_poisoned: header[2] & 0x40 != 0,
            has_ecrc: header[2] & 0x80 != 0,
        }
    }

    /// Returns the tag, whose bits 9 and 8 are in the second byte of the header.
    fn tag(&self, low_at: usize) -> u16 {
        let header = self.header();
        u16::from(header[1] & 0x80) << 2 | u16::from(header[1] & 0x08) << 5 | u16::from(header[low_at])
    }

    fn id(&self, at: usize) -> DeviceId {
        DeviceId(u16::from_be_bytes([self.header()[at], self.header()[at + 1]]))
    }

    fn dw(&self, at: usize) -> u32 {
        let header = self.header();
        u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    }
}

/// Returns the end-to-end checksum of a packet, which covers those prefixes that are end-to-end.
fn ecrc(prefixes: impl Iterator<Item = Prefix>, header: &[u8], payload: &[u8]) -> [u8; 4] {
    let end_to_end: Vec<u8> = prefixes.filter(|prefix| prefix.is_end_to_end()).flat_map(Prefix::to_bytes).collect();
    crc::ecrc(&end_to_end, header, payload)
}

fn length_dw(first_dw: &[u8]) -> u32 {
    match u32::from(u16::from_be_bytes([first_dw[2] & 3, first_dw[3]])) {
        0 => LENGTH_DW_MAX,
        length => length,
    }
}

impl Repr {
    /// Parses a packet.
    ///
    /// # Errors
    /// When its kind is unknown or the specification forbids the value of a field.
    pub fn parse(packet: &Packet<'_>) -> Result<Self, PacketError> {
        let unknown = PacketError::Kind { format: packet.format(), kind: packet.kind() };
        let has_data = packet.format() & 2 != 0;
        let is_long = packet.format() & 1 != 0;
        let is_read_or = |op| if has_data { op } else { MemoryOp::Read };
        match (packet.kind(), is_long, has_data) {
            (kind::MEMORY, ..) => parse_memory(packet, is_read_or(MemoryOp::Write)),
            (kind::FETCH_ADD, _, true) => parse_memory(packet, MemoryOp::FetchAdd),
            (kind::SWAP, _, true) => parse_memory(packet, MemoryOp::Swap),
            (kind::COMPARE_AND_SWAP, _, true) => parse_memory(packet, MemoryOp::CompareAndSwap),
            (kind::DEFERRABLE_WRITE, _, true) => parse_memory(packet, MemoryOp::DeferrableWrite),
            (kind::IO, false, _) => parse_io(packet),
            (kind::CONFIG_0 | kind::CONFIG_1, false, _) => parse_config(packet),
            (kind::COMPLETION, false, _) => parse_completion(packet),
            (kind, true, _) if kind & 0x18 == kind::MESSAGE => Ok(Self::Message(parse_message(packet))),
            _ => Err(unknown),
        }
    }

    /// Returns the bytes to send: prefixes, header, payload, and the end-to-end checksum if the packet has one.
    ///
    /// # Errors
    /// When a value does not fit its field, the specification forbids it, or the payload has another length.
    pub fn emit(&self, prefixes: &[Prefix], payload: &[u8]) -> Result<Vec<u8>, PacketError> {
        self.check()?;
        let needed = self.payload_bytes() as usize;
        if payload.len() != needed {
            return Err(PacketError::Payload { found: payload.len(), needed });
        }
        if prefixes.len() > PREFIXES_MAX {
            return Err(PacketError::Prefixes);
        }
        let mut bytes: Vec<u8> = prefixes.iter().flat_map(|prefix| prefix.to_bytes()).collect();
        let (header, header_bytes) = (self.header(), self.header_bytes() as usize);
        bytes.extend_from_slice(&header[..header_bytes]);
        bytes.extend_from_slice(payload);
        if self.common().has_ecrc {
            bytes.extend_from_slice(&ecrc(prefixes.iter().copied(), &header[..header_bytes], payload));
        }
        Ok(bytes)
    }

    /// Checks that every value fits its field and the specification allows the combination.
    ///
    /// # Errors
    /// For the first value that fails.
    pub fn check(&self) -> Result<(), PacketError> {
        let common = self.common();
        fits("the traffic class", common.traffic_class, 7)?;
        fits("the attributes", common.attributes, 7)?;
        fits("the address type", common.address_type, 3)?;
        fits("the processing hint", common.processing_hint.unwrap_or(0), 3)?;
        if common.processing_hint.is_some() && !matches!(self, Self::Memory(_)) {
            return Err(PacketError::Field { field: "a processing hint outside a memory request", value: 1 });
        }
        match self {
            Self::Memory(request) => check_memory(request),
            Self::Io(request) => {
                fits("the tag", request.tag, 0x3ff)?;
                fits("the byte enables", request.first_byte_enable, 0xf)?;
                fits("the address's last two bits", request.address & 3, 0)
            }
            Self::Config(request) => {
                fits("the tag", request.tag, 0x3ff)?;
                fits("the byte enables", request.first_byte_enable, 0xf)?;
                fits("the register's last two bits", request.register & 3, 0)?;
                fits("the register", request.register, 0xffc)
            }
            Self::Completion(completion) => check_completion(completion),
            Self::Message(message) => {
                fits("the routing", message.routing, 7)?;
                fits("the length", message.length_dw, LENGTH_DW_MAX)
            }
        }
    }

    /// Returns the header in the first 12 or 16 bytes.
    fn header(&self) -> [u8; 16] {
        let mut header = [0; 16];
        self.common().emit(&mut header);
        match self {
            Self::Memory(request) => request.emit(&mut header),
            Self::Io(request) => request.emit(&mut header),
            Self::Config(request) => request.emit(&mut header),
            Self::Completion(completion) => completion.emit(&mut header),
            Self::Message(message) => message.emit(&mut header),
        }
        header
    }
}

fn fits<T: Copy + PartialOrd + Into<u64>>(field: &'static str, value: T, max: T) -> Result<(), PacketError> {
    if value <= max { Ok(()) } else { Err(PacketError::Field { field, value: value.into() }) }
}

fn check_length(length_dw: u32, allowed: impl Fn(u32) -> bool) -> Result<(), PacketError> {
    if (1..=LENGTH_DW_MAX).contains(&length_dw) && allowed(length_dw) {
        Ok(())
    } else {
        Err(PacketError::Length(length_dw))
    }
}

fn check_memory(request: &MemoryRequest) -> Result<(), PacketError> {
    let MemoryRequest { op, address, length_dw, .. } = *request;
    fits("the tag", request.tag, 0x3ff)?;
    fits("the address's last two bits", address & 3, 0)?;
    if request.width == AddressWidth::Bits32 {
        fits("a 32-bit address", address, u64::from(u32::MAX))?;
    }
    fits("the first byte enables", request.first_byte_enable, 0xf)?;
    fits("the last byte enables", request.last_byte_enable, 0xf)?;
    match op {
        MemoryOp::Read | MemoryOp::Write => check_length(length_dw, |_| true)?,
        MemoryOp::DeferrableWrite => check_length(length_dw, |length| length <= 32)?,
        MemoryOp::FetchAdd | MemoryOp::Swap => check_length(length_dw, |length| matches!(length, 1 | 2))?,
        MemoryOp::CompareAndSwap => check_length(length_dw, |length| matches!(length, 2 | 4 | 8))?,
    }
    if address % PAGE_BYTES + u64::from(length_dw * DW_BYTES) > PAGE_BYTES {
        return Err(PacketError::CrossesPage { address, length_dw });
    }
    match op {
        MemoryOp::FetchAdd | MemoryOp::Swap => check_alignment(address, length_dw),
        MemoryOp::CompareAndSwap => check_alignment(address, length_dw / 2),
        // With a processing hint, the byte enables of a read hold the steering tag.
        MemoryOp::Read if request.common.processing_hint.is_some() => Ok(()),
        _ => check_byte_enables(request),
    }
}

fn check_alignment(address: u64, operand_dw: u32) -> Result<(), PacketError> {
    let is_aligned = address.is_multiple_of(u64::from(operand_dw * DW_BYTES));
    if is_aligned { Ok(()) } else { Err(PacketError::Unaligned(address)) }
}

/// Checks byte enables (section 2.2.5): a single double word has no last byte enables; otherwise neither may be empty,
/// and for three or more double words, or two not aligned to eight bytes, the enabled bytes must be contiguous.
fn check_byte_enables(request: &MemoryRequest) -> Result<(), PacketError> {
    let (first, last, length_dw) = (request.first_byte_enable, request.last_byte_enable, request.length_dw);
    let is_contiguous =
        matches!(first, 0b1111 | 0b1110 | 0b1100 | 0b1000) && matches!(last, 0b1111 | 0b0111 | 0b0011 | 0b0001);
    let is_allowed = match length_dw {
        1 => last == 0,
        2 if request.address.is_multiple_of(8) => first != 0 && last != 0,
        _ => is_contiguous,
    };
    if is_allowed { Ok(()) } else { Err(PacketError::ByteEnables { first, last, length_dw }) }
}

fn check_completion(completion: &Completion) -> Result<(), PacketError> {
    fits("the tag", completion.tag, 0x3ff)?;
    fits("the lower address", completion.lower_address, 0x7f)?;
    fits("the length", completion.length_dw, LENGTH_DW_MAX)?;
    if !(1..=BYTE_COUNT_MAX).contains(&completion.byte_count) {
        return Err(PacketError::Field { field: "the byte count", value: completion.byte_count.into() });
    }
    Ok(())
}

fn parse_memory(packet: &Packet<'_>, op: MemoryOp) -> Result<Repr, PacketError> {
    let enables = packet.header()[7];
    let (width, address) = match packet.header().len() {
        12 => (AddressWidth::Bits32, u64::from(packet.dw(8) & !3)),
        _ => (AddressWidth::Bits64, u64::from(packet.dw(8)) << 32 | u64::from(packet.dw(12) & !3)),
    };
    let repr = Repr::Memory(MemoryRequest {
        op,
        address,
        width,
        length_dw: packet.length_dw(),
        first_byte_enable: enables & 0xf,
        last_byte_enable: enables >> 4,
        requester: packet.id(4),
        tag: packet.tag(6),
        common: packet.common(),
    });
    repr.check().map(|()| repr)
}

/// Returns the common fields without the processing hint, whose bit is reserved outside memory requests and ignored.
fn common_without_hint(packet: &Packet<'_>) -> CommonFields {
    CommonFields { processing_hint: None, ..packet.common() }
}

fn parse_io(packet: &Packet<'_>) -> Result<Repr, PacketError> {
    check_length(packet.length_dw(), |length| length == 1)?;
    Ok(Repr::Io(IoRequest {
        is_write: packet.format() & 2 != 0,
        address: packet.dw(8) & !3,
        first_byte_enable: packet.header()[7] & 0xf,
        requester: packet.id(4),
        tag: packet.tag(6),
        common: common_without_hint(packet),
    }))
}

fn parse_config(packet: &Packet<'_>) -> Result<Repr, PacketError> {
    check_length(packet.length_dw(), |length| length == 1)?;
    Ok(Repr::Config(ConfigRequest {
        is_write: packet.format() & 2 != 0,
        is_type_1: packet.kind() == kind::CONFIG_1,
        target: packet.id(8),
        register: (packet.dw(8) & 0xffc) as u16,
        first_byte_enable: packet.header()[7] & 0xf,
        requester: packet.id(4),
        tag: packet.tag(6),
        common: common_without_hint(packet),
    }))
}

fn parse_completion(packet: &Packet<'_>) -> Result<Repr, PacketError> {
    let word = packet.dw(4);
    let has_data = packet.format() & 2 != 0;
    let status = match word >> 13 & 7 {
        0 => CompletionStatus::Successful,
        1 => CompletionStatus::UnsupportedRequest,
        2 => CompletionStatus::ConfigurationRetry,
        4 => CompletionStatus::CompleterAbort,
        other => return Err(PacketError::Status(other as u8)),
    };
    Ok(Repr::Completion(Completion {
        completer: packet.id(4),
        requester: packet.id(8),
        tag: packet.tag(10),
        status,
        byte_count: match (word & 0xfff) as u16 {
            0 => BYTE_COUNT_MAX,
            count => count,
        },
        lower_address: packet.header()[11] & 0x7f,
        length_dw: if has_data { packet.length_dw() } else { 0 },
        common: common_without_hint(packet),
    }))
}

fn parse_message(packet: &Packet<'_>) -> Message {
    Message {
        routing: packet.kind() & 7,
        code: packet.header()[7],
        length_dw: if packet.format() & 2 != 0 { packet.length_dw() } else { 0 },
        rest: u64::from(packet.dw(8)) << 32 | u64::from(packet.dw(12)),
        requester: packet.id(4),
        tag: packet.header()[6],
        common: common_without_hint(packet),
    }
}

impl CommonFields {
    fn emit(&self, header: &mut [u8; 16]) {
        header[1] = self.traffic_class << 4 | self.attributes & 4 | u8::from(self.processing_hint.is_some());
        header[2] = u8::from(self.has_ecrc) << 7
            | u8::from(self.is_poisoned) << 6
            | (self.attributes & 3) << 4
            | self.address_type << 2;
    }
}

fn put_kind(header: &mut [u8; 16], kind: u8, is_long: bool, has_data: bool, length_dw: u32) {
    header[0] = kind | if is_long { FMT_FOUR_DW } else { 0 } | if has_data { FMT_DATA } else { 0 };
    header[2] |= (length_dw >> 8 & 3) as u8; // 1024 is written as 0
    header[3] = length_dw as u8;
}

fn put_tag(header: &mut [u8; 16], low_at: usize, tag: u16) {
    header[1] |= (tag >> 2 & 0x80) as u8 | (tag >> 5 & 0x08) as u8;
    header[low_at] = tag as u8;
}

fn put<const N: usize>(header: &mut [u8; 16], at: usize, bytes: [u8; N]) {
    header[at..at + N].copy_from_slice(&bytes);
}

impl MemoryRequest {
    fn emit(&self, header: &mut [u8; 16]) {
        let (kind, has_data) = match self.op {
            MemoryOp::Read => (kind::MEMORY, false),
            MemoryOp::Write => (kind::MEMORY, true),
            MemoryOp::FetchAdd => (kind::FETCH_ADD, true),
            MemoryOp::Swap => (kind::SWAP, true),
            MemoryOp::CompareAndSwap => (kind::COMPARE_AND_SWAP, true),
            MemoryOp::DeferrableWrite => (kind::DEFERRABLE_WRITE, true),
        };
        put_kind(header, kind, self.width == AddressWidth::Bits64, has_data, self.length_dw);
        put(header, 4, self.requester.0.to_be_bytes());
        put_tag(header, 6, self.tag);
        header[7] = self.last_byte_enable << 4 | self.first_byte_enable;
        let address = self.address | u64::from(self.common.processing_hint.unwrap_or(0));
        match self.width {
            AddressWidth::Bits32 => put(header, 8, (address as u32).to_be_bytes()),
            AddressWidth::Bits64 => put(header, 8, address.to_be_bytes()),
        }
    }
}

impl IoRequest {
    fn emit(&self, header: &mut [u8; 16]) {
        put_kind(header, kind::IO, false, self.is_write, 1);
        put(header, 4, self.requester.0.to_be_bytes());
        put_tag(header, 6, self.tag);
        header[7] = self.first_byte_enable;
        put(header, 8, self.address.to_be_bytes());
    }
}

impl ConfigRequest {
    fn emit(&self, header: &mut [u8; 16]) {
        let kind = if self.is_type_1 { kind::CONFIG_1 } else { kind::CONFIG_0 };
        put_kind(header, kind, false, self.is_write, 1);
        put(header, 4, self.requester.0.to_be_bytes());
        put_tag(header, 6, self.tag);
        header[7] = self.first_byte_enable;
        put(header, 8, self.target.0.to_be_bytes());
        put(header, 10, self.register.to_be_bytes());
    }
}

impl Completion {
    fn emit(&self, header: &mut [u8; 16]) {
        let status: u16 = match self.status {
            CompletionStatus::Successful => 0,
            CompletionStatus::UnsupportedRequest => 1,
            CompletionStatus::ConfigurationRetry => 2,
            CompletionStatus::CompleterAbort => 4,
        };
        put_kind(header, kind::COMPLETION, false, self.length_dw > 0, self.length_dw);
        put(header, 4, self.completer.0.to_be_bytes());
        put(header, 6, (status << 13 | self.byte_count & 0xfff).to_be_bytes()); // 4096 is written as 0
        put(header, 8, self.requester.0.to_be_bytes());
        put_tag(header, 10, self.tag);
        header[11] = self.lower_address;
    }
}

impl Message {
    fn emit(&self, header: &mut [u8; 16]) {
        put_kind(header, kind::MESSAGE | self.routing, true, self.length_dw > 0, self.length_dw);
        put(header, 4, self.requester.0.to_be_bytes());
        header[6] = self.tag;
        header[7] = self.code;
        put(header, 8, self.rest.to_be_bytes());
    }
}
