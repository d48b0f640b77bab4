//! Records that are published together.
//!
//! They are put in place one by one, complete, except for the line that the receiver polls: that line is kept in memory
//! of this process and stored last. So a batch of any size becomes visible with one store, and with one fence if the
//! mapping requires it; and a receiver that finds the first record finds all of them.
//!
//! The lines behind the first are stored with their tags, each in one piece and without a fence in between: a receiver
//! reads them only after it has seen the first tag.

use crate::record::SLOT_BYTES;
use fabric::Outbound;

/// Words of a line.
pub(crate) const LINE_WORDS: usize = SLOT_BYTES / size_of::<u64>();

/// The records that are in place but not visible yet. Allocated on first use: most endpoints never stage a record.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    first: Option<Box<First>>,
}

/// The start of the first record, including at least its tag. If `words` is 0, the batch is empty.
#[derive(Debug, Default)]
struct First {
    offset: usize,
    words: usize,
    line: [u64; LINE_WORDS],
    /// The line is the whole batch, so no other store has to be visible before it.
    is_all: bool,
}

impl Batch {
    /// Adds a record whose first `words`, which begin with the tag and lie in one line, belong at `offset`. The rest of
    /// the record is already in place; `is_whole` says that there is no rest.
    #[inline]
    pub(crate) fn add(&mut self, outbound: &impl Outbound, offset: usize, words: &[u64], is_whole: bool) {
        let first = self.first.get_or_insert_default();
        if first.words > 0 {
            first.is_all = false;
            // SAFETY: a slice is readable for its length, and outside the window: nothing borrows memory that a peer
            // can write.
            return unsafe { outbound.write_from(offset, words.as_ptr().cast(), size_of_val(words)) };
        }
        first.line[..words.len()].copy_from_slice(words);
        (first.offset, first.words, first.is_all) = (offset, words.len(), is_whole);
    }

    /// Publishes the batch. With `is_behind` it becomes visible only after all earlier stores through this window and
    /// its siblings. Returns `false` if the batch is empty.
    #[inline]
    pub(crate) fn publish(&mut self, outbound: &impl Outbound, is_behind: bool) -> bool {
        let Some(first) = self.first.as_mut().filter(|first| first.words > 0) else { return false };
        let words = &first.line[..first.words];
        if first.is_all && !is_behind {
            outbound.store_line(first.offset, words);
        } else {
            outbound.store_line_fenced(first.offset, words);
        }
        first.words = 0;
        true
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.first.as_ref().is_none_or(|first| first.words == 0)
    }
}
