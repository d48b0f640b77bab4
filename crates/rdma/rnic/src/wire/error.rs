//! Why bytes are no packet, and why a header cannot be said.

use thiserror::Error;

use super::header::{Operation, Service};
use super::opcode::Opcode;

/// Bytes that are no packet of this NIC's language. A receiver drops it and counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PacketError {
    /// The bytes end too early.
    #[error("{found} bytes, but a packet with these headers has at least {needed}; it is cut off")]
    Truncated {
        /// Bytes there are.
        found: usize,
        /// Bytes there must be.
        needed: usize,
    },
    /// More bytes than a packet can have.
    #[error("a payload of {found} bytes is more than {most}; the sender's MTU is wrong")]
    PayloadTooLong {
        /// Bytes there are.
        found: usize,
        /// Bytes there may be.
        most: usize,
    },
    /// Payload where there can be none.
    #[error("{operation} carries {found} bytes of payload; it carries none")]
    PayloadUnexpected {
        /// What the packet is.
        operation: Opcode,
        /// Bytes there are.
        found: usize,
    },
    /// Payload and padding together are no multiple of 4, or there is less payload than padding.
    #[error("{bytes} bytes of payload and padding do not go with {padding} of padding; they must be a multiple of 4")]
    Padding {
        /// Both together.
        bytes: usize,
        /// The pad count.
        padding: usize,
    },
    /// A language that this NIC does not speak.
    #[error("transport version {0}; RoCEv2 is 0, its selective extension 1")]
    Version(u8),
    /// An operation that there is not.
    #[error("opcode {0:#04x} is not known for RC, UC and UD")]
    Opcode(u8),
    /// Flags of the extension that mean nothing, or nothing for this operation.
    #[error("extension flags {flags:#04x} do not go with {operation}")]
    Flags {
        /// The flags.
        flags: u8,
        /// What the packet is.
        operation: Opcode,
    },
    /// A partition that this NIC is not in.
    #[error("partition key {0:#06x}; the default partition is 0xffff")]
    Partition(u16),
    /// A syndrome that is reserved.
    #[error("syndrome {0:#04x} of an acknowledgement is reserved")]
    Syndrome(u8),
}

/// A header whose fields do not go together, or do not fit: a fault of who made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum HeaderError {
    /// No opcode says this.
    #[error("{service:?} has no {operation:?} with this immediate; choose what its service has")]
    Operation {
        /// The service.
        service: Service,
        /// The operation.
        operation: Operation,
    },
    /// A header that the operation needs is missing.
    #[error("{operation} without {header}; fill it in")]
    Missing {
        /// What the packet is.
        operation: Opcode,
        /// Which header.
        header: &'static str,
    },
    /// A header that the operation does not have.
    #[error("{operation} with {header}; leave it out")]
    Unexpected {
        /// What the packet is.
        operation: Opcode,
        /// Which header.
        header: &'static str,
    },
    /// A value that its field does not hold.
    #[error("{field} cannot be {value:#x}; the field holds less")]
    Field {
        /// Its name.
        field: &'static str,
        /// The value.
        value: u64,
    },
    /// Not enough room.
    #[error("{found} bytes are no room for a packet of {needed}; make the buffer larger")]
    Room {
        /// Bytes of the buffer.
        found: usize,
        /// Bytes of the packet.
        needed: usize,
    },
}
