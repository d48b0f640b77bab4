//! Mutations for the model checker: a test removes a fence, or the numbers of announcements, and shows that a failure
//! follows.

use std::cell::Cell;

thread_local! {
    static FENCES_OFF: Cell<bool> = const { Cell::new(false) };
    static NUMBERS_OFF: Cell<bool> = const { Cell::new(false) };
}

/// Guard that removes the fence between the store and the load of a sleeper from all lanes of this thread (loom runs
/// all modelled threads on one).
#[derive(Debug)]
pub struct WithoutSleepFences(());

impl WithoutSleepFences {
    /// Removes the fences until the guard is dropped.
    #[allow(clippy::new_without_default)] // A default value must not have a side effect.
    pub fn new() -> Self {
        FENCES_OFF.set(true);
        Self(())
    }
}

impl Drop for WithoutSleepFences {
    fn drop(&mut self) {
        FENCES_OFF.set(false);
    }
}

pub(crate) fn fences_are_off() -> bool {
    FENCES_OFF.get()
}

/// Guard that gives all announcements of sleep of this thread's lanes the same number.
#[derive(Debug)]
pub struct WithoutNumbers(());

impl WithoutNumbers {
    /// Removes the numbers until the guard is dropped.
    #[allow(clippy::new_without_default)] // A default value must not have a side effect.
    pub fn new() -> Self {
        NUMBERS_OFF.set(true);
        Self(())
    }
}

impl Drop for WithoutNumbers {
    fn drop(&mut self) {
        NUMBERS_OFF.set(false);
    }
}

pub(crate) fn numbers_are_off() -> bool {
    NUMBERS_OFF.get()
}
