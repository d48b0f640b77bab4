//! The two windows of a link in one span of memory: the control blocks on the first page, then the windows on pages of
//! their own.

use crate::Memory;
use crate::memory_link::{CONTROL_BYTES, Side, is_window_size};

/// Bytes of a page of memory.
pub(crate) const PAGE_BYTES: usize = 4096;

/// Offsets in the span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PairLayout {
    window_bytes: usize,
    window_stride_bytes: usize,
}

impl PairLayout {
    /// The layout for windows of `window_bytes`. `None` if that is not a positive multiple of the cache line, or the
    /// span exceeds the address space.
    pub(crate) fn new(window_bytes: usize) -> Option<Self> {
        let window_stride_bytes = window_bytes.checked_next_multiple_of(PAGE_BYTES)?;
        let fits = window_stride_bytes <= (isize::MAX as usize - PAGE_BYTES) / 2;
        (fits && is_window_size(window_bytes)).then_some(Self { window_bytes, window_stride_bytes })
    }

    /// Bytes that the span needs.
    pub(crate) fn span_bytes(&self) -> usize {
        PAGE_BYTES + 2 * self.window_stride_bytes
    }

    /// The side of endpoint A, then that of endpoint B.
    pub(crate) fn sides<M: Memory>(&self, span: &M) -> [Side<M>; 2] {
        [0, 1].map(|index| Side {
            control: span.part(index * CONTROL_BYTES, CONTROL_BYTES),
            window: span.part(PAGE_BYTES + index * self.window_stride_bytes, self.window_bytes),
        })
    }
}
