//! What a packet says. Bytes of packets are a peer's, and hostile.
//!
//! [`Header`] is the engine's currency. As bytes it is RoCEv2's, with an extension where a policy is selective
//! (docs/rnic-wire.md): [`Packet::new_checked`] reads a datagram, [`Header::emit`] and [`Header::seal`] write one.

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
