//! The error of all parsers of this crate.

use std::fmt;

/// Why `new_checked` or `parse` rejected bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Error {
    /// Fewer bytes than the shortest header of the protocol, or than a length field says.
    Truncated {
        /// Protocol name.
        protocol: &'static str,
        /// Bytes present.
        bytes: usize,
        /// Bytes required.
        bytes_min: usize,
    },
    /// An unexpected version, hardware type or protocol type.
    Version {
        /// Protocol name.
        protocol: &'static str,
        /// Value found.
        found: u16,
        /// Value required.
        expected: u16,
    },
    /// A header length below the minimum.
    HeaderLength {
        /// Protocol name.
        protocol: &'static str,
        /// Header length field, in bytes.
        bytes: usize,
        /// Minimum, in bytes.
        bytes_min: usize,
    },
    /// A total length below that of the headers.
    TotalLength {
        /// Protocol name.
        protocol: &'static str,
        /// Total length field, in bytes.
        bytes: usize,
        /// Minimum, in bytes.
        bytes_min: usize,
    },
    /// A wrong checksum.
    Checksum {
        /// Protocol name.
        protocol: &'static str,
    },
    /// Too many extension headers.
    Headers {
        /// Protocol name.
        protocol: &'static str,
        /// Maximum number of headers.
        headers_max: usize,
    },
    /// A message of an unsupported type.
    Kind {
        /// Protocol name.
        protocol: &'static str,
        /// Message type.
        kind: u8,
    },
    /// An invalid option or field.
    Malformed {
        /// Protocol name.
        protocol: &'static str,
        /// The part at fault.
        what: &'static str,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Truncated { protocol, bytes, bytes_min } => {
                write!(f, "{protocol}: {bytes} B, but at least {bytes_min} B are required")
            }
            Error::Version { protocol, found, expected } => {
                write!(f, "{protocol}: version or type is {found}, not {expected}")
            }
            Error::HeaderLength { protocol, bytes, bytes_min } => {
                write!(f, "{protocol}: header length is {bytes} B, but must be at least {bytes_min} B")
            }
            Error::TotalLength { protocol, bytes, bytes_min } => {
                write!(f, "{protocol}: total length is {bytes} B, but must be at least {bytes_min} B")
            }
            Error::Checksum { protocol } => write!(f, "{protocol}: the checksum is wrong"),
            Error::Headers { protocol, headers_max } => {
                write!(f, "{protocol}: more than {headers_max} headers before the payload")
            }
            Error::Kind { protocol, kind } => write!(f, "{protocol}: message type {kind} is not supported"),
            Error::Malformed { protocol, what } => write!(f, "{protocol}: malformed {what}"),
        }
    }
}

impl std::error::Error for Error {}

/// Fails unless there are at least `bytes_min` bytes.
#[inline]
pub(crate) fn at_least(protocol: &'static str, bytes: usize, bytes_min: usize) -> Result<(), Error> {
    if bytes < bytes_min {
        return Err(Error::Truncated { protocol, bytes, bytes_min });
    }
    Ok(())
}
