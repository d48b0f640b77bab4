//! Links with the delay, the rate and the write granularity of a modelled link, emulated in real time.
//!
//! There are two emulations. Both endpoints read the kernel's monotonic clock. The delay of a link is longer than the
//! time that a cache line takes between two cores, so it hides what the emulation itself costs, except for a read of
//! the clock.
//!
//! # Windows with a journal: [`TimedLink`] and [`TimedWindows`]
//!
//! A store is appended to a journal in the wrapped link's window, with the time when it is due: the time when the link
//! is free, plus its packets' transmission time, plus the delay. The receiver's loads apply the stores that are due to
//! the window, which is private memory of the receiver's process. Stores arrive in order, and rings arrive after the
//! stores before them.
//!
//! * **Rate.** All writers of one link share a [`Pacer`], also those in several processes.
//! * **Credits.** A journal is bounded. A store to a full journal stalls, as it does without posted credits. The
//!   stalled sender applies its own journal meanwhile, and wakes the peer. A peer that does not load for
//!   [`STALL_NS_MAX`] has lost the link. With [`memory_bytes`] of memory, a journal holds all that a well-behaved
//!   sender leaves unread.
//! * **Slices.** A slice of a window shares its journal. Parts of a link that belong to different processes are made of
//!   slices of the *wrapped* windows, each with [`TimedWindows`] of its own.
//! * **One process.** Window, positions and locks are memory of the process that created them. After a fork only one of
//!   the two processes may use them, and signal handlers may not.
//! * **Not timed**: training, scratchpads, and the return of the journal's own credits.
//!
//! # Windows in shared memory: [`SharedWindows`]
//!
//! Processes that share the memory of a link's windows may stop at any time. Their windows keep all state in it, and
//! neither endpoint depends on the other's loads.

mod clock;
mod error;
mod journal;
mod link;
mod shared;
mod timing;
mod window_types;
mod windows;

pub use clock::{Clock, Monotonic};
pub use error::TimedError;
pub use link::TimedLink;
pub use shared::{SharedConfig, SharedInbound, SharedLayout, SharedOutbound, SharedWindows};
pub use timing::{LinkTiming, Pacer};
pub use window_types::WindowTypes;
pub use windows::{STALL_NS_MAX, TimedConfig, TimedDoorbell, TimedInbound, TimedOutbound, TimedWindows, memory_bytes};
