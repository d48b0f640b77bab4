//! A client of etcd's JSON gateway over HTTP, with the calls that a rack needs.
//!
//! In JSON, keys and values are base64 and 64-bit numbers are strings. If a member does not answer, the next member of
//! the address is tried.

use std::io::{BufRead, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use ureq::Agent;

use crate::error::EtcdError;
use crate::etcd_address::EtcdAddress;
use crate::printable::printable;
use crate::tls;

/// Limits for connecting to a member, and for its response.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
const RESPONSE_LIMIT: Duration = Duration::from_secs(2);
/// Silence after which a watch is started again, because the connection may be dead.
const WATCH_SILENCE: Duration = Duration::from_secs(60);
/// Maximum size in bytes of a response and of one line of a watch: twice a rack's keys and all leases.
const RESPONSE_BYTES_MAX: u64 = 4 << 20;

/// A revision of etcd's key space, which grows with each change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Revision(pub i64);

/// Identifier of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseId(pub i64);

/// A key-value pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: Vec<u8>,
    /// The value.
    pub value: Vec<u8>,
    /// Revision of the last modification.
    pub modified: Revision,
    /// The lease that the key is attached to.
    pub lease: Option<LeaseId>,
}

/// A condition of a transaction.
#[derive(Clone, Debug)]
pub struct Condition {
    /// The key.
    pub key: String,
    /// Expected revision of the last modification; 0 if the key must not exist.
    pub modified: Revision,
}

/// An operation of a transaction.
#[derive(Clone, Debug)]
pub enum Operation {
    /// Writes a key, optionally attached to a lease.
    Put(String, Vec<u8>, Option<LeaseId>),
    /// Deletes a key.
    Delete(String),
}

/// A client of an etcd cluster.
#[derive(Clone, Debug)]
pub struct Gateway {
    address: EtcdAddress,
    /// Index of the member that answered last.
    member: Arc<AtomicUsize>,
}

#[derive(Deserialize)]
struct Header {
    #[serde(deserialize_with = "number")]
    revision: i64,
}

#[derive(Deserialize)]
struct RangeResponse {
    header: Header,
    #[serde(default)]
    kvs: Vec<KeyValue>,
    #[serde(default)]
    more: bool,
}

#[derive(Deserialize)]
struct KeyValue {
    #[serde(deserialize_with = "bytes")]
    key: Vec<u8>,
    #[serde(default, deserialize_with = "bytes")]
    value: Vec<u8>,
    #[serde(default, deserialize_with = "number")]
    mod_revision: i64,
    #[serde(default, deserialize_with = "number")]
    lease: i64,
}

#[derive(Deserialize)]
struct TxnResponse {
    header: Header,
    #[serde(default)]
    succeeded: bool,
}

#[derive(Deserialize)]
struct LeaseResponse {
    #[serde(rename = "ID", default, deserialize_with = "number")]
    id: i64,
    #[serde(rename = "TTL", default, deserialize_with = "number")]
    ttl_s: i64,
}

/// A message of a streaming call.
#[derive(Deserialize)]
struct Streamed<T> {
    result: Option<T>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct WatchResponse {
    header: Header,
    #[serde(default)]
    canceled: bool,
    #[serde(default)]
    cancel_reason: String,
    #[serde(default)]
    events: Vec<WatchEvent>,
}

#[derive(Deserialize)]
struct WatchEvent {
    kv: KeyValue,
}

fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(|_| D::Error::custom(format!("{text:?} is not a number")))
}

fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(deserializer)?;
    BASE64.decode(&text).map_err(|error| D::Error::custom(format!("not base64: {error}")))
}

impl From<KeyValue> for Entry {
    fn from(found: KeyValue) -> Self {
        let lease = (found.lease != 0).then_some(LeaseId(found.lease));
        Self { key: found.key, value: found.value, modified: Revision(found.mod_revision), lease }
    }
}

/// Returns the end of the range of keys that begin with `prefix`.
fn prefix_end(prefix: &str) -> String {
    let mut end = prefix.to_owned();
    let last = end.pop().expect("a prefix ends with a slash");
    assert_eq!(last, '/', "a prefix ends with a slash");
    end.push('0'); // what comes after '/'
    end
}

impl Gateway {
    /// Returns a client. It does not connect yet.
    pub fn new(address: EtcdAddress) -> Self {
        Self { address, member: Arc::default() }
    }

    fn agent(&self) -> Result<Agent, EtcdError> {
        let wrong = |reason| EtcdError::Tls { address: self.address.location(), reason };
        let config = Agent::config_builder()
            // Proxies of the environment are meant for the web.
            .proxy(None)
            .max_redirects(0)
            .http_status_as_error(false)
            .max_idle_connections(0)
            .timeout_connect(Some(CONNECT_LIMIT))
            .timeout_global(Some(CONNECT_LIMIT + RESPONSE_LIMIT));
        let config = match self.address.tls() {
            Some(files) => config.tls_config(tls::config(files).map_err(wrong)?),
            None => config,
        };
        Ok(config.build().new_agent())
    }

    /// Returns the address of the rack.
    pub fn address(&self) -> &EtcdAddress {
        &self.address
    }

    /// Returns all keys that begin with `prefix`, which ends with a slash, at one revision.
    pub fn range(&self, prefix: &str, count_max: usize) -> Result<(Revision, Vec<Entry>), EtcdError> {
        let request =
            json!({ "key": BASE64.encode(prefix), "range_end": BASE64.encode(prefix_end(prefix)), "limit": count_max });
        let response: RangeResponse = self.call("kv/range", &request)?;
        if response.more || response.kvs.len() > count_max {
            return Err(self.unexpected(format!("more than {count_max} keys of one rack")));
        }
        let entries = response.kvs.into_iter().map(Entry::from).collect();
        Ok((Revision(response.header.revision), entries))
    }

    /// Returns one key, if it exists.
    pub fn get(&self, key: &str) -> Result<Option<Entry>, EtcdError> {
        let response: RangeResponse = self.call("kv/range", &json!({ "key": BASE64.encode(key) }))?;
        Ok(response.kvs.into_iter().next().map(Entry::from))
    }

    /// Executes all operations if all conditions hold. Returns whether they held, and the revision.
    pub fn transact(&self, conditions: &[Condition], operations: &[Operation]) -> Result<(bool, Revision), EtcdError> {
        let condition = |Condition { key, modified }: &Condition| {
            json!({ "key": BASE64.encode(key), "target": "MOD", "result": "EQUAL",
                "mod_revision": modified.0.to_string() })
        };
        let operation = |operation: &Operation| match operation {
            Operation::Put(key, value, lease) => {
                let lease = lease.map_or(0, |lease| lease.0).to_string();
                json!({ "request_put": { "key": BASE64.encode(key), "value": BASE64.encode(value), "lease": lease } })
            }
            Operation::Delete(key) => json!({ "request_delete_range": { "key": BASE64.encode(key) } }),
        };
        let compare: Vec<Value> = conditions.iter().map(condition).collect();
        let success: Vec<Value> = operations.iter().map(operation).collect();
        let response: TxnResponse = self.call("kv/txn", &json!({ "compare": compare, "success": success }))?;
        Ok((response.succeeded, Revision(response.header.revision)))
    }

    /// Grants a lease.
    pub fn grant(&self, ttl_s: u64) -> Result<LeaseId, EtcdError> {
        let response: LeaseResponse = self.call("lease/grant", &json!({ "TTL": ttl_s.to_string() }))?;
        if response.id == 0 {
            return Err(self.unexpected("a lease without a number"));
        }
        Ok(LeaseId(response.id))
    }

    /// Renews a lease. Returns whether it still existed.
    pub fn keep_alive(&self, lease: LeaseId) -> Result<bool, EtcdError> {
        let response: Streamed<LeaseResponse> = self.call("lease/keepalive", &json!({ "ID": lease.0.to_string() }))?;
        let response = response.result.ok_or_else(|| self.unexpected("no result for a lease"))?;
        Ok(response.ttl_s > 0)
    }

    /// Returns the remaining time to live of a lease in seconds; less than one if it does not exist.
    pub fn remaining_s(&self, lease: LeaseId) -> Result<i64, EtcdError> {
        let response: LeaseResponse = self.call("lease/timetolive", &json!({ "ID": lease.0.to_string() }))?;
        Ok(response.ttl_s)
    }

    /// Revokes a lease, which deletes its keys.
    pub fn revoke(&self, lease: LeaseId) -> Result<(), EtcdError> {
        self.call::<Value>("lease/revoke", &json!({ "ID": lease.0.to_string() })).map(drop)
    }

    /// Watches keys that begin with `prefix`, starting at a revision.
    pub fn watch(&self, prefix: &str, from: Revision) -> Result<Watch, EtcdError> {
        let create = json!({ "create_request": { "key": BASE64.encode(prefix),
            "range_end": BASE64.encode(prefix_end(prefix)), "start_revision": from.0.to_string() } });
        let response = self.post("watch", &create, true)?;
        let reader = response.into_body().into_with_config().limit(u64::MAX).reader();
        Ok(Watch { gateway: self.clone(), reader: Box::new(BufReader::new(reader)) })
    }

    fn call<T: DeserializeOwned>(&self, path: &str, request: &Value) -> Result<T, EtcdError> {
        let mut response = self.post(path, request, false)?;
        let status = response.status();
        let read = response.body_mut().with_config().limit(RESPONSE_BYTES_MAX).read_to_vec();
        let body = read.map_err(|error| self.unreachable(&error))?;
        let error_text =
            serde_json::from_slice::<Value>(&body).ok().and_then(|body| body["error"].as_str().map(printable));
        if let Some(reason) = error_text {
            return Err(EtcdError::Refused { address: self.address.location(), reason });
        }
        if !status.is_success() {
            return Err(self.unexpected(format!("HTTP status {}", status.as_u16())));
        }
        serde_json::from_slice(&body).map_err(|error| self.unexpected(printable(&error.to_string())))
    }

    /// Sends a request to the members in turn, starting with the one that answered last.
    fn post(&self, path: &str, body: &Value, is_stream: bool) -> Result<ureq::http::Response<ureq::Body>, EtcdError> {
        let (agent, members) = (self.agent()?, self.address.members());
        let scheme = if self.address.tls().is_some() { "https" } else { "http" };
        let first = self.member.load(Ordering::Relaxed);
        let mut failed = None;
        for index in (0..members.len()).map(|next| (first + next) % members.len()) {
            let request = agent.post(format!("{scheme}://{}/v3/{path}", members[index]));
            let request = request.header("Content-Type", "application/json");
            let request = match is_stream {
                true => request.config().timeout_global(None).timeout_per_read(Some(WATCH_SILENCE)).build(),
                false => request,
            };
            match request.send(body.to_string()) {
                Ok(response) => {
                    self.member.store(index, Ordering::Relaxed);
                    return Ok(response);
                }
                Err(error) => failed = Some(error),
            }
        }
        let error = failed.expect("an address has a member");
        Err(self.unreachable(&error))
    }

    fn unreachable(&self, error: &ureq::Error) -> EtcdError {
        if let ureq::Error::Io(error) = error
            && let Some(reason) = tls::failure_reason(error, self.address.tls().is_some())
        {
            return EtcdError::Tls { address: self.address.location(), reason };
        }
        let reason = match error {
            ureq::Error::Io(error) => error.to_string(),
            ureq::Error::Timeout(_) => "no answer in time".to_owned(),
            ureq::Error::BodyExceedsLimit(bytes) => return self.unexpected(format!("more than {bytes} bytes")),
            ureq::Error::Protocol(error) => return self.unexpected(printable(&error.to_string())),
            other => printable(&other.to_string()),
        };
        EtcdError::Unreachable { address: self.address.location(), reason }
    }

    fn unexpected(&self, what: impl Into<String>) -> EtcdError {
        EtcdError::UnexpectedResponse { address: self.address.location(), what: what.into() }
    }
}

/// A stream of changes.
pub struct Watch {
    gateway: Gateway,
    reader: Box<dyn BufRead + Send>,
}

impl Watch {
    /// Waits for the next changes. Returns their revision and the keys, none of them for etcd's acknowledgement of the
    /// watch.
    ///
    /// # Errors
    /// If the watch has ended. The caller then reads all keys and starts another watch.
    pub fn next(&mut self) -> Result<(Revision, Vec<Vec<u8>>), EtcdError> {
        let mut line = Vec::new();
        let read = self.reader.by_ref().take(RESPONSE_BYTES_MAX).read_until(b'\n', &mut line);
        let address = || self.gateway.address.location();
        read.map_err(|error| EtcdError::Unreachable { address: address(), reason: printable(&error.to_string()) })?;
        if line.last() != Some(&b'\n') {
            return Err(EtcdError::Unreachable { address: address(), reason: "a watch has ended".to_owned() });
        }
        let message: Streamed<WatchResponse> =
            serde_json::from_slice(&line).map_err(|error| self.gateway.unexpected(printable(&error.to_string())))?;
        let Some(response) = message.result else {
            let reason = message.error.map_or_else(String::new, |error| printable(&error.to_string()));
            return Err(EtcdError::Refused { address: address(), reason });
        };
        if response.canceled {
            return Err(EtcdError::Refused { address: address(), reason: printable(&response.cancel_reason) });
        }
        let keys = response.events.into_iter().map(|event| event.kv.key).collect();
        Ok((Revision(response.header.revision), keys))
    }
}
