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
    AckExtended, Atomic, Header, Immediate, Operation, Place, Psn, QpNumber, RKey, RdmaExtended, Selective, Service,
    Syndrome,
};
pub use icrc::{Encapsulation, IpAddresses, UDP_PORT};
pub use opcode::Opcode;
pub use packed::Packed;
pub use packet::{
    ACK_BYTES, ATOMIC_ACK_BYTES, ATOMIC_BYTES, BTH_BYTES, DATAGRAM_BYTES, HEADER_BYTES_MAX, ICRC_BYTES,
    IMMEDIATE_BYTES, NOTIFICATION_BYTES, PACKET_BYTES_MAX, PAYLOAD_BYTES_MAX, PLACE_BYTES, Packet, RETH_BYTES,
    SELECTIVE_BYTES,
};
