//! What a packet says. Bytes of packets are a peer's, and hostile.

mod header;

pub use header::{
    AckExtended, Atomic, Header, Immediate, Operation, Place, Psn, QpNumber, RKey, RdmaExtended, Selective, Service,
    Syndrome,
};
