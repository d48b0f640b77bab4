//! Descriptors for the library when the program has used up its limit; and the mappings that lanes may use.
//!
//! A program at its limit can still connect and listen by kernel TCP, which needs no further descriptor. A lane needs a
//! few, so the soft limit is raised towards the hard limit while they are obtained; hidden descriptors then stay above
//! the program's limit.

use crate::descriptor::hidden::{close, release_all_optional};
use crate::process::system::read_text;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};

/// Maximum number of descriptors that one connection or listener needs in addition to the program's.
const SPARE: u64 = 16;

/// Up to this limit, the library always checks whether a number is free.
const SMALL_LIMIT: u64 = 1024;

/// The default of `vm.max_map_count` in Linux.
const MAPPINGS_MAX: u32 = 65_530;

/// Number of connections of this process that have memory, with a mapping each.
static MAPPED: AtomicU32 = AtomicU32::new(0);

/// Counts a connection that gets memory.
pub fn add_mapping() {
    MAPPED.fetch_add(1, Ordering::Relaxed);
}

/// Counts a connection whose memory is unmapped.
pub fn remove_mapping() {
    MAPPED.fetch_sub(1, Ordering::Relaxed);
}

/// Returns whether one more connection may have memory if it can work without: half of the mappings that a process may
/// have (`vm.max_map_count`) are the program's.
pub fn has_spare_mappings() -> bool {
    /// 0 until it has been read.
    static MAX: AtomicU32 = AtomicU32::new(0);
    let mut max = MAX.load(Ordering::Relaxed);
    if max == 0 {
        let mut text = [0; 32];
        let read = read_text(c"/proc/sys/vm/max_map_count", &mut text);
        max = read.and_then(|text| text.trim().parse().ok()).unwrap_or(MAPPINGS_MAX);
        MAX.store(max, Ordering::Relaxed);
    }
    MAPPED.load(Ordering::Relaxed) < max / 2
}

/// Returns whether the address space of this process is limited. It gets no lanes then: each reserves the address range
/// of its largest size, and the peer may begin to use the lane at a time when this process has no range left.
pub fn is_address_space_limited() -> bool {
    getrlimit(Resource::As).current.is_some()
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

/// Runs `action`, and again with a raised limit if it failed for lack of descriptors. If the limit cannot be raised,
/// hidden descriptors that are not required are closed to make room.
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

/// Runs `action`, which needs one descriptor for a short time and cannot be tried twice, with a raised limit if the
/// limit is near. If the limit cannot be raised, hidden descriptors are closed to make room. `any` is any open
/// descriptor.
pub fn with_free_descriptor<R>(any: BorrowedFd<'_>, action: impl FnOnce() -> R) -> R {
    let lowest = rustix::io::fcntl_dupfd_cloexec(any, 0).ok();
    let _raised = lowest.as_ref().is_none_or(|lowest| is_near(lowest.as_raw_fd())).then(raise);
    match lowest {
        Some(lowest) => close(lowest),
        None => _ = lowest_free(any).map(close),
    }
    action()
}

/// Returns whether the limit may be reached. Below a small limit, hidden descriptors may lie between the lowest free
/// number and the limit.
fn is_near(lowest_free: RawFd) -> bool {
    let limit = getrlimit(Resource::Nofile).current;
    limit.is_some_and(|limit| limit <= SMALL_LIMIT || lowest_free as u64 + SPARE >= limit)
}

/// Duplicates `fd` to the lowest free number; closes hidden descriptors if there is none.
fn lowest_free(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    retry_with_room(|| rustix::io::fcntl_dupfd_cloexec(fd, 0), |error| *error == Errno::MFILE)
}

/// Runs `action`. If it failed because the program has no free descriptor number, closes the hidden descriptors that
/// are not required and runs it again.
pub fn retry_with_room<T, E>(
    action: impl Fn() -> Result<T, E>,
    lacks_descriptors: impl Fn(&E) -> bool,
) -> Result<T, E> {
    match action() {
        Err(error) if lacks_descriptors(&error) && release_all_optional() > 0 => action(),
        result => result,
    }
}
