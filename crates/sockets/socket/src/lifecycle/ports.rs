//! The ports that lane connections hold: the kernel does not know them, so `bind` is checked here first.
//!
//! Connections of this process are known. Those of other processes are in the kernel's list of AF_UNIX sockets, which
//! is read by `sock_diag(7)`: `/proc/net/unix` takes twice as long. A connecting endpoint has a name with both
//! addresses, and with a code that proves that a program of this rack has bound it. An accepted endpoint has the name
//! of its listener, which any process could forge, so it counts only together with a connecting endpoint that leads
//! there. A port is held as long as such sockets are open, so nothing needs to be stored or cleaned up. Unlike TCP, a
//! port is not held for a time after the close.

use crate::connection::{self, Connection};
use crate::descriptor::hidden::close;
use crate::entry::{self, Entry};
use crate::options::inspect;
use crate::process::sandbox;
use crate::rendezvous::address::{Opener, Tuple, array, canonical};
use crate::rendezvous::directory::{ListenerName, Rack};
use crate::rendezvous::name_key::NameKey;
use crate::stream::{PortChoice, Stream};
use rustix::io::Errno;
use rustix::net::netlink::SOCK_DIAG;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::RawFd;

/// Bytes of the kernel's list that are read at once; the kernel fills no more than this.
const LISTING_BYTES: usize = 16 << 10;

// `linux/netlink.h`, `linux/sock_diag.h` and `linux/unix_diag.h`.
const HEADER_BYTES: usize = 16;
const REQUEST_BYTES: usize = 24;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// `UDIAG_SHOW_NAME`.
const SHOW_NAME: u32 = 1;
/// `UNIX_DIAG_NAME`.
const NAME_ATTRIBUTE: u16 = 0;
const SOCKET_BYTES: usize = 16;
const STATE_AT: usize = 2;
/// `TCP_ESTABLISHED`: the state of a socket that was accepted or connected.
const ESTABLISHED: u8 = 1;
/// `TCP_CLOSE`: the state of one that is neither yet, and does not listen.
const UNCONNECTED: u8 = 7;

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

    /// Evaluates a socket of the list: its state, and the address that it is bound to, as in `sun_path`.
    fn note(&mut self, state: u8, bound: &[u8], claim: &Claim, key: &NameKey) {
        // Most sockets are about other ports.
        let mut colons = bound.iter().enumerate().filter(|(_, byte)| **byte == b':');
        if !colons.any(|(at, _)| bound[at..].starts_with(claim.port_text.as_bytes())) {
            return;
        }
        match bound {
            [0, name @ ..] => self.note_connecting(name, claim, key),
            path if state == ESTABLISHED => {
                // It is not known whether the socket shares its address. It counts as if it does, because servers that
                // are restarted rely on it.
                let path = path.split(|byte| *byte == 0).next().unwrap_or_default();
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
    // The program's own filter may forbid the calls below.
    if sandbox::is_confined() {
        return Ok(());
    }
    let is_bound = inspect::local_address(fd).is_ok_and(|local| local.port() != 0);
    let (shares, shares_port) =
        Stream::with_options(stream, |options| (options.shares_address(), options.shares_port()));
    if address.port() == 0 || is_bound || shares_port {
        return Ok(());
    }
    let claim = Claim::new(address, inspect::is_v6only(fd), shares);
    let mut is_held = false;
    connection::for_each_open(|connection| is_held = is_held || claim.conflicts_with_connection(connection));
    if is_held || is_held_elsewhere(&claim, inspect::netns_of(fd)) { Err(Errno::ADDRINUSE) } else { Ok(()) }
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
fn is_held_elsewhere(claim: &Claim, netns: u64) -> bool {
    let Some(rack) = Rack::kept_open(netns).or_else(|| Rack::current().ok()) else { return false };
    let (key, mut holders) = (rack.key(), PortHolders::default());
    let _ = for_each_unix_socket(|state, bound| holders.note(state, bound, claim, &key));
    holders.is_held()
}

/// Calls `visit` with the state and the bound address of each AF_UNIX socket of the network namespace.
fn for_each_unix_socket(mut visit: impl FnMut(u8, &[u8])) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(SOCK_DIAG))?;
    let mut bytes = vec![0; LISTING_BYTES];
    let mut outcome = rustix::net::send(&socket, &list_request(), SendFlags::empty()).map(|_| true);
    while outcome == Ok(true) {
        // The kernel queues the next part before it returns one, so there is nothing to wait for.
        let received = rustix::net::recv(&socket, &mut bytes[..], RecvFlags::DONTWAIT);
        outcome = received.map(|(length, _)| visit_part(&bytes[..length], &mut visit));
    }
    close(socket);
    outcome.map(|_| ())
}

fn list_request() -> [u8; HEADER_BYTES + REQUEST_BYTES] {
    let mut request = [0_u8; HEADER_BYTES + REQUEST_BYTES];
    let length = request.len() as u32;
    let flags = (libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16;
    let states = 1_u32 << ESTABLISHED | 1 << UNCONNECTED;
    request[..4].copy_from_slice(&length.to_ne_bytes());
    request[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request[6..8].copy_from_slice(&flags.to_ne_bytes());
    request[HEADER_BYTES] = libc::AF_UNIX as u8;
    request[HEADER_BYTES + 4..HEADER_BYTES + 8].copy_from_slice(&states.to_ne_bytes());
    request[HEADER_BYTES + 12..HEADER_BYTES + 16].copy_from_slice(&SHOW_NAME.to_ne_bytes());
    request
}

/// Evaluates the messages of a part of the list. Returns whether more follow.
fn visit_part(mut part: &[u8], visit: &mut impl FnMut(u8, &[u8])) -> bool {
    while let (Some(length), Some(kind)) = (array(part, 0).map(u32::from_ne_bytes), array(part, 4)) {
        let length = length as usize;
        let Some(message) = part.get(HEADER_BYTES..length) else { return false };
        if u16::from_ne_bytes(kind) != SOCK_DIAG_BY_FAMILY {
            return false; // NLMSG_DONE, or an error.
        }
        if let (Some(state), Some(name)) = (message.get(STATE_AT), message.get(SOCKET_BYTES..).and_then(name_in)) {
            visit(*state, name);
        }
        part = part.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    true
}

/// Returns the name among the attributes of a socket.
fn name_in(mut attributes: &[u8]) -> Option<&[u8]> {
    loop {
        let length = usize::from(u16::from_ne_bytes(array(attributes, 0)?));
        if u16::from_ne_bytes(array(attributes, 2)?) == NAME_ATTRIBUTE {
            return attributes.get(4..length);
        }
        attributes = attributes.get(length.max(4).next_multiple_of(4)..)?;
    }
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
        let named = |opener, key: &NameKey| [&[0], &tuple.name(opener, key).unwrap()[..]].concat();
        let is_held = |bound: &[Vec<u8>], claim: Claim| {
            let mut holders = PortHolders::default();
            bound.iter().for_each(|bound| holders.note(ESTABLISHED, bound, &claim, &key));
            holders.is_held()
        };
        let own = |shares| claims("0.0.0.0:4000", false, shares);
        assert!(is_held(&[named(Opener::Program, &key)], own(false)));
        assert!(is_held(&[named(Opener::SharingProgram, &key)], own(false)));
        assert!(is_held(&[named(Opener::Program, &key)], own(true)));
        assert!(!is_held(&[named(Opener::SharingProgram, &key)], own(true)));
        assert!(!is_held(&[named(Opener::Proxy, &key)], own(false)), "the address belongs to another node");
        assert!(!is_held(&[named(Opener::Program, &scratch.rack().key())], own(false)));
        assert!(!is_held(&[b"".to_vec(), b"\0".to_vec(), b"/run/socket\0".to_vec()], own(false)));
        for listener in [&b"/rack/127.0.0.1:80/lane"[..], b"/rack/0.0.0.0:80/lane#3", b"/rack/[::]:80/lane"] {
            let server = |shares| claims("127.0.0.1:80", false, shares);
            let (connecting, accepted) = (named(Opener::Program, &key), [listener, b"\0"].concat());
            assert!(!is_held(std::slice::from_ref(&accepted), server(false)), "any process could forge it");
            assert!(!is_held(std::slice::from_ref(&connecting), server(false)), "the accepted socket is closed");
            assert!(is_held(&[accepted.clone(), connecting.clone()], server(false)));
            assert!(!is_held(&[accepted, connecting], server(true)));
        }
    }

    #[test]
    fn the_kernel_lists_bound_sockets() {
        let scratch = Scratch::new();
        let path = scratch.0.join("listed");
        let server = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let count = |state: u8| {
            let mut count = 0;
            let own = path.as_os_str().as_encoded_bytes();
            for_each_unix_socket(|of, bound| count += usize::from(of == state && bound.starts_with(own))).unwrap();
            count
        };
        assert_eq!((count(ESTABLISHED), count(UNCONNECTED)), (0, 0), "a listener is neither");
        // More than one part of the list.
        let pairs: Vec<_> = (0..300)
            .map(|_| {
                let client = std::os::unix::net::UnixStream::connect(&path).unwrap();
                (client, server.accept().unwrap())
            })
            .collect();
        assert_eq!(count(ESTABLISHED), pairs.len());
        let unconnected = std::os::unix::net::UnixDatagram::bind(scratch.0.join("listed-datagrams")).unwrap();
        assert_eq!(count(UNCONNECTED), 1);
        drop((pairs, unconnected));
        assert_eq!((count(ESTABLISHED), count(UNCONNECTED)), (0, 0));
    }

    #[test]
    fn damaged_parts_of_the_list_end_it() {
        let mut none = |_: u8, _: &[u8]| panic!("no socket");
        assert!(visit_part(&[], &mut none));
        assert!(!visit_part(&[0xff; 64], &mut none));
        assert!(!visit_part(&[0; 64], &mut none));
        assert_eq!(name_in(&[0; 3]), None);
        assert_eq!(name_in(&[0; 8]), None);
        assert_eq!(name_in(&[0xff; 8]), None);
    }
}
