//! The engines of a thread.

use super::end::SegmentEnd;
use super::{Place, Shared};
use crate::frame::Side;
use crate::{Class, Counters, Engine, Event, Fault, Key, Port, Settings, Tuple};
use control::proxy::Configuration;
use fabric::device::{Device, DeviceDoorbell, DeviceInbound, DeviceOutbound, Slot, Vector};
use fabric::{Doorbell, Epoch, Inbound, Outbound, Slice};
use lane::{Consumer, Layout, Producer};
use volmem::CACHE_LINE_BYTES;
use volmem::sync::Ordering;

/// Bytes before the lanes of a partition: the line with the secret.
const GREETING_BYTES: usize = CACHE_LINE_BYTES;
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
    pub(super) epoch: u32,
    engine: Option<DeviceEngine>,
    windows: Windows,
    settings: Settings,
    secret: u64,
    bell: DeviceDoorbell,
    device: Device,
}

type DeviceEngine = Engine<DeviceInbound, DeviceOutbound, SegmentEnd>;

/// The partitions of an engine.
struct Windows {
    slots: u64,
    latency: (DeviceInbound, DeviceOutbound),
    bulk: Option<(DeviceInbound, DeviceOutbound)>,
}

impl LinkEngine {
    /// An engine over fresh partitions. The link is up in the epoch `up.1`, so that the inbound window is clean.
    /// `vector` is the bell of this thread, at both ends.
    pub(super) fn new(shared: &Shared, device: &Device, up: (u8, u32), index: usize, vector: Vector) -> Self {
        let (peer, epoch) = up;
        let setup = &shared.setup;
        let side = if setup.own < peer { Side::Lower } else { Side::Higher };
        let secret = new_secret();
        let settings = Settings {
            number_first: index as u32,
            number_step: shared.places.len() as u32,
            secret: secret.rotate_left(32),
            ..Settings::new(side)
        };
        let windows = Windows::new(setup, device, shared.places[index], Slot(peer));
        windows.latency.1.store_u64(0, secret, Ordering::Release);
        windows.latency.1.flush();
        let bell = device.doorbell(Slot(peer), vector);
        bell.ring();
        Self { peer, epoch, engine: None, windows, settings, secret, bell, device: device.clone() }
    }

    /// A turn, and the peer's doorbell if it sleeps.
    pub(super) fn turn(&mut self, now_ns: u64) -> Result<bool, Fault> {
        let Some(engine) = &mut self.engine else { return Ok(self.greet()) };
        let turn = engine.turn(now_ns)?;
        if turn.ring {
            self.bell.ring();
        }
        Ok(turn.progressed)
    }

    /// Begins once the peer's secret is there.
    fn greet(&mut self) -> bool {
        let theirs = self.windows.latency.0.load_u64(0, Ordering::Acquire);
        if theirs == 0 {
            return false;
        }
        self.engine = Some(Engine::new(self.settings, self.windows.ports(self.secret, theirs)));
        true
    }

    pub(super) fn is_greeting(&self) -> bool {
        self.engine.is_none()
    }

    /// Whether the peer is still in the epoch.
    pub(super) fn is_up(&self) -> bool {
        self.device.is_peer_in(Slot(self.peer), Epoch(self.epoch))
    }

    pub(super) fn wake(&mut self, key: Key) {
        if let Some(engine) = &mut self.engine {
            engine.wake(key);
        }
    }

    pub(super) fn sleep(&mut self) -> Result<bool, Fault> {
        self.engine.as_mut().map_or(Ok(true), Engine::sleep)
    }

    pub(super) fn park_all(&mut self) {
        if let Some(engine) = &mut self.engine {
            engine.park_all();
        }
    }

    pub(super) fn wake_up(&mut self) {
        if let Some(engine) = &mut self.engine {
            engine.wake_up();
        }
    }

    pub(super) fn next_event(&mut self) -> Option<Event<SegmentEnd>> {
        self.engine.as_mut().and_then(Engine::next_event)
    }

    pub(super) fn answer(&mut self, key: Key, answer: Result<SegmentEnd, u32>) {
        if let Some(engine) = &mut self.engine {
            engine.answer(key, answer);
        }
    }

    /// As [`Engine::open`].
    pub(super) fn open(&mut self, tuple: Tuple, make: impl FnOnce(Key) -> SegmentEnd) {
        if let Some(engine) = &mut self.engine {
            engine.open(tuple, make);
        }
    }

    pub(super) fn take_down(&mut self) {
        if let Some(engine) = &mut self.engine {
            engine.take_down();
        }
    }

    pub(super) fn connections(&self) -> usize {
        self.engine.as_ref().map_or(0, Engine::connections)
    }

    pub(super) fn counters(&self) -> Counters {
        self.engine.as_ref().map_or_else(Counters::default, |engine| *engine.counters())
    }
}

impl Windows {
    fn new(setup: &Configuration, device: &Device, place: Place, peer: Slot) -> Self {
        let window_bytes = device.layout().window_bytes();
        let slots = ring_slots(window_bytes, setup).expect("checked when the device came");
        let bytes = partition_bytes(window_bytes, setup);
        let partition = |index: usize| {
            let offset = setup.control_partition_bytes as usize + index * bytes;
            (device.inbound(peer).slice(offset, bytes), device.outbound(peer).slice(offset, bytes))
        };
        Self { slots, latency: partition(place.latency), bulk: place.bulk.map(partition) }
    }

    /// Lanes with the secret of this end to this end, and of the other to the other.
    fn ports(&self, own: u64, theirs: u64) -> Vec<Port<DeviceInbound, DeviceOutbound>> {
        let port = |windows: &(DeviceInbound, DeviceOutbound), class: Class| {
            let slots_max = if class == Class::Bulk { BULK_SLOTS_MAX } else { LATENCY_SLOTS_MAX };
            let layout = Layout::packed(self.slots.min(slots_max), 0);
            let bytes = windows.0.len_bytes() - GREETING_BYTES;
            let inbound = windows.0.slice(GREETING_BYTES, bytes);
            let outbound = windows.1.slice(GREETING_BYTES, bytes);
            // Records of one partition mean nothing in another.
            let of_class = |secret: u64| secret ^ (class as u64 + 1).wrapping_mul(0xD6E8_FEB8_6659_FD93);
            let to = Producer::new(outbound.clone(), inbound.clone(), layout, of_class(theirs));
            Port::new(to, Consumer::new(inbound, outbound, layout, of_class(own)))
        };
        let latency = port(&self.latency, Class::Latency);
        std::iter::once(latency).chain(self.bulk.as_ref().map(|bulk| port(bulk, Class::Bulk))).collect()
    }
}

/// A random number that is not zero.
fn new_secret() -> u64 {
    let mut bytes = [0; 8];
    // Without randomness, a number that no program can see.
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    let number = if filled == Ok(bytes.len()) { u64::from_ne_bytes(bytes) } else { socket::clock::ticks() };
    number | 1
}

/// Slots that fit in a partition of a window of so many bytes; `None` if it is too small.
pub(super) fn ring_slots(window_bytes: usize, setup: &Configuration) -> Option<u64> {
    let bytes = partition_bytes(window_bytes, setup);
    let room = bytes.checked_sub(GREETING_BYTES + Layout::packed(0, 0).window_bytes())? / lane::SLOT_BYTES;
    let slots = 1_u64 << room.checked_ilog2()?;
    (slots >= SLOTS_MIN).then_some(slots)
}

fn partition_bytes(window_bytes: usize, setup: &Configuration) -> usize {
    let bytes = window_bytes.saturating_sub(setup.control_partition_bytes as usize) / setup.partitions.len().max(1);
    bytes - bytes % CACHE_LINE_BYTES
}
