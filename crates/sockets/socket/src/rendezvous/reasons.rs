//! The reason why a connection got no lane, determined afterwards: the server may run as another user, in another
//! network namespace, or with another version of the library.
//!
//! The sources are read at most once a second for each destination.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Mutex;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use stats_page::FallbackReason;

use crate::descriptor::hidden::close;
use crate::process::buffer;
use crate::process::clock::now_ns;
use crate::rendezvous::address::canonical;
use crate::rendezvous::directory::{self, Rack};

/// Time for which the reason for a destination is cached.
const CACHED_FOR_NS: u64 = 1_000_000_000;
/// Maximum number of cached destinations.
const CACHED_MAX: usize = 64;
/// Maximum number of bytes of /proc/net/tcp that are read. Listeners come first, with 150 bytes each.
const TABLE_BYTES_MAX: usize = 256 << 10;
/// The value of `st` for a listener in /proc/net/tcp.
const STATE_LISTEN: &str = "0A";

/// A reason, and the time at which it was determined.
struct CachedReason {
    destination: SocketAddr,
    reason: FallbackReason,
    at_ns: u64,
}

static CACHE: Mutex<Vec<CachedReason>> = Mutex::new(Vec::new());

/// Returns the reason why no listener in the rack matches `destination`.
pub fn of_missing_listener(rack: &Rack, destination: SocketAddr) -> FallbackReason {
    let (destination, now_ns) = (canonical(destination), now_ns());
    // The lock is only tried: its holder may not exist in the child of a fork.
    if let Ok(cache) = CACHE.try_lock()
        && let Some(known) = cache.iter().find(|known| known.destination == destination)
        && now_ns.saturating_sub(known.at_ns) < CACHED_FOR_NS
    {
        return known.reason;
    }
    let reason = determine(rack, destination);
    if let Ok(mut cache) = CACHE.try_lock() {
        cache.retain(|known| known.destination != destination);
        if cache.len() >= CACHED_MAX {
            cache.remove(0);
        }
        cache.push(CachedReason { destination, reason, at_ns: now_ns });
    }
    reason
}

fn determine(rack: &Rack, destination: SocketAddr) -> FallbackReason {
    match listener_uid(destination) {
        Some(uid) if uid != rack.uid() => FallbackReason::OtherUser,
        Some(_) if rack.has_other_version_at(destination) => FallbackReason::VersionMismatch,
        None if rack.has_other_namespace_at(destination) => FallbackReason::NamespaceDiffers,
        _ => FallbackReason::NoListener,
    }
}

/// Returns the reason why the rack of the calling process cannot be opened.
pub fn of_rack_error(errno: Errno) -> FallbackReason {
    match errno {
        Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS | Errno::NOSPC => FallbackReason::ResourceLimit,
        Errno::CANCELED => FallbackReason::SwitchedOff,
        Errno::AFNOSUPPORT | Errno::NOSYS => FallbackReason::Sandbox,
        Errno::ACCESS | Errno::PERM if directory::is_owned_by_other_user() => FallbackReason::RackOfOtherUser,
        _ => FallbackReason::RackUnavailable,
    }
}

/// Returns whether the creation of a socket or of memory failed because a filter or a security module denies it.
pub fn is_denied(errno: Errno) -> bool {
    matches!(errno, Errno::PERM | Errno::ACCESS | Errno::NOSYS)
}

/// Returns the owner of the TCP listener that the kernel would connect to, if there is one in this network namespace.
fn listener_uid(destination: SocketAddr) -> Option<u32> {
    let own = std::iter::once(destination.ip());
    let of_v4 = destination.is_ipv4().then_some(Ipv4Addr::UNSPECIFIED.into());
    let tables =
        [c"/proc/thread-self/net/tcp", c"/proc/thread-self/net/tcp6"].map(|path| read(path).unwrap_or_default());
    let listeners = || tables.iter().flat_map(|table| table.lines().skip(1).map_while(listener));
    let at = |ip: IpAddr| {
        let address = SocketAddr::new(ip, destination.port());
        listeners().find(|(local, _)| (local.ip(), local.port()) == (address.ip(), address.port()))
    };
    own.chain(of_v4).chain([Ipv6Addr::UNSPECIFIED.into()]).find_map(at).map(|(_, uid)| uid)
}

/// Parses a line of the table; `None` unless it is that of a listener.
fn listener(line: &str) -> Option<(SocketAddr, u32)> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let local = words.next()?;
    let state = words.nth(1)?;
    let uid = words.nth(3)?.parse().ok()?;
    (state == STATE_LISTEN).then_some((parse_address(local)?, uid))
}

/// Parses an address of the table: its 32-bit words in memory order, and the port.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let word = |at: usize| u32::from_str_radix(ip.get(at * 8..at * 8 + 8)?, 16).ok().map(u32::to_ne_bytes);
    let ip = match ip.len() {
        8 => IpAddr::from(word(0)?),
        32 => {
            let words = [word(0)?, word(1)?, word(2)?, word(3)?];
            let mut octets = [0; 16];
            octets.iter_mut().zip(words.as_flattened()).for_each(|(octet, byte)| *octet = *byte);
            IpAddr::from(octets)
        }
        _ => return None,
    };
    Some(canonical(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?)))
}

fn read(path: &std::ffi::CStr) -> Result<String, Errno> {
    let file = rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let (mut bytes, mut chunk) = (Vec::new(), buffer::on_heap(4096)?);
    let outcome = loop {
        match rustix::io::read(&file, &mut chunk) {
            Ok(0) => break Ok(()),
            Ok(length) => bytes.extend_from_slice(&chunk[..length]),
            Err(Errno::INTR) => {}
            Err(errno) => break Err(errno),
        }
        if bytes.len() >= TABLE_BYTES_MAX {
            break Ok(());
        }
    };
    close(file);
    outcome.map(|()| String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_listeners_is_read_as_the_kernel_writes_it() {
        let v4 = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 1 1";
        let v6 = "   1: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A \
                  00000000:00000000 00:00000000 00000000     0        0 2 1";
        let mapped = "   2: 0000000000000000FFFF00000200007F:0051 00000000000000000000000000000000:0000 0A \
                      00000000:00000000 00:00000000 00000000     7        0 2 1";
        assert_eq!(listener(v4), Some(("127.0.0.1:8080".parse().unwrap(), 1000)));
        assert_eq!(listener(v6), Some(("[::1]:80".parse().unwrap(), 0)));
        assert_eq!(listener(mapped), Some(("127.0.0.2:81".parse().unwrap(), 7)));
        assert_eq!(listener(&v4.replace(" 0A ", " 01 ")), None);
        for damaged in ["", "0:", "0: 0100007F 0 0A 0 0 0 1", "0: x:y 0 0A 0 0 0 1", "0: 0100007F:1F90 0 0A 0 0 0 u"] {
            assert_eq!(listener(damaged), None, "{damaged}");
        }
    }

    #[test]
    fn the_owner_of_a_listener_is_found() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let own = rustix::process::geteuid().as_raw();
        assert_eq!(listener_uid(listener.local_addr().unwrap()), Some(own));
        let any = std::net::TcpListener::bind("[::]:0").unwrap();
        let at = SocketAddr::from(([127, 0, 0, 9], any.local_addr().unwrap().port()));
        assert_eq!(listener_uid(at), Some(own));
    }
}
