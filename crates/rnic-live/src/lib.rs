//! The RNIC's engine in real time, as a library: the code that the packet simulator drives, on a wire.
//!
//! * [`Wire`]: what carries packets. [`Udp`] speaks RoCEv2, or its selective extension, as the NIC's policy says
//!   (docs/rnic-wire.md); [`Lanes`] are rings in shared memory.
//! * [`Faulty`]: a wire on which packets are lost, late, doubled and spoilt, by a seed.

mod faulty;
mod lanes;
mod udp;
mod wire;

pub use faulty::{Faults, Faulty, Struck};
pub use lanes::{Lanes, WINDOW_BYTES};
pub use udp::Udp;
pub use wire::{Arrival, Wire, WireError};
