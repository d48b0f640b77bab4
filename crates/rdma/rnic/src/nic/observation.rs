//! What a program may observe of a queue pair's sending side.

use sim::Time;

use super::engine::Nic;
use super::memory::HostMemory;
use crate::wire::QpNumber;

/// What congestion control allows a queue pair to send.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SendLimit {
    /// Anything.
    None,
    /// At most this many bytes in flight.
    WindowBytes(u32),
    /// At most this many bits per second.
    RateBps(f64),
}

impl<M: HostMemory> Nic<M> {
    /// Returns what congestion control allows a queue pair to send at `now`; `None` if the queue pair does not exist.
    pub fn send_limit(&self, now: Time, qp: QpNumber) -> Option<SendLimit> {
        let congestion = self.contexts.as_driver(self.index(qp)?).congestion;
        if let Some(bps) = congestion.rate_bps(&self.profile.congestion, now) {
            return Some(SendLimit::RateBps(bps));
        }
        Some(match congestion.window_bytes() {
            u32::MAX => SendLimit::None,
            bytes => SendLimit::WindowBytes(bytes),
        })
    }

    /// Returns the number of request packets that a queue pair has retransmitted; 0 if it does not exist.
    pub fn retransmitted_packets(&self, qp: QpNumber) -> u64 {
        self.index(qp).map_or(0, |i| self.host_qps[i].retransmitted_packets)
    }
}
