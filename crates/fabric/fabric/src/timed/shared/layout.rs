//! Offsets in the memory of a window in shared memory.

use crate::memory_link::is_window_size;
use crate::timed::error::TimedError;
use volmem::CACHE_LINE_BYTES as LINE;

const WORD_BYTES: usize = size_of::<u64>();
const HISTORY_BYTES: usize = 2 * LINE;

/// The parts of the memory of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedLayout {
    /// Bytes of the window.
    pub window_bytes: usize,
    /// Bytes at its start whose words each have a history; the rest holds the rings of lanes. Whole lines.
    pub words_bytes: usize,
}

impl SharedLayout {
    /// Bytes of memory for a window, its histories and its arrival times.
    pub const fn memory_bytes(self) -> usize {
        self.times_offset() + (self.window_bytes - self.words_bytes) / LINE * WORD_BYTES
    }

    const fn times_offset(self) -> usize {
        self.window_bytes + self.words_bytes / WORD_BYTES * HISTORY_BYTES
    }

    #[inline]
    pub(super) fn history(self, at: usize) -> usize {
        self.window_bytes + at / WORD_BYTES * HISTORY_BYTES
    }

    #[inline]
    pub(super) fn time(self, at: usize) -> usize {
        self.times_offset() + (at - self.words_bytes) / LINE * WORD_BYTES
    }

    pub(super) fn check(self) -> Result<(), TimedError> {
        let Self { window_bytes, words_bytes } = self;
        let fits = is_window_size(window_bytes) && words_bytes <= window_bytes && words_bytes.is_multiple_of(LINE);
        // Whether the memory is large enough is checked where the memory is known.
        if fits && window_bytes < 1 << 48 { Ok(()) } else { Err(TimedError::WindowSize { window_bytes }) }
    }
}
