//! Packets as bytes: the content of a UDP datagram, from BTH to ICRC.
//!
//! Source: IBA 9.2 to 9.6 and RoCEv2 annex A17; the selective extension is this project's (docs/rnic-wire.md).

use super::cursor::{Reader, Writer};
use super::error::{HeaderError, PacketError};
use super::header::{
    Aeth, AtomicEth, Header, Immediate, Operation, PlacementHeader, Psn, QpNumber, RKey, Reth, SelectiveAck, Service,
    Syndrome,
};
use super::icrc::{Encapsulation, ICRC_BYTES, IpAddresses};
use super::opcode::{ImmediateKind, Opcode};

/// Maximum payload of a packet in bytes: the largest MTU.
pub const PAYLOAD_BYTES_MAX: usize = 4096;
/// Maximum length of all headers in bytes: an atomic request with the whole extension.
pub const HEADER_BYTES_MAX: usize = BTH_BYTES + ATOMIC_ETH_BYTES + PLACEMENT_BYTES + SELECTIVE_ACK_BYTES;
/// Maximum length of a packet in bytes.
pub const PACKET_BYTES_MAX: usize = HEADER_BYTES_MAX + PAYLOAD_BYTES_MAX + ICRC_BYTES;

/// Length of the base transport header (BTH).
pub const BTH_BYTES: usize = 12;
/// Length of the RETH.
pub const RETH_BYTES: usize = 16;
/// Length of the AtomicETH.
pub const ATOMIC_ETH_BYTES: usize = 28;
/// Length of the AtomicAckETH.
pub const ATOMIC_ACK_ETH_BYTES: usize = 8;
/// Length of the AETH.
pub const AETH_BYTES: usize = 4;
/// Length of ImmDt and IETH.
pub const IMMEDIATE_BYTES: usize = 4;
/// Length of the DETH.
pub const DETH_BYTES: usize = 8;
/// Length of the reserved field of a CNP, which is zero.
pub const CNP_RESERVED_BYTES: usize = 16;
/// Length of the extension's placement header.
pub const PLACEMENT_BYTES: usize = 8;
/// Length of the extension's selective acknowledgement.
pub const SELECTIVE_ACK_BYTES: usize = 28;

/// Payload is padded to a multiple of this many bytes.
const PADDED_BYTES: usize = 4;
/// The transport version of standard RoCEv2.
const VERSION_STANDARD: u8 = 0;
/// The transport version of the selective extension. A NIC that does not know it drops the packet (IBA 9.6.1).
const VERSION_SELECTIVE: u8 = 1;
const SOLICITED: u8 = 0x80;
/// Migration state "migrated". NICs without alternate paths always set it.
const MIGRATED: u8 = 0x40;
const PAD_SHIFT: u32 = 4;
const PAD_MASK: u8 = 0b11;
const VERSION_MASK: u8 = 0x0f;
/// The default partition key; this NIC is a full member.
const PARTITION: u16 = 0xffff;
/// Masks the membership bit: full and limited members may communicate.
const PARTITION_MASK: u16 = 0x7fff;
const BECN: u8 = 0x40;
const ACK_REQUEST: u8 = 0x80;
const NUMBER_MAX: u32 = (1 << 24) - 1;

/// Flags of the extension, in the last reserved field of the BTH.
mod flag {
    pub const PLACEMENT: u8 = 1;
    pub const SACK: u8 = 1 << 1;
    pub const RETH: u8 = 1 << 2;
    pub const ALL: u8 = PLACEMENT | SACK | RETH;
}

mod syndrome {
    pub const KIND_SHIFT: u32 = 5;
    pub const VALUE_MASK: u8 = 0b1_1111;
    pub const ACK: u8 = 0b00;
    pub const RECEIVER_NOT_READY: u8 = 0b01;
    pub const NAK: u8 = 0b11;
    pub const SEQUENCE_ERROR: u8 = 0;
    pub const INVALID_REQUEST: u8 = 1;
    pub const REMOTE_ACCESS: u8 = 2;
    pub const REMOTE_OPERATION: u8 = 3;
}

/// A checked view of a packet: its headers are decoded, and its payload has the length that they state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    bytes: &'a [u8],
    header: Header,
    payload_at: usize,
}

impl<'a> Packet<'a> {
    /// Decodes the bytes of one datagram. The ICRC covers the datagram's addresses and is checked by
    /// [`Packet::is_intact`].
    ///
    /// # Errors
    /// If the bytes are not a packet of RoCEv2 or its extension.
    pub fn new_checked(bytes: &'a [u8]) -> Result<Self, PacketError> {
        let found = bytes.len();
        let needed = BTH_BYTES + ICRC_BYTES;
        let Some(body) = found.checked_sub(ICRC_BYTES).and_then(|end| bytes.get(..end)) else {
            return Err(PacketError::Truncated { found, needed });
        };
        let mut reader = Reader::new(body);
        let truncated = |needed| PacketError::Truncated { found, needed: needed + ICRC_BYTES };
        let base = Bth::read(&mut reader).map_err(truncated)?;
        let opcode = base.check()?;
        let mut header = base.header(opcode);
        read_extended(&mut reader, opcode, &base, &mut header).map_err(|fault| match fault {
            ExtendedHeaderError::End(needed) => truncated(needed),
            ExtendedHeaderError::Syndrome(syndrome) => PacketError::Syndrome(syndrome),
        })?;
        let payload_at = reader.at();
        header.payload_bytes = payload_bytes(opcode, body.len() - payload_at, base.padding())? as u32;
        Ok(Self { bytes, header, payload_at })
    }

    /// Returns the decoded headers.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns the payload without its padding.
    pub fn payload(&self) -> &'a [u8] {
        &self.bytes[self.payload_at..self.payload_at + self.header.payload_bytes as usize]
    }

    /// Returns whether the ICRC is correct for this packet in this datagram.
    pub fn is_intact(&self, datagram: &Encapsulation) -> bool {
        self.bytes.split_last_chunk().is_some_and(|(packet, icrc)| datagram.icrc(packet) == *icrc)
    }

    /// Returns whether the ICRC is correct, where the IPv4 identification of the datagram is unknown: whether it is
    /// correct for any identification.
    pub fn is_intact_for_any_identification(&self, datagram: &Encapsulation) -> bool {
        match datagram.addresses {
            IpAddresses::V4 { .. } => datagram.identification(self.bytes).is_some(),
            IpAddresses::V6 { .. } => self.is_intact(datagram),
        }
    }
}

/// The fields of the base transport header.
struct Bth {
    code: u8,
    second: u8,
    partition: u16,
    congestion: u8,
    destination: QpNumber,
    last: u8,
    psn: Psn,
}

impl Bth {
    fn read(reader: &mut Reader<'_>) -> Result<Self, usize> {
        Ok(Self {
            code: reader.u8()?,
            second: reader.u8()?,
            partition: reader.u16()?,
            congestion: reader.u8()?,
            destination: QpNumber(reader.u24()?),
            last: reader.u8()?,
            psn: Psn::new(reader.u24()?),
        })
    }

    fn padding(&self) -> usize {
        usize::from(self.second >> PAD_SHIFT & PAD_MASK)
    }

    /// Returns the flags of the extension, which are 0 in standard RoCEv2.
    fn flags(&self) -> u8 {
        if self.second & VERSION_MASK == VERSION_SELECTIVE { self.last & !ACK_REQUEST } else { 0 }
    }

    fn check(&self) -> Result<Opcode, PacketError> {
        let version = self.second & VERSION_MASK;
        if version > VERSION_SELECTIVE {
            return Err(PacketError::Version(version));
        }
        let operation = Opcode::parse(self.code).ok_or(PacketError::Opcode(self.code))?;
        if self.partition & PARTITION_MASK != PARTITION & PARTITION_MASK {
            return Err(PacketError::Partition(self.partition));
        }
        let flags = self.flags();
        let is_wrong = flags & !flag::ALL != 0
            || flags & flag::RETH != 0 && !operation.may_have_reth()
            || operation.is_congestion_notification() && flags != 0
            || version == VERSION_SELECTIVE && flags == 0;
        if is_wrong { Err(PacketError::Flags { flags, operation }) } else { Ok(operation) }
    }

    /// Returns a header of the fields in the BTH alone.
    fn header(&self, opcode: Opcode) -> Header {
        Header {
            ack_request: self.last & ACK_REQUEST != 0,
            solicited: self.second & SOLICITED != 0,
            congestion_echo: self.congestion & BECN != 0,
            ..Header::bare(opcode.service, opcode.operation, self.destination, self.psn)
        }
    }
}

/// Why the headers after the BTH cannot be decoded.
enum ExtendedHeaderError {
    /// The packet should have this many bytes.
    End(usize),
    Syndrome(u8),
}

impl From<usize> for ExtendedHeaderError {
    fn from(needed: usize) -> Self {
        Self::End(needed)
    }
}

/// Reads the extended headers in the order of IBA 9.2, then those of the selective extension.
fn read_extended(
    reader: &mut Reader<'_>,
    opcode: Opcode,
    base: &Bth,
    header: &mut Header,
) -> Result<(), ExtendedHeaderError> {
    if opcode.service == Service::Ud {
        let queue_key = reader.u32()?;
        let _reserved = reader.u8()?;
        header.datagram = Some((queue_key, QpNumber(reader.u24()?)));
    }
    if opcode.has_reth() || base.flags() & flag::RETH != 0 {
        header.reth = Some(Reth { address: reader.u64()?, key: RKey(reader.u32()?), bytes: reader.u32()? });
    }
    if opcode.has_atomic() {
        let (address, key) = (reader.u64()?, RKey(reader.u32()?));
        header.atomic = Some(AtomicEth { address, key, swap_or_add: reader.u64()?, compare: reader.u64()? });
    }
    if opcode.has_aeth() {
        let syndrome = reader.u8()?;
        let decoded = decode_syndrome(syndrome).ok_or(ExtendedHeaderError::Syndrome(syndrome))?;
        header.aeth = Some(Aeth { syndrome: decoded, msn: reader.u24()? });
    }
    if opcode.has_atomic_ack() {
        header.atomic = Some(AtomicEth { address: 0, key: RKey(0), swap_or_add: reader.u64()?, compare: 0 });
    }
    header.immediate = match opcode.immediate_kind {
        ImmediateKind::None => None,
        ImmediateKind::Data => Some(Immediate::Data(reader.u32()?)),
        ImmediateKind::Invalidate => Some(Immediate::Invalidate(RKey(reader.u32()?))),
    };
    if opcode.is_congestion_notification() {
        reader.take::<CNP_RESERVED_BYTES>()?;
    }
    if base.flags() & flag::PLACEMENT != 0 {
        header.placement = Some(PlacementHeader { message: reader.u24()?, packet: reader.u24()?, sent: reader.u16()? });
    }
    if base.flags() & flag::SACK != 0 {
        header.sack = Some(read_sack(reader)?);
    }
    Ok(())
}

fn read_sack(reader: &mut Reader<'_>) -> Result<SelectiveAck, usize> {
    let (expected, newest) = (Psn::new(reader.u24()?), Psn::new(reader.u24()?));
    let (marked, echo) = (reader.u16()?, reader.u16()?);
    let _reserved = reader.u16()?;
    Ok(SelectiveAck { expected, newest, arrived: reader.u128()?, marked, echo })
}

fn payload_bytes(operation: Opcode, bytes: usize, padding: usize) -> Result<usize, PacketError> {
    let Some(found) = bytes.checked_sub(padding).filter(|_| bytes.is_multiple_of(PADDED_BYTES)) else {
        return Err(PacketError::Padding { bytes, padding });
    };
    if found > PAYLOAD_BYTES_MAX {
        return Err(PacketError::PayloadTooLong { found, max: PAYLOAD_BYTES_MAX });
    }
    if bytes > 0 && !operation.has_payload() {
        return Err(PacketError::PayloadUnexpected { operation, found });
    }
    Ok(found)
}

fn decode_syndrome(byte: u8) -> Option<Syndrome> {
    let value = byte & syndrome::VALUE_MASK;
    match byte >> syndrome::KIND_SHIFT {
        syndrome::ACK => Some(Syndrome::Ack { credit_code: value }),
        syndrome::RECEIVER_NOT_READY => Some(Syndrome::ReceiverNotReady { timer_code: value }),
        syndrome::NAK => match value {
            syndrome::SEQUENCE_ERROR => Some(Syndrome::SequenceError),
            syndrome::INVALID_REQUEST => Some(Syndrome::InvalidRequest),
            syndrome::REMOTE_ACCESS => Some(Syndrome::RemoteAccess),
            syndrome::REMOTE_OPERATION => Some(Syndrome::RemoteOperation),
            _ => None,
        },
        _ => None,
    }
}

fn encode_syndrome(syndrome: Syndrome) -> u8 {
    let (kind, value) = match syndrome {
        Syndrome::Ack { credit_code } => (syndrome::ACK, credit_code),
        Syndrome::ReceiverNotReady { timer_code } => (syndrome::RECEIVER_NOT_READY, timer_code),
        Syndrome::SequenceError => (syndrome::NAK, syndrome::SEQUENCE_ERROR),
        Syndrome::InvalidRequest => (syndrome::NAK, syndrome::INVALID_REQUEST),
        Syndrome::RemoteAccess => (syndrome::NAK, syndrome::REMOTE_ACCESS),
        Syndrome::RemoteOperation => (syndrome::NAK, syndrome::REMOTE_OPERATION),
    };
    kind << syndrome::KIND_SHIFT | value
}

impl Header {
    /// Returns the length of all headers, in bytes.
    pub fn header_bytes(&self) -> usize {
        let notification = self.operation == Operation::CongestionNotification;
        let atomic = if self.aeth.is_some() { ATOMIC_ACK_ETH_BYTES } else { ATOMIC_ETH_BYTES };
        let parts = [
            (true, BTH_BYTES),
            (self.datagram.is_some(), DETH_BYTES),
            (self.reth.is_some(), RETH_BYTES),
            (self.atomic.is_some(), atomic),
            (self.aeth.is_some(), AETH_BYTES),
            (self.immediate.is_some(), IMMEDIATE_BYTES),
            (notification, CNP_RESERVED_BYTES),
            (self.placement.is_some(), PLACEMENT_BYTES),
            (self.sack.is_some(), SELECTIVE_ACK_BYTES),
        ];
        parts.into_iter().filter(|(is_there, _)| *is_there).map(|(_, bytes)| bytes).sum()
    }

    /// Returns the length of the packet in bytes: headers, payload, padding and ICRC.
    pub fn packet_bytes(&self) -> usize {
        self.header_bytes() + (self.payload_bytes as usize).next_multiple_of(PADDED_BYTES) + ICRC_BYTES
    }

    /// Encodes the headers at the beginning of `packet` and returns the offset of the payload. After the caller has
    /// written the payload there, [`Header::seal`] completes the packet.
    ///
    /// # Errors
    /// If fields contradict each other, a value is out of range, or the buffer is too small for the whole packet.
    pub fn emit(&self, packet: &mut [u8]) -> Result<usize, HeaderError> {
        let opcode = self.check()?;
        let (found, needed) = (packet.len(), self.packet_bytes());
        if found < needed {
            return Err(HeaderError::Room { found, needed });
        }
        let mut writer = Writer::new(packet);
        self.write_base(&mut writer, opcode);
        self.write_extended(&mut writer, opcode);
        Ok(writer.at())
    }

    /// Pads the payload and writes the ICRC, so that `packet` is the content of the datagram. Without `datagram` the
    /// ICRC is zero, for carriers that do not check it, such as lanes.
    ///
    /// # Panics
    /// If `packet` does not have the length [`Header::packet_bytes`].
    pub fn seal(&self, packet: &mut [u8], datagram: Option<&Encapsulation>) {
        assert_eq!(packet.len(), self.packet_bytes(), "seal needs the whole packet");
        let padding_at = self.header_bytes() + self.payload_bytes as usize;
        let (body, icrc) = packet.split_at_mut(packet.len() - ICRC_BYTES);
        body[padding_at..].fill(0);
        icrc.copy_from_slice(&datagram.map_or([0; ICRC_BYTES], |datagram| datagram.icrc(body)));
    }

    fn flags(&self, opcode: Opcode) -> u8 {
        let mut flags = 0;
        if self.placement.is_some() {
            flags |= flag::PLACEMENT;
        }
        if self.sack.is_some() {
            flags |= flag::SACK;
        }
        if self.reth.is_some() && opcode.may_have_reth() {
            flags |= flag::RETH;
        }
        flags
    }

    fn write_base(&self, writer: &mut Writer<'_>, opcode: Opcode) {
        let flags = self.flags(opcode);
        let version = if flags == 0 { VERSION_STANDARD } else { VERSION_SELECTIVE };
        let padding = (self.payload_bytes as usize).next_multiple_of(PADDED_BYTES) - self.payload_bytes as usize;
        let solicited = if self.solicited { SOLICITED } else { 0 };
        let second = solicited | MIGRATED | (padding as u8) << PAD_SHIFT | version;
        let is_echo = self.congestion_echo || opcode.is_congestion_notification();
        writer.put(&[opcode.code(), second]);
        writer.put(&PARTITION.to_be_bytes());
        writer.put(&[if is_echo { BECN } else { 0 }]);
        writer.u24(self.destination.0);
        writer.put(&[flags | if self.ack_request { ACK_REQUEST } else { 0 }]);
        writer.u24(self.psn.get());
    }

    fn write_extended(&self, writer: &mut Writer<'_>, opcode: Opcode) {
        if let Some((queue_key, source)) = self.datagram {
            writer.put(&queue_key.to_be_bytes());
            writer.put(&[0]);
            writer.u24(source.0);
        }
        if let Some(Reth { address, key, bytes }) = self.reth {
            writer.put(&address.to_be_bytes());
            writer.put(&key.0.to_be_bytes());
            writer.put(&bytes.to_be_bytes());
        }
        if let Some(AtomicEth { address, key, swap_or_add, compare }) = self.atomic.filter(|_| opcode.has_atomic()) {
            writer.put(&address.to_be_bytes());
            writer.put(&key.0.to_be_bytes());
            writer.put(&swap_or_add.to_be_bytes());
            writer.put(&compare.to_be_bytes());
        }
        if let Some(Aeth { syndrome, msn }) = self.aeth {
            writer.put(&[encode_syndrome(syndrome)]);
            writer.u24(msn);
        }
        if let Some(atomic) = self.atomic.filter(|_| opcode.has_atomic_ack()) {
            writer.put(&atomic.swap_or_add.to_be_bytes());
        }
        match self.immediate {
            Some(Immediate::Data(data)) => writer.put(&data.to_be_bytes()),
            Some(Immediate::Invalidate(key)) => writer.put(&key.0.to_be_bytes()),
            None => {}
        }
        if opcode.is_congestion_notification() {
            writer.put(&[0; CNP_RESERVED_BYTES]);
        }
        if let Some(PlacementHeader { message, packet, sent }) = self.placement {
            writer.u24(message);
            writer.u24(packet);
            writer.put(&sent.to_be_bytes());
        }
        if let Some(sack) = &self.sack {
            write_sack(writer, sack);
        }
    }

    /// Checks that the fields agree with the operation and that all values are in range; returns the opcode.
    fn check(&self) -> Result<Opcode, HeaderError> {
        let Header { service, operation: wanted, .. } = *self;
        let operation =
            Opcode::of(service, wanted, self.immediate).ok_or(HeaderError::Operation { service, operation: wanted })?;
        let is_datagram = operation.service == Service::Ud;
        let may_extend = !operation.is_congestion_notification();
        let has_reth = operation.has_reth();
        // Columns: name, whether the operation requires it, whether it allows it, whether it is present.
        let headers = [
            ("DETH", is_datagram, is_datagram, self.datagram.is_some()),
            ("RETH", has_reth, has_reth || operation.may_have_reth(), self.reth.is_some()),
            (
                "AtomicETH",
                operation.has_atomic() || operation.has_atomic_ack(),
                operation.has_atomic() || operation.has_atomic_ack(),
                self.atomic.is_some(),
            ),
            ("AETH", operation.has_aeth(), operation.has_aeth(), self.aeth.is_some()),
            ("placement header", false, may_extend, self.placement.is_some()),
            ("selective acknowledgement", false, may_extend, self.sack.is_some()),
            ("payload", false, operation.has_payload(), self.payload_bytes > 0),
        ];
        for (header, must, may, is_there) in headers {
            match is_there {
                true if !may => return Err(HeaderError::Unexpected { operation, header }),
                false if must => return Err(HeaderError::Missing { operation, header }),
                _ => {}
            }
        }
        self.check_values(operation)?;
        Ok(operation)
    }

    fn check_values(&self, opcode: Opcode) -> Result<(), HeaderError> {
        let code = self.aeth.map(|aeth| match aeth.syndrome {
            Syndrome::Ack { credit_code } => credit_code,
            Syndrome::ReceiverNotReady { timer_code } => timer_code,
            _ => 0,
        });
        let atomic_ack = self.atomic.filter(|_| opcode.has_atomic_ack());
        let max = u64::from(NUMBER_MAX);
        let values = [
            ("destination", u64::from(self.destination.0), max),
            ("source", self.datagram.map_or(0, |(_, source)| u64::from(source.0)), max),
            ("MSN of AETH", self.aeth.map_or(0, |aeth| u64::from(aeth.msn)), max),
            ("code of AETH", code.map_or(0, u64::from), u64::from(syndrome::VALUE_MASK)),
            ("message of placement header", self.placement.map_or(0, |placement| u64::from(placement.message)), max),
            ("packet of placement header", self.placement.map_or(0, |placement| u64::from(placement.packet)), max),
            ("address of AtomicAckETH", atomic_ack.map_or(0, |atomic| atomic.address), 0),
            ("key of AtomicAckETH", atomic_ack.map_or(0, |atomic| u64::from(atomic.key.0)), 0),
            ("compare of AtomicAckETH", atomic_ack.map_or(0, |atomic| atomic.compare), 0),
            ("payload", u64::from(self.payload_bytes), PAYLOAD_BYTES_MAX as u64),
        ];
        match values.into_iter().find(|(_, value, max)| value > max) {
            Some((field, value, _)) => Err(HeaderError::Field { field, value }),
            None => Ok(()),
        }
    }
}

fn write_sack(writer: &mut Writer<'_>, sack: &SelectiveAck) {
    let SelectiveAck { expected, newest, arrived, marked, echo } = *sack;
    writer.u24(expected.get());
    writer.u24(newest.get());
    writer.put(&marked.to_be_bytes());
    writer.put(&echo.to_be_bytes());
    writer.put(&[0; 2]);
    writer.put(&arrived.to_be_bytes());
}

#[cfg(test)]
mod tests;
