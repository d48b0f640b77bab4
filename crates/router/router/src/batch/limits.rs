//! Bounds of batches.

/// Maximum number of packets in a message: twice the largest fixed batch. Short packets cost little compared with their
/// message: 64 packets of 64 B take a seventh less time than two messages of 32.
pub const PACKETS_MAX: usize = 64;

/// Maximum size of a fixed batch, as published.
pub const FIXED_PACKETS_MAX: usize = 32;

/// Maximum bytes of a message: the longest fixed batch of packets of 1500 B. A longer packet forms a message by itself.
pub(super) const MESSAGE_BYTES_MAX: usize = FIXED_PACKETS_MAX * 1500;

/// Maximum fraction of time that a node should work: the rest makes up for interruptions.
pub(super) const WORKS_AT_MOST: f64 = 0.8;
