//! Connects that are pending in the background, as far as waits for readiness must know them.
//!
//! A call that waits for readiness drives these connects ([`advance`]) and does not block for long while there are any.
//! What a connect does is known to `lifecycle::pending`, which registers it here.

use crate::process::callback::Callback;
use crate::process::clock::{TICKS_PER_MILLISECOND, ticks};
use crate::process::lock::{Guard, Lock};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Number of connects of this process that are pending.
static COUNT: AtomicU32 = AtomicU32::new(0);
/// Time in ticks of the last [`advance`].
static ADVANCED_TICKS: AtomicU64 = AtomicU64::new(0);
/// Advances all pending connects.
static ADVANCE: Callback<fn()> = Callback::new();

/// Held while a pending connect ends, and while a descriptor is closed that may belong to one.
static ENDING: Lock = Lock::new();

/// Counts one pending connect for as long as it lives.
pub(crate) struct Counted(());

impl Counted {
    /// Counts a connect; `advance` advances all.
    pub(crate) fn new(advance: fn()) -> Self {
        ADVANCE.set(advance);
        COUNT.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        COUNT.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Returns whether a connect of this process is pending: then no thread may block for long before it polls again.
#[inline]
pub fn is_any_pending() -> bool {
    COUNT.load(Ordering::SeqCst) > 0
}

/// Advances pending connects, at most once in half a millisecond. Waits for readiness call this before they poll.
#[inline]
pub fn advance() {
    if is_any_pending() {
        advance_if_due();
    }
}

#[cold]
fn advance_if_due() {
    let (now, advanced) = (ticks(), ADVANCED_TICKS.load(Ordering::Relaxed));
    let is_due = now.wrapping_sub(advanced) > TICKS_PER_MILLISECOND / 2;
    if is_due
        && ADVANCED_TICKS.compare_exchange(advanced, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        && let Some(advance) = ADVANCE.get()
    {
        advance();
    }
}

/// Keeps connects from ending while the caller records that a descriptor is closed, or changes a registration of it.
pub fn hold_off() -> Option<Guard<'static>> {
    if is_any_pending() { ENDING.lock_unless_held() } else { None }
}

/// Enters the end of a pending connect. `None` in a signal handler that has interrupted a close.
pub(crate) fn enter_ending() -> Option<Guard<'static>> {
    ENDING.lock_unless_held()
}

/// Frees the lock in a child of `fork`. Returns whether the parent has pending connects, whose records must be dropped.
pub(crate) fn after_fork_in_child() -> bool {
    ENDING.reset();
    is_any_pending()
}

/// Forgets all connects: they are the parent's.
pub(crate) fn forget_all() {
    COUNT.store(0, Ordering::SeqCst);
}
