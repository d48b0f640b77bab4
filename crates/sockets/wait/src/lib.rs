//! The waiting policy: how a thread waits for data that another thread, process or host writes to memory.
//!
//! [`spin`] is the policy, and its module page describes all of it: spinning, yielding, blocking. It rests on two
//! detectors: [`oversubscription`] of the machine and [`contention`] by CPU-bound threads. [`yielder`] yields the
//! processor in long work.

// `oversubscription` closes a descriptor by a raw system call.
#![allow(unsafe_code)]

pub mod contention;
pub mod oversubscription;
pub mod spin;
pub mod yielder;

pub use spin::{Action, AdaptiveSpin, Spin};
pub use yielder::Yielder;
