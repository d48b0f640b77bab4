//! The addresses to which this process has connections with lanes.
//!
//! Records in lanes carry the time when they were sent; bytes of a lifeline do not. A program that sends by one
//! connection and then by another one to the same server may rely on the order in which the server's `epoll` reports
//! them. So a process that has lanes to an address switches further connections there to lanes before it sends anything
//! by them.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};

/// Number of counters. Addresses with the same hash share one: at worst a connection gets lanes early.
const COUNTS: usize = 256;

static LANE_PEERS: [AtomicU32; COUNTS] = [const { AtomicU32::new(0) }; COUNTS];

fn count_of(peer: SocketAddr) -> &'static AtomicU32 {
    let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(peer);
    &LANE_PEERS[hash as usize % COUNTS]
}

/// Counts a connection to this address that gets lanes.
pub(in crate::connection) fn note(peer: SocketAddr) {
    count_of(peer).fetch_add(1, Ordering::Relaxed);
}

/// Removes a connection to this address, which had lanes, from the count.
pub(in crate::connection) fn forget(peer: SocketAddr) {
    count_of(peer).fetch_sub(1, Ordering::Relaxed);
}

/// Returns whether there may be a connection with lanes to this address.
pub(super) fn is_any(peer: SocketAddr) -> bool {
    count_of(peer).load(Ordering::Relaxed) > 0
}
