//! The rack in etcd: this node's lease, changes of the rack, and a copy for times when etcd is unreachable.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use control::monitor::Etcd;
use etcd::{EtcdError, EtcdSession, EtcdUpdate, LeaseRecord, LinkState, NodeLease};
use rack::{Rack, RackFile};
use tracing::{error, info, warn};

use crate::settings::{EtcdSource, MonitorSettings};

/// A change that the node applies.
#[derive(Debug)]
pub enum ConfigUpdate {
    /// A changed rack, of which only what can change at run time differs from the current one.
    Rack(Rack),
    /// Another address of metrics.
    MetricsPort(Option<SocketAddr>),
}

/// A monitor's subscription to its rack in etcd.
#[derive(Debug)]
pub struct RackSubscription {
    session: EtcdSession,
    /// State for the command line and metrics.
    pub status: Etcd,
    /// The current error of the rack, and that of etcd.
    faults: [Option<String>; 2],
    links: Vec<LinkState>,
    copy: PathBuf,
}

/// Indices of [`RackSubscription::faults`].
const RACK_FAULT: usize = 0;
const ETCD_FAULT: usize = 1;

impl RackSubscription {
    /// Claims the node's lease if the rack is in etcd. The caller holds the node's lock on this machine.
    ///
    /// # Errors
    /// If another monitor holds the lease, or etcd does not answer.
    pub fn acquire(settings: &MonitorSettings, started_at_ns: u64) -> Result<Option<Self>, EtcdError> {
        let Some(EtcdSource { store, revision }) = settings.etcd.clone() else { return Ok(None) };
        let node = &settings.rack.nodes[settings.slot].name;
        let ttl_s = (settings.rack.timeouts.lease_ns / 1e9).ceil() as u64;
        let record = LeaseRecord::of(&settings.run_dir.node(node).directory, started_at_ns)?;
        let lease = NodeLease::acquire(&store, node, ttl_s, record)?;
        let session = EtcdSession::start(store, lease, revision)?;
        let address = session.address().to_string();
        info!(ttl_s, "the node's lease is held at {address}");
        let status = Etcd { address, is_reached: true, holds_lease: true, ..Etcd::default() };
        let (faults, copy) = (Default::default(), settings.run_dir.copy());
        let subscription = Self { session, status, faults, links: Vec::new(), copy };
        subscription.write_copy(&settings.rack);
        Ok(Some(subscription))
    }

    /// Returns a descriptor that polls readable when there are updates.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.session.descriptor()
    }

    /// Publishes the states of this node's links, by slot of the peer.
    pub fn publish_links(&mut self, rack: &Rack, links: impl Iterator<Item = (usize, &'static str)>) {
        let state =
            |(slot, state): (usize, &str)| LinkState { peer: rack.nodes[slot].name.clone(), state: state.to_owned() };
        let links: Vec<LinkState> = links.map(state).collect();
        if links != self.links {
            self.session.publish_links(links.clone());
            self.links = links;
        }
    }

    /// Returns the changes that the node has to apply, and updates the state.
    pub fn updates(&mut self, settings: &MonitorSettings) -> Vec<ConfigUpdate> {
        let mut latest = None;
        for update in self.session.updates() {
            match update {
                EtcdUpdate::Rack(file) => latest = Some(file),
                EtcdUpdate::Refused(error) => {
                    warn!("{error} (this node keeps its previous configuration)");
                    self.faults[RACK_FAULT] = Some(error.to_string());
                }
                other => self.record(other),
            }
        }
        let updates = latest.map(|file| self.change(settings, &file)).unwrap_or_default();
        self.status.problem = self.faults.iter().flatten().next().cloned();
        updates
    }

    fn record(&mut self, update: EtcdUpdate) {
        match update {
            EtcdUpdate::Unreachable(error) => {
                warn!("{error} (links and connections continue; retrying every second)");
                self.faults[ETCD_FAULT] = Some(error.to_string());
                self.status.is_reached = false;
                self.status.outages += 1;
            }
            EtcdUpdate::Reachable => {
                info!("etcd answers again");
                self.faults[ETCD_FAULT] = None;
                self.status.is_reached = true;
            }
            EtcdUpdate::LeaseReacquired => {
                warn!("the node's lease had expired and was acquired again");
                self.faults[ETCD_FAULT] = None;
                self.status.holds_lease = true;
            }
            EtcdUpdate::LeaseLost(error) => {
                error!("the node's lease had expired and is held by another monitor: {error}");
                self.faults[ETCD_FAULT] = Some(error.to_string());
                self.status.holds_lease = false;
            }
            // Handled by the caller.
            EtcdUpdate::Rack(_) | EtcdUpdate::Refused(_) => {}
        }
    }

    fn change(&mut self, settings: &MonitorSettings, file: &RackFile) -> Vec<ConfigUpdate> {
        self.faults[RACK_FAULT] = None;
        let change = settings.rack.change_to(&file.rack, settings.slot);
        if change.restart_needed != self.status.restart_needed && !change.restart_needed.is_empty() {
            let (keys, address) = (change.restart_needed.join(", "), file.shown());
            warn!("{keys}: changed, which needs a restart; 'crosslane down --rack {address}' on all, then up");
        }
        self.status.restart_needed = change.restart_needed;
        if change.applied.is_empty() {
            return Vec::new();
        }
        info!("changed: {}", change.applied.join(", "));
        self.status.changes_applied += 1;
        self.write_copy(&change.rack);
        let port = change.rack.nodes[settings.slot].metrics;
        let is_moved = port != settings.rack.nodes[settings.slot].metrics;
        let moved = is_moved.then_some(ConfigUpdate::MetricsPort(port));
        [ConfigUpdate::Rack(change.rack)].into_iter().chain(moved).collect()
    }

    /// Writes the copy. While etcd is unreachable, commands read it, for example to bring the nodes down. Other
    /// monitors of this machine write the same file.
    fn write_copy(&self, rack: &Rack) {
        let new = self.copy.with_extension(format!("new-{}", std::process::id()));
        let written = std::fs::write(&new, rack.to_string()).and_then(|()| std::fs::rename(&new, &self.copy));
        if let Err(error) = written {
            warn!("{}: {error}; while etcd is unreachable, commands will not find this rack", self.copy.display());
        }
    }
}
