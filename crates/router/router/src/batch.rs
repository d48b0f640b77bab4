//! Packets for another node, put together into messages.
//!
//! * [`message`]: how a message stands on the wire, and its check.
//! * [`Batcher`]: which packets go together, and when: fixed batches, as published, or adaptive ones.
//! * [`Latency`]: what a message takes, learnt while messages go.
//! * [`Limit`]: how long a message may be, by what long ones cost; [`Carried`]: what of that is known beforehand.
//! * [`Occupancy`]: how busy a node is, and with it how many packets are worth a message.

mod batcher;
mod latency;
mod lengths;
pub mod message;
mod occupancy;

pub use batcher::{BatchTarget, Batcher, Policy, PolicyError, Queued};
pub use latency::{Latency, Sample};
pub use lengths::{Carried, Limit};
pub use occupancy::Occupancy;

use crate::{Hop, Packet};

/// A packet on its way to the node that sends it: from its IP header on, without a header of Ethernet.
pub type Parcel = (Hop, Packet);

/// Packets of a message, at most: twice as many as of the longest fixed batch. Short packets cost little beside their
/// message: 64 of 64 B take a seventh less time than twice 32.
pub const PACKETS_MAX: usize = 64;

/// Packets of a fixed batch, at most, as published.
pub const FIXED_PACKETS_MAX: usize = 32;
