//! The atomics of [`crate::epoch`], so that a model checker can take their place there.

pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};
pub(crate) use std::sync::{Arc, Mutex};
