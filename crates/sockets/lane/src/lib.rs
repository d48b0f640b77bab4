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
//! Every arrow is a store; nobody loads across the link. What the sender must know (credit, "I sleep"), the receiver
//! writes into the sender's memory, and the other way round.
//!
//! **Record.** A record is 1 to [`RECORD_BYTES_MAX`] bytes in contiguous slots. Its first slot starts with two words:
//! the *tag* (position and the lane's secret, so neither stale nor payload bytes pass for one) and the length with the
//! kind. The first 48 bytes of payload share that cache line, so a small message moves in exactly one line and the
//! receiver polls the line that carries the data. The tag is stored last. Records that are ready together are put in
//! place behind the first, tags and all, and the first one's tag is stored last: one fence for all of them.
//!
//! **Rings.** A lane starts in a small ring, so that an idle or chatty connection touches little memory. One with a big
//! ring moves there, for good, the first time it carries bulk. An *elastic* lane has larger rings of doubling sizes:
//! its sender publishes a record "continues in ring N" and goes on there, when a write or a receiver that lags asks for
//! more room and what both ends may hold unread ([`Producer::set_capacity`]) allows it. Once everything is read it
//! gives the memory back ([`Producer::release_memory`]) and goes on in the small ring.
//!
//! **Open records.** Where the receiver of an elastic lane lags, short writes share a record: its length grows with
//! each of them until it is closed. A stream of single bytes would else take 64 times its length.
//!
//! **Hostile peers.** A position, a length or a credit is loaded once, checked, then used, also where it is this end's
//! own word: on shared memory the peer reaches those too. Whatever it writes, each call ends, stays inside the parts of
//! this lane, and gives bytes or [`Corrupt`]. The secret is random and known to both ends only: it keeps payload from
//! passing for a tag, not a peer out.
//!
//! # Memory order
//!
//! Nothing here counts on a machine that keeps stores in order (x86): the argument is in terms of acquire and release,
//! and holds on aarch64 as it stands.
//!
//! | what | first end | other end |
//! |---|---|---|
//! | publish | payload, header; [`fence`](fabric::Outbound::fence); tag, *release* | tag, *acquire*; header, payload |
//! | publish several | all records but the first tag; `fence`; first tag, *release* | first tag, *acquire*; the rest |
//! | append to an open record | payload; header, *release* | header, *acquire*; payload |
//! | credit | payload loads; credit, *release* | credit, *acquire*; stores to those slots |
//! | end | last tag; fence; fin, *release* | fin, *acquire*; then no tag means no record |
//! | sleep | flag; `flush`; *SC fence*; tag or credit | tag or credit; *SC fence*; flag |
//!
//! * The fence of *publish* is for write-combined windows, where a release store alone does not order what still
//!   gathers.
//! * A sender that finds room without a new look at the credit (its tail limit) relies on an earlier acquire, by itself
//!   or by whom the lock around the producer ordered before it.
//! * *Sleep* is the one place where a store must not pass a later load, which release and acquire do not forbid on any
//!   machine. Of two ends that each store, fence and look, at least one sees the other. Credit is returned often and
//!   sleepers for room are rare, so the receiver fences only where it crosses a quarter of the ring (in an elastic
//!   lane: a multiple of 32 slots); [`Producer::is_writable`] counts room from there on. A sender of an elastic lane
//!   says from which position on it wants to be woken.
//! * Flags are cleared by their reader with relaxed stores. A clear that is late could undo a *newer* announcement, but
//!   whoever cleared then rings, and the doorbell remembers: it must order like a lock (ring releases, wait acquires)
//!   and keep a ring that comes early. An eventfd, a socket and a condition variable with a flag do.
//! * Cursors are plain words (relaxed): `&mut` means that one thread at a time uses an end, and its lock orders the
//!   next.
//!
//! Where memory is **not coherent**, windows write back what is stored, and who reads drops lines first
//! ([`Inbound::invalidate`](fabric::Inbound::invalidate), nothing on other memory): the tag's line before each look at
//! it, the record's other lines once its tag is seen, and the words of the other end (credit, end, flags) before each
//! load. No line has two writers: see `wake` for the flags. Both ends must be on such memory, or neither.
//!
//! Tests: `tests/loom.rs` searches all of this but the loads of *credit*, which loom never delays; Miri sees those as
//! data races of in-place access. `tests/properties/non_coherent.rs` leaves out each of the drops, and sees it fail.

#![allow(unsafe_code)] // Raw spans of caller memory cross this interface.

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

/// The peer broke the protocol of the lane: the connection cannot go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Corrupt {
    /// Which value was wrong.
    pub what: &'static str,
    /// What it was.
    pub value: u64,
}

impl std::fmt::Display for Corrupt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "lane: peer wrote {} {:#x}: the connection is reset", self.what, self.value)
    }
}

impl std::error::Error for Corrupt {}

/// Between "I have stored" and "now I look": the one place where a store must not pass a later load, on either end.
#[inline]
fn sleep_fence() {
    #[cfg(loom)]
    if mutation::fences_are_off() {
        return;
    }
    volmem::sync::fence(volmem::sync::Ordering::SeqCst);
}
