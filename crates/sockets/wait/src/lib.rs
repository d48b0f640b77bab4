//! The waiting policy: how a thread waits for data that another thread, process or host writes to memory.
//!
//! [`spin`] is the policy, and its module page describes all of it: spinning, yielding, blocking. [`contention`]
//! detects CPU-bound threads; [`yielder`] yields the processor in long work.

pub mod contention;
pub mod spin;
pub mod yielder;

pub use spin::{Action, AdaptiveSpin, Spin, is_core_shared};
pub use yielder::Yielder;
