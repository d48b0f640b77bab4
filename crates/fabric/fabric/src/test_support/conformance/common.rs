//! Constants and a helper of the suite.

use crate::Inbound;
use std::time::Duration;
use volmem::sync::Ordering;

/// Bytes of a window of each link.
pub const WINDOW_BYTES: usize = if cfg!(miri) { 512 } else { 1024 };
pub(super) const WORD_BYTES: usize = size_of::<u64>();

/// Cases of a property and rounds of an exchange. Miri gets fewer.
pub(super) const CASES: u32 = if cfg!(miri) { 2 } else { 64 };
pub(super) const ROUNDS: u64 = if cfg!(miri) { 12 } else { 2_000 };

/// How long a test waits before it reports a link as stuck. No test passes or fails by how long something takes within
/// that time. The clock of an emulated guest can run ten times too fast.
pub(super) const STUCK_AFTER: Duration = Duration::from_secs(180);

/// Loads a word past this node's cache.
pub(super) fn load_fresh(inbound: &impl Inbound, offset: usize) -> u64 {
    inbound.invalidate(offset, WORD_BYTES);
    inbound.load_u64(offset, Ordering::Acquire)
}
