//! Authentication between nodes on several machines by a shared key.
//!
//! Each endpoint of a connection first sends a nonce of 256 random bits. The key and both nonces give two session keys,
//! one for each direction. Every later message carries an HMAC-SHA256 over its sequence number and its bytes. So:
//!
//! * a peer without the key can neither send a valid message nor learn anything that is useful elsewhere;
//! * a message of another connection, an earlier one, or one of this end is refused, as the nonce, the sequence number
//!   or the direction differs;
//! * nothing is negotiated, so there is no downgrade. Without a key there are no such connections.
//!
//! Messages are not encrypted, and packets between nodes are neither encrypted nor authenticated; both are left to the
//! layer below.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use thiserror::Error;

use super::message::ControlError;

/// Length of a key in bytes.
const KEY_BYTES: usize = 32;
/// Length of a nonce in bytes.
pub const NONCE_BYTES: usize = 32;
/// Prefix of the message with the nonce; its last byte is the version of this handshake.
const MAGIC: &[u8; 8] = b"crosslR\x01";
/// Label of the key derivation: separates the session keys from other uses of the cluster's key.
const LABEL: &[u8] = b"crosslane router control 1";
/// Bytes that sealing adds to a message: half of an HMAC-SHA256, as in RFC 4868.
pub const TAG_BYTES: usize = 16;
/// Mode bits that give access to users other than the owner.
const MODE_GROUP_OTHERS: u32 = 0o077;
/// Maximum length of a key file in bytes.
const FILE_BYTES_MAX: u64 = 4096;

/// An error of a key file.
#[derive(Debug, Error)]
pub enum KeyError {
    /// The file cannot be read.
    #[error("key file '{path}': {error}; make one with 'crosslane router key FILE', and give all nodes the same")]
    Unreadable {
        /// The file.
        path: String,
        /// The error of the kernel.
        error: io::Error,
    },
    /// The file cannot be written.
    #[error("key file '{path}': {error}; name a new file in a directory that you can write")]
    Unwritable {
        /// The file.
        path: String,
        /// The error of the kernel.
        error: io::Error,
    },
    /// Other users have access to the file.
    #[error("key file '{path}' has mode {mode:03o}: other users can access the key; run 'chmod 600 {path}'")]
    Mode {
        /// The file.
        path: String,
        /// Its mode.
        mode: u32,
    },
    /// The file has another owner.
    #[error("key file '{path}' belongs to user {uid}, who could change it; run 'chown {own} {path}'")]
    Owner {
        /// The file.
        path: String,
        /// The owner.
        uid: u32,
        /// The user of this process.
        own: u32,
    },
    /// The file does not contain a key.
    #[error(
        "key file '{path}' does not contain a key of 64 hexadecimal digits; make one with 'crosslane router key FILE'"
    )]
    Malformed {
        /// The file.
        path: String,
    },
}

/// The key of a cluster.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(Arc<[u8; KEY_BYTES]>);

impl fmt::Debug for Key {
    /// Hides the key: it must not appear in a log.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Key")
    }
}

impl Key {
    /// Reads the key from a file that this user or root owns and no other user can access.
    ///
    /// # Errors
    /// Returns what is wrong with the file.
    pub fn read(path: &Path) -> Result<Self, KeyError> {
        let shown = || path.display().to_string();
        let unreadable = |error| KeyError::Unreadable { path: shown(), error };
        // The checks are made on the open file, so that the path cannot be replaced in between. `O_NONBLOCK`: opening a
        // FIFO would wait for a writer.
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let mut file = OpenOptions::new().read(true).custom_flags(nonblocking).open(path).map_err(unreadable)?;
        let found = file.metadata().map_err(unreadable)?;
        if !found.is_file() {
            return Err(unreadable(io::Error::other("not a regular file")));
        }
        let own = rustix::process::geteuid().as_raw();
        if found.uid() != own && found.uid() != 0 {
            return Err(KeyError::Owner { path: shown(), uid: found.uid(), own });
        }
        let mode = found.mode() & 0o777;
        if mode & MODE_GROUP_OTHERS != 0 {
            return Err(KeyError::Mode { path: shown(), mode });
        }
        let mut text = String::new();
        let malformed = |_| KeyError::Malformed { path: shown() };
        (&mut file).take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(malformed)?;
        Self::parse(text.trim()).ok_or_else(|| KeyError::Malformed { path: shown() })
    }

    fn parse(text: &str) -> Option<Self> {
        let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return None };
        let byte = |pair: &[u8; 2]| {
            let digits =
                std::str::from_utf8(pair).ok().filter(|pair| pair.bytes().all(|digit| digit.is_ascii_hexdigit()))?;
            u8::from_str_radix(digits, 16).ok()
        };
        let bytes: Option<Vec<u8>> = pairs.iter().map(byte).collect();
        Some(Self(Arc::new(bytes?.try_into().ok()?)))
    }

    /// Writes a new random key to a new file with mode 600.
    ///
    /// # Errors
    /// Returns an error when the file exists or cannot be created.
    pub fn create(path: &Path) -> Result<(), KeyError> {
        let unwritable = |error| KeyError::Unwritable { path: path.display().to_string(), error };
        let key: [u8; KEY_BYTES] = random_bytes().map_err(unwritable)?;
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(unwritable)?;
        let digits: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        file.write_all((digits + "\n").as_bytes()).map_err(unwritable)
    }

    /// Derives the key of one direction of a connection.
    fn derive(&self, direction: &[u8], nonces: [&[u8; NONCE_BYTES]; 2]) -> Hmac<Sha256> {
        let mut mac = mac(&self.0[..]);
        [LABEL, direction, nonces[0], nonces[1]].into_iter().for_each(|part| mac.update(part));
        self::mac(&mac.finalize().into_bytes())
    }
}

fn mac(key: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).unwrap_or_else(|_| unreachable!("an HMAC takes keys of any length"))
}

/// Returns random bytes of the kernel.
///
/// # Errors
/// Returns the error of `getrandom`.
pub fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    // `getrandom` returns up to 256 bytes completely once the pool is initialised (getrandom(2)).
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes)
}

/// The role of this endpoint in a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It has connected.
    Initiator,
    /// It has accepted the connection.
    Responder,
}

impl Role {
    const fn direction(self) -> &'static [u8] {
        match self {
            Self::Initiator => b" from the connecting end ",
            Self::Responder => b" from the accepting end ",
        }
    }

    const fn other(self) -> Self {
        match self {
            Self::Initiator => Self::Responder,
            Self::Responder => Self::Initiator,
        }
    }
}

/// The state of one direction.
struct Direction {
    mac: Hmac<Sha256>,
    /// Number of messages so far.
    count: u64,
}

impl Direction {
    /// Returns the HMAC of the next message.
    fn next(&mut self, message: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.mac.clone();
        mac.update(&self.count.to_le_bytes());
        mac.update(message);
        self.count += 1;
        mac
    }
}

/// One endpoint of an authenticated connection, without I/O.
pub struct Seal {
    key: Key,
    role: Role,
    nonce: [u8; NONCE_BYTES],
    /// Send and receive direction, once the nonce of the peer is known.
    directions: Option<[Direction; 2]>,
}

impl fmt::Debug for Seal {
    /// Hides the keys: they must not appear in a log.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Seal").field("role", &self.role).finish_non_exhaustive()
    }
}

impl Seal {
    /// Returns the state of a new connection. The nonce must never have been used before.
    pub fn new(key: Key, role: Role, nonce: [u8; NONCE_BYTES]) -> Self {
        Self { key, role, nonce, directions: None }
    }

    /// Returns the message with this endpoint's nonce, which is sent first.
    pub fn nonce_message(&self) -> Vec<u8> {
        [&MAGIC[..], &self.nonce].concat()
    }

    /// Returns whether the peer's nonce was received.
    pub fn is_keyed(&self) -> bool {
        self.directions.is_some()
    }

    /// Returns whether the peer has proved that it has the key.
    pub fn is_peer_authenticated(&self) -> bool {
        self.directions.as_ref().is_some_and(|[_, from]| from.count > 0)
    }

    /// Processes the message with the peer's nonce, and derives the session keys.
    ///
    /// # Errors
    /// Returns an error when the message does not contain a nonce.
    pub fn receive_nonce(&mut self, message: &[u8]) -> Result<(), ControlError> {
        let peer_nonce = message.strip_prefix(MAGIC).and_then(|nonce| <&[u8; NONCE_BYTES]>::try_from(nonce).ok());
        let Some(peer_nonce) = peer_nonce.filter(|peer_nonce| **peer_nonce != self.nonce) else {
            return Err(ControlError::Unauthenticated);
        };
        let nonces = match self.role {
            Role::Initiator => [&self.nonce, peer_nonce],
            Role::Responder => [peer_nonce, &self.nonce],
        };
        let direction = |role: Role| Direction { mac: self.key.derive(role.direction(), nonces), count: 0 };
        self.directions = Some([direction(self.role), direction(self.role.other())]);
        Ok(())
    }

    /// Seals the next message. Returns `None` before the peer's nonce was received.
    pub fn seal(&mut self, message: &[u8]) -> Option<Vec<u8>> {
        let [to, _] = self.directions.as_mut()?;
        let tag = to.next(message).finalize().into_bytes();
        Some([message, &tag[..TAG_BYTES]].concat())
    }

    /// Verifies the next message of the peer and returns it without its tag.
    ///
    /// # Errors
    /// Returns an error when it is not the next message of the peer.
    pub fn open<'a>(&mut self, sealed: &'a [u8]) -> Result<&'a [u8], ControlError> {
        let Some([_, from]) = self.directions.as_mut() else { return Err(ControlError::Unauthenticated) };
        let Some((message, tag)) = sealed.split_last_chunk::<TAG_BYTES>() else {
            return Err(ControlError::Unauthenticated);
        };
        let is_first = from.count == 0;
        match from.next(message).verify_truncated_left(tag) {
            Ok(()) => Ok(message),
            Err(_) if is_first => {
                from.count = 0;
                Err(ControlError::KeyMismatch)
            }
            Err(_) => Err(ControlError::InvalidTag),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn key(byte: u8) -> Key {
        Key(Arc::new([byte; KEY_BYTES]))
    }

    /// Returns both endpoints, after the exchange of nonces.
    fn pair(keys: [Key; 2], nonces: [u8; 2]) -> [Seal; 2] {
        let [one, other] = keys;
        let mut connecting = Seal::new(one, Role::Initiator, [nonces[0]; NONCE_BYTES]);
        let mut accepting = Seal::new(other, Role::Responder, [nonces[1]; NONCE_BYTES]);
        connecting.receive_nonce(&accepting.nonce_message()).unwrap();
        accepting.receive_nonce(&connecting.nonce_message()).unwrap();
        [connecting, accepting]
    }

    fn matching_pair() -> [Seal; 2] {
        pair([key(1), key(1)], [2, 3])
    }

    #[test]
    fn sealed_messages_open_in_order() {
        let mut endpoints = matching_pair();
        for message in [&b"a"[..], b"", &[7; 60_000]] {
            for _ in 0..2 {
                endpoints.reverse();
                let [from, to] = &mut endpoints;
                let sealed = from.seal(message).unwrap();
                assert_eq!((to.open(&sealed), sealed.len()), (Ok(message), message.len() + TAG_BYTES));
                assert!(to.is_peer_authenticated());
            }
        }
    }

    #[test]
    fn another_key_is_distinguished_from_a_modified_message() {
        let [mut one, mut other] = pair([key(1), key(2)], [2, 3]);
        assert_eq!(other.open(&one.seal(b"hello").unwrap()), Err(ControlError::KeyMismatch));
        assert_eq!(one.open(&other.seal(b"hello").unwrap()), Err(ControlError::KeyMismatch));
        assert!(!one.is_peer_authenticated() && !other.is_peer_authenticated());
        let text = ControlError::KeyMismatch.to_string();
        assert!(text.contains("another key") && text.contains("same key file"), "{text}");
        let [mut one, mut other] = matching_pair();
        other.open(&one.seal(b"first").unwrap()).unwrap();
        let mut sealed = one.seal(b"second").unwrap();
        sealed[0] ^= 1;
        assert_eq!(other.open(&sealed), Err(ControlError::InvalidTag));
    }

    #[test]
    fn every_bit_of_a_sealed_message_is_authenticated() {
        let sealed = matching_pair()[0].seal(b"message").unwrap();
        for bit in 0..8 * sealed.len() {
            let mut corrupted = sealed.clone();
            corrupted[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(matching_pair()[1].open(&corrupted), Err(ControlError::KeyMismatch), "bit {bit}");
        }
        assert_eq!(matching_pair()[1].open(&sealed), Ok(&b"message"[..]));
    }

    #[test]
    fn replayed_reordered_and_reflected_messages_are_refused() {
        let [mut one, mut other] = matching_pair();
        let [first, second] = [b"first", b"other"].map(|message| one.seal(message).unwrap());
        // Out of order on this connection, or replayed.
        assert_eq!(other.open(&second), Err(ControlError::KeyMismatch));
        let [_, mut other] = matching_pair();
        other.open(&first).unwrap();
        assert_eq!(other.open(&first), Err(ControlError::InvalidTag));
        // Reflected to its sender.
        assert_eq!(one.open(&first), Err(ControlError::KeyMismatch));
        // On another connection between the same nodes, where either nonce differs.
        for nonces in [[2, 4], [4, 3], [3, 2]] {
            let [_, mut later] = pair([key(1), key(1)], nonces);
            assert_eq!(later.open(&first), Err(ControlError::KeyMismatch), "{nonces:?}");
        }
    }

    #[test]
    fn only_the_peers_nonce_is_accepted_and_nothing_is_sealed_before() {
        let mut one = Seal::new(key(1), Role::Initiator, [2; NONCE_BYTES]);
        assert!(one.seal(b"early").is_none());
        assert_eq!(one.open(&[0; 40]), Err(ControlError::Unauthenticated));
        let own = one.nonce_message();
        for message in [&own[..], &own[..39], b"", &[9; 40], &[&own[..], &[1]].concat()] {
            assert_eq!(one.receive_nonce(message), Err(ControlError::Unauthenticated), "{message:?}");
        }
        // Releases before authentication began with a hello.
        let text = ControlError::Unauthenticated.to_string();
        assert!(text.contains("same release") && text.contains("key"), "{text}");
    }

    #[test]
    fn a_key_file_is_written_once_read_back_and_private() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        Key::create(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let read = Key::read(&path).unwrap();
        assert_eq!(format!("{read:?}"), "Key");
        assert!(matches!(Key::create(&path), Err(KeyError::Unwritable { .. })));
        Key::create(&folder.path().join("other")).unwrap();
        assert_ne!(read, Key::read(&folder.path().join("other")).unwrap());
        for mode in [0o640, 0o604, 0o620] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let error = Key::read(&path).unwrap_err().to_string();
            assert!(error.contains(&format!("mode {mode:o}")) && error.contains("chmod 600"), "{error}");
        }
    }

    #[test]
    fn files_without_a_key_are_refused_with_the_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let good = "0123456789abcdefABCDEF0123456789".repeat(2);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).unwrap();
        file.write_all(b"x").unwrap();
        let read = |text: &str| {
            fs::write(&path, text).unwrap();
            Key::read(&path)
        };
        assert!(read(&good).is_ok() && read(&format!(" {good}\n\n")).is_ok());
        for text in
            ["", &good[1..], &good[2..], &(good.clone() + "00"), &good.replace('a', "g"), &good.replace('1', "+")]
        {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains("64 hexadecimal digits") && error.contains("router key"), "{error}");
        }
        let pipe = folder.path().join("pipe");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        for path in [folder.path(), &folder.path().join("none"), &pipe] {
            assert!(matches!(Key::read(path), Err(KeyError::Unreadable { .. })));
        }
    }
}
