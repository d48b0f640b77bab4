//! Who runs a node: a key that goes with its monitor's lease.

use std::path::Path;

use rack::LEASES;
use serde::{Deserialize, Serialize};

use crate::EtcdError;
use crate::gateway::{Condition, Entry, Gateway, LeaseId, Operation, Revision};
use crate::store::Store;

/// The version of what stands in the key.
const VERSION: u32 = 1;
/// Bytes of the value, letters of a word in it and links at most.
const VALUE_BYTES_MAX: usize = 16 << 10;
const WORD_LETTERS_MAX: usize = 64;
const LINKS_MAX: usize = rack::NODES_MAX;
/// How often a key that changes meanwhile is tried.
const TRIES_MAX: usize = 3;
/// What tells this kernel's run from any other.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// What a monitor says of itself in its key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    version: u32,
    /// Its machine.
    pub host: String,
    /// Its process there.
    pub pid: u32,
    /// When it started, since 1970.
    pub started_at_ns: u64,
    /// How its links are.
    pub links: Vec<LinkState>,
    /// The node's directory, on this run of this kernel: only one monitor at a time has it.
    place: String,
}

/// How a link is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkState {
    /// The other node.
    pub peer: String,
    /// `down`, `training` or `up`.
    pub state: String,
}

/// A lease as others see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lease {
    /// A monitor holds it.
    Held(Held),
    /// What stands there is not what a monitor writes.
    Unreadable(String),
}

impl Lease {
    /// What a value says.
    pub fn parse(value: &[u8]) -> Self {
        let bytes = value.len();
        if bytes > VALUE_BYTES_MAX {
            return Self::Unreadable(format!("{bytes} bytes are no lease"));
        }
        match serde_json::from_slice::<Held>(value) {
            Ok(held) if held.version != VERSION => Self::Unreadable(format!("of another release ({})", held.version)),
            Ok(held) if !held.is_sane() => Self::Unreadable("words that no monitor writes".to_owned()),
            Ok(held) => Self::Held(held),
            Err(error) => Self::Unreadable(crate::gateway::shown(&error.to_string())),
        }
    }
}

impl Held {
    /// What the monitor of the node in `directory` says, which is this process and holds the directory's lock.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn of(directory: &Path, started_at_ns: u64) -> Result<Self, EtcdError> {
        let failed = |what: &Path, reason: String| EtcdError::System { what: what.display().to_string(), reason };
        let boot_id =
            std::fs::read_to_string(BOOT_ID).map_err(|error| failed(Path::new(BOOT_ID), error.to_string()))?;
        let found = rustix::fs::stat(directory).map_err(|error| failed(directory, error.to_string()))?;
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let letters = name.chars().filter(char::is_ascii_graphic).take(WORD_LETTERS_MAX);
        Ok(Self {
            version: VERSION,
            host: letters.collect(),
            pid: std::process::id(),
            started_at_ns,
            links: Vec::new(),
            place: format!("{} {}:{}", boot_id.trim(), found.st_dev, found.st_ino),
        })
    }

    fn is_sane(&self) -> bool {
        let is_word = |word: &str| word.len() <= WORD_LETTERS_MAX && word.bytes().all(|byte| byte.is_ascii_graphic());
        let links = self.links.iter().all(|link| is_word(&link.peer) && is_word(&link.state));
        is_word(&self.host) && self.links.len() <= LINKS_MAX && links
    }
}

/// A monitor's hold on its node.
#[derive(Debug)]
pub struct Tenure {
    gateway: Gateway,
    node: String,
    key: String,
    ttl_s: u64,
    lease: Option<LeaseId>,
    written: Option<Held>,
    /// What the key is to say.
    pub held: Held,
}

impl Tenure {
    /// Takes a node, whose lease nobody else may hold.
    ///
    /// # Errors
    /// When etcd does not answer, or somebody else holds it.
    pub fn take(store: &Store, node: &str, ttl_s: u64, held: Held) -> Result<Self, EtcdError> {
        let (gateway, key) = (store.gateway.clone(), format!("{}{LEASES}{node}", store.folder()));
        let mut tenure = Self { gateway, node: node.to_owned(), key, ttl_s, lease: None, written: None, held };
        tenure.claim()?;
        Ok(tenure)
    }

    /// How long a lease lasts without a sign of the monitor.
    pub fn ttl_s(&self) -> u64 {
        self.ttl_s
    }

    /// Renews the lease, and writes what has changed; false where the lease was lost and is taken anew.
    ///
    /// # Errors
    /// As [`Tenure::take`].
    pub fn keep(&mut self) -> Result<bool, EtcdError> {
        let lease = self.lease.filter(|_| self.written.is_some());
        let is_kept = match lease {
            Some(lease) => self.gateway.keep(lease)?,
            None => false,
        };
        let entry = if is_kept { self.gateway.get(&self.key)? } else { None };
        // Whoever removes the key, by hand or after the lease has ended, has not ended this monitor.
        let Some(entry) = entry.filter(|entry| entry.lease == lease) else {
            self.claim()?;
            return Ok(false);
        };
        if self.written.as_ref() != Some(&self.held) {
            self.write(entry.modified, lease)?;
        }
        Ok(true)
    }

    /// Gives the node up.
    pub fn end(mut self) {
        if let Some(lease) = self.lease.take() {
            // If it fails the lease ends by itself.
            let _ = self.gateway.revoke(lease);
        }
    }

    fn claim(&mut self) -> Result<(), EtcdError> {
        self.written = None;
        for _ in 0..TRIES_MAX {
            let entry = self.gateway.get(&self.key)?;
            if let Some(entry) = &entry {
                self.check_ours(entry)?;
            }
            let former = self.lease.take();
            self.lease = Some(self.gateway.grant(self.ttl_s)?);
            let modified = entry.as_ref().map_or(Revision::default(), |entry| entry.modified);
            let is_written = self.write(modified, self.lease);
            for unused in [former, entry.and_then(|entry| entry.lease)].into_iter().flatten() {
                // One that has ended already cannot be revoked.
                let _ = self.gateway.revoke(unused);
            }
            if is_written? {
                return Ok(());
            }
        }
        Err(EtcdError::Race { address: self.gateway.address().place() })
    }

    fn write(&mut self, modified: Revision, lease: Option<LeaseId>) -> Result<bool, EtcdError> {
        let value = serde_json::to_vec(&self.held).expect("words and numbers are JSON");
        let condition = Condition { key: self.key.clone(), modified };
        let (is_done, _) = self.gateway.transact(&[condition], &[Operation::Put(self.key.clone(), value, lease)])?;
        self.written = is_done.then(|| self.held.clone());
        Ok(is_done)
    }

    /// That a key is of an earlier monitor in the same place: this one holds that place's lock, so the other has ended.
    fn check_ours(&self, entry: &Entry) -> Result<(), EtcdError> {
        let held = Lease::parse(&entry.value);
        let (host, pid) = match &held {
            Lease::Held(held) if held.place == self.held.place => return Ok(()),
            Lease::Held(held) => (held.host.clone(), held.pid),
            Lease::Unreadable(what) => (format!("a machine that is not known: {what}"), 0),
        };
        let remedy = match entry.lease {
            Some(lease) => {
                let left_s = self.gateway.left_s(lease)?.max(1);
                format!("bring it down there, or try again in {left_s} s if it has ended")
            }
            None => format!("its key has no lease: remove {}", self.key),
        };
        Err(EtcdError::Taken { node: self.node.clone(), host, pid, remedy })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_read_as_a_monitor_writes_it_and_anything_else_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let mut held = Held::of(folder.path(), 5).unwrap();
        held.links.push(LinkState { peer: "b".to_owned(), state: "up".to_owned() });
        let text = |held: &Held| serde_json::to_string(held).unwrap();
        assert_eq!(Lease::parse(text(&held).as_bytes()), Lease::Held(held.clone()));
        assert_eq!(Held::of(folder.path(), 5).unwrap().place, held.place);
        assert_ne!(Held::of(tempfile::tempdir().unwrap().path(), 5).unwrap().place, held.place);
        let mut others = vec![String::new(), "{}".to_owned(), "\u{7f}".to_owned(), "9".repeat(1 << 20)];
        others.push(text(&Held { version: 2, ..held.clone() }));
        others.push(text(&Held { host: "a\u{1b}[2J".to_owned(), ..held.clone() }));
        others.push(text(&Held { host: "h".repeat(65), ..held.clone() }));
        others.push(text(&Held { links: vec![held.links[0].clone(); 33], ..held }));
        for other in others {
            assert!(matches!(Lease::parse(other.as_bytes()), Lease::Unreadable(_)), "{other}");
        }
    }
}
