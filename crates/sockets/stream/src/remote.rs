//! Connections to other nodes, which are kernel TCP connections to the proxy of this node.
//!
//! The proxy has a TCP listener for each listener of another node that a program has asked for, and connects by TCP to
//! the servers of this node. All its sockets are at one loopback address of [`PROXY_NET`]. What stands behind each of
//! them is in the [`table`], a file of the rack that the proxy writes and programs map for reading: `connect` finds the
//! proxy's listener there, and programs are shown the addresses of the two programs instead of the proxy's.
//!
//! A connection exists in the kernel as soon as the proxy's listener has queued it. Whether the other node has accepted
//! it, the proxy publishes as a [`Verdict`], for which a `connect` waits.

mod addresses;
mod connect;
mod query;
pub mod table;

pub use addresses::{peer_address, shown_addresses, source_address};
pub use connect::{connect, is_refused};
pub use table::{ProxyTable, TableWriter, Verdict};

use rustix::net::sockopt;
use socket::process::clock::now_ns;
use socket::process::locked::Locked;
use socket::process::settings::settings;
use socket::rack::location;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::BorrowedFd;
use std::path::Path;

/// The first two bytes of the addresses of proxies: a part of 127.0.0.0/8, which every machine has.
pub const PROXY_NET: [u8; 2] = [127, 78];
/// Time for which a process does not look for the table again.
const ABSENT_NS: u64 = 10_000_000;

/// What this process knows of the table of its rack.
enum Known {
    Nothing,
    /// There was none at this time.
    AbsentSince(u64),
    Open(&'static ProxyTable),
}

static KNOWN: Locked<Known> = Locked::new(Known::Nothing);

/// Returns the address of the proxy of the node with this rack directory: different ones for different nodes of a
/// machine, so that they have ports of their own.
pub fn proxy_address(rack_directory: &Path) -> Ipv4Addr {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in rack_directory.as_os_str().as_encoded_bytes() {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    }
    let [.., high, low] = ((hash >> 32) ^ hash).to_be_bytes();
    Ipv4Addr::from([PROXY_NET[0], PROXY_NET[1], high, low.clamp(1, 254)])
}

/// Returns whether an address is that of a proxy.
fn is_proxy(ip: IpAddr) -> bool {
    matches!(ip.to_canonical(), IpAddr::V4(v4) if v4.octets()[..2] == PROXY_NET)
}

/// Returns the table, if this process belongs to a node that has one.
fn table() -> Option<&'static ProxyTable> {
    settings().node?;
    KNOWN.with(|known| {
        match known {
            Known::Open(table) => return Some(*table),
            Known::AbsentSince(since_ns) if now_ns().saturating_sub(*since_ns) < ABSENT_NS => return None,
            Known::Nothing | Known::AbsentSince(_) => {}
        }
        let path = location::rack_dir(rustix::process::geteuid().as_raw()).join(table::FILE_NAME);
        match ProxyTable::open(&path) {
            Ok(table) => {
                // It lives as long as the process: threads and children use it without a lock.
                let table: &'static ProxyTable = Box::leak(Box::new(table));
                *known = Known::Open(table);
                Some(table)
            }
            Err(_) => {
                *known = Known::AbsentSince(now_ns());
                None
            }
        }
    })
}

/// Continues in the child of a fork: another thread of the parent may have held the lock.
pub fn after_fork_in_child() {
    KNOWN.lock().reset();
}

/// Returns the number by which the kernel knows a socket (`SO_COOKIE`).
pub fn cookie_of(socket: BorrowedFd<'_>) -> u64 {
    sockopt::socket_cookie(socket).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxies_have_loopback_addresses_of_their_own() {
        let a = proxy_address(Path::new("/run/user/1000/crosslane/racks/r-1/a"));
        let b = proxy_address(Path::new("/run/user/1000/crosslane/racks/r-1/b"));
        assert_ne!(a, b);
        assert!(is_proxy(a.into()) && is_proxy(b.to_ipv6_mapped().into()));
        assert!(!is_proxy(IpAddr::from([127, 77, 0, 1])));
    }
}
