//! What can go wrong, in one line that names the thing, the value and the remedy.

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
    /// The user's words: a name, a value, a combination that a device cannot do, a file that is not what it should be.
    #[error("{0}")]
    WrongUse(String),
    /// A device that is there failed.
    #[error("{0}")]
    Failed(String),
    /// The operating system refused.
    #[error("{what}: {answer}")]
    System {
        /// What was tried, on what.
        what: String,
        /// What it said: part of the line, so no source of this error, which would be printed once more.
        answer: io::Error,
    },
    /// A file that cannot be read or written.
    #[error("cannot access {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

/// Shorthand.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Whether the remedy is another command line (exit code 2) rather than another machine (exit code 1).
    pub fn is_wrong_use(&self) -> bool {
        matches!(self, Self::Test(_) | Self::WrongUse(_) | Self::File { .. })
    }

    pub(crate) fn wrong_use<T>(text: impl Into<String>) -> Result<T> {
        Err(Self::WrongUse(text.into()))
    }

    pub(crate) fn failed<T>(text: impl Into<String>) -> Result<T> {
        Err(Self::Failed(text.into()))
    }

    pub(crate) fn system(what: impl Into<String>, answer: impl Into<io::Error>) -> Self {
        Self::System { what: what.into(), answer: answer.into() }
    }
}
