//! Reading a rack, and saying where in its text something is wrong.

use std::path::Path;

use config::InvalidKey;
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::check::check;
use crate::keys::Keys;
use crate::{Rack, VERSION};

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
        let bytes = config::read_bytes(path, "rack file", "--rack").map_err(RackError)?;
        Self::parse(path, &bytes)
    }

    /// Parses and checks the bytes of a file.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, RackError> {
        let shown = path.display().to_string();
        let text = config::utf8(&shown, bytes).map_err(RackError)?;
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
        check(&self.rack).map_err(|InvalidKey { key, what }| self.error_at(&key, what))?;
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

    /// Returns the error for an invalid value of `key`, such as `nodes[1].device`.
    pub fn error_at(&self, key: &str, what: impl std::fmt::Display) -> RackError {
        let what = what.to_string();
        match &self.source {
            Source::File(text) => error_at(&self.shown, text, key, &what),
            Source::Keys(keys) => keys.error_at(&self.shown, &self.rack, key, &what),
        }
    }
}

/// The command that prints a valid rack file.
const EXAMPLE: &str = "crosslane rack example";

pub(crate) fn parse<T: DeserializeOwned>(shown: &str, text: &str) -> Result<T, RackError> {
    config::parse_described(shown, text, EXAMPLE).map_err(RackError)
}

pub(crate) fn check_version(file: &str, text: &str) -> Result<(), RackError> {
    config::check_version(file, text, VERSION, EXAMPLE).map_err(RackError)
}

pub(crate) fn error_at(file: &str, text: &str, key: &str, what: &str) -> RackError {
    RackError(config::message_at(file, text, key, what))
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
