//! The state of one connection in an engine.

use crate::frame::{Carried, ConnectionNumber, OPEN_PAYLOAD_BYTES_MAX, Resumption};
use crate::local::{Broken, Input, LocalEndpoint};
use crate::placement::{Class, TrafficHistory};
use crate::retransmit::RetransmitBuffer;
use std::collections::VecDeque;

/// Bytes that may follow an `Open` before it is answered.
pub const CREDIT_BYTES_INITIAL: u32 = 16 << 10;
/// Bound on the bytes in flight to one connection.
pub const CREDIT_BYTES_MAX: u32 = 1 << 30;

/// The payload of an `Open`, which describes the connection; opaque to the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenPayload {
    bytes: [u8; OPEN_PAYLOAD_BYTES_MAX],
    len_bytes: usize,
}

impl OpenPayload {
    /// Copies bytes; returns `None` if there are none or too many.
    pub fn new(source: &[u8]) -> Option<Self> {
        let mut bytes = [0; OPEN_PAYLOAD_BYTES_MAX];
        bytes.get_mut(..source.len())?.copy_from_slice(source);
        (!source.is_empty()).then_some(Self { bytes, len_bytes: source.len() })
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len_bytes]
    }
}

/// How far the two proxies have established a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Opened by this node, not answered yet.
    Opening,
    /// Opened by the peer; the engine's driver looks for the server.
    Answering,
    /// Both programs are connected.
    Open,
    /// Over, except for frames that are still due.
    Over,
}

/// Whether and how a direction has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamEnd {
    /// It has not ended.
    None,
    /// The sender has shut it down.
    Finished,
    /// The sender's program has closed.
    Closed,
}

/// What a connection waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitState {
    /// A frame of the peer, or an event of its descriptors.
    Idle,
    /// Input of the program, for which every poll checks.
    Polled,
    /// Being served, in a queue of its partition.
    Queued,
    /// As `Idle`, and the program was asked to ring.
    Parked,
}

/// The control frames that are due, sent in the order of their bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Due(u16);

impl Due {
    pub(crate) const RESUME: Self = Self(1);
    pub(crate) const OPEN: Self = Self(2);
    pub(crate) const OPENED: Self = Self(4);
    pub(crate) const REFUSED: Self = Self(8);
    pub(crate) const CREDIT: Self = Self(16);
    pub(crate) const MOVE: Self = Self(32);
    pub(crate) const LEFT: Self = Self(64);
    pub(crate) const RING: Self = Self(128);
    pub(crate) const FIN: Self = Self(256);
    pub(crate) const CLOSE: Self = Self(512);
    pub(crate) const RESET: Self = Self(1024);
    /// The frames that may be sent before the peer has resumed the connection.
    const BEFORE_RESUMED: Self = Self(Self::RESUME.0 | Self::OPEN.0);
    /// The frames that end a connection: sent last, and at most one of them.
    pub(crate) const FINAL: Self = Self(Self::REFUSED.0 | Self::CLOSE.0 | Self::RESET.0);

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
    pub number: ConnectionNumber,
    pub open_payload: Option<OpenPayload>,
    pub phase: Phase,
    /// `None` before the server is found and after the program has closed.
    pub local: Option<L>,
    pub due: Due,
    /// The error number of a refusal or a reset.
    pub errno: u32,
    /// Whether its programs may move its bytes to a span; see `engine::with_span`.
    pub has_span: bool,

    /// The class of the partition in which this node sends.
    pub class: Class,
    /// The class that the next `Move` announces.
    pub class_next: Class,
    pub sent: u64,
    /// With failover: bytes consumed from the program that the peer has not acknowledged.
    pub retransmit: RetransmitBuffer,
    /// After a lost link: the peer has not resumed the connection yet.
    pub is_resuming: bool,
    /// When that link was lost; only for connections with a span.
    pub lost_ns: u64,
    /// The frame that ends the connection, once it is over.
    pub final_frame: Due,
    /// The position up to which the peer accepts bytes.
    pub send_limit: u64,
    pub out_end: StreamEnd,
    pub traffic: TrafficHistory,
    /// It ran out of input when it was last served, after few bytes.
    pub is_sparse: bool,

    /// The class of the partition in which the peer sends.
    pub in_class: Class,
    pub received: u64,
    /// The position up to which this node has granted credit.
    pub granted: u64,
    /// Bytes that the program had no room for.
    pub undelivered: VecDeque<u8>,
    pub in_end: StreamEnd,
    /// Whether the program was notified of the end.
    pub in_end_is_delivered: bool,

    pub wait_state: WaitState,
    pub is_in_polled: bool,
    pub is_in_control: bool,
    pub is_in_wake_list: bool,
    pub active_ns: u64,
}

impl<L> Connection<L> {
    pub(crate) fn new(number: ConnectionNumber, phase: Phase, now_ns: u64) -> Self {
        Self {
            number,
            open_payload: None,
            phase,
            local: None,
            due: Due::default(),
            errno: 0,
            has_span: false,
            class: Class::Latency,
            class_next: Class::Latency,
            sent: 0,
            retransmit: RetransmitBuffer::default(),
            is_resuming: false,
            lost_ns: 0,
            final_frame: Due::default(),
            send_limit: u64::from(CREDIT_BYTES_INITIAL),
            out_end: StreamEnd::None,
            traffic: TrafficHistory::new(now_ns),
            is_sparse: true,
            in_class: Class::Latency,
            received: 0,
            granted: u64::from(CREDIT_BYTES_INITIAL),
            undelivered: VecDeque::new(),
            in_end: StreamEnd::None,
            in_end_is_delivered: false,
            wait_state: WaitState::Idle,
            is_in_polled: false,
            is_in_control: false,
            is_in_wake_list: false,
            active_ns: now_ns,
        }
    }

    /// Returns the number of bytes that may be sent now.
    #[inline]
    pub(crate) fn credit_bytes(&self) -> usize {
        usize::try_from(self.send_limit.saturating_sub(self.sent)).unwrap_or(usize::MAX)
    }

    /// Returns whether the peer has to confirm what was carried before anything is (`engine::suspended`).
    pub(crate) fn is_suspended(&self) -> bool {
        self.has_span && self.is_resuming
    }

    /// Returns the due frames that may be sent now.
    pub(crate) fn sendable(&self) -> Due {
        if self.is_resuming { Due(self.due.0 & Due::BEFORE_RESUMED.0) } else { self.due }
    }

    /// Returns what there is to send.
    pub(crate) fn input(&mut self) -> Input
    where
        L: LocalEndpoint,
    {
        match (self.unsent_bytes(), &mut self.local) {
            (0, Some(local)) => local.input(),
            (0, None) => Input::Nothing,
            (bytes, _) => Input::Bytes(bytes),
        }
    }

    /// Makes sure that the next bytes to be sent are retained: reads them from the program, unless they are
    /// retransmitted.
    pub(crate) fn retain(&mut self, len_bytes: usize) -> Result<(), Broken>
    where
        L: LocalEndpoint,
    {
        match &mut self.local {
            Some(local) if self.retransmit.end() == self.sent => {
                self.retransmit.extend(len_bytes, |skip_bytes, piece| local.read_input(skip_bytes, piece));
                local.consume(len_bytes)
            }
            _ => Ok(()),
        }
    }

    /// Returns this end's state for a `Resume`, other than the position received.
    fn resumption(&self) -> Resumption {
        Resumption { limit: self.granted as u32, has_end: self.in_end == StreamEnd::Finished }
    }

    /// Returns the payload of the frame by which this end resumes.
    pub(crate) fn resumption_payload(&mut self) -> Vec<u8>
    where
        L: LocalEndpoint,
    {
        if !self.has_span {
            return self.resumption().encode().to_vec();
        }
        self.local.as_mut().and_then(L::carried).unwrap_or(Carried::UNKNOWN).encode().to_vec()
    }

    /// Returns the number of bytes that were consumed from the program and must be sent, for the first time or again.
    pub(crate) fn unsent_bytes(&self) -> usize {
        usize::try_from(self.retransmit.end().saturating_sub(self.sent)).unwrap_or(usize::MAX)
    }

    /// Returns whether input of the program can be sent now.
    #[inline]
    pub(crate) fn wants_input(&self) -> bool {
        self.out_end != StreamEnd::None || self.credit_bytes() > 0
    }

    /// Returns whether a check would find nothing, and the connection stays polled: it was active after
    /// `active_ns_min`.
    #[inline]
    pub(crate) fn is_quiet(&mut self, active_ns_min: u64) -> bool
    where
        L: LocalEndpoint,
    {
        let stays = self.wait_state == WaitState::Polled && self.active_ns > active_ns_min;
        let is_waited_for = stays && self.undelivered.is_empty() && self.wants_input();
        is_waited_for && self.local.as_mut().is_some_and(|local| !local.may_have_input())
    }

    /// Returns the position up to which the program has the bytes.
    pub(crate) fn delivered(&self) -> u64 {
        self.received - self.undelivered.len() as u64
    }

    /// Extends the low half of a position that the peer wrote and that cannot lie before `base`. Returns `None` if it
    /// is further ahead than any valid one.
    pub(crate) fn position_after(base: u64, low: u32) -> Option<u64> {
        let ahead = low.wrapping_sub(base as u32);
        (ahead <= CREDIT_BYTES_MAX).then(|| base + u64::from(ahead))
    }
}
