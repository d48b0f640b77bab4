//! Packets: their headers as values and as bytes. The bytes come from a peer and are untrusted.
//!
//! [`Header`] is the decoded form. The encoded form is RoCEv2, with an extension for policies with selective repeat
//! (docs/rnic-wire.md): [`Packet::new_checked`] decodes a datagram, [`Header::emit`] and [`Header::seal`] encode one.

mod cursor;
mod error;
mod header;
mod icrc;
mod opcode;
mod packed;
mod packet;

pub use error::{HeaderError, PacketError};
pub use header::{
    Aeth, AtomicEth, Header, Immediate, Operation, PlacementHeader, Psn, QpNumber, RKey, Reth, SelectiveAck, Service,
    Syndrome,
};
pub use icrc::{Encapsulation, ICRC_BYTES, IpAddresses, UDP_PORT};
pub use opcode::Opcode;
pub use packed::PackedHeader;
pub use packet::{
    AETH_BYTES, ATOMIC_ACK_ETH_BYTES, ATOMIC_ETH_BYTES, BTH_BYTES, CNP_RESERVED_BYTES, DETH_BYTES, HEADER_BYTES_MAX,
    IMMEDIATE_BYTES, PACKET_BYTES_MAX, PAYLOAD_BYTES_MAX, PLACEMENT_BYTES, Packet, RETH_BYTES, SELECTIVE_ACK_BYTES,
};
