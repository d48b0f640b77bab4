//! Yielding the processor while streams and short messages share it.
//!
//! A short message passes from program to proxy to proxy to program. Where they share processors, each step waits until
//! the running thread yields: streams copy as long as there is room, and a proxy that serves them finds work in every
//! poll. Therefore a proxy that has forwarded a short message yields, and for some time afterwards streams yield
//! between pieces ([`super::PollOutcome::should_yield`]).
//! Streams without short messages beside them do not yield, and each thread finds out for itself whether yielding lets
//! another thread run ([`wait::Yielder`]).

/// How long streams yield after a short message.
const LATENCY_TRAFFIC_NS: u64 = 10_000_000;
/// How long an engine forwards streams alongside short messages before it yields at the end of a poll. The bound is a
/// time, because the latency of a ping-pong is what matters, and memory speeds differ by a factor of four between
/// machines.
const BUSY_NS_MAX: u64 = 5_000;

/// An engine's record of short messages and of its own busy time.
#[derive(Debug, Default)]
pub(super) struct Yielding {
    /// This poll has forwarded bytes of the latency class.
    has_forwarded: bool,
    /// When bytes of the latency class were last forwarded.
    forwarded_ns: Option<u64>,
    /// Bytes forwarded until the last poll.
    forwarded_bytes: u64,
    /// Since when every poll has forwarded bytes without a yield.
    busy_since_ns: Option<u64>,
}

impl Yielding {
    /// Records that bytes of the latency class were forwarded.
    pub(super) fn note_latency_forwarded(&mut self) {
        self.has_forwarded = true;
    }

    /// Returns whether the driver should yield now, at the end of a poll. `forwarded_bytes` is the number of bytes that
    /// the engine has forwarded so far.
    pub(super) fn should_yield(&mut self, now_ns: u64, forwarded_bytes: u64) -> bool {
        let has_forwarded = std::mem::take(&mut self.has_forwarded);
        if has_forwarded {
            self.forwarded_ns = Some(now_ns);
        }
        let is_busy_for_long = self.is_busy_for_long(now_ns, forwarded_bytes);
        let should_yield = has_forwarded || (is_busy_for_long && self.has_latency_traffic(now_ns));
        if should_yield {
            self.busy_since_ns = None;
        }
        should_yield
    }

    /// Records a poll that forwarded nothing.
    pub(super) fn note_idle_poll(&mut self) {
        self.busy_since_ns = None;
    }

    /// Returns whether every poll for at least [`BUSY_NS_MAX`], including this one, has forwarded bytes.
    fn is_busy_for_long(&mut self, now_ns: u64, forwarded_bytes: u64) -> bool {
        if std::mem::replace(&mut self.forwarded_bytes, forwarded_bytes) == forwarded_bytes {
            self.busy_since_ns = None;
            return false;
        }
        let since_ns = *self.busy_since_ns.get_or_insert(now_ns);
        now_ns - since_ns >= BUSY_NS_MAX
    }

    /// Returns whether the engine has recently forwarded short messages.
    fn has_latency_traffic(&self, now_ns: u64) -> bool {
        self.forwarded_ns.is_some_and(|then_ns| now_ns.saturating_sub(then_ns) < LATENCY_TRAFFIC_NS)
    }
}
