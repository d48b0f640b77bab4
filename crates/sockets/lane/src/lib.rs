//! A lane: a one-way byte stream through a ring in the receiver's memory.
//!
//! ```text
//!   sender's node                                    receiver's node
//!   ┌ back block ───────────┐   credit, asleep      ┌ forward block ────────┐
//!   │ credit    [receiver]  │ ◄──────────────────── │ fin       [sender]    │
//!   │ asleep    [receiver]  │                       │ asleep    [sender]    │
//!   ├ cursor ───────────────┤                       ├ ring: 64-byte slots ──┤
//!   │ tail, credit seen     │   records             │ ▓▓▓▓░░░░░░░░░░░░░░░░░ │
//!   └───────────────────────┘ ────────────────────► ├ cursor ───────────────┤
//!                                                   │ head, record offset   │
//!                                                   └───────────────────────┘
//! ```
//!
//! Every arrow is a store; neither side loads across the link. What the sender must know (credit, whether the receiver
//! sleeps) the receiver writes into the sender's memory, and vice versa.
//!
//! **Record.** A record is 1 to [`RECORD_BYTES_MAX`] bytes in contiguous slots. Its first slot starts with two words:
//! the *tag* (derived from the position and the lane's secret, so that neither stale bytes nor payload are taken for a
//! tag) and the *header* (length, kind and stamp). The first 48 bytes of payload share that cache line, so a small
//! message moves in exactly one line, and the receiver polls the line that carries the data. The tag is stored last.
//! Several records can be published as a batch: all of them are put in place with their tags, except for the first
//! one's tag, which is stored last, so that one fence suffices.
//!
//! **Rings.** A lane starts in a small ring, so that an idle connection or one with short messages touches little
//! memory. A lane with a big ring moves there permanently the first time it carries bulk data. An *elastic* lane has
//! larger rings of doubling sizes: when a write or a lagging receiver requires more room, and the capacity that both
//! endpoints set ([`Producer::set_capacity`]) allows it, the sender publishes a switch record ("continues in ring N")
//! and continues there. Once everything is read, it can release the memory ([`Producer::release_memory`]) and continues
//! in the small ring.
//!
//! **Open records.** While the receiver of an elastic lane lags, short writes share a record, whose length grows with
//! each write until the record is closed. Otherwise a stream of single bytes would take 64 times its length.
//!
//! **Hostile peers.** A position, a length or a credit is loaded once, checked, then used. This includes the words that
//! this endpoint itself writes, because on shared memory the peer can write them too. Whatever the peer writes, each
//! call terminates, stays inside the parts of this lane, and returns bytes or [`Corrupt`]. The secret is random and
//! known only to both endpoints. It prevents that payload is taken for a tag; it does not protect against the peer.
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
//! | sleep | flag; `flush`; *SC fence*; tag or credit | tag or credit; *SC fence*; flag |
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
//! * Flags are cleared by their reader with relaxed stores. A late clear could undo a *newer* announcement, but the
//!   endpoint that cleared the flag then rings the doorbell, and the doorbell remembers it: it must order like a lock
//!   (ring releases, wait acquires) and keep a ring that precedes the wait. An eventfd, a socket and a condition
//!   variable with a flag do.
//! * Cursors are plain words (relaxed): `&mut` means that one thread at a time uses an endpoint, and the lock that
//!   excludes other threads orders their accesses.
//!
//! Where memory is **not coherent**, windows write back each store, and a reader drops cache lines before it loads them
//! ([`Inbound::invalidate`](fabric::Inbound::invalidate), which does nothing on other memory): the tag's line before
//! each poll, the record's other lines once its tag is seen, and the words of the other endpoint (credit, fin, flags)
//! before each load. No line has two writers; for the flags see `wake`. Either both endpoints use such memory, or
//! neither.
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

pub use consumer::{Chunk, Consumer, ShortRead, UrgentHandling};
pub use draft::{Draft, Span};
pub use layout::{ELASTIC_RINGS, ELASTIC_SLOTS_MIN, LargerRings, Layout};
pub use producer::{Budget, HELD_MS_MAX, MemoryRelease, Producer, Reservation};
pub use record::{INLINE_BYTES, RECORD_BYTES_MAX, SHORT_BYTES_MAX, SLOT_BYTES, STAMP_BITS, Urgent};

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
