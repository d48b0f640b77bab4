//! How a writer waits for readers.

use std::time::{Duration, Instant};

use crate::Error;

/// For how long a writer waits for readers where it has no other room. A batch lasts microseconds; a reader that was
/// not given a processor in all this time is none that forwards.
const READER_WAIT_MAX: Duration = Duration::from_secs(2);

/// Asks until there is something, for [`READER_WAIT_MAX`] at most: readers leave their batches meanwhile.
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
