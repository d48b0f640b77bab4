//! Batching: packets for another node are combined into messages.
//!
//! * [`message`]: the wire format of a message, and its validation.
//! * [`Batcher`]: decides which packets form a message, and when: fixed batches, as published, or adaptive ones.
//! * [`Latency`]: a model of the latency of messages, fitted online.
//! * [`Occupancy`]: the load of a node, which determines the batch size, and the maximum length of a message, by the
//!   cost of long ones, which depends on the [`MessageTransfer`].

mod batcher;
mod latency;
mod lengths;
mod limits;
pub mod message;
mod occupancy;

pub use batcher::{BatchTarget, Batcher, Policy, PolicyError, Queued};
pub use latency::{Latency, Sample};
pub use lengths::MessageTransfer;
pub use limits::{FIXED_PACKETS_MAX, PACKETS_MAX};
pub use occupancy::Occupancy;

use crate::{Hop, Packet};

/// A packet to another node with its next hop; it begins with the IP header.
pub type Parcel = (Hop, Packet);
