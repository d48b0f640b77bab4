//! Bounds of the engine, and reserved numbers.

/// READs and atomic operations of one queue pair at a time, in each direction.
pub const READS_MAX: u8 = 16;

/// Requests of one queue, at most.
pub const QUEUE_REQUESTS_MAX: u32 = 1 << 16;

/// What verbs put before a datagram in its receive request: room for a global routing header.
pub const DATAGRAM_OFFSET_BYTES: u32 = 40;

/// Numbers 0 and 1 are those of a port's management.
pub(super) const QP_NUMBER_FIRST: u32 = 2;

/// The least bytes of payload that a packet of a longer message carries.
pub const MTU_BYTES_MIN: u32 = 256;

/// The most.
pub const MTU_BYTES_MAX: u32 = 4096;

/// Packets of one queue pair that may be on their way, at most: the bits of a bitmap (srnic.md: 500 a queue pair).
pub const WINDOW_PACKETS_MAX: u32 = 512;

/// Queue pairs are numbered by 24 bits, without this one.
pub(super) const NO_QP: u32 = (1 << 24) - 1;
