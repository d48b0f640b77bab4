//! Completion queues (IBA 10.8): bounded, and armed for one notification at a time.

use std::collections::VecDeque;

use thiserror::Error;

use super::completion::{Completion, CompletionStatus};
use crate::wire::QpNumber;

/// Maximum number of entries of a completion queue.
pub const CQ_ENTRIES_MAX: usize = 1 << 22;

/// The completions for which an armed queue notifies (`ibv_req_notify_cq`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CqNotify {
    /// Receive completions with a solicited event, and completions with an error.
    Solicited,
    /// The next completion of any kind.
    Next,
}

/// Why an operation on a completion queue fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CompletionQueueError {
    /// The queue overflowed: completions were lost, and the queue cannot be used any more.
    #[error("more than {entries_max} completions were not polled and some are lost; make the queue larger")]
    Overflow {
        /// The capacity of the queue.
        entries_max: usize,
    },
    /// A size out of range.
    #[error("a completion queue cannot have {0} entries; choose 1 to {CQ_ENTRIES_MAX}, and enough for its content")]
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
    /// Creates an empty queue for up to `entries_max` completions. Memory is allocated as completions arrive.
    ///
    /// # Errors
    /// If the size is out of range.
    pub fn new(entries_max: usize) -> Result<Self, CompletionQueueError> {
        let mut queue = Self { entries: VecDeque::new(), entries_max: 0, armed: None, has_overflowed: false };
        queue.resize(entries_max)?;
        Ok(queue)
    }

    /// Changes the capacity.
    ///
    /// # Errors
    /// If the size is out of range, or the queue holds more completions.
    pub fn resize(&mut self, entries_max: usize) -> Result<(), CompletionQueueError> {
        if !(self.entries.len().max(1)..=CQ_ENTRIES_MAX).contains(&entries_max) {
            return Err(CompletionQueueError::Entries(entries_max));
        }
        self.entries_max = entries_max;
        Ok(())
    }

    /// Returns the capacity.
    pub fn entries_max(&self) -> usize {
        self.entries_max
    }

    /// Returns the number of completions that can be polled.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether no completion can be polled.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adds a completion. Returns true if the program must be notified; the queue is then disarmed.
    ///
    /// # Errors
    /// If the queue is full. It is then unusable: every later completion is lost, and its queue pairs must go to the
    /// error state.
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

    /// Takes the oldest completions, as many as there are and fit, and returns their number.
    ///
    /// # Errors
    /// If completions were lost, after all earlier ones have been taken.
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

    /// Requests a notification for a completion that is added from now on. A request for any completion outweighs one
    /// for solicited completions.
    pub fn arm(&mut self, notify: CqNotify) {
        self.armed = self.armed.max(Some(notify));
    }

    /// Returns the notification that is requested.
    pub fn armed(&self) -> Option<CqNotify> {
        self.armed
    }

    /// Removes the completions of a queue pair that is destroyed or reset.
    pub fn remove_queue_pair(&mut self, qp: QpNumber) {
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
    fn completions_are_polled_in_order() {
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
    fn an_overflow_is_reported_after_the_completions_before_it() {
        let mut queue = CompletionQueue::new(2).unwrap();
        queue.push(completion(0)).unwrap();
        queue.push(completion(1)).unwrap();
        let overflow = CompletionQueueError::Overflow { entries_max: 2 };
        assert_eq!(queue.push(completion(2)), Err(overflow));
        let mut polled = [completion(99); 8];
        assert_eq!(queue.poll(&mut polled), Ok(2));
        assert_eq!(queue.poll(&mut polled), Err(overflow));
        assert_eq!(queue.push(completion(3)), Err(overflow), "an overflowed queue accepts nothing");
    }

    #[test]
    fn an_armed_queue_notifies_once() {
        let mut queue = CompletionQueue::new(8).unwrap();
        queue.arm(CqNotify::Solicited);
        assert_eq!(queue.push(completion(0)), Ok(false));
        assert_eq!(queue.push(Completion { solicited: true, ..completion(1) }), Ok(true));
        assert_eq!(queue.push(Completion { solicited: true, ..completion(2) }), Ok(false), "the queue is disarmed");
        queue.arm(CqNotify::Solicited);
        let failed = Completion { status: CompletionStatus::Flushed, ..completion(3) };
        assert_eq!(queue.push(failed), Ok(true), "an error always notifies");
        queue.arm(CqNotify::Next);
        queue.arm(CqNotify::Solicited);
        assert_eq!(queue.armed(), Some(CqNotify::Next), "any completion outweighs solicited ones");
        assert_eq!(queue.push(completion(4)), Ok(true));
    }

    #[test]
    fn a_queue_cannot_shrink_below_its_entries() {
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
    fn completions_of_a_destroyed_queue_pair_are_removed() {
        let mut queue = CompletionQueue::new(8).unwrap();
        for id in 0..6 {
            queue.push(completion(id)).unwrap();
        }
        queue.remove_queue_pair(QpNumber(1));
        let mut polled = [completion(99); 8];
        assert_eq!(queue.poll(&mut polled), Ok(3));
        assert_eq!(polled[..3].iter().map(|completion| completion.id).collect::<Vec<_>>(), [0, 2, 4]);
    }
}
