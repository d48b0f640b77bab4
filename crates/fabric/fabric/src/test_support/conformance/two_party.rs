//! Two testbed that have an end of each link, and run the same facts at the same time.

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

/// How long a party waits for the other one, which may just be finding out that it is stuck itself.
const PARTY_TIMEOUT: Duration = Duration::from_secs(3 * STUCK_AFTER.as_secs());

/// In the windows of a meeting: how often its writer has come, then what it said last and what before that. Who has
/// come once more than the other leaves alone what that still reads.
const COUNT: usize = 0;
const WORDS: [usize; 2] = [CACHE_LINE_BYTES, 2 * CACHE_LINE_BYTES];
const FAILED: usize = size_of::<u64>();

/// Looks that only give way to others, before those with a pause between them.
const YIELDS_MAX: u32 = 64;
const PAUSE: Duration = Duration::from_micros(100);

/// Where two testbed wait for each other, and say a word: in the windows of a link of their own, which is not trained,
/// and whose memory was zero before the first of them came.
pub struct PartyBarrier<K: Link> {
    inbound: K::Inbound,
    outbound: K::Outbound,
    timeout: Duration,
    count: Cell<u64>,
    is_over: Cell<bool>,
}

impl<K: Link> PartyBarrier<K> {
    /// The place of one party, by its end of the link.
    pub fn new(end: &K) -> Self {
        let (count, is_over) = (Cell::new(0), Cell::new(false));
        Self { inbound: end.inbound(), outbound: end.outbound(), timeout: PARTY_TIMEOUT, count, is_over }
    }

    /// For who cannot wait for long.
    #[cfg(test)]
    fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Goes on once the other party has come here too.
    ///
    /// # Panics
    /// If it does not come, or has failed on its way.
    pub fn wait(&self) {
        self.exchange(Ok(0));
    }

    /// Tells the other party what came of this one's part; answers what came of the other's.
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
        assert!(self.wait_for_peer(count), "the other party has not come for {:?}: it is gone, or stuck", self.timeout);
        assert!(load_fresh(&self.inbound, words + FAILED) == 0, "the other party has failed: see what it says");
        load_fresh(&self.inbound, words)
    }

    /// Waits for the other party to have come `count` times. Who did not come once is not waited for again: a property
    /// that fails is tried many times more.
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

/// One of two testbed that have an end of each link.
pub struct TwoParty<K: Link, F> {
    own: Endpoint,
    meeting: Rc<PartyBarrier<K>>,
    open: F,
}

impl<K: Link, L: Link, F: Fn(usize) -> L> TwoParty<K, F> {
    /// The party that has the end `own` of each link. `open` gives that end of a new one, from the bytes of a window;
    /// both testbed are in there at once, and may meet.
    pub fn new(own: Endpoint, meeting: Rc<PartyBarrier<K>>, open: F) -> Self {
        Self { own, meeting, open }
    }
}

impl<K: Link, L: Link, F: Fn(usize) -> L> Testbed for TwoParty<K, F> {
    type EndpointPair = TwoPartyEndpoints<K, L>;

    fn link(&self) -> TwoPartyEndpoints<K, L> {
        self.meeting.wait(); // Neither uses an earlier link any more.
        let opened = catch_unwind(AssertUnwindSafe(|| (self.open)(WINDOW_BYTES)));
        let link = settled(&self.meeting, opened);
        TwoPartyEndpoints { own: self.own, link, meeting: self.meeting.clone() }
    }

    fn random_seed(&self) -> u64 {
        let number = RandomState::new().hash_one(0);
        let others = self.meeting.exchange(Ok(number));
        if self.own == Endpoint::A { number } else { others }
    }
}

/// What this party has got, once the other has got its own.
fn settled<K: Link, T>(meeting: &PartyBarrier<K>, outcome: thread::Result<T>) -> T {
    match outcome {
        Ok(value) => {
            meeting.wait();
            value
        }
        Err(failure) => {
            meeting.exchange(Err(failure));
            unreachable!("a failure is carried on")
        }
    }
}

/// A link, one end of which is this party's.
pub struct TwoPartyEndpoints<K: Link, L> {
    own: Endpoint,
    link: L,
    meeting: Rc<PartyBarrier<K>>,
}

impl<K: Link, L: Link> EndpointPair for TwoPartyEndpoints<K, L> {
    type Link = L;

    fn query(&mut self, end: Endpoint, question: impl FnOnce(&mut L) -> u64) -> u64 {
        if end != self.own {
            return self.meeting.exchange(Ok(0));
        }
        let answer = catch_unwind(AssertUnwindSafe(|| question(&mut self.link)));
        let own = *answer.as_ref().unwrap_or(&0);
        self.meeting.exchange(answer);
        own
    }

    fn both(&mut self, at_a: impl FnOnce(&mut L) + Send, at_b: impl FnOnce(&mut L) + Send) {
        let link = &mut self.link;
        let done = catch_unwind(AssertUnwindSafe(|| match self.own {
            Endpoint::A => at_a(link),
            Endpoint::B => at_b(link),
        }));
        self.meeting.exchange(done.map(|()| 0));
    }

    /// Each end trains at its own pace, as nodes do.
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
