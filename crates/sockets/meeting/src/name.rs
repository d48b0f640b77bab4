//! The abstract AF_UNIX name at which an accepting endpoint can be met.
//!
//! Abstract names (`unix(7)`) belong to a network namespace and not to a user: any process can bind one, and each that
//! is bound is public in `/proc/net/unix`. The name carries a message authentication code (SipHash-2-4-128) of the
//! connection's addresses under a key that only the user's processes have, so nobody else can take a name in advance.
//! That a name which was seen may be bound again by another user, once its owner is gone, is why the connecting
//! endpoint checks `SO_PEERCRED` before it sends anything.

use std::fmt;
use std::hash::Hasher;

use rustix::net::SocketAddrUnix;
use siphasher::sip128::{Hasher128, SipHasher24};

use crate::reason::Reason;
use crate::tuple::Tuple;

/// The beginning of each name.
const PREFIX: &[u8; 17] = b"crosslane-meeting";
/// Bytes of a name: the prefix, a dot, and the code in hexadecimal.
const NAME_BYTES: usize = PREFIX.len() + 1 + 32;

/// A secret of the processes that may meet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Key([u8; 16]);

impl From<[u8; 16]> for Key {
    fn from(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Key(..)")
    }
}

/// Returns the name of the endpoint that has accepted a connection. `accepted` is the connection's tuple as that
/// endpoint sees it; the connecting endpoint passes its own tuple, reversed.
pub fn name(key: &Key, accepted: Tuple) -> [u8; NAME_BYTES] {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut hasher = SipHasher24::new_with_key(&key.0);
    hasher.write(PREFIX); // The key may be used for other names.
    hasher.write(&accepted.bytes());
    let code = hasher.finish128().as_u128();
    let mut name = [b'.'; NAME_BYTES];
    name[..PREFIX.len()].copy_from_slice(PREFIX);
    for (index, digit) in name[PREFIX.len() + 1..].iter_mut().enumerate() {
        *digit = DIGITS[(code >> (124 - 4 * index)) as usize & 15];
    }
    name
}

/// Returns the socket address of a name.
pub(crate) fn address(key: &Key, accepted: Tuple) -> Result<SocketAddrUnix, Reason> {
    SocketAddrUnix::new_abstract_name(&name(key, accepted)).map_err(Reason::of_errno)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tuple::tests::any_address;
    use proptest::prelude::*;

    #[test]
    fn the_code_is_siphash_2_4_128_in_hexadecimal() {
        // Test vector of SipHash's authors: the key is 0, 1, ..., 15, the input is empty.
        let code = SipHasher24::new_with_key(&std::array::from_fn(|index| index as u8)).finish128().as_u128();
        assert_eq!(code.to_le_bytes(), 0xa381_7f04_ba25_a8e6_6df6_7214_c755_0293_u128.to_be_bytes());
        let tuple = Tuple::new("127.0.0.1:80".parse().unwrap(), "127.0.0.1:50000".parse().unwrap());
        let key = Key::from([7; 16]);
        let mut hasher = SipHasher24::new_with_key(&[7; 16]);
        hasher.write(b"crosslane-meeting");
        hasher.write(&tuple.bytes());
        let expected = format!("crosslane-meeting.{:032x}", hasher.finish128().as_u128());
        assert_eq!(std::str::from_utf8(&name(&key, tuple)), Ok(expected.as_str()));
    }

    proptest! {
        #[test]
        fn names_differ_by_key_direction_and_addresses(
            local in any_address(),
            peer in any_address(),
            keys in any::<[[u8; 16]; 2]>(),
        ) {
            let (tuple, [key, other]) = (Tuple::new(local, peer), keys.map(Key::from));
            prop_assert_eq!(name(&key, tuple), name(&key, Tuple::new(tuple.local, tuple.peer)));
            prop_assert_eq!(name(&key, tuple) == name(&other, tuple), key == other);
            prop_assert_eq!(name(&key, tuple) == name(&key, tuple.reversed()), tuple.local == tuple.peer);
        }
    }
}
