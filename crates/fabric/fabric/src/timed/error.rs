//! Errors of timed links.

use std::fmt;

/// Why a link cannot be timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimedError {
    /// The wrapped window is too small.
    Memory {
        /// Bytes of the wrapped window.
        found_bytes: usize,
        /// Recommended bytes.
        advised_bytes: usize,
    },
    /// The size of a window is not a positive multiple of the cache line, or is not below 2^48 bytes.
    WindowSize {
        /// Bytes asked for.
        window_bytes: usize,
    },
    /// A value of the timing is out of range.
    Timing {
        /// Name of the value.
        what: &'static str,
        /// The value.
        value: u64,
        /// Smallest valid value.
        min: u64,
        /// Largest valid value.
        max: u64,
    },
}

impl fmt::Display for TimedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory { found_bytes, advised_bytes } => {
                write!(f, "timed link: a journal in {found_bytes} bytes is too small; give it {advised_bytes} bytes")
            }
            Self::WindowSize { window_bytes } => write!(
                f,
                "timed link: window of {window_bytes} bytes; use a positive multiple of {} below 2^48",
                volmem::CACHE_LINE_BYTES
            ),
            Self::Timing { what, value, min, max } => {
                write!(f, "timed link: {what} = {value}; use {min} to {max}")
            }
        }
    }
}

impl std::error::Error for TimedError {}
