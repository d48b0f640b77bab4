//! Parsing of a text: a rack file, or the value of one key.

use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::VERSION;

/// An error in a rack file or in the keys of a rack: one line with file, line, key, value and remedy.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct RackError(pub(crate) String);

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
