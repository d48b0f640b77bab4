//! Connections whose programs store into the windows themselves: the spans they get, and the proxy's end of them.
//!
//! A span has the same index in both windows of a link, and both go to one connection. The proxy of the program that
//! connects proposes one that none of its own programs can reach; the other proxy takes it if that holds there too, and
//! makes both clean. What programs can reach, only the kernel of their machine knows ([`lease`]): so a span that was in
//! use when a proxy or a link died is not given to another connection before the programs of both nodes are gone.

use crate::frame::{ConnectionNumber, LinkSide};
use crate::{Broken, Input, LocalEndpoint};
use control::ChannelError;
use control::proxy::{FromProxy, RetainedConnection, Spans, send_retained};
use fabric::device::{Caching, Device, DeviceInbound, DeviceOutbound, NodeSlot};
use fabric::timed::{LinkTiming, Pacer};
use fabric::{Inbound, Outbound, Slice};
use lane::{Draft, Span};
use rustix::io::Errno;
use segment::model::{LinkModel, map_pace};
use segment::{Endpoint, Segment};
use socket::process::blocking;
use socket::process::clock::now_ns;
use socket::process::system;
use socket::rendezvous::handshake::WindowSpans;
use socket::rendezvous::span_lease;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::end::SegmentEnd;
use super::to_monitor::ToMonitor;

/// Bytes of the page with the pace of a modelled link.
const PAGE_BYTES: u64 = 4096;
/// How long a span is not proposed again, if there are others, that the other proxy has not taken, or may not know to
/// be free.
const REST_NS: u64 = 100_000_000;

/// The spans of one link, as this node's threads share them.
#[derive(Debug)]
pub(super) struct SpanPool {
    peer: NodeSlot,
    own: NodeSlot,
    spans: Spans,
    /// The model that the link is slowed down to.
    timing: Option<LinkTiming>,
    /// What programs and proxies of this node share of its rate, from when the device is there.
    pace: OnceLock<Pacer>,
    /// To the monitor, which keeps lifelines beyond this proxy.
    monitor: Arc<ToMonitor>,
    /// One end proposes from the first on, the other from the last: so they seldom propose the same.
    from_last: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    entries: Vec<Entry>,
    total: u64,
    missed: u64,
    /// Whether the log has it that programs cannot map their spans: once is enough.
    has_said: bool,
}

impl State {
    /// Counts the connections whose programs have come to their spans since: one that cannot map its span never does.
    fn count_attached(&mut self) {
        let have_come = self.entries.iter_mut().filter_map(Entry::take_attached).count();
        self.total += have_come as u64;
    }
}

#[derive(Debug, Default)]
struct Entry {
    is_taken: bool,
    rests_until_ns: u64,
    /// The other proxy did not take it the last time: a program there may keep it for long.
    was_refused: bool,
    /// Where the program will say that it has the span, until that is counted.
    expected: Option<Arc<Endpoint<DeviceInbound>>>,
    /// What the monitor keeps of it.
    deposited: Option<(RetainedConnection, Arc<OwnedFd>)>,
}

impl Entry {
    /// Tells once that the program has come to its span.
    fn take_attached(&mut self) -> Option<()> {
        self.expected.take_if(|end| end.is_attached()).map(drop)
    }
}

/// A span that this proxy has taken for a connection.
#[derive(Debug)]
pub(super) struct Grant {
    pool: Arc<SpanPool>,
    index: usize,
}

impl Grant {
    /// Has the lifeline's end kept beyond this proxy.
    fn deposit(&mut self, number: ConnectionNumber, lifeline: &Arc<OwnedFd>) {
        let kept = self.kept(number);
        let mut state = self.pool.lock();
        state.entries[self.index].deposited = Some((kept, Arc::clone(lifeline)));
        // Locked: what is told of a span is told in order, also to another monitor.
        if let Err(error) = self.pool.monitor.send(&FromProxy::Deposit(kept), &[lifeline.as_fd()]) {
            eprintln!("crosslane proxy: {kept:?} is lost with this proxy: the monitor's socket: {error}");
        }
    }

    /// Expects the program of this node to come to its span.
    fn expect(&self, endpoint: &Arc<Endpoint<DeviceInbound>>) {
        self.pool.lock().entries[self.index].expected = Some(Arc::clone(endpoint));
    }

    /// The program has heard of its span and left without it. `true`: nobody has said so of this link yet.
    fn miss(&self) -> bool {
        let mut state = self.pool.lock();
        state.entries[self.index].expected = None;
        state.missed += 1;
        !std::mem::replace(&mut state.has_said, true)
    }

    fn kept(&self, number: ConnectionNumber) -> RetainedConnection {
        RetainedConnection { peer: self.pool.peer.0, span: self.index as u32, number: number.0 }
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        let state = &mut *self.pool.lock();
        let entry = &mut state.entries[self.index];
        state.total += u64::from(entry.take_attached().is_some());
        (entry.is_taken, entry.was_refused, entry.expected) = (false, false, None);
        entry.rests_until_ns = now_ns().saturating_add(REST_NS);
        if entry.deposited.take().is_some() {
            let (peer, span) = (self.pool.peer.0, self.index as u32);
            // Before another connection can have the span, which another thread deposits. A monitor that is gone keeps
            // nothing.
            let _ = self.pool.monitor.send(&FromProxy::Withdraw { peer, span }, &[]);
        }
    }
}

/// A span that was proposed to the other proxy, and the descriptor for the program that connects.
#[derive(Debug)]
pub(super) struct Proposal {
    grant: Grant,
    place: WindowSpans,
    /// Noted as leased only when the other proxy has taken the span: where both nodes are on one machine, it looks at
    /// the same notes.
    descriptor: OwnedFd,
    endpoint: Endpoint<DeviceInbound>,
}

impl Proposal {
    /// For the frame.
    pub(super) fn index(&self) -> u32 {
        self.grant.index as u32
    }

    /// The other proxy carries the connection's bytes.
    pub(super) fn refused(self) {
        let (pool, index) = (Arc::clone(&self.grant.pool), self.grant.index);
        drop(self);
        let mut state = pool.lock();
        state.missed += 1;
        state.entries[index].was_refused = true;
    }

    /// The end of the connection, with the program's lifeline; and what the program gets. `None`: no lock can be had.
    pub(super) fn into_end(
        mut self,
        number: ConnectionNumber,
        lifeline: Arc<OwnedFd>,
    ) -> Option<(DirectEnd, WindowSpans, OwnedFd)> {
        span_lease::mark_leased(self.descriptor.as_fd(), self.place).ok()?;
        self.grant.deposit(number, &lifeline);
        Some((DirectEnd::new(self.endpoint, lifeline, self.grant, true), self.place, self.descriptor))
    }
}

/// A span that the other proxy has proposed, taken and clean.
#[derive(Debug)]
pub(super) struct Acceptance {
    grant: Grant,
    pub(super) place: WindowSpans,
    pub(super) lease: OwnedFd,
    endpoint: Endpoint<DeviceInbound>,
}

impl Acceptance {
    /// The end of the connection, with the server's lifeline.
    pub(super) fn into_end(self, lifeline: OwnedFd) -> DirectEnd {
        DirectEnd::new(self.endpoint, Arc::new(lifeline), self.grant, false)
    }
}

impl SpanPool {
    /// Of a link between a peer and this node.
    pub(super) fn new(
        (peer, own): (NodeSlot, NodeSlot),
        spans: Spans,
        timing: Option<LinkTiming>,
        monitor: Arc<ToMonitor>,
    ) -> Self {
        let entries = (0..spans.count).map(|_| Entry::default()).collect();
        let state = Mutex::new(State { entries, total: 0, missed: 0, has_said: false });
        let (pace, from_last) = (OnceLock::new(), own > peer);
        Self { peer, own, spans, timing, pace, monitor, from_last, state }
    }

    /// Whether the spans are what this proxy knows how to use, within windows of so many bytes.
    pub(super) fn fits(&self, window_bytes: usize) -> bool {
        let end_bytes = self.spans.span_bytes.checked_mul(self.spans.count);
        let end_bytes = end_bytes.and_then(|bytes| bytes.checked_add(self.spans.offset_bytes));
        self.spans.span_bytes == Segment::window_bytes(self.timing.is_some()) as u64
            && (self.timing.is_none() || self.spans.offset_bytes >= PAGE_BYTES)
            && self.spans.offset_bytes.is_multiple_of(rustix::param::page_size() as u64)
            && end_bytes.is_some_and(|bytes| bytes <= window_bytes as u64)
    }

    /// Finds what the programs of this node share of the link's rate, where it is slowed down to a model: the proxies
    /// share it too, so that what they say of a program never overtakes what that has stored.
    ///
    /// # Errors
    /// If there is no such page.
    pub(super) fn find_pace(&self, device: &Device) -> Result<(), Errno> {
        if let Some(offset) = self.pace_offset() {
            let (memory, [_, outbound]) = device.windows_in_memory(self.peer);
            // One that was found before is the same.
            let _ = self.pace.set(map_pace(memory, outbound + offset)?);
        }
        Ok(())
    }

    /// What [`SpanPool::find_pace`] has found.
    pub(super) fn pace(&self) -> Option<Pacer> {
        self.pace.get().cloned()
    }

    /// Spans in use now, connections so far, and those that found no span or whose program could not map it.
    pub(super) fn counts(&self) -> (u64, u64, u64) {
        let mut state = self.lock();
        state.count_attached();
        (state.entries.iter().filter(|entry| entry.is_taken).count() as u64, state.total, state.missed)
    }

    /// A span for a program that connects. `None`: none is free, and that is counted.
    pub(super) fn propose(self: &Arc<Self>, device: &Device) -> Option<Proposal> {
        let proposal = self.take_any(device).and_then(|grant| {
            let (memory, place) = self.place(device, grant.index);
            let descriptor = span_lease::reopen(memory).ok()?;
            if place.has_local_state() {
                let (inbound, outbound) = self.spans_of(device, grant.index);
                Segment::clean_with_local_page(&inbound, &outbound);
            }
            let endpoint = self.endpoint(device, grant.index);
            Some(Proposal { grant, place, descriptor, endpoint })
        });
        self.lock().missed += u64::from(proposal.is_none());
        proposal
    }

    /// Takes the span that the other node proposes, a number of any size. `None`: it is not free.
    pub(super) fn accept(self: &Arc<Self>, device: &Device, index: u32) -> Option<Acceptance> {
        let grant = self.take(device, usize::try_from(index).ok()?)?;
        let (inbound, outbound) = self.spans_of(device, grant.index);
        let (memory, place) = self.place(device, grant.index);
        // No program of either node reaches the span now: the other proxy has looked at its own. Where a line has one
        // writer, that one has cleaned the rest of them.
        if device.caching() == Caching::NonCoherent {
            Segment::clean_with_local_page(&inbound, &outbound);
        } else {
            Segment::clean_span(&inbound);
            Segment::clean_remote_span(&outbound);
        }
        let lease = span_lease::lease(memory, place).ok()?;
        let endpoint = self.endpoint(device, grant.index);
        Some(Acceptance { grant, place, lease, endpoint })
    }

    /// Goes on with a connection of an earlier proxy. `None`: there is no such span, or another connection has it.
    pub(super) fn adopt(
        self: &Arc<Self>,
        device: &Device,
        kept: RetainedConnection,
        lifeline: OwnedFd,
    ) -> Option<DirectEnd> {
        let index = usize::try_from(kept.span).ok()?;
        let mut state = self.lock();
        let entry = state.entries.get_mut(index).filter(|entry| !entry.is_taken)?;
        let lifeline = Arc::new(lifeline);
        (entry.is_taken, entry.deposited) = (true, Some((kept, Arc::clone(&lifeline))));
        drop(state);
        let grant = Grant { pool: Arc::clone(self), index };
        let own = if self.own < self.peer { LinkSide::Lower } else { LinkSide::Higher };
        let is_opener = ConnectionNumber(kept.number).opener() == own;
        Some(DirectEnd::new(self.endpoint(device, index), lifeline, grant, is_opener))
    }

    /// Has everything kept by another monitor, which knows of nothing yet.
    ///
    /// # Errors
    /// It does not take it.
    pub(super) fn deposit_all(&self) -> Result<(), ChannelError> {
        let state = self.lock();
        let all: Vec<(RetainedConnection, BorrowedFd<'_>)> =
            state.entries.iter().filter_map(|it| it.deposited.as_ref()).map(|(kept, it)| (*kept, it.as_fd())).collect();
        send_retained(&self.monitor.channel(), &all, FromProxy::Deposits)
    }

    /// Resets what programs of this node still have of an earlier proxy and this one has not.
    pub(super) fn reset_orphans(&self, device: &Device) {
        let count = self.lock().entries.len();
        let is_orphan = |index: &usize| !self.lock().entries[*index].is_taken && self.is_leased(device, *index);
        for index in (0..count).filter(is_orphan) {
            self.endpoint(device, index).note_reset();
        }
    }

    /// One that has rested, else the one that has rested longest; those that were refused behind the others.
    fn take_any(self: &Arc<Self>, device: &Device) -> Option<Grant> {
        let now_ns = now_ns();
        let is_good = |entry: &Entry| entry.rests_until_ns <= now_ns && !entry.was_refused;
        let good = self.in_order().find_map(|index| self.take_if(device, index, is_good));
        good.or_else(|| self.take_poor(device, now_ns))
    }

    #[cold]
    fn take_poor(self: &Arc<Self>, device: &Device, now_ns: u64) -> Option<Grant> {
        let mut indexes: Vec<usize> = self.in_order().collect();
        let state = self.lock();
        indexes.sort_by_key(|index| {
            let entry = &state.entries[*index];
            (entry.rests_until_ns.saturating_sub(now_ns), entry.was_refused)
        });
        drop(state);
        indexes.into_iter().find_map(|index| self.take(device, index))
    }

    /// All spans: the two nodes begin at different ends.
    fn in_order(&self) -> impl Iterator<Item = usize> + use<> {
        let (count, from_last) = (self.lock().entries.len(), self.from_last);
        (0..count).map(move |at| if from_last { count - 1 - at } else { at })
    }

    fn take(self: &Arc<Self>, device: &Device, index: usize) -> Option<Grant> {
        self.take_if(device, index, |_| true)
    }

    fn take_if(self: &Arc<Self>, device: &Device, index: usize, may: impl Fn(&Entry) -> bool) -> Option<Grant> {
        let mut state = self.lock();
        let entry = state.entries.get_mut(index).filter(|entry| !entry.is_taken && may(entry))?;
        if self.is_leased(device, index) {
            return None;
        }
        entry.is_taken = true;
        drop(state);
        Some(Grant { pool: Arc::clone(self), index })
    }

    /// A span of which the kernel does not tell counts as leased.
    fn is_leased(&self, device: &Device, index: usize) -> bool {
        let (memory, place) = self.place(device, index);
        span_lease::is_leased(memory, place).unwrap_or(true)
    }

    fn place<'a>(&self, device: &'a Device, index: usize) -> (std::os::fd::BorrowedFd<'a>, WindowSpans) {
        let (memory, [inbound, outbound]) = device.windows_in_memory(self.peer);
        let offset = self.offset(index) as u64;
        let model = self.timing.zip(self.pace_offset()).map(|(timing, pace)| LinkModel {
            timing,
            inbound_pace_offset: inbound + pace,
            outbound_pace_offset: outbound + pace,
        });
        let place = WindowSpans::new(inbound + offset, outbound + offset);
        (memory, WindowSpans { alignment: device.alignment(), caching: device.caching(), model, ..place })
    }

    /// A span in this node's window, and the one that goes with it in the peer's.
    fn spans_of(&self, device: &Device, index: usize) -> (DeviceInbound, DeviceOutbound) {
        let (offset, span_bytes) = (self.offset(index), self.span_bytes());
        let (inbound, outbound) = (device.inbound(self.peer), device.outbound(self.peer));
        (inbound.slice(offset, span_bytes), outbound.slice(offset, span_bytes))
    }

    /// What this proxy and a program of its node look at together.
    fn endpoint(&self, device: &Device, index: usize) -> Endpoint<DeviceInbound> {
        let (inbound, _) = self.spans_of(device, index);
        if device.caching() == Caching::Cached { Endpoint::new(inbound) } else { Endpoint::with_local_page(inbound) }
    }

    fn span_bytes(&self) -> usize {
        self.spans.span_bytes as usize
    }

    /// Where in a window the page is with the pace of a modelled link.
    fn pace_offset(&self) -> Option<u64> {
        self.timing.map(|_| self.spans.offset_bytes - PAGE_BYTES)
    }

    /// Where in a window a span begins.
    fn offset(&self, index: usize) -> usize {
        self.spans.offset_bytes as usize + index * self.span_bytes()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a program's lifeline has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hangup {
    No,
    Closed,
    /// The server never accepted it.
    Never,
}

/// The proxy's end of a connection in the windows: the lifeline, and what the program looks at besides.
///
/// The lifeline stays open as long as the program's end does, whatever becomes of the other program. So when it ends,
/// this proxy has died and nobody has kept it, and the program counts the connection as reset.
#[derive(Debug)]
pub(super) struct DirectEnd {
    endpoint: Arc<Endpoint<DeviceInbound>>,
    lifeline: Arc<OwnedFd>,
    /// Until both programs are gone.
    grant: Grant,
    is_opener: bool,
    has_rung: bool,
    hangup: Hangup,
}

impl DirectEnd {
    fn new(endpoint: Endpoint<DeviceInbound>, lifeline: Arc<OwnedFd>, grant: Grant, is_opener: bool) -> Self {
        let endpoint = Arc::new(endpoint);
        grant.expect(&endpoint);
        Self { endpoint, lifeline, grant, is_opener, has_rung: false, hangup: Hangup::No }
    }

    /// What the next monitor gets when this one's has died.
    pub(super) fn into_kept(self, number: ConnectionNumber) -> Option<(RetainedConnection, OwnedFd)> {
        let kept = self.grant.kept(number);
        let lifeline = Arc::try_unwrap(self.lifeline);
        lifeline.or_else(|shared| rustix::io::dup(&shared)).ok().map(|lifeline| (kept, lifeline))
    }

    fn poll_lifeline(&mut self) {
        let lifeline = self.lifeline.as_raw_fd();
        // First: draining takes the error.
        let said = blocking::poll_now(lifeline, libc::POLLIN);
        let _ = system::drain(lifeline);
        self.has_rung |= said & libc::POLLIN != 0;
        if said & libc::POLLHUP != 0 && self.hangup == Hangup::No {
            let is_attached = self.endpoint.is_attached();
            self.hangup = if is_attached || self.is_opener { Hangup::Closed } else { Hangup::Never };
            let has_read = said & libc::POLLERR == 0;
            // It has heard of its span and ended without having come to it.
            if has_read && !is_attached && self.grant.miss() {
                eprintln!(
                    "crosslane proxy: a program of this node could not map its part of the windows, or was killed just \
                     then; its connection has failed; see its limits (ulimit -v), or have trust = \"proxy\""
                );
            }
        }
    }

    fn input(&mut self) -> Input {
        match self.hangup {
            Hangup::Never => Input::Broken,
            Hangup::Closed => Input::Closed,
            Hangup::No if std::mem::take(&mut self.has_rung) => Input::Rang,
            Hangup::No => Input::Nothing,
        }
    }

    /// Whoever sleeps must look.
    fn wake(&self) {
        let _ = system::ring(self.lifeline.as_raw_fd());
    }

    fn peer_closed(&self) {
        self.endpoint.note_left();
        self.wake();
    }

    fn reset(&self) {
        self.endpoint.note_reset();
        self.wake();
    }
}

/// The local end of a connection, whichever way its bytes go.
#[derive(Debug)]
pub(super) enum ProgramEnd {
    /// By the proxies.
    Carried(Box<SegmentEnd>),
    /// By the programs.
    Direct(DirectEnd),
}

impl ProgramEnd {
    pub(super) fn lifeline(&self) -> std::os::fd::BorrowedFd<'_> {
        match self {
            Self::Carried(end) => end.lifeline(),
            Self::Direct(end) => end.lifeline.as_fd(),
        }
    }
}

impl LocalEndpoint for ProgramEnd {
    #[inline]
    fn may_have_input(&mut self) -> bool {
        match self {
            Self::Carried(end) => end.may_have_input(),
            Self::Direct(_) => false,
        }
    }

    #[inline]
    fn input(&mut self) -> Input {
        match self {
            Self::Carried(end) => end.input(),
            Self::Direct(end) => end.input(),
        }
    }

    #[inline]
    fn copy_input<O: Outbound, I: Inbound>(&mut self, draft: &mut Draft<'_, O, I>, len_bytes: usize) {
        if let Self::Carried(end) = self {
            end.copy_input(draft, len_bytes);
        }
    }

    fn read_input(&mut self, skip_bytes: usize, destination: &mut [u8]) {
        if let Self::Carried(end) = self {
            end.read_input(skip_bytes, destination);
        }
    }

    #[inline]
    fn consume(&mut self, len_bytes: usize) -> Result<(), Broken> {
        match self {
            Self::Carried(end) => end.consume(len_bytes),
            Self::Direct(_) => Err(Broken),
        }
    }

    #[inline]
    fn write_span<I: Inbound>(&mut self, bytes: &Span<'_, I>) -> Result<usize, Broken> {
        match self {
            Self::Carried(end) => end.write_span(bytes),
            Self::Direct(_) => Err(Broken),
        }
    }

    #[inline]
    fn write(&mut self, bytes: &[u8]) -> Result<usize, Broken> {
        match self {
            Self::Carried(end) => end.write(bytes),
            Self::Direct(_) => Err(Broken),
        }
    }

    fn set_yielding(&mut self, should_yield: bool) {
        if let Self::Carried(end) = self {
            end.set_yielding(should_yield);
        }
    }

    #[inline]
    fn has_room(&mut self) -> bool {
        match self {
            Self::Carried(end) => end.has_room(),
            Self::Direct(_) => false,
        }
    }

    #[inline]
    fn wake_sleeper(&mut self) -> bool {
        match self {
            Self::Carried(end) => end.wake_sleeper(),
            Self::Direct(_) => false,
        }
    }

    fn finish(&mut self) {
        if let Self::Carried(end) = self {
            end.finish();
        }
    }

    fn close(self) {
        match self {
            Self::Carried(end) => end.close(),
            Self::Direct(end) => end.peer_closed(),
        }
    }

    fn reset(self) {
        match self {
            Self::Carried(end) => end.reset(),
            Self::Direct(end) => end.reset(),
        }
    }

    #[inline]
    fn park(&mut self, for_room: bool) {
        if let Self::Carried(end) = self {
            end.park(for_room);
        }
    }

    #[inline]
    fn unpark(&mut self) {
        if let Self::Carried(end) = self {
            end.unpark();
        }
    }

    fn poll_lifeline(&mut self) {
        match self {
            Self::Carried(end) => end.poll_lifeline(),
            Self::Direct(end) => end.poll_lifeline(),
        }
    }

    #[inline]
    fn is_broken(&mut self) -> bool {
        match self {
            Self::Carried(end) => end.is_broken(),
            Self::Direct(_) => false,
        }
    }

    fn opened(&mut self) {
        if let Self::Carried(end) = self {
            end.opened();
        }
    }

    fn is_direct(&self) -> bool {
        matches!(self, Self::Direct(_))
    }

    fn move_to_span(&mut self, number: ConnectionNumber) -> bool {
        match self {
            Self::Carried(end) => {
                let Some(direct) = end.move_to_windows(number) else { return false };
                *self = Self::Direct(direct);
            }
            Self::Direct(end) => end.grant.deposit(number, &end.lifeline),
        }
        true
    }

    fn span_index(&self) -> u32 {
        match self {
            Self::Carried(_) => 0,
            Self::Direct(end) => end.grant.index as u32,
        }
    }

    fn wake(&mut self) {
        if let Self::Direct(end) = self {
            DirectEnd::wake(end);
        }
    }

    fn peer_closed(&mut self) {
        if let Self::Direct(end) = self {
            DirectEnd::peer_closed(end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use control::Channel;
    use fabric::device::DeviceConfig;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use segment::{Secrets, Side as End};
    use volmem::{Mapping, Region};

    const WINDOW_BYTES: u64 = 1 << 20;
    const OWN: NodeSlot = NodeSlot(0);
    const PEER: NodeSlot = NodeSlot(1);

    /// A node's device, the spans of its link, and a monitor that hears nothing.
    fn node() -> (Device, Arc<SpanPool>, Channel) {
        let device_bytes = fabric::device::DeviceLayout::new(2, WINDOW_BYTES as usize).expect("a layout").bytes();
        let name = format!("/dev/shm/proxy-direct-{}-{:?}", std::process::id(), std::thread::current().id());
        let file = std::fs::File::create_new(&name).expect("a file");
        file.set_len(device_bytes as u64).expect("room");
        let device = Device::open_file(name.as_ref(), &DeviceConfig::new(OWN, 2));
        std::fs::remove_file(name).expect("the file");
        let (to_monitor, monitor) = Channel::pair().expect("a channel");
        let spans = Spans { offset_bytes: 1 << 16, span_bytes: Segment::WINDOW_BYTES as u64, count: 3 };
        let pool = SpanPool::new((PEER, OWN), spans, None, Arc::new(ToMonitor::new(to_monitor)));
        (device.expect("a device"), Arc::new(pool), monitor)
    }

    /// The proxy's end of a connection that has got a span, and what the program has.
    fn connection(device: &Device, pool: &Arc<SpanPool>) -> (DirectEnd, OwnedFd, WindowSpans, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let (lifeline, programs) = pair.expect("a pair");
        let proposal = pool.propose(device).expect("a free span");
        let end = proposal.into_end(ConnectionNumber::new(1, LinkSide::Lower), Arc::new(lifeline));
        let (end, place, lease) = end.expect("a lock");
        (end, programs, place, lease)
    }

    #[test]
    fn a_span_that_is_free_again_rests_while_there_are_others() {
        let (device, pool, _monitor) = node();
        let first = pool.propose(&device).expect("a free span");
        let (index, before_ns) = (first.index(), now_ns());
        first.refused();
        let until_ns = std::mem::replace(&mut pool.lock().entries[index as usize].rests_until_ns, u64::MAX);
        assert!(until_ns >= before_ns + REST_NS);
        let others = [(); 2].map(|()| pool.propose(&device).expect("another"));
        assert!(others.iter().all(|other| other.index() != index));
        assert_eq!(pool.propose(&device).expect("the one that rests").index(), index);
    }

    /// A program there that hangs would else have each connection miss that comes when the span has rested.
    #[test]
    fn a_span_that_was_refused_comes_behind_all_others_also_when_it_has_rested() {
        let (device, pool, _monitor) = node();
        let first = pool.propose(&device).expect("a free span");
        let index = first.index();
        first.refused();
        pool.lock().entries.iter_mut().for_each(|entry| entry.rests_until_ns = 0);
        let others = [(); 2].map(|()| pool.propose(&device).expect("another").index());
        assert!(others.iter().all(|other| *other != index), "{others:?}");
    }

    #[test]
    fn a_connection_is_direct_once_its_program_has_come_and_missed_if_that_leaves_without_its_span() {
        let (device, pool, _monitor) = node();
        let (mut end, lifeline, place, lease) = connection(&device, &pool);
        assert_eq!(pool.counts(), (1, 0, 0), "who has not come counts as nothing");
        let map = |offset| {
            let mapping = Mapping::at(lease.as_fd(), offset, place.span_bytes()).expect("a mapping");
            Region::of_mapping(Arc::new(mapping))
        };
        let (inbound, outbound) = (map(place.inbound_offset), map(place.outbound_offset));
        let secrets = Secrets { to_acceptor: 1, to_connector: 2 };
        Segment::in_windows(&inbound, &outbound, End::Connector, secrets).set_up();
        assert_eq!([pool.counts(), pool.counts()], [(1, 1, 0); 2]);
        drop(lifeline);
        end.poll_lifeline();
        drop(end);
        assert_eq!(pool.counts(), (0, 1, 0));

        let (mut end, lifeline, ..) = connection(&device, &pool);
        drop(lifeline);
        end.poll_lifeline();
        assert_eq!(end.hangup, Hangup::Closed);
        drop(end);
        assert_eq!(pool.counts(), (0, 1, 1), "it had the descriptor and did not map it");

        let (mut end, lifeline, ..) = connection(&device, &pool);
        socket::process::system::ring(end.lifeline.as_raw_fd()).expect("room for a ring");
        drop(lifeline);
        end.poll_lifeline();
        drop(end);
        assert_eq!(pool.counts(), (0, 1, 1), "one that has not read the reply knows of no span");
    }
}
