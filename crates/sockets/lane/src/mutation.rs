//! Under the model checker only: switches off what a test then shows to be needed.

use std::cell::Cell;

thread_local! {
    static FENCES_OFF: Cell<bool> = const { Cell::new(false) };
}

/// While it lives, this thread's lanes (loom runs all modelled threads on one) go without the fence between store and
/// look.
#[derive(Debug)]
pub struct WithoutSleepFences(());

impl WithoutSleepFences {
    /// Switches the fences off.
    #[allow(clippy::new_without_default)] // A default that changes behaviour would surprise.
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
