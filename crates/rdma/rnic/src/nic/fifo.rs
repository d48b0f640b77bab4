//! A helper for queues in order of time.

use std::collections::VecDeque;

/// Removes and returns the front element if `is_wanted` accepts it.
pub(super) fn pop_front_if<T>(queue: &mut VecDeque<T>, is_wanted: impl FnOnce(&T) -> bool) -> Option<T> {
    if is_wanted(queue.front()?) { queue.pop_front() } else { None }
}
