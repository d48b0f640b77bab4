//! The names of lane listeners in the rack directory.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::rendezvous::address::canonical;

/// Number of listeners that can share one address.
pub const MEMBERS_MAX: u8 = 64;
/// The prefix of a listener's name in the directory of its address.
const ENTRY_PREFIX: &str = "lane";

/// The name of a lane listener in the rack: the address that it is bound to, and what else a connecting endpoint must
/// know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListenerName {
    /// The address, in canonical form.
    pub address: SocketAddr,
    /// Whether the address is `[::]` without IPv4.
    pub v6_only: bool,
    /// The number of the listener among several at this address.
    pub member: Option<u8>,
    /// Whether the listener is on another node and the proxy of this node stands in for it.
    pub is_remote: bool,
}

impl ListenerName {
    /// Returns the name for a listener bound to `address`.
    pub fn new(address: SocketAddr, v6_only: bool, member: Option<u8>) -> Self {
        let address = canonical(address);
        Self { address, v6_only: v6_only && is_any_v6(address), member, is_remote: false }
    }

    /// Returns the name for a listener of another node, for which the proxy of this node stands in.
    pub fn remote(address: SocketAddr) -> Self {
        Self { is_remote: true, ..Self::new(address, false, None) }
    }

    /// Parses a name; `None` for any text that [`ListenerName`] would not have written.
    pub fn parse(text: &str) -> Option<Self> {
        let (rest, member) = match text.split_once('#') {
            Some((rest, number)) => (rest, Some(number.parse().ok().filter(|number| *number < MEMBERS_MAX)?)),
            None => (text, None),
        };
        let (rest, is_remote) = rest.strip_suffix("!far").map_or((rest, false), |rest| (rest, true));
        let (rest, v6_only) = rest.strip_suffix("!6").map_or((rest, false), |rest| (rest, true));
        let name = Self { address: rest.parse().ok()?, v6_only, member, is_remote };
        let again = if is_remote { Self::remote(name.address) } else { Self::new(name.address, v6_only, member) };
        (again == name && name.address.port() != 0 && again.to_string() == text).then_some(name)
    }

    /// Returns the name of a socket in a rack, from its path.
    pub fn from_path(path: &[u8]) -> Option<Self> {
        let mut components = path.rsplit(|byte| *byte == b'/');
        let (entry, directory) = (components.next()?, components.next()?);
        Self::from_entry(std::str::from_utf8(directory).ok()?, std::str::from_utf8(entry).ok()?)
    }

    /// Returns the name of an entry in the directory of an address.
    pub(super) fn from_entry(directory: &str, entry: &str) -> Option<Self> {
        Self::parse(&format!("{directory}{}", entry.strip_prefix(ENTRY_PREFIX)?))
    }

    /// Returns the name of its directory in the rack.
    pub(super) fn directory(&self) -> String {
        self.address.to_string()
    }

    /// Returns its name in that directory.
    pub(super) fn entry(&self) -> String {
        format!("{ENTRY_PREFIX}{}", Suffix(self))
    }

    /// Returns how well a listener of this name matches a destination, lower being better; `None` if it does not match.
    pub fn rank_for(&self, destination: SocketAddr) -> Option<u8> {
        if self.address.port() != destination.port() {
            return None;
        }
        match (self.address.ip(), destination.ip()) {
            (ours, _) if self.address == destination && !ours.is_unspecified() => Some(0),
            (IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V4(_)) => Some(1),
            (IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V6(_)) => Some(1),
            (IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(_)) if !self.v6_only => Some(2),
            _ => None,
        }
    }

    /// Returns whether both are names of the same address, which two listeners share only if both are willing to.
    pub(super) fn has_same_address(&self, other: &Self) -> bool {
        (self.address, self.v6_only, self.is_remote) == (other.address, other.v6_only, other.is_remote)
    }
}

fn is_any_v6(address: SocketAddr) -> bool {
    address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED)
}

/// Returns the addresses at which a listener may match a destination, the best first.
pub(super) fn addresses_for(destination: SocketAddr) -> impl Iterator<Item = SocketAddr> {
    let any = |ip: IpAddr| SocketAddr::new(ip, destination.port());
    let exact = Some(destination).filter(|address| !address.ip().is_unspecified());
    let any_v4 = destination.is_ipv4().then(|| any(Ipv4Addr::UNSPECIFIED.into()));
    exact.into_iter().chain(any_v4).chain([any(Ipv6Addr::UNSPECIFIED.into())])
}

impl fmt::Display for ListenerName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}{}", self.address, Suffix(self))
    }
}

/// The part of a name after the address.
struct Suffix<'a>(&'a ListenerName);

impl fmt::Display for Suffix<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.v6_only {
            formatter.write_str("!6")?;
        }
        if self.0.is_remote {
            formatter.write_str("!far")?;
        }
        match self.0.member {
            Some(member) => write!(formatter, "#{member}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn name(text: &str) -> ListenerName {
        ListenerName::parse(text).unwrap_or_else(|| panic!("{text}"))
    }

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn names_tell_what_the_listener_accepts() {
        for (bound, v6_only, member, text) in [
            ("127.0.0.1:6379", false, None, "127.0.0.1:6379"),
            ("0.0.0.0:80", false, Some(3), "0.0.0.0:80#3"),
            ("[::]:80", false, None, "[::]:80"),
            ("[::]:80", true, None, "[::]:80!6"),
            ("[::]:80", true, Some(63), "[::]:80!6#63"),
            ("[::1]:80", true, None, "[::1]:80"),
            ("[::ffff:127.0.0.1]:80", false, None, "127.0.0.1:80"),
            ("[fe80::1%2]:80", false, None, "[fe80::1%2]:80"),
        ] {
            let made = ListenerName::new(address(bound), v6_only, member);
            assert_eq!(made.to_string(), text);
            assert_eq!(ListenerName::parse(text), Some(made));
            assert_eq!(
                ListenerName::from_path(format!("/x/{}/{}", made.directory(), made.entry()).as_bytes()),
                Some(made)
            );
        }
        let remote = ListenerName::remote(address("127.77.0.2:80"));
        assert_eq!(remote.to_string(), "127.77.0.2:80!far");
        assert_eq!(ListenerName::parse("127.77.0.2:80!far"), Some(remote));
        for text in [
            "",
            ".",
            "..",
            "127.0.0.1",
            "127.0.0.1:0",
            "127.0.0.1:080",
            "127.0.0.1:80!6",
            "127.0.0.1:80#64",
            "127.0.0.1:80#+1",
            "127.0.0.1:80#01",
            "[::ffff:1.2.3.4]:80",
            "[0::1]:80",
            "junk:80",
            "[::]:80#1!6",
            "[::]:80!6!far",
            "127.0.0.1:80!far#1",
            "127.0.0.1:80!far!far",
        ] {
            assert_eq!(ListenerName::parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_entries_are_valid_names_or_rejected(text in "[0-9a-f:.#!r%\\[\\]]{0,40}") {
            if let Some(name) = ListenerName::parse(&text) {
                prop_assert_eq!(name.to_string(), text);
            }
        }
    }

    #[test]
    fn exact_names_rank_before_the_unspecified_address() {
        let rank = |listener: &str, destination: &str| name(listener).rank_for(destination.parse().unwrap());
        for (listener, destination, expected) in [
            ("127.0.0.1:80", "127.0.0.1:80", Some(0)),
            ("127.0.0.1:80#5", "127.0.0.1:80", Some(0)),
            ("127.0.0.1:80", "127.0.0.1:81", None),
            ("127.0.0.1:80", "127.0.0.2:80", None),
            ("0.0.0.0:80", "127.0.0.2:80", Some(1)),
            ("0.0.0.0:80", "[::1]:80", None),
            ("[::]:80", "[::1]:80", Some(1)),
            ("[::]:80!6", "[::1]:80", Some(1)),
            ("[::]:80", "127.0.0.1:80", Some(2)),
            ("[::]:80!6", "127.0.0.1:80", None),
            ("[::1]:80", "127.0.0.1:80", None),
        ] {
            assert_eq!(rank(listener, destination), expected, "{listener} for {destination}");
        }
    }

    #[test]
    fn paths_identify_their_listener_and_other_paths_none() {
        let from_path = |path: &str| ListenerName::from_path(path.as_bytes()).map(|name| name.to_string());
        assert_eq!(from_path("/proc/self/fd/9/[::]:80/lane!6#3").as_deref(), Some("[::]:80!6#3"));
        assert_eq!(from_path("127.77.0.2:80/lane!far").as_deref(), Some("127.77.0.2:80!far"));
        for path in
            ["", "/", "lane", "/lane", "127.0.0.1:80", "127.0.0.1:80/", "127.0.0.1:80/lan", "127.0.0.1:80/lanes"]
        {
            assert_eq!(from_path(path), None, "{path}");
        }
    }
}
