//! The links to all other nodes, and what the proxy knows of each.

use control::SilenceTimer;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};

use control::proxy::ToProxy;
use fabric::Epoch;
use fabric::device::{Device, DeviceLink, NodeSlot};

use crate::peer::Peer;
use crate::proxy_child::ProxyChild;
use crate::session::{Session, SessionSettings};
use crate::settings::MonitorSettings;

/// The link to another node.
pub struct Neighbour {
    /// Slot of the other node.
    pub slot: usize,
    /// The monitor's endpoint of the link.
    pub peer: Peer<DeviceLink>,
    /// The epoch that was announced to the proxy and that it may still use.
    announced_epoch: Option<Epoch>,
    /// Deadline for the proxy to stop using a lost link.
    stop_deadline_ns: Option<u64>,
    /// The last heartbeat in the device's memory, and how long it has not changed.
    heartbeat: (u64, SilenceTimer),
}

impl Neighbour {
    fn new(settings: &MonitorSettings, device: &Device, slot: usize) -> Self {
        let peer = Peer::new(device.link(NodeSlot(slot as u8)), session_settings(settings, slot));
        Self {
            slot,
            peer,
            announced_epoch: None,
            stop_deadline_ns: None,
            heartbeat: (0, SilenceTimer::new(settings.rack.timeouts.silence_ns as u64, 0)),
        }
    }

    /// Reads the heartbeat of the peer's proxy. It distinguishes a dead monitor, whose proxy waits for another one,
    /// from a slow one.
    pub fn check_heartbeat(&mut self, device: &Device, now_ns: u64) {
        let (beat, is_alone) = device.heartbeat_of(NodeSlot(self.slot as u8));
        let (last, silence) = &mut self.heartbeat;
        if beat != *last {
            *last = beat;
            silence.heard(now_ns);
        }
        let is_beating = silence.expired(now_ns).is_none();
        self.peer.set_proxy_waiting(is_alone && is_beating);
    }

    /// Prepares the loss of a link in `epoch`. Returns whether the proxy has to stop using it until the deadline: it
    /// is not trained before.
    pub fn begin_stop(&mut self, epoch: Epoch, deadline_ns: u64) -> bool {
        let is_announced = self.announced_epoch == Some(epoch);
        if is_announced {
            self.peer.block_training(true);
            self.stop_deadline_ns = Some(deadline_ns);
        }
        is_announced
    }

    /// Handles the end of the proxy, which no longer uses the link. Returns whether it had used it.
    pub fn proxy_ended(&mut self) -> bool {
        self.stop_deadline_ns = None;
        self.peer.block_training(false);
        self.announced_epoch.take().is_some()
    }

    fn stopped(&mut self) {
        (self.announced_epoch, self.stop_deadline_ns) = (None, None);
        self.peer.block_training(false);
    }
}

/// The links to all other nodes, in the order of their slots.
pub struct Neighbours(Vec<Neighbour>);

impl Neighbours {
    /// Returns the links to all nodes but the monitor's own.
    pub fn new(settings: &MonitorSettings, device: &Device) -> Self {
        let slots = (0..settings.rack.nodes.len()).filter(|slot| *slot != settings.slot);
        Self(slots.map(|slot| Neighbour::new(settings, device, slot)).collect())
    }

    /// Adds the link to a node that has joined.
    pub fn add(&mut self, settings: &MonitorSettings, device: &Device, slot: usize) {
        self.0.push(Neighbour::new(settings, device, slot));
    }

    /// Sets the settings of further sessions.
    pub fn set_settings(&mut self, settings: &MonitorSettings) {
        for neighbour in &mut self.0 {
            neighbour.peer.set_settings(session_settings(settings, neighbour.slot));
        }
    }

    /// Returns the index of the link to the node in `slot`.
    pub fn index_of(&self, slot: usize) -> Option<usize> {
        self.0.iter().position(|neighbour| neighbour.slot == slot)
    }

    /// Returns whether the link to the node in `slot` is open.
    pub fn is_open(&self, slot: usize) -> bool {
        self.0.iter().any(|neighbour| neighbour.slot == slot && neighbour.peer.is_open())
    }

    /// Returns the session with the node in `slot` while the link is open.
    pub fn session(&mut self, slot: usize) -> Option<&mut Session> {
        self.0.iter_mut().find(|neighbour| neighbour.slot == slot)?.peer.session()
    }

    /// Reports to peers that listeners are gone, or that they may no longer use them.
    pub fn withdraw(&mut self, addresses: Vec<(usize, SocketAddr)>) {
        for (slot, address) in addresses {
            if let Some(session) = self.session(slot) {
                session.withdraw(address);
            }
        }
    }

    /// Announces open links to the proxy, unless it knows them.
    pub fn announce(&mut self, proxy: &ProxyChild) {
        if !proxy.is_ready() {
            return;
        }
        for neighbour in &mut self.0 {
            let epoch = neighbour.peer.epoch();
            if neighbour.peer.is_open() && neighbour.announced_epoch.is_none() {
                let message = ToProxy::LinkUp { peer: neighbour.slot as u8, epoch: epoch.0 };
                neighbour.announced_epoch = proxy.send(&message).then_some(epoch);
            }
        }
    }

    /// Handles the proxy's report that it no longer uses an epoch of a link.
    pub fn stopped(&mut self, slot: usize, epoch: Epoch) {
        let found = self.0.iter_mut().find(|neighbour| neighbour.slot == slot);
        if let Some(neighbour) = found.filter(|neighbour| neighbour.announced_epoch == Some(epoch)) {
            neighbour.stopped();
        }
    }

    /// Returns whether the proxy has missed the deadline to stop using a lost link.
    pub fn is_stop_overdue(&self, now_ns: u64) -> bool {
        self.0.iter().any(|neighbour| neighbour.stop_deadline_ns.is_some_and(|deadline_ns| deadline_ns <= now_ns))
    }

    /// Returns when a link needs service next.
    pub fn due_ns(&self, now_ns: u64) -> Option<u64> {
        let due = self.0.iter().flat_map(|neighbour| {
            let retry_ns = neighbour.peer.send_retry_ns().map(|delay_ns| now_ns + delay_ns);
            [Some(neighbour.peer.due_ns()), neighbour.stop_deadline_ns, retry_ns]
        });
        due.flatten().min()
    }
}

impl Deref for Neighbours {
    type Target = [Neighbour];

    fn deref(&self) -> &[Neighbour] {
        &self.0
    }
}

impl DerefMut for Neighbours {
    fn deref_mut(&mut self) -> &mut [Neighbour] {
        &mut self.0
    }
}

fn session_settings(settings: &MonitorSettings, slot: usize) -> SessionSettings {
    let rack = &settings.rack;
    SessionSettings {
        own_name: settings.node().name.clone(),
        peer_name: rack.nodes[slot].name.clone(),
        digest: rack.digest(),
        silence_ns: rack.timeouts.silence_ns as u64,
    }
}
