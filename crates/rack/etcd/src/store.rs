//! The keys of a rack below a prefix, read and written as a whole.

use std::collections::BTreeMap;

use rack::{LEASE_PREFIX, Rack, RackFile};

use crate::error::EtcdError;
use crate::etcd_address::EtcdAddress;
use crate::gateway::{Condition, Entry, Gateway, Operation, Revision};
use crate::lease_record::LeaseValue;

/// Maximum number of keys of a rack, including leases; a transaction of etcd can contain 128 operations.
const KEYS_MAX: usize = 120;

/// A rack in etcd.
#[derive(Clone, Debug)]
pub struct RackStore {
    pub(crate) gateway: Gateway,
}

/// A consistent snapshot of a rack.
#[derive(Clone, Debug)]
pub struct StoredRack {
    /// The description of the rack.
    pub file: RackFile,
    /// The leases by name of the node.
    pub leases: BTreeMap<String, LeaseValue>,
    /// The revision of the snapshot.
    pub revision: Revision,
}

/// The result of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PushSummary {
    /// Number of keys created or modified.
    pub written: usize,
    /// Number of keys deleted.
    pub removed: usize,
}

impl RackStore {
    /// Returns the rack at an address. It does not connect yet.
    pub fn new(address: EtcdAddress) -> Self {
        Self { gateway: Gateway::new(address) }
    }

    /// Returns the address.
    pub fn address(&self) -> &EtcdAddress {
        self.gateway.address()
    }

    /// Returns the common prefix of all keys.
    pub(crate) fn key_prefix(&self) -> String {
        format!("{}/", self.address().prefix())
    }

    /// Reads and checks a rack.
    ///
    /// # Errors
    /// If etcd does not answer, or contains no valid rack.
    pub fn load(&self) -> Result<StoredRack, EtcdError> {
        let (revision, entries) = self.gateway.range(&self.key_prefix(), KEYS_MAX)?;
        let (mut keys, mut leases) = (Vec::new(), BTreeMap::new());
        for entry in entries {
            let name = self.name(&entry);
            match name.strip_prefix(LEASE_PREFIX) {
                Some(node) => _ = leases.insert(node.to_owned(), LeaseValue::parse(&entry.value)),
                None => keys.push((name, entry.value)),
            }
        }
        let file = RackFile::parse_keys(&self.address().location(), &keys)?.shown_as(self.address().to_string());
        // Leases of unknown nodes are ignored.
        leases.retain(|node, _| file.rack.node(node).is_some());
        Ok(StoredRack { file, leases, revision })
    }

    /// Replaces the description of the rack in one transaction.
    ///
    /// # Errors
    /// If etcd does not answer, if others write at the same time, or if the prefix contains other keys than a rack's.
    pub fn push(&self, rack: &Rack) -> Result<PushSummary, EtcdError> {
        let (_, entries) = self.gateway.range(&self.key_prefix(), KEYS_MAX)?;
        let mut before: BTreeMap<String, Entry> = entries.into_iter().map(|entry| (self.name(&entry), entry)).collect();
        before.retain(|name, _| !name.starts_with(LEASE_PREFIX));
        if let Some(name) = before.keys().find(|name| !rack::is_rack_key(name)) {
            let (address, name) = (self.address().location(), name.escape_debug());
            let reason = format!("the key {name} there does not belong to a rack; give another prefix, or remove it");
            return Err(EtcdError::PrefixInUse { address, reason });
        }
        let (mut conditions, mut operations) = (Vec::new(), Vec::new());
        let mut pushed = PushSummary { written: 0, removed: 0 };
        for (name, text) in rack.keys() {
            let key = self.key_prefix() + &name;
            let found = before.remove(&name);
            let modified = found.as_ref().map_or(Revision::default(), |entry| entry.modified);
            conditions.push(Condition { key: key.clone(), modified });
            if found.is_none_or(|entry| entry.value != text.as_bytes()) {
                operations.push(Operation::Put(key, text.into_bytes(), None));
                pushed.written += 1;
            }
        }
        for (name, entry) in before {
            let key = self.key_prefix() + &name;
            conditions.push(Condition { key: key.clone(), modified: entry.modified });
            operations.push(Operation::Delete(key));
            pushed.removed += 1;
        }
        let (is_done, _) = self.gateway.transact(&conditions, &operations)?;
        if is_done { Ok(pushed) } else { Err(EtcdError::Conflict { address: self.address().location() }) }
    }

    /// Returns the name of a key below the prefix.
    fn name(&self, entry: &Entry) -> String {
        let key = String::from_utf8_lossy(&entry.key);
        key.strip_prefix(&self.key_prefix()).unwrap_or(&key).to_owned()
    }
}
