//! Records that are shown together.
//!
//! They are put in place one by one, whole, but for the line that the receiver looks at first: that one is kept in
//! memory of this process, and stored behind the others. So however many they are, what makes them visible is one
//! store, and one fence where the mapping needs any; and a receiver that finds the first finds them all.
//!
//! The lines behind the first are stored with their tags, in one piece each and without a fence between: nobody looks
//! there who has not seen the first.

use crate::record::SLOT_BYTES;
use fabric::Outbound;

/// Words of a line.
pub(crate) const LINE_WORDS: usize = SLOT_BYTES / size_of::<u64>();

/// What is in place and not to be seen yet, in memory of this process alone: most ends never have any.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    first: Option<Box<First>>,
}

/// The start of the first record: its tag, at least. No words: there is nothing to show.
#[derive(Debug, Default)]
struct First {
    offset: usize,
    words: usize,
    line: [u64; LINE_WORDS],
    /// It is all there is to show: nothing has to be visible before it.
    is_all: bool,
}

impl Batch {
    /// Adds a record, of which `words` from `offset` on begin with the tag and lie in one line. The rest of it is in
    /// place; `is_whole` says that there is none.
    #[inline]
    pub(crate) fn add(&mut self, outbound: &impl Outbound, offset: usize, words: &[u64], is_whole: bool) {
        let first = self.first.get_or_insert_default();
        if first.words > 0 {
            first.is_all = false;
            // SAFETY: a slice is readable, and no window holds it.
            return unsafe { outbound.write_from(offset, words.as_ptr().cast(), size_of_val(words)) };
        }
        first.line[..words.len()].copy_from_slice(words);
        (first.offset, first.words, first.is_all) = (offset, words.len(), is_whole);
    }

    /// Makes all of it visible, `is_behind` all that was stored through this window or its siblings before, too;
    /// `false`: there was nothing.
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
