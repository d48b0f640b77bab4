//! Completion queues (IBA 10.8): bounded, and armed for one notification at a time.

use std::collections::VecDeque;

use thiserror::Error;

use super::completion::{Completion, CompletionStatus};
use crate::wire::QpNumber;

/// Entries of a completion queue, at most.
pub const CQ_ENTRIES_MAX: usize = 1 << 22;

/// Which completions notify.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CqNotify {
    /// Received ones whose sender asked for it, and those that did not end well.
    Solicited,
    /// Any.
    Next,
}

/// What a completion queue cannot do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CompletionQueueError {
    /// More completions than there was room for: completions are lost, the queue is of no use any more.
    #[error("more than {entries_max} completions were not polled, and some are lost; make a larger queue, poll sooner")]
    Overflow {
        /// How many there is room for.
        entries_max: usize,
    },
    /// A size that cannot be.
    #[error("a completion queue of {0} entries is not possible; choose 1 to {CQ_ENTRIES_MAX}, and what is held")]
    Entries(usize),
}

/// A completion queue.
#[derive(Clone, Debug)]
pub struct CompletionQueue {
    entries: VecDeque<Completion>,
    entries_max: usize,
    armed: Option<CqNotify>,
    has_overflowed: bool,
}

impl CompletionQueue {
    /// An empty queue with room for so many completions; what it needs of memory it takes when they come.
    ///
    /// # Errors
    /// When there can be no such queue.
    pub fn new(entries_max: usize) -> Result<Self, CompletionQueueError> {
        let mut queue = Self { entries: VecDeque::new(), entries_max: 0, armed: None, has_overflowed: false };
        queue.resize(entries_max)?;
        Ok(queue)
    }

    /// Makes room for so many.
    ///
    /// # Errors
    /// When there can be no such queue, or it holds more.
    pub fn resize(&mut self, entries_max: usize) -> Result<(), CompletionQueueError> {
        if !(self.entries.len().max(1)..=CQ_ENTRIES_MAX).contains(&entries_max) {
            return Err(CompletionQueueError::Entries(entries_max));
        }
        self.entries_max = entries_max;
        Ok(())
    }

    /// How many completions there is room for.
    pub fn entries_max(&self) -> usize {
        self.entries_max
    }

    /// Completions that wait to be polled.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adds a completion; true when the program is to be notified, which is then armed no more.
    ///
    /// # Errors
    /// When there is no room: the queue is of no use any more, and its queue pairs are to go to the error state. Every
    /// later completion is lost as well.
    pub fn push(&mut self, completion: Completion) -> Result<bool, CompletionQueueError> {
        if self.has_overflowed || self.entries.len() == self.entries_max {
            self.has_overflowed = true;
            return Err(CompletionQueueError::Overflow { entries_max: self.entries_max });
        }
        let notifies = match self.armed {
            Some(CqNotify::Next) => true,
            Some(CqNotify::Solicited) => completion.solicited || completion.status != CompletionStatus::Success,
            None => false,
        };
        self.entries.push_back(completion);
        if notifies {
            self.armed = None;
        }
        Ok(notifies)
    }

    /// Takes the oldest completions, as many as there are and fit; says how many.
    ///
    /// # Errors
    /// When completions were lost, once those before are taken.
    pub fn poll(&mut self, into: &mut [Completion]) -> Result<usize, CompletionQueueError> {
        let count = self.entries.len().min(into.len());
        for (place, completion) in into.iter_mut().zip(self.entries.drain(..count)) {
            *place = completion;
        }
        if count == 0 && self.has_overflowed && !into.is_empty() {
            return Err(CompletionQueueError::Overflow { entries_max: self.entries_max });
        }
        Ok(count)
    }

    /// Asks for a notification when a completion is added from now on. Asked for any and for solicited ones, it is any.
    pub fn arm(&mut self, notify: CqNotify) {
        self.armed = self.armed.max(Some(notify));
    }

    /// For what the program waits.
    pub fn armed(&self) -> Option<CqNotify> {
        self.armed
    }

    /// Removes the completions of a queue pair that is destroyed, or begins again.
    pub fn forget(&mut self, qp: QpNumber) {
        self.entries.retain(|completion| completion.qp != qp);
    }
}

#[cfg(test)]
mod tests {
    use super::super::completion::CompletionKind;
    use super::*;

    fn completion(id: u64) -> Completion {
        Completion::new(id, QpNumber(id as u32 % 2), CompletionStatus::Success, CompletionKind::Receive)
    }

    #[test]
    fn completions_are_polled_in_order_as_many_as_fit() {
        let mut queue = CompletionQueue::new(8).unwrap();
        for id in 0..5 {
            assert_eq!(queue.push(completion(id)), Ok(false));
        }
        let mut polled = [completion(99); 3];
        assert_eq!(queue.poll(&mut polled), Ok(3));
        assert_eq!(polled.map(|completion| completion.id), [0, 1, 2]);
        assert_eq!(queue.poll(&mut polled), Ok(2));
        assert_eq!(polled.map(|completion| completion.id), [3, 4, 2]);
        assert_eq!(queue.poll(&mut polled), Ok(0));
    }

    #[test]
    fn an_overflow_loses_nothing_that_was_held_and_is_told_after_it() {
        let mut queue = CompletionQueue::new(2).unwrap();
        queue.push(completion(0)).unwrap();
        queue.push(completion(1)).unwrap();
        let overflow = CompletionQueueError::Overflow { entries_max: 2 };
        assert_eq!(queue.push(completion(2)), Err(overflow));
        let mut polled = [completion(99); 8];
        assert_eq!(queue.poll(&mut polled), Ok(2));
        assert_eq!(queue.poll(&mut polled), Err(overflow));
        assert_eq!(queue.push(completion(3)), Err(overflow), "a queue that lost completions takes no more");
    }

    #[test]
    fn a_notification_is_given_once_for_what_was_asked() {
        let mut queue = CompletionQueue::new(8).unwrap();
        queue.arm(CqNotify::Solicited);
        assert_eq!(queue.push(completion(0)), Ok(false));
        assert_eq!(queue.push(Completion { solicited: true, ..completion(1) }), Ok(true));
        assert_eq!(queue.push(Completion { solicited: true, ..completion(2) }), Ok(false), "armed no more");
        queue.arm(CqNotify::Solicited);
        let failed = Completion { status: CompletionStatus::Flushed, ..completion(3) };
        assert_eq!(queue.push(failed), Ok(true), "an error always notifies");
        queue.arm(CqNotify::Next);
        queue.arm(CqNotify::Solicited);
        assert_eq!(queue.armed(), Some(CqNotify::Next), "the wider wish holds");
        assert_eq!(queue.push(completion(4)), Ok(true));
    }

    #[test]
    fn a_queue_cannot_be_resized_below_what_it_holds() {
        let mut queue = CompletionQueue::new(4).unwrap();
        for id in 0..3 {
            queue.push(completion(id)).unwrap();
        }
        assert_eq!(queue.resize(2), Err(CompletionQueueError::Entries(2)));
        queue.resize(3).unwrap();
        assert!(queue.push(completion(3)).is_err());
        for entries in [0, CQ_ENTRIES_MAX + 1] {
            assert_eq!(CompletionQueue::new(entries).err(), Some(CompletionQueueError::Entries(entries)));
        }
    }

    #[test]
    fn completions_of_a_queue_pair_that_is_gone_are_gone() {
        let mut queue = CompletionQueue::new(8).unwrap();
        for id in 0..6 {
            queue.push(completion(id)).unwrap();
        }
        queue.forget(QpNumber(1));
        let mut polled = [completion(99); 8];
        assert_eq!(queue.poll(&mut polled), Ok(3));
        assert_eq!(polled[..3].iter().map(|completion| completion.id).collect::<Vec<_>>(), [0, 2, 4]);
    }
}
