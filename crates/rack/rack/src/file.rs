//! Loading a rack, and locating errors in its text.

use std::path::Path;

use config::InvalidKey;

use crate::Rack;
use crate::check::check;
use crate::keys::Keys;
use crate::parse::{RackError, check_version, error_at, parse};

/// A rack together with the text that it was parsed from.
#[derive(Clone, Debug)]
pub struct RackFile {
    /// The parsed rack.
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
    /// If the file cannot be read or is invalid.
    pub fn read(path: &Path) -> Result<Self, RackError> {
        let bytes = config::read_bytes(path, "rack file", "--rack").map_err(RackError)?;
        Self::parse(path, &bytes)
    }

    /// Parses and checks the bytes of a file.
    ///
    /// # Errors
    /// If they are invalid.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, RackError> {
        let shown = path.display().to_string();
        let text = config::utf8(&shown, bytes).map_err(RackError)?;
        check_version(&shown, text)?;
        let rack: Rack = parse(&shown, text)?;
        Self { rack, shown, source: Source::File(text.to_owned()) }.checked()
    }

    /// Parses and checks the keys of a rack in etcd, without those of leases. `address` is their common prefix: an
    /// error names `ADDRESS/KEY`, and the line in the value of that key.
    ///
    /// # Errors
    /// If they are invalid.
    pub fn parse_keys(address: &str, keys: &[(String, Vec<u8>)]) -> Result<Self, RackError> {
        let (rack, keys) = Keys::parse(address, keys)?;
        Self { rack, shown: address.to_owned(), source: Source::Keys(keys) }.checked()
    }

    fn checked(self) -> Result<Self, RackError> {
        check(&self.rack).map_err(|InvalidKey { key, what }| self.error_at(&key, what))?;
        Ok(self)
    }

    /// Replaces the name under which errors show the file.
    #[must_use]
    pub fn shown_as(self, shown: String) -> Self {
        Self { shown, ..self }
    }

    /// Returns the name of the source: the file's path as it was given, or the address in etcd.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_and_a_directory_are_named_with_the_remedy() {
        for path in ["/no/such.toml", "/"] {
            let error = RackFile::read(Path::new(path)).unwrap_err().to_string();
            assert!(error.starts_with(path) && error.contains("--rack"), "{error}");
        }
    }

    #[test]
    fn an_error_names_the_line_that_is_not_utf_8() {
        let error = RackFile::parse(Path::new("r.toml"), b"version = 1\n\xff").unwrap_err().to_string();
        assert_eq!(error, "r.toml, line 2: not UTF-8; save the file as UTF-8");
    }
}
