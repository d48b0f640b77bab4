//! Shared receive queues (IBA 10.2.9), from which several queue pairs take receive requests.

use std::collections::VecDeque;

use thiserror::Error;

use super::work::ReceiveRequest;

/// Maximum number of requests of a shared receive queue.
pub const SRQ_REQUESTS_MAX: usize = 1 << 20;

/// Why an operation on a shared receive queue fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SharedReceiveQueueError {
    /// The queue is full.
    #[error("the shared receive queue is full with {0} requests; wait for completions or make it larger")]
    Full(usize),
    /// A size out of range.
    #[error(
        "a shared receive queue cannot have {0} requests; choose 1 to {SRQ_REQUESTS_MAX}, and enough for its content"
    )]
    Requests(usize),
    /// A limit that exceeds the capacity.
    #[error("a limit of {limit} requests exceeds the queue's capacity of {requests_max}; choose a lower one")]
    Limit {
        /// The requested limit.
        limit: usize,
        /// The capacity.
        requests_max: usize,
    },
}

/// A receive request taken from the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TakenReceive {
    /// The request.
    pub request: ReceiveRequest,
    /// Fewer requests than the limit are left, and the program must be notified (`IBV_EVENT_SRQ_LIMIT_REACHED`).
    pub is_limit_reached: bool,
}

/// A shared receive queue.
#[derive(Clone, Debug)]
pub struct SharedReceiveQueue {
    requests: VecDeque<ReceiveRequest>,
    requests_max: usize,
    /// Armed if not 0.
    limit: usize,
}

impl SharedReceiveQueue {
    /// Creates an empty queue for up to `requests_max` requests.
    ///
    /// # Errors
    /// If the size is out of range.
    pub fn new(requests_max: usize) -> Result<Self, SharedReceiveQueueError> {
        let mut queue = Self { requests: VecDeque::new(), requests_max: 0, limit: 0 };
        queue.resize(requests_max)?;
        Ok(queue)
    }

    /// Changes the capacity.
    ///
    /// # Errors
    /// If the size is out of range, the queue holds more requests, or its limit exceeds the new capacity.
    pub fn resize(&mut self, requests_max: usize) -> Result<(), SharedReceiveQueueError> {
        if !(self.requests.len().max(1)..=SRQ_REQUESTS_MAX).contains(&requests_max) {
            return Err(SharedReceiveQueueError::Requests(requests_max));
        }
        if self.limit > requests_max {
            return Err(SharedReceiveQueueError::Limit { limit: self.limit, requests_max });
        }
        self.requests_max = requests_max;
        Ok(())
    }

    /// Returns the capacity.
    pub fn requests_max(&self) -> usize {
        self.requests_max
    }

    /// Returns the armed limit, or 0 if none is armed.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Returns the number of posted requests.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Returns whether no request is posted.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Posts a request.
    ///
    /// # Errors
    /// If the queue is full.
    pub fn post(&mut self, request: ReceiveRequest) -> Result<(), SharedReceiveQueueError> {
        if self.requests.len() == self.requests_max {
            return Err(SharedReceiveQueueError::Full(self.requests_max));
        }
        self.requests.push_back(request);
        Ok(())
    }

    /// Takes the oldest request.
    pub fn take(&mut self) -> Option<TakenReceive> {
        let request = self.requests.pop_front()?;
        let is_limit_reached = self.requests.len() < self.limit;
        if is_limit_reached {
            self.limit = 0;
        }
        Some(TakenReceive { request, is_limit_reached })
    }

    /// Arms the limit: the program is notified once, when a request is taken and fewer than `limit` are left. 0 disarms
    /// it.
    ///
    /// # Errors
    /// If the limit exceeds the capacity.
    pub fn arm(&mut self, limit: usize) -> Result<(), SharedReceiveQueueError> {
        if limit > self.requests_max {
            return Err(SharedReceiveQueueError::Limit { limit, requests_max: self.requests_max });
        }
        self.limit = limit;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(requests: u64) -> SharedReceiveQueue {
        let mut queue = SharedReceiveQueue::new(4).unwrap();
        for id in 0..requests {
            queue.post(ReceiveRequest { id, ..ReceiveRequest::default() }).unwrap();
        }
        queue
    }

    #[test]
    fn requests_are_taken_in_order_and_bounded() {
        let mut queue = filled(4);
        assert_eq!(queue.post(ReceiveRequest::default()), Err(SharedReceiveQueueError::Full(4)));
        let ids: Vec<u64> = std::iter::from_fn(|| queue.take()).map(|taken| taken.request.id).collect();
        assert_eq!(ids, [0, 1, 2, 3]);
        assert_eq!(queue.take(), None);
    }

    #[test]
    fn the_limit_is_reported_once_when_fewer_requests_are_left() {
        let mut queue = filled(4);
        queue.arm(3).unwrap();
        let reported: Vec<bool> = std::iter::from_fn(|| queue.take()).map(|taken| taken.is_limit_reached).collect();
        assert_eq!(reported, [false, true, false, false]);
        assert_eq!(queue.limit(), 0);
        assert_eq!(queue.arm(5), Err(SharedReceiveQueueError::Limit { limit: 5, requests_max: 4 }));
    }

    #[test]
    fn a_queue_cannot_shrink_below_its_requests_or_its_limit() {
        let mut queue = filled(2);
        assert_eq!(queue.resize(1), Err(SharedReceiveQueueError::Requests(1)));
        queue.arm(3).unwrap();
        assert_eq!(queue.resize(2), Err(SharedReceiveQueueError::Limit { limit: 3, requests_max: 2 }));
        queue.resize(3).unwrap();
        assert_eq!(SharedReceiveQueue::new(0).err(), Some(SharedReceiveQueueError::Requests(0)));
    }
}
