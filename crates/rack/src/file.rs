//! Reading a rack, and saying where in its text something is wrong.

use std::path::Path;

use pcie::parameters::{self, ParametersError};
use serde::de::DeserializeOwned;
use thiserror::Error;
use toml::de::{DeTable, DeValue};

use crate::check::{Fault, check};
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
    match line_of(text, key) {
        Some(line) => RackError(format!("{file}, line {line}, {key}: {what}")),
        None => RackError(format!("{file}, {key}: {what}")),
    }
}

/// Errors of the parser end at times without a remedy.
fn one_line(error: &ParametersError) -> String {
    let line = error.to_string().replace(['\n', '\r'], " ");
    if line.contains(';') { line } else { format!("{line}; see 'crosslane rack example'") }
}

/// Another release's file may have keys that this one does not know: so its version is looked at first.
pub(crate) fn check_version(file: &str, text: &str) -> Result<(), RackError> {
    // What is no TOML at all is refused later, in better words.
    let Ok(table) = DeTable::parse(text) else { return Ok(()) };
    let example = "a file of this release begins as 'crosslane rack example' prints it";
    let Some(found) = table.get_ref().get("version") else {
        return Err(RackError(format!("{file}, line 1, version: missing; write version = {VERSION}, {example}")));
    };
    let shown = match found.get_ref() {
        DeValue::Integer(integer) => integer.to_string(),
        other => format!("a {}", other.type_str()),
    };
    if shown == VERSION.to_string() {
        return Ok(());
    }
    let what = format!("{shown} belongs to another release, this one reads {VERSION}; {example}");
    Err(fault(file, text, "version", &what))
}

/// The line that says `key`, or the nearest thing around it.
fn line_of(text: &str, key: &str) -> Option<usize> {
    let document = DeTable::parse(text).ok()?;
    let mut segments = key.split(['.', '[']).map(|segment| segment.trim_end_matches(']'));
    let (name, first) = document.get_ref().get_key_value(segments.next()?)?;
    // A table that stands under a header begins at the header, a value at its key.
    let (mut start, mut value) = (name.span().start.min(first.span().start), first.get_ref());
    for segment in segments {
        let next = match value {
            DeValue::Table(table) => {
                table.get_key_value(segment).map(|(name, value)| (name.span().start, value.get_ref()))
            }
            DeValue::Array(array) => segment
                .parse::<usize>()
                .ok()
                .and_then(|index| array.get(index))
                .map(|value| (value.span().start, value.get_ref())),
            _ => None,
        };
        match next {
            Some(next) => (start, value) = next,
            None => break,
        }
    }
    Some(1 + text[..start].matches('\n').count())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str =
        "version = 1\n\n[device]\nbackend = \"shm\"\n\n[[nodes]]\nname = \"a\"\n\n[[nodes]]\nname = \"b\"\n";

    #[test]
    fn a_key_is_found_in_its_line_and_a_missing_one_at_its_table() {
        for (key, line) in [
            ("version", Some(1)),
            ("device", Some(3)),
            ("device.backend", Some(4)),
            ("device.window_bytes", Some(3)),
            ("nodes[0].name", Some(7)),
            ("nodes[1].name", Some(10)),
            ("nodes[1].address", Some(9)),
            ("link.timing", None),
        ] {
            assert_eq!(line_of(TEXT, key), line, "{key}");
        }
    }

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
