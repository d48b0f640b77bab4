//! Where the endpoints of the tested links are.
//!
//! A test is written once, as steps at the two endpoints. Where both endpoints are in one process ([`SingleProcess`]),
//! that process runs all steps. Where each endpoint has an owner ([`TwoParty`](super::TwoParty)), both owners run the
//! test from its start to its end: each runs the steps of its own endpoint, and waits while the other runs its steps.

use super::common::WINDOW_BYTES;
use crate::{Endpoint, Link, LinkState, train_both};
use std::hash::{BuildHasher, RandomState};
use std::thread;

/// Makes the links that are tested.
pub trait Testbed {
    /// The endpoints of a link.
    type EndpointPair: EndpointPair;

    /// Makes a new link that was never trained. Two may exist at the same time.
    fn link(&self) -> Self::EndpointPair;

    /// Returns a random number, the same for all parties.
    fn random_seed(&self) -> u64;
}

/// The two endpoints of a link, wherever they are. A failure at one endpoint is a failure for all parties.
pub trait EndpointPair {
    /// An endpoint.
    type Link: Link;

    /// Runs a step at one endpoint. All parties get its result.
    fn query(&mut self, endpoint: Endpoint, step: impl FnOnce(&mut Self::Link) -> u64) -> u64;

    /// Runs a step at each endpoint, both at the same time.
    fn both(&mut self, at_a: impl FnOnce(&mut Self::Link) + Send, at_b: impl FnOnce(&mut Self::Link) + Send);

    /// Trains both endpoints, each in the way of its holder. Returns whether the link is up.
    fn bring_up(&mut self) -> bool;

    /// Runs a step at one endpoint, before anything that follows.
    fn at(&mut self, endpoint: Endpoint, step: impl FnOnce(&mut Self::Link)) {
        self.query(endpoint, |link| {
            step(link);
            0
        });
    }

    /// Trains both endpoints alternately. Returns whether the link is up.
    fn train_in_turn(&mut self, first: Endpoint) -> bool {
        (0..TRAINING_STEPS_MAX).any(|_| {
            let up = [first, first.other()].map(|endpoint| self.query(endpoint, |link| is_up(link.train())));
            up == [1; 2] && self.query(first, |link| is_up(link.state())) == 1
        })
    }
}

/// Number of alternations that bring up any link.
const TRAINING_STEPS_MAX: usize = 8;

fn is_up(state: LinkState) -> u64 {
    u64::from(state == LinkState::Up)
}

/// Both endpoints in one process, made by a function from the bytes of a window to both endpoints of a new link.
#[derive(Debug)]
pub struct SingleProcess<F> {
    make: F,
}

impl<L: Link, F: Fn(usize) -> (L, L)> SingleProcess<F> {
    /// A testbed whose links `make` makes.
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

/// Both endpoints, in this process.
#[derive(Debug)]
pub struct SingleProcessEndpoints<L> {
    a: L,
    b: L,
}

impl<L: Link> EndpointPair for SingleProcessEndpoints<L> {
    type Link = L;

    fn query(&mut self, endpoint: Endpoint, step: impl FnOnce(&mut L) -> u64) -> u64 {
        match endpoint {
            Endpoint::A => step(&mut self.a),
            Endpoint::B => step(&mut self.b),
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
