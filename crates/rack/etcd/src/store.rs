//! A rack's keys below a prefix: read and written as a whole.

use std::collections::BTreeMap;

use rack::{LEASES, Rack, RackFile};

use crate::gateway::{Condition, Entry, Gateway, Operation, Revision};
use crate::lease::Lease;
use crate::{Address, EtcdError};

/// Keys of a rack at most, those of leases included; a transaction of etcd takes 128.
const KEYS_MAX: usize = 120;

/// A rack's place in etcd.
#[derive(Clone, Debug)]
pub struct Store {
    pub(crate) gateway: Gateway,
}

/// What lies there, all of it of one moment.
#[derive(Clone, Debug)]
pub struct Stored {
    /// The rack.
    pub file: RackFile,
    /// Who runs which node, by the node's name.
    pub leases: BTreeMap<String, Lease>,
    /// When that was.
    pub revision: Revision,
}

/// What a push has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pushed {
    /// Keys that are new or have another value.
    pub written: usize,
    /// Keys that are no more.
    pub removed: usize,
}

impl Store {
    /// A place; nothing is asked yet.
    pub fn new(address: Address) -> Self {
        Self { gateway: Gateway::new(address) }
    }

    /// Where it is.
    pub fn address(&self) -> &Address {
        self.gateway.address()
    }

    /// What all keys begin with.
    pub(crate) fn folder(&self) -> String {
        format!("{}/", self.address().prefix())
    }

    /// Reads and checks a rack.
    ///
    /// # Errors
    /// When etcd does not answer, or holds no good rack.
    pub fn load(&self) -> Result<Stored, EtcdError> {
        let (revision, entries) = self.gateway.range(&self.folder(), KEYS_MAX)?;
        let (mut keys, mut leases) = (Vec::new(), BTreeMap::new());
        for entry in entries {
            let name = self.name(&entry);
            match name.strip_prefix(LEASES) {
                Some(node) => _ = leases.insert(node.to_owned(), Lease::parse(&entry.value)),
                None => keys.push((name, entry.value)),
            }
        }
        let file = RackFile::parse_keys(&self.address().place(), &keys)?.shown_as(self.address().to_string());
        // What is a lease of no node says nothing.
        leases.retain(|node, _| file.rack.node(node).is_some());
        Ok(Stored { file, leases, revision })
    }

    /// Puts a rack there: writes what is new, removes what is no more, in one step.
    ///
    /// # Errors
    /// When etcd does not answer, others write at the same time, or something else than a rack lies there.
    pub fn push(&self, rack: &Rack) -> Result<Pushed, EtcdError> {
        let (_, entries) = self.gateway.range(&self.folder(), KEYS_MAX)?;
        let mut before: BTreeMap<String, Entry> = entries.into_iter().map(|entry| (self.name(&entry), entry)).collect();
        before.retain(|name, _| !name.starts_with(LEASES));
        let is_of_rack = |name: &str| rack::is_key(name);
        if let Some(name) = before.keys().find(|name| !is_of_rack(name)) {
            let (address, name) = (self.address().place(), name.escape_debug());
            let reason = format!("the key {name} there is none of a rack; give another prefix, or remove it");
            return Err(EtcdError::Occupied { address, reason });
        }
        let (mut conditions, mut operations) = (Vec::new(), Vec::new());
        let mut pushed = Pushed { written: 0, removed: 0 };
        for (name, text) in rack.keys() {
            let key = self.folder() + &name;
            let found = before.remove(&name);
            let modified = found.as_ref().map_or(Revision::default(), |entry| entry.modified);
            conditions.push(Condition { key: key.clone(), modified });
            if found.is_none_or(|entry| entry.value != text.as_bytes()) {
                operations.push(Operation::Put(key, text.into_bytes(), None));
                pushed.written += 1;
            }
        }
        for (name, entry) in before {
            let key = self.folder() + &name;
            conditions.push(Condition { key: key.clone(), modified: entry.modified });
            operations.push(Operation::Delete(key));
            pushed.removed += 1;
        }
        let (is_done, _) = self.gateway.transact(&conditions, &operations)?;
        if is_done { Ok(pushed) } else { Err(EtcdError::Race { address: self.address().place() }) }
    }

    /// A key's name below the prefix.
    fn name(&self, entry: &Entry) -> String {
        let key = String::from_utf8_lossy(&entry.key);
        key.strip_prefix(&self.folder()).unwrap_or(&key).to_owned()
    }
}
