//! A monitor's connection with etcd: one thread keeps the lease alive, another watches the rack, and a descriptor
//! becomes readable when there are updates. The monitor's own thread never waits for etcd, so etcd may be slow or
//! unreachable.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use rack::{LEASE_PREFIX, RackFile};
use rustix::event::{EventfdFlags, eventfd};

use crate::error::EtcdError;
use crate::etcd_address::EtcdAddress;
use crate::gateway::Revision;
use crate::lease_record::LinkState;
use crate::node_lease::NodeLease;
use crate::store::RackStore;

/// Pause before a failed call is repeated.
const RETRY: Duration = Duration::from_secs(1);
/// Changes of links within this time are written once.
const COALESCE: Duration = Duration::from_millis(100);
/// Limit for revoking the lease at the end.
const REVOKE_LIMIT: Duration = Duration::from_millis(1500);
/// Keepalives sent within the lease's time to live.
const KEEPALIVES_PER_TTL: u32 = 3;
/// Maximum number of pending updates. The monitor reads them as soon as it is woken.
const UPDATES_MAX: usize = 64;

/// An update of the rack or of the state of etcd.
#[derive(Debug)]
pub enum EtcdUpdate {
    /// The rack may have changed.
    Rack(Box<RackFile>),
    /// The keys do not describe a valid rack.
    Refused(EtcdError),
    /// etcd does not answer.
    Unreachable(EtcdError),
    /// etcd answers again.
    Reachable,
    /// The lease had expired and was acquired again.
    LeaseReacquired,
    /// The lease had expired, and another monitor holds the node.
    LeaseLost(EtcdError),
}

enum Command {
    Links(Vec<LinkState>),
    End,
}

/// Handle of the threads.
#[derive(Debug)]
pub struct EtcdSession {
    address: EtcdAddress,
    commands: Sender<Command>,
    updates: Receiver<EtcdUpdate>,
    eventfd: Arc<OwnedFd>,
    /// Disconnected once the lease is revoked.
    ended: Receiver<()>,
}

impl EtcdSession {
    /// Starts the threads. The rack is known as of `revision`.
    ///
    /// # Errors
    /// If a thread or descriptor cannot be created.
    pub fn start(store: RackStore, lease: NodeLease, revision: Revision) -> Result<Self, EtcdError> {
        let failed = |reason: String| EtcdError::System { what: "threads for etcd".to_owned(), reason };
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|e| failed(e.to_string()))?;
        let eventfd = Arc::new(eventfd);
        let (sender, received) = mpsc::sync_channel(UPDATES_MAX);
        let update_sender = UpdateSender { sender, eventfd: Arc::clone(&eventfd) };
        let (commands, received_commands) = mpsc::channel();
        let (ending, ended) = mpsc::channel();
        let (address, watch_sender) = (store.address().clone(), update_sender.clone());
        let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.to_owned()).spawn(run).map_err(|error| failed(error.to_string()))
        };
        spawn("lease", Box::new(move || keep_lease(lease, &received_commands, &update_sender, ending)))?;
        // The thread ends with the process, or when the receiver of updates is dropped.
        spawn("watch", Box::new(move || watch(&store, &watch_sender, revision)))?;
        Ok(Self { address, commands, updates: received, eventfd, ended })
    }

    /// Returns the address of the rack.
    pub fn address(&self) -> &EtcdAddress {
        &self.address
    }

    /// Returns a descriptor that polls readable when there are updates.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }

    /// Returns the pending updates.
    pub fn updates(&self) -> Vec<EtcdUpdate> {
        let _ = rustix::io::read(&self.eventfd, &mut [0_u8; 8]);
        self.updates.try_iter().collect()
    }

    /// Publishes the states of this node's links in its lease record.
    pub fn publish_links(&self, links: Vec<LinkState>) {
        let _ = self.commands.send(Command::Links(links));
    }
}

impl Drop for EtcdSession {
    /// Revokes the lease. If etcd does not answer, the lease expires by itself.
    fn drop(&mut self) {
        let _ = self.commands.send(Command::End);
        let _ = self.ended.recv_timeout(REVOKE_LIMIT);
    }
}

/// Sends updates to the monitor's thread.
#[derive(Clone)]
struct UpdateSender {
    sender: mpsc::SyncSender<EtcdUpdate>,
    eventfd: Arc<OwnedFd>,
}

impl UpdateSender {
    /// Sends an update. Returns whether the receiver still exists.
    fn send(&self, update: EtcdUpdate) -> bool {
        let is_received = self.sender.send(update).is_ok();
        let _ = rustix::io::write(&self.eventfd, &1_u64.to_ne_bytes());
        is_received
    }
}

/// Keeps the lease alive until it is told to end. Dropping `ending` reports that the lease is revoked.
fn keep_lease(mut lease: NodeLease, commands: &Receiver<Command>, updates: &UpdateSender, ending: Sender<()>) {
    let period = Duration::from_secs(lease.ttl_s()) / KEEPALIVES_PER_TTL;
    let (mut is_unreachable, mut is_lost) = (false, false);
    loop {
        let command = commands.recv_timeout(if is_unreachable || is_lost { RETRY } else { period });
        let mut is_stopping = !matches!(command, Ok(Command::Links(_)) | Err(RecvTimeoutError::Timeout));
        if let Ok(Command::Links(links)) = command {
            lease.record.links = links;
            std::thread::sleep(COALESCE);
        }
        for command in commands.try_iter() {
            match command {
                Command::Links(links) => lease.record.links = links,
                Command::End => is_stopping = true,
            }
        }
        if is_stopping {
            lease.revoke();
            return drop(ending);
        }
        let changes = match lease.renew() {
            Ok(is_renewed) => {
                let was_unreachable = std::mem::take(&mut is_unreachable);
                is_lost = false;
                [was_unreachable.then_some(EtcdUpdate::Reachable), (!is_renewed).then_some(EtcdUpdate::LeaseReacquired)]
            }
            Err(error @ EtcdError::LeaseHeld { .. }) => {
                let was_unreachable = std::mem::take(&mut is_unreachable);
                let was_lost = std::mem::replace(&mut is_lost, true);
                [was_unreachable.then_some(EtcdUpdate::Reachable), (!was_lost).then_some(EtcdUpdate::LeaseLost(error))]
            }
            Err(error) => {
                [(!std::mem::replace(&mut is_unreachable, true)).then_some(EtcdUpdate::Unreachable(error)), None]
            }
        };
        changes.into_iter().flatten().for_each(|update| _ = updates.send(update));
    }
}

/// Watches the rack until the receiver of updates is dropped.
fn watch(store: &RackStore, updates: &UpdateSender, mut seen: Revision) {
    let mut refused = String::new();
    loop {
        if !follow(store, updates, &mut seen, &mut refused) || !reload(store, updates, &mut seen, &mut refused) {
            return;
        }
    }
}

/// Follows changes until the watch ends. Returns false if the receiver of updates is dropped.
fn follow(store: &RackStore, updates: &UpdateSender, seen: &mut Revision, refused: &mut String) -> bool {
    let watch = store.gateway.watch(&store.key_prefix(), Revision(seen.0 + 1));
    let Ok(mut watch) = watch else {
        std::thread::sleep(RETRY);
        return true;
    };
    let leases = format!("{}{LEASE_PREFIX}", store.key_prefix());
    // A watch often ends without changes, because a silent connection is not trusted for long.
    while let Ok((revision, keys)) = watch.next() {
        let is_of_rack = |key: &Vec<u8>| !key.starts_with(leases.as_bytes());
        if revision > *seen && keys.iter().any(is_of_rack) && !reload(store, updates, seen, refused) {
            return false;
        }
        *seen = revision.max(*seen);
    }
    std::thread::sleep(RETRY);
    true
}

/// Reads the whole rack and sends it. Returns false if the receiver of updates is dropped.
fn reload(store: &RackStore, updates: &UpdateSender, seen: &mut Revision, refused: &mut String) -> bool {
    match store.load() {
        Ok(stored) => {
            *seen = stored.revision;
            refused.clear();
            updates.send(EtcdUpdate::Rack(Box::new(stored.file)))
        }
        Err(error @ EtcdError::Rack(_)) => {
            // The same error is reported once.
            let text = error.to_string();
            let is_new = text != *refused;
            *refused = text;
            !is_new || updates.send(EtcdUpdate::Refused(error))
        }
        // The caller retries soon.
        Err(_) => true,
    }
}
