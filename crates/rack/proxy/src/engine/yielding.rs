//! Yielding the processor while streams and short messages share it.
//!
//! A short message passes from program to proxy to proxy to program. Where they share processors, each step waits until
//! the running thread yields: streams copy as long as there is room, and a proxy that serves them finds work in every
//! poll. Therefore a proxy that has forwarded a short message yields, and for some time afterwards streams yield
//! between pieces: proxies ([`super::PollOutcome::should_yield`]) and programs ([`LocalEndpoint::set_yielding`]) alike.
//! Streams without short messages beside them do not yield, and each thread finds out for itself whether yielding lets
//! another thread run ([`wait::Yielder`]).

use super::Engine;
use crate::connection::Connection;
use crate::{Class, LocalEndpoint};
use fabric::{Inbound, Outbound};

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
    carried_bytes: u64,
    /// Since when every poll has forwarded bytes without a yield.
    busy_since_ns: Option<u64>,
}

impl<I: Inbound, O: Outbound, L: LocalEndpoint> Engine<I, O, L> {
    /// Records that bytes were forwarded through a partition. They count as short only if streams have a partition of
    /// their own.
    pub(super) fn note_forwarded(&mut self, partition: usize) {
        self.yielding.has_forwarded |= self.partitions.len() > 1 && partition == Class::Latency as usize;
    }

    /// Returns whether the driver should yield now, at the end of a poll.
    pub(super) fn should_yield(&mut self) -> bool {
        let has_forwarded = std::mem::take(&mut self.yielding.has_forwarded);
        if has_forwarded {
            self.yielding.forwarded_ns = Some(self.now_ns);
        }
        let is_busy_for_long = self.is_busy_for_long();
        let should_yield = has_forwarded || (is_busy_for_long && self.has_latency_traffic());
        if should_yield {
            self.yielding.busy_since_ns = None;
        }
        should_yield
    }

    /// Records a poll that forwarded nothing.
    pub(super) fn note_idle_poll(&mut self) {
        self.yielding.busy_since_ns = None;
    }

    /// Returns whether every poll for at least [`BUSY_NS_MAX`], including this one, has forwarded bytes.
    fn is_busy_for_long(&mut self) -> bool {
        let carried_bytes = self.counters.bytes_sent + self.counters.bytes_received;
        if std::mem::replace(&mut self.yielding.carried_bytes, carried_bytes) == carried_bytes {
            self.yielding.busy_since_ns = None;
            return false;
        }
        let since_ns = *self.yielding.busy_since_ns.get_or_insert(self.now_ns);
        self.now_ns - since_ns >= BUSY_NS_MAX
    }

    /// Returns whether this engine has recently forwarded short messages.
    pub(super) fn has_latency_traffic(&self) -> bool {
        self.yielding.forwarded_ns.is_some_and(|then_ns| self.now_ns.saturating_sub(then_ns) < LATENCY_TRAFFIC_NS)
    }
}

impl<L: LocalEndpoint> Connection<L> {
    /// Tells the program of a stream whether to yield, if that has changed.
    pub(super) fn update_yielding(&mut self, has_latency_traffic: bool) {
        let should_yield = has_latency_traffic && [self.class, self.in_class].contains(&Class::Bulk);
        if self.is_yielding != should_yield
            && let Some(local) = &mut self.local
        {
            local.set_yielding(should_yield);
            self.is_yielding = should_yield;
        }
    }
}
