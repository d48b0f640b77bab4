//! The spans of a link, to which programs move the bytes of their connections with `trust = "direct"`.
//!
//! A span has the same index in both windows of a link, and both spans belong to one connection. The proxy of the
//! program that connects proposes a span that no program of its node can access. The other proxy accepts it if that
//! holds at its node too, and cleans both. Only the kernel of a machine knows what its programs can access
//! ([`lease`]). A span that was in use when a proxy or a link died is therefore not given to another connection
//! before the programs of both nodes are gone.

use super::monitor_channel::MonitorChannel;
use crate::frame::LinkSide;
use control::ChannelError;
use control::proxy::{FromProxy, RetainedConnection, RetainedDescriptors, Spans, send_retained};
use fabric::Slice;
use fabric::device::{Device, DeviceInbound, DeviceOutbound, NodeSlot};
use segment::window::WindowSpans;
use segment::{SPAN_BYTES, ends, lease};
use socket::process::clock::now_ns;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How long a free span is not proposed, if there are others: the other proxy may have refused it, or may not know yet
/// that it is free.
const QUARANTINE_NS: u64 = 100_000_000;

/// The spans of one link, shared by this node's threads.
#[derive(Debug)]
pub(super) struct SpanPool {
    peer: NodeSlot,
    own: NodeSlot,
    spans: Spans,
    /// The monitor, which retains connections beyond this proxy.
    monitor: Arc<MonitorChannel>,
    /// One node proposes spans from the first on, the other one from the last, so that they seldom propose the same.
    from_last: bool,
    state: Mutex<PoolState>,
}

#[derive(Debug)]
struct PoolState {
    entries: Vec<SpanEntry>,
    /// Connections so far that have begun to use a span.
    total: u64,
    /// Connections without a span.
    missed: u64,
}

#[derive(Debug, Default)]
struct SpanEntry {
    is_in_use: bool,
    quarantined_until_ns: u64,
    /// The other proxy did not accept it the last time: a program there may have it for long.
    was_refused: bool,
    /// What the monitor retains.
    deposited: Option<(RetainedConnection, RetainedDescriptors)>,
}

/// A span that a connection has, until this is dropped.
#[derive(Debug)]
pub(super) struct SpanGrant {
    pool: Arc<SpanPool>,
    index: usize,
}

impl SpanGrant {
    pub(super) fn index(&self) -> u32 {
        self.index as u32
    }

    pub(super) fn peer(&self) -> u8 {
        self.pool.peer.0
    }

    /// Deposits duplicates of the descriptors of the connection with the monitor.
    pub(super) fn deposit(&self, retained: RetainedConnection, descriptors: RetainedDescriptors) {
        let mut state = self.pool.lock();
        // Under the lock: messages about a span keep their order, also when the monitor changes.
        if let Err(error) = self.pool.monitor.send(&FromProxy::Deposit(retained), &descriptors.as_fds()) {
            eprintln!("crosslane proxy: {retained:?} is lost with this proxy: the monitor's socket: {error}");
        }
        state.entries[self.index].deposited = Some((retained, descriptors));
    }

    /// Counts a program that has begun to use its span.
    pub(super) fn note_attached(&self) {
        self.pool.lock().total += 1;
    }
}

impl Drop for SpanGrant {
    fn drop(&mut self) {
        let state = &mut *self.pool.lock();
        let entry = &mut state.entries[self.index];
        (entry.is_in_use, entry.was_refused) = (false, false);
        entry.quarantined_until_ns = now_ns().saturating_add(QUARANTINE_NS);
        if entry.deposited.take().is_some() {
            let (peer, span) = (self.pool.peer.0, self.index as u32);
            // Under the lock: before another thread deposits another connection for the span. A monitor that has died
            // retains nothing.
            let _ = self.pool.monitor.send(&FromProxy::Withdraw { peer, span }, &[]);
        }
    }
}

/// A span that was proposed to the other proxy, and the descriptor for the program that connects.
#[derive(Debug)]
pub(super) struct SpanProposal {
    pub(super) grant: SpanGrant,
    pub(super) spans: WindowSpans,
    /// Not marked as leased before the other proxy has accepted the span: if both nodes are on one machine, the other
    /// proxy checks the same locks.
    pub(super) descriptor: OwnedFd,
}

impl SpanProposal {
    pub(super) fn index(&self) -> u32 {
        self.grant.index()
    }

    /// Records that the other proxy forwards the connection's bytes instead.
    pub(super) fn refused(self) {
        let (pool, index) = (Arc::clone(&self.grant.pool), self.grant.index);
        drop(self);
        let mut state = pool.lock();
        state.missed += 1;
        state.entries[index].was_refused = true;
    }

    /// Marks the span as leased, after the other proxy has accepted it. Returns `None` if the lock cannot be taken.
    pub(super) fn marked_leased(self) -> Option<Self> {
        lease::mark_leased(self.descriptor.as_fd(), self.spans).ok()?;
        Some(self)
    }
}

/// A span that the other proxy has proposed, accepted and cleaned.
#[derive(Debug)]
pub(super) struct SpanAcceptance {
    pub(super) grant: SpanGrant,
    pub(super) spans: WindowSpans,
    pub(super) lease: OwnedFd,
}

impl SpanPool {
    /// Creates the pool of the link between a peer and this node.
    pub(super) fn new((peer, own): (NodeSlot, NodeSlot), spans: Spans, monitor: Arc<MonitorChannel>) -> Self {
        let entries = (0..spans.count).map(|_| SpanEntry::default()).collect();
        let state = Mutex::new(PoolState { entries, total: 0, missed: 0 });
        Self { peer, own, spans, monitor, from_last: own > peer, state }
    }

    /// Returns which side of the link this node is.
    pub(super) fn own_side(&self) -> LinkSide {
        if self.own < self.peer { LinkSide::Lower } else { LinkSide::Higher }
    }

    /// Returns whether the spans have the size that this proxy uses, and lie within windows of this size.
    pub(super) fn fits(&self, window_bytes: usize) -> bool {
        let end_bytes = self.spans.span_bytes.checked_mul(self.spans.count);
        let end_bytes = end_bytes.and_then(|bytes| bytes.checked_add(self.spans.offset_bytes));
        self.spans.span_bytes == SPAN_BYTES as u64
            && self.spans.offset_bytes.is_multiple_of(rustix::param::page_size() as u64)
            && end_bytes.is_some_and(|bytes| bytes <= window_bytes as u64)
    }

    /// Returns the number of spans in use, of connections so far that have used one, and of connections that got none.
    pub(super) fn counts(&self) -> (u64, u64, u64) {
        let state = self.lock();
        (state.entries.iter().filter(|entry| entry.is_in_use).count() as u64, state.total, state.missed)
    }

    /// Proposes a span for a program that connects. Returns `None`, and counts it, if none is free.
    pub(super) fn propose(self: &Arc<Self>, device: &Device) -> Option<SpanProposal> {
        let proposal = self.take_any(device).and_then(|grant| {
            let (memory, spans) = self.window_spans(device, grant.index);
            let descriptor = lease::reopen(memory).ok()?;
            Some(SpanProposal { grant, spans, descriptor })
        });
        self.lock().missed += u64::from(proposal.is_none());
        proposal
    }

    /// Accepts the span that the other node proposes. The index is hostile. Returns `None` if the span is not free.
    pub(super) fn accept(self: &Arc<Self>, device: &Device, index: u32) -> Option<SpanAcceptance> {
        let grant = self.take(device, usize::try_from(index).ok()?)?;
        let (inbound, outbound) = self.spans_of(device, grant.index);
        let (memory, spans) = self.window_spans(device, grant.index);
        // No program of either node can access the span now: the other proxy has checked its own node.
        ends::clear_span(&inbound);
        ends::clear_remote_span(&outbound);
        let lease = lease::lease(memory, spans).ok()?;
        Some(SpanAcceptance { grant, spans, lease })
    }

    /// Grants a span to a connection of an earlier proxy. Returns `None` if there is no such span, or another
    /// connection has it.
    pub(super) fn grant_retained(
        self: &Arc<Self>,
        retained: RetainedConnection,
        descriptors: RetainedDescriptors,
    ) -> Option<SpanGrant> {
        let index = usize::try_from(retained.span).ok()?;
        let mut state = self.lock();
        let entry = state.entries.get_mut(index).filter(|entry| !entry.is_in_use)?;
        (entry.is_in_use, entry.deposited) = (true, Some((retained, descriptors)));
        drop(state);
        Some(SpanGrant { pool: Arc::clone(self), index })
    }

    /// Deposits everything with another monitor, which retains nothing yet.
    ///
    /// # Errors
    /// The monitor does not accept it.
    pub(super) fn deposit_all(&self) -> Result<(), ChannelError> {
        let state = self.lock();
        let deposited = state.entries.iter().filter_map(|entry| entry.deposited.as_ref());
        let all: Vec<_> = deposited.map(|(retained, descriptors)| (*retained, descriptors.as_fds())).collect();
        send_retained(&self.monitor.channel(), &all, FromProxy::Deposits)
    }

    /// Takes a free span whose quarantine is over, else the one whose quarantine ends first; spans that were refused
    /// come after the others.
    fn take_any(self: &Arc<Self>, device: &Device) -> Option<SpanGrant> {
        let now_ns = now_ns();
        let is_good = |entry: &SpanEntry| entry.quarantined_until_ns <= now_ns && !entry.was_refused;
        let good = self.in_order().find_map(|index| self.take_if(device, index, is_good));
        good.or_else(|| self.take_quarantined(device, now_ns))
    }

    #[cold]
    fn take_quarantined(self: &Arc<Self>, device: &Device, now_ns: u64) -> Option<SpanGrant> {
        let mut indexes: Vec<usize> = self.in_order().collect();
        let state = self.lock();
        indexes.sort_by_key(|index| {
            let entry = &state.entries[*index];
            (entry.quarantined_until_ns.saturating_sub(now_ns), entry.was_refused)
        });
        drop(state);
        indexes.into_iter().find_map(|index| self.take(device, index))
    }

    /// Returns the indexes of all spans, in the order in which this node proposes them.
    fn in_order(&self) -> impl Iterator<Item = usize> + use<> {
        let (count, from_last) = (self.lock().entries.len(), self.from_last);
        (0..count).map(move |at| if from_last { count - 1 - at } else { at })
    }

    fn take(self: &Arc<Self>, device: &Device, index: usize) -> Option<SpanGrant> {
        self.take_if(device, index, |_| true)
    }

    fn take_if(
        self: &Arc<Self>,
        device: &Device,
        index: usize,
        is_wanted: impl Fn(&SpanEntry) -> bool,
    ) -> Option<SpanGrant> {
        let mut state = self.lock();
        let entry = state.entries.get_mut(index).filter(|entry| !entry.is_in_use && is_wanted(entry))?;
        if self.is_leased(device, index) {
            return None;
        }
        entry.is_in_use = true;
        drop(state);
        Some(SpanGrant { pool: Arc::clone(self), index })
    }

    /// Returns whether a program can access a span. If the kernel cannot tell, it counts as leased.
    fn is_leased(&self, device: &Device, index: usize) -> bool {
        let (memory, spans) = self.window_spans(device, index);
        lease::is_leased(memory, spans).unwrap_or(true)
    }

    /// Returns the memory of the device, and where in it the two spans of an index are.
    fn window_spans<'a>(&self, device: &'a Device, index: usize) -> (BorrowedFd<'a>, WindowSpans) {
        let (memory, [inbound, outbound]) = device.windows_in_memory(self.peer);
        let offset = self.offset(index) as u64;
        let spans = WindowSpans::new(inbound + offset, outbound + offset);
        (memory, WindowSpans { alignment: device.alignment(), ..spans })
    }

    /// Returns a span in this node's window, and the one of the same index in the peer's.
    fn spans_of(&self, device: &Device, index: usize) -> (DeviceInbound, DeviceOutbound) {
        let (offset, span_bytes) = (self.offset(index), self.span_bytes());
        let (inbound, outbound) = (device.inbound(self.peer), device.outbound(self.peer));
        (inbound.slice(offset, span_bytes), outbound.slice(offset, span_bytes))
    }

    fn span_bytes(&self) -> usize {
        self.spans.span_bytes as usize
    }

    /// Returns the offset in a window of a span.
    fn offset(&self, index: usize) -> usize {
        self.spans.offset_bytes as usize + index * self.span_bytes()
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::Channel;
    use fabric::device::DeviceConfig;

    const WINDOW_BYTES: u64 = 1 << 20;
    const OWN: NodeSlot = NodeSlot(0);
    const PEER: NodeSlot = NodeSlot(1);

    /// A node's device, the spans of its link, and the monitor's end of its channel, which nothing reads.
    fn node() -> (Device, Arc<SpanPool>, Channel) {
        let device_bytes = fabric::device::DeviceLayout::new(2, WINDOW_BYTES as usize).expect("a layout").bytes();
        let name = format!("/dev/shm/proxy-direct-{}-{:?}", std::process::id(), std::thread::current().id());
        let file = std::fs::File::create_new(&name).expect("a file");
        file.set_len(device_bytes as u64).expect("room");
        let device = Device::open_file(name.as_ref(), &DeviceConfig::new(OWN, 2));
        std::fs::remove_file(name).expect("the file");
        let (to_monitor, monitor) = Channel::pair().expect("a channel");
        let spans = Spans { offset_bytes: 1 << 16, span_bytes: SPAN_BYTES as u64, count: 3 };
        let pool = SpanPool::new((PEER, OWN), spans, Arc::new(MonitorChannel::new(to_monitor)));
        (device.expect("a device"), Arc::new(pool), monitor)
    }

    #[test]
    fn a_freed_span_is_quarantined_while_there_are_others() {
        let (device, pool, _monitor) = node();
        let first = pool.propose(&device).expect("a free span");
        let (index, before_ns) = (first.index(), now_ns());
        first.refused();
        let until_ns = std::mem::replace(&mut pool.lock().entries[index as usize].quarantined_until_ns, u64::MAX);
        assert!(until_ns >= before_ns + QUARANTINE_NS);
        let others = [(); 2].map(|()| pool.propose(&device).expect("another span"));
        assert!(others.iter().all(|other| other.index() != index));
        assert_eq!(pool.propose(&device).expect("the quarantined span").index(), index);
    }

    /// Otherwise a hung program at the other node would cost every connection its span whose proposal comes after the
    /// quarantine.
    #[test]
    fn a_refused_span_is_proposed_last_even_after_its_quarantine() {
        let (device, pool, _monitor) = node();
        let first = pool.propose(&device).expect("a free span");
        let index = first.index();
        first.refused();
        pool.lock().entries.iter_mut().for_each(|entry| entry.quarantined_until_ns = 0);
        let others = [(); 2].map(|()| pool.propose(&device).expect("another span").index());
        assert!(others.iter().all(|other| *other != index), "{others:?}");
    }
}
