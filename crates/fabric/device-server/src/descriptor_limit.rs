//! The limit of open descriptors.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::Error;
use crate::limits::CLIENTS_MAX;
use crate::send_queue::IN_FLIGHT_MAX;

/// Descriptors that the rest of the process may have open.
const HEADROOM: u64 = 64;

/// Raises the process's limit to what the clients may take: their sockets, their eventfds, and the descriptors in
/// flight to them.
pub fn raise(vectors: u32) -> Result<(), Error> {
    let wanted = CLIENTS_MAX as u64 * (1 + u64::from(vectors) + IN_FLIGHT_MAX as u64) + HEADROOM;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= wanted) {
        return Ok(());
    }
    match maximum {
        Some(limit) if limit < wanted => Err(Error::Descriptors { wanted, vectors, limit }),
        _ => setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum }).map_err(|_| Error::Descriptors {
            wanted,
            vectors,
            limit: current.unwrap_or(u64::MAX),
        }),
    }
}
