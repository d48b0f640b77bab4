//! Bounds of batches, and what the load of a node and the length of messages have in common.

/// Maximum number of packets in a message: twice the largest fixed batch. Short packets cost little compared with their
/// message: 64 packets of 64 B take a seventh less time than two messages of 32.
pub const PACKETS_MAX: usize = 2 * FIXED_PACKETS_MAX;

/// Maximum size of a fixed batch, as published.
pub const FIXED_PACKETS_MAX: usize = 32;

/// Maximum bytes of a message: the longest fixed batch of packets of 1500 B. A longer packet forms a message by itself.
pub(super) const MESSAGE_BYTES_MAX: usize = FIXED_PACKETS_MAX * 1500;

/// Number of bytes that justify a message, however few packets they are: copying them takes several times the fixed
/// cost of a message, and each node has to wait for all of them. Six packets of 1500 B.
pub(super) const ENOUGH_BYTES: usize = 9_000;

/// Maximum fraction of time that a node should work: the rest makes up for interruptions.
pub(super) const WORK_SHARE_MAX: f64 = 0.8;

/// Length of the periods in which load and costs are measured, without interruptions. A period ends with an iteration,
/// which may take longer where messages are system calls.
pub(super) const PERIOD_NS: f64 = 100_000.0;

/// Number of last periods over which load and costs are averaged, to smooth random arrivals. After as many periods, a
/// cost is known.
pub(super) const PERIODS_AVERAGED: u32 = 8;
