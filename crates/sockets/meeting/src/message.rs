//! The messages of a meeting.
//!
//! All have the same size, and pass between two processes of one kernel, so numbers are in the machine's byte order:
//!
//! | offset | bytes | contents |
//! |---|---|---|
//! | 0 | 8 | magic |
//! | 8 | 2 | version of all that follows, and of the memory |
//! | 10 | 1 | kind: 1 proposal, 2 yes, 3 no |
//! | 11 | 1 | role: 1 connected, 2 accepted |
//! | 12 | 2 | reason of a *no*, otherwise 0 |
//! | 14 | 2 | 0 |
//! | 16 | 8 | `SO_COOKIE` of the sender's TCP socket; 0 with a *no* |
//! | 24 | 8 | its `SO_NETNS_COOKIE`, or 0 |
//! | 32 | 32 | counts: written, acked, received, consumed; 0 with a *no* |
//! | 64 | 8 | bytes of the sender's memory; 0 with a *no* |
//! | 72 | 8 | secret of the lane in the sender's memory; 0 with a *no* |
//! | 80 | 4 | kind of the window memory that is passed instead; 0 without |
//! | 84 | 4 | 1 if the sender asks for a proof by the bytes (see [`proof`](crate::proof)), otherwise 0 |
//! | 88 | 16 | offsets in it of the receiver's inbound and outbound span |
//! | 104 | 8 | secret of the lane in the outbound span |
//! | 112 | 4 | 0; 1 if the sender states its user; 3 if it also shows that it has the key of both users |
//! | 116 | 4 | the sender's user, by its number on the machine, otherwise 0 |
//! | 120 | 8 | with 3: the message authentication code (SipHash-2-4), otherwise 0 |
//!
//! Magic and version stay where they are in all releases. A message of another version is refused by that alone,
//! whatever its length.

use crate::counts::{Counts, Role};
use crate::endpoint::Endpoint;
use crate::reason::Reason;
use siphasher::sip::SipHasher24;
use std::hash::Hasher;

/// Version of the messages and of the memory whose descriptors they carry.
pub const VERSION: u16 = 3;
/// Bytes of each message of this version.
pub const MESSAGE_BYTES: usize = 128;
/// The largest memory that an endpoint may state.
pub const MEMORY_BYTES_MAX: u64 = 1 << 32;

const MAGIC: [u8; 8] = *b"xl-meet\n";

const STATES_USER: u8 = 1;
const STATES_USER_WITH_MAC: u8 = 3;

/// What a message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The connecting endpoint proposes to exchange memory. A descriptor comes with it.
    Proposal,
    /// The accepting endpoint agrees. A descriptor comes with it.
    Yes,
    /// The endpoint refuses, or does not use what was agreed on.
    No(Reason),
}

/// The memory that an endpoint writes, as it states it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Its size.
    pub bytes: u64,
    /// A random number by which the reader recognizes records of the lane in it.
    pub secret: u64,
    /// Where it is, if it is not a memory of its own.
    pub window: Option<Window>,
}

impl Memory {
    /// Returns a memory of its own, of which the descriptor is.
    pub const fn own(bytes: u64, secret: u64) -> Self {
        Self { bytes, secret, window: None }
    }
}

/// Two spans of the windows of a proxy's node, which take the place of both endpoints' memories: the endpoint that is
/// given them exchanges bytes with the program of another node, without the proxies. The descriptor is of the memory in
/// which the windows are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// What kind of memory it is; not 0.
    pub kind: u32,
    /// Offset of the span that the endpoint reads.
    pub inbound_offset: u64,
    /// Offset of the span that it writes.
    pub outbound_offset: u64,
    /// The secret of the lane in that.
    pub outgoing_secret: u64,
}

/// A message of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// What it says.
    pub kind: Kind,
    /// The role of the endpoint.
    pub role: Role,
    /// `SO_COOKIE` of its TCP socket.
    pub cookie: u64,
    /// `SO_NETNS_COOKIE` of its TCP socket, or 0.
    pub netns_cookie: u64,
    /// Its counts when the message was made.
    pub counts: Counts,
    /// Its memory.
    pub memory: Memory,
    /// It asks for a proof by the bytes of the connection.
    pub wants_proof: bool,
    /// Its user, where programs of several users meet.
    pub user: Option<StatedUser>,
}

/// The user that an endpoint states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatedUser {
    /// The number on the machine.
    pub number: u32,
    /// The message authentication code under the key that only programs of this user and of the peer's have.
    pub mac: Option<u64>,
}

impl Message {
    /// Returns a message of an endpoint.
    pub fn new(kind: Kind, endpoint: &Endpoint, counts: Counts, memory: Memory) -> Self {
        let Endpoint { role, cookie, netns_cookie, .. } = *endpoint;
        Self { kind, role, cookie, netns_cookie, counts, memory, wants_proof: false, user: None }
    }

    /// Returns the refusal of an endpoint.
    pub fn no(role: Role, reason: Reason) -> Self {
        Self {
            kind: Kind::No(reason),
            role,
            cookie: 0,
            netns_cookie: 0,
            counts: Counts::default(),
            memory: Memory::default(),
            wants_proof: false,
            user: None,
        }
    }

    /// Returns the bytes of the message.
    pub fn encode(&self) -> [u8; MESSAGE_BYTES] {
        let (kind, reason) = match self.kind {
            Kind::Proposal => (1, 0),
            Kind::Yes => (2, 0),
            Kind::No(reason) => (3, reason.number()),
        };
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_ne_bytes());
        bytes[10] = kind;
        bytes[11] = match self.role {
            Role::Connected => 1,
            Role::Accepted => 2,
        };
        bytes[12..14].copy_from_slice(&reason.to_ne_bytes());
        let Counts { written, acked, received, consumed } = self.counts;
        let words =
            [self.cookie, self.netns_cookie, written, acked, received, consumed, self.memory.bytes, self.memory.secret];
        for (part, word) in bytes[16..80].chunks_exact_mut(8).zip(words) {
            part.copy_from_slice(&word.to_ne_bytes());
        }
        bytes[84..88].copy_from_slice(&u32::from(self.wants_proof).to_ne_bytes());
        if let Some(Window { kind, inbound_offset, outbound_offset, outgoing_secret }) = self.memory.window {
            bytes[80..84].copy_from_slice(&kind.to_ne_bytes());
            let words = [inbound_offset, outbound_offset, outgoing_secret];
            for (part, word) in bytes[88..112].chunks_exact_mut(8).zip(words) {
                part.copy_from_slice(&word.to_ne_bytes());
            }
        }
        if let Some(StatedUser { number, mac }) = self.user {
            bytes[112] = if mac.is_some() { STATES_USER_WITH_MAC } else { STATES_USER };
            bytes[116..120].copy_from_slice(&number.to_ne_bytes());
            bytes[120..].copy_from_slice(&mac.unwrap_or(0).to_ne_bytes());
        }
        bytes
    }

    /// Returns a message that states a user with its authentication code, for a program of the user `to`. `answered` is
    /// the secret of the message that it answers, or 0.
    pub(crate) fn with_mac(self, key: &[u8; 16], to: u32, answered: u64) -> Self {
        let mac = Some(self.mac(key, to, answered));
        Self { user: self.user.map(|user| StatedUser { mac, ..user }), ..self }
    }

    /// Returns whether the message has the authentication code that only programs with the key can compute.
    pub(crate) fn has_mac(&self, key: &[u8; 16], to: u32, answered: u64) -> bool {
        self.user.is_some_and(|user| user.mac == Some(self.mac(key, to, answered)))
    }

    fn mac(&self, key: &[u8; 16], to: u32, answered: u64) -> u64 {
        let user = self.user.map(|user| StatedUser { mac: Some(0), ..user });
        let mut hasher = SipHasher24::new_with_key(key);
        hasher.write(&Self { user, ..*self }.encode());
        hasher.write(&to.to_ne_bytes());
        hasher.write(&answered.to_ne_bytes());
        hasher.finish()
    }

    /// Parses the bytes of a message.
    ///
    /// # Errors
    /// [`Reason::Version`] if the sender is of a release with other messages, and [`Reason::Malformed`] for anything
    /// else that this release would not have sent.
    pub fn parse(bytes: &[u8]) -> Result<Self, Reason> {
        let (magic, version) = (bytes.get(..8), bytes.get(8..10));
        if magic != Some(&MAGIC) {
            return Err(Reason::Malformed);
        }
        if version.ok_or(Reason::Malformed)? != VERSION.to_ne_bytes() {
            return Err(Reason::Version);
        }
        let bytes: &[u8; MESSAGE_BYTES] = bytes.try_into().map_err(|_| Reason::Malformed)?;
        Self::parse_whole(bytes).filter(Self::is_consistent).ok_or(Reason::Malformed)
    }

    fn parse_whole(bytes: &[u8; MESSAGE_BYTES]) -> Option<Self> {
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|index| bytes[at + index]));
        let reason = u16::from_ne_bytes([bytes[12], bytes[13]]);
        let kind = match (bytes[10], reason) {
            (1, 0) => Kind::Proposal,
            (2, 0) => Kind::Yes,
            (3, 1..) => Kind::No(Reason::from_number(reason)),
            _ => return None,
        };
        let role = match bytes[11] {
            1 => Role::Connected,
            2 => Role::Accepted,
            _ => return None,
        };
        let kind_of_window = u32::from_ne_bytes([bytes[80], bytes[81], bytes[82], bytes[83]]);
        let window = (kind_of_window != 0).then(|| Window {
            kind: kind_of_window,
            inbound_offset: word(88),
            outbound_offset: word(96),
            outgoing_secret: word(104),
        });
        let wants_proof = match u32::from_ne_bytes([bytes[84], bytes[85], bytes[86], bytes[87]]) {
            0 => false,
            1 => true,
            _ => return None,
        };
        let number = u32::from_ne_bytes([bytes[116], bytes[117], bytes[118], bytes[119]]);
        let (user, behind_user) = match bytes[112] {
            0 => (None, 112),
            STATES_USER => (Some(StatedUser { number, mac: None }), 120),
            STATES_USER_WITH_MAC => (Some(StatedUser { number, mac: Some(word(120)) }), MESSAGE_BYTES),
            _ => return None,
        };
        let window_bytes = if window.is_some() { 88..88 } else { 88..112 };
        let zeros =
            bytes[14..16].iter().chain(&bytes[window_bytes]).chain(&bytes[113..116]).chain(&bytes[behind_user..]);
        zeros.copied().all(|byte| byte == 0).then(|| Self {
            wants_proof,
            user,
            kind,
            role,
            cookie: word(16),
            netns_cookie: word(24),
            counts: Counts { written: word(32), acked: word(40), received: word(48), consumed: word(56) },
            memory: Memory { bytes: word(64), secret: word(72), window },
        })
    }

    /// Returns whether an endpoint can have these counts and this memory.
    fn is_consistent(&self) -> bool {
        let counts = self.counts;
        let is_memory_valid = match self.kind {
            Kind::Proposal | Kind::Yes => (1..=MEMORY_BYTES_MAX).contains(&self.memory.bytes),
            Kind::No(_) => self.memory == Memory::default() && !self.wants_proof && self.user.is_none(),
        };
        counts.acked <= counts.written && counts.consumed <= counts.received && is_memory_valid
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_message() -> impl Strategy<Value = Message> {
        let kind = prop_oneof![
            Just(Kind::Proposal),
            Just(Kind::Yes),
            (1..=u16::MAX).prop_map(|number| Kind::No(Reason::from_number(number))),
        ];
        let role = prop_oneof![Just(Role::Connected), Just(Role::Accepted)];
        let window = prop::option::of((1..=u32::MAX, any::<[u64; 3]>()).prop_map(|(kind, words)| {
            let [inbound_offset, outbound_offset, outgoing_secret] = words;
            Window { kind, inbound_offset, outbound_offset, outgoing_secret }
        }));
        let rest = (any::<[u64; 7]>(), 1..=MEMORY_BYTES_MAX, window);
        (kind, role, rest).prop_map(|(kind, role, (words, bytes, window))| {
            let [cookie, netns_cookie, a, b, c, d, secret] = words;
            let counts = Counts { written: a.max(b), acked: a.min(b), received: c.max(d), consumed: c.min(d) };
            let memory = if matches!(kind, Kind::No(_)) {
                Memory::default()
            } else {
                Memory { window, ..Memory::own(bytes, secret) }
            };
            let wants_proof = secret & 1 == 1 && !matches!(kind, Kind::No(_));
            let user = StatedUser { number: secret as u32, mac: (secret & 2 != 0).then_some(a) };
            let user = Some(user).filter(|_| secret & 4 != 0 && !matches!(kind, Kind::No(_)));
            Message { kind, role, cookie, netns_cookie, counts, memory, wants_proof, user }
        })
    }

    proptest! {
        #[test]
        fn a_message_survives_its_bytes(message in any_message()) {
            prop_assert_eq!(Message::parse(&message.encode()), Ok(message));
        }

        #[test]
        fn a_message_with_changed_bytes_is_an_error_or_encodes_to_the_same_bytes(
            message in any_message(),
            changes in prop::collection::vec((0..MESSAGE_BYTES, any::<u8>()), 1..4),
            length in 0..=MESSAGE_BYTES + 8,
        ) {
            let mut bytes = message.encode().to_vec();
            changes.iter().for_each(|(at, byte)| bytes[*at] = *byte);
            bytes.resize(length, 0);
            match Message::parse(&bytes) {
                Ok(parsed) => prop_assert_eq!(parsed.encode().to_vec(), bytes),
                Err(reason) => prop_assert!(matches!(reason, Reason::Malformed | Reason::Version)),
            }
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert_eq!(Message::parse(&bytes), Err(Reason::Malformed), "no magic");
        }

        #[test]
        fn another_version_is_refused_as_such_at_any_length(
            message in any_message(),
            version in any::<u16>(),
            rest in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            prop_assume!(version != VERSION);
            let mut bytes = message.encode()[..10].to_vec();
            bytes[8..].copy_from_slice(&version.to_ne_bytes());
            bytes.extend(rest);
            prop_assert_eq!(Message::parse(&bytes), Err(Reason::Version));
        }
    }

    #[test]
    fn an_authentication_code_holds_for_one_message_one_key_one_receiver_and_one_answered_message() {
        let message = Message {
            kind: Kind::Proposal,
            role: Role::Connected,
            cookie: 1,
            netns_cookie: 1,
            counts: Counts::default(),
            memory: Memory::own(4096, 7),
            wants_proof: true,
            user: Some(StatedUser { number: 33, mac: None }),
        };
        let authenticated = message.with_mac(&[5; 16], 999, 1);
        let user = |number| Some(StatedUser { number, ..authenticated.user.unwrap() });
        assert!(Message::parse(&authenticated.encode()).unwrap().has_mac(&[5; 16], 999, 1));
        assert!(!message.has_mac(&[5; 16], 999, 1), "without one");
        assert!(!authenticated.has_mac(&[6; 16], 999, 1));
        assert!(!authenticated.has_mac(&[5; 16], 998, 1));
        assert!(!authenticated.has_mac(&[5; 16], 999, 2));
        for other in [
            Message { user: user(34), ..authenticated },
            Message { role: Role::Accepted, ..authenticated },
            Message { cookie: 2, ..authenticated },
            Message { memory: Memory::own(4096, 8), ..authenticated },
            Message { wants_proof: false, ..authenticated },
        ] {
            assert!(!other.has_mac(&[5; 16], 999, 1), "{other:?}");
        }
    }

    #[test]
    fn counts_and_memory_that_no_endpoint_has_are_malformed() {
        let counts = Counts { written: 5, acked: 5, received: 5, consumed: 5 };
        let memory = Memory::own(4096, 1);
        let (role, kind) = (Role::Connected, Kind::Proposal);
        let valid = Message { kind, role, cookie: 1, netns_cookie: 1, counts, memory, wants_proof: false, user: None };
        let invalid = [
            Message { counts: Counts { acked: 6, ..counts }, ..valid },
            Message { counts: Counts { consumed: 6, ..counts }, ..valid },
            Message { memory: Memory { bytes: 0, ..memory }, ..valid },
            Message { memory: Memory { bytes: MEMORY_BYTES_MAX + 1, ..memory }, ..valid },
            Message { kind: Kind::No(Reason::Off), ..valid },
            Message { kind: Kind::No(Reason::Other(0)), memory: Memory::default(), ..valid },
        ];
        assert_eq!(Message::parse(&valid.encode()), Ok(valid));
        for message in invalid {
            assert_eq!(Message::parse(&message.encode()), Err(Reason::Malformed), "{message:?}");
        }
    }
}
