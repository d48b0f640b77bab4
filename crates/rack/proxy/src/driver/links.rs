//! The engines of a thread.
//!
//! How both ends of a partition begin, and begin anew, by the words of the line before its lanes ("greeting"):
//!
//! ```text
//!   one end                                       the other, which does the same
//!   secret: of the lanes to this end ───────────►   nothing of this end's earlier lanes is stored any more:
//!                                                   cleans its window
//!                                    ◄───────────── cleaned for: that secret
//!   stores, once that is there and it has cleaned its own window too
//! ```
//!
//! Where training cleans the partitions, a secret is enough. Where it leaves them alone, an engine that is there goes
//! on over the next link as if nothing had happened, as long as the secret of the peer is what it was: only who begins
//! anew, or ends, changes that.

use super::direct::ProgramEnd;
use super::relay::{Lost, Rescue, Token, Which};
use super::{Place, Shared};
use crate::frame::{ConnectionNumber, LinkSide};
use crate::{
    Class, ConnectionKey, DetachedEngine, Engine, EngineCounters, EngineEvent, EngineSettings, LinkFault,
    LocalEndpoint, OpenPayload, PartitionLanes, PollOutcome, SuspendedConnection,
};
use control::proxy::Configuration;
use fabric::device::{Device, DeviceDoorbell, DeviceInbound, DeviceLink, DeviceOutbound, NodeSlot, Vector};
use fabric::timed::{self, LinkTiming, Pacer, TimedConfig, TimedInbound, TimedOutbound};
use fabric::{Doorbell, Epoch, Inbound, Outbound, Slice};
use lane::{Consumer, Layout, Producer};
use volmem::CACHE_LINE_BYTES;
use volmem::sync::Ordering;

/// Bytes before the lanes of a partition: the line with the secret.
const GREETING_BYTES: usize = CACHE_LINE_BYTES;
/// Where in that line the secret of the lanes to who wrote it is; 0 while there are none.
const SECRET: usize = 0;
/// Where it says for which secret of the reader the writer has cleaned its window. Between them is the [`Rescue`].
const CLEANED_FOR: usize = 32;
/// Slots of a ring at least: enough for the longest frame.
const SLOTS_MIN: u64 = 512;
/// Slots of a latency partition's ring at most: what waits there keeps a short message waiting.
const LATENCY_SLOTS_MAX: u64 = 2048;
/// Slots of a bulk partition's ring at most: larger ones leave the second-level cache.
const BULK_SLOTS_MAX: u64 = 8192;

/// An engine on a link that is up.
///
/// Before its lanes begin, each end chooses the secret of those that come to it, and stores it at the start of the
/// peer's latency partition: programs, which do not map the windows, cannot make payload that passes for a record.
pub(super) struct LinkEngine {
    pub(super) peer: u8,
    /// The one in which it began: both ends call it by that, whichever they are in by now.
    born: u32,
    /// The one in which it is used, or was used last.
    pub(super) epoch: u32,
    /// Since when there has been no epoch to use it in.
    adrift_since_ns: Option<u64>,
    /// Training leaves the partitions alone.
    keeps_partitions: bool,
    /// The peer's secret that the window is clean for, or that the engine uses.
    theirs: u64,
    engine: Option<Box<dyn Carrier>>,
    timed: Vec<TimedWindows>,
    timing: Option<(LinkTiming, Pacer)>,
    windows: Windows,
    settings: EngineSettings,
    secret: u64,
    bell: DeviceDoorbell,
    device: Device,
    pub(super) place: usize,
    /// What each end has told the other for the time after the link.
    rescue: Option<Rescue>,
    their_rescue: Option<Rescue>,
}

/// Whether an engine can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// It can.
    Good,
    /// The peer has just left the epoch, and may come back to it in another.
    Left,
    /// Never again: why.
    Lost(&'static str),
}

/// An engine, whichever windows it is over.
trait Carrier: Send {
    fn poll(&mut self, now_ns: u64, is_oversubscribed: bool) -> Result<PollOutcome, LinkFault>;
    fn prepare_sleep(&mut self) -> Result<bool, LinkFault>;
    fn park_all(&mut self);
    fn end_sleep(&mut self);
    fn lifeline_ready(&mut self, key: ConnectionKey);
    fn next_event(&mut self) -> Option<EngineEvent<ProgramEnd>>;
    fn answer(&mut self, key: ConnectionKey, answer: Result<ProgramEnd, u32>);
    fn open(&mut self, tuple: OpenPayload, make: &mut dyn FnMut(ConnectionKey) -> ProgramEnd);
    fn resume_direct(
        &mut self,
        number: ConnectionNumber,
        lost_ns: u64,
        make: &mut dyn FnMut(ConnectionKey) -> ProgramEnd,
    ) -> Option<ConnectionKey>;
    fn suspend(&mut self, now_ns: u64) -> Vec<SuspendedConnection<ProgramEnd>>;
    fn unresumed(&mut self) -> usize;
    fn reset_lost_before(&mut self, lost_ns: u64);
    fn take_down(&mut self);
    fn detach(self: Box<Self>) -> DetachedEngine<ProgramEnd>;
    fn connections(&self) -> usize;
    fn counters(&self) -> EngineCounters;
}

impl<I: Inbound, O: Outbound> Carrier for Engine<I, O, ProgramEnd> {
    fn poll(&mut self, now_ns: u64, is_oversubscribed: bool) -> Result<PollOutcome, LinkFault> {
        self.set_oversubscribed(is_oversubscribed);
        Engine::poll(self, now_ns)
    }

    fn prepare_sleep(&mut self) -> Result<bool, LinkFault> {
        Engine::prepare_sleep(self)
    }

    fn park_all(&mut self) {
        Engine::park_all(self);
    }

    fn end_sleep(&mut self) {
        Engine::end_sleep(self);
    }

    fn lifeline_ready(&mut self, key: ConnectionKey) {
        Engine::lifeline_ready(self, key);
    }

    fn next_event(&mut self) -> Option<EngineEvent<ProgramEnd>> {
        Engine::next_event(self)
    }

    fn answer(&mut self, key: ConnectionKey, answer: Result<ProgramEnd, u32>) {
        Engine::answer(self, key, answer);
    }

    fn open(&mut self, tuple: OpenPayload, make: &mut dyn FnMut(ConnectionKey) -> ProgramEnd) {
        Engine::open(self, tuple, make);
    }

    fn resume_direct(
        &mut self,
        number: ConnectionNumber,
        lost_ns: u64,
        make: &mut dyn FnMut(ConnectionKey) -> ProgramEnd,
    ) -> Option<ConnectionKey> {
        Engine::resume_direct(self, number, lost_ns, make)
    }

    fn suspend(&mut self, now_ns: u64) -> Vec<SuspendedConnection<ProgramEnd>> {
        Engine::suspend(self, now_ns)
    }

    fn unresumed(&mut self) -> usize {
        Engine::unresumed(self)
    }

    fn reset_lost_before(&mut self, lost_ns: u64) {
        Engine::reset_lost_before(self, lost_ns);
    }

    fn take_down(&mut self) {
        Engine::take_down(self);
    }

    fn detach(self: Box<Self>) -> DetachedEngine<ProgramEnd> {
        Engine::detach(*self)
    }

    fn connections(&self) -> usize {
        Engine::connections(self)
    }

    fn counters(&self) -> EngineCounters {
        *Engine::counters(self)
    }
}

/// The partitions of an engine.
struct Windows {
    slots: u64,
    latency: (DeviceInbound, DeviceOutbound),
    bulk: Option<(DeviceInbound, DeviceOutbound)>,
}

impl LinkEngine {
    /// An engine over fresh partitions. The link is up in the epoch `up.1`, so that the inbound window is clean.
    /// `vector` is the bell of this thread, at both ends.
    /// `rescue` is for the time after the link, where connections outlive it.
    pub(super) fn new(
        shared: &Shared,
        device: &Device,
        up: (u8, u32),
        index: usize,
        vector: Vector,
        rescue: Option<Rescue>,
    ) -> Self {
        let (peer, epoch) = up;
        let setup = &shared.setup;
        let side = if setup.own_slot < peer { LinkSide::Lower } else { LinkSide::Higher };
        let secret = new_secret();
        let settings = EngineSettings {
            number_first: index as u32,
            number_step: shared.places.len() as u32,
            secret: secret.rotate_left(32),
            is_failover: setup.is_failover,
            ..sliced(EngineSettings::new(side), setup.slice_bytes)
        };
        let windows = Windows::new(setup, device, shared.places[index], NodeSlot(peer));
        if let Some(rescue) = &rescue {
            rescue.store(&windows.latency.1);
        }
        windows.latency.1.store_u64(SECRET, secret, Ordering::Release);
        windows.latency.1.flush();
        let bell = device.doorbell(NodeSlot(peer), vector);
        let timing = shared.timing.map(|timing| (timing, shared.pace(peer)));
        bell.ring();
        Self {
            peer,
            born: epoch,
            epoch,
            adrift_since_ns: None,
            keeps_partitions: setup.keeps_partitions,
            theirs: 0,
            engine: None,
            timed: Vec::new(),
            timing,
            windows,
            settings,
            secret,
            bell,
            device: device.clone(),
            place: index,
            rescue,
            their_rescue: None,
        }
    }

    /// A turn, and the peer's doorbell if it sleeps. As for [`Engine::set_oversubscribed`].
    pub(super) fn poll(&mut self, now_ns: u64, is_oversubscribed: bool) -> Result<PollOutcome, LinkFault> {
        let Some(engine) = &mut self.engine else {
            return Ok(PollOutcome { progressed: self.greet(), ..PollOutcome::default() });
        };
        let outcome = engine.poll(now_ns, is_oversubscribed)?;
        if outcome.ring_peer {
            self.bell.ring();
        }
        Ok(outcome)
    }

    /// Begins once the peer's secret is there.
    fn greet(&mut self) -> bool {
        let theirs = self.windows.latency.0.load_u64(SECRET, Ordering::Acquire);
        if theirs == 0 {
            return false;
        }
        let is_news = std::mem::replace(&mut self.theirs, theirs) != theirs;
        if self.keeps_partitions {
            if is_news {
                self.windows.clean();
                self.windows.latency.1.fence();
                self.windows.latency.1.store_u64(CLEANED_FOR, theirs, Ordering::Release);
                self.windows.latency.1.flush();
                self.bell.ring();
            }
            if self.windows.latency.0.load_u64(CLEANED_FOR, Ordering::Acquire) != self.secret {
                return is_news;
            }
        }
        self.their_rescue = Rescue::load(&self.windows.latency.0);
        self.engine = Some(match self.timing.clone() {
            None => Box::new(Engine::new(self.settings, self.windows.ports(self.secret, theirs))),
            Some((timing, pace)) => {
                self.timed = self.windows.timed(timing, &pace, &self.bell);
                Box::new(Engine::new(self.settings, self.windows.timed_ports(&self.timed, timing, self.secret, theirs)))
            }
        });
        true
    }

    pub(super) fn is_greeting(&self) -> bool {
        self.engine.is_none()
    }

    /// Whether the engine can still be used, which it cannot be for longer than `return_ns` without an epoch. Costs two
    /// loads of this node's own window.
    pub(super) fn standing(&self, now_ns: u64, return_ns: u64) -> Standing {
        if self.timed.iter().any(TimedWindows::is_lost) {
            return Standing::Lost("takes nothing from the modelled link, or spoiled it");
        }
        let has_begun = self.keeps_partitions && self.engine.is_some();
        if has_begun && self.windows.latency.0.load_u64(SECRET, Ordering::Acquire) != self.theirs {
            return Standing::Lost("has another proxy by now, or none");
        }
        if let Some(since_ns) = self.adrift_since_ns {
            let is_late = now_ns.saturating_sub(since_ns) > return_ns;
            return if is_late { Standing::Lost("did not come back in time") } else { Standing::Good };
        }
        match self.device.is_peer_ready(NodeSlot(self.peer), Epoch(self.epoch)) {
            true => Standing::Good,
            false if has_begun => Standing::Left,
            false => Standing::Lost("left the epoch of the link"),
        }
    }

    /// Goes on without an epoch; `false`: it cannot.
    pub(super) fn drift(&mut self, now_ns: u64) -> bool {
        let can = self.keeps_partitions && self.engine.is_some();
        if can {
            self.adrift_since_ns.get_or_insert(now_ns);
        }
        can
    }

    /// The link is up again. Rings may have been lost.
    pub(super) fn come_back(&mut self, epoch: u32) {
        (self.epoch, self.adrift_since_ns) = (epoch, None);
        self.bell.ring();
    }

    /// This node's device is another one, with the same memory and other bells.
    pub(super) fn renew(&mut self, device: &Device, vector: Vector) {
        self.bell = device.doorbell(NodeSlot(self.peer), vector);
        self.device = device.clone();
        self.bell.ring();
    }

    pub(super) fn lifeline_ready(&mut self, key: ConnectionKey) {
        if let Some(engine) = &mut self.engine {
            engine.lifeline_ready(key);
        }
    }

    pub(super) fn prepare_sleep(&mut self) -> Result<bool, LinkFault> {
        self.engine.as_mut().map_or(Ok(true), |engine| engine.prepare_sleep())
    }

    pub(super) fn park_all(&mut self) {
        if let Some(engine) = &mut self.engine {
            engine.park_all();
        }
    }

    pub(super) fn end_sleep(&mut self) {
        self.timed.iter().for_each(TimedWindows::wait_for_arrivals);
        if let Some(engine) = &mut self.engine {
            engine.end_sleep();
        }
    }

    pub(super) fn next_event(&mut self) -> Option<EngineEvent<ProgramEnd>> {
        self.engine.as_mut().and_then(|engine| engine.next_event())
    }

    pub(super) fn answer(&mut self, key: ConnectionKey, answer: Result<ProgramEnd, u32>) {
        if let Some(engine) = &mut self.engine {
            engine.answer(key, answer);
        }
    }

    /// As [`Engine::open`].
    pub(super) fn open(&mut self, tuple: OpenPayload, mut make: impl FnMut(ConnectionKey) -> ProgramEnd) {
        if let Some(engine) = &mut self.engine {
            engine.open(tuple, &mut make);
        }
    }

    /// As [`Engine::resume_direct`]. Before the first turn after it has ceased to greet.
    pub(super) fn resume_direct(
        &mut self,
        held: SuspendedConnection<ProgramEnd>,
        mut watch: impl FnMut(ConnectionKey, &ProgramEnd),
    ) {
        let SuspendedConnection { number, local, lost_ns } = held;
        let mut local = Some(local);
        let make = &mut |key| {
            let local = local.take().expect("called once");
            watch(key, &local);
            local
        };
        self.engine.as_mut().map(|engine| engine.resume_direct(number, lost_ns, make));
        local.map(ProgramEnd::reset).unwrap_or_default();
    }

    /// As [`Engine::suspend`], but where all connections go on: [`LinkEngine::detach`].
    pub(super) fn suspend(&mut self, now_ns: u64) -> Vec<SuspendedConnection<ProgramEnd>> {
        let engine = self.engine.as_mut().filter(|_| !self.settings.is_failover);
        engine.map_or_else(Vec::new, |engine| engine.suspend(now_ns))
    }

    /// As [`Engine::unresumed`].
    pub(super) fn unresumed(&mut self) -> usize {
        self.engine.as_mut().map_or(0, |engine| engine.unresumed())
    }

    /// As [`Engine::reset_lost_before`].
    pub(super) fn reset_lost_before(&mut self, lost_ns: u64) {
        if let Some(engine) = &mut self.engine {
            engine.reset_lost_before(lost_ns);
        }
    }

    /// Which engine of which link it is.
    pub(super) fn which(&self) -> Which {
        Which { peer: self.peer, epoch: self.born, place: self.place }
    }

    /// By what the peer's proxy is known that comes by TCP.
    pub(super) fn token(&self) -> Option<Token> {
        self.rescue.map(|rescue| rescue.token)
    }

    /// Leaves the link, which is lost. `None`: nothing was agreed for that case, and all connections are reset.
    pub(super) fn detach(mut self) -> Option<Lost> {
        self.say_good_bye();
        let which = self.which();
        match (self.rescue, self.their_rescue, self.engine.take()) {
            (Some(own), Some(theirs), Some(engine)) => {
                let mut detached = engine.detach();
                // Counted as what the windows have carried.
                detached.take_counters();
                Some(Lost { which, own, theirs, detached })
            }
            (.., engine) => {
                self.engine = engine;
                self.take_down();
                None
            }
        }
    }

    pub(super) fn take_down(&mut self) {
        self.say_good_bye();
        if let Some(engine) = &mut self.engine {
            engine.take_down();
        }
    }

    /// Where training does not clean the partitions: the peer is not to take what is left there for a proxy.
    fn say_good_bye(&self) {
        if self.keeps_partitions {
            self.windows.latency.1.store_u64(SECRET, 0, Ordering::Release);
            self.windows.latency.1.flush();
            self.bell.ring();
        }
    }

    pub(super) fn connections(&self) -> usize {
        self.engine.as_ref().map_or(0, |engine| engine.connections())
    }

    pub(super) fn counters(&self) -> EngineCounters {
        self.engine.as_ref().map_or_else(EngineCounters::default, |engine| engine.counters())
    }
}

impl Windows {
    fn new(setup: &Configuration, device: &Device, place: Place, peer: NodeSlot) -> Self {
        let window_bytes = device.layout().window_bytes();
        let slots = ring_slots(window_bytes, setup).expect("checked when the device came");
        let bytes = partition_bytes(window_bytes, setup);
        let partition = |index: usize| {
            let offset = setup.control_partition_bytes as usize + index * bytes;
            (device.inbound(peer).slice(offset, bytes), device.outbound(peer).slice(offset, bytes))
        };
        Self { slots, latency: partition(place.latency), bulk: place.bulk.map(partition) }
    }

    /// Zeroes what the peer stores into, but for its greeting: before this end says so, the peer stores nothing more.
    fn clean(&self) {
        for (inbound, _) in std::iter::once(&self.latency).chain(&self.bulk) {
            for offset in (GREETING_BYTES..inbound.len_bytes()).step_by(size_of::<u64>()) {
                inbound.store_u64(offset, 0, Ordering::Relaxed);
            }
        }
    }

    /// Lanes with the secret of this end to this end, and of the other to the other.
    fn ports(&self, own: u64, theirs: u64) -> Vec<PartitionLanes<DeviceInbound, DeviceOutbound>> {
        let port = |windows: &(DeviceInbound, DeviceOutbound), class: Class| {
            let slots_max = if class == Class::Bulk { BULK_SLOTS_MAX } else { LATENCY_SLOTS_MAX };
            let layout = Layout::packed(self.slots.min(slots_max), 0);
            let bytes = windows.0.len_bytes() - GREETING_BYTES;
            let inbound = windows.0.slice(GREETING_BYTES, bytes);
            let outbound = windows.1.slice(GREETING_BYTES, bytes);
            // Records of one partition mean nothing in another.
            let of_class = |secret: u64| secret ^ (class as u64 + 1).wrapping_mul(0xD6E8_FEB8_6659_FD93);
            let to = Producer::new(outbound.clone(), inbound.clone(), layout, of_class(theirs));
            PartitionLanes::new(to, Consumer::new(inbound, outbound, layout, of_class(own)))
        };
        let latency = port(&self.latency, Class::Latency);
        std::iter::once(latency).chain(self.bulk.as_ref().map(|bulk| port(bulk, Class::Bulk))).collect()
    }
}

impl Windows {
    /// The partitions behind the model of a link: latency, then bulk.
    fn timed(&self, timing: LinkTiming, pace: &Pacer, bell: &DeviceDoorbell) -> Vec<TimedWindows> {
        let windows = std::iter::once(&self.latency).chain(&self.bulk);
        windows
            .map(|(inbound, outbound)| {
                let bytes = inbound.len_bytes() - GREETING_BYTES;
                let slots = timed_slots(inbound.len_bytes(), timing).expect("checked when the device came");
                let setup =
                    TimedConfig { window_bytes: Layout::packed(slots, 0).window_bytes(), timing, pacer: pace.clone() };
                let (inbound, outbound) = (inbound.slice(GREETING_BYTES, bytes), outbound.slice(GREETING_BYTES, bytes));
                TimedWindows::new(inbound, outbound, bell.clone(), setup).expect("checked when the device came")
            })
            .collect()
    }

    fn timed_ports(&self, timed: &[TimedWindows], timing: LinkTiming, own: u64, theirs: u64) -> Vec<TimedPort> {
        let slots = timed_slots(self.latency.0.len_bytes(), timing).expect("checked when the device came");
        let port = |(class, windows): (usize, &TimedWindows)| {
            let of_class = |secret: u64| secret ^ (class as u64 + 1).wrapping_mul(0xD6E8_FEB8_6659_FD93);
            let (layout, inbound, outbound) = (Layout::packed(slots, 0), windows.inbound(), windows.outbound());
            let to = Producer::new(outbound.clone(), inbound.clone(), layout, of_class(theirs));
            PartitionLanes::new(to, Consumer::new(inbound, outbound, layout, of_class(own)))
        };
        timed.iter().enumerate().map(port).collect()
    }
}

type TimedWindows = timed::TimedWindows<DeviceLink>;
type TimedPort = PartitionLanes<TimedInbound<DeviceLink>, TimedOutbound<DeviceLink>>;

/// Slots of a ring behind the model of a link, in a partition of so many bytes; `None` if it is too small. A short
/// message is several stores, each of which takes its place on the way.
pub(super) fn timed_slots(partition_bytes: usize, timing: LinkTiming) -> Option<u64> {
    const STORES_PER_LINE: usize = 8;
    let fits = |slots: &u64| {
        let window_bytes = Layout::packed(*slots, 0).window_bytes();
        timed::memory_bytes(STORES_PER_LINE * window_bytes, timing)
            .is_ok_and(|bytes| bytes <= partition_bytes.saturating_sub(GREETING_BYTES))
    };
    [LATENCY_SLOTS_MAX, LATENCY_SLOTS_MAX / 2, SLOTS_MIN].into_iter().find(fits)
}

/// With slices as the rack file has them.
fn sliced(settings: EngineSettings, slice_bytes: Option<u64>) -> EngineSettings {
    match slice_bytes {
        None => settings,
        Some(0) => EngineSettings { slice_bytes: usize::MAX, backlog_bytes: usize::MAX, ..settings },
        Some(bytes) => EngineSettings { slice_bytes: usize::try_from(bytes).unwrap_or(usize::MAX), ..settings },
    }
}

/// A random number that is not zero.
fn new_secret() -> u64 {
    let mut bytes = [0; 8];
    // Without randomness, a number that no program can see.
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    let number = if filled == Ok(bytes.len()) { u64::from_ne_bytes(bytes) } else { socket::process::clock::ticks() };
    number | 1
}

/// Slots that fit in a partition of a window of so many bytes; `None` if it is too small.
pub(super) fn ring_slots(window_bytes: usize, setup: &Configuration) -> Option<u64> {
    let bytes = partition_bytes(window_bytes, setup);
    let room = bytes.checked_sub(GREETING_BYTES + Layout::packed(0, 0).window_bytes())? / lane::SLOT_BYTES;
    let slots = 1_u64 << room.checked_ilog2()?;
    (slots >= SLOTS_MIN).then_some(slots)
}

pub(super) fn partition_bytes(window_bytes: usize, setup: &Configuration) -> usize {
    let room_bytes = window_bytes.saturating_sub(setup.control_partition_bytes as usize);
    let bytes = room_bytes.min(setup.data_bytes as usize) / setup.partitions.len().max(1);
    bytes - bytes % CACHE_LINE_BYTES
}
