//! The two addresses of a connection, and the abstract AF_UNIX name of its lifeline.

use std::io::Write as _;
use std::net::{Ipv6Addr, SocketAddr, SocketAddrV6};

use rustix::io::Errno;

use super::canonical::{Family, canonical, to_family};
use super::sockaddr::array;
use crate::rendezvous::name_key::NameKey;

/// Both addresses of a connection in canonical form, as one endpoint sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuple {
    /// The address of this endpoint.
    pub local: SocketAddr,
    /// The address of the other endpoint.
    pub peer: SocketAddr,
}

/// The reason why bytes are not the name of a tuple.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TupleNameError {
    /// Not a name of the library.
    Foreign,
    /// A name of another version of the library, with its number.
    Version(u32),
    /// A name of this version that no endpoint would write.
    Malformed,
    /// A message authentication code that is not valid under the key.
    Forged,
}

/// The kind of process that opened a connection, as the name of its lifeline says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Opener {
    /// A program that has the tuple's local address.
    Program,
    /// A program that shares its local address with others that are willing to (`SO_REUSEADDR`).
    SharingProgram,
    /// The proxy of this node, for a program of another node: if both nodes are on one machine, that program has bound
    /// the name with its own kind.
    Proxy,
}

impl Opener {
    fn separator(self) -> u8 {
        match self {
            Self::Program => b'>',
            Self::SharingProgram => b'}',
            Self::Proxy => b'~',
        }
    }

    fn of_separator(byte: u8) -> Option<Self> {
        [Self::Program, Self::SharingProgram, Self::Proxy].into_iter().find(|opener| opener.separator() == byte)
    }
}

/// The part of a tuple's name before the version.
const NAME_PREFIX: &[u8] = b"crosslane/";
/// The version of the tuple's name.
const NAME_VERSION: u32 = 3;
/// Prefix and version, the part of the name before the message authentication code.
const NAME_HEAD: &[u8] = b"crosslane/3/";
/// Length of the message authentication code: 128 bits in hexadecimal digits.
const MAC_DIGITS: usize = 32;
/// Maximum length of an abstract AF_UNIX name.
pub const NAME_BYTES_MAX: usize = 107;
/// Maximum length of the part with the addresses.
const ADDRESSES_BYTES_MAX: usize = NAME_BYTES_MAX - NAME_HEAD.len() - MAC_DIGITS - 1;
/// Length of an IPv6 address in binary: address, port and scope.
const BINARY_ADDRESS_BYTES: usize = 16 + 2 + 4;
const _: () = assert!(2 * BINARY_ADDRESS_BYTES < ADDRESSES_BYTES_MAX);

impl Tuple {
    /// Returns the tuple as the other endpoint sees it.
    #[must_use]
    pub fn reversed(self) -> Self {
        Self { local: self.peer, peer: self.local }
    }

    /// Returns the tuple as a program with a socket of `family` sees it.
    #[must_use]
    pub fn to_family(self, family: Family) -> Self {
        Self { local: to_family(self.local, family), peer: to_family(self.peer, family) }
    }

    /// Returns the abstract AF_UNIX name that the connecting endpoint binds its lifeline to:
    /// `crosslane/3/<code>/127.0.0.1:40000>127.0.0.1:6379`, or with `~` for `>` if a proxy stands in for that endpoint,
    /// and with `}` if the program shares its address. The code is the message authentication code of the rest under
    /// the rack's key, so no other user can bind the name first. IPv6 addresses that are too long as text are binary.
    ///
    /// The kernel lets a name be bound once, so a tuple is unique among the lanes of a rack, and is free again when the
    /// last descriptor of the connecting endpoint is closed. Abstract names belong to a network namespace, so the name
    /// need not contain it.
    ///
    /// # Errors
    /// `INVAL` if these cannot be the addresses of a connection.
    pub fn name(&self, opener: Opener, key: &NameKey) -> Result<Vec<u8>, Errno> {
        if !is_valid_endpoint(self.local)
            || !is_valid_endpoint(self.peer)
            || self.local.is_ipv4() != self.peer.is_ipv4()
        {
            return Err(Errno::INVAL);
        }
        let addresses = self.encode_addresses(opener);
        let mac = key.mac(NAME_HEAD, &addresses);
        let mut name = Vec::with_capacity(NAME_BYTES_MAX);
        name.extend_from_slice(NAME_HEAD);
        let _ = write!(name, "{mac:0MAC_DIGITS$x}/"); // Writing to memory cannot fail.
        name.extend_from_slice(&addresses);
        Ok(name)
    }

    /// Returns the tuple in an abstract AF_UNIX name, as seen by the endpoint that has bound it, and the kind of that
    /// process. Any process can bind any name, so only a name that [`Tuple::name`] would have written with this key is
    /// accepted.
    ///
    /// # Errors
    /// The reason why the bytes are not such a name.
    pub fn from_name(name: &[u8], key: &NameKey) -> Result<(Self, Opener), TupleNameError> {
        let (tuple, opener) = Self::from_unauthenticated_name(name)?;
        let (mac, addresses) = name[NAME_HEAD.len()..].split_at(MAC_DIGITS);
        let mac = std::str::from_utf8(mac).ok().and_then(|digits| u128::from_str_radix(digits, 16).ok());
        // The comparison need not take constant time: a process that can present a name has come through the rack's
        // private directory, which holds the key.
        if mac == Some(key.mac(NAME_HEAD, &addresses[1..])) { Ok((tuple, opener)) } else { Err(TupleNameError::Forged) }
    }

    /// Returns the tuple as [`Tuple::from_name`] does, without checking the code: for a lifeline that is identified by
    /// the memory that came with it, and whose name was authenticated when it was accepted. Its present holder may be
    /// of a user who cannot read the key.
    ///
    /// # Errors
    /// The reason why the bytes are not such a name; never `Forged`.
    pub fn from_unauthenticated_name(name: &[u8]) -> Result<(Self, Opener), TupleNameError> {
        use TupleNameError::{Foreign, Malformed};
        if name.len() > NAME_BYTES_MAX {
            return Err(Foreign);
        }
        let Some(rest) = name.strip_prefix(NAME_HEAD) else {
            let version = name.strip_prefix(NAME_PREFIX).ok_or(Foreign)?;
            let version = version.split(|byte| *byte == b'/').next().and_then(|text| std::str::from_utf8(text).ok());
            let version = version.and_then(|text| text.parse().ok()).filter(|version| *version != NAME_VERSION);
            return Err(version.map_or(Malformed, TupleNameError::Version));
        };
        let (mac, rest) = rest.split_at_checked(MAC_DIGITS).ok_or(Malformed)?;
        let addresses = rest.strip_prefix(b"/").ok_or(Malformed)?;
        let is_mac = mac.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let decoded = Self::decode_addresses(addresses).filter(|_| is_mac);
        decoded.filter(|(tuple, opener)| tuple.encode_addresses(*opener) == addresses).ok_or(Malformed)
    }

    /// Encodes the addresses as text, or if that does not fit, as the separator and both addresses in binary.
    fn encode_addresses(&self, opener: Opener) -> Vec<u8> {
        let text = format!("{}{}{}", self.local, char::from(opener.separator()), self.peer).into_bytes();
        match (self.local, self.peer) {
            (SocketAddr::V6(local), SocketAddr::V6(peer)) if text.len() > ADDRESSES_BYTES_MAX => {
                let mut bytes = vec![opener.separator()];
                for address in [local, peer] {
                    bytes.extend_from_slice(&address.ip().octets());
                    bytes.extend_from_slice(&address.port().to_be_bytes());
                    bytes.extend_from_slice(&address.scope_id().to_be_bytes());
                }
                bytes
            }
            _ => text,
        }
    }

    /// Decodes what [`Tuple::encode_addresses`] may have encoded; `None` for addresses that no connection can have.
    fn decode_addresses(bytes: &[u8]) -> Option<(Self, Opener)> {
        let (tuple, opener) = match bytes.split_first() {
            Some((first, rest)) if Opener::of_separator(*first).is_some() => {
                let (local, peer) = rest.split_at_checked(BINARY_ADDRESS_BYTES)?;
                let tuple = Self { local: decode_binary(local)?, peer: decode_binary(peer)? };
                (tuple, Opener::of_separator(*first)?)
            }
            _ => {
                let at = bytes.iter().position(|byte| Opener::of_separator(*byte).is_some())?;
                let parse = |text: &[u8]| std::str::from_utf8(text).ok()?.parse().ok();
                let tuple = Self { local: parse(&bytes[..at])?, peer: parse(&bytes[at + 1..])? };
                (tuple, Opener::of_separator(bytes[at])?)
            }
        };
        let are_valid = is_valid_endpoint(tuple.local) && is_valid_endpoint(tuple.peer);
        (are_valid && tuple.local.is_ipv4() == tuple.peer.is_ipv4()).then_some((tuple, opener))
    }
}

fn decode_binary(bytes: &[u8]) -> Option<SocketAddr> {
    let ip = Ipv6Addr::from(array::<16>(bytes, 0)?);
    let (port, scope) = (array(bytes, 16).map(u16::from_be_bytes)?, array(bytes, 18).map(u32::from_be_bytes)?);
    let has_right_length = bytes.len() == BINARY_ADDRESS_BYTES;
    has_right_length.then(|| SocketAddr::V6(SocketAddrV6::new(ip, port, 0, scope)))
}

/// Returns whether the address is canonical and can be that of an endpoint of a connection.
fn is_valid_endpoint(address: SocketAddr) -> bool {
    let ip = address.ip();
    address == canonical(address) && address.port() != 0 && !ip.is_unspecified() && !ip.is_multicast()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::address::canonical::tests::any_address;
    use crate::rendezvous::directory::tests::Scratch;
    use crate::rendezvous::name_key::tests::OTHER_KEY;
    use proptest::prelude::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    proptest! {
        /// Names have room for any two addresses, with any scope.
        #[test]
        fn a_tuple_survives_its_name(local in any_address(), peer in any_address(), by_proxy: bool) {
            let tuple = Tuple { local: canonical(local), peer: canonical(peer) };
            let opener = if by_proxy { Opener::Proxy } else { Opener::Program };
            match tuple.name(opener, &OTHER_KEY) {
                Ok(name) => {
                    prop_assert!(name.len() <= NAME_BYTES_MAX);
                    prop_assert_eq!(Tuple::from_name(&name, &OTHER_KEY), Ok((tuple, opener)));
                    prop_assert_eq!(Tuple::from_unauthenticated_name(&name), Ok((tuple, opener)));
                }
                Err(error) => {
                    let same_family = tuple.local.is_ipv4() == tuple.peer.is_ipv4();
                    let usable = is_valid_endpoint(tuple.local) && is_valid_endpoint(tuple.peer) && same_family;
                    prop_assert!(!usable, "{error} for {tuple:?}");
                }
            }
        }

        #[test]
        fn a_hostile_name_is_rejected_or_has_addresses_in_the_form_that_is_written(
            head in "(crosslane/3/[0-9a-f]{32}/)?",
            text in "[0-9a-f:.>~}\\[\\]%/]{0,60}",
            binary in prop::option::of(prop::collection::vec(any::<u8>(), 40..50)),
            by_proxy: bool,
        ) {
            let mut name = head.into_bytes();
            match binary {
                Some(binary) => {
                    name.push(if by_proxy { b'~' } else { b'>' });
                    name.extend(binary);
                }
                None => name.extend(text.into_bytes()),
            }
            prop_assert!(Tuple::from_name(&name, &OTHER_KEY).is_err(), "128 bits cannot be guessed");
            if let Ok((tuple, opener)) = Tuple::from_unauthenticated_name(&name) {
                let ours = tuple.name(opener, &OTHER_KEY).unwrap();
                let addresses = NAME_HEAD.len() + MAC_DIGITS;
                prop_assert_eq!(&ours[addresses..], &name[addresses..]);
            }
        }

        #[test]
        fn a_name_with_a_changed_bit_is_rejected(port in 1..u16::MAX, bit in 0..8 * 80_usize) {
            let tuple = Tuple { local: SocketAddr::from(([127, 0, 0, 1], port)), peer: address("127.0.0.1:6379") };
            let mut name = tuple.name(Opener::Program, &OTHER_KEY).unwrap();
            if let Some(byte) = name.get_mut(bit / 8) {
                *byte ^= 1 << (bit % 8);
                prop_assert!(Tuple::from_name(&name, &OTHER_KEY).is_err());
            }
        }
    }

    fn name_of(tuple: Tuple, opener: Opener) -> Vec<u8> {
        tuple.name(opener, &OTHER_KEY).unwrap()
    }

    #[test]
    fn tuples_are_named_as_text_where_that_fits() {
        let after_code = |name: &[u8]| {
            assert!(name.starts_with(NAME_HEAD) && name.len() <= NAME_BYTES_MAX);
            String::from_utf8(name[NAME_HEAD.len() + MAC_DIGITS..].to_vec()).unwrap()
        };
        let tuple = Tuple { local: address("127.0.0.1:40000"), peer: address("127.0.0.1:6379") };
        assert_eq!(after_code(&name_of(tuple, Opener::Program)), "/127.0.0.1:40000>127.0.0.1:6379");
        assert_eq!(after_code(&name_of(tuple, Opener::Proxy)), "/127.0.0.1:40000~127.0.0.1:6379");
        let tuple = Tuple { local: address("[fe80::1%3]:40000"), peer: address("[fe80::2%3]:80") };
        assert_eq!(after_code(&name_of(tuple, Opener::Program)), "/[fe80::1%3]:40000>[fe80::2%3]:80");
        let longest = address("255.255.255.255:65535");
        let tuple = Tuple { local: longest, peer: longest };
        assert_eq!(after_code(&name_of(tuple, Opener::Proxy)), "/255.255.255.255:65535~255.255.255.255:65535");
    }

    #[test]
    fn the_longest_addresses_fit_a_name() {
        for longest in [
            "[2001:1db8:1111:2222:3333:4444:5555:6666]:65535",
            "[febf:1db8:1111:2222:3333:4444:5555:6666%4294967295]:65535",
        ] {
            let tuple = Tuple { local: address(longest), peer: address(longest) };
            let name = name_of(tuple, Opener::Proxy);
            assert!(name.len() <= NAME_BYTES_MAX);
            assert_eq!(Tuple::from_name(&name, &OTHER_KEY), Ok((tuple, Opener::Proxy)));
        }
    }

    #[test]
    fn names_of_a_tuple_differ_between_keys() {
        let (scratch, other) = (Scratch::new(), Scratch::new());
        let keys = [scratch.rack().key(), other.rack().key()];
        let tuple = Tuple { local: address("127.0.0.1:40000"), peer: address("127.0.0.1:6379") };
        let names = keys.map(|key| tuple.name(Opener::Program, &key).unwrap());
        assert_ne!(names[0], names[1]);
        assert_eq!(Tuple::from_name(&names[0], &keys[0]), Ok((tuple, Opener::Program)));
        assert_eq!(Tuple::from_name(&names[0], &keys[1]), Err(TupleNameError::Forged));
        assert_eq!(Tuple::from_unauthenticated_name(&names[0]), Ok((tuple, Opener::Program)));
    }

    #[test]
    fn names_that_no_endpoint_would_write_are_rejected() {
        use TupleNameError::{Foreign, Forged, Malformed, Version};
        let code = "0123456789abcdef0123456789abcdef";
        let named = |addresses: &str| format!("crosslane/3/{code}/{addresses}").into_bytes();
        for (name, error) in [
            (b"".to_vec(), Foreign),
            (b"\xff".to_vec(), Foreign),
            (b"other/2/127.0.0.1:1>127.0.0.1:2".to_vec(), Foreign),
            (vec![b'/'; NAME_BYTES_MAX + 1], Foreign),
            (b"crosslane/1/127.0.0.1:1>127.0.0.1:2".to_vec(), Version(1)),
            (b"crosslane/2/whatever".to_vec(), Version(2)),
            (b"crosslane/3".to_vec(), Malformed),
            (b"crosslane/03/".to_vec(), Malformed),
            (b"crosslane/3/127.0.0.1:1>127.0.0.1:2".to_vec(), Malformed),
            (format!("crosslane/3/{}/127.0.0.1:1>127.0.0.1:2", code.to_uppercase()).into_bytes(), Malformed),
            (format!("crosslane/3/{code}0/127.0.0.1:1>127.0.0.1:2").into_bytes(), Malformed),
            (named(""), Malformed),
            (named(">"), Malformed),
            (named("127.0.0.1:01>127.0.0.1:2"), Malformed),
            (named("127.0.0.1:0>127.0.0.1:2"), Malformed),
            (named("0.0.0.0:1>127.0.0.1:2"), Malformed),
            (named("127.0.0.1:1>[::1]:2"), Malformed),
            (named("[::ffff:127.0.0.1]:1>[::ffff:127.0.0.1]:2"), Malformed),
            (named("[0::1]:1>[::1]:2"), Malformed),
            (named("[::1%1]:1>[::1]:2"), Malformed),
            (named("127.0.0.1:1>127.0.0.1:2>127.0.0.1:3"), Malformed),
            (named("127.0.0.1:1~127.0.0.1:2>127.0.0.1:3"), Malformed),
            (named("224.0.0.1:1>127.0.0.1:2"), Malformed),
            (named("127.0.0.1:1>127.0.0.1:2"), Forged),
        ] {
            assert_eq!(Tuple::from_name(&name, &OTHER_KEY), Err(error), "{}", String::from_utf8_lossy(&name));
        }
    }

    #[test]
    fn addresses_that_fit_as_text_are_rejected_in_binary() {
        let mut name = b"crosslane/3/0123456789abcdef0123456789abcdef/>".to_vec();
        for _ in 0..2 {
            name.extend_from_slice(&Ipv6Addr::LOCALHOST.octets());
            name.extend_from_slice(&[0, 80, 0, 0, 0, 0]);
        }
        assert_eq!(Tuple::from_unauthenticated_name(&name), Err(TupleNameError::Malformed));
    }
}
