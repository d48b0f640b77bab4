//! Reading a rack, and saying where in its text something is wrong.

use std::path::Path;

use pcie::parameters::{self, ParametersError};
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::check::check;
use crate::fault::Fault;
use crate::keys::Keys;
use crate::{Rack, VERSION};

/// Bytes of a rack file at most.
pub(crate) const FILE_BYTES_MAX: u64 = 1 << 20;

/// What is wrong with a rack file, or with the keys of a rack: one line with file, line, key, value and remedy.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct RackError(pub(crate) String);

/// A rack together with the text that it came from.
#[derive(Clone, Debug)]
pub struct RackFile {
    /// What the text says.
    pub rack: Rack,
    /// The file's path as it was given, or the address in etcd.
    shown: String,
    source: Source,
}

#[derive(Clone, Debug)]
enum Source {
    File(String),
    Keys(Keys),
}

impl RackFile {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(path: &Path) -> Result<Self, RackError> {
        let shown = path.display();
        let unreadable = |error: std::io::Error| RackError(format!("{shown}: {error}; check --rack"));
        let found = std::fs::metadata(path).map_err(unreadable)?;
        if !found.is_file() {
            return Err(RackError(format!("{shown}: no file; give a rack file with --rack")));
        }
        if found.len() > FILE_BYTES_MAX {
            let bytes = found.len();
            return Err(RackError(format!("{shown}: {bytes} bytes, more than a rack file has; check --rack")));
        }
        let bytes = std::fs::read(path).map_err(unreadable)?;
        Self::parse(path, &bytes)
    }

    /// Parses and checks the bytes of a file.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, RackError> {
        let shown = path.display().to_string();
        let text = text_of(&shown, bytes)?;
        check_version(&shown, text)?;
        let rack: Rack = parse(&shown, text)?;
        Self { rack, shown, source: Source::File(text.to_owned()) }.checked()
    }

    /// Parses and checks the keys of a rack in etcd, without those of leases. `address` is where they lie: an error
    /// names `ADDRESS/KEY`, and the line in that key's value.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn parse_keys(address: &str, keys: &[(String, Vec<u8>)]) -> Result<Self, RackError> {
        let (rack, keys) = Keys::parse(address, keys)?;
        Self { rack, shown: address.to_owned(), source: Source::Keys(keys) }.checked()
    }

    fn checked(self) -> Result<Self, RackError> {
        check(&self.rack).map_err(|Fault { key, what }| self.fault(&key, what))?;
        Ok(self)
    }

    /// The same, read elsewhere than where it is from.
    #[must_use]
    pub fn shown_as(self, shown: String) -> Self {
        Self { shown, ..self }
    }

    /// Where it was read: the file's path as it was given, or the address in etcd.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// The error that something is wrong with the value of `key`, such as `nodes[1].device`.
    pub fn fault(&self, key: &str, what: impl std::fmt::Display) -> RackError {
        let what = what.to_string();
        match &self.source {
            Source::File(text) => fault(&self.shown, text, key, &what),
            Source::Keys(keys) => keys.fault(&self.shown, &self.rack, key, &what),
        }
    }
}

/// Text is UTF-8.
pub(crate) fn text_of<'a>(shown: &str, bytes: &'a [u8]) -> Result<&'a str, RackError> {
    std::str::from_utf8(bytes).map_err(|error| {
        let line = 1 + bytes[..error.valid_up_to()].iter().filter(|byte| **byte == b'\n').count();
        RackError(format!("{shown}, line {line}: not UTF-8; save the file as UTF-8"))
    })
}

/// What a text says, whatever it is of.
pub(crate) fn parse<T: DeserializeOwned>(shown: &str, text: &str) -> Result<T, RackError> {
    parameters::parse(shown, text).map_err(|error| RackError(one_line(&error)))
}

pub(crate) fn fault(file: &str, text: &str, key: &str, what: &str) -> RackError {
    RackError(parameters::fault(file, text, key, what))
}

/// Errors of the parser end at times without a remedy.
fn one_line(error: &ParametersError) -> String {
    let line = error.to_string().replace(['\n', '\r'], " ");
    if line.contains(';') { line } else { format!("{line}; see 'crosslane rack example'") }
}

/// Another release's file may have keys that this one does not know: so its version is looked at first.
pub(crate) fn check_version(file: &str, text: &str) -> Result<(), RackError> {
    parameters::check_version(file, text, VERSION, "crosslane rack example").map_err(RackError)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_there_or_no_file_is_named_with_its_remedy() {
        for path in ["/no/such.toml", "/"] {
            let error = RackFile::read(Path::new(path)).unwrap_err().to_string();
            assert!(error.starts_with(path) && error.contains("--rack"), "{error}");
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_found_in_their_line() {
        let error = RackFile::parse(Path::new("r.toml"), b"version = 1\n\xff").unwrap_err().to_string();
        assert_eq!(error, "r.toml, line 2: not UTF-8; save the file as UTF-8");
    }
}
