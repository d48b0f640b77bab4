//! A poll: what it does, and in which order.
//!
//! 1. Receive frames of each partition, and answer them with control frames.
//! 2. Check the programs of active connections for input, and queue those that have some.
//! 3. Serve the queued connections, then send the control frames that this has caused, and publish everything.
//! 4. Wake programs and the peer. With oversubscribed processors, this waits until a poll makes no progress.
//!
//! If nothing has arrived and no program has input, the poll ends at once.

use super::event::{LinkFault, PollOutcome};
use super::parking::POLLED_UNPUBLISHED_MAX;
use super::state::Engine;
use crate::local::LocalEndpoint;
use fabric::{Inbound, Outbound};

/// Polls in which an engine on oversubscribed processors wakes no thread: as many slices as fill a program's buffer of
/// 64 KiB.
const POLLS_WITHOUT_WAKE_MAX: u32 = 32;

impl<I: Inbound, O: Outbound, L: LocalEndpoint> Engine<I, O, L> {
    /// Receives what has arrived and sends what there is room for, a bounded amount of both.
    ///
    /// # Errors
    /// The link must be taken down: see [`Engine::take_down`].
    pub fn poll(&mut self, now_ns: u64) -> Result<PollOutcome, LinkFault> {
        self.now_ns = self.now_ns.max(now_ns);
        let mut progressed = false;
        if self.partitions_are_quiet() {
            if self.polled_are_quiet() {
                self.yielding.note_idle_poll();
                return Ok(PollOutcome::default());
            }
        } else {
            for partition in 0..self.partitions.len() {
                progressed |= self.receive(partition)?;
            }
            progressed |= self.send_control_frames()?;
        }
        if self.polled.len() > POLLED_UNPUBLISHED_MAX {
            self.publish();
        }
        self.poll_connections();
        for partition in 0..self.partitions.len() {
            progressed |= self.serve_partition(partition, self.settings.backlog_bytes)?;
        }
        progressed |= self.send_control_frames()?;
        self.publish();
        let forwarded_bytes = self.counters.bytes_sent + self.counters.bytes_received;
        let should_yield = self.yielding.should_yield(self.now_ns, forwarded_bytes);
        if self.is_oversubscribed && progressed && self.polls_without_wake < POLLS_WITHOUT_WAKE_MAX {
            self.polls_without_wake += 1;
            return Ok(PollOutcome { progressed, ring_peer: false, should_yield });
        }
        self.polls_without_wake = 0;
        self.wake_programs();
        Ok(PollOutcome { progressed, ring_peer: self.take_peer_wake_request(), should_yield })
    }
}
