//! The lease by which a monitor claims its node.

use rack::LEASE_PREFIX;

use crate::error::EtcdError;
use crate::gateway::{Condition, Entry, Gateway, LeaseId, Operation, Revision};
use crate::lease_record::{LeaseRecord, LeaseValue};
use crate::store::RackStore;

/// Attempts to write a key that others modify at the same time.
const ATTEMPTS_MAX: usize = 3;

/// A monitor's lease of its node.
#[derive(Debug)]
pub struct NodeLease {
    gateway: Gateway,
    node: String,
    key: String,
    ttl_s: u64,
    lease: Option<LeaseId>,
    written: Option<LeaseRecord>,
    /// The record to be written.
    pub record: LeaseRecord,
}

impl NodeLease {
    /// Claims a node.
    ///
    /// # Errors
    /// If etcd does not answer, or if another monitor holds the node.
    pub fn acquire(store: &RackStore, node: &str, ttl_s: u64, record: LeaseRecord) -> Result<Self, EtcdError> {
        let (gateway, key) = (store.gateway.clone(), format!("{}{LEASE_PREFIX}{node}", store.key_prefix()));
        let mut lease = Self { gateway, node: node.to_owned(), key, ttl_s, lease: None, written: None, record };
        lease.claim()?;
        Ok(lease)
    }

    /// Returns the time to live of the lease in seconds.
    pub fn ttl_s(&self) -> u64 {
        self.ttl_s
    }

    /// Renews the lease, and writes the record if it has changed. Returns false if the lease was lost and acquired
    /// again.
    ///
    /// # Errors
    /// If etcd does not answer, or if another monitor holds the node.
    pub fn renew(&mut self) -> Result<bool, EtcdError> {
        let lease = self.lease.filter(|_| self.written.is_some());
        let is_alive = match lease {
            Some(lease) => self.gateway.keep_alive(lease)?,
            None => false,
        };
        let entry = if is_alive { self.gateway.get(&self.key)? } else { None };
        // A key that was deleted, by hand or because the lease expired, is written again: this monitor still runs.
        let Some(entry) = entry.filter(|entry| entry.lease == lease) else {
            self.claim()?;
            return Ok(false);
        };
        if self.written.as_ref() != Some(&self.record) {
            self.write(entry.modified, lease)?;
        }
        Ok(true)
    }

    /// Revokes the lease.
    pub fn revoke(mut self) {
        if let Some(lease) = self.lease.take() {
            // If this fails, the lease expires by itself.
            let _ = self.gateway.revoke(lease);
        }
    }

    fn claim(&mut self) -> Result<(), EtcdError> {
        self.written = None;
        for _ in 0..ATTEMPTS_MAX {
            let entry = self.gateway.get(&self.key)?;
            if let Some(entry) = &entry {
                self.check_reclaimable(entry)?;
            }
            let former = self.lease.take();
            self.lease = Some(self.gateway.grant(self.ttl_s)?);
            let modified = entry.as_ref().map_or(Revision::default(), |entry| entry.modified);
            let is_written = self.write(modified, self.lease);
            for unused in [former, entry.and_then(|entry| entry.lease)].into_iter().flatten() {
                // Revoking fails if the lease has expired.
                let _ = self.gateway.revoke(unused);
            }
            if is_written? {
                return Ok(());
            }
        }
        Err(EtcdError::Conflict { address: self.gateway.address().location() })
    }

    fn write(&mut self, modified: Revision, lease: Option<LeaseId>) -> Result<bool, EtcdError> {
        let value = serde_json::to_vec(&self.record).expect("strings and numbers are JSON");
        let condition = Condition { key: self.key.clone(), modified };
        let (is_done, _) = self.gateway.transact(&[condition], &[Operation::Put(self.key.clone(), value, lease)])?;
        self.written = is_done.then(|| self.record.clone());
        Ok(is_done)
    }

    /// Checks that the key was written by an earlier monitor of the same directory. This process holds the directory's
    /// lock, so that monitor has ended.
    fn check_reclaimable(&self, entry: &Entry) -> Result<(), EtcdError> {
        let record = LeaseValue::parse(&entry.value);
        let (host, pid) = match &record {
            LeaseValue::Valid(record) if record.instance == self.record.instance => return Ok(()),
            LeaseValue::Valid(record) => (record.host.clone(), record.pid),
            LeaseValue::Malformed(what) => (format!("a machine that is not known: {what}"), 0),
        };
        let remedy = match entry.lease {
            Some(lease) => {
                let remaining_s = self.gateway.remaining_s(lease)?.max(1);
                format!("bring it down there, or try again in {remaining_s} s if it has ended")
            }
            None => format!("its key has no lease: remove {}", self.key),
        };
        Err(EtcdError::LeaseHeld { node: self.node.clone(), host, pid, remedy })
    }
}
