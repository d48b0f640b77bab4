//! The memory of a connection: of each of its two ends ([`ends`]), or between nodes whose programs may store into
//! windows themselves, a span of each of the two windows ([`window`]), which is theirs as long as the kernel knows of a
//! [`lease`].

// The peer can write its memory, and callers pass in raw descriptors.
#![allow(unsafe_code)]

pub mod ends;
pub mod lease;
pub mod window;

use fabric::{MemoryInbound, MemoryOutbound};
use lane::{Consumer, Producer};

/// Largest number of unread bytes in one direction.
pub const CAPACITY_BYTES_MAX: usize = 16 << 20;
/// Size in bytes of an end's span in the other node's window, a whole number of pages.
pub const SPAN_BYTES: usize = ends::SPAN_BYTES;

/// The sending end of a lane.
pub type Sender = Producer<MemoryOutbound, MemoryInbound>;
/// The receiving end of a lane.
pub type Receiver = Consumer<MemoryInbound, MemoryOutbound>;
