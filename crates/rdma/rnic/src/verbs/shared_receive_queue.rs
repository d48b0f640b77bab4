//! Shared receive queues (IBA 10.2.9): receive requests that several queue pairs take from.

use std::collections::VecDeque;

use thiserror::Error;

use super::work::ReceiveRequest;

/// Requests of a shared receive queue, at most.
pub const SRQ_REQUESTS_MAX: usize = 1 << 20;

/// What a shared receive queue cannot do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SharedReceiveQueueError {
    /// No room for another request.
    #[error("the shared receive queue holds its {0} requests; wait for completions, or make a larger one")]
    Full(usize),
    /// A size that cannot be.
    #[error("a shared receive queue of {0} requests is not possible; choose 1 to {SRQ_REQUESTS_MAX}, and what is held")]
    Requests(usize),
    /// A limit that cannot be reached.
    #[error("a limit of {limit} requests is above the queue's {requests_max}; choose one up to that")]
    Limit {
        /// The limit asked for.
        limit: usize,
        /// How many requests there is room for.
        requests_max: usize,
    },
}

/// A request taken for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TakenReceive {
    /// The request.
    pub request: ReceiveRequest,
    /// Fewer than the limit are left, and the program is to be told (`IBV_EVENT_SRQ_LIMIT_REACHED`).
    pub is_limit_reached: bool,
}

/// A shared receive queue.
#[derive(Clone, Debug)]
pub struct SharedReceiveQueue {
    requests: VecDeque<ReceiveRequest>,
    requests_max: usize,
    /// Armed while not 0.
    limit: usize,
}

impl SharedReceiveQueue {
    /// An empty queue with room for so many requests.
    ///
    /// # Errors
    /// When there can be no such queue.
    pub fn new(requests_max: usize) -> Result<Self, SharedReceiveQueueError> {
        let mut queue = Self { requests: VecDeque::new(), requests_max: 0, limit: 0 };
        queue.resize(requests_max)?;
        Ok(queue)
    }

    /// Makes room for so many.
    ///
    /// # Errors
    /// When there can be no such queue, it holds more, or its limit is above.
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

    /// How many requests there is room for.
    pub fn requests_max(&self) -> usize {
        self.requests_max
    }

    /// The limit that the program waits for; 0 when it waits for none.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Requests that wait for messages.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Adds a request.
    ///
    /// # Errors
    /// When there is no room.
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

    /// Asks to be told, once, when fewer than so many requests are left after one is taken; 0 asks for nothing.
    ///
    /// # Errors
    /// When there is no room for so many.
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
    fn the_limit_is_told_once_when_fewer_are_left() {
        let mut queue = filled(4);
        queue.arm(3).unwrap();
        let told: Vec<bool> = std::iter::from_fn(|| queue.take()).map(|taken| taken.is_limit_reached).collect();
        assert_eq!(told, [false, true, false, false]);
        assert_eq!(queue.limit(), 0);
        assert_eq!(queue.arm(5), Err(SharedReceiveQueueError::Limit { limit: 5, requests_max: 4 }));
    }

    #[test]
    fn a_queue_keeps_room_for_what_it_holds_and_its_limit() {
        let mut queue = filled(2);
        assert_eq!(queue.resize(1), Err(SharedReceiveQueueError::Requests(1)));
        queue.arm(3).unwrap();
        assert_eq!(queue.resize(2), Err(SharedReceiveQueueError::Limit { limit: 3, requests_max: 2 }));
        queue.resize(3).unwrap();
        assert_eq!(SharedReceiveQueue::new(0).err(), Some(SharedReceiveQueueError::Requests(0)));
    }
}
