//! An RDMA NIC without I/O: verbs go in, packets come out, and the caller passes in time, memory and randomness. The
//! code that carries the verbs of real programs is the code that the packet simulator drives.
//!
//! * [`nic`]: the transport engine, from posted work requests to packets and from packets to completions.
//! * [`memory_budget`]: what a NIC keeps on chip and in the host's memory, computed from the sizes of its structures.
//! * [`verbs`]: the programming interface: work requests, completions, queue pair states, memory regions and their
//!   keys.
//! * [`wire`]: packets. [`wire::Header`] is the decoded form that the engine uses; the encoded form is RoCEv2, with an
//!   extension for policies with selective repeat (docs/rnic-wire.md).

pub mod memory_budget;
pub mod nic;
pub mod verbs;
pub mod wire;
