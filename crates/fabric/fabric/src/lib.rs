//! Memory windows between two nodes, and the links that are made of them.
//!
//! A **window** is memory of one node that one peer can write. Its owner sees it as [`Inbound`]: it reads the window,
//! and writes the parts of it that belong to itself. The peer sees it as [`Outbound`]: it can only write, because a
//! load across a link would cost a round trip. This is a memory window of an NTB (Non-Transparent Bridge), for example.
//!
//! A [`Link`] consists of a pair of windows, a [`Doorbell`], a [`Scratchpad`], a [`LinkState`] and an [`Epoch`]. The
//! backends are:
//!
//! | module | endpoints in | windows | doorbell |
//! |---|---|---|---|
//! | [`heap`] | one process | memory of the process | condition variable |
//! | [`shm`] | two processes under one kernel | a sealed memfd | eventfd |
//! | [`device`] | nodes that share a device, DAX memory or file | spans of it | eventfd, interrupt or polled counter |
//! | [`timed`] | as the wrapped link | of the wrapped link, with the timing of a modelled link | of the wrapped link |
//!
//! Test doubles and the conformance suite, which every backend passes, are in the module `test_support`. The module
//! exists only with the feature `test-support` (the suite needs the feature `conformance` too), which only
//! dev-dependencies, test crates and fuzz targets enable.
//!
//! Under `--cfg loom` only the traits and the windows exist, because the backends need a kernel or addresses.

#![allow(unsafe_code)] // Raw spans of the caller's memory are copied to and from windows.

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
mod pair_layout;
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
pub use training::Training;
pub use window::{Coherence, Inbound, Outbound, Slice};
