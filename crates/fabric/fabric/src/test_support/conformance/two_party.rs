//! Two parties that each hold one endpoint of each link, and run the same tests at the same time.

use super::common::{STUCK_AFTER, WINDOW_BYTES, load_fresh};
use super::testbed::{EndpointPair, Testbed};
use crate::{Endpoint, Link, LinkState, Outbound};
use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};
use volmem::CACHE_LINE_BYTES;
use volmem::sync::Ordering;

/// How long a party waits for the other one, which may itself take [`STUCK_AFTER`] to report a stuck link.
const PARTY_TIMEOUT: Duration = Duration::from_secs(3 * STUCK_AFTER.as_secs());

/// Offsets in the windows of a barrier: the number of the writer's arrivals, then two pairs of words that are used
/// alternately. A party that is one arrival ahead does not overwrite the pair that the other still reads.
const COUNT: usize = 0;
const WORDS: [usize; 2] = [CACHE_LINE_BYTES, 2 * CACHE_LINE_BYTES];
const FAILED: usize = size_of::<u64>();

/// Yields before the first pause of a waiting party.
const YIELDS_MAX: u32 = 64;
const PAUSE: Duration = Duration::from_micros(100);

/// A barrier of two parties that also exchanges a word. It lies in the windows of a link of its own, which is not
/// trained and whose memory was zero before the first party arrived.
pub struct PartyBarrier<K: Link> {
    inbound: K::Inbound,
    outbound: K::Outbound,
    timeout: Duration,
    count: Cell<u64>,
    is_over: Cell<bool>,
}

impl<K: Link> PartyBarrier<K> {
    /// The barrier of one party, by its endpoint of the link.
    pub fn new(endpoint: &K) -> Self {
        let (count, is_over) = (Cell::new(0), Cell::new(false));
        Self { inbound: endpoint.inbound(), outbound: endpoint.outbound(), timeout: PARTY_TIMEOUT, count, is_over }
    }

    /// The same barrier with another timeout.
    #[cfg(test)]
    fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Waits until the other party has arrived here too.
    ///
    /// # Panics
    /// If it does not arrive in time, or has failed before.
    pub fn wait(&self) {
        self.exchange(Ok(0));
    }

    /// Sends the result of this party's step to the other one, and returns the other's result.
    fn exchange(&self, outcome: thread::Result<u64>) -> u64 {
        let count = self.count.get() + 1;
        self.count.set(count);
        let words = WORDS[(count % 2) as usize];
        self.outbound.store_u64(words, *outcome.as_ref().unwrap_or(&0), Ordering::Relaxed);
        self.outbound.store_u64(words + FAILED, u64::from(outcome.is_err()), Ordering::Relaxed);
        self.outbound.fence();
        self.outbound.store_u64(COUNT, count, Ordering::Release);
        self.outbound.flush();
        if let Err(failure) = outcome {
            resume_unwind(failure);
        }
        assert!(
            self.wait_for_peer(count),
            "the other party has not arrived for {:?}: it is gone, or stuck",
            self.timeout
        );
        assert!(load_fresh(&self.inbound, words + FAILED) == 0, "the other party has failed: see its output");
        load_fresh(&self.inbound, words)
    }

    /// Waits until the other party has arrived `count` times. After one timeout it does not wait again, because a
    /// property that fails is tried many more times.
    fn wait_for_peer(&self, count: u64) -> bool {
        let begun = Instant::now();
        let mut yields = 0;
        while load_fresh(&self.inbound, COUNT) < count {
            if self.is_over.get() || begun.elapsed() > self.timeout {
                self.is_over.set(true);
                return false;
            }
            if yields < YIELDS_MAX {
                yields += 1;
                thread::yield_now();
            } else {
                thread::sleep(PAUSE);
            }
        }
        true
    }
}

/// One of two parties that each hold one endpoint of each link.
pub struct TwoParty<K: Link, F> {
    own: Endpoint,
    barrier: Rc<PartyBarrier<K>>,
    open: F,
}

impl<K: Link, L: Link, F: Fn(usize) -> L> TwoParty<K, F> {
    /// The party that holds the endpoint `own` of each link. `open` returns that endpoint of a new link, from the bytes
    /// of a window. Both parties call it at the same time, and may use the barrier in it.
    pub fn new(own: Endpoint, barrier: Rc<PartyBarrier<K>>, open: F) -> Self {
        Self { own, barrier, open }
    }
}

impl<K: Link, L: Link, F: Fn(usize) -> L> Testbed for TwoParty<K, F> {
    type EndpointPair = TwoPartyEndpoints<K, L>;

    fn link(&self) -> TwoPartyEndpoints<K, L> {
        self.barrier.wait(); // From here on neither party uses an earlier link.
        let opened = catch_unwind(AssertUnwindSafe(|| (self.open)(WINDOW_BYTES)));
        let link = settled(&self.barrier, opened);
        TwoPartyEndpoints { own: self.own, link, barrier: self.barrier.clone() }
    }

    fn random_seed(&self) -> u64 {
        let number = RandomState::new().hash_one(0);
        let others = self.barrier.exchange(Ok(number));
        if self.own == Endpoint::A { number } else { others }
    }
}

/// Returns this party's result after the other party has its own.
fn settled<K: Link, T>(barrier: &PartyBarrier<K>, outcome: thread::Result<T>) -> T {
    match outcome {
        Ok(value) => {
            barrier.wait();
            value
        }
        Err(failure) => {
            barrier.exchange(Err(failure));
            unreachable!("exchange resumes the panic")
        }
    }
}

/// A link of which this party holds one endpoint.
pub struct TwoPartyEndpoints<K: Link, L> {
    own: Endpoint,
    link: L,
    barrier: Rc<PartyBarrier<K>>,
}

impl<K: Link, L: Link> EndpointPair for TwoPartyEndpoints<K, L> {
    type Link = L;

    fn query(&mut self, endpoint: Endpoint, step: impl FnOnce(&mut L) -> u64) -> u64 {
        if endpoint != self.own {
            return self.barrier.exchange(Ok(0));
        }
        let answer = catch_unwind(AssertUnwindSafe(|| step(&mut self.link)));
        let own = *answer.as_ref().unwrap_or(&0);
        self.barrier.exchange(answer);
        own
    }

    fn both(&mut self, at_a: impl FnOnce(&mut L) + Send, at_b: impl FnOnce(&mut L) + Send) {
        let link = &mut self.link;
        let done = catch_unwind(AssertUnwindSafe(|| match self.own {
            Endpoint::A => at_a(link),
            Endpoint::B => at_b(link),
        }));
        self.barrier.exchange(done.map(|()| 0));
    }

    /// Each endpoint trains independently, as nodes do.
    fn bring_up(&mut self) -> bool {
        self.both(train_until_up, train_until_up);
        true
    }
}

fn train_until_up(link: &mut impl Link) {
    let begun = Instant::now();
    while link.train() != LinkState::Up {
        assert!(begun.elapsed() < STUCK_AFTER, "stuck: training, {:?}", link.state());
        thread::yield_now();
    }
}

#[cfg(test)]
mod tests;
