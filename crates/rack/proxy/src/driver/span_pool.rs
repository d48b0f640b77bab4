//! The spans of a link, which direct connections get.
//!
//! A span has the same index in both windows of a link, and both spans belong to one connection. The proxy of the
//! program that connects proposes a span that no program of its node can access. The other proxy accepts it if that
//! holds at its node too, and cleans both. Only the kernel of a machine knows what its programs can access
//! ([`span_lease`]). A span that was in use when a proxy or a link died is therefore not given to another connection
//! before the programs of both nodes are gone.

use super::monitor_channel::MonitorChannel;
use crate::frame::{ConnectionNumber, LinkSide};
use control::ChannelError;
use control::proxy::{FromProxy, RetainedConnection, Spans, send_retained};
use fabric::Slice;
use fabric::device::{Caching, Device, DeviceInbound, DeviceOutbound, NodeSlot};
use fabric::timed::{LinkTiming, Pacer};
use rustix::io::Errno;
use segment::model::{LinkModel, map_pace};
use segment::{Endpoint, Segment, ends};
use socket::process::clock::now_ns;
use socket::rendezvous::handshake::WindowSpans;
use socket::rendezvous::span_lease;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Bytes of the page with the pacer of a modelled link.
const PAGE_BYTES: u64 = 4096;
/// How long a free span is not proposed, if there are others: the other proxy may have refused it, or may not know yet
/// that it is free.
const QUARANTINE_NS: u64 = 100_000_000;

/// The spans of one link, shared by this node's threads.
#[derive(Debug)]
pub(super) struct SpanPool {
    peer: NodeSlot,
    own: NodeSlot,
    spans: Spans,
    /// The model that the link is slowed down to.
    timing: Option<LinkTiming>,
    /// The pacer that programs and proxies of this node share, once the device has arrived.
    pacer: OnceLock<Pacer>,
    /// The monitor, which retains lifelines beyond this proxy.
    monitor: Arc<MonitorChannel>,
    /// One node proposes spans from the first on, the other one from the last, so that they seldom propose the same.
    from_last: bool,
    state: Mutex<PoolState>,
}

#[derive(Debug)]
struct PoolState {
    entries: Vec<SpanEntry>,
    /// Direct connections so far.
    total: u64,
    /// Connections without a span, or whose program could not map its span.
    missed: u64,
    /// It has been logged that programs cannot map their spans.
    has_logged: bool,
}

impl PoolState {
    /// Counts the connections whose programs have attached since the last call. A program that cannot map its span
    /// never attaches.
    fn count_attached(&mut self) {
        let attached = self.entries.iter_mut().filter_map(SpanEntry::take_attached).count();
        self.total += attached as u64;
    }
}

#[derive(Debug, Default)]
struct SpanEntry {
    is_in_use: bool,
    quarantined_until_ns: u64,
    /// The other proxy did not accept it the last time: a program there may have it for long.
    was_refused: bool,
    /// The endpoint at which the program will attach, until that is counted.
    expected: Option<Arc<Endpoint<DeviceInbound>>>,
    /// What the monitor retains.
    deposited: Option<(RetainedConnection, Arc<OwnedFd>)>,
}

impl SpanEntry {
    /// Returns once whether the program has attached.
    fn take_attached(&mut self) -> Option<()> {
        self.expected.take_if(|endpoint| endpoint.is_attached()).map(drop)
    }
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

    /// Deposits a duplicate of the lifeline with the monitor.
    pub(super) fn deposit(&mut self, number: ConnectionNumber, lifeline: &Arc<OwnedFd>) {
        let retained = self.retained(number);
        let mut state = self.pool.lock();
        state.entries[self.index].deposited = Some((retained, Arc::clone(lifeline)));
        // Under the lock: messages about a span keep their order, also when the monitor changes.
        if let Err(error) = self.pool.monitor.send(&FromProxy::Deposit(retained), &[lifeline.as_fd()]) {
            eprintln!("crosslane proxy: {retained:?} is lost with this proxy: the monitor's socket: {error}");
        }
    }

    /// Expects the program of this node to attach to its span.
    pub(super) fn expect_attach(&self, endpoint: &Arc<Endpoint<DeviceInbound>>) {
        self.pool.lock().entries[self.index].expected = Some(Arc::clone(endpoint));
    }

    /// Records that the program has read of its span and left without attaching. Returns whether it is the first one of
    /// this link.
    pub(super) fn note_missed(&self) -> bool {
        let mut state = self.pool.lock();
        state.entries[self.index].expected = None;
        state.missed += 1;
        !std::mem::replace(&mut state.has_logged, true)
    }

    /// Notes in this node's window whether the span is for a kernel TCP connection. Each node does so before it lets a
    /// program have the span.
    pub(super) fn note_use(&self, device: &Device, is_for_tcp: bool) {
        let (inbound, _) = self.pool.spans_of(device, self.index);
        ends::set_span_of_ends(&inbound, is_for_tcp);
    }

    /// Counts a program that has begun to use its span.
    pub(super) fn note_attached(&self) {
        self.pool.lock().total += 1;
    }

    /// Returns the description by which the monitor retains the connection.
    pub(super) fn retained(&self, number: ConnectionNumber) -> RetainedConnection {
        RetainedConnection { peer: self.pool.peer.0, span: self.index as u32, number: number.0 }
    }
}

impl Drop for SpanGrant {
    fn drop(&mut self) {
        let state = &mut *self.pool.lock();
        let entry = &mut state.entries[self.index];
        state.total += u64::from(entry.take_attached().is_some());
        (entry.is_in_use, entry.was_refused, entry.expected) = (false, false, None);
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
    pub(super) endpoint: Endpoint<DeviceInbound>,
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
        span_lease::mark_leased(self.descriptor.as_fd(), self.spans).ok()?;
        Some(self)
    }
}

/// A span that the other proxy has proposed, accepted and cleaned.
#[derive(Debug)]
pub(super) struct SpanAcceptance {
    pub(super) grant: SpanGrant,
    pub(super) spans: WindowSpans,
    pub(super) lease: OwnedFd,
    pub(super) endpoint: Endpoint<DeviceInbound>,
}

impl SpanPool {
    /// Creates the pool of the link between a peer and this node.
    pub(super) fn new(
        (peer, own): (NodeSlot, NodeSlot),
        spans: Spans,
        timing: Option<LinkTiming>,
        monitor: Arc<MonitorChannel>,
    ) -> Self {
        let entries = (0..spans.count).map(|_| SpanEntry::default()).collect();
        let state = Mutex::new(PoolState { entries, total: 0, missed: 0, has_logged: false });
        let (pacer, from_last) = (OnceLock::new(), own > peer);
        Self { peer, own, spans, timing, pacer, monitor, from_last, state }
    }

    /// Returns which side of the link this node is.
    pub(super) fn own_side(&self) -> LinkSide {
        if self.own < self.peer { LinkSide::Lower } else { LinkSide::Higher }
    }

    /// Returns whether the spans have the size that this proxy uses, and lie within windows of this size.
    pub(super) fn fits(&self, window_bytes: usize) -> bool {
        let end_bytes = self.spans.span_bytes.checked_mul(self.spans.count);
        let end_bytes = end_bytes.and_then(|bytes| bytes.checked_add(self.spans.offset_bytes));
        self.spans.span_bytes == Segment::window_bytes(self.timing.is_some()) as u64
            && (self.timing.is_none() || self.spans.offset_bytes >= PAGE_BYTES)
            && self.spans.offset_bytes.is_multiple_of(rustix::param::page_size() as u64)
            && end_bytes.is_some_and(|bytes| bytes <= window_bytes as u64)
    }

    /// Maps the pacer that the programs of this node share, if the link is slowed down to a model. The proxies share it
    /// too, so that their frames about a connection never overtake the stores of its program.
    ///
    /// # Errors
    /// The page cannot be mapped.
    pub(super) fn map_pacer(&self, device: &Device) -> Result<(), Errno> {
        if let Some(offset) = self.pace_offset() {
            let (memory, [_, outbound]) = device.windows_in_memory(self.peer);
            // A pacer that was mapped before is the same.
            let _ = self.pacer.set(map_pace(memory, outbound + offset)?);
        }
        Ok(())
    }

    /// Returns the pacer of [`SpanPool::map_pacer`].
    pub(super) fn pacer(&self) -> Option<Pacer> {
        self.pacer.get().cloned()
    }

    /// Returns the number of spans in use, of direct connections so far, and of connections that got no span or whose
    /// program could not map it.
    pub(super) fn counts(&self) -> (u64, u64, u64) {
        let mut state = self.lock();
        state.count_attached();
        (state.entries.iter().filter(|entry| entry.is_in_use).count() as u64, state.total, state.missed)
    }

    /// Proposes a span for a program that connects. Returns `None`, and counts it, if none is free.
    pub(super) fn propose(self: &Arc<Self>, device: &Device, is_for_tcp: bool) -> Option<SpanProposal> {
        let proposal = self.take_any(device).and_then(|grant| {
            grant.note_use(device, is_for_tcp);
            let (memory, spans) = self.window_spans(device, grant.index);
            let descriptor = span_lease::reopen(memory).ok()?;
            if spans.has_local_state() {
                let (inbound, outbound) = self.spans_of(device, grant.index);
                Segment::clean_with_local_page(&inbound, &outbound);
            }
            let endpoint = self.endpoint(device, grant.index);
            Some(SpanProposal { grant, spans, descriptor, endpoint })
        });
        self.lock().missed += u64::from(proposal.is_none());
        proposal
    }

    /// Returns whether kernel TCP connections may move to spans: in ordinary memory, whose writer can read it too.
    pub(super) fn may_serve_tcp(&self, device: &Device) -> bool {
        self.timing.is_none() && device.caching() == Caching::Cached
    }

    /// Accepts the span that the other node proposes. The index is hostile. Returns `None` if the span is not free.
    pub(super) fn accept(self: &Arc<Self>, device: &Device, index: u32, is_for_tcp: bool) -> Option<SpanAcceptance> {
        let grant = self.take(device, usize::try_from(index).ok()?)?;
        grant.note_use(device, is_for_tcp);
        let (inbound, outbound) = self.spans_of(device, grant.index);
        let (memory, spans) = self.window_spans(device, grant.index);
        // No program of either node can access the span now: the other proxy has checked its own node. If each cache
        // line has one writer, the other proxy has cleaned the lines that it writes.
        if device.caching() == Caching::NonCoherent {
            Segment::clean_with_local_page(&inbound, &outbound);
        } else {
            Segment::clean_span(&inbound);
            Segment::clean_remote_span(&outbound);
        }
        let lease = span_lease::lease(memory, spans).ok()?;
        let endpoint = self.endpoint(device, grant.index);
        Some(SpanAcceptance { grant, spans, lease, endpoint })
    }

    /// Grants a span to a connection of an earlier proxy. Returns `None` if there is no such span, or another
    /// connection has it.
    pub(super) fn grant_retained(
        self: &Arc<Self>,
        device: &Device,
        retained: RetainedConnection,
        lifeline: &Arc<OwnedFd>,
    ) -> Option<(SpanGrant, Endpoint<DeviceInbound>)> {
        let index = usize::try_from(retained.span).ok()?;
        let mut state = self.lock();
        let entry = state.entries.get_mut(index).filter(|entry| !entry.is_in_use)?;
        (entry.is_in_use, entry.deposited) = (true, Some((retained, Arc::clone(lifeline))));
        drop(state);
        Some((SpanGrant { pool: Arc::clone(self), index }, self.endpoint(device, index)))
    }

    /// Deposits everything with another monitor, which retains nothing yet.
    ///
    /// # Errors
    /// The monitor does not accept it.
    pub(super) fn deposit_all(&self) -> Result<(), ChannelError> {
        let state = self.lock();
        let deposited = state.entries.iter().filter_map(|entry| entry.deposited.as_ref());
        let all: Vec<(RetainedConnection, BorrowedFd<'_>)> =
            deposited.map(|(retained, lifeline)| (*retained, lifeline.as_fd())).collect();
        send_retained(&self.monitor.channel(), &all, FromProxy::Deposits)
    }

    /// Resets the connections that programs of this node still have from an earlier proxy and this one does not.
    pub(super) fn reset_orphans(&self, device: &Device) {
        let count = self.lock().entries.len();
        let is_orphan = |index: &usize| !self.lock().entries[*index].is_in_use && self.is_leased(device, *index);
        // Kernel TCP connections are reset with their proxies' sockets.
        let is_of_ends = |index: &usize| ends::is_span_of_ends(&self.spans_of(device, *index).0);
        for index in (0..count).filter(is_orphan).filter(|index| !is_of_ends(index)) {
            self.endpoint(device, index).note_reset();
        }
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
        span_lease::is_leased(memory, spans).unwrap_or(true)
    }

    /// Returns the memory of the device, and where in it the two spans of an index are.
    fn window_spans<'a>(&self, device: &'a Device, index: usize) -> (BorrowedFd<'a>, WindowSpans) {
        let (memory, [inbound, outbound]) = device.windows_in_memory(self.peer);
        let offset = self.offset(index) as u64;
        let model = self.timing.zip(self.pace_offset()).map(|(timing, pace)| LinkModel {
            timing,
            inbound_pace_offset: inbound + pace,
            outbound_pace_offset: outbound + pace,
        });
        let spans = WindowSpans::new(inbound + offset, outbound + offset);
        (memory, WindowSpans { alignment: device.alignment(), caching: device.caching(), model, ..spans })
    }

    /// Returns a span in this node's window, and the one of the same index in the peer's.
    fn spans_of(&self, device: &Device, index: usize) -> (DeviceInbound, DeviceOutbound) {
        let (offset, span_bytes) = (self.offset(index), self.span_bytes());
        let (inbound, outbound) = (device.inbound(self.peer), device.outbound(self.peer));
        (inbound.slice(offset, span_bytes), outbound.slice(offset, span_bytes))
    }

    /// Returns the endpoint that this proxy shares with a program of its node.
    fn endpoint(&self, device: &Device, index: usize) -> Endpoint<DeviceInbound> {
        let (inbound, _) = self.spans_of(device, index);
        if device.caching() == Caching::Cached { Endpoint::new(inbound) } else { Endpoint::with_local_page(inbound) }
    }

    fn span_bytes(&self) -> usize {
        self.spans.span_bytes as usize
    }

    /// Returns the offset in a window of the page with the pacer of a modelled link.
    fn pace_offset(&self) -> Option<u64> {
        self.timing.map(|_| self.spans.offset_bytes - PAGE_BYTES)
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
pub(super) mod tests {
    use super::*;
    use control::Channel;
    use fabric::device::DeviceConfig;

    const WINDOW_BYTES: u64 = 1 << 20;
    const OWN: NodeSlot = NodeSlot(0);
    const PEER: NodeSlot = NodeSlot(1);

    /// A node's device, the spans of its link, and the monitor's end of its channel, which nothing reads.
    pub(in crate::driver) fn node() -> (Device, Arc<SpanPool>, Channel) {
        let device_bytes = fabric::device::DeviceLayout::new(2, WINDOW_BYTES as usize).expect("a layout").bytes();
        let name = format!("/dev/shm/proxy-direct-{}-{:?}", std::process::id(), std::thread::current().id());
        let file = std::fs::File::create_new(&name).expect("a file");
        file.set_len(device_bytes as u64).expect("room");
        let device = Device::open_file(name.as_ref(), &DeviceConfig::new(OWN, 2));
        std::fs::remove_file(name).expect("the file");
        let (to_monitor, monitor) = Channel::pair().expect("a channel");
        let spans = Spans { offset_bytes: 1 << 16, span_bytes: Segment::WINDOW_BYTES as u64, count: 3 };
        let pool = SpanPool::new((PEER, OWN), spans, None, Arc::new(MonitorChannel::new(to_monitor)));
        (device.expect("a device"), Arc::new(pool), monitor)
    }

    #[test]
    fn a_freed_span_is_quarantined_while_there_are_others() {
        let (device, pool, _monitor) = node();
        let first = pool.propose(&device, false).expect("a free span");
        let (index, before_ns) = (first.index(), now_ns());
        first.refused();
        let until_ns = std::mem::replace(&mut pool.lock().entries[index as usize].quarantined_until_ns, u64::MAX);
        assert!(until_ns >= before_ns + QUARANTINE_NS);
        let others = [(); 2].map(|()| pool.propose(&device, false).expect("another span"));
        assert!(others.iter().all(|other| other.index() != index));
        assert_eq!(pool.propose(&device, false).expect("the quarantined span").index(), index);
    }

    /// Otherwise a hung program at the other node would cost every connection its span whose proposal comes after the
    /// quarantine.
    #[test]
    fn a_refused_span_is_proposed_last_even_after_its_quarantine() {
        let (device, pool, _monitor) = node();
        let first = pool.propose(&device, false).expect("a free span");
        let index = first.index();
        first.refused();
        pool.lock().entries.iter_mut().for_each(|entry| entry.quarantined_until_ns = 0);
        let others = [(); 2].map(|()| pool.propose(&device, false).expect("another span").index());
        assert!(others.iter().all(|other| *other != index), "{others:?}");
    }
}
