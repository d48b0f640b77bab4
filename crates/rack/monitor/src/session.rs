//! The protocol of two monitors over the control lane of a link: a state machine without I/O.
//!
//! Frames, little endian, each a header of 8 bytes and a payload:
//!
//! ```text
//!   0  kind           one of the kinds below
//!   1  zero
//!   2  len_bytes      of the payload, at most 512
//!   4  number         of a PING, and of the PONG that answers it; 1 in a final CLOSE; zero elsewhere
//!
//!   HANDSHAKE version, digest of the rack file, name of the node    the first frame, sent once
//!   QUERY     address                        does a program listen there?
//!   RESPONSE  state, address                 whether a program listens, and whether the peer may connect
//!   WITHDRAW  address                        a listener that was reported is gone
//!   PING PONG                                keepalive, and round-trip time
//!   CLOSE     text                           the sender takes the link down, and why
//! ```
//!
//! Input of a peer is untrusted: each frame is checked before it is used. A peer that sends a malformed frame, is
//! silent for too long or does not read ends the session ([`SessionError`]), which takes down its link and nothing
//! else.

use std::collections::VecDeque;
use std::net::SocketAddr;

use control::SilenceTimer;
use thiserror::Error;

/// Version of the protocol.
pub const VERSION: u32 = 2;

const HEADER_BYTES: usize = 8;
const PAYLOAD_BYTES_MAX: usize = 512;
/// Maximum number of bytes that wait for a peer to read.
const UNSENT_BYTES_MAX: usize = 256 << 10;
/// Pings sent within the silence that ends a session.
const PINGS_PER_SILENCE: u64 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Handshake = 1,
    Query = 2,
    Response = 3,
    Withdraw = 4,
    Ping = 5,
    Pong = 6,
    Close = 7,
}

impl Kind {
    const ALL: [Self; 7] =
        [Self::Handshake, Self::Query, Self::Response, Self::Withdraw, Self::Ping, Self::Pong, Self::Close];

    fn of(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// The state of a queried listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenerState {
    /// A program listens at the address.
    Listening = 0,
    /// No program listens at the address.
    NotListening = 1,
    /// The access rules deny the connection.
    Denied = 2,
}

impl ListenerState {
    fn of(byte: u8) -> Option<Self> {
        [Self::Listening, Self::NotListening, Self::Denied].into_iter().find(|state| *state as u8 == byte)
    }
}

/// Settings of a session.
#[derive(Clone, Debug)]
pub struct SessionSettings {
    /// Name of this node.
    pub own_name: String,
    /// Name of the peer.
    pub peer_name: String,
    /// Digest of this node's rack file.
    pub digest: u64,
    /// Maximum silence of the peer in nanoseconds.
    pub silence_ns: u64,
}

/// A message of the peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerMessage {
    /// The peer's name, version and rack file match: the link can carry connections.
    Handshake,
    /// The peer queries a listener.
    Query(SocketAddr),
    /// The response to a query.
    Response(SocketAddr, ListenerState),
    /// A listener is gone.
    Withdraw(SocketAddr),
}

/// Why a session has ended.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SessionError {
    /// The peer was silent for too long.
    #[error("silent for {silent_ms} ms; see that its monitor runs, or raise timeouts.silence_ns")]
    Silent {
        /// Duration of the silence.
        silent_ms: u64,
    },
    /// The peer uses another version of the protocol.
    #[error("speaks version {found} of the control lane, not {VERSION}; run the same release on all nodes")]
    Version {
        /// Version of the peer.
        found: u32,
    },
    /// The peer has another rack file.
    #[error("has another rack file (digest {found:016x}, here {own:016x}); use the same file on all nodes")]
    Digest {
        /// Digest of the peer.
        found: u64,
        /// Digest of this node.
        own: u64,
    },
    /// The peer has another name than the device implies.
    #[error("says it is {found:?}; give each node its own --node")]
    Name {
        /// Name of the peer.
        found: String,
    },
    /// The peer has taken the link down.
    #[error("took the link down: {reason}")]
    Close {
        /// The peer's reason.
        reason: String,
        /// Whether the peer shuts down and resets its connections.
        is_final: bool,
    },
    /// A malformed frame.
    #[error("sent a malformed frame ({what}, {value:#x}); the link is trained again")]
    Malformed {
        /// The malformed part.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// The peer does not read.
    #[error("does not read ({waiting_bytes} bytes wait); the link is trained again")]
    NotReading {
        /// Bytes that wait.
        waiting_bytes: usize,
    },
}

impl SessionError {
    /// Returns whether the connections can be resumed later: the peer's monitor or proxy may have died, or be slow.
    pub fn is_recoverable(&self) -> bool {
        match self {
            Self::Silent { .. } | Self::NotReading { .. } => true,
            Self::Close { is_final, .. } => !is_final,
            Self::Version { .. } | Self::Digest { .. } | Self::Name { .. } | Self::Malformed { .. } => false,
        }
    }
}

fn malformed(what: &'static str, value: impl Into<u64>) -> SessionError {
    SessionError::Malformed { what, value: value.into() }
}

/// One side of the session of two monitors, which lasts while the link is up.
#[derive(Debug)]
pub struct Session {
    settings: SessionSettings,
    inbox: Vec<u8>,
    outbox: VecDeque<u8>,
    is_open: bool,
    silence: SilenceTimer,
    pinged_at_ns: u64,
    ping_number: u32,
    round_trip_ns: Option<u64>,
}

impl Session {
    /// Starts a session, which sends a handshake.
    pub fn new(settings: SessionSettings, now_ns: u64) -> Self {
        let silence_ns = settings.silence_ns;
        let mut session = Self {
            settings,
            inbox: Vec::new(),
            outbox: VecDeque::new(),
            is_open: false,
            silence: SilenceTimer::new(silence_ns, now_ns),
            pinged_at_ns: now_ns,
            ping_number: 0,
            round_trip_ns: None,
        };
        let mut payload = VERSION.to_le_bytes().to_vec();
        payload.extend(session.settings.digest.to_le_bytes());
        payload.extend(session.settings.own_name.as_bytes());
        session.send(Kind::Handshake, 0, &payload);
        session
    }

    /// Returns whether the peer has completed the handshake.
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// Returns the last round-trip time in nanoseconds.
    pub fn round_trip_ns(&self) -> Option<u64> {
        self.round_trip_ns
    }

    /// Queries a listener.
    pub fn query(&mut self, address: SocketAddr) {
        self.send(Kind::Query, 0, address.to_string().as_bytes());
    }

    /// Answers a query.
    pub fn respond(&mut self, address: SocketAddr, state: ListenerState) {
        let payload = [&[state as u8], address.to_string().as_bytes()].concat();
        self.send(Kind::Response, 0, &payload);
    }

    /// Reports that a listener is gone.
    pub fn withdraw(&mut self, address: SocketAddr) {
        self.send(Kind::Withdraw, 0, address.to_string().as_bytes());
    }

    /// Sends the reason for taking the link down, and whether this node shuts down.
    pub fn close(&mut self, reason: &str, is_final: bool) {
        self.send(Kind::Close, is_final.into(), printable(reason).as_bytes());
    }

    /// Returns the bytes to be sent.
    pub fn outbox(&mut self) -> &mut VecDeque<u8> {
        &mut self.outbox
    }

    /// Returns whether bytes wait to be sent.
    pub fn has_unsent(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Returns when [`Session::tick`] has to be called next.
    pub fn due_ns(&self) -> u64 {
        self.ping_due_ns().min(self.silence.due_ns())
    }

    fn ping_due_ns(&self) -> u64 {
        self.pinged_at_ns.saturating_add(self.ping_interval_ns())
    }

    fn ping_interval_ns(&self) -> u64 {
        (self.settings.silence_ns / PINGS_PER_SILENCE).max(1)
    }

    /// Sends pings and checks time limits.
    ///
    /// # Errors
    /// If the peer is silent or does not read.
    pub fn tick(&mut self, now_ns: u64) -> Result<(), SessionError> {
        if let Some(silent_ns) = self.silence.expired(now_ns) {
            return Err(SessionError::Silent { silent_ms: silent_ns / 1_000_000 });
        }
        if self.outbox.len() > UNSENT_BYTES_MAX {
            return Err(SessionError::NotReading { waiting_bytes: self.outbox.len() });
        }
        if now_ns >= self.ping_due_ns() {
            self.pinged_at_ns = now_ns;
            self.ping_number = self.ping_number.wrapping_add(1);
            self.send(Kind::Ping, self.ping_number, &[]);
        }
        Ok(())
    }

    /// Parses received bytes, and appends the messages to `messages`.
    ///
    /// # Errors
    /// If the peer's input ends the session.
    pub fn receive(&mut self, bytes: &[u8], now_ns: u64, messages: &mut Vec<PeerMessage>) -> Result<(), SessionError> {
        self.inbox.extend_from_slice(bytes);
        let mut consumed = 0;
        while let Some(Frame { kind, number, payload }) = frame(&self.inbox[consumed..])? {
            consumed += HEADER_BYTES + payload.len();
            let payload = payload.to_vec();
            self.silence.heard(now_ns);
            messages.extend(self.handle(kind, number, &payload, now_ns)?);
        }
        self.inbox.drain(..consumed);
        Ok(())
    }

    fn handle(
        &mut self,
        kind: Kind,
        number: u32,
        payload: &[u8],
        now_ns: u64,
    ) -> Result<Option<PeerMessage>, SessionError> {
        if kind == Kind::Close {
            let reason = printable(&String::from_utf8_lossy(payload));
            return Err(SessionError::Close { reason, is_final: number != 0 });
        }
        if (kind == Kind::Handshake) == self.is_open {
            return Err(malformed("unexpected frame", kind as u8));
        }
        match kind {
            Kind::Handshake => {
                self.check_handshake(payload)?;
                self.is_open = true;
                Ok(Some(PeerMessage::Handshake))
            }
            Kind::Query => address(payload).map(|address| Some(PeerMessage::Query(address))),
            Kind::Withdraw => address(payload).map(|address| Some(PeerMessage::Withdraw(address))),
            Kind::Response => {
                let (state, rest) = payload.split_first().ok_or_else(|| malformed("empty response", 0_u8))?;
                let found = ListenerState::of(*state).ok_or_else(|| malformed("listener state", *state))?;
                address(rest).map(|address| Some(PeerMessage::Response(address, found)))
            }
            Kind::Ping => {
                self.send(Kind::Pong, number, &[]);
                Ok(None)
            }
            Kind::Pong => {
                if number == self.ping_number {
                    self.round_trip_ns = Some(now_ns.saturating_sub(self.pinged_at_ns));
                }
                Ok(None)
            }
            Kind::Close => Ok(None),
        }
    }

    fn check_handshake(&self, payload: &[u8]) -> Result<(), SessionError> {
        let short = || malformed("short handshake", payload.len() as u64);
        let (version, rest) = payload.split_first_chunk::<4>().ok_or_else(short)?;
        let found = u32::from_le_bytes(*version);
        if found != VERSION {
            return Err(SessionError::Version { found });
        }
        let (digest, name) = rest.split_first_chunk::<8>().ok_or_else(short)?;
        let (found, own) = (u64::from_le_bytes(*digest), self.settings.digest);
        if found != own {
            return Err(SessionError::Digest { found, own });
        }
        if name != self.settings.peer_name.as_bytes() {
            let found: String = String::from_utf8_lossy(name).chars().take(64).collect();
            return Err(SessionError::Name { found });
        }
        Ok(())
    }

    fn send(&mut self, kind: Kind, number: u32, payload: &[u8]) {
        assert!(payload.len() <= PAYLOAD_BYTES_MAX, "{kind:?} of {} bytes", payload.len());
        self.outbox.extend([kind as u8, 0]);
        self.outbox.extend((payload.len() as u16).to_le_bytes());
        self.outbox.extend(number.to_le_bytes());
        self.outbox.extend(payload);
    }
}

/// Returns text without control characters that fits a payload in any encoding of its characters.
fn printable(text: &str) -> String {
    text.chars().filter(|letter| !letter.is_control()).take(PAYLOAD_BYTES_MAX / 4).collect()
}

/// A frame with a valid header.
struct Frame<'a> {
    kind: Kind,
    number: u32,
    payload: &'a [u8],
}

/// Parses the first frame of `bytes`, if it is complete.
fn frame(bytes: &[u8]) -> Result<Option<Frame<'_>>, SessionError> {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    let [byte, zero, len_low, len_high, number @ ..] = *header;
    let kind = Kind::of(byte).ok_or_else(|| malformed("frame kind", byte))?;
    let number = u32::from_le_bytes(number);
    let len_bytes = usize::from(u16::from_le_bytes([len_low, len_high]));
    if zero != 0 || len_bytes > PAYLOAD_BYTES_MAX {
        return Err(malformed("frame header", u64::from_le_bytes(*header)));
    }
    Ok(rest.get(..len_bytes).map(|payload| Frame { kind, number, payload }))
}

fn address(payload: &[u8]) -> Result<SocketAddr, SessionError> {
    let text = std::str::from_utf8(payload).ok();
    text.and_then(|text| text.parse().ok()).ok_or_else(|| malformed("address", payload.len() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn settings(own: &str, peer: &str) -> SessionSettings {
        SessionSettings { own_name: own.to_owned(), peer_name: peer.to_owned(), digest: 7, silence_ns: 1000 }
    }

    fn pair() -> [Session; 2] {
        [Session::new(settings("a", "b"), 0), Session::new(settings("b", "a"), 0)]
    }

    /// Passes the unsent bytes of `from` to `to`, `step` bytes at a time.
    fn pass(from: &mut Session, to: &mut Session, step: usize, now_ns: u64) -> Result<Vec<PeerMessage>, SessionError> {
        let bytes: Vec<u8> = from.outbox().drain(..).collect();
        let mut messages = Vec::new();
        bytes.chunks(step).try_for_each(|some| to.receive(some, now_ns, &mut messages))?;
        Ok(messages)
    }

    fn open_pair() -> [Session; 2] {
        let [mut a, mut b] = pair();
        assert_eq!(pass(&mut a, &mut b, 3, 0), Ok(vec![PeerMessage::Handshake]));
        assert_eq!(pass(&mut b, &mut a, 1000, 0), Ok(vec![PeerMessage::Handshake]));
        [a, b]
    }

    #[test]
    fn queries_and_responses_are_exchanged() {
        let [mut a, mut b] = open_pair();
        let address: SocketAddr = "[fd00::2]:6379".parse().unwrap();
        a.query(address);
        assert_eq!(pass(&mut a, &mut b, 1, 0), Ok(vec![PeerMessage::Query(address)]));
        for state in [ListenerState::Listening, ListenerState::NotListening, ListenerState::Denied] {
            b.respond(address, state);
            assert_eq!(pass(&mut b, &mut a, 7, 0), Ok(vec![PeerMessage::Response(address, state)]));
        }
        b.withdraw(address);
        assert_eq!(pass(&mut b, &mut a, 7, 0), Ok(vec![PeerMessage::Withdraw(address)]));
        for is_final in [false, true] {
            let [mut a, mut b] = open_pair();
            b.close("going\ndown", is_final);
            let close = SessionError::Close { reason: "goingdown".to_owned(), is_final };
            assert_eq!(close.is_recoverable(), !is_final);
            assert_eq!(pass(&mut b, &mut a, 7, 0), Err(close));
        }
    }

    #[test]
    fn a_hostile_close_reason_is_a_short_line() {
        let [_, mut b] = open_pair();
        let mut frame = vec![Kind::Close as u8, 0, 0, 2, 0, 0, 0, 0];
        frame.extend([0xff; PAYLOAD_BYTES_MAX]);
        let Err(SessionError::Close { reason, .. }) = b.receive(&frame, 0, &mut Vec::new()) else {
            panic!("no reason")
        };
        assert!(reason.len() <= PAYLOAD_BYTES_MAX, "{} bytes", reason.len());
    }

    #[test]
    fn pings_keep_a_session_alive_and_measure_the_round_trip() {
        let [mut a, mut b] = open_pair();
        for now_ns in (250..5000).step_by(250) {
            assert!(a.tick(now_ns).is_ok() && b.tick(now_ns).is_ok());
            pass(&mut a, &mut b, 64, now_ns).unwrap();
            pass(&mut b, &mut a, 64, now_ns + 40).unwrap();
        }
        assert_eq!(a.round_trip_ns(), Some(40));
    }

    #[test]
    fn silence_ends_a_session() {
        let [mut a, _] = open_pair();
        a.settings.silence_ns = 2_000_000;
        a.silence = SilenceTimer::new(a.settings.silence_ns, 0);
        while a.due_ns() < 2_000_000 {
            assert!(a.tick(a.due_ns()).is_ok());
        }
        assert_eq!((a.due_ns(), a.tick(2_000_000)), (2_000_000, Err(SessionError::Silent { silent_ms: 2 })));
    }

    #[test]
    fn a_pause_of_the_own_machine_ends_no_session() {
        let [mut a, _] = open_pair();
        assert!(a.tick(1_000_000_000).is_ok());
        assert!(a.tick(3_000_000_000).is_ok());
    }

    #[test]
    fn a_peer_that_does_not_read_ends_a_session() {
        let [mut a, _] = open_pair();
        let address = "127.0.0.1:1".parse().unwrap();
        (0..20_000).for_each(|_| a.query(address));
        assert!(matches!(a.tick(1), Err(SessionError::NotReading { .. })));
    }

    #[test]
    fn an_unexpected_peer_is_named() {
        let greeted = |change: fn(&mut SessionSettings)| {
            let mut other = settings("b", "a");
            change(&mut other);
            let (mut a, mut b) = (Session::new(settings("a", "b"), 0), Session::new(other, 0));
            pass(&mut b, &mut a, 64, 0).unwrap_err()
        };
        assert_eq!(greeted(|other| other.digest = 8), SessionError::Digest { found: 8, own: 7 });
        assert_eq!(greeted(|other| other.own_name = "c".to_owned()), SessionError::Name { found: "c".to_owned() });
    }

    #[test]
    fn frames_out_of_order_are_malformed() {
        let [mut a, mut b] = pair();
        a.outbox().clear();
        a.query("127.0.0.1:1".parse().unwrap());
        assert!(matches!(pass(&mut a, &mut b, 64, 0), Err(SessionError::Malformed { .. })));
        let [_, mut b] = open_pair();
        let mut again = Session::new(settings("a", "b"), 0);
        assert!(matches!(pass(&mut again, &mut b, 64, 0), Err(SessionError::Malformed { .. })));
    }

    /// Returns bytes that resemble frames.
    fn hostile_bytes() -> impl Strategy<Value = Vec<u8>> {
        let frame_like = (0..9_u8, 0..2_u8, 0..40_u16, any::<u32>(), prop::collection::vec(any::<u8>(), 0..40))
            .prop_map(|(kind, zero, len, number, payload)| {
                let mut bytes = vec![kind, zero / 2];
                bytes.extend(len.to_le_bytes());
                bytes.extend(number.to_le_bytes());
                bytes.extend(payload.into_iter().take(usize::from(len)));
                bytes
            });
        prop::collection::vec(prop_oneof![frame_like, prop::collection::vec(any::<u8>(), 0..20)], 0..20)
            .prop_map(|parts| parts.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn arbitrary_input_leaves_a_session_running_or_ends_it(
            bytes in hostile_bytes(), step in 1..50_usize, open: bool
        ) {
            let [mut session, _] = if open { open_pair() } else { pair() };
            let mut messages = Vec::new();
            let ended = bytes.chunks(step).try_for_each(|some| session.receive(some, 1, &mut messages));
            prop_assert!(messages.len() <= bytes.len() / HEADER_BYTES);
            prop_assert!(session.inbox.len() <= HEADER_BYTES + PAYLOAD_BYTES_MAX + step || ended.is_err());
        }

        #[test]
        fn frames_can_arrive_in_any_pieces(
            ports in prop::collection::vec(any::<u16>(), 0..30), step in 1..200_usize
        ) {
            let [mut a, mut b] = open_pair();
            let at = |port: &u16| SocketAddr::from(([127, 77, 0, 2], *port));
            let addresses: Vec<SocketAddr> = ports.iter().map(at).collect();
            addresses.iter().for_each(|address| a.query(*address));
            let expected: Vec<PeerMessage> = addresses.into_iter().map(PeerMessage::Query).collect();
            prop_assert_eq!(pass(&mut a, &mut b, step, 0), Ok(expected));
        }
    }
}
