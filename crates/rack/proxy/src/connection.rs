//! What an engine knows of one connection.

use crate::frame::{Number, Resumption, TUPLE_BYTES_MAX};
use crate::placement::{Class, Observed};
use crate::retained::Retained;
use crate::{Broken, Input, Local};
use std::collections::VecDeque;

/// Bytes that may follow an `Open` before it is answered.
pub const CREDIT_BYTES_INITIAL: u32 = 16 << 10;
/// Most bytes that may be under way to one connection.
pub const CREDIT_BYTES_MAX: u32 = 1 << 30;

/// What an `Open` says of the connection: opaque here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuple {
    bytes: [u8; TUPLE_BYTES_MAX],
    len_bytes: usize,
}

impl Tuple {
    /// From bytes; `None` if they are none or too many.
    pub fn new(source: &[u8]) -> Option<Self> {
        let mut bytes = [0; TUPLE_BYTES_MAX];
        bytes.get_mut(..source.len())?.copy_from_slice(source);
        (!source.is_empty()).then_some(Self { bytes, len_bytes: source.len() })
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len_bytes]
    }
}

/// How far the two proxies have got with each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Opened by this node, not answered yet.
    Opening,
    /// Opened by the peer; whoever drives the engine looks for the program.
    Answering,
    /// Both ends are there.
    Open,
    /// Over: what is due is still to be said.
    Over,
}

/// How a direction ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// It has not.
    None,
    /// Shut down.
    Finished,
    /// The whole end is gone.
    Closed,
}

/// Where a connection waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// For a frame of the peer, or for its lifeline.
    Resting,
    /// Among those that are looked at in each turn.
    Polled,
    /// For its turn to send.
    Queued,
    /// As resting, and the program was asked to ring.
    Parked,
}

/// What has to be said to the peer, in the order of its bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Due(u16);

impl Due {
    pub(crate) const RESUME: Self = Self(1);
    pub(crate) const OPEN: Self = Self(2);
    pub(crate) const OPENED: Self = Self(4);
    pub(crate) const REFUSED: Self = Self(8);
    pub(crate) const CREDIT: Self = Self(16);
    pub(crate) const MOVE: Self = Self(32);
    pub(crate) const FIN: Self = Self(64);
    pub(crate) const CLOSE: Self = Self(128);
    pub(crate) const RESET: Self = Self(256);
    /// All that may be said before the peer has said where it stands.
    const GREETINGS: Self = Self(Self::RESUME.0 | Self::OPEN.0);
    /// Said last, and alone.
    pub(crate) const FAREWELLS: Self = Self(Self::REFUSED.0 | Self::CLOSE.0 | Self::RESET.0);

    pub(crate) fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.0 |= other.0;
    }

    pub(crate) fn remove(&mut self, other: Self) {
        self.0 &= !other.0;
    }

    pub(crate) fn first(self) -> Option<Self> {
        (self.0 != 0).then(|| Self(self.0 & self.0.wrapping_neg()))
    }
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Connection<L> {
    pub number: Number,
    pub tuple: Option<Tuple>,
    pub phase: Phase,
    /// None before the program is found and after it is gone.
    pub local: Option<L>,
    pub due: Due,
    /// What a refusal or a reset says.
    pub errno: u32,
    /// It lies in the windows; see `engine::direct`.
    pub is_direct: bool,

    /// Which partition takes what is sent.
    pub class: Class,
    /// Its program has been told that long copies are to give way.
    pub gives_way: bool,
    /// Where the next `Move` leads.
    pub class_next: Class,
    pub sent: u64,
    /// With failover: what was taken from the program and the peer is not known to have.
    pub retained: Retained,
    /// After a lost link: the peer has not said yet where it stands.
    pub is_resuming: bool,
    /// When that link was lost, of a connection in the windows.
    pub lost_ns: u64,
    /// The last that the peer is to hear, once it is over.
    pub farewell: Due,
    /// Up to where the peer takes bytes.
    pub limit: u64,
    pub out_end: End,
    pub observed: Observed,
    /// It ran dry in its last turn, after few bytes.
    pub is_sparse: bool,

    /// In which partition the peer speaks.
    pub in_class: Class,
    pub received: u64,
    /// Up to where this node has said that it takes bytes.
    pub granted: u64,
    /// Bytes that the program had no room for.
    pub held: VecDeque<u8>,
    pub in_end: End,
    /// The program knows of the end.
    pub in_end_is_told: bool,

    pub place: Place,
    pub is_in_polled: bool,
    pub is_in_control: bool,
    pub is_touched: bool,
    pub active_ns: u64,
}

impl<L> Connection<L> {
    pub(crate) fn new(number: Number, phase: Phase, now_ns: u64) -> Self {
        Self {
            number,
            tuple: None,
            phase,
            local: None,
            due: Due::default(),
            errno: 0,
            is_direct: false,
            class: Class::Latency,
            gives_way: false,
            class_next: Class::Latency,
            sent: 0,
            retained: Retained::default(),
            is_resuming: false,
            lost_ns: 0,
            farewell: Due::default(),
            limit: u64::from(CREDIT_BYTES_INITIAL),
            out_end: End::None,
            observed: Observed::new(now_ns),
            is_sparse: true,
            in_class: Class::Latency,
            received: 0,
            granted: u64::from(CREDIT_BYTES_INITIAL),
            held: VecDeque::new(),
            in_end: End::None,
            in_end_is_told: false,
            place: Place::Resting,
            is_in_polled: false,
            is_in_control: false,
            is_touched: false,
            active_ns: now_ns,
        }
    }

    /// Bytes that may be sent now.
    #[inline]
    pub(crate) fn credit_bytes(&self) -> usize {
        usize::try_from(self.limit.saturating_sub(self.sent)).unwrap_or(usize::MAX)
    }

    /// What can be said now.
    pub(crate) fn sayable(&self) -> Due {
        if self.is_resuming { Due(self.due.0 & Due::GREETINGS.0) } else { self.due }
    }

    /// What there is to send.
    pub(crate) fn input(&mut self) -> Input
    where
        L: Local,
    {
        match (self.unsent_bytes(), &mut self.local) {
            (0, Some(local)) => local.input(),
            (0, None) => Input::Nothing,
            (bytes, _) => Input::Bytes(bytes),
        }
    }

    /// Makes sure that the next bytes to be sent are kept: takes them from the program, unless they are sent again.
    pub(crate) fn retain(&mut self, len_bytes: usize) -> Result<(), Broken>
    where
        L: Local,
    {
        match &mut self.local {
            Some(local) if self.retained.end() == self.sent => {
                self.retained.extend(len_bytes, |skip_bytes, piece| local.read_input(skip_bytes, piece));
                local.consume(len_bytes)
            }
            _ => Ok(()),
        }
    }

    /// Where this end stands, besides what it has received.
    pub(crate) fn resumption(&self) -> Resumption {
        Resumption { limit: self.granted as u32, has_end: self.in_end == End::Finished }
    }

    /// Bytes that were taken from the program and have to be sent, for the first time or again.
    pub(crate) fn unsent_bytes(&self) -> usize {
        usize::try_from(self.retained.end().saturating_sub(self.sent)).unwrap_or(usize::MAX)
    }

    /// Whether what the program sends can be sent on.
    #[inline]
    pub(crate) fn wants_input(&self) -> bool {
        self.out_end != End::None || self.credit_bytes() > 0
    }

    /// Whether a look would find nothing, and it goes on being looked at: it was active after `active_ns_min`.
    #[inline]
    pub(crate) fn is_quiet(&mut self, active_ns_min: u64) -> bool
    where
        L: Local,
    {
        let stays = self.place == Place::Polled && self.active_ns > active_ns_min;
        let is_waited_for = stays && self.held.is_empty() && self.wants_input();
        is_waited_for && self.local.as_mut().is_some_and(|local| !local.may_have_input())
    }

    /// Bytes that the program has, or that it had no room for yet.
    pub(crate) fn delivered(&self) -> u64 {
        self.received - self.held.len() as u64
    }

    /// Takes a position that the peer wrote and that cannot lie before `base`; `None` if it is further on than any
    /// honest one.
    pub(crate) fn position_after(base: u64, low: u32) -> Option<u64> {
        let ahead = low.wrapping_sub(base as u32);
        (ahead <= CREDIT_BYTES_MAX).then(|| base + u64::from(ahead))
    }
}
