//! A lane: a one-way byte stream through a ring that the sender writes and the receiver reads.
//!
//! ```text
//!   written by the sender                            written by the receiver
//!   ┌ forward block ────────┐                        ┌ back block ───────────┐
//!   │ fin                   │                        │ credit, open record   │
//!   │ asleep                │   records              │ asleep                │
//!   ├ ring: 64-byte slots ──┤ ─────────────────────► └───────────────────────┘
//!   │ ▓▓▓▓░░░░░░░░░░░░░░░░░ │   credit
//!   └───────────────────────┘ ◄─────────────────────
//!   own state of the sender:                         own state of the receiver:
//!   tail, credit seen                                head, record offset
//! ```
//!
//! **Memory.** Every word has one writing endpoint. An endpoint only stores to the memory that it writes (`outbound`),
//! only loads from the memory that the other one writes (`inbound`), and keeps its cursor in a third place, its *own
//! state*, which the other endpoint does not need. Two arrangements fit:
//!
//! * *Windows* between nodes: each endpoint writes into the other node's memory and reads its own, so that no load
//!   crosses the link.
//! * *Two memories* under one kernel: each endpoint writes its own memory, which the other endpoint maps read-only, so
//!   that nobody can change what an endpoint has written.
//!
//! The own state is memory of the process ([`Producer::new`]), or memory that the processes which share an endpoint
//! share ([`Producer::with_state`]).
//!
//! **Record.** A record is 1 to [`RECORD_BYTES_MAX`] bytes in contiguous slots. Its first slot starts with two words:
//! the *tag* (derived from the position and the lane's secret, so that neither stale bytes nor payload are taken for a
//! tag) and the *header* (length and kind). The first 48 bytes of payload share that cache line, so a small
//! message moves in exactly one line, and the receiver polls the line that carries the data. The tag is stored last.
//! Several records can be published as a batch: all of them are put in place with their tags, except for the first
//! one's tag, which is stored last, so that one fence suffices.
//!
//! **Rings.** A lane starts in a small ring, so that an idle connection or one with short messages touches little
//! memory. A lane with a big ring moves there permanently the first time it carries bulk data. An *elastic* lane has
//! larger rings of doubling sizes: when a write or a lagging receiver requires more room, and the capacity
//! ([`Producer::set_capacity`]) allows it, the sender publishes a switch record ("continues in ring N") and continues
//! there. Once everything is read, it can release the memory ([`Producer::release_memory`]) and continues in the small
//! ring.
//!
//! **Open records.** While the receiver of an elastic lane lags, short writes share a record, whose length grows with
//! each write until the record is closed. Otherwise a stream of single bytes would take 64 times its length.
//!
//! **Moves.** A stream can use the lane for parts of its bytes: a part ends at a position that the sender gives
//! ([`Producer::end_move`]), or where the receiver stops ([`Consumer::frozen_cursor`]), whereupon the sender takes back
//! the rest ([`Producer::unread_from`], only where it can load what it has written). The next part begins with
//! [`Producer::restart`] and [`Consumer::restart`].
//!
//! **Hostile peers.** A position, a length or a credit is loaded once, checked, then used. Whatever the peer writes,
//! each call terminates, stays inside the parts of this lane, and returns bytes or [`Corrupt`]. This also holds for the
//! words of the own state: a segment that is one memfd for both endpoints has them where the peer can write. The checks
//! of cursors are there for such segments only. The secret is random and known only to both endpoints. It prevents that
//! payload is taken for a tag; it does not protect against the peer.
//!
//! # Memory order
//!
//! Nothing here relies on a machine that keeps stores in order (x86): the argument uses acquire and release only, and
//! so holds on aarch64 unchanged.
//!
//! | operation | first endpoint | other endpoint |
//! |---|---|---|
//! | publish | payload, header; [`fence`](fabric::Outbound::fence); tag, *release* | tag, *acquire*; header, payload |
//! | publish several | all records but the first tag; `fence`; first tag, *release* | first tag, *acquire*; the rest |
//! | append to an open record | payload; header, *release* | header, *acquire*; payload |
//! | credit | payload loads; credit, *release* | credit, *acquire*; stores to those slots |
//! | end of stream | last tag; fence; fin, *release* | fin, *acquire*; then no tag means no record |
//! | sleep | target; number, *release*; `flush`; *SC fence*; tag or credit | tag, credit; *SC fence*; number; target |
//!
//! * The fence of *publish* is for write-combined windows, where a release store alone does not order earlier stores
//!   that are still in a write-combining buffer.
//! * A sender that has room below its tail limit does not load the credit. It relies on an earlier acquire, by itself
//!   or by another user of the producer that the lock around the producer has ordered before it.
//! * *Sleep* is the only operation in which a store must not pass a later load (the store-buffering pattern), which
//!   release and acquire do not forbid on any machine. If both endpoints store, fence and load, at least one sees the
//!   other's store. Credit is returned often and sleepers for room are rare, so the receiver fences only where it
//!   crosses a quarter of the ring (in an elastic lane: a multiple of 32 slots); [`Producer::is_writable`] counts room
//!   from there on. A sender of an elastic lane announces the position from which on it wants to be woken.
//! * Announcements are numbered, and their reader keeps the number of the last one that it took in its own state: it
//!   stores nothing that the sleeper writes, and a newer announcement always counts as new. After it has taken one it
//!   rings the doorbell, which must order like a lock (ring releases, wait acquires) and keep a ring that precedes the
//!   wait. An eventfd, a socket and a condition variable with a flag do.
//! * A reader may find the number of one announcement with the target of the next. If that target is not reached, it
//!   takes none, and nothing is lost: the sleeper has given up the older one, and its fence after the newer one orders
//!   the two endpoints as for any announcement.
//! * The words of the own state are plain words (relaxed): `&mut` means that one thread at a time uses an
//!   endpoint, and the lock that excludes other threads orders their accesses. Only announcements need no lock, and are
//!   counted atomically.
//!
//! Where memory is **not coherent**, windows write back each store, and a reader drops cache lines before it loads them
//! ([`Inbound::invalidate`](fabric::Inbound::invalidate), which does nothing on other memory): the tag's line before
//! each poll, the record's other lines once its tag is seen, and the words of the other endpoint (credit, fin, sleep)
//! before each load. No line has two writers. Either both endpoints use such memory, or neither.
//!
//! Tests: `tests/loom.rs` explores all of this except for the loads of *credit*, which loom never delays; Miri reports
//! an error there as a data race of in-place access. `tests/properties/non_coherent.rs` omits each of the invalidations
//! and observes a failure.

#![allow(unsafe_code)] // This interface takes raw pointers to buffers of its callers.

mod batch;
mod consumer;
mod draft;
mod layout;
#[cfg(loom)]
pub mod mutation;
mod producer;
mod record;
#[cfg(all(test, not(loom)))]
mod tests;
mod wake;
mod words;

pub use consumer::{Chunk, Consumer, ShortRead};
pub use draft::{Draft, Span};
pub use layout::{ELASTIC_RINGS, ELASTIC_SLOTS_MIN, LargerRings, Layout};
pub use producer::{Budget, MemoryRelease, Producer, Reservation, UnreadBytes};
pub use record::{INLINE_BYTES, RECORD_BYTES_MAX, SHORT_BYTES_MAX, SLOT_BYTES};

/// The peer violated the protocol of the lane: the connection cannot continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Corrupt {
    /// Which value was wrong.
    pub what: &'static str,
    /// The wrong value.
    pub value: u64,
}

impl std::fmt::Display for Corrupt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "lane: peer wrote {} {:#x}: the connection is reset", self.what, self.value)
    }
}

impl std::error::Error for Corrupt {}

/// The fence between an endpoint's store of its flag or record and its load of the other's: the store must not pass the
/// load.
#[inline]
fn sleep_fence() {
    #[cfg(loom)]
    if mutation::fences_are_off() {
        return;
    }
    volmem::sync::fence(volmem::sync::Ordering::SeqCst);
}
