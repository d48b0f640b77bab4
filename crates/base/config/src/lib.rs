//! Configuration files in TOML. Every error is one line that names the file, the line, the key, the value and the
//! remedy.
//!
//! * [`read`] and [`parse`] deserialize a whole file, [`read_text`] returns its text; [`nanoseconds`], [`bytes`] and
//!   [`meters`] are for serde's `deserialize_with` and accept a number or a text with a unit.
//! * [`read_bytes`], [`utf8`], [`check_version`] and [`parse_described`] are the steps of reading a file that describes
//!   a deployment: its size is bounded and its version is checked before its keys.
//! * [`InvalidKey`] is the error of a check of parsed values; [`message_at`] finds the line of its key.

mod invalid_key;
mod quantity;

use std::path::Path;

use serde::de::DeserializeOwned;
use thiserror::Error;
use toml::de::{DeTable, DeValue};

pub use invalid_key::{CheckResult, InvalidKey, check_name};
pub use quantity::{bytes, bytes_or_word, meters, nanoseconds, parse_nanoseconds};

/// Largest file that describes a deployment, in bytes.
pub const FILE_BYTES_MAX: u64 = 1 << 20;

/// Why a configuration file was refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{file}: {reason}; check the path")]
    Unreadable {
        /// Path of the file.
        file: String,
        /// The operating system's error.
        reason: String,
    },
    /// The file is not text; one line with file, line and remedy.
    #[error("{0}")]
    NotText(String),
    /// The file is not TOML, or a key is missing, unknown or has an invalid value.
    #[error("{file}, {location}: {what}")]
    Invalid {
        /// Path of the file.
        file: String,
        /// The line and the key, as far as they are known.
        location: String,
        /// The defect and the remedy.
        what: String,
    },
}

/// Reads and parses a file.
///
/// # Errors
/// When it cannot be read, is not TOML, or a key is missing, unknown or has an invalid value.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<T, ConfigError> {
    parse(&path.display().to_string(), &read_text(path)?)
}

/// Reads the text of a file.
///
/// # Errors
/// When it cannot be read or is not UTF-8.
pub fn read_text(path: &Path) -> Result<String, ConfigError> {
    let file = path.display().to_string();
    match std::fs::read(path) {
        Ok(bytes) => utf8(&file, &bytes).map(str::to_owned).map_err(ConfigError::NotText),
        Err(error) => Err(ConfigError::Unreadable { file, reason: error.to_string() }),
    }
}

/// Parses the text of a file; `file` is its name in errors.
///
/// # Errors
/// When it is not TOML, or a key is missing, unknown or has an invalid value.
pub fn parse<T: DeserializeOwned>(file: &str, text: &str) -> Result<T, ConfigError> {
    let invalid = |key: Option<String>, error: &toml::de::Error| ConfigError::Invalid {
        file: file.to_owned(),
        location: location(text, key, error),
        what: error.message().lines().collect::<Vec<_>>().join("; "),
    };
    let deserializer = toml::Deserializer::parse(text).map_err(|error| invalid(None, &error))?;
    serde_path_to_error::deserialize(deserializer).map_err(|error| {
        let key = Some(error.path().to_string()).filter(|path| path != ".");
        invalid(key, error.inner())
    })
}

fn location(text: &str, key: Option<String>, error: &toml::de::Error) -> String {
    let line = error.span().map(|span| format!("line {}", text[..span.start].matches('\n').count() + 1));
    let parts: Vec<String> = line.into_iter().chain(key).collect();
    if parts.is_empty() { "the whole file".to_owned() } else { parts.join(", ") }
}

/// Reads a file of at most [`FILE_BYTES_MAX`]. `kind` is what the file is, such as `rack file`, and `option` is the
/// command-line option that names it, such as `--rack`.
///
/// # Errors
/// One line, when it is not a regular file, is too large or cannot be read.
pub fn read_bytes(path: &Path, kind: &str, option: &str) -> Result<Vec<u8>, String> {
    let file = path.display();
    let unreadable = |error: std::io::Error| format!("{file}: {error}; check {option}");
    let metadata = std::fs::metadata(path).map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(format!("{file}: not a regular file; give a {kind} with {option}"));
    }
    if metadata.len() > FILE_BYTES_MAX {
        let bytes = metadata.len();
        return Err(format!("{file}: {bytes} bytes, a {kind} has at most {FILE_BYTES_MAX}; check {option}"));
    }
    std::fs::read(path).map_err(unreadable)
}

/// Returns the bytes of a file as text.
///
/// # Errors
/// One line with file and line, when they are not UTF-8.
pub fn utf8<'a>(file: &str, bytes: &'a [u8]) -> Result<&'a str, String> {
    std::str::from_utf8(bytes).map_err(|error| {
        let line = 1 + bytes[..error.valid_up_to()].iter().filter(|byte| **byte == b'\n').count();
        format!("{file}, line {line}: not UTF-8; save the file as UTF-8")
    })
}

/// Parses a text. `example` is the command that prints a valid file; errors of the parser that carry no remedy name it.
///
/// # Errors
/// One line with file, line and key.
pub fn parse_described<T: DeserializeOwned>(file: &str, text: &str, example: &str) -> Result<T, String> {
    parse(file, text).map_err(|error| {
        let line = error.to_string().replace(['\n', '\r'], " ");
        if line.contains(';') { line } else { format!("{line}; see '{example}'") }
    })
}

/// Returns the error message for an invalid value of `key`, such as `nodes[1].device`, in the text of a file.
pub fn message_at(file: &str, text: &str, key: &str, what: &str) -> String {
    match line_of(text, key) {
        Some(line) => format!("{file}, line {line}, {key}: {what}"),
        None => format!("{file}, {key}: {what}"),
    }
}

/// Checks that a text has `version = VERSION`. Files of another release may have keys that this one does not know, so
/// the version is checked before the rest. `example` is the command that prints a file of this release.
///
/// # Errors
/// One line with file, line, key and value.
pub fn check_version(file: &str, text: &str, version: u32, example: &str) -> Result<(), String> {
    // The parser refuses a text that is not TOML, with a better message.
    let Ok(table) = DeTable::parse(text) else { return Ok(()) };
    let example = format!("a file of this release begins as '{example}' prints it");
    let Some(found) = table.get_ref().get("version") else {
        return Err(format!("{file}, line 1, version: missing; write version = {version}, {example}"));
    };
    let shown = match found.get_ref() {
        DeValue::Integer(integer) => integer.to_string(),
        other => format!("a {}", other.type_str()),
    };
    if shown == version.to_string() {
        return Ok(());
    }
    let what = format!("{shown} belongs to another release, this one reads {version}; {example}");
    Err(message_at(file, text, "version", &what))
}

/// Returns the line, from 1, that sets `key`, or that of the nearest enclosing table or value.
pub fn line_of(text: &str, key: &str) -> Option<usize> {
    let document = DeTable::parse(text).ok()?;
    let mut segments = key.split(['.', '[']).map(|segment| segment.trim_end_matches(']'));
    let (name, first) = document.get_ref().get_key_value(segments.next()?)?;
    // A table with a header begins at the header, a value at its key.
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
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Walk {
        #[serde(deserialize_with = "nanoseconds")]
        walk_ns: f64,
        #[serde(deserialize_with = "bytes")]
        page_bytes: u64,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        walks: Vec<Walk>,
    }

    fn error(text: &str) -> String {
        parse::<File>("host.toml", text).unwrap_err().to_string()
    }

    #[test]
    fn quantities_may_carry_their_unit() {
        let walk = |ns: &str, bytes: &str| format!("[[walks]]\nwalk_ns = {ns}\npage_bytes = {bytes}\n");
        let text = [("290", "4096"), ("'0.5us'", "'2 MiB'"), ("1", "'2 MB'"), ("1", "'1.5KB'")];
        let text = text.map(|(ns, bytes)| walk(ns, bytes)).concat();
        let walks = parse::<File>("host.toml", &text).unwrap().walks;
        let found: Vec<(f64, u64)> = walks.iter().map(|walk| (walk.walk_ns, walk.page_bytes)).collect();
        assert_eq!(found, [(290.0, 4096), (500.0, 2 << 20), (1.0, 2_000_000), (1.0, 1500)]);
    }

    #[test]
    fn an_error_names_file_line_key_and_value() {
        for (text, expected) in [
            (
                "[[walks]]\nwalk_ns = \"290 KiB\"\npage_bytes = 4096\n",
                "host.toml, line 2, walks[0].walk_ns: '290 KiB' is not a time; write nanoseconds as in 290 or \
                 \"0.29 us\"",
            ),
            (
                "[[walks]]\nwalk_ns = -1\npage_bytes = 4096\n",
                "host.toml, line 2, walks[0].walk_ns: '-1' is not a time; write nanoseconds as in 290 or \"0.29 us\"",
            ),
            (
                "[[walks]]\nwalk_ns = 1\npage_bytes = 0.5\n",
                "host.toml, line 3, walks[0].page_bytes: '0.5' is not a size; write bytes as in 64 or \"2 KiB\"",
            ),
        ] {
            assert_eq!(error(text), expected);
        }
        for (text, words) in [
            ("[[walks]]\nwalk_us = 1\n", &["host.toml, line 2", "walk_us", "expected", "walk_ns"][..]),
            ("[[walks]]\nwalk_ns = 1\n", &["host.toml, line 1", "walks[0]", "missing", "page_bytes"]),
            ("[[walks]]\nwalk_ns = true\n", &["line 2", "walk_ns", "true", "nanoseconds"]),
            ("walks = 3", &["line 1", "walks", "3"]),
            ("walks = [", &["host.toml, line 1"]),
            ("", &["host.toml", "missing", "walks"]),
        ] {
            let error = error(text);
            assert!(!error.contains('\n'), "{error}");
            for word in words {
                assert!(error.contains(word), "{word:?} in {error:?}");
            }
        }
    }

    const TEXT: &str =
        "version = 1\n\n[device]\nbackend = \"shm\"\n\n[[nodes]]\nname = \"a\"\n\n[[nodes]]\nname = \"b\"\n";

    #[test]
    fn the_line_of_a_key_is_found_and_of_a_missing_key_its_table() {
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
    fn a_file_that_is_missing_or_no_text_is_named() {
        let error = read::<File>(Path::new("/no/such.toml")).unwrap_err().to_string();
        assert!(error.contains("/no/such.toml") && error.ends_with("check the path"), "{error}");
        let program = std::env::current_exe().unwrap();
        let error = read::<File>(&program).unwrap_err().to_string();
        assert_eq!(error, format!("{}, line 1: not UTF-8; save the file as UTF-8", program.display()));
    }
}
