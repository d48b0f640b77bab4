//! Errors that are the command line's: exit code 2.

use std::error::Error;
use std::fmt;

/// What was asked makes no sense, beyond what the parser of the command line can see: an impossible combination, a
/// bad file.
#[derive(Debug)]
pub struct WrongUse(String);

impl WrongUse {
    /// The same error, as the command line's.
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
