//! Who has the ends of the links that facts are shown on.
//!
//! A fact is written once, as steps at the two ends. Where both ends are in one process ([`SingleProcess`]), that process
//! takes all of them. Where each has an owner ([`TwoParty`](super::TwoParty)), both owners run the fact from its start to
//! its end: each takes the steps of its own end, and waits while the other takes its.

use super::common::WINDOW_BYTES;
use crate::{Endpoint, Link, LinkState, train_both};
use std::hash::{BuildHasher, RandomState};
use std::thread;

/// What makes the links that facts are shown on.
pub trait Testbed {
    /// A link of theirs.
    type EndpointPair: EndpointPair;

    /// A new link, which was never trained. Two may be there at once.
    fn link(&self) -> Self::EndpointPair;

    /// A number by chance, the same for all testbed.
    fn random_seed(&self) -> u64;
}

/// The two ends of a link, wherever they are. What fails at one end fails for all testbed.
pub trait EndpointPair {
    /// An end.
    type Link: Link;

    /// Asks one end something, whose answer all testbed get.
    fn query(&mut self, end: Endpoint, question: impl FnOnce(&mut Self::Link) -> u64) -> u64;

    /// Each end does something at the same time as the other.
    fn both(&mut self, at_a: impl FnOnce(&mut Self::Link) + Send, at_b: impl FnOnce(&mut Self::Link) + Send);

    /// Brings the link up, each end as is usual for who has it; says whether it is.
    fn bring_up(&mut self) -> bool;

    /// One end does something, and what comes next comes behind it.
    fn at(&mut self, end: Endpoint, step: impl FnOnce(&mut Self::Link)) {
        self.query(end, |link| {
            step(link);
            0
        });
    }

    /// Trains both ends in turn; says whether the link is up.
    fn train_in_turn(&mut self, first: Endpoint) -> bool {
        (0..TRAINING_STEPS_MAX).any(|_| {
            let turns = [first, first.other()].map(|end| self.query(end, |link| is_up(link.train())));
            turns == [1; 2] && self.query(first, |link| is_up(link.state())) == 1
        })
    }
}

/// Turns that bring up any link.
const TRAINING_STEPS_MAX: usize = 8;

fn is_up(state: LinkState) -> u64 {
    u64::from(state == LinkState::Up)
}

/// Both ends in one process: a function from the bytes of a window to both ends of a new link.
#[derive(Debug)]
pub struct SingleProcess<F> {
    make: F,
}

impl<L: Link, F: Fn(usize) -> (L, L)> SingleProcess<F> {
    /// Whoever makes links this way.
    pub fn new(make: F) -> Self {
        Self { make }
    }
}

impl<L: Link, F: Fn(usize) -> (L, L)> Testbed for SingleProcess<F> {
    type EndpointPair = SingleProcessEndpoints<L>;

    fn link(&self) -> SingleProcessEndpoints<L> {
        let (a, b) = (self.make)(WINDOW_BYTES);
        SingleProcessEndpoints { a, b }
    }

    fn random_seed(&self) -> u64 {
        RandomState::new().hash_one(0)
    }
}

/// Both ends, as this process has them.
#[derive(Debug)]
pub struct SingleProcessEndpoints<L> {
    a: L,
    b: L,
}

impl<L: Link> EndpointPair for SingleProcessEndpoints<L> {
    type Link = L;

    fn query(&mut self, end: Endpoint, question: impl FnOnce(&mut L) -> u64) -> u64 {
        match end {
            Endpoint::A => question(&mut self.a),
            Endpoint::B => question(&mut self.b),
        }
    }

    fn both(&mut self, at_a: impl FnOnce(&mut L) + Send, at_b: impl FnOnce(&mut L) + Send) {
        let Self { a, b } = self;
        thread::scope(|scope| {
            scope.spawn(move || at_b(b));
            at_a(a);
        });
    }

    fn bring_up(&mut self) -> bool {
        train_both(&mut self.a, &mut self.b)
    }
}
