//! An RDMA NIC without I/O: verbs go in, packets come out, and time, memory and randomness are handed in. The code that
//! carries real programs' verbs is the code that the packet simulator drives.
//!
//! * [`nic`]: the transport engine: from posted work to packets, from packets to completions.
//! * [`memory_budget`]: what a NIC keeps on chip and in the host's memory, from the sizes of its structures.
//! * [`verbs`]: what programs see: work requests, completions, states of a queue pair, memory regions and their keys.
//! * [`wire`]: what a packet says: [`wire::Header`] is the engine's currency, and its bytes are RoCEv2's, with SRNIC's
//!   extension where a policy uses it (docs/rnic-wire.md).

pub mod memory_budget;
pub mod nic;
pub mod verbs;
pub mod wire;
