//! Errors of wrong use, which end the command with exit code 2.

use std::error::Error;
use std::fmt;

/// An error of wrong use that the command-line parser cannot detect: an impossible combination of options, or an
/// invalid file.
#[derive(Debug)]
pub struct WrongUse(String);

impl WrongUse {
    /// Wraps an error as wrong use.
    pub fn of<E: fmt::Display>(error: E) -> Self {
        Self(format!("{error:#}"))
    }
}

impl fmt::Display for WrongUse {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl Error for WrongUse {}
