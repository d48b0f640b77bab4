//! Descriptors: enough for everybody who may come, or none to begin with.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::Error;
use crate::clients::CLIENTS_MAX;
use crate::outbox::IN_FLIGHT_MAX;

/// What the rest of the process may have open.
const HEADROOM: u64 = 64;

/// Raises this process' limit to what the clients may take: their sockets, their eventfds, and those in flight to them.
pub fn ensure(vectors: u32) -> Result<(), Error> {
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
