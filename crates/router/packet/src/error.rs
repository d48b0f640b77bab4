//! Why bytes are not the packet that they should be.

use std::fmt;

/// What `new_checked` and `parse` refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    /// Fewer bytes than the protocol's shortest header, or than a header says that there are.
    Truncated {
        /// Of which protocol.
        protocol: &'static str,
        /// Bytes that there are.
        bytes: usize,
        /// Bytes that there should be.
        bytes_min: usize,
    },
    /// A version, or a hardware or protocol type, that is not the one.
    Version {
        /// Of which protocol.
        protocol: &'static str,
        /// What it says.
        found: u16,
        /// What it should say.
        expected: u16,
    },
    /// A header that says it is shorter than it can be.
    HeaderLength {
        /// Of which protocol.
        protocol: &'static str,
        /// Bytes that it says.
        bytes: usize,
        /// Bytes that it has at least.
        bytes_min: usize,
    },
    /// A total length that is shorter than the headers.
    TotalLength {
        /// Of which protocol.
        protocol: &'static str,
        /// Bytes that it says.
        bytes: usize,
        /// Bytes that it has at least.
        bytes_min: usize,
    },
    /// A checksum that is not that of the bytes.
    Checksum {
        /// Of which protocol.
        protocol: &'static str,
    },
    /// More headers before the payload than anyone sends.
    Headers {
        /// Of which protocol.
        protocol: &'static str,
        /// As many as are followed.
        headers_max: usize,
    },
    /// A message of another kind than those that are parsed.
    Kind {
        /// Of which protocol.
        protocol: &'static str,
        /// Its type.
        kind: u8,
    },
    /// An option or a field that is not as the protocol has it.
    Malformed {
        /// Of which protocol.
        protocol: &'static str,
        /// Which.
        what: &'static str,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Truncated { protocol, bytes, bytes_min } => {
                write!(f, "{protocol}: {bytes} B where there should be {bytes_min} B or more")
            }
            Error::Version { protocol, found, expected } => {
                write!(f, "{protocol}: version or type {found}, not {expected}")
            }
            Error::HeaderLength { protocol, bytes, bytes_min } => {
                write!(f, "{protocol}: a header of {bytes} B, which has at least {bytes_min} B")
            }
            Error::TotalLength { protocol, bytes, bytes_min } => {
                write!(f, "{protocol}: a total length of {bytes} B, which is at least {bytes_min} B")
            }
            Error::Checksum { protocol } => write!(f, "{protocol}: the checksum is wrong"),
            Error::Headers { protocol, headers_max } => {
                write!(f, "{protocol}: more than {headers_max} headers before the payload")
            }
            Error::Kind { protocol, kind } => write!(f, "{protocol}: a message of type {kind}, which is not parsed"),
            Error::Malformed { protocol, what } => write!(f, "{protocol}: malformed {what}"),
        }
    }
}

impl std::error::Error for Error {}

/// `Ok` when there are `bytes_min` of them.
#[inline]
pub(crate) fn at_least(protocol: &'static str, bytes: usize, bytes_min: usize) -> Result<(), Error> {
    if bytes < bytes_min {
        return Err(Error::Truncated { protocol, bytes, bytes_min });
    }
    Ok(())
}
