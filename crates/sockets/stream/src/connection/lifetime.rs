//! Who ends a connection that is closed while calls of other threads sleep: the close, or the call that returns last.
//!
//! `tests/lifetime.rs` checks every order of the steps of several threads.

use std::sync::atomic::{AtomicU32, Ordering};

/// A word that threads share. Each access is sequentially consistent.
pub trait Word: Default {
    /// Returns the value.
    fn load(&self) -> u32;
    /// Stores a value, and returns the one before.
    fn swap(&self, value: u32) -> u32;
    /// Adds to the value, and returns the one before.
    fn add(&self, summand: u32) -> u32;
}

impl Word for AtomicU32 {
    fn load(&self) -> u32 {
        self.load(Ordering::SeqCst)
    }

    fn swap(&self, value: u32) -> u32 {
        self.swap(value, Ordering::SeqCst)
    }

    fn add(&self, summand: u32) -> u32 {
        self.fetch_add(summand, Ordering::SeqCst)
    }
}

/// The calls that have slept and not returned, and whether the connection is closed.
#[derive(Debug, Default)]
pub struct Lifetime<W = AtomicU32> {
    calls: W,
    is_closing: W,
}

impl<W: Word> Lifetime<W> {
    /// Returns the number of calls that have slept.
    pub fn calls(&self) -> u32 {
        self.calls.load()
    }

    /// Counts a call that is about to sleep.
    pub fn begin_call(&self) {
        self.calls.add(1);
    }

    /// Notes that such a call returns. Returns whether it must end the connection.
    #[must_use]
    pub fn end_call(&self) -> bool {
        self.calls.add(1_u32.wrapping_neg()) == 1 && self.is_closing.swap(0) == 1
    }

    /// Removes a call of the thread that closes the connection.
    pub fn forget_call(&self) {
        self.calls.add(1_u32.wrapping_neg());
    }

    /// Notes that the connection is closed, which had such calls. Returns whether the close must end it, because all
    /// of them have returned.
    #[must_use]
    pub fn close(&self) -> bool {
        self.is_closing.swap(1);
        // A call that returned before saw no close to finish; one that returns from now on does.
        self.calls.load() == 0 && self.is_closing.swap(0) == 1
    }

    /// Forgets calls and close in the child of a fork, which has none of those threads.
    pub fn reset(&self) {
        self.calls.swap(0);
        self.is_closing.swap(0);
    }
}
