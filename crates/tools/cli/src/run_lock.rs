//! The lock of a run directory: only one `up`, `down` or `reload` of a rack or cluster runs at a time.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::fs::FlockOperation;

/// Time limit for another `up` or `down` of the same rack to release the lock.
const LOCK_LIMIT: Duration = Duration::from_secs(60);
/// Pause between two checks of a condition that no file descriptor signals.
pub const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Locks the file at `path`, which belongs to the rack or cluster `shown`. Dropping the file releases the lock.
pub fn lock_run_dir(path: &Path, shown: &str) -> Result<File> {
    let file = File::create(path).with_context(|| format!("lock '{}'", path.display()))?;
    let deadline = Instant::now() + LOCK_LIMIT;
    while rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        if Instant::now() >= deadline {
            bail!("another 'up' or 'down' of {shown} does not end; stop it, and try again");
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(file)
}
