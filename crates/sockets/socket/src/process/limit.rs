//! Descriptors of our own when the program has used up its limit; and how many mappings lanes may take.
//!
//! A program at its limit still connects and listens with the kernel's TCP, which needs no further descriptor. A lane
//! needs a few, so the soft limit is raised towards the hard one for as long as it takes to get them; hidden ones then
//! stay above the program's limit.

use crate::descriptor::hidden::{close, release_all_optional};
use crate::process::system::read_text;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};

/// Descriptors that one connection or listener needs at most beyond the program's.
const SPARE: u64 = 16;

/// Limits up to here are asked whether they leave a number free.
const SMALL_LIMIT: u64 = 1024;

/// What Linux allows if nobody says otherwise.
const MAPPINGS_MAX: u32 = 65_530;

/// Connections of this process that have memory, a mapping each.
static MAPPED: AtomicU32 = AtomicU32::new(0);

/// A connection gets memory.
pub fn add_mapping() {
    MAPPED.fetch_add(1, Ordering::Relaxed);
}

/// The memory of a connection is unmapped.
pub fn remove_mapping() {
    MAPPED.fetch_sub(1, Ordering::Relaxed);
}

/// Whether one more connection may have memory if it can do without: half of the mappings that a process may have
/// (`vm.max_map_count`) are the program's.
pub fn has_spare_mappings() -> bool {
    /// 0 until it is known.
    static MAX: AtomicU32 = AtomicU32::new(0);
    let mut max = MAX.load(Ordering::Relaxed);
    if max == 0 {
        let mut text = [0; 32];
        let said = read_text(c"/proc/sys/vm/max_map_count", &mut text);
        max = said.and_then(|said| said.trim().parse().ok()).unwrap_or(MAPPINGS_MAX);
        MAX.store(max, Ordering::Relaxed);
    }
    MAPPED.load(Ordering::Relaxed) < max / 2
}

struct Raised(Rlimit);

impl Drop for Raised {
    fn drop(&mut self) {
        let _ = setrlimit(Resource::Nofile, self.0);
    }
}

fn raise() -> Option<Raised> {
    let limit = getrlimit(Resource::Nofile);
    let raised = limit.current?.saturating_add(SPARE).min(limit.maximum.unwrap_or(u64::MAX));
    setrlimit(Resource::Nofile, Rlimit { current: Some(raised), ..limit }).ok()?;
    Some(Raised(limit))
}

/// Runs `action`, and once more above the program's limit if it failed for lack of descriptors; where that cannot be
/// raised, hidden ones that can be spared make room.
pub fn with_raised_limit<T, E>(
    action: impl Fn() -> Result<T, E>,
    lacks_descriptors: impl Fn(&E) -> bool,
) -> Result<T, E> {
    match action() {
        Err(error) if lacks_descriptors(&error) => {
            let _raised = raise();
            retry_with_room(action, lacks_descriptors)
        }
        result => result,
    }
}

/// Runs `action`, which needs one number for a moment and cannot be tried twice, above the program's limit if that is
/// close; where the limit cannot be raised, hidden descriptors make room. `any` is any open descriptor.
pub fn with_free_descriptor<R>(any: BorrowedFd<'_>, action: impl FnOnce() -> R) -> R {
    let lowest = rustix::io::fcntl_dupfd_cloexec(any, 0).ok();
    let _raised = lowest.as_ref().is_none_or(|lowest| is_near(lowest.as_raw_fd())).then(raise);
    match lowest {
        Some(lowest) => close(lowest),
        None => _ = lowest_free(any).map(close),
    }
    action()
}

/// Below a small limit our own hidden descriptors may stand between the lowest free number and the limit.
fn is_near(lowest_free: RawFd) -> bool {
    let limit = getrlimit(Resource::Nofile).current;
    limit.is_some_and(|limit| limit <= SMALL_LIMIT || lowest_free as u64 + SPARE >= limit)
}

/// A copy of `fd` at the lowest free number, for which hidden descriptors make room.
fn lowest_free(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    retry_with_room(|| rustix::io::fcntl_dupfd_cloexec(fd, 0), |error| *error == Errno::MFILE)
}

/// Runs `action`; if it failed because the program has no number left, gives up what hidden descriptors can be spared
/// and runs it once more.
pub fn retry_with_room<T, E>(
    action: impl Fn() -> Result<T, E>,
    lacks_descriptors: impl Fn(&E) -> bool,
) -> Result<T, E> {
    match action() {
        Err(error) if lacks_descriptors(&error) && release_all_optional() > 0 => action(),
        result => result,
    }
}
