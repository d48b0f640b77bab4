//! The layout of a page: a header, then a table of connection slots.
//!
//! All fields are atomics, because many threads of the writer store to them concurrently and a reader copies the bytes
//! meanwhile. The reader finds fields by `offset_of!` on the same structs, so that the layout is described only once.

use crate::terms::{DataPath, FALLBACK_COUNTERS};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

/// First eight bytes of a complete page. They are stored last; a page without them is still being created.
pub(crate) const MAGIC: u64 = u64::from_ne_bytes(*b"XLLEDGER");
/// Changes whenever a field moves or changes its meaning.
pub const VERSION: u32 = 6;
/// Number of connections with a slot of their own; further ones only count in the totals.
pub const SLOTS: usize = 16_384;
/// Number of closed connections that a page keeps: the last ones.
pub const CLOSED_RECORDS: usize = 64;
/// Bytes of the header, whole memory pages.
pub(crate) const HEADER_BYTES: usize = size_of::<Header>();
/// Bytes of one connection slot.
pub(crate) const SLOT_BYTES: usize = size_of::<Slot>();
/// Size of a page file. The file is sparse: only used parts occupy memory.
pub(crate) const PAGE_BYTES: usize = HEADER_BYTES + SLOTS * SLOT_BYTES;
/// Length of the stored program name.
pub(crate) const PROGRAM_BYTES: usize = 64;

/// `Slot::state`: free.
pub(crate) const STATE_FREE: u32 = 0;
/// `Slot::state`: an open connection.
pub(crate) const STATE_OPEN: u32 = 1;
/// `Slot::state`: its counters are being added to the totals, or a record of a closed connection is being written.
pub(crate) const STATE_CLOSING: u32 = 2;
/// `Slot::state`: the record of a closed connection.
pub(crate) const STATE_CLOSED: u32 = 3;

/// `Slot::kind`, third byte: the connection was opened before a fork.
pub(crate) const FLAG_INHERITED: u32 = 1 << 16;
/// `Slot::kind`, third byte: the other side has reported the reason.
pub(crate) const FLAG_REPORTED: u32 = 1 << 17;
/// `Slot::kind`, third byte: another slot counts the connection from now on, so that it stays open when this one is
/// closed.
pub(crate) const FLAG_REPLACED: u32 = 1 << 18;

/// One connection, or the record of a closed one. Four cache lines: its identity, the sender's counters, the receiver's
/// counters, and the rest, so that a sending and a receiving thread share neither a cache line nor a pair of lines that
/// a processor prefetches together.
#[repr(C, align(256))]
pub(crate) struct Slot {
    pub(crate) identity: Identity,
    pub(crate) sender: Direction,
    pub(crate) receiver: Direction,
    /// Of a record: when the connection was closed, in nanoseconds since 1970.
    pub(crate) closed_at_ns: AtomicU64,
}

/// The identity of a connection: one cache line.
#[repr(C)]
pub(crate) struct Identity {
    pub(crate) state: AtomicU32,
    pub(crate) generation: AtomicU32,
    pub(crate) fd: AtomicI32,
    /// `DataPath`, role, flags, and `FallbackReason` plus one or 0, one byte each.
    pub(crate) kind: AtomicU32,
    pub(crate) opened_at_ns: AtomicU64,
    pub(crate) local_ip: [AtomicU64; 2],
    pub(crate) peer_ip: [AtomicU64; 2],
    /// Port in the low half, family (4, 6 or 0) in the high half.
    pub(crate) local_port: AtomicU32,
    pub(crate) peer_port: AtomicU32,
}

/// The counters of one direction of a connection.
#[repr(C, align(64))]
pub(crate) struct Direction {
    pub(crate) bytes: AtomicU64,
    pub(crate) messages: AtomicU64,
    /// Sender: wakeups sent to the peer. Receiver: sleeps of this side.
    pub(crate) wakes_or_sleeps: AtomicU64,
    /// Bytes of a connection with a lane that kernel TCP has carried, before the lane and between its uses.
    pub(crate) bytes_by_tcp: AtomicU64,
    /// 1 while the direction of a connection with a lane uses kernel TCP.
    pub(crate) is_on_tcp: AtomicU32,
}

/// The totals of a path, without the bytes of open connections, which are in their slots.
#[repr(C, align(64))]
pub(crate) struct PathTotals {
    pub(crate) connections_total: AtomicU64,
    pub(crate) connections_open: AtomicU64,
    pub(crate) bytes_sent_closed: AtomicU64,
    pub(crate) bytes_received_closed: AtomicU64,
}

/// The header of a page, whole memory pages long.
#[repr(C, align(4096))]
pub(crate) struct Header {
    pub(crate) magic: AtomicU64,
    pub(crate) version: AtomicU32,
    pub(crate) header_bytes: AtomicU32,
    pub(crate) slot_bytes: AtomicU32,
    pub(crate) slot_count: AtomicU32,
    pub(crate) pid: AtomicU32,
    /// Address family of the node, 4 or 6, in the upper half; 0 for none.
    pub(crate) node_family: AtomicU32,
    pub(crate) node_ip: [AtomicU64; 2],
    pub(crate) started_at_ns: AtomicU64,
    pub(crate) program: [AtomicU64; PROGRAM_BYTES / 8],
    /// Slots from this index on were never used.
    pub(crate) slots_used_max: AtomicU32,
    /// Connections for which no slot was free.
    pub(crate) connections_unlisted: AtomicU64,
    /// Bytes that the lanes of the process occupy beyond their small rings, and the bound on them.
    pub(crate) lane_memory_bytes: AtomicU64,
    pub(crate) lane_memory_bytes_max: AtomicU64,
    /// By `DataPath as usize`.
    pub(crate) totals: [PathTotals; DataPath::COUNT],
    /// By `FallbackReason as usize`.
    pub(crate) fallbacks: [AtomicU64; FALLBACK_COUNTERS],
    /// Counters of the connections for which no slot was free, by `DataPath as usize`.
    pub(crate) unlisted: [Slot; DataPath::COUNT],
    /// Number of connections that have been recorded as closed. The next one goes to this index, modulo the number of
    /// records.
    pub(crate) closed_total: AtomicU64,
    pub(crate) closed: [Slot; CLOSED_RECORDS],
}

impl Slot {
    const fn new() -> Self {
        Self {
            identity: Identity::new(),
            sender: Direction::new(),
            receiver: Direction::new(),
            closed_at_ns: AtomicU64::new(0),
        }
    }
}

impl Identity {
    const fn new() -> Self {
        Self {
            state: AtomicU32::new(STATE_FREE),
            generation: AtomicU32::new(0),
            fd: AtomicI32::new(-1),
            kind: AtomicU32::new(0),
            opened_at_ns: AtomicU64::new(0),
            local_ip: [const { AtomicU64::new(0) }; 2],
            peer_ip: [const { AtomicU64::new(0) }; 2],
            local_port: AtomicU32::new(0),
            peer_port: AtomicU32::new(0),
        }
    }
}

impl Direction {
    const fn new() -> Self {
        Self {
            bytes: AtomicU64::new(0),
            messages: AtomicU64::new(0),
            wakes_or_sleeps: AtomicU64::new(0),
            bytes_by_tcp: AtomicU64::new(0),
            is_on_tcp: AtomicU32::new(0),
        }
    }
}

impl Header {
    pub(crate) const fn new() -> Self {
        Self {
            magic: AtomicU64::new(0),
            version: AtomicU32::new(0),
            header_bytes: AtomicU32::new(0),
            slot_bytes: AtomicU32::new(0),
            slot_count: AtomicU32::new(0),
            pid: AtomicU32::new(0),
            node_family: AtomicU32::new(0),
            node_ip: [const { AtomicU64::new(0) }; 2],
            started_at_ns: AtomicU64::new(0),
            program: [const { AtomicU64::new(0) }; PROGRAM_BYTES / 8],
            slots_used_max: AtomicU32::new(0),
            connections_unlisted: AtomicU64::new(0),
            lane_memory_bytes: AtomicU64::new(0),
            lane_memory_bytes_max: AtomicU64::new(0),
            totals: [const {
                PathTotals {
                    connections_total: AtomicU64::new(0),
                    connections_open: AtomicU64::new(0),
                    bytes_sent_closed: AtomicU64::new(0),
                    bytes_received_closed: AtomicU64::new(0),
                }
            }; DataPath::COUNT],
            fallbacks: [const { AtomicU64::new(0) }; FALLBACK_COUNTERS],
            unlisted: [const { Slot::new() }; DataPath::COUNT],
            closed_total: AtomicU64::new(0),
            closed: [const { Slot::new() }; CLOSED_RECORDS],
        }
    }
}

const _: () = assert!(HEADER_BYTES.is_multiple_of(4096));
const _: () = assert!(SLOT_BYTES == 256);
const _: () = assert!(std::mem::offset_of!(Slot, sender) == 64);
const _: () = assert!(std::mem::offset_of!(Slot, receiver) == 128);
