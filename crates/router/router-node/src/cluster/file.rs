//! Reads a cluster file and locates errors in its text.

use std::fmt;
use std::path::Path;

use thiserror::Error;

use super::check::check;
use super::model::{Cluster, VERSION};
use config::InvalidKey;

/// The command that prints a valid cluster file.
const EXAMPLE: &str = "crosslane router example";

/// An error in a cluster file: one line with file, line, key, value and remedy.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct ClusterError(String);

/// A cluster and the text that it was parsed from.
#[derive(Clone, Debug)]
pub struct ClusterFile {
    /// The parsed cluster.
    pub cluster: Cluster,
    shown: String,
    text: String,
}

impl ClusterFile {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// Returns the first error in the file.
    pub fn read(path: &Path) -> Result<Self, ClusterError> {
        let bytes = config::read_bytes(path, "cluster file", "--cluster").map_err(ClusterError)?;
        Self::parse(&path.display().to_string(), &bytes)
    }

    /// Parses and checks the bytes of a file.
    ///
    /// # Errors
    /// Returns the first error in the text.
    pub fn parse(shown: &str, bytes: &[u8]) -> Result<Self, ClusterError> {
        let text = config::utf8(shown, bytes).map_err(ClusterError)?;
        config::check_version(shown, text, VERSION, EXAMPLE).map_err(ClusterError)?;
        let cluster: Cluster = config::parse_described(shown, text, EXAMPLE).map_err(ClusterError)?;
        let file = Self { cluster, shown: shown.to_owned(), text: text.to_owned() };
        check(&file.cluster).map_err(|InvalidKey { key, what }| file.error_at(&key, what))?;
        Ok(file)
    }

    /// Returns the path of the file as it was given.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// Returns the error for an invalid value of `key`, such as `nodes[1].ports[0].device`.
    pub fn error_at(&self, key: &str, what: impl fmt::Display) -> ClusterError {
        ClusterError(config::message_at(&self.shown, &self.text, key, &what.to_string()))
    }
}
