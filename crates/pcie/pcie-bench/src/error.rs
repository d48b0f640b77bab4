//! Errors of one line each, which names the thing, the value and the remedy.

use std::io;
use std::path::PathBuf;

use pcie::test::TestError;
use thiserror::Error;

/// Why something could not be measured, read or drawn.
#[derive(Debug, Error)]
pub enum Error {
    /// An invalid test on any device.
    #[error(transparent)]
    Test(#[from] TestError),
    /// An invalid argument: a name, a value, a combination that a device does not support, or a file of the wrong form.
    #[error("{0}")]
    WrongUse(String),
    /// An existing device failed.
    #[error("{0}")]
    Failed(String),
    /// A system call failed.
    #[error("{what}: {error}")]
    System {
        /// The operation and its object.
        what: String,
        /// The error of the system. It is part of the message and therefore not a `source`, which would be printed
        /// again.
        error: io::Error,
    },
    /// A file cannot be read or written.
    #[error("cannot access {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
}

/// Result with the error of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns whether the remedy is another command line (exit code 2) rather than another machine (exit code 1).
    pub fn is_wrong_use(&self) -> bool {
        matches!(self, Self::Test(_) | Self::WrongUse(_) | Self::File { .. })
    }

    pub(crate) fn wrong_use<T>(text: impl Into<String>) -> Result<T> {
        Err(Self::WrongUse(text.into()))
    }

    pub(crate) fn failed<T>(text: impl Into<String>) -> Result<T> {
        Err(Self::Failed(text.into()))
    }

    pub(crate) fn system(what: impl Into<String>, error: impl Into<io::Error>) -> Self {
        Self::System { what: what.into(), error: error.into() }
    }
}
