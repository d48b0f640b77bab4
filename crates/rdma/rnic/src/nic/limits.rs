//! Bounds of the engine, and reserved numbers.

/// Maximum number of outstanding READs and atomics of a queue pair, in each direction.
pub const READS_MAX: u8 = 16;

/// Maximum number of requests of a work queue.
pub const QUEUE_REQUESTS_MAX: u32 = 1 << 16;

/// Bytes that the verbs put before a datagram in its receive request: room for a global routing header (GRH).
pub const DATAGRAM_OFFSET_BYTES: u32 = 40;

/// Queue pair numbers 0 and 1 are reserved for port management.
pub(super) const QP_NUMBER_FIRST: u32 = 2;

/// Minimum MTU in bytes.
pub const MTU_BYTES_MIN: u32 = 256;

/// Maximum MTU in bytes.
pub const MTU_BYTES_MAX: u32 = 4096;

/// Maximum number of packets of a queue pair in flight: the length of a bitmap in bits (srnic.md: 500 for each queue
/// pair).
pub const WINDOW_PACKETS_MAX: u32 = 512;

/// The index that stands for no queue pair. Queue pairs are numbered with 24 bits.
pub(super) const NO_QP: u32 = (1 << 24) - 1;

/// Maximum number of packets of a message, or in flight, of an in-order policy: a quarter of the PSN space.
pub(super) const PACKETS_MAX: u32 = 1 << 22;
