//! When a thread without work spins, yields and blocks, and for how long it blocks.

use rustix::event::Timespec;
use socket::process::clock::now_ns;
use std::ops::RangeInclusive;
use wait::Yielder;

/// Bounds of the block time where no doorbell announces the peers: an eighth of the time for which there has been no
/// work ([`IDLE_PER_NAP`]). A message is therefore late by an eighth of the pause before it, and by 4 ms at most. There
/// are about forty polls in the first 32 ms of a pause, and 250 in each second after.
const NAP_NS: RangeInclusive<u64> = 50_000..=4_000_000;
const IDLE_PER_NAP: u64 = 8;
/// Block time while a peer has not greeted yet.
const GREETING_NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
/// Block time where doorbells announce everything: the interval at which the thread checks that its peers are alive.
const LIVENESS_INTERVAL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// What the block time depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkState {
    /// An engine waits for the greeting of its peer.
    Greeting,
    /// There are links, and no doorbell announces the peers' stores.
    WithoutDoorbell,
    /// There are no links, or a doorbell announces the peers' stores.
    Announced,
}

/// The idle policy of a thread.
#[derive(Debug)]
pub(super) struct IdlePolicy {
    yielder: Yielder,
    /// Since when the thread has only blocked and found no work.
    idle_since_ns: Option<u64>,
}

impl IdlePolicy {
    /// Creates the policy of a thread that has found no work yet.
    pub(super) fn new() -> Self {
        Self { yielder: Yielder::new(), idle_since_ns: None }
    }

    /// Records that there was work.
    pub(super) fn note_work(&mut self) {
        self.idle_since_ns = None;
    }

    /// Returns whether the thread has blocked and found no work since.
    pub(super) fn is_idle(&self) -> bool {
        self.idle_since_ns.is_some()
    }

    pub(super) fn yield_if_useful(&self) {
        self.yielder.yield_if_useful();
    }

    /// Returns how long to block now.
    pub(super) fn block_limit(&mut self, links: LinkState) -> Timespec {
        let now_ns = now_ns();
        let idle_ns = now_ns - *self.idle_since_ns.get_or_insert(now_ns);
        match links {
            LinkState::Greeting => GREETING_NAP,
            LinkState::WithoutDoorbell => nap(idle_ns),
            LinkState::Announced => LIVENESS_INTERVAL,
        }
    }
}

/// Returns the block time after a time without work.
fn nap(idle_ns: u64) -> Timespec {
    let nap_ns = (idle_ns / IDLE_PER_NAP).clamp(*NAP_NS.start(), *NAP_NS.end());
    Timespec { tv_sec: 0, tv_nsec: nap_ns.cast_signed() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn naps_grow_with_the_time_without_work() {
        let naps_us = |idle_us: u64| nap(idle_us * 1000).tv_nsec / 1000;
        assert_eq!([0, 400, 800, 8_000, 32_000, 1_000_000].map(naps_us), [50, 50, 100, 1000, 4000, 4000]);
    }
}
