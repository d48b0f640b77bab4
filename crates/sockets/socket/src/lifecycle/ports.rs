//! The ports that lane connections hold: the kernel does not know them, so `bind` is checked here first.
//!
//! Connections of this process are known. Those of other processes are in the kernel's list of AF_UNIX sockets. A
//! connecting endpoint has a name with both addresses, and with a code that proves that a program of this rack has
//! bound it. An accepted endpoint has the name of its listener, which any process could forge, so it counts only
//! together with a connecting endpoint that leads there. A port is held as long as such sockets are open, so nothing
//! needs to be stored or cleaned up. Unlike TCP, a port is not held for a time after the close.

use crate::connection::{self, Connection};
use crate::descriptor::hidden::close;
use crate::entry::{self, Entry};
use crate::options::inspect;
use crate::rendezvous::address::{Opener, Tuple, canonical};
use crate::rendezvous::directory::{ListenerName, Rack};
use crate::rendezvous::name_key::NameKey;
use crate::stream::{PortChoice, Stream};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::RawFd;

/// Bytes of the kernel's list that are read at once.
const LISTING_BYTES: usize = 64 << 10;
/// Number of columns of the list before the state of a socket (number, references, protocol, flags, type) and after it
/// (inode).
const COLUMNS_BEFORE_STATE: usize = 5;
const COLUMNS_AFTER_STATE: usize = 1;
/// The state of a socket that was accepted or connected.
const CONNECTED: &[u8] = b"03";

/// The address that a socket is about to be bound to.
struct Claim {
    address: SocketAddr,
    is_v6only: bool,
    /// `SO_REUSEADDR`.
    shares: bool,
    /// The port as it appears in names.
    port_text: String,
}

impl Claim {
    fn new(address: SocketAddr, is_v6only: bool, shares: bool) -> Self {
        Self { address: canonical(address), is_v6only, shares, port_text: format!(":{}", address.port()) }
    }

    /// Returns whether the claim conflicts with `held`, by the kernel's rules for sockets that do not listen.
    fn conflicts_with(&self, held: SocketAddr, holder_shares: bool) -> bool {
        let held = canonical(held);
        if held.port() != self.address.port() || (self.shares && holder_shares) {
            return false;
        }
        match self.address.ip() {
            IpAddr::V6(Ipv6Addr::UNSPECIFIED) => held.is_ipv6() || !self.is_v6only,
            ip if ip.is_unspecified() => held.is_ipv4(),
            ip => held.ip() == ip || held.ip().is_unspecified(),
        }
    }

    fn conflicts_with_connection(&self, connection: &'static Connection) -> bool {
        let shares = || connection.with_options(|options| options.shares_address());
        let conflicts = connection.tuple().is_some_and(|tuple| self.conflicts_with(tuple.local, shares()));
        conflicts && !connection.is_closed()
    }
}

/// The sockets in the kernel's list that concern a claim.
#[derive(Default)]
struct PortHolders {
    /// A connecting endpoint has the claimed address.
    is_connecting: bool,
    /// A connecting endpoint leads to the claimed address.
    is_targeted: bool,
    /// A socket was accepted at the claimed address.
    is_accepted: bool,
}

impl PortHolders {
    fn is_held(&self) -> bool {
        self.is_connecting || (self.is_targeted && self.is_accepted)
    }

    /// Evaluates a line of the list.
    fn note(&mut self, line: &[u8], claim: &Claim, key: &NameKey) {
        // Most lines are about other ports.
        if !line.windows(claim.port_text.len()).any(|part| part == claim.port_text.as_bytes()) {
            return;
        }
        let mut columns = line.split(|byte| *byte == b' ').filter(|column| !column.is_empty());
        let (state, path) = (columns.nth(COLUMNS_BEFORE_STATE), columns.nth(COLUMNS_AFTER_STATE));
        match path.map(|path| (path, path.strip_prefix(b"@"))) {
            Some((_, Some(name))) => self.note_connecting(name, claim, key),
            Some((path, None)) if state == Some(CONNECTED) => {
                // It is not known whether the socket shares its address. It counts as if it does, because servers that
                // are restarted rely on it.
                let listener = ListenerName::from_path(path);
                self.is_accepted |= listener.is_some_and(|listener| claim.conflicts_with(listener.address, true));
            }
            _ => {}
        }
    }

    fn note_connecting(&mut self, name: &[u8], claim: &Claim, key: &NameKey) {
        let Ok((tuple, opener)) = Tuple::from_unauthenticated_name(name) else { return };
        let owns_it = match opener {
            Opener::Program => claim.conflicts_with(tuple.local, false),
            Opener::SharingProgram => claim.conflicts_with(tuple.local, true),
            Opener::Proxy => false,
        };
        let is_targeted = claim.conflicts_with(tuple.peer, true);
        // The code is checked last, because that takes longest.
        if (owns_it || is_targeted) && Tuple::from_name(name, key).is_ok() {
            self.is_connecting |= owns_it;
            self.is_targeted |= is_targeted;
        }
    }
}

/// Checks whether the program may bind `fd` to `address`, with regard to lane connections.
///
/// # Errors
/// `ADDRINUSE` if one of them holds the port.
pub fn may_bind(fd: RawFd, address: SocketAddr) -> Result<(), Errno> {
    let Entry::Stream(stream) = entry::get(fd) else { return Ok(()) };
    let is_bound = inspect::local_address(fd).is_ok_and(|local| local.port() != 0);
    let (shares, shares_port) =
        Stream::with_options(stream, |options| (options.shares_address(), options.shares_port()));
    if address.port() == 0 || is_bound || shares_port {
        return Ok(());
    }
    let claim = Claim::new(address, inspect::is_v6only(fd), shares);
    let mut is_held = false;
    connection::for_each_open(|connection| is_held = is_held || claim.conflicts_with_connection(connection));
    if is_held || is_held_elsewhere(&claim) { Err(Errno::ADDRINUSE) } else { Ok(()) }
}

/// Records that the kernel has bound `fd` to `address`, as the program has asked.
pub fn note_bound(fd: RawFd, address: SocketAddr) {
    if let Entry::Stream(stream) = entry::get(fd) {
        let choice = if address.port() == 0 { PortChoice::Kernel } else { PortChoice::Program };
        stream.with(|inner| inner.port_choice = choice);
    }
}

/// Records that the program has read the address of a socket that is not connected.
pub fn note_address_read(stream: &'static Stream) {
    stream.with(|inner| {
        if inner.port_choice == PortChoice::Kernel {
            inner.port_choice = PortChoice::KnownKernel;
        }
    });
}

/// Returns whether a connection of another process holds the claimed address; false if the rack or the kernel's list
/// cannot be read.
fn is_held_elsewhere(claim: &Claim) -> bool {
    let Ok(rack) = Rack::current() else { return false };
    let Ok(list) = rustix::fs::open(c"/proc/net/unix", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) else {
        return false;
    };
    let key = rack.key();
    let mut holders = PortHolders::default();
    let (mut bytes, mut kept) = (vec![0; LISTING_BYTES], 0);
    // An incomplete line is kept for the next read. The kernel writes whole lines, which are far shorter than the
    // buffer.
    while let Ok(read @ 1..) = rustix::io::read(&list, &mut bytes[kept..]) {
        let filled = kept + read;
        let whole = bytes[..filled].iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        bytes[..whole].split(|byte| *byte == b'\n').for_each(|line| holders.note(line, claim, &key));
        bytes.copy_within(whole..filled, 0);
        kept = filled - whole;
    }
    close(list);
    holders.is_held()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::directory::tests::Scratch;
    use crate::rendezvous::name_key::tests::OTHER_KEY;

    fn claims(text: &str, is_v6only: bool, shares: bool) -> Claim {
        Claim::new(text.parse().unwrap(), is_v6only, shares)
    }

    #[test]
    fn a_claim_conflicts_with_its_port_at_its_own_and_at_unspecified_addresses() {
        let held = "127.0.0.1:4000".parse().unwrap();
        for (text, is_v6only, conflicts) in [
            ("127.0.0.1:4000", false, true),
            ("127.0.0.1:4001", false, false),
            ("127.0.0.2:4000", false, false),
            ("0.0.0.0:4000", false, true),
            ("[::]:4000", false, true),
            ("[::]:4000", true, false),
            ("[::1]:4000", false, false),
        ] {
            let claim = claims(text, is_v6only, false);
            assert_eq!(claim.conflicts_with(held, false), conflicts, "{text}");
            assert_eq!(claim.conflicts_with("[::ffff:127.0.0.1]:4000".parse().unwrap(), true), conflicts, "{text}");
            assert!(!claims(text, is_v6only, true).conflicts_with(held, true), "both share");
            assert_eq!(claims(text, is_v6only, true).conflicts_with(held, false), conflicts, "{text}");
        }
    }

    #[test]
    fn only_connections_of_this_rack_count_in_the_list_of_the_kernel() {
        let (key, scratch) = (OTHER_KEY, Scratch::new());
        let tuple = Tuple { local: "127.0.0.1:4000".parse().unwrap(), peer: "127.0.0.1:80".parse().unwrap() };
        let line = |name: &[u8]| [b"000000002296fd92: 00000002 00000000 00000000 0001 03 12246 ", name].concat();
        let named = |opener, key: &NameKey| line(&[b"@", &tuple.name(opener, key).unwrap()[..]].concat());
        let is_held = |lines: &[Vec<u8>], claim: Claim| {
            let mut holders = PortHolders::default();
            lines.iter().for_each(|line| holders.note(line, &claim, &key));
            holders.is_held()
        };
        let own = |shares| claims("0.0.0.0:4000", false, shares);
        assert!(is_held(&[named(Opener::Program, &key)], own(false)));
        assert!(is_held(&[named(Opener::SharingProgram, &key)], own(false)));
        assert!(is_held(&[named(Opener::Program, &key)], own(true)));
        assert!(!is_held(&[named(Opener::SharingProgram, &key)], own(true)));
        assert!(!is_held(&[named(Opener::Proxy, &key)], own(false)), "the address belongs to another node");
        assert!(!is_held(&[named(Opener::Program, &scratch.rack().key())], own(false)));
        assert!(!is_held(&[b"Num       RefCount Protocol Flags    Type St Inode Path".to_vec()], own(false)));
        for listener in [&b"/rack/127.0.0.1:80/lane"[..], b"/rack/0.0.0.0:80/lane#3", b"/rack/[::]:80/lane"] {
            let server = |shares| claims("127.0.0.1:80", false, shares);
            let (connecting, accepted) = (named(Opener::Program, &key), line(listener));
            assert!(!is_held(std::slice::from_ref(&accepted), server(false)), "any process could forge it");
            assert!(!is_held(std::slice::from_ref(&connecting), server(false)), "the accepted socket is closed");
            assert!(is_held(&[accepted.clone(), connecting.clone()], server(false)));
            assert!(!is_held(&[accepted, connecting], server(true)));
        }
    }
}
