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
//! Every arrow is a store; nobody loads across the link. What the sender must know (credit, "I sleep"), the receiver writes into
//! the sender's memory, and the other way round.
//!
//! **Record.** A record is 1 to [`RECORD_BYTES_MAX`] bytes in contiguous slots. Its first slot starts with two words: the *tag*
//! (position and the lane's secret, so neither stale nor payload bytes pass for one) and the length with the kind. The first
//! 48 bytes of payload share that cache line, so a small message moves in exactly one line and the receiver polls the line that
//! carries the data. The tag is stored last.
//!
//! **Rings.** A lane starts in a small ring and moves to a big one, for good, the first time it carries bulk: an idle or chatty
//! connection touches little memory.
//!
//! **Hostile peers.** A header is loaded once, checked, then used. Whatever the peer writes, reads stay inside the window; nonsense
//! is [`Corrupt`].

#![allow(unsafe_code)] // Raw spans of caller memory cross this interface.

mod consumer;
mod layout;
#[cfg(loom)]
pub mod mutation;
mod producer;
mod record;
#[cfg(all(test, not(loom)))]
mod tests;
mod words;

pub use consumer::{Chunk, Consumer};
pub use layout::Layout;
pub use producer::{Producer, Reservation};
pub use record::{INLINE_BYTES, RECORD_BYTES_MAX, SLOT_BYTES};

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
