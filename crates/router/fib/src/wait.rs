//! How a writer waits for readers.

use std::time::{Duration, Instant};

use crate::Error;

/// How long a writer that is out of memory waits for readers to end their batches. A batch lasts microseconds; a reader
/// that was not scheduled in all this time cannot be forwarding.
const READER_WAIT_MAX: Duration = Duration::from_secs(2);

/// Retries `attempt` until it returns something, for at most [`READER_WAIT_MAX`]. Fails with [`Error::ReaderStalled`].
pub(crate) fn wait_for_readers<T>(mut attempt: impl FnMut() -> Option<T>) -> Result<T, Error> {
    if let Some(found) = attempt() {
        return Ok(found);
    }
    let since = Instant::now();
    while since.elapsed() < READER_WAIT_MAX {
        std::thread::sleep(Duration::from_micros(50));
        if let Some(found) = attempt() {
            return Ok(found);
        }
    }
    Err(Error::ReaderStalled { waited_ms: READER_WAIT_MAX.as_millis() as u64 })
}
