//! Values of configuration files that are quantities with units.

use std::fmt;

use serde::de::{Deserializer, Error, Visitor};

/// A physical dimension: the names of its units, and their factors to the base unit.
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
    units: &[
        ("B", 1.0),
        ("KiB", 1024.0),
        ("MiB", 1_048_576.0),
        ("GiB", 1_073_741_824.0),
        ("KB", 1e3),
        ("MB", 1e6),
        ("GB", 1e9),
    ],
    example: "write bytes as in 64 or \"2 KiB\"",
};

const LENGTH: Dimension = Dimension {
    what: "length",
    units: &[("m", 1.0), ("cm", 1e-2), ("mm", 1e-3)],
    example: "write meters as in 0.25 or \"25 cm\"",
};

/// Deserializes a length of zero or more in meters: a number, or text with a unit such as `"25 cm"`.
///
/// # Errors
/// For any other value.
pub fn meters<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    deserializer.deserialize_any(Quantity(&LENGTH))
}

/// Deserializes a time of zero or more in nanoseconds: a number, or text with a unit such as `"0.29 us"`.
///
/// # Errors
/// For any other value.
pub fn nanoseconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    deserializer.deserialize_any(Quantity(&TIME))
}

/// Parses a time of zero or more in nanoseconds: a number, or a number with a unit such as `0.29 us`. Returns `None`
/// for any other text.
pub fn parse_nanoseconds(text: &str) -> Option<f64> {
    let ns = if let Ok(number) = text.parse() { number } else { TIME.parse(text)? };
    (ns >= 0.0 && f64::is_finite(ns)).then_some(ns)
}

/// Deserializes a whole number of bytes: a number, or text with a unit such as `"2 KiB"`.
///
/// # Errors
/// For any other value.
pub fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    whole(deserializer.deserialize_any(Quantity(&BYTES))?)
}

/// Deserializes a whole number of bytes, or `word`, which yields `None` and represents a size that is known elsewhere.
///
/// # Errors
/// For any other value.
pub fn bytes_or_word<'de, D: Deserializer<'de>>(deserializer: D, word: &'static str) -> Result<Option<u64>, D::Error> {
    deserializer.deserialize_any(QuantityOrWord(&BYTES, word))?.map(whole).transpose()
}

fn whole<E: Error>(bytes: f64) -> Result<u64, E> {
    if bytes.fract() == 0.0 { Ok(bytes as u64) } else { Err(BYTES.refuse(bytes)) }
}

impl Dimension {
    fn refuse<E: Error>(&self, value: impl fmt::Display) -> E {
        E::custom(format!("'{value}' is not a {}; {}", self.what, self.example))
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
        value.map(Some).ok_or_else(|| {
            E::custom(format!("'{text}' is neither a {} nor \"{}\"; {}", self.0.what, self.1, self.0.example))
        })
    }
}

fn is_possible(value: f64) -> bool {
    value.is_finite() && value >= 0.0
}
