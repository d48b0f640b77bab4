//! The record that a monitor keeps in its node's lease key.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::EtcdError;
use crate::printable::printable;

/// Version of the record.
const VERSION: u32 = 1;
/// Limits of the value in bytes, of a string in it in bytes, and of its links.
const VALUE_BYTES_MAX: usize = 16 << 10;
const WORD_BYTES_MAX: usize = 64;
const LINKS_MAX: usize = rack::NODES_MAX;
/// Identifies this boot of the kernel.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A monitor's description of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRecord {
    version: u32,
    /// Host name.
    pub host: String,
    /// Process number.
    pub pid: u32,
    /// Start time in nanoseconds since 1970.
    pub started_at_ns: u64,
    /// States of the node's links.
    pub links: Vec<LinkState>,
    /// Boot id of the kernel, and device and inode of the node's directory, which only one monitor can lock.
    #[serde(rename = "place")]
    pub(crate) instance: String,
}

/// State of a link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkState {
    /// Name of the other node.
    pub peer: String,
    /// `down`, `training` or `up`.
    pub state: String,
}

/// The value of a lease key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseValue {
    /// The record of a monitor.
    Valid(LeaseRecord),
    /// The value is not a valid record; the text says why.
    Malformed(String),
}

impl LeaseValue {
    /// Parses a value.
    pub fn parse(value: &[u8]) -> Self {
        let bytes = value.len();
        if bytes > VALUE_BYTES_MAX {
            return Self::Malformed(format!("{bytes} bytes are not a lease record"));
        }
        match serde_json::from_slice::<LeaseRecord>(value) {
            Ok(record) if record.version != VERSION => {
                Self::Malformed(format!("of another release ({})", record.version))
            }
            Ok(record) if !record.is_valid() => Self::Malformed("values that no monitor writes".to_owned()),
            Ok(record) => Self::Valid(record),
            Err(error) => Self::Malformed(printable(&error.to_string())),
        }
    }
}

impl LeaseRecord {
    /// Returns the record of this process, which holds the lock of the node in `directory`.
    ///
    /// # Errors
    /// If the boot id or the directory cannot be read.
    pub fn of(directory: &Path, started_at_ns: u64) -> Result<Self, EtcdError> {
        let failed = |what: &Path, reason: String| EtcdError::System { what: what.display().to_string(), reason };
        let boot_id =
            std::fs::read_to_string(BOOT_ID).map_err(|error| failed(Path::new(BOOT_ID), error.to_string()))?;
        let found = rustix::fs::stat(directory).map_err(|error| failed(directory, error.to_string()))?;
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let letters = name.chars().filter(char::is_ascii_graphic).take(WORD_BYTES_MAX);
        Ok(Self {
            version: VERSION,
            host: letters.collect(),
            pid: std::process::id(),
            started_at_ns,
            links: Vec::new(),
            instance: format!("{} {}:{}", boot_id.trim(), found.st_dev, found.st_ino),
        })
    }

    fn is_valid(&self) -> bool {
        let is_word = |word: &str| word.len() <= WORD_BYTES_MAX && word.bytes().all(|byte| byte.is_ascii_graphic());
        let links = self.links.iter().all(|link| is_word(&link.peer) && is_word(&link.state));
        is_word(&self.host) && self.links.len() <= LINKS_MAX && links
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_back_and_any_other_value_is_malformed() {
        let folder = tempfile::tempdir().unwrap();
        let mut record = LeaseRecord::of(folder.path(), 5).unwrap();
        record.links.push(LinkState { peer: "b".to_owned(), state: "up".to_owned() });
        let text = |record: &LeaseRecord| serde_json::to_string(record).unwrap();
        assert_eq!(LeaseValue::parse(text(&record).as_bytes()), LeaseValue::Valid(record.clone()));
        assert_eq!(LeaseRecord::of(folder.path(), 5).unwrap().instance, record.instance);
        assert_ne!(LeaseRecord::of(tempfile::tempdir().unwrap().path(), 5).unwrap().instance, record.instance);
        let mut others = vec![String::new(), "{}".to_owned(), "\u{7f}".to_owned(), "9".repeat(1 << 20)];
        others.push(text(&LeaseRecord { version: 2, ..record.clone() }));
        others.push(text(&LeaseRecord { host: "a\u{1b}[2J".to_owned(), ..record.clone() }));
        others.push(text(&LeaseRecord { host: "h".repeat(65), ..record.clone() }));
        others.push(text(&LeaseRecord { links: vec![record.links[0].clone(); 33], ..record }));
        for other in others {
            assert!(matches!(LeaseValue::parse(other.as_bytes()), LeaseValue::Malformed(_)), "{other}");
        }
    }
}
