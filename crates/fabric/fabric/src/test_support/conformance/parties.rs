//! Who has the ends of the links that facts are shown on.
//!
//! A fact is written once, as steps at the two ends. Where both ends are in one process ([`OneProcess`]), that process
//! takes all of them. Where each has an owner ([`Apart`](super::Apart)), both owners run the fact from its start to
//! its end: each takes the steps of its own end, and waits while the other takes its.

use crate::{Link, LinkState, train_both};
use std::hash::{BuildHasher, RandomState};
use std::thread;

/// One of the two ends of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The first one.
    A,
    /// The second one.
    B,
}

impl End {
    /// Both.
    pub const ALL: [Self; 2] = [Self::A, Self::B];

    /// The end that is not this one.
    pub fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

/// What makes the links that facts are shown on.
pub trait Parties {
    /// A link of theirs.
    type Ends: Ends;

    /// A new link, which was never trained. Two may be there at once.
    fn link(&self) -> Self::Ends;

    /// A number by chance, the same for all parties.
    fn draw(&self) -> u64;
}

/// The two ends of a link, wherever they are. What fails at one end fails for all parties.
pub trait Ends {
    /// An end.
    type Link: Link;

    /// Asks one end something, whose answer all parties get.
    fn ask(&mut self, end: End, question: impl FnOnce(&mut Self::Link) -> u64) -> u64;

    /// Each end does something at the same time as the other.
    fn both(&mut self, at_a: impl FnOnce(&mut Self::Link) + Send, at_b: impl FnOnce(&mut Self::Link) + Send);

    /// Brings the link up, each end as is usual for who has it; says whether it is.
    fn bring_up(&mut self) -> bool;

    /// One end does something, and what comes next comes behind it.
    fn at(&mut self, end: End, step: impl FnOnce(&mut Self::Link)) {
        self.ask(end, |link| {
            step(link);
            0
        });
    }

    /// Trains both ends in turn; says whether the link is up.
    fn train_in_turn(&mut self, first: End) -> bool {
        (0..TURNS_MAX).any(|_| {
            let turns = [first, first.other()].map(|end| self.ask(end, |link| is_up(link.train())));
            turns == [1; 2] && self.ask(first, |link| is_up(link.state())) == 1
        })
    }
}

/// Turns that bring up any link.
const TURNS_MAX: usize = 8;

fn is_up(state: LinkState) -> u64 {
    u64::from(state == LinkState::Up)
}

/// Both ends in one process: a function from the bytes of a window to both ends of a new link.
#[derive(Debug)]
pub struct OneProcess<F> {
    make: F,
}

impl<L: Link, F: Fn(usize) -> (L, L)> OneProcess<F> {
    /// Whoever makes links this way.
    pub fn new(make: F) -> Self {
        Self { make }
    }
}

impl<L: Link, F: Fn(usize) -> (L, L)> Parties for OneProcess<F> {
    type Ends = EndsHere<L>;

    fn link(&self) -> EndsHere<L> {
        let (a, b) = (self.make)(super::WINDOW_BYTES);
        EndsHere { a, b }
    }

    fn draw(&self) -> u64 {
        RandomState::new().hash_one(0)
    }
}

/// Both ends, as this process has them.
#[derive(Debug)]
pub struct EndsHere<L> {
    a: L,
    b: L,
}

impl<L: Link> Ends for EndsHere<L> {
    type Link = L;

    fn ask(&mut self, end: End, question: impl FnOnce(&mut L) -> u64) -> u64 {
        match end {
            End::A => question(&mut self.a),
            End::B => question(&mut self.b),
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
