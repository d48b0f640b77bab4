//! Reading a cluster file, and saying where in its text something is wrong.

use std::fmt;
use std::path::Path;

use pcie::parameters;
use thiserror::Error;

use super::check::check;
use super::{Cluster, VERSION};
use rack::Fault;

/// Bytes of a cluster file at most.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// What prints a file to begin with.
const EXAMPLE: &str = "crosslane router example";

/// What is wrong with a cluster file: one line with file, line, key, value and remedy.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct ClusterError(String);

/// A cluster together with the text that it came from.
#[derive(Clone, Debug)]
pub struct ClusterFile {
    /// What the text says.
    pub cluster: Cluster,
    shown: String,
    text: String,
}

impl ClusterFile {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(path: &Path) -> Result<Self, ClusterError> {
        let shown = path.display();
        let unreadable = |error: std::io::Error| ClusterError(format!("{shown}: {error}; check --cluster"));
        let found = std::fs::metadata(path).map_err(unreadable)?;
        if !found.is_file() {
            return Err(ClusterError(format!("{shown}: no file; give a cluster file with --cluster")));
        }
        if found.len() > FILE_BYTES_MAX {
            let bytes = found.len();
            return Err(ClusterError(format!("{shown}: {bytes} bytes, more than a cluster file has; check --cluster")));
        }
        let bytes = std::fs::read(path).map_err(unreadable)?;
        Self::parse(&shown.to_string(), &bytes)
    }

    /// Parses and checks the bytes of a file.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn parse(shown: &str, bytes: &[u8]) -> Result<Self, ClusterError> {
        let text = std::str::from_utf8(bytes).map_err(|error| {
            let line = 1 + bytes[..error.valid_up_to()].iter().filter(|byte| **byte == b'\n').count();
            ClusterError(format!("{shown}, line {line}: not UTF-8; save the file as UTF-8"))
        })?;
        parameters::check_version(shown, text, VERSION, EXAMPLE).map_err(ClusterError)?;
        let cluster: Cluster = parameters::parse(shown, text).map_err(|error| ClusterError(one_line(&error)))?;
        let file = Self { cluster, shown: shown.to_owned(), text: text.to_owned() };
        check(&file.cluster).map_err(|Fault { key, what }| file.fault(&key, what))?;
        Ok(file)
    }

    /// The file's path as it was given.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// The error that something is wrong with the value of `key`, such as `nodes[1].ports[0].device`.
    pub fn fault(&self, key: &str, what: impl fmt::Display) -> ClusterError {
        ClusterError(parameters::fault(&self.shown, &self.text, key, &what.to_string()))
    }
}

/// Errors of the parser end at times without a remedy.
fn one_line(error: &parameters::ParametersError) -> String {
    let line = error.to_string().replace(['\n', '\r'], " ");
    if line.contains(';') { line } else { format!("{line}; see '{EXAMPLE}'") }
}
