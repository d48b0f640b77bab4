//! The memory of lanes that have grown, which is returned when they are idle.

use super::Relay;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Relays of this process whose lanes have grown.
static GROWN: AtomicUsize = AtomicUsize::new(0);

/// Whether a lane has grown, and where its sender was when it was last examined.
#[derive(Debug, Default)]
pub(super) struct Growth {
    has_grown: bool,
    position: u64,
}

impl Growth {
    /// Notes whether the lane has memory to return, after a send.
    #[inline]
    pub(super) fn note(&mut self, has_grown: bool) {
        if has_grown && !self.has_grown {
            self.has_grown = true;
            GROWN.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn end(&mut self) {
        if std::mem::take(&mut self.has_grown) {
            GROWN.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Growth {
    fn drop(&mut self) {
        self.end();
    }
}

impl Relay {
    /// Returns whether a relay of this process may have memory to return: call [`Relay::reclaim`] of each a few times a
    /// second.
    pub fn is_any_grown() -> bool {
        GROWN.load(Ordering::Relaxed) > 0
    }

    /// Returns the memory of a lane that has grown to the system, if nothing was sent since the last call and
    /// everything is read.
    pub fn reclaim(&mut self) {
        if !self.growth.has_grown {
            return;
        }
        let Some(lane) = self.sender.lane() else { return };
        let is_idle = std::mem::replace(&mut self.growth.position, lane.position()) == lane.position();
        if is_idle && lane.shrink() {
            self.growth.end();
        }
    }
}
