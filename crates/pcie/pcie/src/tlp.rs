//! Transaction layer packets (TLPs) outside flit mode: parsing, emitting, and their cost on the wire.
//!
//! * [`Repr`] is the parsed form of a packet, small enough to be copied; the simulator passes packets in this form.
//! * [`packet`]: [`Packet`] is a checked view of untrusted bytes; [`Repr::parse`] and [`Repr::emit`] convert between
//!   bytes and [`Repr`].
//! * [`prefix`], [`crc`], [`dllp`]: prefixes before a packet, checksums after it, and data link layer packets.
//! * [`explain`], [`dump`]: a packet field by field, and packets in text, for people.
//!
//! Source: PCI Express Base Specification 5.0, chapters 2 and 3. In flit mode (generation 6) headers differ; the model
//! accounts for their cost.

pub mod crc;
pub mod dllp;
pub mod dump;
pub mod explain;
pub mod packet;
pub mod prefix;
mod repr;

pub use dllp::Dllp;
pub use packet::{Packet, PacketError};
pub use prefix::Prefix;
pub use repr::{
    CommonFields, Completion, CompletionStatus, ConfigRequest, Credits, DATA_CREDIT_BYTES, DLLP_BYTES, DW_BYTES,
    DeviceId, ECRC_BYTES, FRAMING_BYTES, FlowClass, IoRequest, LENGTH_DW_MAX, MemoryOp, MemoryRequest, Message, Repr,
};

#[cfg(test)]
mod tests;
