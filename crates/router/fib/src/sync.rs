//! The synchronization primitives of [`crate::epoch`], which the loom model checker replaces.

pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};
pub(crate) use std::sync::{Arc, Mutex};
