//! etcd's JSON gateway: the calls that a rack needs, over HTTP.
//!
//! Keys and values are base64 in it, and numbers of 64 bits are text. A member that does not answer is followed by the
//! next one of the address.

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

use crate::{Address, EtcdError, tls};

/// How long a member may take to take a connection, and to answer.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// Silence after which a watch is begun anew: the connection may be dead.
const WATCH_SILENCE: Duration = Duration::from_secs(60);
/// Bytes of an answer, and of one line of a watch, at most: a rack's keys and all leases twice over.
const ANSWER_BYTES_MAX: u64 = 4 << 20;
/// Bytes of etcd's own words that are shown.
const SHOWN_BYTES_MAX: usize = 200;

/// A number of etcd's log: it grows with each change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Revision(pub i64);

/// A lease's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseId(pub i64);

/// A key and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: Vec<u8>,
    /// The value.
    pub value: Vec<u8>,
    /// When it was last changed.
    pub modified: Revision,
    /// The lease that it goes with.
    pub lease: Option<LeaseId>,
}

/// What must hold for a transaction to be done.
#[derive(Clone, Debug)]
pub struct Condition {
    /// The key.
    pub key: String,
    /// When it was last changed; 0 where it must not be there.
    pub modified: Revision,
}

/// What a transaction does.
#[derive(Clone, Debug)]
pub enum Operation {
    /// Writes a key, to go with a lease if need be.
    Put(String, Vec<u8>, Option<LeaseId>),
    /// Removes a key.
    Delete(String),
}

/// A client of one etcd.
#[derive(Clone, Debug)]
pub struct Gateway {
    address: Address,
    /// The member that answered last.
    member: Arc<AtomicUsize>,
}

#[derive(Deserialize)]
struct Header {
    #[serde(deserialize_with = "number")]
    revision: i64,
}

#[derive(Deserialize)]
struct RangeAnswer {
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
struct TxnAnswer {
    header: Header,
    #[serde(default)]
    succeeded: bool,
}

#[derive(Deserialize)]
struct LeaseAnswer {
    #[serde(rename = "ID", default, deserialize_with = "number")]
    id: i64,
    #[serde(rename = "TTL", default, deserialize_with = "number")]
    ttl_s: i64,
}

/// Calls that are streams answer so.
#[derive(Deserialize)]
struct Streamed<T> {
    result: Option<T>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct WatchAnswer {
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
    text.parse().map_err(|_| D::Error::custom(format!("{text:?} is no number")))
}

fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(deserializer)?;
    BASE64.decode(&text).map_err(|error| D::Error::custom(format!("no base64: {error}")))
}

impl From<KeyValue> for Entry {
    fn from(found: KeyValue) -> Self {
        let lease = (found.lease != 0).then_some(LeaseId(found.lease));
        Self { key: found.key, value: found.value, modified: Revision(found.mod_revision), lease }
    }
}

/// The first key behind all that begin with `prefix`.
fn end_of(prefix: &str) -> String {
    let mut end = prefix.to_owned();
    let last = end.pop().expect("a prefix ends with a slash");
    assert_eq!(last, '/', "a prefix ends with a slash");
    end.push('0'); // what comes after '/'
    end
}

impl Gateway {
    /// A client; nothing is asked yet.
    pub fn new(address: Address) -> Self {
        Self { address, member: Arc::default() }
    }

    fn agent(&self) -> Result<Agent, EtcdError> {
        let wrong = |reason| EtcdError::Tls { address: self.address.place(), reason };
        let config = Agent::config_builder()
            // What the environment says of proxies is for the web.
            .proxy(None)
            .max_redirects(0)
            .http_status_as_error(false)
            .max_idle_connections(0)
            .timeout_connect(Some(CONNECT_LIMIT))
            .timeout_global(Some(CONNECT_LIMIT + ANSWER_LIMIT));
        let config = match self.address.tls() {
            Some(files) => config.tls_config(tls::config(files).map_err(wrong)?),
            None => config,
        };
        Ok(config.build().new_agent())
    }

    /// Where the rack lies.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// All keys that begin with `prefix`, which ends with a slash, at one revision.
    pub fn range(&self, prefix: &str, count_max: usize) -> Result<(Revision, Vec<Entry>), EtcdError> {
        let asked =
            json!({ "key": BASE64.encode(prefix), "range_end": BASE64.encode(end_of(prefix)), "limit": count_max });
        let answer: RangeAnswer = self.call("kv/range", &asked)?;
        if answer.more || answer.kvs.len() > count_max {
            return Err(self.nonsense(format!("more than {count_max} keys of one rack")));
        }
        let entries = answer.kvs.into_iter().map(Entry::from).collect();
        Ok((Revision(answer.header.revision), entries))
    }

    /// One key, if it is there.
    pub fn get(&self, key: &str) -> Result<Option<Entry>, EtcdError> {
        let answer: RangeAnswer = self.call("kv/range", &json!({ "key": BASE64.encode(key) }))?;
        Ok(answer.kvs.into_iter().next().map(Entry::from))
    }

    /// Does all operations if all conditions hold; whether they did, and when it was.
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
        let answer: TxnAnswer = self.call("kv/txn", &json!({ "compare": compare, "success": success }))?;
        Ok((answer.succeeded, Revision(answer.header.revision)))
    }

    /// A new lease.
    pub fn grant(&self, ttl_s: u64) -> Result<LeaseId, EtcdError> {
        let answer: LeaseAnswer = self.call("lease/grant", &json!({ "TTL": ttl_s.to_string() }))?;
        if answer.id == 0 {
            return Err(self.nonsense("a lease without a number"));
        }
        Ok(LeaseId(answer.id))
    }

    /// Renews a lease; whether it still was one.
    pub fn keep(&self, lease: LeaseId) -> Result<bool, EtcdError> {
        let answer: Streamed<LeaseAnswer> = self.call("lease/keepalive", &json!({ "ID": lease.0.to_string() }))?;
        let answer = answer.result.ok_or_else(|| self.nonsense("nothing said of a lease"))?;
        Ok(answer.ttl_s > 0)
    }

    /// Seconds that a lease has left; less than one when it is none.
    pub fn left_s(&self, lease: LeaseId) -> Result<i64, EtcdError> {
        let answer: LeaseAnswer = self.call("lease/timetolive", &json!({ "ID": lease.0.to_string() }))?;
        Ok(answer.ttl_s)
    }

    /// Ends a lease, and with it its keys.
    pub fn revoke(&self, lease: LeaseId) -> Result<(), EtcdError> {
        self.call::<Value>("lease/revoke", &json!({ "ID": lease.0.to_string() })).map(drop)
    }

    /// Changes of keys that begin with `prefix`, from a revision on.
    pub fn watch(&self, prefix: &str, from: Revision) -> Result<Watch, EtcdError> {
        let create = json!({ "create_request": { "key": BASE64.encode(prefix),
            "range_end": BASE64.encode(end_of(prefix)), "start_revision": from.0.to_string() } });
        let response = self.post("watch", &create, true)?;
        let reader = response.into_body().into_with_config().limit(u64::MAX).reader();
        Ok(Watch { gateway: self.clone(), reader: Box::new(BufReader::new(reader)) })
    }

    fn call<T: DeserializeOwned>(&self, path: &str, asked: &Value) -> Result<T, EtcdError> {
        let mut response = self.post(path, asked, false)?;
        let status = response.status();
        let read = response.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_vec();
        let body = read.map_err(|error| self.unreachable(&error))?;
        let words = serde_json::from_slice::<Value>(&body).ok().and_then(|body| body["error"].as_str().map(shown));
        if let Some(reason) = words {
            return Err(EtcdError::Refused { address: self.address.place(), reason });
        }
        if !status.is_success() {
            return Err(self.nonsense(format!("HTTP status {}", status.as_u16())));
        }
        serde_json::from_slice(&body).map_err(|error| self.nonsense(shown(&error.to_string())))
    }

    /// Asks one member after the other, first the one that answered last.
    fn post(&self, path: &str, asked: &Value, is_stream: bool) -> Result<ureq::http::Response<ureq::Body>, EtcdError> {
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
            match request.send(asked.to_string()) {
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
            && let Some(reason) = tls::reason(error, self.address.tls().is_some())
        {
            return EtcdError::Tls { address: self.address.place(), reason };
        }
        let reason = match error {
            ureq::Error::Io(error) => error.to_string(),
            ureq::Error::Timeout(_) => "no answer in time".to_owned(),
            ureq::Error::BodyExceedsLimit(bytes) => return self.nonsense(format!("more than {bytes} bytes")),
            ureq::Error::Protocol(error) => return self.nonsense(shown(&error.to_string())),
            other => shown(&other.to_string()),
        };
        EtcdError::Unreachable { address: self.address.place(), reason }
    }

    fn nonsense(&self, what: impl Into<String>) -> EtcdError {
        EtcdError::Nonsense { address: self.address.place(), what: what.into() }
    }
}

/// A peer's words as they can be shown: one line, not too long.
pub fn shown(words: &str) -> String {
    let clean: String = words.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect();
    clean.chars().take(SHOWN_BYTES_MAX).collect()
}

/// Changes, as they come.
pub struct Watch {
    gateway: Gateway,
    reader: Box<dyn BufRead + Send>,
}

impl Watch {
    /// The keys that have changed next, and when; none where etcd only says that it watches.
    ///
    /// # Errors
    /// When the watch has ended, and is to be begun anew after a look at all keys.
    pub fn next(&mut self) -> Result<(Revision, Vec<Vec<u8>>), EtcdError> {
        let mut line = Vec::new();
        let read = self.reader.by_ref().take(ANSWER_BYTES_MAX).read_until(b'\n', &mut line);
        let address = || self.gateway.address.place();
        read.map_err(|error| EtcdError::Unreachable { address: address(), reason: shown(&error.to_string()) })?;
        if line.last() != Some(&b'\n') {
            return Err(EtcdError::Unreachable { address: address(), reason: "a watch has ended".to_owned() });
        }
        let said: Streamed<WatchAnswer> =
            serde_json::from_slice(&line).map_err(|error| self.gateway.nonsense(shown(&error.to_string())))?;
        let Some(answer) = said.result else {
            let reason = said.error.map_or_else(String::new, |error| shown(&error.to_string()));
            return Err(EtcdError::Refused { address: address(), reason });
        };
        if answer.canceled {
            return Err(EtcdError::Refused { address: address(), reason: shown(&answer.cancel_reason) });
        }
        let keys = answer.events.into_iter().map(|event| event.kv.key).collect();
        Ok((Revision(answer.header.revision), keys))
    }
}
