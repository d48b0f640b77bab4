//! Errors of decoding packets and of encoding headers.

use thiserror::Error;

use super::header::{Operation, Service};
use super::opcode::Opcode;

/// Why bytes are not a packet of RoCEv2 or its extension. The receiver drops and counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PacketError {
    /// The bytes end within the headers.
    #[error("truncated packet: {found} bytes, but its headers need at least {needed}")]
    Truncated {
        /// Bytes received.
        found: usize,
        /// Bytes needed.
        needed: usize,
    },
    /// The payload is longer than the largest MTU.
    #[error("a payload of {found} bytes is more than {max}; the sender's MTU is wrong")]
    PayloadTooLong {
        /// Bytes of payload.
        found: usize,
        /// The largest allowed value.
        max: usize,
    },
    /// A packet with payload whose operation has none.
    #[error("{operation} with {found} bytes of payload; it must have none")]
    PayloadUnexpected {
        /// The operation.
        operation: Opcode,
        /// Bytes of payload.
        found: usize,
    },
    /// Payload and padding together are not a multiple of 4, or there is less payload than padding.
    #[error("{bytes} bytes of payload and padding with a pad count of {padding}; they must be a multiple of 4")]
    Padding {
        /// Bytes of payload and padding.
        bytes: usize,
        /// The pad count.
        padding: usize,
    },
    /// An unknown transport version.
    #[error("unknown transport version {0}; RoCEv2 is 0, its selective extension is 1")]
    Version(u8),
    /// An unknown opcode.
    #[error("unknown opcode {0:#04x}; expected one of RC, UC or UD")]
    Opcode(u8),
    /// Flags of the extension that are undefined, or not allowed with this operation.
    #[error("extension flags {flags:#04x} are not allowed with {operation}")]
    Flags {
        /// The flags.
        flags: u8,
        /// The operation.
        operation: Opcode,
    },
    /// A partition of which this NIC is not a member.
    #[error("partition key {0:#06x} is not the default partition 0xffff")]
    Partition(u16),
    /// A reserved AETH syndrome.
    #[error("AETH syndrome {0:#04x} is reserved")]
    Syndrome(u8),
}

/// Why a header cannot be encoded: its fields contradict each other or are out of range. This is a bug of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum HeaderError {
    /// No opcode exists for this combination.
    #[error("{service:?} has no {operation:?} with this immediate; choose what its service has")]
    Operation {
        /// The transport service.
        service: Service,
        /// The operation.
        operation: Operation,
    },
    /// A header that the operation needs is missing.
    #[error("{operation} without {header}; fill it in")]
    Missing {
        /// The operation.
        operation: Opcode,
        /// The missing header.
        header: &'static str,
    },
    /// A header that the operation does not have is present.
    #[error("{operation} with {header}; leave it out")]
    Unexpected {
        /// The operation.
        operation: Opcode,
        /// The unexpected header.
        header: &'static str,
    },
    /// A value does not fit its field.
    #[error("{field} cannot be {value:#x}; the field holds less")]
    Field {
        /// The name of the field.
        field: &'static str,
        /// The value.
        value: u64,
    },
    /// The buffer is too small.
    #[error("a buffer of {found} bytes is too small for a packet of {needed} bytes; make it larger")]
    Room {
        /// Bytes of the buffer.
        found: usize,
        /// Bytes of the packet.
        needed: usize,
    },
}
