//! An engine over the partitions of a link.
//!
//! Both ends begin, and restart, by the words of the line before the lanes of the latency partition ("greeting"):
//!
//! ```text
//!   one end                                       the other end, which does the same
//!   secret: of the lanes to this end ───────────►   this end stores nothing for its earlier lanes any more:
//!                                                   cleans its window
//!                                    ◄───────────── cleaned for: that secret
//!   stores, once it has read that and has cleaned its own window
//! ```
//!
//! If training cleans the partitions, exchanging the secrets is enough. If training leaves them alone, an engine
//! continues over the next link without interruption, as long as the peer's secret is unchanged: an engine changes it
//! only when it restarts or ends.

use super::dyn_engine::DynEngine;
use super::failover::contact::{EngineId, FailoverContact, FailoverToken, LostEngine};
use super::link_partitions::{LaneSecrets, LinkPartitions, TimedWindows};
use super::shared::Shared;
use super::tcp_endpoint::TcpEndpoint;
use crate::connection::OpenPayload;
use crate::counters::EngineCounters;
use crate::engine::{Engine, EngineSettings, LinkFault, PollOutcome, SuspendedConnection};
use crate::frame::LinkSide;
use crate::local::LocalEndpoint;
use crate::table::ConnectionKey;
use fabric::device::{Device, DeviceDoorbell, NodeSlot, Vector};
use fabric::timed::{LinkTiming, Pacer};
use fabric::{Doorbell, Epoch, Inbound, Outbound};
use volmem::sync::Ordering;

/// Offset, in the greeting line, of the secret of the lanes to the node that wrote it; 0 while there are none. The
/// [`FailoverContact`] follows.
const SECRET: usize = 0;
/// Offset of the reader's secret for which the writer has cleaned its window.
const CLEANED_FOR: usize = 32;

/// An engine on a link that is up.
///
/// Before its lanes begin, each end chooses the secret of the lanes to it, and stores it at the start of the peer's
/// latency partition. Programs do not map the partitions, so they cannot forge a payload that passes for a record.
pub(super) struct LinkEngine {
    pub(super) peer: u8,
    /// The epoch in which the engine began, by which both nodes identify it.
    epoch_first: u32,
    /// The epoch in which the engine is used, or was used last.
    pub(super) epoch: u32,
    /// Since when there has been no epoch to use it in.
    suspended_since_ns: Option<u64>,
    /// Training leaves the partitions alone.
    keeps_partitions: bool,
    /// The peer's secret for which the window is clean, or which the engine uses.
    remote_secret: u64,
    engine: Option<Box<dyn DynEngine>>,
    timed: Vec<TimedWindows>,
    timing: Option<(LinkTiming, Pacer)>,
    partitions: LinkPartitions,
    settings: EngineSettings,
    secret: u64,
    doorbell: DeviceDoorbell,
    device: Device,
    /// The index of the engine's plan.
    pub(super) plan: usize,
    contact: Option<FailoverContact>,
    remote_contact: Option<FailoverContact>,
}

/// Whether an engine can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkHealth {
    /// It can.
    Good,
    /// The peer has just left the epoch, and may come back in another one.
    Left,
    /// It cannot be used any more, for this reason.
    Lost(&'static str),
}

impl LinkEngine {
    /// Creates an engine over unused partitions. The link is up in the epoch `up.1`, so the inbound window is clean.
    /// `vector` is the doorbell of this thread, at both nodes. `contact` is for the loss of the link, with failover.
    pub(super) fn new(
        shared: &Shared,
        device: &Device,
        up: (u8, u32),
        plan: usize,
        vector: Vector,
        contact: Option<FailoverContact>,
    ) -> Self {
        let (peer, epoch) = up;
        let setup = &shared.setup;
        let side = if setup.own_slot < peer { LinkSide::Lower } else { LinkSide::Higher };
        let secret = new_secret();
        let settings = EngineSettings {
            number_first: plan as u32,
            number_step: shared.plans.len() as u32,
            secret: secret.rotate_left(32),
            is_failover: setup.is_failover,
            ..sliced(EngineSettings::new(side), setup.slice_bytes)
        };
        let partitions = LinkPartitions::new(setup, device, shared.plans[plan], NodeSlot(peer));
        let outbound = &partitions.latency.1;
        if let Some(contact) = &contact {
            contact.store(outbound);
        }
        outbound.store_u64(SECRET, secret, Ordering::Release);
        outbound.flush();
        let doorbell = device.doorbell(NodeSlot(peer), vector);
        let timing = shared.timing.map(|timing| (timing, shared.pacer(peer)));
        doorbell.ring();
        Self {
            peer,
            epoch_first: epoch,
            epoch,
            suspended_since_ns: None,
            keeps_partitions: setup.keeps_partitions,
            remote_secret: 0,
            engine: None,
            timed: Vec::new(),
            timing,
            partitions,
            settings,
            secret,
            doorbell,
            device: device.clone(),
            plan,
            contact,
            remote_contact: None,
        }
    }

    /// Polls the engine, and rings the peer's doorbell if it sleeps. See [`Engine::set_oversubscribed`].
    pub(super) fn poll(&mut self, now_ns: u64, is_oversubscribed: bool) -> Result<PollOutcome, LinkFault> {
        let Some(engine) = &mut self.engine else {
            return Ok(PollOutcome { progressed: self.greet(), ..PollOutcome::default() });
        };
        let outcome = engine.poll(now_ns, is_oversubscribed)?;
        if outcome.ring_peer {
            self.doorbell.ring();
        }
        Ok(outcome)
    }

    /// Begins once the peer has greeted. Returns whether there was progress.
    fn greet(&mut self) -> bool {
        let (inbound, outbound) = &self.partitions.latency;
        let remote_secret = inbound.load_u64(SECRET, Ordering::Acquire);
        if remote_secret == 0 {
            return false;
        }
        let is_new = std::mem::replace(&mut self.remote_secret, remote_secret) != remote_secret;
        if self.keeps_partitions {
            if is_new {
                self.partitions.clean();
                outbound.fence();
                outbound.store_u64(CLEANED_FOR, remote_secret, Ordering::Release);
                outbound.flush();
                self.doorbell.ring();
            }
            if inbound.load_u64(CLEANED_FOR, Ordering::Acquire) != self.secret {
                return is_new;
            }
        }
        self.remote_contact = FailoverContact::load(inbound);
        let secrets = LaneSecrets { inbound: self.secret, outbound: remote_secret };
        self.engine = Some(match self.timing.clone() {
            None => Box::new(Engine::new(self.settings, self.partitions.lanes(secrets))),
            Some((timing, pacer)) => {
                self.timed = self.partitions.timed(timing, &pacer, &self.doorbell);
                Box::new(Engine::new(self.settings, self.partitions.timed_lanes(&self.timed, timing, secrets)))
            }
        });
        true
    }

    /// Returns the engine, once the peer has greeted.
    pub(super) fn engine(&mut self) -> Option<&mut (dyn DynEngine + 'static)> {
        self.engine.as_deref_mut()
    }

    /// Returns whether the peer has not greeted yet.
    pub(super) fn is_greeting(&self) -> bool {
        self.engine.is_none()
    }

    /// Returns whether the engine can still be used. Without an epoch it can for `return_ns`. Costs two loads of this
    /// node's own window.
    pub(super) fn health(&self, now_ns: u64, return_ns: u64) -> LinkHealth {
        if self.timed.iter().any(TimedWindows::is_lost) {
            return LinkHealth::Lost("does not read from the modelled link, or has corrupted it");
        }
        let has_begun = self.keeps_partitions && self.engine.is_some();
        if has_begun && self.partitions.latency.0.load_u64(SECRET, Ordering::Acquire) != self.remote_secret {
            return LinkHealth::Lost("has another proxy by now, or none");
        }
        if let Some(since_ns) = self.suspended_since_ns {
            let is_late = now_ns.saturating_sub(since_ns) > return_ns;
            return if is_late { LinkHealth::Lost("did not come back in time") } else { LinkHealth::Good };
        }
        match self.device.is_peer_ready(NodeSlot(self.peer), Epoch(self.epoch)) {
            true => LinkHealth::Good,
            false if has_begun => LinkHealth::Left,
            false => LinkHealth::Lost("left the epoch of the link"),
        }
    }

    /// Continues without an epoch. Returns `false` if that is not possible.
    pub(super) fn suspend_epoch(&mut self, now_ns: u64) -> bool {
        let can_continue = self.keeps_partitions && self.engine.is_some();
        if can_continue {
            self.suspended_since_ns.get_or_insert(now_ns);
        }
        can_continue
    }

    /// Continues in another epoch. Rings may have been lost.
    pub(super) fn continue_in(&mut self, epoch: u32) {
        (self.epoch, self.suspended_since_ns) = (epoch, None);
        self.doorbell.ring();
    }

    /// Replaces this node's device by one with the same memory and other doorbells.
    pub(super) fn replace_device(&mut self, device: &Device, vector: Vector) {
        self.doorbell = device.doorbell(NodeSlot(self.peer), vector);
        self.device = device.clone();
        self.doorbell.ring();
    }

    pub(super) fn prepare_sleep(&mut self) -> Result<bool, LinkFault> {
        self.engine.as_mut().map_or(Ok(true), |engine| engine.prepare_sleep())
    }

    pub(super) fn end_sleep(&mut self) {
        self.timed.iter().for_each(TimedWindows::wait_for_arrivals);
        if let Some(engine) = &mut self.engine {
            engine.end_sleep();
        }
    }

    /// As [`Engine::open`].
    pub(super) fn open(&mut self, payload: OpenPayload, mut make: impl FnMut(ConnectionKey) -> TcpEndpoint) {
        if let Some(engine) = &mut self.engine {
            engine.open(payload, &mut make);
        }
    }

    /// As [`Engine::resume_suspended`]. Called before the first poll of the engine.
    pub(super) fn resume_suspended(
        &mut self,
        suspended: SuspendedConnection<TcpEndpoint>,
        mut register: impl FnMut(ConnectionKey, &mut TcpEndpoint),
    ) {
        let SuspendedConnection { number, local, lost_ns } = suspended;
        let mut local = Some(local);
        let make = &mut |key| {
            let mut local = local.take().expect("`resume_suspended` calls it at most once");
            register(key, &mut local);
            local
        };
        self.engine.as_mut().map(|engine| engine.resume_suspended(number, lost_ns, make));
        local.map(LocalEndpoint::reset).unwrap_or_default();
    }

    /// As [`Engine::suspend`]. With failover, [`LinkEngine::detach`] keeps all connections instead.
    pub(super) fn suspend(&mut self, now_ns: u64) -> Vec<SuspendedConnection<TcpEndpoint>> {
        let engine = self.engine.as_mut().filter(|_| !self.settings.is_failover);
        engine.map_or_else(Vec::new, |engine| engine.suspend(now_ns))
    }

    pub(super) fn id(&self) -> EngineId {
        EngineId { peer: self.peer, epoch: self.epoch_first, plan: self.plan }
    }

    /// Returns the token by which the peer's proxy is recognized when it connects by TCP.
    pub(super) fn failover_token(&self) -> Option<FailoverToken> {
        self.contact.map(|contact| contact.token)
    }

    /// Leaves a lost link. Returns `None`, with all connections reset, unless both nodes support failover.
    pub(super) fn detach(mut self) -> Option<LostEngine> {
        self.withdraw_secret();
        let id = self.id();
        match (self.contact, self.remote_contact, self.engine.take()) {
            (Some(local), Some(remote), Some(engine)) => {
                let mut detached = engine.detach();
                // They count what the windows have carried, and are reported with the link's.
                detached.take_counters();
                Some(LostEngine { id, local, remote, detached })
            }
            (.., engine) => {
                self.engine = engine;
                self.take_down();
                None
            }
        }
    }

    /// Leaves the link, and resets all connections.
    pub(super) fn take_down(&mut self) {
        self.withdraw_secret();
        if let Some(engine) = &mut self.engine {
            engine.take_down();
        }
    }

    /// Clears the secret if training does not clean the partitions: the peer must not mistake it for a running proxy's.
    fn withdraw_secret(&self) {
        if self.keeps_partitions {
            self.partitions.latency.1.store_u64(SECRET, 0, Ordering::Release);
            self.partitions.latency.1.flush();
            self.doorbell.ring();
        }
    }

    pub(super) fn counters(&self) -> EngineCounters {
        self.engine.as_ref().map_or_else(EngineCounters::default, |engine| engine.counters())
    }
}

/// Applies the slice length of the rack file; 0 switches slicing off.
fn sliced(settings: EngineSettings, slice_bytes: Option<u64>) -> EngineSettings {
    match slice_bytes {
        None => settings,
        Some(0) => EngineSettings { slice_bytes: usize::MAX, backlog_bytes: usize::MAX, ..settings },
        Some(bytes) => EngineSettings { slice_bytes: usize::try_from(bytes).unwrap_or(usize::MAX), ..settings },
    }
}

/// Returns a random number that is not zero.
pub(super) fn new_secret() -> u64 {
    let mut bytes = [0; 8];
    // Without random numbers, use one that no program sees.
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    let number = if filled == Ok(bytes.len()) { u64::from_ne_bytes(bytes) } else { socket::process::clock::ticks() };
    number | 1
}
