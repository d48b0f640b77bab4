//! Parameter files in TOML: what is wrong in one is said in a line with file, place, key and value.

use std::fmt;
use std::path::Path;

use serde::de::{DeserializeOwned, Deserializer, Error, Visitor};
use thiserror::Error;
use toml::de::{DeTable, DeValue};

/// What is wrong in a file.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ParametersError {
    /// It cannot be read.
    #[error("{file}: {reason}; check the path")]
    Unreadable {
        /// Its path.
        file: String,
        /// Why, in the system's words.
        reason: String,
    },
    /// What it says makes no sense.
    #[error("{file}, {place}: {what}")]
    Senseless {
        /// Its path.
        file: String,
        /// Line and key, as far as known.
        place: String,
        /// What is wrong and what would be right.
        what: String,
    },
}

/// Reads and parses a file.
///
/// # Errors
/// When it cannot be read, is no TOML or lacks, misnames or misuses a key.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<T, ParametersError> {
    let file = path.display().to_string();
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&file, &text),
        Err(error) => Err(ParametersError::Unreadable { file, reason: error.to_string() }),
    }
}

/// Parses the text of a file.
///
/// # Errors
/// When it is no TOML or lacks, misnames or misuses a key.
pub fn parse<T: DeserializeOwned>(file: &str, text: &str) -> Result<T, ParametersError> {
    let senseless = |key: Option<String>, error: &toml::de::Error| ParametersError::Senseless {
        file: file.to_owned(),
        place: place(text, key, error),
        what: error.message().lines().collect::<Vec<_>>().join("; "),
    };
    let deserializer = toml::Deserializer::parse(text).map_err(|error| senseless(None, &error))?;
    serde_path_to_error::deserialize(deserializer).map_err(|error| {
        let key = Some(error.path().to_string()).filter(|path| path != ".");
        senseless(key, error.inner())
    })
}

fn place(text: &str, key: Option<String>, error: &toml::de::Error) -> String {
    let line = error.span().map(|span| format!("line {}", text[..span.start].matches('\n').count() + 1));
    let places: Vec<String> = line.into_iter().chain(key).collect();
    if places.is_empty() { "the whole of it".to_owned() } else { places.join(", ") }
}

/// The error that something is wrong with the value of `key`, such as `nodes[1].device`, in the text of a file.
pub fn fault(file: &str, text: &str, key: &str, what: &str) -> String {
    match line_of(text, key) {
        Some(line) => format!("{file}, line {line}, {key}: {what}"),
        None => format!("{file}, {key}: {what}"),
    }
}

/// That a text says `version = VERSION`: another release's may have keys that this one does not know, so that its
/// version is to be looked at before the rest. `example` is the command that prints a file of this release.
///
/// # Errors
/// One line with file, line, key and value.
pub fn check_version(file: &str, text: &str, version: u32, example: &str) -> Result<(), String> {
    // What is no TOML at all is refused later, in better words.
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

/// A dimension that quantities in files have: names of its units, and how many of the first each is.
struct Dimension {
    what: &'static str,
    units: &'static [(&'static str, f64)],
    example: &'static str,
}

const TIME: Dimension = Dimension {
    what: "time",
    units: &[("ns", 1.0), ("ps", 1e-3), ("us", 1e3), ("ms", 1e6), ("s", 1e9)],
    example: "write nanoseconds as in 290 or \"0.29 us\"",
};
const BYTES: Dimension = Dimension {
    what: "size",
    units: &[("B", 1.0), ("KiB", 1024.0), ("MiB", 1_048_576.0), ("GiB", 1_073_741_824.0)],
    example: "write bytes as in 64 or \"2 KiB\"",
};

const LENGTH: Dimension = Dimension {
    what: "length",
    units: &[("m", 1.0), ("cm", 1e-2), ("mm", 1e-3)],
    example: "write meters as in 0.25 or \"25 cm\"",
};

/// A length of zero or more in meters: a number or, with its unit, `"25 cm"`. For serde's `deserialize_with`.
///
/// # Errors
/// For anything else.
pub fn meters<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    deserializer.deserialize_any(Quantity(&LENGTH))
}

/// A time of zero or more in nanoseconds: a number or, with its unit, `"0.29 us"`. For serde's `deserialize_with`.
///
/// # Errors
/// For anything else.
pub fn nanoseconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    deserializer.deserialize_any(Quantity(&TIME))
}

/// A whole number of bytes: a number or, with its unit, `"2 KiB"`. For serde's `deserialize_with`.
///
/// # Errors
/// For anything else.
pub fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    whole(deserializer.deserialize_any(Quantity(&BYTES))?)
}

/// As [`bytes`], or a word that stands for bytes known elsewhere: `None`.
///
/// # Errors
/// For anything else.
pub fn bytes_or_word<'de, D: Deserializer<'de>>(deserializer: D, word: &'static str) -> Result<Option<u64>, D::Error> {
    deserializer.deserialize_any(QuantityOrWord(&BYTES, word))?.map(whole).transpose()
}

fn whole<E: Error>(bytes: f64) -> Result<u64, E> {
    if bytes.fract() == 0.0 { Ok(bytes as u64) } else { Err(BYTES.refuse(bytes)) }
}

impl Dimension {
    fn refuse<E: Error>(&self, value: impl fmt::Display) -> E {
        E::custom(format!("'{value}' is no {}; {}", self.what, self.example))
    }

    fn parse(&self, text: &str) -> Option<f64> {
        let number = text.trim_end_matches(|last: char| last.is_alphabetic());
        let unit = &text[number.len()..];
        let (_, factor) = self.units.iter().find(|(name, _)| *name == unit)?;
        Some(number.trim().parse::<f64>().ok()? * factor)
    }
}

struct Quantity(&'static Dimension);

impl Visitor<'_> for Quantity {
    type Value = f64;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "a {}; {}", self.0.what, self.0.example)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<f64, E> {
        self.visit_f64(value as f64)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<f64, E> {
        self.visit_f64(value as f64)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<f64, E> {
        if is_possible(value) { Ok(value) } else { Err(self.0.refuse(value)) }
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<f64, E> {
        let value = self.0.parse(text).filter(|value| is_possible(*value));
        value.ok_or_else(|| self.0.refuse(text))
    }
}

struct QuantityOrWord(&'static Dimension, &'static str);

impl Visitor<'_> for QuantityOrWord {
    type Value = Option<f64>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "a {} or \"{}\"; {}", self.0.what, self.1, self.0.example)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Option<f64>, E> {
        Quantity(self.0).visit_i64(value).map(Some)
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Option<f64>, E> {
        Quantity(self.0).visit_f64(value).map(Some)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Option<f64>, E> {
        if text == self.1 {
            return Ok(None);
        }
        let value = self.0.parse(text).filter(|value| is_possible(*value));
        value
            .map(Some)
            .ok_or_else(|| E::custom(format!("'{text}' is no {} nor \"{}\"; {}", self.0.what, self.1, self.0.example)))
    }
}

fn is_possible(value: f64) -> bool {
    value.is_finite() && value >= 0.0
}

/// The indented example in `document` that begins with the line `first`.
#[cfg(test)]
pub(crate) fn example(document: &str, first: &str) -> String {
    let lines = document.lines().skip_while(|line| line.trim_start() != first);
    let lines = lines.take_while(|line| line.is_empty() || line.starts_with("    "));
    lines.map(|line| format!("{}\n", line.trim_start())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

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
        let text =
            "[[walks]]\nwalk_ns = 290\npage_bytes = 4096\n[[walks]]\nwalk_ns = \"0.5us\"\npage_bytes = \"2 MiB\"\n";
        let walks = parse::<File>("host.toml", text).unwrap().walks;
        let found: Vec<(f64, u64)> = walks.iter().map(|walk| (walk.walk_ns, walk.page_bytes)).collect();
        assert_eq!(found, [(290.0, 4096), (500.0, 2 << 20)]);
    }

    #[test]
    fn what_is_wrong_is_said_with_file_line_key_and_value() {
        for (text, expected) in [
            (
                "[[walks]]\nwalk_ns = \"290 KiB\"\npage_bytes = 4096\n",
                "host.toml, line 2, walks[0].walk_ns: '290 KiB' is no time; write nanoseconds as in 290 or \"0.29 us\"",
            ),
            (
                "[[walks]]\nwalk_ns = -1\npage_bytes = 4096\n",
                "host.toml, line 2, walks[0].walk_ns: '-1' is no time; write nanoseconds as in 290 or \"0.29 us\"",
            ),
            (
                "[[walks]]\nwalk_ns = 1\npage_bytes = 0.5\n",
                "host.toml, line 3, walks[0].page_bytes: '0.5' is no size; write bytes as in 64 or \"2 KiB\"",
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
    fn a_file_that_is_not_there_is_named() {
        let error = read::<File>(Path::new("/no/such.toml")).unwrap_err().to_string();
        assert!(error.contains("/no/such.toml") && error.ends_with("check the path"), "{error}");
    }
}
