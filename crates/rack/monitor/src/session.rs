//! What two monitors say to each other over the control lane of a link: a state machine without I/O.
//!
//! Frames, little endian, each a header of 8 bytes and a payload:
//!
//! ```text
//!   0  kind           one of the kinds below
//!   1  zero
//!   2  len_bytes      of the payload, at most 512
//!   4  number         of a PING, and of the PONG that answers it; 1 in a BYE for good; zero elsewhere
//!
//!   HELLO     version, digest of the rack file, name of the node      the first frame, and no other
//!   QUERY     address                          does a program listen there?
//!   ANSWER    verdict, address                 whether one does, and whether the peer may know
//!   WITHDRAW  address                          what was answered with yes is gone
//!   PING PONG                                  alive, and how far away
//!   BYE       text                             this end takes the link down, and why
//! ```
//!
//! What a peer sends is hostile: each frame is checked before it is used, and a peer that sends nonsense, falls silent
//! or does not read ends the session ([`SessionError`]), which takes the link down and nothing else.

use std::collections::VecDeque;
use std::net::SocketAddr;

use thiserror::Error;

/// The version of this exchange.
pub const VERSION: u32 = 2;

const HEADER_BYTES: usize = 8;
const PAYLOAD_BYTES_MAX: usize = 512;
/// Bytes that wait for a peer that does not read, at most.
const OUTBOX_BYTES_MAX: usize = 256 << 10;
/// Pings in the time after which silence ends a session.
const PINGS_PER_SILENCE: u64 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Hello = 1,
    Query = 2,
    Answer = 3,
    Withdraw = 4,
    Ping = 5,
    Pong = 6,
    Bye = 7,
}

impl Kind {
    const ALL: [Self; 7] = [Self::Hello, Self::Query, Self::Answer, Self::Withdraw, Self::Ping, Self::Pong, Self::Bye];

    fn of(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// What is said of an address that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// A program listens there.
    Listening = 0,
    /// Nobody listens there.
    Nobody = 1,
    /// The access rules do not allow it.
    Denied = 2,
}

impl Verdict {
    fn of(byte: u8) -> Option<Self> {
        [Self::Listening, Self::Nobody, Self::Denied].into_iter().find(|verdict| *verdict as u8 == byte)
    }
}

/// What a session knows before it begins.
#[derive(Clone, Debug)]
pub struct Settings {
    /// This node's name.
    pub own: String,
    /// The peer's name.
    pub peer: String,
    /// The digest of this node's rack file.
    pub digest: u64,
    /// How long the peer may be silent.
    pub silence_ns: u64,
}

/// What the peer said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// It is who it should be, and has the same rack file: the link can carry connections.
    Hello,
    /// It asks for a listener.
    Query(SocketAddr),
    /// It answers.
    Answer(SocketAddr, Verdict),
    /// A listener is gone.
    Withdraw(SocketAddr),
}

/// Why a session has ended.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SessionError {
    /// Nothing was heard for too long.
    #[error("silent for {silent_ms} ms; see that its monitor runs, or raise timeouts.silence_ns")]
    Silent {
        /// For how long.
        silent_ms: u64,
    },
    /// Another version of this exchange.
    #[error("speaks version {found} of the control lane, not {VERSION}; run the same release on all nodes")]
    Version {
        /// The peer's.
        found: u32,
    },
    /// Another rack file.
    #[error("has another rack file (digest {found:016x}, here {own:016x}); use the same file on all nodes")]
    Digest {
        /// The peer's.
        found: u64,
        /// This node's.
        own: u64,
    },
    /// Another node than the device says.
    #[error("says it is {found:?}; give each node its own --node")]
    Name {
        /// The name it gave.
        found: String,
    },
    /// The peer has taken the link down.
    #[error("took the link down: {reason}")]
    Bye {
        /// In its own words.
        reason: String,
        /// Its node ends, and resets what it has.
        is_for_good: bool,
    },
    /// A frame that no monitor sends.
    #[error("sent nonsense ({what}, {value:#x}); the link is trained again")]
    Nonsense {
        /// What was wrong.
        what: &'static str,
        /// What it was.
        value: u64,
    },
    /// What was said to it piles up.
    #[error("does not read ({waiting_bytes} bytes wait); the link is trained again")]
    Deaf {
        /// Bytes that wait.
        waiting_bytes: usize,
    },
}

impl SessionError {
    /// Whether an honest peer may come back to what it had: its monitor or its proxy has died, or is slow.
    pub fn may_return(&self) -> bool {
        match self {
            Self::Silent { .. } | Self::Deaf { .. } => true,
            Self::Bye { is_for_good, .. } => !is_for_good,
            Self::Version { .. } | Self::Digest { .. } | Self::Name { .. } | Self::Nonsense { .. } => false,
        }
    }
}

fn nonsense(what: &'static str, value: impl Into<u64>) -> SessionError {
    SessionError::Nonsense { what, value: value.into() }
}

/// One end of the conversation of two monitors, from when the link came up until it goes down.
#[derive(Debug)]
pub struct Session {
    settings: Settings,
    inbox: Vec<u8>,
    outbox: VecDeque<u8>,
    is_open: bool,
    heard_at_ns: u64,
    pinged_at_ns: u64,
    ping_number: u32,
    round_trip_ns: Option<u64>,
}

impl Session {
    /// Begins, and says hello.
    pub fn new(settings: Settings, now_ns: u64) -> Self {
        let mut session = Self {
            settings,
            inbox: Vec::new(),
            outbox: VecDeque::new(),
            is_open: false,
            heard_at_ns: now_ns,
            pinged_at_ns: now_ns,
            ping_number: 0,
            round_trip_ns: None,
        };
        let mut payload = VERSION.to_le_bytes().to_vec();
        payload.extend(session.settings.digest.to_le_bytes());
        payload.extend(session.settings.own.as_bytes());
        session.say(Kind::Hello, 0, &payload);
        session
    }

    /// Whether the peer has said hello.
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// How long the last ping took, there and back.
    pub fn round_trip_ns(&self) -> Option<u64> {
        self.round_trip_ns
    }

    /// Asks for a listener.
    pub fn query(&mut self, address: SocketAddr) {
        self.say(Kind::Query, 0, address.to_string().as_bytes());
    }

    /// Answers.
    pub fn answer(&mut self, address: SocketAddr, verdict: Verdict) {
        let payload = [&[verdict as u8], address.to_string().as_bytes()].concat();
        self.say(Kind::Answer, 0, &payload);
    }

    /// Says that a listener is gone.
    pub fn withdraw(&mut self, address: SocketAddr) {
        self.say(Kind::Withdraw, 0, address.to_string().as_bytes());
    }

    /// Says why the link goes down, and whether this node ends.
    pub fn bye(&mut self, reason: &str, is_for_good: bool) {
        self.say(Kind::Bye, is_for_good.into(), readable(reason).as_bytes());
    }

    /// What is to be sent.
    pub fn outbox(&mut self) -> &mut VecDeque<u8> {
        &mut self.outbox
    }

    /// Whether anything is.
    pub fn is_unsent(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// When [`Session::tick`] has something to do.
    pub fn due_ns(&self) -> u64 {
        self.pinged_at_ns.saturating_add(self.ping_every_ns())
    }

    fn ping_every_ns(&self) -> u64 {
        (self.settings.silence_ns / PINGS_PER_SILENCE).max(1)
    }

    /// Lets time pass.
    ///
    /// # Errors
    /// When the peer is silent or does not read.
    pub fn tick(&mut self, now_ns: u64) -> Result<(), SessionError> {
        let silent_ns = now_ns.saturating_sub(self.heard_at_ns);
        if silent_ns > self.settings.silence_ns {
            return Err(SessionError::Silent { silent_ms: silent_ns / 1_000_000 });
        }
        if self.outbox.len() > OUTBOX_BYTES_MAX {
            return Err(SessionError::Deaf { waiting_bytes: self.outbox.len() });
        }
        if now_ns >= self.due_ns() {
            self.pinged_at_ns = now_ns;
            self.ping_number = self.ping_number.wrapping_add(1);
            self.say(Kind::Ping, self.ping_number, &[]);
        }
        Ok(())
    }

    /// Takes what has come; `said` gets what it means.
    ///
    /// # Errors
    /// When the peer sent what ends the session.
    pub fn receive(&mut self, bytes: &[u8], now_ns: u64, said: &mut Vec<Said>) -> Result<(), SessionError> {
        self.inbox.extend_from_slice(bytes);
        let mut taken = 0;
        while let Some(Frame { kind, number, payload }) = frame(&self.inbox[taken..])? {
            taken += HEADER_BYTES + payload.len();
            let payload = payload.to_vec();
            self.heard_at_ns = now_ns;
            said.extend(self.hear(kind, number, &payload, now_ns)?);
        }
        self.inbox.drain(..taken);
        Ok(())
    }

    fn hear(&mut self, kind: Kind, number: u32, payload: &[u8], now_ns: u64) -> Result<Option<Said>, SessionError> {
        if kind == Kind::Bye {
            let reason = readable(&String::from_utf8_lossy(payload));
            return Err(SessionError::Bye { reason, is_for_good: number != 0 });
        }
        if (kind == Kind::Hello) == self.is_open {
            return Err(nonsense("frame out of turn", kind as u8));
        }
        match kind {
            Kind::Hello => {
                self.check_hello(payload)?;
                self.is_open = true;
                Ok(Some(Said::Hello))
            }
            Kind::Query => address(payload).map(|address| Some(Said::Query(address))),
            Kind::Withdraw => address(payload).map(|address| Some(Said::Withdraw(address))),
            Kind::Answer => {
                let (verdict, rest) = payload.split_first().ok_or_else(|| nonsense("empty answer", 0_u8))?;
                let found = Verdict::of(*verdict).ok_or_else(|| nonsense("verdict", *verdict))?;
                address(rest).map(|address| Some(Said::Answer(address, found)))
            }
            Kind::Ping => {
                self.say(Kind::Pong, number, &[]);
                Ok(None)
            }
            Kind::Pong => {
                if number == self.ping_number {
                    self.round_trip_ns = Some(now_ns.saturating_sub(self.pinged_at_ns));
                }
                Ok(None)
            }
            Kind::Bye => Ok(None),
        }
    }

    fn check_hello(&self, payload: &[u8]) -> Result<(), SessionError> {
        let short = || nonsense("short hello", payload.len() as u64);
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
        if name != self.settings.peer.as_bytes() {
            let found: String = String::from_utf8_lossy(name).chars().take(64).collect();
            return Err(SessionError::Name { found });
        }
        Ok(())
    }

    fn say(&mut self, kind: Kind, number: u32, payload: &[u8]) {
        assert!(payload.len() <= PAYLOAD_BYTES_MAX, "{kind:?} of {} bytes", payload.len());
        self.outbox.extend([kind as u8, 0]);
        self.outbox.extend((payload.len() as u16).to_le_bytes());
        self.outbox.extend(number.to_le_bytes());
        self.outbox.extend(payload);
    }
}

/// Text as it is sent, and as it is shown: a line of a payload's bytes at most, of whatever letters.
fn readable(text: &str) -> String {
    text.chars().filter(|letter| !letter.is_control()).take(PAYLOAD_BYTES_MAX / 4).collect()
}

/// A frame whose header is as it must be.
struct Frame<'a> {
    kind: Kind,
    number: u32,
    payload: &'a [u8],
}

/// The frame that `bytes` begin with, once all of it is there.
fn frame(bytes: &[u8]) -> Result<Option<Frame<'_>>, SessionError> {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    let [byte, zero, len_low, len_high, number @ ..] = *header;
    let kind = Kind::of(byte).ok_or_else(|| nonsense("kind of frame", byte))?;
    let number = u32::from_le_bytes(number);
    let len_bytes = usize::from(u16::from_le_bytes([len_low, len_high]));
    if zero != 0 || len_bytes > PAYLOAD_BYTES_MAX {
        return Err(nonsense("header of a frame", u64::from_le_bytes(*header)));
    }
    Ok(rest.get(..len_bytes).map(|payload| Frame { kind, number, payload }))
}

fn address(payload: &[u8]) -> Result<SocketAddr, SessionError> {
    let text = std::str::from_utf8(payload).ok();
    text.and_then(|text| text.parse().ok()).ok_or_else(|| nonsense("address of bytes", payload.len() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn settings(own: &str, peer: &str) -> Settings {
        Settings { own: own.to_owned(), peer: peer.to_owned(), digest: 7, silence_ns: 1000 }
    }

    fn pair() -> [Session; 2] {
        [Session::new(settings("a", "b"), 0), Session::new(settings("b", "a"), 0)]
    }

    /// Takes what `from` has to say to `to`, `step` bytes at a time.
    fn pass(from: &mut Session, to: &mut Session, step: usize, now_ns: u64) -> Result<Vec<Said>, SessionError> {
        let bytes: Vec<u8> = from.outbox().drain(..).collect();
        let mut said = Vec::new();
        bytes.chunks(step).try_for_each(|some| to.receive(some, now_ns, &mut said))?;
        Ok(said)
    }

    fn open_pair() -> [Session; 2] {
        let [mut a, mut b] = pair();
        assert_eq!(pass(&mut a, &mut b, 3, 0), Ok(vec![Said::Hello]));
        assert_eq!(pass(&mut b, &mut a, 1000, 0), Ok(vec![Said::Hello]));
        [a, b]
    }

    #[test]
    fn questions_and_answers_cross() {
        let [mut a, mut b] = open_pair();
        let address: SocketAddr = "[fd00::2]:6379".parse().unwrap();
        a.query(address);
        assert_eq!(pass(&mut a, &mut b, 1, 0), Ok(vec![Said::Query(address)]));
        for verdict in [Verdict::Listening, Verdict::Nobody, Verdict::Denied] {
            b.answer(address, verdict);
            assert_eq!(pass(&mut b, &mut a, 7, 0), Ok(vec![Said::Answer(address, verdict)]));
        }
        b.withdraw(address);
        assert_eq!(pass(&mut b, &mut a, 7, 0), Ok(vec![Said::Withdraw(address)]));
        for is_for_good in [false, true] {
            let [mut a, mut b] = open_pair();
            b.bye("going\ndown", is_for_good);
            let bye = SessionError::Bye { reason: "goingdown".to_owned(), is_for_good };
            assert_eq!(bye.may_return(), !is_for_good);
            assert_eq!(pass(&mut b, &mut a, 7, 0), Err(bye));
        }
    }

    #[test]
    fn a_hostile_good_bye_is_a_short_line() {
        let [_, mut b] = open_pair();
        let mut frame = vec![Kind::Bye as u8, 0, 0, 2, 0, 0, 0, 0];
        frame.extend([0xff; PAYLOAD_BYTES_MAX]);
        let Err(SessionError::Bye { reason, .. }) = b.receive(&frame, 0, &mut Vec::new()) else {
            panic!("no good-bye")
        };
        assert!(reason.len() <= PAYLOAD_BYTES_MAX, "{} bytes", reason.len());
    }

    #[test]
    fn pings_keep_a_session_alive_and_measure_the_way() {
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
        assert!(a.tick(1000).is_ok());
        assert_eq!(a.tick(2_000_000), Err(SessionError::Silent { silent_ms: 2 }));
    }

    #[test]
    fn a_peer_that_does_not_read_ends_a_session() {
        let [mut a, _] = open_pair();
        let address = "127.0.0.1:1".parse().unwrap();
        (0..20_000).for_each(|_| a.query(address));
        assert!(matches!(a.tick(1), Err(SessionError::Deaf { .. })));
    }

    #[test]
    fn a_stranger_is_named() {
        let greeted = |change: fn(&mut Settings)| {
            let mut other = settings("b", "a");
            change(&mut other);
            let (mut a, mut b) = (Session::new(settings("a", "b"), 0), Session::new(other, 0));
            pass(&mut b, &mut a, 64, 0).unwrap_err()
        };
        assert_eq!(greeted(|other| other.digest = 8), SessionError::Digest { found: 8, own: 7 });
        assert_eq!(greeted(|other| other.own = "c".to_owned()), SessionError::Name { found: "c".to_owned() });
    }

    #[test]
    fn frames_out_of_turn_are_nonsense() {
        let [mut a, mut b] = pair();
        a.outbox().clear();
        a.query("127.0.0.1:1".parse().unwrap());
        assert!(matches!(pass(&mut a, &mut b, 64, 0), Err(SessionError::Nonsense { .. })));
        let [_, mut b] = open_pair();
        let mut again = Session::new(settings("a", "b"), 0);
        assert!(matches!(pass(&mut again, &mut b, 64, 0), Err(SessionError::Nonsense { .. })));
    }

    /// Bytes that are like frames, more or less.
    fn hostile_bytes() -> impl Strategy<Value = Vec<u8>> {
        let near = (0..9_u8, 0..2_u8, 0..40_u16, any::<u32>(), prop::collection::vec(any::<u8>(), 0..40)).prop_map(
            |(kind, zero, len, number, payload)| {
                let mut bytes = vec![kind, zero / 2];
                bytes.extend(len.to_le_bytes());
                bytes.extend(number.to_le_bytes());
                bytes.extend(payload.into_iter().take(usize::from(len)));
                bytes
            },
        );
        prop::collection::vec(prop_oneof![near, prop::collection::vec(any::<u8>(), 0..20)], 0..20)
            .prop_map(|parts| parts.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn whatever_a_peer_sends_a_session_goes_on_or_ends(bytes in hostile_bytes(), step in 1..50_usize, open: bool) {
            let [mut session, _] = if open { open_pair() } else { pair() };
            let mut said = Vec::new();
            let ended = bytes.chunks(step).try_for_each(|some| session.receive(some, 1, &mut said));
            prop_assert!(said.len() <= bytes.len() / HEADER_BYTES);
            prop_assert!(session.inbox.len() <= HEADER_BYTES + PAYLOAD_BYTES_MAX + step || ended.is_err());
        }

        #[test]
        fn frames_arrive_alike_however_they_are_cut(
            ports in prop::collection::vec(any::<u16>(), 0..30), step in 1..200_usize
        ) {
            let [mut a, mut b] = open_pair();
            let at = |port: &u16| SocketAddr::from(([127, 77, 0, 2], *port));
            let addresses: Vec<SocketAddr> = ports.iter().map(at).collect();
            addresses.iter().for_each(|address| a.query(*address));
            let expected: Vec<Said> = addresses.into_iter().map(Said::Query).collect();
            prop_assert_eq!(pass(&mut a, &mut b, step, 0), Ok(expected));
        }
    }
}
