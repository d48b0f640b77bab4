//! Memory windows between two nodes, and what holds two of them together.
//!
//! A **window** is memory of one node that one peer can write. Seen from its owner it is [`Inbound`]: read it, and
//! write what is yours in it. Seen from the peer it is [`Outbound`]: write it; there is no way to read it, because a
//! load across a link costs a round trip.
//!
//! A [`Link`] is a pair of windows, a [`Doorbell`], a [`Scratchpad`], a [`LinkState`] and an [`Epoch`]. Backends are
//! files named after their mechanism:
//!
//! | module | both ends in | windows | doorbell |
//! |---|---|---|---|
//! | [`heap`] | one process | its own memory | condition variable |
//! | [`shm`] | two processes under one kernel | a sealed memfd | eventfd |
//! | [`dax`] | two kernels, or processes | a CXL or persistent-memory device, a file | a count that sleepers look at |
//! | [`stale`] | one process | an emulation of memory that two caches do not keep coherent | condition variable |
//! | [`device`] | two kernels that share a device | spans of its memory | eventfd, interrupt or flag |
//! | [`timed`] | wherever the link that it wraps has them | that link's, as late as a modelled link | that link's |
//! | [`faulty`] | wherever the link that it wraps has them | that link's, spoiled by a seeded plan | that link's |
//!
//! Other crates take them by the aliases in [`recommended`]. What a backend must do, whatever it is made of, stands in
//! `conformance` (feature `conformance`), and every backend passes it: in one process where that can have both ends,
//! and between two machines.
//!
//! Under `--cfg loom` only the traits and the windows exist: the backends need a kernel, or addresses.

#![allow(unsafe_code)] // Raw spans of caller memory cross the windows.

#[cfg(not(loom))]
pub mod dax;
#[cfg(not(loom))]
pub mod device;
#[cfg(not(loom))]
mod eventfd;
#[cfg(not(loom))]
pub mod heap;
mod link;
mod memory;
#[cfg(not(loom))]
mod memory_link;
#[cfg(not(loom))]
mod pair;
#[cfg(not(loom))]
mod polled;
#[cfg(not(loom))]
pub mod shm;
#[cfg(all(feature = "test-support", not(loom)))]
pub mod test_support;
#[cfg(not(loom))]
pub mod timed;
mod training;
#[cfg(not(loom))]
mod wait;
mod window;

pub use link::{Doorbell, Endpoint, Epoch, Link, LinkState, Scratchpad, WaitOutcome, train_both};
pub use memory::{Memory, MemoryInbound, MemoryOutbound};
#[cfg(not(loom))]
pub use memory_link::{MemoryLink, MemoryScratchpad, SCRATCHPAD_WORDS};
#[cfg(not(loom))]
pub use polled::PolledDoorbell;
pub use training::Training;
pub use window::{Coherence, Inbound, Outbound, Slice};
