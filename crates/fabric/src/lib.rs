//! Memory windows between two nodes, and what holds two of them together.
//!
//! A **window** is memory of one node that one peer can write. Seen from its owner it is [`Inbound`]: read it, and write what is
//! yours in it. Seen from the peer it is [`Outbound`]: write it; there is no way to read it, because a load across a link costs a
//! round trip.

#![allow(unsafe_code)] // Raw copies between private memory and windows.

mod memory;
mod window;

pub use memory::{MemoryInbound, MemoryOutbound};
pub use window::{Coherence, Inbound, Outbound};
