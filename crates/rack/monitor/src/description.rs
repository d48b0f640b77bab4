//! The rack in etcd: this node's lease there, changes, and a copy for when etcd is away.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use control::monitor::Etcd;
use etcd::{EtcdError, Held, Keeper, LinkState, News, Revision, Store, Tenure};
use rack::{Rack, RackFile};
use tracing::{error, info, warn};

use crate::node::Settings;

/// Where a rack lies in etcd, and when it was read.
#[derive(Clone, Debug)]
pub struct InEtcd {
    /// Where.
    pub store: Store,
    /// When.
    pub revision: Revision,
}

/// What a node is to go on with.
#[derive(Debug)]
pub enum Heard {
    /// Another rack, in what can differ while nodes run.
    Rack(Rack),
    /// Metrics at another port.
    Port(Option<SocketAddr>),
}

/// A monitor's side of etcd.
#[derive(Debug)]
pub struct Description {
    keeper: Keeper,
    /// For the command line and metrics.
    pub status: Etcd,
    /// What is wrong with the rack there, and with etcd.
    faults: [Option<String>; 2],
    links: Vec<LinkState>,
    copy: PathBuf,
}

/// Places in [`Description::faults`].
const OF_RACK: usize = 0;
const OF_ETCD: usize = 1;

impl Description {
    /// Takes the node's lease, where the rack lies in etcd. Whoever calls holds the node's lock on this machine.
    ///
    /// # Errors
    /// When somebody else holds the lease, or etcd does not answer.
    pub fn take(settings: &Settings, started_at_ns: u64) -> Result<Option<Self>, EtcdError> {
        let Some(InEtcd { store, revision }) = settings.etcd.clone() else { return Ok(None) };
        let node = &settings.rack.nodes[settings.slot].name;
        let ttl_s = (settings.rack.timeouts.lease_ns / 1e9).ceil() as u64;
        let held = Held::of(&settings.places.node(node).directory, started_at_ns)?;
        let tenure = Tenure::take(&store, node, ttl_s, held)?;
        let keeper = Keeper::start(store, tenure, revision)?;
        let address = keeper.address().to_string();
        info!(ttl_s, "the node's lease is held at {address}");
        let status = Etcd { address, is_reached: true, is_held: true, ..Etcd::default() };
        let (faults, copy) = (Default::default(), settings.places.copy());
        let description = Self { keeper, status, faults, links: Vec::new(), copy };
        description.write_copy(&settings.rack);
        Ok(Some(description))
    }

    /// Polls readable when [`Description::hear`] has something.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.keeper.descriptor()
    }

    /// How this node's links are, by slot of the peer.
    pub fn tell_links(&mut self, rack: &Rack, links: impl Iterator<Item = (usize, &'static str)>) {
        let state =
            |(slot, state): (usize, &str)| LinkState { peer: rack.nodes[slot].name.clone(), state: state.to_owned() };
        let links: Vec<LinkState> = links.map(state).collect();
        if links != self.links {
            self.keeper.tell_links(links.clone());
            self.links = links;
        }
    }

    /// What has happened, of which the node takes on what it can.
    pub fn hear(&mut self, settings: &Settings) -> Vec<Heard> {
        let mut latest = None;
        for news in self.keeper.news() {
            match news {
                News::Rack(file) => latest = Some(file),
                News::Refused(error) => {
                    warn!("{error} (this node goes on with what it has)");
                    self.faults[OF_RACK] = Some(error.to_string());
                }
                other => self.note(other),
            }
        }
        let heard = latest.map(|file| self.change(settings, &file)).unwrap_or_default();
        self.status.problem = self.faults.iter().flatten().next().cloned();
        heard
    }

    fn note(&mut self, news: News) {
        match news {
            News::Away(error) => {
                warn!("{error} (links and connections go on; it is asked again every second)");
                self.faults[OF_ETCD] = Some(error.to_string());
                self.status.is_reached = false;
                self.status.outages += 1;
            }
            News::Back => {
                info!("etcd answers again");
                self.faults[OF_ETCD] = None;
                self.status.is_reached = true;
            }
            News::Renewed => {
                warn!("the node's lease had ended, and is taken anew");
                self.faults[OF_ETCD] = None;
                self.status.is_held = true;
            }
            News::Taken(error) => {
                error!("the node's lease had ended, and somebody else has it: {error}");
                self.faults[OF_ETCD] = Some(error.to_string());
                self.status.is_held = false;
            }
            // Heard before.
            News::Rack(_) | News::Refused(_) => {}
        }
    }

    fn change(&mut self, settings: &Settings, file: &RackFile) -> Vec<Heard> {
        self.faults[OF_RACK] = None;
        let change = settings.rack.change_to(&file.rack, settings.slot);
        if change.left != self.status.restart_needed && !change.left.is_empty() {
            let (keys, address) = (change.left.join(", "), file.shown());
            warn!("{keys}: changed, but not while nodes run; 'crosslane down --rack {address}' on all, then up");
        }
        self.status.restart_needed = change.left;
        if change.taken.is_empty() {
            return Vec::new();
        }
        info!("changed: {}", change.taken.join(", "));
        self.status.changes_taken += 1;
        self.write_copy(&change.rack);
        let port = change.rack.nodes[settings.slot].metrics;
        let is_moved = port != settings.rack.nodes[settings.slot].metrics;
        let moved = is_moved.then_some(Heard::Port(port));
        [Heard::Rack(change.rack)].into_iter().chain(moved).collect()
    }

    /// For commands while etcd is away, and for bringing down what runs whatever etcd says by then. Other monitors of
    /// this machine write the same.
    fn write_copy(&self, rack: &Rack) {
        let new = self.copy.with_extension(format!("new-{}", std::process::id()));
        let written = std::fs::write(&new, rack.to_string()).and_then(|()| std::fs::rename(&new, &self.copy));
        if let Err(error) = written {
            warn!("{}: {error}; while etcd is away, commands will not find this rack", self.copy.display());
        }
    }
}
