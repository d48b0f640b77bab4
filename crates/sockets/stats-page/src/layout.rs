//! The bytes of a page: one header, then a table of connection slots.
//!
//! Every field is an atomic, because many threads of the writer store to it at once, and because a reader copies the
//! bytes while they change. The reader finds fields by `offset_of!` on these same structs, so there is one
//! description of the layout and no second one to drift from it.

use crate::terms::{DataPath, FALLBACK_COUNTERS};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

/// First eight bytes of a finished page. Stored last, so a page without it is one that is still being made.
pub(crate) const MAGIC: u64 = u64::from_ne_bytes(*b"XLLEDGER");
/// Changes whenever a field moves or changes its meaning.
pub(crate) const VERSION: u32 = 4;
/// Connections that get a line of their own; further ones are counted in the totals only.
pub const SLOTS: usize = 16_384;
/// Bytes of the header, a whole memory page.
pub(crate) const HEADER_BYTES: usize = size_of::<Header>();
/// Bytes of one connection slot.
pub(crate) const SLOT_BYTES: usize = size_of::<Slot>();
/// Size of a page file. Sparse: only what is used takes memory.
pub(crate) const PAGE_BYTES: usize = HEADER_BYTES + SLOTS * SLOT_BYTES;
/// Bytes kept of a program's name.
pub(crate) const PROGRAM_BYTES: usize = 64;

/// `Slot::state`: nobody's.
pub(crate) const STATE_FREE: u32 = 0;
/// `Slot::state`: an open connection.
pub(crate) const STATE_OPEN: u32 = 1;
/// `Slot::state`: its bytes are moving into the totals.
pub(crate) const STATE_CLOSING: u32 = 2;

/// `Slot::kind`, third byte: the connection was opened before a fork.
pub(crate) const FLAG_INHERITED: u32 = 1 << 16;

/// One connection. Four cache lines: what identifies it, what its sender counts, what its receiver counts, and
/// nothing, so that a sending and a receiving thread share neither a line nor the pair of lines that a processor
/// fetches together.
#[repr(C, align(256))]
pub(crate) struct Slot {
    pub(crate) identity: Identity,
    pub(crate) sender: Direction,
    pub(crate) receiver: Direction,
}

/// What identifies a connection: one cache line.
#[repr(C)]
pub(crate) struct Identity {
    pub(crate) state: AtomicU32,
    pub(crate) generation: AtomicU32,
    pub(crate) fd: AtomicI32,
    /// DataPath, role and flags, one byte each.
    pub(crate) kind: AtomicU32,
    pub(crate) opened_at_ns: AtomicU64,
    pub(crate) local_ip: [AtomicU64; 2],
    pub(crate) peer_ip: [AtomicU64; 2],
    /// Port in the low half, family (4, 6 or 0) in the high half.
    pub(crate) local_port: AtomicU32,
    pub(crate) peer_port: AtomicU32,
}

/// What one direction of a connection counts.
#[repr(C, align(64))]
pub(crate) struct Direction {
    pub(crate) bytes: AtomicU64,
    pub(crate) messages: AtomicU64,
    /// Sender: wake-ups given to the peer. Receiver: sleeps of this side.
    pub(crate) wakes_or_sleeps: AtomicU64,
}

/// What a path has carried, without the connections that are still open: their bytes are in their slots.
#[repr(C, align(64))]
pub(crate) struct PathTotals {
    pub(crate) connections_total: AtomicU64,
    pub(crate) connections_open: AtomicU64,
    pub(crate) bytes_sent_closed: AtomicU64,
    pub(crate) bytes_received_closed: AtomicU64,
}

/// The first memory page of a page.
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
    /// Slots at and above this index were never used.
    pub(crate) slots_used_max: AtomicU32,
    /// Connections that found no slot.
    pub(crate) connections_unlisted: AtomicU64,
    /// Bytes of memory that the lanes of the process have taken beyond their small rings, and that they may take.
    pub(crate) lane_memory_bytes: AtomicU64,
    pub(crate) lane_memory_bytes_max: AtomicU64,
    /// By `DataPath as usize`.
    pub(crate) totals: [PathTotals; DataPath::COUNT],
    /// By `FallbackReason as usize`.
    pub(crate) fallbacks: [AtomicU64; FALLBACK_COUNTERS],
    /// Connections that found no slot count their bytes here, by `DataPath as usize`.
    pub(crate) unlisted: [Slot; DataPath::COUNT],
}

impl Slot {
    const fn new() -> Self {
        Self { identity: Identity::new(), sender: Direction::new(), receiver: Direction::new() }
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
        Self { bytes: AtomicU64::new(0), messages: AtomicU64::new(0), wakes_or_sleeps: AtomicU64::new(0) }
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
        }
    }
}

const _: () = assert!(HEADER_BYTES == 4096);
const _: () = assert!(SLOT_BYTES == 256);
const _: () = assert!(std::mem::offset_of!(Slot, sender) == 64);
const _: () = assert!(std::mem::offset_of!(Slot, receiver) == 128);
